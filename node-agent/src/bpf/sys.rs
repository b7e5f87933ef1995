//! The few system calls that aya and std have no function for, most of them
//! `bpf(2)` commands.

use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aya::Pod;
use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_link_type};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::GetStruct;

/// What a pinned cgroup link is attached to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct LinkInfo {
    /// The link's id.
    pub(super) link_id: u32,
    /// Id of the program inside.
    pub(super) program_id: u32,
    /// Id of the cgroup, which is its inode number; 0 once the cgroup is gone, and
    /// `None` for what is attached to something else.
    pub(super) cgroup_id: Option<u64>,
}

/// Cookie of this thread's network namespace: the host's, where the agent is
/// meant to run.
pub fn netns_cookie() -> io::Result<u64> {
    netns_cookie_of(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.as_fd())
}

/// Cookie of a socket's network namespace (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn netns_cookie_of(socket: BorrowedFd<'_>) -> io::Result<u64> {
    getsockopt(&socket, NetnsCookie).map_err(io::Error::from)
}

#[derive(Clone, Copy)]
struct NetnsCookie;

nix::getsockopt_impl!(
    NetnsCookie,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64,
    GetStruct<u64>
);

/// Number that no other socket of this machine has or had (`SO_COOKIE`).
pub fn socket_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: value and length are ours, and the length is that of the value.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(cookie)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// What `FIONREAD` tells of a socket.
pub fn unread_bytes(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer there.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if result == 0 {
        u32::try_from(bytes).map_err(io::Error::other)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Opens a pinned object.
pub(super) fn open_pinned(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    let fd = bpf(bpf_cmd::BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins an object.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = object.as_raw_fd().cast_unsigned();
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Attaches a program, without flags, so that it coexists with those of others.
pub(super) fn create_link(
    program: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    attach_type: bpf_attach_type,
) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd().cast_unsigned();
    attr.link_create.__bindgen_anon_2.target_fd = target.as_raw_fd().cast_unsigned();
    attr.link_create.attach_type = attach_type as u32;
    let fd = bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr)?;
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Replaces the program inside a link.
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = zeroed();
    attr.link_update.link_fd = link.as_raw_fd().cast_unsigned();
    attr.link_update.__bindgen_anon_1.new_prog_fd = program.as_raw_fd().cast_unsigned();
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// What a cgroup link is attached to.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    // SAFETY: bpf_link_info is plain integers, for which zeros are valid.
    let mut info: bpf_link_info = unsafe { std::mem::zeroed() };
    let mut attr = zeroed();
    attr.info.bpf_fd = link.as_raw_fd().cast_unsigned();
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = &raw mut info as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    let is_of_cgroup = info.type_ == bpf_link_type::BPF_LINK_TYPE_CGROUP as u32;
    // SAFETY: of another type this is some other integer, or a part of a pointer.
    let cgroup_id = unsafe { info.__bindgen_anon_1.cgroup.cgroup_id };
    let cgroup_id = is_of_cgroup.then_some(cgroup_id);
    Ok(LinkInfo {
        link_id: info.id,
        program_id: info.prog_id,
        cgroup_id,
    })
}

/// Writes many elements of a hash map with one call (Linux 5.6).
///
/// # Errors
///
/// The errno, after which some of the elements may have been written.
pub(super) fn update_batch<K: Pod, V: Pod>(
    map: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> io::Result<()> {
    debug_assert_eq!(keys.len(), values.len());
    if keys.is_empty() {
        return Ok(());
    }
    let mut attr = zeroed();
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.values = values.as_ptr() as u64;
    attr.batch.count = u32::try_from(keys.len()).map_err(io::Error::other)?;
    attr.batch.map_fd = map.as_raw_fd().cast_unsigned();
    bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr).map(drop)
}

/// Counts the elements of a hash map. Those that others insert or delete
/// meanwhile may count or not.
pub(super) fn count<K: Pod, V: Pod>(map: BorrowedFd<'_>) -> io::Result<usize> {
    let mut total = 0;
    walk(map, |keys: &[K], _: &[V]| total += keys.len())?;
    Ok(total)
}

/// The elements of a hash map, as far as others do not change them meanwhile.
/// To go from key to key, as `BPF_MAP_GET_NEXT_KEY` does, begins anew whenever
/// the last key was deleted, and may never end where much comes and goes.
pub(super) fn elements<K: Pod, V: Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    let mut elements = Vec::new();
    walk(map, |keys, values| {
        elements.extend(keys.iter().copied().zip(values.iter().copied()));
    })?;
    Ok(elements)
}

/// Shows all elements of a hash map, many with one call (Linux 5.6).
fn walk<K: Pod, V: Pod>(map: BorrowedFd<'_>, mut show: impl FnMut(&[K], &[V])) -> io::Result<()> {
    // A bucket is told whole or not at all, and is rarely longer than a few.
    const AT_ONCE: usize = 4096;
    let mut keys = Vec::<K>::with_capacity(AT_ONCE);
    let mut values = Vec::<V>::with_capacity(AT_ONCE);
    // Where to go on: for hash maps a bucket's number
    // (`__htab_map_lookup_and_delete_batch` in `kernel/bpf/hashtab.c`).
    let mut bucket = 0_u32;
    let mut first = true;
    loop {
        let mut attr = zeroed();
        if !first {
            attr.batch.in_batch = &raw const bucket as u64;
        }
        attr.batch.out_batch = &raw mut bucket as u64;
        attr.batch.keys = keys.as_mut_ptr() as u64;
        attr.batch.values = values.as_mut_ptr() as u64;
        attr.batch.count = AT_ONCE as u32;
        attr.batch.map_fd = map.as_raw_fd().cast_unsigned();
        let result = bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr);
        // SAFETY: the kernel has written the count, also with ENOENT.
        let count = (unsafe { attr.batch.count } as usize).min(AT_ONCE);
        let is_end = match result {
            Ok(_) => false,
            // That was the end.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) => return Err(error),
        };
        // SAFETY: the kernel has written so many of each, and every `Pod` is valid
        // whatever its bytes are.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        show(&keys, &values);
        if is_end {
            return Ok(());
        }
        first = false;
    }
}

/// Ids of the programs attached to a map or cgroup with this attach type
/// (`enum bpf_attach_type`; for maps since Linux 5.17).
pub(super) fn attached_programs(target: BorrowedFd<'_>, attach_type: u32) -> io::Result<Vec<u32>> {
    let mut ids = [0_u32; 16];
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_fd = target.as_raw_fd().cast_unsigned();
    attr.query.attach_type = attach_type;
    attr.query.prog_ids = ids.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.prog_cnt = ids.len() as u32;
    bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr)?;
    // SAFETY: the kernel has written the count; the other member of the union
    // is the same integer under another name.
    let count = unsafe { attr.query.__bindgen_anon_2.prog_cnt };
    Ok(ids[..ids.len().min(count as usize)].to_vec())
}

/// Runs a program `repeat` times on a packet, which it may change in place.
pub(super) fn test_run(program: BorrowedFd<'_>, packet: &mut [u8], repeat: u32) -> io::Result<()> {
    let length = u32::try_from(packet.len()).map_err(io::Error::other)?;
    let mut attr = zeroed();
    attr.test.prog_fd = program.as_raw_fd().cast_unsigned();
    attr.test.data_in = packet.as_ptr() as u64;
    attr.test.data_size_in = length;
    attr.test.data_out = packet.as_mut_ptr() as u64;
    attr.test.data_size_out = length;
    attr.test.repeat = repeat;
    bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr).map(drop)
}

fn zeroed() -> bpf_attr {
    // SAFETY: bpf_attr is a union of plain integers, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}

fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    let size = size_of::<bpf_attr>();
    // SAFETY: `attr` is valid for `size` bytes, and every pointer that the
    // caller put into it outlives this call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, size) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(result).map_err(io::Error::other)
}
