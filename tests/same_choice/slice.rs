//! Random EndpointSlices.

use std::collections::BTreeMap;
use std::net::IpAddr;

use lab::random::Random;
use serde_json::{Value, json};

use crate::pod::{HINTS, Hints, Pod, address};
use crate::service::{HEADLESS, NAMESPACE, PROXY_NAME, Service};

const MOST_ENDPOINTS: usize = 6;

/// An EndpointSlice of some Service.
pub(crate) struct Slice {
    name: String,
    /// Name of the Service; empty for none.
    pub(crate) service: String,
    family: &'static str,
    label: Option<&'static str>,
    hints: Hints,
    ports: Value,
    members: Vec<Member>,
}

#[derive(Clone, Copy)]
struct Member {
    address: IpAddr,
    is_twin: bool,
}

/// All pods that there are.
pub(crate) type Pods = BTreeMap<IpAddr, Pod>;

impl Slice {
    pub(crate) fn new(
        number: usize,
        service: &Service,
        hints: Hints,
        pods: &mut Pods,
        random: &mut Random,
    ) -> Self {
        let mut slice = Self {
            name: format!("slice-{number}"),
            service: if random.percent(97) {
                service.name()
            } else {
                String::new()
            },
            family: random.pick(service.families),
            label: random
                .percent(4)
                .then(|| random.pick(&[PROXY_NAME, HEADLESS])),
            hints,
            ports: ports(service, random),
            members: Vec::new(),
        };
        if random.percent(2) {
            slice.family = "FQDN";
        }
        slice.change(pods, random);
        slice
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn holds(&self, address: IpAddr) -> bool {
        self.members.iter().any(|member| member.address == address)
    }

    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.members.iter().map(|member| member.address).collect()
    }

    /// Other endpoints: one more, one less, or all of them others.
    pub(crate) fn change(&mut self, pods: &mut Pods, random: &mut Random) {
        match random.below(3) {
            0 if !self.members.is_empty() => drop(self.members.pop()),
            1 => self.add(pods, random),
            _ => {
                self.members.clear();
                for _ in 0..random.below(MOST_ENDPOINTS) {
                    self.add(pods, random);
                }
            }
        }
    }

    fn add(&mut self, pods: &mut Pods, random: &mut Random) {
        if self.family == "FQDN" {
            return;
        }
        let (address, node) = address(self.hints, self.family == "IPv6", random);
        pods.entry(address)
            .or_insert_with(|| Pod::new(address, node, self.hints, random));
        let is_twin = random.percent(15);
        self.members.push(Member { address, is_twin });
        if random.percent(8) {
            self.members.push(Member {
                address,
                is_twin: !is_twin,
            });
        }
    }

    pub(crate) fn object(&self, pods: &Pods) -> Value {
        let mut labels = json!({});
        if !self.service.is_empty() {
            labels["kubernetes.io/service-name"] = json!(self.service);
        }
        if let Some(label) = self.label {
            labels[label] = json!("");
        }
        let entry = |member: &Member| {
            let pod = &pods[&member.address];
            if member.is_twin {
                pod.twin.clone()
            } else {
                pod.entry.clone()
            }
        };
        let endpoints: Vec<_> = match self.family {
            "FQDN" => vec![json!({ "addresses": ["shop.example.org"] })],
            _ => self.members.iter().map(entry).collect(),
        };
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "namespace": NAMESPACE, "name": self.name, "labels": labels },
            "addressType": self.family,
            "ports": self.ports,
            "endpoints": endpoints,
        })
    }
}

/// Mostly those that the Service asks for; the numbers differ between slices.
fn ports(service: &Service, random: &mut Random) -> Value {
    let mut ports = Vec::new();
    for (number, port) in (8080..).zip(&service.ports) {
        let number = number + 10 * random.below(2);
        let mut value = json!({ "name": port.name, "port": number, "protocol": port.protocol });
        match random.below(30) {
            0 => continue,
            1 => value["port"] = Value::Null,
            2 => value["protocol"] = json!("UDP"),
            3 => value["name"] = json!("other"),
            _ => {}
        }
        ports.push(value);
    }
    let mut seen = Vec::new();
    // The API wants each name once.
    ports.retain(|port| {
        let is_new = !seen.contains(&port["name"]);
        seen.push(port["name"].clone());
        is_new
    });
    json!(ports)
}

/// One for all slices of a Service, so that hints come to count.
pub(crate) fn any_hints(random: &mut Random) -> Hints {
    random.pick(&HINTS)
}
