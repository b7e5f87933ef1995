//! A client that connects at a steady pace, whatever becomes of its connects.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::report::{PaceReport, PacedConnect};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::{PaceArgs, socket};

pub(crate) fn run(args: &PaceArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start tokio")?;
    let connects = runtime.block_on(connect_all(args))?;
    socket::print(&PaceReport { connects })
}

async fn connect_all(args: &PaceArgs) -> Result<Vec<PacedConnect>> {
    let period = Duration::from_secs(1) / args.rate;
    let mut ticks = interval(period);
    // A client that was late catches up, or it would measure its own rest.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut running = JoinSet::new();
    let start = Instant::now();
    for _ in 0..args.rate * args.seconds {
        let due = ticks.tick().await;
        let (to, patience) = (args.to, args.timeout_ms);
        running.spawn(async move { connect(to, patience, due - start).await });
    }
    let mut connects: Vec<_> = Vec::new();
    while let Some(connect) = running.join_next().await {
        connects.push(connect.context("a connect panicked")?);
    }
    connects.sort_by_key(|it| it.at_ms);
    Ok(connects)
}

async fn connect(to: SocketAddr, patience: Duration, at: Duration) -> PacedConnect {
    let start = Instant::now();
    let connected = timeout(patience, TcpStream::connect(to)).await;
    let took = start.elapsed();
    let outcome = match connected {
        Ok(Ok(stream)) => read_id(stream, patience).await,
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    };
    PacedConnect {
        at_ms: milliseconds(at),
        took_ms: milliseconds(took),
        id: outcome.as_ref().ok().cloned(),
        errno: outcome.err().map(|error| socket::error_name(&error)),
    }
}

async fn read_id(stream: TcpStream, patience: Duration) -> io::Result<String> {
    socket::reset_on_close(&stream)?;
    let mut line = String::new();
    let mut reader = BufReader::new(stream);
    match timeout(patience, reader.read_line(&mut line)).await {
        Ok(Ok(_)) if line.ends_with('\n') => Ok(line.trim_end().to_owned()),
        Ok(Ok(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}
