//! Checks that a connection carries bytes as TCP must: two streams at once,
//! writes of all sizes, optional pauses in reading, half-close at the end.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::poll::PollFlags;

use lab::pattern::{Pattern, Random, Verifier};
use lab::report::StreamReport;

use crate::StreamArgs;
use crate::socket;

/// Largest write and read: 256 KiB.
const MAX_SIZE_BITS: u64 = 18;
const MAX_SIZE: usize = 1 << MAX_SIZE_BITS;

/// A slow reader pauses once in so many reads, up to so many milliseconds.
const READS_PER_PAUSE: u64 = 8;
const MAX_PAUSE_MS: u64 = 20;

pub(crate) fn run(args: &StreamArgs) -> Result<()> {
    let (stream, role) = match (args.end.connect, args.end.listen) {
        (Some(to), _) => (
            TcpStream::connect(to).with_context(|| format!("connect to {to}"))?,
            0,
        ),
        (None, Some(address)) => (accept_one(address, args.stall_ms)?, 1),
        (None, None) => unreachable!("clap requires one of the two"),
    };
    socket::prepare(&stream).context("prepare the connection")?;
    let mut exchange = Exchange::new(stream, args, role);
    let error = exchange.run().err().map(|error| match error.kind() {
        io::ErrorKind::TimedOut if error.raw_os_error().is_none() => "stalled".to_owned(),
        _ => socket::error_name(&error),
    });
    socket::print(&exchange.report(error))
}

fn accept_one(address: SocketAddr, timeout: Duration) -> Result<TcpStream> {
    let listener = socket::listen(address)?;
    socket::announce(&listener)?;
    let came = socket::wait(listener.as_fd(), PollFlags::POLLIN, timeout)?;
    ensure!(came, "nobody connected within {timeout:?}");
    Ok(listener.accept().context("accept")?.0)
}

struct Exchange {
    stream: TcpStream,
    outgoing: Outgoing,
    incoming: Incoming,
    stall: Duration,
}

struct Outgoing {
    pattern: Pattern,
    random: Random,
    sent: u64,
    /// The write that is under way; shorter after the kernel took a part.
    chunk: Vec<u8>,
    taken: usize,
    closed: bool,
}

struct Incoming {
    verifier: Verifier,
    random: Random,
    buffer: Vec<u8>,
    slow: bool,
    paused_until: Option<Instant>,
    end_seen: bool,
}

impl Exchange {
    /// Each role sends a stream of its own.
    fn new(stream: TcpStream, args: &StreamArgs, role: u64) -> Self {
        let pattern = |role| Pattern::new(args.seed.wrapping_mul(2).wrapping_add(role), args.bytes);
        Self {
            stream,
            outgoing: Outgoing {
                pattern: pattern(role),
                random: Random::new(args.seed ^ role),
                sent: 0,
                chunk: Vec::new(),
                taken: 0,
                closed: false,
            },
            incoming: Incoming {
                verifier: Verifier::new(pattern(1 - role)),
                random: Random::new(!args.seed ^ role),
                buffer: vec![0; MAX_SIZE],
                slow: args.slow_reader,
                paused_until: None,
                end_seen: false,
            },
            stall: args.stall_ms,
        }
    }

    fn run(&mut self) -> io::Result<()> {
        while !(self.outgoing.closed && self.incoming.end_seen) {
            let paused = self.incoming.pause_left();
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLOUT, !self.outgoing.closed);
            events.set(
                PollFlags::POLLIN,
                paused.is_none() && !self.incoming.end_seen,
            );
            let ready = socket::wait(self.stream.as_fd(), events, paused.unwrap_or(self.stall))?;
            if !ready && paused.is_none() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if events.contains(PollFlags::POLLOUT) {
                self.outgoing.step(&mut self.stream)?;
            }
            if events.contains(PollFlags::POLLIN) {
                self.incoming.step(&mut self.stream)?;
            }
        }
        Ok(())
    }

    fn report(&self, error: Option<String>) -> StreamReport {
        let Self {
            outgoing, incoming, ..
        } = self;
        let bytes = outgoing.pattern.length();
        let mut report = StreamReport {
            sent: outgoing.sent,
            received: incoming.verifier.received(),
            wrong: incoming.verifier.wrong(),
            first_wrong: incoming.verifier.first_wrong(),
            end_seen: incoming.end_seen,
            error,
            ok: false,
        };
        report.ok = report.sent == bytes
            && report.received == bytes
            && report.wrong == 0
            && report.end_seen
            && report.error.is_none();
        report
    }
}

impl Outgoing {
    fn step(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        if self.taken == self.chunk.len() {
            self.next_chunk();
        }
        if self.chunk.is_empty() {
            self.closed = true;
            return stream.shutdown(Shutdown::Write);
        }
        match stream.write(&self.chunk[self.taken..]) {
            Ok(count) => {
                self.taken += count;
                self.sent += count as u64;
                Ok(())
            }
            Err(error) => unless_temporary(error),
        }
    }

    fn next_chunk(&mut self) {
        let left = self.pattern.length() - self.sent;
        let size = random_size(&mut self.random).min(usize::try_from(left).unwrap_or(MAX_SIZE));
        self.chunk.resize(size, 0);
        self.pattern.fill(self.sent, &mut self.chunk);
        self.taken = 0;
    }
}

impl Incoming {
    fn step(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        let size = random_size(&mut self.random);
        match stream.read(&mut self.buffer[..size]) {
            Ok(0) => self.end_seen = true,
            Ok(count) => self.verifier.accept(&self.buffer[..count]),
            Err(error) => return unless_temporary(error),
        }
        if self.slow && self.random.below(READS_PER_PAUSE) == 0 {
            let pause = Duration::from_millis(1 + self.random.below(MAX_PAUSE_MS));
            self.paused_until = Some(Instant::now() + pause);
        }
        Ok(())
    }

    fn pause_left(&mut self) -> Option<Duration> {
        let left = self.paused_until?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.paused_until = None;
            return None;
        }
        // poll() counts whole milliseconds; 0 would spin.
        Some(left.max(Duration::from_millis(1)))
    }
}

/// 1 B to 256 KiB; each power of two is as likely as another, so small writes
/// come between large ones.
fn random_size(random: &mut Random) -> usize {
    let limit = 1 << random.below(MAX_SIZE_BITS + 1);
    usize::try_from(1 + random.below(limit)).unwrap_or(MAX_SIZE)
}

fn unless_temporary(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}
