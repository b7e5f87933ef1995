//! UDP through a ClusterIP, as an application sees it.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use lab::fixture::{Service, json, live_endpoints, start, wait_until};
use lab::report::UdpReport;
use lab::{Lab, Node, Place as _, Pod, Server};

const DNS: &str = "10.96.0.10:80";
const DNS_V6: &str = "[fd00:96::10]:80";

/// A node with a client and two servers, and the Service of both families.
struct Stage {
    node: Node,
    client: Pod,
    servers: [Pod; 2],
    _running: Vec<Server>,
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let node = lab.node("n1").unwrap();
        let client = node.pod("client", None).unwrap();
        let servers = ["one", "two"].map(|name| node.pod(name, None).unwrap());
        // Bound to its address, since a server on :: answers from any of its own.
        let running = servers.iter().flat_map(|pod| {
            let addresses: [SocketAddr; 2] = [(pod.ipv4(), 5353).into(), (pod.ipv6(), 5353).into()];
            addresses.map(|address| pod.serve_udp(address, pod.name()).unwrap())
        });
        let running = running.collect();
        Self {
            node,
            client,
            servers,
            _running: running,
        }
    }

    /// Gives the Service these servers as endpoints.
    fn write(&self, servers: &[&Pod]) {
        let v4 = servers.iter().map(|pod| (IpAddr::from(pod.ipv4()), "n1"));
        let v6 = servers.iter().map(|pod| (IpAddr::from(pod.ipv6()), "n1"));
        let service = Service {
            protocol: "UDP",
            target_port: 5353,
            ..Service::default()
        };
        let service_v4 = Service {
            endpoints: v4.collect(),
            ..service
        };
        self.node
            .write_manifest("dns.yaml", &service_v4.yaml())
            .unwrap();
        let service = Service {
            protocol: "UDP",
            target_port: 5353,
            ..Service::default()
        };
        let service_v6 = Service {
            name: "dns6",
            cluster_ip: "fd00:96::10",
            endpoints: v6.collect(),
            ..service
        };
        self.node
            .write_manifest("dns6.yaml", &service_v6.yaml())
            .unwrap();
    }

    fn wait_for(&self, servers: &[&Pod]) {
        let of = |pod: &&Pod| format!("[{}]:5353", pod.ipv6());
        let mut expected: Vec<_> = servers.iter().map(of).collect();
        expected.sort();
        wait_until("both tables are written", || {
            live_endpoints(&self.node, "shop/dns6", "node") == expected
                && live_endpoints(&self.node, "shop/cart", "node").len() == servers.len()
        });
    }

    /// One answer for each datagram of one socket.
    fn ask(&self, target: &str, args: &[&str]) -> Vec<UdpReport> {
        let mut process = self
            .client
            .start_lab_pod(&[&["udp", target], args].concat())
            .unwrap();
        let position = args.iter().position(|arg| *arg == "--count");
        let count = position.map_or(1, |at| args[at + 1].parse().unwrap());
        (0..count).map(|_| process.report().unwrap()).collect()
    }
}

#[test]
fn answers_come_from_the_cluster_ip_whatever_the_socket() {
    let mut lab = Lab::new("udp").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(&[&stage.servers[0]]);
    let _agent = start(&stage.node, &[]);

    for target in [DNS, DNS_V6] {
        let cluster_ip: SocketAddr = target.parse().unwrap();
        for connected in [false, true] {
            let args: &[&str] = if connected { &["--connected"] } else { &[] };
            let [report] = &stage.ask(target, args)[..] else {
                panic!("one answer")
            };
            assert_eq!(
                report.id.as_deref(),
                Some("one"),
                "{target} {connected}: {report:?}"
            );
            assert_eq!(report.from, Some(cluster_ip), "{target} {connected}");
            assert_eq!(
                report.peer,
                connected.then_some(cluster_ip),
                "{target} {connected}"
            );
        }
    }
    let counters = &json(&stage.node, &["status"])["counters"];
    assert_eq!(counters["connect_node"], 4, "{counters}");
    assert_eq!(counters["source_names"], 4, "{counters}");
}

#[test]
fn what_is_no_service_is_left_alone() {
    let mut lab = Lab::new("udp_direct").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(&[&stage.servers[0]]);
    let _agent = start(&stage.node, &[]);

    let direct = SocketAddr::from((stage.servers[1].ipv4(), 5353));
    for args in [&[][..], &["--connected"]] {
        let [report] = &stage.ask(&direct.to_string(), args)[..] else {
            panic!("one answer")
        };
        assert_eq!(
            (report.id.as_deref(), report.from),
            (Some("two"), Some(direct))
        );
    }
}

#[test]
fn a_flow_keeps_to_its_endpoint_until_that_leaves_the_set() {
    let mut lab = Lab::new("udp_flow").unwrap();
    let stage = Stage::new(&mut lab);
    let [one, two] = &stage.servers;
    stage.write(&[one, two]);
    let _agent = start(&stage.node, &[]);

    let mut ids = BTreeSet::new();
    // More than twenty are needed once in 2^19 runs.
    for socket in 0..64 {
        if socket >= 20 && ids.len() == 2 {
            break;
        }
        let answers = stage.ask(DNS, &["--count", "5"]);
        let first = answers[0].id.clone();
        assert!(answers.iter().all(|it| it.id == first), "{answers:?}");
        ids.extend(first);
    }
    assert_eq!(
        ids.into_iter().collect::<Vec<_>>(),
        ["one", "two"],
        "sockets are spread over both"
    );

    // An open socket, over a change that takes its endpoint away.
    let args = ["udp", DNS, "--count", "1000", "--pause-ms", "10"];
    let mut process = stage.client.start_lab_pod(&args).unwrap();
    let first: UdpReport = process.report().unwrap();
    let (leaves, stays) = if first.id.as_deref() == Some("one") {
        (one, two)
    } else {
        (two, one)
    };
    stage.write(&[stays]);
    stage.wait_for(&[stays]);
    wait_until("the flow has moved", || {
        let answer: UdpReport = process.report().unwrap();
        assert_eq!(answer.from, Some(DNS.parse().unwrap()), "{answer:?}");
        assert!(
            [stays.name(), leaves.name()]
                .map(Some)
                .contains(&answer.id.as_deref())
        );
        answer.id.as_deref() == Some(stays.name())
    });
}

#[test]
fn a_service_without_endpoints_refuses_both_kinds_of_sockets() {
    let mut lab = Lab::new("udp_refuse").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(&[]);
    let _agent = start(&stage.node, &[]);

    for target in [DNS, DNS_V6] {
        for args in [&[][..], &["--connected"]] {
            let [report] = &stage.ask(target, args)[..] else {
                panic!("one answer")
            };
            assert_eq!(
                report.errno.as_deref(),
                Some("ECONNREFUSED"),
                "{target} {args:?}"
            );
        }
    }
}
