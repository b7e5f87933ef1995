//! `shunt agent`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use super::PinsArgs;
use crate::agent::{Config, run};
use crate::plan::Policy;
use crate::tables::Prefer;
use crate::watch::Source;

/// Keeps the routing of this node up to date.
#[derive(Args, Debug)]
pub(super) struct AgentArgs {
    /// Name of the node that this runs on, as Kubernetes knows it.
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
    /// Read Services, EndpointSlices and Nodes from the manifests in this
    /// folder, and follow its changes. Without it, from the Kubernetes API: the
    /// cluster that this pod runs in, or the one of the kubeconfig.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Which endpoints new connections try first, for Services that do not say.
    #[arg(long, value_enum, default_value_t)]
    prefer: Prefer,
    /// The cgroup v2 directory to attach to [default: the machine's root].
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Translate what processes of the node itself connect to, which are those in
    /// its own network namespace, pods with hostNetwork among them.
    #[arg(long, value_enum, default_value_t = Switch::On, value_name = "ON|OFF")]
    host_processes: Switch,
    /// Leave every connect to kube-proxy once the agent has been silent for
    /// this long.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    stale_after: Duration,
    /// Serve Prometheus metrics at /metrics, and /healthz, on this address, such
    /// as 127.0.0.1:10270. Nothing is served without it.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_addr: Option<SocketAddr>,
    #[command(flatten)]
    pins: PinsArgs,
}

/// On or off.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Runs until SIGTERM or SIGINT.
pub(super) fn agent(args: AgentArgs) -> Result<()> {
    let source = args.from.map_or(Source::Kubernetes, Source::Folder);
    let config = Config {
        node_name: args.node_name,
        source,
        policy: Policy {
            prefer: args.prefer,
        },
        host_processes: args.host_processes == Switch::On,
        cgroup: args.cgroup,
        pins: args.pins.pins(),
        metrics_address: args.metrics_addr,
        stale_after: args.stale_after,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    Ok(runtime.block_on(run(config))?)
}
