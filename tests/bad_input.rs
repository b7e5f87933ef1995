//! Whatever is wrong gets one clear message with what to do, and nothing else
//! is lost.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use lab::fixture::{PATIENCE, Service, cart, json, start, stderr};
use lab::{Lab, Place as _};

fn shunt() -> Command {
    Command::new(lab::target_binary("shunt", "SHUNT_BIN").unwrap())
}

/// Fails, and says each of these.
fn assert_fails(mut command: Command, expected: &[&str]) {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert!(!output.status.success(), "{command:?} succeeded");
    for part in expected {
        assert!(text.contains(part), "{command:?}: no {part:?} in: {text}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn without_root_each_command_that_needs_it_says_so() {
    // The binary may lie where nobody else can read.
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("shunt");
    std::fs::copy(lab::target_binary("shunt", "SHUNT_BIN").unwrap(), &copy).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    for args in [
        &["routes"][..],
        &["status"],
        &["sockets"],
        &["uninstall"],
        &["agent", "--node-name", "n", "--from", "."],
    ] {
        let mut command = Command::new(&copy);
        command.args(args).uid(65534).gid(65534).current_dir("/");
        assert_fails(command, &["needs root", "CAP_BPF"]);
    }
}

#[test]
fn a_missing_folder_bpffs_or_cgroup_is_named_with_what_to_do() {
    let mut lab = Lab::new("missing").unwrap();
    let node = lab.node("n1").unwrap();
    let pins = node.pins();
    let agent = |args: &[&str]| {
        let mut command = shunt();
        command.args(["agent", "--node-name", "n1"]).args(args);
        command
    };
    let manifests = node.manifests().to_str().unwrap();
    let (cgroup, pins) = (node.node_cgroup().to_str().unwrap(), pins.to_str().unwrap());

    let missing = [
        "--from",
        "/no/such/folder",
        "--cgroup",
        cgroup,
        "--pins",
        pins,
    ];
    assert_fails(agent(&missing), &["/no/such/folder"]);
    let no_bpffs = [
        "--from",
        manifests,
        "--cgroup",
        cgroup,
        "--pins",
        "/tmp/shunt-no-bpffs",
    ];
    assert_fails(
        agent(&no_bpffs),
        &["not on a bpf file system", "mount -t bpf bpf /tmp"],
    );
    let no_cgroup = ["--from", manifests, "--cgroup", "/tmp", "--pins", pins];
    assert_fails(
        agent(&no_cgroup),
        &[
            "/tmp is not a directory of a cgroup v2 hierarchy",
            "--cgroup",
        ],
    );
    let mut routes = shunt();
    routes.args(["routes", "--pins", "/tmp/shunt-no-bpffs"]);
    assert_fails(routes, &["no pins of shunt in /tmp/shunt-no-bpffs"]);
    let mut wrong = shunt();
    wrong.args(["routes", "--service", "cart"]);
    assert_fails(wrong, &["NAMESPACE/NAME"]);
}

#[test]
fn a_second_agent_on_the_same_pins_refuses_to_start() {
    let mut lab = Lab::new("second").unwrap();
    let node = lab.node("n1").unwrap();
    let _first = start(&node, &[]);
    let mut second = node.agent(&[]).unwrap();
    second
        .wait_for_log("another shunt agent is running", PATIENCE)
        .unwrap();
    assert_fails(
        {
            let mut command = shunt();
            command.arg("uninstall").arg("--pins").arg(node.pins());
            command
        },
        &["another shunt agent is running", "stop it first"],
    );
}

#[test]
fn one_bad_object_does_not_stop_the_others() {
    let mut lab = Lab::new("bad").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, server) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _web = server.serve("0.0.0.0:8080", "web").unwrap();
    let manifest = cart(&[server.ipv4().into()]);
    node.write_manifest("cart.yaml", &manifest).unwrap();
    node.write_manifest(
        "broken.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: [\n",
    )
    .unwrap();
    let bad = Service {
        name: "bad",
        cluster_ip: "10.96.0.66",
        endpoints: vec![("10.66.66.66".parse().unwrap(), "n1")],
        ..Service::default()
    };
    node.write_manifest(
        "bad.yaml",
        &bad.yaml().replace("10.66.66.66", "10.66.66.666"),
    )
    .unwrap();

    let mut agent = start(&node, &[]);

    for message in ["broken.yaml", "10.66.66.666"] {
        agent.wait_for_log(message, PATIENCE).unwrap();
    }
    assert_eq!(
        client.connect("10.96.0.10:80").unwrap().id.as_deref(),
        Some("web")
    );
    // Not refused: what the bad slice would have said is not known.
    let routes = json(&node, &["routes", "--service", "shop/bad"]);
    assert_eq!(routes["routes"][0]["verdict"], "pass", "{routes}");
}
