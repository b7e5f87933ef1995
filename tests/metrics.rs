//! `/metrics` and `/healthz` of a running agent.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeMap;

use lab::fixture::{PATIENCE, READY, Service, json, start, wait_until};
use lab::kubernetes::ControlPlane;
use lab::report::HttpReport;
use lab::{Lab, Node, Place as _};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";
const ADDRESS: &str = "127.0.0.1:10270";

fn get(node: &Node, path: &str) -> HttpReport {
    node.lab_pod(&["get", ADDRESS, path]).unwrap()
}

/// Each sample, by its name and labels as they are written.
fn scrape(node: &Node) -> BTreeMap<String, f64> {
    let report = get(node, "/metrics");
    assert_eq!(report.status, 200, "{}", report.body);
    assert!(report.head.contains("application/openmetrics-text"));
    assert!(report.body.ends_with("# EOF\n"));
    let samples = report.body.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// The sample that a counter of `shunt status` is.
fn sample(counter: &str) -> String {
    match counter {
        "connect_local" => "shunt_local_connects_total".to_owned(),
        "connect_spilled" => "shunt_spilled_connects_total".to_owned(),
        "promotions" | "demotions" | "latches" | "events_lost" => format!("shunt_{counter}_total"),
        "connects_failed" => "shunt_failed_connects_total".to_owned(),
        "suspected" => "shunt_suspicions_total{change=\"begun\"}".to_owned(),
        "cleared" => "shunt_suspicions_total{change=\"ended\"}".to_owned(),
        "syn_timeouts" | "probes" | "suspects_avoided" | "failed_fast" => {
            format!("shunt_{counter}_total")
        }
        "self_check" => "shunt_self_checks_total".to_owned(),
        "peer_names" => "shunt_names_shown_total{call=\"getpeername\"}".to_owned(),
        "source_names" => "shunt_names_shown_total{call=\"recvmsg\"}".to_owned(),
        _ => {
            let label = |family: &str, label: &str, member: &str| {
                format!("shunt_{family}_total{{{label}=\"{member}\"}}")
            };
            if let Some(tier) = counter.strip_prefix("connect_") {
                label("connects", "result", tier)
            } else if let Some(result) = counter.strip_prefix("pairs_") {
                label("pairs", "result", result)
            } else if let Some(way) = counter.strip_prefix("messages_") {
                label("messages", "way", way)
            } else {
                label("connects", "result", counter)
            }
        }
    }
}

#[test]
fn the_metrics_are_what_the_status_shows() {
    let mut lab = Lab::new("metrics").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, web) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = web.serve("0.0.0.0:8080", "web").unwrap();
    let cart = Service {
        endpoints: vec![(web.ipv4().into(), "n1")],
        ..Service::default()
    };
    let empty = Service {
        name: "empty",
        cluster_ip: "10.96.0.11",
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &cart.yaml()).unwrap();
    node.write_manifest("empty.yaml", &empty.yaml()).unwrap();
    let agent = start(&node, &["--metrics-addr", ADDRESS]);
    for _ in 0..3 {
        assert_eq!(client.connect(CART).unwrap().id.as_deref(), Some("web"));
    }
    client.connect("10.96.0.11:80").unwrap();

    wait_until("the address is noted", || {
        json(&node, &["status"])["metrics"] == format!("http://{ADDRESS}/metrics")
    });
    let metrics = scrape(&node);
    let status = json(&node, &["status"]);
    let counters = status["counters"].as_object().unwrap();
    for (counter, value) in counters {
        let sample = sample(counter);
        assert_eq!(
            metrics.get(&sample).copied(),
            value.as_f64(),
            "{counter}, {sample}"
        );
    }
    let told = |name: &str| metrics[name];
    assert_eq!(told("shunt_connects_total{result=\"node\"}"), 3.0);
    assert_eq!(told("shunt_connects_total{result=\"refused\"}"), 1.0);
    for map in status["maps"].as_array().unwrap() {
        let sample = |family| format!("shunt_{family}{{map={}}}", map["name"]);
        assert_eq!(map["used"], told(&sample("map_entries")) as u64);
        assert_eq!(
            map["capacity"],
            told(&sample("map_capacity_entries")) as u64
        );
    }
    assert_eq!(told("shunt_map_entries{map=\"services\"}"), 2.0);
    assert_eq!(told("shunt_map_entries{map=\"slots\"}"), 3.0);
    assert_eq!(told("shunt_program_attached{program=\"connect4\"}"), 1.0);
    assert_eq!(told("shunt_routes"), 2.0);
    assert_eq!(told("shunt_ready") + told("shunt_source_connected"), 2.0);
    assert_eq!(told("shunt_rejected_objects"), 0.0);
    assert!(told("shunt_last_in_step_timestamp_seconds") > 1e9);
    assert!(told("shunt_heartbeat_age_seconds") < told("shunt_heartbeat_stale_after_seconds"));
    assert!(metrics.keys().any(|it| it.starts_with("shunt_build_info{")));
    assert_eq!(get(&node, "/healthz").status, 200);
    assert_eq!(get(&node, "/nothing").status, 404);

    let wrong = cart.yaml().replace("addresses: [\"", "addresses: [\"x");
    node.write_manifest("cart.yaml", &wrong).unwrap();
    wait_until("the slice is rejected", || {
        scrape(&node)["shunt_rejected_objects"] == 1.0
    });
    assert!(agent.stop().unwrap().success());
    assert_eq!(json(&node, &["status"])["metrics"], Value::Null);
}

#[test]
fn an_address_that_is_taken_stops_nothing_and_is_tried_again() {
    let mut lab = Lab::new("taken").unwrap();
    let node = lab.node("n1").unwrap();
    let web = node.pod("web", None).unwrap();
    let _web = web.serve("0.0.0.0:8080", "web").unwrap();
    let cart = Service {
        endpoints: vec![(web.ipv4().into(), "n1")],
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &cart.yaml()).unwrap();
    let other = node.serve(ADDRESS, "other").unwrap();

    let mut agent = start(&node, &["--metrics-addr", ADDRESS]);
    let complaint = "metrics cannot be served here";
    agent.wait_for_log(complaint, PATIENCE).unwrap();
    assert_eq!(web.connect(CART).unwrap().id.as_deref(), Some("web"));
    let noted = |start: &str| {
        let status = json(&node, &["status"]);
        let metrics = status["metrics"].as_str().unwrap_or_default();
        metrics.starts_with(start)
    };
    let failed = format!("NOT SERVED at {ADDRESS}: Address already in use");
    wait_until("the failure is noted", || noted(&failed));

    drop(other);
    wait_until("it is served", || noted("http://"));
    assert_eq!(scrape(&node)["shunt_ready"], 1.0);
    assert_eq!(agent.read_log().matches(complaint).count(), 1);
}

#[test]
fn a_source_that_is_away_is_told() {
    let mut lab = Lab::new("away").unwrap();
    let node = lab.node("n1").unwrap();
    let mut plane = ControlPlane::start(&node).unwrap();
    let objects = |zone: &str| {
        let node = format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: n1, labels: \
             {{topology.kubernetes.io/zone: {zone}}}}}\n---\n"
        );
        let endpoints = vec![(format!("10.244.1.{}", zone.len()).parse().unwrap(), "n1")];
        let service = Service {
            endpoints,
            annotations: &[("round", zone)],
            ..Service::default()
        };
        let pod = format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, labels: {{shunt.dev/mode: \
             \"off\", round: {zone}}}}}\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata: \
             {{namespace: shop, name: default}}\n---\napiVersion: v1\nkind: Pod\nmetadata: \
             {{namespace: shop, name: client, annotations: {{round: {zone}}}}}\nspec: {{nodeName: \
             n1, containers: [{{name: app, image: app}}]}}\n---\n"
        );
        node + &pod + &service.yaml()
    };
    plane.apply(&objects("z")).unwrap();
    let args = ["--metrics-addr", ADDRESS];
    let mut agent = node.agent_of_cluster(plane.kubeconfig(), &args).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    assert_eq!(scrape(&node)["shunt_source_connected"], 1.0);
    let errors = |metrics: &BTreeMap<String, f64>| metrics["shunt_source_errors_total"];
    assert_eq!(errors(&scrape(&node)), 0.0);

    plane.stop_api_server();
    wait_until("it is away", || {
        scrape(&node)["shunt_source_connected"] == 0.0
    });
    assert!(errors(&scrape(&node)) > 0.0);
    // It routes by what it knows.
    assert_eq!(get(&node, "/healthz").status, 200);

    plane.start_api_server().unwrap();
    // News of each kind.
    plane.apply(&objects("zz")).unwrap();
    wait_until("it is back", || {
        scrape(&node)["shunt_source_connected"] == 1.0
    });
}

#[test]
fn an_agent_without_its_objects_is_not_healthy() {
    let mut lab = Lab::new("unready").unwrap();
    let node = lab.node("n1").unwrap();
    let kubeconfig = lab.folder().join("nobody.kubeconfig");
    // Nobody listens there.
    let text = "{apiVersion: v1, kind: Config, current-context: lab, \
                clusters: [{name: lab, cluster: {server: 'http://127.0.0.1:9'}}], \
                users: [{name: lab, user: {}}], \
                contexts: [{name: lab, context: {cluster: lab, user: lab}}]}";
    std::fs::write(&kubeconfig, text).unwrap();
    let args = ["--metrics-addr", ADDRESS];
    let mut agent = node.agent_of_cluster(&kubeconfig, &args).unwrap();
    agent.wait_for_log("serving /metrics", PATIENCE).unwrap();
    agent.wait_for_log("did not answer", PATIENCE).unwrap();

    let health = get(&node, "/healthz");
    assert_eq!(health.status, 503);
    assert!(health.body.contains("first full list"), "{}", health.body);
    let metrics = scrape(&node);
    assert_eq!(metrics["shunt_ready"], 0.0);
    assert_eq!(metrics["shunt_source_connected"], 0.0);
    assert!(metrics["shunt_source_errors_total"] >= 1.0);
    // One that is busy while it waits looks by the thousand.
    let looks = metrics["shunt_reconciliations_total"];
    assert!(looks < 100.0, "{looks} looks, and nothing has come");
}
