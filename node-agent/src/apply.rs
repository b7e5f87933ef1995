//! Writes differences into the maps, in an order that no reader can notice.
//!
//! - A Service port is published by one write: its slots are written under a
//!   fresh table id, and then its entry, which names them, is replaced.
//! - The old slots are deleted only after a grace period, when no program can
//!   still be on its way to them.
//! - A write that fails leaves the old state known as the actual one, so that
//!   the next comparison finds the same difference again.

mod layout;
mod maps;
mod memory;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use shunt_common::{Node, SlotKey, Wish};

pub(crate) use layout::decode;
pub use layout::{frontend, service_key};
pub use maps::{Maps, Record, Snapshot, WriteError};
pub use memory::MemoryMaps;

use crate::diff::Op;
use crate::tables::{Client, Frontend, NodeIdentity, Route, Tables, Verdict};

/// How long slots stay after no entry names them any more. A program that read
/// the old entry is done within microseconds; the rest is for a vCPU that was
/// taken away meanwhile, and what comes later still finds out and looks again.
pub const GRACE: Duration = Duration::from_millis(500);

/// Knows what is in the maps and changes it.
#[derive(Debug, Default)]
pub struct Applier {
    actual: Tables,
    table_ids: BTreeMap<Frontend, TableSize>,
    last_table_id: u64,
    retired: VecDeque<(Instant, Vec<SlotKey>)>,
}

/// Where the slots of a Service port are.
#[derive(Clone, Copy, Debug)]
struct TableSize {
    table_id: u64,
    slots: u32,
}

/// What [`Applier::apply`] did.
#[derive(Debug, Default)]
pub struct Applied {
    /// Operations that were done.
    pub done: usize,
    /// Those that failed and have to be tried again.
    pub failed: Vec<(Op, WriteError)>,
}

impl Applier {
    /// Takes over what an earlier agent left in the maps.
    pub fn adopt(snapshot: &Snapshot, now: Instant) -> Self {
        let mut applier = Self {
            actual: Tables {
                node: layout::decode_node(&snapshot.node),
                left_alone: snapshot
                    .left_alone
                    .iter()
                    .map(|(cgroup, client)| (*cgroup, layout::decode_client(client)))
                    .collect(),
                wishes: snapshot.wishes.clone(),
                ..Tables::default()
            },
            ..Self::default()
        };
        for record in &snapshot.records {
            let table_id = record.entry.table_id();
            applier.last_table_id = applier.last_table_id.max(table_id);
            let slots = record.slots.len() as u32;
            let (frontend, route) = layout::decode(record);
            applier.actual.routes.insert(frontend, route);
            applier
                .table_ids
                .insert(frontend, TableSize { table_id, slots });
        }
        // Ids of orphans are not used again either: they are about to be deleted.
        let orphans = snapshot.orphans.iter().map(|slot| slot.table_id());
        applier.last_table_id = orphans.fold(applier.last_table_id, u64::max);
        applier.retire(snapshot.orphans.clone(), now);
        applier
    }

    /// What is in the maps, as a value of its own.
    pub fn into_actual(self) -> Tables {
        self.actual
    }

    /// What is in the maps.
    pub fn actual(&self) -> &Tables {
        &self.actual
    }

    /// Does the operations in their order.
    pub fn apply(&mut self, ops: Vec<Op>, maps: &mut impl Maps, now: Instant) -> Applied {
        let mut applied = Applied::default();
        for op in ops {
            let result = match &op {
                Op::Publish(frontend, route) => self.publish(*frontend, route, maps, now),
                Op::Withdraw(frontend) => self.withdraw(*frontend, maps, now),
                Op::LeaveAlone(cgroup, client) => self.leave_alone(*cgroup, client, maps),
                Op::Readmit(cgroup) => self.readmit(*cgroup, maps),
                Op::PutWish(address, wish) => self.put_wish(*address, *wish, maps),
                Op::ForgetWish(address) => self.forget_wish(*address, maps),
                Op::SetNode(node) => self.set_node(node, maps),
            };
            match result {
                Ok(()) => applied.done += 1,
                Err(error) => applied.failed.push((op, error)),
            }
        }
        applied
    }

    /// Deletes the slots whose grace period is over, and says when to call
    /// again.
    ///
    /// # Errors
    ///
    /// A slot can't be deleted; it will be tried again.
    pub fn delete_retired(
        &mut self,
        maps: &mut impl Maps,
        now: Instant,
    ) -> Result<Option<Instant>, WriteError> {
        while let Some((due, slots)) = self.retired.front() {
            if *due > now {
                return Ok(Some(*due));
            }
            maps.delete_slots(slots)?;
            self.retired.pop_front();
        }
        Ok(None)
    }

    fn publish(
        &mut self,
        frontend: Frontend,
        route: &Route,
        maps: &mut impl Maps,
        now: Instant,
    ) -> Result<(), WriteError> {
        let table_id = self.next_table_id();
        let encoded = layout::encode(route, table_id);
        if let Err(error) = maps.put_slots(&encoded.slots) {
            // Some of them may have been written.
            self.retire(encoded.slots.iter().map(|(key, _)| *key).collect(), now);
            self.pass_instead(frontend, maps, now);
            return Err(error);
        }
        let key = layout::service_key(&frontend);
        if let Err(error) = maps.put_service(key, layout::service_name(route), encoded.entry) {
            self.retire(encoded.slots.iter().map(|(key, _)| *key).collect(), now);
            return Err(error);
        }
        let size = TableSize {
            table_id,
            slots: encoded.slots.len() as u32,
        };
        self.replace(frontend, route.clone(), size, now);
        Ok(())
    }

    /// There is no room for the new endpoints, and the old ones are no longer
    /// true: kube-proxy answers meanwhile. Replacing an entry needs no room.
    fn pass_instead(&mut self, frontend: Frontend, maps: &mut impl Maps, now: Instant) {
        let Some(old) = self.actual.routes.get(&frontend) else {
            return;
        };
        if old.verdict == Verdict::Pass {
            return;
        }
        let mut route = old.clone();
        route.verdict = Verdict::Pass;
        route.terminating = false;
        route
            .tiers
            .iter_mut()
            .for_each(|tier| tier.endpoints.clear());
        let table_id = self.next_table_id();
        let entry = layout::encode(&route, table_id).entry;
        let key = layout::service_key(&frontend);
        if maps
            .put_service(key, layout::service_name(&route), entry)
            .is_ok()
        {
            self.replace(frontend, route, TableSize { table_id, slots: 0 }, now);
        }
    }

    fn withdraw(
        &mut self,
        frontend: Frontend,
        maps: &mut impl Maps,
        now: Instant,
    ) -> Result<(), WriteError> {
        maps.delete_service(layout::service_key(&frontend))?;
        self.actual.routes.remove(&frontend);
        if let Some(size) = self.table_ids.remove(&frontend) {
            self.retire(size.keys(), now);
        }
        Ok(())
    }

    fn leave_alone(
        &mut self,
        cgroup: u64,
        client: &Client,
        maps: &mut impl Maps,
    ) -> Result<(), WriteError> {
        maps.put_client(cgroup, layout::encode_client(client))?;
        self.actual.left_alone.insert(cgroup, client.clone());
        Ok(())
    }

    fn readmit(&mut self, cgroup: u64, maps: &mut impl Maps) -> Result<(), WriteError> {
        maps.delete_client(cgroup)?;
        self.actual.left_alone.remove(&cgroup);
        Ok(())
    }

    fn put_wish(
        &mut self,
        address: IpAddr,
        wish: Wish,
        maps: &mut impl Maps,
    ) -> Result<(), WriteError> {
        maps.put_wish(address, wish)?;
        self.actual.wishes.insert(address, wish);
        Ok(())
    }

    fn forget_wish(&mut self, address: IpAddr, maps: &mut impl Maps) -> Result<(), WriteError> {
        maps.delete_wish(address)?;
        self.actual.wishes.remove(&address);
        Ok(())
    }

    fn set_node(&mut self, node: &NodeIdentity, maps: &mut impl Maps) -> Result<(), WriteError> {
        maps.put_node(Node::new(
            &node.name,
            node.zone.as_deref().unwrap_or_default(),
        ))?;
        self.actual.node = node.clone();
        Ok(())
    }

    fn replace(&mut self, frontend: Frontend, route: Route, size: TableSize, now: Instant) {
        self.actual.routes.insert(frontend, route);
        if let Some(old) = self.table_ids.insert(frontend, size) {
            self.retire(old.keys(), now);
        }
    }

    fn retire(&mut self, slots: Vec<SlotKey>, now: Instant) {
        if !slots.is_empty() {
            self.retired.push_back((now + GRACE, slots));
        }
    }

    /// Ids are used in turn and, with 64 bits, never twice.
    fn next_table_id(&mut self) -> u64 {
        self.last_table_id += 1;
        self.last_table_id
    }
}

impl TableSize {
    fn keys(self) -> Vec<SlotKey> {
        (0..self.slots)
            .map(|index| SlotKey::new(self.table_id, index))
            .collect()
    }
}
