//! sockops: watches TCP sockets come up and go.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB,
    BPF_SOCK_OPS_STATE_CB_FLAG, BPF_TCP_CLOSE,
};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use shunt_common::Counter;

use crate::count::count;
use crate::pairing;

#[sock_ops]
pub(crate) fn sock_ops(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => watch(&ctx, pairing::register_client(&ctx)),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => watch(&ctx, pairing::register_server(&ctx)),
        BPF_SOCK_OPS_STATE_CB if ctx.arg(1) == BPF_TCP_CLOSE => pairing::forget(&ctx),
        _ => {}
    }
    // The return value of a sockops program only matters to the tests of other
    // callbacks; 1 is "handled".
    1
}

/// Lets the end of a registered socket be seen: without the state callback its
/// registration would outlive it.
#[inline(always)]
fn watch(ctx: &SockOpsContext, registered: Result<bool, pairing::Failed>) {
    match registered {
        Ok(false) => {}
        Ok(true) => {
            let flags = ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG;
            if ctx.set_cb_flags(flags.cast_signed()).is_err() {
                pairing::forget(ctx);
                count(Counter::PairsFailed);
            }
        }
        Err(pairing::Failed) => count(Counter::PairsFailed),
    }
}
