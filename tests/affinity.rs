//! `sessionAffinity: ClientIP`.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use lab::fixture::{
    PATIENCE, Service, dump, json as report, live_endpoints, servers, start, wait_until,
};
use lab::{Lab, Node, Place, Pod, Server};
use serde_json::{Value, json};

const CART: &str = "10.96.0.10:80";

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
    let until = |node: &Node| {
        dump(node, "affinity")[0]["value"]["until_ns"]
            .as_u64()
            .unwrap()
    };
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
    let mut cgroups: Vec<_> = dump(&node, "affinity").iter().map(cgroup).collect();
    cgroups.sort_unstable();
    let id = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(node.cgroup()).unwrap());
    assert_eq!(cgroups, [0, id]);
}

/// How often what must not change is looked at: by chance it would be right once
/// in 64 runs.
const REPEATS: usize = 6;

/// Those of kube-proxy's cases, without the time that can't be waited for and
/// without NodePorts.
#[test]
fn the_cases_of_kube_proxy_hold_on_real_sockets() {
    let cases = include_str!("../node-agent/tests/cases/kube-proxy.yaml");
    let cases: Value = serde_saphyr::from_str(cases).unwrap();
    let cases = cases["cases"].as_array().unwrap().iter();
    let cases: Vec<_> = cases.filter(|case| case["kind"] == "affinity").collect();
    assert_eq!(cases.len(), 9);

    let mut lab = Lab::new("affcases").unwrap();
    let node = lab.node("n1").unwrap();
    let names = ["X", "Y", "Z", "Remote", "Local"];
    let pods = names.map(|name| (name, node.pod(&name.to_lowercase(), None).unwrap()));
    let serve = |(name, pod): &(&str, Pod)| pod.serve("0.0.0.0:8080", name).unwrap();
    let _running: Vec<Server> = pods.iter().map(serve).collect();
    let pods = BTreeMap::from(pods);
    write_set(&node, &[], 100);
    let _agent = start(&node, &[]);
    for case in cases {
        check_case(&node, &pods, case);
    }
}

fn check_case(node: &Node, pods: &BTreeMap<&str, Pod>, case: &Value) {
    let timeout = case["timeout_seconds"].as_u64().unwrap();
    let mut clients: BTreeMap<&str, Pod> = BTreeMap::new();
    let mut names: BTreeMap<&str, String> = BTreeMap::new();
    let mut last_connect = 0;
    for step in case["steps"].as_array().unwrap() {
        let t = step["t"].as_u64().unwrap();
        if step["via"] == "nodePort" || t - last_connect > timeout {
            continue;
        }
        last_connect = t;
        let set = step["set"].as_array().unwrap().iter();
        let set: Vec<&Pod> = set.map(|name| &pods[name.as_str().unwrap()]).collect();
        write_set(node, &set, timeout);
        wait_until("the set is live", || has_set(node, &set));

        let client = step["client"].as_str().unwrap();
        let number = client.rsplit('.').next().unwrap();
        // Containers of a pod are processes in its namespace, as these are.
        let client = clients
            .entry(client)
            .or_insert_with(|| node.pod(&format!("client{number}"), None).unwrap());
        let port = if step["port"] == "https" { 443 } else { 80 };
        let connect = || {
            client
                .connect(format!("10.96.0.10:{port}"))
                .unwrap()
                .id
                .unwrap()
        };
        let answer = connect();
        let expect = step["expect"].as_str().unwrap();
        match (expect.strip_prefix("any, call it "), names.get(expect)) {
            (Some(name), _) => {
                names.insert(name, answer);
            }
            (None, Some(known)) => {
                assert_eq!(&answer, known, "{step}: {case}");
                for _ in 1..REPEATS {
                    assert_eq!(&connect(), known, "{step}: {case}");
                }
            }
            (None, None) if expect == "any" => {}
            (None, None) => assert_eq!(answer, expect, "{step}: {case}"),
        }
    }
    for (_, client) in clients {
        client.remove().unwrap();
    }
}

fn write_set(node: &Node, set: &[&Pod], timeout_seconds: u64) {
    let ports = [("http", 80), ("https", 443)];
    let endpoints: Vec<Value> = set
        .iter()
        .map(|pod| json!({"addresses": [pod.ipv4()], "nodeName": "n1"}))
        .collect();
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": "cart"},
        "spec": {
            "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"],
            "ports": ports.map(|(name, port)| json!({"name": name, "port": port})),
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": timeout_seconds}},
        },
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "shop", "name": "cart-1",
                     "labels": {"kubernetes.io/service-name": "cart"}},
        "ports": ports.map(|(name, _)| json!({"name": name, "port": 8080})),
        "endpoints": endpoints,
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, slice]});
    node.write_manifest("cart.yaml", &list.to_string()).unwrap();
}

/// Whether both ports have these endpoints.
fn has_set(node: &Node, set: &[&Pod]) -> bool {
    let expected: BTreeSet<_> = set
        .iter()
        .map(|pod| format!("{}:8080", pod.ipv4()))
        .collect();
    let report = report(node, &["routes"]);
    let routes = report["routes"].as_array().unwrap();
    let endpoints = |route: &Value| -> BTreeSet<String> {
        let endpoints = route["tiers"][0]["endpoints"].as_array().unwrap().iter();
        endpoints
            .map(|it| it.as_str().unwrap().to_owned())
            .collect()
    };
    routes.len() == 2 && routes.iter().all(|route| endpoints(route) == expected)
}
