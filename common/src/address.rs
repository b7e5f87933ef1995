//! Addresses as the maps keep them: 16 bytes, IPv4 as IPv4-mapped IPv6.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The first twelve bytes of an IPv4-mapped address.
const MAPPED_PREFIX: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The IPv4-mapped form of an IPv4 address in network byte order.
#[inline(always)]
pub const fn mapped(v4: [u8; 4]) -> [u8; 16] {
    [
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, v4[0], v4[1], v4[2], v4[3],
    ]
}

/// The IPv4 address inside a mapped one.
#[inline(always)]
pub fn unmapped(address: &[u8; 16]) -> Option<[u8; 4]> {
    let [prefix @ .., a, b, c, d] = address;
    (*prefix == MAPPED_PREFIX).then_some([*a, *b, *c, *d])
}

/// Whether this is an IPv4 address.
#[inline(always)]
pub fn is_mapped(address: &[u8; 16]) -> bool {
    unmapped(address).is_some()
}

/// Whether this is `127.0.0.0/8` or `::1`.
#[inline(always)]
pub fn is_loopback(address: &[u8; 16]) -> bool {
    match unmapped(address) {
        Some([first, ..]) => first == 127,
        None => *address == Ipv6Addr::LOCALHOST.octets(),
    }
}

/// The bytes of an address.
pub const fn from_ip(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => mapped(v4.octets()),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of these bytes; a mapped one is an IPv4 address.
pub fn to_ip(address: &[u8; 16]) -> IpAddr {
    match unmapped(address) {
        Some(v4) => IpAddr::V4(Ipv4Addr::from(v4)),
        None => IpAddr::V6(Ipv6Addr::from(*address)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_come_back_as_they_went_in() {
        for text in [
            "10.96.0.10",
            "0.0.0.0",
            "255.255.255.255",
            "::1",
            "fd00::a",
            "::",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(to_ip(&from_ip(address)), address);
        }
    }

    #[test]
    fn loopback_is_known_in_both_families() {
        let is = |text: &str| is_loopback(&from_ip(text.parse().unwrap()));
        assert!(is("127.0.0.1") && is("127.255.0.3") && is("::1"));
        assert!(!is("128.0.0.1") && !is("::2") && !is("10.0.0.1"));
    }
}
