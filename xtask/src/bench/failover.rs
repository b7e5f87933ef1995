//! What a dead node costs its callers: connects at a steady pace to Services with
//! endpoints on three nodes, one of which is cut off without a word, and comes back.
//!
//! All contenders run at once, each from a node of its own that has a third of the
//! endpoints; the two other nodes are shared, and one of them is cut. The
//! EndpointSlices stay as they are, as they do for 40 seconds and more in a cluster.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::kubernetes::{ControlPlane, ProxyMode, list};
use lab::report::{PaceReport, PacedConnect};
use lab::{Agent, Lab, LogOutput, Node, Options, Place as _, Pod, Process, Server};
use serde_json::{Value, json};

use super::Row;
use crate::stats::Samples;

/// Connects a second, of each contender.
const RATE: u32 = 200;
/// Times since the first connect: the node is cut, the node is back, the end.
const CUT: Duration = Duration::from_secs(5);
const BACK: Duration = Duration::from_secs(66);
const END: Duration = Duration::from_secs(90);
/// Of the time after the node is back, how long its share may take to return.
const RETURN: Duration = Duration::from_secs(15);
const MINUTE_MS: u32 = 60_000;
/// What takes longer is as good as failed.
const SLOW_MS: u32 = 1_000;
const SERVER_PORT: u16 = 8080;
const PATIENCE: Duration = Duration::from_secs(120);

/// How many endpoints on each node, and over which family.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    cluster_ip: IpAddr,
    endpoints: u8,
}

const CASES: [Case; 3] = [
    Case {
        name: "3 endpoints",
        cluster_ip: IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)),
        endpoints: 1,
    },
    Case {
        name: "3 endpoints, IPv6",
        cluster_ip: IpAddr::V6(Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10)),
        endpoints: 1,
    },
    Case {
        name: "30 endpoints",
        cluster_ip: IpAddr::V4(Ipv4Addr::new(10, 96, 0, 30)),
        endpoints: 10,
    },
];

/// The three contenders.
const SHUNT: &str = "shunt";
const NO_AGENT: &str = "shunt-agent-dead";
const PROXY: &str = "kube-proxy";

/// A node with servers, which answer its name.
struct Servers {
    node: Node,
    pod: Pod,
    _server: Server,
}

struct Contender {
    name: &'static str,
    servers: Servers,
    client: Pod,
    _agent: Option<Agent>,
}

pub(super) fn run() -> Result<Vec<Row>> {
    let logs = LogOutput::OnPanic;
    let mut lab = Lab::with(
        "failover",
        Options {
            logs,
            ..Options::default()
        },
    )?;
    let shared = [Servers::new(&mut lab, "n1")?, Servers::new(&mut lab, "n2")?];
    let mut contenders = [
        Contender::new(&mut lab, SHUNT, "n3")?,
        Contender::new(&mut lab, NO_AGENT, "n4")?,
        Contender::new(&mut lab, PROXY, "n5")?,
    ];
    for contender in &mut contenders {
        contender.start(&shared)?;
    }
    let mut rows = Vec::new();
    for case in CASES {
        println!(
            "\n{}: {RATE} connects a second, {} s",
            case.name,
            END.as_secs()
        );
        let reports = measure(&contenders, &shared[1].node, case)?;
        for (contender, report) in contenders.iter().zip(&reports) {
            rows.extend(summary(case, contender, report, shared[1].node.name()));
        }
        print(&contenders, &reports);
    }
    Ok(rows)
}

impl Servers {
    fn new(lab: &mut Lab, name: &str) -> Result<Self> {
        let node = lab.node(name)?;
        let pod = node.pod("server", None)?;
        let number = pod.ipv4().octets()[2];
        pod.add_network(&format!("10.244.{number}.128/28"))?;
        let server = pod.serve(format!("[::]:{SERVER_PORT}"), name)?;
        Ok(Self {
            node,
            pod,
            _server: server,
        })
    }

    fn addresses(&self, case: Case) -> Vec<IpAddr> {
        if case.cluster_ip.is_ipv6() {
            return vec![self.pod.ipv6().into()];
        }
        if case.endpoints == 1 {
            return vec![self.pod.ipv4().into()];
        }
        let [a, b, c, _] = self.pod.ipv4().octets();
        let many = (0..case.endpoints).map(|last| Ipv4Addr::new(a, b, c, 128 + last).into());
        many.collect()
    }
}

impl Contender {
    fn new(lab: &mut Lab, name: &'static str, node: &str) -> Result<Self> {
        let servers = Servers::new(lab, node)?;
        let client = servers.node.pod("client", None)?;
        Ok(Self {
            name,
            servers,
            client,
            _agent: None,
        })
    }

    /// Has the real kube-proxy write its rules, or shunt its table.
    fn start(&mut self, shared: &[Servers; 2]) -> Result<()> {
        let [one, two] = shared;
        let all = [&self.servers, one, two];
        let objects: Vec<_> = CASES.iter().flat_map(|case| service(*case, &all)).collect();
        let node = &self.servers.node;
        if self.name == PROXY {
            let plane = ControlPlane::start(node)?;
            plane.apply("{apiVersion: v1, kind: Namespace, metadata: {name: bench}}")?;
            plane.create_all(&objects)?;
            plane.kube_proxy(node, ProxyMode::Nftables)?;
            return Ok(());
        }
        node.write_manifest("services.json", &list(&objects))?;
        let mut agent = node.agent(&["--prefer", "none", "--stale-after", "1h"])?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        if self.name == NO_AGENT {
            agent.kill()?;
        } else {
            self._agent = Some(agent);
        }
        Ok(())
    }

    fn pace(&self, case: Case) -> Result<Process> {
        let to = std::net::SocketAddr::new(case.cluster_ip, 80).to_string();
        let (rate, seconds) = (RATE.to_string(), END.as_secs().to_string());
        let args = ["pace", &to, "--rate", &rate, "--seconds", &seconds];
        self.client.start_lab_pod(&args)
    }
}

fn measure(contenders: &[Contender], node: &Node, case: Case) -> Result<Vec<PaceReport>> {
    let running: Vec<_> = contenders
        .iter()
        .map(|contender| contender.pace(case))
        .collect::<Result<_>>()?;
    sleep(CUT);
    node.cut()?;
    sleep(BACK - CUT);
    node.restore()?;
    let reports = running.into_iter().map(Process::finish);
    reports.collect::<Result<_>>().context("pace")
}

fn is_affected(connect: &PacedConnect) -> bool {
    connect.id.is_none() || connect.took_ms > SLOW_MS
}

/// Connects that began in the minute after the cut.
fn of_minute(report: &PaceReport) -> impl Iterator<Item = &PacedConnect> {
    let cut = milliseconds(CUT);
    report
        .connects
        .iter()
        .filter(move |it| (cut..cut + MINUTE_MS).contains(&it.at_ms))
}

/// Percent of those that fail a test; 0 of none.
fn percent<'c>(
    connects: impl Iterator<Item = &'c PacedConnect>,
    is_bad: impl Fn(&PacedConnect) -> bool,
) -> f64 {
    let (mut all, mut bad) = (0_u32, 0_u32);
    for connect in connects {
        all += 1;
        bad += u32::from(is_bad(connect));
    }
    100.0 * f64::from(bad) / f64::from(all.max(1))
}

/// Seconds after the cut until less than 1 % of the connects of each second to come
/// are affected, until the node is back.
fn seconds_to_1_percent(report: &PaceReport) -> u32 {
    let last_bad = (0..MINUTE_MS / 1_000).rev().find(|second| {
        let start = milliseconds(CUT) + second * 1_000;
        let connects = report.connects.iter();
        let of_second = connects.filter(|it| (start..start + 1_000).contains(&it.at_ms));
        percent(of_second, is_affected) >= 1.0
    });
    last_bad.map_or(0, |second| second + 1)
}

fn summary(case: Case, contender: &Contender, report: &PaceReport, cut: &str) -> Vec<Row> {
    let back = milliseconds(BACK);
    let after: Vec<_> = report
        .connects
        .iter()
        .filter(|it| it.at_ms >= back)
        .collect();
    let settled = back + milliseconds(RETURN);
    let late = after.iter().copied().filter(|it| it.at_ms >= settled);
    let is_there = |it: &PacedConnect| it.id.as_deref() == Some(cut);
    let row = |metric, value: f64| {
        let mut samples = Samples::default();
        samples.add(value);
        Row::new(case.name, contender.name, metric, &samples)
    };
    vec![
        row("affected_percent", percent(of_minute(report), is_affected)),
        row(
            "failed_percent",
            percent(of_minute(report), |it| it.id.is_none()),
        ),
        row("seconds_to_1_percent", seconds_to_1_percent(report).into()),
        // A third is fair.
        row("share_after_return", percent(late, is_there) / 100.0),
        row(
            "failed_after_return",
            after.iter().filter(|it| it.id.is_none()).count() as f64,
        ),
    ]
}

/// Of the first seconds after the cut, one by one.
fn print(contenders: &[Contender], reports: &[PaceReport]) {
    println!(
        "{:<18} {:>9} {:>8} {:>6}   affected of {RATE}, in each second after the cut",
        "", "affected", "failed", "to 1%"
    );
    for (contender, report) in contenders.iter().zip(reports) {
        let seconds: Vec<_> = (0..20).map(|second| affected_in(report, second)).collect();
        println!(
            "{:<18} {:>8.2}% {:>7.2}% {:>4} s   {}",
            contender.name,
            percent(of_minute(report), is_affected),
            percent(of_minute(report), |it| it.id.is_none()),
            seconds_to_1_percent(report),
            seconds.join(" ")
        );
    }
}

fn affected_in(report: &PaceReport, second: u32) -> String {
    let start = milliseconds(CUT) + second * 1_000;
    let connects = report.connects.iter();
    let of_second = connects.filter(|it| (start..start + 1_000).contains(&it.at_ms));
    of_second.filter(|it| is_affected(it)).count().to_string()
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).expect("a few minutes")
}

/// A Service and its slice.
fn service(case: Case, servers: &[&Servers; 3]) -> [Value; 2] {
    let name = case.name.replace([' ', ','], "").to_lowercase();
    let name = format!("s{name}");
    let ip = case.cluster_ip;
    let family = if ip.is_ipv6() { "IPv6" } else { "IPv4" };
    let endpoints = servers.iter().flat_map(|of_node| {
        let addresses = of_node.addresses(case).into_iter();
        addresses.map(|address| {
            json!({
                "addresses": [address],
                "nodeName": of_node.node.name(),
                "conditions": { "ready": true },
            })
        })
    });
    let endpoints: Vec<_> = endpoints.collect();
    let labels = json!({ "kubernetes.io/service-name": name });
    [
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "namespace": "bench", "name": name },
            "spec": {
                "clusterIP": ip,
                "clusterIPs": [ip],
                "ipFamilies": [family],
                "ports": [{ "port": 80 }],
            },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "namespace": "bench", "name": format!("{name}-1"), "labels": labels },
            "addressType": family,
            "ports": [{ "port": SERVER_PORT }],
            "endpoints": endpoints,
        }),
    ]
}
