//! Session affinity by client: which endpoint each client was given.

use crate::{ServiceKey, Slot};

/// A client of a Service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct AffinityKey {
    /// Cookie of the client's network namespace: a pod is one client.
    netns_cookie: u64,
    /// In the host's namespace, which processes share, also the id of the
    /// client's cgroup; 0 elsewhere.
    cgroup_id: u64,
    service: ServiceKey,
    reserved: [u8; 4],
}

/// Where a client's next connection goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Affinity {
    /// Time since boot from which on the client is free again, ns.
    until_ns: u64,
    endpoint: Slot,
}

const _: () = assert!(size_of::<AffinityKey>() == 40 && align_of::<AffinityKey>() == 8);
const _: () = assert!(size_of::<Affinity>() == 32 && align_of::<Affinity>() == 8);

impl AffinityKey {
    /// See the fields.
    #[inline(always)]
    pub const fn new(netns_cookie: u64, cgroup_id: u64, service: ServiceKey) -> Self {
        Self {
            netns_cookie,
            cgroup_id,
            service,
            reserved: [0; 4],
        }
    }
}

impl Affinity {
    /// A client that keeps to `endpoint` until then.
    #[inline(always)]
    pub const fn new(endpoint: Slot, until_ns: u64) -> Self {
        Self { until_ns, endpoint }
    }

    /// Time since boot from which on the client is free again, ns.
    pub const fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// The endpoint, unless the time is over.
    #[inline(always)]
    pub fn at(&self, now_ns: u64) -> Option<&Slot> {
        (now_ns < self.until_ns).then_some(&self.endpoint)
    }
}
