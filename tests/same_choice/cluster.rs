//! A random cluster and its random changes.

use std::collections::BTreeMap;
use std::mem;

use lab::kubernetes::Write;
use lab::random::Random;
use serde_json::{Value, json};

use crate::pod::{NODES, ZONES};
use crate::service::{NAMESPACE, Service};
use crate::slice::{Pods, Slice, any_hints};

/// What the API server is to hold.
pub(crate) struct Cluster {
    random: Random,
    services: BTreeMap<String, Service>,
    slices: BTreeMap<String, Slice>,
    pods: Pods,
    /// Numbers are never used again.
    numbers: usize,
    has_moved: bool,
}

impl Cluster {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            services: BTreeMap::new(),
            slices: BTreeMap::new(),
            pods: Pods::new(),
            numbers: 0,
            has_moved: false,
        }
    }

    /// Nodes, and so many Services with their slices.
    pub(crate) fn populate(&mut self, services: usize) -> Vec<Write> {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE },
        });
        let mut writes = vec![Write::Create(namespace)];
        for (index, node) in NODES.iter().enumerate() {
            writes.push(Write::Create(node_object(node, ZONES[index % ZONES.len()])));
        }
        for _ in 0..services {
            writes.extend(self.add_service());
        }
        writes
    }

    /// One change; most are of endpoints, as in life.
    pub(crate) fn change(&mut self) -> Vec<Write> {
        match self.random.below(100) {
            0..35 => self.change_pod(),
            35..60 => self.change_slice(),
            60..69 => self.add_slice(),
            69..78 => self.delete_slice(),
            78..81 => self.move_slice(),
            81..93 => self.change_service(),
            93..95 => self.add_service(),
            95..98 => self.delete_service(),
            _ => self.move_node(),
        }
    }

    /// Whether a slice went to another Service since this was asked.
    pub(crate) fn has_moved_a_slice(&mut self) -> bool {
        mem::take(&mut self.has_moved)
    }

    fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers
    }

    fn add_service(&mut self) -> Vec<Write> {
        let service = Service::new(self.number(), &mut self.random);
        let mut writes = vec![Write::Create(service.object())];
        let hints = any_hints(&mut self.random);
        for _ in 0..self.random.below(4) {
            let number = self.number();
            let slice = Slice::new(number, &service, hints, &mut self.pods, &mut self.random);
            writes.push(Write::Create(slice.object(&self.pods)));
            self.slices.insert(slice.name().to_owned(), slice);
        }
        self.services.insert(service.name(), service);
        writes
    }

    fn delete_service(&mut self) -> Vec<Write> {
        let name = any(&self.services, &mut self.random);
        self.services.remove(&name);
        vec![delete("Service", &name)]
    }

    fn change_service(&mut self) -> Vec<Write> {
        let name = any(&self.services, &mut self.random);
        let service = self.services.get_mut(&name).expect("it is one of them");
        service.change(&mut self.random);
        vec![Write::Replace(service.object())]
    }

    fn add_slice(&mut self) -> Vec<Write> {
        let number = self.number();
        let hints = any_hints(&mut self.random);
        let service = &self.services[&any(&self.services, &mut self.random)];
        let slice = Slice::new(number, service, hints, &mut self.pods, &mut self.random);
        let write = Write::Create(slice.object(&self.pods));
        self.slices.insert(slice.name().to_owned(), slice);
        vec![write]
    }

    fn delete_slice(&mut self) -> Vec<Write> {
        let name = any(&self.slices, &mut self.random);
        self.slices.remove(&name);
        vec![delete("EndpointSlice", &name)]
    }

    fn change_slice(&mut self) -> Vec<Write> {
        let name = any(&self.slices, &mut self.random);
        let slice = self.slices.get_mut(&name).expect("it is one of them");
        slice.change(&mut self.pods, &mut self.random);
        vec![Write::Replace(slice.object(&self.pods))]
    }

    /// To another Service, with its endpoints.
    fn move_slice(&mut self) -> Vec<Write> {
        let service = any(&self.services, &mut self.random);
        let name = any(&self.slices, &mut self.random);
        let slice = self.slices.get_mut(&name).expect("it is one of them");
        slice.service = service;
        self.has_moved = true;
        vec![Write::Replace(slice.object(&self.pods))]
    }

    /// Other conditions and hints, in all slices that have it.
    fn change_pod(&mut self) -> Vec<Write> {
        let slice = &self.slices[&any(&self.slices, &mut self.random)];
        let addresses = slice.addresses();
        if addresses.is_empty() {
            return self.change_slice();
        }
        let address = self.random.pick(&addresses);
        let pod = self.pods.get_mut(&address).expect("slices hold no others");
        pod.change(&mut self.random);
        let slices = self.slices.values().filter(|slice| slice.holds(address));
        slices
            .map(|slice| Write::Replace(slice.object(&self.pods)))
            .collect()
    }

    /// To another zone, or to none.
    fn move_node(&mut self) -> Vec<Write> {
        let zone = self.random.pick(&[ZONES[0], ZONES[1], "z3", ""]);
        vec![Write::Replace(node_object(NODES[0], zone))]
    }
}

fn any<T>(all: &BTreeMap<String, T>, random: &mut Random) -> String {
    let index = random.below(all.len());
    all.keys()
        .nth(index)
        .expect("the index is below the length")
        .clone()
}

fn node_object(name: &str, zone: &str) -> Value {
    let labels = match zone {
        "" => json!({}),
        zone => json!({ "topology.kubernetes.io/zone": zone }),
    };
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": labels } })
}

fn delete(kind: &'static str, name: &str) -> Write {
    Write::Delete {
        kind,
        namespace: NAMESPACE.to_owned(),
        name: name.to_owned(),
    }
}
