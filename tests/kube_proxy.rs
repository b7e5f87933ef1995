//! The real kube-proxy.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, wait_until};
use lab::kubernetes::{ControlPlane, ProxyMode};
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
