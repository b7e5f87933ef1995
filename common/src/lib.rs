//! What the BPF programs and the agent agree on: the keys and values of the
//! maps, their names and capacities, and the counters.
//!
//! Rules, each checked by an assertion or a test in this crate:
//! - Every map type is `#[repr(C)]` and has no implicit padding, so that equal
//!   keys are equal bytes. Spare bytes are named `reserved` and are zero.
//! - Addresses and ports are byte arrays in network byte order. An IPv4 address
//!   is kept as its IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2): one
//!   key form for both families, and a socket that uses mapped addresses needs
//!   no case of its own.
//! - A change of any layout raises [`LAYOUT_VERSION`], which is part of the pin
//!   path, so that programs and maps of two layouts never meet.
#![no_std]
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod address;
mod affinity;
mod choice;
mod client;
mod counter;
mod datagram;
mod health;
mod load;
mod mark;
mod node;
mod pair;
#[cfg(feature = "user")]
mod pod;
mod route;
mod service_counts;
mod socket;
mod task;

pub use affinity::{Affinity, AffinityKey};
pub use choice::{Choice, Demands, Source, search};
pub use client::{LeftAlone, Reason};
pub use counter::Counter;
pub use datagram::{Flow, Flows};
pub use health::{
    CERTAIN, Evidence, FIRST_WAIT_NS, Failure, Health, HealthChange, HealthConfig, HealthEvent,
    HealthKey, Judgement, MAX_WAIT_NS, MEMORY_NS, NodeId, ProbeKey, Standing, Threshold, judge,
};
pub use load::LoadKey;
pub use mark::{Mark, Marks};
pub use node::{Clients, Heartbeat, Node};
pub use pair::{
    CONFIRMED, Direction, End, EndKey, EventKind, Pair, Role, SelfTest, SpliceConfig, SpliceEvent,
    SpliceMode, SpliceReason, Stage, Wish,
};
pub use route::{Flags, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey, TierRange};
pub use service_counts::ServiceCounts;
pub use socket::{Connection, SocketKey, UdpClient};
pub use task::{EndState, HEADER_BYTES, MAX_TASKS, OWN_NAMESPACE, Operation, Task};

/// Version of the map layouts; part of the pin path.
pub const LAYOUT_VERSION: u32 = 3;

/// The most tiers that a Service port can have: node, zone, cluster.
pub const MAX_TIERS: usize = 3;

/// An address that no host has (192.0.2.0/24 is TEST-NET-1, RFC 5737). A TCP
/// connect to it is counted as [`Counter::SelfCheck`] and refused, by which the
/// agent proves that its programs see the connects made below their cgroup.
pub const SELF_CHECK_ADDRESS: [u8; 16] = address::mapped([192, 0, 2, 1]);

/// The port that goes with [`SELF_CHECK_ADDRESS`] (discard).
pub const SELF_CHECK_PORT: [u8; 2] = 9_u16.to_be_bytes();

/// Names of the maps, as pinned and as bpftool shows them. The kernel keeps at
/// most 15 bytes of a name (`BPF_OBJ_NAME_LEN` in `include/uapi/linux/bpf.h`).
pub mod map {
    /// [`ServiceKey`](crate::ServiceKey) → [`ServiceEntry`](crate::ServiceEntry).
    pub const SERVICES: &str = "services";
    /// [`SlotKey`](crate::SlotKey) → [`Slot`](crate::Slot).
    pub const SLOTS: &str = "slots";
    /// [`ServiceKey`](crate::ServiceKey) → [`ServiceName`](crate::ServiceName); only people read it.
    pub const NAMES: &str = "names";
    /// [`ServiceKey`](crate::ServiceKey) → [`ServiceCounts`](crate::ServiceCounts); only
    /// people read it.
    pub const SERVICE_COUNTS: &str = "service_counts";
    /// One [`Node`](crate::Node); only people read it.
    pub const NODE: &str = "node";
    /// One [`Heartbeat`](crate::Heartbeat).
    pub const HEARTBEAT: &str = "heartbeat";
    /// One `u64` for each [`Counter`](crate::Counter) and CPU.
    pub const COUNTERS: &str = "counters";
    /// Socket storage: [`Connection`](crate::Connection).
    pub const CONNECTIONS: &str = "connections";
    /// Cookie of a connected UDP socket (`SO_COOKIE`) → [`UdpClient`](crate::UdpClient),
    /// for the agent, which the kernel shows no storage of UDP sockets.
    pub const UDP_CLIENTS: &str = "udp_clients";
    /// Socket storage: [`Flows`](crate::Flows).
    pub const FLOWS: &str = "flows";
    /// [`AffinityKey`](crate::AffinityKey) → [`Affinity`](crate::Affinity); the
    /// longest unused make room.
    pub const AFFINITY: &str = "affinity";
    /// Id of a pod's cgroup (`u64`) → [`LeftAlone`](crate::LeftAlone).
    pub const LEFT_ALONE: &str = "left_alone";
    /// [`LoadKey`](crate::LoadKey) → number of open connections (`u64`).
    pub const LOADS: &str = "loads";
    /// [`HealthKey`](crate::HealthKey) → [`Health`](crate::Health), of those that
    /// failed lately; the longest unused make room.
    pub const HEALTH: &str = "health";
    /// [`ProbeKey`](crate::ProbeKey) → 0; the longest unused make room.
    pub const PROBES: &str = "probes";
    /// One `u64`: while boot time in ns is below it, something in `health` may be
    /// suspect.
    pub const HEALTH_GATE: &str = "health_gate";
    /// One [`HealthConfig`](crate::HealthConfig).
    pub const HEALTH_CONFIG: &str = "health_config";
    /// Ring buffer of [`HealthEvent`](crate::HealthEvent).
    pub const HEALTH_EVENTS: &str = "health_events";
    /// Address (16 bytes) → cookie of the network namespace that connects from it.
    pub const NAMESPACES: &str = "namespaces";
    /// Cookie of a network namespace → the address (16 bytes) that it was last seen
    /// to use.
    pub const ADDRESSES: &str = "netns_addresses";
    /// [`SocketKey`](crate::SocketKey) of a client → its cookie, until its server
    /// has found it.
    pub const CLIENTS: &str = "clients";
    /// Socket storage: [`EndKey`](crate::EndKey).
    pub const ENDS: &str = "ends";
    /// Cookie of the client's socket (`u64`) → [`Pair`](crate::Pair).
    pub const PAIRS: &str = "pairs";
    /// Address (16 bytes) of a pod of this node → its [`Wish`](crate::Wish) (`u32`).
    pub const WISHES: &str = "splice_wishes";
    /// One [`SpliceConfig`](crate::SpliceConfig).
    pub const SPLICE_CONFIG: &str = "splice_config";
    /// One `u32`: 1 if the operator has switched the splice off.
    pub const SPLICE_SWITCH: &str = "splice_switch";
    /// Ring buffer of [`SpliceEvent`](crate::SpliceEvent).
    pub const SPLICE_EVENTS: &str = "splice_events";
    /// Id of a cgroup (`u64`) in which splice(2) reads TCP sockets → when it was first
    /// seen to, ns since boot (`u64`).
    pub const SPLICERS: &str = "splicers";
    /// [`EndKey`](crate::EndKey) → the socket, for redirection.
    pub const SPLICE: &str = "splice";
}

/// Capacities of the maps, in entries.
pub mod capacity {
    /// Service ports of both families.
    pub const SERVICES: usize = 32_768;
    /// Endpoints, once for each tier that holds them.
    pub const SLOTS: usize = 524_288;
    /// Clients of Service ports with session affinity.
    pub const AFFINITY: usize = 65_536;
    /// Connected UDP sockets of clients.
    pub const UDP_CLIENTS: usize = 65_536;
    /// Pods of this node that opted out; the kubelet's limit is 110 pods unless
    /// it is raised (`maxPods`).
    pub const LEFT_ALONE: usize = 4_096;
    /// Endpoints on this node of Services that limit their connections.
    pub const LOADS: usize = 16_384;
    /// Endpoints and nodes that failed lately. Of what has no room, nothing is
    /// suspected.
    pub const HEALTH: usize = 8_192;
    /// Probes that were made lately.
    pub const PROBES: usize = 4_096;
    /// Bytes of the ring buffer.
    pub const HEALTH_EVENTS: usize = 1 << 16;
    /// Addresses on this node that are seen to connect or to accept.
    pub const NAMESPACES: usize = 4_096;
    /// Connections whose ends may be on this node.
    pub const PAIRS: usize = 65_536;
    /// Sockets of promoted pairs.
    pub const SPLICE: usize = 16_384;
    /// Addresses of pods that have a wish of their own.
    pub const WISHES: usize = 8_192;
    /// Cgroups in which splice(2) reads TCP sockets.
    pub const SPLICERS: usize = 4_096;
    /// Bytes of the ring buffer.
    pub const SPLICE_EVENTS: usize = 1 << 20;
}
