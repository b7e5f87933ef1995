//! shunt without a preference chooses as the real kube-proxy does: both watch
//! one API server with random Services, and their tables are compared.
//!
//! `SHUNT_SEED=N` repeats what a failure names.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

mod pod;
mod service;
mod slice;

mod cluster;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use lab::fixture::{PATIENCE, READY, json, planned};
use lab::kubernetes::choices::Choices;
use lab::kubernetes::{ControlPlane, KubeProxy, ProxyMode, list};
use lab::random::seed;
use lab::{Lab, Node};
use node_agent::report::{RouteReport, RoutesReport};
use node_agent::tables::{Protocol, Scope, Verdict};
use serde_json::{Value, json as value};

use crate::cluster::Cluster;
use crate::service::NAMESPACE;

const SERVICES: usize = 240;
const CHANGES: usize = 300;
const COMPARED_EVERY: usize = 20;
/// What shunt captures. kube-proxy's other choices are not compared.
const PROTOCOLS: [&str; 2] = ["/TCP", "/UDP"];
const NO_PREFERENCE: [&str; 2] = ["--prefer", "none"];

#[test]
fn without_preference_the_choice_is_that_of_kube_proxy() {
    let seed = seed();
    let mut lab = Lab::new("same").unwrap();
    let node = lab.node("n1").unwrap();
    let plane = ControlPlane::start(&node).unwrap();
    let mut cluster = Cluster::new(seed);
    plane.write(&cluster.populate(SERVICES)).unwrap();
    let proxy = plane.kube_proxy(&node, ProxyMode::Nftables).unwrap();
    let mut agent = node
        .agent_of_cluster(plane.kubeconfig(), &NO_PREFERENCE)
        .unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    let mut judge = Judge {
        seed,
        node: &node,
        plane: &plane,
        proxy: Some(proxy),
        changes: 0,
    };
    assert_varied(&judge.compare());
    while judge.changes < CHANGES {
        let writes: Vec<_> = (0..COMPARED_EVERY).flat_map(|_| cluster.change()).collect();
        plane.write(&writes).unwrap();
        judge.changes += COMPARED_EVERY;
        if cluster.has_moved_a_slice() {
            judge.restart_proxy();
        }
        judge.compare();
    }
}

struct Judge<'a> {
    seed: u64,
    node: &'a Node,
    plane: &'a ControlPlane<'a>,
    /// Always there but while it is restarted.
    proxy: Option<KubeProxy<'a>>,
    changes: usize,
}

impl Judge<'_> {
    /// Compares both tables with the plan of what the server holds.
    fn compare(&self) -> RoutesReport {
        let (frontend, endpoint) = self.mark();
        self.wait_for(|| {
            let both = [choices(&self.live()), self.theirs()];
            let knows = |it: &Choices| it.get(&frontend).is_some_and(|it| it.contains(&endpoint));
            if both.iter().all(knows) {
                Vec::new()
            } else {
                vec![format!("{frontend}: no {endpoint}")]
            }
        });
        let plan = self.plan();
        self.wait_for(|| differences(&choices(&plan), &self.theirs()));
        self.wait_for(|| {
            let live = self.live();
            if live == plan {
                Vec::new()
            } else {
                vec![format!("{live:?} is not {plan:?}")]
            }
        });
        plan
    }

    /// Writes a Service and a slice, each unlike before: who shows both has
    /// seen all that was written before them.
    fn mark(&self) -> (String, SocketAddr) {
        let round = self.changes / COMPARED_EVERY;
        let port = 1000 + round;
        let address = format!("10.250.0.{}", 1 + round);
        let metadata = |labels: Value| {
            value!({
                "namespace": NAMESPACE, "name": "marker", "labels": labels,
            })
        };
        let objects = [
            value!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata(value!({})),
                "spec": { "clusterIP": "10.96.255.1", "ports": [{ "name": "at", "port": port }] },
            }),
            value!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": metadata(value!({ "kubernetes.io/service-name": "marker" })),
                "addressType": "IPv4",
                "ports": [{ "name": "at", "port": 8080, "protocol": "TCP" }],
                "endpoints": [{ "addresses": [address] }],
            }),
        ];
        self.plane.apply(&list(&objects)).unwrap();
        (
            format!("10.96.255.1:{port}/TCP"),
            format!("{address}:8080").parse().unwrap(),
        )
    }

    /// A kube-proxy that runs keeps the endpoints of a slice that moved to
    /// another Service with the first Service too (pkg/proxy/nftables/proxier.go,
    /// OnEndpointSliceUpdate, ignores what the slice was); a new one does not.
    fn restart_proxy(&mut self) {
        // Two can't share the ports.
        self.proxy = None;
        let proxy = self.plane.kube_proxy(self.node, ProxyMode::Nftables);
        self.proxy = Some(proxy.unwrap());
    }

    /// kube-proxy's choices.
    fn theirs(&self) -> Choices {
        let mut theirs = self.proxy.as_ref().unwrap().choices().unwrap();
        theirs.retain(|frontend, _| PROTOCOLS.iter().any(|it| frontend.ends_with(it)));
        theirs
    }

    /// The agent's table.
    fn live(&self) -> RoutesReport {
        serde_json::from_value(json(self.node, &["routes"])).unwrap()
    }

    fn plan(&self) -> RoutesReport {
        self.plane.write_objects(self.node).unwrap();
        serde_json::from_value(planned(self.node, &NO_PREFERENCE)).unwrap()
    }

    /// Waits until nothing is wrong.
    fn wait_for(&self, wrong: impl Fn() -> Vec<String>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let wrong = wrong();
            if wrong.is_empty() {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "SHUNT_SEED={}, after {} changes:\n{}",
                self.seed,
                self.changes,
                wrong.join("\n")
            );
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// What a connect may be given: the first tier.
fn choices(report: &RoutesReport) -> Choices {
    let routes = report.routes.iter();
    routes
        .map(|route| {
            let address = SocketAddr::new(route.address, route.port);
            let endpoints = route.tiers[0].endpoints.iter().copied();
            (format!("{address}/{}", route.protocol), endpoints.collect())
        })
        .collect()
}

fn differences(ours: &Choices, theirs: &Choices) -> Vec<String> {
    let frontends: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    let pairs = frontends
        .into_iter()
        .map(|it| (it, ours.get(it), theirs.get(it)));
    let different = pairs.filter(|(_, ours, theirs)| ours != theirs);
    different
        .map(|(frontend, ours, theirs)| {
            format!("{frontend}: shunt {ours:?}, kube-proxy {theirs:?}")
        })
        .collect()
}

/// That the comparison is one of many things. Each seed gives far more of them: of
/// 3000, those with the fewest gave 23 with many endpoints, and 36 with affinity.
fn assert_varied(report: &RoutesReport) {
    let count = |what, least, is: &dyn Fn(&RouteReport) -> bool| {
        let count = report.routes.iter().filter(|route| is(route)).count();
        assert!(count >= least, "only {count} routes {what}");
    };
    count("in all", 200, &|_| true);
    count("to be refused", 10, &|it| it.verdict == Verdict::Refuse);
    count("by hints", 5, &|it| it.tiers[0].scope == Scope::Hints);
    count("to this node", 10, &|it| it.tiers[0].scope == Scope::Node);
    count("with many endpoints", 8, &|it| {
        it.tiers[0].endpoints.len() > 2
    });
    count("of IPv6", 50, &|it| it.address.is_ipv6());
    count("of UDP", 50, &|it| it.protocol == Protocol::Udp);
    count("with affinity", 10, &|it| it.affinity_seconds.is_some());
}
