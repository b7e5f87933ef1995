//! Pairs: the two sockets of a same-node connection, and how far their splice is.
//!
//! Each field has one writer, so that nothing is locked:
//!
//! | written by | what |
//! |---|---|
//! | sockops | identity of the ends |
//! | sk_msg of an end, which runs under its socket's lock | stage, counts, tgid |
//! | the program `manage`, which only the one agent runs | member, frozen, verdict |
//! | setsockopt and splice(2) hooks | marks |
//!
//! While an end is no member, sk_msg does not run for it, and `manage` may reset
//! what sk_msg has written.

use crate::{Marks, ServiceKey, SocketKey};

/// Where the bytes that one end sends go. Each end of a pair is in one of these
/// states, on its own.
///
/// ```text
///              manage: both ends inspected            sk_msg: all that TCP
///   Plain ───────────────────────────────> Member ──carried has been read──> Engaged
///     ^                                      │                                  │
///     │                                      │ sk_msg: may not be, or not any more
///     │                                      v                                  v
///     └──manage: nothing on the way──── Frozen <───agent: told of it──────── Latched
/// ```
///
/// Only `Engaged` redirects, and it does so with every message: a message that
/// went by TCP meanwhile could be read too late, or not wake its reader. So each
/// way out of it ends in `Plain`, by way of the agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// TCP as without shunt: the peer is not in the map `splice`.
    Plain,
    /// The peer can be redirected to; nothing was yet.
    Member,
    /// All messages are put on the peer's receive queue.
    Engaged,
    /// TCP again, by the decision of sk_msg, which has told the agent.
    Latched,
    /// TCP again, by the decision of the agent.
    Frozen,
}

/// One end of a pair, and the direction in which it sends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct End {
    /// Address of the kernel's `struct tcp_sock`, only ever read through
    /// `bpf_probe_read_kernel`; 0 until the end is there.
    pub tcp_sock: u64,
    /// Cookie of its network namespace.
    pub netns_cookie: u64,
    /// Messages that this end put on the peer's receive queue.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Messages that it sent by TCP while it was a member.
    pub messages_tcp: u64,
    /// Process that sent last; 0 if none has.
    pub tgid: u32,
    /// Messages since the peer's last one, for the gates.
    pub run: u32,
    /// Their bytes, as far as 32 bits go.
    pub run_bytes: u32,
    /// What `sends` of the peer was when the run began.
    pub run_peer_sends: u32,
    /// All messages, modulo 2^32.
    pub sends: u32,
    /// [`Stage`].
    pub stage: u8,
    /// Why it is latched: a [`SpliceReason`].
    pub reason: u8,
    /// Not 0 if this end's socket is in the map `splice`; [`CONFIRMED`] once the
    /// agent relies on its next message to be redirected.
    pub member: u8,
    /// 1 if this end must not redirect.
    pub frozen: u8,
}

/// Value of [`End::member`]: all that this end sent by TCP has been read, so that
/// its next message is redirected, or it is latched. (Before, it may go by TCP: the
/// agent looks whether the reader noticed.)
pub const CONFIRMED: u8 = 2;

/// What sk_msg has made of a direction.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Stage {
    /// Nothing was redirected.
    #[default]
    Idle = 0,
    /// Everything is redirected.
    Engaged = 1,
    /// Nothing is redirected any more.
    Latched = 2,
}

/// The two ends of a same-node connection. The key in the map `pairs` is the
/// cookie of the client's socket (`SO_COOKIE`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pair {
    /// The end that connected.
    pub client: End,
    /// The end that accepted.
    pub server: End,
    /// Addresses, as the client sees them.
    key: SocketKey,
    /// `CLOCK_MONOTONIC` when the pair was found, nanoseconds.
    pub since_ns: u64,
    /// The Service port that the client connected to; all zeros if none.
    service: ServiceKey,
    /// What processes did to the two sockets.
    pub marks: Marks,
    /// What came of the last inspection: a [`SpliceReason`].
    pub verdict: u8,
    /// Promotions so far, up to 255.
    pub promotions: u8,
    reserved: [u8; 6],
}

/// Which end of the connection a socket is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Role {
    /// It connected.
    Client = 0,
    /// It was accepted.
    Server = 1,
}

/// Names one end: the key of the map `splice`, and what the socket storage
/// `ends` says of a socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct EndKey {
    /// The pair's key.
    pub pair: u64,
    role: u32,
    reserved: u32,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $value:literal, $name:literal;)+) => {
        /// Why a pair is not spliced, or not any more.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum SpliceReason {
            $($(#[$doc])* $variant = $value,)+
        }

        impl SpliceReason {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Of a byte that the programs have written.
            pub const fn from_u8(value: u8) -> Option<Self> {
                match value {
                    $($value => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// In the CLI and its JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

reasons! {
    /// Not inspected yet.
    New = 0, "new";
    /// Nothing is against it.
    Eligible = 1, "eligible";
    /// One of its sockets is not there any more.
    Gone = 2, "gone";
    /// It is being closed, or half closed.
    Closing = 3, "closing";
    /// A socket is in blocking mode.
    Blocking = 4, "blocking";
    /// `SO_RCVLOWAT` is not one.
    LowWater = 5, "low_water";
    /// `SO_ZEROCOPY`.
    ZeroCopy = 6, "zero_copy";
    /// `SO_TIMESTAMPING`, or an older form of it.
    Timestamps = 7, "timestamps";
    /// An upper layer protocol, such as kTLS.
    UpperLayer = 8, "upper_layer";
    /// `TCP_REPAIR`.
    Repair = 9, "repair";
    /// MPTCP.
    Mptcp = 10, "mptcp";
    /// A process that has it uses splice(2).
    SpliceCall = 11, "splice_call";
    /// Somebody else's BPF map has the socket.
    OtherMap = 12, "other_map";
    /// The kernel did not let it into the map.
    Refused = 13, "refused";
    /// Too little is sent to be worth it.
    Quiet = 14, "quiet";
    /// As many pairs are spliced as may be, or were promoted in this second.
    Budget = 15, "budget";
    /// TCP bytes were unread when something was to be redirected.
    Order = 16, "order";
    /// The reader holds as many bytes as it may.
    SlowReader = 17, "slow_reader";
    /// A stream of small messages, which TCP puts together.
    SmallWrites = 18, "small_writes";
    /// A stream of large messages, which TCP carries better.
    LargeWrites = 19, "large_writes";
    /// It did not come to a redirection in time.
    NotEngaged = 20, "not_engaged";
    /// The operator has switched the splice off.
    SwitchedOff = 21, "switched_off";
    /// Service or pod do not want it any more.
    NotWanted = 22, "not_wanted";
    /// The peer could not be found when something was to be redirected.
    PeerGone = 23, "peer_gone";
    /// A process did something else to a socket: see [`Mark`](crate::Mark).
    Marked = 24, "marked";
}

/// Whether a Service or a pod wants its connections spliced: the annotation
/// `shunt.dev/splice`.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Wish {
    /// It says nothing.
    #[default]
    None = 0,
    /// `"on"`.
    On = 1,
    /// `"off"`.
    Off = 2,
}

/// What the programs are told of splicing: the only value of `splice_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SpliceConfig {
    /// Bytes that an end may hold unread (of its `sk_rmem_alloc`) before the
    /// other one is latched.
    pub queue_bytes: u32,
    /// [`SpliceMode`].
    pub mode: u8,
    /// 1 if some address has a wish of its own.
    pub wishes: u8,
    /// The self-test's listener, network byte order; zeros if none runs.
    pub self_test_port: [u8; 2],
    /// [`SelfTest`]: which check has failed, if any. Only people read it.
    pub self_test: u32,
}

/// What became of the self-test: a check of the kernel that failed.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SelfTest {
    /// It was not run, or not yet.
    Pending = 0,
    /// None has failed.
    Passed = 1,
    /// Two sockets of one connection find each other.
    Registration = 2,
    /// They can be put into the map.
    Promotion = 3,
    /// Bytes arrive in order.
    Order = 4,
    /// Messages are redirected.
    Engagement = 5,
    /// Each message wakes an edge-triggered reader.
    Wakeups = 6,
    /// FIONREAD tells of redirected bytes.
    Fionread = 7,
    /// What a slow reader holds is counted and limited.
    SlowReader = 8,
    /// A pair gets back to TCP.
    Demotion = 9,
    /// The end of the stream comes last.
    End = 10,
    /// It could not be run.
    Failed = 11,
}

/// Which pairs are registered.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SpliceMode {
    /// None.
    #[default]
    Off = 0,
    /// Those of Services and pods that want it.
    OptIn = 1,
    /// All but those of Services and pods that do not want it.
    Auto = 2,
}

/// What the programs tell the agent, through the ring buffer `splice_events`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SpliceEvent {
    /// The pair's key; 0 if it is about all.
    pub pair: u64,
    /// [`EventKind`].
    pub kind: u32,
    /// A [`SpliceReason`].
    pub reason: u32,
}

/// What a [`SpliceEvent`] tells.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EventKind {
    /// A pair was found.
    Paired = 0,
    /// A direction is latched, for the reason that is told.
    Latched = 1,
    /// A process did something to a socket: see [`Mark`](crate::Mark).
    Marked = 2,
    /// splice(2) was called in a cgroup for the first time; `pair` is its id.
    Splicer = 3,
    /// A socket of a pair that was promoted is closed.
    Closed = 4,
}

const _: () = assert!(size_of::<End>() == 64 && align_of::<End>() == 8);
const _: () = assert!(size_of::<Pair>() == 224 && align_of::<Pair>() == 8);
const _: () = assert!(size_of::<EndKey>() == 16 && align_of::<EndKey>() == 8);
const _: () = assert!(size_of::<SpliceConfig>() == 12);
const _: () = assert!(size_of::<SpliceEvent>() == 16 && align_of::<SpliceEvent>() == 8);

impl End {
    /// All zeros.
    pub const EMPTY: Self = Self {
        tcp_sock: 0,
        netns_cookie: 0,
        messages: 0,
        bytes: 0,
        messages_tcp: 0,
        tgid: 0,
        run: 0,
        run_bytes: 0,
        run_peer_sends: 0,
        sends: 0,
        stage: Stage::Idle as u8,
        reason: 0,
        member: 0,
        frozen: 0,
    };

    /// Of the direction in which this end sends, `to` the other one.
    pub const fn direction(&self, to: &Self) -> Direction {
        if to.member == 0 && self.member == 0 {
            Direction::Plain
        } else if self.frozen != 0 {
            Direction::Frozen
        } else if self.stage == Stage::Latched as u8 {
            Direction::Latched
        } else if self.stage == Stage::Engaged as u8 {
            Direction::Engaged
        } else {
            Direction::Member
        }
    }

    /// Whether sk_msg has latched what this end sends.
    pub const fn is_latched(&self) -> bool {
        self.stage == Stage::Latched as u8
    }
}

impl Pair {
    /// All zeros.
    pub const EMPTY: Self = Self {
        client: End::EMPTY,
        server: End::EMPTY,
        key: SocketKey::EMPTY,
        since_ns: 0,
        service: ServiceKey::new([0; 16], [0; 2], 0),
        marks: Marks::NONE,
        verdict: SpliceReason::New as u8,
        promotions: 0,
        reserved: [0; 6],
    };

    /// Makes an empty one that of a client.
    #[inline(always)]
    pub const fn begin(&mut self, key: SocketKey, service: ServiceKey) {
        self.key = key;
        self.service = service;
    }

    /// Addresses, as the client sees them.
    #[inline(always)]
    pub const fn key(&self) -> &SocketKey {
        &self.key
    }

    /// The Service port that the client connected to, if it did.
    pub fn service(&self) -> Option<&ServiceKey> {
        (self.service.protocol() != 0).then_some(&self.service)
    }

    /// Whether both ends are known.
    #[inline(always)]
    pub const fn is_complete(&self) -> bool {
        self.server.tcp_sock != 0
    }

    /// Why the last inspection said no.
    pub const fn verdict(&self) -> Option<SpliceReason> {
        SpliceReason::from_u8(self.verdict)
    }
}

impl EndKey {
    /// The end of a pair.
    #[inline(always)]
    pub const fn new(pair: u64, role: Role) -> Self {
        Self {
            pair,
            role: role as u32,
            reserved: 0,
        }
    }

    /// Which end this is.
    #[inline(always)]
    pub const fn role(&self) -> Role {
        if self.role == Role::Client as u32 {
            Role::Client
        } else {
            Role::Server
        }
    }

    /// The other end of the same pair.
    #[inline(always)]
    pub const fn peer(&self) -> Self {
        let role = match self.role() {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        };
        Self::new(self.pair, role)
    }
}

impl SelfTest {
    /// Of the number in [`SpliceConfig`].
    pub const fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::Pending,
            1 => Self::Passed,
            2 => Self::Registration,
            3 => Self::Promotion,
            4 => Self::Order,
            5 => Self::Engagement,
            6 => Self::Wakeups,
            7 => Self::Fionread,
            8 => Self::SlowReader,
            9 => Self::Demotion,
            10 => Self::End,
            11 => Self::Failed,
            _ => return None,
        })
    }

    /// In words.
    pub const fn what(self) -> &'static str {
        match self {
            Self::Pending => "not run yet",
            Self::Passed => "passed",
            Self::Registration => "the two sockets of a connection did not find each other",
            Self::Promotion => "a connection could not be promoted",
            Self::Order => "bytes did not arrive in order",
            Self::Engagement => "messages were not redirected",
            Self::Wakeups => "a message did not wake its edge-triggered reader",
            Self::Fionread => "FIONREAD does not tell of redirected bytes",
            Self::SlowReader => "what a slow reader holds is not limited",
            Self::Demotion => "a connection did not get back to TCP",
            Self::End => "the end of a stream did not come last",
            Self::Failed => "it could not be run; the agent's log says why",
        }
    }
}

impl SpliceEvent {
    /// As the ring buffer holds it; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        // SAFETY: the length is the type's, for which all bytes are valid, and
        // the read needs no alignment.
        (bytes.len() == size_of::<Self>())
            .then(|| unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

impl Wish {
    /// Of a byte of a map; what is not known counts as nothing said.
    #[inline(always)]
    pub const fn from_u8(value: u8) -> Self {
        match value {
            1 => Self::On,
            2 => Self::Off,
            _ => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_their_numbers_and_have_names_of_their_own() {
        for (index, reason) in SpliceReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
            assert_eq!(SpliceReason::from_u8(index as u8), Some(*reason));
            let same = SpliceReason::ALL
                .iter()
                .filter(|it| it.name() == reason.name());
            assert_eq!(same.count(), 1, "{}", reason.name());
        }
        assert_eq!(SpliceReason::from_u8(SpliceReason::ALL.len() as u8), None);
    }

    #[test]
    fn a_direction_is_what_its_flags_say() {
        let member = End {
            member: 1,
            ..End::EMPTY
        };
        let stage = |stage: Stage, frozen| End {
            stage: stage as u8,
            frozen,
            ..member
        };
        for (from, to, expected) in [
            (End::EMPTY, End::EMPTY, Direction::Plain),
            (member, member, Direction::Member),
            (stage(Stage::Engaged, 0), member, Direction::Engaged),
            (stage(Stage::Latched, 0), member, Direction::Latched),
            (stage(Stage::Engaged, 1), member, Direction::Frozen),
            (stage(Stage::Latched, 1), member, Direction::Frozen),
        ] {
            assert_eq!(from.direction(&to), expected);
        }
    }
}
