//! Finds the two sockets of a same-node connection.
//!
//! The client registers its pair when its connect is established, under its
//! cookie, and leaves the cookie in `clients` under its [`SocketKey`]. The server
//! is established later, looks up the key that its peer must have, and completes
//! the pair. A connection that was translated on the way (by kube-proxy, say)
//! has other addresses at each end, is not found, and stays plain TCP.
//!
//! The server knows the addresses of its client, but not its namespace: the map
//! `namespaces` says in which one an address was last seen to connect or to
//! accept. A wrong answer only means that the pair is not found, since the
//! sequence numbers in the key belong to one connection.
//!
//! Nothing is put into a socket map here: the agent may do that later, through
//! [`manage`](crate::manage).

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_F_NO_PREALLOC, BPF_NOEXIST, bpf_sock};
use aya_ebpf::btf_maps::{Array, HashMap, LruHashMap, SkStorage};
use aya_ebpf::helpers::generated::{
    bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_skc_to_tcp_sock,
};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockOpsContext;
use shunt_common::{
    Counter, EndKey, EventKind, Pair, Role, ServiceKey, SocketKey, SpliceConfig, SpliceMode,
    SpliceReason, Wish, address, capacity,
};

use crate::choose::now_ns;
use crate::connect::CONNECTIONS;
use crate::count::count;
use crate::{events, storage};

#[btf_map(name = "namespaces")]
static NAMESPACES: LruHashMap<[u8; 16], u64, { capacity::NAMESPACES }> = LruHashMap::new();

/// The other way round, for what a pod says of itself by loopback addresses.
#[btf_map(name = "netns_addresses")]
static ADDRESSES: LruHashMap<u64, [u8; 16], { capacity::NAMESPACES }> = LruHashMap::new();

#[btf_map(name = "clients")]
static CLIENTS: HashMap<SocketKey, u64, { capacity::PAIRS }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map(name = "ends")]
pub(crate) static ENDS: SkStorage<EndKey> = SkStorage::new();

#[btf_map(name = "pairs")]
pub(crate) static PAIRS: HashMap<u64, Pair, { capacity::PAIRS }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map(name = "splice_wishes")]
static WISHES: HashMap<[u8; 16], u32, { capacity::WISHES }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map(name = "splice_config")]
static SPLICE_CONFIG: Array<SpliceConfig, 1> = Array::new();

/// Only the agent reads it; here, since maps are made with the object.
#[btf_map(name = "splice_switch")]
static SPLICE_SWITCH: Array<u32, 1> = Array::new();

/// What a new pair begins as: with its key it is too large for the stack.
static NO_PAIR: Pair = Pair::EMPTY;

const AF_INET: u32 = 2;

/// A map is full, or the kernel has no memory for socket storage.
pub(crate) struct Failed;

/// What the agent wants, as far as it is known.
#[inline(always)]
pub(crate) fn config() -> SpliceConfig {
    SPLICE_CONFIG.get(0).copied().unwrap_or_default()
}

/// The connecting side, if the connection may be within this node and is to be
/// spliced; whether it was registered.
#[inline(always)]
pub(crate) fn register_client(ctx: &SockOpsContext) -> Result<bool, Failed> {
    let config = config();
    if config.mode == SpliceMode::Off as u8 {
        return Ok(false);
    }
    let Some(socket) = socket(ctx) else {
        return Ok(false);
    };
    let remote = remote_ip(ctx);
    // SAFETY: the socket is the context's.
    let connection = unsafe { storage::get(&CONNECTIONS, socket) };
    // SAFETY: the storage lives as long as the socket.
    let connection = connection.map(|connection| unsafe { &*connection });
    let connection = connection.filter(|it| it.is_about(&remote, remote_port(ctx)));
    let wish = match connection {
        Some(connection) => connection.wish(),
        None => Wish::None,
    };
    let local = own_address(ctx, &remote);
    if !is_wanted(&config, wish, &local, &remote) && !is_self_test(ctx, &config) {
        return Ok(false);
    }
    let is_near = match connection {
        Some(connection) => connection.is_near(),
        None => address::is_loopback(&remote) || namespace_of(&remote).is_some(),
    };
    if !is_near {
        return Ok(false);
    }
    let service = match connection {
        Some(connection) => *connection.service(),
        None => ServiceKey::new([0; 16], [0; 2], 0),
    };
    add_client(ctx, socket, service).map(|()| true)
}

#[inline(always)]
fn add_client(
    ctx: &SockOpsContext,
    socket: *mut bpf_sock,
    service: ServiceKey,
) -> Result<(), Failed> {
    let cookie = cookie(ctx);
    let nothing: &Pair = &NO_PAIR;
    PAIRS
        .insert(cookie, nothing, u64::from(BPF_NOEXIST))
        .map_err(|_| Failed)?;
    let Some(pair) = PAIRS.get_ptr_mut(cookie) else {
        return Err(Failed);
    };
    // SAFETY: the map's memory, which is kept until the program ends; nobody else
    // knows of the pair yet.
    let pair = unsafe { &mut *pair };
    pair.begin(own_key(ctx), service);
    pair.client.tcp_sock = tcp_sock(socket);
    pair.client.netns_cookie = pair.key().netns_cookie();
    let key = pair.key();
    if note_namespace(key.local(), key.netns_cookie()).is_ok()
        && CLIENTS.insert(key, cookie, u64::from(BPF_ANY)).is_ok()
        && name_end(socket, EndKey::new(cookie, Role::Client)).is_ok()
    {
        count(Counter::PairsRegistered);
        return Ok(());
    }
    let _ = CLIENTS.remove(key);
    let _ = PAIRS.remove(cookie);
    Err(Failed)
}

/// The accepting side, if its client is registered; whether it was.
#[inline(always)]
pub(crate) fn register_server(ctx: &SockOpsContext) -> Result<bool, Failed> {
    let config = config();
    if config.mode == SpliceMode::Off as u8 {
        return Ok(false);
    }
    let Some(socket) = socket(ctx) else {
        return Ok(false);
    };
    let own_netns = netns_cookie(ctx);
    // A client that does not connect to a Service learns from this that the
    // server is near.
    if config.mode == SpliceMode::Auto as u8 || config.wishes != 0 {
        note_namespace(&local_ip(ctx), own_netns)?;
    }
    // The usual case, a client on another node, ends here.
    let Some(client_netns) = client_namespace(ctx) else {
        return Ok(false);
    };
    let client_key = own_key(ctx).peer(client_netns);
    // SAFETY: the value is copied at once.
    let Some(cookie) = (unsafe { CLIENTS.get(client_key) }).copied() else {
        return Ok(false);
    };
    let _ = CLIENTS.remove(client_key);
    let Some(pair) = PAIRS.get_ptr_mut(cookie) else {
        return Ok(false);
    };
    name_end(socket, EndKey::new(cookie, Role::Server))?;
    // SAFETY: the client's socket is in its handshake, so that its entry stays,
    // and nobody reads the server's end before it is told of the pair.
    let pair = unsafe { &mut *pair };
    pair.server.netns_cookie = own_netns;
    pair.since_ns = now_ns();
    pair.server.tcp_sock = tcp_sock(socket);
    count(Counter::PairsFound);
    events::tell(cookie, EventKind::Paired, SpliceReason::New);
    Ok(true)
}

/// Drops the registration of a socket that is closed.
#[inline(always)]
pub(crate) fn forget(ctx: &SockOpsContext) {
    let Some(socket) = socket(ctx) else { return };
    // SAFETY: the socket is the context's.
    let Some(end) = (unsafe { storage::get(&ENDS, socket) }) else {
        return;
    };
    // SAFETY: the storage lives as long as the socket.
    let end = unsafe { *end };
    if let Some(pair) = PAIRS.get_ptr_mut(end.pair) {
        // SAFETY: the map's memory, which is kept until the program ends.
        let pair = unsafe { &*pair };
        if !pair.is_complete() {
            let _ = CLIENTS.remove(pair.key());
        }
        if pair.client.member != 0 || pair.server.member != 0 {
            // The agent looks at what is spliced no more, and would count it for ever.
            events::tell(end.pair, EventKind::Closed, SpliceReason::Gone);
        }
        // That the other end was first is no error.
        let _ = PAIRS.remove(end.pair);
    }
}

/// Whether anybody wants this connection spliced, and nobody does not.
#[inline(always)]
fn is_wanted(config: &SpliceConfig, of_service: Wish, local: &[u8; 16], remote: &[u8; 16]) -> bool {
    if of_service == Wish::Off {
        return false;
    }
    let mut wanted = config.mode == SpliceMode::Auto as u8 || of_service == Wish::On;
    if config.wishes != 0 {
        match wish_of(local) {
            Wish::Off => return false,
            Wish::On => wanted = true,
            Wish::None => {}
        }
        match wish_of(remote) {
            Wish::Off => return false,
            Wish::On => wanted = true,
            Wish::None => {}
        }
    }
    wanted
}

#[inline(always)]
fn wish_of(address: &[u8; 16]) -> Wish {
    // SAFETY: the value is copied at once.
    match unsafe { WISHES.get(address) } {
        Some(wish) => Wish::from_u8(*wish as u8),
        None => Wish::None,
    }
}

#[inline(always)]
fn is_self_test(ctx: &SockOpsContext, config: &SpliceConfig) -> bool {
    config.self_test_port != [0; 2] && remote_port(ctx) == config.self_test_port
}

/// Lets sk_msg find the pair of this socket.
#[inline(always)]
fn name_end(socket: *mut bpf_sock, mut end: EndKey) -> Result<(), Failed> {
    // SAFETY: the socket is the context's.
    let stored = unsafe { storage::create(&ENDS, socket, &mut end) };
    stored.map(|_| ()).ok_or(Failed)
}

/// Lets servers find the namespace of this client, and clients learn that this
/// server is near.
#[inline(always)]
fn note_namespace(address: &[u8; 16], netns_cookie: u64) -> Result<(), Failed> {
    if address::is_loopback(address) || namespace_of(address) == Some(netns_cookie) {
        return Ok(());
    }
    NAMESPACES
        .insert(address, netns_cookie, u64::from(BPF_ANY))
        .map_err(|_| Failed)?;
    ADDRESSES
        .insert(netns_cookie, address, u64::from(BPF_ANY))
        .map_err(|_| Failed)
}

/// The address by which the pod of this client is known: of a connection inside
/// the pod, one that was seen before.
#[inline(always)]
fn own_address(ctx: &SockOpsContext, remote: &[u8; 16]) -> [u8; 16] {
    if !address::is_loopback(remote) {
        return local_ip(ctx);
    }
    // SAFETY: the value is copied at once.
    let known = unsafe { ADDRESSES.get(netns_cookie(ctx)) }.copied();
    known.unwrap_or(*remote)
}

#[inline(always)]
fn client_namespace(ctx: &SockOpsContext) -> Option<u64> {
    let remote = remote_ip(ctx);
    if address::is_loopback(&remote) {
        return Some(netns_cookie(ctx));
    }
    namespace_of(&remote)
}

#[inline(always)]
fn namespace_of(address: &[u8; 16]) -> Option<u64> {
    // SAFETY: the value is copied at once.
    unsafe { NAMESPACES.get(address) }.copied()
}

#[inline(always)]
fn own_key(ctx: &SockOpsContext) -> SocketKey {
    // SAFETY: the kernel passes a valid context.
    let ops = unsafe { &*ctx.ops };
    SocketKey::new(
        netns_cookie(ctx),
        // local_port is in host byte order, unlike remote_port.
        (local_ip(ctx), (ops.local_port as u16).to_be_bytes()),
        (remote_ip(ctx), remote_port(ctx)),
        ops.snd_una,
        ops.rcv_nxt,
    )
}

#[inline(always)]
fn local_ip(ctx: &SockOpsContext) -> [u8; 16] {
    // SAFETY: the kernel passes a valid context.
    let ops = unsafe { &*ctx.ops };
    address_of(ctx.family(), &ops.local_ip4, &ops.local_ip6)
}

#[inline(always)]
fn remote_ip(ctx: &SockOpsContext) -> [u8; 16] {
    // SAFETY: the kernel passes a valid context.
    let ops = unsafe { &*ctx.ops };
    address_of(ctx.family(), &ops.remote_ip4, &ops.remote_ip6)
}

/// Reads both families' fields and then chooses: if it chose first, the compiler
/// would load through a computed pointer into the context, which the verifier
/// forbids ("dereference of modified ctx ptr").
#[inline(always)]
fn address_of(family: u32, v4: &u32, v6: &[u32; 4]) -> [u8; 16] {
    let read = |word: &u32| {
        let word: *const u32 = word;
        // SAFETY: `word` points into the context.
        unsafe { word.read_volatile() }
    };
    let v4 = read(v4);
    let v6 = [read(&v6[0]), read(&v6[1]), read(&v6[2]), read(&v6[3])];
    match family {
        AF_INET => address::mapped(v4.to_ne_bytes()),
        _ => bytes(v6),
    }
}

/// The context's `remote_port` is the 32-bit network byte order form of the
/// port (`include/uapi/linux/bpf.h`).
#[inline(always)]
fn remote_port(ctx: &SockOpsContext) -> [u8; 2] {
    (u32::from_be(ctx.remote_port()) as u16).to_be_bytes()
}

#[inline(always)]
fn bytes(words: [u32; 4]) -> [u8; 16] {
    let [a, b, c, d] = words.map(u32::to_ne_bytes);
    [
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], //
        c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
    ]
}

#[inline(always)]
fn cookie(ctx: &SockOpsContext) -> u64 {
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn netns_cookie(ctx: &SockOpsContext) -> u64 {
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn socket(ctx: &SockOpsContext) -> Option<*mut bpf_sock> {
    // SAFETY: the kernel passes a valid context.
    let socket = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    (!socket.is_null()).then_some(socket)
}

/// The address of the kernel's `struct tcp_sock`, as a number.
#[inline(always)]
fn tcp_sock(socket: *mut bpf_sock) -> u64 {
    // SAFETY: the socket is the context's and not null.
    unsafe { bpf_skc_to_tcp_sock(socket.cast()) as u64 }
}
