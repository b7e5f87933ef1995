//! API objects to model objects.
//!
//! An object that can't be right rejects itself, with a message that says which
//! field and what it should be. An annotation of ours with a value that is not
//! known is no reason to lose the Service: it counts as absent, with a warning.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use shunt_common::Wish;
use tracing::warn;

use super::{
    EndpointSlice, Exempt, Kind, Namespace, Node, ObjectName, ObjectRef, Pod, Service, ServicePort,
    SliceEndpoint, SlicePort,
};
use crate::tables::{Prefer, Protocol};

/// Annotation of a Service: which endpoints to prefer.
pub const PREFER: &str = "shunt.dev/prefer";
/// Annotation of a Service or Pod: whether its same-node connections are spliced.
pub const SPLICE: &str = "shunt.dev/splice";
/// Annotation of a Service: so many connections each endpoint of this node may
/// hold, before others get them.
pub const MAX_LOCAL_CONNECTIONS: &str = "shunt.dev/max-local-connections";
/// Annotation of a Service: `off` leaves it to kube-proxy. Annotation of a Pod,
/// label of a Namespace: `off` leaves what it connects to alone.
pub const MODE: &str = "shunt.dev/mode";

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const ZONE: &str = "topology.kubernetes.io/zone";
/// Any value of this label gives a Service to another proxy
/// (`pkg/proxy/apis/well_known_labels.go` in kubernetes/kubernetes).
pub const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// On an EndpointSlice of a headless Service.
pub const HEADLESS: &str = "service.kubernetes.io/headless";
/// Containers that a mesh puts beside an application, and that need to see which
/// ClusterIP it calls: Istio's (`pkg/config/constants/constants.go` of
/// istio/istio, `IstioProxyName`) and Linkerd's (`pkg/k8s/labels.go` of
/// linkerd/linkerd2, `ProxyContainerName`).
const SIDECARS: [&str; 2] = ["istio-proxy", "linkerd-proxy"];
/// Annotation of a Pod whose connects Istio's ambient mode sends to the node's
/// ztunnel, which too needs the ClusterIP (istio.io, reference of annotations).
const AMBIENT: (&str, &str) = ("ambient.istio.io/redirection", "enabled");
/// Annotation of the mirror of a static Pod: its uid for the kubelet, which is
/// not the mirror's (`pkg/kubelet/types/pod_update.go` in kubernetes/kubernetes,
/// `ConfigHashAnnotationKey`).
const STATIC_UID: &str = "kubernetes.io/config.hash";
/// `DefaultClientIPServiceAffinitySeconds` in `pkg/apis/core/v1/defaults.go`.
const AFFINITY_SECONDS: i32 = 10_800;

/// An object that was not taken.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{object} is left out: {reason}")]
pub struct Rejected {
    /// Which one.
    pub object: ObjectRef,
    /// The Service that it is about, if it is an EndpointSlice.
    pub service: Option<ObjectName>,
    /// What is wrong with it.
    pub reason: Reason,
}

/// Why an object is not taken.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Reason {
    /// A field that is not an IP address.
    #[error("{field} {value:?} is not an IP address")]
    Address {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// An address of the other family.
    #[error("the address {value} does not fit addressType {address_type}")]
    Family {
        /// The address.
        value: IpAddr,
        /// The type of the slice.
        address_type: &'static str,
    },
    /// A port that is none.
    #[error("the port {value} is not between 1 and 65535")]
    Port {
        /// Its value.
        value: i32,
    },
    /// A type of addresses that Kubernetes does not have.
    #[error("addressType {value:?} is none of IPv4, IPv6, FQDN")]
    AddressType {
        /// Its value.
        value: String,
    },
    /// Anything that the API's own types do not accept.
    #[error("{0}")]
    Malformed(String),
}

/// A Service.
pub fn service(service: core::Service) -> Result<Service, Rejected> {
    let name = object_name(&service.metadata);
    let rejected = |reason| reject(Kind::Service, &name, None, reason);
    let annotations = service.metadata.annotations.unwrap_or_default();
    let labels = service.metadata.labels.unwrap_or_default();
    let spec = service.spec.unwrap_or_default();
    let mut exempt = exempt(&spec, &labels, &annotations);
    let cluster_ips = match exempt {
        None => cluster_ips(&spec).map_err(rejected)?,
        Some(_) => Vec::new(),
    };
    if exempt.is_none() && cluster_ips.is_empty() {
        exempt = Some(Exempt::NoClusterIp);
    }
    let all_ports = spec.ports.as_deref().unwrap_or_default();
    let ports = all_ports
        .iter()
        .filter_map(|it| service_port(it).transpose());
    Ok(Service {
        cluster_ips,
        exempt,
        sctp_ports: all_ports.iter().filter_map(sctp_port).collect(),
        ports: ports.collect::<Result<_, _>>().map_err(rejected)?,
        local_only: spec.internal_traffic_policy.as_deref() == Some("Local"),
        affinity_seconds: affinity_seconds(&spec),
        prefer: prefer(&annotations, &name),
        has_distribution: spec
            .traffic_distribution
            .is_some_and(|value| !value.is_empty()),
        splice: wish(&annotations, &name),
        max_local_connections: max_local_connections(&annotations, &name),
        name,
    })
}

/// An EndpointSlice; `None` if its addresses are names, which is nothing that
/// kube-proxy reads.
pub fn endpoint_slice(slice: discovery::EndpointSlice) -> Result<Option<EndpointSlice>, Rejected> {
    let name = object_name(&slice.metadata);
    let labels = slice.metadata.labels.as_ref();
    // The label of another proxy is no reason: it is copied from the Service,
    // and stays a while longer than there.
    let is_headless = labels.is_some_and(|labels| labels.contains_key(HEADLESS));
    let service_name = owner(&slice.metadata).filter(|_| !is_headless);
    let rejected = |reason| reject(Kind::EndpointSlice, &name, service_name.clone(), reason);
    let is_ipv6 = match slice.address_type.as_str() {
        "IPv4" => false,
        "IPv6" => true,
        "FQDN" => return Ok(None),
        other => {
            return Err(rejected(Reason::AddressType {
                value: other.to_owned(),
            }));
        }
    };
    let ports = slice.ports.unwrap_or_default();
    let ports = ports.iter().filter_map(|it| slice_port(it).transpose());
    let endpoints = slice.endpoints.into_iter();
    let endpoints = endpoints.filter_map(|it| slice_endpoint(it, is_ipv6).transpose());
    Ok(Some(EndpointSlice {
        service: service_name
            .as_ref()
            .map(|service| Arc::clone(&service.name)),
        is_ipv6,
        ports: ports.collect::<Result<_, _>>().map_err(rejected)?,
        endpoints: endpoints.collect::<Result<_, _>>().map_err(rejected)?,
        name,
    }))
}

/// The Service that an EndpointSlice says it belongs to.
pub fn owner(metadata: &ObjectMeta) -> Option<ObjectName> {
    let name = metadata
        .labels
        .as_ref()?
        .get(SERVICE_NAME)
        .filter(|name| !name.is_empty())?;
    let namespace = object_name(metadata).namespace;
    Some(ObjectName {
        namespace,
        name: Arc::from(name.as_str()),
    })
}

/// A Node.
pub fn node(metadata: &ObjectMeta) -> Node {
    let zone = metadata.labels.as_ref().and_then(|labels| labels.get(ZONE));
    Node {
        name: cluster_wide_name(metadata),
        zone: zone
            .filter(|zone| !zone.is_empty())
            .map(|zone| Arc::from(zone.as_str())),
    }
}

/// A Pod.
pub fn pod(pod: &core::Pod) -> Pod {
    let name = object_name(&pod.metadata);
    let none = BTreeMap::new();
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
    let uid = annotations.get(STATIC_UID).or(pod.metadata.uid.as_ref());
    let spec = pod.spec.as_ref();
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    Pod {
        cgroup_uid: Arc::from(uid.map_or("", String::as_str)),
        node: spec.and_then(|it| it.node_name.as_deref().map(Arc::from)),
        mode: switch(annotations, MODE, &name),
        splice: wish(annotations, &name),
        addresses: own_addresses(pod),
        in_mesh: annotations.get(AMBIENT.0).map(String::as_str) == Some(AMBIENT.1)
            || spec.is_some_and(has_sidecar),
        finished: matches!(phase, Some("Succeeded" | "Failed")),
        name,
    }
}

/// Those that no other pod has. One that can't be read is left out: it is about
/// speed only.
fn own_addresses(pod: &core::Pod) -> Vec<IpAddr> {
    let has_host_network = pod.spec.as_ref().and_then(|spec| spec.host_network);
    if has_host_network == Some(true) {
        return Vec::new();
    }
    let ips = pod.status.iter().flat_map(|status| &status.pod_ips);
    ips.flatten().filter_map(|it| it.ip.parse().ok()).collect()
}

/// What the annotation [`SPLICE`] says.
fn wish(annotations: &BTreeMap<String, String>, name: &ObjectName) -> Wish {
    match switch(annotations, SPLICE, name) {
        Some(true) => Wish::On,
        Some(false) => Wish::Off,
        None => Wish::None,
    }
}

/// As a container, or as one of those init containers that go on running.
fn has_sidecar(spec: &core::PodSpec) -> bool {
    let running = |it: &&core::Container| it.restart_policy.as_deref() == Some("Always");
    let init = spec.init_containers.iter().flatten().filter(running);
    let mut all = spec.containers.iter().chain(init);
    all.any(|container| SIDECARS.contains(&container.name.as_str()))
}

/// A Namespace.
pub fn namespace(metadata: &ObjectMeta) -> Namespace {
    let none = BTreeMap::new();
    let name = cluster_wide_name(metadata);
    let labels = metadata.labels.as_ref().unwrap_or(&none);
    Namespace {
        off: switch(labels, MODE, &name) == Some(false),
        name,
    }
}

/// The name of an object of this kind.
pub fn name_of(kind: Kind, metadata: &ObjectMeta) -> ObjectName {
    if kind.is_cluster_wide() {
        cluster_wide_name(metadata)
    } else {
        object_name(metadata)
    }
}

fn cluster_wide_name(metadata: &ObjectMeta) -> ObjectName {
    ObjectName {
        namespace: Arc::from(""),
        name: object_name(metadata).name,
    }
}

/// Namespace and name; an absent namespace is `default`, as for kubectl.
pub fn object_name(metadata: &ObjectMeta) -> ObjectName {
    ObjectName {
        namespace: Arc::from(metadata.namespace.as_deref().unwrap_or("default")),
        name: Arc::from(metadata.name.as_deref().unwrap_or_default()),
    }
}

fn reject(kind: Kind, name: &ObjectName, service: Option<ObjectName>, reason: Reason) -> Rejected {
    Rejected {
        object: ObjectRef {
            kind,
            name: name.clone(),
        },
        service,
        reason,
    }
}

/// kube-proxy leaves out headless Services, ExternalNames and those with the
/// label for another proxy (`pkg/proxy/util/utils.go`, `ShouldSkipService`).
fn exempt(
    spec: &core::ServiceSpec,
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
) -> Option<Exempt> {
    if spec.type_.as_deref() == Some("ExternalName") {
        return Some(Exempt::ExternalName);
    }
    if let Some(proxy) = labels.get(PROXY_NAME) {
        return Some(Exempt::OtherProxy(Arc::from(proxy.as_str())));
    }
    if annotations.get(MODE).map(String::as_str) == Some("off") {
        return Some(Exempt::ModeOff);
    }
    (spec.cluster_ip.as_deref() == Some("None")).then_some(Exempt::Headless)
}

fn cluster_ips(spec: &core::ServiceSpec) -> Result<Vec<IpAddr>, Reason> {
    let many = spec.cluster_ips.iter().flatten();
    let texts: Vec<&String> = match many.clone().next() {
        Some(_) => many.collect(),
        None => spec.cluster_ip.iter().collect(),
    };
    let has_address = |text: &&&String| !text.is_empty() && text.as_str() != "None";
    texts
        .iter()
        .filter(has_address)
        .map(|text| address("clusterIP", text))
        .collect()
}

fn service_port(port: &core::ServicePort) -> Result<Option<ServicePort>, Reason> {
    let Some(protocol) = protocol(port.protocol.as_deref()) else {
        return Ok(None);
    };
    let name = Arc::from(port.name.as_deref().unwrap_or_default());
    Ok(Some(ServicePort {
        name,
        port: port_number(port.port)?,
        protocol,
    }))
}

fn sctp_port(port: &core::ServicePort) -> Option<(Arc<str>, u16)> {
    let name = Arc::from(port.name.as_deref().unwrap_or_default());
    let is_sctp = port.protocol.as_deref() == Some("SCTP");
    Some((name, u16::try_from(port.port).ok()?)).filter(|_| is_sctp)
}

fn slice_port(port: &discovery::EndpointPort) -> Result<Option<SlicePort>, Reason> {
    let Some(protocol) = protocol(port.protocol.as_deref()) else {
        return Ok(None);
    };
    let Some(number) = port.port else {
        return Ok(None);
    };
    let name = Arc::from(port.name.as_deref().unwrap_or_default());
    Ok(Some(SlicePort {
        name,
        port: port_number(number)?,
        protocol,
    }))
}

fn slice_endpoint(
    endpoint: discovery::Endpoint,
    is_ipv6: bool,
) -> Result<Option<SliceEndpoint>, Reason> {
    let Some(text) = endpoint.addresses.first() else {
        return Ok(None);
    };
    let value = address("the address", text)?;
    if value.is_ipv6() != is_ipv6 {
        let address_type = if is_ipv6 { "IPv6" } else { "IPv4" };
        return Err(Reason::Family {
            value,
            address_type,
        });
    }
    let conditions = endpoint.conditions.unwrap_or_default();
    let hints = endpoint.hints.unwrap_or_default();
    let arc = |text: String| Arc::from(text);
    Ok(Some(SliceEndpoint {
        address: value,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        node: endpoint.node_name.map(arc),
        zone: endpoint.zone.map(arc),
        pod: endpoint
            .target_ref
            .filter(|target| target.kind.as_deref() == Some("Pod"))
            .and_then(|target| target.name)
            .map(arc),
        hint_zones: hints
            .for_zones
            .into_iter()
            .flatten()
            .map(|zone| arc(zone.name))
            .collect(),
        hint_nodes: hints
            .for_nodes
            .into_iter()
            .flatten()
            .map(|node| arc(node.name))
            .collect(),
    }))
}

/// SCTP is kube-proxy's.
fn protocol(name: Option<&str>) -> Option<Protocol> {
    match name {
        None | Some("" | "TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some(_) => None,
    }
}

fn port_number(value: i32) -> Result<u16, Reason> {
    match u16::try_from(value) {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(Reason::Port { value }),
    }
}

/// The API server has accepted IPv4 addresses with leading zeros and reads them
/// as decimal (`k8s.io/utils/net`, `ParseIPSloppy`).
fn address(field: &'static str, text: &str) -> Result<IpAddr, Reason> {
    let malformed = || Reason::Address {
        field,
        value: text.to_owned(),
    };
    if text.contains(':') {
        return text
            .parse::<Ipv6Addr>()
            .map(IpAddr::V6)
            .map_err(|_| malformed());
    }
    let parts: Vec<u8> = text
        .split('.')
        .map(|part| {
            let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse().ok().filter(|_| digits)
        })
        .collect::<Option<_>>()
        .ok_or_else(malformed)?;
    let octets: [u8; 4] = parts.try_into().map_err(|_| malformed())?;
    Ok(Ipv4Addr::from(octets).into())
}

fn affinity_seconds(spec: &core::ServiceSpec) -> Option<u32> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref();
    let seconds = config.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
    u32::try_from(seconds.unwrap_or(AFFINITY_SECONDS))
        .ok()
        .filter(|seconds| *seconds > 0)
}

fn prefer(annotations: &BTreeMap<String, String>, name: &ObjectName) -> Option<Prefer> {
    match annotations.get(PREFER)?.as_str() {
        "node" => Some(Prefer::Node),
        "zone" => Some(Prefer::Zone),
        "hints" => Some(Prefer::Hints),
        "none" => Some(Prefer::None),
        other => {
            unknown_value(PREFER, other, "node, zone, hints, none", name);
            None
        }
    }
}

fn max_local_connections(
    annotations: &BTreeMap<String, String>,
    name: &ObjectName,
) -> Option<NonZeroU32> {
    let text = annotations.get(MAX_LOCAL_CONNECTIONS)?;
    let limit = text.parse().ok();
    if limit.is_none() {
        unknown_value(MAX_LOCAL_CONNECTIONS, text, "a whole number from 1", name);
    }
    limit
}

fn switch(
    annotations: &BTreeMap<String, String>,
    key: &'static str,
    name: &ObjectName,
) -> Option<bool> {
    match annotations.get(key)?.as_str() {
        "on" => Some(true),
        "off" => Some(false),
        other => {
            unknown_value(key, other, "\"on\", \"off\"", name);
            None
        }
    }
}

fn unknown_value(key: &str, value: &str, allowed: &str, name: &ObjectName) {
    warn!(object = %name, annotation = key, value, allowed, "unknown value, taken as absent");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_zeros_are_decimal_and_nonsense_is_no_address() {
        let parse = |text| address("the address", text).ok();
        assert_eq!(parse("010.001.000.009"), Some([10, 1, 0, 9].into()));
        assert_eq!(parse("fd00::5"), "fd00::5".parse().ok());
        for text in [
            "10.66.66.666",
            "10.0.0",
            "10.0.0.0.1",
            "",
            "a.b.c.d",
            "+1.0.0.0",
            "fd00::g",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn sidecars_are_seen_where_meshes_put_them() {
        let check = |yaml: &str, in_mesh| {
            let parsed: core::Pod = serde_json::from_str(yaml).unwrap();
            assert_eq!(pod(&parsed).in_mesh, in_mesh, "{yaml}");
        };
        check(
            r#"{"spec": {"containers": [{"name": "app"}, {"name": "istio-proxy"}]}}"#,
            true,
        );
        check(
            r#"{"spec": {"containers": [{"name": "app"}],
                "initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always"}]}}"#,
            true,
        );
        check(
            r#"{"spec": {"containers": [{"name": "app"}], "initContainers": [{"name": "istio-proxy"}]}}"#,
            false,
        );
        check(
            r#"{"metadata": {"annotations": {"ambient.istio.io/redirection": "enabled"}}}"#,
            true,
        );
        check(r#"{"spec": {"containers": [{"name": "app"}]}}"#, false);
    }

    #[test]
    fn the_cgroup_of_a_static_pod_has_the_uid_of_its_file() {
        let uid = |metadata: &str| {
            let text = format!(r#"{{"metadata": {{"uid": "a-b" {metadata}}}}}"#);
            let parsed: core::Pod = serde_json::from_str(&text).unwrap();
            pod(&parsed).cgroup_uid
        };
        assert_eq!(&*uid(""), "a-b");
        let mirror = r#", "annotations": {"kubernetes.io/config.hash": "0af3"}"#;
        assert_eq!(&*uid(mirror), "0af3");
    }

    #[test]
    fn a_port_out_of_range_rejects_the_service_by_name() {
        let spec = core::ServiceSpec {
            cluster_ip: Some("10.0.0.1".to_owned()),
            ports: Some(vec![core::ServicePort {
                port: 70_000,
                ..Default::default()
            }]),
            ..Default::default()
        };
        let metadata = ObjectMeta {
            name: Some("cart".to_owned()),
            ..Default::default()
        };
        let error = service(core::Service {
            metadata,
            spec: Some(spec),
            status: None,
        })
        .unwrap_err();
        let expected =
            "Service default/cart is left out: the port 70000 is not between 1 and 65535";
        assert_eq!(error.to_string(), expected);
    }
}
