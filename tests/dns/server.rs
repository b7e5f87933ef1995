//! DNS servers, and the Service that they are behind.

use std::fs::{self, File};
use std::process::{Child, Stdio};

use lab::fixture::wait_until;
use lab::{Node, Place as _, Pod};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// Of the Service, one of each family.
pub(crate) const CLUSTER_IPS: [&str; 2] = ["10.96.0.53", "fd00:96::53"];
/// Where the servers listen; the Service's port is 53.
const PORT: u16 = 5353;

/// Known to all servers.
pub(crate) const WEB: &str = "web.shop.test";
pub(crate) const WEB_ADDRESSES: [&str; 2] = ["192.0.2.10", "2001:db8::10"];
/// Its text needs more than a datagram holds.
pub(crate) const BIG: &str = "big.shop.test";
pub(crate) const BIG_STRINGS: usize = 10;
/// Its addresses need more than the 512 bytes that a resolver takes without EDNS.
pub(crate) const MANY: &str = "many.shop.test";
pub(crate) const MANY_ADDRESSES: usize = 100;
/// Has another address on each server.
pub(crate) const WHO: &str = "who.shop.test";

/// A running dnsmasq in a pod; dropping it kills it.
pub(crate) struct DnsServer {
    pub(crate) pod: Pod,
    number: u8,
    child: Child,
}

impl DnsServer {
    /// Starts it and waits until it answers.
    pub(crate) fn start(node: &Node, number: u8) -> Self {
        let name = format!("dns{number}");
        let pod = node.pod(&name, None).unwrap();
        let hosts = node.folder().join(format!("{name}.hosts"));
        let line = |last| format!("192.0.2.{} {MANY}\n", 100 + last);
        let lines: String = (0..MANY_ADDRESSES).map(line).collect();
        fs::write(&hosts, lines).unwrap();
        let log = File::create(node.folder().join(format!("{name}.log"))).unwrap();
        let [v4, v6] = WEB_ADDRESSES;
        let strings = vec!["0123456789".repeat(20); BIG_STRINGS].join(",");
        let mut command = pod.command("dnsmasq");
        command
            .args([
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--pid-file",
            ])
            .args([
                "--log-facility=-",
                "--no-resolv",
                "--no-hosts",
                "--local=/test/",
            ])
            .args(["--bind-interfaces", &format!("--port={PORT}")])
            .arg(format!("--listen-address={},{}", pod.ipv4(), pod.ipv6()))
            .arg(format!("--host-record={WEB},{v4},{v6}"))
            .arg(format!("--host-record={WHO},{}", identity(number)))
            .arg(format!("--txt-record={BIG},{strings}"))
            .arg(format!("--addn-hosts={}", hosts.display()));
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let server = Self { pod, number, child };
        server.wait();
        server
    }

    fn wait(&self) {
        let at = [format!("@{}", self.pod.ipv4()), format!("-p{PORT}")];
        let ask = || {
            let mut dig = self.pod.command("dig");
            dig.args(&at).args(["+tries=1", "+time=1", "+short", WHO]);
            dig.stderr(Stdio::null()).output().unwrap()
        };
        wait_until("dnsmasq answers", || ask().status.success());
    }

    /// What it answers when it is asked for [`WHO`].
    pub(crate) fn identity(&self) -> String {
        identity(self.number)
    }

    /// Stops it: what it is sent waits, as with a node that has failed.
    pub(crate) fn fall_silent(&self) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn identity(number: u8) -> String {
    format!("192.0.2.{number}")
}

/// The Service, with affinity if it is asked for.
pub(crate) fn service(affinity: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "namespace": "shop", "name": "dns" },
        "spec": {
            "clusterIP": CLUSTER_IPS[0],
            "clusterIPs": CLUSTER_IPS,
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "sessionAffinity": affinity,
            "ports": [
                { "name": "udp", "port": 53, "targetPort": PORT, "protocol": "UDP" },
                { "name": "tcp", "port": 53, "targetPort": PORT, "protocol": "TCP" },
            ],
        },
    })
}

/// Its EndpointSlices, one for each family.
pub(crate) fn slices(servers: &[&DnsServer]) -> [Value; 2] {
    let slice = |family: &str, addresses: Vec<String>| {
        let endpoint = |address| json!({ "addresses": [address], "nodeName": "n1" });
        let endpoints: Vec<_> = addresses.into_iter().map(endpoint).collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": "shop",
                "name": format!("dns-{}", family.to_lowercase()),
                "labels": { "kubernetes.io/service-name": "dns" },
            },
            "addressType": family,
            "ports": [
                { "name": "udp", "port": PORT, "protocol": "UDP" },
                { "name": "tcp", "port": PORT, "protocol": "TCP" },
            ],
            "endpoints": endpoints,
        })
    };
    let v4 = servers.iter().map(|it| it.pod.ipv4().to_string());
    let v6 = servers.iter().map(|it| it.pod.ipv6().to_string());
    [slice("IPv4", v4.collect()), slice("IPv6", v6.collect())]
}
