//! A checker of byte streams: many connections at once, each with a plan of its
//! own that both ends draw from a seed, read in the ways that programs read,
//! every byte checked. What it reports is what TCP would not do.
//!
//! Start with [`plan`] (what a connection does) and [`session`] (what an end may
//! do now, and what is a fault). [`event_loop`], [`runtime`], [`blocking`] and
//! [`writers`] are the ways to do it.

mod plan;
mod session;

mod blocking;
mod connection;
mod event_loop;
mod readiness;
mod records;
mod runtime;
mod writers;

mod client;
mod server;
mod victims;

mod options;
mod ports;
mod tally;
mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

use anyhow::Result;

use crate::{End, milliseconds, socket};

/// Both ends take all of them, though some are for one only.
#[derive(Clone, clap::Args)]
pub(crate) struct TortureArgs {
    #[command(flatten)]
    end: End,
    /// Spread over so many times three ports, from that of the address on.
    #[arg(long, default_value_t = 4)]
    banks: u16,
    /// Event loops, each with a thread.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// When nothing moves for so long, it is a hang.
    #[arg(long, default_value = "10000", value_parser = milliseconds)]
    patience_ms: Duration,
    /// Do not start processes only to kill them.
    #[arg(long)]
    no_victims: bool,
    /// Be such a process.
    #[arg(long)]
    victim: bool,
    /// Client: no new connections after so many.
    #[arg(long, default_value_t = 1_000_000_000)]
    connections: u64,
    /// Client: no new connections after so long.
    #[arg(long, default_value_t = 1e6)]
    seconds: f64,
    /// Client: no new connections once standard input is closed.
    #[arg(long)]
    until_stdin_closes: bool,
    /// Client: what the plans are drawn from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Client: connections at once.
    #[arg(long, default_value_t = 200)]
    parallel: usize,
    /// Client: the number of the first connection.
    #[arg(long, default_value_t = 0)]
    first_id: u64,
}

pub(crate) fn run(args: &TortureArgs) -> Result<()> {
    socket::raise_file_limit()?;
    let report = match (args.end.connect, args.end.listen) {
        (Some(to), _) => client::run(args, to)?,
        (None, Some(address)) => server::run(args, address)?,
        (None, None) => unreachable!("clap requires one of the two"),
    };
    socket::print(&report)
}
