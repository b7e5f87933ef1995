//! What `shunt sockets` says of the connections to a port while a program runs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lab::target_binary;
use lab::{Node, Place as _};
use serde_json::Value;

/// Between looks.
const PAUSE: Duration = Duration::from_millis(150);

/// Looks again and again until it is dropped.
pub(crate) struct Observer {
    ports: Arc<Mutex<BTreeMap<u16, Port>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The connections to one port.
#[derive(Clone, Debug, Default)]
struct Port {
    /// Promotions and messages past TCP, by the client's address.
    connections: BTreeMap<SocketAddr, (u64, u64)>,
    reasons: BTreeSet<String>,
}

/// The sum of all connections to a port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Connections.
    pub(crate) promoted: usize,
    /// Past TCP.
    pub(crate) messages: u64,
    /// Why some were not spliced, or not any more, at some time.
    pub(crate) reasons: BTreeSet<String>,
}

impl Observer {
    pub(crate) fn start(node: &Node) -> Self {
        let ports = Arc::new(Mutex::new(BTreeMap::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let mut command = node.command(target_binary("shunt", "SHUNT_BIN").unwrap());
        command
            .args(["sockets", "-o", "json", "--pins"])
            .arg(node.pins());
        let (all, is_over) = (Arc::clone(&ports), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let output = command.output().unwrap();
                assert!(output.status.success(), "{output:?}");
                let report: Value = serde_json::from_slice(&output.stdout).unwrap();
                for row in report["sockets"].as_array().unwrap() {
                    note(&mut all.lock().unwrap(), row);
                }
                thread::sleep(PAUSE);
            }
        });
        Self {
            ports,
            stop,
            thread: Some(thread),
        }
    }

    /// What was seen of a port so far.
    pub(crate) fn seen(&self, port: u16) -> Seen {
        let ports = self.ports.lock().unwrap();
        let Some(port) = ports.get(&port) else {
            return Seen::default();
        };
        Seen {
            promoted: port.connections.values().filter(|it| it.0 > 0).count(),
            messages: port.connections.values().map(|it| it.1).sum(),
            reasons: port.reasons.clone(),
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic there has been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Seen {
    /// In one line.
    pub(crate) fn reasons(&self) -> String {
        let all: Vec<_> = self.reasons.iter().map(String::as_str).collect();
        all.join(" ")
    }
}

fn note(ports: &mut BTreeMap<u16, Port>, row: &Value) {
    let address = |field: &str| row[field].as_str().unwrap().parse::<SocketAddr>().unwrap();
    let port = ports.entry(address("server").port()).or_default();
    let messages = |flow: &str| row[flow]["messages"].as_u64().unwrap();
    let promotions = row["promotions"].as_u64().unwrap();
    let connection = port.connections.entry(address("client")).or_default();
    connection.0 = connection.0.max(promotions);
    connection.1 = connection
        .1
        .max(messages("to_server") + messages("to_client"));
    if let Some(reason) = row["reason"].as_str() {
        port.reasons.insert(reason.to_owned());
    }
}
