//! The desired and the actual routing of one node, as plain data.
//!
//! [`plan`](crate::plan) makes [`Tables`], [`diff`](crate::diff) compares two
//! of them, [`apply`](crate::apply) writes the difference into the kernel's
//! maps and reads it back, and the CLI prints them. Everything is `Ord` and
//! kept in sorted containers, so that equal content means equal values.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shunt_common::{NodeId, Reason, Wish};

use crate::model::{Node, ObjectName};

/// Everything that shunt does on one node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Tables {
    /// The node for which this was planned.
    pub node: NodeIdentity,
    /// The clients that are left alone, by the id of their cgroup.
    pub left_alone: BTreeMap<u64, Client>,
    /// Addresses of pods of this node that have a wish of their own for the splice.
    pub wishes: BTreeMap<IpAddr, Wish>,
    /// One route for each Service port that shunt captures.
    pub routes: BTreeMap<Frontend, Route>,
}

/// The node that the agent runs on.
#[derive(Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct NodeIdentity {
    /// The Kubernetes node name.
    pub name: String,
    /// Label `topology.kubernetes.io/zone`; `None` when it is absent or empty.
    pub zone: Option<String>,
}

/// A pod of the node that opted out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Client {
    /// Its name.
    pub pod: ObjectName,
    /// Why.
    pub reason: Reason,
}

/// What a client connects to: a ClusterIP and a Service port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Frontend {
    /// The ClusterIP.
    pub address: IpAddr,
    /// The Service port, host byte order.
    pub port: u16,
    /// The transport protocol.
    pub protocol: Protocol,
}

/// A transport protocol of a Service port that shunt can capture.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The name of a Service port.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ServicePortName {
    /// The namespace of the Service.
    pub namespace: Arc<str>,
    /// The name of the Service.
    pub service: Arc<str>,
    /// The name of the port; empty for an unnamed port.
    pub port: Arc<str>,
}

/// What happens to a connect to one [`Frontend`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Route {
    /// The Service port.
    pub name: ServicePortName,
    /// What the connect gets.
    pub verdict: Verdict,
    /// The preference that shaped the tiers.
    pub prefer: Prefer,
    /// `sessionAffinity: ClientIP` with this timeout in seconds.
    pub affinity_seconds: Option<u32>,
    /// Splice same-node connections (annotation `shunt.dev/splice`).
    pub splice: Wish,
    /// So many TCP connections each endpoint on this node may hold, before others
    /// get them.
    pub max_local_connections: Option<NonZeroU32>,
    /// No endpoint is ready: those in the tiers still serve while they
    /// terminate.
    pub terminating: bool,
    /// In order of preference; a new connection takes the first usable tier.
    /// At most [`MAX_TIERS`](shunt_common::MAX_TIERS) of them.
    pub tiers: Vec<Tier>,
}

/// What a connect to a captured Service port gets.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// An endpoint of the first usable tier.
    Balance,
    /// ECONNREFUSED: nothing usable exists.
    Refuse,
    /// kube-proxy's answer: shunt does not know enough to decide, or has no room
    /// for the endpoints.
    Pass,
}

/// What decides a connect.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The tier "node" has endpoints.
    Node,
    /// The tier "zone" is the first that has.
    Zone,
    /// The tier "cluster" is the first that has.
    Cluster,
    /// The tier "hints" has endpoints.
    Hints,
    /// Refused: no endpoint is usable.
    Empty,
    /// Refused: `internalTrafficPolicy: Local`, and none on this node is usable.
    LocalEmpty,
    /// Left to kube-proxy.
    Passed,
}

impl Route {
    /// What decides a connect.
    pub fn stage(&self) -> Stage {
        let mut tiers = self.tiers.iter();
        match self.verdict {
            Verdict::Pass => Stage::Passed,
            Verdict::Refuse if self.local_only() => Stage::LocalEmpty,
            Verdict::Refuse => Stage::Empty,
            Verdict::Balance => match tiers.find(|tier| !tier.endpoints.is_empty()) {
                None => Stage::Empty,
                Some(tier) => tier.scope.into(),
            },
        }
    }

    /// `internalTrafficPolicy: Local`: of all tables, only its have the one tier
    /// "node".
    pub fn local_only(&self) -> bool {
        matches!(&self.tiers[..], [tier] if tier.scope == Scope::Node)
    }
}

impl From<Scope> for Stage {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Node => Self::Node,
            Scope::Zone => Self::Zone,
            Scope::Cluster => Self::Cluster,
            Scope::Hints => Self::Hints,
        }
    }
}

/// A set of endpoints of equal preference.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tier {
    /// What bounds the set.
    pub scope: Scope,
    /// Sorted, without duplicates.
    pub endpoints: Vec<Endpoint>,
}

/// One address that serves a Service port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Endpoint {
    /// Pod (or host) address and target port.
    pub address: SocketAddr,
    /// It is on this node.
    pub local: bool,
    /// Its node, if that is known and another one.
    pub node: NodeId,
}

/// What bounds the endpoints of a [`Tier`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// This node.
    Node,
    /// This node's zone.
    Zone,
    /// Nothing: the whole cluster.
    Cluster,
    /// The hints of the EndpointSlices, as kube-proxy reads them.
    Hints,
}

/// Which endpoints a new connection tries first.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    Deserialize,
    Eq,
    Ord,
    PartialEq,
    PartialOrd,
    Serialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Prefer {
    /// This node, then its zone, then all.
    #[default]
    Node,
    /// The node's zone, then all.
    Zone,
    /// kube-proxy's set; all ready ones only while every one of it is suspect.
    Hints,
    /// Exactly kube-proxy's set.
    None,
}

impl NodeIdentity {
    /// The node of this name, and what is known of it.
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        let zone = node.and_then(|node| node.zone.as_deref());
        Self {
            name: name.to_owned(),
            zone: zone.map(str::to_owned),
        }
    }
}

impl ServicePortName {
    /// Whether it is a port of this Service.
    pub fn is_of(&self, service: &ObjectName) -> bool {
        (&self.namespace, &self.service) == (&service.namespace, &service.name)
    }
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.service)?;
        if self.port.is_empty() {
            Ok(())
        } else {
            write!(f, ":{}", self.port)
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}
