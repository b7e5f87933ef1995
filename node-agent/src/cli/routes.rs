//! `shunt routes`.

use anyhow::Result;
use clap::Args;

use super::{Output, PinsArgs, print};
use crate::apply::Applier;
use crate::bpf::{KernelMaps, check_privileges};
use crate::report;
use crate::tables::ServicePortName;

/// The routing table that is in force on this node, read from the kernel. Works
/// without the agent.
#[derive(Args, Debug)]
pub(super) struct RoutesArgs {
    /// Only this Service.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = service_name)]
    service: Option<(String, String)>,
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    pins: PinsArgs,
}

pub(super) fn routes(args: &RoutesArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let snapshot = KernelMaps::open(&pins)?.snapshot()?;
    let mut tables = Applier::adopt(&snapshot, std::time::Instant::now()).into_actual();
    if let Some(wanted) = &args.service {
        tables.routes.retain(|_, route| is(&route.name, wanted));
    }
    let report = report::routes(&tables);
    match args.output {
        Output::Json => print(&serde_json::to_string_pretty(&report)?),
        Output::Table => print(&report.table(false)),
        Output::Wide => print(&report.table(true)),
    }
}

fn is(name: &ServicePortName, wanted: &(String, String)) -> bool {
    *name.namespace == *wanted.0 && *name.service == *wanted.1
}

fn service_name(text: &str) -> Result<(String, String), String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
            Ok((namespace.to_owned(), name.to_owned()))
        }
        _ => Err("give it as NAMESPACE/NAME, such as shop/cart".to_owned()),
    }
}
