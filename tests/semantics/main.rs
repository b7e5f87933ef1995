//! What sockets do on a spliced connection, held against plain TCP: each behaviour
//! of `behaviours.py`, on connections between the same pods. Those that differ are
//! exactly those that the README lists.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use lab::fixture::{Service, json, start, wait_until};
use lab::{Lab, Place as _, Pod};

/// The Services that are spliced and not, with the same pod behind them.
const SPLICED: &str = "10.96.0.10";
const PLAIN: &str = "10.96.0.11";
const HEADING: &str = "### What a spliced connection does differently";
/// As many behaviours at least are compared.
const ENOUGH: usize = 40;

#[test]
fn spliced_connections_differ_from_tcp_where_the_readme_says_and_nowhere_else() {
    let mut lab = Lab::new("semantics").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("server", None).unwrap(),
    );
    let ends = [("spliced", SPLICED, "on"), ("plain", PLAIN, "off")];
    for (name, cluster_ip, wish) in ends {
        let service = Service {
            name,
            cluster_ip,
            annotations: &[("shunt.dev/splice", wish)],
            endpoints: vec![(server.ipv4().into(), "n1")],
            ..Service::default()
        };
        node.write_manifest(&format!("{name}.yaml"), &service.yaml())
            .unwrap();
    }
    let _agent = start(&node, &["--splice-after", "0ms"]);
    wait_until("the self-test has passed", || {
        json(&node, &["status"])["splicing"]["self_test"] == "passed"
    });

    let plain = outcomes(&client, &server, PLAIN, "plain");
    let spliced = outcomes(&client, &server, SPLICED, "spliced");

    assert!(plain.len() >= ENOUGH, "{}", plain.len());
    assert!(plain.keys().eq(spliced.keys()));
    let different: BTreeSet<_> = plain
        .keys()
        .filter(|it| plain[*it] != spliced[*it])
        .collect();
    print(&plain, &spliced);
    let listed = listed();
    let listed: BTreeSet<_> = listed.iter().collect();
    assert_eq!(different, listed, "found, and what the README lists");
}

/// Runs all behaviours, both ends in one process of the client's pod.
fn outcomes(client: &Pod, server: &Pod, service: &str, mode: &str) -> BTreeMap<String, String> {
    let holder = server.serve("127.0.0.1:9", "").unwrap();
    let namespace = format!("/proc/{}/ns/net", holder.process().id());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("semantics/behaviours.py");
    let mut python = client.command("/usr/bin/python3");
    python.arg(script).arg(format!("{service}:80"));
    python.args(["0.0.0.0:8080", &namespace, mode]);
    let output = python.output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{mode}: {complaint}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[expect(clippy::print_stdout, reason = "the table is what people run it for")]
fn print(plain: &BTreeMap<String, String>, spliced: &BTreeMap<String, String>) {
    let mut text = String::new();
    for (name, tcp) in plain {
        let other = &spliced[name];
        let _ = if tcp == other {
            writeln!(text, "same       {name}: {tcp}")
        } else {
            writeln!(text, "DIFFERENT  {name}: TCP {tcp}, spliced {other}")
        };
    }
    println!("{text}");
}

/// The first column of the README's table.
fn listed() -> BTreeSet<String> {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once(HEADING).unwrap();
    let rest = rest.split_once("\n#").map_or(rest, |(section, _)| section);
    // Without the head and the line below it.
    let rows = rest.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.split('|').nth(1).unwrap().trim().to_owned())
        .collect()
}
