//! Fields of the kernel's own structs, read where no helper tells them.
//!
//! Addresses are numbers here: they are read through a helper that fails rather
//! than faults, so that what is gone meanwhile reads as garbage or nothing, and
//! nothing worse. Who uses such a value proves by other means that its owner was
//! there: see [`splice`](crate::splice).
//!
//! The offsets, in bytes, come from the kernel's BTF, by way of the agent
//! (`node-agent/src/bpf/offsets.rs`).

use aya_ebpf::Global;
use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_skc_to_tcp_sock};
use shunt_common::End;

/// What the agent sets where a kernel has no such field.
const ABSENT: u32 = u32::MAX;

macro_rules! offsets {
    ($($name:ident)+) => {
        $(
            #[unsafe(no_mangle)]
            static $name: Global<u32> = Global::new(0);
        )+
    };
}

offsets! {
    OFFSET_WRITE_SEQ OFFSET_COPIED_SEQ OFFSET_RCV_NXT OFFSET_DATA_SEGS_OUT OFFSET_NONAGLE
    OFFSET_IS_MPTCP OFFSET_ULP_OPS
    OFFSET_STATE OFFSET_SHUTDOWN OFFSET_RMEM_ALLOC OFFSET_RCVLOWAT OFFSET_SOCK_FLAGS
    OFFSET_TSFLAGS OFFSET_PEEK_OFF OFFSET_USER_DATA OFFSET_SOCKET
    OFFSET_FILE OFFSET_FILE_FLAGS OFFSET_FILE_INODE OFFSET_INODE_NUMBER
    OFFSET_PSOCK_INGRESS OFFSET_PSOCK_REFCOUNT
    OFFSET_ERROR
    OFFSET_CGROUP OFFSET_KERNFS_NODE OFFSET_KERNFS_ID
    OFFSET_TASK_FILES OFFSET_FILE_TABLE OFFSET_FILE_ARRAY OFFSET_FILE_PRIVATE OFFSET_INODE_MODE
    OFFSET_SOCKET_TYPE OFFSET_SOCKET_SOCK OFFSET_FAMILY OFFSET_FIRST_ARGUMENT
}

/// Masks of `SOCK_ZEROCOPY`, and of `SOCK_RCVTSTAMP`, in `sk_flags`; the numbers of
/// the bits are not part of any interface.
#[unsafe(no_mangle)]
static ZERO_COPY_FLAG: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
static TIMESTAMP_FLAG: Global<u64> = Global::new(0);

/// `O_NONBLOCK` on all of Linux' architectures that shunt is built for.
const O_NONBLOCK: u32 = 0o4000;
/// `TCP_NAGLE_OFF` and `TCP_NAGLE_CORK` in `include/net/tcp.h`.
const NAGLE_MASK: u8 = 0b11;
/// Flags in the low bits of `sk_user_data` (`include/net/sock.h`).
const USER_DATA_FLAGS: u64 = 0b111;

/// Nothing could be read.
pub(crate) struct Unreadable;

/// The error of a TCP socket of the running program's context, which is not null:
/// an errno; 0 if it has none, or if that can't be known.
#[inline(always)]
pub(crate) fn error(socket: *mut bpf_sock) -> u32 {
    if OFFSET_ERROR.load() == 0 {
        return 0;
    }
    // SAFETY: the helper takes a socket.
    let tcp_sock = unsafe { bpf_skc_to_tcp_sock(socket.cast()) };
    if tcp_sock.is_null() {
        return 0;
    }
    read(tcp_sock as u64, &OFFSET_ERROR).unwrap_or(0)
}

/// Address of a `struct tcp_sock`.
#[derive(Clone, Copy)]
pub(crate) struct TcpSock(u64);

/// Address of a `struct file`.
#[derive(Clone, Copy)]
pub(crate) struct File(u64);

/// Address of a `struct sk_psock`: what a socket gets that is in a socket map.
#[derive(Clone, Copy)]
pub(crate) struct Psock(u64);

#[inline(always)]
fn read<T: Copy>(address: u64, offset: &Global<u32>) -> Result<T, Unreadable> {
    read_at(address + u64::from(offset.load()))
}

#[inline(always)]
fn read_at<T: Copy>(address: u64) -> Result<T, Unreadable> {
    let field = address as *const T;
    // SAFETY: the helper checks the address and fails rather than faults.
    unsafe { bpf_probe_read_kernel(field) }.map_err(|_| Unreadable)
}

impl TcpSock {
    /// Of an end. The address is read anew: where the compiler knows that it equals
    /// a pointer, it counts with that one, which the verifier forbids.
    #[inline(always)]
    pub(crate) fn of(end: &End) -> Self {
        let address: *const u64 = &end.tcp_sock;
        // SAFETY: a field of a map's value.
        Self(unsafe { address.read_volatile() })
    }

    #[inline(always)]
    pub(crate) fn write_seq(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_WRITE_SEQ)
    }

    #[inline(always)]
    pub(crate) fn copied_seq(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_COPIED_SEQ)
    }

    #[inline(always)]
    pub(crate) fn received_seq(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_RCV_NXT)
    }

    #[inline(always)]
    pub(crate) fn segments(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_DATA_SEGS_OUT)
    }

    /// Whether small writes may wait to be sent together.
    #[inline(always)]
    pub(crate) fn has_nagle(self) -> Result<bool, Unreadable> {
        Ok(read::<u8>(self.0, &OFFSET_NONAGLE)? & NAGLE_MASK != 1)
    }

    #[inline(always)]
    pub(crate) fn is_mptcp(self) -> Result<bool, Unreadable> {
        Ok(OFFSET_IS_MPTCP.load() != ABSENT && read::<u8>(self.0, &OFFSET_IS_MPTCP)? != 0)
    }

    #[inline(always)]
    pub(crate) fn has_upper_layer(self) -> Result<bool, Unreadable> {
        Ok(read::<u64>(self.0, &OFFSET_ULP_OPS)? != 0)
    }

    #[inline(always)]
    pub(crate) fn state(self) -> Result<u8, Unreadable> {
        read(self.0, &OFFSET_STATE)
    }

    #[inline(always)]
    pub(crate) fn shutdown(self) -> Result<u8, Unreadable> {
        read(self.0, &OFFSET_SHUTDOWN)
    }

    #[inline(always)]
    pub(crate) fn unread_bytes(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_RMEM_ALLOC)
    }

    #[inline(always)]
    pub(crate) fn low_water(self) -> Result<u32, Unreadable> {
        read(self.0, &OFFSET_RCVLOWAT)
    }

    #[inline(always)]
    pub(crate) fn is_zero_copy(self) -> Result<bool, Unreadable> {
        Ok(read::<u64>(self.0, &OFFSET_SOCK_FLAGS)? & ZERO_COPY_FLAG.load() != 0)
    }

    #[inline(always)]
    pub(crate) fn has_timestamps(self) -> Result<bool, Unreadable> {
        let is_old_form = read::<u64>(self.0, &OFFSET_SOCK_FLAGS)? & TIMESTAMP_FLAG.load() != 0;
        Ok(is_old_form || read::<u32>(self.0, &OFFSET_TSFLAGS)? != 0)
    }

    /// Whether a peek begins elsewhere than at the first unread byte.
    #[inline(always)]
    pub(crate) fn has_peek_offset(self) -> Result<bool, Unreadable> {
        Ok(read::<i32>(self.0, &OFFSET_PEEK_OFF)? >= 0)
    }

    /// Id of the cgroup of the process that made it, or its listener.
    #[inline(always)]
    pub(crate) fn cgroup_id(self) -> Result<u64, Unreadable> {
        let cgroup: u64 = read(self.0, &OFFSET_CGROUP)?;
        let node: u64 = read(cgroup, &OFFSET_KERNFS_NODE)?;
        read(node, &OFFSET_KERNFS_ID)
    }

    /// The file of the process, or of one of them; none once it is closed.
    #[inline(always)]
    pub(crate) fn file(self) -> Result<File, Unreadable> {
        let socket: u64 = read(self.0, &OFFSET_SOCKET)?;
        if socket == 0 {
            return Err(Unreadable);
        }
        match read(socket, &OFFSET_FILE)? {
            0 => Err(Unreadable),
            file => Ok(File(file)),
        }
    }

    /// `None` if it is in no socket map.
    #[inline(always)]
    pub(crate) fn psock(self) -> Result<Option<Psock>, Unreadable> {
        match read::<u64>(self.0, &OFFSET_USER_DATA)? & !USER_DATA_FLAGS {
            0 => Ok(None),
            psock => Ok(Some(Psock(psock))),
        }
    }
}

/// The `struct sock` of a `struct socket`.
///
/// # Safety
///
/// The verifier must know `socket` as one.
#[inline(always)]
pub(crate) unsafe fn sock_of(socket: *const u8) -> *mut bpf_sock {
    let field = socket.wrapping_add(OFFSET_SOCKET_SOCK.load() as usize);
    // SAFETY: the caller's promise.
    unsafe { field.cast::<*mut bpf_sock>().read_volatile() }
}

/// Address of a `struct pt_regs`, at the entry of a system call.
#[derive(Clone, Copy)]
pub(crate) struct Registers(pub(crate) u64);

impl Registers {
    #[inline(always)]
    pub(crate) fn first_argument(self) -> Result<u64, Unreadable> {
        read(self.0, &OFFSET_FIRST_ARGUMENT)
    }
}

const S_IFMT: u16 = 0o170_000;
const S_IFSOCK: u16 = 0o140_000;
const SOCK_STREAM: u16 = 1;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

impl File {
    /// What a descriptor of the current process is.
    #[inline(always)]
    pub(crate) fn of_current(descriptor: u64) -> Result<Self, Unreadable> {
        // SAFETY: the helper takes nothing and returns an address.
        let task = unsafe { bpf_get_current_task() };
        let files: u64 = read(task, &OFFSET_TASK_FILES)?;
        let table: u64 = read(files, &OFFSET_FILE_TABLE)?;
        let array: u64 = read(table, &OFFSET_FILE_ARRAY)?;
        // What is beyond the table reads as garbage, or not at all.
        match read_at(array + (descriptor & 0xffff_ffff) * 8)? {
            0 => Err(Unreadable),
            file => Ok(Self(file)),
        }
    }

    /// Whether it is a socket of TCP, or another stream of the Internet's.
    #[inline(always)]
    pub(crate) fn is_internet_stream(self) -> bool {
        let is_it = || {
            let inode: u64 = read(self.0, &OFFSET_FILE_INODE)?;
            if read::<u16>(inode, &OFFSET_INODE_MODE)? & S_IFMT != S_IFSOCK {
                return Ok(false);
            }
            let socket: u64 = read(self.0, &OFFSET_FILE_PRIVATE)?;
            let sock: u64 = read(socket, &OFFSET_SOCKET_SOCK)?;
            let family: u16 = read(sock, &OFFSET_FAMILY)?;
            let is_internet = family == AF_INET || family == AF_INET6;
            Ok(is_internet && read::<u16>(socket, &OFFSET_SOCKET_TYPE)? == SOCK_STREAM)
        };
        let is_it: Result<bool, Unreadable> = is_it();
        is_it.unwrap_or(false)
    }

    #[inline(always)]
    pub(crate) fn is_non_blocking(self) -> Result<bool, Unreadable> {
        Ok(read::<u32>(self.0, &OFFSET_FILE_FLAGS)? & O_NONBLOCK != 0)
    }

    #[inline(always)]
    pub(crate) fn inode(self) -> Result<u64, Unreadable> {
        let inode: u64 = read(self.0, &OFFSET_FILE_INODE)?;
        read(inode, &OFFSET_INODE_NUMBER)
    }
}

impl Psock {
    /// Whether redirected bytes wait to be read: a list that does not point at
    /// itself.
    #[inline(always)]
    pub(crate) fn has_unread(self) -> Result<bool, Unreadable> {
        let head = self.0 + u64::from(OFFSET_PSOCK_INGRESS.load());
        Ok(read::<u64>(self.0, &OFFSET_PSOCK_INGRESS)? != head)
    }

    /// Whether a system call is at work on the socket: each holds a reference,
    /// and the map one.
    #[inline(always)]
    pub(crate) fn is_in_use(self) -> Result<bool, Unreadable> {
        Ok(read::<u32>(self.0, &OFFSET_PSOCK_REFCOUNT)? != 1)
    }
}
