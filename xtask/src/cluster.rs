//! `cargo xtask cluster`: a real cluster on this machine, for people.
//!
//! `up` starts a process that goes on ([`keep`]) and owns the lab that the cluster
//! is on. Whatever end that process comes to, the lab's reaper removes everything:
//! `down` need only end it. While `up` waits, the two hold a pipe, so that an end of
//! `up` is the cluster's too.

mod state;

use std::env;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio, exit};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand};
use lab::cluster::{Cluster, Machines, write_images};
use lab::image::{LAB_POD, SHUNT};
use lab::{Lab, LogOutput, Options};

use self::state::{Claim, State};
use crate::build::{Binaries, Profile, binaries};
use crate::command::{announce, root};
use crate::setup::{self, Need, is_root};

/// What to do.
#[derive(Args, Debug)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start one, and say what to type next.
    Up {
        /// How many nodes, beside the one of the control plane.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
        nodes: u8,
    },
    /// Show nodes and pods.
    Status,
    /// End it. Nothing of it stays.
    Down,
    /// Be the cluster's owner, for `up`.
    #[command(hide = true)]
    Keep {
        #[arg(long)]
        nodes: u8,
        #[command(flatten)]
        binaries: Binaries,
    },
}

/// What the owner says to `up` when the cluster is there.
const READY: &str = "ready";
/// What `up` answers: the owner is on its own from then on.
const GO_ON: &str = "go on";
/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Does it.
pub(crate) fn run(args: ClusterArgs) -> Result<()> {
    ensure!(
        is_root(),
        "a cluster is made of network namespaces and cgroups: run as root"
    );
    match args.action {
        Action::Up { nodes } => up(nodes),
        Action::Status => status(),
        Action::Down => down(),
        Action::Keep { nodes, binaries } => keep(nodes, binaries),
    }
}

fn up(nodes: u8) -> Result<()> {
    if State::read()?.is_some() {
        bail!("a cluster is up: `cargo xtask cluster status` shows it, `down` ends it");
    }
    setup::ensure(&[Need::Build, Need::Lab, Need::Kubernetes, Need::Cluster])?;
    let binaries = binaries(Profile::Image)?;
    let start = Instant::now();
    let mut owner = start_owner(nodes, &binaries)?;
    if !follow(&mut owner)? {
        let status = owner.wait().context("wait for the owner")?;
        state::forget();
        bail!("the cluster did not start ({status}); nothing of it is left");
    }
    let mut stdin = owner.stdin.take().context("the owner's standard input")?;
    writeln!(stdin, "{GO_ON}").context("tell the owner to go on")?;
    let state = State::read()?.context("the cluster ended at once")?;
    println!("{}", next(&state, nodes, start.elapsed()));
    Ok(())
}

/// A process in a session of its own, which Ctrl-C does not reach.
fn start_owner(nodes: u8, binaries: &Binaries) -> Result<Child> {
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command
        .args(["cluster", "keep", "--nodes", &nodes.to_string()])
        .args(binaries.arguments())
        .current_dir(root())
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("start the cluster's owner")
}

/// Prints what the owner says; returns whether it is ready.
fn follow(owner: &mut Child) -> Result<bool> {
    let errors = owner.stderr.take().context("the owner's errors")?;
    thread::spawn(move || {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            println!("    {line}");
        }
    });
    let words = owner.stdout.take().context("the owner's output")?;
    for line in BufReader::new(words).lines() {
        match line.context("read the owner's output")?.as_str() {
            READY => return Ok(true),
            step => announce(step),
        }
    }
    Ok(false)
}

/// The owner: starts the cluster and waits to be ended.
fn keep(nodes: u8, binaries: Binaries) -> Result<()> {
    let claim = Claim::take()?;
    die_with_up();
    let images_of = (binaries.shunt.clone(), binaries.lab_pod.clone());
    lab::use_binaries([binaries.shunt, binaries.lab_pod, binaries.lab_runc]);
    let options = Options {
        logs: LogOutput::OnPanic,
        ..Options::default()
    };
    let mut lab = Lab::with("cluster", options)?;
    let images = write_images(lab.folder(), &images_of.0, &images_of.1)?;
    let machines = Machines::add(&mut lab, usize::from(nodes))?;
    let cluster = Cluster::start(&lab, &machines, &images, |step| println!("{step}"))?;
    let kubectl = cluster.write_kubectl(&machines, &lab.folder().join("bin"))?;
    claim.publish(lab.name(), &kubectl)?;
    println!("{READY}");
    loop {
        thread::park();
    }
}

/// Ends this process when standard input ends before `up` says to go on; the lab's
/// reaper does the rest.
fn die_with_up() {
    thread::spawn(|| {
        let mut line = String::new();
        let read = io::stdin().read_line(&mut line);
        if read.is_err() || line.trim_end() != GO_ON {
            state::forget();
            exit(1);
        }
    });
}

fn status() -> Result<()> {
    let state = State::read()?.context("no cluster is up: `cargo xtask cluster up`")?;
    for arguments in [
        &["get", "nodes", "-o", "wide"][..],
        &["get", "pods", "-A", "-o", "wide"],
    ] {
        let status = Command::new(&state.kubectl)
            .args(arguments)
            .status()
            .context("start kubectl")?;
        ensure!(status.success(), "kubectl failed ({status})");
        println!();
    }
    println!("kubectl is {}", state.kubectl.display());
    Ok(())
}

fn down() -> Result<()> {
    let Some(state) = State::read()? else {
        let labs = lab::sweep()?;
        state::forget();
        println!(
            "no cluster is up; removed what {} dead labs left",
            labs.len()
        );
        return Ok(());
    };
    state.end_owner()?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let remains = lab::remains(&state.lab)?;
        if remains.is_empty() {
            break;
        }
        ensure!(Instant::now() < deadline, "these stay: {remains:?}");
        thread::sleep(Duration::from_millis(50));
    }
    state::forget();
    println!("the cluster is gone");
    Ok(())
}

fn next(state: &State, nodes: u8, took: Duration) -> String {
    let folder = state.kubectl.parent().unwrap_or(&state.kubectl).display();
    format!(
        "
The cluster is up, with {nodes} nodes, after {} s. They know the images {SHUNT}
and {LAB_POD}, and no registry. Next:

  export PATH={folder}:$PATH
  kubectl get nodes -o wide
  kubectl apply -k deploy/overlays/lab
  kubectl -n shunt-system rollout status daemonset/shunt
  kubectl -n shunt-system exec daemonset/shunt -- shunt status

  cargo xtask cluster down",
        took.as_secs()
    )
}
