//! The objects that are known, fed by events of any source; pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::model::convert::Rejected;
use crate::model::{
    EndpointSlice, Kind, Namespace, Node, Object, ObjectName, ObjectRef, Pod, Service,
};

/// Ids of the cgroups of pods, by the uid in their names.
pub type PodCgroupIds = BTreeMap<Arc<str>, u64>;

/// What a source has seen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// An object is there, new or changed.
    Apply(Object),
    /// An object is gone.
    Delete(ObjectRef),
    /// An object is there, but can't be right.
    Reject(Rejected),
    /// These are the ids of the cgroups of pods, by the uids in their names.
    PodCgroups(PodCgroupIds),
    /// So many documents can't be read at all, so that it is not known what
    /// they are about.
    Unreadable(usize),
    /// All that there is has been seen once.
    Synced,
}

/// What is known.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct State {
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
    nodes: BTreeMap<ObjectName, Node>,
    pods: BTreeMap<ObjectName, Pod>,
    namespaces: BTreeMap<ObjectName, Namespace>,
    pod_cgroups: PodCgroupIds,
    /// The slices of each Service.
    slices_of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    /// Objects that were rejected, and the Service that each slice is about.
    rejected: BTreeMap<ObjectRef, Option<ObjectName>>,
    unreadable: usize,
    synced: bool,
}

impl State {
    /// Takes note of an event.
    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Apply(object) => {
                self.remove(&object.reference());
                self.insert(object);
            }
            Event::Delete(reference) => self.remove(&reference),
            Event::Reject(rejected) => {
                self.remove(&rejected.object);
                self.rejected.insert(rejected.object, rejected.service);
            }
            Event::PodCgroups(ids) => self.pod_cgroups = ids,
            Event::Unreadable(documents) => self.unreadable = documents,
            Event::Synced => self.synced = true,
        }
    }

    /// Whether all that there is has been seen once.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// All Services.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// The slices of a Service, by name.
    pub fn slices(&self, service: &ObjectName) -> impl Iterator<Item = &EndpointSlice> {
        let names = self.slices_of.get(service).into_iter().flatten();
        names.filter_map(|name| self.slices.get(name))
    }

    /// A Node, by name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(&cluster_wide(name))
    }

    /// All Pods.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// The id of a Pod's cgroup on this node.
    pub fn cgroup_of(&self, pod: &Pod) -> Option<u64> {
        self.pod_cgroups.get(&pod.cgroup_uid).copied()
    }

    /// A Namespace, by name.
    pub fn namespace(&self, name: &str) -> Option<&Namespace> {
        self.namespaces.get(&cluster_wide(name))
    }

    /// A Service, by name.
    pub fn service(&self, name: &ObjectName) -> Option<&Service> {
        self.services.get(name)
    }

    /// Slices of the Service that were rejected.
    pub fn rejected_slices(&self, service: &ObjectName) -> impl Iterator<Item = &ObjectName> {
        let rejected = self.rejected.iter();
        rejected
            .filter(move |(_, about)| about.as_ref() == Some(service))
            .map(|(object, _)| &object.name)
    }

    /// How many objects are left out since they can't be right.
    pub fn rejected(&self) -> usize {
        self.rejected.len()
    }

    /// Documents that can't be read, so that it is not known what they are about.
    pub fn unreadable(&self) -> usize {
        self.unreadable
    }

    /// Whether there may be endpoints of the Service that are not known.
    pub fn may_lack_endpoints(&self, service: &ObjectName) -> bool {
        self.unreadable > 0 || self.rejected_slices(service).next().is_some()
    }

    fn insert(&mut self, object: Object) {
        match object {
            Object::Service(service) => {
                self.services.insert(service.name.clone(), service);
            }
            Object::Node(node) => {
                self.nodes.insert(node.name.clone(), node);
            }
            Object::Pod(pod) => {
                self.pods.insert(pod.name.clone(), pod);
            }
            Object::Namespace(namespace) => {
                self.namespaces.insert(namespace.name.clone(), namespace);
            }
            Object::EndpointSlice(slice) => {
                if let Some(service) = owner(&slice) {
                    self.slices_of
                        .entry(service)
                        .or_default()
                        .insert(slice.name.clone());
                }
                self.slices.insert(slice.name.clone(), slice);
            }
        }
    }

    fn remove(&mut self, reference: &ObjectRef) {
        self.rejected.remove(reference);
        match reference.kind {
            Kind::Service => drop(self.services.remove(&reference.name)),
            Kind::Node => drop(self.nodes.remove(&reference.name)),
            Kind::Pod => drop(self.pods.remove(&reference.name)),
            Kind::Namespace => drop(self.namespaces.remove(&reference.name)),
            Kind::EndpointSlice => self.remove_slice(&reference.name),
        }
    }

    fn remove_slice(&mut self, name: &ObjectName) {
        let Some(service) = self.slices.remove(name).as_ref().and_then(owner) else {
            return;
        };
        if let Some(names) = self.slices_of.get_mut(&service) {
            names.remove(name);
            if names.is_empty() {
                self.slices_of.remove(&service);
            }
        }
    }
}

fn cluster_wide(name: &str) -> ObjectName {
    ObjectName {
        namespace: Arc::from(""),
        name: Arc::from(name),
    }
}

/// The Service that a slice belongs to: one of its own namespace.
fn owner(slice: &EndpointSlice) -> Option<ObjectName> {
    let name = Arc::clone(slice.service.as_ref()?);
    Some(ObjectName {
        namespace: Arc::clone(&slice.name.namespace),
        name,
    })
}
