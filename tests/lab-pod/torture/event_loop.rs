//! Many connections in one thread: epoll, timers, and the watch for hangs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::connection::{Connection, Next, close};
use super::plan::Style;
use super::session::{Close, Session};
use super::tally::Tally;

/// How often hangs are looked for.
const WATCH: Duration = Duration::from_millis(250);
/// The longest wait, so that new connections are looked after.
const TICK: Duration = Duration::from_millis(5);
/// Tokens of the caller's own: these and above.
pub(super) const CALLERS: u64 = 1 << 62;

pub(super) struct EventLoop {
    pub(super) epoll: Epoll,
    slots: Vec<Slot>,
    free: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u64)>>,
    turns: Vec<u64>,
    events: Vec<EpollEvent>,
    buffer: Vec<u8>,
    patience: Duration,
    watched: Instant,
    tally: Tally,
    open: usize,
    /// Called when a connection is over, with its number.
    ended: Vec<u64>,
}

struct Slot {
    generation: u32,
    content: Content,
}

enum Content {
    Free,
    Open {
        connection: Box<Connection>,
        interest: EpollFlags,
        timer: Option<Instant>,
    },
    /// Reported; kept open so that the other end sees its own hang, and not ours.
    Hung {
        connection: Box<Connection>,
        until: Instant,
    },
}

impl Content {
    fn into_hung(self, until: Instant) -> Self {
        match self {
            Content::Open { connection, .. } => Content::Hung { connection, until },
            other => other,
        }
    }
}

impl EventLoop {
    pub(super) fn new(patience: Duration, tally: Tally) -> Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("make an epoll")?,
            slots: Vec::new(),
            free: Vec::new(),
            timers: BinaryHeap::new(),
            turns: Vec::new(),
            events: vec![EpollEvent::empty(); 128],
            buffer: vec![0; 1 << 18],
            patience,
            watched: Instant::now(),
            tally,
            open: 0,
            ended: Vec::new(),
        })
    }

    /// Connections that are not over.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// The numbers of those that ended since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }

    /// Takes a connection over.
    pub(super) fn add(&mut self, stream: std::net::TcpStream, session: Session, style: Style) {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u32::try_from(self.slots.len()).expect("fewer than file descriptors");
            self.slots.push(Slot {
                generation: 0,
                content: Content::Free,
            });
            index
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = (slot.generation + 1) & 0x3fff_ffff;
        let token = token(index, slot.generation);
        slot.content = Content::Open {
            connection: Box::new(Connection::new(stream, session, style)),
            interest: EpollFlags::empty(),
            timer: None,
        };
        self.open += 1;
        self.update(token);
        self.turns.push(token);
    }

    /// Waits for events and serves them; those of the caller are handed back.
    pub(super) fn turn(&mut self) -> Result<Vec<u64>> {
        let wait = if self.turns.is_empty() {
            self.time_to_wait()
        } else {
            Duration::ZERO
        };
        let timeout = EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::ZERO);
        let count = match self.epoll.wait(&mut self.events, timeout) {
            Err(Errno::EINTR) => 0,
            count => count.context("wait for events")?,
        };
        let mut callers = Vec::new();
        for index in 0..count {
            let event = self.events[index];
            match event.data() {
                token @ CALLERS.. => callers.push(token),
                token => self.serve(token, event.events()),
            }
        }
        for token in std::mem::take(&mut self.turns) {
            self.serve(token, EpollFlags::empty());
        }
        self.ring();
        if self.watched.elapsed() > WATCH {
            self.watch();
        }
        Ok(callers)
    }

    fn time_to_wait(&self) -> Duration {
        let timer = self.timers.peek().map_or(TICK, |Reverse((at, _))| {
            // epoll counts whole milliseconds; 0 would spin.
            at.saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1))
        });
        timer.min(TICK)
    }

    fn ring(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, token))) = self.timers.peek().copied()
            && at <= now
        {
            self.timers.pop();
            if let Some(Content::Open { timer, .. }) = self.content(token) {
                timer.take_if(|timer| *timer <= now);
                self.serve(token, EpollFlags::empty());
            }
        }
    }

    fn serve(&mut self, token: u64, events: EpollFlags) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let next = match self.content(token) {
            Some(Content::Open { connection, .. }) => Some(connection.turn(events, &mut buffer)),
            _ => None,
        };
        self.buffer = buffer;
        match next {
            Some(Next::Close(how)) => self.end(token, how),
            Some(Next::Turn) => self.turns.push(token),
            Some(Next::Wait(until)) => {
                self.update(token);
                if let Some(until) = until {
                    self.set_timer(token, until);
                }
            }
            None => {}
        }
    }

    fn set_timer(&mut self, token: u64, until: Instant) {
        if let Some(Content::Open { timer, .. }) = self.content(token)
            && timer.is_none_or(|earlier| until < earlier)
        {
            *timer = Some(until);
            self.timers.push(Reverse((until, token)));
        }
    }

    /// Tells epoll what the connection listens for. One that rests is taken out,
    /// since a reset is reported all the time otherwise.
    fn update(&mut self, token: u64) {
        let slot = &mut self.slots[index(token)];
        let Content::Open {
            connection,
            interest,
            ..
        } = &mut slot.content
        else {
            return;
        };
        let wanted = connection.interest();
        if wanted == *interest {
            return;
        }
        let fd = connection.stream.as_fd();
        let mut event = EpollEvent::new(wanted, token);
        let done = if wanted.is_empty() {
            self.epoll.delete(fd)
        } else if interest.is_empty() {
            self.epoll.add(fd, event)
        } else {
            self.epoll.modify(fd, &mut event)
        };
        *interest = wanted;
        done.expect("an open socket can be watched");
    }

    fn watch(&mut self) {
        let now = Instant::now();
        self.watched = now;
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            match &mut slot.content {
                Content::Open {
                    connection,
                    interest,
                    ..
                } => {
                    if connection.is_hung(self.patience) {
                        if !interest.is_empty() {
                            let deleted = self.epoll.delete(&connection.stream);
                            deleted.expect("it is watched");
                        }
                        let content = std::mem::replace(&mut slot.content, Content::Free);
                        slot.content = content.into_hung(now + self.patience);
                    }
                }
                Content::Hung { until, .. } if *until <= now => {
                    if let Content::Hung { connection, .. } =
                        std::mem::replace(&mut slot.content, Content::Free)
                    {
                        self.release(index, *connection, Close::Reset);
                    }
                }
                Content::Hung { .. } | Content::Free => {}
            }
        }
    }

    fn end(&mut self, token: u64, how: Close) {
        let slot = &mut self.slots[index(token)];
        if let Content::Open { connection, .. } =
            std::mem::replace(&mut slot.content, Content::Free)
        {
            self.release(index(token), *connection, how);
        }
    }

    fn release(&mut self, index: usize, connection: Connection, how: Close) {
        let Connection {
            stream, session, ..
        } = connection;
        close(stream, how);
        self.ended.push(session.plan.id);
        session.report(&self.tally);
        self.free
            .push(u32::try_from(index).expect("it came from one"));
        self.open -= 1;
    }

    fn content(&mut self, token: u64) -> Option<&mut Content> {
        let slot = self.slots.get_mut(index(token))?;
        (slot.generation == generation(token)).then_some(&mut slot.content)
    }
}

/// Listens for what the caller serves itself.
pub(super) fn watch_for_caller(
    epoll: &Epoll,
    fd: impl AsFd,
    flags: EpollFlags,
    number: u64,
) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(flags, CALLERS + number))?)
}

fn token(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

fn index(token: u64) -> usize {
    (token & u64::from(u32::MAX)) as usize
}

fn generation(token: u64) -> u32 {
    (token >> 32) as u32
}
