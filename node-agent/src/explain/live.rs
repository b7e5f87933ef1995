//! What the live table holds, held against the plan.

use std::collections::BTreeSet;
use std::fmt::Display;

use serde::{Deserialize, Serialize};
use shunt_common::{Heartbeat, Wish};

use crate::report::word;
use crate::tables::{Endpoint, Route, Scope};

/// How many endpoints a difference names.
const NAMED: usize = 5;
/// The agent writes its heartbeat every second; without one for so long, ns, it
/// is not running, though its table may still be in force.
const SILENT_NS: u64 = 5_000_000_000;

/// The live table and the plan.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Comparison {
    /// They hold the same.
    Same,
    /// They do not.
    Differs {
        /// In what.
        differences: Vec<String>,
    },
    /// The live table has no entry, and should have one.
    Missing,
    /// The live table can't be read.
    Unreadable {
        /// Why.
        because: String,
    },
}

/// The agent, as its heartbeat shows it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AgentSign {
    /// Whether it is running.
    pub running: bool,
    /// Whether all connects pass to kube-proxy, since it has been silent for too
    /// long.
    pub stale: bool,
    /// The same in words.
    pub says: String,
}

impl Comparison {
    /// Of the entry of one Service port.
    pub fn of(live: Option<&Route>, planned: &Route) -> Self {
        let Some(live) = live else {
            return Self::Missing;
        };
        let differences = differences(live, planned);
        if differences.is_empty() {
            Self::Same
        } else {
            Self::Differs { differences }
        }
    }
}

impl AgentSign {
    /// At `now_ns` since boot.
    pub fn of(heartbeat: &Heartbeat, now_ns: u64) -> Self {
        let age_ns = now_ns.saturating_sub(heartbeat.beat_ns());
        let stale = heartbeat.is_stale(now_ns);
        let running = !stale && age_ns < SILENT_NS;
        let (age, left) = (
            seconds(age_ns),
            heartbeat.stale_after_ns().saturating_sub(age_ns),
        );
        let says = if heartbeat.beat_ns() == 0 {
            "no agent has been up yet: all connects pass to kube-proxy".to_owned()
        } else if stale {
            format!("STALE: no heartbeat for {age}, all connects pass to kube-proxy")
        } else if running {
            format!("the agent is running, its heartbeat was {age} ago")
        } else {
            format!(
                "no heartbeat for {age}, the agent is not running; its table stays in force for \
                 another {}",
                seconds(left)
            )
        };
        Self {
            running,
            stale,
            says,
        }
    }
}

/// What is different, in words; empty if nothing is.
pub fn differences(live: &Route, planned: &Route) -> Vec<String> {
    let mut found = Vec::new();
    let name = |route: &Route| route.name.to_string();
    add(&mut found, "Service port", &name(live), &name(planned));
    let verdict = |route: &Route| word(&route.verdict);
    add(&mut found, "verdict", &verdict(live), &verdict(planned));
    let prefer = |route: &Route| word(&route.prefer);
    add(&mut found, "prefer", &prefer(live), &prefer(planned));
    let affinity = |route: &Route| {
        route
            .affinity_seconds
            .map_or_else(|| "none".to_owned(), |it| format!("{it} s"))
    };
    add(&mut found, "affinity", &affinity(live), &affinity(planned));
    let wish = |wish| match wish {
        Wish::None => "default",
        Wish::On => "on",
        Wish::Off => "off",
    };
    let switch = |is_on| if is_on { "on" } else { "off" };
    add(
        &mut found,
        "splice",
        wish(live.splice),
        wish(planned.splice),
    );
    add(
        &mut found,
        "terminating endpoints",
        switch(live.terminating),
        switch(planned.terminating),
    );
    for scope in [Scope::Node, Scope::Zone, Scope::Hints, Scope::Cluster] {
        add_tier(&mut found, scope, live, planned);
    }
    // What nobody has thought of here.
    if found.is_empty() && live != planned {
        found.push(format!("live {live:?}, planned {planned:?}"));
    }
    found
}

fn add(found: &mut Vec<String>, what: &str, live: &str, planned: &str) {
    if live != planned {
        found.push(format!("{what}: live {live}, planned {planned}"));
    }
}

fn add_tier(found: &mut Vec<String>, scope: Scope, live: &Route, planned: &Route) {
    let endpoints = |route: &Route| {
        let mut tiers = route.tiers.iter();
        let tier = tiers.find(|tier| tier.scope == scope)?;
        Some(tier.endpoints.iter().copied().collect::<BTreeSet<_>>())
    };
    let word = word(&scope);
    let (live, planned) = match (endpoints(live), endpoints(planned)) {
        (None, None) => return,
        (Some(_), None) => return found.push(format!("tier {word}: only in the live table")),
        (None, Some(_)) => return found.push(format!("tier {word}: not in the live table")),
        (Some(live), Some(planned)) => (live, planned),
    };
    let extra: Vec<_> = live.difference(&planned).collect();
    let missing: Vec<_> = planned.difference(&live).collect();
    if !extra.is_empty() {
        found.push(format!("tier {word}: only live {}", list(&extra)));
    }
    if !missing.is_empty() {
        found.push(format!("tier {word}: not live {}", list(&missing)));
    }
}

fn list(endpoints: &[&Endpoint]) -> String {
    let first = endpoints.iter().take(NAMED);
    let text = first
        .map(|it| it.address.to_string())
        .collect::<Vec<_>>()
        .join(", ");
    match endpoints.len().saturating_sub(NAMED) {
        0 => text,
        more => format!("{text}, +{more} more"),
    }
}

/// Nanoseconds as seconds, for people.
pub(super) fn seconds(ns: u64) -> impl Display {
    format!("{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shunt_common::NodeId;

    use super::*;
    use crate::tables::{Prefer, ServicePortName, Tier, Verdict};

    fn route(hosts: &[u8]) -> Route {
        let endpoints = hosts.iter().map(|host| Endpoint {
            address: ([10, 0, 0, *host], 80).into(),
            local: false,
            node: NodeId::UNKNOWN,
        });
        Route {
            name: ServicePortName {
                namespace: Arc::from("shop"),
                service: Arc::from("cart"),
                port: Arc::from("http"),
            },
            verdict: Verdict::Balance,
            prefer: Prefer::Zone,
            affinity_seconds: None,
            splice: Wish::None,
            terminating: false,
            max_local_connections: None,
            tiers: vec![Tier {
                scope: Scope::Cluster,
                endpoints: endpoints.collect(),
            }],
        }
    }

    #[test]
    fn each_difference_is_told() {
        let planned = route(&[1, 2]);
        assert_eq!(Comparison::of(Some(&planned), &planned), Comparison::Same);
        assert_eq!(Comparison::of(None, &planned), Comparison::Missing);
        let mut live = route(&[2, 3]);
        live.verdict = Verdict::Pass;
        live.prefer = Prefer::Node;
        live.affinity_seconds = Some(30);
        live.splice = Wish::On;
        live.terminating = true;
        live.tiers.push(Tier {
            scope: Scope::Zone,
            endpoints: vec![],
        });
        let expected = [
            "verdict: live pass, planned balance",
            "prefer: live node, planned zone",
            "affinity: live 30 s, planned none",
            "splice: live on, planned default",
            "terminating endpoints: live on, planned off",
            "tier zone: only in the live table",
            "tier cluster: only live 10.0.0.3:80",
            "tier cluster: not live 10.0.0.1:80",
        ];
        assert_eq!(differences(&live, &planned), expected);
    }

    /// The same endpoints in another order are another table for the programs.
    #[test]
    fn no_difference_is_passed_over() {
        let (live, planned) = (route(&[2, 1]), route(&[1, 2]));
        assert_eq!(differences(&live, &planned).len(), 1);
    }

    #[test]
    fn the_agent_is_running_silent_or_stale() {
        let second = 1_000_000_000;
        let beat = Heartbeat::new(second, 60 * second, 7);
        let at = |seconds: u64| AgentSign::of(&beat, seconds * second);
        let states = [2, 20, 62].map(|now| (at(now).running, at(now).stale));
        assert_eq!(states, [(true, false), (false, false), (false, true)]);
        assert!(at(20).says.ends_with("for another 41.0 s"), "{:?}", at(20));
        let never = AgentSign::of(&Heartbeat::default(), second);
        assert!(
            never.stale && never.says.starts_with("no agent"),
            "{never:?}"
        );
    }
}
