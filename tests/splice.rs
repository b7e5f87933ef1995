//! Spliced connections, with the real agent.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, json, start, start_splicing, wait_until};
use lab::report::{Listening, PingPongBench, StreamReport};
use lab::{Lab, Node, Options, Place as _, Pod};

const CART: &str = "10.96.0.10:80";
const SPLICE: &[(&str, &str)] = &[("shunt.dev/splice", "on")];
/// Young connections too.
const AT_ONCE: &[&str] = &["--splice-after", "0ms"];
/// Each way, so that 1 GB passes in all.
const BYTES: &str = "500000000";

fn count(node: &Node, counter: &str) -> u64 {
    json(node, &["status"])["counters"][counter]
        .as_u64()
        .unwrap()
}

/// Both ends check every byte; the packets of plain TCP are steered to another
/// CPU, which is where a splice without the ordering rule corrupts.
fn checked_stream(label: &str, options: Options, slow_reader: bool) {
    let mut lab = Lab::with(label, options).unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let endpoints = vec![(server.ipv4().into(), "n1")];
    let service = Service {
        endpoints,
        annotations: SPLICE,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let _agent = start_splicing(&node, AT_ONCE);
    let (found, spliced) = (
        count(&node, "pairs_found"),
        count(&node, "messages_spliced"),
    );
    let mut args = vec![
        "stream",
        "--bytes",
        BYTES,
        "--seed",
        "11",
        "--listen",
        "0.0.0.0:8080",
    ];
    if slow_reader {
        args.push("--slow-reader");
    }
    let mut listener = server.start_lab_pod(&args).unwrap();
    let _ready: Listening = listener.report().unwrap();

    let args = [
        "stream",
        "--bytes",
        BYTES,
        "--seed",
        "11",
        "--connect",
        CART,
    ];
    let near: StreamReport = client.lab_pod(&args).unwrap();
    let far: StreamReport = listener.finish().unwrap();

    assert!(near.ok && far.ok, "{near:?}\n{far:?}");
    assert_eq!(count(&node, "pairs_found") - found, 1);
    let spliced = count(&node, "messages_spliced") - spliced;
    assert!(spliced > 100, "{spliced}");
}

#[test]
fn a_gigabyte_both_ways_arrives_without_a_wrong_byte() {
    checked_stream(
        "gigabyte",
        Options {
            steering: 3,
            ..Options::default()
        },
        false,
    );
}

#[test]
fn a_gigabyte_arrives_at_a_slow_reader_without_a_wrong_byte() {
    checked_stream(
        "slow",
        Options {
            steering: 3,
            ..Options::default()
        },
        true,
    );
}

#[test]
fn sockets_shows_the_pair_with_its_counts_and_forgets_it_when_it_closes() {
    let mut lab = Lab::new("sockets").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let endpoints = vec![(server.ipv4().into(), "n1")];
    let service = Service {
        endpoints,
        annotations: SPLICE,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let _agent = start_splicing(&node, AT_ONCE);
    let bench = client
        .start_lab_pod(&["bench-pingpong", CART, "--seconds", "5"])
        .unwrap();

    let spliced = || json(&node, &["sockets"])["sockets"][0].clone();
    wait_until("the pair is spliced", || {
        spliced()["to_server"]["spliced"] == true
    });
    let pair = spliced();
    assert_eq!(pair["service"], "shop/cart:http");
    assert_eq!(pair["server"], format!("{}:8080", server.ipv4()));
    assert!(pair["to_server"]["bytes"].as_u64() >= pair["to_server"]["messages"].as_u64());
    let top = json(&node, &["top", "--count", "1", "--interval", "200ms"]);
    let (service, total) = (&top["services"][0], &top["total"]);
    assert_eq!(service["service"], "shop/cart:http");
    assert_eq!(
        (&service["open"], &service["spliced"]),
        (&1.into(), &1.into())
    );
    assert!(total["spliced_bytes_per_second"].as_f64().unwrap() > 0.0);
    let report: PingPongBench = bench.finish().unwrap();
    assert!(report.count > 0);
    wait_until("the closed pair is forgotten", || spliced().is_null());
}

#[test]
fn top_counts_the_connects_of_a_service_and_those_that_stay_on_the_node() {
    let mut lab = Lab::new("top").unwrap();
    let (near, far) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
    let client = near.pod("client", None).unwrap();
    let pods = [
        near.pod("web", None).unwrap(),
        far.pod("web", None).unwrap(),
    ];
    let _web = pods
        .each_ref()
        .map(|pod| pod.serve("0.0.0.0:8080", "web").unwrap());
    let endpoint = |pod: &Pod, node| (pod.ipv4().into(), node);
    let service = Service {
        endpoints: vec![endpoint(&pods[0], "n1"), endpoint(&pods[1], "n2")],
        annotations: &[("shunt.dev/prefer", "none")],
        ..Service::default()
    };
    near.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let _agent = start(&near, &[]);
    let load = client
        .start_lab_pod(&["load", CART, "--threads", "1", "--until-stdin-closes"])
        .unwrap();
    // Until a random choice has been both.
    wait_until("top shows connects to both nodes", || {
        let top = json(&near, &["top", "--count", "1", "--interval", "200ms"]);
        let service = &top["services"][0];
        service["service"] == "shop/cart:http"
            && service["connects_per_second"].as_f64().unwrap() > 0.0
            && (0.01..0.99).contains(&service["local_share"].as_f64().unwrap())
    });
    drop(load);
    // A Service that is gone is no longer counted.
    near.remove_manifest("cart.yaml").unwrap();
    wait_until("the Service is forgotten", || {
        let top = json(&near, &["top", "--count", "1", "--interval", "100ms"]);
        top["services"] == serde_json::json!([])
    });
}

#[test]
fn a_service_without_the_annotation_stays_plain_tcp() {
    let mut lab = Lab::new("plain").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let endpoints = vec![(server.ipv4().into(), "n1")];
    node.write_manifest(
        "cart.yaml",
        &Service {
            endpoints,
            ..Service::default()
        }
        .yaml(),
    )
    .unwrap();
    let _agent = start_splicing(&node, AT_ONCE);
    let counters = ["pairs_registered", "pairs_found", "messages_spliced"];
    let before = counters.map(|counter| count(&node, counter));

    let _report: PingPongBench = client
        .lab_pod(&["bench-pingpong", CART, "--seconds", "0.2"])
        .unwrap();

    assert_eq!(count(&node, "connect_local"), 1);
    assert_eq!(counters.map(|counter| count(&node, counter)), before);
}

#[test]
fn loopback_addresses_of_two_pods_are_never_mixed_up() {
    // Both pods use 127.0.0.1:8080 for themselves; each must reach itself.
    let mut lab = Lab::new("loopback").unwrap();
    let node = lab.node("n1").unwrap();
    let pods = [node.pod("a", None).unwrap(), node.pod("b", None).unwrap()];
    let endpoints = vec![("127.0.0.1".parse().unwrap(), "n1")];
    let service = Service {
        endpoints,
        annotations: SPLICE,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let _agent = start_splicing(&node, AT_ONCE);
    let found = count(&node, "pairs_found");
    let args = |end: &'static str, to: &'static str, seed: &'static str| {
        ["stream", "--bytes", "3000000", "--seed", seed, end, to]
    };
    std::thread::scope(|scope| {
        for (pod, seed) in pods.iter().zip(["21", "22"]) {
            scope.spawn(move || {
                let mut listener = pod
                    .start_lab_pod(&args("--listen", "127.0.0.1:8080", seed))
                    .unwrap();
                let _ready: Listening = listener.report().unwrap();
                let near: StreamReport = pod.lab_pod(&args("--connect", CART, seed)).unwrap();
                let far: StreamReport = listener.finish().unwrap();
                assert!(near.ok && far.ok, "{near:?}\n{far:?}");
            });
        }
    });
    assert_eq!(count(&node, "pairs_found") - found, 2);
}

/// A Pod as the API has it.
fn write_pod(node: &Node, pod: &Pod, splice: &str) {
    let yaml = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: shop, name: {name}, uid: {uid}, \
         annotations: {{shunt.dev/splice: \"{splice}\"}}}}\nspec: {{nodeName: n1}}\n\
         status: {{podIPs: [{{ip: \"{v4}\"}}, {{ip: \"{v6}\"}}]}}\n",
        name = pod.name(),
        uid = pod.uid(),
        v4 = pod.ipv4(),
        v6 = pod.ipv6(),
    );
    node.write_manifest(&format!("pod-{}.yaml", pod.name()), &yaml)
        .unwrap();
}

fn ping(place: &impl lab::Place, to: &str) {
    let report: PingPongBench = place
        .lab_pod(&["bench-pingpong", to, "--seconds", "0.1"])
        .unwrap();
    assert!(report.count > 0);
}

/// What a pod says goes for all of its connections, to a Service or not, and a
/// no of either end outdoes all.
#[test]
fn pods_and_services_say_what_is_spliced() {
    let mut lab = Lab::new("wishes").unwrap();
    let node = lab.node("n1").unwrap();
    let [plain, on, off, web] =
        ["plain", "willing", "unwilling", "web"].map(|name| node.pod(name, None).unwrap());
    let _web = web.serve("0.0.0.0:8080", "web").unwrap();
    let _own = on.serve("127.0.0.1:8080", "own").unwrap();
    write_pod(&node, &on, "on");
    write_pod(&node, &off, "off");
    let service = |name, cluster_ip, annotations| Service {
        name,
        cluster_ip,
        endpoints: vec![(web.ipv4().into(), "n1")],
        annotations,
        ..Service::default()
    };
    for service in [
        service("cart", "10.96.0.10", &[]),
        service("willing", "10.96.0.11", SPLICE),
        service("unwilling", "10.96.0.12", &[("shunt.dev/splice", "off")]),
    ] {
        node.write_manifest(&format!("{}.yaml", service.name), &service.yaml())
            .unwrap();
    }
    let direct = format!("{}:8080", web.ipv4());
    let check = |client: &Pod, to: &str, expected: bool| {
        let before = count(&node, "pairs_registered");
        ping(client, to);
        let is_registered = count(&node, "pairs_registered") > before;
        assert_eq!(is_registered, expected, "{} to {to}", client.name());
    };

    let agent = start_splicing(&node, AT_ONCE);
    for (client, to, expected) in [
        (&plain, CART, false),
        (&plain, "10.96.0.11:80", true),
        (&plain, &*direct, false),
        (&on, CART, true),
        (&on, "10.96.0.11:80", true),
        (&on, "10.96.0.12:80", false),
        (&on, &*direct, true),
        (&on, "127.0.0.1:8080", true),
        (&off, CART, false),
        (&off, "10.96.0.11:80", false),
    ] {
        check(client, to, expected);
    }
    agent.stop().unwrap();

    let agent = start_splicing(&node, &["--splice", "auto", "--splice-after", "0ms"]);
    for (client, to, expected) in [
        (&plain, CART, true),
        (&plain, "10.96.0.12:80", false),
        (&plain, &*direct, true),
        (&off, CART, false),
    ] {
        check(client, to, expected);
    }
    agent.stop().unwrap();

    let _agent = start(&node, &["--splice", "off"]);
    check(&on, "10.96.0.11:80", false);
}

#[test]
fn connections_that_are_closed_leave_their_room_to_others() {
    let mut lab = Lab::new("room").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let service = Service {
        endpoints: vec![(server.ipv4().into(), "n1")],
        annotations: SPLICE,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let _agent = start_splicing(&node, &["--splice-after", "0ms", "--splice-max-pairs", "1"]);

    for turn in 1..=3 {
        let bench = client
            .start_lab_pod(&["bench-pingpong", CART, "--seconds", "300"])
            .unwrap();
        wait_until(&format!("connection {turn} is spliced"), || {
            json(&node, &["sockets"])["sockets"][0]["to_server"]["spliced"] == true
        });
        drop(bench);
        wait_until("it is closed", || {
            json(&node, &["sockets"])["sockets"][0].is_null()
        });
    }
}

#[test]
fn the_switch_takes_all_back_to_tcp_and_lasts() {
    let mut lab = Lab::new("switch").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let service = Service {
        endpoints: vec![(server.ipv4().into(), "n1")],
        annotations: SPLICE,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let agent = start_splicing(&node, AT_ONCE);
    let benches: Vec<_> = (0..5)
        .map(|_| {
            client
                .start_lab_pod(&["bench-pingpong", CART, "--seconds", "300"])
                .unwrap()
        })
        .collect();
    let spliced = || {
        let report = json(&node, &["sockets"]);
        let rows = report["sockets"].as_array().unwrap().iter();
        rows.filter(|row| row["to_server"]["spliced"] == true)
            .count()
    };
    wait_until("all are spliced", || spliced() == benches.len());

    let off = node.shunt(&["splice", "off"]).unwrap();
    assert!(off.status.success(), "{off:?}");
    assert_eq!(spliced(), 0);
    agent.stop().unwrap();
    let agent = start_splicing(&node, AT_ONCE);
    ping(&client, CART);
    assert_eq!(spliced(), 0);
    assert!(node.shunt(&["splice", "on"]).unwrap().status.success());
    wait_until("all are spliced again", || spliced() == benches.len());
    agent.stop().unwrap();
    let _agent = start(&node, &["--splice", "off"]);
    wait_until("an agent that splices nothing takes them back", || {
        json(&node, &["status"])["maps"]
            .as_array()
            .unwrap()
            .iter()
            .any(|map| map["name"] == "splice" && map["used"] == 0)
    });

    let report = json(&node, &["sockets"]);
    let open = report["sockets"].as_array().unwrap().len();
    assert_eq!(open, benches.len(), "all live on");
}
