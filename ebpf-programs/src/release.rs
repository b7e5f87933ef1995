//! sock_release: what is kept for a socket under its cookie goes with it. (Its
//! storage goes by itself.)

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::btf_maps::LruHashMap;
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::macros::{btf_map, cgroup_sock};
use aya_ebpf::programs::{SockAddrContext, SockContext};
use shunt_common::{Connection, ServiceKey, UdpClient, capacity};

use crate::connect::CONNECTIONS;
use crate::{load, storage};

/// The agent looks here for the sockets of an endpoint that is gone. Sockets of
/// the kernel itself are never released in this hook (`inet_release` in
/// `net/ipv4/af_inet.c`): the longest unused make room.
#[btf_map(name = "udp_clients")]
static UDP_CLIENTS: LruHashMap<u64, UdpClient, { capacity::UDP_CLIENTS }> = LruHashMap::new();

#[cgroup_sock(sock_release)]
pub(crate) fn sock_release(ctx: SockContext) -> i32 {
    // SAFETY: the socket is the context.
    if let Some(connection) = unsafe { storage::get(&CONNECTIONS, ctx.sock) } {
        // SAFETY: the storage lives as long as the socket, which nobody else has
        // any more.
        load::forget(unsafe { &mut *connection });
    }
    // SAFETY: the kernel passes a valid socket.
    if unsafe { (*ctx.sock).protocol } == u32::from(ServiceKey::UDP) {
        // SAFETY: the helper takes the hook's context.
        let cookie = unsafe { bpf_get_socket_cookie(ctx.sock.cast()) };
        // That there is none is the usual case.
        let _ = UDP_CLIENTS.remove(cookie);
    }
    1
}

/// Lets the agent find the socket. Without room it stays with its endpoint,
/// which is no reason to fail the connect.
#[inline(always)]
pub(crate) fn register(ctx: &SockAddrContext, connection: &Connection) {
    // SAFETY: the helper takes the hook's context.
    let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
    let client = UdpClient::new(netns_cookie, *connection);
    let _ = UDP_CLIENTS.insert(cookie(ctx), client, BPF_ANY.into());
}

#[inline(always)]
pub(crate) fn unregister(ctx: &SockAddrContext) {
    let _ = UDP_CLIENTS.remove(cookie(ctx));
}

#[inline(always)]
fn cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes the hook's context.
    unsafe { bpf_get_socket_cookie(ctx.sock_addr.cast()) }
}
