//! What holds for every sequence of tables, with maps that work and with maps
//! that fail.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shunt_common::{
    LeftAlone, Node, NodeId, Reason, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey, Wish,
};

use super::{Applier, GRACE, Maps, MemoryMaps, Snapshot, WriteError};
use crate::diff::{Op, diff};
use crate::model::ObjectName;
use crate::tables::{
    Client, Endpoint, Frontend, NodeIdentity, Prefer, Protocol, Route, Scope, ServicePortName,
    Tables, Tier, Verdict,
};

fn frontend(number: u8) -> Frontend {
    Frontend {
        address: [10, 96, 0, number].into(),
        port: 80,
        protocol: Protocol::Tcp,
    }
}

fn route(number: u8, hosts: &[u8]) -> Route {
    let endpoint = |host: &u8| Endpoint {
        address: ([10, 244, 0, *host], 8080).into(),
        local: host.is_multiple_of(2),
        node: NodeId(u32::from(*host)),
    };
    let all: Vec<_> = hosts.iter().map(endpoint).collect();
    let local = all
        .iter()
        .copied()
        .filter(|endpoint| endpoint.local)
        .collect();
    Route {
        name: ServicePortName {
            namespace: Arc::from("shop"),
            service: Arc::from(format!("cart-{number}")),
            port: Arc::from(""),
        },
        verdict: if hosts.is_empty() {
            Verdict::Refuse
        } else {
            Verdict::Balance
        },
        prefer: Prefer::Node,
        affinity_seconds: (number == 3).then_some(30),
        splice: if number == 4 { Wish::On } else { Wish::None },
        max_local_connections: NonZeroU32::new(number.into()).filter(|_| number == 6),
        terminating: number == 5,
        tiers: vec![
            Tier {
                scope: Scope::Node,
                endpoints: local,
            },
            Tier {
                scope: Scope::Cluster,
                endpoints: all,
            },
        ],
    }
}

fn client((number, hosts): (&u8, &Vec<u8>)) -> (u64, Client) {
    let client = Client {
        pod: ObjectName {
            namespace: Arc::from("shop"),
            name: Arc::from(format!("front-{number}")),
        },
        reason: match hosts.len() {
            0 => Reason::Annotation,
            1 => Reason::Namespace,
            _ => Reason::Mesh,
        },
    };
    (u64::from(*number), client)
}

fn wish((number, hosts): (&u8, &Vec<u8>)) -> Option<(IpAddr, Wish)> {
    let wish = match hosts.len() {
        0 => return None,
        1 => Wish::On,
        _ => Wish::Off,
    };
    Some(([10, 244, 1, *number].into(), wish))
}

fn tables(services: &BTreeMap<u8, Vec<u8>>) -> Tables {
    let routes = services
        .iter()
        .map(|(number, hosts)| (frontend(*number), route(*number, hosts)));
    let zone = services.len().is_multiple_of(2).then(|| "z1".to_owned());
    Tables {
        node: NodeIdentity {
            name: "n1".to_owned(),
            zone,
        },
        left_alone: services.iter().map(client).collect(),
        wishes: services.iter().filter_map(wish).collect(),
        routes: routes.collect(),
    }
}

/// Any table of up to six Service ports with up to eight endpoints each.
fn any_tables() -> impl Strategy<Value = Tables> {
    let hosts = prop::collection::btree_set(1_u8..40, 0..8);
    prop::collection::btree_map(
        1_u8..7,
        hosts.prop_map(|set| set.into_iter().collect()),
        0..6,
    )
    .prop_map(|services| tables(&services))
}

fn apply_all(applier: &mut Applier, desired: &Tables, maps: &mut impl Maps, now: Instant) {
    applier.apply(diff(applier.actual(), desired), maps, now);
}

/// What a new agent would read.
fn read_back(snapshot: &Snapshot) -> Tables {
    Applier::adopt(snapshot, Instant::now()).into_actual()
}

/// Looks at the maps as a program may see them: after every single write.
#[derive(Default)]
struct Watched {
    maps: MemoryMaps,
    /// The sets that were ever asked for, by Service port.
    allowed: BTreeMap<ServiceKey, Vec<Vec<Slot>>>,
}

impl Watched {
    fn allow(&mut self, desired: &Tables) {
        for (frontend, route) in &desired.routes {
            let slots = super::layout::encode(route, 1).slots;
            let set = slots.into_iter().map(|(_, slot)| slot).collect();
            self.allowed
                .entry(super::service_key(frontend))
                .or_default()
                .push(set);
        }
    }

    fn check(&self) {
        for record in self.maps.snapshot().records {
            let allowed = &self.allowed[&record.key];
            assert!(allowed.contains(&record.slots), "a mixture: {record:?}");
        }
    }
}

impl Maps for Watched {
    fn put_slots(&mut self, slots: &[(SlotKey, Slot)]) -> Result<(), WriteError> {
        slots.iter().try_for_each(|slot| {
            self.maps.put_slots(std::slice::from_ref(slot))?;
            self.check();
            Ok(())
        })
    }

    fn delete_slots(&mut self, slots: &[SlotKey]) -> Result<(), WriteError> {
        slots.iter().try_for_each(|slot| {
            self.maps.delete_slots(std::slice::from_ref(slot))?;
            self.check();
            Ok(())
        })
    }

    fn put_service(
        &mut self,
        key: ServiceKey,
        name: ServiceName,
        entry: ServiceEntry,
    ) -> Result<(), WriteError> {
        self.maps.put_service(key, name, entry)?;
        self.check();
        Ok(())
    }

    fn delete_service(&mut self, key: ServiceKey) -> Result<(), WriteError> {
        self.maps.delete_service(key)?;
        self.check();
        Ok(())
    }

    fn put_client(&mut self, cgroup: u64, client: LeftAlone) -> Result<(), WriteError> {
        self.maps.put_client(cgroup, client)
    }

    fn delete_client(&mut self, cgroup: u64) -> Result<(), WriteError> {
        self.maps.delete_client(cgroup)
    }

    fn put_wish(&mut self, address: IpAddr, wish: Wish) -> Result<(), WriteError> {
        self.maps.put_wish(address, wish)
    }

    fn delete_wish(&mut self, address: IpAddr) -> Result<(), WriteError> {
        self.maps.delete_wish(address)
    }

    fn put_node(&mut self, node: Node) -> Result<(), WriteError> {
        self.maps.put_node(node)
    }
}

proptest! {
    #[test]
    fn the_maps_hold_what_was_last_asked_for(sequence in prop::collection::vec(any_tables(), 1..6)) {
        let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
        for desired in &sequence {
            apply_all(&mut applier, desired, &mut maps, Instant::now());
            prop_assert_eq!(applier.actual(), desired);
            prop_assert_eq!(&read_back(&maps.snapshot()), desired);
        }
    }

    #[test]
    fn no_reader_ever_sees_a_mixture_of_two_sets(
        sequence in prop::collection::vec(any_tables(), 1..6),
    ) {
        let (mut applier, mut watched) = (Applier::default(), Watched::default());
        let mut now = Instant::now();
        for desired in &sequence {
            watched.allow(desired);
            apply_all(&mut applier, desired, &mut watched, now);
            now += GRACE;
            applier.delete_retired(&mut watched, now).unwrap();
        }
    }

    #[test]
    fn writes_that_fail_are_made_up_for(
        sequence in prop::collection::vec((any_tables(), 0_usize..30), 1..6),
    ) {
        let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
        let mut now = Instant::now();
        for (desired, writes) in &sequence {
            maps.writes_until_failure = Some(*writes);
            apply_all(&mut applier, desired, &mut maps, now);
            // What the applier believes is what the maps hold, also then.
            prop_assert_eq!(&read_back(&maps.snapshot()), applier.actual());
            maps.writes_until_failure = None;
            apply_all(&mut applier, desired, &mut maps, now);
            prop_assert_eq!(applier.actual(), desired);
            now += GRACE;
            applier.delete_retired(&mut maps, now).unwrap();
            prop_assert_eq!(maps.snapshot().orphans, [], "no slot is left behind");
        }
    }

    #[test]
    fn an_agent_that_dies_at_any_write_is_followed_by_one_that_cleans_up(
        first in any_tables(),
        second in any_tables(),
        writes in 0_usize..40,
    ) {
        let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
        let now = Instant::now();
        apply_all(&mut applier, &first, &mut maps, now);
        maps.writes_until_failure = Some(writes);
        apply_all(&mut applier, &second, &mut maps, now);
        drop(applier);

        maps.writes_until_failure = None;
        let mut next = Applier::adopt(&maps.snapshot(), now);
        apply_all(&mut next, &second, &mut maps, now);
        next.delete_retired(&mut maps, now + GRACE).unwrap();

        prop_assert_eq!(&read_back(&maps.snapshot()), &second);
        prop_assert_eq!(maps.snapshot().orphans, []);
    }

    #[test]
    fn an_agent_that_starts_again_writes_nothing_that_is_there(desired in any_tables()) {
        let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
        apply_all(&mut applier, &desired, &mut maps, Instant::now());
        let writes = maps.writes;

        let next = Applier::adopt(&maps.snapshot(), Instant::now());

        prop_assert_eq!(diff(next.actual(), &desired), []);
        prop_assert_eq!(maps.writes, writes);
    }
}

#[test]
fn withdrawals_come_before_publications() {
    let actual = tables(&BTreeMap::from([(9, vec![1])]));
    let desired = tables(&BTreeMap::from([(1, vec![1])]));
    let ops = diff(&actual, &desired);
    let (cgroup, left_alone) = client((&1, &vec![1]));
    let expected = [
        Op::Readmit(9),
        Op::LeaveAlone(cgroup, left_alone),
        Op::Withdraw(frontend(9)),
        Op::Publish(frontend(1), route(1, &[1])),
    ];
    assert_eq!(ops[..4], expected);
}

#[test]
fn the_slots_of_an_old_set_stay_for_the_grace_period() {
    let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
    let now = Instant::now();
    apply_all(
        &mut applier,
        &tables(&BTreeMap::from([(1, vec![1, 3])])),
        &mut maps,
        now,
    );
    apply_all(
        &mut applier,
        &tables(&BTreeMap::from([(1, vec![5])])),
        &mut maps,
        now,
    );

    let early = applier
        .delete_retired(&mut maps, now + GRACE - Duration::from_millis(1))
        .unwrap();
    assert_eq!((early, maps.slot_count()), (Some(now + GRACE), 3));
    let late = applier.delete_retired(&mut maps, now + GRACE).unwrap();
    assert_eq!((late, maps.slot_count()), (None, 1));
}

#[test]
fn a_service_that_does_not_fit_in_is_left_to_kube_proxy_and_the_others_go_on() {
    let (mut applier, mut maps) = (Applier::default(), MemoryMaps::default());
    let now = Instant::now();
    apply_all(
        &mut applier,
        &tables(&BTreeMap::from([(1, vec![1])])),
        &mut maps,
        now,
    );
    maps.slot_capacity = Some(4);

    let desired = tables(&BTreeMap::from([
        (1, vec![1, 3, 5, 7, 9]),
        (2, vec![]),
        (3, vec![]),
    ]));
    let applied = applier.apply(diff(applier.actual(), &desired), &mut maps, now);

    assert!(matches!(
        applied.failed[..],
        [(Op::Publish(_, _), WriteError::Full { map: "slots" })]
    ));
    let table = read_back(&maps.snapshot());
    assert_eq!(
        table.routes[&frontend(1)].verdict,
        Verdict::Pass,
        "the old set is not true any more"
    );
    assert_eq!(table.routes[&frontend(2)].verdict, Verdict::Refuse);
    // Once there is room, the same difference is found again and written.
    maps.slot_capacity = None;
    apply_all(&mut applier, &desired, &mut maps, now);
    assert_eq!(read_back(&maps.snapshot()), desired);
}
