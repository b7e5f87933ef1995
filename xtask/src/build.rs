//! `cargo xtask build`, and the programs that lab, demo and benchmarks run.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{ChildStdout, Stdio};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::Value;

use crate::command::{announce, command};

/// What to build.
#[derive(Args, Debug)]
pub(crate) struct BuildArgs {
    /// With optimizations.
    #[arg(long)]
    release: bool,
}

/// How to build.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Profile {
    /// Tests and demo use it, since it builds in a fraction of the time: the BPF
    /// programs and what runs inside pods are optimized in it, too.
    Debug,
    Release,
    /// For container images, which hold nothing but the program: optimized, and
    /// linked with all that it needs.
    Image,
}

impl Profile {
    /// As cargo names it.
    const fn name(self) -> &'static str {
        match self {
            Self::Debug => "dev",
            Self::Release => "release",
            Self::Image => "image",
        }
    }
}

/// Built programs.
#[derive(Args, Debug)]
pub(crate) struct Binaries {
    #[arg(long)]
    pub(crate) shunt: PathBuf,
    /// What runs inside the pods of the lab.
    #[arg(long)]
    pub(crate) lab_pod: PathBuf,
    /// What the nodes of a cluster start containers with.
    #[arg(long)]
    pub(crate) lab_runc: PathBuf,
}

impl Binaries {
    /// As another process of this program is told of them.
    pub(crate) fn arguments(&self) -> [&OsStr; 6] {
        [
            "--shunt".as_ref(),
            self.shunt.as_os_str(),
            "--lab-pod".as_ref(),
            self.lab_pod.as_os_str(),
            "--lab-runc".as_ref(),
            self.lab_runc.as_os_str(),
        ]
    }
}

/// Builds them and says where they are.
pub(crate) fn run(args: &BuildArgs) -> Result<()> {
    let profile = if args.release {
        Profile::Release
    } else {
        Profile::Debug
    };
    let binaries = binaries(profile)?;
    println!("{}", binaries.shunt.display());
    Ok(())
}

/// Builds the agent, with the BPF programs in it, and the lab's helper.
pub(crate) fn binaries(profile: Profile) -> Result<Binaries> {
    announce("building shunt and lab-pod (some minutes, when nothing is built yet)");
    let executables = build("shunt", &[], profile)?;
    Ok(Binaries {
        shunt: find(&executables, "shunt")?,
        lab_pod: find(&executables, "lab-pod")?,
        lab_runc: find(&executables, "lab-runc")?,
    })
}

/// Builds the agent that tests make crash and break rules.
pub(crate) fn faulty() -> Result<PathBuf> {
    announce("building shunt-faulty");
    let features = ["--features", "node-agent/fault-injection"];
    find(
        &build("shunt-faulty", &features, Profile::Debug)?,
        "shunt-faulty",
    )
}

/// Builds a program of the agent, always beside the lab's helper: so cargo chooses
/// the same features of all other crates, and builds them once.
fn build(agent: &str, features: &[&str], profile: Profile) -> Result<Vec<PathBuf>> {
    let mut cargo = command("cargo");
    // cargo itself tells where they are, whatever the target folder is.
    cargo.args(["build", "--message-format=json-render-diagnostics"]);
    cargo
        .args(["--package", "node-agent", "--bin", agent])
        .args(features);
    cargo.args(["--package", "shunt-tests"]);
    cargo.args(["--bin", "lab-pod", "--bin", "lab-runc"]);
    cargo.args(["--profile", profile.name()]);
    if profile == Profile::Image {
        // With a target of its own, since what runs at build time (procedural
        // macros are shared objects) can't be static.
        cargo.args(["--target", &host()?]);
        cargo.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    }
    let mut child = cargo
        .stdout(Stdio::piped())
        .spawn()
        .context("start cargo")?;
    let stdout = child.stdout.take().context("the output of cargo")?;
    let executables = executables(stdout)?;
    let status = child.wait().context("wait for cargo")?;
    ensure!(status.success(), "the build failed ({status})");
    Ok(executables)
}

fn find(executables: &[PathBuf], name: &str) -> Result<PathBuf> {
    let path = executables.iter().find(|path| path.ends_with(name));
    path.cloned()
        .with_context(|| format!("cargo did not say where {name} is"))
}

/// The target that is this machine, as rustc names it.
fn host() -> Result<String> {
    let mut rustc = command("rustc");
    let output = rustc.arg("-vV").output().context("start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned)
        .with_context(|| format!("rustc -vV names no host: {text}"))
}

/// Reads cargo's messages to the end.
fn executables(messages: ChildStdout) -> Result<Vec<PathBuf>> {
    let lines = BufReader::new(messages).lines();
    let paths = lines.filter_map(|line| line.map(|line| executable(&line)).transpose());
    paths
        .collect::<Result<_, _>>()
        .context("read the messages of cargo")
}

/// The path in a message of the kind `compiler-artifact`, if it is a program.
fn executable(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    message["executable"].as_str().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_have_an_executable() {
        let program = r#"{"reason":"compiler-artifact","executable":"/t/release/shunt"}"#;
        assert_eq!(executable(program), Some(PathBuf::from("/t/release/shunt")));
        assert_eq!(
            executable(r#"{"reason":"compiler-artifact","executable":null}"#),
            None
        );
        assert_eq!(executable("words of a build script"), None);
    }
}
