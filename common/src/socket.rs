//! Sockets: what the connect hook remembers, and by what the two ends of a
//! connection find each other.

use crate::{NodeId, ServiceKey, Slot, Wish, address};

/// Socket storage of a client: where it meant to go and where it went.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Connection {
    /// The ClusterIP and port that the application connected to.
    service: ServiceKey,
    /// The endpoint that took their place. The record counts only while the
    /// socket's peer is this one.
    endpoint: [u8; 16],
    endpoint_port: [u8; 2],
    /// The Service's [`Wish`], and [`NEAR`].
    splice: u8,
    /// 1 if it is in the number that `loads` has for the endpoint.
    pub counted: u8,
    /// When the connect began, ns since boot.
    began_ns: u64,
    /// [`NodeId`] of the endpoint's node.
    node: u32,
    /// The socket's own number of SYN retries, while it has more of them; 0
    /// otherwise.
    pub own_retries: u8,
    /// 1 once the connect is made to fail.
    pub failing: u8,
    reserved: [u8; 2],
}

/// A connected UDP socket that our connect hook sent to an endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UdpClient {
    /// Cookie of the socket's network namespace.
    netns_cookie: u64,
    connection: Connection,
}

/// Names one socket of a same-node connection, and never two.
///
/// The sequence numbers are those right after the handshake: `local_seq` is
/// `snd_una` (ISS + 1), `remote_seq` is `rcv_nxt` (IRS + 1). They tell apart
/// two connections that use the same addresses one after the other, and the
/// namespace cookie those that use the same loopback addresses at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct SocketKey {
    /// Cookie of the socket's network namespace (`bpf_get_netns_cookie`).
    netns_cookie: u64,
    local: [u8; 16],
    remote: [u8; 16],
    local_seq: u32,
    remote_seq: u32,
    local_port: [u8; 2],
    remote_port: [u8; 2],
    reserved: [u8; 4],
}

/// Bit of `Connection::splice`: the endpoint is on this node.
const NEAR: u8 = 1 << 7;

const _: () = assert!(size_of::<Connection>() == 56 && align_of::<Connection>() == 8);
const _: () = assert!(size_of::<UdpClient>() == 64 && align_of::<UdpClient>() == 8);
const _: () = assert!(size_of::<SocketKey>() == 56 && align_of::<SocketKey>() == 8);

impl Connection {
    /// A connect to `service` that was sent to `endpoint` at `began_ns` since boot.
    #[inline(always)]
    pub const fn new(service: ServiceKey, endpoint: &Slot, wish: Wish, began_ns: u64) -> Self {
        Self {
            service,
            endpoint: *endpoint.address(),
            endpoint_port: endpoint.port(),
            splice: wish as u8 | if endpoint.is_local() { NEAR } else { 0 },
            counted: 0,
            began_ns,
            node: endpoint.node().0,
            own_retries: 0,
            failing: 0,
            reserved: [0; 2],
        }
    }

    /// When the connect began, ns since boot.
    #[inline(always)]
    pub const fn began_ns(&self) -> u64 {
        self.began_ns
    }

    /// The endpoint's node.
    #[inline(always)]
    pub const fn node(&self) -> NodeId {
        NodeId(self.node)
    }

    /// What the application connected to.
    #[inline(always)]
    pub const fn service(&self) -> &ServiceKey {
        &self.service
    }

    /// The endpoint's address.
    #[inline(always)]
    pub const fn endpoint(&self) -> &[u8; 16] {
        &self.endpoint
    }

    /// The endpoint's port, network byte order.
    #[inline(always)]
    pub const fn endpoint_port(&self) -> [u8; 2] {
        self.endpoint_port
    }

    /// Whether the record is about a connection to this peer.
    #[inline(always)]
    pub fn is_about(&self, peer: &[u8; 16], port: [u8; 2]) -> bool {
        self.endpoint == *peer && self.endpoint_port == port
    }

    /// Whether the Service wants its connections spliced.
    #[inline(always)]
    pub const fn wish(&self) -> Wish {
        Wish::from_u8(self.splice & !NEAR)
    }

    /// Whether the endpoint is on this node.
    #[inline(always)]
    pub const fn is_near(&self) -> bool {
        self.splice & NEAR != 0
    }
}

impl UdpClient {
    /// A socket of this namespace.
    #[inline(always)]
    pub const fn new(netns_cookie: u64, connection: Connection) -> Self {
        Self {
            netns_cookie,
            connection,
        }
    }

    /// Cookie of the socket's network namespace (`SO_NETNS_COOKIE`).
    pub const fn netns_cookie(&self) -> u64 {
        self.netns_cookie
    }

    /// Where it meant to go and where it went.
    pub const fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl SocketKey {
    /// All zeros.
    pub const EMPTY: Self = Self::new(0, ([0; 16], [0; 2]), ([0; 16], [0; 2]), 0, 0);

    /// See the type for what the sequence numbers are; ports are in network
    /// byte order.
    #[inline(always)]
    pub const fn new(
        netns_cookie: u64,
        local: ([u8; 16], [u8; 2]),
        remote: ([u8; 16], [u8; 2]),
        local_seq: u32,
        remote_seq: u32,
    ) -> Self {
        Self {
            netns_cookie,
            local: local.0,
            remote: remote.0,
            local_seq,
            remote_seq,
            local_port: local.1,
            remote_port: remote.1,
            reserved: [0; 4],
        }
    }

    /// The key of the other end, which lives in namespace `netns_cookie`.
    #[inline(always)]
    pub const fn peer(&self, netns_cookie: u64) -> Self {
        Self::new(
            netns_cookie,
            (self.remote, self.remote_port),
            (self.local, self.local_port),
            self.remote_seq,
            self.local_seq,
        )
    }

    /// The socket's network namespace.
    #[inline(always)]
    pub const fn netns_cookie(&self) -> u64 {
        self.netns_cookie
    }

    /// The socket's own address.
    #[inline(always)]
    pub const fn local(&self) -> &[u8; 16] {
        &self.local
    }

    /// The peer's address.
    #[inline(always)]
    pub const fn remote(&self) -> &[u8; 16] {
        &self.remote
    }

    /// Both ports in one word, as `struct bpf_sock_tuple` has them for a packet to
    /// this socket: the peer's first, network byte order.
    #[inline(always)]
    pub const fn ports(&self) -> u32 {
        let ([a, b], [c, d]) = (self.remote_port, self.local_port);
        u32::from_ne_bytes([a, b, c, d])
    }

    /// Own address and port, for people.
    pub fn local_address(&self) -> core::net::SocketAddr {
        (
            address::to_ip(&self.local),
            u16::from_be_bytes(self.local_port),
        )
            .into()
    }

    /// The peer's address and port, for people.
    pub fn remote_address(&self) -> core::net::SocketAddr {
        (
            address::to_ip(&self.remote),
            u16::from_be_bytes(self.remote_port),
        )
            .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_the_peer_is_the_socket_itself() {
        let local = (address::mapped([10, 0, 0, 1]), [1, 2]);
        let remote = (address::mapped([10, 0, 0, 2]), [3, 4]);
        let key = SocketKey::new(7, local, remote, 100, 200);
        let peer = key.peer(8);
        assert_eq!(peer, SocketKey::new(8, remote, local, 200, 100));
        assert_eq!(peer.peer(7), key);
    }
}
