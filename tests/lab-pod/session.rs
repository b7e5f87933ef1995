//! One socket that is kept open and used as standard input says, a line each:
//! - `ask`: sends a datagram or byte and waits for the answer;
//! - `send`: only sends;
//! - `wait`: waits for what comes by itself, such as an error;
//! - `connect ADDRESS`: connects the socket again (UDP).

use std::io::{self, BufRead, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use lab::report::SessionReport;

use crate::{SessionArgs, SessionKind, socket};

/// Longer than any test waits.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &SessionArgs) -> Result<()> {
    let mut session = Session::open(args.to, args.kind)?;
    for line in io::stdin().lock().lines() {
        let line = line.context("read standard input")?;
        let outcome = match line.split_once(' ') {
            None if line == "ask" => session.send().and_then(|()| session.receive()),
            None if line == "send" => session.send().map(|()| String::new()),
            None if line == "wait" => session.receive(),
            Some(("connect", to)) => {
                let to = to.parse().with_context(|| format!("address {to}"))?;
                session.connect(to).map(|()| String::new())
            }
            _ => bail!("unknown command {line:?}"),
        };
        let (id, errno) = match outcome {
            Ok(id) => (Some(id), None),
            Err(error) => (None, Some(socket::error_name(&error))),
        };
        socket::print(&SessionReport {
            local: session.local()?,
            id,
            errno,
        })?;
    }
    Ok(())
}

enum Session {
    /// With what the server called itself.
    Tcp(TcpStream, String),
    /// With where to send to, unless it is connected.
    Udp(UdpSocket, Option<SocketAddr>),
}

impl Session {
    fn open(to: SocketAddr, kind: SessionKind) -> Result<Self> {
        if kind == SessionKind::Tcp {
            let mut stream = TcpStream::connect(to).with_context(|| format!("connect to {to}"))?;
            let mut greeting = [0; 256];
            let length = stream.read(&mut greeting).context("read the greeting")?;
            let id = String::from_utf8_lossy(&greeting[..length])
                .trim_end()
                .to_owned();
            return Ok(Self::Tcp(stream, id));
        }
        let any: SocketAddr = match to {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(any).context("bind")?;
        socket
            .set_read_timeout(Some(PATIENCE))
            .context("set a timeout")?;
        if kind == SessionKind::Udp {
            return Ok(Self::Udp(socket, Some(to)));
        }
        socket
            .connect(to)
            .with_context(|| format!("connect to {to}"))?;
        Ok(Self::Udp(socket, None))
    }

    fn local(&self) -> Result<SocketAddr> {
        let local = match self {
            Self::Tcp(stream, _) => stream.local_addr(),
            Self::Udp(socket, _) => socket.local_addr(),
        };
        local.context("own address")
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<()> {
        match self {
            Self::Tcp(..) => Err(io::ErrorKind::Unsupported.into()),
            Self::Udp(socket, _) => socket.connect(to),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream, _) => stream.write_all(b"?"),
            Self::Udp(socket, None) => socket.send(b"?").map(drop),
            Self::Udp(socket, Some(to)) => socket.send_to(b"?", *to).map(drop),
        }
    }

    /// Who answered.
    fn receive(&mut self) -> io::Result<String> {
        match self {
            Self::Tcp(stream, id) => {
                stream.read_exact(&mut [0])?;
                Ok(id.clone())
            }
            Self::Udp(socket, _) => {
                let mut buffer = [0; 2048];
                let (length, _) = socket.recv_from(&mut buffer)?;
                Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
            }
        }
    }
}
