//! sendmsg4/6 and recvmsg4/6: datagrams of unconnected UDP sockets to a
//! ClusterIP go to an endpoint, and the answers show the ClusterIP.
//!
//! A flow, one socket's datagrams to one Service port, keeps to its endpoint
//! while that is in the set and the flow is in use, as kube-proxy's connection
//! tracking does. The kernel holds the socket's lock around these hooks
//! (`BPF_CGROUP_RUN_PROG_UDP4_SENDMSG_LOCK` in `include/linux/bpf-cgroup.h`),
//! so that only one of them changes its flows at a time.

use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::macros::{btf_map, cgroup_sock_addr};
use aya_ebpf::programs::SockAddrContext;
use shunt_common::{Counter, Flow, Flows, ServiceKey, Slot};

use crate::choose::{Answer, Chosen, Pass, choose, now_ns};
use crate::connect::{CONNECTIONS, PROCEED, count_endpoint, count_pass, protocol, refuse};
use crate::count::{count, count_service};
use crate::sock_addr::{Address, Family, socket};
use crate::storage;

#[btf_map(name = "flows")]
static FLOWS: SkStorage<Flows> = SkStorage::new();

/// A flow that rested for longer may get another endpoint:
/// `net.netfilter.nf_conntrack_udp_timeout_stream`.
const IDLE_NS: u64 = 120_000_000_000;

/// How a datagram to a captured Service port is sent.
enum Sent {
    /// As those before it.
    Along,
    /// To an endpoint that was chosen now.
    Chosen(Chosen),
    Refused,
}

#[cgroup_sock_addr(sendmsg4)]
pub(crate) fn sendmsg4(ctx: SockAddrContext) -> i32 {
    send(&ctx, Family::V4)
}

#[cgroup_sock_addr(sendmsg6)]
pub(crate) fn sendmsg6(ctx: SockAddrContext) -> i32 {
    send(&ctx, Family::V6)
}

#[cgroup_sock_addr(recvmsg4)]
pub(crate) fn recvmsg4(ctx: SockAddrContext) -> i32 {
    receive(&ctx, Family::V4)
}

#[cgroup_sock_addr(recvmsg6)]
pub(crate) fn recvmsg6(ctx: SockAddrContext) -> i32 {
    receive(&ctx, Family::V6)
}

#[inline(always)]
fn send(ctx: &SockAddrContext, family: Family) -> i32 {
    match try_send(ctx, family) {
        Ok(Sent::Along) => {}
        Ok(Sent::Chosen(chosen)) => count_endpoint(&chosen),
        Ok(Sent::Refused) => return refuse(Counter::Refused),
        // Unlike connects, these come by the thousand.
        Err(Pass::NoEntry) => {}
        Err(pass) => count_pass(pass),
    }
    PROCEED
}

#[inline(always)]
fn try_send(ctx: &SockAddrContext, family: Family) -> Result<Sent, Pass> {
    if protocol(ctx) != Some(ServiceKey::UDP) {
        return Err(Pass::NotOurs);
    }
    let target = family.read(ctx);
    let key = ServiceKey::new(target.ip, target.port, ServiceKey::UDP);
    if let Some(endpoint) = connected_to(ctx, &key) {
        family.write(ctx, &endpoint);
        return Ok(Sent::Along);
    }
    let now_ns = now_ns();
    let before = flow_in_use(ctx, &key, now_ns);
    let Answer::Endpoint(chosen) = choose::<false>(ctx, &key, before.as_ref(), now_ns)? else {
        return Ok(Sent::Refused);
    };
    let slot = chosen.slot;
    note_flow(ctx, Flow::new(key, slot, now_ns))?;
    family.write(
        ctx,
        &Address {
            ip: *slot.address(),
            port: slot.port(),
        },
    );
    if before.is_some() && chosen.counter as u32 == Counter::ConnectSame as u32 {
        return Ok(Sent::Along);
    }
    count_service(&key, slot.is_local());
    Ok(Sent::Chosen(chosen))
}

/// The endpoint that a connected socket has for this Service port: an answer
/// from another one would not be received.
#[inline(always)]
fn connected_to(ctx: &SockAddrContext, key: &ServiceKey) -> Option<Address> {
    let socket = socket(ctx);
    // SAFETY: the context always has a socket. A disconnected one has port 0.
    if unsafe { (*socket).dst_port } == 0 {
        return None;
    }
    // SAFETY: the socket is the context's.
    let connection = unsafe { storage::get(&CONNECTIONS, socket) }?;
    // SAFETY: the storage lives as long as the socket.
    let connection = unsafe { &*connection };
    (connection.service() == key).then(|| Address {
        ip: *connection.endpoint(),
        port: connection.endpoint_port(),
    })
}

/// A copy of the endpoint of the flow: the verifier would walk the rest of the
/// program once for each place that a reference could point to.
#[inline(always)]
fn flow_in_use(ctx: &SockAddrContext, key: &ServiceKey, now_ns: u64) -> Option<Slot> {
    // SAFETY: the socket is the context's.
    let flows = unsafe { storage::get(&FLOWS, socket(ctx)) }?;
    // SAFETY: the storage lives as long as the socket.
    let flow = unsafe { &*flows }.newest(key)?;
    (now_ns - flow.used_ns() < IDLE_NS).then(|| *flow.endpoint())
}

#[inline(always)]
fn note_flow(ctx: &SockAddrContext, flow: Flow) -> Result<(), Pass> {
    // SAFETY: the socket is the context's, and zeros are unused flows.
    let flows = unsafe { storage::create_zeroed(&FLOWS, socket(ctx)) };
    let flows = flows.ok_or(Pass::NoStorage)?;
    // SAFETY: the storage lives as long as the socket, whose lock is held.
    *unsafe { &mut *flows }.place_for(&flow) = flow;
    Ok(())
}

/// These hooks may only return 1 (`check_return_code` in
/// `kernel/bpf/verifier.c`).
#[inline(always)]
fn receive(ctx: &SockAddrContext, family: Family) -> i32 {
    if let Some(service) = service_of(ctx, family) {
        family.write(ctx, &service);
        count(Counter::SourceNames);
    }
    PROCEED
}

/// The ClusterIP that took the socket's datagrams to where this one is from.
#[inline(always)]
fn service_of(ctx: &SockAddrContext, family: Family) -> Option<Address> {
    let source = family.read(ctx);
    let address = |service: &ServiceKey| Address {
        ip: *service.address(),
        port: service.port(),
    };
    // SAFETY: the socket is the context's.
    if let Some(connection) = unsafe { storage::get(&CONNECTIONS, socket(ctx)) } {
        // SAFETY: the storage lives as long as the socket.
        let connection = unsafe { &*connection };
        if connection.is_about(&source.ip, source.port) {
            return Some(address(connection.service()));
        }
    }
    // SAFETY: the socket is the context's.
    let flows = unsafe { storage::get(&FLOWS, socket(ctx)) }?;
    // SAFETY: the storage lives as long as the socket.
    unsafe { &*flows }
        .service_of(&source.ip, source.port)
        .map(address)
}
