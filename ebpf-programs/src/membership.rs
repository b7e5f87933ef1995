//! Puts sockets where sk_msg sees what they send, and where it can redirect to.
//!
//! A socket is inserted when it is established and stays until it closes, when
//! the kernel takes it out. Membership alone changes how a socket behaves (a
//! blocking read can end early, FIONREAD shows only redirected bytes), so that
//! only pairs that asked for it are inserted, and never taken out while open:
//! that would drop unread bytes (`sk_psock_drop` in `net/core/skmsg.c`).

use core::ptr;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::btf_maps::SockHash;
use aya_ebpf::helpers::generated::bpf_sock_hash_update;
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockOpsContext;
use shunt_common::{SocketKey, capacity};

#[btf_map(name = "splice")]
pub(crate) static SPLICE: SockHash<SocketKey, { capacity::SOCKETS }> = SockHash::new();

/// Inserts the context's socket; the errno if the kernel refuses (a socket with
/// an upper layer protocol, MPTCP, a full map).
#[inline(always)]
pub(crate) fn insert(ctx: &SockOpsContext, key: &'static SocketKey) -> Result<(), i64> {
    let map = ptr::from_ref(&SPLICE).cast_mut().cast();
    let key = ptr::from_ref(key).cast_mut().cast();
    // Two connections never share a key, and replacing an entry has raced with
    // close in the kernel (CVE-2024-56664): so never replace.
    // SAFETY: the kernel passes a valid context; the helper only reads the key.
    let result = unsafe { bpf_sock_hash_update(ctx.ops, map, key, BPF_NOEXIST.into()) };
    if result == 0 { Ok(()) } else { Err(result) }
}
