//! The lab itself: what all other tests stand on.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests are not recognised as tests"
)]

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use std::{fs, thread};

use lab::report::{ConnectReport, LoadReport, PingPongBench, StreamReport};
use lab::{Lab, Options, Place, Pod, Process};

#[test]
fn pods_of_two_nodes_reach_each_other() {
    let mut lab = Lab::new("reach").unwrap();
    let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
    let client = n1.pod("client", Some("10.244.1.5")).unwrap();
    let near = n1.pod("near", None).unwrap();
    let far = n2.pod("far", Some("10.244.2.112")).unwrap();
    let _servers = [
        near.serve("[::]:80", "near").unwrap(),
        far.serve("[::]:80", "far").unwrap(),
        n2.serve("[::]:80", "n2").unwrap(),
    ];
    let targets: [(IpAddr, &str); 6] = [
        (near.ipv4().into(), "near"),
        (near.ipv6().into(), "near"),
        (far.ipv4().into(), "far"),
        (far.ipv6().into(), "far"),
        (n2.ipv4().into(), "n2"),
        (n2.ipv6().into(), "n2"),
    ];
    for (address, id) in targets {
        let to = SocketAddr::new(address, 80);
        let from_pod = client.connect(to).unwrap();
        assert_eq!(
            from_pod.id.as_deref(),
            Some(id),
            "{to} from a pod: {from_pod:?}"
        );
        assert_eq!(from_pod.peer, Some(to));
        assert_eq!(from_pod.local.unwrap().ip(), address_of(&client, to));
        let from_node = n1.connect(to).unwrap();
        assert_eq!(
            from_node.id.as_deref(),
            Some(id),
            "{to} from the node: {from_node:?}"
        );
        let expected = if to.is_ipv4() {
            IpAddr::from(n1.ipv4())
        } else {
            n1.ipv6().into()
        };
        assert_eq!(from_node.local.unwrap().ip(), expected);
    }
}

fn address_of(pod: &Pod, to: SocketAddr) -> IpAddr {
    if to.is_ipv4() {
        pod.ipv4().into()
    } else {
        pod.ipv6().into()
    }
}

#[test]
fn refused_connects_name_their_errno() {
    let mut lab = Lab::new("refused").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    let report = client
        .connect(SocketAddr::new(node.ipv4().into(), 81))
        .unwrap();
    assert_eq!(report.errno.as_deref(), Some("ECONNREFUSED"));
}

#[test]
fn processes_are_in_cgroup_and_namespace_of_their_pod() {
    let mut lab = Lab::new("inside").unwrap();
    let node = lab.node("n1").unwrap();
    let pod = node.pod("web", None).unwrap();
    // The pod's as the kubelet makes it, with one for its container.
    let of_pod = format!("n1/kubepods/burstable/pod{}/web", pod.uid());
    for (place, path) in [
        (pod.command("cat"), of_pod.as_str()),
        (node.command("cat"), "n1/host"),
    ] {
        let mut cat = place;
        let output = cat.arg("/proc/self/cgroup").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.lines()
                .any(|l| l == format!("0::/{}/{path}", lab.name())),
            "{text}"
        );
    }
    let links = pod
        .command("cat")
        .arg("/proc/self/net/dev")
        .output()
        .unwrap();
    assert!(String::from_utf8(links.stdout).unwrap().contains("eth0"));
    assert!(pod.cgroup().starts_with(node.node_cgroup()));
    // A directory in bpffs shows that it is one: files cannot be made there.
    fs::create_dir(node.pins()).unwrap();
    assert!(fs::write(node.pins().join("file"), "").is_err());
}

#[test]
fn a_cut_node_is_silent_until_it_is_restored() {
    let mut lab = Lab::new("cut").unwrap();
    let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
    let (client, web) = (
        n1.pod("client", None).unwrap(),
        n2.pod("web", None).unwrap(),
    );
    let _server = web.serve("[::]:80", "web").unwrap();
    let to = SocketAddr::new(web.ipv4().into(), 80).to_string();
    n2.cut().unwrap();
    let cut: ConnectReport = client
        .lab_pod(&["connect", &to, "--timeout-ms", "300"])
        .unwrap();
    assert_eq!(cut.errno.as_deref(), Some("timeout"));
    n2.restore().unwrap();
    assert_eq!(client.connect(&to).unwrap().id.as_deref(), Some("web"));
}

#[test]
fn a_removed_pod_frees_its_name_and_address() {
    let mut lab = Lab::new("again").unwrap();
    let node = lab.node("n1").unwrap();
    let client = node.pod("client", None).unwrap();
    for _ in 0..2 {
        let pod = node.pod("web", Some("10.244.1.9")).unwrap();
        let _server = pod.serve("0.0.0.0:80", "web").unwrap();
        assert_eq!(
            client.connect("10.244.1.9:80").unwrap().id.as_deref(),
            Some("web")
        );
        pod.remove().unwrap();
    }
    assert!(node.pod("other", Some(&client.ipv4().to_string())).is_err());
}

#[test]
fn load_counts_every_connection() {
    let mut lab = Lab::new("load").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, web) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _server = web.serve("0.0.0.0:80", "web").unwrap();
    let to = SocketAddr::new(web.ipv4().into(), 80).to_string();
    let report: LoadReport = client
        .lab_pod(&["load", &to, "--threads", "8", "--count", "3000"])
        .unwrap();
    assert_eq!(report.ids.get("web"), Some(&3000), "{report:?}");

    let endless = client
        .start_lab_pod(&["load", &to, "--until-stdin-closes"])
        .unwrap();
    thread::sleep(Duration::from_millis(50));
    let report: LoadReport = endless.finish().unwrap();
    assert!(
        report.errnos.is_empty() && report.ids["web"] > 0,
        "{report:?}"
    );
}

#[test]
fn ping_pong_survives_messages_larger_than_buffers() {
    let mut lab = Lab::new("pingpong").unwrap();
    let node = lab.node("n1").unwrap();
    let (client, web) = (
        node.pod("client", None).unwrap(),
        node.pod("web", None).unwrap(),
    );
    let _server = web.serve("0.0.0.0:80", "web").unwrap();
    let to = SocketAddr::new(web.ipv4().into(), 80).to_string();
    for size in ["1", "20000000"] {
        let args = ["bench-pingpong", &to, "--size", size, "--seconds", "0.1"];
        let report: PingPongBench = client.lab_pod(&args).unwrap();
        assert!(
            report.count > 0 && report.p50_ns <= report.p99_ns,
            "{report:?}"
        );
    }
}

#[test]
fn streams_are_right_both_ways() {
    let mut lab = Lab::with(
        "stream",
        Options {
            steering: 0b11,
            ..Options::default()
        },
    )
    .unwrap();
    let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
    let (a, b) = (n1.pod("a", None).unwrap(), n2.pod("b", None).unwrap());
    for (bytes, slow) in [
        ("0", false),
        ("1", false),
        ("30000000", false),
        ("5000000", true),
    ] {
        let mut options = vec!["--bytes", bytes, "--seed", "5"];
        options.extend(slow.then_some("--slow-reader"));
        let (here, there) = stream(&a, &b, &options, &options);
        assert!(
            here.ok && there.ok,
            "{bytes} slow={slow}: {here:?} {there:?}"
        );
        assert_eq!(here.received.to_string(), bytes);
    }
}

#[test]
fn the_stream_checker_sees_a_wrong_stream() {
    let mut lab = Lab::new("wrong").unwrap();
    let node = lab.node("n1").unwrap();
    let (a, b) = (node.pod("a", None).unwrap(), node.pod("b", None).unwrap());
    let (here, there) = stream(
        &a,
        &b,
        &["--bytes", "1000", "--seed", "1"],
        &["--bytes", "1000", "--seed", "2"],
    );
    assert!(
        !here.ok && !there.ok && here.wrong > 900,
        "{here:?} {there:?}"
    );
    assert_eq!(here.first_wrong.unwrap().belongs_at, None);
    let (here, there) = stream(&a, &b, &["--bytes", "1000"], &["--bytes", "1001"]);
    assert!(!here.ok && !there.ok, "{here:?} {there:?}");
    assert_eq!((here.wrong, there.wrong, there.received), (1, 0, 1000));
}

#[test]
fn steering_reaches_the_queues_of_pods() {
    let mut lab = Lab::with(
        "steering",
        Options {
            steering: 0b11,
            ..Options::default()
        },
    )
    .unwrap();
    let pod = lab.node("n1").unwrap().pod("web", None).unwrap();
    // The usual /sys shows the host's devices: a fresh one shows the pod's.
    let script = "mount -t sysfs sys /mnt && cat /mnt/class/net/eth0/queues/rx-0/rps_cpus";
    let output = pod
        .command("unshare")
        .args(["--mount", "sh", "-c", script])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), "3");
}

/// Runs both ends of a checked stream.
fn stream(a: &Pod, b: &Pod, a_args: &[&str], b_args: &[&str]) -> (StreamReport, StreamReport) {
    let mut listen = vec!["stream", "--listen", "0.0.0.0:90"];
    listen.extend(b_args);
    let mut listener: Process = b.start_lab_pod(&listen).unwrap();
    let _: lab::report::Listening = listener.report().unwrap();
    let to = SocketAddr::new(b.ipv4().into(), 90).to_string();
    let mut connect = vec!["stream", "--connect", &to];
    connect.extend(a_args);
    let report = a.lab_pod(&connect).unwrap();
    (report, listener.finish().unwrap())
}

#[test]
fn two_labs_with_one_label_live_side_by_side() {
    let mut labs = [Lab::new("twin").unwrap(), Lab::new("twin").unwrap()];
    assert_ne!(labs[0].name(), labs[1].name());
    for lab in &mut labs {
        let node = lab.node("n1").unwrap();
        let (client, web) = (
            node.pod("client", None).unwrap(),
            node.pod("web", None).unwrap(),
        );
        let server = web.serve("0.0.0.0:80", lab.name()).unwrap();
        let to = SocketAddr::new(web.ipv4().into(), server.address().port());
        assert_eq!(client.connect(to).unwrap().id.as_deref(), Some(lab.name()));
    }
}

#[test]
fn setup_errors_show_the_command() {
    let mut lab = Lab::new("errors").unwrap();
    let node = lab.node("n1").unwrap();
    let error = node.pod("bad", Some("10.244.9.9")).err().unwrap();
    assert!(format!("{error:#}").contains("10.244.1.0/24"), "{error:#}");
    assert!(Lab::new("no-dashes").is_err());
}
