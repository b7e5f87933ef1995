//! Manifests to routing tables, as `shunt plan` prints them.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::fs;

use node_agent::plan::{Policy, plan};
use node_agent::report;
use node_agent::tables::Prefer;
use node_agent::watch::folder;

/// Two nodes in z1, one in z2, and endpoints on n1 (here), n2 and n3.
const NODES_AND_SLICE: &str = r#"
kind: List
apiVersion: v1
items:
- {apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}}}
- {apiVersion: v1, kind: Node, metadata: {name: n2, labels: {topology.kubernetes.io/zone: z1}}}
- {apiVersion: v1, kind: Node, metadata: {name: n3, labels: {topology.kubernetes.io/zone: z2}}}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {namespace: shop, name: cart-1, labels: {kubernetes.io/service-name: cart}}
  addressType: IPv4
  ports: [{name: http, port: 8080}]
  endpoints:
  - {addresses: [10.244.1.5], nodeName: n1, zone: z1, hints: {forZones: [{name: z1}]}}
  - {addresses: [10.244.2.7], nodeName: n2, zone: z1, hints: {forZones: [{name: z2}]}}
  - {addresses: [10.244.3.9], nodeName: n3, zone: z2, hints: {forZones: [{name: z2}]}}
"#;

fn service(metadata: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: shop, name: cart{metadata}}}\n\
         spec: {{clusterIP: 10.96.0.10, ports: [{{name: http, port: 80}}]{spec}}}\n"
    )
}

/// Verdict, preference, and each tier's scope with the last number of its
/// endpoints, all as on node n1.
fn routes(manifests: &str, prefer: Prefer) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("all.yaml"), manifests).unwrap();
    let (state, complaints) = folder::read(directory.path()).unwrap();
    assert_eq!(complaints, [""; 0]);
    let report = report::routes(&plan(&state, "n1", &Policy { prefer }));
    let tier = |tier: &report::TierReport| {
        let last = tier
            .endpoints
            .iter()
            .map(|it| it.ip().to_string().rsplit('.').next().unwrap().to_owned());
        format!(
            " {}[{}]",
            word(&tier.scope),
            last.collect::<Vec<_>>().join(",")
        )
    };
    let route = |route: &report::RouteReport| {
        let tiers: String = route.tiers.iter().map(tier).collect();
        format!(
            "{}:{} {} {}{tiers}",
            route.service,
            route.port,
            word(&route.verdict),
            word(&route.prefer)
        )
    };
    report.routes.iter().map(route).collect()
}

/// The word of the JSON form.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value)
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned()
}

fn check(metadata: &str, spec: &str, prefer: Prefer, expected: &str) {
    let manifests = format!("{NODES_AND_SLICE}{}", service(metadata, spec));
    assert_eq!(routes(&manifests, prefer), [expected]);
}

#[test]
fn each_preference_has_its_tiers() {
    for (prefer, expected) in [
        (
            Prefer::Node,
            "cart:80 balance node node[5] zone[5,7] cluster[5,7,9]",
        ),
        (
            Prefer::Zone,
            "cart:80 balance zone zone[5,7] cluster[5,7,9]",
        ),
        (
            Prefer::Hints,
            "cart:80 balance hints hints[5] cluster[5,7,9]",
        ),
        (Prefer::None, "cart:80 balance none hints[5]"),
    ] {
        check("", "", prefer, expected);
    }
}

#[test]
fn the_annotation_wins_over_traffic_distribution_and_that_over_the_flag() {
    let distribution = ", trafficDistribution: PreferSameZone";
    let hints = "cart:80 balance hints hints[5] cluster[5,7,9]";
    check("", distribution, Prefer::Node, hints);
    let annotation = ", annotations: {shunt.dev/prefer: zone}";
    check(
        annotation,
        distribution,
        Prefer::Node,
        "cart:80 balance zone zone[5,7] cluster[5,7,9]",
    );
    let unknown = ", annotations: {shunt.dev/prefer: nearest}";
    check(unknown, "", Prefer::None, "cart:80 balance none hints[5]");
}

/// An endpoint on this node is within the node's zone, whatever its slice says.
#[test]
fn the_zone_tier_holds_the_node_tier() {
    for (from, to) in [
        ("nodeName: n1, zone: z1", "nodeName: n1"),
        ("nodeName: n1, zone: z1", "nodeName: n1, zone: z2"),
    ] {
        let manifests = NODES_AND_SLICE.replace(from, to) + &service("", "");
        let routes = routes(&manifests, Prefer::Node);
        assert_eq!(
            routes,
            ["cart:80 balance node node[5] zone[5,7] cluster[5,7,9]"]
        );
    }
    let no_zones = NODES_AND_SLICE.replace("topology.kubernetes.io/zone", "zone");
    let routes = routes(&(no_zones + &service("", "")), Prefer::Node);
    assert_eq!(
        routes,
        ["cart:80 balance node node[5] zone[5] cluster[5,7,9]"]
    );
}

#[test]
fn nothing_widens_internal_traffic_policy_local() {
    let local = ", internalTrafficPolicy: Local";
    for (prefer, word) in [
        (Prefer::Node, "node"),
        (Prefer::Zone, "zone"),
        (Prefer::Hints, "hints"),
    ] {
        check(
            "",
            local,
            prefer,
            &format!("cart:80 balance {word} node[5]"),
        );
    }
}

#[test]
fn what_shunt_does_not_capture_is_not_listed() {
    let manifests = |metadata, spec| format!("{NODES_AND_SLICE}{}", service(metadata, spec));
    for (metadata, spec) in [
        (", annotations: {shunt.dev/mode: \"off\"}", ""),
        (
            ", labels: {service.kubernetes.io/service-proxy-name: other}",
            "",
        ),
        ("", ", type: ExternalName"),
    ] {
        assert_eq!(routes(&manifests(metadata, spec), Prefer::Node), [""; 0]);
    }
    // Endpoints without a Service.
    assert_eq!(routes(NODES_AND_SLICE, Prefer::Node), [""; 0]);
}

/// The label of another proxy stays on slices a while after the Service lost it.
#[test]
fn of_the_labels_that_are_copied_to_slices_only_headless_counts() {
    let routes = |label: &str| {
        let labelled = format!("labels: {{{label}: other, kubernetes.io");
        let manifests = NODES_AND_SLICE.replace("labels: {kubernetes.io", &labelled);
        routes(&format!("{manifests}{}", service("", "")), Prefer::Zone)
    };
    let all = "cart:80 balance zone zone[5,7] cluster[5,7,9]";
    assert_eq!(routes("service.kubernetes.io/service-proxy-name"), [all]);
    let none = "cart:80 refuse zone zone[] cluster[]";
    assert_eq!(routes("service.kubernetes.io/headless"), [none]);
}

#[test]
fn a_service_without_endpoints_refuses() {
    let expected = "cart:80 refuse node node[] zone[] cluster[]";
    assert_eq!(routes(&service("", ""), Prefer::Node), [expected]);
}

/// What `shunt routes -o wide` says of the one route.
fn decided_by(manifests: &str, prefer: Prefer) -> String {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("all.yaml"), manifests).unwrap();
    let (state, _) = folder::read(directory.path()).unwrap();
    let report = report::routes(&plan(&state, "n1", &Policy { prefer }));
    report.routes[0].decided_by()
}

#[test]
fn the_stage_that_decides_is_told() {
    let check = |slice: &str, spec: &str, prefer, expected: &str| {
        let manifests = format!("{slice}{}", service("", spec));
        assert_eq!(decided_by(&manifests, prefer), expected);
    };
    let all = NODES_AND_SLICE;
    let none_here = &all.replace("nodeName: n1", "nodeName: n4");
    let none_in_zone = &none_here.replace(", zone: z1", ", zone: z3");
    let terminating = &all.replace(
        "nodeName",
        "conditions: {ready: false, serving: true, terminating: true}, nodeName",
    );
    let local = ", internalTrafficPolicy: Local";
    check(all, "", Prefer::Node, "node");
    check(none_here, "", Prefer::Node, "zone: none on this node");
    check(
        none_in_zone,
        "",
        Prefer::Node,
        "cluster: none on this node or in its zone",
    );
    check(none_in_zone, "", Prefer::Zone, "cluster: none in the zone");
    check(all, "", Prefer::None, "hints");
    check(
        terminating,
        "",
        Prefer::None,
        "cluster: no hints apply; terminating ones, since none is ready",
    );
    check(
        terminating,
        "",
        Prefer::Node,
        "node; terminating ones, since none is ready",
    );
    check(
        all,
        local,
        Prefer::Node,
        "node: internalTrafficPolicy is Local",
    );
    check(
        none_here,
        local,
        Prefer::Node,
        "internalTrafficPolicy is Local, and no endpoint on this node is usable",
    );
    check("", "", Prefer::Node, "no endpoint is usable");
    check(
        all,
        ", sessionAffinity: ClientIP",
        Prefer::Zone,
        "zone; affinity first (10800 s)",
    );
}

#[test]
fn udp_ports_have_routes_of_their_own() {
    let ports = ", ports: [{name: http, port: 80}, {name: http, port: 80, protocol: UDP}]";
    let manifests = NODES_AND_SLICE.replace(
        "ports: [{name: http, port: 8080}]",
        "ports: [{name: http, port: 8080}, {name: http, port: 8081, protocol: UDP}]",
    );
    let service = service("", "").replace(", ports: [{name: http, port: 80}]", ports);
    let routes = routes(&format!("{manifests}{service}"), Prefer::Zone);
    assert_eq!(routes, ["cart:80 balance zone zone[5,7] cluster[5,7,9]"; 2]);
}
