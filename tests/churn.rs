//! Connects while everything changes.
//!
//! Each change of a Service moves it to two addresses that it never had before,
//! so that the address that answers tells which set a connect was given.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lab::fixture::{PATIENCE, Service, live_endpoints, start, wait_until};
use lab::report::{Landing, LoadReport};
use lab::{Lab, Node, Place as _, Pod, Process, Server};
use node_agent::bpf::{KernelMaps, Pins};

const PROCESSES: u64 = 4;
/// Of all processes together.
const CONNECTS: u64 = 10_000;
/// Time from one change to the next: 200 a second.
const STEP: Duration = Duration::from_millis(5);

/// A Service whose endpoints are all new at each step; one pod has them all.
struct Moving {
    name: &'static str,
    cluster_ip: &'static str,
    /// The network of its endpoints is 10.N.0.0/16.
    network: u8,
    _pod: Pod,
    _server: Server,
}

impl Moving {
    fn new(node: &Node, name: &'static str, cluster_ip: &'static str, network: u8) -> Self {
        let pod = node.pod(name, None).unwrap();
        pod.add_network(&format!("10.{network}.0.0/16")).unwrap();
        let args = ["serve", "--listen", "0.0.0.0:8080", "--id-is-address"];
        let server = Server::start(pod.start_lab_pod(&args).unwrap()).unwrap();
        Self {
            name,
            cluster_ip,
            network,
            _pod: pod,
            _server: server,
        }
    }

    /// The endpoints of a step: 10.N.0.0 and 10.N.0.1, then .2 and .3, and so on.
    fn endpoints(&self, step: u32) -> [IpAddr; 2] {
        [2 * step, 2 * step + 1].map(|index| {
            let [_, _, high, low] = index.to_be_bytes();
            Ipv4Addr::new(10, self.network, high, low).into()
        })
    }

    /// The step in which the address was an endpoint.
    fn step(&self, address: &str) -> Option<u32> {
        let [ten, network, high, low] = address.parse::<Ipv4Addr>().ok()?.octets();
        let index = u32::from_be_bytes([0, 0, high, low]);
        (ten == 10 && network == self.network).then_some(index / 2)
    }

    fn write(&self, node: &Node, step: u32) {
        let endpoints = self.endpoints(step).map(|address| (address, "n1")).to_vec();
        let Self {
            name, cluster_ip, ..
        } = *self;
        let yaml = Service {
            name,
            cluster_ip,
            endpoints,
            ..Service::default()
        }
        .yaml();
        node.write_manifest(&format!("{name}.yaml"), &yaml).unwrap();
    }

    /// Every connect was answered by an endpoint of the newest set that any
    /// connect before it was given, or of a newer one: never by one of a set
    /// that had been replaced, never by a mixture, never by anything else.
    fn check(&self, report: &LoadReport, last_step: u32) {
        assert!(report.errnos.is_empty(), "{:?}", report.errnos);
        let step = |landing: &Landing| {
            self.step(&landing.id)
                .unwrap_or_else(|| panic!("{} answered for {}", landing.id, self.name))
        };
        let mut by_end: Vec<_> = report
            .landings
            .iter()
            .map(|it| (it.end_ns, step(it)))
            .collect();
        let mut by_start: Vec<_> = report
            .landings
            .iter()
            .map(|it| (it.start_ns, step(it)))
            .collect();
        by_end.sort();
        by_start.sort();
        let mut ended = by_end.into_iter().peekable();
        let mut newest = 0;
        for (start_ns, step) in by_start {
            while let Some((_, earlier)) = ended.next_if(|(end_ns, _)| *end_ns < start_ns) {
                newest = newest.max(earlier);
            }
            assert!(
                (newest..=last_step).contains(&step),
                "{step} after {newest}, of {last_step}"
            );
        }
        assert!(
            newest > 20,
            "the endpoints moved only {newest} steps under the load"
        );
    }

    /// The newest step that any connect was given.
    fn newest(&self, report: &LoadReport) -> Option<u32> {
        let steps = report.landings.iter().map(|it| self.step(&it.id));
        steps.max().flatten()
    }
}

fn load(client: &Pod, target: &str, end: &[&str]) -> Vec<Process> {
    let args = [&["load", target, "--threads", "1", "--trace"], end].concat();
    (0..PROCESSES)
        .map(|_| client.start_lab_pod(&args).unwrap())
        .collect()
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
    snapshot
        .records
        .iter()
        .map(|record| record.entry.table_id())
        .max()
        .unwrap()
}

/// Writes the next step 200 times a second until the work is done; returns the
/// last step.
fn while_moving<T>(services: &[Moving], node: &Node, work: impl FnOnce() -> T) -> (T, u32) {
    let (done, step) = (AtomicBool::new(false), AtomicU32::new(0));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) {
                let next = step.fetch_add(1, Ordering::Relaxed) + 1;
                services
                    .iter()
                    .for_each(|service| service.write(node, next));
                std::thread::sleep((begin + STEP * next).saturating_duration_since(Instant::now()));
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    });
    (result, step.into_inner())
}

#[test]
fn each_connect_lands_on_the_old_or_the_new_set_while_endpoints_change() {
    let mut lab = Lab::new("churn").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    // The second Service is there so that map memory moves between the two.
    let services = [
        Moving::new(&node, "cart", "10.96.0.10", 250),
        Moving::new(&node, "pay", "10.96.0.20", 251),
    ];
    services.iter().for_each(|service| service.write(&node, 0));
    let _agent = start(&node, &[]);
    let first_table = last_table_id(&node);
    let count = (CONNECTS / PROCESSES).to_string();

    let (reports, steps) = while_moving(&services, &node, || {
        let mut reports = [LoadReport::default(), LoadReport::default()];
        let has_moved = |(service, report): (&Moving, &LoadReport)| {
            service.newest(report).is_some_and(|newest| newest > 50)
        };
        let deadline = Instant::now() + PATIENCE;
        // Again where the machine is so fast that little has moved meanwhile.
        while last_table_id(&node) - first_table <= 20
            || !services.iter().zip(&reports).all(has_moved)
        {
            assert!(Instant::now() < deadline, "the table does not follow");
            let loads = ["10.96.0.10:80", "10.96.0.20:80"]
                .map(|target| load(&client, target, &["--count", &count]));
            for (report, load) in reports.iter_mut().zip(loads) {
                report.merge(finish(load));
            }
        }
        reports
    });

    for (service, report) in services.iter().zip(&reports) {
        assert_eq!(report.landings.len() as u64 % CONNECTS, 0);
        service.check(report, steps);
    }
    let last = services[0]
        .endpoints(steps)
        .map(|address| format!("{address}:8080"));
    wait_until("the live table is the last one written", || {
        live_endpoints(&node, "shop/cart", "node") == last
    });
}

#[test]
fn no_connect_fails_while_the_agent_is_killed_and_restarted_ten_times() {
    let mut lab = Lab::new("killed").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let services = [Moving::new(&node, "cart", "10.96.0.10", 250)];
    services[0].write(&node, 0);
    let mut agent = start(&node, &[]);
    let loads = load(&client, "10.96.0.10:80", &["--until-stdin-closes"]);

    let ((), steps) = while_moving(&services, &node, || {
        for _ in 0..10 {
            agent.kill().unwrap();
            agent = start(&node, &[]);
        }
    });

    let report = finish(loads);
    assert!(
        report.landings.len() > 1000,
        "only {} connects",
        report.landings.len()
    );
    services[0].check(&report, steps);
}
