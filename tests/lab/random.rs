//! Random numbers that a seed repeats (SplitMix64).

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

/// A source of them.
pub struct Random(u64);

impl Random {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % end as u64).expect("it is below a usize")
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of them.
    pub fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// `SHUNT_SEED`, or a new seed; prints it.
#[expect(clippy::unwrap_used, reason = "a test fails this way")]
pub fn seed() -> u64 {
    let given = env::var("SHUNT_SEED").ok();
    let seed = given.map_or_else(
        || {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .subsec_nanos()
                .into()
        },
        |seed| seed.parse().unwrap(),
    );
    #[expect(
        clippy::print_stderr,
        reason = "the harness captures it for failed tests"
    )]
    {
        eprintln!("SHUNT_SEED={seed}");
    }
    seed
}
