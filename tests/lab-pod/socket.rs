//! What the subcommands share: sockets, errors, processors, output.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{Backlog, listen as set_backlog, setsockopt, sockopt};
use nix::unistd::Pid;
use serde::Serialize;

use lab::report::Listening;

/// Connections that may wait for accept; net.core.somaxconn is the same.
const BACKLOG: i32 = 4096;

/// Listens, and says so. std sets SO_REUSEADDR; its backlog is 128, but a
/// second listen() changes that.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
    let backlog = Backlog::new(BACKLOG).context("backlog")?;
    set_backlog(&listener, backlog).context("set the backlog")?;
    Ok(listener)
}

pub(crate) fn announce(listener: &TcpListener) -> Result<()> {
    let listening = listener.local_addr().context("own address")?;
    print(&Listening { listening })
}

/// Makes close() reset the connection: no TIME_WAIT, the port is free again at
/// once. Sockets inherit it from the listener that accepts them.
pub(crate) fn reset_on_close(socket: &impl AsFd) -> io::Result<()> {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    Ok(setsockopt(socket, sockopt::Linger, &linger)?)
}

/// Non-blocking and without delay.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Waits for one of the events; `false` if the time ran out.
pub(crate) fn wait(fd: BorrowedFd<'_>, events: PollFlags, timeout: Duration) -> io::Result<bool> {
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut [PollFd::new(fd, events)], timeout) {
            Err(Errno::EINTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// Waits until there is something to read or an end, however long it takes.
pub(crate) fn wait_for_input(fd: &impl AsFd) -> io::Result<()> {
    loop {
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            ready => return Ok(ready.map(drop)?),
        }
    }
}

/// Thousands of connections may be open at once.
pub(crate) fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise the limit of files")
}

/// Keeps this process on one processor.
pub(crate) fn pin(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("processor {cpu}"))?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("pin to processor {cpu}"))
}

/// A short name for reports: that of the errno, else of the kind.
pub(crate) fn error_name(error: &io::Error) -> String {
    match (error.raw_os_error(), error.kind()) {
        (Some(number), _) => format!("{:?}", Errno::from_raw(number)),
        (None, io::ErrorKind::TimedOut) => "timeout".to_owned(),
        (None, io::ErrorKind::UnexpectedEof) => "eof".to_owned(),
        (None, kind) => format!("{kind:?}"),
    }
}

/// Prints one report.
pub(crate) fn print(report: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(report).context("write a report")?;
    line.push(b'\n');
    io::stdout().write_all(&line).context("print a report")
}
