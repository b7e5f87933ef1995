//! Finds the two sockets of a same-node connection.
//!
//! The client registers itself under its [`SocketKey`] when its connect is
//! established. The server is established later, looks up the key that its peer
//! must have, and links the two. A connection that was translated on the way
//! (by kube-proxy, say) has other addresses at each end, is not found, and
//! stays plain TCP.
//!
//! The server knows the addresses of its client, but not its namespace: the map
//! `namespaces` says from which namespace an address was last used to connect.
//! A wrong answer only means that the pair is not found, since the sequence
//! numbers in the key belong to one connection.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_F_NO_PREALLOC, BPF_NOEXIST, bpf_sock};
use aya_ebpf::btf_maps::{HashMap, LruHashMap, SkStorage};
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_skc_to_tcp_sock};
use aya_ebpf::macros::btf_map;
use aya_ebpf::programs::SockOpsContext;
use shunt_common::{Counter, Role, SocketEntry, SocketKey, address, capacity};

use crate::connect::CONNECTIONS;
use crate::count::count;
use crate::storage;

#[btf_map(name = "namespaces")]
static NAMESPACES: LruHashMap<[u8; 16], u64, { capacity::NAMESPACES }> = LruHashMap::new();

#[btf_map(name = "socket_keys")]
pub(crate) static SOCKET_KEYS: SkStorage<SocketKey> = SkStorage::new();

#[btf_map(name = "sockets")]
pub(crate) static SOCKETS: HashMap<
    SocketKey,
    SocketEntry,
    { capacity::SOCKETS },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

const AF_INET: u32 = 2;

/// A map is full, or the kernel has no memory for socket storage.
pub(crate) struct Failed;

/// The key of a socket that is to be spliced, in its socket storage: a copy on
/// the stack for each step would exceed the 512 bytes that there are.
pub(crate) type Outcome = Result<Option<&'static SocketKey>, Failed>;

/// The connecting side, if its connect was sent to an endpoint on this node of
/// a Service that is to be spliced.
#[inline(always)]
pub(crate) fn register_client(ctx: &SockOpsContext) -> Outcome {
    let Some(socket) = socket(ctx) else {
        return Ok(None);
    };
    // SAFETY: the socket is the context's.
    let Some(connection) = (unsafe { storage::get(&CONNECTIONS, socket) }) else {
        return Ok(None);
    };
    // SAFETY: the storage lives as long as the socket.
    let connection = unsafe { &*connection };
    if !connection.wants_splice() || !connection.is_about(&remote_ip(ctx), remote_port(ctx)) {
        return Ok(None);
    }
    let key = store_key(ctx, socket)?;
    note_namespace(key)?;
    let entry = SocketEntry::new(tcp_sock(socket), *connection.service(), Role::Client);
    register(key, &entry)
}

/// The accepting side, if its client is registered.
#[inline(always)]
pub(crate) fn register_server(ctx: &SockOpsContext) -> Outcome {
    let Some(socket) = socket(ctx) else {
        return Ok(None);
    };
    // The usual case, a client on another node, ends here.
    let Some(client_netns) = client_namespace(ctx) else {
        return Ok(None);
    };
    let client_key = own_key(ctx).peer(client_netns);
    let Some(client) = SOCKETS.get_ptr_mut(client_key) else {
        return Ok(None);
    };
    // SAFETY: the client's socket is in its handshake, so that its entry stays.
    let client = unsafe { &mut *client };
    let key = store_key(ctx, socket)?;
    let mut entry = SocketEntry::new(tcp_sock(socket), *client.service(), Role::Server);
    entry.peer_tcp_sock = client.tcp_sock();
    entry.peer_netns_cookie = client_netns;
    let registered = register(key, &entry)?;
    client.peer_netns_cookie = key.netns_cookie();
    client.peer_tcp_sock = entry.tcp_sock();
    count(Counter::SocketsPaired);
    Ok(registered)
}

/// Drops the registration of a socket that is closed.
#[inline(always)]
pub(crate) fn forget(ctx: &SockOpsContext) {
    let Some(socket) = socket(ctx) else { return };
    // SAFETY: the socket is the context's.
    if let Some(key) = unsafe { storage::get(&SOCKET_KEYS, socket) } {
        // SAFETY: the storage lives as long as the socket.
        let key = unsafe { &*key };
        // That the entry is gone already is no error.
        let _ = SOCKETS.remove(key);
    }
}

#[inline(always)]
fn store_key(ctx: &SockOpsContext, socket: *mut bpf_sock) -> Result<&'static SocketKey, Failed> {
    let mut key = own_key(ctx);
    // SAFETY: the socket is the context's.
    let stored = unsafe { storage::create(&SOCKET_KEYS, socket, &mut key) }.ok_or(Failed)?;
    // SAFETY: the storage lives as long as the socket, which outlives the
    // program's run, and nothing writes to it again.
    Ok(unsafe { &*stored })
}

#[inline(always)]
fn register(key: &'static SocketKey, entry: &SocketEntry) -> Outcome {
    SOCKETS
        .insert(key, entry, u64::from(BPF_NOEXIST))
        .map_err(|_| Failed)?;
    Ok(Some(key))
}

/// Lets the server find the namespace of this client.
#[inline(always)]
fn note_namespace(key: &SocketKey) -> Result<(), Failed> {
    if address::is_loopback(key.local()) {
        return Ok(());
    }
    // SAFETY: the value is copied at once.
    let known = unsafe { NAMESPACES.get(key.local()) }.copied();
    if known == Some(key.netns_cookie()) {
        return Ok(());
    }
    let cookie = key.netns_cookie();
    NAMESPACES
        .insert(key.local(), cookie, u64::from(BPF_ANY))
        .map_err(|_| Failed)
}

#[inline(always)]
fn client_namespace(ctx: &SockOpsContext) -> Option<u64> {
    let remote = remote_ip(ctx);
    if address::is_loopback(&remote) {
        return Some(netns_cookie(ctx));
    }
    // SAFETY: the value is copied at once.
    unsafe { NAMESPACES.get(remote) }.copied()
}

#[inline(always)]
fn own_key(ctx: &SockOpsContext) -> SocketKey {
    // SAFETY: the kernel passes a valid context.
    let ops = unsafe { &*ctx.ops };
    let local = address_of(ctx.family(), &ops.local_ip4, &ops.local_ip6);
    SocketKey::new(
        netns_cookie(ctx),
        // local_port is in host byte order, unlike remote_port.
        (local, (ops.local_port as u16).to_be_bytes()),
        (remote_ip(ctx), remote_port(ctx)),
        ops.snd_una,
        ops.rcv_nxt,
    )
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
