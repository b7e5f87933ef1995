//! What a connect costs: connect and close as fast as one client can, to a
//! server on the same node, which closes each connection at once.
//!
//! Each contender has a node of its own, so that the programs and rules of one
//! do not touch another, and all have the same objects: shunt from manifests,
//! kube-proxy from an API server. While we measure, neither kube-proxy nor the
//! API server runs: the rules are the kernel's, and the processors are free.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lab::kubernetes::{ControlPlane, ProxyMode, list};
use lab::report::ConnectBench;
use lab::{Agent, Lab, LogOutput, Node, Options, Place as _, Pod, Server};
use serde_json::{Value, json};

use super::Row;
use crate::stats::Samples;

/// The names of kube-proxy in both modes.
const PROXIES: [(&str, ProxyMode); 2] = [
    ("kube-proxy", ProxyMode::Nftables),
    ("kube-proxy-iptables", ProxyMode::Iptables),
];
const RUNS: usize = 7;
const SECONDS: &str = "0.7";
const METRIC: &str = "connects_per_s";
/// The server's address, the same on each node, in its pod.
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 250, 0, 1)), 8080);
/// The cases, and their numbers of Services.
const FEW: Case = Case {
    name: "1 service",
    services: 1,
};
const MANY: Case = Case {
    name: "10000 services",
    services: 10_000,
};
/// How long agent and kube-proxy may take for the first table.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    services: u16,
}

/// One way to the server.
struct Contender {
    case: &'static str,
    name: &'static str,
    /// How many Services lead to the server; none for the way without one.
    services: Option<u16>,
    client: Pod,
    samples: Samples,
    _server: Server,
    _server_pod: Pod,
    _agent: Option<Agent>,
    node: Node,
}

pub(super) fn run() -> Result<Vec<Row>> {
    println!("setting up seven nodes, one for each contender");
    let mut lab = Lab::with(
        "bench",
        Options {
            logs: LogOutput::OnPanic,
            ..Options::default()
        },
    )?;
    let mut contenders = vec![
        Contender::new(&mut lab, "pod-ip", None)?,
        Contender::shunt(&mut lab, FEW)?,
        Contender::shunt(&mut lab, MANY)?,
    ];
    let ours = contenders.len();
    for (name, _) in PROXIES {
        for case in [FEW, MANY] {
            contenders.push(Contender::new(&mut lab, name, Some(case))?);
        }
    }
    write_rules(&contenders[ours..])?;
    for run in 1..=RUNS {
        println!("run {run} of {RUNS}");
        for contender in &mut contenders {
            contender.measure(run)?;
        }
    }
    print(&contenders);
    Ok(contenders.iter().map(Contender::row).collect())
}

/// Has the real kube-proxy write its rules on the nodes of its contenders, first
/// of those with few Services. (The API server adds one of its own, `kubernetes`.)
fn write_rules(contenders: &[Contender]) -> Result<()> {
    let plane = ControlPlane::start(&contenders[0].node)?;
    plane.apply("{apiVersion: v1, kind: Namespace, metadata: {name: bench}}")?;
    let mut written = 0;
    for case in [FEW, MANY] {
        println!("writing {} to the API server", case.name);
        plane.create_all(&objects(written..case.services))?;
        written = case.services;
        for (name, mode) in PROXIES {
            let of_this = |it: &&Contender| it.name == name && it.case == case.name;
            let contender = contenders.iter().find(of_this);
            let node = &contender.context("each case has both modes")?.node;
            println!("{name} writes its rules");
            plane.kube_proxy(node, mode)?;
        }
    }
    Ok(())
}

impl Contender {
    fn shunt(lab: &mut Lab, case: Case) -> Result<Self> {
        let mut contender = Self::new(lab, "shunt", Some(case))?;
        let manifest = list(&objects(0..case.services));
        contender.node.write_manifest("services.json", &manifest)?;
        let mut agent = contender.node.agent(&[])?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        contender._agent = Some(agent);
        Ok(contender)
    }

    /// Client and server on a new node.
    fn new(lab: &mut Lab, name: &'static str, case: Option<Case>) -> Result<Self> {
        let services = case.map(|case| case.services);
        let node = lab.node(&format!("{name}{}", services.unwrap_or_default()))?;
        let client = node.pod("client", None)?;
        let server_pod = node.pod("server", None)?;
        server_pod.add_network(&format!("{}/32", SERVER.ip()))?;
        let listen = format!("0.0.0.0:{}", SERVER.port());
        let args = ["serve", "--close", "--listen", &listen, "--cpu", "1"];
        let server = Server::start(server_pod.start_lab_pod(&args)?)?;
        Ok(Self {
            case: case.map_or("no service", |case| case.name),
            name,
            services,
            client,
            samples: Samples::default(),
            _server: server,
            _server_pod: server_pod,
            _agent: None,
            node,
        })
    }

    /// Another Service in each run: the place of a Service in the rules of
    /// iptables mode, which the kernel walks from the first, is left to chance.
    fn target(&self, run: usize) -> SocketAddr {
        let Some(services) = self.services else {
            return SERVER;
        };
        let number = usize::from(services) * run / (RUNS + 1);
        (
            cluster_ip(u16::try_from(number).expect("below the number of Services")),
            80,
        )
            .into()
    }

    fn measure(&mut self, run: usize) -> Result<()> {
        let target = self.target(run).to_string();
        let args = ["bench-connect", &target, "--seconds", SECONDS, "--cpu", "0"];
        let report: ConnectBench = self.client.lab_pod(&args)?;
        ensure!(
            report.errors == 0,
            "{} with {}: {report:?}",
            self.name,
            self.case
        );
        self.samples.add(report.per_second);
        Ok(())
    }

    fn row(&self) -> Row {
        Row::new(self.case, self.name, METRIC, &self.samples)
    }
}

fn print(contenders: &[Contender]) {
    let base = contenders[0].samples.median();
    println!("\nconnect + close per second, median of {RUNS} interleaved runs");
    println!(
        "{:<20} {:<16} {:>9} {:>9} {:>9}  of pod-ip",
        "", "", "median", "min", "max"
    );
    for contender in contenders {
        let samples = &contender.samples;
        println!(
            "{:<20} {:<16} {:>9.0} {:>9.0} {:>9.0}  {:.2}",
            contender.name,
            contender.case,
            samples.median(),
            samples.min(),
            samples.max(),
            samples.median() / base,
        );
    }
}

fn cluster_ip(number: u16) -> IpAddr {
    // The API server keeps 10.96.0.1 for itself.
    let [high, low] = (number + 10).to_be_bytes();
    Ipv4Addr::new(10, 96, high, low).into()
}

/// Services that all have the one server as their endpoint.
fn objects(numbers: Range<u16>) -> Vec<Value> {
    numbers.flat_map(service).collect()
}

/// A Service and its slice.
fn service(number: u16) -> [Value; 2] {
    let (name, ip) = (format!("s{number}"), cluster_ip(number));
    let labels = json!({ "kubernetes.io/service-name": name });
    [
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "namespace": "bench", "name": name },
            "spec": { "clusterIP": ip, "clusterIPs": [ip], "ports": [{ "port": 80 }] },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "namespace": "bench", "name": format!("{name}-1"), "labels": labels },
            "addressType": "IPv4",
            "ports": [{ "port": SERVER.port() }],
            "endpoints": [{ "addresses": [SERVER.ip()], "conditions": { "ready": true } }],
        }),
    ]
}
