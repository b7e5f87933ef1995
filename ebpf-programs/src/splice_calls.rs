//! splice(2): reads TCP's own queue only (`tcp_splice_read` in `net/ipv4/tcp.c`), and
//! so past redirected bytes, which would wait for ever.
//!
//! There is no hook of cgroups for it. Where the kernel lets programs trace its
//! functions, `tcp_splice_read` tells the very socket and costs nothing else. Where
//! it does not, `sys_enter` sees all system calls of the node. The agent attaches
//! one of the two.
//!
//! Both note the caller's cgroup, which is its container: whoever splices one
//! connection may begin to splice another that is promoted already. A process that
//! has a socket is not known to the kernel before it uses it, its cgroup is.

use aya_ebpf::btf_maps::LruHashMap;
use aya_ebpf::helpers::generated::bpf_get_current_cgroup_id;
use aya_ebpf::macros::{btf_map, fentry, raw_tracepoint};
use aya_ebpf::programs::{FEntryContext, RawTracePointContext};
use aya_ebpf::{EbpfContext as _, Global};
use shunt_common::{EventKind, Mark, Role, SpliceReason, capacity};

use crate::choose::now_ns;
use crate::kernel::{File, Registers};
use crate::pairing::{ENDS, PAIRS};
use crate::{events, kernel, storage};

/// Id of a cgroup → when it was seen first, ns since boot.
#[btf_map(name = "splicers")]
static SPLICERS: LruHashMap<u64, u64, { capacity::SPLICERS }> = LruHashMap::new();

/// Whether splice(2) was called in a cgroup.
#[inline(always)]
pub(crate) fn is_splicer(cgroup_id: u64) -> bool {
    // SAFETY: the value is not looked at.
    unsafe { SPLICERS.get(cgroup_id) }.is_some()
}

#[fentry(function = "tcp_splice_read")]
pub(crate) fn tcp_splice_read(ctx: FEntryContext) -> i32 {
    mark_socket(&ctx);
    mark_cgroup();
    0
}

#[inline(always)]
fn mark_socket(ctx: &FEntryContext) -> Option<()> {
    // The first argument, a `struct socket *`.
    let socket: *const *const u8 = ctx.as_ptr().cast_const().cast();
    // SAFETY: the context of such a program is an array of the arguments.
    let socket = unsafe { *socket };
    // SAFETY: the verifier knows the type, and checks that there is a pointer.
    let socket = unsafe { kernel::sock_of(socket) };
    if socket.is_null() {
        return None;
    }
    // SAFETY: the verifier has followed the pointer from the argument.
    let key = unsafe { storage::get(&ENDS, socket) }?;
    // SAFETY: the storage lives as long as the socket.
    let key = unsafe { *key };
    let pair = PAIRS.get_ptr_mut(key.pair)?;
    // SAFETY: the map's memory, which is kept until the program ends; only this
    // program writes the field, and always the same.
    let pair = unsafe { &mut *pair };
    let end = match key.role() {
        Role::Client => &pair.client,
        Role::Server => &pair.server,
    };
    if end.tcp_sock != socket as u64 || pair.marks.calls != 0 {
        return None;
    }
    pair.marks.calls = Mark::SPLICE_CALL.0;
    let is_member = pair.client.member != 0 || pair.server.member != 0;
    events::tell_of_mark(key.pair, Mark::SPLICE_CALL, is_member);
    Some(())
}

/// Number of the system call on this architecture.
#[unsafe(no_mangle)]
static SYS_SPLICE: Global<u64> = Global::new(0);

/// The arguments are the registers and the number of the system call
/// (`TRACE_EVENT_SYS(sys_enter` in `include/trace/events/syscalls.h`).
#[raw_tracepoint(tracepoint = "sys_enter")]
pub(crate) fn sys_enter(ctx: RawTracePointContext) -> i32 {
    if ctx.arg::<u64>(1) == SYS_SPLICE.load() {
        let registers = Registers(ctx.arg::<u64>(0));
        let file = registers.first_argument().and_then(File::of_current);
        if file.is_ok_and(File::is_internet_stream) {
            mark_cgroup();
        }
    }
    0
}

#[inline(always)]
fn mark_cgroup() {
    // SAFETY: the helper takes nothing and returns a number.
    let cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    if is_splicer(cgroup_id) {
        return;
    }
    // The longest unused makes room.
    if SPLICERS.insert(cgroup_id, now_ns(), 0).is_ok() {
        events::tell(cgroup_id, EventKind::Splicer, SpliceReason::SpliceCall);
    }
}
