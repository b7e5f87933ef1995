//! The routing table: `services`, `slots` and `names`.
//!
//! A Service port is one [`ServiceEntry`] that points at a run of [`Slot`]s by
//! a table id. An update writes the slots under a fresh table id and then
//! replaces the entry, so that no reader sees a mixture of two sets.

use core::net::IpAddr;

use crate::{MAX_TIERS, NodeId, Wish, address};

/// What a client connects to: ClusterIP, port, protocol. Aligned, so that the
/// programs copy and compare words and not bytes.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ServiceKey {
    address: [u8; 16],
    port: [u8; 2],
    /// An IP protocol number: 6 or 17.
    protocol: u8,
    reserved: u8,
}

/// How to choose an endpoint of a Service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ServiceEntry {
    /// The first half of the keys of this entry's slots. Never used twice.
    table_id: u64,
    /// [`Flags`].
    flags: u8,
    /// How many of `tiers` are in use.
    tier_count: u8,
    /// What was preferred; only people read it.
    prefer: u8,
    reserved: u8,
    /// Session affinity by client, in seconds; 0 is none.
    affinity_seconds: u32,
    /// The first tier with an endpoint is used.
    tiers: [TierRange; MAX_TIERS],
    /// So many TCP connections each endpoint of this node may hold, before
    /// others get them; 0 is no limit.
    max_local_connections: u32,
}

/// A run of slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TierRange {
    /// Index of the first slot.
    start: u32,
    /// Number of slots.
    count: u32,
    /// What bounds the set; an index of the scope counters.
    scope: u32,
}

/// Bits of [`ServiceEntry::flags`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Flags(pub u8);

impl Flags {
    /// Known, but nothing usable: refuse the connect.
    pub const REFUSE: u8 = 1 << 0;
    /// Known, but not decided: kube-proxy answers.
    pub const PASS: u8 = 1 << 1;
    /// Splice connections to endpoints on this node.
    pub const SPLICE: u8 = 1 << 2;
    /// No endpoint is ready: these still serve while they terminate. Only people
    /// read it.
    pub const TERMINATING: u8 = 1 << 3;
    /// Never splice connections.
    pub const NO_SPLICE: u8 = 1 << 4;
}

/// Key of a [`Slot`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct SlotKey {
    table_id: u64,
    index: u32,
    reserved: [u8; 4],
}

/// One endpoint.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Slot {
    address: [u8; 16],
    port: [u8; 2],
    /// 1 if the endpoint is on this node.
    local: u8,
    reserved: u8,
    /// [`NodeId`] of the endpoint's node.
    node: u32,
}

/// The name of a Service port, for people. Each part is padded with zeros;
/// Kubernetes allows 63 bytes for each (RFC 1123 labels).
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ServiceName {
    namespace: [u8; 64],
    service: [u8; 64],
    port: [u8; 64],
}

const _: () = assert!(size_of::<ServiceKey>() == 20 && align_of::<ServiceKey>() == 4);
const _: () = assert!(size_of::<ServiceEntry>() == 56 && align_of::<ServiceEntry>() == 8);
const _: () = assert!(size_of::<TierRange>() == 12);
const _: () = assert!(size_of::<SlotKey>() == 16 && align_of::<SlotKey>() == 8);
const _: () = assert!(size_of::<Slot>() == 24 && align_of::<Slot>() == 4);
const _: () = assert!(size_of::<ServiceName>() == 192);

impl ServiceKey {
    /// TCP's IP protocol number.
    pub const TCP: u8 = 6;
    /// UDP's IP protocol number.
    pub const UDP: u8 = 17;

    /// From the bytes that a hook sees.
    #[inline(always)]
    pub const fn new(address: [u8; 16], port: [u8; 2], protocol: u8) -> Self {
        Self {
            address,
            port,
            protocol,
            reserved: 0,
        }
    }

    /// From an address and a port in host byte order.
    pub const fn from_parts(address: IpAddr, port: u16, protocol: u8) -> Self {
        Self::new(address::from_ip(address), port.to_be_bytes(), protocol)
    }

    /// The ClusterIP's bytes.
    #[inline(always)]
    pub const fn address(&self) -> &[u8; 16] {
        &self.address
    }

    /// The port, network byte order.
    #[inline(always)]
    pub const fn port(&self) -> [u8; 2] {
        self.port
    }

    /// The IP protocol number.
    #[inline(always)]
    pub const fn protocol(&self) -> u8 {
        self.protocol
    }
}

impl ServiceEntry {
    /// An entry whose slots are `table_id`, 0, 1, ….
    pub const fn new(
        table_id: u64,
        flags: Flags,
        prefer: u8,
        affinity_seconds: u32,
        tier_count: u8,
        tiers: [TierRange; MAX_TIERS],
    ) -> Self {
        Self {
            table_id,
            flags: flags.0,
            tier_count,
            prefer,
            reserved: 0,
            affinity_seconds,
            tiers,
            max_local_connections: 0,
        }
    }

    /// The same with a limit; 0 is none.
    pub const fn with_max_local_connections(mut self, limit: u32) -> Self {
        self.max_local_connections = limit;
        self
    }

    /// The first half of the keys of this entry's slots.
    #[inline(always)]
    pub const fn table_id(&self) -> u64 {
        self.table_id
    }

    /// Whether any of the bits of `flag` is set.
    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether connections are to be spliced.
    #[inline(always)]
    pub const fn splice(&self) -> Wish {
        if self.has(Flags::SPLICE) {
            Wish::On
        } else if self.has(Flags::NO_SPLICE) {
            Wish::Off
        } else {
            Wish::None
        }
    }

    /// What was preferred.
    pub const fn prefer(&self) -> u8 {
        self.prefer
    }

    /// Session affinity in seconds; 0 is none.
    #[inline(always)]
    pub const fn affinity_seconds(&self) -> u32 {
        self.affinity_seconds
    }

    /// So many connections each endpoint of this node may hold; 0 is no limit.
    #[inline(always)]
    pub const fn max_local_connections(&self) -> u32 {
        self.max_local_connections
    }

    /// All tiers, those in use first; the others are empty.
    #[inline(always)]
    pub const fn tiers(&self) -> &[TierRange; MAX_TIERS] {
        &self.tiers
    }

    /// How many tiers are in use.
    pub const fn tier_count(&self) -> u8 {
        self.tier_count
    }
}

impl TierRange {
    /// A run of `count` slots from `start`; `scope` is what bounds it.
    pub const fn new(start: u32, count: u32, scope: u32) -> Self {
        Self {
            start,
            count,
            scope,
        }
    }

    /// Index of the first slot.
    #[inline(always)]
    pub const fn start(&self) -> u32 {
        self.start
    }

    /// Number of slots.
    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// What bounds the set.
    #[inline(always)]
    pub const fn scope(&self) -> u32 {
        self.scope
    }
}

impl SlotKey {
    /// Slot `index` of table `table_id`.
    #[inline(always)]
    pub const fn new(table_id: u64, index: u32) -> Self {
        Self {
            table_id,
            index,
            reserved: [0; 4],
        }
    }

    /// The table.
    pub const fn table_id(&self) -> u64 {
        self.table_id
    }

    /// The place in the table.
    pub const fn index(&self) -> u32 {
        self.index
    }
}

impl Slot {
    /// No endpoint.
    pub const UNUSED: Self = Self {
        address: [0; 16],
        port: [0; 2],
        local: 0,
        reserved: 0,
        node: 0,
    };

    /// From an address and a port in host byte order.
    pub const fn new(address: IpAddr, port: u16, local: bool) -> Self {
        Self {
            address: address::from_ip(address),
            port: port.to_be_bytes(),
            local: local as u8,
            reserved: 0,
            node: 0,
        }
    }

    /// The same, on this node.
    pub const fn on(mut self, node: NodeId) -> Self {
        self.node = node.0;
        self
    }

    /// The endpoint's node, if it is known and another one.
    #[inline(always)]
    pub const fn node(&self) -> NodeId {
        NodeId(self.node)
    }

    /// The endpoint's address.
    #[inline(always)]
    pub const fn address(&self) -> &[u8; 16] {
        &self.address
    }

    /// The endpoint's port, network byte order.
    #[inline(always)]
    pub const fn port(&self) -> [u8; 2] {
        self.port
    }

    /// Whether this is where it is.
    #[inline(always)]
    pub fn is_at(&self, address: &[u8; 16], port: [u8; 2]) -> bool {
        self.address == *address && self.port == port
    }

    /// All of it, as numbers.
    #[inline(always)]
    pub const fn words(&self) -> [u64; 3] {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = self.address;
        let [q, r] = self.port;
        let [s, t, u, v] = self.node.to_ne_bytes();
        [
            u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            u64::from_ne_bytes([i, j, k, l, m, n, o, p]),
            u64::from_ne_bytes([q, r, self.local, self.reserved, s, t, u, v]),
        ]
    }

    /// From what [`Slot::words`] gives.
    #[inline(always)]
    pub const fn from_words([high, low, rest]: [u64; 3]) -> Self {
        let [a, b, c, d, e, f, g, h] = high.to_ne_bytes();
        let [i, j, k, l, m, n, o, p] = low.to_ne_bytes();
        let [q, r, local, reserved, s, t, u, v] = rest.to_ne_bytes();
        Self {
            address: [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p],
            port: [q, r],
            local,
            reserved,
            node: u32::from_ne_bytes([s, t, u, v]),
        }
    }

    /// Whether it comes before another in a tier: by address, then by port.
    #[inline(always)]
    pub fn is_before(&self, other: &Self) -> bool {
        let halves = |slot: &Self| {
            let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = slot.address;
            let high = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
            (
                high,
                u64::from_be_bytes([i, j, k, l, m, n, o, p]),
                u16::from_be_bytes(slot.port),
            )
        };
        halves(self) < halves(other)
    }

    /// Whether the endpoint is on this node.
    #[inline(always)]
    pub const fn is_local(&self) -> bool {
        self.local != 0
    }
}

impl ServiceName {
    /// Parts longer than 63 bytes are cut.
    pub fn new(namespace: &str, service: &str, port: &str) -> Self {
        Self {
            namespace: padded(namespace),
            service: padded(service),
            port: padded(port),
        }
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        text(&self.namespace)
    }

    /// The Service.
    pub fn service(&self) -> &str {
        text(&self.service)
    }

    /// The port name; empty for an unnamed port.
    pub fn port(&self) -> &str {
        text(&self.port)
    }
}

/// Zero-padded bytes of a text, cut to leave one zero.
pub(crate) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

/// The text before the first zero; empty if it is not UTF-8.
pub(crate) fn text(bytes: &[u8]) -> &str {
    let length = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    core::str::from_utf8(&bytes[..length]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_key_is_address_port_protocol_zero() {
        let key = ServiceKey::from_parts("10.96.0.10".parse().unwrap(), 80, ServiceKey::TCP);
        // SAFETY: ServiceKey is repr(C) and has no padding.
        let bytes: [u8; 20] = unsafe { core::mem::transmute(key) };
        let expected = [
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 96, 0, 10, 0, 80, 6, 0,
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_slot_comes_back_from_its_words() {
        let slot = Slot::new("10.0.0.9".parse().unwrap(), 80, true).on(NodeId(7));
        assert_eq!(Slot::from_words(slot.words()), slot);
    }

    #[test]
    fn slots_are_in_the_order_of_their_addresses_and_ports() {
        let texts = [
            "10.0.0.9:80",
            "10.0.0.10:79",
            "10.0.0.10:80",
            "10.0.0.10:443",
            "[fd00::1]:1",
        ];
        let slots = texts.map(|text| {
            let address: core::net::SocketAddr = text.parse().unwrap();
            (Slot::new(address.ip(), address.port(), false), address)
        });
        for (slot, address) in &slots {
            for (other, other_address) in &slots {
                assert_eq!(slot.is_before(other), address < other_address);
            }
        }
    }

    #[test]
    fn a_name_comes_back_and_is_cut_at_63_bytes() {
        let long = "a".repeat(70);
        let name = ServiceName::new("shop", &long, "");
        assert_eq!(
            (name.namespace(), name.service().len(), name.port()),
            ("shop", 63, "")
        );
    }

    extern crate std;
    use std::prelude::v1::*;
}
