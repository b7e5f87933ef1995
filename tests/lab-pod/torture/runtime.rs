//! Ends that use the real tokio.

use std::future::pending;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until};

use super::connection::close;
use super::session::{Close, Session, Step};
use super::tally::Tally;

/// How often an end that nothing moves is looked after.
const TICK: Duration = Duration::from_millis(10);

pub(super) fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("start tokio")
}

/// Runs one end; the stream is non-blocking.
pub(super) async fn run(
    stream: std::net::TcpStream,
    session: Session,
    patience: Duration,
    tally: Tally,
) {
    let mut stream = TcpStream::from_std(stream).expect("the runtime takes a stream");
    let shared = Shared {
        session: Mutex::new(session),
        moved: Notify::new(),
        look: Notify::new(),
    };
    // For what is asked of the socket while the halves are in use.
    let watched = std::os::fd::AsFd::as_fd(&stream).try_clone_to_owned();
    let watched = watched.expect("a file descriptor is free");
    let how = {
        let (reader, writer) = stream.split();
        tokio::select! {
            how = watch(&shared, &watched, patience) => how,
            () = read(&shared, reader) => unreachable!("it waits for ever at the end"),
            () = write(&shared, writer) => unreachable!("it waits for ever at the end"),
        }
    };
    drop(watched);
    if let Some(how) = how {
        close(stream.into_std().expect("the runtime gives it back"), how);
    } else {
        sleep(patience).await;
        close(
            stream.into_std().expect("the runtime gives it back"),
            Close::Reset,
        );
    }
    let session = shared.session.into_inner();
    session
        .expect("nothing panics while it holds the lock")
        .report(&tally);
}

struct Shared {
    session: Mutex<Session>,
    /// The reader has moved: the writer may be allowed more.
    moved: Notify,
    /// Something has moved: it may be time to close.
    look: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Session> {
        self.session
            .lock()
            .expect("nothing panics while it holds the lock")
    }
}

/// Returns how to close, or `None` after a hang.
async fn watch(shared: &Shared, fd: &std::os::fd::OwnedFd, patience: Duration) -> Option<Close> {
    use std::os::fd::AsFd as _;
    loop {
        {
            let mut session = shared.lock();
            let now = Instant::now();
            session.tend(fd.as_fd(), now);
            if let Some(how) = session.close_now(fd.as_fd(), now) {
                return Some(how);
            }
            if session.is_stuck(patience, now) {
                session.hung(fd.as_fd());
                return None;
            }
        }
        tokio::select! {
            () = shared.look.notified() => {}
            () = sleep(TICK) => {}
        }
    }
}

async fn read(shared: &Shared, mut reader: ReadHalf<'_>) {
    let mut buffer = Vec::new();
    loop {
        let step = shared.lock().read_step(Instant::now());
        match step {
            Step::Move(size) => {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                match reader.read(&mut buffer[..size]).await {
                    Ok(count) => shared.lock().read(&buffer[..count], Instant::now()),
                    Err(error) => shared.lock().failed("recv", &error),
                }
                shared.moved.notify_one();
                shared.look.notify_one();
            }
            Step::Rest(until) => sleep_until(until.into()).await,
            Step::Wait => sleep(TICK).await,
            Step::ShutDown | Step::Done => pending().await,
        }
    }
}

async fn write(shared: &Shared, mut writer: WriteHalf<'_>) {
    let mut buffer = Vec::new();
    loop {
        let step = shared.lock().write_step(Instant::now());
        match step {
            Step::Move(size) => {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                shared.lock().fill(&mut buffer[..size]);
                match writer.write(&buffer[..size]).await {
                    Ok(count) => shared.lock().wrote(count, Instant::now()),
                    Err(error) => shared.lock().failed("send", &error),
                }
                shared.look.notify_one();
            }
            Step::Rest(until) => sleep_until(until.into()).await,
            Step::Wait => shared.moved.notified().await,
            Step::ShutDown => {
                shared.lock().has_shut_down();
                if let Err(error) = writer.shutdown().await {
                    shared.lock().failed("shutdown", &error);
                }
                shared.look.notify_one();
            }
            Step::Done => pending().await,
        }
    }
}
