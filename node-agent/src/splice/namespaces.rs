//! The numbers by which the program `manage` names network namespaces.
//!
//! The programs know a namespace by its cookie, and `bpf_skc_lookup_tcp` wants the
//! number that the agent's own namespace has given to it (`NETNSA_NSID` of
//! rtnetlink). The number lives as long as the namespace.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use shunt_common::OWN_NAMESPACE;
use tracing::debug;

use crate::bpf::{namespace_ids, own_netns_cookie};

/// How often all namespaces are looked through for one that is not known.
const LOOK: Duration = Duration::from_millis(100);

/// Numbers by cookie.
#[derive(Debug)]
pub(super) struct Namespaces {
    known: BTreeMap<u64, i32>,
    looked: Option<Instant>,
}

impl Namespaces {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            known: BTreeMap::from([(own_netns_cookie()?, OWN_NAMESPACE)]),
            looked: None,
        })
    }

    /// The number of a namespace; `None` if no process is in it, or not yet.
    pub(super) fn id(&mut self, cookie: u64, now: Instant) -> Option<i32> {
        if let Some(id) = self.known.get(&cookie) {
            return Some(*id);
        }
        let is_due = self.looked.is_none_or(|looked| now >= looked + LOOK);
        if is_due {
            self.looked = Some(now);
            match namespace_ids() {
                Ok(ids) => {
                    self.known.retain(|_, id| *id == OWN_NAMESPACE);
                    for (cookie, id) in ids {
                        self.known.entry(cookie).or_insert(id);
                    }
                }
                Err(error) => debug!(%error, "cannot look through the network namespaces"),
            }
        }
        self.known.get(&cookie).copied()
    }
}
