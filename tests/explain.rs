//! `shunt explain` beside a running agent: the plan, the live table, a client.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Output;

use lab::fixture::{Service, live_endpoints, servers, start, stderr, wait_until};
use lab::{Lab, Node, Place, Pod};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

fn write(node: &Node, servers: &[&Pod]) {
    let endpoints = servers
        .iter()
        .map(|pod| (pod.ipv4().into(), "n1"))
        .collect();
    let service = Service {
        endpoints,
        spec: "sessionAffinity: ClientIP",
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
}

fn run(node: &Node, args: &[&str]) -> Output {
    let manifests = node.manifests().display().to_string();
    let source = ["explain", "--node", "n1", "--manifests", &manifests];
    node.shunt(&[&source[..], args].concat()).unwrap()
}

fn explain(node: &Node, args: &[&str]) -> Value {
    let output = run(node, &[args, &["-o", "json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The address of the pod that answered.
fn endpoint(pods: &[Pod; 2], name: &str) -> String {
    let pod = pods.iter().find(|pod| pod.name() == name).unwrap();
    format!("{}:8080", pod.ipv4())
}

#[test]
fn the_plan_is_held_against_the_live_table_and_the_agent() {
    let mut lab = Lab::new("explain").unwrap();
    let node = lab.node("n1").unwrap();
    let ([one, two], _running) = servers(&node);
    write(&node, &[&one]);
    let agent = start(&node, &["--stale-after", "2s"]);

    // On a busy machine, an agent that is alive may be silent for so long.
    let mut report = Value::Null;
    wait_until("the agent is heard", || {
        report = explain(&node, &["shop/cart:http"]);
        report["agent"]["stale"] == false
    });
    let port = &report["ports"][0];
    assert_eq!(port["live"]["state"], "same", "{report}");
    assert_eq!(port["live_route"], port["route"]);
    assert_eq!(report["agent"]["running"], true);
    let answer = format!(
        "goes to {}:8080 (live table, node; affinity first (10800 s))",
        one.ipv4()
    );
    assert_eq!(port["answer"], answer);

    agent.kill().unwrap();
    write(&node, &[&two]);
    wait_until("the agent is called stale", || {
        explain(&node, &["shop/cart"])["agent"]["stale"] == true
    });
    let report = explain(&node, &[CART]);
    let port = &report["ports"][0];
    assert_eq!(
        port["answer"],
        "left to kube-proxy, since the agent is silent"
    );
    assert_eq!(port["live"]["state"], "differs");
    let differences = port["live"]["differences"].to_string();
    for expected in [
        format!("tier node: only live {}:8080", one.ipv4()),
        format!("tier node: not live {}:8080", two.ipv4()),
    ] {
        assert!(differences.contains(&expected), "{differences}");
    }
    let off = Service {
        annotations: &[("shunt.dev/mode", "off")],
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &off.yaml()).unwrap();
    let report = explain(&node, &["shop/cart"]);
    assert_eq!(
        report["left_alone"],
        "its annotation shunt.dev/mode is \"off\""
    );
    assert_eq!(report["leftovers"][0]["address"], "10.96.0.10");
    let text = String::from_utf8(run(&node, &["shop/cart"]).stdout).unwrap();
    assert!(text.contains("BUT the live table still holds"), "{text}");
    let other = Service {
        name: "pay",
        cluster_ip: "10.96.0.11",
        ..Service::default()
    };
    node.write_manifest("pay.yaml", &other.yaml()).unwrap();
    let report = explain(&node, &["shop/pay"]);
    assert_eq!(report["ports"][0]["live"]["state"], "missing");
    let text = String::from_utf8(run(&node, &["shop/pay"]).stdout).unwrap();
    assert!(text.contains("NO ENTRY, though one is planned"), "{text}");
}

#[test]
fn a_client_is_told_where_affinity_sends_it() {
    let mut lab = Lab::new("keeps").unwrap();
    let node = lab.node("n1").unwrap();
    let (pods, _running) = servers(&node);
    let [one, two] = &pods;
    write(&node, &[one, two]);
    let _agent = start(&node, &[]);
    let pod = node.pod("client", None).unwrap();
    let in_pod = pod.serve("0.0.0.0:9000", "any").unwrap();
    let on_host = node.serve("0.0.0.0:9000", "any").unwrap();

    for (place, process, host_network) in [
        (&pod as &dyn Client, &in_pod, false),
        (&node as &dyn Client, &on_host, true),
    ] {
        let pid = process.process().id().to_string();
        let from = ["--from", &pid, "shop/cart"];
        assert_eq!(
            explain(&node, &from)["ports"][0]["client_affinity"]["state"],
            "free"
        );
        let answer = endpoint(&pods, &place.answer());
        let report = explain(&node, &from);
        let client = &report["client"];
        assert_eq!(client["host_network"], host_network);
        assert_eq!(client["cgroup_id"], place.cgroup_id());
        let affinity = &report["ports"][0]["client_affinity"];
        assert_eq!(affinity["state"], "keeps", "{report}");
        assert_eq!(affinity["endpoint"], answer);
        assert_eq!(affinity["in_set"], true);
        let said = report["ports"][0]["answer"].as_str().unwrap();
        assert!(
            said.starts_with(&format!("goes to {answer}, which")),
            "{said}"
        );
    }

    let first = pod.answer();
    let stays = if first == "one" { two } else { one };
    write(&node, &[stays]);
    wait_until("it has left", || {
        live_endpoints(&node, "shop/cart", "node").len() == 1
    });
    let pid = in_pod.process().id().to_string();
    let report = explain(&node, &["--from", &pid, "shop/cart"]);
    assert_eq!(report["ports"][0]["client_affinity"]["in_set"], false);
    let answer = format!("goes to {} (", endpoint(&pods, stays.name()));
    let said = report["ports"][0]["answer"].as_str().unwrap();
    assert!(said.starts_with(&answer), "{said}");
}

#[test]
fn a_pod_is_found_by_name_and_an_opted_out_one_is_told() {
    let mut lab = Lab::new("explainpod").unwrap();
    let node = lab.node("n1").unwrap();
    let (pods, _running) = servers(&node);
    write(&node, &[&pods[0]]);
    let _agent = start(&node, &[]);
    let (plain, quiet) = (
        node.pod("plain", None).unwrap(),
        node.pod("quiet", None).unwrap(),
    );
    let _in_plain = plain.serve("0.0.0.0:9000", "any").unwrap();
    let in_quiet = quiet.serve("0.0.0.0:9000", "any").unwrap();
    for (pod, annotations) in [(&plain, ""), (&quiet, "shunt.dev/mode: \"off\"")] {
        let yaml = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: shop, name: {name}, uid: {uid}, \
             annotations: {{{annotations}}}}}\nspec: {{nodeName: n1, containers: [{{name: app}}]}}\n",
            name = pod.name(),
            uid = pod.uid(),
        );
        node.write_manifest(&format!("{}.yaml", pod.name()), &yaml)
            .unwrap();
    }
    let cgroup = node.node_cgroup().display().to_string();
    let from = |client: &str| explain(&node, &["--cgroup", &cgroup, "--from", client, "cart"]);

    plain.answer();
    let report = from("shop/plain");
    assert_eq!(report["client"]["pod"], "shop/plain");
    assert_eq!(report["client"]["left_alone"], Value::Null);
    let affinity = &report["ports"][0]["client_affinity"];
    assert_eq!(affinity["state"], "keeps", "{report}");

    let reason = "its pod shop/quiet has the annotation shunt.dev/mode: \"off\"";
    wait_until("the pod is left alone", || {
        from("shop/quiet")["client"]["left_alone"] == reason
    });
    // By its process, it is the same pod.
    let report = from(&in_quiet.process().id().to_string());
    assert_eq!(report["client"]["pod"], "shop/quiet");
    assert_eq!(
        report["ports"][0]["answer"],
        format!("left to kube-proxy, since {reason}")
    );

    let output = run(&node, &["--from", "shop/none", "cart"]);
    let said = stderr(&output);
    assert!(
        said.contains("no Pod shop/none on node n1; of its namespace these are: plain, quiet"),
        "{said}"
    );
}

/// A place with a client in it.
trait Client {
    fn answer(&self) -> String;
    fn cgroup_id(&self) -> u64;
}

impl<T: Place> Client for T {
    fn answer(&self) -> String {
        self.connect(CART).unwrap().id.unwrap()
    }

    fn cgroup_id(&self) -> u64 {
        fs::metadata(self.cgroup()).unwrap().ino()
    }
}

#[test]
fn what_is_not_known_is_an_error_that_says_what_is() {
    let mut lab = Lab::new("unknown").unwrap();
    let node = lab.node("n1").unwrap();
    write(&node, &[]);
    for (args, expected) in [
        (&["shop/crat"][..], "did you mean shop/cart?"),
        (&["shop/cart:https"], "but http (80/TCP)"),
        (&["10.96.0.99"], "no Service that shunt handles has"),
        (
            &["--from", "999999999", "shop/cart"],
            "no process 999999999",
        ),
    ] {
        let output = run(&node, args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = stderr(&output);
        assert!(said.contains(expected), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    // Without an agent, the plan is explained all the same.
    let report = explain(&node, &["shop/cart"]);
    assert_eq!(report["ports"][0]["live"]["state"], "unreadable");
    assert_eq!(
        report["ports"][0]["answer"],
        "refused with ECONNREFUSED, since no endpoint is usable"
    );
}
