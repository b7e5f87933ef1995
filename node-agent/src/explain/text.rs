//! The whole answer, for people and for programs: the plan, the live table, and
//! the client.

use std::fmt::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::live::{AgentSign, Comparison, seconds};
use super::{Explanation, PortExplanation, Skipped, TierExplanation, by_reason};
use crate::plan::{Basis, PreferredBy};
use crate::report::{RouteReport, word};
use crate::tables::Verdict;

/// How many endpoints a line names.
const NAMED: usize = 4;

/// The JSON form of `shunt explain`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Report {
    /// `namespace/name`.
    pub service: String,
    /// The node that it is about.
    pub node: String,
    /// Its zone, if it is known.
    pub zone: Option<String>,
    /// Why the whole Service is left to kube-proxy, if it is.
    pub left_alone: Option<String>,
    /// What the live table still holds of a Service that is left alone.
    pub leftovers: Vec<RouteReport>,
    /// The agent of this node; null if the pinned maps can't be read.
    pub agent: Option<AgentSign>,
    /// The client, if one was given.
    pub client: Option<ClientReport>,
    /// One for each port that was asked for, and family.
    pub ports: Vec<PortReport>,
}

/// One Service port of one family.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PortReport {
    /// What a connect gets now, in words.
    pub answer: String,
    /// The plan, rule by rule.
    #[serde(flatten)]
    pub plan: PortExplanation,
    /// The live table held against it.
    pub live: Comparison,
    /// What the live table holds, if it has an entry.
    pub live_route: Option<RouteReport>,
    /// What session affinity does for the client.
    pub client_affinity: Option<ClientAffinity>,
}

/// Who connects.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct ClientReport {
    /// Its pod, `namespace/name`, if it is in one that is known.
    pub pod: Option<String>,
    /// The process that was looked at.
    pub pid: Option<u32>,
    /// Its cgroup, from the root of the hierarchy.
    pub cgroup: Option<String>,
    /// The id of that: its inode number.
    pub cgroup_id: Option<u64>,
    /// Cookie of its network namespace.
    pub netns_cookie: Option<u64>,
    /// Whether it is in the node's own network namespace.
    pub host_network: bool,
    /// Why its connects are left to kube-proxy, if they are.
    pub left_alone: Option<String>,
}

/// What session affinity does for a client.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum ClientAffinity {
    /// The Service has none.
    None,
    /// The client is new, or its time is over.
    Free,
    /// It keeps to an endpoint.
    Keeps {
        /// Which one.
        endpoint: SocketAddr,
        /// For how long after its last connect, ns from now.
        left_ns: u64,
        /// Whether that is still in the set; otherwise it chooses anew.
        in_set: bool,
    },
    /// It can't be told.
    Unknown {
        /// Why.
        because: String,
    },
}

/// What is live, for [`Report::new`].
pub struct LivePort {
    /// The live table held against the plan.
    pub comparison: Comparison,
    /// What it holds.
    pub route: Option<RouteReport>,
    /// What session affinity does for the client.
    pub affinity: Option<ClientAffinity>,
}

impl Report {
    /// Of an explanation, what is live for each of its ports, and what is live
    /// though it should not be.
    pub fn new(
        explanation: Explanation,
        agent: Option<AgentSign>,
        client: Option<ClientReport>,
        live: Vec<LivePort>,
        leftovers: Vec<RouteReport>,
    ) -> Self {
        let ports = explanation.ports.into_iter().zip(live);
        let ports = ports.map(|(plan, live)| PortReport {
            answer: answer(&plan, &live, agent.as_ref(), client.as_ref()),
            plan,
            live: live.comparison,
            live_route: live.route,
            client_affinity: live.affinity,
        });
        Self {
            service: explanation.service,
            node: explanation.node,
            zone: explanation.zone,
            left_alone: explanation.left_alone,
            leftovers,
            ports: ports.collect(),
            agent,
            client,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let zone = self.zone.as_deref().unwrap_or("unknown");
        let mut text = format!(
            "Service {}, seen from node {} (zone {zone})",
            self.service, self.node
        );
        if let Some(client) = &self.client {
            let _ = write!(text, "\nClient {}", client.text());
        }
        if let Some(agent) = &self.agent {
            let _ = write!(text, "\nAgent: {}", agent.says);
        }
        match &self.left_alone {
            Some(reason) => {
                let _ = write!(text, "\n\nLeft to kube-proxy: {reason}.");
            }
            None if self.ports.is_empty() => text += "\n\nIt has no TCP or UDP port.",
            None => {}
        }
        for route in &self.leftovers {
            let address = SocketAddr::new(route.address, route.port);
            let _ = write!(
                text,
                "\nBUT the live table still holds {address}/{}, by which connects go until the \
                 agent withdraws it.",
                route.protocol
            );
        }
        for port in &self.ports {
            let _ = write!(text, "\n\n{}", port.text());
        }
        text
    }
}

impl ClientReport {
    fn text(&self) -> String {
        let mut parts = Vec::from_iter(self.pod.as_ref().map(|pod| format!("pod {pod}")));
        parts.extend(self.pid.map(|pid| format!("process {pid}")));
        if let Some(cgroup) = &self.cgroup {
            let id = self.cgroup_id.unwrap_or_default();
            parts.push(format!("cgroup {cgroup} (id {id})"));
        }
        if self.host_network {
            parts.push("in the node's own network".to_owned());
        } else if let Some(cookie) = self.netns_cookie {
            parts.push(format!("network namespace cookie {cookie}"));
        }
        parts.join(", ")
    }
}

/// What a connect gets now.
fn answer(
    plan: &PortExplanation,
    live: &LivePort,
    agent: Option<&AgentSign>,
    client: Option<&ClientReport>,
) -> String {
    if let Some(reason) = client.and_then(|client| client.left_alone.as_ref()) {
        return format!("left to kube-proxy, since {reason}");
    }
    if agent.is_some_and(|agent| agent.stale) {
        return "left to kube-proxy, since the agent is silent".to_owned();
    }
    if let Some(other) = &plan.hidden_by {
        return format!("goes to the Service {other}, which has the same ClusterIP and port");
    }
    if live.comparison == Comparison::Missing {
        return "left to kube-proxy, since the live table has no entry".to_owned();
    }
    let (route, of) = match &live.route {
        Some(route) => (route, "live table"),
        None => (&plan.route, "plan"),
    };
    let decided = route.decided_by();
    match (route.verdict, &live.affinity) {
        (Verdict::Pass, _) => format!("left to kube-proxy, since {decided}"),
        (Verdict::Refuse, _) => format!("refused with ECONNREFUSED, since {decided}"),
        (
            Verdict::Balance,
            Some(ClientAffinity::Keeps {
                endpoint,
                in_set: true,
                ..
            }),
        ) => format!("goes to {endpoint}, which this client keeps to (session affinity)"),
        (Verdict::Balance, _) => {
            let mut tiers = route.tiers.iter();
            let tier = tiers.find(|tier| !tier.endpoints.is_empty());
            let endpoints = tier.map_or(&[][..], |tier| &tier.endpoints);
            format!("goes to {} ({of}, {decided})", one_of(endpoints))
        }
    }
}

fn one_of(endpoints: &[SocketAddr]) -> String {
    match endpoints {
        [only] => only.to_string(),
        all => format!("one of {}", list(all.iter().map(ToString::to_string))),
    }
}

/// The first few.
fn list(names: impl ExactSizeIterator<Item = String>) -> String {
    let count = names.len();
    let text = names.take(NAMED).collect::<Vec<_>>().join(", ");
    if count > NAMED {
        format!("{text}, +{} more", count - NAMED)
    } else {
        text
    }
}

/// Lines with a word in front of each first one.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn add(&mut self, label: &str, text: impl AsRef<str>) {
        let _ = write!(self.0, "\n  {label:<13} {}", text.as_ref());
    }

    fn add_skipped(&mut self, skipped: &[Skipped]) {
        for (because, group) in by_reason(skipped) {
            let names = group.iter().map(|it| it.name());
            self.add("", format!("skipped, {because}: {}", list(names)));
        }
    }
}

impl Skipped {
    fn name(&self) -> String {
        match &self.pod {
            Some(pod) => format!("{} (pod {pod})", self.endpoint),
            None => self.endpoint.to_string(),
        }
    }
}

impl PortReport {
    fn text(&self) -> String {
        let route = &self.plan.route;
        let address = SocketAddr::new(route.address, route.port);
        let name = match route.port_name.as_str() {
            "" => String::new(),
            name => format!("{name}, "),
        };
        let head = format!("{name}{address}/{}", route.protocol);
        let mut lines = Lines::default();
        lines.add("a connect", &self.answer);
        self.plan.add_to(&mut lines);
        self.add_live(&mut lines);
        head + &lines.0
    }

    fn add_live(&self, lines: &mut Lines) {
        if let Some(seconds) = self.plan.route.affinity_seconds {
            lines.add("affinity", format!("ClientIP, {seconds} s"));
        }
        if let Some(affinity) = &self.client_affinity {
            lines.add("client", affinity.text());
        }
        match &self.live {
            Comparison::Same => lines.add("live table", "the same as the plan"),
            Comparison::Missing => lines.add("live table", "NO ENTRY, though one is planned"),
            Comparison::Unreadable { because } => {
                lines.add("live table", format!("not read: {because}"));
            }
            Comparison::Differs { differences } => {
                lines.add("live table", "DIFFERS from the plan:");
                differences.iter().for_each(|it| lines.add("", it));
            }
        }
    }
}

impl PortExplanation {
    fn add_to(&self, lines: &mut Lines) {
        let prefer = word(&self.route.prefer);
        let by = match self.preferred_by {
            PreferredBy::Annotation => "the Service's annotation",
            PreferredBy::TrafficDistribution => "the Service sets trafficDistribution",
            PreferredBy::Flag => "the agent's --prefer",
        };
        lines.add("prefer", format!("{prefer}: {by}"));
        if self.route.local_only {
            lines.add("policy", "internalTrafficPolicy: Local, nothing widens it");
        }
        for slice in &self.slices {
            let ports: Vec<_> = slice.target_ports.iter().map(u16::to_string).collect();
            let text = match &slice.left_out {
                Some(reason) => format!("{} left out: {reason}", slice.name),
                None => format!(
                    "{}: {} endpoints, target port {}",
                    slice.name,
                    slice.endpoints,
                    ports.join(", ")
                ),
            };
            lines.add("slice", text);
        }
        if self.slices.is_empty() {
            lines.add("slice", "none: does the selector match any pod?");
        }
        for unknown in &self.unknown {
            lines.add("unknown", unknown);
        }
        self.add_conditions(lines);
        self.add_hints(lines);
        for tier in &self.tiers {
            tier.add_to(lines);
        }
    }

    fn add_conditions(&self, lines: &mut Lines) {
        let fit = match self.basis {
            Basis::Ready => "those that are ready count",
            Basis::Terminating => {
                "none is ready, so that those count which still serve while they terminate"
            }
        };
        if self.endpoints > 0 {
            lines.add(
                "conditions",
                format!("of {} endpoints, {fit}", self.endpoints),
            );
        }
        lines.add_skipped(&self.unfit);
    }

    fn add_hints(&self, lines: &mut Lines) {
        if !self.hints.used {
            return;
        }
        lines.add("hints", format!("for nodes: {}", self.hints.for_nodes));
        lines.add("", format!("for zones: {}", self.hints.for_zones));
    }
}

impl TierExplanation {
    fn add_to(&self, lines: &mut Lines) {
        let endpoints = if self.endpoints.is_empty() {
            "empty".to_owned()
        } else {
            list(self.endpoints.iter().map(ToString::to_string))
        };
        let decides = if self.decides { "  <- decides" } else { "" };
        let label = format!("tier {}", word(&self.scope));
        lines.add(&label, endpoints + decides);
        lines.add_skipped(&self.skipped);
    }
}

impl ClientAffinity {
    fn text(&self) -> String {
        match self {
            Self::None => "the Service has no session affinity".to_owned(),
            Self::Free => "keeps to no endpoint yet; its next connect chooses".to_owned(),
            Self::Keeps {
                endpoint,
                left_ns,
                in_set,
            } => {
                let left = seconds(*left_ns);
                let but = if *in_set {
                    ""
                } else {
                    ", but that is no longer in the set: its next connect chooses anew"
                };
                format!("keeps to {endpoint} for another {left}{but}")
            }
            Self::Unknown { because } => format!("not known: {because}"),
        }
    }
}
