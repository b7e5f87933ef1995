//! `shunt agent`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use shunt_common::SpliceMode;

use super::PinsArgs;
use crate::agent::{Config, run};
use crate::health;
use crate::plan::Policy;
use crate::splice::Settings;
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
    #[arg(long, value_name = "DIR", env = "SHUNT_CGROUP")]
    cgroup: Option<PathBuf>,
    /// Translate what processes of the node itself connect to, which are those in
    /// its own network namespace, pods with hostNetwork among them.
    #[arg(long, value_enum, default_value_t = Switch::On, value_name = "ON|OFF")]
    host_processes: Switch,
    /// Which connections within this node are spliced: none; those of Services and
    /// pods that ask for it; or all but those of Services and pods that do not
    /// want it.
    #[arg(long, value_enum, default_value_t)]
    splice: Splice,
    /// Splice connections that are older than this.
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = humantime::parse_duration)]
    splice_after: Duration,
    /// Bytes that the readers of all spliced connections together may hold unread,
    /// in MiB. What has no room stays with TCP.
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    splice_memory: u64,
    /// Connections that may be spliced at once.
    #[arg(long, value_name = "COUNT", default_value_t = 4096)]
    splice_max_pairs: usize,
    /// Connections that may become spliced in a second.
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    splice_rate: u32,
    /// How long a connect that was given an endpoint waits for an answer before it
    /// asks again, the first time. From 1s on, which is the kernel's own time, that
    /// is left to the kernel.
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = first_timeout)]
    connect_timeout_initial: Duration,
    /// End connects early that wait for an endpoint which is taken for dead, while
    /// another one lives: they fail with ETIMEDOUT.
    #[arg(long, value_enum, default_value_t = Switch::On, value_name = "ON|OFF")]
    fail_fast: Switch,
    /// Whether the readers of splice(2), which do not see spliced bytes, are looked
    /// for, so that they are left alone. Where this kernel allows no program to trace
    /// its functions, that costs each system call of the node some nanoseconds.
    /// Otherwise only with `--splice auto`: an annotation is somebody's promise that
    /// nobody calls it.
    #[arg(long, value_enum, value_name = "WATCH|IGNORE")]
    splice_calls: Option<SpliceCalls>,
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
    /// What is to go wrong.
    #[cfg(feature = "fault-injection")]
    #[arg(long, value_enum)]
    fault: Option<crate::fault::Fault>,
}

/// On or off.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// What is done about splice(2).
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum SpliceCalls {
    Watch,
    Ignore,
}

/// Which connections are spliced.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
enum Splice {
    Off,
    #[default]
    OptIn,
    Auto,
}

impl Splice {
    const fn mode(self) -> SpliceMode {
        match self {
            Self::Off => SpliceMode::Off,
            Self::OptIn => SpliceMode::OptIn,
            Self::Auto => SpliceMode::Auto,
        }
    }
}

fn first_timeout(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time < Duration::from_millis(10) {
        return Err("at least 10ms; 1s leaves it to the kernel".to_owned());
    }
    Ok(time)
}

/// Runs until SIGTERM or SIGINT.
pub(super) fn agent(args: AgentArgs) -> Result<()> {
    #[cfg(feature = "fault-injection")]
    args.fault.into_iter().for_each(crate::fault::set);
    let source = args.from.map_or(Source::Kubernetes, Source::Folder);
    let config = Config {
        node_name: args.node_name,
        source,
        policy: Policy {
            prefer: args.prefer,
        },
        host_processes: args.host_processes == Switch::On,
        splice: Settings {
            mode: args.splice.mode(),
            after: args.splice_after,
            memory: args.splice_memory << 20,
            max_pairs: args.splice_max_pairs,
            rate: args.splice_rate,
        },
        health: health::Settings {
            first_timeout: Some(args.connect_timeout_initial),
            fail_fast: args.fail_fast == Switch::On,
        },
        watch_splice_calls: match args.splice_calls {
            Some(told) => told == SpliceCalls::Watch,
            None => args.splice.mode() == SpliceMode::Auto,
        },
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
