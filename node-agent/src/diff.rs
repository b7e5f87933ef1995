//! What has to be done to make one routing table of another; pure.

use crate::tables::{Frontend, NodeIdentity, Route, Tables};

/// One change of a node's routing.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Op {
    /// Give a Service port this route, new or in place of another.
    Publish(Frontend, Route),
    /// Leave a Service port to kube-proxy.
    Withdraw(Frontend),
    /// Note for which node the table is.
    SetNode(NodeIdentity),
}

/// The operations that make `desired` of `actual`. Withdrawals come first, since
/// they make room in the maps.
pub fn diff(actual: &Tables, desired: &Tables) -> Vec<Op> {
    let gone = actual.routes.keys().filter(|frontend| !desired.routes.contains_key(frontend));
    let changed =
        desired.routes.iter().filter(|(frontend, route)| actual.routes.get(frontend) != Some(route));
    let mut ops: Vec<Op> = gone.copied().map(Op::Withdraw).collect();
    ops.extend(changed.map(|(frontend, route)| Op::Publish(*frontend, route.clone())));
    if actual.node != desired.node {
        ops.push(Op::SetNode(desired.node.clone()));
    }
    ops
}
