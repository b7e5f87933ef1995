//! Endpoints and nodes that do not answer; pure.
//!
//! Evidence is what becomes of the connects of this node's own clients. What
//! fails for two sockets one after the other, while nobody else is answered, is
//! *suspect*: connects go elsewhere for [`FIRST_WAIT_NS`], then one of them
//! probes. Each probe doubles the time to the next, up to [`MAX_WAIT_NS`]; any
//! answer ends the suspicion.
//!
//! A connect that waits for an answer says nothing if somebody else was answered
//! after it began: a packet was lost, or the accept queue was full for a moment.
//! So neither loss nor a burst makes a busy endpoint suspect.
//!
//! Suspicion spreads to a node by the same rule, from endpoints that are silent:
//! a node that refuses is alive.

/// How long the first suspicion lasts, ns.
pub const FIRST_WAIT_NS: u64 = 5_000_000_000;
/// How long the longest does, ns.
pub const MAX_WAIT_NS: u64 = 60_000_000_000;
/// Failures that lie further apart do not add up, ns. The longest suspicion has
/// room in it, so that nothing is forgotten while it lasts.
pub const MEMORY_NS: u64 = 2 * MAX_WAIT_NS;
/// So many unanswered SYNs, with no answer to anyone between them, are taken for
/// death: at a loss of 5 % they come about once in 160,000 connects that have no
/// other beside them.
pub const CERTAIN: u32 = 4;

/// Which failures make suspect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Threshold {
    /// Of so many sockets.
    pub sockets: u32,
    /// To so many endpoints.
    pub endpoints: u32,
}

impl Threshold {
    /// For an endpoint.
    pub const ENDPOINT: Self = Self {
        sockets: 2,
        endpoints: 1,
    };
    /// For a node.
    pub const NODE: Self = Self {
        sockets: 3,
        endpoints: 2,
    };
}

/// The number of a node, by which its endpoints know each other: a hash of its
/// name. Two nodes with the same are suspected and cleared as one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Not known, or this very node, which is never suspected.
    pub const UNKNOWN: Self = Self(0);

    /// Of a node's name: FNV-1a (RFC 9923), never [`NodeId::UNKNOWN`].
    pub fn of(name: &str) -> Self {
        let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        Self(name.bytes().fold(0x811c_9dc5, mix).max(1))
    }
}

/// What may be suspect: an endpoint or a node.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct HealthKey {
    /// Of an endpoint. Of a node: twelve zeros and its number, big-endian.
    address: [u8; 16],
    /// Network byte order; 0 for a node.
    port: [u8; 2],
    reserved: [u8; 2],
}

/// What is known of an endpoint or a node that failed lately. Whoever writes it
/// does so field by field: a lost update costs one piece of evidence.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Health {
    /// Time since boot until which nobody is sent there, ns; 0 if not suspect.
    /// Later, one connect at a time is.
    until_ns: u64,
    /// When it became suspect or was probed last, ns since boot.
    since_ns: u64,
    /// The last failure, ns since boot.
    failed_ns: u64,
    /// The last answer, ns since boot.
    answered_ns: u64,
    /// The last answer that ended a suspicion, ns since boot.
    cleared_ns: u64,
    /// Cookie of the socket that failed last.
    socket: u64,
    /// Failures since the last answer.
    failures: u32,
    /// Of so many sockets.
    sockets: u32,
    /// To so many endpoints.
    endpoints: u32,
    /// What tells the endpoint that failed last from others.
    endpoint: u32,
    /// Bits of [`Evidence`].
    evidence: u32,
    /// Probes since it became suspect.
    probes: u32,
}

/// Bits of [`Health::evidence`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Evidence(pub u32);

impl Evidence {
    /// A SYN had no answer in time.
    pub const SILENT: u32 = 1 << 0;
    /// A SYN was answered by RST.
    pub const REFUSED: u32 = 1 << 1;
    /// ICMP said that there is no way.
    pub const UNREACHABLE: u32 = 1 << 2;
}

/// A connect that failed, or has had no answer so far.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Failure {
    /// Cookie of its socket.
    pub socket: u64,
    /// What tells the endpoint from others of the same node.
    pub endpoint: u32,
    /// When it began, ns since boot.
    pub began_ns: u64,
    /// A bit of [`Evidence`].
    pub evidence: u32,
}

/// Whether a connect may go somewhere.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Standing {
    /// It may.
    Live,
    /// It should not.
    Suspect,
    /// One may, to find out.
    Due,
}

/// The same for an endpoint and its node together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Judgement {
    /// It may.
    Live,
    /// It should not.
    Suspect,
    /// One may, for the endpoint.
    ProbeEndpoint,
    /// One may, for the node.
    ProbeNode,
}

/// Names one probe; the first to put it into the map `probes` is the one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ProbeKey {
    of: HealthKey,
    reserved: [u8; 4],
    /// [`Health::until_ns`] of the suspicion that is over.
    until_ns: u64,
}

/// What the programs were told of connects that get no answer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct HealthConfig {
    /// The first SYN timeout, jiffies; 0 is the kernel's own.
    pub first_timeout: u32,
    /// How many SYNs more are sent, so that the wait in all does not shrink.
    pub more_retries: u32,
    /// 1 if a connect that waits for what is taken for dead is to end.
    pub fail_fast: u32,
    /// Zero.
    pub reserved: u32,
}

/// What the agent is told.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HealthEvent {
    /// Of what.
    pub of: HealthKey,
    /// [`HealthChange`].
    pub change: u32,
    /// Bits of [`Evidence`].
    pub evidence: u32,
    /// The endpoint's node; 0 if unknown.
    pub node: u32,
}

/// [`HealthEvent::change`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HealthChange {
    /// It is suspect now.
    Suspected = 0,
    /// It has answered.
    Cleared = 1,
}

const _: () = assert!(size_of::<HealthKey>() == 20 && align_of::<HealthKey>() == 4);
const _: () = assert!(size_of::<Health>() == 72 && align_of::<Health>() == 8);
const _: () = assert!(size_of::<ProbeKey>() == 32 && align_of::<ProbeKey>() == 8);
const _: () = assert!(size_of::<HealthConfig>() == 16);
const _: () = assert!(size_of::<HealthEvent>() == 32);

impl HealthKey {
    /// Of an endpoint; the port is in network byte order.
    #[inline(always)]
    pub const fn endpoint(address: [u8; 16], port: [u8; 2]) -> Self {
        Self {
            address,
            port,
            reserved: [0; 2],
        }
    }

    /// Of a node.
    #[inline(always)]
    pub const fn node(node: NodeId) -> Self {
        let [a, b, c, d] = node.0.to_be_bytes();
        let address = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d];
        Self::endpoint(address, [0; 2])
    }

    /// The endpoint's address and port, or the node.
    pub fn subject(&self) -> Result<core::net::SocketAddr, NodeId> {
        let [.., a, b, c, d] = self.address;
        match u16::from_be_bytes(self.port) {
            0 => Err(NodeId(u32::from_be_bytes([a, b, c, d]))),
            port => Ok((crate::address::to_ip(&self.address), port).into()),
        }
    }

    /// What tells endpoints of a node apart, well enough.
    #[inline(always)]
    pub const fn tag(&self) -> u32 {
        let [.., a, b, c, d] = self.address;
        let [high, low] = self.port;
        u32::from_be_bytes([a, b, c, d]) ^ u32::from_be_bytes([high, low, 0, 0])
    }
}

impl ProbeKey {
    /// The probe that `health`, of `of`, is due for.
    #[inline(always)]
    pub const fn new(of: HealthKey, health: &Health) -> Self {
        Self {
            of,
            reserved: [0; 4],
            until_ns: health.until_ns,
        }
    }
}

impl Health {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        until_ns: 0,
        since_ns: 0,
        failed_ns: 0,
        answered_ns: 0,
        cleared_ns: 0,
        socket: 0,
        failures: 0,
        sockets: 0,
        endpoints: 0,
        endpoint: 0,
        evidence: 0,
        probes: 0,
    };

    /// A connect failed. Whether this is what makes it suspect.
    #[inline(always)]
    pub fn fail(&mut self, failure: &Failure, threshold: Threshold, now_ns: u64) -> bool {
        if self.answered_ns > failure.began_ns {
            return false;
        }
        let is_suspect = self.until_ns != 0;
        if !is_suspect && now_ns.saturating_sub(self.failed_ns) > MEMORY_NS {
            self.forget();
        }
        if self.socket != failure.socket {
            self.socket = failure.socket;
            self.sockets += 1;
        }
        if self.endpoint != failure.endpoint {
            self.endpoint = failure.endpoint;
            self.endpoints += 1;
        }
        self.failures += 1;
        self.evidence |= failure.evidence;
        self.failed_ns = now_ns;
        if is_suspect || self.sockets < threshold.sockets || self.endpoints < threshold.endpoints {
            return false;
        }
        self.probes = 0;
        self.since_ns = now_ns;
        self.until_ns = now_ns + FIRST_WAIT_NS;
        true
    }

    /// A connect was answered. Whether this ends a suspicion.
    #[inline(always)]
    pub fn succeed(&mut self, now_ns: u64) -> bool {
        let was_suspect = self.until_ns != 0;
        self.answered_ns = now_ns;
        if was_suspect {
            self.cleared_ns = now_ns;
        }
        self.until_ns = 0;
        self.forget();
        was_suspect
    }

    #[inline(always)]
    fn forget(&mut self) {
        self.failures = 0;
        self.sockets = 0;
        self.endpoints = 0;
        self.socket = 0;
        self.endpoint = 0;
        self.evidence = 0;
    }

    /// One connect is sent there to find out: the others wait for the next turn.
    #[inline(always)]
    pub fn probe(&mut self, now_ns: u64) {
        self.probes += 1;
        self.since_ns = now_ns;
        self.until_ns = now_ns + self.wait_ns();
    }

    /// The time between probes. A refusal costs the caller no time, and often
    /// means a restart: that is looked after as often as at first.
    #[inline(always)]
    const fn wait_ns(&self) -> u64 {
        if self.evidence == Evidence::REFUSED {
            return FIRST_WAIT_NS;
        }
        match self.probes {
            0 => FIRST_WAIT_NS,
            1 => 2 * FIRST_WAIT_NS,
            2 => 4 * FIRST_WAIT_NS,
            3 => 8 * FIRST_WAIT_NS,
            _ => MAX_WAIT_NS,
        }
    }

    /// Whether a connect may go there.
    #[inline(always)]
    pub const fn standing(&self, now_ns: u64) -> Standing {
        if self.until_ns == 0 {
            Standing::Live
        } else if now_ns < self.until_ns {
            Standing::Suspect
        } else {
            Standing::Due
        }
    }

    /// Whether it is suspect, and so many SYNs had no answer that this connect need
    /// not wait for one: nobody has had one since it began.
    #[inline(always)]
    pub const fn is_certain_for(&self, connect: &Failure) -> bool {
        self.until_ns != 0
            && self.failures >= CERTAIN
            && self.evidence & Evidence::SILENT != 0
            && self.answered_ns <= connect.began_ns
    }

    /// Lets the next connect find out, as if the time were over.
    pub const fn end_wait(&mut self, now_ns: u64) {
        if self.until_ns > now_ns {
            self.until_ns = now_ns;
        }
    }

    /// Time since boot until which nobody is sent there, ns; 0 if not suspect.
    #[inline(always)]
    pub const fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// Bits of [`Evidence`].
    #[inline(always)]
    pub const fn evidence(&self) -> u32 {
        self.evidence
    }

    /// Failures since the last answer.
    pub const fn failures(&self) -> u32 {
        self.failures
    }
}

/// Whether a connect may go to an endpoint.
///
/// While its node is suspect, it may not; and when the node has answered, the
/// endpoint's own suspicion need not be sat out.
#[inline(always)]
pub fn judge(endpoint: Option<&Health>, node: Option<&Health>, now_ns: u64) -> Judgement {
    let of_node = node.map_or(Standing::Live, |node| node.standing(now_ns));
    if of_node == Standing::Suspect {
        return Judgement::Suspect;
    }
    let mut of_endpoint = endpoint.map_or(Standing::Live, |it| it.standing(now_ns));
    if let (Standing::Suspect, Some(endpoint), Some(node)) = (of_endpoint, endpoint, node)
        && node.cleared_ns > endpoint.since_ns
    {
        of_endpoint = Standing::Due;
    }
    match (of_endpoint, of_node) {
        (Standing::Suspect, _) => Judgement::Suspect,
        (_, Standing::Due) => Judgement::ProbeNode,
        (Standing::Due, _) => Judgement::ProbeEndpoint,
        (Standing::Live, _) => Judgement::Live,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const START: u64 = 1_000 * SECOND;

    /// Of a connect to endpoint 1 that began `before_ns` ago.
    fn silent(socket: u64, began_ns: u64) -> Failure {
        Failure {
            socket,
            endpoint: 1,
            began_ns,
            evidence: Evidence::SILENT,
        }
    }

    fn fail(health: &mut Health, failure: &Failure, now_ns: u64) -> bool {
        health.fail(failure, Threshold::ENDPOINT, now_ns)
    }

    fn suspect() -> Health {
        let mut health = Health::UNKNOWN;
        fail(&mut health, &silent(1, START), START);
        assert!(fail(&mut health, &silent(2, START), START));
        health
    }

    #[test]
    fn two_sockets_make_suspect_and_one_alone_does_not() {
        let mut health = Health::UNKNOWN;
        for n in 0..10 {
            assert!(!fail(&mut health, &silent(7, START), START + n));
            assert_eq!(health.standing(START + n), Standing::Live);
        }
        assert!(fail(&mut health, &silent(8, START), START));
        assert_eq!(health.standing(START + 1), Standing::Suspect);
        assert!(
            !fail(&mut health, &silent(9, START), START),
            "it was before"
        );
    }

    #[test]
    fn what_began_before_an_answer_is_no_evidence() {
        let mut health = Health::UNKNOWN;
        fail(&mut health, &silent(1, START), START);
        assert!(!health.succeed(START + 10));
        for socket in 2..9 {
            assert!(!fail(&mut health, &silent(socket, START + 9), START + 20));
        }
        fail(&mut health, &silent(10, START + 11), START + 20);
        assert!(fail(&mut health, &silent(11, START + 11), START + 20));
    }

    #[test]
    fn failures_that_lie_far_apart_do_not_add_up() {
        let mut health = Health::UNKNOWN;
        fail(&mut health, &silent(1, START), START);
        let later = START + MEMORY_NS + 1;
        assert!(!fail(&mut health, &silent(2, later), later));
        assert!(fail(&mut health, &silent(3, later), later));
    }

    #[test]
    fn suspicion_ends_in_a_probe_and_doubles_up_to_a_minute() {
        let mut health = suspect();
        let mut now_ns = START;
        for seconds in [5, 10, 20, 40, 60, 60, 60] {
            now_ns += seconds * SECOND - 1;
            assert_eq!(health.standing(now_ns), Standing::Suspect, "{seconds}");
            now_ns += 1;
            assert_eq!(health.standing(now_ns), Standing::Due, "{seconds}");
            health.probe(now_ns);
        }
        assert!(health.succeed(now_ns));
        assert_eq!(health.standing(now_ns), Standing::Live);
        // And begins anew.
        fail(&mut health, &silent(3, now_ns + 1), now_ns + 1);
        fail(&mut health, &silent(4, now_ns + 1), now_ns + 1);
        assert_eq!(health.until_ns(), now_ns + 1 + FIRST_WAIT_NS);
    }

    #[test]
    fn what_refuses_is_probed_every_five_seconds() {
        let mut health = Health::UNKNOWN;
        for socket in [1, 2] {
            let mut refused = silent(socket, START);
            refused.evidence = Evidence::REFUSED;
            fail(&mut health, &refused, START);
        }
        for _ in 0..9 {
            health.probe(START);
        }
        assert_eq!(health.until_ns(), START + FIRST_WAIT_NS);
        let waits = silent(3, START);
        fail(&mut health, &waits, START);
        let mut refused = health;
        refused.evidence = Evidence::REFUSED;
        assert!(!refused.is_certain_for(&waits), "a refusal ends by itself");
    }

    #[test]
    fn each_turn_has_a_probe_of_its_own_name() {
        let key = HealthKey::node(NodeId::of("n1"));
        let mut health = suspect();
        let first = ProbeKey::new(key, &health);
        assert_eq!(first, ProbeKey::new(key, &health));
        health.probe(START + FIRST_WAIT_NS);
        assert_ne!(first, ProbeKey::new(key, &health));
    }

    #[test]
    fn death_is_certain_after_some_more() {
        let mut health = suspect();
        let waits = silent(2, START);
        assert!(!health.is_certain_for(&waits));
        fail(&mut health, &silent(1, START), START);
        assert!(!health.is_certain_for(&waits));
        fail(&mut health, &waits, START);
        assert!(health.is_certain_for(&waits));
        let mut answered = health;
        answered.answered_ns = START + 1;
        assert!(
            !answered.is_certain_for(&waits),
            "somebody was answered since"
        );
        health.succeed(START);
        assert!(!health.is_certain_for(&waits));
    }

    #[test]
    fn a_node_is_suspect_by_two_of_its_endpoints_only() {
        let mut node = Health::UNKNOWN;
        for socket in 1..9 {
            assert!(!node.fail(&silent(socket, START), Threshold::NODE, START));
        }
        let mut other = silent(10, START);
        other.endpoint = 2;
        assert!(node.fail(&other, Threshold::NODE, START));
    }

    #[test]
    fn the_endpoints_of_a_suspect_node_wait_for_its_probe() {
        let mut node = suspect();
        let late = START + FIRST_WAIT_NS;
        assert_eq!(judge(None, Some(&node), START), Judgement::Suspect);
        assert_eq!(judge(None, Some(&node), late), Judgement::ProbeNode);
        let mut endpoint = suspect();
        assert_eq!(
            judge(Some(&endpoint), Some(&node), late),
            Judgement::ProbeNode
        );
        endpoint.probe(late);
        assert_eq!(
            judge(Some(&endpoint), Some(&node), late),
            Judgement::Suspect
        );
        // Once the node answers, so do its endpoints, most likely.
        node.succeed(late + 1);
        assert_eq!(
            judge(Some(&endpoint), Some(&node), late + 2),
            Judgement::ProbeEndpoint
        );
        endpoint.probe(late + 2);
        assert_eq!(
            judge(Some(&endpoint), Some(&node), late + 3),
            Judgement::Suspect
        );
        assert_eq!(judge(None, Some(&node), late + 3), Judgement::Live);
    }

    #[test]
    fn an_endpoint_alone_is_judged_by_itself() {
        let endpoint = suspect();
        assert_eq!(judge(Some(&endpoint), None, START), Judgement::Suspect);
        let late = START + FIRST_WAIT_NS;
        assert_eq!(judge(Some(&endpoint), None, late), Judgement::ProbeEndpoint);
        assert_eq!(judge(None, None, START), Judgement::Live);
    }

    #[test]
    fn keys_of_endpoints_and_nodes_come_back() {
        let endpoint = HealthKey::endpoint(crate::address::mapped([10, 0, 0, 1]), [0x1f, 0x90]);
        assert_eq!(endpoint.subject(), Ok("10.0.0.1:8080".parse().unwrap()));
        let node = NodeId::of("n1");
        assert_eq!(HealthKey::node(node).subject(), Err(node));
        assert_ne!(NodeId::of("n1"), NodeId::of("n2"));
        assert_ne!(NodeId::of(""), NodeId::UNKNOWN);
    }
}
