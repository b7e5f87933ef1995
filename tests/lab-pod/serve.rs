//! The server of pods: answers its name to each connection, then echoes.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::ServeArgs;
use crate::socket;

const LISTENER: u64 = u64::MAX;

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    socket::pin(args.cpu)?;
    socket::raise_file_limit()?;
    let listener = socket::listen(args.listen)?;
    if args.close {
        return close_all(&listener);
    }
    listener
        .set_nonblocking(true)
        .context("make the listener non-blocking")?;
    let mut server = Server::new(listener, args)?;
    socket::announce(&server.listener)?;
    loop {
        server.turn()?;
    }
}

/// Accepts and resets, as little work as a server can do.
fn close_all(listener: &TcpListener) -> Result<()> {
    socket::reset_on_close(listener).context("set SO_LINGER")?;
    socket::announce(listener)?;
    loop {
        listener.accept().context("accept")?;
    }
}

/// One thread and a level-triggered epoll.
struct Server {
    listener: TcpListener,
    epoll: Epoll,
    /// `None`: the address that was connected to.
    greeting: Option<Vec<u8>>,
    connections: HashMap<u64, Connection>,
    events: Vec<EpollEvent>,
    buffer: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    /// Read but not yet written back. Nothing is read while there is any.
    unsent: Vec<u8>,
    interest: EpollFlags,
}

impl Server {
    fn new(listener: TcpListener, args: &ServeArgs) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("make an epoll")?;
        epoll
            .add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))
            .context("watch the listener")?;
        Ok(Self {
            listener,
            epoll,
            greeting: (!args.id_is_address).then(|| format!("{}\n", args.id).into_bytes()),
            connections: HashMap::new(),
            events: vec![EpollEvent::empty(); 256],
            buffer: vec![0; 256 * 1024],
        })
    }

    fn turn(&mut self) -> Result<()> {
        let count = match self.epoll.wait(&mut self.events, EpollTimeout::NONE) {
            Err(Errno::EINTR) => return Ok(()),
            other => other.context("wait for events")?,
        };
        for index in 0..count {
            match self.events[index].data() {
                LISTENER => self.accept()?,
                token => self.serve(token)?,
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<()> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error).context("accept"),
            };
            socket::prepare(&stream).context("prepare a connection")?;
            let token = u64::try_from(stream.as_raw_fd()).context("file descriptor")?;
            let interest = EpollFlags::EPOLLIN;
            self.epoll
                .add(&stream, EpollEvent::new(interest, token))
                .context("watch a connection")?;
            let unsent = match &self.greeting {
                Some(greeting) => greeting.clone(),
                None => own_address(&stream).context("address of a connection")?,
            };
            self.connections.insert(
                token,
                Connection {
                    stream,
                    unsent,
                    interest,
                },
            );
            self.serve(token)?;
        }
    }

    fn serve(&mut self, token: u64) -> Result<()> {
        let Some(connection) = self.connections.get_mut(&token) else {
            return Ok(());
        };
        // A reset or an end: closing the stream also ends its watch.
        let Ok(Progress::Open) = connection.echo(&mut self.buffer) else {
            self.connections.remove(&token);
            return Ok(());
        };
        let interest = connection.wanted();
        if interest != connection.interest {
            connection.interest = interest;
            self.epoll
                .modify(&connection.stream, &mut EpollEvent::new(interest, token))
                .context("watch a connection")?;
        }
        Ok(())
    }
}

enum Progress {
    Open,
    Ended,
}

impl Connection {
    /// Writes what is left, then echoes what one read gives.
    fn echo(&mut self, buffer: &mut [u8]) -> io::Result<Progress> {
        let written = write(&mut self.stream, &self.unsent)?;
        self.unsent.drain(..written);
        if !self.unsent.is_empty() {
            return Ok(Progress::Open);
        }
        let count = match self.stream.read(buffer) {
            Ok(0) => return Ok(Progress::Ended),
            Err(error) if is_temporary(&error) => return Ok(Progress::Open),
            other => other?,
        };
        let written = write(&mut self.stream, &buffer[..count])?;
        self.unsent.extend_from_slice(&buffer[written..count]);
        Ok(Progress::Open)
    }

    fn wanted(&self) -> EpollFlags {
        if self.unsent.is_empty() {
            EpollFlags::EPOLLIN
        } else {
            EpollFlags::EPOLLOUT
        }
    }
}

fn own_address(stream: &TcpStream) -> io::Result<Vec<u8>> {
    Ok(format!("{}\n", stream.local_addr()?.ip()).into_bytes())
}

fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        return Ok(0);
    }
    match stream.write(bytes) {
        Err(error) if is_temporary(&error) => Ok(0),
        other => other,
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
