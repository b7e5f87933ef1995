//! The other end of `bench-pingpong` and `bench-stream`: one connection at a
//! time, whose socket is non-blocking, and a poll before each read.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use crate::BenchServeArgs;
use crate::channel::{Channel, Nagle, Target};
use crate::socket;

/// What comes in the first moments of a stream is not measured: windows open,
/// and the agent decides.
const WARM_UP: Duration = Duration::from_millis(500);
/// How long it is measured.
const WINDOW: Duration = Duration::from_millis(600);

pub(crate) fn run(args: &BenchServeArgs) -> Result<()> {
    socket::pin(args.cpu)?;
    match &args.listen {
        Target::Tcp(address) => {
            let listener = socket::listen(*address)?;
            serve(args, || accept_tcp(&listener))
        }
        Target::Unix(path) => {
            let listener = UnixListener::bind(path).context("listen")?;
            let result = serve(args, || accept_unix(&listener));
            fs::remove_file(path).context("remove the socket's file")?;
            result
        }
    }
}

fn serve(args: &BenchServeArgs, accept: impl Fn() -> Result<Channel>) -> Result<()> {
    socket::print(&json!({ "listening": args.listen.to_string() }))?;
    loop {
        let mut channel = accept()?;
        channel.write_all(b"\n")?;
        // A client that is gone takes nothing along.
        let _ = if args.sink {
            sink(channel)
        } else {
            echo(channel)
        };
    }
}

fn accept_tcp(listener: &TcpListener) -> Result<Channel> {
    let (stream, _) = listener.accept().context("accept")?;
    Channel::tcp(stream, Nagle::Off).context("prepare a connection")
}

fn accept_unix(listener: &UnixListener) -> Result<Channel> {
    let (stream, _) = listener.accept().context("accept")?;
    Channel::unix(stream).context("prepare a connection")
}

fn echo(mut channel: Channel) -> Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        socket::wait_for_input(&channel)?;
        match channel.read(&mut buffer)? {
            None => {}
            Some(0) => return Ok(()),
            Some(count) => channel.write_all(&buffer[..count])?,
        }
    }
}

/// Reads, and after [`WARM_UP`] and [`WINDOW`] tells the client what came in the
/// window: bytes and nanoseconds.
fn sink(mut channel: Channel) -> Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    let mut stream = Measured::default();
    loop {
        socket::wait_for_input(&channel)?;
        match channel.read(&mut buffer)? {
            None => {}
            Some(0) => return Ok(()),
            Some(count) => {
                if let Some((bytes, nanoseconds)) = stream.add(count, Instant::now()) {
                    channel.write_all(format!("{bytes} {nanoseconds}\n").as_bytes())?;
                }
            }
        }
    }
}

/// A stream, from its first bytes on.
#[derive(Default)]
struct Measured {
    first: Option<Instant>,
    window: Option<Instant>,
    bytes: usize,
    is_over: bool,
}

impl Measured {
    /// Bytes that have come. At the end of the window: how many came in it, and how
    /// long it was.
    fn add(&mut self, count: usize, now: Instant) -> Option<(usize, u128)> {
        let first = *self.first.get_or_insert(now);
        if self.is_over || now - first < WARM_UP {
            return None;
        }
        let Some(begin) = self.window else {
            self.window = Some(now);
            return None;
        };
        self.bytes += count;
        self.is_over = now - begin >= WINDOW;
        self.is_over.then(|| (self.bytes, (now - begin).as_nanos()))
    }
}
