//! What real programs gain: requests per second of unmodified servers and clients in
//! pods of one node, by every way between them. See [`cases`] for the programs.
//!
//! Each way has a node of its own, so that the programs and rules of one do not touch
//! another. Nothing is kept on one processor: there are more processes than that.

mod cases;

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::kubernetes::{ControlPlane, ProxyMode, list};
use lab::programs::{Programs, Running};
use lab::{Agent, Lab, LogOutput, Node, Options, Pod};
use serde_json::{Value, json};

use self::cases::{CASES, Case, Ends};
use super::Row;
use crate::stats::Samples;

const RUNS: usize = 5;
const METRIC: &str = "requests_per_s";
/// What the others are held against.
const BASE: &str = "kube-proxy";
/// Of the Services before the front and before what is behind it.
const FRONT: &str = "10.96.0.10";
const BACK: &str = "10.96.0.11";
/// The front's ports, one for each case; those behind are as many further.
const FIRST_PORT: u16 = 7100;
const FURTHER: u16 = 100;
/// How long agent and kube-proxy may take for the first table.
const PATIENCE: Duration = Duration::from_secs(120);

/// One way between the programs, on a node of its own.
struct Way {
    name: &'static str,
    /// What clients, and the front itself, connect to.
    to_front: String,
    to_back: String,
    client: Pod,
    front: Pod,
    back: Pod,
    agent: Option<Agent>,
    node: Node,
}

pub(super) fn run() -> Result<Vec<Row>> {
    println!("setting up five nodes, one for each way");
    let options = Options {
        logs: LogOutput::OnPanic,
        ..Options::default()
    };
    let mut lab = Lab::with("bench", options)?;
    let programs = Programs::new(lab.folder())?;
    let ways = ways(&mut lab)?;
    let mut rows = Vec::new();
    for (case, port) in CASES.iter().zip(FIRST_PORT..) {
        let figures = measure(&programs, &ways, case, port).context(case.name)?;
        print(case, &ways, &figures);
        let row = |(way, (samples, _)): (&Way, &(Samples, u64))| {
            Row::new(case.name, way.name, METRIC, samples)
        };
        rows.extend(ways.iter().zip(&figures).map(row));
    }
    Ok(rows)
}

fn ways(lab: &mut Lab) -> Result<[Way; 5]> {
    let mut proxy = Way::new(lab, "kube-proxy")?;
    let direct = Way::new(lab, "pod-ip")?;
    let mut redirected = Way::new(lab, "shunt")?;
    let mut spliced = Way::new(lab, "shunt-splice")?;
    let mut loopback = Way::new(lab, "loopback")?;
    proxy.write_rules()?;
    redirected.start_agent(&["--splice", "off"])?;
    spliced.start_agent(&["--splice", "auto", "--splice-after", "0ms"])?;
    for to in [&mut loopback.to_front, &mut loopback.to_back] {
        "127.0.0.1".clone_into(to);
    }
    Ok([proxy, direct, redirected, spliced, loopback])
}

/// For each way the figures, and the messages that were spliced.
fn measure(
    programs: &Programs,
    ways: &[Way],
    case: &Case,
    port: u16,
) -> Result<Vec<(Samples, u64)>> {
    let start = |way: &Way| (case.serve)(programs, &way.ends(port));
    let servers = ways
        .iter()
        .map(start)
        .collect::<Result<Vec<Vec<Running>>>>()?;
    let mut figures: Vec<_> = ways.iter().map(|_| (Samples::default(), 0)).collect();
    let before = ways.iter().map(Way::spliced).collect::<Result<Vec<_>>>()?;
    for run in 0..=RUNS {
        for (way, (samples, _)) in ways.iter().zip(&mut figures) {
            let command = (case.ask)(programs, &way.ends(port))?;
            let printed = programs.finish(way.name, command).context(way.name)?;
            let value = (case.requests_per_second)(&printed);
            let value = value.with_context(|| format!("no figure in {printed}"))?;
            // The first warms up: runtimes compile what is used much.
            if run > 0 {
                samples.add(value);
            }
        }
    }
    for ((way, (_, spliced)), before) in ways.iter().zip(&mut figures).zip(before) {
        *spliced = way.spliced()? - before;
    }
    drop(servers);
    Ok(figures)
}

impl Way {
    /// By the pods' own addresses.
    fn new(lab: &mut Lab, name: &'static str) -> Result<Self> {
        let node = lab.node(name)?;
        let client = node.pod("client", None)?;
        let front = node.pod("front", None)?;
        let back = node.pod("back", None)?;
        Ok(Self {
            name,
            to_front: front.ipv4().to_string(),
            to_back: back.ipv4().to_string(),
            client,
            front,
            back,
            agent: None,
            node,
        })
    }

    /// Through the Services.
    fn by_services(&mut self) {
        FRONT.clone_into(&mut self.to_front);
        BACK.clone_into(&mut self.to_back);
    }

    fn write_rules(&mut self) -> Result<()> {
        let plane = ControlPlane::start(&self.node)?;
        plane.apply("{apiVersion: v1, kind: Namespace, metadata: {name: bench}}")?;
        plane.create_all(&self.objects())?;
        plane.kube_proxy(&self.node, ProxyMode::Nftables)?;
        self.by_services();
        Ok(())
    }

    fn start_agent(&mut self, args: &[&str]) -> Result<()> {
        let manifest = list(&self.objects());
        self.node.write_manifest("services.json", &manifest)?;
        let mut agent = self.node.agent(args)?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        self.agent = Some(agent);
        self.by_services();
        Ok(())
    }

    fn ends(&self, port: u16) -> Ends<'_> {
        // Over loopback all are in one pod.
        let is_alone = self.to_front == "127.0.0.1";
        let pod = |pod| if is_alone { &self.front } else { pod };
        Ends {
            client: pod(&self.client),
            front: &self.front,
            back: pod(&self.back),
            front_port: port,
            back_port: port + FURTHER,
            to_front: format!("{}:{port}", self.to_front),
            to_back: format!("{}:{}", self.to_back, port + FURTHER),
        }
    }

    /// Messages past TCP so far.
    fn spliced(&self) -> Result<u64> {
        if self.agent.is_none() {
            return Ok(0);
        }
        let output = self.node.shunt(&["status", "-o", "json"])?;
        let status: Value = serde_json::from_slice(&output.stdout).context("shunt status")?;
        let messages = status["counters"]["messages_spliced"].as_u64();
        messages.context("shunt status has no counter of spliced messages")
    }

    /// Both Services with their slices.
    fn objects(&self) -> Vec<Value> {
        let front = self.service("front", FRONT, &self.front, FIRST_PORT);
        let back = self.service("back", BACK, &self.back, FIRST_PORT + FURTHER);
        [front, back].concat()
    }

    fn service(&self, name: &str, ip: &str, pod: &Pod, first: u16) -> [Value; 2] {
        let numbers = (first..).take(CASES.len());
        let port = |port: u16| json!({ "name": format!("p{port}"), "port": port });
        let ports: Vec<_> = numbers.map(port).collect();
        let labels = json!({ "kubernetes.io/service-name": name });
        [
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": { "namespace": "bench", "name": name },
                "spec": { "clusterIP": ip, "clusterIPs": [ip], "ports": ports },
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": { "namespace": "bench", "name": format!("{name}-1"), "labels": labels },
                "addressType": "IPv4",
                "ports": ports,
                "endpoints": [{
                    "addresses": [pod.ipv4()],
                    "nodeName": self.node.name(),
                    "conditions": { "ready": true },
                }],
            }),
        ]
    }
}

fn print(case: &Case, ways: &[Way], figures: &[(Samples, u64)]) {
    let base = ways.iter().zip(figures).find(|(way, _)| way.name == BASE);
    let base = base.map_or(f64::NAN, |(_, (samples, _))| samples.median());
    println!(
        "\n{}, requests per second, median of {RUNS} interleaved runs",
        case.name
    );
    for (way, (samples, spliced)) in ways.iter().zip(figures) {
        let spliced = match spliced {
            0 => String::new(),
            messages => format!("  {messages} messages spliced"),
        };
        println!(
            "{:<14} {:>9.0}  ({:.0} to {:.0})  {:.2} of {BASE}{spliced}",
            way.name,
            samples.median(),
            samples.min(),
            samples.max(),
            samples.median() / base,
        );
    }
}
