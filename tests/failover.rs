//! Endpoints and nodes that do not answer are avoided, and found again. No agent
//! takes part in most of it.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use lab::fixture::{PATIENCE, Service, json, live_endpoints, start, wait_until};
use lab::report::LoadReport;
use lab::{Lab, Node, Place as _, Pod, Server};
use node_agent::bpf::{KernelMaps, Pins};
use shunt_common::{Counter, Evidence, Health, HealthKey, NodeId, address, capacity};

const CART_IP: &str = "10.96.0.10";
const CART: &str = "10.96.0.10:80";
const CART_V6: &str = "[fd00:10:96::10]:80";

/// So many that each endpoint gets two of them, but for one run in 10^8.
const MANY: &[&str] = &["--threads", "32", "--timeout-ms", "60000"];

/// A client on one node, and a server on each of two others.
struct Stage {
    near: Node,
    client: Pod,
    nodes: [Node; 2],
    servers: [Pod; 2],
    running: Vec<Server>,
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let near = lab.node("n1").unwrap();
        let nodes = ["n2", "n3"].map(|name| lab.node(name).unwrap());
        let servers = nodes
            .each_ref()
            .map(|node| node.pod("server", None).unwrap());
        let mut stage = Self {
            client: near.pod("client", None).unwrap(),
            near,
            running: Vec::new(),
            nodes,
            servers,
        };
        for index in [0, 1] {
            let server = stage.serve(index, 8080);
            stage.running.push(server);
        }
        stage
    }

    fn serve(&self, index: usize, port: u16) -> Server {
        let id = self.nodes[index].name();
        self.servers[index]
            .serve(format!("[::]:{port}"), id)
            .unwrap()
    }

    /// A Service of both servers.
    fn write(&self, name: &str, cluster_ip: &str, target_port: u16) {
        let of = |pod: &Pod| -> IpAddr {
            if cluster_ip.contains(':') {
                pod.ipv6().into()
            } else {
                pod.ipv4().into()
            }
        };
        let service = Service {
            name,
            cluster_ip,
            target_port,
            annotations: &[("shunt.dev/prefer", "none")],
            endpoints: vec![(of(&self.servers[0]), "n2"), (of(&self.servers[1]), "n3")],
            ..Service::default()
        };
        self.near
            .write_manifest(&format!("{name}.yaml"), &service.yaml())
            .unwrap();
    }

    fn connect(&self, to: &str, count: u32) -> LoadReport {
        let count = count.to_string();
        self.client
            .lab_pod(&["load", to, "--count", &count, "--timeout-ms", "30000"])
            .unwrap()
    }

    /// Connects until an endpoint or node is suspect.
    fn make_suspect(&self, to: &str, key: HealthKey) {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_suspect(&key) {
            assert!(Instant::now() < deadline, "{key:?} is not suspect");
            self.connect(to, 20);
        }
    }

    fn key(&self, index: usize, port: u16) -> HealthKey {
        let address = self.servers[index].ipv4().into();
        HealthKey::endpoint(address::from_ip(address), port.to_be_bytes())
    }

    fn key_v6(&self, index: usize, port: u16) -> HealthKey {
        let address = self.servers[index].ipv6().into();
        HealthKey::endpoint(address::from_ip(address), port.to_be_bytes())
    }

    fn maps(&self) -> KernelMaps {
        KernelMaps::open(&Pins::new(&self.near.pins())).unwrap()
    }

    fn health(&self, key: &HealthKey) -> Option<Health> {
        self.maps().health.all().unwrap().get(key).copied()
    }

    fn is_suspect(&self, key: &HealthKey) -> bool {
        self.health(key).is_some_and(|it| it.until_ns() != 0)
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.maps().counters().unwrap()[counter as usize]
    }

    /// Connects, of which each that fails is one that was sent to find out.
    fn only_probes_fail(&self, to: &str, count: u32) -> LoadReport {
        let before = self.counter(Counter::Probes);
        let report = self.connect(to, count);
        let probes = self.counter(Counter::Probes) - before;
        let failed: u64 = report.errnos.values().sum();
        assert!(failed <= probes, "{report:?}, {probes} probes");
        report
    }

    /// Connects, none of which fails, until each of both servers has answered.
    fn wait_for_both(&self, to: &str) {
        let deadline = Instant::now() + 2 * PATIENCE;
        loop {
            let report = self.connect(to, 20);
            assert!(report.errnos.is_empty(), "{report:?}");
            if report.ids.len() == 2 {
                return;
            }
            assert!(Instant::now() < deadline, "only {report:?}");
        }
    }
}

fn a_dead_node_is_avoided_and_comes_back(to: &str, key: impl Fn(&Stage) -> HealthKey) {
    let label = if to.contains('[') {
        "failover6"
    } else {
        "failover"
    };
    let mut lab = Lab::new(label).unwrap();
    let stage = Stage::new(&mut lab);
    stage.write("cart", CART_IP, 8080);
    stage.write("cart6", "fd00:10:96::10", 8080);
    let agent = start(&stage.near, &["--stale-after", "1h"]);
    wait_until("both are in the table", || {
        live_endpoints(&stage.near, "shop/cart6", "cluster").len() == 2
    });
    stage.wait_for_both(to);
    agent.kill().unwrap();

    stage.nodes[1].cut().unwrap();
    let key = key(&stage);
    stage.make_suspect(to, key);
    let failed = stage.counter(Counter::FailedFast);
    let report = stage.only_probes_fail(to, 200);
    assert!(report.ids["n2"] >= 190, "{report:?}");
    // What is pending when death is certain does not wait for minutes.
    assert!(failed > 0);
    let health = stage.health(&key).unwrap();
    assert_eq!(health.evidence(), Evidence::SILENT);

    stage.nodes[1].restore().unwrap();
    stage.wait_for_both(to);
    assert!(!stage.is_suspect(&key));
    assert!(stage.counter(Counter::Cleared) > 0);
}

#[test]
fn a_dead_node_is_avoided_and_comes_back_without_an_agent() {
    a_dead_node_is_avoided_and_comes_back(CART, |stage| stage.key(1, 8080));
}

#[test]
fn a_dead_node_is_avoided_and_comes_back_over_ipv6() {
    a_dead_node_is_avoided_and_comes_back(CART_V6, |stage| stage.key_v6(1, 8080));
}

#[test]
fn what_refuses_is_suspect_by_its_port_alone() {
    let mut lab = Lab::new("refusal").unwrap();
    let mut stage = Stage::new(&mut lab);
    stage.write("cart", CART_IP, 8080);
    stage.write("other", "10.96.0.11", 9090);
    let _others = [stage.serve(0, 9090), stage.serve(1, 9090)];
    let _agent = start(&stage.near, &[]);
    wait_until("both Services are in the table", || {
        live_endpoints(&stage.near, "shop/other", "cluster").len() == 2
    });
    drop(stage.running.pop());
    let key = stage.key(1, 8080);
    stage.make_suspect(CART, key);
    assert_eq!(stage.health(&key).unwrap().evidence(), Evidence::REFUSED);
    stage.only_probes_fail(CART, 100);
    // Its other port is another endpoint, and its node is none the worse.
    assert!(!stage.is_suspect(&stage.key(1, 9090)));
    assert!(!stage.is_suspect(&HealthKey::node(NodeId::of("n3"))));
    let report = stage.connect("10.96.0.11:80", 100);
    assert!(
        report.errnos.is_empty() && report.ids.len() == 2,
        "{report:?}"
    );

    stage.running.push(stage.serve(1, 8080));
    stage.wait_for_both(CART);
    assert!(!stage.is_suspect(&key));
}

#[test]
fn where_all_are_suspect_they_are_tried_as_if_none_were() {
    let mut lab = Lab::new("alldead").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write("cart", CART_IP, 8080);
    let _agent = start(&stage.near, &["--fail-fast", "off"]);
    for node in &stage.nodes {
        node.cut().unwrap();
    }
    let load = stage
        .client
        .start_lab_pod(&[&["load", CART, "--until-stdin-closes"], MANY].concat())
        .unwrap();
    wait_until("both are suspect", || {
        (0..2).all(|index| stage.is_suspect(&stage.key(index, 8080)))
    });
    // Pending connects go on, and are answered; so are those that begin now.
    for node in &stage.nodes {
        node.restore().unwrap();
    }
    stage.wait_for_both(CART);
    let report: LoadReport = load.finish().unwrap();
    assert!(report.errnos.is_empty(), "{report:?}");
    assert_eq!(stage.counter(Counter::FailedFast), 0, "it was switched off");
}

#[test]
fn what_several_endpoints_of_a_node_show_counts_for_the_others() {
    let mut lab = Lab::new("spread").unwrap();
    let stage = Stage::new(&mut lab);
    let ports = [8080, 8081, 8082];
    let running: Vec<_> = ports[1..]
        .iter()
        .flat_map(|port| [stage.serve(0, *port), stage.serve(1, *port)])
        .collect();
    for (name, ip, port) in [
        ("a", "10.96.0.10", 8080),
        ("b", "10.96.0.11", 8081),
        ("c", "10.96.0.12", 8082),
    ] {
        stage.write(name, ip, port);
    }
    let _agent = start(&stage.near, &[]);
    wait_until("all Services are in the table", || {
        live_endpoints(&stage.near, "shop/c", "cluster").len() == 2
    });
    stage.nodes[1].cut().unwrap();
    let node = HealthKey::node(NodeId::of("n3"));
    let deadline = Instant::now() + PATIENCE;
    while !stage.is_suspect(&node) {
        assert!(Instant::now() < deadline, "the node is not suspect");
        stage.connect("10.96.0.10:80", 8);
        stage.connect("10.96.0.11:80", 8);
    }
    // Nobody has connected to this one before.
    let report = stage.only_probes_fail("10.96.0.12:80", 100);
    assert!(report.ids["n2"] >= 98, "{report:?}");

    // An answer of one clears the node, and the others have not to wait.
    stage.nodes[1].restore().unwrap();
    for to in ["10.96.0.12:80", "10.96.0.10:80", "10.96.0.11:80"] {
        stage.wait_for_both(to);
    }
    assert!(!stage.is_suspect(&node));
    drop(running);
}

#[test]
fn a_full_map_makes_room_and_nobody_is_turned_away() {
    let mut lab = Lab::new("fullhealth").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write("cart", CART_IP, 8080);
    let _agent = start(&stage.near, &[]);
    let mut maps = stage.maps();
    for number in 0..2 * u32::try_from(capacity::HEALTH).unwrap() {
        let key = HealthKey::node(NodeId(number + 1));
        maps.health.put(&key, Health::UNKNOWN).unwrap();
    }
    stage.nodes[1].cut().unwrap();
    stage.make_suspect(CART, stage.key(1, 8080));
    let report = stage.only_probes_fail(CART, 100);
    assert!(report.ids["n2"] >= 98, "{report:?}");
}

#[test]
fn the_policy_local_is_never_widened_by_a_suspicion() {
    let mut lab = Lab::new("locally").unwrap();
    let stage = Stage::new(&mut lab);
    // Nobody listens on this one.
    let here = stage.near.pod("here", None).unwrap();
    let far = &stage.servers[0];
    let service = Service {
        endpoints: vec![(here.ipv4().into(), "n1"), (far.ipv4().into(), "n2")],
        spec: "internalTrafficPolicy: Local",
        ..Service::default()
    };
    stage
        .near
        .write_manifest("cart.yaml", &service.yaml())
        .unwrap();
    let _agent = start(&stage.near, &[]);
    let address = SocketAddr::new(here.ipv4().into(), 8080);
    let key = HealthKey::endpoint(address::from_ip(address.ip()), address.port().to_be_bytes());
    stage.make_suspect(CART, key);
    let report = stage.connect(CART, 50);
    assert_eq!(report.errnos["ECONNREFUSED"], 50, "{report:?}");
    assert_eq!(json(&stage.near, &["status"])["counters"]["failed_fast"], 0);
}
