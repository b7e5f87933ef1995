//! Why the programs did what they did, as counters.

/// Index of a counter in the map `counters`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Counter {
    /// Connects and flows of datagrams given an endpoint of the tier "node".
    ConnectNode = 0,
    /// Connects and flows of datagrams given an endpoint of the tier "zone".
    ConnectZone = 1,
    /// Connects and flows of datagrams given an endpoint of the tier "cluster".
    ConnectCluster = 2,
    /// Connects and flows of datagrams given an endpoint of the tier "hints".
    ConnectHints = 3,
    /// Connects and flows given the endpoint of before, by session affinity or
    /// since the flow was in use.
    ConnectSame = 4,
    /// Of all those, connects to an endpoint on this node.
    ConnectLocal = 5,
    /// Connects refused, since nothing is usable.
    Refused = 6,
    /// Passed: the address is none of a captured Service port.
    PassedNoEntry = 7,
    /// Passed: the agent asked for it.
    PassedVerdict = 8,
    /// Passed: the agent has been silent for too long.
    PassedStale = 9,
    /// Passed: the entry changed twice while it was read.
    PassedRace = 10,
    /// Passed: no socket storage could be had.
    PassedNoStorage = 11,
    /// Passed: nothing usable, and this kernel can't refuse with ECONNREFUSED.
    PassedNoRefusal = 12,
    /// Connects of the agent to the self-check address.
    SelfCheck = 13,
    /// getpeername calls answered with the ClusterIP.
    PeerNames = 14,
    /// Datagrams received whose source was shown as the ClusterIP.
    SourceNames = 15,
    /// Sockets registered for splicing.
    SocketsRegistered = 16,
    /// Pairs found.
    SocketsPaired = 17,
    /// Sockets that could not be registered or inserted.
    SocketsFailed = 18,
    /// Messages put on the peer's receive queue.
    MessagesSpliced = 19,
    /// Messages sent by TCP: the peer has unread TCP bytes.
    MessagesOrder = 20,
    /// Messages sent by TCP: the peer reads too slowly.
    MessagesCredit = 21,
    /// Messages sent by TCP: no peer, or one that is closing.
    MessagesNoPeer = 22,
}

impl Counter {
    /// All of them, in the order of their index.
    pub const ALL: [Self; 23] = [
        Self::ConnectNode,
        Self::ConnectZone,
        Self::ConnectCluster,
        Self::ConnectHints,
        Self::ConnectSame,
        Self::ConnectLocal,
        Self::Refused,
        Self::PassedNoEntry,
        Self::PassedVerdict,
        Self::PassedStale,
        Self::PassedRace,
        Self::PassedNoStorage,
        Self::PassedNoRefusal,
        Self::SelfCheck,
        Self::PeerNames,
        Self::SourceNames,
        Self::SocketsRegistered,
        Self::SocketsPaired,
        Self::SocketsFailed,
        Self::MessagesSpliced,
        Self::MessagesOrder,
        Self::MessagesCredit,
        Self::MessagesNoPeer,
    ];

    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Name in `shunt status` and its JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ConnectNode => "connect_node",
            Self::ConnectZone => "connect_zone",
            Self::ConnectCluster => "connect_cluster",
            Self::ConnectHints => "connect_hints",
            Self::ConnectSame => "connect_same",
            Self::ConnectLocal => "connect_local",
            Self::Refused => "refused",
            Self::PassedNoEntry => "passed_no_entry",
            Self::PassedVerdict => "passed_verdict",
            Self::PassedStale => "passed_stale",
            Self::PassedRace => "passed_race",
            Self::PassedNoStorage => "passed_no_storage",
            Self::PassedNoRefusal => "passed_no_refusal",
            Self::SelfCheck => "self_check",
            Self::PeerNames => "peer_names",
            Self::SourceNames => "source_names",
            Self::SocketsRegistered => "sockets_registered",
            Self::SocketsPaired => "sockets_paired",
            Self::SocketsFailed => "sockets_failed",
            Self::MessagesSpliced => "messages_spliced",
            Self::MessagesOrder => "messages_tcp_order",
            Self::MessagesCredit => "messages_tcp_credit",
            Self::MessagesNoPeer => "messages_tcp_no_peer",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lists_each_counter_at_its_index() {
        for (index, counter) in Counter::ALL.into_iter().enumerate() {
            assert_eq!(counter as usize, index);
        }
    }
}
