//! What the applier writes to, and what it reads back.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use shunt_common::{LeftAlone, Node, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey, Wish};

/// The maps as [`Applier`](super::Applier) writes them: the kernel's, or ones
/// in memory that can fail.
pub trait Maps {
    /// Writes slots; after an error some of them may have been written.
    fn put_slots(&mut self, slots: &[(SlotKey, Slot)]) -> Result<(), WriteError>;
    /// Deletes slots; that one is gone already is no error.
    fn delete_slots(&mut self, slots: &[SlotKey]) -> Result<(), WriteError>;
    /// Writes the name of a Service port, and then its entry, which replaces
    /// an older one at once.
    fn put_service(
        &mut self,
        key: ServiceKey,
        name: ServiceName,
        entry: ServiceEntry,
    ) -> Result<(), WriteError>;
    /// Deletes the entry of a Service port, and then its name.
    fn delete_service(&mut self, key: ServiceKey) -> Result<(), WriteError>;
    /// Leaves the connects of a cgroup alone.
    fn put_client(&mut self, cgroup: u64, client: LeftAlone) -> Result<(), WriteError>;
    /// Translates them again; that it is gone already is no error.
    fn delete_client(&mut self, cgroup: u64) -> Result<(), WriteError>;
    /// Writes whether connections of this address are spliced.
    fn put_wish(&mut self, address: IpAddr, wish: Wish) -> Result<(), WriteError>;
    /// Forgets that; that it is gone already is no error.
    fn delete_wish(&mut self, address: IpAddr) -> Result<(), WriteError>;
    /// Writes for which node all of this is.
    fn put_node(&mut self, node: Node) -> Result<(), WriteError>;
}

/// The whole content of the maps at one time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The node that it was planned for.
    pub node: Node,
    /// The clients that are left alone, by the id of their cgroup.
    pub left_alone: BTreeMap<u64, LeftAlone>,
    /// Addresses of pods that have a wish of their own for the splice.
    pub wishes: BTreeMap<IpAddr, Wish>,
    /// The Service ports.
    pub records: Vec<Record>,
    /// Slots that no entry names: an agent died before it deleted them.
    pub orphans: Vec<SlotKey>,
}

/// One Service port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Record {
    /// Its key.
    pub key: ServiceKey,
    /// Its name.
    pub name: ServiceName,
    /// Its entry.
    pub entry: ServiceEntry,
    /// Its slots, by index.
    pub slots: Vec<Slot>,
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// No element more fits in.
    #[error(
        "the map {map} is full: the Service ports that do not fit in are left to kube-proxy, and \
         pods that do not are not left alone; see `shunt status` for how full the maps are"
    )]
    Full {
        /// The map.
        map: &'static str,
    },
    /// Anything else.
    #[error("cannot write to the map {map}")]
    Kernel {
        /// The map.
        map: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl WriteError {
    /// The kernel says that a hash map is full with E2BIG ("argument list too
    /// long"; `alloc_htab_elem` in `kernel/bpf/hashtab.c`).
    pub fn new(map: &'static str, source: io::Error) -> Self {
        if source.raw_os_error() == Some(libc::E2BIG) {
            return Self::Full { map };
        }
        Self::Kernel { map, source }
    }
}

impl Default for Snapshot {
    fn default() -> Self {
        Self {
            node: Node::new("", ""),
            left_alone: BTreeMap::new(),
            wishes: BTreeMap::new(),
            records: Vec::new(),
            orphans: Vec::new(),
        }
    }
}
