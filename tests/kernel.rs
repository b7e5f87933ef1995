//! The programs on the real kernel, without the agent: tables written by hand.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use lab::{Lab, Node, Place as _, Pod};
use node_agent::apply::Applier;
use node_agent::bpf::{Cgroup, Features, KernelMaps, Loaded, Loader, Pins};
use node_agent::diff::diff;
use node_agent::tables::{
    Endpoint, Frontend, Prefer, Protocol, Route, Scope, ServicePortName, Tables, Tier, Verdict,
};
use shunt_common::{Counter, Heartbeat, SpliceMode, Wish};

const CLUSTER_IP: &str = "10.96.0.10";

/// Programs attached to one lab node, and the means to change its table.
struct Attached {
    maps: KernelMaps,
    applier: Applier,
    pins: Pins,
    cgroup: Cgroup,
    _loaded: Loaded,
}

impl Attached {
    fn to(node: &Node) -> Self {
        let pins = Pins::new(&node.pins());
        let cgroup = Cgroup::find(Some(node.node_cgroup())).unwrap();
        pins.create().unwrap();
        let mut loaded = Loader::new(&pins, &Features::probe()).load().unwrap();
        let mut maps = KernelMaps::open(&pins).unwrap();
        maps.beat(Heartbeat::new(node_agent_now(), u64::MAX, 1))
            .unwrap();
        let applier = Applier::adopt(&maps.snapshot().unwrap(), Instant::now());
        loaded.attach(&cgroup, &pins, SpliceMode::OptIn).unwrap();
        Self {
            maps,
            applier,
            pins,
            cgroup,
            _loaded: loaded,
        }
    }

    fn set(&mut self, routes: Vec<(Frontend, Route)>) {
        let desired = Tables {
            routes: routes.into_iter().collect(),
            ..Tables::default()
        };
        let ops = diff(self.applier.actual(), &desired);
        let applied = self.applier.apply(ops, &mut self.maps, Instant::now());
        assert!(applied.failed.is_empty(), "{:?}", applied.failed);
    }

    fn count(&self, counter: Counter) -> u64 {
        self.maps.counters().unwrap()[counter as usize]
    }
}

/// Any time that is not 0 will do where nothing becomes stale.
fn node_agent_now() -> u64 {
    1
}

fn frontend(address: &str, port: u16) -> Frontend {
    Frontend {
        address: address.parse().unwrap(),
        port,
        protocol: Protocol::Tcp,
    }
}

fn route(verdict: Verdict, endpoints: &[SocketAddr], splice: bool) -> Route {
    let endpoints: Vec<_> = endpoints
        .iter()
        .map(|address| Endpoint {
            address: *address,
            local: true,
            node: shunt_common::NodeId::UNKNOWN,
        })
        .collect();
    Route {
        name: ServicePortName {
            namespace: Arc::from("shop"),
            service: Arc::from("cart"),
            port: Arc::from("http"),
        },
        verdict,
        prefer: Prefer::Node,
        affinity_seconds: None,
        splice: if splice { Wish::On } else { Wish::None },
        terminating: false,
        max_local_connections: None,
        tiers: vec![Tier {
            scope: Scope::Node,
            endpoints,
        }],
    }
}

fn at(pod: &Pod, port: u16) -> SocketAddr {
    (IpAddr::V4(pod.ipv4()), port).into()
}

fn at6(pod: &Pod, port: u16) -> SocketAddr {
    (IpAddr::V6(pod.ipv6()), port).into()
}

#[test]
fn a_connect_to_a_cluster_ip_lands_on_the_endpoint_and_shows_the_cluster_ip() {
    let mut lab = Lab::new("connect").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("[::]:8080", "web").unwrap();
    let mut shunt = Attached::to(&node);
    let v6 = "fd00:96::a";
    shunt.set(vec![
        (
            frontend(CLUSTER_IP, 80),
            route(Verdict::Balance, &[at(&server, 8080)], false),
        ),
        (
            frontend(v6, 80),
            route(Verdict::Balance, &[at6(&server, 8080)], false),
        ),
    ]);

    for target in [
        format!("{CLUSTER_IP}:80"),
        format!("[{v6}]:80"),
        format!("[::ffff:{CLUSTER_IP}]:80"),
    ] {
        let report = client.connect(&target).unwrap();
        assert_eq!(report.id.as_deref(), Some("web"), "{target}: {report:?}");
        assert_eq!(report.peer, Some(target.parse().unwrap()), "{target}");
    }
    assert_eq!(shunt.count(Counter::ConnectNode), 3);
    assert_eq!(shunt.count(Counter::ConnectLocal), 3);
}

#[test]
fn a_service_without_endpoints_refuses_at_once_with_econnrefused() {
    let mut lab = Lab::new("refuse").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let mut shunt = Attached::to(&node);
    shunt.set(vec![
        (frontend(CLUSTER_IP, 80), route(Verdict::Refuse, &[], false)),
        (
            frontend("fd00:96::a", 80),
            route(Verdict::Refuse, &[], false),
        ),
    ]);

    for target in [format!("{CLUSTER_IP}:80"), "[fd00:96::a]:80".to_owned()] {
        let report = client.connect(&target).unwrap();
        assert_eq!(report.errno.as_deref(), Some("ECONNREFUSED"), "{target}");
    }
    assert_eq!(shunt.count(Counter::Refused), 2);
}

#[test]
fn a_second_agent_replaces_the_programs_inside_the_links() {
    let mut lab = Lab::new("adopt").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("[::]:8080", "web").unwrap();
    let mut first = Attached::to(&node);
    first.set(vec![(
        frontend(CLUSTER_IP, 80),
        route(Verdict::Balance, &[at(&server, 8080)], false),
    )]);
    let links = node_agent::bpf::programs(&first.pins);
    let table = first.applier.actual().clone();
    drop(first);

    let second = Attached::to(&node);

    assert_eq!(*second.applier.actual(), table, "the table is read back");
    let again = node_agent::bpf::programs(&second.pins);
    for (before, after) in links.iter().zip(&again) {
        let (Some(before), Some(after)) = (&before.attachment, &after.attachment) else {
            // The agent attaches one of these two, and none is running here.
            assert!(["tcp_splice_read", "sys_enter"].contains(&after.name));
            assert!(before.attachment.is_none() && after.attachment.is_none());
            continue;
        };
        use node_agent::bpf::Attachment::Cgroup as C;
        if let (
            C {
                link_id: a,
                program_id: p,
                ..
            },
            C {
                link_id: b,
                program_id: q,
                cgroup_id,
            },
        ) = (before, after)
        {
            assert_eq!(a, b, "the link stays");
            assert_ne!(p, q, "the program is a new one");
            assert_eq!(*cgroup_id, second.cgroup.id());
        }
    }
    assert_eq!(
        client
            .connect(format!("{CLUSTER_IP}:80"))
            .unwrap()
            .id
            .as_deref(),
        Some("web")
    );
}

/// Entries are counted many with one call.
#[test]
fn a_large_map_is_counted_whole() {
    let mut lab = Lab::new("count").unwrap();
    let node = lab.node("n1").unwrap();
    let mut shunt = Attached::to(&node);
    let used = |shunt: &Attached, name: &str| {
        let fill = shunt.maps.fill().unwrap();
        fill.iter().find(|it| it.map == name).unwrap().used
    };
    assert_eq!(used(&shunt, "slots"), 0);
    let endpoints: Vec<SocketAddr> = (0..9000_u16)
        .map(|n| ([10, 244, (n >> 8) as u8, n as u8], 80).into())
        .collect();
    let routes = (1..=3).map(|port| {
        (
            frontend(CLUSTER_IP, port),
            route(Verdict::Balance, &endpoints, false),
        )
    });
    shunt.set(routes.collect());
    assert_eq!(used(&shunt, "slots"), 27_000);
    assert_eq!(used(&shunt, "services"), 3);
}
