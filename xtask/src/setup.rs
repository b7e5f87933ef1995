//! `cargo xtask setup`: finds or installs what the other commands need.
//!
//! [`requirement`] is the table of what is needed; [`machine`] looks at what
//! this machine has; [`plan`] decides, without looking at anything itself,
//! which steps follow; [`step`] does them.

mod kubernetes;
mod machine;
mod plan;
mod requirement;
mod services;
mod step;

use anyhow::{Result, bail};
use clap::Args;

use self::machine::Machine;
pub(crate) use self::machine::is_root;
use self::plan::Plan;
use self::requirement::{Install, REQUIREMENTS, Requirement};
pub(crate) use self::requirement::{Need, SYSTEM_CLIPPY};
use crate::command::announce;

/// Whether to install.
#[derive(Args, Debug)]
pub(crate) struct SetupArgs {
    /// Only say what is there and what is missing; fail if something is.
    #[arg(long)]
    check: bool,
}

/// Installs what any command needs, or says what is missing.
pub(crate) fn run(args: &SetupArgs) -> Result<()> {
    if args.check {
        return check();
    }
    ensure(Need::ALL)?;
    println!("everything is there that can be installed from here");
    Ok(())
}

/// Installs what these kinds of work need. Quiet when nothing is missing.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let missing = missing(needs);
    if missing.iter().any(|it| it.install != Install::ByHand) {
        install(&missing)?;
    }
    report(&self::missing(needs))
}

fn missing(needs: &[Need]) -> Vec<&'static Requirement> {
    let needed = |it: &&Requirement| needs.contains(&it.need) && !(it.probe)();
    REQUIREMENTS.iter().filter(needed).collect()
}

fn check() -> Result<()> {
    for requirement in REQUIREMENTS {
        let state = if (requirement.probe)() {
            "found"
        } else {
            "missing"
        };
        println!(
            "{state:<8} {:<18} {}",
            requirement.name, requirement.purpose
        );
    }
    let missing = missing(Need::ALL);
    if missing.is_empty() {
        return Ok(());
    }
    let plan = plan::plan(&Machine::probe(), &missing);
    println!("\n`cargo xtask setup` would do this:");
    for line in plan.lines() {
        println!("  {line}");
    }
    bail!(
        "{} of {} requirements are missing",
        missing.len(),
        REQUIREMENTS.len()
    )
}

fn install(missing: &[&Requirement]) -> Result<()> {
    let names: Vec<_> = missing.iter().map(|it| it.name).collect();
    announce(&format!("missing: {}", names.join(", ")));
    let mut machine = Machine::probe();
    if plan::wants_package_lists(&machine, missing) {
        step::update_package_lists()?;
        machine = Machine::probe();
    }
    let Plan { steps, advice } = plan::plan(&machine, missing);
    for line in advice {
        announce(&line);
    }
    steps.iter().try_for_each(|it| it.run())
}

/// Fails if something is still missing that nothing goes without.
fn report(missing: &[&Requirement]) -> Result<()> {
    let line = |it: &&Requirement| format!("{} ({}): {}", it.name, it.purpose, it.advice);
    let (optional, required): (Vec<&Requirement>, _) = missing
        .iter()
        .copied()
        .partition(|it| it.install == Install::ByHand);
    for requirement in &optional {
        announce(&format!("missing, go on without it: {}", line(requirement)));
    }
    if required.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> = required.iter().map(line).collect();
    bail!("still missing:\n  {}", lines.join("\n  "))
}
