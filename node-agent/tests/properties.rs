//! What holds for the plan of any cluster: random manifests against kube-proxy's
//! rule, written down a second time.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

mod explained;
mod kube_proxy;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use node_agent::plan::{Policy, plan};
use node_agent::report::{self, RouteReport, RoutesReport};
use node_agent::tables::{Prefer, Scope, Verdict};
use node_agent::watch::folder;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};

use kube_proxy::KubeProxy;

const NODE: &str = "n1";
const PREFERENCES: [Prefer; 4] = [Prefer::Node, Prefer::Zone, Prefer::Hints, Prefer::None];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3072))]

    #[test]
    fn the_tiers_of_any_cluster_are_within_what_kube_proxy_may_use(cluster in any_cluster()) {
        let directory = write(&cluster);
        let (state, complaints) = folder::read(directory.path()).unwrap();
        prop_assert_eq!(complaints, [""; 0]);
        for prefer in PREFERENCES {
            let policy = Policy { prefer };
            let tables = plan(&state, NODE, &policy);
            let report = report::routes(&tables);
            check_frontends(&cluster, &report)?;
            explained::check(&state, &tables.node, &policy, &report)?;
            for route in &report.routes {
                check_route(&cluster, route)?;
            }
        }
    }
}

proptest! {
    // Each runs the program.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn shunt_plan_prints_the_documented_form_for_any_manifests(
        cluster in any_cluster(),
        junk in prop::collection::vec(any_junk(), 0..4),
        prefer in select(&["node", "zone", "hints", "none"][..]),
    ) {
        let directory = write(&cluster);
        for (index, text) in junk.iter().enumerate() {
            fs::write(directory.path().join(format!("junk-{index}.yaml")), text).unwrap();
        }
        let printed = shunt_plan(directory.path(), prefer);
        check_form(&printed)?;
        // It is the table of the plan, and loses nothing when it is read again.
        let report: RoutesReport = serde_json::from_value(printed.clone()).unwrap();
        prop_assert_eq!(serde_json::to_value(&report).unwrap(), printed);
        let (state, _) = folder::read(directory.path()).unwrap();
        let prefer = serde_json::from_value(json!(prefer)).unwrap();
        prop_assert_eq!(report, report::routes(&plan(&state, NODE, &Policy { prefer })));
    }
}

/// The objects of a cluster; a failure shows each on a line of JSON.
struct Cluster(Vec<Value>);

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|object| write!(f, "\n{object}"))
    }
}

/// Each ClusterIP and port that shunt captures, and no other, has one route.
fn check_frontends(cluster: &Cluster, report: &RoutesReport) -> Result<(), TestCaseError> {
    let off = |service: &Value| service["metadata"]["annotations"]["shunt.dev/mode"] == "off";
    let expected = KubeProxy::new(&cluster.0, NODE).frontends(|service| !off(service));
    let planned: BTreeSet<_> = report
        .routes
        .iter()
        .map(|it| {
            (
                SocketAddr::new(it.address, it.port),
                it.protocol.to_string(),
            )
        })
        .collect();
    prop_assert_eq!(planned.len(), report.routes.len(), "a route twice");
    prop_assert_eq!(planned, expected);
    Ok(())
}

fn check_route(cluster: &Cluster, route: &RouteReport) -> Result<(), TestCaseError> {
    let proxy = KubeProxy::new(&cluster.0, NODE);
    let port = proxy.port(
        &route.namespace,
        &route.service,
        &route.port_name,
        &route.protocol.to_string(),
        route.address.is_ipv6(),
    );
    let tiers: Vec<(Scope, BTreeSet<SocketAddr>)> = route
        .tiers
        .iter()
        .map(|tier| (tier.scope, tier.endpoints.iter().copied().collect()))
        .collect();
    let scopes: Vec<Scope> = tiers.iter().map(|(scope, _)| *scope).collect();
    for (tier, (_, endpoints)) in route.tiers.iter().zip(&tiers) {
        prop_assert_eq!(tier.endpoints.len(), endpoints.len(), "twice: {:?}", route);
        prop_assert!(
            endpoints.is_subset(&port.serving()),
            "not serving: {:?}",
            route
        );
    }
    for pair in tiers.windows(2) {
        prop_assert!(pair[0].1.is_subset(&pair[1].1), "not nested: {:?}", route);
    }
    let usable = tiers.iter().any(|(_, endpoints)| !endpoints.is_empty());
    let verdict = if usable {
        Verdict::Balance
    } else {
        Verdict::Refuse
    };
    prop_assert_eq!(route.verdict, verdict);

    prop_assert_eq!(route.local_only, port.is_local_only());
    let widest = &tiers.last().unwrap().1;
    if port.is_local_only() {
        prop_assert_eq!(&scopes[..], &[Scope::Node][..]);
        prop_assert!(
            widest.is_subset(&port.local()),
            "Local is widened: {:?}",
            route
        );
        prop_assert!(
            port.choices().contains(widest),
            "{:?} is none of {:?}",
            route,
            port.choices()
        );
        return Ok(());
    }
    let expected: &[&[Scope]] = match route.prefer {
        Prefer::Node => &[&[Scope::Node, Scope::Zone, Scope::Cluster]],
        Prefer::Zone => &[&[Scope::Zone, Scope::Cluster]],
        Prefer::Hints => &[&[Scope::Hints, Scope::Cluster], &[Scope::Cluster]],
        Prefer::None => &[&[Scope::Hints], &[Scope::Cluster]],
    };
    prop_assert!(expected.contains(&&scopes[..]), "tiers of {:?}", route);
    for (scope, endpoints) in &tiers {
        if *scope == Scope::Node {
            prop_assert!(endpoints.is_subset(&port.local()), "{:?}", route);
        }
    }
    // The first tier of these is what kube-proxy itself would use.
    if matches!(route.prefer, Prefer::Hints | Prefer::None) {
        prop_assert!(
            port.choices().contains(&tiers[0].1),
            "{:?} is none of {:?}",
            route,
            port.choices()
        );
    }
    Ok(())
}

/// The JSON that the README describes, field by field.
fn check_form(printed: &Value) -> Result<(), TestCaseError> {
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect();
    let is_one_of = |value: &Value, words: &[&str]| words.contains(&value.as_str().unwrap());
    let same_keys = |value: &Value, expected: &[&str]| {
        let keys: BTreeSet<String> = keys(value);
        keys == expected.iter().map(|key| (*key).to_owned()).collect()
    };
    prop_assert!(same_keys(printed, &["node", "zone", "routes"]));
    prop_assert_eq!(&printed["node"], NODE);
    prop_assert!(printed["zone"].is_null() || printed["zone"] != "");
    let mut order = Vec::new();
    for route in printed["routes"].as_array().unwrap() {
        prop_assert!(
            same_keys(
                route,
                &[
                    "namespace",
                    "service",
                    "port_name",
                    "address",
                    "port",
                    "protocol",
                    "verdict",
                    "prefer",
                    "affinity_seconds",
                    "max_local_connections",
                    "stage",
                    "local_only",
                    "terminating",
                    "tiers"
                ]
            ),
            "{}",
            route
        );
        let address: std::net::IpAddr = route["address"].as_str().unwrap().parse().unwrap();
        prop_assert_eq!(&route["address"], &address.to_string());
        prop_assert!((1..=65_535).contains(&route["port"].as_u64().unwrap()));
        prop_assert!(is_one_of(&route["protocol"], &["TCP", "UDP"]));
        prop_assert!(is_one_of(&route["verdict"], &["balance", "refuse", "pass"]));
        prop_assert!(is_one_of(
            &route["prefer"],
            &["node", "zone", "hints", "none"]
        ));
        prop_assert!(route["affinity_seconds"].is_null() || route["affinity_seconds"].is_u64());
        prop_assert!(is_one_of(
            &route["stage"],
            &[
                "node",
                "zone",
                "cluster",
                "hints",
                "empty",
                "local-empty",
                "passed"
            ]
        ));
        prop_assert!(route["local_only"].is_boolean() && route["terminating"].is_boolean());
        for tier in route["tiers"].as_array().unwrap() {
            prop_assert!(same_keys(tier, &["scope", "endpoints"]), "{}", tier);
            prop_assert!(is_one_of(
                &tier["scope"],
                &["node", "zone", "cluster", "hints"]
            ));
            let endpoints: Vec<&str> = tier["endpoints"]
                .as_array()
                .unwrap()
                .iter()
                .map(|endpoint| endpoint.as_str().unwrap())
                .collect();
            prop_assert!(endpoints.is_sorted(), "{:?}", endpoints);
            for endpoint in endpoints {
                let parsed: SocketAddr = endpoint.parse().unwrap();
                prop_assert_eq!(endpoint, parsed.to_string());
            }
        }
        let text = |key: &str| route[key].as_str().unwrap().to_owned();
        order.push((
            text("namespace"),
            text("service"),
            text("port_name"),
            text("protocol"),
            address.is_ipv6(),
        ));
    }
    prop_assert!(order.is_sorted(), "{:?}", order);
    Ok(())
}

fn shunt_plan(directory: &Path, prefer: &str) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_shunt"))
        .args(["plan", "--node", NODE, "--prefer", prefer, "-o", "json"])
        .arg("--from")
        .arg(directory)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn write(cluster: &Cluster) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": cluster.0});
    fs::write(directory.path().join("all.json"), list.to_string()).unwrap();
    directory
}

/// A node, two Services of one namespace, and their slices.
fn any_cluster() -> impl Strategy<Value = Cluster> {
    let services: Vec<_> = (1..=2).map(any_service).collect();
    let slices = prop::collection::vec(any_slice(), 0..7);
    (any_node(), services, slices).prop_map(|(node, services, mut slices)| {
        for (index, slice) in slices.iter_mut().enumerate() {
            slice["metadata"]["name"] = json!(format!("slice-{index}"));
        }
        let nodes = node.into_iter();
        Cluster(nodes.chain(services).chain(slices).collect())
    })
}

/// Absent, without a zone, with an empty one, or in a zone.
fn any_node() -> impl Strategy<Value = Option<Value>> {
    let zone = select(
        &[
            None,
            Some(""),
            Some("z1"),
            Some("z1"),
            Some("z1"),
            Some("z2"),
        ][..],
    );
    let labels = zone.prop_map(|zone| without_nulls(json!({"topology.kubernetes.io/zone": zone})));
    prop::option::weighted(0.9, labels.prop_map(node))
}

fn node(labels: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": labels}})
}

fn any_service(number: u8) -> impl Strategy<Value = Value> {
    let v4 = format!("10.96.0.{number}");
    let v6 = format!("fd00:96::{number}");
    let addresses = select(vec![
        vec![v4.clone()],
        vec![v6.clone()],
        vec![v4.clone(), v6.clone()],
        vec![v6, v4],
        vec!["None".to_owned()],
    ]);
    let kind = select(
        &[
            "ClusterIP",
            "ClusterIP",
            "ClusterIP",
            "NodePort",
            "ExternalName",
        ][..],
    );
    let policy = select(&[None, Some("Cluster"), Some("Local")][..]);
    let prefer = select(
        &[
            None,
            None,
            Some("node"),
            Some("zone"),
            Some("hints"),
            Some("none"),
            Some("nearest"),
        ][..],
    );
    let mode = select(&[None, None, None, None, Some("off"), Some("other")][..]);
    let distribution = select(&[None, None, Some("PreferSameZone"), Some("PreferSameNode")][..]);
    let label = select(
        &[
            None,
            None,
            None,
            Some("service.kubernetes.io/service-proxy-name"),
            Some("service.kubernetes.io/headless"),
        ][..],
    );
    (
        addresses,
        kind,
        any_service_ports(),
        policy,
        (prefer, mode),
        distribution,
        label,
        prop::option::weighted(0.2, Just("ClientIP")),
    )
        .prop_map(
            move |(ips, kind, ports, policy, (prefer, mode), distribution, label, affinity)| {
                let labels: BTreeMap<_, _> =
                    label.map(|label| (label, "other")).into_iter().collect();
                json!({
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": {
                        "namespace": "shop",
                        "name": format!("s{number}"),
                        "labels": labels,
                        "annotations": without_nulls(json!({
                            "shunt.dev/prefer": prefer,
                            "shunt.dev/mode": mode,
                        })),
                    },
                    "spec": {
                        "type": kind,
                        "clusterIP": ips[0],
                        "clusterIPs": ips,
                        "ports": ports,
                        "internalTrafficPolicy": policy,
                        "trafficDistribution": distribution,
                        "sessionAffinity": affinity,
                    },
                })
            },
        )
}

/// One without a name, or several with.
fn any_service_ports() -> impl Strategy<Value = Vec<Value>> {
    let protocol = || select(&["TCP", "TCP", "UDP", "UDP", "SCTP"][..]);
    let unnamed = protocol().prop_map(|protocol| vec![json!({"port": 80, "protocol": protocol})]);
    let names = subsequence(vec![("http", 80), ("dns", 53), ("web", 443)], 1..=3);
    let named = (names, prop::collection::vec(protocol(), 3)).prop_map(|(names, protocols)| {
        let ports = names.into_iter().zip(protocols);
        ports
            .map(|((name, port), protocol)| json!({"name": name, "port": port, "protocol": protocol}))
            .collect()
    });
    prop_oneof![unnamed, named]
}

fn any_slice() -> impl Strategy<Value = Value> {
    let owner = select(
        &[
            Some("s1"),
            Some("s1"),
            Some("s1"),
            Some("s1"),
            Some("s1"),
            Some("s2"),
            Some("s2"),
            Some("s2"),
            Some("s2"),
            Some("gone"),
            Some(""),
            None,
        ][..],
    );
    let label = select(
        &[
            None,
            None,
            None,
            None,
            None,
            None,
            Some("service.kubernetes.io/headless"),
            Some("service.kubernetes.io/service-proxy-name"),
        ][..],
    );
    let family = select(&["IPv4", "IPv4", "IPv4", "IPv6", "IPv6", "FQDN"][..]);
    let namespace = select(&["shop", "shop", "shop", "shop", "shop", "other"][..]);
    let ports = prop::collection::vec(any_slice_port(), 4..9);
    let endpoints = prop::collection::vec(any_endpoint(), 0..7);
    (owner, label, family, namespace, ports, endpoints).prop_map(
        |(owner, label, family, namespace, ports, endpoints)| {
            let endpoints = endpoints.into_iter().map(|(hosts, mut endpoint)| {
                endpoint["addresses"] = hosts
                    .into_iter()
                    .map(|host| address(family, host))
                    .collect();
                endpoint
            });
            let mut labels = without_nulls(json!({"kubernetes.io/service-name": owner}));
            if let Some(label) = label {
                labels[label] = json!("other");
            }
            json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"namespace": namespace, "labels": labels},
                "addressType": family,
                "ports": ports,
                "endpoints": endpoints.collect::<Vec<_>>(),
            })
        },
    )
}

fn address(family: &str, host: u8) -> Value {
    match family {
        "IPv4" => json!(format!("10.244.0.{host}")),
        "IPv6" => json!(format!("fd00:244::{host}")),
        _ => json!(format!("h{host}.example.org")),
    }
}

/// The API server fills in name and protocol; a port without number is one that
/// no pod has.
fn any_slice_port() -> impl Strategy<Value = Value> {
    let name = select(&["", "", "http", "dns", "web"][..]);
    let number = select(&[Some(8080), Some(8080), Some(9090), None][..]);
    let protocol = select(&["TCP", "TCP", "UDP", "UDP", "SCTP"][..]);
    (name, number, protocol).prop_map(
        |(name, port, protocol)| json!({"name": name, "port": port, "protocol": protocol}),
    )
}

/// The last numbers of its addresses, and the rest. Few hosts, so that several
/// slices have the same.
fn any_endpoint() -> impl Strategy<Value = (Vec<u8>, Value)> {
    let hosts = prop::collection::vec(1_u8..10, 1..3);
    let condition = || select(&[None, Some(true), Some(false)][..]);
    let node = select(&[None, Some("n1"), Some("n2"), Some("")][..]);
    let zone = select(&[None, Some("z1"), Some("z2"), Some("")][..]);
    // Hints count only where all ready endpoints have some.
    let hints = |often| {
        let some = subsequence(vec![1, 2], 1..=2);
        prop::option::weighted(often, prop_oneof![9 => some, 1 => Just(vec![])])
    };
    (
        hosts,
        (condition(), condition(), condition()),
        node,
        zone,
        prop::option::weighted(0.95, (hints(0.8), hints(0.3))),
    )
        .prop_map(
            |(hosts, (ready, serving, terminating), node, zone, hints)| {
                let named = |letter: &str, numbers: Vec<u8>| -> Vec<Value> {
                    let names = numbers.into_iter().map(|it| format!("{letter}{it}"));
                    names.map(|name| json!({ "name": name })).collect()
                };
                let hints = hints.map(|(zones, nodes)| {
                    json!({
                        "forZones": zones.map(|it| named("z", it)),
                        "forNodes": nodes.map(|it| named("n", it)),
                    })
                });
                let endpoint = json!({
                    "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
                    "nodeName": node,
                    "zone": zone,
                    "hints": hints,
                });
                (hosts, endpoint)
            },
        )
}

/// What else may lie in a folder of manifests.
fn any_junk() -> impl Strategy<Value = String> {
    let known = select(
        &[
            "kind: [",
            "apiVersion: v1\nkind: Service\nmetadata: {namespace: shop, name: s1}\n\
             spec: {clusterIP: 10.96.0.300, ports: [{port: 80}]}\n",
            "apiVersion: v1\nkind: Service\nmetadata: {namespace: shop, name: s9}\n\
             spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n",
            "apiVersion: v1\nkind: Service\nmetadata: {namespace: shop, name: s8}\n\
             spec: {clusterIP: 10.96.0.8, ports: [{port: eighty}]}\n",
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {namespace: shop, \
             name: x, labels: {kubernetes.io/service-name: s2}}\naddressType: IPv4\nendpoints: \
             [{addresses: [nowhere]}]\n",
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: cart}\n",
        ][..],
    );
    prop_oneof![known.prop_map(str::to_owned), ".{0,40}"]
}

fn without_nulls(mut value: Value) -> Value {
    value
        .as_object_mut()
        .unwrap()
        .retain(|_, value| !value.is_null());
    value
}
