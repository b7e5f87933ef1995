//! Spliced connections, with the real agent.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, json, start, wait_until};
use lab::report::{Listening, PingPongBench, StreamReport};
use lab::{Lab, Options, Place as _};

const CART: &str = "10.96.0.10:80";
const SPLICE: &[(&str, &str)] = &[("shunt.dev/splice", "on")];
/// Young connections too.
const AT_ONCE: &[&str] = &["--splice-after", "0ms"];
/// Each way, so that 1 GB passes in all.
const BYTES: &str = "500000000";

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
    let _agent = start(&node, AT_ONCE);
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
    let counters = &json(&node, &["status"])["counters"];
    assert_eq!(counters["pairs_found"], 1);
    assert!(
        counters["messages_spliced"].as_u64() > Some(100),
        "{counters}"
    );
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
    let _agent = start(&node, AT_ONCE);
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
    let report: PingPongBench = bench.finish().unwrap();
    assert!(report.count > 0);
    wait_until("the closed pair is forgotten", || spliced().is_null());
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
    let _agent = start(&node, AT_ONCE);

    let _report: PingPongBench = client
        .lab_pod(&["bench-pingpong", CART, "--seconds", "0.2"])
        .unwrap();

    let counters = &json(&node, &["status"])["counters"];
    assert_eq!(counters["connect_local"], 1);
    for counter in ["pairs_registered", "pairs_found", "messages_spliced"] {
        assert_eq!(counters[counter], 0, "{counter}");
    }
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
    let _agent = start(&node, AT_ONCE);
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
    assert_eq!(json(&node, &["status"])["counters"]["pairs_found"], 2);
}
