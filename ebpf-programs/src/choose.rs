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
    Choice, Connection, Counter, Demands, Flags, Heartbeat, MAX_TIERS, ServiceEntry, ServiceKey,
    ServiceName, Slot, SlotKey, Source, TierRange, Wish, capacity,
};

use crate::search::{find, is_alive};
use crate::{affinity, client, health};

/// How many endpoints are tried for one that lives.
const ALTERNATIVES: u32 = 8;
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
/// `WATCHED` is whether limits of connections count, and what answers them.
#[inline(always)]
pub(crate) fn choose<const WATCHED: bool>(
    ctx: &SockAddrContext,
    key: &ServiceKey,
    before: Option<&Slot>,
    now_ns: u64,
) -> Result<Answer, Pass> {
    // A loop: written out, each try has its own place on the stack.
    for _ in 0..2 {
        match choose_once::<WATCHED>(ctx, key, before, now_ns) {
            Err(Pass::Race) => {}
            other => return other,
        }
    }
    Err(Pass::Race)
}

/// Time since boot, ns.
#[inline(always)]
pub(crate) fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing and returns a number.
    unsafe { bpf_ktime_get_boot_ns() }
}

#[inline(always)]
fn choose_once<const WATCHED: bool>(
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
    let at = |index| slot(entry.table_id(), index);
    let find = |tiers: &[TierRange; MAX_TIERS], demands| find(entry.table_id(), tiers, demands);
    let demands = if WATCHED && key.protocol() == ServiceKey::TCP {
        Demands {
            limit: entry.max_local_connections(),
            alive: health::is_gate_open(now_ns),
        }
    } else {
        Demands::default()
    };
    // Copied before the entry is looked at again.
    let chosen = match entry.choose(before, demands, random_below, at, is_alive, find) {
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
        spilled: demands.limit != 0 && matches!(source, Source::Spilled(_)),
        splice: entry.splice(),
        counted: demands.limit != 0 && slot.is_local(),
    }))
}

/// Whether the client of a connection would be sent to a live endpoint now: some
/// are tried.
#[inline(always)]
pub(crate) fn has_alternative(connection: &Connection, now_ns: u64) -> bool {
    // SAFETY: the reference is only copied from.
    let Some(entry) = (unsafe { SERVICES.get(connection.service()) }).copied() else {
        return false;
    };
    let Some(tier) = entry.last_tier() else {
        return false;
    };
    for _ in 0..ALTERNATIVES {
        let index = tier.start() + random_below(tier.count());
        if slot(entry.table_id(), index).is_some_and(|slot| health::is_known_good(slot, now_ns)) {
            return true;
        }
    }
    false
}

/// If the element is replaced while it is read, the second look at the entry
/// finds out.
#[inline(always)]
pub(crate) fn slot(table_id: u64, index: u32) -> Option<&'static Slot> {
    // SAFETY: the kernel keeps the memory of an element, if not its content,
    // until the program ends.
    unsafe { SLOTS.get(SlotKey::new(table_id, index)) }
}

/// A number in [0, `count`), by multiplication, since a division would bring the
/// code of its panic along.
#[inline(always)]
pub(crate) fn random_below(count: u32) -> u32 {
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
