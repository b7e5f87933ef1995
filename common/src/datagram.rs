//! Unconnected UDP sockets: which endpoint each Service port was given.

use crate::{ServiceKey, Slot};

/// Socket storage of a socket that sends datagrams to Service ports: its newest
/// flows. What is older than those is forgotten, and a late answer to it shows
/// the endpoint's own address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Flows {
    flows: [Flow; Flows::COUNT],
}

/// Datagrams of one socket to one Service port that go to one endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Flow {
    /// Time since boot of the last datagram that was sent, ns; 0 if the flow is
    /// not in use.
    used_ns: u64,
    service: ServiceKey,
    endpoint: Slot,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<Flow>() == 56 && align_of::<Flow>() == 8);
const _: () = assert!(size_of::<Flows>() == 8 * 56);

impl Flows {
    /// How many a socket has: resolvers use up to three servers at once.
    pub const COUNT: usize = 8;

    /// All of them, in no order.
    #[inline(always)]
    pub fn all(&self) -> &[Flow; Self::COUNT] {
        &self.flows
    }

    /// The place for a flow: that of the same Service port and endpoint, or else
    /// the one that was not used for the longest time.
    #[inline(always)]
    pub fn place_for(&mut self, flow: &Flow) -> &mut Flow {
        let mut oldest = 0;
        let mut oldest_ns = u64::MAX;
        for index in 0..Self::COUNT {
            let other = &self.flows[index];
            let used_ns = if other.is_same(flow) {
                0
            } else {
                other.used_ns.max(1)
            };
            if used_ns < oldest_ns {
                (oldest, oldest_ns) = (index, used_ns);
            }
        }
        // The mask tells the verifier what the loop has proved already.
        &mut self.flows[oldest & (Self::COUNT - 1)]
    }

    /// The flow to this Service port that was used last.
    #[inline(always)]
    pub fn newest(&self, service: &ServiceKey) -> Option<&Flow> {
        let mut newest: Option<&Flow> = None;
        for flow in &self.flows {
            let newer = newest.is_none_or(|it| flow.used_ns > it.used_ns);
            if flow.used_ns != 0 && newer && flow.service == *service {
                newest = Some(flow);
            }
        }
        newest
    }

    /// The Service port whose datagrams go to this endpoint.
    #[inline(always)]
    pub fn service_of(&self, address: &[u8; 16], port: [u8; 2]) -> Option<&ServiceKey> {
        for flow in &self.flows {
            if flow.used_ns != 0 && flow.endpoint.is_at(address, port) {
                return Some(&flow.service);
            }
        }
        None
    }
}

impl Flow {
    /// A flow that is used now; `now_ns` is not 0.
    #[inline(always)]
    pub const fn new(service: ServiceKey, endpoint: Slot, now_ns: u64) -> Self {
        Self {
            used_ns: now_ns,
            service,
            endpoint,
            reserved: [0; 4],
        }
    }

    /// When a datagram was last sent, ns since boot.
    #[inline(always)]
    pub const fn used_ns(&self) -> u64 {
        self.used_ns
    }

    /// Where the datagrams go.
    #[inline(always)]
    pub const fn endpoint(&self) -> &Slot {
        &self.endpoint
    }

    #[inline(always)]
    fn is_same(&self, other: &Self) -> bool {
        self.service == other.service
            && self
                .endpoint
                .is_at(other.endpoint.address(), other.endpoint.port())
    }
}

impl Default for Flow {
    fn default() -> Self {
        Self::new(ServiceKey::new([0; 16], [0; 2], 0), Slot::UNUSED, 0)
    }
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use super::*;

    const DNS: ServiceKey =
        ServiceKey::from_parts(IpAddr::V4(core::net::Ipv4Addr::new(10, 96, 0, 10)), 53, 17);

    fn flow(last: u8, now_ns: u64) -> Flow {
        Flow::new(DNS, Slot::new([10, 0, 0, last].into(), 53, false), now_ns)
    }

    #[test]
    fn a_flow_is_renewed_in_its_place_and_the_oldest_makes_room() {
        let mut flows = Flows::default();
        for last in 1..=8 {
            let flow = flow(last, u64::from(last));
            *flows.place_for(&flow) = flow;
        }
        let renewed = flow(1, 20);
        *flows.place_for(&renewed) = renewed;
        let ninth = flow(9, 21);
        *flows.place_for(&ninth) = ninth;

        let mut ends: [u8; 8] = flows.all().map(|flow| flow.endpoint.address()[15]);
        ends.sort();
        assert_eq!(ends, [1, 3, 4, 5, 6, 7, 8, 9], "2 was the oldest");
        assert_eq!(flows.newest(&DNS), Some(&ninth));
        let late = *renewed.endpoint();
        assert_eq!(flows.service_of(late.address(), late.port()), Some(&DNS));
        let other = ServiceKey::from_parts([10, 96, 0, 11].into(), 53, 17);
        assert_eq!(flows.newest(&other), None);
    }
}
