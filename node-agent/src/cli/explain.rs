//! `shunt explain`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use shunt_common::{AffinityKey, Clients, Reason};

use super::source::{Cluster, SourceArgs};
use super::{Output, PinsArgs, print};
use crate::agent::since_boot_ns;
use crate::apply::{Applier, service_key};
use crate::bpf::{Cgroup, Client, KernelMaps, Pins, check_privileges, pod_cgroup, uid_in};
use crate::explain::{
    AgentSign, ClientAffinity, ClientReport, Comparison, LivePort, Report, Target, explain,
};
use crate::model::convert::MODE;
use crate::model::{ObjectName, Pod, Service};
use crate::plan::{self, decide};
use crate::report::{self, RouteReport, route_report};
use crate::tables::{Endpoint, Frontend, Route};

/// Why connects to a Service go where they go: which rule decides, tier by tier,
/// whether the live table holds the same, and what session affinity does for a
/// client.
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    /// The Service: NAMESPACE/NAME, NAME in the namespace of the client, or its
    /// ClusterIP; the port by number or name, all of them by default.
    #[arg(value_name = "SERVICE[:PORT]")]
    target: Target,
    /// Who connects: a pod of this node, or the id of a process on it.
    #[arg(long, value_name = "NAMESPACE/POD|PID")]
    from: Option<From>,
    /// The cgroup v2 directory below which pods are looked for [default: the
    /// machine's root].
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    source: SourceArgs,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

/// A client, as a person names it.
#[derive(Clone, Debug, Eq, PartialEq)]
enum From {
    Process(u32),
    Pod(ObjectName),
}

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(pid) = text.parse() {
            return Ok(Self::Process(pid));
        }
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
                Ok(Self::Pod(ObjectName {
                    namespace: namespace.into(),
                    name: name.into(),
                }))
            }
            _ => Err("give NAMESPACE/POD, such as shop/cart-0, or the id of a process".to_owned()),
        }
    }
}

pub(super) fn explain_service(args: &ExplainArgs) -> Result<()> {
    let cluster = args.source.read()?;
    let client = args.from.as_ref();
    let client = client
        .map(|from| Caller::find(from, &cluster, args.cgroup.as_deref()))
        .transpose()?;
    let namespace = client.as_ref().and_then(|it| it.pod);
    let namespace = namespace.map(|pod| &*pod.name.namespace);
    let (service, ports) = args.target.find(&cluster.state, namespace)?;
    let (node, policy) = (&cluster.node, &cluster.policy);
    let live = Live::open(&args.pins.pins());
    let mut live_ports = Vec::new();
    for (port, address) in &ports {
        let decision = decide(&cluster.state, service, port, *address, node, policy);
        let planned = decision.into_route(service, port);
        let process = client.as_ref().map(|it| &it.process);
        live_ports.push(live.port(&plan::frontend(port, *address), &planned, process));
    }
    let report = Report::new(
        explain(&cluster.state, node, policy, service, ports),
        live.agent(),
        client.map(|client| client.report(&live)),
        live_ports,
        live.leftovers(service),
    );
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table | Output::Wide => print(&report.text()),
    }
}

/// The client that was named.
struct Caller<'a> {
    process: Client,
    /// The pod that it is in, if it is known.
    pod: Option<&'a Pod>,
}

impl<'a> Caller<'a> {
    fn find(from: &From, cluster: &'a Cluster, cgroup: Option<&Path>) -> Result<Self> {
        let pod_name = match from {
            From::Pod(name) => name,
            From::Process(pid) => {
                let process = Client::of_process(*pid)?;
                let uid = uid_in(&process.cgroup);
                let mut pods = cluster.state.pods();
                let pod = uid.and_then(|uid| pods.find(|pod| *pod.cgroup_uid == *uid));
                return Ok(Self { process, pod });
            }
        };
        let mut pods = cluster.state.pods();
        let Some(pod) = pods.find(|pod| pod.name == *pod_name) else {
            bail!(
                "there is no Pod {pod_name} on node {}{}",
                cluster.node.name,
                known_pods(cluster, pod_name)
            );
        };
        if pod.node.as_deref() != Some(cluster.node.name.as_str()) {
            let node = pod.node.as_deref().unwrap_or("none yet");
            bail!("the Pod {pod_name} is on another node ({node}): ask there");
        }
        let root = Cgroup::find(cgroup)?;
        let directory = pod_cgroup(root.path(), &pod.cgroup_uid).with_context(|| {
            format!(
                "the Pod {pod_name} has no cgroup pod{} below {}: has it ended, or not begun?",
                pod.cgroup_uid,
                root.path().display()
            )
        })?;
        Ok(Self {
            process: Client::of_cgroup(&directory)?,
            pod: Some(pod),
        })
    }

    fn report(self, live: &Live) -> ClientReport {
        let process = self.process;
        ClientReport {
            pod: self.pod.map(|pod| pod.name.to_string()),
            pid: Some(process.pid),
            cgroup_id: cgroup_id(&process),
            netns_cookie: Some(process.netns_cookie),
            host_network: process.host_network,
            left_alone: live.left_alone(&process),
            cgroup: Some(process.cgroup),
        }
    }
}

/// Those of the namespace.
fn known_pods(cluster: &Cluster, wanted: &ObjectName) -> String {
    let here = cluster.state.pods();
    let names: Vec<&str> = here
        .filter(|pod| pod.name.namespace == wanted.namespace)
        .map(|pod| &*pod.name.name)
        .take(10)
        .collect();
    if names.is_empty() {
        format!("; none of the namespace {} is", wanted.namespace)
    } else {
        format!("; of its namespace these are: {}", names.join(", "))
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

    /// Why the programs let all that the client does pass.
    fn left_alone(&self, client: &Client) -> Option<String> {
        let maps = self.0.as_ref().ok()?;
        let heartbeat = maps.heartbeat().ok()?;
        if client.host_network && heartbeat.leaves_alone(Clients::HOST) {
            return Some("processes of the host are left alone (--host-processes off)".to_owned());
        }
        let pods = maps.left_alone().ok()?;
        let pod = cgroup_ids(client).find_map(|id| pods.get(&id))?;
        let name = format!("{}/{}", pod.namespace(), pod.pod());
        Some(match pod.reason() {
            Some(Reason::Annotation) => {
                format!("its pod {name} has the annotation {MODE}: \"off\"")
            }
            Some(Reason::Namespace) => {
                format!("the namespace of its pod {name} has the label {MODE}: \"off\"")
            }
            Some(Reason::Mesh) => {
                format!("its pod {name} is in a mesh, which needs to see ClusterIPs")
            }
            None => format!("its pod {name} is left alone"),
        })
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
    cgroup_ids(client).next()
}

/// Of its cgroup and of those above it.
fn cgroup_ids(client: &Client) -> impl Iterator<Item = u64> {
    let root = Cgroup::find(None).ok();
    let root = root.map(|root| root.path().to_owned()).unwrap_or_default();
    let directory = root.join(client.cgroup.trim_start_matches('/'));
    let directories: Vec<_> = directory
        .ancestors()
        .take_while(|it| it.starts_with(&root))
        .map(Path::to_owned)
        .collect();
    directories
        .into_iter()
        .map_while(|it| Some(fs::metadata(it).ok()?.ino()))
}
