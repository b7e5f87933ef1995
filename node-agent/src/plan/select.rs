//! The endpoints of one Service port, and which of them kube-proxy would use
//! (`pkg/proxy/endpointslicecache.go` and `pkg/proxy/topology.go` in
//! kubernetes/kubernetes, 1.36).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shunt_common::NodeId;

use crate::model::{EndpointSlice, ObjectName, ServicePort, SliceEndpoint};
use crate::tables::{Endpoint, Scope};

/// Where the choice is made.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The node.
    pub node: &'a str,
    /// Its zone, if it is known.
    pub zone: Option<&'a str>,
    /// Whether hints for nodes count (they do since Kubernetes 1.34).
    pub node_hints: bool,
}

/// An endpoint of the Service port, usable or not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate<'a> {
    /// Address and target port, and whether it is on this node.
    pub endpoint: Endpoint,
    /// What its slice says of it.
    pub of_slice: &'a SliceEndpoint,
    /// The name of that slice.
    pub slice: &'a ObjectName,
}

/// kube-proxy's choice among the candidates of a Service port.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// Where it was made.
    pub place: Place<'a>,
    /// `internalTrafficPolicy: Local`: no other node's endpoint is used.
    pub local_only: bool,
    /// Which conditions an endpoint must meet.
    pub basis: Basis,
    /// What became of the hints.
    pub hints: Hints,
}

/// Which conditions an endpoint must meet.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Ready.
    Ready,
    /// None is ready: still serving while it terminates.
    Terminating,
}

/// What became of the hints of a Service port's slices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Hints {
    /// Those for nodes, which are asked first.
    pub for_nodes: HintOutcome,
    /// Those for zones.
    pub for_zones: HintOutcome,
}

/// Whether hints of one kind narrow the set, and why not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HintOutcome {
    /// They do.
    Applied,
    /// Not read: the policy is `Local`, those for nodes apply already, or they
    /// are switched off.
    NotAsked,
    /// No endpoint is ready, and only ready ones count.
    NoneReady,
    /// No ready endpoint has one.
    NoneGiven,
    /// This ready endpoint has none.
    Missing(SocketAddr),
    /// None of them is for here.
    NoneForHere,
    /// The node has no zone.
    ZoneUnknown,
}

/// Why an endpoint is not in a set.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exclusion {
    /// Not ready.
    NotReady,
    /// Terminating, while others are ready.
    Terminating,
    /// No longer serving, though it terminates.
    NotServing,
    /// On another node.
    OtherNode,
    /// Its slice names no node for it.
    NodeUnknown,
    /// In another zone.
    OtherZone,
    /// Its slice names no zone for it.
    ZoneUnknown,
    /// The node itself has no zone.
    OwnZoneUnknown,
    /// Its hints are for elsewhere.
    HintedElsewhere,
}

/// The endpoints of a Service port in these slices, each address and port once.
///
/// Of several entries for one, the one that is not terminating wins, then the
/// ready one, then the serving one; upstream leaves the last two open.
pub fn candidates<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    port: &ServicePort,
    is_ipv6: bool,
    place: &Place<'_>,
) -> Vec<Candidate<'a>> {
    let mut by_address: BTreeMap<SocketAddr, Candidate<'a>> = BTreeMap::new();
    for slice in slices {
        let Ok(numbers) = target_ports(slice, port, is_ipv6) else {
            continue;
        };
        for number in numbers {
            for of_slice in &slice.endpoints {
                let candidate = Candidate::new(slice, of_slice, number, place);
                by_address
                    .entry(candidate.endpoint.address)
                    .and_modify(|known| {
                        if candidate.rank() > known.rank() {
                            *known = candidate;
                        }
                    })
                    .or_insert(candidate);
            }
        }
    }
    by_address.into_values().collect()
}

/// Why a slice has no endpoint of a Service port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SliceExclusion {
    /// Its addresses are of the other family.
    OtherFamily,
    /// It has no port with the name and the protocol of the Service port.
    NoSuchPort,
}

/// The ports of a slice that a Service port stands for; never none.
pub fn target_ports(
    slice: &EndpointSlice,
    port: &ServicePort,
    is_ipv6: bool,
) -> Result<impl Iterator<Item = u16> + Clone, SliceExclusion> {
    if slice.is_ipv6 != is_ipv6 {
        return Err(SliceExclusion::OtherFamily);
    }
    let ports = slice.ports.iter();
    let mut numbers = ports
        .filter(|it| it.name == port.name && it.protocol == port.protocol)
        .map(|it| it.port)
        .peekable();
    if numbers.peek().is_none() {
        return Err(SliceExclusion::NoSuchPort);
    }
    Ok(numbers)
}

/// kube-proxy's choice for a ClusterIP.
pub fn select<'a>(
    candidates: &[Candidate<'_>],
    local_only: bool,
    place: &Place<'a>,
) -> Selection<'a> {
    let counts = |it: &&Candidate<'_>| !local_only || it.endpoint.local;
    let any_ready = candidates.iter().filter(counts).any(|it| it.of_slice.ready);
    let basis = if any_ready {
        Basis::Ready
    } else {
        Basis::Terminating
    };
    let hints = if local_only {
        Hints::NOT_ASKED
    } else {
        Hints::judge(candidates, place)
    };
    Selection {
        place: *place,
        local_only,
        basis,
        hints,
    }
}

impl Selection<'_> {
    /// What bounds kube-proxy's own set.
    pub fn scope(&self) -> Scope {
        if self.local_only {
            Scope::Node
        } else if self.hints.apply() {
            Scope::Hints
        } else {
            Scope::Cluster
        }
    }

    /// Why an endpoint is not in the set with these bounds; `None` if it is.
    pub fn exclusion(&self, scope: Scope, candidate: &Candidate<'_>) -> Option<Exclusion> {
        let of_scope = || match scope {
            Scope::Node => other_node(candidate),
            Scope::Zone => other_zone(candidate, &self.place),
            Scope::Hints => self.hints.exclusion(candidate, &self.place),
            Scope::Cluster => None,
        };
        if self.local_only {
            // The others have no say, also about the conditions.
            return other_node(candidate).or_else(|| self.basis.exclusion(candidate));
        }
        self.basis.exclusion(candidate).or_else(of_scope)
    }
}

impl Basis {
    fn exclusion(self, candidate: &Candidate<'_>) -> Option<Exclusion> {
        let it = candidate.of_slice;
        match self {
            Self::Ready if it.ready => None,
            Self::Ready if it.terminating && it.serving => Some(Exclusion::Terminating),
            Self::Terminating if it.terminating && it.serving => None,
            _ if it.terminating => Some(Exclusion::NotServing),
            _ => Some(Exclusion::NotReady),
        }
    }
}

impl Exclusion {
    /// Whether it is for what the endpoint is, and not for where it is.
    pub fn is_condition(self) -> bool {
        matches!(self, Self::NotReady | Self::Terminating | Self::NotServing)
    }
}

fn other_node(candidate: &Candidate<'_>) -> Option<Exclusion> {
    match candidate.of_slice.node {
        _ if candidate.endpoint.local => None,
        None => Some(Exclusion::NodeUnknown),
        Some(_) => Some(Exclusion::OtherNode),
    }
}

/// By what the slice says of the endpoint; one on this node is in the node's
/// zone, whatever that is.
fn other_zone(candidate: &Candidate<'_>, place: &Place<'_>) -> Option<Exclusion> {
    match (place.zone, candidate.of_slice.zone.as_deref()) {
        _ if candidate.endpoint.local => None,
        (None, _) => Some(Exclusion::OwnZoneUnknown),
        (_, None) => Some(Exclusion::ZoneUnknown),
        (Some(own), Some(zone)) if own == zone => None,
        _ => Some(Exclusion::OtherZone),
    }
}

impl Hints {
    const NOT_ASKED: Self = Self {
        for_nodes: HintOutcome::NotAsked,
        for_zones: HintOutcome::NotAsked,
    };

    /// Whether they narrow the set.
    pub fn apply(&self) -> bool {
        [self.for_nodes, self.for_zones].contains(&HintOutcome::Applied)
    }

    /// Hints apply only if every ready endpoint has one of the kind, and one of
    /// them is for here; those for nodes are asked first. Endpoints that are not
    /// ready have no say: each rollout would turn the hints off (cilium#47960).
    fn judge(candidates: &[Candidate<'_>], place: &Place<'_>) -> Self {
        let ready = || candidates.iter().filter(|it| it.of_slice.ready);
        let mut hints = Self::NOT_ASKED;
        if place.node_hints {
            hints.for_nodes = outcome(ready(), Candidate::hint_nodes, place.node);
        }
        if hints.for_nodes != HintOutcome::Applied {
            hints.for_zones = match place.zone {
                Some(zone) => outcome(ready(), Candidate::hint_zones, zone),
                None => HintOutcome::ZoneUnknown,
            };
        }
        hints
    }

    fn exclusion(&self, candidate: &Candidate<'_>, place: &Place<'_>) -> Option<Exclusion> {
        let fits = if self.for_nodes == HintOutcome::Applied {
            names(candidate.hint_nodes(), place.node)
        } else {
            let zone = place.zone.unwrap_or_default();
            self.for_zones != HintOutcome::Applied || names(candidate.hint_zones(), zone)
        };
        (!fits).then_some(Exclusion::HintedElsewhere)
    }
}

/// What becomes of the hints of one kind.
fn outcome<'c, 'a: 'c>(
    ready: impl Iterator<Item = &'c Candidate<'a>> + Clone,
    hints: impl Fn(&Candidate<'a>) -> &'a [Arc<str>],
    here: &str,
) -> HintOutcome {
    let mut without = ready.clone().filter(|it| hints(it).is_empty());
    if ready.clone().next().is_none() {
        HintOutcome::NoneReady
    } else if ready.clone().all(|it| hints(it).is_empty()) {
        HintOutcome::NoneGiven
    } else if let Some(candidate) = without.next() {
        HintOutcome::Missing(candidate.endpoint.address)
    } else if ready.clone().any(|it| names(hints(it), here)) {
        HintOutcome::Applied
    } else {
        HintOutcome::NoneForHere
    }
}

fn names(hints: &[Arc<str>], here: &str) -> bool {
    hints.iter().any(|it| **it == *here)
}

impl<'a> Candidate<'a> {
    fn new(
        slice: &'a EndpointSlice,
        of_slice: &'a SliceEndpoint,
        port: u16,
        place: &Place<'_>,
    ) -> Self {
        let local = of_slice.node.as_deref() == Some(place.node);
        let other = of_slice.node.as_deref().filter(|_| !local);
        let endpoint = Endpoint {
            address: (of_slice.address, port).into(),
            local,
            node: other.map_or(NodeId::UNKNOWN, NodeId::of),
        };
        Self {
            endpoint,
            of_slice,
            slice: &slice.name,
        }
    }

    fn hint_nodes(&self) -> &'a [Arc<str>] {
        &self.of_slice.hint_nodes
    }

    fn hint_zones(&self) -> &'a [Arc<str>] {
        &self.of_slice.hint_zones
    }

    fn rank(&self) -> (Reverse<bool>, bool, bool) {
        let SliceEndpoint {
            ready,
            serving,
            terminating,
            ..
        } = *self.of_slice;
        (Reverse(terminating), ready, serving)
    }
}
