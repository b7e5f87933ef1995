//! Connects while everything changes.

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lab::report::LoadReport;
use lab::{Lab, Node, Place as _, Pod, Process};
use node_agent::bpf::{KernelMaps, Pins};
use support::{Service, live_endpoints, start, wait_until};

const PROCESSES: usize = 4;
/// Of all processes together.
const CONNECTS: u64 = 10_000;

/// A Service whose endpoints are a moving window over its pods, and so often
/// disjoint with the set before.
struct Rotating<'a> {
    name: &'a str,
    cluster_ip: &'a str,
    pods: &'a [Pod],
}

impl Rotating<'_> {
    /// Two neighbours at each step.
    fn write(&self, node: &Node, step: usize) {
        let at = |index: usize| (self.pods[index % self.pods.len()].ipv4().into(), "n1");
        let endpoints = vec![at(2 * step), at(2 * step + 1)];
        let Self { name, cluster_ip, .. } = *self;
        let yaml = Service { name, cluster_ip, endpoints, ..Service::default() }.yaml();
        node.write_manifest(&format!("{name}.yaml"), &yaml).unwrap();
    }
}

fn pods(node: &Node, prefix: &str) -> Vec<Pod> {
    (0..4).map(|number| node.pod(&format!("{prefix}{number}"), None).unwrap()).collect()
}

fn load(client: &Pod, target: &str) -> Vec<Process> {
    let count = (CONNECTS / PROCESSES as u64).to_string();
    let args = ["load", target, "--threads", "1", "--count", &count];
    (0..PROCESSES).map(|_| client.start_lab_pod(&args).unwrap()).collect()
}

fn finish(processes: Vec<Process>) -> LoadReport {
    let mut sum = LoadReport::default();
    for process in processes {
        sum.merge(process.finish().unwrap());
    }
    sum
}

fn last_table_id(node: &Node) -> u64 {
    let maps = KernelMaps::open(&Pins::new(&node.pins())).unwrap();
    let snapshot = maps.snapshot().unwrap();
    snapshot.records.iter().map(|record| record.entry.table_id()).max().unwrap()
}

/// Writes the next step 200 times a second until the work is done.
fn while_changing<T>(services: &[Rotating<'_>], node: &Node, work: impl FnOnce() -> T) -> (T, usize) {
    let (done, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let step = steps.fetch_add(1, Ordering::Relaxed) + 1;
                services.iter().for_each(|service| service.write(node, step as usize));
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    });
    (result, steps.load(Ordering::Relaxed) as usize)
}

#[test]
fn each_connect_lands_on_an_endpoint_of_its_service_while_endpoints_change() {
    let mut lab = Lab::new("churn").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let (carts, pays) = (pods(&node, "cart"), pods(&node, "pay"));
    let serve = |pod: &Pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap();
    let _servers: Vec<_> = carts.iter().chain(&pays).map(serve).collect();
    // The second Service is there so that map memory moves between the two.
    let services = [
        Rotating { name: "cart", cluster_ip: "10.96.0.10", pods: &carts },
        Rotating { name: "pay", cluster_ip: "10.96.0.20", pods: &pays },
    ];
    services.iter().for_each(|service| service.write(&node, 0));
    let _agent = start(&node, &[]);
    let first_table = last_table_id(&node);

    let ((cart, pay), steps) = while_changing(&services, &node, || {
        let (cart, pay) = (load(&client, "10.96.0.10:80"), load(&client, "10.96.0.20:80"));
        (finish(cart), finish(pay))
    });

    for (report, prefix) in [(&cart, "cart"), (&pay, "pay")] {
        assert!(report.errnos.is_empty(), "{report:?}");
        assert_eq!(report.ids.values().sum::<u64>(), CONNECTS);
        assert!(report.ids.keys().all(|id| id.starts_with(prefix)), "another Service: {report:?}");
        assert_eq!(report.ids.len(), 4, "the set has moved: {report:?}");
    }
    let last = [carts[(2 * steps) % 4].ipv4(), carts[(2 * steps + 1) % 4].ipv4()];
    let mut last = last.map(|address| format!("{address}:8080"));
    last.sort();
    wait_until("the live table is the last one written", || {
        live_endpoints(&node, "shop/cart", "node") == last
    });
    let published = last_table_id(&node) - first_table;
    assert!(published > 50, "only {published} tables were published in {steps} steps");
}

#[test]
fn no_connect_fails_while_the_agent_is_killed_and_restarted_ten_times() {
    let mut lab = Lab::new("killed").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let carts = pods(&node, "cart");
    let serve = |pod: &Pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap();
    let _servers: Vec<_> = carts.iter().map(serve).collect();
    let services = [Rotating { name: "cart", cluster_ip: "10.96.0.10", pods: &carts }];
    services[0].write(&node, 0);
    let mut agent = start(&node, &[]);
    let args = ["load", "10.96.0.10:80", "--threads", "1", "--until-stdin-closes"];
    let load: Vec<_> = (0..PROCESSES).map(|_| client.start_lab_pod(&args).unwrap()).collect();

    let ((), steps) = while_changing(&services, &node, || {
        for _ in 0..10 {
            let log = agent.log().to_owned();
            let ready = || fs::read_to_string(&log).unwrap().matches(support::READY).count();
            let before = ready();
            std::mem::replace(&mut agent, node.agent(&[]).unwrap()).kill().unwrap();
            // The first try may have met the lock of the one that was killed.
            wait_until("the next agent is ready", || {
                if !agent.is_running() {
                    agent = node.agent(&[]).unwrap();
                }
                ready() > before
            });
        }
    });

    let report = finish(load);
    assert!(report.errnos.is_empty(), "{report:?} in {steps} steps");
    assert!(report.ids.values().sum::<u64>() > 1000, "{report:?}");
    assert!(report.ids.keys().all(|id| id.starts_with("cart")), "{report:?}");
}
