//! `shunt uninstall` leaves the kernel as it was. A test binary of its own, so
//! that no other test makes programs meanwhile.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeSet;
use std::process::Command;

use lab::fixture::{Service, start_splicing, stderr, wait_until};
use lab::{Lab, Place as _};
use serde_json::Value;

/// Ids of all programs, links and maps.
fn objects() -> BTreeSet<(&'static str, u64)> {
    let mut ids = BTreeSet::new();
    for kind in ["prog", "link", "map"] {
        let output = Command::new("bpftool")
            .args(["-j", kind, "list"])
            .output()
            .unwrap();
        let list: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        for object in list.as_array().into_iter().flatten() {
            ids.insert((kind, object["id"].as_u64().unwrap()));
        }
    }
    ids
}

#[test]
fn uninstall_leaves_programs_links_and_maps_as_before() {
    let mut lab = Lab::new("uninstall").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let endpoints = vec![(server.ipv4().into(), "n1")];
    let annotations = &[("shunt.dev/splice", "on")];
    let service = Service {
        endpoints,
        annotations,
        ..Service::default()
    };
    node.write_manifest("cart.yaml", &service.yaml()).unwrap();
    let foreign = node.bpffs().join("foreign");
    let create = [
        "map",
        "create",
        foreign.to_str().unwrap(),
        "type",
        "array",
        "key",
        "4",
        "value",
        "4",
        "entries",
        "1",
        "name",
        "foreign",
    ];
    assert!(
        Command::new("bpftool")
            .args(create)
            .status()
            .unwrap()
            .success()
    );
    let before = objects();

    let agent = start_splicing(&node, &[]);
    assert!(
        objects().len() >= before.len() + 6 + 5 + 11,
        "programs, links and maps are there"
    );
    // While a spliced connection is open, unread bytes could be lost.
    let bench = client
        .start_lab_pod(&["bench-pingpong", "10.96.0.10:80", "--seconds", "600"])
        .unwrap();
    wait_until("the pair is spliced", || {
        lab::fixture::json(&node, &["sockets"])["sockets"][0]["to_server"]["spliced"] == true
    });
    agent.stop().unwrap();
    let refused = node.shunt(&["uninstall"]).unwrap();
    assert!(
        !refused.status.success() && stderr(&refused).contains("--force"),
        "{}",
        stderr(&refused)
    );
    drop(bench);
    wait_until("the sockets are closed", || {
        node.shunt(&["uninstall"]).unwrap().status.success()
    });

    // The kernel frees programs and maps a moment after the last reference: some of
    // those of before may have been on their way out.
    wait_until("all are gone", || objects().is_subset(&before));
    assert!(foreign.exists(), "what is not shunt's stays");
    assert!(!node.pins().exists());
    let again = node.shunt(&["uninstall"]).unwrap();
    assert!(
        again.status.success(),
        "nothing to do is no error: {}",
        stderr(&again)
    );
}
