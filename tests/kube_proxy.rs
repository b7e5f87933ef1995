//! The real kube-proxy in the lab, without shunt: what the tests that compare
//! the two stand on.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::net::{IpAddr, SocketAddr};

use lab::fixture::{Service, control_plane, wait_until};
use lab::kubernetes::{ControlPlane, ProxyMode};
use lab::report::{LoadReport, SessionReport, UdpReport};
use lab::{Lab, Node, Place, Pod, Server};

const CART_V4: &str = "10.96.0.10:80";
const CART_V6: &str = "[fd00:96::10]:80";
const DNS: &str = "10.96.0.53:80";
const EMPTY: [&str; 2] = ["10.96.0.99:80", "[fd00:96::99]:80"];

/// A client on the first of two nodes, and a server on each.
struct Stage {
    n1: Node,
    _n2: Node,
    client: Pod,
    near: Pod,
    far: Pod,
    _running: [Server; 4],
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let (n1, n2) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
        let (near, far) = (n1.pod("near", None).unwrap(), n2.pod("far", None).unwrap());
        let tcp = |pod: &Pod| pod.serve("[::]:8080", pod.name()).unwrap();
        let udp = |pod: &Pod| pod.serve_udp("[::]:8080", pod.name()).unwrap();
        Self {
            client: n1.pod("client", None).unwrap(),
            _running: [tcp(&near), tcp(&far), udp(&near), udp(&far)],
            n1,
            _n2: n2,
            near,
            far,
        }
    }

    /// Writes a Service with these endpoints.
    fn write(&self, plane: &ControlPlane<'_>, name: &str, at: &str, pods: &[&Pod]) {
        let at: SocketAddr = at.parse().unwrap();
        let address = |pod: &&Pod| match at.ip() {
            IpAddr::V4(_) => (pod.ipv4().into(), "n1"),
            IpAddr::V6(_) => (pod.ipv6().into(), "n1"),
        };
        let service = Service {
            name,
            cluster_ip: &at.ip().to_string(),
            endpoints: pods.iter().map(address).collect(),
            protocol: if name == "dns" { "UDP" } else { "TCP" },
            ..Service::default()
        };
        plane.apply(&service.yaml()).unwrap();
    }

    /// Both pods answer, to a pod, to the node, and to one of themselves.
    fn assert_balanced(&self) {
        for cart in [CART_V4, CART_V6] {
            for counts in [often(&self.client, cart), often(&self.n1, cart)] {
                assert!(counts.errnos.is_empty(), "{cart}: {counts:?}");
                assert!(counts.ids.values().all(|it| *it > 5), "{cart}: {counts:?}");
                assert_eq!(counts.ids.len(), 2, "{cart}: {counts:?}");
            }
            let itself = often(&self.near, cart);
            assert!(itself.errnos.is_empty(), "{cart}: {itself:?}");
            assert_eq!(itself.ids.len(), 2, "{cart}: {itself:?}");
            let peer = self.client.connect(cart).unwrap().peer;
            assert_eq!(peer, Some(cart.parse().unwrap()));
        }
    }

    fn assert_datagrams_are_answered(&self) {
        let dns = Some(DNS.parse().unwrap());
        for (connected, peer) in [(None, None), (Some("--connected"), dns)] {
            let mut args = vec!["udp", DNS, "--count", "2"];
            args.extend(connected);
            let report: UdpReport = self.client.lab_pod(&args).unwrap();
            assert_eq!(report.id.as_deref(), Some("near"), "{report:?}");
            assert_eq!((report.from, report.peer), (dns, peer));
        }
    }
}

fn often(from: &impl Place, to: &str) -> LoadReport {
    from.lab_pod(&["connect", to, "--count", "60"]).unwrap()
}

fn services_work_through(mode: ProxyMode) {
    let mut lab = Lab::new("proxy").unwrap();
    let stage = Stage::new(&mut lab);
    let plane = control_plane(&stage.n1);
    let both = [&stage.near, &stage.far];
    stage.write(&plane, "cart", CART_V4, &both);
    stage.write(&plane, "cart6", CART_V6, &both);
    stage.write(&plane, "dns", DNS, &[&stage.near]);
    stage.write(&plane, "empty", EMPTY[0], &[]);
    stage.write(&plane, "empty6", EMPTY[1], &[]);
    let proxy = plane.kube_proxy(&stage.n1, mode).unwrap();
    stage.assert_balanced();
    stage.assert_datagrams_are_answered();
    for empty in EMPTY {
        let refused = stage.client.connect(empty).unwrap().errno;
        assert_eq!(refused.as_deref(), Some("ECONNREFUSED"), "{empty}");
    }

    stage.write(&plane, "empty", EMPTY[0], &[&stage.far]);
    wait_until("kube-proxy follows", || {
        stage.client.connect(EMPTY[0]).unwrap().id.as_deref() == Some("far")
    });
    // The rules are the kernel's.
    drop((proxy, plane));
    stage.assert_balanced();
}

#[test]
fn services_work_through_nftables() {
    services_work_through(ProxyMode::Nftables);
}

#[test]
fn services_work_through_iptables() {
    services_work_through(ProxyMode::Iptables);
}

/// What shunt's README compares with: the socket moves without an error, and
/// once nothing serves, it is refused (up to 1.36 it stayed where it was).
#[test]
fn a_connected_udp_socket_moves_when_its_endpoint_stops_serving() {
    let mut lab = Lab::new("proxyudp").unwrap();
    let n1 = lab.node("n1").unwrap();
    let [client, one, two] = ["client", "one", "two"].map(|name| n1.pod(name, None).unwrap());
    let _running = [&one, &two].map(|pod| pod.serve_udp("0.0.0.0:5353", pod.name()).unwrap());
    let plane = control_plane(&n1);
    let mut dns = Service {
        protocol: "UDP",
        target_port: 5353,
        endpoints: vec![(one.ipv4().into(), "n1")],
        ..Service::default()
    };
    plane.apply(&dns.yaml()).unwrap();
    let _proxy = plane.kube_proxy(&n1, ProxyMode::Nftables).unwrap();
    let mut socket = client
        .start_lab_pod(&["session", "connected-udp", CART_V4])
        .unwrap();
    let mut ask = || socket.command::<SessionReport>("ask").unwrap();
    let first = ask();
    assert_eq!(first.id.as_deref(), Some("one"), "{first:?}");

    dns.endpoints = vec![(two.ipv4().into(), "n1")];
    plane.apply(&dns.yaml()).unwrap();
    wait_until("the socket has moved", || {
        let report = ask();
        assert_eq!((report.errno, report.local), (None, first.local));
        report.id.as_deref() == Some("two")
    });

    dns.endpoints.clear();
    plane.apply(&dns.yaml()).unwrap();
    wait_until("the socket is refused", || {
        ask().errno.as_deref() == Some("ECONNREFUSED")
    });
}
