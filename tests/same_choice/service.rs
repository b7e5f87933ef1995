//! Random Services.

use std::net::{Ipv4Addr, Ipv6Addr};

use lab::random::Random;
use serde_json::{Value, json};

pub(crate) const NAMESPACE: &str = "shop";
/// Keeps a Service from kube-proxy, but not its slices.
pub(crate) const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// Keeps a slice from kube-proxy.
pub(crate) const HEADLESS: &str = "service.kubernetes.io/headless";

const MOST_PORTS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    ClusterIp,
    NodePort,
    Headless,
    ExternalName,
}

/// A Service; what can't be changed in the API is the same for its whole life.
pub(crate) struct Service {
    number: usize,
    /// IPv4, IPv6 or both, the first being the Service's first.
    pub(crate) families: &'static [&'static str],
    is_headless: bool,
    pub(crate) ports: Vec<Port>,
    object: Value,
}

#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) name: &'static str,
    pub(crate) protocol: &'static str,
    number: u16,
}

impl Service {
    pub(crate) fn new(number: usize, random: &mut Random) -> Self {
        let families: [&[&str]; 4] = [&["IPv4"], &["IPv6"], &["IPv4", "IPv6"], &["IPv6", "IPv4"]];
        let mut service = Self {
            number,
            families: random.pick(&families),
            is_headless: random.percent(8),
            ports: Vec::new(),
            object: Value::Null,
        };
        service.change(random);
        service
    }

    pub(crate) fn name(&self) -> String {
        format!("s{}", self.number)
    }

    pub(crate) fn object(&self) -> Value {
        self.object.clone()
    }

    /// Other ports, another type, other policies.
    pub(crate) fn change(&mut self, random: &mut Random) {
        self.ports = ports(random);
        let kind = match random.below(100) {
            _ if self.is_headless => Kind::Headless,
            0..5 => Kind::ExternalName,
            5..20 => Kind::NodePort,
            _ => Kind::ClusterIp,
        };
        let mut spec = json!({ "ports": self.ports.iter().map(Port::value).collect::<Vec<_>>() });
        if kind == Kind::ExternalName {
            spec["type"] = json!("ExternalName");
            spec["externalName"] = json!("shop.example.org");
        } else {
            self.add_addresses(&mut spec);
            add_policies(&mut spec, random);
            if kind == Kind::NodePort {
                self.add_node_ports(&mut spec, random);
            }
        }
        let labels = match random.below(100) {
            0..4 => json!({ PROXY_NAME: "another" }),
            // Only on slices does it mean anything.
            4..7 => json!({ HEADLESS: "" }),
            _ => json!({}),
        };
        self.object = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "namespace": NAMESPACE, "name": self.name(), "labels": labels },
            "spec": spec,
        });
    }

    fn add_addresses(&self, spec: &mut Value) {
        let addresses = self.families.iter().map(|family| match *family {
            "IPv4" => Ipv4Addr::from_bits(0x0a60_0100 + self.bits()).to_string(),
            _ => {
                Ipv6Addr::from_bits(0xfd00_0096 << 96 | u128::from(0x100 + self.bits())).to_string()
            }
        });
        let addresses: Vec<_> = if self.is_headless {
            vec!["None".to_owned()]
        } else {
            addresses.collect()
        };
        spec["clusterIP"] = json!(addresses[0]);
        spec["clusterIPs"] = json!(addresses);
        spec["ipFamilies"] = json!(self.families);
        let both = self.families.len() == 2;
        spec["ipFamilyPolicy"] = json!(if both {
            "RequireDualStack"
        } else {
            "SingleStack"
        });
    }

    fn add_node_ports(&self, spec: &mut Value, random: &mut Random) {
        spec["type"] = json!("NodePort");
        spec["externalTrafficPolicy"] = json!(random.pick(&["Cluster", "Local"]));
        // Those that the server chooses may clash when a port changes.
        for index in 0..self.ports.len() {
            let node_port = 30_000 + (MOST_PORTS * self.number + index) % 2_767;
            spec["ports"][index]["nodePort"] = json!(node_port);
        }
    }

    fn bits(&self) -> u32 {
        u32::try_from(self.number).expect("there are few")
    }
}

impl Port {
    fn value(&self) -> Value {
        json!({ "name": self.name, "port": self.number, "protocol": self.protocol })
    }
}

/// Only a single one may be without a name.
fn ports(random: &mut Random) -> Vec<Port> {
    let count = 1 + random.below(MOST_PORTS);
    let names = ["http", "dns", "metrics"];
    let numbers: [u16; MOST_PORTS] = [80, 53, 9090];
    let mut ports: Vec<_> = names
        .into_iter()
        .zip(numbers)
        .map(|(name, number)| Port {
            name,
            number,
            protocol: random.pick(&["TCP", "TCP", "UDP"]),
        })
        .take(count)
        .collect();
    if count == 1 && random.percent(50) {
        ports[0].name = "";
    }
    if count == 2 && random.percent(50) {
        // One number for two protocols.
        ports[1].number = ports[0].number;
        ports[0].protocol = "TCP";
        ports[1].protocol = "UDP";
    }
    if random.percent(4) {
        ports[0].protocol = "SCTP";
    }
    ports
}

fn add_policies(spec: &mut Value, random: &mut Random) {
    if random.percent(25) {
        spec["internalTrafficPolicy"] = json!("Local");
    }
    if random.percent(15) {
        spec["sessionAffinity"] = json!("ClientIP");
        let seconds = 1 + random.below(3600);
        spec["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": seconds } });
    }
    if random.percent(15) {
        let wishes = ["PreferClose", "PreferSameZone", "PreferSameNode"];
        spec["trafficDistribution"] = json!(random.pick(&wishes));
    }
    if random.percent(10) {
        spec["publishNotReadyAddresses"] = json!(true);
    }
}
