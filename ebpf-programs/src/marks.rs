//! setsockopt: what a process asks of a socket that only TCP can do.
//!
//! `manage` sees in the socket itself what was asked before it is promoted. This
//! hook closes the window after that: it leaves a [`Mark`] in the pair, by which
//! sk_msg gives up, and tells the agent, who takes the pair back to TCP. An option
//! that is taken back takes its mark along, so that the pair may be promoted again.
//!
//! The kernel skips the hook for system calls of 32-bit processes
//! (`do_sock_setsockopt` in `net/socket.c`).

use aya_ebpf::bindings::{bpf_sock, bpf_sockopt};
use aya_ebpf::macros::cgroup_sockopt;
use aya_ebpf::programs::SockoptContext;
use shunt_common::{Mark, Role};

use crate::pairing::{ENDS, PAIRS};
use crate::{events, storage};

const SOL_SOCKET: i32 = 1;
const SOL_TCP: i32 = 6;

/// What a hook returns to let the call go on.
const PROCEED: i32 = 1;

#[cgroup_sockopt(setsockopt)]
pub(crate) fn setsockopt(ctx: SockoptContext) -> i32 {
    note(ctx.sockopt);
    keep_value(ctx.sockopt);
    PROCEED
}

/// Almost all calls are of no interest, and end after a few comparisons.
#[inline(always)]
fn note(ctx: *mut bpf_sockopt) -> Option<()> {
    let value = value(ctx)?;
    // SAFETY: the kernel passes a valid context.
    let (level, name, socket) = unsafe {
        let context = &*ctx;
        (context.level, context.optname, context.__bindgen_anon_1.sk)
    };
    let (mark, gets) = Mark::of_option(level, name, value)?;
    if socket.is_null() {
        return None;
    }
    set(socket, mark, gets)
}

/// The first four bytes of the option's value; the kernel's copy of it has sixteen
/// at least.
#[inline(always)]
fn value(ctx: *mut bpf_sockopt) -> Option<i32> {
    // SAFETY: the kernel passes a valid context.
    let (start, end): (*const i32, *const i32) = unsafe {
        let context = &*ctx;
        (
            context.__bindgen_anon_2.optval.cast(),
            context.__bindgen_anon_3.optval_end.cast(),
        )
    };
    if start.wrapping_add(1) > end {
        return None;
    }
    // SAFETY: it was just held against the end; the verifier checks it again.
    Some(unsafe { start.read_volatile() })
}

#[inline(always)]
fn set(socket: *mut bpf_sock, mark: Mark, gets: bool) -> Option<()> {
    // SAFETY: the socket is the context's.
    let key = unsafe { storage::get(&ENDS, socket) }?;
    // SAFETY: the storage lives as long as the socket.
    let key = unsafe { *key };
    let pair = PAIRS.get_ptr_mut(key.pair)?;
    // SAFETY: the map's memory, which is kept until the program ends; of its fields
    // only this program writes those that it changes, under the socket's lock.
    let pair = unsafe { &mut *pair };
    let is_member = pair.client.member != 0 || pair.server.member != 0;
    let (end, marks) = match key.role() {
        Role::Client => (&pair.client, &mut pair.marks.client_options),
        Role::Server => (&pair.server, &mut pair.marks.server_options),
    };
    if end.tcp_sock != socket as u64 {
        // The peer has just closed, and the memory is another pair's by now.
        return None;
    }
    let before = *marks;
    *marks = if gets {
        before | mark.0
    } else {
        before & !mark.0
    };
    if *marks & !before != 0 {
        events::tell_of_mark(key.pair, mark, is_member);
    }
    Some(())
}

/// Lets the kernel take the value from where it would without this hook. It would
/// take the hook's copy otherwise, which has a page at most, and of which netfilter
/// and others have read more than there is (until "netfilter: validate user input
/// for expected length", Linux 6.9). A length of 0 stands for the caller's own value
/// (`__cgroup_bpf_run_filter_setsockopt` in `kernel/bpf/cgroup.c`).
///
/// A hook that somebody has attached to a cgroup below runs earlier, and may have
/// put another value there. That can't be told from an untouched one; for options
/// of sockets and TCP, which are what such hooks are written for, it is kept.
#[inline(always)]
fn keep_value(ctx: *mut bpf_sockopt) {
    // SAFETY: the kernel passes a valid context.
    let context = unsafe { &mut *ctx };
    let is_longer = context.optlen > PAGE_BYTES;
    let is_checked = context.level == SOL_SOCKET || context.level == SOL_TCP;
    // Less than 0 means that another hook has answered the call.
    if context.optlen > 0 && (is_longer || !is_checked) {
        context.optlen = 0;
    }
}

/// The least that a page has.
const PAGE_BYTES: i32 = 4096;
