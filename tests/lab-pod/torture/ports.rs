//! Ports: the server's, by what kind of end listens there, and those that the
//! client binds again and again.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Mutex;

use super::options::is_blocking;
use super::plan::Plan;

/// Who listens on the ports of a bank, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    EventLoop,
    Blocking,
    /// A process that is going to be killed.
    Victim,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::EventLoop, Self::Blocking, Self::Victim];

    fn of(plan: &Plan) -> Self {
        if plan.server_dies() {
            Self::Victim
        } else if plan.writers.is_none() && is_blocking(plan.server.style) {
            Self::Blocking
        } else {
            Self::EventLoop
        }
    }
}

/// The port of a kind: each bank has one of each, so that there are more pairs
/// of ports than TIME_WAIT holds.
pub(super) fn port(base: u16, bank: u16, kind: Kind) -> u16 {
    base + bank * Kind::ALL.len() as u16 + kind as u16
}

/// Below the range from which the kernel takes ports by itself.
const REUSED: std::ops::Range<u16> = 20_000..20_064;

pub(super) struct Ports {
    banks: u16,
    /// Bound now.
    taken: Mutex<BTreeSet<u16>>,
}

impl Ports {
    pub(super) fn new(banks: u16) -> Self {
        Self {
            banks,
            taken: Mutex::default(),
        }
    }

    /// Where the plan's server listens.
    pub(super) fn of(&self, base: SocketAddr, plan: &Plan) -> SocketAddr {
        let bank = (plan.id % u64::from(self.banks)) as u16;
        SocketAddr::new(base.ip(), port(base.port(), bank, Kind::of(plan)))
    }

    /// The port, if no connection of this process has it.
    pub(super) fn take(&self, port: u16) -> Option<u16> {
        self.lock().insert(port).then_some(port)
    }

    pub(super) fn give_back(&self, port: u16) {
        self.lock().remove(&port);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<u16>> {
        self.taken
            .lock()
            .expect("nothing panics while it holds the lock")
    }
}

/// One in eight connections binds a port that others had before.
pub(super) fn reused_port(plan: &Plan) -> Option<u16> {
    let random = plan.stream_seed(super::plan::Side::Client);
    let count = u64::from(REUSED.end - REUSED.start);
    random
        .is_multiple_of(8)
        .then(|| REUSED.start + (random / 8 % count) as u16)
}
