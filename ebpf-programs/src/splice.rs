//! sk_msg: puts what a member sends straight on its peer's receive queue.
//!
//! The peer reads redirected bytes before those in its TCP queue. So bytes may
//! be redirected only while the peer has read all that was ever sent by TCP:
//! `peer.copied_seq == own.write_seq`. Bytes that go by TCP while redirected
//! ones are unread are read after them, in order; the next redirection waits
//! until they have been read.
//!
//! Redirected bytes escape the receive window, so that a slow reader would take
//! memory without bound. Once it holds more than [`CREDIT_BYTES`], TCP carries
//! the rest, and its window slows the writer.

use aya_ebpf::Global;
use aya_ebpf::bindings::{BPF_F_INGRESS, bpf_sock, sk_action};
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::bpf_skc_to_tcp_sock;
use aya_ebpf::macros::sk_msg;
use aya_ebpf::programs::SkMsgContext;
use shunt_common::Counter;

use crate::count::count;
use crate::membership::SPLICE;
use crate::pairing::{SOCKET_KEYS, SOCKETS};
use crate::storage;

/// Offsets in the kernel's `struct tcp_sock`, in bytes, from the kernel's BTF.
#[unsafe(no_mangle)]
static OFFSET_WRITE_SEQ: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static OFFSET_COPIED_SEQ: Global<u32> = Global::new(0);
/// `sk_backlog.rmem_alloc`, better known as `sk_rmem_alloc`.
#[unsafe(no_mangle)]
static OFFSET_RMEM_ALLOC: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static OFFSET_SHUTDOWN: Global<u32> = Global::new(0);

/// How much the peer may hold unread before TCP takes over, bytes of its
/// `sk_rmem_alloc`, which counts the redirected ones too since Linux 6.13
/// (d888b7af7c14). One message may go beyond it.
const CREDIT_BYTES: u32 = 64 * 1024;

/// `SEND_SHUTDOWN` in `include/net/sock.h`.
const SEND_SHUTDOWN: u8 = 2;

/// Why a message goes by TCP.
enum ByTcp {
    NoPeer,
    Order,
    Credit,
}

#[sk_msg]
pub(crate) fn redirect(ctx: SkMsgContext) -> u32 {
    count(match try_splice(&ctx) {
        Ok(()) => Counter::MessagesSpliced,
        Err(ByTcp::NoPeer) => Counter::MessagesNoPeer,
        Err(ByTcp::Order) => Counter::MessagesOrder,
        Err(ByTcp::Credit) => Counter::MessagesCredit,
    });
    // Always: the helper has noted where the message goes, and SK_DROP would
    // fail the send with EACCES.
    sk_action::SK_PASS
}

#[inline(always)]
fn try_splice(ctx: &SkMsgContext) -> Result<(), ByTcp> {
    // SAFETY: the kernel passes a valid context.
    let socket = unsafe { (*ctx.msg).__bindgen_anon_3.sk };
    if socket.is_null() {
        return Err(ByTcp::NoPeer);
    }
    // SAFETY: the socket is the context's.
    let key = unsafe { storage::get(&SOCKET_KEYS, socket) }.ok_or(ByTcp::NoPeer)?;
    // SAFETY: the storage lives as long as the socket.
    let key = unsafe { *key };
    let entry = SOCKETS.get_ptr_mut(key).ok_or(ByTcp::NoPeer)?;
    // SAFETY: the entry is removed when this socket closes, which its sender
    // now holds off; only its sender changes the counts.
    let entry = unsafe { &mut *entry };
    if !entry.is_paired() {
        return Err(ByTcp::NoPeer);
    }
    check_order_and_credit(socket, entry.peer_tcp_sock)?;
    // What was read of the peer above is true only if the peer is alive, and
    // that it is found under a key that no other socket can have proves it.
    let redirected =
        SPLICE.redirect_msg(ctx, key.peer(entry.peer_netns_cookie), BPF_F_INGRESS.into());
    if redirected != i64::from(sk_action::SK_PASS) {
        return Err(ByTcp::NoPeer);
    }
    entry.messages += 1;
    entry.bytes += u64::from(ctx.size());
    Ok(())
}

#[inline(always)]
fn check_order_and_credit(socket: *mut bpf_sock, peer: u64) -> Result<(), ByTcp> {
    // SAFETY: the socket is the context's and not null.
    let own = unsafe { bpf_skc_to_tcp_sock(socket.cast()) };
    if own.is_null() {
        return Err(ByTcp::NoPeer);
    }
    let own = own.cast_const().cast::<u8>();
    // SAFETY: the verifier checks the access against the kernel's BTF.
    let shutdown = unsafe { own.add(OFFSET_SHUTDOWN.load() as usize).read_volatile() };
    if shutdown & SEND_SHUTDOWN != 0 {
        // TCP answers with EPIPE; a redirection would not.
        return Err(ByTcp::NoPeer);
    }
    // SAFETY: as above.
    let write_seq = unsafe {
        own.add(OFFSET_WRITE_SEQ.load() as usize)
            .cast::<u32>()
            .read_volatile()
    };
    if read_peer(peer, OFFSET_COPIED_SEQ.load())? != write_seq {
        return Err(ByTcp::Order);
    }
    if read_peer(peer, OFFSET_RMEM_ALLOC.load())? > CREDIT_BYTES {
        return Err(ByTcp::Credit);
    }
    Ok(())
}

/// A 32-bit field of the peer's `struct tcp_sock`.
#[inline(always)]
fn read_peer(peer: u64, offset: u32) -> Result<u32, ByTcp> {
    let field = (peer + u64::from(offset)) as *const u32;
    // SAFETY: the helper checks the address and fails rather than faults.
    unsafe { bpf_probe_read_kernel(field) }.map_err(|_| ByTcp::NoPeer)
}
