//! Proves that the connect hook sees the connects made below its cgroup, by one
//! of our own. Flags and link ids can't prove that: inside a private cgroup
//! namespace a program can be attached, and yet see nothing (cilium#16259).

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
use shunt_common::{Counter, SELF_CHECK_ADDRESS, SELF_CHECK_PORT};
use std::os::fd::AsRawFd as _;

use super::maps::{KernelMaps, ReadError};

/// Why the check did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum SelfCheckError {
    /// The hook did not see the connect.
    #[error(
        "the programs are attached, but did not see a connect of this process: the cgroup \
         {cgroup} is not above this process; name the machine's cgroup v2 root with --cgroup"
    )]
    NotSeen {
        /// Where they are attached.
        cgroup: String,
    },
    /// No socket could be had.
    #[error("cannot make a socket for the self-check")]
    Socket(#[source] io::Error),
    /// The counters can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Connects to the self-check address and looks whether that was counted.
pub fn self_check(maps: &KernelMaps, cgroup: &str) -> Result<(), SelfCheckError> {
    let seen = || Ok::<_, ReadError>(maps.counters()?[Counter::SelfCheck as usize]);
    // Two counters: where connects can't be refused, the hook counts the other.
    let passed = || Ok::<_, ReadError>(maps.counters()?[Counter::PassedNoRefusal as usize]);
    let before = seen()? + passed()?;
    attempt().map_err(SelfCheckError::Socket)?;
    if seen()? + passed()? > before {
        return Ok(());
    }
    Err(SelfCheckError::NotSeen {
        cgroup: cgroup.to_owned(),
    })
}

/// Non-blocking: where the hook can't refuse it, the connect would wait for an
/// answer that never comes.
fn attempt() -> io::Result<()> {
    let [.., a, b, c, d] = SELF_CHECK_ADDRESS;
    let port = u16::from_be_bytes(SELF_CHECK_PORT);
    let address = SocketAddr::from((Ipv4Addr::new(a, b, c, d), port));
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        // Refused by the hook, on its way, or no route: each went through it.
        Ok(()) | Err(Errno::ECONNREFUSED | Errno::EINPROGRESS | Errno::ENETUNREACH) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
