//! `cargo xtask torture`: spliced connections held against TCP, for as long as
//! wanted.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::Args;
use lab::LogOutput;
use lab::torture::run::{Settings, run as run_rounds};

use crate::build::{Profile, binaries};
use crate::command::announce;
use crate::setup::{Need, ensure as ensure_installed, is_root};

/// How long, and what to repeat.
#[derive(Args, Debug)]
pub(crate) struct TortureArgs {
    /// Minutes.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// What connections and trouble are drawn from [default: another each time].
    #[arg(long, env = "SHUNT_SEED")]
    seed: Option<u64>,
    /// Connections at once, of each of six ways to connect.
    #[arg(long, default_value_t = 12)]
    parallel: usize,
}

/// Runs it. The last line has the figures.
pub(crate) fn run(args: &TortureArgs) -> Result<()> {
    ensure!(
        is_root(),
        "torture makes network namespaces and cgroups: run as root"
    );
    ensure_installed(&[Need::Build, Need::Lab])?;
    let built = binaries(Profile::Debug)?;
    lab::use_binaries([built.shunt, built.lab_pod]);
    let seed = args.seed.unwrap_or_else(lab::random::seed);
    announce(&format!("torture, seed {seed}"));
    let time = Duration::try_from_secs_f64(args.minutes * 60.0)?;
    let settings = Settings {
        seed,
        time,
        promotions: 0,
        demotions: 0,
        limit: Duration::MAX,
        parallel: args.parallel,
        patience: Duration::from_secs(60),
        logs: LogOutput::OnPanic,
    };
    let outcome = run_rounds(&settings, |line| println!("{line}"))?;
    for fault in &outcome.torture.described {
        println!("{fault:#?}");
    }
    println!("{outcome}");
    let faulty: usize = outcome.torture.faulty.values().map(|ids| ids.len()).sum();
    if faulty > 0 {
        bail!("{faulty} connections did what TCP would not do; --seed {seed} repeats their plans");
    }
    Ok(())
}
