//! `shunt sockets`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use shunt_common::{Role, ServiceKey, SocketEntry, SocketKey, address};

use super::{Output, PinsArgs, print};
use crate::bpf::{KernelMaps, check_privileges};
use crate::report::plain_table;

/// Same-node connections of the Services that are spliced, and whether they
/// are.
#[derive(Args, Debug)]
pub(super) struct SocketsArgs {
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

/// The JSON form.
#[derive(Debug, Serialize)]
struct SocketsReport {
    sockets: Vec<Pair>,
}

/// One connection.
#[derive(Debug, Serialize)]
struct Pair {
    client: SocketAddr,
    server: SocketAddr,
    /// `namespace/service:port`; the ClusterIP if the name is gone.
    service: String,
    cluster_ip: IpAddr,
    state: PairState,
    /// Whether bytes have gone past TCP.
    spliced: bool,
    to_server: Flow,
    to_client: Flow,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum PairState {
    /// The client's socket is known; its peer was not found, or is not yet up.
    Registered,
    /// Both sockets are known.
    Paired,
}

/// What went past TCP in one direction.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Flow {
    messages: u64,
    bytes: u64,
}

pub(super) fn sockets(args: &SocketsArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let maps = KernelMaps::open(&pins)?;
    let report = SocketsReport {
        sockets: pairs(&maps.sockets()?, |key| name(&maps, key)),
    };
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table | Output::Wide => print(&table(&report)),
    }
}

/// One row for each client; a server whose client is gone is about to close.
fn pairs(sockets: &[(SocketKey, SocketEntry)], name: impl Fn(&ServiceKey) -> String) -> Vec<Pair> {
    let by_key: BTreeMap<_, _> = sockets.iter().map(|(key, entry)| (*key, entry)).collect();
    let pair = |(key, entry): &(SocketKey, SocketEntry)| {
        let server = by_key.get(&key.peer(entry.peer_netns_cookie));
        let to_server = flow(entry);
        let to_client = server.map_or_else(Flow::default, |entry| flow(entry));
        Pair {
            client: key.local_address(),
            server: key.remote_address(),
            service: name(entry.service()),
            cluster_ip: address::to_ip(entry.service().address()),
            state: if entry.is_paired() {
                PairState::Paired
            } else {
                PairState::Registered
            },
            spliced: to_server.messages + to_client.messages > 0,
            to_server,
            to_client,
        }
    };
    let mut pairs: Vec<_> = sockets
        .iter()
        .filter(|(_, entry)| entry.role() == Role::Client)
        .map(pair)
        .collect();
    pairs.sort_by_key(|pair| (pair.client, pair.server));
    pairs
}

fn flow(entry: &SocketEntry) -> Flow {
    Flow {
        messages: entry.messages,
        bytes: entry.bytes,
    }
}

fn name(maps: &KernelMaps, key: &ServiceKey) -> String {
    let Some(name) = maps.name(key) else {
        let port = u16::from_be_bytes(key.port());
        return SocketAddr::from((address::to_ip(key.address()), port)).to_string();
    };
    let port = if name.port().is_empty() {
        String::new()
    } else {
        format!(":{}", name.port())
    };
    format!("{}/{}{port}", name.namespace(), name.service())
}

fn table(report: &SocketsReport) -> String {
    if report.sockets.is_empty() {
        return "No same-node connections of spliced Services.".to_owned();
    }
    let mut table = plain_table([
        "CLIENT",
        "SERVER",
        "SERVICE",
        "STATE",
        "TO SERVER",
        "BYTES",
        "TO CLIENT",
        "BYTES",
    ]);
    for pair in &report.sockets {
        let state = match (pair.state, pair.spliced) {
            (PairState::Registered, _) => "registered",
            (PairState::Paired, false) => "paired",
            (PairState::Paired, true) => "spliced",
        };
        table.add_row([
            pair.client.to_string(),
            pair.server.to_string(),
            pair.service.clone(),
            state.to_owned(),
            pair.to_server.messages.to_string(),
            pair.to_server.bytes.to_string(),
            pair.to_client.messages.to_string(),
            pair.to_client.bytes.to_string(),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(cookie: u64, local: &str, remote: &str, seqs: (u32, u32)) -> SocketKey {
        let parts = |text: &str| {
            let address: SocketAddr = text.parse().unwrap();
            (address::from_ip(address.ip()), address.port().to_be_bytes())
        };
        SocketKey::new(cookie, parts(local), parts(remote), seqs.0, seqs.1)
    }

    #[test]
    fn the_two_ends_of_a_connection_are_one_row() {
        let service = ServiceKey::from_parts("10.96.0.10".parse().unwrap(), 80, ServiceKey::TCP);
        let client_key = end(1, "10.1.0.2:40000", "10.1.0.3:8080", (10, 20));
        let server_key = end(2, "10.1.0.3:8080", "10.1.0.2:40000", (20, 10));
        let mut client = SocketEntry::new(0x100, service, Role::Client);
        (client.peer_tcp_sock, client.peer_netns_cookie) = (0x200, 2);
        (client.messages, client.bytes) = (3, 30);
        let mut server = SocketEntry::new(0x200, service, Role::Server);
        (server.messages, server.bytes) = (4, 40);
        let alone = end(1, "10.1.0.2:40001", "10.1.0.3:8080", (1, 2));
        let sockets = [
            (server_key, server),
            (alone, SocketEntry::new(0x300, service, Role::Client)),
            (client_key, client),
        ];

        let pairs = pairs(&sockets, |_| "shop/cart:http".to_owned());

        let summary: Vec<_> = pairs
            .iter()
            .map(|pair| {
                (
                    pair.client.port(),
                    pair.spliced,
                    pair.to_server.bytes,
                    pair.to_client.bytes,
                )
            })
            .collect();
        assert_eq!(summary, [(40000, true, 30, 40), (40001, false, 0, 0)]);
    }
}
