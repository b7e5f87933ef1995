//! What each Service port was given; only people read it.

/// Counts of one Service port, since its first connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ServiceCounts {
    /// Connects and new flows of datagrams given an endpoint.
    pub connects: u64,
    /// Of these, to an endpoint on this node.
    pub local: u64,
}

const _: () = assert!(size_of::<ServiceCounts>() == 16 && align_of::<ServiceCounts>() == 8);
