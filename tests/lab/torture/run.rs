//! Rounds of torture, until there were enough.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::round::{Round, RoundReport};
use super::trouble::{Program, Trouble};
use super::{FaultKind, TortureReport};
use crate::LogOutput;
use crate::random::Random;

/// What a run is to come to.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What everything is drawn from.
    pub seed: u64,
    /// At least so long, and two rounds: with packet steering and without.
    pub time: Duration,
    /// And until there were so many promotions, and so many demotions.
    pub promotions: u64,
    /// As above.
    pub demotions: u64,
    /// It has failed if it takes longer.
    pub limit: Duration,
    /// As [`Round::parallel`].
    pub parallel: usize,
    /// As [`Round::patience`].
    pub patience: Duration,
    /// As [`Round::logs`].
    pub logs: LogOutput,
}

/// The sum of all rounds.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Of the connections.
    pub torture: TortureReport,
    /// Connections that were promoted.
    pub promotions: u64,
    /// Connections that were taken back to TCP while they were open.
    pub demotions: u64,
}

/// A round has at most so long.
const ROUND: Duration = Duration::from_secs(30);

/// Runs rounds, and tells of each in a line.
///
/// # Errors
///
/// A round could not be run, or there were too few promotions or demotions within
/// the limit. Faults of connections are no error here.
pub fn run(settings: &Settings, mut tell: impl FnMut(&str)) -> Result<Outcome> {
    let mut random = Random::new(settings.seed);
    let start = Instant::now();
    let mut outcome = Outcome::default();
    for number in 0.. {
        let is_enough = number >= 2
            && start.elapsed() >= settings.time
            && outcome.promotions >= settings.promotions
            && outcome.demotions >= settings.demotions;
        if is_enough {
            break;
        }
        ensure!(
            start.elapsed() < settings.limit,
            "not enough within {:?}: {outcome}",
            settings.limit
        );
        let round = Round {
            seed: random.below(usize::MAX) as u64,
            number,
            trouble: Trouble::All((settings.time / 2).min(ROUND)),
            steering: if number % 2 == 0 { 0b11 } else { 0 },
            parallel: settings.parallel,
            patience: settings.patience,
            program: Program::Shunt,
            args: &[],
            logs: settings.logs,
        };
        let report = round.run()?;
        tell(&line(&round, &report));
        outcome.add(report);
    }
    Ok(outcome)
}

impl Outcome {
    fn add(&mut self, round: RoundReport) {
        self.torture.merge(round.torture);
        self.promotions += round.promotions;
        self.demotions += round.demotions;
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "connections {}, promotions {}, demotions {}, wrong {}, hung {}",
            self.torture.connections,
            self.promotions,
            self.demotions,
            self.torture.count(FaultKind::Wrong),
            self.torture.count(FaultKind::Hung)
        )
    }
}

fn line(round: &Round<'_>, report: &RoundReport) -> String {
    let torture = &report.torture;
    format!(
        "round {}, steering {}: {} connections, {} MB, {} promotions, {} demotions, \
         {} messages spliced, {} agents killed, {} times off; wrong {}, hung {}, errors {}",
        round.number,
        if round.steering == 0 { "off" } else { "on" },
        torture.connections,
        torture.bytes / 1_000_000,
        report.promotions,
        report.demotions,
        report.messages,
        report.trouble.kills,
        report.trouble.switches,
        torture.count(FaultKind::Wrong),
        torture.count(FaultKind::Hung),
        torture.count(FaultKind::Error),
    )
}
