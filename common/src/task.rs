//! What the agent asks the program `manage` to do with pairs: an array of
//! [`Task`]s after a header of [`HEADER_BYTES`], which the program answers in
//! place.

use crate::Role;

/// Before the tasks, so that the kernel takes them for a packet: an Ethernet
/// header of zeros, and two bytes to align.
pub const HEADER_BYTES: usize = 16;

/// The most tasks of one run: the kernel takes no more than a page, less what a
/// packet needs (`bpf_prog_test_run_skb` in `net/bpf/test_run.c`).
pub const MAX_TASKS: usize = 16;

/// One thing to do with one pair, and what came of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Task {
    /// The pair's key.
    pub pair: u64,
    /// The two ends, client first: in, the namespace; out, what was seen.
    pub ends: [EndState; 2],
    /// [`Operation`].
    pub operation: u32,
    /// A [`SpliceReason`](crate::SpliceReason): of an inspection or promotion, why not.
    pub verdict: u32,
}

/// One end, as `manage` sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct EndState {
    /// Number of the inode in the process' `/proc/PID/fd`; 0 if unknown.
    pub inode: u64,
    /// Id of its namespace in the agent's (rtnetlink's `NETNSA_NSID`), or
    /// [`OWN_NAMESPACE`].
    pub netns_id: i32,
    /// `copied_seq`: what the application has read of TCP.
    pub copied_seq: u32,
    /// `rcv_nxt`: what TCP has received.
    pub received_seq: u32,
    /// `write_seq`: what the application has written to TCP.
    pub write_seq: u32,
    /// `data_segs_out`: segments with data, a measure of how busy it is.
    pub segments: u32,
    /// `sk_rmem_alloc`, bytes.
    pub unread_bytes: u32,
    /// The process that sent last; 0 if none has.
    pub tgid: u32,
    /// Bits: [`EndState::FOUND`] and so on.
    pub flags: u32,
}

/// Stands for the namespace of the agent (`BPF_F_CURRENT_NETNS`).
pub const OWN_NAMESPACE: i32 = -1;

/// What to do with a pair.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Look, and say why it can't be promoted.
    Inspect = 0,
    /// Put both sockets into the map `splice`, unless something is against it.
    Promote = 1,
    /// Let neither direction redirect any more.
    Freeze = 2,
    /// Take each socket out of the map that nothing is on its way to.
    Release = 3,
    /// Rely on the next message of each end to be redirected.
    Confirm = 4,
}

const _: () = assert!(size_of::<EndState>() == 40);
const _: () = assert!(size_of::<Task>() == 96);
const _: () = assert!(HEADER_BYTES + MAX_TASKS * size_of::<Task>() <= 2048);

impl EndState {
    /// The socket is there.
    pub const FOUND: u32 = 1;
    /// It is in the map `splice`.
    pub const MEMBER: u32 = 1 << 1;
    /// What it sends is redirected.
    pub const ENGAGED: u32 = 1 << 2;
    /// What it sent is not redirected any more.
    pub const LATCHED: u32 = 1 << 3;
    /// Its receive queue holds redirected bytes.
    pub const REDIRECTED_UNREAD: u32 = 1 << 4;
    /// A system call is at work on it.
    pub const IN_USE: u32 = 1 << 5;

    /// Whether all of these bits are set.
    #[inline(always)]
    pub const fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }

    /// Whether TCP bytes, or the end of the stream, wait to be read.
    pub const fn has_tcp_unread(&self) -> bool {
        self.copied_seq != self.received_seq
    }
}

impl Task {
    /// A task for the pair `pair`.
    pub fn new(pair: u64, operation: Operation, netns_ids: [i32; 2]) -> Self {
        let end = |netns_id| EndState {
            netns_id,
            ..EndState::default()
        };
        Self {
            pair,
            ends: netns_ids.map(end),
            operation: operation as u32,
            verdict: 0,
        }
    }

    /// As the program sees it.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the type is repr(C), made of integers, and has no padding.
        unsafe { core::slice::from_raw_parts(core::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// From what the program has made of it; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        // SAFETY: the length is the type's, for which all bytes are valid, and
        // the read needs no alignment.
        (bytes.len() == size_of::<Self>())
            .then(|| unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// One of the ends.
    pub const fn end(&self, role: Role) -> &EndState {
        &self.ends[role as usize]
    }
}
