//! Who calls, and whether shunt leaves it alone.
//!
//! Pods are told apart by their cgroup: the kubelet makes one for each, and the
//! cgroups of its containers are below.

use aya_ebpf::Global;
use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::btf_maps::HashMap;
use aya_ebpf::helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_netns_cookie};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockAddrContext;
use shunt_common::{Clients, Heartbeat, LeftAlone, capacity};

use crate::choose::Pass;

#[btf_map(name = "left_alone")]
static LEFT_ALONE: HashMap<
    u64,
    LeftAlone,
    { capacity::LEFT_ALONE },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// Cookie of the host's network namespace; 0 if it is not known.
#[unsafe(no_mangle)]
static HOST_NETNS: Global<u64> = Global::new(0);

/// Pods are at level 2 to 4 below the root, in nested clusters at up to 7.
const MAX_LEVEL: i32 = 16;

/// Lets the calls of those pass that are to be left alone.
#[inline(always)]
pub(crate) fn check(ctx: &SockAddrContext, heartbeat: &Heartbeat) -> Result<(), Pass> {
    if heartbeat.leaves_alone(Clients::HOST) && is_of_host(netns_cookie(ctx)) {
        return Err(Pass::Host);
    }
    if heartbeat.leaves_alone(Clients::SOME_PODS) && is_pod_left_alone() {
        return Err(Pass::OptedOut);
    }
    Ok(())
}

/// Cookie of the network namespace of the socket.
#[inline(always)]
pub(crate) fn netns_cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) }
}

/// Whether this is the namespace that the host's processes share.
#[inline(always)]
pub(crate) fn is_of_host(netns_cookie: u64) -> bool {
    netns_cookie == HOST_NETNS.load()
}

#[inline(always)]
fn is_pod_left_alone() -> bool {
    for level in 1..MAX_LEVEL {
        // SAFETY: the helper takes a number and returns one, which is 0 below
        // the task's own cgroup.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 {
            return false;
        }
        // SAFETY: the value is not read.
        if unsafe { LEFT_ALONE.get(id) }.is_some() {
            return true;
        }
    }
    false
}
