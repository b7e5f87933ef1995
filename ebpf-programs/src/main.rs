//! The BPF programs of shunt, one module for each hook.
//!
//! Invariant: a hook fails open. Whatever goes wrong inside one, the call goes
//! on as it would without shunt, and a [`Counter`](shunt_common::Counter) says
//! why. The choice is made in one `match` per hook and nowhere else.
//!
//! Start at [`connect`]; the splice is [`pairing`] → [`manage`] → [`splice`].
#![no_std]
#![no_main]
// For atomic addition, see `load`: there is no stable way to it on this target.
#![feature(asm_experimental_arch)]

mod connect;
mod datagram;
mod health;
mod peer_name;
mod release;
mod sockops;

mod affinity;
mod choose;
mod client;
mod load;
mod search;

mod events;
mod kernel;
mod manage;
mod marks;
mod pairing;
mod splice;
mod splice_calls;

mod count;
mod sock_addr;
mod storage;

/// Some helpers are only for programs under a licence that the kernel takes as
/// compatible with the GPL; "Dual MIT/GPL" is one of them
/// (`include/linux/license.h`).
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier rejects a program that can get here.
    loop {}
}
