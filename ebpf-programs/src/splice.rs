//! sk_msg: puts what a member sends straight on its peer's receive queue.
//!
//! The peer reads redirected bytes before those in its TCP queue. So a direction
//! starts to redirect only when the peer has read all that was ever sent by TCP
//! (`peer.copied_seq == own.write_seq`), and from then on redirects every
//! message. When it may not any more, it is latched: the rest goes by TCP, and
//! the agent is told, since a reader may not notice TCP bytes that lie behind
//! redirected ones (an edge-triggered one takes a short read for the end). The
//! agent takes the pair out of the map and wakes such a reader.
//!
//! Redirected bytes escape the receive window, so that a slow reader would take
//! memory without bound: the peer may hold `queue_bytes` unread.
//!
//! The program runs under the lock of the sending socket, so that what it writes
//! to its own [`End`] has one writer.

use aya_ebpf::bindings::{BPF_F_INGRESS, sk_action};
use aya_ebpf::btf_maps::SockHash;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::macros::{btf_map, sk_msg};
use aya_ebpf::programs::SkMsgContext;
use shunt_common::{
    CONFIRMED, Counter, End, EndKey, EventKind, Mark, Role, SpliceReason, Stage, capacity,
};

use crate::count::count;
use crate::kernel::{TcpSock, Unreadable};
use crate::pairing::{ENDS, PAIRS, config};
use crate::{events, storage};

#[btf_map(name = "splice")]
pub(crate) static SPLICE: SockHash<EndKey, { capacity::SPLICE }> = SockHash::new();

/// `SEND_SHUTDOWN` in `include/net/sock.h`.
const SEND_SHUTDOWN: u8 = 2;

/// So many messages without one of the peer make a stream.
const STREAM_MESSAGES: u32 = 16;
/// Streams of smaller messages are faster by TCP, which puts them together,
/// unless the application has told it not to; bytes a message.
const SMALL_BYTES: u64 = 512;
/// Streams of larger messages are, whatever it was told; bytes a message.
const LARGE_BYTES: u64 = 128 * 1024;

/// Why a message goes by TCP.
enum ByTcp {
    /// As all of this direction, for now or for good.
    Pass,
    /// This one and all that follow.
    Latch(SpliceReason),
}

impl From<Unreadable> for ByTcp {
    #[inline(always)]
    fn from(_: Unreadable) -> Self {
        Self::Latch(SpliceReason::PeerGone)
    }
}

#[sk_msg]
pub(crate) fn redirect(ctx: SkMsgContext) -> u32 {
    try_redirect(&ctx);
    // Always: the helper has noted where the message goes, and SK_DROP would
    // fail the send with EACCES.
    sk_action::SK_PASS
}

#[inline(always)]
fn try_redirect(ctx: &SkMsgContext) -> Option<()> {
    // SAFETY: the kernel passes a valid context.
    let socket = unsafe { (*ctx.msg).__bindgen_anon_3.sk };
    if socket.is_null() {
        return None;
    }
    // SAFETY: the socket is the context's.
    let key = unsafe { storage::get(&ENDS, socket) }?;
    // SAFETY: the storage lives as long as the socket.
    let key = unsafe { *key };
    let pair = PAIRS.get_ptr_mut(key.pair)?;
    // SAFETY: the map's memory, which is kept until the program ends; of this
    // end's fields only this program writes those that it changes.
    let pair = unsafe { &mut *pair };
    let marks = pair.marks.all();
    let (own, peer) = match key.role() {
        Role::Client => (&mut pair.client, &pair.server),
        Role::Server => (&mut pair.server, &pair.client),
    };
    if own.tcp_sock != socket as u64 {
        // The peer has just closed, and the memory is another pair's by now.
        return None;
    }
    let size = ctx.size();
    note_send(own, peer, size);
    let result = check(own, peer, marks, size).and_then(|()| {
        let redirected = SPLICE.redirect_msg(ctx, key.peer(), BPF_F_INGRESS.into());
        // What was read of the peer is true only if it was there, and that it is
        // found under a key that no other socket can have proves it.
        if redirected == i64::from(sk_action::SK_PASS) {
            Ok(())
        } else if own.stage == Stage::Engaged as u8 {
            Err(ByTcp::Latch(SpliceReason::PeerGone))
        } else {
            Err(ByTcp::Pass)
        }
    });
    match result {
        Ok(()) => {
            own.stage = Stage::Engaged as u8;
            own.messages += 1;
            own.bytes += u64::from(size);
            count(Counter::MessagesSpliced);
        }
        Err(by_tcp) => {
            own.messages_tcp += 1;
            count(Counter::MessagesTcp);
            if let ByTcp::Latch(reason) = by_tcp {
                own.reason = reason as u8;
                own.stage = Stage::Latched as u8;
                count(Counter::Latches);
                events::tell(key.pair, EventKind::Latched, reason);
            }
        }
    }
    Some(())
}

/// Counts the message, also towards the stream that it may be a part of.
#[inline(always)]
fn note_send(own: &mut End, peer: &End, size: u32) {
    own.tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    own.sends = own.sends.wrapping_add(1);
    let peer_sends = peer.sends;
    if own.run_peer_sends != peer_sends {
        own.run_peer_sends = peer_sends;
        own.run = 0;
        own.run_bytes = 0;
    }
    own.run = own.run.saturating_add(1);
    own.run_bytes = own.run_bytes.saturating_add(size);
}

#[inline(always)]
fn check(own: &End, peer: &End, marks: Mark, size: u32) -> Result<(), ByTcp> {
    if own.frozen != 0 || own.is_latched() || peer.member == 0 {
        return Err(ByTcp::Pass);
    }
    if marks.is_some() {
        return Err(ByTcp::Latch(marks.reason()));
    }
    let own_sock = TcpSock::of(own);
    let peer_sock = TcpSock::of(peer);
    if own_sock.shutdown()? & SEND_SHUTDOWN != 0 {
        // TCP answers with EPIPE; a redirection would not.
        return Err(ByTcp::Pass);
    }
    if own_sock.write_seq()? != peer_sock.copied_seq()? {
        return Err(
            if own.stage == Stage::Engaged as u8 || own.member == CONFIRMED {
                ByTcp::Latch(SpliceReason::Order)
            } else {
                ByTcp::Pass
            },
        );
    }
    check_stream(own, own_sock)?;
    if !peer_sock.file()?.is_non_blocking()? {
        return Err(ByTcp::Latch(SpliceReason::Blocking));
    }
    if u64::from(peer_sock.unread_bytes()?) + u64::from(size) > u64::from(config().queue_bytes) {
        return Err(ByTcp::Latch(SpliceReason::SlowReader));
    }
    Ok(())
}

/// Streams of messages that TCP carries better.
#[inline(always)]
fn check_stream(own: &End, own_sock: TcpSock) -> Result<(), ByTcp> {
    if own.run < STREAM_MESSAGES {
        return Ok(());
    }
    let (bytes, messages) = (u64::from(own.run_bytes), u64::from(own.run));
    if bytes > messages * LARGE_BYTES {
        return Err(ByTcp::Latch(SpliceReason::LargeWrites));
    }
    if bytes < messages * SMALL_BYTES && own_sock.has_nagle()? {
        return Err(ByTcp::Latch(SpliceReason::SmallWrites));
    }
    Ok(())
}
