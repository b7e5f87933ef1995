//! Torture of the splice: [`run`] makes rounds of connections, of which `lab-pod
//! torture` checks every byte. Here is what it prints at its end, and the sum of
//! several.

mod lane;

pub mod round;
pub mod run;
pub mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

/// Faults that a report describes; more are only counted.
const MAX_DESCRIBED: usize = 100;

/// One process's view of many connections.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct TortureReport {
    /// Connections that were established and have ended, each in its way.
    pub connections: u64,
    /// Bytes that arrived, all of them checked.
    pub bytes: u64,
    /// Connections by scenario.
    pub scenarios: BTreeMap<String, u64>,
    /// Connections by how this end reads.
    pub styles: BTreeMap<String, u64>,
    /// Things that happened and are right, such as sockets that were marked.
    pub events: BTreeMap<String, u64>,
    /// Connections that went wrong, by kind and then by what and scenario.
    pub faults: BTreeMap<FaultKind, BTreeMap<String, u64>>,
    /// The numbers of these.
    pub faulty: BTreeMap<FaultKind, BTreeSet<u64>>,
    /// The first of them, described.
    pub described: Vec<Fault>,
}

/// What a connection does and how it ends.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Scenario {
    /// Who sends when, such as `turns`.
    pub shape: String,
    /// Such as `reset by client`.
    pub ending: String,
}

/// A connection on which something happened that TCP would not do.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The connection's number: with the seed it repeats the plan.
    pub id: u64,
    /// What it did.
    pub scenario: String,
    /// `client` or `server`.
    pub side: String,
    /// How this end reads, and what it did with its socket.
    pub style: String,
    /// Which kind.
    pub kind: FaultKind,
    /// What happened, without figures, so that it can be counted.
    pub what: String,
    /// With figures.
    pub state: String,
}

/// Kinds of [`Fault`].
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// A byte that is not the one due at its position, or too many or too few.
    Wrong,
    /// Neither direction moved for long, though it should have.
    Hung,
    /// An error that TCP would not give here.
    Error,
}

impl fmt::Display for Scenario {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}, {}", self.shape, self.ending)
    }
}

impl TortureReport {
    /// Notes that something right happened.
    pub fn note(&mut self, event: &str) {
        *self.events.entry(event.to_owned()).or_default() += 1;
    }

    /// Counts a fault, and keeps its description if there is room.
    pub fn fault(&mut self, fault: Fault) {
        let name = format!("{} ({})", fault.what, fault.scenario);
        let counts = self.faults.entry(fault.kind).or_default();
        *counts.entry(name).or_default() += 1;
        self.faulty.entry(fault.kind).or_default().insert(fault.id);
        if self.described.len() < MAX_DESCRIBED {
            self.described.push(fault);
        }
    }

    /// Connections with a fault of this kind. An end that finds wrong bytes or a
    /// hang resets, so the other end's error is not counted again.
    pub fn count(&self, kind: FaultKind) -> usize {
        let of = |kind| self.faulty.get(&kind).into_iter().flatten();
        let worse: BTreeSet<_> = match kind {
            FaultKind::Wrong => BTreeSet::new(),
            FaultKind::Hung => of(FaultKind::Wrong).collect(),
            FaultKind::Error => of(FaultKind::Wrong).chain(of(FaultKind::Hung)).collect(),
        };
        of(kind).filter(|id| !worse.contains(id)).count()
    }

    /// Adds the other end's report. Both ends know all connections except those
    /// whose other end was killed before it could report.
    pub fn merge_other_end(&mut self, other: Self) {
        for (scenario, count) in &other.scenarios {
            let known = self.scenarios.entry(scenario.clone()).or_default();
            self.connections += count.saturating_sub(*known);
            *known = (*known).max(*count);
        }
        self.merge_rest(other);
    }

    /// Adds the report of other connections.
    pub fn merge(&mut self, other: Self) {
        self.connections += other.connections;
        for (scenario, count) in &other.scenarios {
            *self.scenarios.entry(scenario.clone()).or_default() += count;
        }
        self.merge_rest(other);
    }

    fn merge_rest(&mut self, other: Self) {
        self.bytes += other.bytes;
        for (style, count) in other.styles {
            *self.styles.entry(style).or_default() += count;
        }
        for (event, count) in other.events {
            *self.events.entry(event).or_default() += count;
        }
        for (kind, counts) in other.faults {
            let mine = self.faults.entry(kind).or_default();
            for (name, count) in counts {
                *mine.entry(name).or_default() += count;
            }
        }
        for (kind, ids) in other.faulty {
            self.faulty.entry(kind).or_default().extend(ids);
        }
        self.described.extend(other.described);
        self.described.truncate(MAX_DESCRIBED);
    }
}
