//! What benchmarks talk over: TCP connections and Unix sockets, non-blocking.

use std::convert::Infallible;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::poll::PollFlags;

use crate::socket;

/// What waits longer has failed.
pub(crate) const STALL: Duration = Duration::from_secs(10);

/// Where a benchmark's server is.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Target {
    type Err = Infallible;

    /// What is no address and port is a path.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text
            .parse()
            .map_or_else(|_| Self::Unix(text.into()), Self::Tcp))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(path) => path.display().fmt(formatter),
        }
    }
}

/// Whether small writes wait for those before them to be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nagle {
    On,
    Off,
}

pub(crate) trait Stream: Read + Write + AsFd {}

impl<T: Read + Write + AsFd> Stream for T {}

/// One end of a connection.
pub(crate) struct Channel(Box<dyn Stream>);

impl Channel {
    /// Connects to a server of this program, and takes its greeting off.
    pub(crate) fn connect(to: &Target, nagle: Nagle) -> Result<Self> {
        let channel = match to {
            Target::Tcp(address) => TcpStream::connect(address)
                .and_then(|stream| Self::tcp(stream, nagle))
                .with_context(|| format!("connect to {to}"))?,
            Target::Unix(path) => UnixStream::connect(path)
                .and_then(Self::unix)
                .with_context(|| format!("connect to {to}"))?,
        };
        channel.skip_greeting()
    }

    pub(crate) fn tcp(stream: TcpStream, nagle: Nagle) -> io::Result<Self> {
        stream.set_nodelay(nagle == Nagle::Off)?;
        stream.set_nonblocking(true)?;
        Ok(Self(Box::new(stream)))
    }

    pub(crate) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(Box::new(stream)))
    }

    /// Waits until it can be read or, with bytes to send, written.
    pub(crate) fn wait(&self, events: PollFlags) -> Result<()> {
        ensure!(socket::wait(self.0.as_fd(), events, STALL)?, "stalled");
        Ok(())
    }

    /// Reads what is there: `None` if nothing is, 0 at the end.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        ready(self.0.read(buffer))
    }

    /// Writes what there is room for, which may be nothing.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(ready(self.0.write(bytes))?.unwrap_or(0))
    }

    /// Writes all of it.
    pub(crate) fn write_all(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let count = self.write(bytes).context("write")?;
            bytes = &bytes[count..];
            if count == 0 {
                self.wait(PollFlags::POLLOUT)?;
            }
        }
        Ok(())
    }

    /// A line, without its end.
    pub(crate) fn read_line(&mut self) -> Result<String> {
        let mut line = Vec::new();
        loop {
            self.wait(PollFlags::POLLIN)?;
            let mut byte = [0];
            match self.read(&mut byte).context("read a line")? {
                None => {}
                Some(0) => bail!("the server ended the connection"),
                Some(_) if byte == *b"\n" => break,
                Some(_) => line.push(byte[0]),
            }
        }
        String::from_utf8(line).context("read a line")
    }

    fn skip_greeting(mut self) -> Result<Self> {
        self.read_line()?;
        Ok(self)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn ready(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        other => other.map(Some),
    }
}
