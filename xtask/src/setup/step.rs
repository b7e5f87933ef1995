//! The steps of an installation.

use std::collections::BTreeSet;
use std::fmt;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::{kubernetes, services};
use crate::command::{announce, command, run, text};

/// The version of bpf-linker that is known to work with the compilers.
pub(super) const LINKER_VERSION: &str = "0.13.0";
/// Where Debian's packages put the LLVM that bpf-linker is built from.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
/// apt waits this many seconds for another that holds its lock.
const LOCK_TIMEOUT: &str = "DPkg::Lock::Timeout=300";

/// One of them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// apt.
    Packages(BTreeSet<&'static str>),
    /// rustup's nightly, with the source of core.
    Nightly,
    /// A component of one of rustup's toolchains.
    Component {
        name: &'static str,
        toolchain: Option<&'static str>,
    },
    /// bpf-linker.
    Linker(LinkerFrom),
    /// Kubernetes' own programs.
    Kubernetes,
    /// The Go modules of `tests/programs/go`.
    GoModules,
    /// What the nodes of a cluster run.
    Nodes,
}

/// Where bpf-linker comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LinkerFrom {
    /// Its source, with Debian's LLVM.
    DebianLlvm,
    /// Its source, with the LLVM that it asks for by default.
    OtherLlvm,
    /// Its release.
    Release,
}

impl Step {
    /// Does it, with its output on the terminal.
    pub(super) fn run(&self) -> Result<()> {
        announce(&self.to_string());
        match self {
            Self::Packages(packages) => {
                let guard = services::NothingStarts::begin()?;
                run(&mut install(packages))?;
                drop(guard);
                services::disable(packages)
            }
            Self::GoModules => services::fetch_go_modules(),
            Self::Nightly => run(&mut nightly()),
            Self::Component { name, toolchain } => run(&mut component(name, *toolchain)),
            Self::Linker(LinkerFrom::OtherLlvm) => run(&mut linker(LinkerFrom::OtherLlvm)).context(
                "bpf-linker could not be built: it needs the LLVM that its features name, with \
                 headers. Easier is its release: `cargo binstall bpf-linker`, or a file from \
                 https://github.com/aya-rs/bpf-linker/releases on the PATH",
            ),
            Self::Linker(from) => run(&mut linker(*from)),
            Self::Kubernetes => kubernetes::build(),
            Self::Nodes => kubernetes::build_nodes(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packages(packages) => {
                let packages: Vec<_> = packages.iter().copied().collect();
                write!(f, "installing Debian packages: {}", packages.join(" "))
            }
            Self::Nightly => f.write_str("installing rustup's nightly with the source of core"),
            Self::Component { name, toolchain } => {
                write!(
                    f,
                    "installing {name} for {}",
                    toolchain.unwrap_or("the toolchain in use")
                )
            }
            Self::Kubernetes => write!(
                f,
                "building etcd and the programs of Kubernetes {} (about 10 minutes, once a machine)",
                lab::kubernetes::VERSION
            ),
            Self::GoModules => {
                f.write_str("fetching the Go modules of the programs that a test runs")
            }
            Self::Nodes => f.write_str(
                "building kubelet, containerd and network plugins (about 5 minutes, once a machine)",
            ),
            Self::Linker(LinkerFrom::Release) => {
                write!(f, "installing bpf-linker {LINKER_VERSION}")
            }
            Self::Linker(_) => {
                write!(
                    f,
                    "installing bpf-linker {LINKER_VERSION} from source (about 2 minutes)"
                )
            }
        }
    }
}

/// Has apt read what the package servers offer.
pub(super) fn update_package_lists() -> Result<()> {
    announce("updating apt's package lists");
    run(&mut apt(&["update"]))
}

/// What root would type for a step of apt.
pub(super) fn as_root(packages: &BTreeSet<&'static str>) -> String {
    let install = text(&install(packages));
    format!(
        "apt-get update && {}",
        install.replace(&format!(" -o {LOCK_TIMEOUT}"), "")
    )
}

fn install(packages: &BTreeSet<&'static str>) -> Command {
    let mut command = apt(&["install", "-y", "--no-install-recommends"]);
    command.args(packages);
    command
}

fn nightly() -> Command {
    let mut command = command("rustup");
    command.args(["toolchain", "install", "nightly", "--profile", "minimal"]);
    command.args(["--component", "rust-src"]);
    command
}

fn component(name: &str, toolchain: Option<&str>) -> Command {
    let mut command = command("rustup");
    command.args(["component", "add", name]);
    if let Some(toolchain) = toolchain {
        command.args(["--toolchain", toolchain]);
    }
    command
}

fn apt(args: &[&str]) -> Command {
    let mut command = command("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.args(["-o", LOCK_TIMEOUT]);
    command.args(args);
    command
}

fn linker(from: LinkerFrom) -> Command {
    let mut command = command("cargo");
    match from {
        LinkerFrom::Release => {
            let package = format!("bpf-linker@{LINKER_VERSION}");
            command.args(["binstall", "--no-confirm", &package]);
        }
        LinkerFrom::OtherLlvm => {
            command.args([
                "install",
                "bpf-linker",
                "--version",
                LINKER_VERSION,
                "--locked",
            ]);
        }
        LinkerFrom::DebianLlvm => {
            command.args([
                "install",
                "bpf-linker",
                "--version",
                LINKER_VERSION,
                "--locked",
            ]);
            command.args(["--no-default-features", "--features", "llvm-22"]);
            command.env("LLVM_PREFIX", LLVM_PREFIX);
        }
    }
    // Not into the project's target folder, whose profile settings don't apply.
    command.env_remove("CARGO_TARGET_DIR");
    command
}

#[cfg(test)]
mod tests {
    use super::super::requirement::{COMPILER_PACKAGES, LINKER_PACKAGES};
    use super::*;

    #[test]
    fn the_image_is_built_with_the_same_tools() {
        let dockerfile = include_str!("../../../deploy/Dockerfile");
        let words: BTreeSet<_> = dockerfile.split_whitespace().collect();
        let packages = COMPILER_PACKAGES.iter().chain(LINKER_PACKAGES);
        for word in packages.chain([&LINKER_VERSION]) {
            assert!(words.contains(word), "{word}");
        }
        assert!(words.contains(format!("LLVM_PREFIX={LLVM_PREFIX}").as_str()));
    }
}
