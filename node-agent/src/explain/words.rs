//! Reasons in words.

use std::fmt::Display;
use std::sync::Arc;

use crate::model::{EndpointSlice, ServicePort};
use crate::plan::{Candidate, Exclusion, HintOutcome, Selection, SliceExclusion};

/// Why an endpoint is skipped.
pub(super) fn exclusion(
    reason: Exclusion,
    candidate: &Candidate<'_>,
    selection: &Selection<'_>,
) -> String {
    let it = candidate.of_slice;
    match reason {
        Exclusion::NotReady => "not ready".to_owned(),
        Exclusion::Terminating => "terminating, while others are ready".to_owned(),
        Exclusion::NotServing => "terminating, and no longer serving".to_owned(),
        Exclusion::NodeUnknown => "its slice has no nodeName for it: never local".to_owned(),
        Exclusion::OtherNode => format!("on node {}", name(it.node.as_ref())),
        Exclusion::OwnZoneUnknown => "this node has no zone".to_owned(),
        Exclusion::ZoneUnknown => "its slice has no zone for it".to_owned(),
        Exclusion::OtherZone => format!("in zone {}", name(it.zone.as_ref())),
        Exclusion::HintedElsewhere if selection.hints.for_nodes == HintOutcome::Applied => {
            format!("its hints are for {}", list("node", &it.hint_nodes))
        }
        Exclusion::HintedElsewhere => format!("its hints are for {}", list("zone", &it.hint_zones)),
    }
}

/// What became of the hints of one kind.
pub(super) fn hints(outcome: HintOutcome, here: &str) -> String {
    match outcome {
        HintOutcome::Applied => format!("applied: only endpoints that have one for {here}"),
        HintOutcome::NotAsked => "not asked".to_owned(),
        HintOutcome::NoneReady => "ignored, since no endpoint is ready".to_owned(),
        HintOutcome::NoneGiven => "ignored, since no ready endpoint has one".to_owned(),
        HintOutcome::Missing(endpoint) => {
            format!("ignored, since {endpoint} is ready and has none")
        }
        HintOutcome::NoneForHere => format!("ignored, since none is for {here}"),
        HintOutcome::ZoneUnknown => "ignored, since the node has no zone".to_owned(),
    }
}

/// Why a slice is left out.
pub(super) fn slice(reason: SliceExclusion, slice: &EndpointSlice, port: &ServicePort) -> String {
    match reason {
        SliceExclusion::OtherFamily if slice.is_ipv6 => "its addresses are IPv6".to_owned(),
        SliceExclusion::OtherFamily => "its addresses are IPv4".to_owned(),
        SliceExclusion::NoSuchPort => {
            let ports = slice.ports.iter();
            let ports: Vec<String> = ports
                .map(|it| format!("{:?}/{}", it.name, it.protocol))
                .collect();
            let ports = if ports.is_empty() {
                "none".to_owned()
            } else {
                ports.join(", ")
            };
            format!(
                "it has no port {:?}/{}, only: {ports}",
                port.name, port.protocol
            )
        }
    }
}

fn name(name: Option<&Arc<str>>) -> impl Display {
    name.map_or_else(String::new, ToString::to_string)
}

fn list(kind: &str, names: &[Arc<str>]) -> String {
    let plural = if names.len() == 1 { "" } else { "s" };
    format!("{kind}{plural} {}", names.join(", "))
}
