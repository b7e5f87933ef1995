//! `shunt top`.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use shunt_common::{Direction, End, Pair, ServiceCounts, ServiceKey};

use super::{Output, PinsArgs, print, service_name};
use crate::bpf::{KernelMaps, check_privileges};
use crate::report::plain_table;

/// What each Service gets on this node, as it happens: connects, how many of them
/// stay on the node, and what is spliced. Works without the agent.
#[derive(Args, Debug)]
pub(super) struct TopArgs {
    /// Time between two looks.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    interval: Duration,
    /// End after so many tables. Otherwise go on until interrupted.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// How to print it. JSON is one line for each look.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

/// The JSON form.
#[derive(Debug, PartialEq, Serialize)]
struct TopReport {
    /// Between the two looks.
    seconds: f64,
    total: Figures,
    /// The busiest first.
    services: Vec<Row>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Row {
    /// `namespace/service:port`; the ClusterIP if the name is gone; nothing for
    /// connections to the addresses of pods.
    service: Option<String>,
    #[serde(flatten)]
    figures: Figures,
}

/// Of a Service port, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Figures {
    /// Connects and new flows of datagrams that were given an endpoint, a second.
    connects_per_second: f64,
    /// The share of these whose endpoint is on this node; nothing without any.
    local_share: Option<f64>,
    /// TCP connections within this node that are open.
    open: u64,
    /// Of these, those that are in the splice.
    spliced: u64,
    /// Bytes that went past TCP, a second, on connections that are still open.
    spliced_bytes_per_second: f64,
}

/// What the maps hold at one time.
#[derive(Default)]
struct Sample {
    counts: BTreeMap<ServiceKey, ServiceCounts>,
    pairs: BTreeMap<u64, Pair>,
}

/// What happened between two samples.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    connects: u64,
    local: u64,
    open: u64,
    spliced: u64,
    bytes: u64,
}

pub(super) fn top(args: &TopArgs) -> Result<()> {
    ensure!(
        args.interval >= Duration::from_millis(100),
        "--interval is {}; at least 100ms are needed to count anything",
        humantime::format_duration(args.interval)
    );
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let maps = KernelMaps::open(&pins)?;
    let (mut before, mut at) = (Sample::read(&maps)?, Instant::now());
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        left -= 1;
        thread::sleep(args.interval);
        let (after, now) = (Sample::read(&maps)?, Instant::now());
        let report = report(&before, &after, now - at, |key| service_name(&maps, key));
        match args.output {
            Output::Json => print(&serde_json::to_string(&report)?)?,
            Output::Table | Output::Wide => print(&screen(&report))?,
        }
        (before, at) = (after, now);
    }
    Ok(())
}

impl Sample {
    fn read(maps: &KernelMaps) -> Result<Self> {
        Ok(Self {
            counts: maps.service_counts()?,
            pairs: maps.pairs()?,
        })
    }
}

fn report(
    before: &Sample,
    after: &Sample,
    elapsed: Duration,
    name: impl Fn(&ServiceKey) -> String,
) -> TopReport {
    let seconds = elapsed.as_secs_f64();
    let changes = changes(before, after);
    let mut services: Vec<(Change, Row)> = changes
        .iter()
        .map(|(key, change)| {
            let service = key.as_ref().map(&name);
            let figures = change.figures(seconds);
            (*change, Row { service, figures })
        })
        .collect();
    services.sort_by(|(one, one_row), (other, other_row)| {
        (other.connects, other.open, other.bytes)
            .cmp(&(one.connects, one.open, one.bytes))
            .then_with(|| one_row.service.cmp(&other_row.service))
    });
    let total = changes
        .into_values()
        .fold(Change::default(), |sum, one| sum.plus(one));
    TopReport {
        seconds,
        total: total.figures(seconds),
        services: services.into_iter().map(|(_, row)| row).collect(),
    }
}

/// Of each Service port with anything to tell.
fn changes(before: &Sample, after: &Sample) -> BTreeMap<Option<ServiceKey>, Change> {
    let mut changes: BTreeMap<Option<ServiceKey>, Change> = BTreeMap::new();
    for (key, counts) in &after.counts {
        // A Service that was gone meanwhile counts anew.
        let old = before.counts.get(key).copied().unwrap_or_default();
        let connects = counts
            .connects
            .checked_sub(old.connects)
            .unwrap_or(counts.connects);
        if connects > 0 {
            let change = changes.entry(Some(*key)).or_default();
            change.connects = connects;
            let local = counts.local.checked_sub(old.local).unwrap_or(counts.local);
            // The two are not read in one step.
            change.local = local.min(connects);
        }
    }
    for (cookie, pair) in &after.pairs {
        let change = changes.entry(pair.service().copied()).or_default();
        let bytes = before.pairs.get(cookie).map_or(0, spliced_bytes);
        change.open += 1;
        change.spliced += u64::from(is_spliced(pair));
        change.bytes += spliced_bytes(pair).saturating_sub(bytes);
    }
    changes
}

impl Change {
    fn plus(self, other: Self) -> Self {
        Self {
            connects: self.connects + other.connects,
            local: self.local + other.local,
            open: self.open + other.open,
            spliced: self.spliced + other.spliced,
            bytes: self.bytes + other.bytes,
        }
    }

    fn figures(self, seconds: f64) -> Figures {
        Figures {
            connects_per_second: self.connects as f64 / seconds,
            local_share: (self.connects > 0).then(|| self.local as f64 / self.connects as f64),
            open: self.open,
            spliced: self.spliced,
            spliced_bytes_per_second: self.bytes as f64 / seconds,
        }
    }
}

/// Whether one direction at least goes past TCP.
fn is_spliced(pair: &Pair) -> bool {
    let is_engaged = |own: &End, peer| own.direction(peer) == Direction::Engaged;
    is_engaged(&pair.client, &pair.server) || is_engaged(&pair.server, &pair.client)
}

fn spliced_bytes(pair: &Pair) -> u64 {
    pair.client.bytes + pair.server.bytes
}

fn screen(report: &TopReport) -> String {
    let mut table = plain_table([
        "SERVICE",
        "CONNECTS/S",
        "LOCAL",
        "OPEN",
        "SPLICED",
        "MB/S SPLICED",
    ]);
    let mut add = |name: &str, figures: &Figures| {
        let share = figures
            .local_share
            .map(|share| format!("{:.0}%", share * 100.0));
        table.add_row([
            name.to_owned(),
            format!("{:.1}", figures.connects_per_second),
            share.unwrap_or_else(|| "-".to_owned()),
            figures.open.to_string(),
            figures.spliced.to_string(),
            format!("{:.1}", figures.spliced_bytes_per_second / 1e6),
        ]);
    };
    for row in &report.services {
        add(
            row.service.as_deref().unwrap_or("(pod addresses)"),
            &row.figures,
        );
    }
    add("all", &report.total);
    // Each table takes the place of the one before.
    let clear = if io::stdout().is_terminal() {
        "\x1b[H\x1b[2J"
    } else {
        ""
    };
    format!("{clear}{}\n", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use shunt_common::{SocketKey, Stage, address};

    use super::*;

    fn service(port: u16) -> ServiceKey {
        ServiceKey::from_parts("10.96.0.10".parse().unwrap(), port, ServiceKey::TCP)
    }

    fn sample(counts: &[(u16, u64, u64)], pairs: &[(u64, Pair)]) -> Sample {
        let count = |&(port, connects, local): &(u16, u64, u64)| {
            (service(port), ServiceCounts { connects, local })
        };
        Sample {
            counts: counts.iter().map(count).collect(),
            pairs: pairs.iter().copied().collect(),
        }
    }

    /// An engaged pair whose client has sent so much past TCP.
    fn pair(port: u16, bytes: u64) -> Pair {
        let end = |text: &str| {
            let address: std::net::SocketAddr = text.parse().unwrap();
            (address::from_ip(address.ip()), address.port().to_be_bytes())
        };
        let key = SocketKey::new(1, end("10.1.0.2:40000"), end("10.1.0.3:8080"), 10, 20);
        let mut pair = Pair::EMPTY;
        pair.begin(key, service(port));
        pair.client.tcp_sock = 1;
        pair.server.tcp_sock = 2;
        (pair.client.member, pair.server.member) = (1, 1);
        pair.client.stage = Stage::Engaged as u8;
        pair.client.bytes = bytes;
        pair
    }

    #[test]
    fn figures_are_of_the_time_between_the_looks() {
        let before = sample(&[(80, 100, 50), (81, 7, 7)], &[(1, pair(81, 1000))]);
        let after = sample(
            &[(80, 120, 55), (81, 7, 7)],
            &[(1, pair(81, 5000)), (2, pair(81, 2000))],
        );
        let name = |key: &ServiceKey| u16::from_be_bytes(key.port()).to_string();
        let report = report(&before, &after, Duration::from_secs(2), name);
        let names: Vec<_> = report
            .services
            .iter()
            .map(|row| row.service.clone())
            .collect();
        assert_eq!(names, [Some("80".to_owned()), Some("81".to_owned())]);
        let busy = report.services[0].figures;
        assert_eq!(
            (busy.connects_per_second, busy.local_share),
            (10.0, Some(0.25))
        );
        let spliced = report.services[1].figures;
        assert_eq!((spliced.open, spliced.spliced), (2, 2));
        assert_eq!(spliced.spliced_bytes_per_second, 3000.0);
        assert_eq!(spliced.local_share, None);
        assert_eq!(report.total.connects_per_second, 10.0);
    }

    #[test]
    fn a_service_that_was_gone_meanwhile_counts_anew() {
        let before = sample(&[(80, 100, 50)], &[]);
        let after = sample(&[(80, 4, 3)], &[]);
        let changes = changes(&before, &after);
        let change = changes[&Some(service(80))];
        assert_eq!((change.connects, change.local), (4, 3));
    }
}
