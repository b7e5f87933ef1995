//! The metrics. Their names are in the README; a renamed one breaks alerts.

use std::fmt;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use shunt_common::{Counter, Heartbeat, LAYOUT_VERSION};

use super::{Admin, MetricsError, Progress};
use crate::agent::since_boot_ns;
use crate::bpf::{Fill, KernelMaps, Pins, ProgramState, ReadError, programs};

/// Of the OpenMetrics text format, version 1.0.0.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All of it, read now.
pub(super) fn text(admin: &Admin) -> Result<String, MetricsError> {
    let mut registry = Registry::with_prefix("shunt");
    registry.register_collector(Box::new(Sample::take(admin)?));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// The pinned maps.
pub(super) fn open(pins: &Pins) -> Result<KernelMaps, ReadError> {
    KernelMaps::open(pins)
}

/// What was read.
#[derive(Debug)]
struct Sample {
    progress: Progress,
    source_connected: bool,
    source_errors: u64,
    counters: [u64; Counter::COUNT],
    fill: Vec<Fill>,
    programs: Vec<ProgramState>,
    heartbeat: Heartbeat,
    now_ns: u64,
}

impl Sample {
    fn take(admin: &Admin) -> Result<Self, ReadError> {
        let maps = open(&admin.pins)?;
        Ok(Self {
            progress: admin.progress(),
            source_connected: admin.source.is_connected(Instant::now()),
            source_errors: admin.source.errors(),
            counters: maps.counters()?,
            fill: maps.fill()?,
            programs: programs(&admin.pins),
            heartbeat: maps.heartbeat()?,
            now_ns: since_boot_ns(),
        })
    }
}

/// A family of counters of the programs.
struct Family {
    /// Without the prefix and the suffix `_total`.
    name: &'static str,
    help: &'static str,
    /// The label that tells its members apart; empty if there is but one.
    label: &'static str,
}

const CONNECTS: Family = Family {
    name: "connects",
    help: "Connects and new UDP flows that the programs saw, by what became of them",
    label: "result",
};
const LOCAL_CONNECTS: Family = Family {
    name: "local_connects",
    help: "Of all connects given an endpoint, those given one on this node",
    label: "",
};
const SPILLED_CONNECTS: Family = Family {
    name: "spilled_connects",
    help: "Of all connects given an endpoint, those given one of a farther tier since each nearer one holds as many connections as it may",
    label: "",
};
const SYN_TIMEOUTS: Family = Family {
    name: "syn_timeouts",
    help: "SYNs of connects given an endpoint that had no answer in time",
    label: "",
};
const FAILED_CONNECTS: Family = Family {
    name: "failed_connects",
    help: "Connects given an endpoint that were refused there, or had no way",
    label: "",
};
const SUSPICIONS: Family = Family {
    name: "suspicions",
    help: "Suspicions of endpoints and nodes that did not answer, by what became of them",
    label: "change",
};
const PROBES: Family = Family {
    name: "probes",
    help: "Connects given a suspect endpoint to find out whether it answers",
    label: "",
};
const SUSPECTS_AVOIDED: Family = Family {
    name: "suspects_avoided",
    help: "Suspect endpoints passed over by connects",
    label: "",
};
const FAILED_FAST: Family = Family {
    name: "failed_fast",
    help: "Waiting connects that were ended early, since their endpoint is taken for dead",
    label: "",
};
const SELF_CHECKS: Family = Family {
    name: "self_checks",
    help: "Connects of the agent itself to its self-check address",
    label: "",
};
const NAMES_SHOWN: Family = Family {
    name: "names_shown",
    help: "Calls that were answered with the ClusterIP instead of the endpoint",
    label: "call",
};
const PAIRS: Family = Family {
    name: "pairs",
    help: "Connections within this node that may be spliced, by what became of them",
    label: "result",
};
const PROMOTIONS: Family = Family {
    name: "promotions",
    help: "Connections that were put into the splice",
    label: "",
};
const DEMOTIONS: Family = Family {
    name: "demotions",
    help: "Connections that were taken back to TCP",
    label: "",
};
const LATCHES: Family = Family {
    name: "latches",
    help: "Directions of connections that the kernel's side of the splice gave up",
    label: "",
};
const EVENTS_LOST: Family = Family {
    name: "events_lost",
    help: "Events of the splice for which there was no room",
    label: "",
};
const MESSAGES: Family = Family {
    name: "messages",
    help: "Messages of promoted connections, by the way that they took",
    label: "way",
};
const FAMILIES: [Family; 17] = [
    CONNECTS,
    LOCAL_CONNECTS,
    SPILLED_CONNECTS,
    SYN_TIMEOUTS,
    FAILED_CONNECTS,
    SUSPICIONS,
    PROBES,
    SUSPECTS_AVOIDED,
    FAILED_FAST,
    SELF_CHECKS,
    NAMES_SHOWN,
    PAIRS,
    PROMOTIONS,
    DEMOTIONS,
    LATCHES,
    EVENTS_LOST,
    MESSAGES,
];

/// The family of a counter, and its label there.
fn member(counter: Counter) -> (&'static str, &'static str) {
    match counter {
        Counter::ConnectNode => (CONNECTS.name, "node"),
        Counter::ConnectZone => (CONNECTS.name, "zone"),
        Counter::ConnectCluster => (CONNECTS.name, "cluster"),
        Counter::ConnectHints => (CONNECTS.name, "hints"),
        Counter::ConnectSame => (CONNECTS.name, "same"),
        Counter::Refused => (CONNECTS.name, "refused"),
        Counter::PassedNoEntry => (CONNECTS.name, "passed_no_entry"),
        Counter::PassedVerdict => (CONNECTS.name, "passed_verdict"),
        Counter::PassedOptedOut => (CONNECTS.name, "passed_opted_out"),
        Counter::PassedHost => (CONNECTS.name, "passed_host"),
        Counter::PassedStale => (CONNECTS.name, "passed_stale"),
        Counter::PassedRace => (CONNECTS.name, "passed_race"),
        Counter::PassedNoStorage => (CONNECTS.name, "passed_no_storage"),
        Counter::PassedNoRefusal => (CONNECTS.name, "passed_no_refusal"),
        Counter::ConnectLocal => (LOCAL_CONNECTS.name, ""),
        Counter::ConnectSpilled => (SPILLED_CONNECTS.name, ""),
        Counter::SynTimeouts => (SYN_TIMEOUTS.name, ""),
        Counter::ConnectsFailed => (FAILED_CONNECTS.name, ""),
        Counter::Suspected => (SUSPICIONS.name, "begun"),
        Counter::Cleared => (SUSPICIONS.name, "ended"),
        Counter::Probes => (PROBES.name, ""),
        Counter::SuspectsAvoided => (SUSPECTS_AVOIDED.name, ""),
        Counter::FailedFast => (FAILED_FAST.name, ""),
        Counter::SelfCheck => (SELF_CHECKS.name, ""),
        Counter::PeerNames => (NAMES_SHOWN.name, "getpeername"),
        Counter::SourceNames => (NAMES_SHOWN.name, "recvmsg"),
        Counter::PairsRegistered => (PAIRS.name, "registered"),
        Counter::PairsFound => (PAIRS.name, "found"),
        Counter::PairsFailed => (PAIRS.name, "failed"),
        Counter::Promotions => (PROMOTIONS.name, ""),
        Counter::Demotions => (DEMOTIONS.name, ""),
        Counter::Latches => (LATCHES.name, ""),
        Counter::EventsLost => (EVENTS_LOST.name, ""),
        Counter::MessagesSpliced => (MESSAGES.name, "spliced"),
        Counter::MessagesTcp => (MESSAGES.name, "tcp"),
    }
}

impl Collector for Sample {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        for family in FAMILIES {
            self.write_family(&mut page, &family)?;
        }
        self.write_maps(&mut page)?;
        self.write_agent(&mut page)?;
        self.write_objects(&mut page)
    }
}

impl Sample {
    fn write_family(&self, page: &mut Page<'_>, family: &Family) -> fmt::Result {
        let mut members = Counter::ALL
            .into_iter()
            .map(|it| (member(it), self.counters[it as usize]))
            .filter(|((name, _), _)| *name == family.name)
            .map(|((_, label), value)| (label, value));
        if family.label.is_empty() {
            let total = members.map(|(_, value)| value).sum();
            return page.counter(family.name, family.help, total);
        }
        let kind = MetricType::Counter;
        let mut metric = page
            .0
            .encode_descriptor(family.name, family.help, None, kind)?;
        members.try_for_each(|(label, value)| {
            let labels = [(family.label, label)];
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)
        })
    }

    fn write_maps(&self, page: &mut Page<'_>) -> fmt::Result {
        let fill = || self.fill.iter();
        page.gauges(
            "map_entries",
            "Entries of a BPF map",
            "map",
            fill().map(|it| (it.map, it.used)),
        )?;
        page.gauges(
            "map_capacity_entries",
            "Entries that fit into a BPF map; what does not is left to kube-proxy",
            "map",
            fill().map(|it| (it.map, it.capacity)),
        )?;
        let programs = self.programs.iter();
        page.gauges(
            "program_attached",
            "Whether a BPF program is attached; those of the splice are not where it is off",
            "program",
            programs.map(|it| (it.name, it.attachment.is_some().into())),
        )
    }

    fn write_agent(&self, page: &mut Page<'_>) -> fmt::Result {
        let version = env!("CARGO_PKG_VERSION");
        let layout = LAYOUT_VERSION.to_string();
        let help = "Version of shunt and of its map layout";
        let mut metric = page
            .0
            .encode_descriptor("build", help, None, MetricType::Info)?;
        metric.encode_info(&[("version", version), ("layout", &layout)])?;
        let progress = &self.progress;
        page.gauge(
            "ready",
            "Whether the table is written and the programs are attached",
            f64::from(u8::from(progress.ready)),
        )?;
        page.seconds(
            "heartbeat_age",
            "Time since the agent's last sign of life",
            seconds(self.now_ns.saturating_sub(self.heartbeat.beat_ns())),
        )?;
        page.seconds(
            "heartbeat_stale_after",
            "Age of the heartbeat from which on all connects pass to kube-proxy",
            seconds(self.heartbeat.stale_after_ns()),
        )?;
        page.seconds(
            "last_in_step_timestamp",
            "When the table was last what the objects ask for, since the epoch; 0 if never",
            progress.in_step.map_or(0.0, since_epoch),
        )?;
        page.counter(
            "table_writes",
            "Service ports written to or deleted from the table",
            progress.writes,
        )?;
        page.counter(
            "table_write_failures",
            "Service ports that could not be written, each time",
            progress.failed_writes,
        )?;
        page.counter(
            "udp_sockets_destroyed",
            "Connected UDP sockets that were destroyed, since their endpoint stopped serving",
            progress.udp_sockets_destroyed as u64,
        )?;
        page.counter(
            "reconciliations",
            "How often the agent looked for what is to be done",
            progress.reconciliations,
        )?;
        page.gauge(
            "routes",
            "Service ports in the table",
            count(progress.routes),
        )?;
        page.gauge(
            "pending_routes",
            "Service ports that could not be written and are tried again",
            count(progress.pending_routes),
        )
    }

    fn write_objects(&self, page: &mut Page<'_>) -> fmt::Result {
        page.gauge(
            "source_connected",
            "Whether the source of objects has given its first full list, and no error since or lately",
            f64::from(u8::from(self.source_connected)),
        )?;
        page.counter(
            "source_errors",
            "Answers of the source of objects that were errors",
            self.source_errors,
        )?;
        page.gauge(
            "rejected_objects",
            "Objects that are left out since they can't be right",
            count(self.progress.rejected_objects),
        )?;
        page.gauge(
            "unreadable_documents",
            "Documents of the manifests that can't be read",
            count(self.progress.unreadable_documents),
        )
    }
}

/// Where metrics are written to.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let kind = MetricType::Counter;
        let metric = self.0.encode_descriptor(name, help, None, kind)?;
        ConstCounter::new(value).encode(metric)
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let kind = MetricType::Gauge;
        let metric = self.0.encode_descriptor(name, help, None, kind)?;
        ConstGauge::new(value).encode(metric)
    }

    fn seconds(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let (unit, kind) = (Unit::Seconds, MetricType::Gauge);
        let metric = self.0.encode_descriptor(name, help, Some(&unit), kind)?;
        ConstGauge::new(value).encode(metric)
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        mut values: impl Iterator<Item = (&'static str, usize)>,
    ) -> fmt::Result {
        let kind = MetricType::Gauge;
        let mut metric = self.0.encode_descriptor(name, help, None, kind)?;
        values.try_for_each(|(member, value)| {
            let labels = [(label, member)];
            ConstGauge::new(count(value)).encode(metric.encode_family(&labels)?)
        })
    }
}

/// Exact up to 2^53.
fn count(number: usize) -> f64 {
    number as f64
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn since_epoch(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0.0, |it| it.as_secs_f64())
}
