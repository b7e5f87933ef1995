//! Kubernetes objects, reduced to what the plan reads.
//!
//! [`convert`] makes them of the API's types and rejects what can't be true.

pub mod convert;

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use shunt_common::Wish;

use crate::tables::{Prefer, Protocol};

/// Namespace and name of an object.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ObjectName {
    /// The namespace; empty for a Node and a Namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

/// Which object.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ObjectRef {
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: ObjectName,
}

/// The kinds of objects that the plan reads.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// core/v1.
    Service,
    /// discovery.k8s.io/v1.
    EndpointSlice,
    /// core/v1.
    Node,
    /// core/v1.
    Pod,
    /// core/v1.
    Namespace,
}

impl Kind {
    /// Whether objects of the kind are in no namespace.
    pub fn is_cluster_wide(self) -> bool {
        matches!(self, Self::Node | Self::Namespace)
    }
}

/// An object of any of these kinds.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    EndpointSlice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A Pod.
    Pod(Pod),
    /// A Namespace.
    Namespace(Namespace),
}

/// A Service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Service {
    /// Its name.
    pub name: ObjectName,
    /// Its ClusterIPs, one for each family; empty if shunt must not capture it.
    pub cluster_ips: Vec<IpAddr>,
    /// Why shunt must not capture it, if so.
    pub exempt: Option<Exempt>,
    /// Its TCP and UDP ports.
    pub ports: Vec<ServicePort>,
    /// Name and number of its SCTP ports, which are kube-proxy's.
    pub sctp_ports: Vec<(Arc<str>, u16)>,
    /// `internalTrafficPolicy: Local`.
    pub local_only: bool,
    /// `sessionAffinity: ClientIP`, with its timeout in seconds.
    pub affinity_seconds: Option<u32>,
    /// Annotation `shunt.dev/prefer`.
    pub prefer: Option<Prefer>,
    /// `trafficDistribution` is set, so that the EndpointSlices carry hints.
    pub has_distribution: bool,
    /// Annotation `shunt.dev/splice`.
    pub splice: Wish,
    /// Annotation `shunt.dev/max-local-connections`.
    pub max_local_connections: Option<NonZeroU32>,
}

/// Why a Service is not captured.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Exempt {
    /// `type: ExternalName`.
    ExternalName,
    /// Label `service.kubernetes.io/service-proxy-name`, with its value.
    OtherProxy(Arc<str>),
    /// Annotation `shunt.dev/mode: "off"`.
    ModeOff,
    /// `clusterIP: None`.
    Headless,
    /// It has no ClusterIP, or none yet.
    NoClusterIp,
}

/// A port of a Service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServicePort {
    /// Empty for an unnamed port.
    pub name: Arc<str>,
    /// The port that clients connect to.
    pub port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

/// An EndpointSlice with addresses, not names.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointSlice {
    /// Its name.
    pub name: ObjectName,
    /// Label `kubernetes.io/service-name`; a slice without it, or one of a
    /// headless Service, belongs to no Service.
    pub service: Option<Arc<str>>,
    /// The family of its addresses.
    pub is_ipv6: bool,
    /// Its ports; those without a number are left out.
    pub ports: Vec<SlicePort>,
    /// Its endpoints; those without an address are left out.
    pub endpoints: Vec<SliceEndpoint>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SlicePort {
    /// The name of the Service port that it is for.
    pub name: Arc<str>,
    /// Where the pods listen.
    pub port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

/// An endpoint of an EndpointSlice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SliceEndpoint {
    /// Its address; the API ignores all but the first.
    pub address: IpAddr,
    /// Ready for new connections; absent means true.
    pub ready: bool,
    /// Able to answer, also while it terminates; absent means true.
    pub serving: bool,
    /// On its way out; absent means false.
    pub terminating: bool,
    /// The node that it runs on.
    pub node: Option<Arc<str>>,
    /// The zone that it runs in.
    pub zone: Option<Arc<str>>,
    /// Name of the pod behind it, in the namespace of the slice. Only people read
    /// it, and the agent does not keep it.
    pub pod: Option<Arc<str>>,
    /// `hints.forZones`.
    pub hint_zones: Vec<Arc<str>>,
    /// `hints.forNodes`.
    pub hint_nodes: Vec<Arc<str>>,
}

/// A Node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Node {
    /// Its name.
    pub name: ObjectName,
    /// Label `topology.kubernetes.io/zone`; `None` if absent or empty.
    pub zone: Option<Arc<str>>,
}

/// A Pod, as a client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pod {
    /// Its name.
    pub name: ObjectName,
    /// What the kubelet names its cgroup after.
    pub cgroup_uid: Arc<str>,
    /// The node that it runs on, once it is scheduled.
    pub node: Option<Arc<str>>,
    /// Annotation `shunt.dev/mode`: `Some(false)` is `off`.
    pub mode: Option<bool>,
    /// Annotation `shunt.dev/splice`.
    pub splice: Wish,
    /// Its own addresses; none if it has those of its node.
    pub addresses: Vec<IpAddr>,
    /// A mesh looks at what it connects to.
    pub in_mesh: bool,
    /// Its containers have ended for good, so that it has no cgroup any more.
    pub finished: bool,
}

/// A Namespace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Namespace {
    /// Its name.
    pub name: ObjectName,
    /// Label `shunt.dev/mode: off`.
    pub off: bool,
}

impl Object {
    /// Which object it is.
    pub fn reference(&self) -> ObjectRef {
        let (kind, name) = match self {
            Self::Service(service) => (Kind::Service, &service.name),
            Self::EndpointSlice(slice) => (Kind::EndpointSlice, &slice.name),
            Self::Node(node) => (Kind::Node, &node.name),
            Self::Pod(pod) => (Kind::Pod, &pod.name),
            Self::Namespace(namespace) => (Kind::Namespace, &namespace.name),
        };
        ObjectRef {
            kind,
            name: name.clone(),
        }
    }
}

impl EndpointSlice {
    /// Drops what only people read: an agent holds all slices of the cluster.
    pub fn forget_pods(&mut self) {
        self.endpoints.iter_mut().for_each(|it| it.pod = None);
    }
}

impl fmt::Display for Exempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExternalName => f.write_str("it is an ExternalName, which is a DNS name only"),
            Self::OtherProxy(name) => write!(
                f,
                "its label {} gives it to another proxy, {name:?}",
                convert::PROXY_NAME
            ),
            Self::ModeOff => write!(f, "its annotation {} is \"off\"", convert::MODE),
            Self::Headless => f.write_str(
                "it is headless (clusterIP: None): DNS gives the pods' addresses, and there is \
                 nothing to translate",
            ),
            Self::NoClusterIp => f.write_str("it has no ClusterIP"),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            return f.write_str(&self.name);
        }
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.kind, self.name)
    }
}
