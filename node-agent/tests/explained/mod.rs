//! That an explanation says what the plan does, and that its reasons are true.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use node_agent::explain::{Explanation, PortExplanation, Skipped, explain};
use node_agent::model::{Service, SliceEndpoint};
use node_agent::plan::{Exclusion, Policy};
use node_agent::report::{RouteReport, RoutesReport};
use node_agent::state::State;
use node_agent::tables::{NodeIdentity, Verdict};
use proptest::prelude::*;

/// Explains every Service port, and holds all of it to the plan.
pub(crate) fn check(
    state: &State,
    node: &NodeIdentity,
    policy: &Policy,
    planned: &RoutesReport,
) -> Result<(), TestCaseError> {
    let mut explained = BTreeMap::new();
    for service in state.services() {
        let explanation = explain_all(state, node, policy, service);
        prop_assert_eq!(
            explanation.left_alone.is_some(),
            service.cluster_ips.is_empty(),
            "{:?}",
            service
        );
        for port in explanation.ports {
            check_port(state, node, service, &port)?;
            if port.hidden_by.is_none() {
                let before = explained.insert(key(&port.route), port.route);
                prop_assert!(before.is_none(), "explained twice: {:?}", before);
            }
        }
    }
    let routes = planned.routes.iter().map(|it| (key(it), it.clone()));
    prop_assert_eq!(explained, routes.collect::<BTreeMap<_, _>>());
    Ok(())
}

fn key(route: &RouteReport) -> (SocketAddr, String) {
    let address = SocketAddr::new(route.address, route.port);
    (address, route.protocol.to_string())
}

fn explain_all(
    state: &State,
    node: &NodeIdentity,
    policy: &Policy,
    service: &Service,
) -> Explanation {
    let addresses = || service.cluster_ips.iter().copied();
    let ports = service.ports.iter();
    let ports = ports.flat_map(|port| addresses().map(move |ip| (port, ip)));
    explain(state, node, policy, service, ports)
}

fn check_port(
    state: &State,
    node: &NodeIdentity,
    service: &Service,
    port: &PortExplanation,
) -> Result<(), TestCaseError> {
    let balance = port.route.verdict == Verdict::Balance;
    let first = port.tiers.iter().position(|it| !it.endpoints.is_empty());
    prop_assert_eq!(first.is_some(), balance);
    for (index, (tier, of_route)) in port.tiers.iter().zip(&port.route.tiers).enumerate() {
        prop_assert_eq!(
            (&tier.scope, &tier.endpoints),
            (&of_route.scope, &of_route.endpoints)
        );
        prop_assert_eq!(tier.decides, first == Some(index));
        // Each endpoint is in the tier, or there is one reason why not.
        let skipped = tier.skipped.iter().chain(&port.unfit);
        let mut told: Vec<SocketAddr> = skipped.map(|it| it.endpoint).collect();
        told.extend(&tier.endpoints);
        prop_assert_eq!(told.len(), port.endpoints, "{:?}", port);
        prop_assert_eq!(
            BTreeSet::from_iter(told).len(),
            port.endpoints,
            "{:?}",
            port
        );
    }
    prop_assert_eq!(port.tiers.len(), port.route.tiers.len());
    let skipped = port.tiers.iter().flat_map(|tier| &tier.skipped);
    for skipped in skipped.chain(&port.unfit) {
        let slices = state.slices(&service.name);
        let mut entries = slices
            .filter(|slice| *slice.name.name == *skipped.slice)
            .flat_map(|slice| &slice.endpoints)
            .filter(|it| it.address == skipped.endpoint.ip());
        prop_assert!(
            entries.any(|it| is_true(skipped, it, node)),
            "not so: {:?} in {:?}",
            skipped,
            port
        );
    }
    Ok(())
}

/// The reason, looked up in the slice.
fn is_true(skipped: &Skipped, it: &SliceEndpoint, node: &NodeIdentity) -> bool {
    let here = Some(node.name.as_str());
    let zone = node.zone.as_deref();
    let names =
        |hints: &[Arc<str>], wanted: Option<&str>| hints.iter().any(|it| Some(&**it) == wanted);
    match skipped.reason {
        Exclusion::NotReady => !it.ready && !it.terminating,
        Exclusion::Terminating => !it.ready && it.terminating && it.serving,
        Exclusion::NotServing => it.terminating && !it.serving,
        Exclusion::OtherNode => it.node.is_some() && it.node.as_deref() != here,
        Exclusion::NodeUnknown => it.node.is_none(),
        Exclusion::OtherZone => zone.is_some() && it.zone.is_some() && it.zone.as_deref() != zone,
        Exclusion::ZoneUnknown => zone.is_some() && it.zone.is_none(),
        Exclusion::OwnZoneUnknown => zone.is_none(),
        Exclusion::HintedElsewhere => {
            let elsewhere = |hints: &[Arc<str>], here| !hints.is_empty() && !names(hints, here);
            elsewhere(&it.hint_nodes, here) || elsewhere(&it.hint_zones, zone)
        }
    }
}
