//! rtnetlink's numbers of network namespaces (`include/uapi/linux/net_namespace.h`).

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::thread;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recvfrom, send, socket,
};

use super::namespaces::visit_namespaces;
use super::sys::netns_cookie_of;

const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST`, and with `NLM_F_ACK`.
const REQUEST: u16 = 0x1;
const ACKNOWLEDGE: u16 = 0x5;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// `struct nlmsghdr`, and `struct rtgenmsg` with its padding.
const HEADER: usize = 16;
const GENERIC: usize = 4;
/// The kernel chooses a number.
const ANY: i32 = -1;

/// The number that this thread's network namespace has for each other one in
/// which a process is, by cookie. Those without get one.
pub fn namespace_ids() -> io::Result<Vec<(u64, i32)>> {
    let netlink = Netlink::open()?;
    // A thread that ends leaves the last namespace that it entered.
    thread::scope(|scope| {
        let visit = scope.spawn(move || {
            let mut ids = Vec::new();
            let failures = visit_namespaces(|| {
                let here = File::open("/proc/thread-self/ns/net")?;
                // Any socket tells the cookie of its namespace.
                let cookie = netns_cookie_of(Netlink::open()?.0.as_fd())?;
                if let Some(id) = netlink.id(&here)? {
                    ids.push((cookie, id));
                }
                Ok(ControlFlow::Continue(()))
            });
            match failures.into_iter().next() {
                Some(error) if ids.is_empty() => Err(error),
                _ => Ok(ids),
            }
        });
        visit.join().expect("looking does not panic")
    })
}

struct Netlink(OwnedFd);

impl Netlink {
    fn open() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        Ok(Self(socket))
    }

    /// The number of a namespace; `None` for the socket's own.
    fn id(&self, namespace: &File) -> io::Result<Option<i32>> {
        let fd = namespace.as_raw_fd();
        let new = [(NETNSA_NSID, ANY), (NETNSA_FD, fd)];
        match self.call(RTM_NEWNSID, ACKNOWLEDGE, &new) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(error),
            _ => {}
        }
        let answer = self.call(RTM_GETNSID, REQUEST, &[(NETNSA_FD, fd)])?;
        Ok(answer.filter(|id| *id >= 0))
    }

    /// Sends a request and gives the number in the answer, if there is one.
    fn call(&self, kind: u16, flags: u16, attributes: &[(u16, i32)]) -> io::Result<Option<i32>> {
        let length = HEADER + GENERIC + 8 * attributes.len();
        let mut request = u32::try_from(length)
            .map_err(io::Error::other)?
            .to_ne_bytes()
            .to_vec();
        request.extend(kind.to_ne_bytes());
        request.extend(flags.to_ne_bytes());
        // Sequence and port, which one request at a time needs not; then a family
        // and padding.
        request.extend([0; 8 + GENERIC]);
        for (attribute, value) in attributes {
            request.extend(8_u16.to_ne_bytes());
            request.extend(attribute.to_ne_bytes());
            request.extend(value.to_ne_bytes());
        }
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut buffer = [0; 1024];
        loop {
            let (length, from) = recvfrom::<NetlinkAddr>(self.0.as_raw_fd(), &mut buffer)?;
            if from.is_some_and(|from| from.pid() == 0) {
                return parse(&buffer[..length]);
            }
        }
    }
}

/// The number in an answer, or the error that it is.
fn parse(answer: &[u8]) -> io::Result<Option<i32>> {
    let short = || io::Error::other("a netlink answer is cut off");
    let word = |at: usize| {
        let bytes = answer.get(at..at + 4).ok_or_else(short)?;
        Ok::<_, io::Error>(i32::from_ne_bytes(
            bytes.try_into().map_err(io::Error::other)?,
        ))
    };
    let kind = answer.get(4..6).ok_or_else(short)?;
    if kind == NLMSG_ERROR.to_ne_bytes() {
        return match word(HEADER)? {
            0 => Ok(None),
            errno => Err(io::Error::from_raw_os_error(-errno)),
        };
    }
    let mut at = HEADER + GENERIC;
    while let Some(header) = answer.get(at..at + 4) {
        let length = u16::from_ne_bytes([header[0], header[1]]);
        if u16::from_ne_bytes([header[2], header[3]]) == NETNSA_NSID {
            return word(at + 4).map(Some);
        }
        if length < 4 {
            break;
        }
        at += usize::from(length).next_multiple_of(4);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
        let length = HEADER + payload.len();
        let mut message = (length as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(payload);
        message
    }

    #[test]
    fn an_answer_is_a_number_or_an_error_and_never_read_beyond_its_end() {
        let mut payload = vec![0; GENERIC];
        payload.extend([8, 0, 9, 0, 1, 0, 0, 0, 8, 0, 1, 0, 7, 0, 0, 0]);
        let answer = message(RTM_NEWNSID, &payload);
        assert_eq!(parse(&answer).unwrap(), Some(7));
        for length in 0..answer.len() {
            assert_ne!(parse(&answer[..length]).ok().flatten(), Some(7), "{length}");
        }
        let error = message(NLMSG_ERROR, &(-libc::EEXIST).to_ne_bytes());
        let errno = parse(&error).unwrap_err().raw_os_error();
        assert_eq!(errno, Some(libc::EEXIST));
        let done = message(NLMSG_ERROR, &0_i32.to_ne_bytes());
        assert_eq!(parse(&done).unwrap(), None);
    }
}
