//! The stream that one end sends.

use std::time::{Duration, Instant};

use lab::pattern::{Pattern, Random};

use super::super::plan::{End, Gate, WhenReceived};
use super::Step;

pub(super) struct Sender {
    pattern: Pattern,
    random: Random,
    gates: Vec<Gate>,
    bits: u64,
    position: u64,
    /// The gate that is to be passed, and when that is allowed, once it is known.
    gate: usize,
    opens: Option<Instant>,
    pub(super) shut_down: bool,
}

impl Sender {
    pub(super) fn new(end: &End, pattern: Pattern, random: Random) -> Self {
        Self {
            pattern,
            random,
            gates: end.gates.clone(),
            bits: end.write_bits,
            position: 0,
            gate: 0,
            opens: None,
            shut_down: false,
        }
    }

    pub(super) fn step(&mut self, received: u64, ended: bool, now: Instant) -> Step {
        while self
            .gates
            .get(self.gate)
            .is_some_and(|gate| gate.until == self.position)
        {
            self.gate += 1;
            self.opens = None;
        }
        let Some(gate) = self.gates.get(self.gate) else {
            return if self.shut_down {
                Step::Done
            } else {
                Step::ShutDown
            };
        };
        let open = match gate.when {
            WhenReceived::AtLeast(bytes) => received >= bytes,
            WhenReceived::End => ended,
        };
        if !open {
            return Step::Wait;
        }
        let pause = Duration::from_millis(gate.pause_ms);
        let opens = *self.opens.get_or_insert(now + pause);
        if opens > now {
            return Step::Rest(opens);
        }
        let size = crate::torture::plan::size(&mut self.random, self.bits);
        let size = size.min(gate.until - self.position);
        Step::Move(usize::try_from(size).expect("a write has at most 256 KiB"))
    }

    pub(super) fn fill(&self, buffer: &mut [u8]) {
        self.pattern.fill(self.position, buffer);
    }

    pub(super) fn wrote(&mut self, count: usize) {
        self.position += count as u64;
    }

    pub(super) fn sent(&self) -> u64 {
        self.position
    }

    pub(super) fn is_complete(&self) -> bool {
        self.position == self.pattern.length()
    }

    pub(super) fn describe(&self) -> String {
        let waits = match self.gates.get(self.gate) {
            _ if self.shut_down => ", shut down".to_owned(),
            Some(gate) => format!(", next {gate:?}"),
            None => String::new(),
        };
        format!("sent {} of {}{waits}", self.position, self.pattern.length())
    }
}
