//! The end that is connected to. It learns each plan from the header.

use std::collections::HashMap;
use std::io::{self, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{SockFlag, accept4};
use tokio::runtime::Runtime;

use lab::torture::{Fault, FaultKind, TortureReport};

use super::event_loop::{CALLERS, EventLoop, watch_for_caller};
use super::plan::{Plan, Side, Style};
use super::ports::{Kind, port};
use super::session::Session;
use super::tally::Tally;
use super::victims::{self, Victims};
use super::wire::{HEADER, parse};
use super::{TortureArgs, blocking, options, runtime, writers};
use crate::socket::{announce, listen};

pub(super) fn run(args: &TortureArgs, address: SocketAddr) -> Result<TortureReport> {
    let running = Running::start(args, address)?;
    announce(&running.listeners[0])?;
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("read standard input")?;
    running.finish()
}

/// A server at work.
pub(super) struct Running {
    server: Arc<Server>,
    listeners: Vec<Arc<TcpListener>>,
    threads: Vec<JoinHandle<Result<()>>>,
    victims: Option<Victims>,
}

impl Running {
    pub(super) fn start(args: &TortureArgs, address: SocketAddr) -> Result<Self> {
        let open = |kind| -> Result<Vec<_>> {
            let of_bank = |bank| SocketAddr::new(address.ip(), port(address.port(), bank, kind));
            (0..args.banks)
                .map(|bank| listen(of_bank(bank)).map(Arc::new))
                .collect()
        };
        let server = Arc::new(Server {
            patience: args.patience_ms,
            stopping: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            tally: Tally::default(),
            runtime: runtime::runtime()?,
        });
        let listeners = open(if args.victim {
            Kind::Victim
        } else {
            Kind::EventLoop
        })?;
        let work = |_| {
            let (server, listeners) = (Arc::clone(&server), listeners.clone());
            thread::spawn(move || server.work(&listeners))
        };
        let threads = (0..args.threads).map(work).collect();
        if !args.victim {
            for listener in open(Kind::Blocking)? {
                let server = Arc::clone(&server);
                // It ends with the process.
                thread::spawn(move || server.accept_blocking(&listener));
            }
        }
        let kills = !args.victim && !args.no_victims;
        let victims = kills.then(|| victims::servers(args, address)).transpose()?;
        Ok(Self {
            server,
            listeners,
            threads,
            victims,
        })
    }

    /// Waits until all connections are over.
    pub(super) fn finish(self) -> Result<TortureReport> {
        self.server.stopping.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a worker does not panic")?;
        }
        let mut report = self.server.tally.lock().clone();
        if let Some(victims) = self.victims {
            report
                .events
                .insert("servers killed".to_owned(), victims.end()?);
        }
        Ok(report)
    }
}

struct Server {
    patience: Duration,
    stopping: AtomicBool,
    /// Connections in threads and in tokio.
    running: AtomicUsize,
    tally: Tally,
    runtime: Runtime,
}

/// A connection whose header has not come yet.
struct Young {
    stream: TcpStream,
    header: Vec<u8>,
    since: Instant,
}

struct Worker {
    events: EventLoop,
    young: HashMap<u64, Young>,
    next: u64,
}

impl Server {
    fn work(self: &Arc<Self>, listeners: &[Arc<TcpListener>]) -> Result<()> {
        let mut worker = Worker {
            events: EventLoop::new(self.patience, self.tally.clone())?,
            young: HashMap::new(),
            next: listeners.len() as u64,
        };
        for (index, listener) in listeners.iter().enumerate() {
            listener
                .set_nonblocking(true)
                .context("make the listener non-blocking")?;
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
            watch_for_caller(&worker.events.epoll, listener.as_ref(), flags, index as u64)
                .context("watch the listener")?;
        }
        loop {
            for token in worker.events.turn()? {
                let number = token - CALLERS;
                match listeners.get(number as usize) {
                    Some(listener) => self.accept(listener, &mut worker)?,
                    None => self.read_header(number, &mut worker),
                }
            }
            worker.events.take_ended();
            self.look_for_silent(&mut worker);
            let idle = worker.events.open() == 0 && self.running.load(Ordering::Relaxed) == 0;
            if self.stopping.load(Ordering::Relaxed) && idle && worker.young.is_empty() {
                return Ok(());
            }
        }
    }

    fn accept(&self, listener: &TcpListener, worker: &mut Worker) -> Result<()> {
        for _ in 0..64 {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let fd = match accept4(listener, flags) {
                Ok(fd) => fd,
                Err(nix::errno::Errno::EAGAIN) => return Ok(()),
                Err(nix::errno::Errno::ECONNABORTED) => continue,
                Err(error) => return Err(error).context("accept"),
            };
            let stream = TcpStream::from(fd);
            let number = worker.next;
            worker.next += 1;
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP;
            watch_for_caller(&worker.events.epoll, &stream, flags, number)
                .context("watch a connection")?;
            let young = Young {
                stream,
                header: Vec::new(),
                since: Instant::now(),
            };
            worker.young.insert(number, young);
        }
        Ok(())
    }

    fn read_header(self: &Arc<Self>, number: u64, worker: &mut Worker) {
        let Some(young) = worker.young.get_mut(&number) else {
            return;
        };
        let mut rest = [0; HEADER];
        let wanted = HEADER - young.header.len();
        match young.stream.read(&mut rest[..wanted]) {
            Ok(1..) if wanted == 0 => unreachable!("it is asked for at least one byte"),
            Ok(count @ 1..) => young.header.extend_from_slice(&rest[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // Killed, or refused a header, before it said what it is.
            Ok(0) | Err(_) => {
                worker.young.remove(&number);
                self.tally.note("closed before the header");
                return;
            }
        }
        if young.header.len() < HEADER {
            return;
        }
        let Young { stream, header, .. } = worker.young.remove(&number).expect("it was there");
        worker.events.epoll.delete(&stream).expect("it is watched");
        if let Some(plan) = self.plan(&header) {
            self.start(stream, plan, worker);
        }
    }

    fn plan(&self, header: &[u8]) -> Option<Arc<Plan>> {
        let header: [u8; HEADER] = header.try_into().expect("it is as long as a header");
        let Some((seed, id)) = parse(header) else {
            self.headless(FaultKind::Wrong, "wrong header", format!("{header:?}"));
            return None;
        };
        Some(Arc::new(Plan::new(seed, id)))
    }

    fn start(self: &Arc<Self>, stream: TcpStream, plan: Arc<Plan>, worker: &mut Worker) {
        options::prepare(stream.as_fd(), &plan.server);
        let server = Arc::clone(self);
        if let Some(writers) = plan.writers {
            self.running.fetch_add(1, Ordering::Relaxed);
            thread::spawn(move || {
                writers::server(&stream, &plan, writers, server.patience, &server.tally);
                server.running.fetch_sub(1, Ordering::Relaxed);
            });
            return;
        }
        let style = match plan.server.style {
            // A server that is killed has no other ports.
            Style::Blocking => Style::Level,
            style => style,
        };
        let session = Session::new(plan, Side::Server, Instant::now());
        if style == Style::Tokio {
            self.running.fetch_add(1, Ordering::Relaxed);
            self.runtime.spawn(async move {
                runtime::run(stream, session, server.patience, server.tally.clone()).await;
                server.running.fetch_sub(1, Ordering::Relaxed);
            });
        } else {
            worker.events.add(stream, session, style);
        }
    }

    /// A header that does not come is a hang too.
    fn look_for_silent(&self, worker: &mut Worker) {
        let late = |young: &Young| young.since.elapsed() > self.patience;
        let numbers: Vec<_> = worker.young.keys().copied().collect();
        for number in numbers {
            if worker.young.get(&number).is_some_and(late)
                && let Some(young) = worker.young.remove(&number)
            {
                let state = options::describe(young.stream.as_fd());
                self.headless(FaultKind::Hung, "hung before the header", state);
            }
        }
    }

    fn accept_blocking(self: &Arc<Self>, listener: &TcpListener) -> Result<()> {
        loop {
            let (mut stream, _) = listener.accept().context("accept")?;
            let server = Arc::clone(self);
            self.running.fetch_add(1, Ordering::Relaxed);
            thread::spawn(move || {
                let mut header = [0; HEADER];
                match stream.read_exact(&mut header) {
                    Ok(()) => server.run_blocking(stream, &header),
                    Err(_) => server.tally.note("closed before the header"),
                }
                server.running.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    fn run_blocking(&self, stream: TcpStream, header: &[u8]) {
        if let Some(plan) = self.plan(header) {
            options::prepare(stream.as_fd(), &plan.server);
            let session = Session::new(plan, Side::Server, Instant::now());
            blocking::run(stream, session, self.patience, &self.tally);
        }
    }

    fn headless(&self, kind: FaultKind, what: &str, state: String) {
        self.tally.lock().fault(Fault {
            id: u64::MAX,
            scenario: "unknown".to_owned(),
            side: Side::Server.name().to_owned(),
            style: String::new(),
            kind,
            what: what.to_owned(),
            state,
        });
    }
}
