//! kube-proxy's rules as data (`cases/kube-proxy.yaml`), each restated from its
//! upstream test or derived from its code, against the plan with `prefer=none`.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Instant;

use k8s_openapi::api::discovery::v1 as discovery;
use node_agent::apply::{Applier, MemoryMaps, service_key};
use node_agent::diff::diff;
use node_agent::model::{Object, ServicePort, convert};
use node_agent::plan::{Candidate, Place, Policy, candidates, plan, select};
use node_agent::serving::Serving;
use node_agent::state::{Event, State};
use node_agent::tables::{Frontend, Prefer, Protocol, Scope, Tables, Verdict};
use serde_json::{Value, json};
use shunt_common::{Affinity, AffinityKey, Choice, Demands, Slot, Source};

/// A ClusterIP for cases that name none.
const CLUSTER_IP: &str = "10.96.0.10";
const CLUSTER_IP_V6: &str = "fd00:96::10";

/// Kinds whose cases are about what shunt does not do: how kube-proxy counts its
/// changes, metrics, health checks, NodePorts.
const NOT_OURS: [&str; 5] = [
    "change",
    "cleanup",
    "metric",
    "health",
    "nodeport-localhost",
];

#[test]
fn every_case_of_kube_proxy_holds() {
    let file: Value = serde_saphyr::from_str(include_str!("cases/kube-proxy.yaml")).unwrap();
    let mut ran: BTreeMap<String, usize> = BTreeMap::new();
    for case in list(&file["cases"]) {
        let kind = text(&case["kind"]);
        match kind {
            "select" => check_select(case),
            "slices" => check_slices(case, &case["slices"]),
            "transition" => check_transition(case),
            "flow" => check_flow(case),
            "service" => check_service(case),
            "udp-cleanup" => check_udp_cleanup(case),
            "affinity" => check_affinity(case),
            other => assert!(NOT_OURS.contains(&other), "unknown kind {other}"),
        }
        *ran.entry(kind.to_owned()).or_default() += 1;
    }
    assert_eq!(json!(ran), file["counts"]);
}

/// One Service port, from endpoints to the set that a connect may use.
fn check_select(case: &Value) {
    let mut service = case["service"].clone();
    merge(
        &mut service,
        json!({"name": "cart", "clusterIP": CLUSTER_IP, "ports": [{"port": 80}]}),
    );
    let endpoints = list(&case["endpoints"]);
    let slices = endpoints.iter().enumerate().map(|(index, endpoint)| {
        let mut endpoint = endpoint.clone();
        endpoint["addresses"] = json!([endpoint["ip"]]);
        json!({"name": format!("cart-{index}"), "service": "cart", "addressType": "IPv4",
               "ports": [{"port": endpoint["port"]}], "endpoints": [endpoint]})
    });
    let state = state(case, [&service], slices.collect::<Vec<_>>().iter());
    // All releases that shunt is for read hints for nodes.
    if case["node_hints_enabled"] != false {
        let tables = tables(&state, case);
        expect_action(
            case,
            &tables,
            &frontend(CLUSTER_IP, 80, "TCP"),
            &case["expect"]["clusterip"],
        );
    }
    if case["expect"]["cluster_set"].is_array() {
        let place = place(case, &state);
        let service = state.services().next().unwrap();
        let all = candidates(
            state.slices(&service.name),
            &service.ports[0],
            false,
            &place,
        );
        let selection = select(&all, false, &place);
        let scope = selection.scope();
        let usable = all
            .iter()
            .filter(|it| selection.exclusion(scope, it).is_none());
        let usable = sorted(usable.map(|it| json!(it.endpoint.address)));
        assert_eq!(usable, case["expect"]["cluster_set"], "{case}");
    }
}

/// Slices applied in order, to what is known of the endpoints and what is used.
fn check_slices(case: &Value, slices: &Value) {
    let expect = &case["expect"];
    let mut keys: Vec<&str> = list(slices)
        .iter()
        .map(|slice| text(&slice["service"]))
        .collect();
    keys.sort_unstable();
    keys.dedup();
    let services: Vec<Value> = keys
        .iter()
        .map(|name| service_for(case, slices, name))
        .collect();
    let state = state(case, &services, list(slices));
    let (mut held, mut usable) = (json!({}), json!({}));
    for service in state.services() {
        for port in &service.ports {
            let key = format!("{}:{}/{}", service.name, port.name, port.protocol);
            let candidates = of_port(case, &state, &service.name, port);
            let route = &tables(&state, case).routes[&frontend(
                &service.cluster_ips[0].to_string(),
                port.port,
                &port.protocol.to_string(),
            )];
            let used = route.tiers[0].endpoints.iter().map(|it| json!(it.address));
            // The file names what holds something, and what is asked for.
            if !candidates.is_empty() {
                held[&key] = sorted(candidates.iter().map(condition));
            }
            if !candidates.is_empty() || !expect["clusterip_usable"][&key].is_null() {
                usable[&key] = sorted(used);
            }
        }
    }
    if let Some(allowed) = expect["clusterip_usable_any_of"].as_array() {
        assert!(allowed.contains(&usable), "{usable}: {case}");
        return;
    }
    assert_eq!(held, expect["held"], "{case}");
    assert_eq!(usable, expect["clusterip_usable"], "{case}");
}

/// The slices after count, however they came about.
fn check_transition(case: &Value) {
    let all = [list(&case["before"]), list(&case["after"])].concat();
    let mut changed = case.clone();
    changed["deleted"] = list(&case["before"])
        .iter()
        .filter(|old| {
            !list(&case["after"])
                .iter()
                .any(|new| name_of(new) == name_of(old))
        })
        .cloned()
        .collect();
    check_slices(&changed, &Value::Array(all));
}

/// Connects to ClusterIPs by pods and the node; what comes from outside, and
/// what goes to other addresses, is not shunt's.
fn check_flow(case: &Value) {
    let before = state(case, list(&case["services"]), list(&case["slices"]));
    let mut after = before.clone();
    for name in list(&case["then"]["delete_slices"]) {
        let slice = list(&case["slices"])
            .iter()
            .find(|slice| slice["name"] == *name)
            .unwrap();
        after.apply(Event::Delete(slice_object(slice).unwrap().reference()));
    }
    let (before, after) = (tables(&before, case), tables(&after, case));
    let cluster_ips: Vec<_> = list(&case["services"])
        .iter()
        .map(|it| &it["clusterIP"])
        .collect();
    for flow in list(&case["flows"]) {
        let external = text(&flow["from"]).starts_with("external");
        if external || !cluster_ips.contains(&&flow["dest"]) || flow["protocol"] == "SCTP" {
            continue;
        }
        let port = u16::try_from(flow["port"].as_u64().unwrap()).unwrap();
        let frontend = frontend(text(&flow["dest"]), port, text(&flow["protocol"]));
        if flow["expect"]["action"] == "refuse" && !before.routes.contains_key(&frontend) {
            // A port that the Service does not have: kube-proxy refuses, not shunt.
            assert!(!services_have(case, &frontend), "{case}");
            continue;
        }
        expect_action(case, &before, &frontend, &flow["expect"]);
        if case["then"].is_object() {
            expect_action(case, &after, &frontend, &case["then"]["expect"]);
        }
    }
}

/// Which addresses and ports are captured. Load-balancer addresses never are,
/// nor is IPv4 in a case about IPv6.
fn check_service(case: &Value) {
    let service = &case["service"];
    let versions = if service["before"].is_object() {
        vec![&service["before"], &service["after"]]
    } else {
        vec![service]
    };
    let mut state = State::default();
    for version in versions.into_iter().filter(|version| version.is_object()) {
        state.apply(Event::Apply(service_object(version)));
    }
    let ipv6 = case["family"] == "IPv6";
    let captured: Vec<Value> = tables(&state, case)
        .routes
        .keys()
        .filter(|it| it.address.is_ipv6() == ipv6)
        .map(|it| json!({"ip": it.address, "port": it.port, "protocol": it.protocol}))
        .collect();
    let own = |entry: &Value| json!({"ip": entry["ip"], "port": entry["port"], "protocol": entry["protocol"]});
    if let Some(expected) = case["expect"]["captured"].as_array() {
        let mut expected: Vec<Value> = expected.iter().map(own).collect();
        expected.sort_by_key(|it| it["port"].as_u64());
        assert_eq!(captured, expected, "{case}");
    } else {
        assert!(
            captured.iter().all(|it| it["ip"] == service["clusterIP"]),
            "{case}"
        );
    }
}

/// Connects one after the other, as the programs decide them from the table and
/// from what they remember of clients. NodePorts are kube-proxy's.
fn check_affinity(case: &Value) {
    let mut clients: BTreeMap<AffinityKey, Affinity> = BTreeMap::new();
    let mut names: BTreeMap<&str, Slot> = BTreeMap::new();
    let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
    let steps = list(&case["steps"])
        .iter()
        .filter(|it| it["via"] != "nodePort");
    for (turn, step) in (0_u32..).zip(steps) {
        let desired = tables(&affinity_state(case, step), case);
        let ops = diff(applier.actual(), &desired);
        applier.apply(ops, &mut maps, Instant::now());
        let port = if step["port"] == "https" { 443 } else { 80 };
        let service = service_key(&frontend(CLUSTER_IP, port, "TCP"));
        let snapshot = maps.snapshot();
        let record = snapshot
            .records
            .iter()
            .find(|it| it.key == service)
            .unwrap();

        let now_ns = (1_000 + step["t"].as_u64().unwrap()) * 1_000_000_000;
        let address: Ipv4Addr = text(&step["client"]).parse().unwrap();
        // A pod has a network namespace of its own, whatever runs in it.
        let client = AffinityKey::new(address.to_bits().into(), 0, service);
        let before = clients.get(&client).and_then(|it| it.at(now_ns));
        // Each turn would choose another one.
        let below = |count| turn % count;
        let slot = |index| record.slots.get(index as usize);
        let chosen = record.entry.choose(
            before,
            Demands::default(),
            below,
            slot,
            |_| true,
            |_, _| None,
        );
        let Choice::Endpoint(slot, source) = chosen else {
            panic!("no endpoint: {step}: {case}");
        };
        let affinity = record.entry.affinity(*slot, now_ns).unwrap();
        clients.insert(client, affinity);
        expect_endpoint(case, step, slot, source, &mut names);
    }
}

/// `any`, `any, call it F`, what was called so, or an endpoint of the set.
fn expect_endpoint<'a>(
    case: &Value,
    step: &'a Value,
    slot: &Slot,
    source: Source,
    names: &mut BTreeMap<&'a str, Slot>,
) {
    let expect = text(&step["expect"]);
    match (expect.strip_prefix("any, call it "), names.get(expect)) {
        (Some(name), _) => {
            assert!(matches!(source, Source::Drawn(_)), "{step}: {case}");
            names.insert(name, *slot);
        }
        (None, Some(known)) => {
            assert_eq!((slot, source), (known, Source::Kept), "{step}: {case}");
        }
        (None, None) if expect == "any" => {
            assert!(matches!(source, Source::Drawn(_)), "{step}: {case}");
        }
        (None, None) => {
            let Some(address) = endpoint_address(expect) else {
                panic!("expect {expect}: {case}");
            };
            assert_eq!(
                *slot,
                Slot::new(address.into(), 8080, false).on(slot.node()),
                "{step}: {case}"
            );
        }
    }
}

fn affinity_state(case: &Value, step: &Value) -> State {
    let seconds = &case["timeout_seconds"];
    let is_default = text(&case["from"]) == "derived: API default";
    let config = json!({"clientIP": {"timeoutSeconds": seconds}});
    let names = [("http", 80), ("https", 443)];
    let ports = names.map(|(name, port)| json!({"name": name, "port": port}));
    let service = json!({
        "name": "cart", "clusterIP": CLUSTER_IP, "ports": ports, "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": if is_default { Value::Null } else { config },
    });
    let ports = names.map(|(name, _)| json!({"name": name, "port": 8080, "protocol": "TCP"}));
    let endpoints: Vec<Value> = list(&step["set"])
        .iter()
        .map(|name| json!({"addresses": [endpoint_address(text(name)).unwrap()]}))
        .collect();
    let slice = json!({"name": "cart-1", "service": "cart", "addressType": "IPv4",
                       "ports": ports, "endpoints": endpoints});
    state(&json!({"node": {"name": "n1"}}), [&service], [&slice])
}

/// Of the endpoints that the cases call by these names.
fn endpoint_address(name: &str) -> Option<Ipv4Addr> {
    let last = (1..).zip(["X", "Y", "Z", "Remote", "Local"]);
    let (last, _) = last.into_iter().find(|(_, it)| *it == name)?;
    Some([10, 244, 0, last].into())
}

/// Sockets that shunt sent from a ClusterIP to a backend. Those that it did not
/// send anywhere are kube-proxy's: to other addresses, never translated, SCTP.
fn check_udp_cleanup(case: &Value) {
    for row in list(&case["rows"]) {
        let Some(backend) = row["backend"]
            .as_str()
            .filter(|_| row["protocol"] != "SCTP")
        else {
            continue;
        };
        let address = match text(&row["to"]) {
            "clusterIP" => CLUSTER_IP,
            "loadBalancerIP" => "192.0.2.4",
            "externalIP" => "198.51.100.7",
            "nodePort" => "192.168.77.1",
            other => panic!("to {other}: {case}"),
        };
        let port = match text(&row["port"]) {
            "service-port" => 80,
            "another-port" => 81,
            "node-port" => 30080,
            other => panic!("port {other}: {case}"),
        };
        let frontend = frontend(address, port, text(&row["protocol"]));
        let lost =
            Serving::of(&serving_state(case, row)).has_lost(&frontend, &backend.parse().unwrap());
        let expected = row["expect"] == "delete" && row["to"] == "clusterIP";
        assert_eq!(lost, expected, "{row}");
    }
}

/// As those of a Service with publishNotReadyAddresses. kube-proxy forgets their
/// flows, which goes unnoticed.
#[test]
fn a_backend_that_is_ready_but_does_not_serve_keeps_its_sockets() {
    let ports = json!([{"port": 80, "protocol": "UDP"}]);
    let service = json!({"name": "cart", "clusterIP": CLUSTER_IP, "ports": ports});
    let endpoint = json!({"addresses": ["10.240.0.4"], "ready": true, "serving": false});
    let slice = json!({"name": "cart-1", "service": "cart", "addressType": "IPv4",
                       "ports": [{"port": 9090, "protocol": "UDP"}], "endpoints": [endpoint]});
    let state = state(&json!({"node": {"name": "n1"}}), [&service], [&slice]);
    let frontend = frontend(CLUSTER_IP, 80, "UDP");
    let has_lost =
        |backend: &str| Serving::of(&state).has_lost(&frontend, &backend.parse().unwrap());
    assert!(!has_lost("10.240.0.4:9090") && has_lost("10.240.0.4:8080"));
}

/// A Service over UDP and TCP, with the backend as the row says, and with one
/// that serves unless the row has none.
fn serving_state(case: &Value, row: &Value) -> State {
    let ports = ["UDP", "TCP"].map(|protocol| json!({"port": 80, "protocol": protocol}));
    let service = json!({"name": "cart", "clusterIP": CLUSTER_IP, "ports": ports});
    let mut endpoints = Vec::new();
    if row["serving_endpoints"] != 0 {
        endpoints.push(json!({"addresses": ["10.240.0.4"]}));
    }
    match text(&row["backend_is"]) {
        "not serving" => {
            endpoints.push(json!({"addresses": ["10.240.1.5"], "ready": false, "serving": false}))
        }
        "serving, terminating" => {
            endpoints[0] = json!({"addresses": ["10.240.0.4"], "ready": false, "serving": true, "terminating": true});
            endpoints.push(json!({"addresses": ["10.240.0.9"]}));
        }
        "serving" | "no longer listed" | "serving address, old port" => {}
        other => panic!("backend is {other}: {case}"),
    }
    let ports = ["UDP", "TCP"].map(|protocol| json!({"port": 9090, "protocol": protocol}));
    let slice = json!({"name": "cart-1", "service": "cart", "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
    state(&json!({"node": {"name": "n1"}}), [&service], [&slice])
}

/// `drop` is what kube-proxy does for `Local` without a local endpoint; shunt
/// refuses, so that the caller does not hang.
fn expect_action(case: &Value, tables: &Tables, frontend: &Frontend, expect: &Value) {
    let route = tables.routes.get(frontend);
    let verdict = route.map(|route| route.verdict);
    match text(&expect["action"]) {
        "connect" => {
            assert_eq!(verdict, Some(Verdict::Balance), "{case}");
            let tiers = &route.unwrap().tiers;
            assert!(
                tiers.iter().all(|tier| tier.scope != Scope::Zone),
                "prefer=none: {case}"
            );
            let endpoints = sorted(tiers[0].endpoints.iter().map(|it| json!(it.address)));
            assert_eq!((&endpoints, tiers.len()), (&expect["to"], 1), "{case}");
        }
        "refuse" | "drop" => assert_eq!(verdict, Some(Verdict::Refuse), "{case}"),
        other => panic!("action {other}: {case}"),
    }
}

fn tables(state: &State, case: &Value) -> Tables {
    plan(
        state,
        text(&case["node"]["name"]),
        &Policy {
            prefer: Prefer::None,
        },
    )
}

fn place<'a>(case: &'a Value, state: &'a State) -> Place<'a> {
    let node = text(&case["node"]["name"]);
    let zone = state.node(node).and_then(|node| node.zone.as_deref());
    Place {
        node,
        zone,
        node_hints: case["node_hints_enabled"] != false,
    }
}

fn of_port<'a>(
    case: &Value,
    state: &'a State,
    service: &node_agent::model::ObjectName,
    port: &ServicePort,
) -> Vec<Candidate<'a>> {
    let place = Place {
        node: text(&case["node"]["name"]),
        zone: None,
        node_hints: true,
    };
    candidates(
        state.slices(service),
        port,
        case["family"] == "IPv6",
        &place,
    )
}

fn condition(candidate: &Candidate<'_>) -> Value {
    let place = if candidate.endpoint.local {
        "local"
    } else {
        "remote"
    };
    let it = candidate.of_slice;
    let condition = match (it.ready, it.serving && it.terminating) {
        (true, _) => "ready",
        (false, true) => "serving-terminating",
        (false, false) => "unready",
    };
    json!([candidate.endpoint.address.to_string(), place, condition])
}

/// As the file has them, by their text.
fn sorted(values: impl Iterator<Item = Value>) -> Value {
    let mut values: Vec<Value> = values.collect();
    values.sort_by_key(Value::to_string);
    Value::Array(values)
}

/// The state after the objects of a case, and after what it deletes.
fn state<'a>(
    case: &Value,
    services: impl IntoIterator<Item = &'a Value>,
    slices: impl IntoIterator<Item = &'a Value>,
) -> State {
    let mut state = State::default();
    let mut labels = json!({});
    if let Some(zone) = case["node"]["zone"].as_str() {
        labels["topology.kubernetes.io/zone"] = json!(zone);
    }
    let metadata = json!({"name": case["node"]["name"], "labels": labels});
    let node = convert::node(&serde_json::from_value(metadata).unwrap());
    state.apply(Event::Apply(Object::Node(node)));
    let objects = services.into_iter().map(service_object);
    let objects = objects.chain(slices.into_iter().filter_map(slice_object));
    objects.for_each(|object| state.apply(Event::Apply(object)));
    for slice in list(&case["deleted"]) {
        state.apply(Event::Delete(slice_object(slice).unwrap().reference()));
    }
    state
}

fn service_object(service: &Value) -> Object {
    let ports: Vec<Value> = list(&service["ports"])
        .iter()
        .map(|port| json!({"name": port["name"], "port": port["port"], "protocol": port["protocol"]}))
        .collect();
    let object = json!({
        "metadata": {"namespace": namespace(service), "name": service["name"].as_str().unwrap_or("cart"),
                     "labels": service["labels"]},
        "spec": {"type": service["type"], "clusterIP": service["clusterIP"],
                 "clusterIPs": service["clusterIPs"], "ports": ports,
                 "internalTrafficPolicy": service["internalTrafficPolicy"],
                 "sessionAffinity": service["sessionAffinity"],
                 "sessionAffinityConfig": service["sessionAffinityConfig"]},
    });
    Object::Service(convert::service(serde_json::from_value(object).unwrap()).unwrap())
}

fn slice_object(slice: &Value) -> Option<Object> {
    let mut labels = slice["labels"].clone();
    if slice["service"].is_string() {
        merge(
            &mut labels,
            json!({"kubernetes.io/service-name": slice["service"]}),
        );
    }
    let endpoints: Vec<Value> = list(&slice["endpoints"]).iter().map(endpoint).collect();
    let object = json!({
        "metadata": {"namespace": namespace(slice), "name": slice["name"], "labels": labels},
        "addressType": slice["addressType"], "ports": slice["ports"], "endpoints": endpoints,
    });
    let slice: discovery::EndpointSlice = serde_json::from_value(object).unwrap();
    convert::endpoint_slice(slice)
        .unwrap()
        .map(Object::EndpointSlice)
}

fn endpoint(endpoint: &Value) -> Value {
    let named = |names: &Value| -> Vec<Value> {
        list(names)
            .iter()
            .map(|name| json!({"name": name}))
            .collect()
    };
    let hints = json!({"forZones": named(&endpoint["hint_zones"]), "forNodes": named(&endpoint["hint_nodes"])});
    json!({
        "addresses": endpoint["addresses"], "nodeName": endpoint["node"], "zone": endpoint["zone"],
        "conditions": {"ready": endpoint["ready"], "serving": endpoint["serving"],
                       "terminating": endpoint["terminating"]},
        "hints": hints,
    })
}

/// A Service with each port that its slices ever had, and each that is asked for,
/// over TCP and UDP.
fn service_for(case: &Value, slices: &Value, name: &str) -> Value {
    let of_service = list(slices)
        .iter()
        .filter(|slice| text(&slice["service"]) == name);
    let mut names: Vec<&str> = of_service
        .clone()
        .flat_map(|slice| list(&slice["ports"]))
        .map(|port| text(&port["name"]))
        .collect();
    let asked = case["expect"]["clusterip_usable"]
        .as_object()
        .into_iter()
        .flat_map(|it| it.keys());
    names.extend(asked.filter_map(|key| key.split_once(':')?.1.split('/').next()));
    names.sort_unstable();
    names.dedup();
    let ports: Vec<Value> = (80..)
        .zip(names)
        .flat_map(|(port, name)| {
            ["TCP", "UDP"].map(|protocol| json!({"port": port, "name": name, "protocol": protocol}))
        })
        .collect();
    let cluster_ip = if case["family"] == "IPv6" {
        CLUSTER_IP_V6.to_owned()
    } else {
        // One of its own for each of a transition's Services.
        format!("10.96.1.{}", name.bytes().next().unwrap_or(0))
    };
    let namespace = of_service.map(namespace).next();
    json!({"namespace": namespace, "name": name, "clusterIP": cluster_ip, "ports": ports})
}

fn services_have(case: &Value, frontend: &Frontend) -> bool {
    list(&case["services"]).iter().any(|service| {
        text(&service["clusterIP"]).parse() == Ok(frontend.address)
            && list(&service["ports"]).iter().any(|port| {
                port["port"] == frontend.port && port["protocol"] == frontend.protocol.to_string()
            })
    })
}

fn frontend(address: &str, port: u16, protocol: &str) -> Frontend {
    let protocol = if protocol == "UDP" {
        Protocol::Udp
    } else {
        Protocol::Tcp
    };
    Frontend {
        address: address.parse().unwrap(),
        port,
        protocol,
    }
}

fn merge(into: &mut Value, from: Value) {
    if into.is_null() {
        *into = json!({});
    }
    into.as_object_mut()
        .unwrap()
        .extend(from.as_object().unwrap().clone());
}

fn name_of(object: &Value) -> (&str, &Value) {
    (namespace(object), &object["name"])
}

fn namespace(object: &Value) -> &str {
    object["namespace"].as_str().unwrap_or("default")
}

/// Empty if it is absent.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Empty if it is absent.
fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}
