//! Socket options and what the kernel knows of a socket.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use nix::libc;
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};

use super::plan::{End, Mark, Style};

mod ioctl {
    use nix::libc;

    nix::ioctl_read_bad!(unread, libc::FIONREAD, libc::c_int);
    nix::ioctl_read_bad!(unsent, libc::TIOCOUTQ, libc::c_int);
}

/// Bytes of small socket buffers; the kernel doubles them. A receive buffer below
/// the largest packet of a loopback device stalls TCP itself.
const SMALL_RECEIVE_BUFFER: usize = 128 * 1024;
const SMALL_SEND_BUFFER: usize = 8 * 1024;

/// Prepares a connected socket as the plan says. Nothing here fails on TCP.
pub(super) fn prepare(fd: BorrowedFd<'_>, end: &End) {
    let expect = "a connected TCP socket takes this option";
    setsockopt(&fd, sockopt::TcpNoDelay, &end.nodelay).expect(expect);
    if end.small_buffers {
        setsockopt(&fd, sockopt::RcvBuf, &SMALL_RECEIVE_BUFFER).expect(expect);
        setsockopt(&fd, sockopt::SndBuf, &SMALL_SEND_BUFFER).expect(expect);
    }
}

/// Makes a blocking socket's calls give EAGAIN after so long.
pub(super) fn limit_blocking(fd: BorrowedFd<'_>, time: Duration) {
    let expect = "a TCP socket takes a time-out";
    let time = nix::sys::time::TimeVal::new(time.as_secs() as i64, time.subsec_micros().into());
    setsockopt(&fd, sockopt::ReceiveTimeout, &time).expect(expect);
    setsockopt(&fd, sockopt::SendTimeout, &time).expect(expect);
}

/// A reset connection refuses some options; then the mark no longer matters.
pub(super) fn set_mark(fd: BorrowedFd<'_>, mark: Mark) {
    match mark {
        Mark::LowWater => set_low_water(fd, 2),
        Mark::ZeroCopy => set(fd, libc::SO_ZEROCOPY, 1),
        Mark::Timestamping => {
            let flags = libc::SOF_TIMESTAMPING_RX_SOFTWARE | libc::SOF_TIMESTAMPING_SOFTWARE;
            set(fd, libc::SO_TIMESTAMPING, flags as i32);
        }
    }
}

pub(super) fn set_low_water(fd: BorrowedFd<'_>, bytes: i32) {
    set(fd, libc::SO_RCVLOWAT, bytes);
}

fn set(fd: BorrowedFd<'_>, option: i32, value: i32) {
    // SAFETY: the value lives through the call, and its size is told.
    let _refused = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
}

/// FIONREAD; 0 if it fails.
pub(super) fn unread(fd: BorrowedFd<'_>) -> i32 {
    let mut bytes = 0;
    // SAFETY: the kernel writes one int there.
    let result = unsafe { ioctl::unread(fd.as_raw_fd(), &raw mut bytes) };
    result.map_or(0, |_| bytes)
}

/// What recv() would give: a number of bytes, or an error.
pub(super) fn peek(fd: BorrowedFd<'_>) -> nix::Result<usize> {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    recv(fd.as_raw_fd(), &mut [0; 4096], flags)
}

/// What the kernel knows, for a fault's description.
pub(super) fn describe(fd: BorrowedFd<'_>) -> String {
    let mut unsent = 0;
    // SAFETY: the kernel writes one int there.
    let result = unsafe { ioctl::unsent(fd.as_raw_fd(), &raw mut unsent) };
    let unsent = result.map_or(-1, |_| unsent);
    let address = |text: io::Result<std::net::SocketAddr>| match text {
        Ok(address) => address.to_string(),
        Err(error) => error.to_string(),
    };
    let socket = socket2_view(fd);
    let (local, peer) = match &socket {
        Ok(stream) => (address(stream.local_addr()), address(stream.peer_addr())),
        Err(error) => (error.to_string(), String::new()),
    };
    format!(
        "FIONREAD {}, SIOCOUTQ {unsent}, peek {:?}, {local} -> {peer}",
        unread(fd),
        peek(fd)
    )
}

fn socket2_view(fd: BorrowedFd<'_>) -> io::Result<std::net::TcpStream> {
    Ok(fd.try_clone_to_owned()?.into())
}

/// Whether a style needs a blocking socket.
pub(super) fn is_blocking(style: Style) -> bool {
    style == Style::Blocking
}
