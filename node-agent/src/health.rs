//! Dead endpoints: what the programs are told of them, and what they tell.
//!
//! The programs notice by themselves what does not answer, and avoid it
//! (`common/src/health.rs` has the rules, `ebpf-programs/src/health.rs` the
//! hooks). The agent only sets how.

use std::time::Duration;

use nix::time::{ClockId, clock_getres};
use shunt_common::HealthConfig;

/// The kernel's own first SYN timeout (`TCP_TIMEOUT_INIT` in
/// `include/net/tcp.h`).
pub const KERNEL_TIMEOUT: Duration = Duration::from_secs(1);

/// So many SYN timeouts at the beginning do not double (`tcp_syn_linear_timeouts`,
/// Linux 6.5, by default).
const LINEAR: u32 = 4;
/// Enough for the shortest first timeout that the CLI takes, 10 ms.
const MAX_MORE: u32 = 8;

/// What the operator wants of connects to endpoints that do not answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// The first SYN timeout; none to leave it to the kernel.
    pub first_timeout: Option<Duration>,
    /// Whether a connect that waits for what is dead ends early.
    pub fail_fast: bool,
}

impl Settings {
    /// As the programs want it, on a kernel whose clock ticks so often.
    pub fn config(&self, tick: Duration) -> HealthConfig {
        let first_timeout = self.first_timeout.filter(|it| *it < KERNEL_TIMEOUT);
        HealthConfig {
            first_timeout: first_timeout.map_or(0, |timeout| ticks(timeout, tick)),
            more_retries: first_timeout.map_or(0, more_retries),
            fail_fast: u32::from(self.fail_fast),
            reserved: 0,
        }
    }
}

/// Time between two ticks of the kernel's clock, by which it counts timeouts
/// (jiffies): 1 / `CONFIG_HZ`. That is the resolution of the coarse clocks
/// (`posix_get_coarse_res` in `kernel/time/posix-timers.c`), to the ns; USER_HZ,
/// which sysconf(3) tells, is another.
pub fn tick() -> Duration {
    // It has no other way to fail than a kernel without the clock (before 2.6.32).
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::from_millis(10), Duration::from)
}

/// Ticks in a time: as many as it takes, at least one.
fn ticks(time: Duration, tick: Duration) -> u32 {
    let ticks = time.as_nanos().div_ceil(tick.as_nanos().max(1)).max(1);
    u32::try_from(ticks).unwrap_or(u32::MAX)
}

/// So many more SYNs make the wait of a connect no shorter than with the kernel's
/// first timeout, for any number of retries: what holds for one holds for more,
/// since each further timeout is twice the one before, on either side.
fn more_retries(first_timeout: Duration) -> u32 {
    let is_enough = |more: &u32| {
        first_timeout * (1 << more) >= KERNEL_TIMEOUT
            && wait(first_timeout, 1 + more, LINEAR) >= wait(KERNEL_TIMEOUT, 1, LINEAR)
    };
    (0..MAX_MORE).find(is_enough).unwrap_or(MAX_MORE)
}

/// How long a connect waits in all: its first timeout, so many that are as long, and
/// `retries` that double.
fn wait(first_timeout: Duration, retries: u32, linear: u32) -> Duration {
    first_timeout * (linear + (1 << (retries + 1)) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn times_are_told_in_the_ticks_of_this_kernel() {
        for (hz, expected) in [(100, 20), (250, 50), (300, 61), (1000, 200)] {
            // As the kernel rounds it (`TICK_NSEC` in `include/linux/jiffies.h`).
            let tick = Duration::from_nanos((1_000_000_000 + hz / 2) / hz);
            let settings = Settings {
                first_timeout: Some(ms(200)),
                fail_fast: true,
            };
            assert_eq!(settings.config(tick).first_timeout, expected, "{hz}");
        }
        assert_eq!(ticks(ms(1), ms(10)), 1, "never none");
    }

    #[test]
    fn the_tick_is_that_of_a_kernel() {
        let tick = tick();
        assert!(ms(1) <= tick && tick <= ms(10), "{tick:?}");
        let hz = 1_000_000_000.0 / tick.as_nanos() as f64;
        assert!((hz - hz.round()).abs() < 0.01, "{hz}");
    }

    #[test]
    fn no_connect_gives_up_earlier_than_without_shunt() {
        for first in [10, 50, 100, 200, 250, 300, 500, 900, 1000].map(ms) {
            for retries in 1..10 {
                for linear in [0, LINEAR] {
                    let before = wait(KERNEL_TIMEOUT, retries, linear);
                    let after = wait(first, retries + more_retries(first), linear);
                    assert!(after >= before, "{first:?} {retries} {linear}");
                }
            }
        }
        assert_eq!(more_retries(ms(200)), 3);
    }

    #[test]
    fn what_is_not_shorter_is_left_to_the_kernel() {
        for first_timeout in [None, Some(KERNEL_TIMEOUT), Some(ms(3_000))] {
            let settings = Settings {
                first_timeout,
                fail_fast: false,
            };
            assert_eq!(settings.config(ms(4)), HealthConfig::default());
        }
    }
}
