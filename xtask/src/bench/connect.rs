//! What a connect costs: connect and close as fast as one client can, to a
//! server on the same node, which closes each connection at once.
//!
//! Each contender has a node of its own, so that the programs and rules of one
//! do not touch another.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use lab::report::ConnectBench;
use lab::{Agent, Lab, LogOutput, Node, Options, Place as _, Pod, Server, ServiceRule};

use super::Row;
use crate::stats::Samples;

const RUNS: usize = 7;
const SECONDS: &str = "0.7";
const METRIC: &str = "connects_per_s";
const PORT: u16 = 8080;
/// How long the agent may take for the first table.
const PATIENCE: Duration = Duration::from_secs(120);

/// One way to the server.
struct Contender {
    case: &'static str,
    name: &'static str,
    target: SocketAddr,
    client: Pod,
    samples: Samples,
    _server: Server,
    _server_pod: Pod,
    _agent: Option<Agent>,
    _node: Node,
}

pub(super) fn run() -> Result<Vec<Row>> {
    println!("setting up five nodes, one for each contender");
    let mut lab = Lab::with(
        "bench",
        Options {
            logs: LogOutput::OnPanic,
            ..Options::default()
        },
    )?;
    let mut contenders = vec![
        Contender::pod_ip(&mut lab)?,
        Contender::shunt(&mut lab, "1 service", 1)?,
        Contender::shunt(&mut lab, "10000 services", 10_000)?,
        Contender::kube_proxy(&mut lab, "1 service", 1)?,
        Contender::kube_proxy(&mut lab, "10000 services", 10_000)?,
    ];
    for run in 1..=RUNS {
        println!("run {run} of {RUNS}");
        for contender in &mut contenders {
            contender.measure()?;
        }
    }
    print(&contenders);
    Ok(contenders.iter().map(Contender::row).collect())
}

impl Contender {
    fn pod_ip(lab: &mut Lab) -> Result<Self> {
        let node = lab.node("podip")?;
        let contender = Self::on(node, "no service", "pod-ip")?;
        Ok(contender)
    }

    fn shunt(lab: &mut Lab, case: &'static str, services: u16) -> Result<Self> {
        let mut contender = Self::on(lab.node(&format!("shunt{services}"))?, case, "shunt")?;
        let node = &contender._node;
        node.write_manifest(
            "services.json",
            &manifests(node, services, contender.target),
        )?;
        let mut agent = node.agent(&[])?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        contender._agent = Some(agent);
        contender.target = (cluster_ip(services - 1), 80).into();
        Ok(contender)
    }

    fn kube_proxy(lab: &mut Lab, case: &'static str, services: u16) -> Result<Self> {
        let mut contender = Self::on(lab.node(&format!("proxy{services}"))?, case, "kube-proxy")?;
        let endpoint = [contender.target];
        let rules: Vec<_> = (0..services)
            .map(|number| ServiceRule::tcp(cluster_ip(number), 80, &endpoint))
            .collect();
        contender._node.kube_proxy(&rules)?;
        contender.target = (cluster_ip(services - 1), 80).into();
        Ok(contender)
    }

    /// Client and server on one node; the target is the pod itself.
    fn on(node: Node, case: &'static str, name: &'static str) -> Result<Self> {
        let client = node.pod("client", None)?;
        let server_pod = node.pod("server", None)?;
        let listen = format!("0.0.0.0:{PORT}");
        let args = ["serve", "--close", "--listen", &listen, "--cpu", "1"];
        let server = Server::start(server_pod.start_lab_pod(&args)?)?;
        Ok(Self {
            case,
            name,
            target: (server_pod.ipv4(), PORT).into(),
            client,
            samples: Samples::default(),
            _server: server,
            _server_pod: server_pod,
            _agent: None,
            _node: node,
        })
    }

    fn measure(&mut self) -> Result<()> {
        let target = self.target.to_string();
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
        "{:<12} {:<16} {:>9} {:>9} {:>9}  of pod-ip",
        "", "", "median", "min", "max"
    );
    for contender in contenders {
        let samples = &contender.samples;
        println!(
            "{:<12} {:<16} {:>9.0} {:>9.0} {:>9.0}  {:.2}",
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
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, 96, high, low).into()
}

/// Services that all have the one server as their endpoint, as a List.
fn manifests(node: &Node, services: u16, server: SocketAddr) -> String {
    let mut items = String::new();
    for number in 0..services {
        let comma = if number == 0 { "" } else { "," };
        let _ = write!(
            items,
            r#"{comma}{{"apiVersion":"v1","kind":"Service","metadata":{{"namespace":"bench","name":"s{number}"}},
"spec":{{"clusterIP":"{ip}","clusterIPs":["{ip}"],"ports":[{{"port":80,"protocol":"TCP"}}]}}}},
{{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{{"namespace":"bench","name":"s{number}-1",
"labels":{{"kubernetes.io/service-name":"s{number}"}}}},"addressType":"IPv4","ports":[{{"port":{port},"protocol":"TCP"}}],
"endpoints":[{{"addresses":["{address}"],"nodeName":"{node}","conditions":{{"ready":true}}}}]}}"#,
            ip = cluster_ip(number),
            port = server.port(),
            address = server.ip(),
            node = node.name(),
        );
    }
    format!(r#"{{"apiVersion":"v1","kind":"List","items":[{items}]}}"#)
}
