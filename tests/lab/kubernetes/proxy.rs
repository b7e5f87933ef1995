//! The real kube-proxy on a lab node.

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{ControlPlane, PATIENCE, Running, choices, log_end, start};
use crate::node::Node;
use crate::place::Place;

const PROGRAM: &str = "kube-proxy";
/// The label of nodes.
const ZONE: &str = "topology.kubernetes.io/zone";

/// What kube-proxy writes its rules with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    /// nftables.
    Nftables,
    /// iptables.
    Iptables,
}

/// A running kube-proxy. Dropping it ends it; its rules stay, as always.
pub struct KubeProxy<'a> {
    node: &'a Node,
    running: Running,
}

impl ControlPlane<'_> {
    /// Starts kube-proxy on a node and waits until it has written its rules, for
    /// both families, of all that the server holds.
    pub fn kube_proxy<'a>(&self, node: &'a Node, mode: ProxyMode) -> Result<KubeProxy<'a>> {
        self.publish_addresses(node)?;
        let proxy = self.start_proxy(node, mode)?;
        self.tell_zone(node)?;
        Ok(proxy)
    }

    /// As [`ControlPlane::kube_proxy`], where a kubelet has published the addresses.
    pub(crate) fn kube_proxy_of_kubelet<'a>(&self, node: &'a Node) -> Result<KubeProxy<'a>> {
        self.start_proxy(node, ProxyMode::Nftables)
    }

    fn start_proxy<'a>(&self, node: &'a Node, mode: ProxyMode) -> Result<KubeProxy<'a>> {
        let kubeconfig = node.folder().join("kube-proxy.kubeconfig");
        self.write_kubeconfig(&kubeconfig, super::PROXY_TOKEN)?;
        let config = node.folder().join("kube-proxy.yaml");
        let text = configuration(node, &kubeconfig.display().to_string(), mode);
        fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        let arguments = [format!("--config={}", config.display())];
        let running = start(node, node.folder(), PROGRAM, &arguments)?;
        let mut proxy = KubeProxy { node, running };
        proxy.wait_for("rules", || has_rules(node, mode))?;
        // The rules may be those of an earlier one.
        proxy.wait_for("watch of the node", || Ok(watches_node(node)))?;
        Ok(proxy)
    }

    /// Takes the node out of its zone and back: a kube-proxy that starts may miss
    /// the zone, and then does not know it until it changes. The informer of the
    /// node runs already when `NodeTopologyConfig` is added to it, whose only event
    /// may come before the proxier is registered (`Run` in
    /// `cmd/kube-proxy/app/server.go` and `handleNodeEvent` in
    /// `pkg/proxy/config/config.go`, 1.37.2): in one start of sixty on a busy
    /// machine.
    fn tell_zone(&self, node: &Node) -> Result<()> {
        let field = format!("jsonpath={{.metadata.labels.{}}}", ZONE.replace('.', "\\."));
        let zone = self.kubectl(&["get", "node", node.name(), "-o", &field])?;
        if zone.is_empty() {
            return Ok(());
        }
        for zone in ["nowhere", &zone] {
            let label = format!("{ZONE}={zone}");
            self.kubectl(&["label", "--overwrite", "node", node.name(), &label])?;
        }
        Ok(())
    }

    /// What a kubelet would do, and what kube-proxy waits for.
    fn publish_addresses(&self, node: &Node) -> Result<()> {
        // By a manager of its own, so that labels given elsewhere stay.
        let object = format!(
            "{{apiVersion: v1, kind: Node, metadata: {{name: {}}}}}",
            node.name()
        );
        let apply = ["apply", "--server-side", "--field-manager=lab", "-f", "-"];
        self.kubectl_with_input(&apply, &object)?;
        let address = |text: String| format!(r#"{{"type":"InternalIP","address":"{text}"}}"#);
        let (v4, v6) = (node.ipv4().to_string(), node.ipv6().to_string());
        let patch = format!(
            r#"{{"status":{{"addresses":[{},{}]}}}}"#,
            address(v4),
            address(v6)
        );
        let args = ["patch", "node", node.name(), "--subresource=status"];
        self.kubectl(&[&args[..], &["--type=merge", "--patch", &patch]].concat())
            .map(drop)
    }
}

impl KubeProxy<'_> {
    /// What its nftables rules do with each ClusterIP.
    pub fn choices(&self) -> Result<choices::Choices> {
        choices::read(self.node)
    }

    fn wait_for(&mut self, what: &str, is_there: impl Fn() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let log = || log_end(self.node.folder(), PROGRAM);
        while !is_there()? {
            if let Some(status) = self.running.0.try_wait().context("look after kube-proxy")? {
                bail!("kube-proxy ended ({status}): {}", log());
            }
            ensure!(Instant::now() < deadline, "no {what} yet: {}", log());
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Whether both families have what is written only together with the rules of
/// all Services.
fn has_rules(node: &Node, mode: ProxyMode) -> Result<bool> {
    let (programs, needle): ([&[&str]; 2], _) = match mode {
        ProxyMode::Nftables => (
            [
                &["nft", "list", "map", "ip", "kube-proxy", "service-ips"],
                &["nft", "list", "map", "ip6", "kube-proxy", "service-ips"],
            ],
            "service-ips",
        ),
        // The chain itself is there a little earlier.
        ProxyMode::Iptables => (
            [
                &["iptables-save", "-t", "nat"],
                &["ip6tables-save", "-t", "nat"],
            ],
            "-A KUBE-SERVICES ",
        ),
    };
    for command in programs {
        let output = node
            .command(command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {}", command[0]))?;
        if !String::from_utf8_lossy(&output.stdout).contains(needle) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether it has registered for changes of its node, which comes last.
fn watches_node(node: &Node) -> bool {
    let log = fs::read(node.folder().join(format!("{PROGRAM}.log"))).unwrap_or_default();
    String::from_utf8_lossy(&log).contains("Starting node config controller")
}

fn configuration(node: &Node, kubeconfig: &str, mode: ProxyMode) -> String {
    let mode = match mode {
        ProxyMode::Nftables => "nftables",
        ProxyMode::Iptables => "iptables",
    };
    let (name, address) = (node.name(), node.ipv4());
    // The limits of conntrack are the machine's, and not a namespace's to set.
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
         kind: KubeProxyConfiguration\n\
         mode: {mode}\n\
         hostnameOverride: {name}\n\
         bindAddress: {address}\n\
         healthzBindAddress: 127.0.0.1:10256\n\
         metricsBindAddress: 127.0.0.1:10249\n\
         clusterCIDR: '10.244.0.0/16,fd00:10:244::/48'\n\
         clientConnection: {{kubeconfig: '{kubeconfig}'}}\n\
         conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n"
    )
}
