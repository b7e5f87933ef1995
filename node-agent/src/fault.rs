//! Faults of the agent that tests ask for: a rule of the splice that is not kept, or
//! a crash at a chosen point. They show that the tests find what such a rule is for,
//! and that the next agent takes over from any point (`tests/faults.rs`).
//!
//! Invariant: only `shunt-faulty` has them, which is built with the feature
//! `fault-injection` and never installed.

use std::sync::OnceLock;

use clap::ValueEnum;
use nix::sys::signal::{Signal, raise};
use shunt_common::{EndState, Operation, Task};

/// What is to go wrong.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Fault {
    /// Messages are redirected whether TCP bytes before them are unread or not.
    NoOrder,
    /// No reader is woken.
    NoKick,
    /// Crash when told of a new pair.
    CrashFound,
    /// Crash when told of a latch.
    CrashTold,
    /// Crash when the kernel has promoted a pair.
    CrashPromoted,
    /// Crash when the kernel was told to rely on a pair.
    CrashConfirmed,
    /// Crash when the kernel has frozen a pair.
    CrashFrozen,
    /// Crash when the kernel has taken an end out of the map, and nobody was woken.
    CrashReleased,
}

static FAULT: OnceLock<Fault> = OnceLock::new();

/// Asks for a fault. Only the first call counts.
pub fn set(fault: Fault) {
    FAULT.get_or_init(|| fault);
}

/// Whether this fault was asked for.
pub(crate) fn is(fault: Fault) -> bool {
    FAULT.get() == Some(&fault)
}

/// Ends this process at once, if this crash was asked for.
pub(crate) fn crash_at(point: Fault) {
    if is(point) {
        // Nothing can be done if there is no signal; the test will say so.
        let _ = raise(Signal::SIGKILL);
    }
}

/// As [`crash_at`], where the kernel has done these tasks and nobody knows yet.
pub(crate) fn crash_after(tasks: &[Task]) {
    for task in tasks {
        let is = |operation: Operation| task.operation == operation as u32;
        let is_out = |end: &EndState| end.has(EndState::FOUND) && !end.has(EndState::MEMBER);
        if is(Operation::Promote) && !task.ends.iter().any(is_out) {
            crash_at(Fault::CrashPromoted);
        } else if is(Operation::Confirm) {
            crash_at(Fault::CrashConfirmed);
        } else if is(Operation::Freeze) {
            crash_at(Fault::CrashFrozen);
        } else if is(Operation::Release) && task.ends.iter().any(is_out) {
            crash_at(Fault::CrashReleased);
        }
    }
}
