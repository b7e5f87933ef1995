//! The routing table for people and for programs: one form for what would be
//! (`shunt plan`) and for what is (`shunt routes`).

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use crate::tables::{Frontend, Prefer, Protocol, Route, Scope, Stage, Tables, Tier, Verdict};

/// How many endpoints of a tier the narrow table names.
const NAMED: usize = 3;

/// The JSON form.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RoutesReport {
    /// The node.
    pub node: String,
    /// Its zone, if it is known.
    pub zone: Option<String>,
    /// Sorted by namespace, service, port name, protocol, family.
    pub routes: Vec<RouteReport>,
}

/// One Service port of one family.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RouteReport {
    /// The namespace of the Service.
    pub namespace: String,
    /// Its name.
    pub service: String,
    /// Empty for an unnamed port.
    pub port_name: String,
    /// The ClusterIP.
    pub address: IpAddr,
    /// The Service port.
    pub port: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// What a connect gets.
    pub verdict: Verdict,
    /// What was preferred.
    pub prefer: Prefer,
    /// Session affinity, if there is any.
    pub affinity_seconds: Option<u32>,
    /// How many connections each endpoint on the node may hold before others get
    /// them, if there is a limit.
    pub max_local_connections: Option<u32>,
    /// What decides a connect.
    pub stage: Stage,
    /// `internalTrafficPolicy: Local`.
    pub local_only: bool,
    /// No endpoint is ready: these still serve while they terminate.
    pub terminating: bool,
    /// In order of preference.
    pub tiers: Vec<TierReport>,
}

/// A set of endpoints of equal preference.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct TierReport {
    /// What bounds it.
    pub scope: Scope,
    /// Sorted as text.
    pub endpoints: Vec<SocketAddr>,
}

/// The report of a routing table.
pub fn routes(tables: &Tables) -> RoutesReport {
    let mut routes: Vec<_> = tables.routes.iter().collect();
    routes.sort_by(|(a, x), (b, y)| order(a, x).cmp(&order(b, y)));
    RoutesReport {
        node: tables.node.name.clone(),
        zone: tables.node.zone.clone(),
        routes: routes
            .into_iter()
            .map(|(frontend, route)| route_report(frontend, route))
            .collect(),
    }
}

impl RoutesReport {
    /// A table for people; a wide one names all endpoints, and what decides.
    pub fn table(&self, wide: bool) -> String {
        let zone = self.zone.as_deref().unwrap_or("unknown");
        let head = format!(
            "Node {} (zone {zone}), {} routes",
            self.node,
            self.routes.len()
        );
        if self.routes.is_empty() {
            return head;
        }
        let decided = if wide { "DECIDED BY" } else { "" };
        let mut table = plain_table([
            "SERVICE",
            "CLUSTER IP",
            "VERDICT",
            "PREFER",
            "TIER",
            "ENDPOINTS",
            decided,
        ]);
        for route in &self.routes {
            add_rows(&mut table, route, wide);
        }
        format!("{head}\n\n{}", table.trim_fmt())
    }
}

/// A table without lines, as `kubectl` prints them.
pub(crate) fn plain_table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// One row for each tier; the first says what the route is.
fn add_rows(table: &mut Table, route: &RouteReport, wide: bool) {
    let port = if route.port_name.is_empty() {
        String::new()
    } else {
        format!(":{}", route.port_name)
    };
    let cluster_ip = SocketAddr::new(route.address, route.port);
    let mut head = [
        format!("{}/{}{port}", route.namespace, route.service),
        format!("{cluster_ip}/{}", route.protocol),
        word(&route.verdict),
        word(&route.prefer),
    ];
    let mut decided = if wide {
        route.decided_by()
    } else {
        String::new()
    };
    for tier in &route.tiers {
        let endpoints = endpoints(&tier.endpoints, wide);
        table.add_row(
            head.iter()
                .cloned()
                .chain([word(&tier.scope), endpoints, decided]),
        );
        head = Default::default();
        decided = String::new();
    }
}

impl RouteReport {
    /// What decides a connect, in words.
    pub fn decided_by(&self) -> String {
        let mut text = match (self.stage, self.prefer) {
            (Stage::Node, _) if self.local_only => "node: internalTrafficPolicy is Local",
            (Stage::Node, _) => "node",
            (Stage::Zone, Prefer::Node) => "zone: none on this node",
            (Stage::Zone, _) => "zone",
            (Stage::Cluster, Prefer::Node) => "cluster: none on this node or in its zone",
            (Stage::Cluster, Prefer::Zone) => "cluster: none in the zone",
            (Stage::Cluster, Prefer::Hints | Prefer::None) => "cluster: no hints apply",
            (Stage::Hints, _) => "hints",
            (Stage::Empty, _) => "no endpoint is usable",
            (Stage::LocalEmpty, _) => {
                "internalTrafficPolicy is Local, and no endpoint on this node is usable"
            }
            (Stage::Passed, _) => "endpoints may be unknown, or do not fit in",
        }
        .to_owned();
        if self.terminating {
            text += "; terminating ones, since none is ready";
        }
        if let Some(seconds) = self.affinity_seconds
            && self.verdict == Verdict::Balance
        {
            text += &format!("; affinity first ({seconds} s)");
        }
        if let Some(limit) = self.max_local_connections {
            text += &format!("; others once each on this node holds {limit} connections");
        }
        text
    }
}

fn endpoints(all: &[SocketAddr], wide: bool) -> String {
    let named = if wide {
        all.len()
    } else {
        NAMED.min(all.len())
    };
    let mut text = all[..named]
        .iter()
        .map(SocketAddr::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if named < all.len() {
        text = format!("{text}, +{} more", all.len() - named);
    }
    if text.is_empty() {
        "-".to_owned()
    } else {
        text
    }
}

/// The word that the JSON form has for it.
pub(crate) fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

fn order<'a>(
    frontend: &'a Frontend,
    route: &'a Route,
) -> (
    &'a crate::tables::ServicePortName,
    Protocol,
    bool,
    &'a Frontend,
) {
    (
        &route.name,
        frontend.protocol,
        frontend.address.is_ipv6(),
        frontend,
    )
}

pub(crate) fn route_report(frontend: &Frontend, route: &Route) -> RouteReport {
    RouteReport {
        namespace: route.name.namespace.to_string(),
        service: route.name.service.to_string(),
        port_name: route.name.port.to_string(),
        address: frontend.address,
        port: frontend.port,
        protocol: frontend.protocol,
        verdict: route.verdict,
        prefer: route.prefer,
        affinity_seconds: route.affinity_seconds,
        max_local_connections: route.max_local_connections.map(NonZeroU32::get),
        stage: route.stage(),
        local_only: route.local_only(),
        terminating: route.terminating,
        tiers: route.tiers.iter().map(tier_report).collect(),
    }
}

pub(crate) fn tier_report(tier: &Tier) -> TierReport {
    let mut endpoints: Vec<_> = tier
        .endpoints
        .iter()
        .map(|endpoint| endpoint.address)
        .collect();
    endpoints.sort_by_cached_key(SocketAddr::to_string);
    TierReport {
        scope: tier.scope,
        endpoints,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shunt_common::NodeId;

    use super::*;
    use crate::tables::{Endpoint, NodeIdentity, ServicePortName};

    fn endpoint(text: &str, local: bool) -> Endpoint {
        Endpoint {
            address: text.parse().unwrap(),
            local,
            node: NodeId::UNKNOWN,
        }
    }

    /// The example of the README.
    fn example() -> Tables {
        let near = endpoint("10.244.1.5:8080", true);
        let far = endpoint("10.244.2.7:8080", false);
        let tier = |scope, endpoints: &[Endpoint]| Tier {
            scope,
            endpoints: endpoints.to_vec(),
        };
        let route = Route {
            name: ServicePortName {
                namespace: Arc::from("shop"),
                service: Arc::from("cart"),
                port: Arc::from("http"),
            },
            verdict: Verdict::Balance,
            prefer: Prefer::Node,
            affinity_seconds: None,
            splice: shunt_common::Wish::None,
            max_local_connections: None,
            terminating: false,
            tiers: vec![
                tier(Scope::Node, &[near]),
                tier(Scope::Zone, &[]),
                tier(Scope::Cluster, &[near, far]),
            ],
        };
        let frontend = Frontend {
            address: "10.96.0.10".parse().unwrap(),
            port: 80,
            protocol: Protocol::Tcp,
        };
        Tables {
            node: NodeIdentity {
                name: "n1".to_owned(),
                zone: Some("z1".to_owned()),
            },
            routes: [(frontend, route)].into(),
            ..Tables::default()
        }
    }

    #[test]
    fn the_json_form_is_the_documented_one() {
        let expected = r#"{"node":"n1","zone":"z1","routes":[{"namespace":"shop","service":"cart","port_name":"http","address":"10.96.0.10","port":80,"protocol":"TCP","verdict":"balance","prefer":"node","affinity_seconds":null,"max_local_connections":null,"stage":"node","local_only":false,"terminating":false,"tiers":[{"scope":"node","endpoints":["10.244.1.5:8080"]},{"scope":"zone","endpoints":[]},{"scope":"cluster","endpoints":["10.244.1.5:8080","10.244.2.7:8080"]}]}]}"#;
        assert_eq!(
            serde_json::to_string(&routes(&example())).unwrap(),
            expected
        );
    }

    #[test]
    fn the_table_has_a_row_for_each_tier() {
        let text = routes(&example()).table(false);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows[0], ["Node", "n1", "(zone", "z1),", "1", "routes"]);
        assert_eq!(
            rows[3],
            [
                "shop/cart:http",
                "10.96.0.10:80/TCP",
                "balance",
                "node",
                "node",
                "10.244.1.5:8080"
            ]
        );
        assert_eq!(rows[4], ["zone", "-"]);
    }

    #[test]
    fn the_wide_table_says_what_decides() {
        let mut tables = example();
        assert!(!routes(&tables).table(false).contains("DECIDED"));
        let route = tables.routes.values_mut().next().unwrap();
        route.tiers[0].endpoints.clear();
        (route.terminating, route.affinity_seconds) = (true, Some(30));
        route.max_local_connections = NonZeroU32::new(7);
        let text = routes(&tables).table(true);
        let expected = "cluster: none on this node or in its zone; terminating ones, since none \
                        is ready; affinity first (30 s); others once each on this node holds 7 \
                        connections";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_long_tier_is_cut_unless_the_table_is_wide() {
        let all: Vec<_> = (1..=5)
            .map(|n| SocketAddr::from(([10, 0, 0, n], 80)))
            .collect();
        assert_eq!(
            endpoints(&all, false),
            "10.0.0.1:80, 10.0.0.2:80, 10.0.0.3:80, +2 more"
        );
        assert!(endpoints(&all, true).ends_with("10.0.0.5:80"));
    }
}
