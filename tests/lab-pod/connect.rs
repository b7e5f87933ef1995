//! Clients: one connect, many, or many at once.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use lab::report::{ConnectReport, Landing, LoadReport};
use nix::time::{ClockId, clock_gettime};

use crate::socket;
use crate::{ConnectArgs, LoadArgs};

/// Longest id line that is waited for.
const MAX_ID: usize = 4096;

pub(crate) fn run(args: &ConnectArgs) -> Result<()> {
    let Some(count) = args.count else {
        return socket::print(&connect(args.to, args.timeout_ms, Close::Gracefully));
    };
    let mut report = LoadReport::default();
    for _ in 0..count {
        report.add(connect(args.to, args.timeout_ms, Close::Reset));
    }
    socket::print(&report)
}

pub(crate) fn load(args: &LoadArgs) -> Result<()> {
    let load = Load {
        to: args.to,
        timeout: args.timeout_ms,
        left: AtomicU64::new(args.count.unwrap_or(u64::MAX)),
        stopped: AtomicBool::new(false),
        trace: args.trace,
    };
    let report = thread::scope(|scope| -> Result<LoadReport> {
        let threads: Vec<_> = (0..args.threads)
            .map(|_| scope.spawn(|| load.run()))
            .collect();
        if args.until_stdin_closes {
            let end = io::stdin().read_to_end(&mut Vec::new());
            load.stopped.store(true, Ordering::Relaxed);
            end.context("read standard input")?;
        }
        let mut report = LoadReport::default();
        for thread in threads {
            report.merge(thread.join().expect("run does not panic"));
        }
        Ok(report)
    })?;
    socket::print(&report)
}

struct Load {
    to: SocketAddr,
    timeout: Duration,
    left: AtomicU64,
    stopped: AtomicBool,
    trace: bool,
}

impl Load {
    fn run(&self) -> LoadReport {
        let mut report = LoadReport::default();
        while self.take_one() {
            let start_ns = monotonic_ns();
            let connect = connect(self.to, self.timeout, Close::Reset);
            if let Some(id) = connect.id.clone().filter(|_| self.trace) {
                let end_ns = monotonic_ns();
                report.landings.push(Landing {
                    start_ns,
                    end_ns,
                    id,
                });
            }
            report.add(connect);
            if self.stopped.load(Ordering::Relaxed) {
                break;
            }
        }
        report
    }

    fn take_one(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Close {
    Gracefully,
    /// Leaves no TIME_WAIT: many connects would run out of ports.
    Reset,
}

pub(crate) fn connect(to: SocketAddr, timeout: Duration, close: Close) -> ConnectReport {
    let mut report = ConnectReport::default();
    let start = Instant::now();
    let stream = TcpStream::connect_timeout(&to, timeout);
    report.connect_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let outcome = stream.and_then(|stream| {
        if let Close::Reset = close {
            socket::reset_on_close(&stream)?;
        }
        report.local = Some(stream.local_addr()?);
        report.peer = Some(stream.peer_addr()?);
        read_id(stream, timeout)
    });
    match outcome {
        Ok(id) => report.id = Some(id),
        Err(error) => report.errno = Some(socket::error_name(&error)),
    }
    report
}

fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn read_id(mut stream: TcpStream, timeout: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(timeout))?;
    let mut line = Vec::new();
    let mut buffer = [0; 256];
    while line.len() < MAX_ID {
        let count = match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            // What SO_RCVTIMEO gives.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            other => other?,
        };
        line.extend_from_slice(&buffer[..count]);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}
