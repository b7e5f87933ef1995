//! `shunt sockets`.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use shunt_common::{Direction, End, Pair, ServiceKey, SpliceReason, address};

use super::{Output, PinsArgs, print, service_name};
use crate::bpf::{KernelMaps, check_privileges};
use crate::report::plain_table;

/// Connections within this node, whether they are spliced, and if not, why.
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
    sockets: Vec<Row>,
}

/// One connection.
#[derive(Debug, Serialize)]
struct Row {
    client: SocketAddr,
    server: SocketAddr,
    /// `namespace/service:port`; the ClusterIP if the name is gone; nothing if the
    /// client did not connect to a Service.
    service: Option<String>,
    cluster_ip: Option<IpAddr>,
    state: State,
    /// Why it is not spliced, or not any more.
    reason: Option<&'static str>,
    /// How often it was put into the splice.
    promotions: u8,
    to_server: Flow,
    to_client: Flow,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// The client's socket is known; its peer was not found, or is not yet up.
    Registered,
    /// Both sockets are known, and all goes by TCP.
    Paired,
    /// The sockets can be redirected to.
    Promoted,
    /// On the way back to TCP.
    Demoting,
}

/// One direction.
#[derive(Clone, Copy, Debug, Serialize)]
struct Flow {
    /// Whether all messages are put on the peer's receive queue.
    spliced: bool,
    messages: u64,
    bytes: u64,
    /// Messages by TCP while the connection was promoted.
    messages_tcp: u64,
}

pub(super) fn sockets(args: &SocketsArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let maps = KernelMaps::open(&pins)?;
    let pairs = maps.pairs()?;
    let mut sockets: Vec<_> = pairs
        .values()
        .map(|pair| row(pair, |key| service_name(&maps, key)))
        .collect();
    sockets.sort_by_key(|row| (row.client, row.server));
    let report = SocketsReport { sockets };
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table | Output::Wide => print(&table(&report)),
    }
}

fn row(pair: &Pair, name: impl Fn(&ServiceKey) -> String) -> Row {
    let to_server = pair.client.direction(&pair.server);
    let to_client = pair.server.direction(&pair.client);
    let is = |direction| to_server == direction || to_client == direction;
    let state = if !pair.is_complete() {
        State::Registered
    } else if is(Direction::Latched) || is(Direction::Frozen) {
        State::Demoting
    } else if is(Direction::Member) || is(Direction::Engaged) {
        State::Promoted
    } else {
        State::Paired
    };
    Row {
        client: pair.key().local_address(),
        server: pair.key().remote_address(),
        service: pair.service().map(name),
        cluster_ip: pair.service().map(|key| address::to_ip(key.address())),
        state,
        reason: reason(pair, state).map(SpliceReason::name),
        promotions: pair.promotions,
        to_server: flow(&pair.client, to_server),
        to_client: flow(&pair.server, to_client),
    }
}

/// What a process did to a socket; of a pair that was given up, why; else what the
/// last look said.
fn reason(pair: &Pair, state: State) -> Option<SpliceReason> {
    if matches!(state, State::Registered | State::Promoted) {
        return None;
    }
    let marks = pair.marks.all();
    if marks.is_some() {
        return Some(marks.reason());
    }
    let latched = [&pair.client, &pair.server]
        .into_iter()
        .find(|end| end.is_latched());
    latched
        .and_then(|end| SpliceReason::from_u8(end.reason))
        .or_else(|| pair.verdict())
}

fn flow(end: &End, direction: Direction) -> Flow {
    Flow {
        spliced: direction == Direction::Engaged,
        messages: end.messages,
        bytes: end.bytes,
        messages_tcp: end.messages_tcp,
    }
}

fn table(report: &SocketsReport) -> String {
    if report.sockets.is_empty() {
        return "No connections within this node that may be spliced.".to_owned();
    }
    let mut table = plain_table([
        "CLIENT",
        "SERVER",
        "SERVICE",
        "STATE",
        "REASON",
        "TO SERVER",
        "BYTES",
        "TO CLIENT",
        "BYTES",
    ]);
    for row in &report.sockets {
        let state = match row.state {
            State::Registered => "registered",
            State::Paired => "paired",
            State::Promoted if row.to_server.spliced && row.to_client.spliced => "spliced",
            State::Promoted if row.to_server.spliced => "spliced to server",
            State::Promoted if row.to_client.spliced => "spliced to client",
            State::Promoted => "promoted",
            State::Demoting => "demoting",
        };
        table.add_row([
            row.client.to_string(),
            row.server.to_string(),
            row.service.clone().unwrap_or_else(|| "-".to_owned()),
            state.to_owned(),
            row.reason.unwrap_or("-").to_owned(),
            row.to_server.messages.to_string(),
            row.to_server.bytes.to_string(),
            row.to_client.messages.to_string(),
            row.to_client.bytes.to_string(),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use shunt_common::{Mark, SocketKey, Stage};

    use super::*;

    fn pair() -> Pair {
        let service = ServiceKey::from_parts("10.96.0.10".parse().unwrap(), 80, ServiceKey::TCP);
        let end = |text: &str| {
            let address: SocketAddr = text.parse().unwrap();
            (address::from_ip(address.ip()), address.port().to_be_bytes())
        };
        let key = SocketKey::new(1, end("10.1.0.2:40000"), end("10.1.0.3:8080"), 10, 20);
        let mut pair = Pair::EMPTY;
        pair.begin(key, service);
        pair.client.tcp_sock = 1;
        pair
    }

    fn shown(pair: &Pair) -> (State, Option<&'static str>) {
        let row = row(pair, |_| "shop/cart:http".to_owned());
        assert_eq!(row.client.port(), 40000);
        (row.state, row.reason)
    }

    #[test]
    fn a_pair_is_shown_with_how_far_it_is_and_why_no_further() {
        let mut pair = pair();
        assert_eq!(shown(&pair), (State::Registered, None));
        pair.server.tcp_sock = 2;
        pair.verdict = SpliceReason::Blocking as u8;
        assert_eq!(shown(&pair), (State::Paired, Some("blocking")));
        (pair.client.member, pair.server.member) = (1, 1);
        pair.client.stage = Stage::Engaged as u8;
        assert_eq!(shown(&pair), (State::Promoted, None));
        pair.client.stage = Stage::Latched as u8;
        pair.client.reason = SpliceReason::SlowReader as u8;
        assert_eq!(shown(&pair), (State::Demoting, Some("slow_reader")));
        (pair.client.member, pair.server.member) = (0, 0);
        assert_eq!(shown(&pair), (State::Paired, Some("slow_reader")));
        pair.marks.server_options = Mark::LOW_WATER.0;
        assert_eq!(shown(&pair), (State::Paired, Some("low_water")));
    }
}
