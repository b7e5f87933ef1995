//! `cargo xtask`: the one way to set up, build, test, lint, measure and show
//! shunt. Each command first installs what it needs (see [`setup`]).
#![expect(
    clippy::print_stdout,
    reason = "the output of these commands is for people"
)]

mod setup;

mod build;
mod image;
mod lint;
mod test;
mod torture;

mod bench;
mod cluster;
mod demo;

mod command;
mod stats;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};

use self::build::{Profile, binaries};
use self::setup::{Need, is_root};

/// Development tasks of shunt.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what the other commands need.
    Setup(setup::SetupArgs),
    /// Build shunt, with the BPF programs in it.
    Build(build::BuildArgs),
    /// Write shunt's container image, without a container engine.
    Image(image::ImageArgs),
    /// Show the main job on this machine, with two nodes made of network
    /// namespaces. Needs root.
    Demo,
    /// A real cluster on this machine: kubelets, containerd, kube-proxy. Needs root.
    Cluster(cluster::ClusterArgs),
    /// Run the unit tests, and as root the tests in the lab.
    Test(test::TestArgs),
    /// Hold spliced connections against TCP, for as long as wanted. Needs root.
    Torture(torture::TortureArgs),
    /// Check formatting, clippy and the map layout.
    Lint(lint::LintArgs),
    /// Measure, contenders side by side. Needs root.
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Setup(args) => setup::run(&args),
        Task::Build(args) => {
            setup::ensure(&[Need::Build])?;
            build::run(&args)
        }
        Task::Image(args) => {
            setup::ensure(&[Need::Build])?;
            image::run(&args)
        }
        Task::Demo => {
            prepare_lab(Profile::Debug)?;
            demo::run(command::root())
        }
        Task::Cluster(args) => cluster::run(args),
        Task::Test(args) => test::run(&args),
        Task::Torture(args) => torture::run(&args),
        Task::Lint(args) => {
            setup::ensure(&[Need::Build, Need::Lint])?;
            lint::run(&args)
        }
        Task::Bench(args) => {
            prepare_lab(Profile::Release)?;
            bench::run(&args)
        }
    }
}

#[expect(
    clippy::print_stderr,
    reason = "this is where a program says why it failed"
)]
fn report(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}

/// What demo and benchmarks need, which run the lab in this process.
fn prepare_lab(profile: Profile) -> Result<()> {
    ensure!(
        is_root(),
        "the lab makes network namespaces and cgroups: run as root"
    );
    setup::ensure(&[Need::Build, Need::Lab, Need::Kubernetes])?;
    let binaries = binaries(profile)?;
    lab::use_binaries([binaries.shunt, binaries.lab_pod]);
    Ok(())
}
