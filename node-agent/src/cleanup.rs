//! Destroys connected UDP sockets whose endpoint has stopped serving.
//!
//! A socket that connected to a ClusterIP is connected to an endpoint, for good:
//! no hook sees what it sends. Once the endpoint is gone, all of that is lost
//! without a word. So the kernel is told to abort the socket (`SOCK_DESTROY`,
//! `CONFIG_INET_DIAG_DESTROY`): the application gets ECONNABORTED, also out of a
//! read that waits, the socket is not connected any more, and the next connect
//! chooses anew. Which sockets, [`Serving`] decides.
//!
//! Invariants:
//! - Only a socket that our connect hook sent to the endpoint that it is still
//!   connected to: the hook keeps a record under the socket's cookie, which names
//!   it for the kernel too. A socket without a record, an unconnected one, and
//!   TCP are never touched (cilium#48564 tells of the second).
//! - All network namespaces of processes that `/proc` shows are looked through,
//!   one after the other, once something has stopped serving, and never before.
//! - The agent never waits for any of this: it has a thread of its own.

mod diag;
mod namespaces;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use shunt_common::{Connection, address};
use tracing::{debug, info, warn};

use crate::apply::frontend;
use crate::bpf::{UdpClients, may_enter_namespaces};
use crate::serving::{Serving, ServingHistory};
use crate::state::State;
use crate::tables::Frontend;
use diag::{Family, SocketDiag, UdpSocket};

/// Between the new table and the look for sockets: a connect that has read the
/// old table is done by then, and changes that come together share one look.
const SETTLE: Duration = Duration::from_millis(200);
/// How often a look that failed is repeated, each time after twice the wait.
const ATTEMPTS: u32 = 6;

/// Why sockets can't be destroyed here.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Unavailable {
    /// The process may not.
    #[error(
        "to enter network namespaces it needs CAP_SYS_ADMIN and CAP_SYS_PTRACE: run shunt as root, \
         or as a privileged container"
    )]
    Privileges,
    /// Sockets can't be listed.
    #[error("this kernel does not list UDP sockets (CONFIG_INET_UDP_DIAG)")]
    NoListing,
    /// Sockets can't be destroyed.
    #[error("this kernel does not destroy sockets (CONFIG_INET_DIAG_DESTROY)")]
    NoDestruction,
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// Tries everything but to destroy a socket that is there.
pub fn probe() -> Result<(), Unavailable> {
    let failed = |error: io::Error| Unavailable::Failed(error.to_string());
    if !may_enter_namespaces() {
        return Err(Unavailable::Privileges);
    }
    let diag = SocketDiag::open().map_err(failed)?;
    match diag.can_list() {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            return Err(Unavailable::NoListing);
        }
        result => result.map_err(failed)?,
    }
    match diag.destroy(&UdpSocket::NONE) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Err(Unavailable::NoDestruction)
        }
        result => result.map(drop).map_err(failed),
    }
}

/// Follows what serves, and lets a thread destroy sockets when something stops.
#[derive(Debug)]
pub struct Cleaner {
    history: ServingHistory,
    sender: Sender<Serving>,
}

impl Cleaner {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The thread can't be had.
    pub fn start(clients: UdpClients) -> io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new()
            .name("udp-cleanup".to_owned())
            .spawn(move || work(&receiver, &clients))?;
        Ok(Self {
            history: ServingHistory::default(),
            sender,
        })
    }

    /// Takes note of a state whose table is in force.
    pub fn observe(&mut self, state: &State) {
        let serving = Serving::of(state);
        if self.history.observe(&serving) && self.sender.send(serving).is_err() {
            warn!("the thread that destroys UDP sockets is gone: restart the agent");
        }
    }
}

/// Looks for sockets whenever it is told to, until nobody can tell it any more.
fn work(receiver: &Receiver<Serving>, clients: &UdpClients) {
    let mut is_first = true;
    while let Ok(serving) = receiver.recv() {
        thread::sleep(SETTLE);
        let newest = receiver.try_iter().last().unwrap_or(serving);
        clean(newest, receiver, clients);
        if std::mem::take(&mut is_first) {
            info!("UDP sockets whose endpoint stopped serving while no agent ran are gone");
        }
    }
}

fn clean(mut serving: Serving, receiver: &Receiver<Serving>, clients: &UdpClients) {
    let mut wait = SETTLE;
    for _ in 0..ATTEMPTS {
        let swept = sweep(&serving, clients);
        swept.log();
        if swept.failures == 0 {
            return;
        }
        wait *= 2;
        match receiver.recv_timeout(wait) {
            Ok(newer) => serving = newer,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// What one look through all namespaces came to.
#[derive(Debug, Default)]
struct Swept {
    took: Duration,
    namespaces: usize,
    /// Sockets, by Service port and endpoint.
    destroyed: BTreeMap<(Frontend, SocketAddr), usize>,
    failures: usize,
    first_failure: Option<io::Error>,
}

impl Swept {
    fn log(&self) {
        debug!(namespaces = self.namespaces, took = ?self.took, "looked for UDP sockets");
        for ((service, endpoint), sockets) in &self.destroyed {
            let cluster_ip = SocketAddr::new(service.address, service.port);
            info!(%cluster_ip, %endpoint, sockets, "destroyed UDP sockets: the endpoint stopped serving");
        }
        if let Some(error) = &self.first_failure {
            let failures = self.failures;
            warn!(%error, failures, "some network namespaces could not be looked through for UDP sockets");
        }
    }
}

fn sweep(serving: &Serving, clients: &UdpClients) -> Swept {
    let start = Instant::now();
    let mut swept = Swept::default();
    // A thread that ends leaves the last namespace that it entered; one that
    // goes on would keep it, and the links of its pod, from going away.
    thread::scope(|scope| {
        scope.spawn(|| {
            let failures = namespaces::visit_all(|| {
                swept.namespaces += 1;
                sweep_namespace(serving, clients, &mut swept.destroyed)
            });
            swept.failures = failures.len();
            swept.first_failure = failures.into_iter().next();
        });
    });
    swept.took = start.elapsed();
    swept
}

/// In the namespace that the thread is in.
fn sweep_namespace(
    serving: &Serving,
    clients: &UdpClients,
    destroyed: &mut BTreeMap<(Frontend, SocketAddr), usize>,
) -> io::Result<()> {
    let diag = SocketDiag::open()?;
    for family in [Family::V4, Family::V6] {
        let sockets = match diag.connected(family) {
            // A kernel that was started without IPv6.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) && family == Family::V6 => {
                continue;
            }
            sockets => sockets?,
        };
        for socket in sockets {
            let connection = clients.get(socket.cookie()).map_err(io::Error::other)?;
            let Some(stale) = connection.and_then(|it| stale(&socket, &it, serving)) else {
                continue;
            };
            if diag.destroy(&socket)? {
                *destroyed.entry(stale).or_default() += 1;
            }
        }
    }
    Ok(())
}

/// The Service port and the endpoint, if the socket has to go.
fn stale(
    socket: &UdpSocket,
    connection: &Connection,
    serving: &Serving,
) -> Option<(Frontend, SocketAddr)> {
    let (peer, port) = socket.peer();
    let service = frontend(connection.service());
    let endpoint = SocketAddr::new(address::to_ip(&peer), u16::from_be_bytes(port));
    // A connect that failed after our hook has left the earlier peer.
    let is_ours = connection.is_about(&peer, port);
    (is_ours && serving.has_lost(&service, &endpoint)).then_some((service, endpoint))
}

/// An errno as std has it.
fn os(errno: Errno) -> io::Error {
    errno.into()
}

#[cfg(test)]
mod tests {
    use shunt_common::ServiceKey;

    use super::*;
    use crate::tables::Protocol;

    #[test]
    fn only_a_socket_that_is_still_connected_as_we_did_has_to_go() {
        let service = ServiceKey::from_parts([10, 96, 0, 10].into(), 53, ServiceKey::UDP);
        let frontend = Frontend {
            address: [10, 96, 0, 10].into(),
            port: 53,
            protocol: Protocol::Udp,
        };
        let gone = SocketAddr::from(([10, 244, 1, 5], 5353));
        let other = SocketAddr::from(([10, 244, 1, 6], 5353));
        let connection = |to: SocketAddr| {
            let port = to.port().to_be_bytes();
            Connection::new(service, address::from_ip(to.ip()), port, false)
        };
        let serving = Serving::from_iter([(frontend, [other].into())]);
        let check = |peer, to| stale(&UdpSocket::connected_to(peer), &connection(to), &serving);
        assert_eq!(check(gone, gone), Some((frontend, gone)));
        assert_eq!(check(other, other), None, "it serves");
        assert_eq!(check(gone, other), None, "another connect came between");
        let elsewhere = SocketAddr::from(([10, 244, 1, 5], 53));
        assert_eq!(check(elsewhere, gone), None, "another port");
        assert_eq!(check(elsewhere, elsewhere), Some((frontend, elsewhere)));
    }
}
