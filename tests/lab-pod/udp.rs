//! UDP: a server that answers its name, and clients of both kinds.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};

use lab::report::{Listening, UdpReport};

use crate::socket;
use crate::{ServeArgs, UdpArgs};

pub(crate) fn serve(args: &ServeArgs) -> Result<()> {
    socket::pin(args.cpu)?;
    let server = UdpSocket::bind(args.listen).with_context(|| format!("bind {}", args.listen))?;
    let listening = server.local_addr().context("own address")?;
    socket::print(&Listening { listening })?;
    let mut buffer = [0; 2048];
    loop {
        // Both may report ICMP errors of earlier answers.
        if let Ok((_, client)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(args.id.as_bytes(), client);
        }
    }
}

/// Asks several times from one socket and reports each answer.
pub(crate) fn ask(args: &UdpArgs) -> Result<()> {
    let client = Client::new(args.to, args.connected, args.timeout_ms).context("bind")?;
    for _ in 0..args.count {
        socket::print(&client.ask())?;
        std::thread::sleep(Duration::from_millis(args.pause_ms));
    }
    Ok(())
}

/// A socket that asks one server.
pub(crate) struct Client {
    socket: UdpSocket,
    to: SocketAddr,
    connected: bool,
}

impl Client {
    pub(crate) fn new(to: SocketAddr, connected: bool, timeout: Duration) -> io::Result<Self> {
        let any: SocketAddr = match to {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(any)?;
        socket.set_read_timeout(Some(timeout))?;
        Ok(Self {
            socket,
            to,
            connected,
        })
    }

    pub(crate) fn ask(&self) -> UdpReport {
        let mut report = UdpReport::default();
        if let Err(error) = self.try_to_ask(&mut report) {
            report.errno = Some(socket::error_name(&error));
        }
        report
    }

    fn try_to_ask(&self, report: &mut UdpReport) -> io::Result<()> {
        let Self { socket, to, .. } = self;
        if self.connected {
            if socket.peer_addr().is_err() {
                socket.connect(to)?;
            }
            report.peer = Some(socket.peer_addr()?);
            socket.send(b"?")?;
        } else {
            socket.send_to(b"?", to)?;
        }
        let mut buffer = [0; 2048];
        let (count, from) = socket.recv_from(&mut buffer).map_err(timed_out)?;
        report.from = Some(from);
        report.id = Some(String::from_utf8_lossy(&buffer[..count]).into_owned());
        Ok(())
    }
}

/// SO_RCVTIMEO gives EAGAIN.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}
