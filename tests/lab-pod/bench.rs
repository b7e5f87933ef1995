//! Measurements over TCP. They print facts of one run; comparing runs is the
//! caller's.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::PollFlags;

use lab::report::{ConnectBench, PingPongBench};

use crate::socket;
use crate::{BenchArgs, PingPongArgs};

/// A round trip that takes longer has failed.
const STALL: Duration = Duration::from_secs(10);

/// Counts cycles of socket(), connect(), setsockopt(SO_LINGER 0), close(), one
/// after the other. The reset on close keeps ports out of TIME_WAIT, so the
/// cycle has the whole handshake and the cheapest end: no FIN exchange. The
/// other end is `serve --close`; the client never waits for its accept().
pub(crate) fn connect(args: &BenchArgs) -> Result<()> {
    socket::pin(args.cpu)?;
    let duration = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
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
    socket::pin(args.bench.cpu)?;
    let duration = Duration::try_from_secs_f64(args.bench.seconds).context("--seconds")?;
    let size = usize::try_from(args.size).context("--size")?;
    let mut echo = Echo::connect(args.bench.to, size)?;
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
    stream: TcpStream,
    message: Vec<u8>,
    answer: Vec<u8>,
}

impl Echo {
    /// Connects and takes the server's id line off the stream.
    fn connect(to: SocketAddr, size: usize) -> Result<Self> {
        let mut stream = TcpStream::connect(to).with_context(|| format!("connect to {to}"))?;
        stream
            .set_read_timeout(Some(STALL))
            .context("set a timeout")?;
        let mut byte = [0];
        while byte != *b"\n" {
            stream
                .read_exact(&mut byte)
                .context("read the server's id")?;
        }
        socket::prepare(&stream).context("prepare the connection")?;
        Ok(Self {
            stream,
            message: vec![0x5a; size],
            answer: vec![0; size],
        })
    }

    fn round_trip(&mut self) -> Result<()> {
        let size = self.message.len();
        let (mut sent, mut received) = (0, 0);
        while received < size {
            if sent < size {
                sent += moved(self.stream.write(&self.message[sent..]))?;
            }
            let mut events = PollFlags::POLLIN;
            events.set(PollFlags::POLLOUT, sent < size);
            ensure!(socket::wait(self.stream.as_fd(), events, STALL)?, "stalled");
            let read = self.stream.read(&mut self.answer[received..]);
            ensure!(!matches!(read, Ok(0)), "the server ended the connection");
            received += moved(read)?;
        }
        Ok(())
    }
}

/// Bytes moved: none, if the socket is not ready.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}
