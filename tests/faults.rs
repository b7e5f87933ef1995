//! Agents that break a rule of the splice are found out by the torture; those that
//! crash, wherever it is, are not noticed. Run with `shunt-faulty`, the agent that can
//! be told to.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::process::Command;
use std::time::Duration;

use lab::random::{Random, seed};
use lab::torture::round::{Round, RoundReport};
use lab::torture::trouble::{Program, Trouble};
use lab::{LogOutput, target_binary};

/// Far more rounds than a fault has ever taken to be found.
const ROUNDS: u64 = 20;

fn round<'a>(seed: u64, number: u64, args: &'a [&'a str], trouble: Trouble<'a>) -> Round<'a> {
    Round {
        seed: Random::new(seed + number).below(usize::MAX) as u64,
        number,
        trouble,
        steering: 0b11,
        parallel: 12,
        patience: Duration::from_secs(8),
        program: Program::Faulty,
        args,
        logs: LogOutput::Captured,
    }
}

/// Goes on until a fault of a connection is the one that is looked for.
#[expect(clippy::print_stdout, reason = "shown if the test fails")]
fn finds(fault: &str, is_it: impl Fn(&RoundReport) -> bool) {
    let args = ["--fault", fault];
    let trouble = Trouble::Switches(Duration::from_secs(10));
    let seed = seed();
    for number in 0..ROUNDS {
        let report = round(seed, number, &args, trouble).run().unwrap();
        println!("{fault}, round {number}: {:?}", report.torture.faults);
        if is_it(&report) {
            return;
        }
    }
    panic!("{fault} was not found in {ROUNDS} rounds");
}

fn has(report: &RoundReport, what: &str) -> bool {
    report
        .torture
        .described
        .iter()
        .any(|fault| fault.what == what)
}

#[test]
fn the_torture_finds_an_agent_that_does_not_keep_the_order() {
    finds("no-order", |report| has(report, "wrong byte"));
}

/// The reader has bytes, and sleeps.
#[test]
fn the_torture_finds_an_agent_that_wakes_nobody() {
    finds("no-kick", |report| {
        has(
            report,
            "hung with bytes to recv that FIONREAD does not show",
        ) || has(report, "hung with bytes unread")
    });
}

#[test]
fn no_connection_sees_an_agent_crash_and_the_next_one_takes_over() {
    // In the order of a pair's life: registered, promoted, relied on, latched,
    // frozen, and out of the map with its readers still asleep.
    let faults = [
        "crash-found",
        "crash-promoted",
        "crash-confirmed",
        "crash-told",
        "crash-frozen",
        "crash-released",
    ];
    let round = Round {
        // Agents that only crash wake nobody for long.
        patience: Duration::from_secs(240),
        ..round(seed(), 0, &[], Trouble::Crashes(&faults, 2))
    };
    let report = round.run().unwrap();
    println!("{:?}", report.trouble);
    let torture = &report.torture;
    assert!(torture.faults.is_empty(), "{:#?}", torture.described);
    assert!(report.trouble.kills >= 2 * faults.len() as u64);
    assert!(report.demotions > 0, "{report:?}");
}

#[test]
fn the_program_that_is_installed_has_no_faults() {
    let output = Command::new(target_binary("shunt", "SHUNT_BIN").unwrap())
        .args(["agent", "--node-name", "n1", "--fault", "no-kick"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("unexpected argument '--fault'"), "{text}");
}
