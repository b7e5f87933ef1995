//! Measurements over TCP. They print facts of one run; comparing runs is the
//! caller's.

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::PollFlags;

use lab::report::{ConnectBench, PingPongBench, StreamBench};

use crate::channel::{Channel, Nagle};
use crate::socket;
use crate::{BenchArgs, BenchStreamArgs, PingPongArgs};

/// Counts cycles of socket(), connect(), setsockopt(SO_LINGER 0), close(), one
/// after the other. The reset on close keeps ports out of TIME_WAIT, so the
/// cycle has the whole handshake and the cheapest end: no FIN exchange. The
/// other end is `serve --close`; the client never waits for its accept().
pub(crate) fn connect(args: &BenchArgs) -> Result<()> {
    socket::pin(args.run.cpu)?;
    let duration = args.run.duration()?;
    let (mut connects, mut errors) = (0u64, 0u64);
    let start = Instant::now();
    while start.elapsed() < duration {
        match TcpStream::connect(args.to).and_then(|stream| socket::reset_on_close(&stream)) {
            Ok(()) => connects += 1,
            // Established, and reset by the server before this thread woke up
            // (`inet_wait_for_connect` in `net/ipv4/af_inet.c`).
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => connects += 1,
            Err(_) => errors += 1,
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    socket::print(&ConnectBench {
        connects,
        errors,
        seconds,
        per_second: connects as f64 / seconds,
    })
}

/// Times round trips of one message through an echoing server: write, poll,
/// read until all is back. Both ends' sockets are non-blocking.
pub(crate) fn ping_pong(args: &PingPongArgs) -> Result<()> {
    socket::pin(args.run.cpu)?;
    let duration = args.run.duration()?;
    let size = usize::try_from(args.size).context("--size")?;
    let mut echo = Echo {
        channel: Channel::connect(&args.to, Nagle::Off)?,
        message: vec![0x5a; size],
        answer: vec![0; size],
    };
    let mut times = Vec::new();
    let start = Instant::now();
    while start.elapsed() < duration {
        let begin = Instant::now();
        echo.round_trip().context("round trip")?;
        times.push(u64::try_from(begin.elapsed().as_nanos()).context("round trip time")?);
    }
    let seconds = start.elapsed().as_secs_f64();
    socket::print(&summary(size, seconds, times).context("no round trip was made")?)
}

/// How often a stream looks for the server's answer, which costs a call.
const WRITES_PER_READ: u32 = 16;

/// Writes messages of one size as fast as they are taken, until the server has
/// measured.
pub(crate) fn stream(args: &BenchStreamArgs) -> Result<()> {
    socket::pin(args.cpu)?;
    let size = usize::try_from(args.size).context("--size")?;
    let nagle = if args.nodelay { Nagle::Off } else { Nagle::On };
    let mut channel = Channel::connect(&args.to, nagle)?;
    let message = vec![0x5a; size];
    let mut answer = String::new();
    while !answer.ends_with('\n') {
        for _ in 0..WRITES_PER_READ {
            channel.write_all(&message)?;
        }
        let mut buffer = [0; 64];
        let read = channel.read(&mut buffer)?;
        ensure!(read != Some(0), "the server ended the connection");
        answer.push_str(std::str::from_utf8(&buffer[..read.unwrap_or(0)])?);
    }
    let (bytes, nanoseconds) = answer.trim().split_once(' ').context("two numbers")?;
    let (bytes, nanoseconds): (u64, u64) = (bytes.parse()?, nanoseconds.parse()?);
    socket::print(&StreamBench {
        bytes,
        bytes_per_second: bytes as f64 / Duration::from_nanos(nanoseconds).as_secs_f64(),
    })
}

fn summary(size: usize, seconds: f64, mut times: Vec<u64>) -> Option<PingPongBench> {
    times.sort_unstable();
    let count = times.len();
    Some(PingPongBench {
        size,
        count,
        seconds,
        p50_ns: *times.get(count / 2)?,
        p99_ns: *times.get(count * 99 / 100)?,
        mean_ns: times.iter().sum::<u64>() / u64::try_from(count).ok()?,
    })
}

struct Echo {
    channel: Channel,
    message: Vec<u8>,
    answer: Vec<u8>,
}

impl Echo {
    fn round_trip(&mut self) -> Result<()> {
        let size = self.message.len();
        let (mut sent, mut received) = (0, 0);
        while received < size {
            if sent < size {
                sent += self.channel.write(&self.message[sent..])?;
            }
            let mut events = PollFlags::POLLIN;
            events.set(PollFlags::POLLOUT, sent < size);
            self.channel.wait(events)?;
            let read = self.channel.read(&mut self.answer[received..])?;
            ensure!(read != Some(0), "the server ended the connection");
            received += read.unwrap_or(0);
        }
        Ok(())
    }
}
