//! Files of other processes.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// A process, for as long as it lives (`pidfd_open(2)`, Linux 5.3).
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// The process with this id now.
    pub fn open(pid: u32) -> io::Result<Self> {
        // SAFETY: the call takes two integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        // SAFETY: the kernel has just opened this descriptor for us.
        owned(fd).map(|fd| Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The same open file as descriptor `fd` of the process (`pidfd_getfd(2)`,
    /// Linux 5.6; needs CAP_SYS_PTRACE).
    pub fn duplicate(&self, fd: i32) -> io::Result<OwnedFd> {
        // SAFETY: the call takes three integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), fd, 0) };
        // SAFETY: the kernel has just opened this descriptor for us.
        owned(fd).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

fn owned(result: libc::c_long) -> io::Result<i32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(result).map_err(io::Error::other)
}

/// Sets `SO_RCVLOWAT` of a socket to what it is, by which the kernel tells its
/// readers again of what they may read.
pub fn repeat_low_water(socket: &OwnedFd) -> io::Result<()> {
    let mut value: libc::c_int = 0;
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: value and length are ours, and the length is that of the value.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
