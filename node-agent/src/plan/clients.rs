//! Which pods of the node are left alone.

use std::collections::BTreeMap;

use shunt_common::Reason;

use crate::model::Pod;
use crate::state::State;
use crate::tables::Client;

/// Those whose cgroup is known, by its id.
pub(super) fn left_alone(state: &State, node: &str) -> BTreeMap<u64, Client> {
    let clients = opted_out(state, node).filter_map(|(pod, reason)| {
        let client = Client {
            pod: pod.name.clone(),
            reason,
        };
        Some((state.cgroup_of(pod)?, client))
    });
    clients.collect()
}

/// The pods that are to be left alone, whether or not they have a cgroup yet.
pub fn opted_out<'a>(
    state: &'a State,
    node: &'a str,
) -> impl Iterator<Item = (&'a Pod, Reason)> + 'a {
    let here = move |pod: &&Pod| pod.node.as_deref() == Some(node) && !pod.finished;
    let pods = state.pods().filter(here);
    pods.filter_map(|pod| Some((pod, reason(state, pod)?)))
}

/// Why a pod is left alone. Its own annotation outdoes what goes for its
/// namespace and for meshes.
pub fn reason(state: &State, pod: &Pod) -> Option<Reason> {
    let is_off = || {
        let namespace = state.namespace(&pod.name.namespace);
        namespace.is_some_and(|namespace| namespace.off)
    };
    match pod.mode {
        Some(true) => None,
        Some(false) => Some(Reason::Annotation),
        None if is_off() => Some(Reason::Namespace),
        None => pod.in_mesh.then_some(Reason::Mesh),
    }
}
