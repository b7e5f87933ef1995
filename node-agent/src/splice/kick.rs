//! Wakes the readers of a socket.
//!
//! A reader may not know of bytes that wait for it, see
//! [`step`](super::step). To set `SO_RCVLOWAT` to what it is makes the kernel tell
//! all who wait of the bytes again (`tcp_set_rcvlowat` in `net/ipv4/tcp.c`); for
//! that the socket is taken out of the process that has it (`pidfd_getfd`).

use std::fs;
use std::io;
use std::path::Path;

use crate::bpf::{PidFd, repeat_low_water};

/// Wakes all who wait for this socket to become readable; whether it was found.
///
/// The process that sent last is looked at first, then all others.
pub(super) fn kick(inode: u64, tgid: u32) -> io::Result<bool> {
    let link = format!("socket:[{inode}]");
    if tgid != 0 && kick_in(tgid, &link)? {
        return Ok(true);
    }
    for process in fs::read_dir("/proc")?.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // One that ended meanwhile has nothing any more.
        if pid != tgid && kick_in(pid, &link).unwrap_or(false) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn kick_in(pid: u32, link: &str) -> io::Result<bool> {
    let Ok(files) = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else {
        return Ok(false);
    };
    for file in files.flatten() {
        let is_it = fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == link);
        if !is_it {
            continue;
        }
        let Some(number) = file.file_name().to_str().and_then(|it| it.parse().ok()) else {
            continue;
        };
        let process = PidFd::open(pid)?;
        repeat_low_water(&process.duplicate(number)?)?;
        return Ok(true);
    }
    Ok(false)
}
