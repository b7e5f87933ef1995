//! What kube-proxy's nftables rules do with each ClusterIP.
//!
//! The map `service-ips` names a chain for each address, protocol and port, in
//! which one rule translates to one endpoint or to one of a map; with session
//! affinity it goes on to a chain for each endpoint. What has no endpoint is in
//! the map `no-endpoint-services` instead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::node::Node;
use crate::place::Place;

/// The endpoints of each Service port, which is written as in
/// `10.96.0.10:80/TCP`.
pub type Choices = BTreeMap<String, BTreeSet<SocketAddr>>;

/// Reads the tables of both families in the node's network namespace.
pub(super) fn read(node: &Node) -> Result<Choices> {
    let mut choices = Choices::new();
    for family in ["ip", "ip6"] {
        let output = node
            .command("nft")
            .args(["-j", "list", "table", family, "kube-proxy"])
            .stdin(Stdio::null())
            .output()
            .context("run nft")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "nft failed: {complaint}");
        let ruleset = serde_json::from_slice(&output.stdout).context("the output of nft")?;
        Table::new(&ruleset).add_to(&mut choices)?;
    }
    Ok(choices)
}

/// One family's table.
#[derive(Default)]
struct Table<'a> {
    /// The set of that name; the maps hold other addresses of Services too.
    cluster_ips: BTreeSet<&'a str>,
    /// Elements of the maps.
    maps: BTreeMap<&'a str, Vec<(&'a Value, &'a Value)>>,
    /// Expressions of the rules of each chain.
    chains: BTreeMap<&'a str, Vec<&'a Value>>,
}

impl<'a> Table<'a> {
    fn new(ruleset: &'a Value) -> Self {
        let mut table = Self::default();
        for object in items(&ruleset["nftables"]) {
            if object["set"]["name"] == "cluster-ips" {
                table.cluster_ips = items(&object["set"]["elem"]).map(text).collect();
            }
            if let Some(map) = object.get("map") {
                let elements = pairs(&map["elem"]).collect();
                table.maps.insert(text(&map["name"]), elements);
            }
            if let Some(rule) = object.get("rule") {
                let chain = table.chains.entry(text(&rule["chain"])).or_default();
                chain.extend(items(&rule["expr"]));
            }
        }
        table
    }

    fn add_to(&self, choices: &mut Choices) -> Result<()> {
        for (frontend, verdict) in self.frontends("service-ips")? {
            let chain = text(&verdict["goto"]["target"]);
            let endpoints = self.endpoints(chain)?;
            ensure!(!endpoints.is_empty(), "chain {chain} translates to nothing");
            choices.insert(frontend, endpoints);
        }
        for (frontend, _) in self.frontends("no-endpoint-services")? {
            choices.insert(frontend, BTreeSet::new());
        }
        Ok(())
    }

    /// The elements of a map whose address is a ClusterIP.
    fn frontends(&self, map: &str) -> Result<Vec<(String, &'a Value)>> {
        let elements = self
            .maps
            .get(map)
            .with_context(|| format!("no map {map}"))?;
        let mut frontends = Vec::new();
        for (key, verdict) in elements {
            // An element with a comment is wrapped.
            let key = key.get("elem").map_or(*key, |element| &element["val"]);
            let [address, protocol, port] = [0, 1, 2].map(|index| &key["concat"][index]);
            if self.cluster_ips.contains(text(address)) {
                let protocol = text(protocol).to_uppercase();
                let frontend = format!("{}/{protocol}", socket(address, port)?);
                frontends.push((frontend, *verdict));
            }
        }
        Ok(frontends)
    }

    /// The endpoints that the rules of a chain translate to.
    fn endpoints(&self, chain: &str) -> Result<BTreeSet<SocketAddr>> {
        let rules = self.chains.get(chain);
        let mut endpoints = BTreeSet::new();
        for expression in rules.with_context(|| format!("no chain {chain}"))? {
            if let Some(translation) = expression.get("dnat") {
                endpoints.extend(targets(translation)?);
            }
            for (_, verdict) in pairs(&expression["vmap"]["data"]["set"]) {
                endpoints.extend(self.endpoints(text(&verdict["goto"]["target"]))?);
            }
        }
        Ok(endpoints)
    }
}

/// The endpoints of a `dnat`: the only one, or those of its map.
fn targets(translation: &Value) -> Result<Vec<SocketAddr>> {
    if translation["addr"].is_string() {
        return Ok(vec![socket(&translation["addr"], &translation["port"])?]);
    }
    pairs(&translation["addr"]["map"]["data"]["set"])
        .map(|(_, target)| socket(&target["concat"][0], &target["concat"][1]))
        .collect()
}

fn socket(address: &Value, port: &Value) -> Result<SocketAddr> {
    let unexpected = || format!("{address} and {port} of nft's output");
    let address: IpAddr = text(address).parse().with_context(unexpected)?;
    let port = port.as_u64().and_then(|port| u16::try_from(port).ok());
    Ok(SocketAddr::new(address, port.with_context(unexpected)?))
}

fn pairs(set: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    items(set).map(|pair| (&pair[0], &pair[1]))
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(name: &str, elements: &Value) -> Value {
        json!({"map": {"name": name, "elem": elements}})
    }

    fn rule(chain: &str, expression: &Value) -> Value {
        json!({"rule": {"chain": chain, "expr": [{"match": {}}, expression]}})
    }

    fn goto(chain: &str) -> Value {
        json!({"goto": {"target": chain}})
    }

    /// In the form that nft 1.0.6 gives to what kube-proxy 1.37 writes.
    fn ruleset() -> Value {
        let key = |address: &str, port: u16| json!({"concat": [address, "tcp", port]});
        let wrapped = |key: &Value| json!({"elem": {"val": key, "comment": "shop/none"}});
        let services = json!([
            [key("10.96.0.1", 80), goto("service-one")],
            [key("10.96.0.2", 80), goto("service-two")],
            [key("10.96.0.3", 80), goto("service-sticky")],
            [key("203.0.113.1", 80), goto("external-one")],
        ]);
        let empty = json!([[wrapped(&key("10.96.0.1", 81)), goto("reject-chain")]]);
        let endpoints = json!([[0, {"concat": ["10.0.0.5", 1]}], [1, {"concat": ["10.0.0.6", 2]}]]);
        let jumps = json!([[0, goto("endpoint-a")], [1, goto("endpoint-b")]]);
        let two = json!({"dnat": {"family": "ip", "addr": {"map": {"data": {"set": endpoints}}}}});
        let one = |address: &str| json!({"dnat": {"addr": address, "port": 8080}});
        let sticky = json!({"vmap": {"data": {"set": jumps}}});
        json!({"nftables": [
            {"set": {"name": "cluster-ips", "elem": ["10.96.0.1", "10.96.0.2", "10.96.0.3"]}},
            map("service-ips", &services),
            map("no-endpoint-services", &empty),
            rule("service-one", &one("10.0.0.5")),
            rule("service-two", &two),
            rule("service-sticky", &goto("endpoint-a")),
            rule("service-sticky", &sticky),
            rule("endpoint-a", &one("10.0.0.7")),
            rule("endpoint-b", &one("10.0.0.8")),
        ]})
    }

    #[test]
    fn every_form_of_a_choice_is_read() {
        let mut choices = Choices::new();
        Table::new(&ruleset()).add_to(&mut choices).unwrap();
        let expected = [
            ("10.96.0.1:80/TCP", vec!["10.0.0.5:8080"]),
            ("10.96.0.1:81/TCP", vec![]),
            ("10.96.0.2:80/TCP", vec!["10.0.0.5:1", "10.0.0.6:2"]),
            ("10.96.0.3:80/TCP", vec!["10.0.0.7:8080", "10.0.0.8:8080"]),
        ];
        let expected = expected.map(|(frontend, endpoints)| {
            let endpoints = endpoints.iter().map(|it| it.parse().unwrap());
            (frontend.to_owned(), endpoints.collect())
        });
        assert_eq!(choices, Choices::from(expected));
    }

    #[test]
    fn a_chain_that_is_not_understood_is_an_error() {
        let mut ruleset = ruleset();
        ruleset["nftables"][3] = rule("service-one", &json!({"drop": null}));
        let error = Table::new(&ruleset).add_to(&mut Choices::new());
        let message = error.unwrap_err().to_string();
        assert_eq!(message, "chain service-one translates to nothing");
    }
}
