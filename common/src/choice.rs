//! Which endpoint of a Service port a client gets; pure. The programs look slots
//! up in the kernel's map, and tests in a slice.

use core::num::NonZeroU32;

use crate::{Affinity, Flags, ServiceEntry, Slot, TierRange};

/// More look-ups than a binary search of any tier takes:
/// [`capacity::SLOTS`](crate::capacity::SLOTS) is 2^19.
const SEARCH_STEPS: u32 = 20;
/// How many slots of the first tier are asked whether they have room, and how
/// many of each other one.
const SCAN_STEPS: u32 = 32;
const TRIES: u32 = 16;
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
    /// The same, since no endpoint of an earlier tier has room.
    Spilled(u32),
}

impl ServiceEntry {
    /// That of `before` if it is in the set, or else a random endpoint of the
    /// first tier that has any.
    ///
    /// With a `limit` of connections other than 0, the first tier that has one
    /// with room; if none has, nobody is turned away. `below` gives a random
    /// number below another, `slot` the slot at an index; `has_room` is whether
    /// an endpoint of this node holds less than the limit.
    #[inline(always)]
    pub fn choose<'s>(
        &self,
        before: Option<&Slot>,
        limit: u32,
        below: impl Fn(u32) -> u32 + Copy,
        slot: impl Fn(u32) -> Option<&'s Slot> + Copy,
        has_room: impl Fn(&Slot, u32) -> bool + Copy,
    ) -> Choice<'s> {
        if let Some(kept) = before.and_then(|before| self.find(before, slot)) {
            return Choice::Endpoint(kept, Source::Kept);
        }
        let Some(first) = self.first_tier() else {
            return Choice::Nothing;
        };
        let found = if limit == 0 {
            None
        } else {
            let has_room = |index| {
                // A slot that is missing: the caller will find out.
                slot(index).is_some_and(|slot| !slot.is_local() || has_room(slot, limit))
            };
            self.with_room(below, has_room)
                .filter(|(tier, _)| tier.count() > 0)
        };
        let (tier, index) = found.unwrap_or_else(|| (first, below(first.count())));
        let source = if tier.start() == first.start() {
            Source::Drawn(tier.scope())
        } else {
            Source::Spilled(tier.scope())
        };
        slot(tier.start() + index).map_or(Choice::Torn, |slot| Choice::Endpoint(slot, source))
    }

    /// A tier and the index of a slot of it that has room: of the first tier in
    /// which one is found.
    ///
    /// Of the first tier each slot is asked in turn, from a random one on. Of the
    /// others some are tried at random: the one that follows the full ones of
    /// this node must not get all that they do not take.
    ///
    /// What the verifier can walk: the loops have a number as their result and no
    /// reference, and no branch in them depends on the index or on how many slots
    /// there are, as it would walk the rest of the program for each value of
    /// these. So where there are few slots, some are asked again.
    #[inline(always)]
    fn with_room(
        &self,
        below: impl Fn(u32) -> u32,
        has_room: impl Fn(u32) -> bool,
    ) -> Option<(TierRange, u32)> {
        let [first, second, third] = *self.tiers();
        if let Some(count) = NonZeroU32::new(first.count()) {
            let start = below(first.count());
            for step in 0..SCAN_STEPS {
                let index = (start + step) % count;
                if has_room(first.start() + index) {
                    return Some((first, index));
                }
            }
        }
        let second = if second.count() > 0 { second } else { third };
        for attempt in 0..2 * TRIES {
            let tier = if attempt < TRIES { second } else { third };
            let index = below(tier.count());
            if has_room(tier.start() + index) {
                return Some((tier, index));
            }
        }
        None
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

    /// `None` if nothing is usable. One tier after the other: the verifier does
    /// not follow a pointer that walks over the stack.
    #[inline(always)]
    fn first_tier(&self) -> Option<TierRange> {
        let [first, second, third] = *self.tiers();
        if self.has(Flags::REFUSE) {
            None
        } else if first.count() > 0 {
            Some(first)
        } else if second.count() > 0 {
            Some(second)
        } else {
            (third.count() > 0).then_some(third)
        }
    }

    #[inline(always)]
    fn last_tier(&self) -> Option<TierRange> {
        let [first, second, third] = *self.tiers();
        if self.has(Flags::REFUSE) {
            None
        } else if third.count() > 0 {
            Some(third)
        } else if second.count() > 0 {
            Some(second)
        } else {
            (first.count() > 0).then_some(first)
        }
    }

    /// The slot of an endpoint, if it is in the set: each tier is a part of the
    /// next, so that the last one has all, sorted.
    ///
    /// What is left to search does not depend on what is found, nor does any
    /// branch depend on where it is: otherwise the verifier would walk a tree.
    #[inline(always)]
    fn find<'s>(&self, wanted: &Slot, slot: impl Fn(u32) -> Option<&'s Slot>) -> Option<&'s Slot> {
        let tier = self.last_tier()?;
        let (mut start, mut size) = (tier.start(), tier.count());
        for _ in 0..SEARCH_STEPS {
            if size <= 1 {
                break;
            }
            let half = size / 2;
            let is_beyond = wanted.is_before(slot(start + half)?);
            start += half * u32::from(!is_beyond);
            size -= half;
        }
        let slot = slot(start)?;
        slot.is_at(wanted.address(), wanted.port()).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;
    use crate::MAX_TIERS;

    /// Two endpoints here, and five in all.
    fn table(limit: u32) -> (ServiceEntry, [Slot; 7]) {
        let slot = |last, local| Slot::new([10, 0, 0, last].into(), 80, local);
        let (a, b) = (slot(1, true), slot(2, true));
        let far = |last| slot(last, false);
        let mut tiers = [TierRange::default(); MAX_TIERS];
        tiers[0] = TierRange::new(0, 2, 0);
        tiers[1] = TierRange::new(2, 5, 2);
        let entry = ServiceEntry::new(1, Flags(0), 0, 0, 2, tiers);
        (
            entry.with_max_local_connections(limit),
            [a, b, a, b, far(3), far(4), far(5)],
        )
    }

    /// What is given, where `full` have no room, for each first random number.
    fn chosen(limit: u32, full: &[u8]) -> Vec<(u8, Source)> {
        let (entry, slots) = table(limit);
        let at = |index: u32| slots.get(index as usize);
        let has_room = |slot: &Slot, _| !full.contains(&slot.address()[15]);
        let draw = |seed: u32| {
            // Any sequence will do that reaches all.
            let state = std::cell::Cell::new(seed);
            let below = |count: u32| {
                state.set(state.get().wrapping_mul(1_103_515_245).wrapping_add(12_345));
                (state.get() >> 16) % count.max(1)
            };
            let limit = entry.max_local_connections();
            match entry.choose(None, limit, below, at, has_room) {
                Choice::Endpoint(slot, source) => (slot.address()[15], source),
                other => panic!("{other:?}"),
            }
        };
        let mut all: Vec<_> = (0..200).map(draw).collect();
        all.sort_by_key(|(last, _)| *last);
        all.dedup();
        all
    }

    #[test]
    fn what_is_full_here_is_passed_over_and_then_others_are_tried() {
        let near = |last| (last, Source::Drawn(0));
        assert_eq!(chosen(0, &[1, 2]), [near(1), near(2)], "no limit");
        assert_eq!(chosen(9, &[]), [near(1), near(2)]);
        assert_eq!(chosen(9, &[1]), [near(2)]);
        let far = [3, 4, 5].map(|last| (last, Source::Spilled(2)));
        assert_eq!(chosen(9, &[1, 2]), far);
        // Those of other nodes are never asked.
        assert_eq!(chosen(9, &[1, 2, 3, 4, 5]), far);
    }

    #[test]
    fn every_endpoint_is_found_and_no_other() {
        for count in 0..40_u8 {
            let slots: Vec<_> = (1..=count)
                .map(|n| Slot::new([10, 0, 0, 2 * n].into(), 80, false))
                .collect();
            let tiers = [
                TierRange::new(0, count.into(), 2),
                TierRange::default(),
                TierRange::default(),
            ];
            let entry = ServiceEntry::new(1, Flags(0), 0, 0, 1, tiers);
            for last in 0..=2 * count + 2 {
                let wanted = Slot::new([10, 0, 0, last].into(), 80, false);
                let found = entry.find(&wanted, |index| slots.get(index as usize));
                assert_eq!(found, slots.contains(&wanted).then_some(&wanted));
            }
        }
    }
}
