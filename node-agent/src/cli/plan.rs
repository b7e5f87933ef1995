//! `shunt plan`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::source::SourceArgs;
use super::{Output, print};
use crate::plan::plan as plan_node;
use crate::report;

/// What the routing table of a node would be, without touching a kernel. Needs
/// no root.
#[derive(Args, Debug)]
pub(super) struct PlanArgs {
    /// The same as --manifests.
    #[arg(long, value_name = "DIR", conflicts_with = "manifests")]
    from: Option<PathBuf>,
    #[command(flatten)]
    source: SourceArgs,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

pub(super) fn plan(mut args: PlanArgs) -> Result<()> {
    let from = args.from.take();
    args.source.manifests = args.source.manifests.or(from);
    let cluster = args.source.read()?;
    let report = report::routes(&plan_node(
        &cluster.state,
        &cluster.node.name,
        &cluster.policy,
    ));
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table => print(&report.table(false)),
        Output::Wide => print(&report.table(true)),
    }
}
