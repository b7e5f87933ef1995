//! The endpoints of one Service port, and which of them kube-proxy would use
//! (`pkg/proxy/endpointslicecache.go` and `pkg/proxy/topology.go` in
//! kubernetes/kubernetes, 1.36).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::model::{EndpointSlice, ServicePort, SliceEndpoint};
use crate::tables::Endpoint;

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
}

/// kube-proxy's set.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Selection<'a> {
    /// Those that a new connection may use.
    pub usable: Vec<Candidate<'a>>,
    /// All that are ready (or, if none is, still serving), whatever the hints.
    pub all: Vec<Candidate<'a>>,
    /// Whether hints narrowed the set.
    pub hinted: bool,
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
    for slice in slices.filter(|slice| slice.is_ipv6 == is_ipv6) {
        let ports = slice.ports.iter();
        let numbers = ports
            .filter(|it| it.name == port.name && it.protocol == port.protocol)
            .map(|it| it.port);
        for number in numbers {
            for of_slice in &slice.endpoints {
                let candidate = Candidate::new(of_slice, number, place);
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

/// kube-proxy's choice for a ClusterIP.
pub fn select<'a>(
    candidates: &[Candidate<'a>],
    local_only: bool,
    place: &Place<'_>,
) -> Selection<'a> {
    if local_only {
        let local = candidates
            .iter()
            .copied()
            .filter(|it| it.endpoint.local)
            .collect::<Vec<_>>();
        let usable = ready_or_serving(&local);
        return Selection {
            all: usable.clone(),
            usable,
            hinted: false,
        };
    }
    let all = ready_or_serving(candidates);
    let hint = hint(candidates, place);
    let usable: Vec<_> = match hint {
        // Hints are about ready endpoints; where they apply, one fits.
        Some(hint) => all.iter().copied().filter(|it| hint.fits(it)).collect(),
        None => all.clone(),
    };
    Selection {
        usable,
        all,
        hinted: hint.is_some(),
    }
}

/// The ready ones; if there is none, those that still serve while they
/// terminate.
fn ready_or_serving<'a>(candidates: &[Candidate<'a>]) -> Vec<Candidate<'a>> {
    let ready: Vec<_> = candidates
        .iter()
        .copied()
        .filter(|it| it.of_slice.ready)
        .collect();
    if !ready.is_empty() {
        return ready;
    }
    let serving = |it: &Candidate<'_>| it.of_slice.serving && it.of_slice.terminating;
    candidates.iter().copied().filter(serving).collect()
}

/// Which hints apply.
#[derive(Clone, Copy)]
enum Hint<'a> {
    Node(&'a str),
    Zone(&'a str),
}

impl Hint<'_> {
    fn fits(&self, candidate: &Candidate<'_>) -> bool {
        match self {
            Self::Node(node) => candidate
                .of_slice
                .hint_nodes
                .iter()
                .any(|it| **it == **node),
            Self::Zone(zone) => candidate
                .of_slice
                .hint_zones
                .iter()
                .any(|it| **it == **zone),
        }
    }
}

/// Hints apply only if every ready endpoint has one of the kind, and one of
/// them is for here; those for nodes are asked first. Endpoints that are not
/// ready have no say: each rollout would turn the hints off (cilium#47960).
fn hint<'a>(candidates: &[Candidate<'_>], place: &Place<'a>) -> Option<Hint<'a>> {
    let ready = || candidates.iter().filter(|it| it.of_slice.ready);
    let for_node = Hint::Node(place.node);
    let all_for_nodes = ready().all(|it| !it.of_slice.hint_nodes.is_empty());
    if place.node_hints && all_for_nodes && ready().any(|it| for_node.fits(it)) {
        return Some(for_node);
    }
    let for_zone = Hint::Zone(place.zone?);
    let all_for_zones = ready().all(|it| !it.of_slice.hint_zones.is_empty());
    (all_for_zones && ready().any(|it| for_zone.fits(it))).then_some(for_zone)
}

impl<'a> Candidate<'a> {
    fn new(of_slice: &'a SliceEndpoint, port: u16, place: &Place<'_>) -> Self {
        let local = of_slice.node.as_deref() == Some(place.node);
        let endpoint = Endpoint {
            address: (of_slice.address, port).into(),
            local,
        };
        Self { endpoint, of_slice }
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
