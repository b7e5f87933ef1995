//! NETLINK_SOCK_DIAG: lists connected UDP sockets, and destroys one by its cookie.
//!
//! The messages are those of `include/uapi/linux/inet_diag.h`; integers are in
//! the machine's byte order, addresses and ports in the network's.
//!
//! A listing can hold socket storage too, but not that of UDP sockets
//! (`inet_sk_diag_fill` in `net/ipv4/inet_diag.c` is done with them before).

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recvfrom, send,
    setsockopt, socket,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use shunt_common::{ServiceKey, address};

use super::os;
use crate::bpf::netns_cookie_of;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST`, with `NLM_F_DUMP` or `NLM_F_ACK`.
const LIST: u16 = 0x301;
const ACKNOWLEDGE: u16 = 0x5;
/// Of a connected UDP socket, as of a TCP one (`include/net/tcp_states.h`).
const TCP_ESTABLISHED: u32 = 1;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct inet_diag_sockid`.
const ID: usize = 48;
/// The kernel fills up to 32 KiB at once (`netlink_dump` in
/// `net/netlink/af_netlink.c`).
const BUFFER: usize = 64 * 1024;
/// The kernel answers within the call; only a fault could take so long.
const PATIENCE_SECONDS: i64 = 5;

/// An address family, as its `AF_` number.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Family {
    V4 = libc::AF_INET as u8,
    V6 = libc::AF_INET6 as u8,
}

/// A UDP socket, as listed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct UdpSocket {
    family: Family,
    /// Ports, addresses, interface and cookie.
    id: [u8; ID],
}

/// The sockets of one network namespace.
pub(super) struct SocketDiag {
    netlink: OwnedFd,
}

impl UdpSocket {
    /// One that can't be there: a socket without a port is in no table.
    pub(super) const NONE: Self = Self {
        family: Family::V4,
        id: [0; ID],
    };

    /// The number that no other socket of this machine has or had (`SO_COOKIE`):
    /// two words, the lower one first (`sock_diag_save_cookie`).
    pub(super) fn cookie(&self) -> u64 {
        let word = |at| u32::from_ne_bytes(std::array::from_fn(|index| self.id[at + index]));
        u64::from(word(44)) << 32 | u64::from(word(40))
    }

    #[cfg(test)]
    pub(super) fn connected_to(peer: std::net::SocketAddr) -> Self {
        let mut socket = Self::NONE;
        socket.id[2..4].copy_from_slice(&peer.port().to_be_bytes());
        match peer.ip() {
            std::net::IpAddr::V4(ip) => socket.id[20..24].copy_from_slice(&ip.octets()),
            std::net::IpAddr::V6(ip) => {
                socket.family = Family::V6;
                socket.id[20..36].copy_from_slice(&ip.octets());
            }
        }
        socket
    }

    /// Address and port that it is connected to, as maps have them.
    pub(super) fn peer(&self) -> ([u8; 16], [u8; 2]) {
        let bytes = std::array::from_fn(|index| self.id[20 + index]);
        let ip = match self.family {
            Family::V4 => address::mapped([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Family::V6 => bytes,
        };
        (ip, [self.id[2], self.id[3]])
    }
}

impl SocketDiag {
    /// For the namespace that the thread is in now.
    pub(super) fn open() -> io::Result<Self> {
        let netlink = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )
        .map_err(os)?;
        setsockopt(
            &netlink,
            ReceiveTimeout,
            &TimeVal::seconds(PATIENCE_SECONDS),
        )
        .map_err(os)?;
        Ok(Self { netlink })
    }

    /// Cookie of the namespace; `None` if this kernel does not tell.
    pub(super) fn netns_cookie(&self) -> Option<u64> {
        netns_cookie_of(self.netlink.as_fd()).ok()
    }

    /// The connected sockets.
    pub(super) fn connected(&self, family: Family) -> io::Result<Vec<UdpSocket>> {
        let mut request = request(SOCK_DIAG_BY_FAMILY, LIST, family, 1 << TCP_ESTABLISHED);
        request.extend(UdpSocket::NONE.id);
        let mut sockets = Vec::new();
        self.call(request, |listed| sockets.extend(parse(listed)))?;
        Ok(sockets)
    }

    /// Fails with ENOENT if UDP sockets can't be listed.
    pub(super) fn can_list(&self) -> io::Result<()> {
        let mut request = request(SOCK_DIAG_BY_FAMILY, LIST, Family::V4, 0);
        request.extend(UdpSocket::NONE.id);
        self.call(request, |_| {})
    }

    /// Aborts a socket; `false` if it is not there any more, or is connected to
    /// something else by now. (One that was disconnected meanwhile and keeps its
    /// port is found too, and gets an error that it could have got before.)
    ///
    /// # Errors
    ///
    /// EOPNOTSUPP if sockets can't be destroyed.
    pub(super) fn destroy(&self, socket: &UdpSocket) -> io::Result<bool> {
        let mut request = request(SOCK_DESTROY, ACKNOWLEDGE, socket.family, 0);
        request.extend(socket.id);
        match self.call(request, |_| {}) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Sends a request and reads all answers to it.
    fn call(&self, mut request: Vec<u8>, mut listed: impl FnMut(&[u8])) -> io::Result<()> {
        let length = u32::try_from(request.len()).map_err(io::Error::other)?;
        request[..4].copy_from_slice(&length.to_ne_bytes());
        send(self.netlink.as_raw_fd(), &request, MsgFlags::empty()).map_err(os)?;
        let mut buffer = vec![0; BUFFER];
        loop {
            let (length, from) =
                recvfrom::<NetlinkAddr>(self.netlink.as_raw_fd(), &mut buffer).map_err(os)?;
            if from.is_none_or(|from| from.pid() != 0) {
                // Not from the kernel.
                continue;
            }
            for (kind, payload) in messages(&buffer[..length]) {
                match kind {
                    SOCK_DIAG_BY_FAMILY => listed(payload),
                    NLMSG_DONE | NLMSG_ERROR => return ended(payload),
                    _ => {}
                }
            }
        }
    }
}

/// A request without its length, and with all of `struct inet_diag_req_v2` but
/// the id.
fn request(kind: u16, flags: u16, family: Family, states: u32) -> Vec<u8> {
    let mut request = vec![0; 4];
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence and port, which one request at a time needs not.
    request.extend([0; 8]);
    request.extend([family as u8, ServiceKey::UDP, 0, 0]);
    request.extend(states.to_ne_bytes());
    request
}

/// Type and payload of each message. Ends where a length can't be right.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = bytes.get(..HEADER)?;
        let length = u32::from_ne_bytes(*header.first_chunk()?) as usize;
        let payload = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([header[4], header[5]]), payload))
    })
}

/// Both kinds of last messages begin with 0 or a negated errno.
fn ended(payload: &[u8]) -> io::Result<()> {
    match payload
        .first_chunk()
        .map(|bytes| i32::from_ne_bytes(*bytes))
    {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(error.wrapping_neg())),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// `struct inet_diag_msg`; `None` if that is not what it is.
fn parse(listed: &[u8]) -> Option<UdpSocket> {
    let family = match i32::from(*listed.first()?) {
        libc::AF_INET => Family::V4,
        libc::AF_INET6 => Family::V6,
        _ => return None,
    };
    let id = *listed.get(4..)?.first_chunk()?;
    Some(UdpSocket { family, id })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket as StdUdpSocket;

    use nix::sys::socket::getsockopt;
    use nix::sys::socket::sockopt::GetStruct;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_end_is_an_error_or_not() {
        assert!(ended(&0_i32.to_ne_bytes()).is_ok());
        let error = ended(&(-libc::EPERM).to_ne_bytes()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert!(ended(&[0; 3]).is_err());
    }

    #[test]
    fn the_kernel_lists_the_sockets_of_this_process() {
        for (any, family) in [("127.0.0.1:0", Family::V4), ("[::1]:0", Family::V6)] {
            let socket = StdUdpSocket::bind(any).unwrap();
            let own = socket.local_addr().unwrap();
            socket.connect(own).unwrap();
            let listed = SocketDiag::open().unwrap().connected(family).unwrap();
            let peer = (address::from_ip(own.ip()), own.port().to_be_bytes());
            let found: Vec<_> = listed.iter().filter(|it| it.peer() == peer).collect();
            assert_eq!(found.len(), 1, "{own}: {listed:?}");
            assert_eq!(found[0].cookie(), getsockopt(&socket, Cookie).unwrap());
        }
    }

    #[derive(Clone, Copy)]
    struct Cookie;

    nix::getsockopt_impl!(
        Cookie,
        libc::SOL_SOCKET,
        libc::SO_COOKIE,
        u64,
        GetStruct<u64>
    );

    proptest! {
        #[test]
        fn nothing_that_comes_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            for (_, payload) in messages(&bytes) {
                let _ = (parse(payload), ended(payload));
            }
            let _ = parse(&[&[libc::AF_INET as u8][..], &bytes].concat());
        }
    }
}
