//! What the splice gains: round trips and one-way streams between two pods of a
//! node, by every way that there is.
//!
//! Each way that needs rules or an agent has a node of its own. While we measure,
//! neither kube-proxy nor the API server runs: the rules are the kernel's, and the
//! processors are free.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::kubernetes::{ControlPlane, ProxyMode, list};
use lab::report::{PingPongBench, StreamBench};
use lab::{Agent, Lab, LogOutput, Node, Options, Place as _, Pod, Process};
use serde_json::{Value, json};

use super::Row;
use crate::stats::Samples;

const RUNS: usize = 5;
const ROUND_TRIP_SIZES: [u32; 3] = [64, 1024, 16 * 1024];
const STREAM_SIZES: [u32; 6] = [64, 1024, 4096, 16 * 1024, 64 * 1024, 256 * 1024];
const PING_PONG_SECONDS: &str = "0.7";
/// Of the Service.
const CLUSTER_IP: &str = "10.96.0.10";
/// Of a server that echoes, and of one that reads.
const ECHO: u16 = 8080;
const SINK: u16 = 8081;
/// How long agent and kube-proxy may take for the first table.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    PingPong(u32),
    Stream { size: u32, nagle: bool },
}

impl Case {
    fn all() -> Vec<Self> {
        let streams = |nagle| STREAM_SIZES.map(|size| Self::Stream { size, nagle });
        let mut cases = ROUND_TRIP_SIZES.map(Self::PingPong).to_vec();
        cases.extend(streams(true));
        cases.extend(streams(false));
        cases
    }

    fn name(self) -> String {
        match self {
            Self::PingPong(size) => format!("pingpong {size}"),
            Self::Stream { size, nagle: true } => format!("stream nagle {size}"),
            Self::Stream { size, nagle: false } => format!("stream nodelay {size}"),
        }
    }

    /// The contender that others are held against.
    fn base(self) -> &'static str {
        match self {
            Self::PingPong(_) => "kube-proxy",
            Self::Stream { .. } => "pod-ip",
        }
    }
}

/// A node with a client and the servers.
struct Site {
    node: Node,
    client: Pod,
    server: Pod,
    _servers: Vec<Process>,
    _agent: Option<Agent>,
}

/// One way from client to server.
struct Contender<'a> {
    name: &'static str,
    from: &'a Pod,
    echo: String,
    sink: String,
    figures: Vec<Figures>,
}

/// Of one case.
#[derive(Default)]
struct Figures {
    /// Microseconds of half of the round trips, or bytes a second.
    first: Samples,
    /// Microseconds of all but one round trip in a hundred.
    p99: Samples,
}

pub(super) fn run() -> Result<Vec<Row>> {
    println!("setting up four nodes");
    let mut lab = Lab::with(
        "bench",
        Options {
            logs: LogOutput::OnPanic,
            ..Options::default()
        },
    )?;
    let plain = Site::new(&mut lab, "plain")?;
    let proxy = Site::new(&mut lab, "proxy")?;
    let mut redirected = Site::new(&mut lab, "redirected")?;
    let mut spliced = Site::new(&mut lab, "spliced")?;
    proxy.write_rules()?;
    redirected.start_agent(&["--splice", "off"])?;
    // The trace of system calls is the machine's, and all contenders would pay for it.
    let at_once = ["--splice", "auto", "--splice-after", "0ms"];
    spliced.start_agent(&[&at_once[..], &["--splice-calls", "ignore"]].concat())?;
    let (echo, sink) = plain.unix_servers()?;
    let mut contenders = [
        Contender::of_service("kube-proxy", &proxy),
        Contender::new("pod-ip", &plain.client, &plain.server.ipv4().to_string()),
        Contender::of_service("shunt", &redirected),
        Contender::of_service("shunt-splice", &spliced),
        Contender::new("loopback", &plain.server, "127.0.0.1"),
        Contender {
            echo: echo.path,
            sink: sink.path,
            ..Contender::new("unix", &plain.client, "")
        },
    ];
    let cases = Case::all();
    for run in 1..=RUNS {
        println!("run {run} of {RUNS}");
        for (index, case) in cases.iter().enumerate() {
            for contender in &mut contenders {
                contender
                    .measure(index, *case)
                    .with_context(|| format!("{} by {}", case.name(), contender.name))?;
            }
        }
    }
    let mut rows = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        print(*case, index, &contenders);
        rows.extend(
            contenders
                .iter()
                .flat_map(|contender| contender.rows(index, *case)),
        );
    }
    Ok(rows)
}

impl Site {
    fn new(lab: &mut Lab, name: &str) -> Result<Self> {
        let node = lab.node(name)?;
        let client = node.pod("client", None)?;
        let server = node.pod("server", None)?;
        let listen = |port: u16, extra: &[&str]| {
            let address = format!("0.0.0.0:{port}");
            let args = ["bench-serve", "--cpu", "1", "--listen", &address];
            start(&server, &[&args, extra].concat())
        };
        let servers = vec![listen(ECHO, &[])?, listen(SINK, &["--sink"])?];
        Ok(Self {
            node,
            client,
            server,
            _servers: servers,
            _agent: None,
        })
    }

    /// The Service, and its slice.
    fn objects(&self) -> [Value; 2] {
        let labels = json!({ "kubernetes.io/service-name": "server" });
        let ports = [("echo", ECHO), ("sink", SINK)];
        let service_ports = ports.map(|(name, port)| json!({ "name": name, "port": port }));
        [
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": { "namespace": "bench", "name": "server" },
                "spec": { "clusterIP": CLUSTER_IP, "clusterIPs": [CLUSTER_IP], "ports": service_ports },
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": { "namespace": "bench", "name": "server-1", "labels": labels },
                "addressType": "IPv4",
                "ports": service_ports,
                "endpoints": [{
                    "addresses": [self.server.ipv4()],
                    "nodeName": self.node.name(),
                    "conditions": { "ready": true },
                }],
            }),
        ]
    }

    /// Has the real kube-proxy write its rules.
    fn write_rules(&self) -> Result<()> {
        let plane = ControlPlane::start(&self.node)?;
        plane.apply("{apiVersion: v1, kind: Namespace, metadata: {name: bench}}")?;
        plane.create_all(&self.objects())?;
        plane.kube_proxy(&self.node, ProxyMode::Nftables)?;
        Ok(())
    }

    fn start_agent(&mut self, args: &[&str]) -> Result<()> {
        self.node
            .write_manifest("server.json", &list(&self.objects()))?;
        let mut agent = self.node.agent(args)?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        self._agent = Some(agent);
        Ok(())
    }

    fn unix_servers(&self) -> Result<(UnixServer, UnixServer)> {
        let listen = |name: &str, extra: &[&str]| {
            let path = self.node.folder().join(name).display().to_string();
            let args = ["bench-serve", "--cpu", "1", "--listen", &path];
            let process = start(&self.server, &[&args, extra].concat())?;
            anyhow::Ok(UnixServer {
                path,
                _process: process,
            })
        };
        Ok((listen("echo", &[])?, listen("sink", &["--sink"])?))
    }
}

struct UnixServer {
    path: String,
    _process: Process,
}

fn start(pod: &Pod, args: &[&str]) -> Result<Process> {
    let mut process = pod.start_lab_pod(args)?;
    let _: Value = process.report().context("wait for a server")?;
    Ok(process)
}

impl<'a> Contender<'a> {
    fn of_service(name: &'static str, site: &'a Site) -> Self {
        Self::new(name, &site.client, CLUSTER_IP)
    }

    fn new(name: &'static str, from: &'a Pod, address: &str) -> Self {
        Self {
            name,
            from,
            echo: format!("{address}:{ECHO}"),
            sink: format!("{address}:{SINK}"),
            figures: Case::all().iter().map(|_| Figures::default()).collect(),
        }
    }

    fn measure(&mut self, index: usize, case: Case) -> Result<()> {
        let figures = &mut self.figures[index];
        match case {
            Case::PingPong(size) => {
                let size = size.to_string();
                let report: PingPongBench = self.from.lab_pod(&[
                    "bench-pingpong",
                    &self.echo,
                    "--size",
                    &size,
                    "--seconds",
                    PING_PONG_SECONDS,
                    "--cpu",
                    "0",
                ])?;
                figures.first.add(report.p50_ns as f64 / 1000.0);
                figures.p99.add(report.p99_ns as f64 / 1000.0);
            }
            Case::Stream { size, nagle } => {
                let size = size.to_string();
                let mut args = vec!["bench-stream", &self.sink, "--size", &size];
                args.extend(["--cpu", "0"]);
                args.extend((!nagle).then_some("--nodelay"));
                let report: StreamBench = self.from.lab_pod(&args)?;
                figures.first.add(report.bytes_per_second);
            }
        }
        Ok(())
    }

    fn rows(&self, index: usize, case: Case) -> Vec<Row> {
        let figures = &self.figures[index];
        let row = |metric, samples| Row::new(&case.name(), self.name, metric, samples);
        match case {
            Case::PingPong(_) => vec![row("p50_us", &figures.first), row("p99_us", &figures.p99)],
            Case::Stream { .. } => vec![row("bytes_per_s", &figures.first)],
        }
    }
}

fn print(case: Case, index: usize, contenders: &[Contender<'_>]) {
    let (unit, scale) = match case {
        Case::PingPong(_) => ("µs", 1.0),
        Case::Stream { .. } => ("MB/s", 1e-6),
    };
    let base = contenders.iter().find(|it| it.name == case.base());
    let base = base.map_or(f64::NAN, |it| it.figures[index].first.median());
    println!(
        "\n{}, {unit}, median of {RUNS} interleaved runs",
        case.name()
    );
    for contender in contenders {
        let Figures { first, p99 } = &contender.figures[index];
        let tail = match case {
            Case::PingPong(_) => format!("  p99 {:.1}", p99.median()),
            Case::Stream { .. } => String::new(),
        };
        println!(
            "{:<14} {:>9.1}  ({:.1} to {:.1})  {:.2} of {}{tail}",
            contender.name,
            first.median() * scale,
            first.min() * scale,
            first.max() * scale,
            first.median() / base,
            case.base(),
        );
    }
}
