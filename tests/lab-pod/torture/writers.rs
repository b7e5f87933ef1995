//! Several threads that write on one non-blocking socket without a lock, and the
//! other end, which answers each record with one byte.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use lab::pattern::{Pattern, Verifier};
use lab::torture::{Fault, FaultKind};
use nix::poll::PollFlags;
use nix::sys::socket::{setsockopt, sockopt};

use super::options;
use super::plan::{Plan, Side, Writers};
use super::records::{Checker, Records};
use super::tally::Tally;
use crate::socket::{self, error_name};

/// Records without an answer: so few that the send buffer always has room, and
/// TCP never takes only a part of one.
const WINDOW: u64 = 64;
const SEND_BUFFER: usize = 1 << 20;

type Failure = (FaultKind, String, String);

/// The end with the writers.
pub(super) fn client(
    stream: &TcpStream,
    plan: &Plan,
    writers: Writers,
    time: Duration,
    tally: &Tally,
) {
    let forced = setsockopt(&stream, sockopt::SndBufForce, &SEND_BUFFER);
    forced.expect("root may set the size of a socket's buffer");
    let state = State {
        stream,
        time,
        credit: Mutex::new(Credit {
            left: WINDOW,
            given: Instant::now(),
            failed: None,
        }),
        changed: Condvar::new(),
    };
    let all = u64::from(writers.threads) * u64::from(writers.records);
    let answers = Pattern::new(plan.stream_seed(Side::Server), all);
    thread::scope(|scope| {
        for writer in 0..writers.threads {
            let records = Records::new(plan, writers, writer);
            let state = &state;
            scope.spawn(move || state.end(state.write(records)));
        }
        state.end(state.read_answers(answers));
    });
    let failed = state.lock().failed.take();
    report(stream, plan, Side::Client, all, failed, tally);
}

/// The end that checks.
pub(super) fn server(
    stream: &TcpStream,
    plan: &Plan,
    writers: Writers,
    time: Duration,
    tally: &Tally,
) {
    let mut checker = Checker::new(plan, writers);
    let outcome = check(stream, plan, &mut checker, time);
    report(
        stream,
        plan,
        Side::Server,
        checker.bytes(),
        outcome.err(),
        tally,
    );
}

struct State<'a> {
    stream: &'a TcpStream,
    time: Duration,
    credit: Mutex<Credit>,
    changed: Condvar,
}

struct Credit {
    left: u64,
    /// When the last answer came.
    given: Instant,
    failed: Option<Failure>,
}

impl State<'_> {
    fn lock(&self) -> MutexGuard<'_, Credit> {
        self.credit
            .lock()
            .expect("nothing panics while it holds the lock")
    }

    fn end(&self, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            self.lock().failed.get_or_insert(failure);
            self.changed.notify_all();
        }
    }

    fn write(&self, mut records: Records) -> Result<(), Failure> {
        let mut record = Vec::new();
        while records.next(&mut record) {
            if !self.take_credit()? {
                return Ok(());
            }
            let sent = retry(
                self.stream,
                PollFlags::POLLOUT,
                self.time,
                "send",
                |mut stream| stream.write(&record),
            )?;
            if sent != record.len() {
                let state = format!("{sent} of {} bytes", record.len());
                return Err((
                    FaultKind::Error,
                    "send took a part of a record".to_owned(),
                    state,
                ));
            }
        }
        Ok(())
    }

    /// `false`: another thread has failed.
    fn take_credit(&self) -> Result<bool, Failure> {
        let mut credit = self.lock();
        while credit.left == 0 && credit.failed.is_none() {
            let waited = self.changed.wait_timeout(credit, self.time);
            credit = waited.expect("nothing panics while it holds the lock").0;
            if credit.left == 0 && credit.given.elapsed() > self.time {
                return Err(hung(self.stream, "no answer to records"));
            }
        }
        credit.left = credit.left.saturating_sub(1);
        Ok(credit.failed.is_none())
    }

    fn read_answers(&self, pattern: Pattern) -> Result<(), Failure> {
        let mut verifier = Verifier::new(pattern);
        let mut buffer = [0; 256];
        while verifier.received() < pattern.length() {
            if self.lock().failed.is_some() {
                return Ok(());
            }
            let count = retry(
                self.stream,
                PollFlags::POLLIN,
                self.time,
                "recv",
                |mut stream| stream.read(&mut buffer),
            )?;
            verifier.accept(&buffer[..count]);
            if count == 0 || verifier.wrong() > 0 {
                let state = format!(
                    "{} received, {:?}",
                    verifier.received(),
                    verifier.first_wrong()
                );
                return Err((
                    FaultKind::Wrong,
                    "wrong answer to records".to_owned(),
                    state,
                ));
            }
            let mut credit = self.lock();
            credit.left += count as u64;
            credit.given = Instant::now();
            drop(credit);
            self.changed.notify_all();
        }
        let shut = self.stream.shutdown(Shutdown::Write);
        shut.map_err(|error| failure("shutdown", &error))?;
        let count = retry(
            self.stream,
            PollFlags::POLLIN,
            self.time,
            "recv",
            |mut stream| stream.read(&mut buffer),
        )?;
        if count == 0 {
            return Ok(());
        }
        Err((
            FaultKind::Wrong,
            "more answers than records".to_owned(),
            String::new(),
        ))
    }
}

fn check(
    stream: &TcpStream,
    plan: &Plan,
    checker: &mut Checker,
    time: Duration,
) -> Result<(), Failure> {
    let wrong = |state| (FaultKind::Wrong, "wrong record".to_owned(), state);
    let answers = Pattern::new(plan.stream_seed(Side::Server), u64::MAX);
    let mut buffer = vec![0; 1 << 16];
    let mut answered = 0;
    loop {
        let count = retry(stream, PollFlags::POLLIN, time, "recv", |mut stream| {
            stream.read(&mut buffer)
        })?;
        if count == 0 {
            return checker.finish().map_err(wrong);
        }
        checker.accept(&buffer[..count]).map_err(wrong)?;
        let mut answer = vec![0; (checker.complete() - answered) as usize];
        answers.fill(answered, &mut answer);
        let mut left = &answer[..];
        while !left.is_empty() {
            let sent = retry(stream, PollFlags::POLLOUT, time, "send", |mut stream| {
                stream.write(left)
            })?;
            left = &left[sent..];
        }
        answered = checker.complete();
    }
}

/// Calls, and while there is nothing to do, waits and calls again.
fn retry(
    stream: &TcpStream,
    events: PollFlags,
    time: Duration,
    name: &str,
    mut call: impl FnMut(&TcpStream) -> io::Result<usize>,
) -> Result<usize, Failure> {
    loop {
        match call(stream) {
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failure(name, &error)),
        }
        let ready = socket::wait(stream.as_fd(), events, time);
        if !ready.map_err(|error| failure("poll", &error))? {
            return Err(hung(stream, name));
        }
    }
}

fn hung(stream: &TcpStream, what: &str) -> Failure {
    let state = options::describe(stream.as_fd());
    (FaultKind::Hung, format!("hung: {what}"), state)
}

fn failure(call: &str, error: &io::Error) -> Failure {
    (
        FaultKind::Error,
        format!("{call}: {}", error_name(error)),
        String::new(),
    )
}

fn report(
    stream: &TcpStream,
    plan: &Plan,
    side: Side,
    bytes: u64,
    failed: Option<Failure>,
    tally: &Tally,
) {
    let scenario = plan.scenario.to_string();
    let mut report = tally.lock();
    report.connections += 1;
    report.bytes += bytes;
    *report.scenarios.entry(scenario.clone()).or_default() += 1;
    *report
        .styles
        .entry("poll and threads".to_owned())
        .or_default() += 1;
    if let Some((kind, what, state)) = failed {
        // The other end fails in its way, and sooner than by its own patience.
        let _closed_already = stream.shutdown(Shutdown::Both);
        report.fault(Fault {
            id: plan.id,
            scenario,
            side: side.name().to_owned(),
            style: "poll and threads".to_owned(),
            kind,
            what,
            state,
        });
    }
}
