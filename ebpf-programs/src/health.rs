//! Watches connects to the endpoints that [`connect`](crate::connect) chose, and
//! remembers what does not answer. No agent takes part.
//!
//! A sockops program of its own, beside [`sockops`](crate::sockops), so that it
//! works where nothing can be spliced. What it relies on, in `net/ipv4/` of the
//! kernel:
//! - the callback TCP_CONNECT runs before the first SYN timeout is asked for
//!   (`tcp_connect`, then `tcp_connect_init`);
//! - the callback RTO runs at each SYN timeout, with the socket's lock held, and
//!   after it was decided whether the connect has expired (`tcp_write_timeout`).
//!   So what is set there counts at the next timeout, and a TCP_USER_TIMEOUT that
//!   is over makes that one come with the next tick
//!   (`tcp_clamp_rto_to_user_timeout`): then the connect fails with ETIMEDOUT;
//! - the error of a socket is set before its state becomes CLOSE, if the peer or
//!   the network closed it (`tcp_reset`, `tcp_v4_err`), and not if the process did
//!   (`__tcp_close`, `tcp_disconnect`).

use core::ffi::c_void;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{
    BPF_NOEXIST, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB,
    BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_TIMEOUT_INIT,
    BPF_TCP_ESTABLISHED, BPF_TCP_SYN_SENT, bpf_sock,
};
use aya_ebpf::btf_maps::{Array, LruHashMap, RingBuf};
use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_getsockopt, bpf_setsockopt};
use aya_ebpf::macros::{btf_map, sock_ops};
use aya_ebpf::programs::SockOpsContext;
use shunt_common::{
    Connection, Counter, Evidence, Failure, Health, HealthChange, HealthConfig, HealthEvent,
    HealthKey, Judgement, MEMORY_NS, NodeId, ProbeKey, Slot, Threshold, capacity, judge,
};

use crate::choose::{has_alternative, now_ns};
use crate::connect::CONNECTIONS;
use crate::count::count;
use crate::{kernel, storage};

#[btf_map(name = "health")]
static HEALTH: LruHashMap<HealthKey, Health, { capacity::HEALTH }> = LruHashMap::new();

/// Whoever inserts a key first is the one to probe: the way to have one winner
/// that each kernel has (compare-and-swap needs Linux 5.12).
#[btf_map(name = "probes")]
static PROBES: LruHashMap<ProbeKey, u32, { capacity::PROBES }> = LruHashMap::new();

/// Read first, so that nothing is looked up while all are well.
#[btf_map(name = "health_gate")]
static GATE: Array<u64, 1> = Array::new();

#[btf_map(name = "health_config")]
static CONFIG: Array<HealthConfig, 1> = Array::new();

#[btf_map(name = "health_events")]
static EVENTS: RingBuf<HealthEvent, { capacity::HEALTH_EVENTS }> = RingBuf::new();

const SOL_TCP: i32 = 6;
const TCP_SYNCNT: i32 = 7;
const TCP_USER_TIMEOUT: i32 = 18;
/// `MAX_TCP_SYNCNT` in `include/net/tcp.h`.
const MAX_RETRIES: u32 = 127;
const ECONNREFUSED: u32 = 111;
const ENETUNREACH: u32 = 101;
const EHOSTUNREACH: u32 = 113;

#[sock_ops]
pub(crate) fn watch_connects(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => begin(&ctx),
        BPF_SOCK_OPS_TIMEOUT_INIT => shorten_first_timeout(&ctx),
        BPF_SOCK_OPS_RTO_CB => timed_out(&ctx),
        BPF_SOCK_OPS_STATE_CB if ctx.arg(0) == BPF_TCP_SYN_SENT => end(&ctx),
        _ => {}
    }
    1
}

/// Whether anything may be suspect.
#[inline(always)]
pub(crate) fn is_gate_open(now_ns: u64) -> bool {
    GATE.get(0).is_some_and(|until_ns| now_ns < *until_ns)
}

/// Whether a connect may go to this endpoint, be it to find out.
#[inline(always)]
pub(crate) fn is_alive(endpoint: &Slot, now_ns: u64) -> bool {
    let key = HealthKey::endpoint(*endpoint.address(), endpoint.port());
    let node_key = HealthKey::node(endpoint.node());
    let of_endpoint = find(&key);
    let of_node = find_node(endpoint.node());
    let judgement = judge(of_endpoint.as_deref(), of_node.as_deref(), now_ns);
    let may = match judgement {
        Judgement::Live => return true,
        Judgement::Suspect => false,
        Judgement::ProbeEndpoint => of_endpoint
            .as_deref()
            .is_some_and(|it| is_first(ProbeKey::new(key, it))),
        Judgement::ProbeNode => of_node
            .as_deref()
            .is_some_and(|it| is_first(ProbeKey::new(node_key, it))),
    };
    if !may {
        count(Counter::SuspectsAvoided);
        return false;
    }
    count(Counter::Probes);
    open_gate(now_ns);
    if let Some(it) = of_endpoint
        && it.until_ns() != 0
    {
        it.probe(now_ns);
    }
    if let (Judgement::ProbeNode, Some(it)) = (judgement, of_node) {
        it.probe(now_ns);
    }
    true
}

/// Whether nothing speaks against this endpoint.
#[inline(always)]
pub(crate) fn is_known_good(endpoint: &Slot, now_ns: u64) -> bool {
    let key = HealthKey::endpoint(*endpoint.address(), endpoint.port());
    let (of_endpoint, of_node) = (find(&key), find_node(endpoint.node()));
    judge(of_endpoint.as_deref(), of_node.as_deref(), now_ns) == Judgement::Live
}

/// A connect begins.
#[inline(always)]
fn begin(ctx: &SockOpsContext) {
    let Some(connection) = connection(ctx) else {
        return;
    };
    let flags = ctx.cb_flags() | BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG;
    if ctx.set_cb_flags(flags.cast_signed()).is_err() {
        return;
    }
    let config = config();
    if config.first_timeout == 0 {
        return;
    }
    // Where the number of retries can't be read (before Linux 6.1), the timeout
    // stays as it is: the wait in all must not shrink.
    let Some(retries @ 1..=MAX_RETRIES) = option(ctx, TCP_SYNCNT) else {
        return;
    };
    let more = (retries + config.more_retries).min(MAX_RETRIES);
    if set_option(ctx, TCP_SYNCNT, more) {
        connection.own_retries = retries as u8;
    }
}

#[inline(always)]
fn shorten_first_timeout(ctx: &SockOpsContext) {
    if connection(ctx).is_some_and(|connection| connection.own_retries != 0) {
        ctx.set_reply(config().first_timeout);
    }
}

/// A SYN had no answer in time.
#[inline(always)]
fn timed_out(ctx: &SockOpsContext) {
    // The flag is taken off once the connect is answered.
    let Some(connection) = connection(ctx) else {
        return;
    };
    if connection.failing != 0 {
        return;
    }
    count(Counter::SynTimeouts);
    let now_ns = now_ns();
    let failure = note_failure(ctx, connection, Evidence::SILENT, now_ns);
    if config().fail_fast == 0 {
        return;
    }
    let of_endpoint = find(&key(connection));
    let of_node = find_node(connection.node());
    let is_certain =
        |health: Option<&mut Health>| health.is_some_and(|it| it.is_certain_for(&failure));
    if (is_certain(of_endpoint) || is_certain(of_node))
        && option(ctx, TCP_USER_TIMEOUT) == Some(0)
        && has_alternative(connection, now_ns)
        && set_option(ctx, TCP_USER_TIMEOUT, 1)
    {
        connection.failing = 1;
        count(Counter::FailedFast);
    }
}

/// A connect is answered, or has failed, or its process gave it up.
#[inline(always)]
fn end(ctx: &SockOpsContext) {
    let Some(connection) = connection(ctx) else {
        return;
    };
    if ctx.arg(1) == BPF_TCP_ESTABLISHED {
        note_answer(connection);
    } else {
        let evidence = match socket(ctx).map(kernel::error) {
            Some(ECONNREFUSED) => Evidence::REFUSED,
            Some(ENETUNREACH | EHOSTUNREACH) => Evidence::UNREACHABLE,
            _ => 0,
        };
        if evidence != 0 {
            count(Counter::ConnectsFailed);
            note_failure(ctx, connection, evidence, now_ns());
        }
    }
    // A socket that has failed may connect again.
    if connection.own_retries != 0 {
        let _ = set_option(ctx, TCP_SYNCNT, connection.own_retries.into());
        connection.own_retries = 0;
    }
    if connection.failing != 0 {
        let _ = set_option(ctx, TCP_USER_TIMEOUT, 0);
        connection.failing = 0;
    }
    let flags = ctx.cb_flags() & !(BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
    let _ = ctx.set_cb_flags(flags.cast_signed());
}

#[inline(always)]
fn note_failure(
    ctx: &SockOpsContext,
    connection: &Connection,
    evidence: u32,
    now_ns: u64,
) -> Failure {
    let key = key(connection);
    let failure = Failure {
        // SAFETY: the kernel passes a valid context.
        socket: unsafe { bpf_get_socket_cookie(ctx.as_ptr()) },
        endpoint: key.tag(),
        began_ns: connection.began_ns(),
        evidence,
    };
    open_gate(now_ns);
    fail(&key, &failure, Threshold::ENDPOINT, connection, now_ns);
    let node = connection.node();
    if evidence != Evidence::REFUSED && node != NodeId::UNKNOWN {
        let key = HealthKey::node(node);
        fail(&key, &failure, Threshold::NODE, connection, now_ns);
    }
    failure
}

#[inline(always)]
fn fail(
    key: &HealthKey,
    failure: &Failure,
    threshold: Threshold,
    connection: &Connection,
    now_ns: u64,
) {
    let health = match find(key) {
        Some(health) => health,
        None => {
            let _ = HEALTH.insert(key, Health::UNKNOWN, BPF_NOEXIST.into());
            // No room: nothing is suspected.
            let Some(health) = find(key) else { return };
            health
        }
    };
    if health.fail(failure, threshold, now_ns) {
        count(Counter::Suspected);
        tell(key, HealthChange::Suspected, health.evidence(), connection);
    }
}

#[inline(always)]
fn note_answer(connection: &Connection) {
    let now_ns = now_ns();
    if !is_gate_open(now_ns) {
        return;
    }
    let key = key(connection);
    succeed(&key, find(&key), connection, now_ns);
    let node = HealthKey::node(connection.node());
    succeed(&node, find_node(connection.node()), connection, now_ns);
}

#[inline(always)]
fn succeed(key: &HealthKey, health: Option<&mut Health>, connection: &Connection, now_ns: u64) {
    let Some(health) = health else { return };
    let evidence = health.evidence();
    if health.succeed(now_ns) {
        count(Counter::Cleared);
        tell(key, HealthChange::Cleared, evidence, connection);
    }
}

/// Nothing is lost with an event that has no room: the map says the same.
#[inline(always)]
fn tell(key: &HealthKey, change: HealthChange, evidence: u32, connection: &Connection) {
    let event = HealthEvent {
        of: *key,
        change: change as u32,
        evidence,
        node: connection.node().0,
    };
    let _ = EVENTS.output(event, 0);
}

#[inline(always)]
fn open_gate(now_ns: u64) {
    if let Some(until_ns) = GATE.get_ptr_mut(0) {
        // SAFETY: the map's memory; whoever writes last has about the same time.
        unsafe { until_ns.write_volatile(now_ns + MEMORY_NS) };
    }
}

/// Whether nobody has claimed this probe.
#[inline(always)]
fn is_first(probe: ProbeKey) -> bool {
    PROBES.insert(probe, 0, BPF_NOEXIST.into()).is_ok()
}

#[inline(always)]
fn key(connection: &Connection) -> HealthKey {
    HealthKey::endpoint(*connection.endpoint(), connection.endpoint_port())
}

/// Whoever else writes to it does so field by field, see [`Health`].
#[inline(always)]
fn find(key: &HealthKey) -> Option<&'static mut Health> {
    let health = HEALTH.get_ptr_mut(key)?;
    // SAFETY: the kernel keeps the memory of an element until the program ends;
    // integers of which any value is valid.
    Some(unsafe { &mut *health })
}

#[inline(always)]
fn find_node(node: NodeId) -> Option<&'static mut Health> {
    if node == NodeId::UNKNOWN {
        return None;
    }
    find(&HealthKey::node(node))
}

#[inline(always)]
fn config() -> HealthConfig {
    CONFIG.get(0).copied().unwrap_or_default()
}

/// What the connect hook remembers, if it chose the endpoint; it forgets at each
/// connect.
#[inline(always)]
fn connection(ctx: &SockOpsContext) -> Option<&'static mut Connection> {
    // SAFETY: the socket is the context's.
    let connection = unsafe { storage::get(&CONNECTIONS, socket(ctx)?) }?;
    // SAFETY: the storage lives as long as the socket, whose lock is held.
    Some(unsafe { &mut *connection })
}

#[inline(always)]
fn socket(ctx: &SockOpsContext) -> Option<*mut bpf_sock> {
    // SAFETY: the kernel passes a valid context.
    let socket = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    (!socket.is_null()).then_some(socket)
}

#[inline(always)]
fn option(ctx: &SockOpsContext, name: i32) -> Option<u32> {
    let mut value: u32 = 0;
    let at: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value has the length that is told.
    let failed = unsafe { bpf_getsockopt(ctx.as_ptr(), SOL_TCP, name, at, 4) };
    (failed == 0).then_some(value)
}

#[inline(always)]
fn set_option(ctx: &SockOpsContext, name: i32, mut value: u32) -> bool {
    let at: *mut c_void = (&raw mut value).cast();
    // SAFETY: the value has the length that is told.
    unsafe { bpf_setsockopt(ctx.as_ptr(), SOL_TCP, name, at, 4) == 0 }
}
