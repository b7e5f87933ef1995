//! Why a Service port is routed as it is, rule by rule; pure.
//!
//! Invariant: nothing is decided here. [`plan::decide`] decides, and its own
//! functions say why an endpoint is not in a set; this puts that into words.

mod live;
mod resolve;
mod text;
mod words;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::model::{EndpointSlice, ObjectName, Service, ServicePort};
use crate::plan::{self, Basis, Candidate, Decision, Exclusion, Policy, PreferredBy, target_ports};
use crate::report::{self, RouteReport};
use crate::state::State;
use crate::tables::{Frontend, NodeIdentity, Prefer, Scope};

pub use live::{AgentSign, Comparison, differences};
pub use resolve::{Frontends, ResolveError, Target, Wanted};
pub use text::{ClientAffinity, ClientReport, LivePort, PortReport, Report};

/// The JSON form.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Explanation {
    /// `namespace/name`.
    pub service: String,
    /// The node that it is about.
    pub node: String,
    /// Its zone, if it is known.
    pub zone: Option<String>,
    /// Why the whole Service is left to kube-proxy, if it is.
    pub left_alone: Option<String>,
    /// One for each port that was asked for, and family.
    pub ports: Vec<PortExplanation>,
}

/// One Service port of one family.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PortExplanation {
    /// As `shunt plan` has it.
    pub route: RouteReport,
    /// The Service that has the same ClusterIP and port and comes first by name,
    /// so that this one gets no connects.
    pub hidden_by: Option<String>,
    /// Who says what is preferred.
    pub preferred_by: PreferredBy,
    /// What may be missing from the picture: objects that can't be read.
    pub unknown: Vec<String>,
    /// The EndpointSlices of the Service.
    pub slices: Vec<SliceExplanation>,
    /// Endpoints in them, each address and port once.
    pub endpoints: usize,
    /// Which conditions count.
    pub basis: Basis,
    /// Endpoints that do not meet them.
    pub unfit: Vec<Skipped>,
    /// What became of the hints.
    pub hints: HintsExplanation,
    /// In order of preference.
    pub tiers: Vec<TierExplanation>,
}

/// An EndpointSlice of the Service.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SliceExplanation {
    /// Its name.
    pub name: String,
    /// Endpoints in it.
    pub endpoints: usize,
    /// The ports that stand for the Service port; empty if it has none.
    pub target_ports: Vec<u16>,
    /// Why none of its endpoints counts.
    pub left_out: Option<String>,
}

/// What became of the hints.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct HintsExplanation {
    /// Whether they matter with this preference.
    pub used: bool,
    /// Those for nodes.
    pub for_nodes: String,
    /// Those for zones.
    pub for_zones: String,
}

/// A tier, and who is not in it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct TierExplanation {
    /// What bounds it.
    pub scope: Scope,
    /// Whether connects are given its endpoints.
    pub decides: bool,
    /// Its endpoints, sorted as text.
    pub endpoints: Vec<SocketAddr>,
    /// Endpoints that meet the conditions, but are not in the tier.
    pub skipped: Vec<Skipped>,
}

/// An endpoint that is not in a set.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Skipped {
    /// Its address and target port.
    pub endpoint: SocketAddr,
    /// The slice that has it.
    pub slice: String,
    /// The pod behind it, if the slice says so.
    pub pod: Option<String>,
    /// Why, for programs.
    pub reason: Exclusion,
    /// Why, for people.
    pub because: String,
}

/// Explains ports of a Service, one by one.
pub fn explain<'a>(
    state: &State,
    node: &NodeIdentity,
    policy: &Policy,
    service: &Service,
    ports: impl IntoIterator<Item = (&'a ServicePort, IpAddr)>,
) -> Explanation {
    let ports = ports.into_iter();
    Explanation {
        service: service.name.to_string(),
        node: node.name.clone(),
        zone: node.zone.clone(),
        left_alone: service.exempt.as_ref().map(ToString::to_string),
        ports: ports
            .map(|(port, address)| explain_port(state, node, policy, service, port, address))
            .collect(),
    }
}

fn explain_port(
    state: &State,
    node: &NodeIdentity,
    policy: &Policy,
    service: &Service,
    port: &ServicePort,
    address: IpAddr,
) -> PortExplanation {
    let frontend = plan::frontend(port, address);
    let decision = plan::decide(state, service, port, address, node, policy);
    PortExplanation {
        hidden_by: hidden_by(state, &frontend, service),
        preferred_by: decision.preference.by,
        unknown: unknown(state, &service.name),
        slices: state
            .slices(&service.name)
            .map(|slice| explain_slice(slice, port, address.is_ipv6()))
            .collect(),
        endpoints: decision.candidates.len(),
        basis: decision.selection.basis,
        unfit: unfit(&decision),
        hints: explain_hints(&decision),
        tiers: explain_tiers(&decision),
        route: report::route_report(&frontend, &decision.into_route(service, port)),
    }
}

/// Two Services with one ClusterIP can't come from an API server, but from
/// manifests.
fn hidden_by(state: &State, frontend: &Frontend, service: &Service) -> Option<String> {
    let first = plan::owner(state, frontend)?;
    (first.name != service.name).then(|| first.name.to_string())
}

fn unknown(state: &State, service: &ObjectName) -> Vec<String> {
    let rejected = state.rejected_slices(service);
    let mut unknown: Vec<String> = rejected
        .map(|slice| {
            format!(
                "the EndpointSlice {} can't be right and is left out",
                slice.name
            )
        })
        .collect();
    let documents = state.unreadable();
    if documents > 0 {
        unknown.push(format!(
            "{documents} documents of the manifests can't be read"
        ));
    }
    unknown
}

fn explain_slice(slice: &EndpointSlice, port: &ServicePort, is_ipv6: bool) -> SliceExplanation {
    let (target_ports, left_out) = match target_ports(slice, port, is_ipv6) {
        Ok(numbers) => (numbers.collect(), None),
        Err(reason) => (Vec::new(), Some(words::slice(reason, slice, port))),
    };
    SliceExplanation {
        name: slice.name.name.to_string(),
        endpoints: slice.endpoints.len(),
        target_ports,
        left_out,
    }
}

/// Those that fit no tier, for what they are and not for where they are.
fn unfit(decision: &Decision<'_>) -> Vec<Skipped> {
    let exclusion = |it: &Candidate<'_>| {
        decision
            .selection
            .exclusion(decision.selection.scope(), it)
            .filter(|reason| reason.is_condition())
    };
    skipped(decision, exclusion)
}

fn explain_hints(decision: &Decision<'_>) -> HintsExplanation {
    let selection = &decision.selection;
    let wanted = matches!(decision.preference.prefer, Prefer::Hints | Prefer::None);
    HintsExplanation {
        used: wanted && !selection.local_only,
        for_nodes: words::hints(selection.hints.for_nodes, "this node"),
        for_zones: words::hints(selection.hints.for_zones, "the node's zone"),
    }
}

fn explain_tiers(decision: &Decision<'_>) -> Vec<TierExplanation> {
    let mut tiers = decision.tiers.iter();
    let deciding = tiers.position(|it| !it.endpoints.is_empty());
    let tiers = decision.tiers.iter().enumerate();
    tiers
        .map(|(index, tier)| TierExplanation {
            scope: tier.scope,
            decides: deciding == Some(index),
            endpoints: report::tier_report(tier).endpoints,
            skipped: skipped(decision, |it| {
                let reason = decision.selection.exclusion(tier.scope, it);
                reason.filter(|reason| !reason.is_condition())
            }),
        })
        .collect()
}

fn skipped(
    decision: &Decision<'_>,
    exclusion: impl Fn(&Candidate<'_>) -> Option<Exclusion>,
) -> Vec<Skipped> {
    let candidates = decision.candidates.iter();
    candidates
        .filter_map(|it| {
            let reason = exclusion(it)?;
            Some(Skipped {
                endpoint: it.endpoint.address,
                slice: it.slice.name.to_string(),
                pod: it.of_slice.pod.as_deref().map(str::to_owned),
                reason,
                because: words::exclusion(reason, it, &decision.selection),
            })
        })
        .collect()
}

/// Those with one reason together, in the order of their first.
fn by_reason(skipped: &[Skipped]) -> Vec<(&str, Vec<&Skipped>)> {
    let mut places = BTreeMap::new();
    let mut groups: Vec<(&str, Vec<&Skipped>)> = Vec::new();
    for it in skipped {
        let place = *places.entry(&*it.because).or_insert(groups.len());
        if place == groups.len() {
            groups.push((&it.because, Vec::new()));
        }
        groups[place].1.push(it);
    }
    groups
}
