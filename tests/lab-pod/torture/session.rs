//! One end of a connection, without its socket: what it may read and write now,
//! whether what came is right, and whether an error belongs to the plan. Every
//! driver (event loop, tokio, threads) asks this.

mod receiver;
mod sender;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lab::pattern::{Pattern, Random};
use lab::torture::{Fault, FaultKind};

use super::options::{self, peek};
use super::plan::{Ending, Mark, Plan, Side};
use super::tally::Tally;
use crate::socket::error_name;
use receiver::Receiver;
use sender::Sender;

/// How long SO_RCVLOWAT stays 2.
const LOW_WATER_TIME: Duration = Duration::from_millis(20);
/// How long a reader that is going to close waits, again and again, for bytes to
/// leave unread; and how often.
const UNREAD_PAUSE: Duration = Duration::from_millis(10);
const UNREAD_PAUSES: u32 = 30;

/// What may be done in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Read or write up to so many bytes.
    Move(usize),
    /// Nothing before then.
    Rest(Instant),
    /// Nothing before the other direction has moved.
    Wait,
    /// All is written: SHUT_WR, once.
    ShutDown,
    /// Nothing any more.
    Done,
}

/// How the connection's end is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    Plain,
    /// With SO_LINGER 0.
    Reset,
}

pub(super) struct Session {
    pub(super) plan: Arc<Plan>,
    side: Side,
    sender: Sender,
    receiver: Receiver,
    mark: Option<(Mark, u64)>,
    low_water_until: Option<Instant>,
    /// When the reader looks whether bytes are unread, and how often yet.
    unread_look: Option<(Instant, u32)>,
    /// An error that the plan allows has come: what follows of it is allowed too.
    broken: bool,
    fault: Option<(FaultKind, String, String)>,
    last_move: Instant,
    notes: Vec<String>,
}

impl Session {
    pub(super) fn new(plan: Arc<Plan>, side: Side, now: Instant) -> Self {
        let (own, peer) = (plan.end(side), plan.end(side.peer()));
        let pattern = |side, length| Pattern::new(plan.stream_seed(side), length);
        let random = |salt: u64| Random::new(plan.stream_seed(side) ^ salt);
        Self {
            sender: Sender::new(own, pattern(side, own.send), random(1)),
            receiver: Receiver::new(own, pattern(side.peer(), peer.send), random(2)),
            mark: own.mark,
            low_water_until: None,
            unread_look: None,
            broken: false,
            fault: None,
            last_move: now,
            notes: Vec::new(),
            side,
            plan,
        }
    }

    /// What the reader may do.
    pub(super) fn read_step(&mut self, now: Instant) -> Step {
        if self.unread_look.is_some() {
            return Step::Wait;
        }
        self.receiver.step(now)
    }

    /// What the writer may do.
    pub(super) fn write_step(&mut self, now: Instant) -> Step {
        if self.broken {
            return Step::Done;
        }
        let half_close = self.plan.end(self.side).half_close;
        match self
            .sender
            .step(self.receiver.received(), self.receiver.ended(), now)
        {
            Step::ShutDown if !half_close => Step::Done,
            step => step,
        }
    }

    /// The bytes that a write of this size carries now.
    pub(super) fn fill(&self, buffer: &mut [u8]) {
        self.sender.fill(buffer);
    }

    pub(super) fn wrote(&mut self, count: usize, now: Instant) {
        self.sender.wrote(count);
        self.last_move = now;
    }

    pub(super) fn has_shut_down(&mut self) {
        self.sender.shut_down = true;
    }

    /// Takes what a read gave; nothing is the end.
    pub(super) fn read(&mut self, bytes: &[u8], now: Instant) {
        self.last_move = now;
        if !bytes.is_empty() {
            self.receiver.accept(bytes, now);
            if let Some(what) = self.receiver.wrong() {
                self.set_fault(FaultKind::Wrong, "wrong byte", what);
            }
            return;
        }
        self.receiver.end();
        if self.receiver.is_complete() || self.broken {
            return;
        }
        match self.plan.ending {
            Ending::Killed { side } if side != self.side => self.broken = true,
            Ending::Unread { by, .. } if by != self.side => {
                self.notes.push("end instead of ECONNRESET".to_owned());
                self.broken = true;
            }
            _ => {
                let state = self.receiver.describe();
                self.set_fault(FaultKind::Wrong, "end before all came", state);
            }
        }
    }

    /// Takes an error other than EAGAIN. The connection is over for this side.
    pub(super) fn failed(&mut self, call: &str, error: &io::Error) {
        let name = error_name(error);
        let reset = matches!(name.as_str(), "ECONNRESET" | "EPIPE")
            || name == "ENOTCONN" && call == "shutdown";
        if reset && (self.peer_may_break() || self.broken) {
            self.broken = true;
            if call == "recv" {
                self.receiver.end();
            }
            return;
        }
        let state = self.describe(None);
        self.set_fault(FaultKind::Error, &format!("{call}: {name}"), state);
    }

    /// Nothing moved for too long: says what waits where.
    pub(super) fn hung(&mut self, fd: BorrowedFd<'_>) {
        let unread = options::unread(fd);
        let what = match (unread, peek(fd)) {
            (1.., _) => "hung with bytes unread",
            (_, Ok(1..)) => "hung with bytes to recv that FIONREAD does not show",
            (_, Ok(0)) if !self.receiver.ended() => "hung with the end unread",
            _ => "hung, nothing to read",
        };
        let state = self.describe(Some(fd));
        self.set_fault(FaultKind::Hung, what, state);
    }

    /// Marks the socket when it is time, and looks after SO_RCVLOWAT.
    pub(super) fn tend(&mut self, fd: BorrowedFd<'_>, now: Instant) {
        if self.low_water_until.is_some_and(|until| until <= now) {
            self.low_water_until = None;
            options::set_low_water(fd, 1);
        }
        let moved = self.sender.sent() + self.receiver.received();
        if let Some((mark, _)) = self.mark.take_if(|(_, after)| moved >= *after) {
            self.notes.push(format!("marked with {}", mark.name()));
            options::set_mark(fd, mark);
            if mark == Mark::LowWater {
                self.low_water_until = Some(now + LOW_WATER_TIME);
            }
        }
    }

    /// Whether it is time to close, and how.
    pub(super) fn close_now(&mut self, fd: BorrowedFd<'_>, now: Instant) -> Option<Close> {
        if self.fault.is_some() {
            return Some(Close::Reset);
        }
        let moved = self.sender.sent() + self.receiver.received();
        match self.plan.ending {
            Ending::Reset { by, after } if by == self.side && moved >= after => {
                return Some(Close::Reset);
            }
            Ending::Unread { by, after } if by == self.side && moved >= after => {
                return self.close_with_unread(fd, now);
            }
            _ => {}
        }
        if self.broken {
            return self.receiver.ended().then_some(Close::Plain);
        }
        let end = self.plan.end(self.side);
        let received = if end.half_close {
            self.receiver.ended()
        } else {
            self.receiver.is_complete()
        };
        let sent = self.sender.is_complete() && (self.sender.shut_down || !end.half_close);
        (received && sent).then_some(Close::Plain)
    }

    /// When something is to be done though nothing moves; at the latest to look
    /// for a hang.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let look = self.unread_look.map(|(at, _)| at);
        self.low_water_until.into_iter().chain(look).min()
    }

    /// Whether neither direction has moved for so long, rests left out.
    pub(super) fn is_stuck(&mut self, patience: Duration, now: Instant) -> bool {
        let resting = |step| matches!(step, Step::Rest(_));
        if resting(self.read_step(now)) || resting(self.write_step(now)) {
            // Counted from the end of the rest.
            self.last_move = self.last_move.max(now - patience / 2);
        }
        now - self.last_move > patience
    }

    /// Hands in what is known at the end.
    pub(super) fn report(self, tally: &Tally) {
        let style = self.plan.end(self.side).style;
        let mut report = tally.lock();
        report.connections += 1;
        report.bytes += self.receiver.received();
        let scenario = self.plan.scenario.to_string();
        *report.scenarios.entry(scenario.clone()).or_default() += 1;
        *report.styles.entry(style.name().to_owned()).or_default() += 1;
        for note in &self.notes {
            report.note(note);
        }
        if let Some((kind, what, state)) = self.fault {
            report.fault(Fault {
                id: self.plan.id,
                scenario,
                side: self.side.name().to_owned(),
                style: format!("{}; {}", style.name(), self.notes.join(", ")),
                kind,
                what,
                state,
            });
        }
    }

    fn close_with_unread(&mut self, fd: BorrowedFd<'_>, now: Instant) -> Option<Close> {
        let (at, looks) = *self.unread_look.get_or_insert((now + UNREAD_PAUSE, 0));
        if at > now {
            return None;
        }
        let unread = options::unread(fd) > 0;
        if unread
            || looks == UNREAD_PAUSES
            || self.sender.is_complete() && self.receiver.is_complete()
        {
            let note = if unread {
                "closed with bytes unread"
            } else {
                "no byte to leave unread"
            };
            self.notes.push(note.to_owned());
            return Some(Close::Plain);
        }
        self.unread_look = Some((now + UNREAD_PAUSE, looks + 1));
        None
    }

    fn peer_may_break(&self) -> bool {
        match self.plan.ending {
            Ending::Orderly => false,
            Ending::Reset { by, .. } | Ending::Unread { by, .. } => by != self.side,
            Ending::Killed { side } => side != self.side,
        }
    }

    fn set_fault(&mut self, kind: FaultKind, what: &str, state: String) {
        self.fault
            .get_or_insert_with(|| (kind, what.to_owned(), state));
    }

    fn describe(&self, fd: Option<BorrowedFd<'_>>) -> String {
        let mut text = format!("{}; {}", self.sender.describe(), self.receiver.describe());
        if let Some(fd) = fd {
            text += "; ";
            text += &options::describe(fd);
        }
        text
    }
}
