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
    /// Of all those, connects given another endpoint since each on this node holds
    /// as many connections as it may.
    ConnectSpilled = 6,
    /// Connects refused, since nothing is usable.
    Refused = 7,
    /// Passed: the address is none of a captured Service port.
    PassedNoEntry = 8,
    /// Passed: the agent asked for it.
    PassedVerdict = 9,
    /// Passed: the client is a pod that opted out.
    PassedOptedOut = 10,
    /// Passed: the client is a process of the host, and these are left alone.
    PassedHost = 11,
    /// Passed: the agent has been silent for too long.
    PassedStale = 12,
    /// Passed: the entry changed twice while it was read.
    PassedRace = 13,
    /// Passed: no socket storage could be had.
    PassedNoStorage = 14,
    /// Passed: nothing usable, and this kernel can't refuse with ECONNREFUSED.
    PassedNoRefusal = 15,
    /// Connects of the agent to the self-check address.
    SelfCheck = 16,
    /// getpeername calls answered with the ClusterIP.
    PeerNames = 17,
    /// Datagrams received whose source was shown as the ClusterIP.
    SourceNames = 18,
    /// Connections to an endpoint on this node whose client was registered.
    PairsRegistered = 19,
    /// Pairs of which both ends were found.
    PairsFound = 20,
    /// Pairs that could not be registered: no room.
    PairsFailed = 21,
    /// Pairs put into the map `splice`.
    Promotions = 22,
    /// Pairs taken out again.
    Demotions = 23,
    /// Messages put on the peer's receive queue.
    MessagesSpliced = 24,
    /// Messages of promoted pairs that went by TCP.
    MessagesTcp = 25,
    /// Directions that sk_msg has given up.
    Latches = 26,
    /// Events for which the ring buffer had no room: the agent looks at all
    /// pairs then.
    EventsLost = 27,
    /// SYNs of connects to an endpoint that had no answer in time.
    SynTimeouts = 28,
    /// Connects to an endpoint that were refused or had no way.
    ConnectsFailed = 29,
    /// Endpoints and nodes that became suspect.
    Suspected = 30,
    /// Suspicions that ended in an answer.
    Cleared = 31,
    /// Connects sent to a suspect endpoint to find out.
    Probes = 32,
    /// Suspect endpoints that were passed over.
    SuspectsAvoided = 33,
    /// Waiting connects that were made to fail, since their endpoint is dead.
    FailedFast = 34,
}

impl Counter {
    /// All of them, in the order of their index.
    pub const ALL: [Self; 35] = [
        Self::ConnectNode,
        Self::ConnectZone,
        Self::ConnectCluster,
        Self::ConnectHints,
        Self::ConnectSame,
        Self::ConnectLocal,
        Self::ConnectSpilled,
        Self::Refused,
        Self::PassedNoEntry,
        Self::PassedVerdict,
        Self::PassedOptedOut,
        Self::PassedHost,
        Self::PassedStale,
        Self::PassedRace,
        Self::PassedNoStorage,
        Self::PassedNoRefusal,
        Self::SelfCheck,
        Self::PeerNames,
        Self::SourceNames,
        Self::PairsRegistered,
        Self::PairsFound,
        Self::PairsFailed,
        Self::Promotions,
        Self::Demotions,
        Self::MessagesSpliced,
        Self::MessagesTcp,
        Self::Latches,
        Self::EventsLost,
        Self::SynTimeouts,
        Self::ConnectsFailed,
        Self::Suspected,
        Self::Cleared,
        Self::Probes,
        Self::SuspectsAvoided,
        Self::FailedFast,
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
            Self::ConnectSpilled => "connect_spilled",
            Self::Refused => "refused",
            Self::PassedNoEntry => "passed_no_entry",
            Self::PassedVerdict => "passed_verdict",
            Self::PassedOptedOut => "passed_opted_out",
            Self::PassedHost => "passed_host",
            Self::PassedStale => "passed_stale",
            Self::PassedRace => "passed_race",
            Self::PassedNoStorage => "passed_no_storage",
            Self::PassedNoRefusal => "passed_no_refusal",
            Self::SelfCheck => "self_check",
            Self::PeerNames => "peer_names",
            Self::SourceNames => "source_names",
            Self::PairsRegistered => "pairs_registered",
            Self::PairsFound => "pairs_found",
            Self::PairsFailed => "pairs_failed",
            Self::Promotions => "promotions",
            Self::Demotions => "demotions",
            Self::MessagesSpliced => "messages_spliced",
            Self::MessagesTcp => "messages_tcp",
            Self::Latches => "latches",
            Self::EventsLost => "events_lost",
            Self::SynTimeouts => "syn_timeouts",
            Self::ConnectsFailed => "connects_failed",
            Self::Suspected => "suspected",
            Self::Cleared => "cleared",
            Self::Probes => "probes",
            Self::SuspectsAvoided => "suspects_avoided",
            Self::FailedFast => "failed_fast",
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
