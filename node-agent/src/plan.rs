//! Which endpoints each Service port gets, in order of preference; pure.
//!
//! The unit of decision is one Service port of one IP family, never the whole
//! Service: [`select`] gathers its endpoints and judges them as kube-proxy
//! does, and [`tiers`] puts the node and the zone first.

mod select;
mod tiers;

use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::{Service, ServicePort};
use crate::state::State;
use crate::tables::{Frontend, NodeIdentity, Prefer, Route, ServicePortName, Tables, Verdict};

pub use select::{Candidate, Place, Selection, candidates, select};
pub use tiers::tiers;

/// What is the same for all Services.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Policy {
    /// What to prefer, for Services that do not say.
    pub prefer: Prefer,
}

/// The routing table of a node.
pub fn plan(state: &State, node_name: &str, policy: &Policy) -> Tables {
    let zone = state.node(node_name).and_then(|node| node.zone.as_deref());
    let node = NodeIdentity {
        name: node_name.to_owned(),
        zone: zone.map(str::to_owned),
    };
    let mut tables = Tables {
        node,
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
            let frontend = Frontend {
                address,
                port: port.port,
                protocol: port.protocol,
            };
            (
                frontend,
                plan_port(state, service, port, address, node, policy),
            )
        })
        .collect()
}

fn plan_port(
    state: &State,
    service: &Service,
    port: &ServicePort,
    address: IpAddr,
    node: &NodeIdentity,
    policy: &Policy,
) -> Route {
    let place = Place {
        node: &node.name,
        zone: node.zone.as_deref(),
        node_hints: true,
    };
    let slices = state.slices(&service.name);
    let candidates = candidates(slices, port, address.is_ipv6(), &place);
    let prefer = preference(service, policy);
    let tiers = tiers(&candidates, service.local_only, prefer, &place);
    let usable = tiers.iter().any(|tier| !tier.endpoints.is_empty());
    let verdict = if usable {
        Verdict::Balance
    } else if state.may_lack_endpoints(&service.name) {
        // Refusing would leave the caller worse off than without shunt.
        Verdict::Pass
    } else {
        Verdict::Refuse
    };
    Route {
        name: ServicePortName {
            namespace: Arc::clone(&service.name.namespace),
            service: Arc::clone(&service.name.name),
            port: Arc::clone(&port.name),
        },
        verdict,
        prefer,
        affinity_seconds: service.affinity_seconds,
        splice: service.splice,
        tiers,
    }
}

/// The annotation, else hints for a Service that asks for a distribution, else
/// the agent's flag.
fn preference(service: &Service, policy: &Policy) -> Prefer {
    match service.prefer {
        Some(prefer) => prefer,
        None if service.has_distribution => Prefer::Hints,
        None => policy.prefer,
    }
}
