//! `sessionAffinity: ClientIP`.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use lab::fixture::{PATIENCE, Service, live_endpoints, start, wait_until};
use lab::{Lab, Node, Place, Pod, Server};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

fn servers(node: &Node) -> ([Pod; 2], Vec<Server>) {
    let pods = ["one", "two"].map(|name| node.pod(name, None).unwrap());
    let serve = |pod: &Pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap();
    let running = pods.iter().map(serve).collect();
    (pods, running)
}

fn write(node: &Node, servers: &[&Pod], timeout_seconds: u32) {
    let spec = format!(
        "sessionAffinity: ClientIP\n  sessionAffinityConfig: {{clientIP: {{timeoutSeconds: \
         {timeout_seconds}}}}}"
    );
    let endpoints = servers
        .iter()
        .map(|pod| (pod.ipv4().into(), "n1"))
        .collect();
    let service = Service {
        endpoints,
        spec: &spec,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
}

fn answer(client: &impl Place) -> String {
    client.connect(CART).unwrap().id.unwrap()
}

/// What the kernel remembers of clients.
fn clients(node: &Node) -> Vec<Value> {
    let pin = node
        .pins()
        .join(format!("v{}/affinity", shunt_common::LAYOUT_VERSION));
    let output = Command::new("bpftool")
        .args(["map", "dump", "pinned"])
        .arg(pin)
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_pod_keeps_to_its_endpoint_while_that_is_in_the_set() {
    let mut lab = Lab::new("affinity").unwrap();
    let node = lab.node("n1").unwrap();
    let ([one, two], _running) = servers(&node);
    write(&node, &[&one, &two], 10_800);
    let _agent = start(&node, &[]);

    let clients: Vec<_> = (0..8)
        .map(|n| node.pod(&format!("c{n}"), None).unwrap())
        .collect();
    let mut used = BTreeSet::new();
    for client in &clients {
        let first = answer(client);
        for _ in 0..10 {
            assert_eq!(answer(client), first);
        }
        used.insert(first);
    }
    // All on one side: once in 128 runs, if clients are spread evenly. More
    // clients follow then.
    for n in 8..40 {
        if used.len() == 2 {
            break;
        }
        used.insert(answer(&node.pod(&format!("c{n}"), None).unwrap()));
    }
    assert_eq!(used.len(), 2, "clients are spread over both");

    let first = answer(&clients[0]);
    let (leaves, stays) = if first == "one" {
        (&one, &two)
    } else {
        (&two, &one)
    };
    write(&node, &[stays], 10_800);
    wait_until("it has left", || {
        live_endpoints(&node, "shop/cart", "node").len() == 1
    });
    assert_eq!(answer(&clients[0]), stays.name());
    write(&node, &[stays, leaves], 10_800);
    wait_until("it is back", || {
        live_endpoints(&node, "shop/cart", "node").len() == 2
    });
    for _ in 0..10 {
        assert_eq!(
            answer(&clients[0]),
            stays.name(),
            "the client has moved for good"
        );
    }
}

#[test]
fn a_client_is_free_after_the_time_and_each_connection_renews_it() {
    let mut lab = Lab::new("timeout").unwrap();
    let node = lab.node("n1").unwrap();
    let ([one, two], _running) = servers(&node);
    write(&node, &[&one, &two], 1);
    let _agent = start(&node, &[]);
    let client = node.pod("client", None).unwrap();

    let first = answer(&client);
    let until = |node: &Node| clients(node)[0]["value"]["until_ns"].as_u64().unwrap();
    let before = until(&node);
    answer(&client);
    assert!(until(&node) > before);

    let deadline = Instant::now() + PATIENCE;
    while answer(&client) == first {
        assert!(Instant::now() < deadline, "always {first}");
        std::thread::sleep(Duration::from_millis(1100));
    }
}

#[test]
fn processes_of_the_host_are_clients_by_their_cgroup() {
    let mut lab = Lab::new("hostclient").unwrap();
    let node = lab.node("n1").unwrap();
    let ([one, two], _running) = servers(&node);
    write(&node, &[&one, &two], 10_800);
    let _agent = start(&node, &[]);
    let pod = node.pod("client", None).unwrap();

    let first = answer(&node);
    assert_eq!(answer(&node), first);
    answer(&pod);

    let cgroup = |client: &Value| client["key"]["cgroup_id"].as_u64().unwrap();
    let mut cgroups: Vec<_> = clients(&node).iter().map(cgroup).collect();
    cgroups.sort_unstable();
    let id = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(node.cgroup()).unwrap());
    assert_eq!(cgroups, [0, id]);
}
