//! `shunt explain`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use shunt_common::AffinityKey;

use super::source::SourceArgs;
use super::{Output, PinsArgs, print};
use crate::agent::since_boot_ns;
use crate::apply::{Applier, service_key};
use crate::bpf::{Cgroup, Client, KernelMaps, Pins, check_privileges};
use crate::explain::{
    AgentSign, ClientAffinity, ClientReport, Comparison, LivePort, Report, Target, explain,
};
use crate::model::Service;
use crate::plan::{self, decide};
use crate::report::{self, RouteReport, route_report};
use crate::tables::{Endpoint, Frontend, Route};

/// Why connects to a Service go where they go: which rule decides, tier by tier,
/// whether the live table holds the same, and what session affinity does for a
/// client.
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    /// The Service: NAMESPACE/NAME or its ClusterIP; the port by number or name,
    /// all of them by default.
    #[arg(value_name = "SERVICE[:PORT]")]
    target: Target,
    /// Who connects: the id of a process on this node.
    #[arg(long, value_name = "PID")]
    from: Option<u32>,
    #[command(flatten)]
    source: SourceArgs,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

pub(super) fn explain_service(args: &ExplainArgs) -> Result<()> {
    let client = args.from.map(Client::of_process).transpose()?;
    let cluster = args.source.read()?;
    let (service, ports) = args.target.find(&cluster.state, None)?;
    let (node, policy) = (&cluster.node, &cluster.policy);
    let live = Live::open(&args.pins.pins());
    let mut live_ports = Vec::new();
    for (port, address) in &ports {
        let decision = decide(&cluster.state, service, port, *address, node, policy);
        let planned = decision.into_route(service, port);
        live_ports.push(live.port(&plan::frontend(port, *address), &planned, client.as_ref()));
    }
    let report = Report::new(
        explain(&cluster.state, node, policy, service, ports),
        live.agent(),
        client.map(|client| client_report(args.from, &client)),
        live_ports,
        live.leftovers(service),
    );
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table | Output::Wide => print(&report.text()),
    }
}

/// The pinned maps, or why they can't be read: the plan can be explained still.
struct Live(Result<KernelMaps, String>);

impl Live {
    fn open(pins: &Pins) -> Self {
        let open = || -> Result<KernelMaps> {
            check_privileges()?;
            pins.require()?;
            Ok(KernelMaps::open(pins)?)
        };
        Self(open().map_err(|error| format!("{error:#}")))
    }

    fn agent(&self) -> Option<AgentSign> {
        let heartbeat = self.0.as_ref().ok()?.heartbeat().ok()?;
        Some(AgentSign::of(&heartbeat, since_boot_ns()))
    }

    /// Entries of a Service that should have none: the agent was away when it
    /// changed, or is.
    fn leftovers(&self, service: &Service) -> Vec<RouteReport> {
        let maps = self.0.as_ref().ok().filter(|_| service.exempt.is_some());
        let Some(Ok(snapshot)) = maps.map(KernelMaps::snapshot) else {
            return Vec::new();
        };
        let mut tables = Applier::adopt(&snapshot, Instant::now()).into_actual();
        tables
            .routes
            .retain(|_, route| route.name.is_of(&service.name));
        report::routes(&tables).routes
    }

    fn port(&self, frontend: &Frontend, planned: &Route, client: Option<&Client>) -> LivePort {
        let maps = match &self.0 {
            Ok(maps) => maps,
            Err(because) => {
                let because = because.clone();
                return LivePort {
                    comparison: Comparison::Unreadable { because },
                    route: None,
                    affinity: None,
                };
            }
        };
        let route = maps.route(frontend);
        LivePort {
            comparison: Comparison::of(route.as_ref(), planned),
            affinity: client
                .map(|client| affinity(maps, frontend, route.as_ref().unwrap_or(planned), client)),
            route: route.map(|route| route_report(frontend, &route)),
        }
    }
}

/// What the programs would recall for this client.
fn affinity(
    maps: &KernelMaps,
    frontend: &Frontend,
    route: &Route,
    client: &Client,
) -> ClientAffinity {
    if route.affinity_seconds.is_none() {
        return ClientAffinity::None;
    }
    let cgroup_id = if client.host_network {
        match cgroup_id(client) {
            Some(id) => id,
            None => {
                return ClientAffinity::Unknown {
                    because: format!("the cgroup {} is not there", client.cgroup),
                };
            }
        }
    } else {
        0
    };
    let key = AffinityKey::new(client.netns_cookie, cgroup_id, service_key(frontend));
    let now_ns = since_boot_ns();
    match maps.affinity(&key) {
        Err(error) => ClientAffinity::Unknown {
            because: error.to_string(),
        },
        Ok(None) => ClientAffinity::Free,
        Ok(Some(affinity)) => match affinity.at(now_ns) {
            None => ClientAffinity::Free,
            Some(slot) => {
                let endpoint = Endpoint::from(slot).address;
                let mut tiers = route.tiers.iter();
                ClientAffinity::Keeps {
                    endpoint,
                    left_ns: affinity.until_ns().saturating_sub(now_ns),
                    in_set: tiers
                        .any(|tier| tier.endpoints.iter().any(|it| it.address == endpoint)),
                }
            }
        },
    }
}

/// The inode number of its directory.
fn cgroup_id(client: &Client) -> Option<u64> {
    let root = Cgroup::find(None).ok()?;
    let directory = root.path().join(client.cgroup.trim_start_matches('/'));
    Some(fs::metadata(directory).ok()?.ino())
}

fn client_report(pid: Option<u32>, client: &Client) -> ClientReport {
    ClientReport {
        pid,
        cgroup: Some(client.cgroup.clone()),
        cgroup_id: cgroup_id(client),
        netns_cookie: Some(client.netns_cookie),
        host_network: client.host_network,
        ..ClientReport::default()
    }
}
