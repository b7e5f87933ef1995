//! The end that connects: keeps so many connections going until there were
//! enough or the time is up.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use tokio::runtime::Runtime;

use lab::torture::{Fault, FaultKind, TortureReport};

use super::event_loop::{CALLERS, EventLoop, watch_for_caller};
use super::plan::{Plan, Side, Style};
use super::ports::{Ports, reused_port};
use super::session::Session;
use super::tally::Tally;
use super::{TortureArgs, blocking, options, runtime, victims, wire, writers};
use crate::socket::error_name;

/// How long connect() may take.
const CONNECT_TIME: Duration = Duration::from_secs(20);

pub(super) fn run(args: &TortureArgs, to: SocketAddr) -> Result<TortureReport> {
    let client = Arc::new(Client {
        to,
        seed: args.seed,
        patience: args.patience_ms,
        parallel: args.parallel,
        until: Instant::now() + Duration::from_secs_f64(args.seconds),
        stopping: AtomicBool::new(false),
        next: AtomicU64::new(args.first_id),
        end: args.first_id.saturating_add(args.connections),
        running: AtomicUsize::new(0),
        tally: Tally::default(),
        ports: Ports::new(args.banks),
        runtime: runtime::runtime()?,
    });
    if args.until_stdin_closes {
        let client = Arc::clone(&client);
        thread::spawn(move || {
            // That it can't be read is an end too.
            let _ = io::stdin().read_to_end(&mut Vec::new());
            client.stopping.store(true, Ordering::Relaxed);
        });
    }
    let kills = !args.victim && !args.no_victims;
    let victims = kills.then(|| victims::clients(args, to));
    let threads: Vec<_> = (0..args.threads)
        .map(|_| {
            let client = Arc::clone(&client);
            thread::spawn(move || client.work())
        })
        .collect();
    let mut outcome = Ok(());
    for thread in threads {
        outcome = outcome.and(thread.join().expect("a worker does not panic"));
    }
    if let Some(victims) = victims {
        let killed = victims.end()?;
        client
            .tally
            .lock()
            .events
            .insert("clients killed".to_owned(), killed);
    }
    outcome?;
    let report = client.tally.lock().clone();
    Ok(report)
}

struct Client {
    to: SocketAddr,
    seed: u64,
    patience: Duration,
    parallel: usize,
    until: Instant,
    stopping: AtomicBool,
    next: AtomicU64,
    end: u64,
    /// Connections of all kinds that are not over.
    running: AtomicUsize,
    tally: Tally,
    ports: Ports,
    runtime: Runtime,
}

/// One of the client's threads.
struct Worker {
    events: EventLoop,
    connecting: HashMap<u64, Connecting>,
    bound: HashMap<u64, u16>,
}

struct Connecting {
    fd: OwnedFd,
    plan: Arc<Plan>,
    style: Style,
}

impl Client {
    fn work(self: &Arc<Self>) -> Result<()> {
        let mut worker = Worker {
            events: EventLoop::new(self.patience, self.tally.clone())?,
            connecting: HashMap::new(),
            bound: HashMap::new(),
        };
        loop {
            // A few at a time, so that those that are open are not starved.
            for _ in 0..16 {
                let Some(plan) = self.take_plan() else { break };
                self.start(plan, &mut worker);
            }
            for token in worker.events.turn()? {
                self.connected(token - CALLERS, &mut worker);
            }
            for id in worker.events.take_ended() {
                self.over(id, &mut worker);
            }
            let all_done = self.running.load(Ordering::Relaxed) == 0 && self.is_enough();
            if all_done && worker.events.open() == 0 {
                return Ok(());
            }
        }
    }

    fn is_enough(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.end
            || Instant::now() >= self.until
            || self.stopping.load(Ordering::Relaxed)
    }

    fn take_plan(&self) -> Option<Arc<Plan>> {
        if self.is_enough() || self.running.load(Ordering::Relaxed) >= self.parallel {
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        (id < self.end).then(|| {
            self.running.fetch_add(1, Ordering::Relaxed);
            Arc::new(Plan::new(self.seed, id))
        })
    }

    fn over(&self, id: u64, worker: &mut Worker) {
        if let Some(port) = worker.bound.remove(&id) {
            self.ports.give_back(port);
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    fn start(self: &Arc<Self>, plan: Arc<Plan>, worker: &mut Worker) {
        let style = plan.client.style;
        if plan.writers.is_none() && options::is_blocking(style) {
            let client = Arc::clone(self);
            thread::spawn(move || {
                client.run_blocking(&plan);
                client.running.fetch_sub(1, Ordering::Relaxed);
            });
            return;
        }
        match self.begin_connect(&plan, worker) {
            Ok(fd) => {
                let id = plan.id & (CALLERS - 1);
                let flags = EpollFlags::EPOLLOUT | EpollFlags::EPOLLONESHOT;
                let watched = watch_for_caller(&worker.events.epoll, &fd, flags, id);
                watched.expect("a new socket can be watched");
                worker.connecting.insert(id, Connecting { fd, plan, style });
            }
            Err(error) => {
                self.no_connection(&plan, error);
                self.over(plan.id, worker);
            }
        }
    }

    fn begin_connect(&self, plan: &Plan, worker: &mut Worker) -> nix::Result<OwnedFd> {
        let to = self.ports.of(self.to, plan);
        if let Some(port) = reused_port(plan).and_then(|wish| self.ports.take(wish)) {
            match connect_from(to, Some(port)) {
                Err(Errno::EADDRINUSE | Errno::EADDRNOTAVAIL) => {
                    self.tally.note("port still in use");
                    self.ports.give_back(port);
                }
                result => {
                    self.tally.note("port reused");
                    worker.bound.insert(plan.id, port);
                    return result;
                }
            }
        }
        connect_from(to, None)
    }

    /// connect() is over, well or not.
    fn connected(self: &Arc<Self>, id: u64, worker: &mut Worker) {
        let Some(Connecting { fd, plan, style }) = worker.connecting.remove(&id) else {
            return;
        };
        worker.events.epoll.delete(&fd).expect("it is watched");
        let mut stream = TcpStream::from(fd);
        let error = stream.take_error().expect("a socket has SO_ERROR");
        let begun = match error {
            Some(error) => Err(error),
            None => stream.write_all(&wire::header(&plan)),
        };
        if let Err(error) = begun {
            let number = error.raw_os_error().unwrap_or_default();
            self.no_connection(&plan, Errno::from_raw(number));
            self.over(plan.id, worker);
            return;
        }
        options::prepare(stream.as_fd(), &plan.client);
        if let Some(writers) = plan.writers {
            let client = Arc::clone(self);
            thread::spawn(move || {
                writers::client(&stream, &plan, writers, client.patience, &client.tally);
                client.running.fetch_sub(1, Ordering::Relaxed);
            });
            return;
        }
        let session = Session::new(Arc::clone(&plan), Side::Client, Instant::now());
        if style == Style::Tokio {
            let client = Arc::clone(self);
            self.runtime.spawn(async move {
                runtime::run(stream, session, client.patience, client.tally.clone()).await;
                client.running.fetch_sub(1, Ordering::Relaxed);
            });
        } else {
            worker.events.add(stream, session, style);
        }
    }

    fn run_blocking(&self, plan: &Arc<Plan>) {
        let to = self.ports.of(self.to, plan);
        let stream = TcpStream::connect_timeout(&to, CONNECT_TIME);
        let begun = stream.and_then(|mut stream| {
            stream.write_all(&wire::header(plan))?;
            Ok(stream)
        });
        match begun {
            Ok(stream) => {
                options::prepare(stream.as_fd(), &plan.client);
                let session = Session::new(Arc::clone(plan), Side::Client, Instant::now());
                blocking::run(stream, session, self.patience, &self.tally);
            }
            Err(error) => {
                let number = error.raw_os_error().unwrap_or(Errno::ETIMEDOUT as i32);
                self.no_connection(plan, Errno::from_raw(number));
            }
        }
    }

    fn no_connection(&self, plan: &Plan, error: Errno) {
        let resets = matches!(
            error,
            Errno::ECONNREFUSED | Errno::ECONNRESET | Errno::EPIPE
        );
        if plan.server_dies() && resets {
            self.tally.note("no connection, the server was killed");
            return;
        }
        self.tally.lock().fault(Fault {
            id: plan.id,
            scenario: plan.scenario.to_string(),
            side: Side::Client.name().to_owned(),
            style: plan.client.style.name().to_owned(),
            kind: FaultKind::Error,
            what: format!("connect: {}", error_name(&error.into())),
            state: String::new(),
        });
    }
}

fn connect_from(to: SocketAddr, port: Option<u16>) -> nix::Result<OwnedFd> {
    let family = if to.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = socket(family, SockType::Stream, flags, None)?;
    if let Some(port) = port {
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        let any: std::net::IpAddr = match to {
            SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
        };
        bind(
            fd.as_raw_fd(),
            &SockaddrStorage::from(SocketAddr::new(any, port)),
        )?;
    }
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(fd),
        Err(error) => Err(error),
    }
}
