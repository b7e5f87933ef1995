//! Ends with a blocking socket: a thread for each direction.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::connection::close;
use super::options;
use super::session::{Close, Session, Step};
use super::tally::Tally;

/// Calls block for so long; then the thread looks around and calls again.
const LIMIT: Duration = Duration::from_millis(200);
/// The kernel counts ticks, down to a hundred a second.
const ROUNDING: Duration = Duration::from_millis(20);
const TICK: Duration = Duration::from_millis(10);

/// Runs one end; the stream is blocking.
pub(super) fn run(stream: TcpStream, session: Session, patience: Duration, tally: &Tally) {
    options::limit_blocking(stream.as_fd(), LIMIT);
    let shared = Shared {
        session: Mutex::new((session, None)),
        moved: Condvar::new(),
        patience,
    };
    let how = thread::scope(|scope| {
        scope.spawn(|| shared.write(&stream));
        shared.read(&stream)
    });
    if how == End::Hung {
        thread::sleep(patience);
    }
    let close_how = match how {
        End::Closed(how) => how,
        End::Hung => Close::Reset,
    };
    close(stream, close_how);
    let (session, _) = shared
        .session
        .into_inner()
        .expect("nothing panics while it holds the lock");
    session.report(tally);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Closed(Close),
    Hung,
}

struct Shared {
    session: Mutex<(Session, Option<End>)>,
    moved: Condvar,
    patience: Duration,
}

type Guard<'a> = MutexGuard<'a, (Session, Option<End>)>;

impl Shared {
    fn lock(&self) -> Guard<'_> {
        self.session
            .lock()
            .expect("nothing panics while it holds the lock")
    }

    /// Whether it is over, for both threads.
    fn look(&self, guard: &mut Guard<'_>, stream: &TcpStream) -> Option<End> {
        let (session, end) = &mut **guard;
        if end.is_none() {
            let now = Instant::now();
            session.tend(stream.as_fd(), now);
            *end = session.close_now(stream.as_fd(), now).map(End::Closed);
            if end.is_none() && session.is_stuck(self.patience, now) {
                session.hung(stream.as_fd());
                *end = Some(End::Hung);
            }
        }
        *end
    }

    fn read(&self, mut stream: &TcpStream) -> End {
        let mut buffer = Vec::new();
        loop {
            let mut guard = self.lock();
            if let Some(end) = self.look(&mut guard, stream) {
                self.moved.notify_all();
                return end;
            }
            match guard.0.read_step(Instant::now()) {
                Step::Move(size) => {
                    drop(guard);
                    buffer.resize(buffer.len().max(size), 0);
                    let started = Instant::now();
                    let result = stream.read(&mut buffer[..size]);
                    let mut guard = self.lock();
                    match result {
                        Ok(count) => guard.0.read(&buffer[..count], Instant::now()),
                        Err(error) if timed_out(&error, started) => {}
                        Err(error) => guard.0.failed("recv", &error),
                    }
                    self.moved.notify_all();
                }
                step => self.wait(guard, step),
            }
        }
    }

    fn write(&self, mut stream: &TcpStream) {
        let mut buffer = Vec::new();
        loop {
            let mut guard = self.lock();
            if self.look(&mut guard, stream).is_some() {
                return;
            }
            match guard.0.write_step(Instant::now()) {
                Step::Move(size) => {
                    buffer.resize(buffer.len().max(size), 0);
                    guard.0.fill(&mut buffer[..size]);
                    drop(guard);
                    let started = Instant::now();
                    let result = stream.write(&buffer[..size]);
                    let mut guard = self.lock();
                    match result {
                        Ok(count) => guard.0.wrote(count, Instant::now()),
                        Err(error) if timed_out(&error, started) => {}
                        Err(error) => guard.0.failed("send", &error),
                    }
                }
                Step::ShutDown => {
                    guard.0.has_shut_down();
                    if let Err(error) = stream.shutdown(Shutdown::Write) {
                        guard.0.failed("shutdown", &error);
                    }
                }
                step => self.wait(guard, step),
            }
        }
    }

    fn wait(&self, guard: Guard<'_>, step: Step) {
        let time = match step {
            Step::Rest(until) => until.saturating_duration_since(Instant::now()),
            _ => TICK,
        };
        let waited = self.moved.wait_timeout(guard, time.min(LIMIT));
        drop(waited.expect("nothing panics while it holds the lock"));
    }
}

/// A blocking call that gives EAGAIN before its time is up is at fault.
fn timed_out(error: &io::Error, started: Instant) -> bool {
    error.kind() == io::ErrorKind::WouldBlock && started.elapsed() + ROUNDING >= LIMIT
}
