//! A way between the ends that damages what it carries, once a connection.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::libc;

use super::super::ports::Kind;
use super::super::wire::HEADER;

/// Keeps the connection open for longer than the ends have patience.
const STALL: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    None,
    /// One bit is another.
    Flip,
    /// One byte is left out.
    Swallow,
    /// Of what is read at once, the second half comes first.
    Swap,
    /// Nothing comes any more.
    Stall,
    /// Both ends are reset.
    Reset,
}

impl Damage {
    /// Whether bytes that are damaged so are others.
    fn is_seen_in(self, bytes: &[u8]) -> bool {
        let half = bytes.len() / 2;
        match self {
            Damage::None => false,
            Damage::Swap => [&bytes[half..], &bytes[..half]].concat() != bytes,
            Damage::Flip | Damage::Swallow | Damage::Stall | Damage::Reset => true,
        }
    }
}

/// Dropping it ends it.
pub(super) struct Proxy(Arc<AtomicBool>);

impl Proxy {
    /// Takes connections on the address `front`, and makes them to `back`, on all
    /// ports of the bank.
    pub(super) fn start(front: IpAddr, back: IpAddr, port: u16, damage: Damage) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        for kind in Kind::ALL {
            let port = super::super::ports::port(port, 0, kind);
            let listener = TcpListener::bind(SocketAddr::new(front, port)).unwrap();
            listener.set_nonblocking(true).unwrap();
            let over = Arc::clone(&over);
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    match listener.accept() {
                        Ok((client, _)) => relay(client, SocketAddr::new(back, port), damage),
                        Err(_) => thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
        }
        Self(over)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn relay(client: TcpStream, to: SocketAddr, damage: Damage) {
    client.set_nonblocking(false).unwrap();
    let server = TcpStream::connect(to).unwrap();
    let (client, server) = (Arc::new(client), Arc::new(server));
    let (from, into) = (Arc::clone(&server), Arc::clone(&client));
    thread::spawn(move || copy(&client, &server, HEADER + 50, damage));
    thread::spawn(move || copy(&from, &into, usize::MAX, Damage::None));
}

/// Resets a connection that another thread uses, too: connect() to no address.
fn reset(stream: &TcpStream) {
    let none = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as u16,
        sa_data: [0; 14],
    };
    // SAFETY: the address lives through the call, and its size is told.
    let result = unsafe {
        libc::connect(
            stream.as_raw_fd(),
            &raw const none,
            size_of_val(&none) as u32,
        )
    };
    assert_eq!(result, 0);
}

/// Copies to the end; damages what comes first after so many bytes.
fn copy(
    mut from: &TcpStream,
    mut into: &TcpStream,
    after: usize,
    damage: Damage,
) -> io::Result<()> {
    let mut copied = 0;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let size = after.saturating_sub(copied).clamp(1, buffer.len());
        let size = if copied < after { size } else { buffer.len() };
        let count = from.read(&mut buffer[..size])?;
        if count == 0 {
            return into.shutdown(Shutdown::Write);
        }
        let first = copied >= after && damage.is_seen_in(&buffer[..count]);
        copied += count;
        if !first {
            into.write_all(&buffer[..count])?;
            continue;
        }
        match damage {
            Damage::None => unreachable!("that is not the first"),
            Damage::Flip => {
                buffer[0] ^= 0x40;
                into.write_all(&buffer[..count])?;
            }
            Damage::Swallow => into.write_all(&buffer[1..count])?,
            Damage::Swap => {
                buffer[..count].rotate_left(count / 2);
                into.write_all(&buffer[..count])?;
            }
            Damage::Stall => {
                while from.read(&mut buffer)? > 0 {}
                thread::sleep(STALL);
                return Ok(());
            }
            Damage::Reset => {
                reset(from);
                reset(into);
                return Ok(());
            }
        }
        return io::copy(&mut from, &mut into).and_then(|_| into.shutdown(Shutdown::Write));
    }
}
