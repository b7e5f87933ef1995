//! What the tests of the agent share: manifests, and a node that runs shunt.
//! Everything here panics where a test would.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::fmt::Write as _;
use std::net::IpAddr;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::kubernetes::ControlPlane;
use crate::{Agent, Node, Place as _, Pod, Server, target_binary};

/// What the agent logs once its table is written and its programs attached.
pub const READY: &str = "ready: the table is written";
/// How long to wait for something that takes milliseconds, on a machine that
/// may be busy. Only a hang is ever this long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A Service with one port and one EndpointSlice.
pub struct Service<'a> {
    /// Its name, in the namespace `shop`.
    pub name: &'a str,
    /// Its only ClusterIP; the family of the EndpointSlice follows from it.
    pub cluster_ip: &'a str,
    /// Annotations of the Service.
    pub annotations: &'a [(&'a str, &'a str)],
    /// Address and node of each endpoint.
    pub endpoints: Vec<(IpAddr, &'a str)>,
    /// Where each endpoint listens.
    pub target_port: u16,
    /// TCP or UDP.
    pub protocol: &'a str,
    /// More of the Service's spec, such as `sessionAffinity: ClientIP`.
    pub spec: &'a str,
}

impl Default for Service<'_> {
    fn default() -> Self {
        Self {
            name: "cart",
            cluster_ip: "10.96.0.10",
            annotations: &[],
            endpoints: Vec::new(),
            target_port: 8080,
            protocol: "TCP",
            spec: "",
        }
    }
}

impl Service<'_> {
    /// Both objects as YAML.
    pub fn yaml(&self) -> String {
        let Self {
            name,
            cluster_ip,
            target_port,
            protocol,
            spec,
            ..
        } = self;
        let mut annotations = String::new();
        for (key, value) in self.annotations {
            let _ = write!(annotations, "{key}: \"{value}\", ");
        }
        let family = if cluster_ip.contains(':') {
            "IPv6"
        } else {
            "IPv4"
        };
        let mut endpoints = String::new();
        for (address, node) in &self.endpoints {
            let _ = write!(
                endpoints,
                "\n- {{addresses: [\"{address}\"], nodeName: {node}}}"
            );
        }
        let endpoints = if endpoints.is_empty() {
            " []".to_owned()
        } else {
            endpoints
        };
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: {name}, \
             annotations: {{{annotations}}}}}\nspec:\n  clusterIP: \"{cluster_ip}\"\n  \
             clusterIPs: [\"{cluster_ip}\"]\n  ports: [{{name: http, port: 80, protocol: {protocol}}}]\n  {spec}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{namespace: \
             shop, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}\n\
             addressType: {family}\nports: [{{name: http, port: {target_port}, protocol: {protocol}}}]\n\
             endpoints:{endpoints}\n"
        )
    }
}

/// The manifest of the Service that is the default, with these endpoints on `n1`.
pub fn cart(endpoints: &[IpAddr]) -> String {
    let endpoints = endpoints.iter().map(|address| (*address, "n1")).collect();
    Service {
        endpoints,
        ..Service::default()
    }
    .yaml()
}

/// Two pods that answer at port 8080 by their names.
pub fn servers(node: &Node) -> ([Pod; 2], [Server; 2]) {
    let pods = ["one", "two"].map(|name| node.pod(name, None).unwrap());
    let serve = |pod: &Pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap();
    let running = pods.each_ref().map(serve);
    (pods, running)
}

/// A control plane on the node, ready for each [`Service`].
pub fn control_plane(node: &Node) -> ControlPlane<'_> {
    let plane = ControlPlane::start(node).unwrap();
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}";
    plane.apply(namespace).unwrap();
    plane
}

/// Starts the agent and waits until it is ready.
pub fn start(node: &Node, args: &[&str]) -> Agent {
    let mut agent = node.agent(args).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    agent
}

/// Starts the agent and waits until it splices: only connections that begin from
/// then on. (What this kernel can do is tested by connections of the agent's own,
/// which are shown and counted too.)
pub fn start_splicing(node: &Node, args: &[&str]) -> Agent {
    let agent = start(node, args);
    wait_until("the self-test has passed", || {
        let splicing = &json(node, &["status"])["splicing"];
        splicing["available"] == true && splicing["self_test"] == "passed"
    });
    agent
}

/// The JSON of a CLI command.
pub fn json(node: &Node, args: &[&str]) -> Value {
    let output = node.shunt(&[args, &["-o", "json"]].concat()).unwrap();
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `shunt plan` makes of the node's manifests, as JSON.
pub fn planned(node: &Node, args: &[&str]) -> Value {
    let output = Command::new(target_binary("shunt", "SHUNT_BIN").unwrap())
        .args(["plan", "--node", node.name(), "-o", "json", "--from"])
        .arg(node.manifests())
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "plan: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The entries of one of the node's pinned maps, as bpftool prints them.
pub fn dump(node: &Node, map: &str) -> Vec<Value> {
    let pin = format!("v{}/{map}", shunt_common::LAYOUT_VERSION);
    let output = Command::new("bpftool")
        .args(["map", "dump", "pinned"])
        .arg(node.pins().join(pin))
        .output()
        .unwrap();
    assert!(output.status.success(), "{map}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a command wrote to standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The endpoints of the first route's tier, in the live table.
pub fn live_endpoints(node: &Node, service: &str, scope: &str) -> Vec<String> {
    let report = json(node, &["routes", "--service", service]);
    let tiers = report["routes"][0]["tiers"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let tier = tiers.iter().find(|tier| tier["scope"] == scope);
    let endpoints = tier
        .and_then(|tier| tier["endpoints"].as_array().cloned())
        .unwrap_or_default();
    endpoints
        .iter()
        .filter_map(|endpoint| endpoint.as_str().map(str::to_owned))
        .collect()
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
