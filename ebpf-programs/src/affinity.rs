//! Session affinity: a client keeps to its endpoint while that is in the set and
//! the time since its last connection is not over.

use aya_ebpf::btf_maps::LruHashMap;
use aya_ebpf::helpers::generated::{bpf_get_current_cgroup_id, bpf_get_netns_cookie};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockAddrContext;
use aya_ebpf::{Global, bindings::BPF_ANY};
use shunt_common::{Affinity, AffinityKey, ServiceEntry, ServiceKey, Slot, capacity};

#[btf_map(name = "affinity")]
static AFFINITY: LruHashMap<AffinityKey, Affinity, { capacity::AFFINITY }> = LruHashMap::new();

/// Cookie of the host's network namespace, which is no one client; 0 if it is
/// not known.
#[unsafe(no_mangle)]
static HOST_NETNS: Global<u64> = Global::new(0);

/// The endpoint that this client keeps to.
#[inline(always)]
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
#[inline(always)]
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
    // SAFETY: the kernel passes a valid context.
    let cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
    let cgroup_id = if cookie == HOST_NETNS.load() {
        // SAFETY: the helper takes nothing and returns a number.
        unsafe { bpf_get_current_cgroup_id() }
    } else {
        0
    };
    AffinityKey::new(cookie, cgroup_id, *service)
}
