//! Real programs, unmodified, on a node where everything is spliced that may be:
//! the same bytes, no error, no hang; and which of their connections are spliced,
//! or why not.
//!
//! The table is [`table::programs`]. `SHUNT_PROGRAM=TEXT` runs only those with the
//! text in their names.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

mod observe;
mod stage;
mod table;

use std::env;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use lab::Lab;

use observe::Observer;
use stage::{Running, Stage};
use table::{Expected, Program, programs};

/// A client is run again until its connections were spliced: it may have ended
/// before anybody looked at them. Only a fault makes this ever long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a connection's messages, to say that it was spliced.
const ENOUGH: u64 = 1;

#[test]
fn programs_get_the_same_bytes_spliced_or_not() {
    let mut lab = Lab::new("programs").unwrap();
    let stage = Stage::new(&mut lab).unwrap();
    let wanted = env::var("SHUNT_PROGRAM").unwrap_or_default();
    let mut table = format!(
        "{:<34} {:<8} {:<8} {:>9} {:>11} {:>8}  {}\n",
        "PROGRAM", "HOP", "STATE", "PROMOTED", "MESSAGES", "SECONDS", "WHY NOT"
    );
    let mut failures = Vec::new();
    let all = programs();
    for program in all.iter().filter(|it| it.name.contains(&wanted)) {
        let start = Instant::now();
        let observer = Observer::start(&stage.node);
        let result = run(&stage, program, &observer);
        let result = stage.clear().and(result);
        let seconds = start.elapsed().as_secs_f64();
        for ((port, hop), _) in stage::PORTS.into_iter().zip(program.hops) {
            let seen = observer.seen(port);
            let _ = writeln!(
                table,
                "{:<34} {hop:<8} {:<8} {:>9} {:>11} {seconds:>8.1}  {}",
                program.name,
                if seen.messages > 0 { "spliced" } else { "tcp" },
                seen.promoted,
                seen.messages,
                seen.reasons()
            );
        }
        if let Err(error) = result {
            failures.push(format!("{}: {error:#}", program.name));
        }
    }
    print(&table);
    assert!(failures.is_empty(), "\n{}", failures.join("\n\n"));
}

#[expect(clippy::print_stdout, reason = "the table is what people run it for")]
fn print(table: &str) {
    println!("{table}");
}

/// Runs the client until it is clear what becomes of the program's connections.
fn run(stage: &Stage, program: &Program, observer: &Observer) -> Result<()> {
    let Running { client, servers } = (program.start)(stage).context("start it")?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let printed = stage.programs.finish("program", client()?)?;
        for word in program.complaints {
            ensure!(!printed.contains(word), "{word:?} in\n{printed}");
        }
        let missing = missing(program, observer);
        if missing.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            bail!("{}", missing.join(", "));
        }
    }
    drop(servers);
    for ((port, hop), expected) in stage::PORTS.into_iter().zip(program.hops) {
        let seen = observer.seen(port);
        if matches!(expected, Expected::Left(_)) {
            ensure!(seen.messages == 0, "{hop} was spliced: {seen:?}");
        }
    }
    Ok(())
}

/// What was expected of the hops and not seen yet.
fn missing(program: &Program, observer: &Observer) -> Vec<String> {
    let hops = stage::PORTS.into_iter().zip(program.hops);
    hops.filter_map(|((port, hop), expected)| {
        let seen = observer.seen(port);
        let is_there = match expected {
            Expected::Spliced => seen.messages >= ENOUGH,
            Expected::Left(reason) => seen.reasons.contains(*reason),
            Expected::Either => true,
        };
        (!is_there).then(|| format!("{hop} is not {expected:?}: {seen:?}"))
    })
    .collect()
}
