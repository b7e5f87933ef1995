//! Which endpoints kube-proxy would use, told a second time and as plainly as
//! can be, from Kubernetes 1.37's `pkg/proxy`: `endpointslicecache.go`
//! (`endpointInfoByServicePort`, `addEndpoints`), `topology.go`
//! (`CategorizeEndpoints`, `topologyModeFromHints`), `util/utils.go`
//! (`ShouldSkipService`) and the selectors of `cmd/kube-proxy/app/server.go`.
//! It reads the manifests themselves and shares nothing with the plan.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde_json::Value;

/// A kube-proxy on one node.
pub(crate) struct KubeProxy<'a> {
    objects: &'a [Value],
    node: &'a str,
    zone: &'a str,
}

/// What it knows of one Service port in one family.
pub(crate) struct Port<'a> {
    node: &'a str,
    zone: &'a str,
    local_only: bool,
    /// All that the slices say of each address.
    entries: BTreeMap<SocketAddr, Vec<&'a Value>>,
}

/// What it holds of each address.
type View<'a> = BTreeMap<SocketAddr, &'a Value>;

impl<'a> KubeProxy<'a> {
    pub(crate) fn new(objects: &'a [Value], node: &'a str) -> Self {
        let this_node = objects
            .iter()
            .find(|it| it["kind"] == "Node" && it["metadata"]["name"] == node);
        let zone = this_node
            .and_then(|it| it["metadata"]["labels"]["topology.kubernetes.io/zone"].as_str());
        Self {
            objects,
            node,
            zone: zone.unwrap_or(""),
        }
    }

    /// The ClusterIPs, ports and protocols that it answers for, SCTP left out.
    pub(crate) fn frontends(
        &self,
        also: impl Fn(&Value) -> bool,
    ) -> BTreeSet<(SocketAddr, String)> {
        let mut frontends = BTreeSet::new();
        for service in self.objects.iter().filter(|it| it["kind"] == "Service") {
            let labels = &service["metadata"]["labels"];
            let skipped = service["spec"]["clusterIP"] == "None"
                || service["spec"]["type"] == "ExternalName"
                || !labels["service.kubernetes.io/service-proxy-name"].is_null();
            if skipped || !also(service) {
                continue;
            }
            for ip in service["spec"]["clusterIPs"].as_array().unwrap() {
                for port in service["spec"]["ports"].as_array().unwrap() {
                    if port["protocol"] != "SCTP" {
                        let ip = ip.as_str().unwrap().parse().unwrap();
                        let address = SocketAddr::new(ip, number(&port["port"]));
                        frontends.insert((address, text(&port["protocol"]).to_owned()));
                    }
                }
            }
        }
        frontends
    }

    pub(crate) fn port(
        &self,
        namespace: &str,
        service: &str,
        port: &str,
        protocol: &str,
        is_ipv6: bool,
    ) -> Port<'a> {
        let of_kind = |kind: &'static str| {
            self.objects
                .iter()
                .filter(move |it| it["kind"] == kind && it["metadata"]["namespace"] == namespace)
        };
        let local_only = of_kind("Service")
            .find(|it| it["metadata"]["name"] == service)
            .is_some_and(|it| it["spec"]["internalTrafficPolicy"] == "Local");
        let mut entries: BTreeMap<SocketAddr, Vec<&Value>> = BTreeMap::new();
        for slice in of_kind("EndpointSlice") {
            let labels = &slice["metadata"]["labels"];
            let family = if is_ipv6 { "IPv6" } else { "IPv4" };
            if labels["kubernetes.io/service-name"] != service
                || !labels["service.kubernetes.io/headless"].is_null()
                || slice["addressType"] != family
            {
                continue;
            }
            for slice_port in slice["ports"].as_array().unwrap() {
                if slice_port["name"] != port
                    || slice_port["protocol"] != protocol
                    || slice_port["port"].is_null()
                {
                    continue;
                }
                for endpoint in slice["endpoints"].as_array().unwrap() {
                    // "address" is always the first one.
                    let ip = text(&endpoint["addresses"][0]).parse().unwrap();
                    let address = SocketAddr::new(ip, number(&slice_port["port"]));
                    entries.entry(address).or_default().push(endpoint);
                }
            }
        }
        Port {
            node: self.node,
            zone: self.zone,
            local_only,
            entries,
        }
    }
}

impl<'a> Port<'a> {
    pub(crate) fn is_local_only(&self) -> bool {
        self.local_only
    }

    /// Addresses that anything calls ready, or able to serve while terminating.
    pub(crate) fn serving(&self) -> BTreeSet<SocketAddr> {
        self.any(|it| is_ready(it) || is_serving_terminating(it))
    }

    /// Addresses that anything places on this node.
    pub(crate) fn local(&self) -> BTreeSet<SocketAddr> {
        self.any(|it| it["nodeName"] == self.node)
    }

    fn any(&self, fits: impl Fn(&Value) -> bool) -> BTreeSet<SocketAddr> {
        self.entries
            .iter()
            .filter(|(_, entries)| entries.iter().any(|it| fits(it)))
            .map(|(address, _)| *address)
            .collect()
    }

    /// The sets that it may use for the ClusterIP: more than one where slices
    /// contradict each other.
    pub(crate) fn choices(&self) -> Vec<BTreeSet<SocketAddr>> {
        self.views().iter().map(|view| self.choose(view)).collect()
    }

    /// A later entry takes the place of an earlier one unless it is terminating,
    /// and the order of slices is that of a Go map: any.
    fn views(&self) -> Vec<View<'a>> {
        let mut views = vec![View::new()];
        for (address, entries) in &self.entries {
            let mut winners: Vec<&Value> = entries
                .iter()
                .copied()
                .filter(|it| it["conditions"]["terminating"] != true)
                .collect();
            if winners.is_empty() {
                winners.clone_from(entries);
            }
            winners.dedup();
            views = views
                .into_iter()
                .flat_map(|view| {
                    winners.iter().map(move |winner| {
                        let mut view = view.clone();
                        view.insert(*address, winner);
                        view
                    })
                })
                .collect();
        }
        views
    }

    fn choose(&self, view: &View<'_>) -> BTreeSet<SocketAddr> {
        if self.local_only {
            let local: View<'_> = view
                .iter()
                .filter(|(_, it)| it["nodeName"] == self.node)
                .map(|(address, it)| (*address, *it))
                .collect();
            let ready = those(&local, is_ready);
            if !ready.is_empty() {
                return ready;
            }
            return those(&local, is_serving_terminating);
        }
        let hint = self.hint(view);
        let ready = those(view, |it| {
            is_ready(it) && hint.is_none_or(|(kind, name)| has_hint(it, kind, name))
        });
        if !ready.is_empty() {
            return ready;
        }
        those(view, is_serving_terminating)
    }

    /// The kind of hints that counts, and the name that fits.
    fn hint(&self, view: &View<'_>) -> Option<(&'static str, &'a str)> {
        let ready: Vec<&Value> = view.values().copied().filter(|it| is_ready(it)).collect();
        for (kind, name) in [("forNodes", self.node), ("forZones", self.zone)] {
            let all_have = ready.iter().all(|it| {
                it["hints"][kind]
                    .as_array()
                    .is_some_and(|it| !it.is_empty())
            });
            let one_fits = ready.iter().any(|it| has_hint(it, kind, name));
            if all_have && one_fits {
                return Some((kind, name));
            }
        }
        None
    }
}

fn those(view: &View<'_>, fits: impl Fn(&Value) -> bool) -> BTreeSet<SocketAddr> {
    view.iter()
        .filter(|(_, it)| fits(it))
        .map(|(address, _)| *address)
        .collect()
}

fn is_ready(endpoint: &Value) -> bool {
    endpoint["conditions"]["ready"] != false
}

fn is_serving_terminating(endpoint: &Value) -> bool {
    endpoint["conditions"]["serving"] != false && endpoint["conditions"]["terminating"] == true
}

fn has_hint(endpoint: &Value, kind: &str, name: &str) -> bool {
    endpoint["hints"][kind]
        .as_array()
        .is_some_and(|hints| hints.iter().any(|hint| hint["name"] == name))
}

fn number(value: &Value) -> u16 {
    u16::try_from(value.as_u64().unwrap()).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
