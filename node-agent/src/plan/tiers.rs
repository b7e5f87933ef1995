//! Nearest first.

use super::select::{Candidate, Selection};
use crate::tables::{Prefer, Scope, Tier};

/// The tiers of a Service port. `internalTrafficPolicy: Local` has one, which
/// nothing widens.
pub fn tiers(candidates: &[Candidate<'_>], selection: &Selection<'_>, prefer: Prefer) -> Vec<Tier> {
    scopes(selection, prefer)
        .iter()
        .map(|scope| tier(*scope, candidates, selection))
        .collect()
}

fn scopes(selection: &Selection<'_>, prefer: Prefer) -> &'static [Scope] {
    match (prefer, selection.scope()) {
        (_, Scope::Node) => &[Scope::Node],
        (Prefer::Node, _) => &[Scope::Node, Scope::Zone, Scope::Cluster],
        (Prefer::Zone, _) => &[Scope::Zone, Scope::Cluster],
        (Prefer::Hints, Scope::Hints) => &[Scope::Hints, Scope::Cluster],
        (Prefer::None, Scope::Hints) => &[Scope::Hints],
        (Prefer::Hints | Prefer::None, _) => &[Scope::Cluster],
    }
}

fn tier(scope: Scope, candidates: &[Candidate<'_>], selection: &Selection<'_>) -> Tier {
    let mut endpoints: Vec<_> = candidates
        .iter()
        .filter(|it| selection.exclusion(scope, it).is_none())
        .map(|it| it.endpoint)
        .collect();
    endpoints.sort();
    Tier { scope, endpoints }
}
