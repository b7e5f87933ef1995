//! `shunt.dev/max-local-connections`: what endpoints of this node have no room
//! for goes to others.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use lab::fixture::{PATIENCE, Service, json, start, wait_until};
use lab::report::SessionReport;
use lab::{Lab, Node, Place as _, Pod, Process, Server};
use node_agent::bpf::{KernelMaps, Pins};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

/// Two endpoints here, and so many elsewhere, where some are tried at random, that
/// one is met but for one run in 10^14.
struct Stage {
    near: Node,
    client: Pod,
    here: [Pod; 2],
    _far: Pod,
    _node: Node,
    _running: [Server; 3],
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let (near, node) = (lab.node("n1").unwrap(), lab.node("n2").unwrap());
        let here = ["a", "b"].map(|name| near.pod(name, None).unwrap());
        let far = node.pod("far", None).unwrap();
        far.add_network("10.244.2.128/28").unwrap();
        let running =
            [&here[0], &here[1], &far].map(|pod| pod.serve("0.0.0.0:8080", pod.name()).unwrap());
        Self {
            client: near.pod("client", None).unwrap(),
            near,
            here,
            _far: far,
            _node: node,
            _running: running,
        }
    }

    fn write(&self, limit: Option<&str>, spec: &str) {
        let annotations: Vec<_> = limit
            .map(|limit| ("shunt.dev/max-local-connections", limit))
            .into_iter()
            .collect();
        let here = self.here.iter().map(|pod| (pod.ipv4().into(), "n1"));
        let far = (128..144).map(|last| (Ipv4Addr::new(10, 244, 2, last).into(), "n2"));
        let service = Service {
            annotations: &annotations,
            endpoints: here.chain(far).collect(),
            spec,
            ..Service::default()
        };
        self.near
            .write_manifest("cart.yaml", &service.yaml())
            .unwrap();
    }

    /// Opens a connection and says who answers.
    fn open(&self) -> Held {
        let mut process = self
            .client
            .start_lab_pod(&["session", "tcp", CART])
            .unwrap();
        let report: SessionReport = process.command("ask").unwrap();
        Held {
            process,
            id: report.id.unwrap(),
        }
    }

    fn open_many(&self, count: usize) -> (Vec<Held>, BTreeMap<String, usize>) {
        let held: Vec<_> = (0..count).map(|_| self.open()).collect();
        let mut ids = BTreeMap::new();
        for it in &held {
            *ids.entry(it.id.clone()).or_default() += 1;
        }
        (held, ids)
    }

    /// How many connections the kernel counts, in all.
    fn counted(&self) -> u64 {
        let maps = KernelMaps::open(&Pins::new(&self.near.pins())).unwrap();
        maps.loads().unwrap().values().sum()
    }

    fn spilled(&self) -> u64 {
        let status = json(&self.near, &["status"]);
        status["counters"]["connect_spilled"].as_u64().unwrap()
    }

    fn wait_for_limit(&self, limit: Option<u64>) {
        wait_until("the limit is in force", || {
            let routes = json(&self.near, &["routes"]);
            routes["routes"][0]["max_local_connections"] == Value::from(limit)
        });
    }
}

/// An open connection; dropping it kills the client.
struct Held {
    process: Process,
    id: String,
}

fn counts(all: &[(&str, usize)]) -> BTreeMap<String, usize> {
    all.iter()
        .map(|(id, count)| ((*id).to_owned(), *count))
        .collect()
}

#[test]
fn connections_spill_once_each_endpoint_here_is_full() {
    let mut lab = Lab::new("spill").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(Some("2"), "");
    let agent = start(&stage.near, &[]);

    let (mut held, ids) = stage.open_many(7);
    assert_eq!(ids, counts(&[("a", 2), ("b", 2), ("far", 3)]));
    assert_eq!((stage.counted(), stage.spilled()), (4, 3));

    // The place of one that was killed, and of one that ended, is free again;
    // also when an agent comes that has seen neither begin.
    agent.kill().unwrap();
    let place = |id: &str| held.iter().position(|it| it.id == id).unwrap();
    let killed = place("a");
    drop(held.remove(killed));
    let place = held.iter().position(|it| it.id == "b").unwrap();
    let ended = held.remove(place);
    drop(ended.process);
    wait_until("both are closed", || stage.counted() == 2);
    let _agent = start(&stage.near, &[]);
    let (more, ids) = stage.open_many(3);
    assert_eq!(ids, counts(&[("a", 1), ("b", 1), ("far", 1)]));

    // Without a limit nothing is counted, and all are here again.
    stage.write(None, "");
    stage.wait_for_limit(None);
    let (_most, ids) = stage.open_many(4);
    assert!(!ids.contains_key("far"), "{ids:?}");
    drop((held, more));
    wait_until("all are closed", || stage.counted() == 0);
}

#[test]
fn a_policy_of_local_is_never_widened_and_nobody_is_turned_away() {
    let mut lab = Lab::new("spilllocal").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(Some("1"), "internalTrafficPolicy: Local");
    let _agent = start(&stage.near, &[]);
    let (_held, ids) = stage.open_many(6);
    assert!(!ids.contains_key("far"), "{ids:?}");
    assert_eq!(stage.spilled(), 0);
}

#[test]
fn a_limit_that_is_none_is_passed_over() {
    let mut lab = Lab::new("spillbad").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(Some("0"), "");
    let mut agent = start(&stage.near, &[]);
    agent
        .wait_for_log("a whole number from 1", PATIENCE)
        .unwrap();
    let (_held, ids) = stage.open_many(4);
    assert!(!ids.contains_key("far"), "{ids:?}");
}
