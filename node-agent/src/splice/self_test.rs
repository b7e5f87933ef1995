//! Proves that this kernel splices as shunt relies on it to: with two connections
//! of the agent's own, before any other is promoted. What a kernel does here can't
//! be told from its version, since distributions port changes back.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use shunt_common::{EndState, OWN_NAMESPACE, Operation, SelfTest, SpliceReason, Task};

use crate::bpf::{Manage, Pairs, socket_cookie, unread_bytes};

/// How long the kernel may take for anything here.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);
/// Of the stream to a reader that does not read, bytes.
const WRITE: usize = 16 * 1024;

/// Why the self-test did not succeed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The kernel behaves in another way.
    #[error("this kernel failed the self-test of the splice: {}", .0.what())]
    Check(SelfTest),
    /// Something else went wrong.
    #[error("the self-test of the splice could not be run")]
    Io(#[from] io::Error),
}

/// The sockets of the test, and the means to promote them.
struct Test<'a> {
    manage: &'a Manage,
    pairs: &'a Pairs,
    queue_bytes: u32,
}

/// One connection.
struct Connection {
    client: TcpStream,
    server: TcpStream,
    key: u64,
}

/// Runs all checks. The programs have to register connections to the listener.
pub(super) fn run(
    manage: &Manage,
    pairs: &Pairs,
    listener: &TcpListener,
    queue_bytes: u32,
) -> Result<(), Failure> {
    let test = Test {
        manage,
        pairs,
        queue_bytes,
    };
    let mut connection = test.connect(listener)?;
    test.promote(&connection)?;
    test.check_order(&mut connection)?;
    test.check_wakeups(&mut connection)?;
    test.check_slow_reader(&mut connection)?;
    test.check_demotion(&mut connection)?;
    let mut connection = test.connect(listener)?;
    test.promote(&connection)?;
    test.check_end(&mut connection)
}

/// A listener for the test; its port has to be told to the programs.
pub(super) fn listener() -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

impl Test<'_> {
    fn connect(&self, listener: &TcpListener) -> Result<Connection, Failure> {
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        for stream in [&client, &server] {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
        }
        let key = socket_cookie(client.as_fd())?;
        let connection = Connection {
            client,
            server,
            key,
        };
        let is_found = || self.pairs.get(key).is_some_and(|pair| pair.is_complete());
        wait(is_found, SelfTest::Registration)?;
        Ok(connection)
    }

    fn run(&self, connection: &Connection, operation: Operation) -> io::Result<Task> {
        let mut tasks = [Task::new(connection.key, operation, [OWN_NAMESPACE; 2])];
        self.manage.run(&mut tasks)?;
        Ok(tasks[0])
    }

    fn promote(&self, connection: &Connection) -> Result<(), Failure> {
        let task = self.run(connection, Operation::Promote)?;
        check(
            task.verdict == SpliceReason::Eligible as u32,
            SelfTest::Promotion,
        )
    }

    fn is_engaged(&self, connection: &Connection) -> io::Result<bool> {
        let task = self.run(connection, Operation::Inspect)?;
        Ok(task.ends.iter().all(|end| end.has(EndState::ENGAGED)))
    }

    /// Messages of many sizes both ways, several of them unread at once.
    fn check_order(&self, connection: &mut Connection) -> Result<(), Failure> {
        let failed = SelfTest::Order;
        for round in 0..64_usize {
            let sizes = [1, 1 + round * 37, 4096];
            let message = |size: usize, salt: usize| {
                (0..size)
                    .map(|at| (at * 7 + salt) as u8)
                    .collect::<Vec<u8>>()
            };
            let to_server: Vec<u8> = sizes
                .iter()
                .flat_map(|size| message(*size, round))
                .collect();
            let mut at = 0;
            for size in sizes {
                write(&mut connection.client, &to_server[at..at + size], failed)?;
                at += size;
            }
            check(
                read(&mut connection.server, at, failed)? == to_server,
                failed,
            )?;
            let to_client = message(sizes[1], round + 1);
            write(&mut connection.server, &to_client, failed)?;
            let answer = read(&mut connection.client, to_client.len(), failed)?;
            check(answer == to_client, failed)?;
        }
        check(self.is_engaged(connection)?, SelfTest::Engagement)
    }

    /// What readers learn: FIONREAD tells of redirected bytes, and each message is
    /// an event of its own to an edge-triggered reader.
    fn check_wakeups(&self, connection: &mut Connection) -> Result<(), Failure> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io::Error::from)?;
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll
            .add(&connection.server, EpollEvent::new(edges, 0))
            .map_err(io::Error::from)?;
        let mut events = [EpollEvent::empty()];
        let timeout = EpollTimeout::try_from(PATIENCE).map_err(io::Error::other)?;
        for count in 1..=3 {
            write(&mut connection.client, b"edge", SelfTest::Wakeups)?;
            let woken = epoll.wait(&mut events, timeout).map_err(io::Error::from)?;
            check(woken == 1, SelfTest::Wakeups)?;
            let unread = unread_bytes(connection.server.as_fd())?;
            check(unread == 4 * count, SelfTest::Fionread)?;
        }
        read(&mut connection.server, 12, SelfTest::Wakeups).map(drop)
    }

    /// A reader that does not read: the direction is given up at the limit, what
    /// was sent before and after arrives in order.
    fn check_slow_reader(&self, connection: &mut Connection) -> Result<(), Failure> {
        let failed = SelfTest::SlowReader;
        let limit = self.queue_bytes as usize * 2;
        let chunk = [0x5a; WRITE];
        let mut sent = 0;
        while sent < limit {
            match connection.client.write(&chunk) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        let task = self.run(connection, Operation::Inspect)?;
        check(task.ends[0].has(EndState::LATCHED), failed)?;
        let received = read(&mut connection.server, sent, failed)?;
        check(received.iter().all(|byte| *byte == 0x5a), failed)
    }

    /// Back to TCP, which goes on.
    fn check_demotion(&self, connection: &mut Connection) -> Result<(), Failure> {
        let failed = SelfTest::Demotion;
        write(&mut connection.server, b"unread", failed)?;
        self.run(connection, Operation::Freeze)?;
        let task = self.run(connection, Operation::Release)?;
        // The client has not read, so that its end has to stay.
        check(task.ends[0].has(EndState::MEMBER), failed)?;
        let unread = read(&mut connection.client, 6, failed)?;
        check(unread == b"unread", failed)?;
        let is_out = || {
            let task = self.run(connection, Operation::Release);
            task.is_ok_and(|task| task.ends.iter().all(|end| !end.has(EndState::MEMBER)))
        };
        wait(is_out, failed)?;
        write(&mut connection.client, b"again", failed)?;
        check(read(&mut connection.server, 5, failed)? == b"again", failed)
    }

    /// Redirected bytes come before the end of the stream.
    fn check_end(&self, connection: &mut Connection) -> Result<(), Failure> {
        let failed = SelfTest::End;
        write(&mut connection.client, b"last", failed)?;
        connection.client.shutdown(Shutdown::Write)?;
        check(read(&mut connection.server, 4, failed)? == b"last", failed)?;
        let start = Instant::now();
        loop {
            match connection.server.read(&mut [0]) {
                Ok(count) => return check(count == 0, failed),
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) => check(start.elapsed() < PATIENCE, failed)?,
            }
            thread::sleep(PAUSE);
        }
    }
}

fn check(is_right: bool, what: SelfTest) -> Result<(), Failure> {
    if is_right {
        Ok(())
    } else {
        Err(Failure::Check(what))
    }
}

fn wait(mut is_done: impl FnMut() -> bool, what: SelfTest) -> Result<(), Failure> {
    let start = Instant::now();
    while !is_done() {
        check(start.elapsed() < PATIENCE, what)?;
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn write(stream: &mut TcpStream, bytes: &[u8], what: SelfTest) -> Result<(), Failure> {
    let start = Instant::now();
    let mut rest = bytes;
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
            Err(_) => {
                check(start.elapsed() < PATIENCE, what)?;
                thread::sleep(PAUSE);
            }
        }
    }
    Ok(())
}

fn read(stream: &mut TcpStream, count: usize, what: SelfTest) -> Result<Vec<u8>, Failure> {
    let start = Instant::now();
    let mut bytes = vec![0; count];
    let mut at = 0;
    while at < count {
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Err(Failure::Check(what)),
            Ok(count) => at += count,
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
            Err(_) => {
                check(start.elapsed() < PATIENCE, what)?;
                thread::sleep(PAUSE);
            }
        }
    }
    Ok(bytes)
}
