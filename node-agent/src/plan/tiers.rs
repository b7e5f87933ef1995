//! Nearest first.

use super::select::{Candidate, Place, select};
use crate::tables::{Prefer, Scope, Tier};

/// The tiers of a Service port. `internalTrafficPolicy: Local` has one, which
/// nothing widens.
pub fn tiers(
    candidates: &[Candidate<'_>],
    local_only: bool,
    prefer: Prefer,
    place: &Place<'_>,
) -> Vec<Tier> {
    let selection = select(candidates, local_only, place);
    if local_only {
        return vec![tier(Scope::Node, &selection.usable, |_| true)];
    }
    let all = &selection.all;
    let cluster = || tier(Scope::Cluster, all, |_| true);
    let zone = || tier(Scope::Zone, all, |it| is_in_zone(it, place));
    let hints = || tier(Scope::Hints, &selection.usable, |_| true);
    match prefer {
        Prefer::Node => vec![
            tier(Scope::Node, all, |it| it.endpoint.local),
            zone(),
            cluster(),
        ],
        Prefer::Zone => vec![zone(), cluster()],
        Prefer::Hints if selection.hinted => vec![hints(), cluster()],
        Prefer::None if selection.hinted => vec![hints()],
        Prefer::Hints | Prefer::None => vec![cluster()],
    }
}

fn tier(scope: Scope, candidates: &[Candidate<'_>], fits: impl Fn(&Candidate<'_>) -> bool) -> Tier {
    let mut endpoints: Vec<_> = candidates
        .iter()
        .filter(|it| fits(it))
        .map(|it| it.endpoint)
        .collect();
    endpoints.sort();
    Tier { scope, endpoints }
}

/// By what the slice says of the endpoint; a node or an endpoint without a zone
/// is in none.
fn is_in_zone(candidate: &Candidate<'_>, place: &Place<'_>) -> bool {
    place.zone.is_some() && candidate.of_slice.zone.as_deref() == place.zone
}
