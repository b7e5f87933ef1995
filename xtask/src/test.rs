//! `cargo xtask test`: unit tests, and tests that need root.

use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;

use crate::build::{Profile, binaries, faulty};
use crate::command::{announce, command, run as run_command};
use crate::setup::{Need, ensure as ensure_installed, is_root};

/// Labs share the machine's processors, and some tests keep more than one busy.
const ROOT_TEST_THREADS: &str = "--test-threads=1";

/// Which tests.
#[derive(Args, Debug)]
pub(crate) struct TestArgs {
    /// Only those that need no root.
    #[arg(long, conflicts_with = "root")]
    unit: bool,
    /// Only those that need root.
    #[arg(long)]
    root: bool,
    /// For the test programs: part of a name, --nocapture, --ignored, …
    #[arg(last = true)]
    rest: Vec<String>,
}

/// Runs them.
pub(crate) fn run(args: &TestArgs) -> Result<()> {
    // Said at once, and not after minutes of unit tests.
    ensure!(
        args.unit || is_root(),
        "the root tests make network namespaces and cgroups: run as root, or `cargo xtask test \
         --unit`"
    );
    let needs: &[Need] = if args.unit {
        &[Need::Build]
    } else {
        &[
            Need::Build,
            Need::Lab,
            Need::Test,
            Need::Programs,
            Need::Kubernetes,
        ]
    };
    ensure_installed(needs)?;
    if args.rest.iter().any(|it| it.ends_with("ignored")) {
        ensure_installed(&[Need::Cluster])?;
    }
    if !args.root {
        announce("unit tests");
        run_command(&mut unit(&args.rest))?;
    }
    if !args.unit {
        run_command(&mut root(&args.rest)?)?;
    }
    Ok(())
}

fn unit(rest: &[String]) -> Command {
    let mut cargo = command("cargo");
    cargo.args(["test", "--"]).args(rest);
    cargo
}

fn root(rest: &[String]) -> Result<Command> {
    let binaries = binaries(Profile::Debug)?;
    let faulty = faulty()?;
    announce("root tests");
    let mut cargo = command("cargo");
    cargo.env("SHUNT_BIN", binaries.shunt);
    cargo.env("SHUNT_FAULTY_BIN", faulty);
    cargo.env("LAB_POD_BIN", binaries.lab_pod);
    // One program that fails must not hide what the others find.
    cargo.args(["test", "--no-fail-fast", "--package", "shunt-tests", "--"]);
    cargo.args(root_test_arguments(rest));
    Ok(cargo)
}

fn root_test_arguments(rest: &[String]) -> Vec<&str> {
    let mut arguments: Vec<_> = rest.iter().map(String::as_str).collect();
    // The test programs refuse to be told twice.
    if !arguments.iter().any(|it| it.starts_with("--test-threads")) {
        arguments.push(ROOT_TEST_THREADS);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_can_be_given() {
        let arguments = |text: &str| {
            let rest: Vec<_> = text.split(' ').map(str::to_owned).collect();
            root_test_arguments(&rest).join(" ")
        };
        assert_eq!(
            arguments("churn --nocapture"),
            "churn --nocapture --test-threads=1"
        );
        assert_eq!(arguments("--test-threads 4"), "--test-threads 4");
    }
}
