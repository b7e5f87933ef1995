//! The stream that one end receives.

use std::time::{Duration, Instant};

use lab::pattern::{Pattern, Random, Verifier};

use super::super::plan::{End, size};
use super::Step;

pub(super) struct Receiver {
    verifier: Verifier,
    length: u64,
    random: Random,
    bits: u64,
    /// Once in so many reads, up to so many milliseconds.
    rest: Option<(u64, u64)>,
    /// At this position, for so many milliseconds.
    stop: Option<(u64, u64)>,
    resumes: Option<Instant>,
    ended: bool,
}

impl Receiver {
    pub(super) fn new(end: &End, pattern: Pattern, random: Random) -> Self {
        Self {
            verifier: Verifier::new(pattern),
            length: pattern.length(),
            random,
            bits: end.read_bits,
            rest: end.rest,
            stop: end.stop,
            resumes: None,
            ended: false,
        }
    }

    pub(super) fn step(&mut self, now: Instant) -> Step {
        if self.ended {
            return Step::Done;
        }
        if let Some(resumes) = self.resumes {
            if resumes > now {
                return Step::Rest(resumes);
            }
            self.resumes = None;
        }
        let size = size(&mut self.random, self.bits);
        Step::Move(usize::try_from(size).expect("a read has at most 256 KiB"))
    }

    pub(super) fn accept(&mut self, bytes: &[u8], now: Instant) {
        self.verifier.accept(bytes);
        let mut pause = 0;
        if let Some((reads, most)) = self.rest
            && self.random.below(reads) == 0
        {
            pause = 1 + self.random.below(most);
        }
        let received = self.verifier.received();
        if let Some((_, stop)) = self.stop.take_if(|(position, _)| received >= *position) {
            pause = stop;
        }
        if pause > 0 {
            self.resumes = Some(now + Duration::from_millis(pause));
        }
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    pub(super) fn received(&self) -> u64 {
        self.verifier.received()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.verifier.received() == self.length
    }

    /// What is wrong with the bytes, if something is.
    pub(super) fn wrong(&self) -> Option<String> {
        let wrong = self.verifier.wrong();
        (wrong > 0).then(|| {
            let first = self.verifier.first_wrong();
            format!("{wrong} wrong bytes, first {first:?}; {}", self.describe())
        })
    }

    pub(super) fn describe(&self) -> String {
        let end = if self.ended { ", end seen" } else { "" };
        format!("received {} of {}{end}", self.received(), self.length)
    }
}
