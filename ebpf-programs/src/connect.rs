//! connect4 and connect6: a ClusterIP becomes an endpoint.

use aya_ebpf::Global;
use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::helpers::generated::bpf_set_retval;
use aya_ebpf::macros::{btf_map, cgroup_sock_addr};
use aya_ebpf::programs::SockAddrContext;
use shunt_common::{Connection, Counter, SELF_CHECK_ADDRESS, SELF_CHECK_PORT, ServiceKey};

use crate::choose::{Answer, Chosen, Pass, choose, now_ns};
use crate::count::{count, count_service};
use crate::load;
use crate::sock_addr::{Address, Family, socket};
use crate::{release, storage};

#[btf_map(name = "connections")]
pub(crate) static CONNECTIONS: SkStorage<Connection> = SkStorage::new();

/// 1 if this kernel has `bpf_set_retval` for these hooks (Linux 5.18). Where it
/// has not, the verifier never sees the call, since it knows this constant.
#[unsafe(no_mangle)]
static CAN_REFUSE: Global<u8> = Global::new(0);

/// `bpf_set_retval` takes a negated errno.
const ECONNREFUSED: i32 = 111;
const SOCK_STREAM: u32 = 1;
const SOCK_DGRAM: u32 = 2;

/// What a hook returns to let the call go on.
pub(crate) const PROCEED: i32 = 1;
/// What a hook returns to fail it, with the errno of `bpf_set_retval`.
const FAIL: i32 = 0;

/// How a connect to a captured Service port ends.
enum Verdict {
    Endpoint(Chosen),
    Refuse,
    SelfCheck,
}

#[cgroup_sock_addr(connect4)]
pub(crate) fn connect4(ctx: SockAddrContext) -> i32 {
    connect(&ctx, Family::V4)
}

#[cgroup_sock_addr(connect6)]
pub(crate) fn connect6(ctx: SockAddrContext) -> i32 {
    connect(&ctx, Family::V6)
}

#[inline(always)]
fn connect(ctx: &SockAddrContext, family: Family) -> i32 {
    match try_connect(ctx, family) {
        Ok(Verdict::Endpoint(chosen)) => count_endpoint(&chosen),
        Ok(Verdict::Refuse) => return refuse(Counter::Refused),
        Ok(Verdict::SelfCheck) => return refuse(Counter::SelfCheck),
        Err(pass) => count_pass(pass),
    }
    PROCEED
}

#[inline(always)]
fn try_connect(ctx: &SockAddrContext, family: Family) -> Result<Verdict, Pass> {
    let protocol = protocol(ctx).ok_or(Pass::NotOurs)?;
    forget_connection(ctx, protocol);
    let target = family.read(ctx);
    let is_self_check = target.ip == SELF_CHECK_ADDRESS && target.port == SELF_CHECK_PORT;
    if is_self_check && protocol == ServiceKey::TCP {
        return Ok(Verdict::SelfCheck);
    }
    let key = ServiceKey::new(target.ip, target.port, protocol);
    let now_ns = now_ns();
    let Answer::Endpoint(chosen) = choose::<true>(ctx, &key, None, now_ns)? else {
        return Ok(Verdict::Refuse);
    };
    let endpoint = Address {
        ip: *chosen.slot.address(),
        port: chosen.slot.port(),
    };
    if !remember_connection(ctx, &key, &chosen, now_ns) {
        return Err(Pass::NoStorage);
    }
    family.write(ctx, &endpoint);
    count_service(&key, chosen.slot.is_local());
    Ok(Verdict::Endpoint(chosen))
}

/// TCP's or UDP's number; `None` for any other kind of socket.
#[inline(always)]
pub(crate) fn protocol(ctx: &SockAddrContext) -> Option<u8> {
    // SAFETY: the kernel passes a valid context.
    let context = unsafe { &*ctx.sock_addr };
    let is = |protocol: u8, socket_type: u32| {
        context.protocol == u32::from(protocol) && context.type_ == socket_type
    };
    if is(ServiceKey::TCP, SOCK_STREAM) {
        Some(ServiceKey::TCP)
    } else if is(ServiceKey::UDP, SOCK_DGRAM) {
        Some(ServiceKey::UDP)
    } else {
        None
    }
}

#[inline(always)]
pub(crate) fn count_endpoint(chosen: &Chosen) {
    count(chosen.counter);
    if chosen.slot.is_local() {
        count(Counter::ConnectLocal);
    }
    if chosen.spilled {
        count(Counter::ConnectSpilled);
    }
}

#[inline(always)]
pub(crate) fn count_pass(pass: Pass) {
    if let Some(counter) = pass.counter() {
        count(counter);
    }
}

/// Fails the call as a closed port would. Returning 0 alone would mean EPERM,
/// which in-kernel NFS clients retry without a pause (cilium#33395).
#[inline(always)]
pub(crate) fn refuse(counter: Counter) -> i32 {
    if CAN_REFUSE.load() == 0 {
        count(Counter::PassedNoRefusal);
        return PROCEED;
    }
    count(counter);
    // SAFETY: the argument is a constant in [-4095, 0], as Linux 7.2 demands.
    unsafe { bpf_set_retval(-ECONNREFUSED) };
    FAIL
}

/// A socket may connect again after it was disconnected.
#[inline(never)]
fn forget_connection(ctx: &SockAddrContext, protocol: u8) {
    let socket: *mut bpf_sock = socket(ctx);
    // SAFETY: the socket is the context's.
    let Some(connection) = (unsafe { storage::get(&CONNECTIONS, socket) }) else {
        return;
    };
    // SAFETY: the storage lives as long as the socket, whose lock is held.
    load::forget(unsafe { &mut *connection });
    // SAFETY: as above.
    let was_ours = unsafe { CONNECTIONS.delete(socket) }.is_ok();
    if was_ours && protocol == ServiceKey::UDP {
        release::unregister(ctx);
    }
}

/// Whether there was room for it. (A frame of its own, as the stack of the hook has
/// none for it.)
#[inline(never)]
fn remember_connection(
    ctx: &SockAddrContext,
    service: &ServiceKey,
    chosen: &Chosen,
    now_ns: u64,
) -> bool {
    let mut connection = Connection::new(*service, &chosen.slot, chosen.splice, now_ns);
    // SAFETY: the socket is the context's.
    let kept = unsafe { storage::create(&CONNECTIONS, socket(ctx), &mut connection) };
    let Some(kept) = kept else {
        return false;
    };
    if chosen.counted {
        // SAFETY: as in `forget_connection`.
        load::note(unsafe { &mut *kept });
    }
    if service.protocol() == ServiceKey::UDP {
        release::register(ctx, &connection);
    }
    true
}
