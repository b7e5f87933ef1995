//! `cargo xtask demo`: the main job on this machine, with its real output.
//!
//! Two nodes and five pods are made of network namespaces and cgroups; an agent
//! runs on n1; kube-proxy's rules are on both, and n2 has nothing else.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lab::kubernetes::{ControlPlane, ProxyMode};
use lab::report::{ConnectReport, PingPongBench};
use lab::{Agent, Lab, LogOutput, Node, Options, Place, Pod, Server};

use serde_json::Value;

use crate::stats::Samples;

/// The manifests that the demo uses, from the root of the project.
const MANIFESTS: &str = "deploy/demo";
const CART: &str = "10.96.0.10:80";
const PAY: &str = "10.96.0.20:80";
/// On n2 only: the pod next door, so that the latencies compare one distance.
const PAY_2: &str = "10.96.0.21:80";
const PAY_2_OBJECTS: &str = "\
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: pay-2}
spec:
  clusterIP: 10.96.0.21
  ports: [{port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: pay-2-1, labels: {kubernetes.io/service-name: pay-2}}
addressType: IPv4
ports: [{port: 9090}]
endpoints: [{addresses: [10.244.2.8], nodeName: n2}]
";
/// How long to wait for the agent.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interleaved repetitions of the latency measurement.
const ROUNDS: usize = 5;

/// Runs all of it.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut lab = Lab::with(
        "demo",
        Options {
            logs: LogOutput::OnPanic,
            ..Options::default()
        },
    )?;
    let stage = Stage::build(&mut lab, &root.join(MANIFESTS))?;
    let mut agent = stage.show_table()?;
    stage.show_local_connect()?;
    stage.show_splice()?;
    stage.show_latency()?;
    stage.show_failover(&mut agent)?;
    stage.show_dead_agent(agent)?;
    drop(stage);
    let name = lab.name().to_owned();
    lab.close().context("remove the lab")?;
    show_clean(&name)
}

/// The nodes, pods and servers of the demo.
struct Stage {
    n1: Node,
    n2: Node,
    client: Pod,
    cart_1: Pod,
    pay_1: Pod,
    cart_2: Pod,
    pay_2: Pod,
    servers: Vec<Server>,
}

impl Stage {
    fn build(lab: &mut Lab, manifests: &Path) -> Result<Self> {
        title("Two nodes, five pods, two Services");
        let n1 = lab.node("n1")?;
        let n2 = lab.node("n2")?;
        let stage = Self {
            client: n1.pod("client", Some("10.244.1.2"))?,
            cart_1: n1.pod("cart-1", Some("10.244.1.5"))?,
            pay_1: n1.pod("pay-1", Some("10.244.1.6"))?,
            cart_2: n2.pod("cart-2", Some("10.244.2.7"))?,
            pay_2: n2.pod("pay-2", Some("10.244.2.8"))?,
            servers: Vec::new(),
            n1,
            n2,
        };
        for node in [&stage.n1, &stage.n2] {
            copy_manifests(manifests, node)?;
        }
        let stage = stage.serve()?;
        stage.write_proxy_rules(manifests)?;
        say(
            "n1: client 10.244.1.2, cart-1 10.244.1.5, pay-1 10.244.1.6; runs shunt and kube-proxy",
        );
        say("n2: cart-2 10.244.2.7, pay-2 10.244.2.8; kube-proxy only");
        Ok(stage)
    }

    /// Has the real kube-proxy write what nodes have without shunt. Then it and
    /// the API server end: the rules are the kernel's, and the processors free.
    fn write_proxy_rules(&self, manifests: &Path) -> Result<()> {
        let plane = ControlPlane::start(&self.n2)?;
        plane.apply("{apiVersion: v1, kind: Namespace, metadata: {name: shop}}")?;
        plane.kubectl(&["apply", "-f", &manifests.display().to_string()])?;
        plane.apply(PAY_2_OBJECTS)?;
        for node in [&self.n1, &self.n2] {
            plane.kube_proxy(node, ProxyMode::Nftables)?;
        }
        Ok(())
    }

    fn serve(mut self) -> Result<Self> {
        for (pod, listen, id) in [
            (&self.cart_1, "0.0.0.0:8080", "cart-1 on n1"),
            (&self.pay_1, "0.0.0.0:9090", "pay-1 on n1"),
            (&self.cart_2, "0.0.0.0:8080", "cart-2 on n2"),
            (&self.pay_2, "0.0.0.0:9090", "pay-2 on n2"),
        ] {
            let args = ["serve", "--listen", listen, "--id", id, "--cpu", "1"];
            self.servers.push(Server::start(pod.start_lab_pod(&args)?)?);
        }
        Ok(self)
    }

    fn show_table(&self) -> Result<Agent> {
        title("The routing table of n1");
        // The connections measured below are young.
        let mut agent = self.n1.agent(&["--splice-after", "0ms"])?;
        agent.wait_for_log("ready: the table is written", PATIENCE)?;
        self.show(&["routes"])?;
        Ok(agent)
    }

    fn show_local_connect(&self) -> Result<()> {
        title("A client on n1 connects to the ClusterIP, ten times");
        for _ in 0..10 {
            let report = self.client.connect(CART)?;
            expect_answer(&report, "cart-1 on n1")?;
            ensure!(
                report.peer == Some(CART.parse()?),
                "getpeername shows {:?}",
                report.peer
            );
        }
        say("each was answered by cart-1, the pod on its own node");
        say(&format!("getpeername still says {CART}"));
        Ok(())
    }

    fn show_splice(&self) -> Result<()> {
        title("The pair is spliced");
        // Only connections that begin after the agent's self-test are.
        self.wait_until(&["status", "-o", "json"], |text| {
            serde_json::from_str(text)
                .is_ok_and(|status: Value| status["splicing"]["self_test"] == "passed")
        })?;
        let bench = self
            .client
            .start_lab_pod(&["bench-pingpong", CART, "--seconds", "1.5"])?;
        let text = self.wait_until(&["sockets"], |text| text.contains(" spliced "))?;
        println!("{}", indent(&text));
        let report: PingPongBench = bench.finish()?;
        let status: Value = serde_json::from_str(&self.shunt(&["status", "-o", "json"])?)?;
        let messages = &status["counters"]["messages_spliced"];
        say(&format!(
            "{} round trips; {messages} messages went past TCP",
            report.count
        ));
        Ok(())
    }

    /// Three ways to a pod on the same node: through kube-proxy on n2, with
    /// the connect redirected, and spliced as well.
    fn show_latency(&self) -> Result<()> {
        title("Round trip to a pod on the same node, 64 bytes, median");
        let mut contenders = [
            (
                "kube-proxy (nftables)",
                &self.cart_2,
                PAY_2,
                Samples::default(),
            ),
            (
                "connect-time redirect",
                &self.client,
                PAY,
                Samples::default(),
            ),
            ("redirect + splice", &self.client, CART, Samples::default()),
        ];
        for _ in 0..ROUNDS {
            for (_, pod, target, samples) in &mut contenders {
                let args = ["bench-pingpong", target, "--seconds", "1.2", "--cpu", "0"];
                let report: PingPongBench = pod.lab_pod(&args)?;
                samples.add(report.p50_ns as f64 / 1000.0);
            }
        }
        let base = contenders[0].3.median();
        for (name, _, _, samples) in &contenders {
            say(&format!(
                "{name:<22} {:6.1} µs  ({:.2} of kube-proxy)",
                samples.median(),
                samples.median() / base
            ));
        }
        Ok(())
    }

    fn show_failover(&self, _agent: &mut Agent) -> Result<()> {
        title("The local endpoint leaves the manifests");
        let path = self.n1.manifests().join("cart.yaml");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        self.n1
            .write_manifest("cart.yaml", &without_endpoint(&text, "10.244.1.5")?)?;
        let changed = Instant::now();
        loop {
            let report = self.client.connect(CART)?;
            if report.id.as_deref() == Some("cart-2 on n2") {
                break;
            }
            expect_answer(&report, "cart-1 on n1")?;
            ensure!(
                changed.elapsed() < PATIENCE,
                "connects still land on cart-1"
            );
        }
        say("the next connect is answered by cart-2 on n2");
        self.show(&["routes", "--service", "shop/cart"])
    }

    fn show_dead_agent(&self, agent: Agent) -> Result<()> {
        title("The agent is killed (SIGKILL)");
        agent.kill()?;
        for _ in 0..10 {
            expect_answer(&self.client.connect(CART)?, "cart-2 on n2")?;
            expect_answer(&self.client.connect(PAY)?, "pay-1 on n1")?;
        }
        say("ten connects to each Service still land where the table says");
        self.show(&["uninstall"])
    }

    fn show(&self, args: &[&str]) -> Result<()> {
        println!("$ shunt {}\n{}", args.join(" "), indent(&self.shunt(args)?));
        Ok(())
    }

    /// What a command prints, once that is as it should be.
    fn wait_until(&self, args: &[&str], is_right: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.shunt(args)?;
            if is_right(&text) {
                return Ok(text);
            }
            ensure!(
                Instant::now() < deadline,
                "shunt {args:?} still prints:\n{text}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn shunt(&self, args: &[&str]) -> Result<String> {
        let output = self.n1.shunt(args)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "shunt {args:?} failed: {errors}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn show_clean(lab: &str) -> Result<()> {
    title("Clean-up");
    let left = lab::remains(lab)?;
    ensure!(left.is_empty(), "the demo left behind: {left:?}");
    say("no namespace, cgroup, pin, link or rule is left");
    Ok(())
}

fn copy_manifests(from: &Path, node: &Node) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let path = entry?.path();
        let name = path
            .file_name()
            .context("a manifest has a name")?
            .to_string_lossy()
            .into_owned();
        node.write_manifest(&name, &fs::read_to_string(&path)?)?;
    }
    Ok(())
}

/// The manifest without the list item that holds this address.
fn without_endpoint(yaml: &str, address: &str) -> Result<String> {
    let marker = format!("  - addresses: [{address}]");
    let start = yaml
        .find(&marker)
        .with_context(|| format!("no endpoint {address}"))?;
    let rest = &yaml[start + marker.len()..];
    let end = rest
        .find("\n  - ")
        .map_or(yaml.len(), |at| start + marker.len() + at + 1);
    Ok(format!("{}{}", &yaml[..start], &yaml[end..]))
}

fn expect_answer(report: &ConnectReport, id: &str) -> Result<()> {
    ensure!(
        report.id.as_deref() == Some(id),
        "expected an answer of {id}: {report:?}"
    );
    Ok(())
}

fn title(text: &str) {
    println!("\n== {text}");
}

fn say(text: &str) {
    println!("   {text}");
}

fn indent(text: &str) -> String {
    text.trim_end()
        .lines()
        .map(|line| format!("   {line}").trim_end().to_owned())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_cut_out_of_a_manifest() {
        let yaml = "endpoints:\n  - addresses: [10.0.0.1]\n    nodeName: n1\n  - addresses: \
                    [10.0.0.2]\n    nodeName: n2\n";
        let first = without_endpoint(yaml, "10.0.0.1").unwrap();
        assert_eq!(
            first,
            "endpoints:\n  - addresses: [10.0.0.2]\n    nodeName: n2\n"
        );
        let last = without_endpoint(yaml, "10.0.0.2").unwrap();
        assert_eq!(
            last,
            "endpoints:\n  - addresses: [10.0.0.1]\n    nodeName: n1\n"
        );
        assert!(without_endpoint(yaml, "10.0.0.3").is_err());
    }
}
