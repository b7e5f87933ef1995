//! Which pods of the node are left alone, and which are spliced or not.

use std::collections::BTreeMap;
use std::net::IpAddr;

use shunt_common::{Reason, Wish};

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

/// Whether connections of a pod's addresses are spliced, of those that have a
/// wish. A pod that is left alone has that of not to.
pub(super) fn wishes(state: &State, node: &str) -> BTreeMap<IpAddr, Wish> {
    let pods = here(state, node).flat_map(|pod| {
        let wish = match reason(state, pod) {
            Some(_) => Wish::Off,
            None => pod.splice,
        };
        let addresses = pod.addresses.iter().filter(move |_| wish != Wish::None);
        addresses.map(move |address| (*address, wish))
    });
    pods.collect()
}

fn here<'a>(state: &'a State, node: &'a str) -> impl Iterator<Item = &'a Pod> + 'a {
    let here = move |pod: &&Pod| pod.node.as_deref() == Some(node) && !pod.finished;
    state.pods().filter(here)
}

/// The pods that are to be left alone, whether or not they have a cgroup yet.
pub fn opted_out<'a>(
    state: &'a State,
    node: &'a str,
) -> impl Iterator<Item = (&'a Pod, Reason)> + 'a {
    here(state, node).filter_map(|pod| Some((pod, reason(state, pod)?)))
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
