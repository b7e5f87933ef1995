//! getpeername4 and getpeername6: the application sees the ClusterIP that it
//! connected to.

use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use shunt_common::Counter;

use crate::connect::CONNECTIONS;
use crate::count::count;
use crate::sock_addr::{Address, Family, socket};
use crate::storage;

#[cgroup_sock_addr(getpeername4)]
pub(crate) fn getpeername4(ctx: SockAddrContext) -> i32 {
    peer_name(&ctx, Family::V4)
}

#[cgroup_sock_addr(getpeername6)]
pub(crate) fn getpeername6(ctx: SockAddrContext) -> i32 {
    peer_name(&ctx, Family::V6)
}

/// These hooks may only return 1 (`check_return_code` in
/// `kernel/bpf/verifier.c`).
#[inline(always)]
fn peer_name(ctx: &SockAddrContext, family: Family) -> i32 {
    if let Some(service) = service_of(ctx, family) {
        family.write(ctx, &service);
        count(Counter::PeerNames);
    }
    1
}

/// The ClusterIP that took the socket to its current peer.
#[inline(always)]
fn service_of(ctx: &SockAddrContext, family: Family) -> Option<Address> {
    // SAFETY: the socket is the context's.
    let connection = unsafe { storage::get(&CONNECTIONS, socket(ctx)) }?;
    // SAFETY: the storage lives as long as the socket.
    let connection = unsafe { &*connection };
    let peer = family.read(ctx);
    let service = connection.service();
    connection.is_about(&peer.ip, peer.port).then(|| Address {
        ip: *service.address(),
        port: service.port(),
    })
}
