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
    let any: SocketAddr = match args.to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let client = UdpSocket::bind(any).context("bind")?;
    client
        .set_read_timeout(Some(args.timeout_ms))
        .context("set a timeout")?;
    for _ in 0..args.count {
        let mut report = UdpReport::default();
        if let Err(error) = ask_once(&client, args, &mut report) {
            report.errno = Some(socket::error_name(&error));
        }
        socket::print(&report)?;
        std::thread::sleep(Duration::from_millis(args.pause_ms));
    }
    Ok(())
}

fn ask_once(client: &UdpSocket, args: &UdpArgs, report: &mut UdpReport) -> io::Result<()> {
    if args.connected {
        if client.peer_addr().is_err() {
            client.connect(args.to)?;
        }
        report.peer = Some(client.peer_addr()?);
        client.send(b"?")?;
    } else {
        client.send_to(b"?", args.to)?;
    }
    let mut buffer = [0; 2048];
    let (count, from) = client.recv_from(&mut buffer).map_err(timed_out)?;
    report.from = Some(from);
    report.id = Some(String::from_utf8_lossy(&buffer[..count]).into_owned());
    Ok(())
}

/// SO_RCVTIMEO gives EAGAIN.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}
