//! The routing table, and the choice of an endpoint from it.
//!
//! An entry that is replaced while it is read: the kernel gives the memory of a
//! removed hash element to the next insertion at once, also while a program
//! still holds a pointer to it (`kernel/bpf/hashtab.c`, `htab_map_delete_elem`
//! and `free_htab_elem`). So an entry is copied, its slot is read, and then the
//! entry is looked up again: only if it still names the same table was all of
//! that one set. Otherwise once more, and then the call passes untouched.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::btf_maps::{Array, HashMap};
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockAddrContext;
use shunt_common::{
    Choice, Counter, Flags, Heartbeat, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey,
    Source, Wish, capacity,
};

use crate::{affinity, client, load};

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

/// What the table says.
pub(crate) enum Answer {
    Endpoint(Chosen),
    Refuse,
}

/// An endpoint, and what goes with it.
pub(crate) struct Chosen {
    pub(crate) slot: Slot,
    /// By what.
    pub(crate) counter: Counter,
    /// Whether a nearer tier was left out, since it has no room.
    pub(crate) spilled: bool,
    /// Whether the Service wants its connections spliced.
    pub(crate) splice: Wish,
    /// Whether the endpoint's connections are to be counted.
    pub(crate) counted: bool,
}

/// Why a call passes untouched.
pub(crate) enum Pass {
    NotOurs,
    NoEntry,
    Verdict,
    OptedOut,
    Host,
    Stale,
    Race,
    NoStorage,
}

impl Pass {
    /// `None` for what is not worth counting.
    #[inline(always)]
    pub(crate) fn counter(self) -> Option<Counter> {
        match self {
            Self::NotOurs => None,
            Self::NoEntry => Some(Counter::PassedNoEntry),
            Self::Verdict => Some(Counter::PassedVerdict),
            Self::OptedOut => Some(Counter::PassedOptedOut),
            Self::Host => Some(Counter::PassedHost),
            Self::Stale => Some(Counter::PassedStale),
            Self::Race => Some(Counter::PassedRace),
            Self::NoStorage => Some(Counter::PassedNoStorage),
        }
    }
}

/// An endpoint of the Service port: that of `before` if it is still one, or the
/// one that the client keeps to, or a random one of the first tier that has any.
/// `LIMITED` is whether limits of connections count.
#[inline(always)]
pub(crate) fn choose<const LIMITED: bool>(
    ctx: &SockAddrContext,
    key: &ServiceKey,
    before: Option<&Slot>,
    now_ns: u64,
) -> Result<Answer, Pass> {
    match choose_once::<LIMITED>(ctx, key, before, now_ns) {
        Err(Pass::Race) => choose_once::<LIMITED>(ctx, key, before, now_ns),
        other => other,
    }
}

/// Time since boot, ns.
#[inline(always)]
pub(crate) fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing and returns a number.
    unsafe { bpf_ktime_get_boot_ns() }
}

#[inline(always)]
fn choose_once<const LIMITED: bool>(
    ctx: &SockAddrContext,
    key: &ServiceKey,
    before: Option<&Slot>,
    now_ns: u64,
) -> Result<Answer, Pass> {
    // SAFETY: the reference is only copied from; see the module's head for
    // elements that are replaced meanwhile.
    let entry = *unsafe { SERVICES.get(key) }.ok_or(Pass::NoEntry)?;
    let heartbeat = HEARTBEAT.get(0).ok_or(Pass::Stale)?;
    if heartbeat.is_stale(now_ns) {
        return Err(Pass::Stale);
    }
    if entry.has(Flags::PASS) {
        return Err(Pass::Verdict);
    }
    client::check(ctx, heartbeat)?;
    let before = before.or_else(|| affinity::recall(ctx, key, &entry, now_ns));
    let at = |index| slot(&entry, index);
    let limit = if LIMITED && key.protocol() == ServiceKey::TCP {
        entry.max_local_connections()
    } else {
        0
    };
    // Copied before the entry is looked at again.
    let chosen = match entry.choose(before, limit, random_below, at, load::has_room) {
        Choice::Endpoint(slot, source) => Some((*slot, source)),
        Choice::Nothing => None,
        Choice::Torn => return Err(Pass::Race),
    };
    // SAFETY: as above.
    let again = unsafe { SERVICES.get(key) }.ok_or(Pass::Race)?;
    if again.table_id() != entry.table_id() {
        return Err(Pass::Race);
    }
    let Some((slot, source)) = chosen else {
        return Ok(Answer::Refuse);
    };
    affinity::keep(ctx, key, &entry, slot, now_ns);
    Ok(Answer::Endpoint(Chosen {
        slot,
        counter: source_counter(source),
        spilled: matches!(source, Source::Spilled(_)),
        splice: entry.splice(),
        counted: limit != 0 && slot.is_local(),
    }))
}

/// If the element is replaced while it is read, the second look at the entry
/// finds out.
#[inline(always)]
fn slot(entry: &ServiceEntry, index: u32) -> Option<&'static Slot> {
    // SAFETY: the kernel keeps the memory of an element, if not its content,
    // until the program ends.
    unsafe { SLOTS.get(SlotKey::new(entry.table_id(), index)) }
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
fn source_counter(source: Source) -> Counter {
    match source {
        Source::Kept => Counter::ConnectSame,
        Source::Drawn(0) | Source::Spilled(0) => Counter::ConnectNode,
        Source::Drawn(1) | Source::Spilled(1) => Counter::ConnectZone,
        Source::Drawn(2) | Source::Spilled(2) => Counter::ConnectCluster,
        Source::Drawn(_) | Source::Spilled(_) => Counter::ConnectHints,
    }
}
