//! Maps in memory, for tests: with a capacity, and failing on demand.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use shunt_common::{LeftAlone, Node, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey, Wish};

use super::maps::{Maps, Record, Snapshot, WriteError};

/// Behaves as the kernel's maps do.
#[derive(Clone, Debug, Default)]
pub struct MemoryMaps {
    services: BTreeMap<ServiceKey, (ServiceName, ServiceEntry)>,
    slots: BTreeMap<SlotKey, Slot>,
    /// Its node, clients and wishes.
    rest: Snapshot,
    /// How many slots fit in; no limit if `None`.
    pub slot_capacity: Option<usize>,
    /// Counts down with each write; the write that finds 0 fails, and with it
    /// every later one until this is changed. `None` never fails.
    pub writes_until_failure: Option<usize>,
    /// How many writes there have been.
    pub writes: usize,
}

impl MemoryMaps {
    /// Everything in the maps.
    pub fn snapshot(&self) -> Snapshot {
        let record = |(key, (name, entry)): (&ServiceKey, &(ServiceName, ServiceEntry))| {
            let of_table =
                SlotKey::new(entry.table_id(), 0)..=SlotKey::new(entry.table_id(), u32::MAX);
            let slots = self.slots.range(of_table).map(|(_, slot)| *slot).collect();
            Record {
                key: *key,
                name: *name,
                entry: *entry,
                slots,
            }
        };
        let in_use = |id| {
            self.services
                .values()
                .any(|(_, entry)| entry.table_id() == id)
        };
        Snapshot {
            node: self.rest.node,
            left_alone: self.rest.left_alone.clone(),
            wishes: self.rest.wishes.clone(),
            records: self.services.iter().map(record).collect(),
            orphans: self
                .slots
                .keys()
                .filter(|slot| !in_use(slot.table_id()))
                .copied()
                .collect(),
        }
    }

    /// How many slots there are.
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    fn write(&mut self, map: &'static str) -> Result<(), WriteError> {
        self.writes += 1;
        match &mut self.writes_until_failure {
            Some(0) => Err(WriteError::new(
                map,
                io::Error::from_raw_os_error(libc::ENOMEM),
            )),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Maps for MemoryMaps {
    fn put_slots(&mut self, slots: &[(SlotKey, Slot)]) -> Result<(), WriteError> {
        for (key, slot) in slots {
            self.write("slots")?;
            if self
                .slot_capacity
                .is_some_and(|capacity| self.slots.len() >= capacity)
            {
                return Err(WriteError::Full { map: "slots" });
            }
            self.slots.insert(*key, *slot);
        }
        Ok(())
    }

    fn delete_slots(&mut self, slots: &[SlotKey]) -> Result<(), WriteError> {
        for key in slots {
            self.write("slots")?;
            self.slots.remove(key);
        }
        Ok(())
    }

    fn put_service(
        &mut self,
        key: ServiceKey,
        name: ServiceName,
        entry: ServiceEntry,
    ) -> Result<(), WriteError> {
        self.write("services")?;
        self.services.insert(key, (name, entry));
        Ok(())
    }

    fn delete_service(&mut self, key: ServiceKey) -> Result<(), WriteError> {
        self.write("services")?;
        self.services.remove(&key);
        Ok(())
    }

    fn put_client(&mut self, cgroup: u64, client: LeftAlone) -> Result<(), WriteError> {
        self.write("left_alone")?;
        self.rest.left_alone.insert(cgroup, client);
        Ok(())
    }

    fn delete_client(&mut self, cgroup: u64) -> Result<(), WriteError> {
        self.write("left_alone")?;
        self.rest.left_alone.remove(&cgroup);
        Ok(())
    }

    fn put_wish(&mut self, address: IpAddr, wish: Wish) -> Result<(), WriteError> {
        self.write("splice_wishes")?;
        self.rest.wishes.insert(address, wish);
        Ok(())
    }

    fn delete_wish(&mut self, address: IpAddr) -> Result<(), WriteError> {
        self.write("splice_wishes")?;
        self.rest.wishes.remove(&address);
        Ok(())
    }

    fn put_node(&mut self, node: Node) -> Result<(), WriteError> {
        self.write("node")?;
        self.rest.node = node;
        Ok(())
    }
}
