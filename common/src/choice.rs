//! Which endpoint of a Service port a client gets; pure. The programs look slots
//! up in the kernel's map, and tests in a slice.

use core::num::NonZeroU32;

use crate::{Affinity, Flags, MAX_TIERS, ServiceEntry, Slot, TierRange};

/// More look-ups than a binary search of any tier takes:
/// [`capacity::SLOTS`](crate::capacity::SLOTS) is 2^19.
const SEARCH_STEPS: u32 = 20;
/// How many slots of the first tier are asked in turn whether they will do, and
/// how many of each tier at random.
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
    /// The same, since no endpoint of an earlier tier will do.
    Spilled(u32),
}

/// What an endpoint has to be asked before it is given to a client.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Demands {
    /// So many connections each endpoint of this node may hold; 0 is no limit.
    pub limit: u32,
    /// Whether any endpoint may be suspect.
    pub alive: bool,
}

impl ServiceEntry {
    /// That of `before` if it is in the set and alive, or else a random endpoint
    /// of the first tier that has any.
    ///
    /// With demands, what `search` finds, which is [`search`] or does the same; if
    /// it finds nothing, nobody is turned away. `below` gives a random number below
    /// another, `slot` the slot at an index; `is_alive` is whether one is not
    /// suspect.
    #[inline(always)]
    pub fn choose<'s>(
        &self,
        before: Option<&Slot>,
        demands: Demands,
        below: impl Fn(u32) -> u32 + Copy,
        slot: impl Fn(u32) -> Option<&'s Slot> + Copy,
        is_alive: impl Fn(&Slot) -> bool,
        search: impl Fn(&[TierRange; MAX_TIERS], Demands) -> Option<u32>,
    ) -> Choice<'s> {
        // Not `and_then`: whether the linker inlines that is left to chance, and as a
        // function of its own it takes connect4 past the verifier's 512 bytes of stack.
        let kept = match before {
            Some(before) => self.find(before, slot),
            None => None,
        };
        if let Some(kept) = kept
            && (!demands.alive || is_alive(kept))
        {
            return Choice::Endpoint(kept, Source::Kept);
        }
        let Some(first) = self.first_tier() else {
            return Choice::Nothing;
        };
        let found = if demands.limit == 0 && !demands.alive {
            None
        } else {
            search(self.tiers(), demands)
        };
        let index = found.unwrap_or_else(|| first.start() + below(first.count()));
        let source = self.source(&first, index);
        slot(index).map_or(Choice::Torn, |slot| Choice::Endpoint(slot, source))
    }

    /// Where the slot at an index comes from: the tiers' slots are one after the
    /// other.
    #[inline(always)]
    fn source(&self, first: &TierRange, index: u32) -> Source {
        let [_, second, third] = self.tiers();
        if index < first.start() + first.count() {
            Source::Drawn(first.scope())
        } else if index < second.start() + second.count() {
            Source::Spilled(second.scope())
        } else {
            Source::Spilled(third.scope())
        }
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

    /// The one that holds all endpoints, as each tier is a part of the next.
    #[inline(always)]
    pub fn last_tier(&self) -> Option<TierRange> {
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

/// The index of a slot that will do, of the first tier in which one is found.
///
/// Some are tried at random: the one that follows others which will not do must
/// not get all that they do not take. Of the first and the last tier, each slot is
/// then asked in turn, from a random one on.
///
/// What the verifier can walk: the loops have a number as their result and no
/// reference, and no branch in them depends on the index or on how many slots
/// there are, as it would walk the rest of the program for each value of these. So
/// where there are few slots, some are asked again.
#[inline(always)]
pub fn search(
    tiers: &[TierRange; MAX_TIERS],
    below: impl Fn(u32) -> u32,
    will_do: impl Fn(u32) -> bool,
) -> Option<u32> {
    let [first, second, third] = *tiers;
    if let Some(count) = NonZeroU32::new(first.count()) {
        let start = below(first.count());
        for step in 0..TRIES + SCAN_STEPS {
            let index = if step < TRIES {
                below(first.count())
            } else {
                (start + step) % count
            };
            if will_do(first.start() + index) {
                return Some(first.start() + index);
            }
        }
    }
    let second = if second.count() > 0 { second } else { third };
    let third = if third.count() > 0 { third } else { second };
    let count = NonZeroU32::new(third.count())?;
    let start = below(third.count());
    for attempt in 0..2 * TRIES + SCAN_STEPS {
        let tier = if attempt < TRIES { second } else { third };
        let index = if attempt < 2 * TRIES {
            below(tier.count())
        } else {
            (start + attempt) % count
        };
        if will_do(tier.start() + index) {
            return Some(tier.start() + index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

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
        chosen_of(limit, full, None)
    }

    /// What is given, where these are suspect.
    fn living(suspects: &[u8]) -> Vec<(u8, Source)> {
        chosen_of(0, &[], Some(suspects))
    }

    fn chosen_of(limit: u32, full: &[u8], suspects: Option<&[u8]>) -> Vec<(u8, Source)> {
        let (entry, slots) = table(limit);
        let at = |index: u32| slots.get(index as usize);
        let has_room = |slot: &Slot| !full.contains(&slot.address()[15]);
        let is_alive = |slot: &Slot| !suspects.is_some_and(|it| it.contains(&slot.address()[15]));
        let demands = Demands {
            limit,
            alive: suspects.is_some(),
        };
        let draw = |seed: u32| {
            // Any sequence will do that reaches all.
            let state = std::cell::Cell::new(seed);
            let below = |count: u32| {
                state.set(state.get().wrapping_mul(1_103_515_245).wrapping_add(12_345));
                (state.get() >> 16) % count.max(1)
            };
            let search = |tiers: &[TierRange; MAX_TIERS], demands: Demands| {
                let will_do = |index| {
                    let slot = at(index).unwrap();
                    let full = demands.limit != 0 && slot.is_local() && !has_room(slot);
                    !full && (!demands.alive || is_alive(slot))
                };
                search(tiers, below, will_do)
            };
            match entry.choose(None, demands, below, at, is_alive, search) {
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
    fn suspects_are_passed_over_tier_by_tier() {
        let near = |last| (last, Source::Drawn(0));
        let far = |last| (last, Source::Spilled(2));
        assert_eq!(living(&[]), [near(1), near(2)]);
        assert_eq!(living(&[2, 3]), [near(1)]);
        assert_eq!(living(&[1, 2]), [far(3), far(4), far(5)]);
        assert_eq!(living(&[1, 2, 4, 5]), [far(3)]);
        // None is left: as if none were suspect.
        assert_eq!(living(&[1, 2, 3, 4, 5]), [near(1), near(2)]);
    }

    #[test]
    fn a_client_keeps_to_its_endpoint_only_while_that_is_alive() {
        let (entry, slots) = table(0);
        let demands = |alive| Demands { limit: 0, alive };
        let with = |alive, suspect: u8| {
            entry.choose(
                Some(&slots[1]),
                demands(alive),
                |_| 0,
                |index| slots.get(index as usize),
                |slot| slot.address()[15] != suspect,
                |tiers, _| Some(tiers[0].start()),
            )
        };
        let kept = Choice::Endpoint(&slots[3], Source::Kept);
        assert_eq!(with(false, 2), kept);
        assert_eq!(with(true, 1), kept);
        assert_eq!(with(true, 2), Choice::Endpoint(&slots[0], Source::Drawn(0)));
    }

    #[test]
    fn what_suspects_leave_is_shared_evenly() {
        // One of three is suspect: no other gets more than its half.
        let slots = [1, 2, 3].map(|last| Slot::new([10, 0, 0, last].into(), 80, false));
        let mut tiers = [TierRange::default(); MAX_TIERS];
        tiers[0] = TierRange::new(0, 3, 2);
        let entry = ServiceEntry::new(1, Flags(0), 0, 0, 1, tiers);
        let state = std::cell::Cell::new(1_u32);
        let below = |count: u32| {
            state.set(state.get().wrapping_mul(1_103_515_245).wrapping_add(12_345));
            (state.get() >> 16) % count
        };
        let mut counts = [0_u32; 3];
        let demands = Demands {
            limit: 0,
            alive: true,
        };
        for _ in 0..3_000 {
            let chosen = entry.choose(
                None,
                demands,
                below,
                |index| slots.get(index as usize),
                |_| true,
                |tiers, _| search(tiers, below, |index| index != 1),
            );
            let Choice::Endpoint(slot, _) = chosen else {
                panic!("{chosen:?}")
            };
            counts[usize::from(slot.address()[15]) - 1] += 1;
        }
        // The numbers are the same in each run.
        assert_eq!(counts[1], 0);
        assert!(counts[0].abs_diff(counts[2]) < 300, "{counts:?}");
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
