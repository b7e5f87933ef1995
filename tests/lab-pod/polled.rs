//! One TCP connection in non-blocking mode, kept open and used as standard input
//! says, a line each:
//! - `ask COUNT`: so many round trips of a byte;
//! - `set OPTION VALUE`: sets a socket option, by the name that it has in C;
//! - `splice`: reads once by splice(2);
//! - `splice-ask COUNT`: round trips whose answers are read by splice(2).

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::libc;
use nix::poll::PollFlags;

use lab::report::SessionReport;

use crate::socket;

/// Only a hang is ever this long; shorter than a test's own patience.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(to: SocketAddr) -> Result<()> {
    let mut session = Session::open(to)?;
    for line in io::stdin().lock().lines() {
        let line = line.context("read standard input")?;
        let words: Vec<_> = line.split(' ').collect();
        let outcome = match *words {
            ["ask", count] => session.ask(number(count)?, Session::receive),
            ["splice-ask", count] => session.ask(number(count)?, Session::receive_by_splice),
            ["splice"] => session.splice().map(drop),
            ["set", option, value] => session.set(option, value)?,
            _ => bail!("unknown command {line:?}"),
        };
        socket::print(&SessionReport {
            local: session.stream.local_addr().context("own address")?,
            id: None,
            errno: outcome.err().map(|error| socket::error_name(&error)),
        })?;
    }
    Ok(())
}

fn number<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    text: &str,
) -> Result<T> {
    text.parse().with_context(|| format!("number {text}"))
}

struct Session {
    stream: TcpStream,
    pipe: (io::PipeReader, io::PipeWriter),
}

impl Session {
    /// The server's greeting is read, whatever it is.
    fn open(to: SocketAddr) -> Result<Self> {
        let mut stream = TcpStream::connect(to).with_context(|| format!("connect to {to}"))?;
        let length = stream.read(&mut [0; 256]).context("read the greeting")?;
        anyhow::ensure!(length > 0, "the server has closed");
        socket::prepare(&stream).context("prepare the connection")?;
        let pipe = io::pipe().context("make a pipe")?;
        Ok(Self { stream, pipe })
    }

    fn ask(&mut self, count: u32, receive: fn(&mut Self) -> io::Result<usize>) -> io::Result<()> {
        for _ in 0..count {
            self.stream.write_all(b"?")?;
            let deadline = Instant::now() + PATIENCE;
            loop {
                match receive(self) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(_) => break,
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                    Err(_) if Instant::now() >= deadline => return Err(ErrorKind::TimedOut.into()),
                    Err(_) => {
                        let wait = Duration::from_millis(100);
                        let _ = socket::wait(self.stream.as_fd(), PollFlags::POLLIN, wait)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<usize> {
        self.stream.read(&mut [0])
    }

    fn receive_by_splice(&mut self) -> io::Result<usize> {
        let count = self.splice()?;
        let mut bytes = vec![0; count];
        self.pipe.0.read_exact(&mut bytes)?;
        if bytes.iter().all(|byte| *byte == b'?') {
            Ok(count)
        } else {
            Err(ErrorKind::InvalidData.into())
        }
    }

    fn splice(&mut self) -> io::Result<usize> {
        // SAFETY: both descriptors are ours, and no offset is given.
        let count = unsafe {
            libc::splice(
                self.stream.as_raw_fd(),
                std::ptr::null_mut(),
                self.pipe.1.as_raw_fd(),
                std::ptr::null_mut(),
                4096,
                libc::SPLICE_F_NONBLOCK,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// What the kernel says to it, or an error if there is no such option.
    fn set(&self, option: &str, value: &str) -> Result<io::Result<()>> {
        if option == "TCP_ULP" {
            return Ok(self.set_bytes(libc::IPPROTO_TCP, libc::TCP_ULP, value.as_bytes()));
        }
        let (level, name) = match option {
            "SO_RCVLOWAT" => (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
            "SO_ZEROCOPY" => (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
            "SO_TIMESTAMP" => (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
            "SO_TIMESTAMPING" => (libc::SOL_SOCKET, libc::SO_TIMESTAMPING),
            "SO_PEEK_OFF" => (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
            "SO_KEEPALIVE" => (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            "TCP_REPAIR" => (libc::IPPROTO_TCP, libc::TCP_REPAIR),
            "TCP_NODELAY" => (libc::IPPROTO_TCP, libc::TCP_NODELAY),
            "IP_TOS" => (libc::IPPROTO_IP, libc::IP_TOS),
            _ => bail!("unknown option {option}"),
        };
        let value: i32 = number(value)?;
        Ok(self.set_bytes(level, name, &value.to_ne_bytes()))
    }

    fn set_bytes(&self, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
        // SAFETY: the value lives through the call, and its length is told.
        let result = unsafe {
            libc::setsockopt(
                self.stream.as_raw_fd(),
                level,
                name,
                value.as_ptr().cast(),
                value.len() as u32,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}
