//! Which endpoint of a Service port a client gets; pure. The programs look slots
//! up in the kernel's map, and tests in a slice.

use crate::{Affinity, Flags, ServiceEntry, Slot, TierRange};

/// More look-ups than a binary search of any tier takes:
/// [`capacity::SLOTS`](crate::capacity::SLOTS) is 2^19.
const SEARCH_STEPS: u32 = 20;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// What a client gets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Choice<'s> {
    /// This endpoint.
    Endpoint(&'s Slot, Source),
    /// Nothing is usable.
    Nothing,
    /// A slot is missing: the entry has been replaced.
    Torn,
}

/// Where an endpoint comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// The client had it before.
    Kept,
    /// It was drawn from a tier with this scope.
    Drawn(u32),
}

impl ServiceEntry {
    /// That of `before` if it is in the set, or else a random endpoint of the
    /// first tier that has any. `below` gives a random number below another,
    /// `slot` the slot at an index.
    #[inline(always)]
    pub fn choose<'s>(
        &self,
        before: Option<&Slot>,
        below: impl FnOnce(u32) -> u32,
        slot: impl Fn(u32) -> Option<&'s Slot> + Copy,
    ) -> Choice<'s> {
        let mut source = Source::Kept;
        let mut chosen = before.and_then(|before| self.find(before, slot));
        if chosen.is_none() {
            let Some(tier) = self.first_tier() else {
                return Choice::Nothing;
            };
            source = Source::Drawn(tier.scope());
            chosen = slot(tier.start() + below(tier.count()));
        }
        chosen.map_or(Choice::Torn, |slot| Choice::Endpoint(slot, source))
    }

    /// What a client that is given an endpoint now keeps to; `None` without
    /// session affinity.
    #[inline(always)]
    pub const fn affinity(&self, endpoint: Slot, now_ns: u64) -> Option<Affinity> {
        match self.affinity_seconds() {
            0 => None,
            seconds => Some(Affinity::new(
                endpoint,
                now_ns + seconds as u64 * NS_PER_SECOND,
            )),
        }
    }

    /// `None` if nothing is usable.
    #[inline(always)]
    fn first_tier(&self) -> Option<&TierRange> {
        if self.has(Flags::REFUSE) {
            return None;
        }
        self.tiers().iter().find(|tier| tier.count() > 0)
    }

    #[inline(always)]
    fn last_tier(&self) -> Option<&TierRange> {
        if self.has(Flags::REFUSE) {
            return None;
        }
        self.tiers().iter().rev().find(|tier| tier.count() > 0)
    }

    /// The slot of an endpoint, if it is in the set: each tier is a part of the
    /// next, so that the last one has all, sorted.
    #[inline(always)]
    fn find<'s>(&self, wanted: &Slot, slot: impl Fn(u32) -> Option<&'s Slot>) -> Option<&'s Slot> {
        let tier = self.last_tier()?;
        let (mut low, mut high) = (0, tier.count());
        for _ in 0..SEARCH_STEPS {
            if low >= high {
                break;
            }
            let middle = (low + high) / 2;
            if slot(tier.start() + middle)?.is_before(wanted) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let slot = slot(tier.start() + low)?;
        let found = low < tier.count() && slot.is_at(wanted.address(), wanted.port());
        found.then_some(slot)
    }
}
