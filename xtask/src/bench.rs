//! `cargo xtask bench NAME`: contenders side by side, interleaved in one run.

mod apps;
mod connect;
mod failover;
mod splice;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::setup::{self, Need};
use crate::stats::Samples;

/// Which benchmark, and where its figures go.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure.
    name: Name,
    /// Write the figures to this file as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Name {
    /// Requests per second of real programs.
    Apps,
    /// Connects per second, with 1 and with 10,000 Services.
    Connect,
    /// Connects that fail or take over a second while a node is dead.
    Failover,
    /// Round trips and streams between two pods of a node.
    Splice,
}

/// The JSON form of every benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    machine: Machine,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Machine {
    kernel: String,
    cpus: usize,
}

/// One contender in one case.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    case: String,
    contender: &'static str,
    metric: &'static str,
    median: f64,
    min: f64,
    max: f64,
    runs: usize,
}

/// Runs it, prints the figures, and writes them if asked to.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let (bench, rows) = match args.name {
        Name::Apps => {
            setup::ensure(&[Need::Programs])?;
            ("apps", apps::run()?)
        }
        Name::Connect => ("connect", connect::run()?),
        Name::Failover => ("failover", failover::run()?),
        Name::Splice => ("splice", splice::run()?),
    };
    let report = Report {
        bench,
        machine: Machine::this()?,
        rows,
    };
    if let Some(path) = &args.json {
        write_json(&report, path)?;
    }
    Ok(())
}

impl Row {
    /// The summary of the samples.
    pub(crate) fn new(
        case: &str,
        contender: &'static str,
        metric: &'static str,
        samples: &Samples,
    ) -> Self {
        Self {
            case: case.to_owned(),
            contender,
            metric,
            median: samples.median(),
            min: samples.min(),
            max: samples.max(),
            runs: samples.count(),
        }
    }
}

impl Machine {
    fn this() -> Result<Self> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel release")?;
        let cpus = std::thread::available_parallelism()
            .context("number of CPUs")?
            .get();
        // Major and minor; what follows is the builder's own.
        let kernel: Vec<_> = release.trim().split('.').take(2).collect();
        Ok(Self {
            kernel: kernel.join("."),
            cpus,
        })
    }
}

fn write_json(report: &Report, path: &Path) -> Result<()> {
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    serde_json::to_writer_pretty(file, report)
        .with_context(|| format!("write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}
