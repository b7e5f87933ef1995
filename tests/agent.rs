//! The agent on a lab node: manifests in, connects out.

use std::process::Command;

use lab::fixture::{
    READY, Service, cart, control_plane, dump, json, live_endpoints, start, stderr, wait_until,
};
use lab::kubernetes::ProxyMode;
use lab::report::LoadReport;
use lab::{Lab, Place as _, Pod};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

#[test]
fn a_connect_follows_the_manifests() {
    let mut lab = Lab::new("follow").unwrap();
    let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
    let client = n1.pod("client", None).unwrap();
    let (near, far) = (n1.pod("near", None).unwrap(), n2.pod("far", None).unwrap());
    let _near = near.serve("0.0.0.0:8080", "near").unwrap();
    let _far = far.serve("0.0.0.0:8080", "far").unwrap();
    let both = vec![(near.ipv4().into(), "n1"), (far.ipv4().into(), "n2")];
    let manifest = |endpoints| {
        let service = Service {
            endpoints,
            ..Service::default()
        };
        service.yaml()
    };
    n1.write_manifest("cart.yaml", &manifest(both)).unwrap();
    let _agent = start(&n1, &[]);

    for _ in 0..20 {
        let report = client.connect(CART).unwrap();
        assert_eq!(report.id.as_deref(), Some("near"));
        assert_eq!(report.peer, Some(CART.parse().unwrap()));
    }

    let only_far = vec![(far.ipv4().into(), "n2")];
    n1.write_manifest("cart.yaml", &manifest(only_far)).unwrap();
    wait_until("the far endpoint answers", || {
        client.connect(CART).unwrap().id.as_deref() == Some("far")
    });
    n1.write_manifest("cart.yaml", &manifest(vec![])).unwrap();
    wait_until("refused, since nothing is left", || {
        client.connect(CART).unwrap().errno.as_deref() == Some("ECONNREFUSED")
    });
    n1.remove_manifest("cart.yaml").unwrap();
    wait_until("the route is withdrawn", || {
        json(&n1, &["routes"])["routes"] == Value::Array(vec![])
    });
}

#[test]
fn the_live_table_has_the_form_and_the_content_of_the_plan() {
    let mut lab = Lab::new("plan").unwrap();
    let node = lab.node("n1").unwrap();
    let zone = "apiVersion: v1\nkind: Node\nmetadata:\n  name: n1\n  labels: \
                {topology.kubernetes.io/zone: z1}\n";
    node.write_manifest("node.yaml", zone).unwrap();
    for (name, cluster_ip, address) in [
        ("cart", "10.96.0.10", "10.244.1.5"),
        ("v6", "fd00:96::a", "fd00::5"),
    ] {
        let endpoints = vec![(address.parse().unwrap(), "n1")];
        let service = Service {
            name,
            cluster_ip,
            endpoints,
            ..Service::default()
        };
        node.write_manifest(&format!("{name}.yaml"), &service.yaml())
            .unwrap();
    }
    let draining = Service {
        name: "draining",
        cluster_ip: "10.96.0.11",
        endpoints: vec![("10.244.1.6".parse().unwrap(), "n1")],
        ..Service::default()
    };
    let terminating = "{conditions: {ready: false, terminating: true}, addresses";
    let draining = draining.yaml().replace("{addresses", terminating);
    node.write_manifest("draining.yaml", &draining).unwrap();
    let agent = start(&node, &[]);

    let from = node.manifests().to_str().unwrap().to_owned();
    let shunt = lab::target_binary("shunt", "SHUNT_BIN").unwrap();
    let plan = Command::new(shunt)
        .args(["plan", "--from", &from, "--node", "n1", "-o", "json"])
        .output()
        .unwrap();
    assert!(plan.status.success(), "{}", stderr(&plan));
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(plan["zone"], "z1");
    assert_eq!(plan["routes"].as_array().unwrap().len(), 3);
    assert_eq!(json(&node, &["routes"]), plan);
    // The maps are read, not the agent asked.
    agent.kill().unwrap();
    assert_eq!(json(&node, &["routes"]), plan);
    let wide = node.shunt(&["routes", "-o", "wide"]).unwrap();
    let wide = String::from_utf8(wide.stdout).unwrap();
    let expected = "node; terminating ones, since none is ready";
    assert!(wide.contains(expected), "{wide}");
}

#[test]
fn a_silent_agent_leaves_connects_to_kube_proxy() {
    let mut lab = Lab::new("stale").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let (ours, theirs) = (
        node.pod("ours", None).unwrap(),
        node.pod("theirs", None).unwrap(),
    );
    let _ours = ours.serve("0.0.0.0:8080", "shunt").unwrap();
    let _theirs = theirs.serve("0.0.0.0:8080", "kube-proxy").unwrap();
    // Each is told of another endpoint, so that the answer tells whose rule it was.
    let cart = |pod: &Pod| cart(&[pod.ipv4().into()]);
    let plane = control_plane(&node);
    plane.apply(&cart(&theirs)).unwrap();
    let _proxy = plane.kube_proxy(&node, ProxyMode::Nftables).unwrap();
    node.write_manifest("cart.yaml", &cart(&ours)).unwrap();
    let answer = || client.connect(CART).unwrap().id.unwrap();
    // On a busy machine, an agent that is alive may be silent for so long.
    let agent = start(&node, &["--stale-after", "2s"]);
    wait_until("shunt answers", || answer() == "shunt");

    agent.kill().unwrap();

    wait_until("kube-proxy answers", || answer() == "kube-proxy");
    assert_eq!(json(&node, &["status"])["agent"]["stale"], true);
    assert!(json(&node, &["status"])["counters"]["passed_stale"].as_u64() > Some(0));
    let _agent = start(&node, &["--stale-after", "2s"]);
    wait_until("shunt answers again", || answer() == "shunt");
}

#[test]
fn an_agent_that_is_started_again_adopts_maps_and_links() {
    let mut lab = Lab::new("again").unwrap();
    let node = lab.node("n1").unwrap();
    let manifest = cart(&["10.244.1.5".parse().unwrap()]);
    node.write_manifest("cart.yaml", &manifest).unwrap();
    let first = start(&node, &[]);
    let links = |status: &Value| -> Vec<Value> {
        status["programs"]
            .as_array()
            .unwrap()
            .iter()
            // The program inside the link of a raw tracepoint can't be replaced.
            .filter(|program| program["name"] != "sys_enter")
            .map(|program| program["link_id"].clone())
            .collect()
    };
    let before = json(&node, &["status"]);
    assert!(first.stop().unwrap().success());

    // Its log is appended to that of the first, which holds READY already.
    let mut second = node.agent(&["--prefer", "zone"]).unwrap();
    second
        .wait_for_log("adopted=1", lab::fixture::PATIENCE)
        .unwrap();
    wait_until("the new preference is in force", || {
        json(&node, &["routes"])["routes"][0]["prefer"] == "zone"
    });
    let after = json(&node, &["status"]);
    assert_eq!(links(&before), links(&after));
    assert!(
        links(&before).iter().filter(|id| id.is_number()).count() >= 5,
        "{before}"
    );
    assert_eq!(
        live_endpoints(&node, "shop/cart", "cluster"),
        ["10.244.1.5:8080"]
    );
    assert!(
        std::fs::read_to_string(second.log())
            .unwrap()
            .contains(READY)
    );
}

#[test]
fn the_services_map_prints_named_fields() {
    let mut lab = Lab::new("bpftool").unwrap();
    let node = lab.node("n1").unwrap();
    let manifest = cart(&["10.244.1.5".parse().unwrap()]);
    node.write_manifest("cart.yaml", &manifest).unwrap();
    let _agent = start(&node, &[]);

    let dump = dump(&node, "services");
    assert_eq!(dump[0]["key"]["protocol"], 6);
    assert_eq!(dump[0]["value"]["tier_count"], 3);
    assert_eq!(dump[0]["value"]["tiers"][0]["count"], 1);
}

#[test]
fn programs_of_another_layout_are_replaced_without_a_gap() {
    let mut lab = Lab::new("layouts").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let manifest = cart(&[server.ipv4().into()]);
    node.write_manifest("cart.yaml", &manifest).unwrap();
    start(&node, &[]).stop().unwrap();
    // What an older shunt would have left.
    let own = node
        .pins()
        .join(format!("v{}", shunt_common::LAYOUT_VERSION));
    let other = node.pins().join("v0");
    std::fs::rename(&own, &other).unwrap();
    assert_eq!(client.connect(CART).unwrap().id.as_deref(), Some("web"));
    let args = ["load", CART, "--threads", "1", "--until-stdin-closes"];
    let load = client.start_lab_pod(&args).unwrap();

    let agent = start(&node, &[]);

    wait_until("the other layout is gone", || !other.exists());
    let report: LoadReport = load.finish().unwrap();
    assert!(report.errnos.is_empty(), "{report:?}");
    assert!(report.ids["web"] > 0);
    agent.stop().unwrap();
    std::fs::rename(&own, &other).unwrap();
    let output = node.shunt(&["uninstall"]).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!other.exists() && !own.exists());
}
