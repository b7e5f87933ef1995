//! A client of many servers.

use std::fs;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use lab::report::{ConnectReport, ManyReport};

use crate::connect::{Close, connect};
use crate::udp::Client;
use crate::{LoadManyArgs, socket};

pub(crate) fn run(args: &LoadManyArgs) -> Result<()> {
    let targets = fs::read_to_string(&args.targets)
        .with_context(|| format!("read {}", args.targets.display()))?;
    let targets: Vec<SocketAddr> = targets
        .lines()
        .map(|line| line.parse().with_context(|| format!("address {line}")))
        .collect::<Result<_>>()?;
    let stopped = AtomicBool::new(false);
    let report = thread::scope(|scope| -> Result<ManyReport> {
        let client = scope.spawn(|| ask_all(args, &targets, &stopped));
        let end = io::stdin().read_to_end(&mut Vec::new());
        stopped.store(true, Ordering::Relaxed);
        end.context("read standard input")?;
        Ok(client.join().expect("ask_all does not panic"))
    })?;
    socket::print(&report)
}

fn ask_all(args: &LoadManyArgs, targets: &[SocketAddr], stopped: &AtomicBool) -> ManyReport {
    let mut report = ManyReport::new();
    for (number, target) in targets.iter().cycle().enumerate() {
        if stopped.load(Ordering::Relaxed) {
            break;
        }
        let answer = if args.udp {
            // Not always the same half: the rounds differ.
            let connected = (number + number / targets.len()).is_multiple_of(2);
            ask(*target, connected, args.timeout_ms)
        } else {
            connect(*target, args.timeout_ms, Close::Reset)
        };
        report.entry(*target).or_default().add(answer);
        thread::sleep(Duration::from_millis(args.pause_ms));
    }
    report
}

fn ask(target: SocketAddr, connected: bool, timeout: Duration) -> ConnectReport {
    let once = || match Client::new(target, connected, timeout).map(|client| client.ask()) {
        // As a resolver, which takes an answer from nobody else.
        Ok(answer) if answer.id.is_some() && answer.from != Some(target) => ConnectReport {
            errno: Some(format!("answer of {:?}", answer.from)),
            ..ConnectReport::default()
        },
        Ok(answer) => ConnectReport {
            peer: answer.from,
            id: answer.id,
            errno: answer.errno,
            ..ConnectReport::default()
        },
        Err(error) => ConnectReport {
            errno: Some(socket::error_name(&error)),
            ..ConnectReport::default()
        },
    };
    let first = once();
    if first.id.is_some() { first } else { once() }
}
