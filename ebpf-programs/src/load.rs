//! How many connections the endpoints of this node hold, for Services with
//! `shunt.dev/max-local-connections`.
//!
//! A connection counts from connect() until its socket is closed or connects
//! again. Several that begin at once may all get the last place.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::HashMap;
use aya_ebpf::macros::btf_map;
use shunt_common::{Connection, LoadKey, Slot, capacity};

use crate::count::add;

#[btf_map(name = "loads")]
static LOADS: HashMap<LoadKey, u64, { capacity::LOADS }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// Whether an endpoint of this node may have one connection more.
#[inline(always)]
pub(crate) fn has_room(endpoint: &Slot, limit: u32) -> bool {
    let count = counter(&key(endpoint.address(), endpoint.port()));
    // SAFETY: the map's memory, which is kept until the program ends.
    count.is_none_or(|count| unsafe { count.read_volatile() } < u64::from(limit))
}

/// Counts a connection to an endpoint of this node. One that can't be counted is
/// no reason to fail it.
#[inline(always)]
pub(crate) fn note(connection: &mut Connection) {
    let key = key(connection.endpoint(), connection.endpoint_port());
    let _ = LOADS.insert(key, 0, BPF_NOEXIST.into());
    if let Some(count) = counter(&key) {
        add(count, 1);
        connection.counted = 1;
    }
}

/// Takes a connection off again, if it was counted.
#[inline(always)]
pub(crate) fn forget(connection: &mut Connection) {
    if connection.counted == 0 {
        return;
    }
    connection.counted = 0;
    let key = key(connection.endpoint(), connection.endpoint_port());
    if let Some(count) = counter(&key)
        // SAFETY: as in `has_room`.
        && unsafe { count.read_volatile() } > 0
    {
        add(count, u64::MAX);
    }
}

#[inline(always)]
fn key(address: &[u8; 16], port: [u8; 2]) -> LoadKey {
    LoadKey::new(*address, port)
}

/// The agent removes only what is zero and no longer chosen.
#[inline(always)]
fn counter(key: &LoadKey) -> Option<*mut u64> {
    LOADS.get_ptr_mut(key)
}
