//! `shunt plan`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use tracing::warn;

use super::{Output, print};
use crate::plan::{Policy, plan as plan_node};
use crate::report;
use crate::tables::Prefer;
use crate::watch::folder;

/// What the routing table of a node would be, without touching a kernel. Needs
/// no root.
#[derive(Args, Debug)]
pub(super) struct PlanArgs {
    /// Folder with Service, EndpointSlice and Node manifests.
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    /// The node to plan for.
    #[arg(long)]
    node: String,
    /// Which endpoints new connections try first, for Services that do not say.
    #[arg(long, value_enum, default_value_t)]
    prefer: Prefer,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

pub(super) fn plan(args: &PlanArgs) -> Result<()> {
    let (state, complaints) = folder::read(&args.from)?;
    for complaint in complaints {
        warn!("{complaint}");
    }
    if state.node(&args.node).is_none() {
        warn!(node = %args.node, "no manifest of this Node, so that its zone is not known");
    }
    let policy = Policy {
        prefer: args.prefer,
    };
    let report = report::routes(&plan_node(&state, &args.node, &policy));
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table => print(&report.table(false)),
        Output::Wide => print(&report.table(true)),
    }
}
