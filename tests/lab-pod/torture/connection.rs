//! One connection of an event loop.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;

use super::options;
use super::plan::Style;
use super::readiness::{EDGES, ReadOutcome, Readiness};
use super::session::{Close, Session, Step};
use crate::socket;

/// Reads and writes of one connection before others get their turn.
const TURNS: usize = 8;

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) session: Session,
    readiness: Readiness,
    style: Style,
}

/// What is next for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Others first, then on.
    Turn,
    /// An event, or this time.
    Wait(Option<Instant>),
    Close(Close),
}

impl Connection {
    pub(super) fn new(stream: TcpStream, session: Session, style: Style) -> Self {
        Self {
            stream,
            session,
            readiness: Readiness::new(style),
            style,
        }
    }

    /// Reads and writes what it may.
    pub(super) fn turn(&mut self, events: EpollFlags, buffer: &mut [u8]) -> Next {
        self.readiness.note(events);
        for _ in 0..TURNS {
            let now = Instant::now();
            self.session.tend(self.stream.as_fd(), now);
            if let Some(close) = self.session.close_now(self.stream.as_fd(), now) {
                return Next::Close(close);
            }
            let read = self.session.read_step(now);
            let write = self.session.write_step(now);
            let moved = self.read(read, buffer, now) | self.write(write, buffer, now);
            if !moved {
                let rest = |step| match step {
                    Step::Rest(until) => Some(until),
                    _ => None,
                };
                let times = [rest(read), rest(write), self.session.next_look()];
                return Next::Wait(times.into_iter().flatten().min());
            }
        }
        Next::Turn
    }

    /// What to listen for. An edge-triggered end always listens for the same.
    pub(super) fn interest(&mut self) -> EpollFlags {
        if self.style != Style::Level {
            return EDGES;
        }
        let now = Instant::now();
        let mut interest = EpollFlags::empty();
        let reads = matches!(self.session.read_step(now), Step::Move(_));
        let writes = matches!(self.session.write_step(now), Step::Move(_));
        interest.set(EpollFlags::EPOLLIN, reads);
        interest.set(EpollFlags::EPOLLOUT, writes && !self.readiness.writable);
        interest
    }

    /// Whether nothing moved for so long; then says why.
    pub(super) fn is_hung(&mut self, patience: Duration) -> bool {
        let hung = self.session.is_stuck(patience, Instant::now());
        if hung {
            self.session.hung(self.stream.as_fd());
        }
        hung
    }

    fn read(&mut self, step: Step, buffer: &mut [u8], now: Instant) -> bool {
        let Step::Move(size) = step else { return false };
        if !self.readiness.readable {
            return false;
        }
        match self.stream.read(&mut buffer[..size]) {
            Ok(count) => {
                self.session.read(&buffer[..count], now);
                let fd = self.stream.as_fd();
                let outcome = ReadOutcome::Count(count);
                self.readiness
                    .after_read(size, outcome, || options::unread(fd));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readiness
                    .after_read(size, ReadOutcome::WouldBlock, || 0);
                return false;
            }
            Err(error) => self.session.failed("recv", &error),
        }
        true
    }

    fn write(&mut self, step: Step, buffer: &mut [u8], now: Instant) -> bool {
        match step {
            Step::ShutDown => {
                self.session.has_shut_down();
                if let Err(error) = self.stream.shutdown(Shutdown::Write) {
                    self.session.failed("shutdown", &error);
                }
                true
            }
            Step::Move(size) if self.readiness.writable => {
                let bytes = &mut buffer[..size];
                self.session.fill(bytes);
                self.send(size, buffer, now)
            }
            _ => false,
        }
    }

    fn send(&mut self, size: usize, buffer: &[u8], now: Instant) -> bool {
        match self.stream.write(&buffer[..size]) {
            Ok(count) => {
                self.session.wrote(count, now);
                self.readiness.after_write(size, Some(count));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readiness.after_write(size, None);
                return false;
            }
            Err(error) => self.session.failed("send", &error),
        }
        true
    }
}

/// Closes as the session wants it.
pub(super) fn close(stream: TcpStream, how: Close) {
    if how == Close::Reset {
        socket::reset_on_close(&stream).expect("a TCP socket takes SO_LINGER");
    }
    drop(stream);
}
