//! What is done next with a pair; pure.
//!
//! ```text
//!             ┌──────── not now ────────┐
//!             v                         │
//!  ──> Watching ── eligible, busy ──> Promoting ── is in ──> Verifying ── settled ──> Confirming
//!             ^                                                  │                        │ still
//!             │                                                  │ stays unsettled,       v settled
//!             │                                                  v latched, marked, off  Spliced
//!             └──────────── Cooling <── both out, woken ── Draining <───── Freezing <─────┘
//! ```
//!
//! Each phase but `Spliced` and `Cooling` has an operation that the kernel is
//! asked for, and its answer is the next event. A pair that is not there any more
//! is forgotten, whatever phase it is in.

use std::time::Duration;

use shunt_common::{EndState, Operation, Pair, Role, SpliceReason, Task};

/// How far a pair is.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Phase {
    /// Plain TCP; looked at now and then.
    Watching {
        /// Segments of both ends, when it was looked at last.
        segments: u32,
        /// Looks in a row that found nothing to do.
        idle: u32,
    },
    /// To be put into the map.
    Promoting {
        /// Segments since the look before: the busiest go first.
        busy: u32,
    },
    /// In the map; whether each direction can be relied on is not known yet.
    Verifying {
        /// Looks so far.
        looks: u32,
        /// What each reader had read of TCP at the last look.
        copied: [u32; 2],
    },
    /// Settled, it seems: a send that had begun before the promotion may still be on
    /// its way, so the kernel is told to rely on it, and then it is looked at again.
    Confirming,
    /// In the map, and in the kernel's hands until it gives a direction up.
    Spliced,
    /// No direction may redirect any more, as soon as the kernel is told.
    Freezing(SpliceReason),
    /// To be taken out of the map, each end as soon as nothing is lost.
    Draining {
        /// Why.
        reason: SpliceReason,
        /// Attempts so far.
        looks: u32,
        /// What each reader had read of TCP at the last attempt.
        copied: [u32; 2],
    },
    /// Plain TCP again; not to be promoted for a while.
    Cooling(SpliceReason),
}

/// What happened.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The kernel has answered the phase's operation.
    Answer(&'a Task),
    /// The pair has to go back to TCP.
    Leave(SpliceReason),
    /// What it waited for has passed.
    Due,
}

/// What to do then.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Step {
    /// How far the pair is now.
    pub phase: Phase,
    /// When to look again; never, if `None`.
    pub wait: Option<Duration>,
    /// Ends whose readers are to be woken, client first.
    pub kick: [bool; 2],
}

/// How long a pair may take to settle: so many looks, each after twice the wait.
const VERIFY_LOOKS: u32 = 9;
const VERIFY_WAIT: Duration = Duration::from_micros(500);
/// Longer than a send takes that had begun before the promotion.
const CONFIRM_WAIT: Duration = Duration::from_millis(2);
/// Between attempts to take a pair out.
const DRAIN_WAIT: Duration = Duration::from_micros(500);
const DRAIN_WAIT_MAX: Duration = Duration::from_millis(64);
/// Between looks at a pair that is not promoted.
const WATCH_WAIT: Duration = Duration::from_millis(200);
const WATCH_WAIT_MAX: Duration = Duration::from_secs(5);
/// Before a pair that was given up is looked at again.
const COOL: Duration = Duration::from_secs(1);
const COOL_STREAM: Duration = Duration::from_secs(10);

impl Phase {
    /// A pair that was just found.
    pub const NEW: Self = Self::Watching {
        segments: 0,
        idle: 0,
    };

    /// A pair whose earlier phases nobody knows, as the kernel has it.
    pub fn adopt(pair: &Pair) -> Self {
        let ends = [&pair.client, &pair.server];
        let members = ends.iter().filter(|end| end.member != 0).count();
        let marks = pair.marks.all();
        let is_given_up = ends.iter().any(|end| end.is_latched() || end.frozen != 0);
        match members {
            0 if pair.promotions == 0 => Self::NEW,
            // Who took it out may not have come to wake the readers.
            0 => Self::Draining {
                reason: SpliceReason::NotEngaged,
                looks: 0,
                copied: [0; 2],
            },
            _ if marks.is_some() => Self::Freezing(marks.reason()),
            2 if !is_given_up => Self::verifying(),
            _ => Self::Freezing(SpliceReason::NotEngaged),
        }
    }

    /// What the kernel is asked for in this phase.
    pub const fn operation(&self) -> Option<Operation> {
        match self {
            Self::Watching { .. } | Self::Verifying { .. } => Some(Operation::Inspect),
            Self::Promoting { .. } => Some(Operation::Promote),
            Self::Confirming => Some(Operation::Confirm),
            Self::Freezing(_) => Some(Operation::Freeze),
            Self::Draining { .. } => Some(Operation::Release),
            Self::Spliced | Self::Cooling(_) => None,
        }
    }

    /// Whether the pair is in the map, or may be.
    pub const fn is_member(&self) -> bool {
        !matches!(self, Self::Watching { .. } | Self::Cooling(_))
    }

    const fn verifying() -> Self {
        Self::Verifying {
            looks: 0,
            copied: [0; 2],
        }
    }
}

/// The next phase. `None`: the pair is not there any more.
pub fn step(phase: Phase, event: Event<'_>) -> Option<Step> {
    match (phase, event) {
        (_, Event::Answer(task)) if is_gone(task) && !is_member(task) => None,
        (Phase::Watching { segments, idle }, Event::Answer(task)) => {
            Some(watched(segments, idle, task))
        }
        (Phase::Promoting { .. }, Event::Answer(task)) => Some(promoted(task)),
        (Phase::Verifying { looks, copied }, Event::Answer(task)) => {
            Some(verified(looks, copied, task))
        }
        (Phase::Confirming, Event::Answer(task)) => Some(confirmed(task)),
        (Phase::Freezing(reason), Event::Answer(_)) => {
            let phase = Phase::Draining {
                reason,
                looks: 0,
                copied: [0; 2],
            };
            Some(soon(phase))
        }
        (
            Phase::Draining {
                reason,
                looks,
                copied,
            },
            Event::Answer(task),
        ) => Some(drained(reason, looks, copied, task)),
        (Phase::Cooling(_), Event::Due) => Some(soon(Phase::NEW)),
        (phase @ (Phase::Freezing(_) | Phase::Draining { .. }), Event::Leave(_)) => {
            Some(soon(phase))
        }
        // Nothing is in the map.
        (phase @ (Phase::Watching { .. } | Phase::Cooling(_)), Event::Leave(_)) => {
            let wait = Some(WATCH_WAIT);
            Some(Step {
                phase,
                wait,
                kick: [false; 2],
            })
        }
        (_, Event::Leave(reason)) => Some(soon(Phase::Freezing(reason))),
        (phase, _) => Some(soon(phase)),
    }
}

/// Whether a look at a pair found enough to do to promote it, were it the only
/// one. Both what was sent by now and whether nothing is against it count.
fn watched(before: u32, idle: u32, task: &Task) -> Step {
    let segments = segments(task);
    let busy = segments.wrapping_sub(before);
    let is_busy = busy >= BUSY_SEGMENTS;
    if task.verdict == SpliceReason::Eligible as u32 && is_busy {
        return soon(Phase::Promoting { busy });
    }
    let idle = if is_busy { 0 } else { idle + 1 };
    // One that is against it rarely changes its mind.
    let wait = backoff(WATCH_WAIT, idle.max(patience(task.verdict)), WATCH_WAIT_MAX);
    later(Phase::Watching { segments, idle }, wait)
}

/// Segments with data, of both ends since the last look, that are worth it.
const BUSY_SEGMENTS: u32 = 4;

const fn patience(verdict: u32) -> u32 {
    if verdict == SpliceReason::Eligible as u32 {
        0
    } else {
        3
    }
}

fn promoted(task: &Task) -> Step {
    if task.verdict == SpliceReason::Eligible as u32 {
        return soon(Phase::verifying());
    }
    if is_member(task) {
        // One end is in the map, the other was refused.
        return soon(Phase::Freezing(SpliceReason::Refused));
    }
    let phase = Phase::Watching {
        segments: segments(task),
        idle: 0,
    };
    later(phase, WATCH_WAIT)
}

fn verified(looks: u32, before: [u32; 2], task: &Task) -> Step {
    if task.verdict == SpliceReason::SpliceCall as u32 {
        return soon(Phase::Freezing(SpliceReason::SpliceCall));
    }
    if task.ends.iter().any(|end| end.has(EndState::LATCHED)) {
        return soon(Phase::Freezing(SpliceReason::NotEngaged));
    }
    if is_settled(task, Role::Client) && is_settled(task, Role::Server) {
        return later(Phase::Confirming, CONFIRM_WAIT);
    }
    if looks >= VERIFY_LOOKS {
        return soon(Phase::Freezing(SpliceReason::NotEngaged));
    }
    Step {
        phase: Phase::Verifying {
            looks: looks + 1,
            copied: task.ends.map(|end| end.copied_seq),
        },
        wait: Some(backoff(VERIFY_WAIT, looks, DRAIN_WAIT_MAX)),
        kick: stalled(looks, before, task),
    }
}

fn confirmed(task: &Task) -> Step {
    if task.verdict == SpliceReason::SpliceCall as u32 {
        return soon(Phase::Freezing(SpliceReason::SpliceCall));
    }
    let is_settled = is_settled(task, Role::Client) && is_settled(task, Role::Server);
    if !is_settled || task.ends.iter().any(|end| end.has(EndState::LATCHED)) {
        return soon(Phase::Freezing(SpliceReason::NotEngaged));
    }
    Step {
        phase: Phase::Spliced,
        wait: None,
        kick: [false; 2],
    }
}

fn drained(reason: SpliceReason, looks: u32, before: [u32; 2], task: &Task) -> Step {
    if is_member(task) {
        return Step {
            phase: Phase::Draining {
                reason,
                looks: looks + 1,
                copied: task.ends.map(|end| end.copied_seq),
            },
            wait: Some(backoff(DRAIN_WAIT, looks, DRAIN_WAIT_MAX)),
            kick: stalled(looks, before, task),
        };
    }
    Step {
        phase: Phase::Cooling(reason),
        wait: Some(match reason {
            SpliceReason::SmallWrites | SpliceReason::LargeWrites | SpliceReason::SlowReader => {
                COOL_STREAM
            }
            _ => COOL,
        }),
        // What came by TCP meanwhile may not have woken its reader.
        kick: task
            .ends
            .map(|end| end.has(EndState::FOUND) && end.has_tcp_unread()),
    }
}

/// Whether all that this end sent by TCP has been read, so that its next message
/// is redirected, or one was.
fn is_settled(task: &Task, role: Role) -> bool {
    let (own, peer) = match role {
        Role::Client => (&task.ends[0], &task.ends[1]),
        Role::Server => (&task.ends[1], &task.ends[0]),
    };
    own.has(EndState::ENGAGED) || own.write_seq == peer.copied_seq
}

/// Readers with unread TCP bytes who have read nothing since the last look: they
/// may not know of them. (FIONREAD tells only of redirected bytes, and a short
/// read is taken for the end.)
fn stalled(looks: u32, before: [u32; 2], task: &Task) -> [bool; 2] {
    [0, 1].map(|index| {
        let end = &task.ends[index];
        looks > 0
            && end.has(EndState::FOUND)
            && end.has_tcp_unread()
            && !end.has(EndState::REDIRECTED_UNREAD)
            && end.copied_seq == before[index]
    })
}

fn segments(task: &Task) -> u32 {
    let [client, server] = &task.ends;
    client.segments.wrapping_add(server.segments)
}

/// The kernel does not know the pair, or neither of its sockets.
fn is_gone(task: &Task) -> bool {
    !task.ends.iter().any(|end| end.has(EndState::FOUND))
}

fn is_member(task: &Task) -> bool {
    task.ends
        .iter()
        .any(|end| end.has(EndState::FOUND | EndState::MEMBER))
}

fn backoff(wait: Duration, times: u32, max: Duration) -> Duration {
    wait.saturating_mul(1 << times.min(16)).min(max)
}

const fn soon(phase: Phase) -> Step {
    later(phase, Duration::ZERO)
}

const fn later(phase: Phase, wait: Duration) -> Step {
    Step {
        phase,
        wait: Some(wait),
        kick: [false; 2],
    }
}
