//! Session affinity: a client keeps to its endpoint while that is in the set and
//! the time since its last connection is not over.

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::btf_maps::LruHashMap;
use aya_ebpf::helpers::generated::bpf_get_current_cgroup_id;
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockAddrContext;
use shunt_common::{Affinity, AffinityKey, ServiceEntry, ServiceKey, Slot, capacity};

use crate::client::{is_of_host, netns_cookie};

#[btf_map(name = "affinity")]
static AFFINITY: LruHashMap<AffinityKey, Affinity, { capacity::AFFINITY }> = LruHashMap::new();

/// The endpoint that this client keeps to.
#[inline(never)]
pub(crate) fn recall(
    ctx: &SockAddrContext,
    service: &ServiceKey,
    entry: &ServiceEntry,
    now_ns: u64,
) -> Option<&'static Slot> {
    if entry.affinity_seconds() == 0 {
        return None;
    }
    // SAFETY: the kernel keeps the memory of an element until the program ends.
    // If its content is replaced meanwhile, the endpoint is still looked for in
    // the set of this Service.
    unsafe { AFFINITY.get(client(ctx, service)) }?.at(now_ns)
}

/// Makes the client keep to an endpoint, from now on. That there is no room is
/// no reason to fail the connection.
/// (A frame of its own: the stack of the hooks has no room for it.)
#[inline(never)]
pub(crate) fn keep(
    ctx: &SockAddrContext,
    service: &ServiceKey,
    entry: &ServiceEntry,
    endpoint: Slot,
    now_ns: u64,
) {
    if let Some(affinity) = entry.affinity(endpoint, now_ns) {
        let _ = AFFINITY.insert(client(ctx, service), affinity, BPF_ANY.into());
    }
}

#[inline(always)]
fn client(ctx: &SockAddrContext, service: &ServiceKey) -> AffinityKey {
    let cookie = netns_cookie(ctx);
    let cgroup_id = if is_of_host(cookie) {
        // SAFETY: the helper takes nothing and returns a number.
        unsafe { bpf_get_current_cgroup_id() }
    } else {
        0
    };
    AffinityKey::new(cookie, cgroup_id, *service)
}
