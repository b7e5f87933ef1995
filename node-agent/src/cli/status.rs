//! `shunt status`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use shunt_common::{
    Clients, Counter, Heartbeat, LAYOUT_VERSION, LeftAlone, Reason, SelfTest, SpliceMode,
};

use super::{Output, PinsArgs, print};
use crate::agent::since_boot_ns;
use crate::bpf::{
    Attachment, Cgroup, Features, Fill, KernelMaps, Pins, ProgramState, Splicing, cgroup_path,
    check_privileges, programs, watched_by,
};
use crate::cleanup;
use crate::report::plain_table;

/// Programs and where they are attached, how full the maps are, the agent's
/// sign of life, and counters by reason. Works without the agent.
#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

/// The JSON form.
#[derive(Debug, Serialize)]
struct StatusReport {
    version: &'static str,
    layout: u32,
    pins: PathBuf,
    node: String,
    zone: Option<String>,
    agent: AgentStatus,
    clients: ClientsStatus,
    /// Where the agent serves metrics, or why not; null if it was not asked to.
    metrics: Option<String>,
    splicing: SplicingStatus,
    udp_cleanup: FeatureStatus,
    programs: Vec<ProgramStatus>,
    maps: Vec<MapStatus>,
    counters: BTreeMap<&'static str, u64>,
}

#[derive(Debug, Serialize)]
struct AgentStatus {
    /// Of the last agent; in its own pid namespace.
    pid: u32,
    heartbeat_age_ms: u64,
    stale_after_ms: u64,
    /// Whether connects pass to kube-proxy for that reason.
    stale: bool,
}

/// Whose connects are translated.
#[derive(Debug, Serialize)]
struct ClientsStatus {
    /// Whether those of the node's own processes are.
    host_processes: bool,
    /// The pods whose are not.
    left_alone: Vec<ClientStatus>,
}

#[derive(Debug, Serialize)]
struct ClientStatus {
    namespace: String,
    pod: String,
    reason: &'static str,
    cgroup_id: u64,
}

/// What a kernel may lack without shunt being of no use.
#[derive(Debug, Serialize)]
struct FeatureStatus {
    available: bool,
    /// Why not.
    reason: Option<String>,
}

/// Whether connections are spliced.
#[derive(Debug, Serialize)]
struct SplicingStatus {
    /// Whether this kernel can, as far as is known.
    available: bool,
    /// Why not, or what the agent's self-test has found.
    reason: Option<String>,
    /// Which connections: `off`, `opt-in` or `auto`.
    mode: &'static str,
    /// `shunt splice off`.
    switched_off: bool,
    /// What the agent has found out about this kernel.
    self_test: &'static str,
    /// The kernel's function or tracepoint by which splice(2) is seen, if it is.
    splice_calls: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct ProgramStatus {
    name: &'static str,
    attached: bool,
    /// What to: a cgroup directory, `cgroup ID` or `map NAME`.
    to: Option<String>,
    program_id: Option<u32>,
    link_id: Option<u32>,
}

#[derive(Debug, Serialize)]
struct MapStatus {
    name: &'static str,
    used: usize,
    capacity: usize,
    full: bool,
}

pub(super) fn status(args: &StatusArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let maps = KernelMaps::open(&pins)?;
    let counters = maps.counters()?;
    let node = maps.node()?;
    let heartbeat = maps.heartbeat()?;
    let report = StatusReport {
        version: env!("CARGO_PKG_VERSION"),
        layout: LAYOUT_VERSION,
        pins: pins.directory(),
        node: node.name().to_owned(),
        zone: Some(node.zone().to_owned()).filter(|zone| !zone.is_empty()),
        agent: agent_status(&heartbeat, since_boot_ns()),
        clients: ClientsStatus {
            host_processes: !heartbeat.leaves_alone(Clients::HOST),
            left_alone: maps.left_alone()?.into_iter().map(client_status).collect(),
        },
        metrics: Some(node.metrics().to_owned()).filter(|text| !text.is_empty()),
        splicing: splicing_status(Features::probe().splicing(), &maps, &pins)?,
        udp_cleanup: FeatureStatus::new(cleanup::probe().err().map(|it| it.to_string())),
        programs: programs(&pins).into_iter().map(program_status).collect(),
        maps: maps.fill()?.into_iter().map(map_status).collect(),
        counters: Counter::ALL
            .iter()
            .map(|it| (it.name(), counters[*it as usize]))
            .collect(),
    };
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table | Output::Wide => print(&text(&report, &counters)),
    }
}

fn agent_status(heartbeat: &Heartbeat, now_ns: u64) -> AgentStatus {
    AgentStatus {
        pid: heartbeat.pid(),
        heartbeat_age_ms: now_ns.saturating_sub(heartbeat.beat_ns()) / 1_000_000,
        stale_after_ms: heartbeat.stale_after_ns() / 1_000_000,
        stale: heartbeat.is_stale(now_ns),
    }
}

fn client_status((cgroup_id, client): (u64, LeftAlone)) -> ClientStatus {
    ClientStatus {
        namespace: client.namespace().to_owned(),
        pod: client.pod().to_owned(),
        reason: match client.reason() {
            Some(Reason::Annotation) => "annotation",
            Some(Reason::Namespace) => "namespace",
            Some(Reason::Mesh) => "mesh",
            None => "unknown",
        },
        cgroup_id,
    }
}

impl FeatureStatus {
    fn new(reason: Option<String>) -> Self {
        Self {
            available: reason.is_none(),
            reason,
        }
    }

    /// For people, with what it does where it is available.
    fn text(&self, does: &str) -> String {
        match &self.reason {
            None => format!("available{does}"),
            Some(reason) => format!("off: {reason}"),
        }
    }
}

fn splicing_status(splicing: Splicing, maps: &KernelMaps, pins: &Pins) -> Result<SplicingStatus> {
    let config = maps.splice_config()?;
    let reason = match splicing {
        Splicing::Unavailable(reason) => Some(reason),
        Splicing::Available(_) => match SelfTest::from_u32(config.self_test) {
            Some(SelfTest::Pending | SelfTest::Passed) => None,
            Some(failed) => Some(format!("the self-test has failed: {}", failed.what())),
            None => Some(format!("the self-test has failed ({})", config.self_test)),
        },
    };
    Ok(SplicingStatus {
        available: reason.is_none(),
        reason,
        mode: match config.mode {
            mode if mode == SpliceMode::OptIn as u8 => "opt-in",
            mode if mode == SpliceMode::Auto as u8 => "auto",
            _ => "off",
        },
        switched_off: maps.is_switched_off()?,
        self_test: SelfTest::from_u32(config.self_test).map_or("unknown", SelfTest::what),
        splice_calls: watched_by(pins),
    })
}

fn splicing_text(status: &SplicingStatus) -> String {
    match (&status.reason, status.switched_off, status.mode) {
        (Some(reason), _, _) => format!("off: {reason}"),
        (None, true, _) => "switched off (shunt splice off)".to_owned(),
        (None, false, "opt-in") => format!(
            "opt-in: for Services and pods with shunt.dev/splice: \"on\"{}",
            splice_calls_text(status)
        ),
        (None, false, "auto") => format!(
            "auto: for all but Services and pods with shunt.dev/splice: \"off\"{}",
            splice_calls_text(status)
        ),
        (None, false, _) => "off (--splice off)".to_owned(),
    }
}

fn splice_calls_text(status: &SplicingStatus) -> String {
    match status.splice_calls {
        Some(by) => format!("; splice(2) is seen by {by}"),
        None => "; splice(2) is NOT seen: its readers miss spliced bytes".to_owned(),
    }
}

fn program_status(program: ProgramState) -> ProgramStatus {
    let (to, program_id, link_id) = match program.attachment {
        None => (None, None, None),
        Some(Attachment::Map { program_id }) => (
            Some(format!("map {}", shunt_common::map::SPLICE)),
            Some(program_id),
            None,
        ),
        Some(Attachment::Kernel {
            program_id,
            link_id,
        }) => (
            Some(format!("kernel {}", program.name)),
            Some(program_id),
            Some(link_id),
        ),
        Some(Attachment::Cgroup {
            program_id,
            link_id,
            cgroup_id,
        }) => (
            Some(cgroup_name(cgroup_id)),
            Some(program_id),
            Some(link_id),
        ),
    };
    ProgramStatus {
        name: program.name,
        attached: to.is_some(),
        to,
        program_id,
        link_id,
    }
}

fn cgroup_name(id: u64) -> String {
    let root = Cgroup::find(None).ok();
    let path = root.and_then(|root| cgroup_path(root.path(), id));
    path.map_or_else(|| format!("cgroup {id}"), |path| path.display().to_string())
}

fn map_status(fill: Fill) -> MapStatus {
    let Fill {
        map,
        used,
        capacity,
    } = fill;
    MapStatus {
        name: map,
        used,
        capacity,
        full: used >= capacity,
    }
}

fn text(report: &StatusReport, counters: &[u64; Counter::COUNT]) -> String {
    let zone = report.zone.as_deref().unwrap_or("unknown");
    let splicing = splicing_text(&report.splicing);
    let udp = report
        .udp_cleanup
        .text(": sockets are destroyed when their endpoint stops serving");
    let head = format!(
        "shunt {}, layout {}, pins in {}\nNode      {} (zone {zone})\nAgent     {}\nClients   {}\nMetrics   {}\nSplicing  {splicing}\nUDP       {udp}",
        report.version,
        report.layout,
        report.pins.display(),
        report.node,
        agent_text(&report.agent),
        clients_text(&report.clients),
        report.metrics.as_deref().unwrap_or("off"),
    );
    let mut programs = plain_table(["PROGRAM", "ATTACHED TO", "PROGRAM ID", "LINK ID"]);
    let id = |id: Option<u32>| id.map_or_else(|| "-".to_owned(), |id| id.to_string());
    for program in &report.programs {
        let to = program
            .to
            .clone()
            .unwrap_or_else(|| "not attached".to_owned());
        programs.add_row([
            program.name.to_owned(),
            to,
            id(program.program_id),
            id(program.link_id),
        ]);
    }
    let mut maps = plain_table(["MAP", "USED", "CAPACITY", ""]);
    for map in &report.maps {
        let full = if map.full {
            "FULL: what does not fit in is left to kube-proxy"
        } else {
            ""
        };
        maps.add_row([
            map.name,
            &map.used.to_string(),
            &map.capacity.to_string(),
            full,
        ]);
    }
    let mut values = plain_table(["COUNTER", "VALUE"]);
    for counter in Counter::ALL {
        values.add_row([counter.name(), &counters[counter as usize].to_string()]);
    }
    [
        head,
        programs.trim_fmt(),
        maps.trim_fmt(),
        values.trim_fmt(),
    ]
    .join("\n\n")
}

fn clients_text(clients: &ClientsStatus) -> String {
    let host = if clients.host_processes {
        "pods and host processes"
    } else {
        "pods, not host processes"
    };
    let name = |it: &ClientStatus| format!("{}/{} ({})", it.namespace, it.pod, it.reason);
    let left_alone: Vec<_> = clients.left_alone.iter().map(name).collect();
    if left_alone.is_empty() {
        return host.to_owned();
    }
    format!("{host}; left alone: {}", left_alone.join(", "))
}

fn agent_text(agent: &AgentStatus) -> String {
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let age = seconds(agent.heartbeat_age_ms);
    if agent.stale {
        return format!("STALE: last heartbeat {age} ago; connects pass to kube-proxy");
    }
    let limit = seconds(agent.stale_after_ms);
    format!(
        "heartbeat {age} ago (pid {}, stale after {limit})",
        agent.pid
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_agent_is_called_stale_with_what_follows() {
        let heartbeat = Heartbeat::new(1_000_000_000, 60_000_000_000, 7);
        let fresh = agent_text(&agent_status(&heartbeat, 1_500_000_000));
        assert_eq!(fresh, "heartbeat 0.5 s ago (pid 7, stale after 60.0 s)");
        let stale = agent_text(&agent_status(&heartbeat, 94_000_000_000));
        assert_eq!(
            stale,
            "STALE: last heartbeat 93.0 s ago; connects pass to kube-proxy"
        );
    }
}
