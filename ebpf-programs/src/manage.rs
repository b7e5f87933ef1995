//! manage: what the agent does with pairs. It runs when the agent asks for it
//! (`BPF_PROG_TEST_RUN`) and sees no packet: its skb holds the agent's
//! [`Task`]s, one for each run, and takes the answers.
//!
//! It is a program of the traffic control, since those may look sockets up, in
//! any namespace, and put them into a socket map (`may_update_sockmap` in
//! `kernel/bpf/verifier.c`).
//!
//! A socket may leave the map when nothing is lost with it: the map's end of a
//! socket takes its unread redirected bytes along (`sk_psock_drop` in
//! `net/core/skmsg.c`). So both directions are frozen first. Then no sender is
//! inside the peer's socket any more who may have decided before, the list of
//! redirected bytes is empty, and no system call is at work on the socket.

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::bindings::{BPF_NOEXIST, bpf_sock, bpf_sock_tuple};
use aya_ebpf::helpers::generated::{
    bpf_map_delete_elem, bpf_map_update_elem, bpf_sk_release, bpf_skb_load_bytes,
    bpf_skb_store_bytes, bpf_skc_lookup_tcp,
};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use shunt_common::{
    CONFIRMED, Counter, End, EndKey, EndState, HEADER_BYTES, MAX_TASKS, Operation, Pair, Role,
    SocketKey, SpliceReason, Stage, Task, address::is_mapped,
};

use crate::count::count;
use crate::kernel::{TcpSock, Unreadable};
use crate::pairing::PAIRS;
use crate::splice::SPLICE;
use crate::splice_calls::is_splicer;

/// `TCP_ESTABLISHED` in `include/net/tcp_states.h`.
const ESTABLISHED: u8 = 1;
const TASK_BYTES: u32 = size_of::<Task>() as u32;

#[classifier]
pub(crate) fn manage(ctx: TcContext) -> i32 {
    let skb = ctx.skb.skb;
    // Each run takes the next task: what a program writes here stays for the
    // next run of the same call.
    // SAFETY: the kernel passes a valid context.
    let index = unsafe { (*skb).cb[0] };
    // SAFETY: as above.
    unsafe { (*skb).cb[0] = index + 1 };
    if index as usize >= MAX_TASKS {
        return 0;
    }
    let offset = HEADER_BYTES as u32 + index * TASK_BYTES;
    let mut task = Task {
        pair: 0,
        ends: [EMPTY, EMPTY],
        operation: 0,
        verdict: 0,
    };
    let bytes: *mut c_void = ptr::from_mut(&mut task).cast();
    // SAFETY: the helper fills exactly the task.
    if unsafe { bpf_skb_load_bytes(skb.cast(), offset, bytes, TASK_BYTES) } != 0 {
        return 0;
    }
    do_task(&ctx, &mut task);
    // SAFETY: the helper reads exactly the task.
    unsafe { bpf_skb_store_bytes(skb, offset, bytes, TASK_BYTES, 0) };
    0
}

const EMPTY: EndState = EndState {
    inode: 0,
    netns_id: 0,
    copied_seq: 0,
    received_seq: 0,
    write_seq: 0,
    segments: 0,
    unread_bytes: 0,
    tgid: 0,
    flags: 0,
};

#[inline(always)]
fn do_task(ctx: &TcContext, task: &mut Task) {
    task.verdict = SpliceReason::Gone as u32;
    let Some(pair) = PAIRS.get_ptr_mut(task.pair) else {
        return;
    };
    // SAFETY: the map's memory, which is kept until the program ends; of the
    // fields that are changed here nobody else writes any, see `Pair`.
    let pair = unsafe { &mut *pair };
    if !pair.is_complete() {
        return;
    }
    if task.operation == Operation::Freeze as u32 {
        pair.client.frozen = 1;
        pair.server.frozen = 1;
    }
    if task.operation == Operation::Confirm as u32 {
        for end in [&mut pair.client, &mut pair.server] {
            if end.member != 0 {
                end.member = CONFIRMED;
            }
        }
    }
    let mut verdict = look(ctx, pair, Role::Client, task);
    let of_server = look(ctx, pair, Role::Server, task);
    if verdict == SpliceReason::Eligible {
        verdict = of_server;
    }
    let marks = pair.marks.all();
    if verdict == SpliceReason::Eligible && marks.is_some() {
        verdict = marks.reason();
    }
    if task.operation == Operation::Promote as u32 && verdict == SpliceReason::Eligible {
        verdict = promote(ctx, task.pair, pair, task);
    }
    if task.operation == Operation::Release as u32 {
        // Of each end it must be known that no sender was inside its peer before
        // it is known that nothing waits to be read.
        let client_before = task.ends[0];
        look(ctx, pair, Role::Client, task);
        release(task.pair, pair, task, &client_before);
    }
    if task.operation <= Operation::Promote as u32 {
        pair.verdict = verdict as u8;
    }
    task.verdict = verdict as u32;
}

/// Sees one end, and says what is against its promotion.
#[inline(always)]
fn look(ctx: &TcContext, pair: &Pair, role: Role, task: &mut Task) -> SpliceReason {
    let (end, state) = match role {
        Role::Client => (&pair.client, &mut task.ends[0]),
        Role::Server => (&pair.server, &mut task.ends[1]),
    };
    state.tgid = end.tgid;
    state.flags = flags_of(end);
    let Some(socket) = find(ctx, pair, role, state.netns_id) else {
        return SpliceReason::Gone;
    };
    let verdict = if is_same(socket, end) {
        state.flags |= EndState::FOUND;
        inspect(TcpSock::of(end), end, state).unwrap_or(SpliceReason::Closing)
    } else {
        SpliceReason::Gone
    };
    // SAFETY: the reference is `find`'s.
    unsafe { bpf_sk_release(socket.cast()) };
    verdict
}

#[inline(always)]
fn flags_of(end: &End) -> u32 {
    let mut flags = 0;
    if end.member != 0 {
        flags |= EndState::MEMBER;
    }
    if end.stage == Stage::Engaged as u8 {
        flags |= EndState::ENGAGED;
    }
    if end.stage == Stage::Latched as u8 {
        flags |= EndState::LATCHED;
    }
    flags
}

#[inline(always)]
fn inspect(socket: TcpSock, end: &End, state: &mut EndState) -> Result<SpliceReason, Unreadable> {
    state.copied_seq = socket.copied_seq()?;
    state.received_seq = socket.received_seq()?;
    state.write_seq = socket.write_seq()?;
    state.segments = socket.segments()?;
    state.unread_bytes = socket.unread_bytes()?;
    let psock = socket.psock()?;
    if let Some(psock) = psock {
        // In this order: who was inside may have added to the list.
        if psock.is_in_use()? {
            state.flags |= EndState::IN_USE;
        }
        if psock.has_unread()? {
            state.flags |= EndState::REDIRECTED_UNREAD;
        }
    }
    let file = socket.file()?;
    state.inode = file.inode()?;
    Ok(
        if socket.state()? != ESTABLISHED || socket.shutdown()? != 0 {
            SpliceReason::Closing
        } else if psock.is_some() && end.member == 0 {
            SpliceReason::OtherMap
        } else if socket.is_mptcp()? {
            SpliceReason::Mptcp
        } else if socket.has_upper_layer()? {
            SpliceReason::UpperLayer
        } else if socket.low_water()? > 1 {
            SpliceReason::LowWater
        } else if socket.is_zero_copy()? {
            SpliceReason::ZeroCopy
        } else if socket.has_timestamps()? {
            SpliceReason::Timestamps
        } else if socket.has_peek_offset()? {
            SpliceReason::Marked
        } else if is_splicer(socket.cgroup_id().unwrap_or(0)) {
            SpliceReason::SpliceCall
        } else if !file.is_non_blocking()? {
            SpliceReason::Blocking
        } else {
            SpliceReason::Eligible
        },
    )
}

/// Puts both sockets into the map. If only the first gets in, it is taken out
/// again as any other.
#[inline(always)]
fn promote(ctx: &TcContext, key: u64, pair: &mut Pair, task: &mut Task) -> SpliceReason {
    if pair.client.member != 0 || pair.server.member != 0 {
        return SpliceReason::Refused;
    }
    // sk_msg does not run for what is no member.
    for end in [&mut pair.client, &mut pair.server] {
        end.stage = Stage::Idle as u8;
        end.reason = 0;
        end.frozen = 0;
        end.run = 0;
        end.run_bytes = 0;
    }
    if !insert(ctx, key, pair, Role::Client, task.ends[0].netns_id) {
        return SpliceReason::Refused;
    }
    pair.client.member = 1;
    task.ends[0].flags |= EndState::MEMBER;
    if !insert(ctx, key, pair, Role::Server, task.ends[1].netns_id) {
        pair.client.frozen = 1;
        return SpliceReason::Refused;
    }
    pair.server.member = 1;
    task.ends[1].flags |= EndState::MEMBER;
    pair.promotions = pair.promotions.saturating_add(1);
    count(Counter::Promotions);
    SpliceReason::Eligible
}

#[inline(always)]
fn insert(ctx: &TcContext, key: u64, pair: &Pair, role: Role, netns_id: i32) -> bool {
    let Some(socket) = find(ctx, pair, role, netns_id) else {
        return false;
    };
    let end = match role {
        Role::Client => &pair.client,
        Role::Server => &pair.server,
    };
    let mut result = -1;
    if is_same(socket, end) {
        let key = EndKey::new(key, role);
        // Two connections never share a key, and replacing an entry has raced
        // with close in the kernel (CVE-2024-56664): so never replace.
        // SAFETY: the helper reads the key, and takes the socket, of which it
        // keeps a reference of its own.
        result = unsafe {
            bpf_map_update_elem(
                splice_map(),
                ptr::from_ref(&key).cast(),
                socket.cast_const().cast(),
                BPF_NOEXIST.into(),
            )
        };
    }
    // SAFETY: the reference is `find`'s.
    unsafe { bpf_sk_release(socket.cast()) };
    result == 0
}

/// Takes out each end that nothing can be on its way to.
#[inline(always)]
fn release(key: u64, pair: &mut Pair, task: &mut Task, client_before: &EndState) {
    let [client, server] = &mut task.ends;
    if may_go(client, server) && remove(EndKey::new(key, Role::Client)) {
        pair.client.member = 0;
    }
    if may_go(server, client_before) && remove(EndKey::new(key, Role::Server)) {
        pair.server.member = 0;
    }
    let was_member = (client.flags | server.flags) & EndState::MEMBER != 0;
    if pair.client.member == 0 {
        client.flags &= !EndState::MEMBER;
    }
    if pair.server.member == 0 {
        server.flags &= !EndState::MEMBER;
    }
    if was_member && pair.client.member == 0 && pair.server.member == 0 {
        count(Counter::Demotions);
    }
}

#[inline(always)]
fn may_go(end: &EndState, peer: &EndState) -> bool {
    let busy = EndState::IN_USE | EndState::REDIRECTED_UNREAD;
    end.has(EndState::FOUND | EndState::MEMBER)
        && end.flags & busy == 0
        && !peer.has(EndState::IN_USE)
}

#[inline(always)]
fn remove(key: EndKey) -> bool {
    // SAFETY: the helper only reads the key.
    unsafe { bpf_map_delete_elem(splice_map(), ptr::from_ref(&key).cast()) == 0 }
}

#[inline(always)]
fn splice_map() -> *mut c_void {
    ptr::from_ref(&SPLICE).cast_mut().cast()
}

/// The socket that has these addresses now, with a reference to it.
#[inline(always)]
fn find(ctx: &TcContext, pair: &Pair, role: Role, netns_id: i32) -> Option<*mut bpf_sock> {
    let key = match role {
        Role::Client => *pair.key(),
        Role::Server => pair.key().peer(pair.server.netns_cookie),
    };
    let mut tuple = [0_u32; 9];
    let size = fill(&mut tuple, &key);
    let tuple: *mut bpf_sock_tuple = ptr::from_mut(&mut tuple).cast();
    // The sign of the id must survive: it is one of 32 bits.
    let netns = i64::from(netns_id).cast_unsigned();
    // SAFETY: the helper reads `size` bytes of the tuple.
    let socket = unsafe {
        if size == V4_BYTES {
            bpf_skc_lookup_tcp(ctx.skb.skb.cast(), tuple, V4_BYTES, netns, 0)
        } else {
            bpf_skc_lookup_tcp(ctx.skb.skb.cast(), tuple, V6_BYTES, netns, 0)
        }
    };
    (!socket.is_null()).then_some(socket)
}

/// Sizes of `struct bpf_sock_tuple`'s two forms, by which the helper tells the
/// family.
const V4_BYTES: u32 = 12;
const V6_BYTES: u32 = 36;

/// As a packet to this socket has them: the peer's address first.
#[inline(always)]
fn fill(tuple: &mut [u32; 9], key: &SocketKey) -> u32 {
    let [from, to] = [words(key.remote()), words(key.local())];
    let ports = key.ports();
    if is_mapped(key.local()) {
        *tuple = [from[3], to[3], ports, 0, 0, 0, 0, 0, 0];
        V4_BYTES
    } else {
        *tuple = [
            from[0], from[1], from[2], from[3], to[0], to[1], to[2], to[3], ports,
        ];
        V6_BYTES
    }
}

#[inline(always)]
fn words(address: &[u8; 16]) -> [u32; 4] {
    let word = |at: usize| {
        u32::from_ne_bytes([
            address[at],
            address[at + 1],
            address[at + 2],
            address[at + 3],
        ])
    };
    [word(0), word(4), word(8), word(12)]
}

/// Whether this is the very socket that was registered, and not a later one with
/// its addresses.
#[inline(always)]
fn is_same(socket: *mut bpf_sock, end: &End) -> bool {
    socket as u64 == end.tcp_sock
}
