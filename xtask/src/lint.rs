//! `cargo xtask lint`: formatting, clippy on both targets, and the map layout.

mod layout;

use anyhow::{Result, bail};
use clap::Args;
use ebpf_toolchain::Compiler;

use crate::command::{announce, command, run as run_command};
use crate::setup::SYSTEM_CLIPPY;

/// What to change instead of only looking.
#[derive(Args, Debug)]
pub(crate) struct LintArgs {
    /// Record the present map layout, after LAYOUT_VERSION was raised.
    #[arg(long)]
    update_layout: bool,
}

/// Its name, and what does it.
type Part = (&'static str, fn() -> Result<()>);

/// Does all of it, and fails at the end if one part failed.
pub(crate) fn run(args: &LintArgs) -> Result<()> {
    if args.update_layout {
        return layout::update();
    }
    let parts: [Part; 5] = [
        ("map layout", layout::check),
        ("formatting", formatting),
        ("clippy", clippy),
        ("clippy for shunt-faulty", faulty_clippy),
        ("clippy for BPF", bpf_clippy),
    ];
    let mut failed = Vec::new();
    for (name, part) in parts {
        announce(name);
        if let Err(error) = part() {
            announce(&format!("{name}: {error:#}"));
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("lint found something in: {}", failed.join(", "))
}

fn formatting() -> Result<()> {
    run_command(command("cargo").args(["fmt", "--all", "--check"]))
}

fn clippy() -> Result<()> {
    let mut cargo = command("cargo");
    // The BPF programs compile for their own target only.
    cargo.args([
        "clippy",
        "--workspace",
        "--exclude",
        "ebpf-programs",
        "--all-targets",
    ]);
    cargo.args(["--", "--deny", "warnings"]);
    run_command(&mut cargo)
}

/// What only the tests' agent has.
fn faulty_clippy() -> Result<()> {
    let mut cargo = command("cargo");
    // As above, so that the other crates are not checked again.
    cargo.args(["clippy", "--workspace", "--exclude", "ebpf-programs"]);
    cargo.args(["--all-targets", "--features", "node-agent/fault-injection"]);
    cargo.args(["--", "--deny", "warnings"]);
    run_command(&mut cargo)
}

/// With the clippy of the compiler that builds them: another version can't read
/// its core library.
fn bpf_clippy() -> Result<()> {
    let compiler = Compiler::find()?;
    let mut cargo = match &compiler {
        Compiler::Nightly => compiler.cargo("clippy"),
        // What `cargo clippy` does, but not with rustup's clippy-driver.
        Compiler::Prebuilt { .. } => {
            let mut cargo = compiler.cargo("check");
            cargo.env("RUSTC_WORKSPACE_WRAPPER", SYSTEM_CLIPPY);
            cargo
        }
    };
    // Read by clippy-driver; `cargo clippy -- --deny warnings` sets the same.
    cargo.env(
        "CLIPPY_ARGS",
        "--deny__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
    );
    cargo.current_dir(crate::command::root());
    cargo.args(["--package", "ebpf-programs", "--release"]);
    run_command(&mut cargo)
}
