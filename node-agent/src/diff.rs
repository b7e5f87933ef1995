//! What has to be done to make one routing table of another; pure.

use std::net::IpAddr;

use shunt_common::Wish;

use crate::tables::{Client, Frontend, NodeIdentity, Route, Tables};

/// One change of a node's routing.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Op {
    /// Give a Service port this route, new or in place of another.
    Publish(Frontend, Route),
    /// Leave a Service port to kube-proxy.
    Withdraw(Frontend),
    /// Leave the connects of a cgroup alone, or note another reason for it.
    LeaveAlone(u64, Client),
    /// Translate the connects of a cgroup again.
    Readmit(u64),
    /// Note whether the connections of a pod with this address are spliced.
    PutWish(IpAddr, Wish),
    /// Forget that.
    ForgetWish(IpAddr),
    /// Note for which node the table is.
    SetNode(NodeIdentity),
}

/// The operations that make `desired` of `actual`. First come the clients to be
/// left alone, and withdrawals before what they make room for.
pub fn diff(actual: &Tables, desired: &Tables) -> Vec<Op> {
    let gone = actual
        .routes
        .keys()
        .filter(|frontend| !desired.routes.contains_key(frontend));
    let changed = desired
        .routes
        .iter()
        .filter(|(frontend, route)| actual.routes.get(frontend) != Some(route));
    let readmitted = actual
        .left_alone
        .keys()
        .filter(|cgroup| !desired.left_alone.contains_key(cgroup));
    let left_alone = desired
        .left_alone
        .iter()
        .filter(|(cgroup, client)| actual.left_alone.get(cgroup) != Some(client));
    let mut ops: Vec<Op> = readmitted.copied().map(Op::Readmit).collect();
    ops.extend(left_alone.map(|(cgroup, client)| Op::LeaveAlone(*cgroup, client.clone())));
    ops.extend(gone.copied().map(Op::Withdraw));
    ops.extend(changed.map(|(frontend, route)| Op::Publish(*frontend, route.clone())));
    let forgotten = actual.wishes.keys();
    let forgotten = forgotten.filter(|address| !desired.wishes.contains_key(address));
    ops.extend(forgotten.copied().map(Op::ForgetWish));
    let wishes = desired
        .wishes
        .iter()
        .filter(|(address, wish)| actual.wishes.get(address) != Some(wish));
    ops.extend(wishes.map(|(address, wish)| Op::PutWish(*address, *wish)));
    if actual.node != desired.node {
        ops.push(Op::SetNode(desired.node.clone()));
    }
    ops
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shunt_common::NodeId;

    use super::*;
    use crate::tables::{Endpoint, Prefer, Protocol, Scope, ServicePortName, Tier, Verdict};

    /// A table with these Services: each has a name, which is its port too, and
    /// the last numbers of its endpoints.
    fn tables(node: &str, services: &[(u16, &[u8])]) -> Tables {
        let route = |(port, endpoints): &(u16, &[u8])| {
            let endpoint = |last: &u8| Endpoint {
                address: ([10, 0, 0, *last], 80).into(),
                local: true,
                node: NodeId::UNKNOWN,
            };
            let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
            let frontend = Frontend {
                address: [10, 96, 0, 1].into(),
                port: *port,
                protocol: Protocol::Tcp,
            };
            let route = Route {
                name: ServicePortName {
                    namespace: Arc::from("shop"),
                    service: Arc::from(port.to_string()),
                    port: Arc::from(""),
                },
                verdict: Verdict::Balance,
                prefer: Prefer::Node,
                affinity_seconds: None,
                splice: Wish::None,
                max_local_connections: None,
                terminating: false,
                tiers: vec![Tier {
                    scope: Scope::Node,
                    endpoints,
                }],
            };
            (frontend, route)
        };
        let node = NodeIdentity {
            name: node.to_owned(),
            zone: None,
        };
        Tables {
            node,
            routes: services.iter().map(route).collect(),
            ..Tables::default()
        }
    }

    /// The operations in short: `-80` withdraws, `+80` publishes.
    fn check(actual: &Tables, desired: &Tables, expected: &[&str]) {
        let short = |op: &Op| match op {
            Op::Withdraw(frontend) => format!("-{}", frontend.port),
            Op::Publish(frontend, route) => {
                assert_eq!(desired.routes.get(frontend), Some(route));
                format!("+{}", frontend.port)
            }
            Op::LeaveAlone(cgroup, _) => format!("+{cgroup}"),
            Op::Readmit(cgroup) => format!("-{cgroup}"),
            Op::PutWish(address, _) => format!("+{address}"),
            Op::ForgetWish(address) => format!("-{address}"),
            Op::SetNode(node) => format!("node {}", node.name),
        };
        let ops: Vec<_> = diff(actual, desired).iter().map(short).collect();
        assert_eq!(ops, expected);
    }

    #[test]
    fn only_what_differs_is_written_and_withdrawals_come_first() {
        let one = tables("n1", &[(80, &[5]), (81, &[6]), (82, &[7])]);
        let two = tables("n1", &[(79, &[4]), (81, &[6]), (82, &[7, 8])]);
        check(&one, &one, &[]);
        check(&one, &two, &["-80", "+79", "+82"]);
        check(&Tables::default(), &one, &["+80", "+81", "+82", "node n1"]);
        check(&one, &tables("n2", &[]), &["-80", "-81", "-82", "node n2"]);
    }
}
