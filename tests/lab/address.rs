//! Who has which address. All of it follows from the node's number and the
//! last part of the pod's IPv4 address.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};

/// Number that the fabric itself has among the nodes: their default gateway.
pub(crate) const GATEWAY: u8 = 254;

/// Most nodes that a lab can have.
pub(crate) const MAX_NODES: u8 = GATEWAY - 1;

/// Every pod's gateway, on the node's end of its veth.
pub(crate) const POD_GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
pub(crate) const POD_GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

pub(crate) fn node_v4(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 77, node)
}

/// Reads like the IPv4 address: `fd00:192:168:77::12` is node 12.
pub(crate) fn node_v6(node: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x192, 0x168, 0x77, 0, 0, 0, decimal_as_hex(node))
}

/// Fixed, so that neighbour entries can be permanent.
pub(crate) fn node_mac(node: u8) -> String {
    format!("02:c0:a8:4d:00:{node:02x}")
}

pub(crate) fn pod_v4(node: u8, pod: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, node, pod)
}

/// Reads like the IPv4 address: 10.244.3.12 has fd00:10:244:3::12.
pub(crate) fn pod_v6(node: u8, pod: u8) -> Ipv6Addr {
    Ipv6Addr::new(
        0xfd00,
        0x10,
        0x244,
        decimal_as_hex(node),
        0,
        0,
        0,
        decimal_as_hex(pod),
    )
}

pub(crate) fn pod_cidr_v4(node: u8) -> String {
    format!("{}/24", pod_v4(node, 0))
}

pub(crate) fn pod_cidr_v6(node: u8) -> String {
    format!("{}/64", pod_v6(node, 0))
}

/// The pod's number in an address that the caller chose.
pub(crate) fn pod_number(node: u8, address: &str) -> Result<u8> {
    let address: Ipv4Addr = address
        .parse()
        .with_context(|| format!("pod address {address} is not an IPv4 address"))?;
    let [.., pod] = address.octets();
    ensure!(
        address == pod_v4(node, pod) && pod != 0 && pod != 255,
        "pod address {address} is not a host address of its node's {}",
        pod_cidr_v4(node)
    );
    Ok(pod)
}

/// 12 becomes 0x12, so that an IPv6 group shows the decimal number.
fn decimal_as_hex(number: u8) -> u16 {
    let number = u16::from(number);
    number / 100 * 0x100 + number / 10 % 10 * 0x10 + number % 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_read_alike() {
        assert_eq!(pod_v4(3, 112).to_string(), "10.244.3.112");
        assert_eq!(pod_v6(3, 112).to_string(), "fd00:10:244:3::112");
        assert_eq!(node_v6(12).to_string(), "fd00:192:168:77::12");
        assert_eq!(pod_cidr_v6(1), "fd00:10:244:1::/64");
    }

    #[test]
    fn a_pod_address_must_be_of_its_node() {
        assert_eq!(pod_number(1, "10.244.1.5").unwrap(), 5);
        for wrong in ["10.244.2.5", "10.244.1.0", "10.244.1.255", "fd00::1", "web"] {
            assert!(pod_number(1, wrong).is_err(), "{wrong}");
        }
    }
}
