//! The real kube-proxy.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, wait_until};
use lab::kubernetes::{ControlPlane, ProxyMode};
use lab::report::SessionReport;
use lab::{Lab, Place as _};

const CART: &str = "10.96.0.10:80";

const OBJECTS: &str = "
apiVersion: v1
kind: Node
metadata: {name: n1}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
";

fn a_pod_connects_through(mode: ProxyMode) {
    let mut lab = Lab::new("proxy").unwrap();
    let n1 = lab.node("n1").unwrap();
    let (client, server) = (n1.pod("client", None).unwrap(), n1.pod("a", None).unwrap());
    let _running = server.serve("0.0.0.0:8080", "a").unwrap();
    let plane = ControlPlane::start(&n1).unwrap();
    plane.apply(OBJECTS).unwrap();
    let mut cart = Service::default();
    plane.apply(&cart.yaml()).unwrap();
    let proxy = plane.kube_proxy(&n1, mode).unwrap();
    let refused = client.connect(CART).unwrap().errno;
    assert_eq!(refused.as_deref(), Some("ECONNREFUSED"));

    cart.endpoints = vec![(server.ipv4().into(), "n1")];
    plane.apply(&cart.yaml()).unwrap();
    wait_until("kube-proxy translates", || {
        client.connect(CART).unwrap().id.as_deref() == Some("a")
    });
    // The rules are the kernel's.
    drop(proxy);
    assert_eq!(client.connect(CART).unwrap().id.as_deref(), Some("a"));
}

#[test]
fn a_pod_connects_through_nftables() {
    a_pod_connects_through(ProxyMode::Nftables);
}

#[test]
fn a_pod_connects_through_iptables() {
    a_pod_connects_through(ProxyMode::Iptables);
}

/// What shunt's README compares with: the socket moves without an error, and
/// once nothing serves, it is refused (up to 1.36 it stayed where it was).
#[test]
fn a_connected_udp_socket_moves_when_its_endpoint_stops_serving() {
    let mut lab = Lab::new("proxyudp").unwrap();
    let n1 = lab.node("n1").unwrap();
    let [client, one, two] = ["client", "one", "two"].map(|name| n1.pod(name, None).unwrap());
    let _running = [&one, &two].map(|pod| pod.serve_udp("0.0.0.0:5353", pod.name()).unwrap());
    let plane = ControlPlane::start(&n1).unwrap();
    plane.apply(OBJECTS).unwrap();
    let mut dns = Service {
        protocol: "UDP",
        target_port: 5353,
        endpoints: vec![(one.ipv4().into(), "n1")],
        ..Service::default()
    };
    plane.apply(&dns.yaml()).unwrap();
    let _proxy = plane.kube_proxy(&n1, ProxyMode::Nftables).unwrap();
    let mut socket = client
        .start_lab_pod(&["session", "connected-udp", CART])
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
