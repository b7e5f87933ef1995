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
//! - Only when something has stopped serving are the records read, and only when
//!   there are sockets to destroy are their network namespaces searched for, among
//!   those of all processes that `/proc` shows.
//! - The agent never waits for any of this: it has a thread of its own.

mod diag;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use shunt_common::{Connection, UdpClient, address};
use tracing::{debug, info, warn};

use crate::apply::frontend;
use crate::bpf::{UdpClients, may_enter_namespaces, visit_namespaces};
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
    /// Starts the thread, which tells of sockets that it has destroyed.
    ///
    /// # Errors
    ///
    /// The thread can't be had.
    pub fn start(clients: UdpClients, told: impl Fn(usize) + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new()
            .name("udp-cleanup".to_owned())
            .spawn(move || work(&receiver, &clients, &told))?;
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
fn work(receiver: &Receiver<Serving>, clients: &UdpClients, told: &impl Fn(usize)) {
    let mut is_first = true;
    while let Ok(serving) = receiver.recv() {
        thread::sleep(SETTLE);
        let newest = receiver.try_iter().last().unwrap_or(serving);
        let is_done = clean(newest, receiver, clients, told);
        if std::mem::take(&mut is_first) && is_done {
            info!("UDP sockets whose endpoint stopped serving while no agent ran are gone");
        }
    }
}

/// Whether all namespaces were looked through in the end.
fn clean(
    mut serving: Serving,
    receiver: &Receiver<Serving>,
    clients: &UdpClients,
    told: &impl Fn(usize),
) -> bool {
    let mut wait = SETTLE;
    for _ in 0..ATTEMPTS {
        let swept = sweep(&serving, clients);
        swept.log();
        told(swept.destroyed.values().sum());
        if swept.failures == 0 {
            return true;
        }
        wait *= 2;
        match receiver.recv_timeout(wait) {
            Ok(newer) => {
                serving = newer;
                thread::sleep(SETTLE);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
    warn!(
        "gave up: some UDP sockets may stay with an endpoint that is gone, until the next one is"
    );
    false
}

/// How many sockets, by Service port and endpoint.
type Destroyed = BTreeMap<(Frontend, SocketAddr), usize>;

/// What one look through all namespaces came to.
#[derive(Debug, Default)]
struct Swept {
    took: Duration,
    namespaces: usize,
    destroyed: Destroyed,
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
    match clients.all() {
        Ok(all) => Search::new(all, serving, clients).run(&mut swept),
        Err(error) => {
            swept.failures = 1;
            swept.first_failure = Some(io::Error::other(error));
        }
    }
    swept.took = start.elapsed();
    swept
}

/// The search for sockets that have to go.
struct Search<'a> {
    /// Those not found yet, by their cookies.
    wanted: BTreeMap<u64, UdpClient>,
    clients: &'a UdpClients,
}

impl<'a> Search<'a> {
    fn new(all: Vec<(u64, UdpClient)>, serving: &Serving, clients: &'a UdpClients) -> Self {
        let has_lost = |(_, client): &(u64, UdpClient)| {
            let (service, endpoint) = ends(client.connection());
            serving.has_lost(&service, &endpoint)
        };
        Self {
            wanted: all.into_iter().filter(has_lost).collect(),
            clients,
        }
    }

    fn run(&mut self, swept: &mut Swept) {
        if self.wanted.is_empty() {
            return;
        }
        // A thread that ends leaves the last namespace that it entered; one that
        // goes on would keep it, and the links of its pod, from going away.
        thread::scope(|scope| {
            scope.spawn(|| {
                let failures = visit_namespaces(|| {
                    swept.namespaces += 1;
                    self.look_here(&mut swept.destroyed)
                });
                swept.failures = failures.len();
                swept.first_failure = failures.into_iter().next();
            });
        });
    }

    /// Looks in the namespace that the thread is in.
    fn look_here(&mut self, destroyed: &mut Destroyed) -> io::Result<ControlFlow<()>> {
        let diag = SocketDiag::open()?;
        let here = diag.netns_cookie();
        let is_here = |client: &UdpClient| here.is_none_or(|it| it == client.netns_cookie());
        if self.wanted.values().any(is_here) {
            for socket in connected(&diag)? {
                let Some(client) = self.wanted.get(&socket.cookie()) else {
                    continue;
                };
                // The record is asked for again: a connect may have come between.
                let is_same = self.clients.get(socket.cookie()) == Some(*client);
                if is_same && is_connected(&socket, client) && diag.destroy(&socket)? {
                    *destroyed.entry(ends(client.connection())).or_default() += 1;
                }
                self.wanted.remove(&socket.cookie());
            }
            // The rest of this namespace is closed, or not connected any more.
            self.wanted
                .retain(|_, client| here.is_none() || !is_here(client));
        }
        Ok(if self.wanted.is_empty() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        })
    }
}

/// Of both families.
fn connected(diag: &SocketDiag) -> io::Result<Vec<UdpSocket>> {
    let mut sockets = diag.connected(Family::V4)?;
    match diag.connected(Family::V6) {
        // A kernel that was started without IPv6.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        more => sockets.extend(more?),
    }
    Ok(sockets)
}

/// The Service port that the application connected to, and the endpoint.
fn ends(connection: &Connection) -> (Frontend, SocketAddr) {
    let ip = address::to_ip(connection.endpoint());
    let port = u16::from_be_bytes(connection.endpoint_port());
    (frontend(connection.service()), SocketAddr::new(ip, port))
}

/// Whether the socket is where our hook sent it: a connect that failed after the
/// hook has left the earlier peer.
fn is_connected(socket: &UdpSocket, client: &UdpClient) -> bool {
    let (peer, port) = socket.peer();
    client.connection().is_about(&peer, port)
}

/// An errno as std has it.
fn os(errno: Errno) -> io::Error {
    errno.into()
}

#[cfg(test)]
mod tests {
    use shunt_common::{ServiceKey, Slot, Wish};

    use super::*;

    #[test]
    fn a_socket_is_where_we_sent_it_only_if_address_and_port_are_the_same() {
        let service = ServiceKey::from_parts([10, 96, 0, 10].into(), 53, ServiceKey::UDP);
        for (sent, peer, expected) in [
            ("10.244.1.5:53", "10.244.1.5:53", true),
            ("10.244.1.5:53", "[::ffff:10.244.1.5]:53", true),
            ("[fd00::5]:53", "[fd00::5]:53", true),
            ("10.244.1.5:53", "10.244.1.5:54", false),
            ("10.244.1.5:53", "10.244.1.6:53", false),
            ("[fd00::5]:53", "[fd00::6]:53", false),
        ] {
            let [sent, peer] = [sent, peer].map(|it| it.parse::<SocketAddr>().unwrap());
            let endpoint = Slot::new(sent.ip(), sent.port(), false);
            let connection = Connection::new(service, &endpoint, Wish::None, 0);
            let client = UdpClient::new(1, connection);
            let socket = UdpSocket::connected_to(peer);
            assert_eq!(is_connected(&socket, &client), expected, "{sent} {peer}");
            assert_eq!(ends(&connection), (frontend(&service), sent));
        }
    }
}
