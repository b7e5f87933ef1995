//! Routes to map elements and back; pure.
//!
//! The slots of a route are its tiers one after the other, so that an endpoint
//! that is in three tiers has three slots. (The programs would allow tiers to
//! share slots: a tier is any run of them.)

use std::num::NonZeroU32;
use std::sync::Arc;

use shunt_common::{
    Flags, LeftAlone, MAX_TIERS, Node, Reason, ServiceEntry, ServiceKey, ServiceName, Slot,
    SlotKey, TierRange, Wish, address,
};

use super::maps::Record;
use crate::model::ObjectName;
use crate::tables::{
    Client, Endpoint, Frontend, NodeIdentity, Prefer, Protocol, Route, Scope, ServicePortName,
    Tier, Verdict,
};

/// A route as map elements.
pub(super) struct Encoded {
    pub(super) entry: ServiceEntry,
    pub(super) slots: Vec<(SlotKey, Slot)>,
}

pub(super) fn encode(route: &Route, table_id: u64) -> Encoded {
    debug_assert!(route.tiers.len() <= MAX_TIERS);
    let mut slots = Vec::new();
    let mut ranges = [TierRange::default(); MAX_TIERS];
    for (range, tier) in ranges.iter_mut().zip(&route.tiers) {
        let start = slots.len() as u32;
        *range = TierRange::new(start, tier.endpoints.len() as u32, scope_number(tier.scope));
        for (index, endpoint) in (start..).zip(&tier.endpoints) {
            let slot = Slot::new(
                endpoint.address.ip(),
                endpoint.address.port(),
                endpoint.local,
            )
            .on(endpoint.node);
            slots.push((SlotKey::new(table_id, index), slot));
        }
    }
    let entry = ServiceEntry::new(
        table_id,
        flags(route),
        prefer_number(route.prefer),
        route.affinity_seconds.unwrap_or(0),
        route.tiers.len().min(MAX_TIERS) as u8,
        ranges,
    )
    .with_max_local_connections(route.max_local_connections.map_or(0, NonZeroU32::get));
    Encoded { entry, slots }
}

/// Numbers that no version of shunt wrote come back as something else than what
/// is desired or as a default; either way the next comparison puts it right.
pub(crate) fn decode(record: &Record) -> (Frontend, Route) {
    let entry = &record.entry;
    let tiers = entry.tiers().iter().take(entry.tier_count().into());
    let route = Route {
        name: ServicePortName {
            namespace: Arc::from(record.name.namespace()),
            service: Arc::from(record.name.service()),
            port: Arc::from(record.name.port()),
        },
        verdict: verdict(entry),
        prefer: prefer(entry.prefer()),
        affinity_seconds: Some(entry.affinity_seconds()).filter(|seconds| *seconds != 0),
        splice: entry.splice(),
        max_local_connections: NonZeroU32::new(entry.max_local_connections()),
        terminating: entry.has(Flags::TERMINATING),
        tiers: tiers.map(|range| tier(range, &record.slots)).collect(),
    };
    (frontend(&record.key), route)
}

/// The key of a Service port.
pub fn service_key(frontend: &Frontend) -> ServiceKey {
    let protocol = match frontend.protocol {
        Protocol::Tcp => ServiceKey::TCP,
        Protocol::Udp => ServiceKey::UDP,
    };
    ServiceKey::from_parts(frontend.address, frontend.port, protocol)
}

pub(super) fn service_name(route: &Route) -> ServiceName {
    ServiceName::new(&route.name.namespace, &route.name.service, &route.name.port)
}

pub(super) fn encode_client(client: &Client) -> LeftAlone {
    LeftAlone::new(&client.pod.namespace, &client.pod.name, client.reason)
}

pub(crate) fn decode_client(client: &LeftAlone) -> Client {
    Client {
        pod: ObjectName {
            namespace: Arc::from(client.namespace()),
            name: Arc::from(client.pod()),
        },
        reason: client.reason().unwrap_or(Reason::Annotation),
    }
}

pub(crate) fn decode_node(node: &Node) -> NodeIdentity {
    let zone = Some(node.zone()).filter(|zone| !zone.is_empty());
    NodeIdentity {
        name: node.name().to_owned(),
        zone: zone.map(str::to_owned),
    }
}

/// The Service port of a key.
pub fn frontend(key: &ServiceKey) -> Frontend {
    let protocol = if key.protocol() == ServiceKey::UDP {
        Protocol::Udp
    } else {
        Protocol::Tcp
    };
    Frontend {
        address: address::to_ip(key.address()),
        port: u16::from_be_bytes(key.port()),
        protocol,
    }
}

fn tier(range: &TierRange, slots: &[Slot]) -> Tier {
    let start = range.start() as usize;
    let slots = slots
        .get(start..start + range.count() as usize)
        .unwrap_or_default();
    Tier {
        scope: scope(range.scope()),
        endpoints: slots.iter().map(Endpoint::from).collect(),
    }
}

impl From<&Slot> for Endpoint {
    fn from(slot: &Slot) -> Self {
        let port = u16::from_be_bytes(slot.port());
        Self {
            address: (address::to_ip(slot.address()), port).into(),
            local: slot.is_local(),
            node: slot.node(),
        }
    }
}

fn flags(route: &Route) -> Flags {
    let verdict = match route.verdict {
        Verdict::Balance => 0,
        Verdict::Refuse => Flags::REFUSE,
        Verdict::Pass => Flags::PASS,
    };
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let splice = match route.splice {
        Wish::None => 0,
        Wish::On => Flags::SPLICE,
        Wish::Off => Flags::NO_SPLICE,
    };
    Flags(verdict | splice | flag(route.terminating, Flags::TERMINATING))
}

fn verdict(entry: &ServiceEntry) -> Verdict {
    if entry.has(Flags::PASS) {
        Verdict::Pass
    } else if entry.has(Flags::REFUSE) {
        Verdict::Refuse
    } else {
        Verdict::Balance
    }
}

fn scope_number(scope: Scope) -> u32 {
    match scope {
        Scope::Node => 0,
        Scope::Zone => 1,
        Scope::Cluster => 2,
        Scope::Hints => 3,
    }
}

fn scope(number: u32) -> Scope {
    match number {
        0 => Scope::Node,
        1 => Scope::Zone,
        3 => Scope::Hints,
        _ => Scope::Cluster,
    }
}

fn prefer_number(prefer: Prefer) -> u8 {
    match prefer {
        Prefer::Node => 0,
        Prefer::Zone => 1,
        Prefer::Hints => 2,
        Prefer::None => 3,
    }
}

fn prefer(number: u8) -> Prefer {
    match number {
        0 => Prefer::Node,
        1 => Prefer::Zone,
        2 => Prefer::Hints,
        _ => Prefer::None,
    }
}
