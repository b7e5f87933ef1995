//! Which connected UDP sockets may go on; pure.
//!
//! kube-proxy forgets a UDP flow whose endpoint has stopped serving its Service
//! port, so that the next datagram goes to another one (`CleanStaleEntries` in
//! `pkg/proxy/conntrack/cleanup.go` of kubernetes/kubernetes, 1.37). Traffic
//! policy, hints and tiers do not matter, nor whether the endpoint terminates:
//! what a new flow would not get, an old one may keep. shunt has no flow to
//! forget: a connected socket is connected to the endpoint itself, and is
//! destroyed. See [`cleanup`](crate::cleanup).
//!
//! One thing differs: an endpoint that is ready but not serving, as those of a
//! Service with `publishNotReadyAddresses` can be, keeps its sockets. To forget
//! its flows goes unnoticed, to destroy sockets that would come back at once
//! does not.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use crate::model::Service;
use crate::plan::{Place, candidates};
use crate::state::State;
use crate::tables::{Frontend, Protocol};

/// The endpoints that UDP flows may stay with, for each Service port of which
/// all endpoints are known.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Serving(BTreeMap<Frontend, BTreeSet<SocketAddr>>);

impl Serving {
    /// What serves now.
    pub fn of(state: &State) -> Self {
        let mut serving = Self::default();
        for service in state.services() {
            if state.may_lack_endpoints(&service.name) {
                continue;
            }
            for (frontend, endpoints) in of_service(state, service) {
                // As in the plan, the first of two Services with one address.
                serving.0.entry(frontend).or_insert(endpoints);
            }
        }
        serving
    }

    /// Whether a socket that connected to `service`, and so to `endpoint`, has
    /// to go. Of a Service port that is not known nothing has to: kube-proxy
    /// does not clean up after Services that are deleted.
    pub fn has_lost(&self, service: &Frontend, endpoint: &SocketAddr) -> bool {
        let endpoints = self.0.get(service);
        endpoints.is_some_and(|endpoints| !endpoints.contains(endpoint))
    }
}

impl FromIterator<(Frontend, BTreeSet<SocketAddr>)> for Serving {
    fn from_iter<T: IntoIterator<Item = (Frontend, BTreeSet<SocketAddr>)>>(ports: T) -> Self {
        Self(ports.into_iter().collect())
    }
}

/// Notices when something stops serving, so that sockets are looked for then
/// and only then.
#[derive(Debug, Default)]
pub struct ServingHistory {
    /// The last that is known of each Service port, also of those that are gone
    /// or in doubt: they may come back with fewer endpoints.
    known: Option<BTreeMap<Frontend, BTreeSet<SocketAddr>>>,
}

impl ServingHistory {
    /// Whether something has stopped serving since the last call. The first
    /// time, nobody knows, and it is taken to be so.
    pub fn observe(&mut self, now: &Serving) -> bool {
        let Some(known) = &mut self.known else {
            self.known = Some(now.0.clone());
            return true;
        };
        let mut stopped = false;
        for (frontend, endpoints) in &now.0 {
            let before = known.insert(*frontend, endpoints.clone());
            stopped |= before.is_some_and(|before| !before.is_subset(endpoints));
        }
        stopped
    }
}

fn of_service<'a>(
    state: &'a State,
    service: &'a Service,
) -> impl Iterator<Item = (Frontend, BTreeSet<SocketAddr>)> + 'a {
    // The node does not matter here.
    let place = Place {
        node: "",
        zone: None,
        node_hints: true,
    };
    let ports = service.ports.iter();
    let ports = ports.filter(|port| port.protocol == Protocol::Udp);
    ports
        .flat_map(|port| service.cluster_ips.iter().map(move |ip| (port, *ip)))
        .map(move |(port, address)| {
            let slices = state.slices(&service.name);
            let endpoints = candidates(slices, port, address.is_ipv6(), &place)
                .into_iter()
                .filter(|it| it.of_slice.serving || it.of_slice.ready)
                .map(|it| it.endpoint.address)
                .collect();
            let frontend = Frontend {
                address,
                port: port.port,
                protocol: port.protocol,
            };
            (frontend, endpoints)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frontend(port: u16) -> Frontend {
        Frontend {
            address: [10, 96, 0, 10].into(),
            port,
            protocol: Protocol::Udp,
        }
    }

    /// Service ports, each with the last numbers of its endpoints.
    type Ports = &'static [(u16, &'static [u8])];

    fn serving(ports: Ports) -> Serving {
        let endpoints = |hosts: &[u8]| {
            let address = |host: &u8| SocketAddr::from(([10, 244, 0, *host], 53));
            hosts.iter().map(address).collect()
        };
        let ports = ports.iter();
        ports
            .map(|(port, hosts)| (frontend(*port), endpoints(hosts)))
            .collect()
    }

    #[test]
    fn sockets_are_looked_for_once_at_the_start_and_when_something_stops_serving() {
        let mut history = ServingHistory::default();
        let steps: [(Ports, bool, &str); 9] = [
            (&[(53, &[1, 2])], true, "nobody knows what was before"),
            (&[(53, &[1, 2])], false, "no change"),
            (&[(53, &[1, 2, 3]), (54, &[1])], false, "more of them"),
            (&[(53, &[1, 3]), (54, &[1])], true, "one stops"),
            (&[(53, &[1, 3])], false, "a Service is deleted, or in doubt"),
            (&[(53, &[1, 3]), (54, &[2])], true, "and comes back without"),
            (&[(53, &[3, 4]), (54, &[2])], true, "one is replaced"),
            (&[(53, &[]), (54, &[2])], true, "the last one stops"),
            (&[(53, &[1]), (54, &[2])], false, "the first one starts"),
        ];
        for (ports, expected, what) in steps {
            assert_eq!(history.observe(&serving(ports)), expected, "{what}");
        }
    }
}
