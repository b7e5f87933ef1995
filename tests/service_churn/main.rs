//! A minute of random changes of 500 Services under load, with the real
//! kube-proxy beside shunt as the judge.
//!
//! Two nodes have the same objects, changes and clients, TCP and UDP. The first
//! has shunt and kube-proxy, the second kube-proxy only. All pods that are ever
//! endpoints live on to the end, as draining pods do, so that an error is one of
//! routing. Most Services have a usable endpoint after each single write: their
//! clients get no error, on neither node. The others are emptied, deleted and
//! made again: what their clients get from shunt, kube-proxy gives too.
//!
//! `SHUNT_SEED=N` repeats the changes that a failure names.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

mod cluster;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use lab::fixture::{PATIENCE, READY, json, planned, wait_until};
use lab::kubernetes::{ControlPlane, ProxyMode};
use lab::random::seed;
use lab::report::{LoadReport, ManyReport};
use lab::{Lab, Node, Place as _, Process, Server};

use crate::cluster::{Backend, Cluster, Kind, NAMESPACE, Service, TARGET_PORT};

const SERVICES: usize = 500;
const DURATION: Duration = Duration::from_secs(60);
const LEAST_CHANGES: usize = 1000;
/// Services that are changed at a time.
const BATCH: usize = 40;
const PODS_OF_A_NODE: usize = 4;
const NODES: [(&str, &str); 3] = [("n1", "z1"), ("n2", "z1"), ("n3", "z2")];
const KINDS: [Kind; 2] = [Kind::Steady, Kind::Fickle];

#[test]
fn no_error_that_kube_proxy_would_not_give_and_the_last_table_is_the_plan() {
    let seed = seed();
    let mut lab = Lab::new("services").unwrap();
    let nodes = NODES.map(|(name, _)| lab.node(name).unwrap());
    let (backends, _running) = backends(&nodes);
    let mut cluster = Cluster::new(seed, SERVICES, &backends);
    let plane = ControlPlane::start(&nodes[2]).unwrap();
    plane.apply(&fixed_objects()).unwrap();
    plane.create_all(&cluster.objects()).unwrap();
    let [with_shunt, without, _] = &nodes;
    let _proxies =
        [with_shunt, without].map(|it| plane.kube_proxy(it, ProxyMode::Nftables).unwrap());
    let mut agent = with_shunt
        .agent_of_cluster(plane.kubeconfig(), &[])
        .unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();

    let loads = [with_shunt, without].map(|node| Load::start(node, &cluster));
    change_for(DURATION, &mut cluster, &plane);
    let [ours, theirs] = loads.map(Load::finish);

    assert_no_error_of_steady_services(&cluster, "kube-proxy alone", &theirs);
    assert_no_error_of_steady_services(&cluster, "shunt", &ours);
    for udp in [false, true] {
        assert_errors_are_of_both(&cluster, &ours, &theirs, udp);
    }
    assert_chosen_by_shunt(with_shunt, &ours);
    plane.write_objects(with_shunt).unwrap();
    let plan = planned(with_shunt, &[]);
    wait_until("the live table is the plan", || {
        json(with_shunt, &["routes"]) == plan
    });
}

fn backends(nodes: &[Node; 3]) -> (Vec<Backend>, Vec<Server>) {
    let (mut backends, mut running) = (Vec::new(), Vec::new());
    let listen = format!("[::]:{TARGET_PORT}");
    for (node, (name, zone)) in nodes.iter().zip(NODES) {
        for number in 0..PODS_OF_A_NODE {
            let id = format!("{name}p{number}");
            let pod = node.pod(&id, None).unwrap();
            running.push(pod.serve(&listen, &id).unwrap());
            running.push(pod.serve_udp(&listen, &id).unwrap());
            backends.push(Backend {
                pod,
                node: name,
                zone,
            });
        }
    }
    (backends, running)
}

fn fixed_objects() -> String {
    let namespace = format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}");
    let node = |(name, zone): &(&str, &str)| {
        format!(
            "\n---\n{{apiVersion: v1, kind: Node, metadata: {{name: {name}, labels: \
             {{topology.kubernetes.io/zone: {zone}}}}}}}"
        )
    };
    namespace + &NODES.iter().map(node).collect::<String>()
}

/// Changes the cluster for so long, and often enough if the machine is slow.
fn change_for(duration: Duration, cluster: &mut Cluster<'_>, plane: &ControlPlane<'_>) {
    let begin = Instant::now();
    let mut changes = 0;
    while begin.elapsed() < duration || changes < LEAST_CHANGES {
        let (writes, count) = cluster.change(BATCH);
        plane.write(&writes).unwrap();
        changes += count;
    }
}

/// The clients of a node, one for each kind of Service and protocol.
struct Load(Vec<Process>);

impl Load {
    fn start(node: &Node, cluster: &Cluster<'_>) -> Self {
        let client = node.pod("client", None).unwrap();
        let mut processes = Vec::new();
        for (kind, udp) in KINDS.iter().flat_map(|it| [(it, false), (it, true)]) {
            let services = cluster.services.iter();
            let targets = services.filter(|it| it.kind == *kind && it.is_udp() == udp);
            let targets: Vec<_> = targets.map(|it| it.address().to_string()).collect();
            let path = node.folder().join(format!("targets-{kind:?}-{udp}"));
            fs::write(&path, targets.join("\n")).unwrap();
            let path = path.display().to_string();
            // What is lost on the way to no Service must not hold up the others.
            let timeout = if *kind == Kind::Steady {
                "10000"
            } else {
                "300"
            };
            let mut args = vec!["load-many", &path, "--timeout-ms", timeout];
            args.extend(udp.then_some("--udp"));
            processes.push(client.start_lab_pod(&args).unwrap());
        }
        Self(processes)
    }

    fn finish(self) -> ManyReport {
        let reports = self
            .0
            .into_iter()
            .map(|it| it.finish::<ManyReport>().unwrap());
        let mut sum = ManyReport::new();
        for (target, report) in reports.flatten() {
            sum.insert(target, report);
        }
        sum
    }
}

fn report<'a>(all: &'a ManyReport, service: &Service) -> &'a LoadReport {
    all.get(&service.address())
        .unwrap_or_else(|| panic!("nobody asked {}", service.address()))
}

fn assert_no_error_of_steady_services(cluster: &Cluster<'_>, who: &str, all: &ManyReport) {
    for service in &cluster.services {
        let LoadReport { ids, errnos, .. } = report(all, service);
        let at = service.address();
        for id in ids.keys() {
            assert!(cluster.may_answer(service, id), "{who}: {id} for {at}");
        }
        let may_fail = service.kind == Kind::Fickle;
        assert!(may_fail || errnos.is_empty(), "{who}: {at}: {errnos:?}");
    }
}

/// What fails with shunt fails with kube-proxy alone, in the same way, and only
/// where the Service had no usable endpoint for some time.
fn assert_errors_are_of_both(
    cluster: &Cluster<'_>,
    ours: &ManyReport,
    theirs: &ManyReport,
    udp: bool,
) {
    let fickle = cluster.services.iter();
    let fickle = fickle.filter(|it| it.kind == Kind::Fickle && it.is_udp() == udp);
    let (mut of_shunt, mut of_kube_proxy) = (BTreeSet::new(), BTreeSet::new());
    for service in fickle {
        let errnos = &report(ours, service).errnos;
        // The wait is short, and a busy machine may take as long.
        let is_late = errnos.keys().all(|it| it == "timeout");
        assert!(
            service.was_unusable || is_late,
            "{}: {errnos:?}",
            service.address()
        );
        of_shunt.extend(errnos.keys());
        of_kube_proxy.extend(report(theirs, service).errnos.keys());
    }
    assert!(!of_kube_proxy.is_empty(), "the Services were not fickle");
    assert!(
        of_shunt.is_subset(&of_kube_proxy),
        "udp={udp}: shunt {of_shunt:?}, kube-proxy alone {of_kube_proxy:?}"
    );
}

/// That it was not kube-proxy's rules that answered on the first node, too; but
/// for Services that shunt does not know yet.
fn assert_chosen_by_shunt(node: &Node, ours: &ManyReport) {
    let answers: u64 = ours.values().flat_map(|it| it.ids.values()).sum();
    let counters = &json(node, &["status"])["counters"];
    let tiers = ["node", "zone", "cluster", "same"];
    let chosen = tiers.map(|it| counters[format!("connect_{it}")].as_u64().unwrap());
    let chosen: u64 = chosen.iter().sum();
    assert!(chosen > answers / 10 * 9, "{answers} answers, {counters}");
}
