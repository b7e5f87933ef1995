//! Who answers a connect, or which error it gets, on real sockets.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use lab::fixture::{Service, json, planned, start, wait_until};
use lab::kubernetes::list;
use lab::report::{ConnectReport, LoadReport, UdpReport};
use lab::{Lab, Node, Place, Pod, Server};
use serde_json::{Value, json as value};

/// kube-proxy's rules as data, which `node-agent/tests/cases.rs` runs as plans.
const CASES: &str = include_str!("../node-agent/tests/cases/kube-proxy.yaml");
/// Networks of the endpoints in the cases about flows.
const NETWORKS: [&str; 3] = ["10.180.0.0/16", "10.20.0.0/16", "fd00:10:180::/64"];
const NO_PREFERENCE: [&str; 2] = ["--prefer", "none"];
/// So often that each of three endpoints is met, but for one run in 10^10.
const CONNECTS: usize = 60;

/// Connects to ClusterIPs by pods. What comes from outside, and what goes to
/// other addresses, is not shunt's; nor is SCTP.
#[test]
fn every_flow_of_kube_proxy_to_a_cluster_ip_ends_as_there() {
    let file: Value = serde_saphyr::from_str(CASES).unwrap();
    let mut lab = Lab::new("flows").unwrap();
    let node = lab.node("here").unwrap();
    let client = node.pod("client", None).unwrap();
    // Wherever a case has an endpoint, this pod has its address.
    let backend = node.pod("backend", None).unwrap();
    for network in NETWORKS {
        backend.add_network(network).unwrap();
    }
    let _agent = start(&node, &NO_PREFERENCE);
    let stage = Stage {
        node,
        client,
        backend,
    };
    let (mut cases, mut flows) = (0, 0);
    for case in items(&file["cases"]).filter(|it| it["kind"] == "flow") {
        flows += stage.run(case);
        cases += 1;
    }
    assert_eq!(cases, file["counts"]["flow"]);
    assert!(flows > cases, "only {flows} flows of {cases} cases");
}

struct Stage {
    node: Node,
    client: Pod,
    backend: Pod,
}

impl Stage {
    /// Runs one case; returns how many of its flows are shunt's.
    fn run(&self, case: &Value) -> usize {
        let _servers = self.serve(case);
        self.write(case, &[]);
        let flows = || items(&case["flows"]).filter(|flow| is_ours(case, flow));
        flows().for_each(|flow| self.check(case, flow, &flow["expect"]));
        if case["then"].is_object() {
            let deleted: Vec<_> = items(&case["then"]["delete_slices"]).collect();
            self.write(case, &deleted);
            flows().for_each(|flow| self.check(case, flow, &case["then"]["expect"]));
        }
        flows().count()
    }

    /// A server for each endpoint, which answers with its address and port.
    fn serve(&self, case: &Value) -> Vec<Server> {
        let mut servers = Vec::new();
        let mut known = BTreeSet::new();
        for slice in items(&case["slices"]) {
            let endpoints = items(&slice["endpoints"]).map(|it| address(text(&it["addresses"][0])));
            for (address, port) in
                endpoints.flat_map(|it| items(&slice["ports"]).map(move |port| (it, port)))
            {
                let protocol = text(&port["protocol"]);
                let at = SocketAddr::new(address, number(&port["port"]));
                self.own(address);
                let is_new = known.insert((at, protocol));
                match protocol {
                    "TCP" if is_new => servers.push(self.backend.serve(at, &at.to_string())),
                    "UDP" if is_new => servers.push(self.backend.serve_udp(at, &at.to_string())),
                    _ => {}
                }
            }
        }
        servers.into_iter().map(|it| it.unwrap()).collect()
    }

    /// IPv6 binds to addresses only, and not to what a route makes local, and answers
    /// its neighbours for those of the link only.
    fn own(&self, address: IpAddr) {
        if address.is_ipv6() {
            let mut ip = self.backend.command("ip");
            let network = format!("{address}/128");
            ip.args(["addr", "replace", &network, "dev", "eth0", "nodad"]);
            assert!(ip.status().unwrap().success(), "{address}");
        }
    }

    /// Has the agent follow the objects of the case, but for deleted slices.
    fn write(&self, case: &Value, deleted: &[&Value]) {
        let services = items(&case["services"]).map(service_object);
        let slices = items(&case["slices"]).filter(|it| !deleted.contains(&&it["name"]));
        let objects: Vec<_> = services.chain(slices.map(slice_object)).collect();
        self.node
            .write_manifest("case.json", &list(&objects))
            .unwrap();
        let plan = planned(&self.node, &NO_PREFERENCE);
        wait_until("the table is that of the case", || {
            json(&self.node, &["routes"]) == plan
        });
    }

    fn check(&self, case: &Value, flow: &Value, expect: &Value) {
        let to = SocketAddr::new(address(text(&flow["dest"])), number(&flow["port"]));
        let from = match text(&flow["from"]) {
            "pod" => &self.client,
            from if from.ends_with("(the endpoint itself)") => &self.backend,
            other => panic!("from {other}: {case}"),
        };
        let udp = flow["protocol"] == "UDP";
        let action = if has_port(case, flow) {
            text(&expect["action"])
        } else {
            // A port that the Service does not have: left to kube-proxy, which
            // is not there.
            "pass"
        };
        match action {
            "connect" => {
                let expected: BTreeSet<_> =
                    items(&expect["to"]).map(|it| text(it).to_owned()).collect();
                assert_eq!(answers(from, to, udp), expected, "{flow}: {case}");
            }
            "refuse" => assert_eq!(error(from, to, udp), "ECONNREFUSED", "{flow}: {case}"),
            "pass" => assert!(
                error(from, to, udp) == "timeout" || error(from, to, udp) == "ETIMEDOUT",
                "{flow}: {case}"
            ),
            other => panic!("action {other}: {case}"),
        }
    }
}

/// Who answers, if many ask. Every answer shows the ClusterIP.
fn answers(from: &Pod, to: SocketAddr, udp: bool) -> BTreeSet<String> {
    if !udp {
        let count = CONNECTS.to_string();
        let report: LoadReport = from
            .lab_pod(&["connect", &to.to_string(), "--count", &count])
            .unwrap();
        assert!(report.errnos.is_empty(), "{to}: {report:?}");
        let peer = from.connect(to).unwrap().peer;
        assert_eq!(peer, Some(to));
        return report.ids.into_keys().collect();
    }
    let ask = |_| {
        let report: UdpReport = from.lab_pod(&["udp", &to.to_string()]).unwrap();
        assert_eq!(report.from, Some(to), "{report:?}");
        report.id.unwrap()
    };
    (0..CONNECTS).map(ask).collect()
}

fn error(from: &Pod, to: SocketAddr, udp: bool) -> String {
    let to = to.to_string();
    let wait = ["--timeout-ms", "300"];
    let errno = if udp {
        let report: UdpReport = from.lab_pod(&[&["udp", &to], &wait[..]].concat()).unwrap();
        report.errno
    } else {
        let report: ConnectReport = from
            .lab_pod(&[&["connect", &to], &wait[..]].concat())
            .unwrap();
        report.errno
    };
    errno.unwrap_or_default()
}

fn is_ours(case: &Value, flow: &Value) -> bool {
    let from_outside = text(&flow["from"]).starts_with("external");
    let to_service = items(&case["services"]).any(|it| it["clusterIP"] == flow["dest"]);
    !from_outside && to_service && flow["protocol"] != "SCTP"
}

fn has_port(case: &Value, flow: &Value) -> bool {
    let mut services = items(&case["services"]).filter(|it| it["clusterIP"] == flow["dest"]);
    services.any(|service| {
        let mut ports = items(&service["ports"]);
        ports.any(|it| it["port"] == flow["port"] && it["protocol"] == flow["protocol"])
    })
}

fn service_object(service: &Value) -> Value {
    let ports = items(&service["ports"]);
    let ports: Vec<_> = ports
        .map(|it| value!({ "name": it["name"], "port": it["port"], "protocol": it["protocol"] }))
        .collect();
    value!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "namespace": service["namespace"], "name": service["name"] },
        "spec": {
            "clusterIP": service["clusterIP"],
            "clusterIPs": [service["clusterIP"]],
            "internalTrafficPolicy": service["internalTrafficPolicy"],
            "ports": ports,
        },
    })
}

fn slice_object(slice: &Value) -> Value {
    let endpoints = items(&slice["endpoints"]).map(|it| {
        value!({
            "addresses": it["addresses"],
            "nodeName": it["node"],
            "conditions": {
                "ready": it["ready"],
                "serving": it["serving"],
                "terminating": it["terminating"],
            },
        })
    });
    let endpoints: Vec<_> = endpoints.collect();
    value!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": slice["namespace"],
            "name": slice["name"],
            "labels": { "kubernetes.io/service-name": slice["service"] },
        },
        "addressType": slice["addressType"],
        "ports": slice["ports"],
        "endpoints": endpoints,
    })
}

/// Also with leading zeros, as Kubernetes once took them.
fn address(text: &str) -> IpAddr {
    let without_zeros = |part: &str| part.parse::<u8>().map(|it| it.to_string());
    let parts: Result<Vec<_>, _> = text.split('.').map(without_zeros).collect();
    parts
        .map_or_else(|_| text.parse(), |it| it.join(".").parse())
        .unwrap()
}

fn number(port: &Value) -> u16 {
    port.as_u64().unwrap().try_into().unwrap()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> + Clone {
    value
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A Service of a pod, and one of a process in the host's network.
const POD: [&str; 4] = ["10.96.0.10", "fd00:96::10", "10.96.0.11", "fd00:96::11"];
const HOST: [&str; 4] = ["10.96.0.20", "fd00:96::20", "10.96.0.21", "fd00:96::21"];

fn write_services(node: &Node, pod: &Pod) {
    let all = [
        (
            "pod",
            POD,
            8080,
            [IpAddr::from(pod.ipv4()), pod.ipv6().into()],
        ),
        ("host", HOST, 9090, [node.ipv4().into(), node.ipv6().into()]),
    ];
    let mut yaml = Vec::new();
    for (name, cluster_ips, target_port, endpoints) in all {
        for (index, cluster_ip) in cluster_ips.into_iter().enumerate() {
            let service = Service {
                name: &format!("{name}{index}"),
                cluster_ip,
                endpoints: vec![(endpoints[index % 2], "n1")],
                target_port,
                protocol: if index < 2 { "TCP" } else { "UDP" },
                ..Service::default()
            };
            yaml.push(service.yaml());
        }
    }
    node.write_manifest("services.yaml", &yaml.join("---\n"))
        .unwrap();
}

/// That this place is answered by `id`, over both protocols and families.
fn assert_answered(from: &impl Place, cluster_ips: [&str; 4], id: &str) {
    for (index, cluster_ip) in cluster_ips.into_iter().enumerate() {
        let to = SocketAddr::new(cluster_ip.parse().unwrap(), 80);
        if index < 2 {
            let report = from.connect(to).unwrap();
            assert_eq!(
                (report.id.as_deref(), report.peer),
                (Some(id), Some(to)),
                "{report:?}"
            );
            continue;
        }
        let to_text = to.to_string();
        for (option, peer) in [(None, None), (Some("--connected"), Some(to))] {
            let mut args = vec!["udp", &to_text];
            args.extend(option);
            let report: UdpReport = from.lab_pod(&args).unwrap();
            assert_eq!(report.id.as_deref(), Some(id), "{report:?}");
            assert_eq!((report.from, report.peer), (Some(to), peer));
        }
    }
}

/// No kube-proxy is there, which would masquerade a pod that calls itself: the
/// connect goes straight to the endpoint.
#[test]
fn pods_and_the_host_reach_themselves_and_each_other() {
    let mut lab = Lab::new("hairpin").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, web) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _running = [
        web.serve("[::]:8080", "web").unwrap(),
        web.serve_udp("[::]:8080", "web").unwrap(),
        node.serve("[::]:9090", "host").unwrap(),
        node.serve_udp("[::]:9090", "host").unwrap(),
    ];
    write_services(&node, &web);
    let _agent = start(&node, &[]);
    assert_answered(&client, POD, "web");
    assert_answered(&client, HOST, "host");
    assert_answered(&web, POD, "web");
    assert_answered(&web, HOST, "host");
    assert_answered(&node, POD, "web");
    assert_answered(&node, HOST, "host");
}
