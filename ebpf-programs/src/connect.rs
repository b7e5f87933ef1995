//! connect4 and connect6: a ClusterIP becomes an endpoint.
//!
//! An entry that is replaced while it is read: the kernel gives the memory of a
//! removed hash element to the next insertion at once, also while a program
//! still holds a pointer to it (`kernel/bpf/hashtab.c`, `htab_map_delete_elem`
//! and `free_htab_elem`). So an entry is copied, its slot is read, and then the
//! entry is looked up again: only if it still names the same table was all of
//! that one set. Otherwise once more, and then the connect passes untouched.

use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::btf_maps::{Array, HashMap, SkStorage};
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns, bpf_set_retval};
use aya_ebpf::macros::{btf_map, cgroup_sock_addr};
use aya_ebpf::programs::SockAddrContext;
use aya_ebpf::{Global, bindings::BPF_F_NO_PREALLOC};
use shunt_common::{
    Connection, Counter, Flags, Heartbeat, SELF_CHECK_ADDRESS, SELF_CHECK_PORT, ServiceEntry,
    ServiceKey, ServiceName, Slot, SlotKey, TierRange, capacity,
};

use crate::count::count;
use crate::sock_addr::{Address, Family};
use crate::storage;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map(name = "services")]
static SERVICES: HashMap<ServiceKey, ServiceEntry, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

#[btf_map(name = "slots")]
static SLOTS: HashMap<SlotKey, Slot, { capacity::SLOTS }, NO_PREALLOC> = HashMap::new();

/// For people; here so that one object holds all maps.
#[btf_map(name = "names")]
static NAMES: HashMap<ServiceKey, ServiceName, { capacity::SERVICES }, NO_PREALLOC> =
    HashMap::new();

/// For people.
#[btf_map(name = "node")]
static NODE: Array<shunt_common::Node, 1> = Array::new();

#[btf_map(name = "heartbeat")]
static HEARTBEAT: Array<Heartbeat, 1> = Array::new();

#[btf_map(name = "connections")]
pub(crate) static CONNECTIONS: SkStorage<Connection> = SkStorage::new();

/// 1 if this kernel has `bpf_set_retval` for these hooks (Linux 5.18). Where it
/// has not, the verifier never sees the call, since it knows this constant.
#[unsafe(no_mangle)]
static CAN_REFUSE: Global<u8> = Global::new(0);

/// `bpf_set_retval` takes a negated errno.
const ECONNREFUSED: i32 = 111;
const SOCK_STREAM: u32 = 1;

/// What a hook returns to let the connect go on.
const PROCEED: i32 = 1;
/// What a hook returns to fail it, with the errno of `bpf_set_retval`.
const FAIL: i32 = 0;

/// How a connect to a captured Service port ends.
enum Verdict {
    Endpoint { scope: u32, local: bool },
    Refuse,
    SelfCheck,
}

/// Why a connect passes untouched.
enum Pass {
    NotTcp,
    NoEntry,
    Verdict,
    Stale,
    Race,
    NoStorage,
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
        Ok(Verdict::Endpoint { scope, local }) => {
            count(scope_counter(scope));
            if local {
                count(Counter::ConnectLocal);
            }
            PROCEED
        }
        Ok(Verdict::Refuse) => refuse(Counter::Refused),
        Ok(Verdict::SelfCheck) => refuse(Counter::SelfCheck),
        Err(Pass::NotTcp) => PROCEED,
        Err(Pass::NoEntry) => pass(Counter::PassedNoEntry),
        Err(Pass::Verdict) => pass(Counter::PassedVerdict),
        Err(Pass::Stale) => pass(Counter::PassedStale),
        Err(Pass::Race) => pass(Counter::PassedRace),
        Err(Pass::NoStorage) => pass(Counter::PassedNoStorage),
    }
}

#[inline(always)]
fn try_connect(ctx: &SockAddrContext, family: Family) -> Result<Verdict, Pass> {
    // SAFETY: the kernel passes a valid context.
    let context = unsafe { &*ctx.sock_addr };
    if context.protocol != u32::from(ServiceKey::TCP) || context.type_ != SOCK_STREAM {
        return Err(Pass::NotTcp);
    }
    forget_connection(ctx);
    let target = family.read(ctx);
    if target.ip == SELF_CHECK_ADDRESS && target.port == SELF_CHECK_PORT {
        return Ok(Verdict::SelfCheck);
    }
    let key = ServiceKey::new(target.ip, target.port, ServiceKey::TCP);
    let choice = match choose(&key) {
        Err(Pass::Race) => choose(&key)?,
        other => other?,
    };
    let Choice::Endpoint {
        slot,
        scope,
        splice,
    } = choice
    else {
        return Ok(Verdict::Refuse);
    };
    let splice = splice && slot.is_local();
    remember_connection(
        ctx,
        Connection::new(key, *slot.address(), slot.port(), splice),
    )?;
    family.write(
        ctx,
        &Address {
            ip: *slot.address(),
            port: slot.port(),
        },
    );
    Ok(Verdict::Endpoint {
        scope,
        local: slot.is_local(),
    })
}

/// What the table says.
enum Choice {
    Endpoint {
        slot: Slot,
        scope: u32,
        splice: bool,
    },
    Refuse,
}

#[inline(always)]
fn choose(key: &ServiceKey) -> Result<Choice, Pass> {
    let entry = read_entry(key).ok_or(Pass::NoEntry)?;
    if is_stale() {
        return Err(Pass::Stale);
    }
    let choice = choose_of(&entry)?;
    match read_entry(key) {
        Some(again) if again.table_id() == entry.table_id() => Ok(choice),
        _ => Err(Pass::Race),
    }
}

#[inline(always)]
fn choose_of(entry: &ServiceEntry) -> Result<Choice, Pass> {
    if entry.has(Flags::PASS) {
        return Err(Pass::Verdict);
    }
    let Some(tier) = first_usable(entry) else {
        return Ok(Choice::Refuse);
    };
    let slot = SlotKey::new(entry.table_id(), tier.start() + random_below(tier.count()));
    // SAFETY: the reference is only copied from. If the element was replaced
    // meanwhile, the second look at the entry finds out.
    let slot = *unsafe { SLOTS.get(slot) }.ok_or(Pass::Race)?;
    Ok(Choice::Endpoint {
        slot,
        scope: tier.scope(),
        splice: entry.has(Flags::SPLICE),
    })
}

#[inline(always)]
fn first_usable(entry: &ServiceEntry) -> Option<&TierRange> {
    if entry.has(Flags::REFUSE) {
        return None;
    }
    entry.tiers().iter().find(|tier| tier.count() > 0)
}

/// A number in [0, `count`), by multiplication, since a division would bring the
/// code of its panic along.
#[inline(always)]
fn random_below(count: u32) -> u32 {
    // SAFETY: the helper takes nothing and returns a number.
    let random = unsafe { bpf_get_prandom_u32() };
    ((u64::from(random) * u64::from(count)) >> 32) as u32
}

#[inline(always)]
fn read_entry(key: &ServiceKey) -> Option<ServiceEntry> {
    // SAFETY: the reference is only copied from; see the module's head for
    // elements that are replaced meanwhile.
    unsafe { SERVICES.get(key) }.copied()
}

#[inline(always)]
fn is_stale() -> bool {
    // SAFETY: the helper takes nothing and returns a number.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    HEARTBEAT
        .get(0)
        .is_none_or(|heartbeat| heartbeat.is_stale(now))
}

#[inline(always)]
fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the kernel passes a valid context, which always has a socket.
    unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk }
}

/// A socket may connect again after it was disconnected.
#[inline(always)]
fn forget_connection(ctx: &SockAddrContext) {
    // SAFETY: the socket is the context's. That there was nothing to delete is
    // the usual case.
    let _ = unsafe { CONNECTIONS.delete(socket(ctx)) };
}

#[inline(always)]
fn remember_connection(ctx: &SockAddrContext, mut connection: Connection) -> Result<(), Pass> {
    // SAFETY: the socket is the context's.
    let kept = unsafe { storage::create(&CONNECTIONS, socket(ctx), &mut connection) };
    kept.map(|_| ()).ok_or(Pass::NoStorage)
}

#[inline(always)]
fn scope_counter(scope: u32) -> Counter {
    match scope {
        0 => Counter::ConnectNode,
        1 => Counter::ConnectZone,
        2 => Counter::ConnectCluster,
        _ => Counter::ConnectHints,
    }
}

#[inline(always)]
fn pass(counter: Counter) -> i32 {
    count(counter);
    PROCEED
}

/// Fails the connect as a closed port would. Returning 0 alone would mean
/// EPERM, which in-kernel NFS clients retry without a pause (cilium#33395).
#[inline(always)]
fn refuse(counter: Counter) -> i32 {
    if CAN_REFUSE.load() == 0 {
        count(Counter::PassedNoRefusal);
        return PROCEED;
    }
    count(counter);
    // SAFETY: the argument is a constant in [-4095, 0], as Linux 7.2 demands.
    unsafe { bpf_set_retval(-ECONNREFUSED) };
    FAIL
}
