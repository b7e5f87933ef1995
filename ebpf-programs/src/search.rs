//! Looks for an endpoint that has room and is alive.
//!
//! Functions of their own in the kernel's eyes too: a function with global linkage
//! is verified once, by itself, for any arguments (Linux 5.6), where one that is
//! inlined is verified in each state in which it is reached. So they take and
//! return numbers only; pointers would need Linux 5.12.

use shunt_common::{Demands, MAX_TIERS, Slot, TierRange, search};

use crate::choose::{now_ns, random_below, slot};
use crate::{health, load};

/// The index of a slot that meets the demands.
#[inline(always)]
pub(crate) fn find(table_id: u64, tiers: &[TierRange; MAX_TIERS], demands: Demands) -> Option<u32> {
    let [first, second, third] = *tiers;
    let demands = pack(demands.limit, demands.alive as u32);
    let found = find_slot(
        table_id,
        pack(first.start(), first.count()),
        pack(second.start(), second.count()),
        pack(third.start(), third.count()),
        demands,
    );
    if found == u64::MAX {
        None
    } else {
        Some(found as u32)
    }
}

/// Whether a connect may go to an endpoint, be it to find out.
#[inline(always)]
pub(crate) fn is_alive(endpoint: &Slot) -> bool {
    let [high, low, rest] = endpoint.words();
    may_connect(high, low, rest) != 0
}

/// As [`find`]; the tiers and demands as [`pack`] has them, and none is
/// `u64::MAX`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn find_slot(table_id: u64, first: u64, second: u64, third: u64, demands: u64) -> u64 {
    let range = |packed: u64| TierRange::new(packed as u32, (packed >> 32) as u32, 0);
    let (limit, alive) = (demands as u32, demands >> 32 != 0);
    let now_ns = now_ns();
    let will_do = |index| {
        let Some(slot) = slot(table_id, index) else {
            // The caller will find out.
            return false;
        };
        if limit != 0 && slot.is_local() && !load::has_room(slot, limit) {
            return false;
        }
        !alive || health::is_alive(slot, now_ns)
    };
    let tiers = [range(first), range(second), range(third)];
    match search(&tiers, random_below, will_do) {
        Some(index) => index.into(),
        None => u64::MAX,
    }
}

/// As [`is_alive`], of the endpoint with these [`Slot::words`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn may_connect(high: u64, low: u64, rest: u64) -> u64 {
    let endpoint = Slot::from_words([high, low, rest]);
    health::is_alive(&endpoint, now_ns()).into()
}

#[inline(always)]
const fn pack(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}
