//! Which Service ports a person means.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use crate::model::{ObjectName, Service, ServicePort};
use crate::state::State;

/// How many names an error lists.
const NAMED: usize = 10;
/// From which likeness on (1 is the same) a name may be what was meant.
const ALIKE: f64 = 0.8;

/// A Service port, as a person names it: `SERVICE[:PORT]`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Target {
    /// The Service.
    pub service: Wanted,
    /// Name or number of a port; all of them by default.
    pub port: Option<String>,
}

/// A Service, as a person names it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Wanted {
    /// By name, in this namespace or in that of the client.
    Name {
        /// The namespace, if it was given.
        namespace: Option<String>,
        /// The name.
        name: String,
    },
    /// By ClusterIP.
    ClusterIp(IpAddr),
}

/// Service ports, each with one ClusterIP.
pub type Frontends<'a> = Vec<(&'a ServicePort, IpAddr)>;

/// What is meant is not known.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// Not of the form.
    #[error(
        "{0:?} is no Service: give it as NAMESPACE/NAME, NAME or its ClusterIP, and :PORT by \
         number or name, such as shop/cart:http"
    )]
    Form(String),
    /// A name without a namespace.
    #[error(
        "in which namespace is the Service {name}? Give it as NAMESPACE/{name}, its \
         ClusterIP, or a client with --from NAMESPACE/POD"
    )]
    NoNamespace {
        /// The name.
        name: String,
    },
    /// No such Service.
    #[error("there is no Service {wanted}{hint}")]
    NoService {
        /// Namespace and name.
        wanted: ObjectName,
        /// What there is instead.
        hint: String,
    },
    /// No Service with this address.
    #[error(
        "no Service that shunt handles has the ClusterIP {0}: node ports, external and \
         load-balancer addresses are kube-proxy's, and why a Service is not handled is told by \
         its name"
    )]
    NoClusterIp(IpAddr),
    /// No such port.
    #[error("the Service {service} has no port {wanted}, but {known}")]
    NoPort {
        /// Namespace and name.
        service: ObjectName,
        /// What was asked for.
        wanted: String,
        /// What there is instead.
        known: String,
    },
    /// A port that shunt does not handle.
    #[error("port {wanted} of the Service {service} is SCTP, which is left to kube-proxy")]
    Sctp {
        /// Namespace and name.
        service: ObjectName,
        /// What was asked for.
        wanted: String,
    },
}

impl FromStr for Target {
    type Err = ResolveError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let by_ip = |address, port: Option<u16>| Self {
            service: Wanted::ClusterIp(address),
            port: port.map(|port| port.to_string()),
        };
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(by_ip(address, None));
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(by_ip(address.ip(), Some(address.port())));
        }
        let text = text.strip_prefix('[').unwrap_or(text);
        let split = text.split_once("]:").or_else(|| text.split_once(':'));
        let (service, port) = match split {
            Some((service, port)) => (service, Some(port)),
            None => (text, None),
        };
        let (namespace, name) = match service.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, service),
        };
        let parts = [namespace, Some(name), port];
        let malformed = |part: &str| part.is_empty() || part.contains('/');
        if parts.into_iter().flatten().any(malformed) {
            return Err(ResolveError::Form(text.to_owned()));
        }
        if let Ok(address) = name.parse() {
            // A ClusterIP with the name of a port.
            return Ok(Self {
                service: Wanted::ClusterIp(address),
                port: port.map(str::to_owned),
            });
        }
        Ok(Self {
            service: Wanted::Name {
                namespace: namespace.map(str::to_owned),
                name: name.to_owned(),
            },
            port: port.map(str::to_owned),
        })
    }
}

impl Target {
    /// The Service and those of its ports and ClusterIPs that are meant; none of
    /// one that is not captured.
    pub fn find<'a>(
        &self,
        state: &'a State,
        namespace_of_client: Option<&str>,
    ) -> Result<(&'a Service, Frontends<'a>), ResolveError> {
        let service = self.service(state, namespace_of_client)?;
        let ports = self.ports(service)?;
        let asked = |ip: &&IpAddr| match self.service {
            Wanted::ClusterIp(wanted) => **ip == wanted,
            Wanted::Name { .. } => true,
        };
        let pairs = ports.into_iter().flat_map(|port| {
            let addresses = service.cluster_ips.iter().filter(asked);
            addresses.map(move |ip| (port, *ip))
        });
        Ok((service, pairs.collect()))
    }

    fn service<'a>(
        &self,
        state: &'a State,
        namespace_of_client: Option<&str>,
    ) -> Result<&'a Service, ResolveError> {
        let (namespace, name) = match &self.service {
            Wanted::ClusterIp(address) => {
                let mut services = state.services();
                return services
                    .find(|service| service.cluster_ips.contains(address))
                    .ok_or(ResolveError::NoClusterIp(*address));
            }
            Wanted::Name { namespace, name } => (namespace, name),
        };
        let namespace = namespace.as_deref().or(namespace_of_client);
        let namespace =
            namespace.ok_or_else(|| ResolveError::NoNamespace { name: name.clone() })?;
        let wanted = ObjectName {
            namespace: namespace.into(),
            name: name.as_str().into(),
        };
        state
            .service(&wanted)
            .ok_or_else(|| ResolveError::NoService {
                hint: hint(state, &wanted),
                wanted,
            })
    }

    fn ports<'a>(&self, service: &'a Service) -> Result<Vec<&'a ServicePort>, ResolveError> {
        let is_meant = |name: &str, number: u16| match &self.port {
            None => true,
            Some(wanted) => *wanted == *name || *wanted == number.to_string(),
        };
        let ports: Vec<_> = service
            .ports
            .iter()
            .filter(|port| is_meant(&port.name, port.port))
            .collect();
        let Some(wanted) = self.port.clone().filter(|_| ports.is_empty()) else {
            return Ok(ports);
        };
        let mut sctp = service.sctp_ports.iter();
        let service_name = service.name.clone();
        Err(if sctp.any(|(name, number)| is_meant(name, *number)) {
            ResolveError::Sctp {
                service: service_name,
                wanted,
            }
        } else {
            ResolveError::NoPort {
                service: service_name,
                wanted,
                known: known_ports(service),
            }
        })
    }
}

fn known_ports(service: &Service) -> String {
    let ports = service.ports.iter().map(|port| {
        let number = format!("{}/{}", port.port, port.protocol);
        match &*port.name {
            "" => number,
            name => format!("{name} ({number})"),
        }
    });
    let sctp = service.sctp_ports.iter();
    let sctp = sctp.map(|(_, number)| format!("{number}/SCTP (left to kube-proxy)"));
    listed(ports.chain(sctp)).unwrap_or_else(|| "none at all".to_owned())
}

/// What may be meant instead, and what there is.
fn hint(state: &State, wanted: &ObjectName) -> String {
    let names = || state.services().map(|service| &service.name);
    if let Some(other) = names().find(|it| it.name == wanted.name) {
        return format!("; did you mean {other}?");
    }
    let likeness = |it: &ObjectName| strsim::jaro_winkler(&it.name, &wanted.name);
    let here = || names().filter(|it| it.namespace == wanted.namespace);
    let nearest = here().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let guess = nearest
        .filter(|it| likeness(it) >= ALIKE)
        .map(|it| format!("; did you mean {it}?"));
    let known = match listed(here().map(|it| &it.name)) {
        Some(known) => format!("; in the namespace are: {known}"),
        None => match listed(namespaces(state)) {
            Some(known) => format!(
                "; the namespace {} has none, these have: {known}",
                wanted.namespace
            ),
            None => "; there is none at all".to_owned(),
        },
    };
    guess.unwrap_or_default() + &known
}

fn namespaces(state: &State) -> Vec<&str> {
    let mut names: Vec<_> = state
        .services()
        .map(|service| &*service.name.namespace)
        .collect();
    names.dedup();
    names
}

/// The first few; `None` if there are none.
fn listed<T: Display>(names: impl IntoIterator<Item = T>) -> Option<String> {
    let names: Vec<_> = names.into_iter().map(|name| name.to_string()).collect();
    let first = names.iter().take(NAMED).cloned().collect::<Vec<_>>();
    let text = first.join(", ");
    match names.len() {
        0 => None,
        count if count > NAMED => Some(format!("{text}, and {} more", count - NAMED)),
        _ => Some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, Object, ObjectRef, convert};
    use crate::state::Event;
    use serde_json::json;

    fn state() -> State {
        let mut state = State::default();
        for (namespace, name, address) in [
            ("shop", "cart", "10.96.0.10"),
            ("shop", "pay", "10.96.0.11"),
            ("web", "front", "fd00::1"),
        ] {
            let ports = json!([
                {"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "media", "port": 9, "protocol": "SCTP"},
            ]);
            let service = json!({"metadata": {"namespace": namespace, "name": name},
                                 "spec": {"clusterIP": address, "ports": ports}});
            let service = convert::service(serde_json::from_value(service).unwrap()).unwrap();
            state.apply(Event::Apply(Object::Service(service)));
        }
        state
    }

    fn find(text: &str) -> Result<String, String> {
        let target: Target = text.parse().map_err(|it: ResolveError| it.to_string())?;
        let state = state();
        let (service, ports) = target
            .find(&state, Some("shop"))
            .map_err(|it| it.to_string())?;
        let ports: Vec<_> = ports
            .iter()
            .map(|(port, ip)| format!(" {ip}:{}", port.port))
            .collect();
        Ok(format!("{}{}", service.name, ports.concat()))
    }

    #[test]
    fn a_service_is_found_by_name_or_address_and_a_port_by_name_or_number() {
        for (text, expected) in [
            ("cart", "shop/cart 10.96.0.10:80 10.96.0.10:53"),
            ("web/front:http", "web/front fd00::1:80"),
            ("cart:53", "shop/cart 10.96.0.10:53"),
            ("10.96.0.11", "shop/pay 10.96.0.11:80 10.96.0.11:53"),
            ("10.96.0.11:80", "shop/pay 10.96.0.11:80"),
            ("10.96.0.11:dns", "shop/pay 10.96.0.11:53"),
            ("[fd00::1]:80", "web/front fd00::1:80"),
            ("[fd00::1]:dns", "web/front fd00::1:53"),
            ("fd00::1", "web/front fd00::1:80 fd00::1:53"),
        ] {
            assert_eq!(find(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_not_there_is_answered_with_what_is() {
        for (text, expected) in [
            (
                "shop/crat",
                "did you mean shop/cart?; in the namespace are: cart, pay",
            ),
            (
                "shop/xyz",
                "no Service shop/xyz; in the namespace are: cart, pay",
            ),
            ("front", "no Service shop/front; did you mean web/front?"),
            (
                "none/xyz",
                "the namespace none has none, these have: shop, web",
            ),
            (
                "cart:81",
                "has no port 81, but http (80/TCP), dns (53/UDP), 9/SCTP",
            ),
            ("cart:media", "port media of the Service shop/cart is SCTP"),
            (
                "10.96.0.99",
                "no Service that shunt handles has the ClusterIP 10.96.0.99",
            ),
            ("a/b/c", "give it as NAMESPACE/NAME"),
            ("cart:", "give it as NAMESPACE/NAME"),
        ] {
            let error = find(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let target: Target = "cart".parse().unwrap();
        let error = target.find(&state(), None).unwrap_err().to_string();
        assert!(error.contains("NAMESPACE/cart"), "{error}");
    }

    #[test]
    fn an_empty_cluster_is_called_so() {
        let mut state = state();
        let names: Vec<_> = state.services().map(|it| it.name.clone()).collect();
        for name in names {
            let kind = Kind::Service;
            state.apply(Event::Delete(ObjectRef { kind, name }));
        }
        let target: Target = "shop/cart".parse().unwrap();
        let error = target.find(&state, None).unwrap_err().to_string();
        assert!(error.ends_with("there is none at all"), "{error}");
    }
}
