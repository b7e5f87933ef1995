//! What the agent says of itself: `node` and `heartbeat`.

use crate::route::{padded, text};

/// The node that the routing table was planned for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Node {
    /// A Kubernetes node name has at most 253 bytes (RFC 1123 subdomain).
    name: [u8; 256],
    /// A label value has at most 63 bytes.
    zone: [u8; 64],
    /// Where the agent serves its metrics, in words; empty if nowhere.
    metrics: [u8; 192],
}

/// The sign of life that the dead-man switch watches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Heartbeat {
    /// Time since boot (`CLOCK_BOOTTIME`), ns; 0 if no agent has been up yet.
    beat_ns: u64,
    /// The programs pass every connect once the beat is older than this, ns.
    stale_after_ns: u64,
    /// Process id of the agent, in its own pid namespace.
    pid: u32,
    /// [`Clients`].
    clients: u32,
}

/// Bits of [`Heartbeat::clients`]: which clients are left alone. Part of the
/// heartbeat, since that is what each connect reads anyway.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Clients(pub u32);

impl Clients {
    /// Some pods: see the map `left_alone`.
    pub const SOME_PODS: u32 = 1 << 0;
    /// All that are in the node's own network namespace.
    pub const HOST: u32 = 1 << 1;
}

const _: () = assert!(size_of::<Node>() == 512);
const _: () = assert!(size_of::<Heartbeat>() == 24 && align_of::<Heartbeat>() == 8);

impl Node {
    /// Parts that are too long are cut. An unknown zone is "".
    pub fn new(name: &str, zone: &str) -> Self {
        Self {
            name: padded(name),
            zone: padded(zone),
            metrics: [0; 192],
        }
    }

    /// The same, with where the agent serves its metrics; what is too long is
    /// cut.
    pub fn with_metrics(mut self, metrics: &str) -> Self {
        self.metrics = padded(metrics);
        self
    }

    /// Where the agent serves its metrics; empty if nowhere.
    pub fn metrics(&self) -> &str {
        text(&self.metrics)
    }

    /// The node's name; empty if no agent has been up yet.
    pub fn name(&self) -> &str {
        text(&self.name)
    }

    /// The node's zone; empty if unknown.
    pub fn zone(&self) -> &str {
        text(&self.zone)
    }
}

impl Heartbeat {
    /// A beat at `beat_ns`.
    pub const fn new(beat_ns: u64, stale_after_ns: u64, pid: u32) -> Self {
        Self {
            beat_ns,
            stale_after_ns,
            pid,
            clients: 0,
        }
    }

    /// The same, with clients that are left alone.
    pub const fn leaving_alone(mut self, clients: Clients) -> Self {
        self.clients = clients.0;
        self
    }

    /// When it was written, ns since boot.
    pub const fn beat_ns(&self) -> u64 {
        self.beat_ns
    }

    /// From which age on it is stale, ns.
    pub const fn stale_after_ns(&self) -> u64 {
        self.stale_after_ns
    }

    /// Process id of the agent.
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether any of the bits of `clients` is set.
    #[inline(always)]
    pub const fn leaves_alone(&self, clients: u32) -> bool {
        self.clients & clients != 0
    }

    /// Whether the agent has been silent for too long at `now_ns` since boot.
    #[inline(always)]
    pub const fn is_stale(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.beat_ns) > self.stale_after_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_is_stale_only_after_its_time() {
        let beat = Heartbeat::new(100, 50, 1);
        assert!(!beat.is_stale(90) && !beat.is_stale(150) && beat.is_stale(151));
    }

    #[test]
    fn a_table_without_an_agent_is_stale() {
        assert!(Heartbeat::default().is_stale(1));
    }
}
