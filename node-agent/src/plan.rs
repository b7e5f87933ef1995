//! Which endpoints each Service port gets, in order of preference; pure.
//!
//! The unit of decision is one Service port of one IP family, never the whole
//! Service: [`select`] gathers its endpoints and judges them as kube-proxy
//! does, and [`tiers`] puts the node and the zone first.

mod clients;
mod select;
mod tiers;

use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{Service, ServicePort};
use crate::state::State;
use crate::tables::{
    Frontend, NodeIdentity, Prefer, Protocol, Route, ServicePortName, Tables, Tier, Verdict,
};

pub use clients::{opted_out, reason};
pub use select::{
    Basis, Candidate, Exclusion, HintOutcome, Hints, Place, Selection, SliceExclusion, candidates,
    select, target_ports,
};
pub use tiers::tiers;

/// What is the same for all Services.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Policy {
    /// What to prefer, for Services that do not say.
    pub prefer: Prefer,
}

/// The routing table of a node.
pub fn plan(state: &State, node_name: &str, policy: &Policy) -> Tables {
    let mut tables = Tables {
        left_alone: clients::left_alone(state, node_name),
        wishes: clients::wishes(state, node_name),
        node: NodeIdentity::of(node_name, state.node(node_name)),
        ..Tables::default()
    };
    for service in state.services() {
        for (frontend, route) in plan_service(state, service, &tables.node, policy) {
            // Two Services with one ClusterIP can't come from an API server.
            // The first by name keeps it, whatever came first.
            if let Entry::Vacant(entry) = tables.routes.entry(frontend) {
                entry.insert(route);
            }
        }
    }
    tables
}

/// The routes of one Service.
fn plan_service(
    state: &State,
    service: &Service,
    node: &NodeIdentity,
    policy: &Policy,
) -> Vec<(Frontend, Route)> {
    let ports = service.ports.iter();
    let frontends = ports.flat_map(|port| service.cluster_ips.iter().map(move |ip| (port, *ip)));
    frontends
        .map(|(port, address)| {
            let decision = decide(state, service, port, address, node, policy);
            (frontend(port, address), decision.into_route(service, port))
        })
        .collect()
}

/// What clients of a Service port connect to.
pub fn frontend(port: &ServicePort, address: IpAddr) -> Frontend {
    Frontend {
        address,
        port: port.port,
        protocol: port.protocol,
    }
}

/// The Service whose port a ClusterIP and port is in the table of [`plan`].
pub fn owner<'a>(state: &'a State, wanted: &Frontend) -> Option<&'a Service> {
    let has = |service: &Service, address| {
        let mut ports = service.ports.iter();
        ports.any(|port| frontend(port, address) == *wanted)
    };
    state
        .services()
        .find(|service| service.cluster_ips.iter().any(|ip| has(service, *ip)))
}

/// What is decided for a Service port of one family, and from what.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// Its endpoints, usable or not.
    pub candidates: Vec<Candidate<'a>>,
    /// kube-proxy's choice among them.
    pub selection: Selection<'a>,
    /// What is preferred.
    pub preference: Preference,
    /// In order of preference.
    pub tiers: Vec<Tier>,
    /// What a connect gets.
    pub verdict: Verdict,
}

/// What is preferred, and who says so.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Preference {
    /// What.
    pub prefer: Prefer,
    /// Who.
    pub by: PreferredBy,
}

/// Who says what is preferred.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreferredBy {
    /// The annotation `shunt.dev/prefer`.
    Annotation,
    /// `trafficDistribution`, which asks for hints.
    TrafficDistribution,
    /// The agent's flag.
    Flag,
}

impl Decision<'_> {
    /// As the table has it.
    pub fn into_route(self, service: &Service, port: &ServicePort) -> Route {
        Route {
            name: ServicePortName {
                namespace: Arc::clone(&service.name.namespace),
                service: Arc::clone(&service.name.name),
                port: Arc::clone(&port.name),
            },
            verdict: self.verdict,
            prefer: self.preference.prefer,
            affinity_seconds: service.affinity_seconds,
            splice: service.splice,
            max_local_connections: service
                .max_local_connections
                .filter(|_| port.protocol == Protocol::Tcp),
            terminating: self.terminating(),
            tiers: self.tiers,
        }
    }

    /// Whether the endpoints in use are on their way out, since none is ready.
    pub fn terminating(&self) -> bool {
        self.verdict == Verdict::Balance && self.selection.basis == Basis::Terminating
    }
}

/// Decides for a Service port of one family.
pub fn decide<'a>(
    state: &'a State,
    service: &Service,
    port: &ServicePort,
    address: IpAddr,
    node: &'a NodeIdentity,
    policy: &Policy,
) -> Decision<'a> {
    let place = Place {
        node: &node.name,
        zone: node.zone.as_deref(),
        node_hints: true,
    };
    let slices = state.slices(&service.name);
    let candidates = candidates(slices, port, address.is_ipv6(), &place);
    let selection = select(&candidates, service.local_only, &place);
    let preference = preference(service, policy);
    let tiers = tiers(&candidates, &selection, preference.prefer);
    let usable = tiers.iter().any(|tier| !tier.endpoints.is_empty());
    let verdict = if usable {
        Verdict::Balance
    } else if state.may_lack_endpoints(&service.name) {
        // Refusing would leave the caller worse off than without shunt.
        Verdict::Pass
    } else {
        Verdict::Refuse
    };
    Decision {
        candidates,
        selection,
        preference,
        tiers,
        verdict,
    }
}

/// The annotation, else hints for a Service that asks for a distribution, else
/// the agent's flag.
fn preference(service: &Service, policy: &Policy) -> Preference {
    let (prefer, by) = match service.prefer {
        Some(prefer) => (prefer, PreferredBy::Annotation),
        None if service.has_distribution => (Prefer::Hints, PreferredBy::TrafficDistribution),
        None => (policy.prefer, PreferredBy::Flag),
    };
    Preference { prefer, by }
}
