//! sockops: watches TCP sockets come up and go.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB,
    BPF_SOCK_OPS_STATE_CB_FLAG, BPF_TCP_CLOSE,
};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use shunt_common::Counter;

use crate::count::count;
use crate::{membership, pairing};

#[sock_ops]
pub(crate) fn sock_ops(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => adopt(&ctx, pairing::register_client(&ctx)),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => adopt(&ctx, pairing::register_server(&ctx)),
        BPF_SOCK_OPS_STATE_CB if ctx.arg(1) == BPF_TCP_CLOSE => pairing::forget(&ctx),
        _ => {}
    }
    // The return value of a sockops program only matters to the tests of other
    // callbacks; 1 is "handled".
    1
}

/// Puts a socket that is to be spliced where sk_msg sees it.
#[inline(always)]
fn adopt(ctx: &SockOpsContext, registered: pairing::Outcome) {
    let key = match registered {
        Ok(Some(key)) => key,
        Ok(None) => return,
        Err(pairing::Failed) => return count(Counter::SocketsFailed),
    };
    // Without the state callback the registration would outlive the socket.
    let flags = ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG;
    let watched = ctx.set_cb_flags(flags.cast_signed()).is_ok();
    if watched && membership::insert(ctx, key).is_ok() {
        count(Counter::SocketsRegistered);
    } else {
        pairing::forget(ctx);
        count(Counter::SocketsFailed);
    }
}
