//! An OCI runtime: runc, after the limits of processor, memory and so on are taken
//! out of what it is asked for.
//!
//! The cgroups of a lab have no controllers, since the machine keeps them, or has
//! bound them to version 1; runc would fail to set a limit.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde_json::Value;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "containerd logs it")]
            {
                eprintln!("lab-runc: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Returns only without runc, or where there is nothing to do for it.
fn run() -> Result<ExitCode> {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match command(&arguments) {
        // Changes of limits are all that it is for.
        Some("update") => return Ok(ExitCode::SUCCESS),
        Some(_) => drop_limits(&bundle(&arguments).join("config.json"))?,
        None => {}
    }
    Err(Command::new("runc").args(&arguments).exec()).context("start runc")
}

/// The command, of those that have to do with limits.
fn command(arguments: &[OsString]) -> Option<&str> {
    let mut words = arguments.iter().filter_map(|word| word.to_str());
    words.find(|word| ["create", "run", "update"].contains(word))
}

fn bundle(arguments: &[OsString]) -> PathBuf {
    let is_flag = |word: &OsString| word == OsStr::new("--bundle") || word == OsStr::new("-b");
    let flag = arguments.iter().position(is_flag);
    let value = flag.and_then(|flag| arguments.get(flag + 1));
    value.map_or_else(|| PathBuf::from("."), PathBuf::from)
}

fn drop_limits(config: &Path) -> Result<()> {
    let shown = config.display();
    let text = fs::read(config).with_context(|| format!("read {shown}"))?;
    let mut parsed: Value =
        serde_json::from_slice(&text).with_context(|| format!("parse {shown}"))?;
    if let Some(resources) = parsed["linux"]["resources"].as_object_mut() {
        // Devices are no controller in version 2, but a program.
        resources.retain(|name, _| name == "devices");
    }
    fs::write(config, parsed.to_string()).with_context(|| format!("write {shown}"))
}
