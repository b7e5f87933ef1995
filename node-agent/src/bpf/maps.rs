//! The pinned maps, for the agent to write and for the CLI to read.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};

use aya::Pod;
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf, SockHash};
use shunt_common::{
    Affinity, AffinityKey, Counter, EndKey, Health, HealthConfig, HealthKey, Heartbeat, LeftAlone,
    LoadKey, Node, Pair, ServiceCounts, ServiceEntry, ServiceKey, ServiceName, Slot, SlotKey,
    SpliceConfig, UdpClient, Wish, address, capacity, map,
};

use super::pins::Pins;
use super::sys;
use crate::apply::{Maps, Record, Snapshot, WriteError, decode, service_key};
use crate::tables::{Frontend, Route};

/// How many elements one batch call writes: small enough to be freed of other
/// work in between, large enough that the call itself costs nothing.
const BATCH: usize = 1024;

/// The maps of one node, opened by their pins.
pub struct KernelMaps {
    pins: Pins,
    services: HashMap<MapData, ServiceKey, ServiceEntry>,
    slots: HashMap<MapData, SlotKey, Slot>,
    /// The same map, for batches, which aya has no function for.
    slots_fd: OwnedFd,
    names: HashMap<MapData, ServiceKey, ServiceName>,
    service_counts: HashMap<MapData, ServiceKey, ServiceCounts>,
    /// The same map, for batches.
    service_counts_fd: OwnedFd,
    node: Array<MapData, Node>,
    heartbeat: Array<MapData, Heartbeat>,
    counters: PerCpuArray<MapData, u64>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    left_alone: HashMap<MapData, u64, LeftAlone>,
    loads: HashMap<MapData, LoadKey, u64>,
    wishes: HashMap<MapData, [u8; 16], u32>,
    /// What does not answer.
    pub health: HealthMaps,
    pairs: Pairs,
    splice: SockHash<MapData, EndKey>,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fill {
    /// Its name.
    pub map: &'static str,
    /// Elements in it.
    pub used: usize,
    /// Elements that fit.
    pub capacity: usize,
}

/// A map can't be opened or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the map {map}")]
pub struct ReadError {
    map: &'static str,
    #[source]
    source: Box<MapError>,
}

/// How many sockets are members of the pinned splice map, and so may have unread
/// bytes that would go with it.
pub fn splice_members(pins: &Pins) -> Result<usize, ReadError> {
    members(&open(pins, map::SPLICE, Map::SockHash)?)
}

/// What the connect hook keeps of connected UDP sockets.
pub struct UdpClients {
    clients: HashMap<MapData, u64, UdpClient>,
    /// The same map, for batches, which aya has no function for.
    fd: OwnedFd,
}

impl UdpClients {
    /// Opens the pinned map.
    pub fn open(pins: &Pins) -> Result<Self, ReadError> {
        Ok(Self {
            clients: open(pins, map::UDP_CLIENTS, Map::LruHashMap)?,
            fd: open_fd(pins, map::UDP_CLIENTS)?,
        })
    }

    /// All of them, by the cookies of the sockets.
    pub fn all(&self) -> Result<Vec<(u64, UdpClient)>, ReadError> {
        sys::elements(self.fd.as_fd())
            .map_err(MapError::IoError)
            .map_err(reading(map::UDP_CLIENTS))
    }

    /// One, if it is still there.
    pub fn get(&self, cookie: u64) -> Option<UdpClient> {
        self.clients.get(&cookie, 0).ok()
    }
}

/// The maps of what does not answer.
pub struct HealthMaps {
    health: HashMap<MapData, HealthKey, Health>,
    /// The same map, for batches, which aya has no function for.
    fd: OwnedFd,
    config: Array<MapData, HealthConfig>,
}

impl HealthMaps {
    /// Opens the pinned maps.
    pub fn open(pins: &Pins) -> Result<Self, ReadError> {
        Ok(Self {
            health: open(pins, map::HEALTH, Map::LruHashMap)?,
            fd: open_fd(pins, map::HEALTH)?,
            config: open(pins, map::HEALTH_CONFIG, Map::Array)?,
        })
    }

    /// Tells the programs what the operator wants.
    pub fn configure(&mut self, config: HealthConfig) -> Result<(), WriteError> {
        self.config
            .set(0, config, 0)
            .map_err(writing(map::HEALTH_CONFIG))
    }

    /// What is known of endpoints and nodes that failed lately.
    pub fn all(&self) -> Result<BTreeMap<HealthKey, Health>, ReadError> {
        let all = sys::elements(self.fd.as_fd()).map_err(MapError::IoError);
        Ok(all.map_err(reading(map::HEALTH))?.into_iter().collect())
    }

    /// Notes what is known of one.
    pub fn put(&mut self, key: &HealthKey, health: Health) -> Result<(), WriteError> {
        self.health
            .insert(key, health, 0)
            .map_err(writing(map::HEALTH))
    }

    /// Lets the next connect find out whether it answers again.
    pub fn end_wait(&mut self, key: &HealthKey, now_ns: u64) -> Result<(), WriteError> {
        let Ok(mut health) = self.health.get(key, 0) else {
            return Ok(());
        };
        health.end_wait(now_ns);
        let exists = 2; // BPF_EXIST in include/uapi/linux/bpf.h
        ignore_absent(self.health.insert(key, health, exists)).map_err(writing(map::HEALTH))
    }
}

/// The ring buffer in which the programs tell of suspicions.
pub fn health_events(pins: &Pins) -> Result<RingBuf<MapData>, ReadError> {
    open(pins, map::HEALTH_EVENTS, Map::RingBuf)
}

/// The maps of the splice.
pub struct Pairs {
    pairs: HashMap<MapData, u64, Pair>,
    /// The same map, for batches, which aya has no function for.
    pairs_fd: OwnedFd,
    config: Array<MapData, SpliceConfig>,
    switch: Array<MapData, u32>,
    counters: PerCpuArray<MapData, u64>,
}

impl Pairs {
    /// Opens the pinned maps.
    pub fn open(pins: &Pins) -> Result<Self, ReadError> {
        Ok(Self {
            pairs: open(pins, map::PAIRS, Map::HashMap)?,
            pairs_fd: open_fd(pins, map::PAIRS)?,
            config: open(pins, map::SPLICE_CONFIG, Map::Array)?,
            switch: open(pins, map::SPLICE_SWITCH, Map::Array)?,
            counters: open(pins, map::COUNTERS, Map::PerCpuArray)?,
        })
    }

    /// All of them, by the cookie of the client's socket.
    pub fn all(&self) -> Result<BTreeMap<u64, Pair>, ReadError> {
        let pairs = sys::elements(self.pairs_fd.as_fd()).map_err(MapError::IoError);
        Ok(pairs.map_err(reading(map::PAIRS))?.into_iter().collect())
    }

    /// One, if it is still there.
    pub fn get(&self, cookie: u64) -> Option<Pair> {
        self.pairs.get(&cookie, 0).ok()
    }

    /// Tells the programs what the agent wants.
    pub fn configure(&mut self, config: SpliceConfig) -> Result<(), WriteError> {
        self.config
            .set(0, config, 0)
            .map_err(writing(map::SPLICE_CONFIG))
    }

    /// How many events the ring buffer had no room for.
    pub fn events_lost(&self) -> Result<u64, ReadError> {
        sum(&self.counters, Counter::EventsLost)
    }

    /// Whether the operator has switched the splice off.
    pub fn is_switched_off(&self) -> Result<bool, ReadError> {
        let value = self.switch.get(&0, 0);
        Ok(value.map_err(reading(map::SPLICE_SWITCH))? != 0)
    }

    /// Switches it off or on.
    pub fn switch(&mut self, off: bool) -> Result<(), WriteError> {
        self.switch
            .set(0, u32::from(off), 0)
            .map_err(writing(map::SPLICE_SWITCH))
    }
}

fn sum(counters: &PerCpuArray<MapData, u64>, counter: Counter) -> Result<u64, ReadError> {
    let values = counters.get(&(counter as u32), 0);
    Ok(values.map_err(reading(map::COUNTERS))?.iter().sum())
}

/// The ring buffer in which the programs tell of pairs.
pub fn splice_events(pins: &Pins) -> Result<RingBuf<MapData>, ReadError> {
    open(pins, map::SPLICE_EVENTS, Map::RingBuf)
}

fn members(splice: &SockHash<MapData, EndKey>) -> Result<usize, ReadError> {
    Ok(keys(splice.keys(), map::SPLICE)?.len())
}

impl KernelMaps {
    /// Opens the pinned maps.
    pub fn open(pins: &Pins) -> Result<Self, ReadError> {
        Ok(Self {
            pins: pins.clone(),
            services: open(pins, map::SERVICES, Map::HashMap)?,
            slots: open(pins, map::SLOTS, Map::HashMap)?,
            slots_fd: open_fd(pins, map::SLOTS)?,
            names: open(pins, map::NAMES, Map::HashMap)?,
            service_counts: open(pins, map::SERVICE_COUNTS, Map::HashMap)?,
            service_counts_fd: open_fd(pins, map::SERVICE_COUNTS)?,
            node: open(pins, map::NODE, Map::Array)?,
            heartbeat: open(pins, map::HEARTBEAT, Map::Array)?,
            counters: open(pins, map::COUNTERS, Map::PerCpuArray)?,
            affinity: open(pins, map::AFFINITY, Map::LruHashMap)?,
            left_alone: open(pins, map::LEFT_ALONE, Map::HashMap)?,
            loads: open(pins, map::LOADS, Map::HashMap)?,
            wishes: open(pins, map::WISHES, Map::HashMap)?,
            health: HealthMaps::open(pins)?,
            pairs: Pairs::open(pins)?,
            splice: open(pins, map::SPLICE, Map::SockHash)?,
        })
    }

    /// The whole routing table. An entry that the agent replaces meanwhile is
    /// read again; one that is gone is left out.
    pub fn snapshot(&self) -> Result<Snapshot, ReadError> {
        let mut snapshot = Snapshot {
            node: self.node()?,
            left_alone: self.left_alone()?,
            wishes: self.wishes()?,
            ..Snapshot::default()
        };
        for key in keys(self.services.keys(), map::SERVICES)? {
            let whole = self
                .record(key)
                .filter(is_whole)
                .or_else(|| self.record(key));
            snapshot.records.extend(whole);
        }
        let used: BTreeSet<u64> = snapshot
            .records
            .iter()
            .map(|record| record.entry.table_id())
            .collect();
        for slot in keys(self.slots.keys(), map::SLOTS)? {
            if !used.contains(&slot.table_id()) {
                snapshot.orphans.push(slot);
            }
        }
        Ok(snapshot)
    }

    /// The node that the table was planned for.
    pub fn node(&self) -> Result<Node, ReadError> {
        self.node.get(&0, 0).map_err(reading(map::NODE))
    }

    /// The agent's sign of life.
    pub fn heartbeat(&self) -> Result<Heartbeat, ReadError> {
        self.heartbeat.get(&0, 0).map_err(reading(map::HEARTBEAT))
    }

    /// Writes the agent's sign of life.
    pub fn beat(&mut self, heartbeat: Heartbeat) -> Result<(), WriteError> {
        self.heartbeat
            .set(0, heartbeat, 0)
            .map_err(writing(map::HEARTBEAT))
    }

    /// Writes where the agent serves its metrics; the rest of the node stays.
    pub fn put_metrics(&mut self, metrics: &str) -> Result<(), WriteError> {
        let node = self.node.get(&0, 0).map_err(writing(map::NODE))?;
        self.node
            .set(0, node.with_metrics(metrics), 0)
            .map_err(writing(map::NODE))
    }

    /// All counters, added up over the CPUs, by index.
    pub fn counters(&self) -> Result<[u64; Counter::COUNT], ReadError> {
        let mut sums = [0; Counter::COUNT];
        for counter in Counter::ALL {
            sums[counter as usize] = sum(&self.counters, counter)?;
        }
        Ok(sums)
    }

    /// The clients that are left alone, by the id of their cgroup.
    pub fn left_alone(&self) -> Result<BTreeMap<u64, LeftAlone>, ReadError> {
        let keys = keys(self.left_alone.keys(), map::LEFT_ALONE)?;
        Ok(keys
            .into_iter()
            .filter_map(|key| Some((key, self.left_alone.get(&key, 0).ok()?)))
            .collect())
    }

    /// Addresses of pods that have a wish of their own for the splice.
    pub fn wishes(&self) -> Result<BTreeMap<IpAddr, Wish>, ReadError> {
        let keys = keys(self.wishes.keys(), map::WISHES)?;
        let wish = |key: [u8; 16]| {
            let wish = u8::try_from(self.wishes.get(&key, 0).ok()?).unwrap_or(0);
            Some((address::to_ip(&key), Wish::from_u8(wish)))
        };
        Ok(keys.into_iter().filter_map(wish).collect())
    }

    /// How many connections the endpoints of this node hold, of those that are
    /// counted.
    pub fn loads(&self) -> Result<BTreeMap<LoadKey, u64>, ReadError> {
        let keys = keys(self.loads.keys(), map::LOADS)?;
        Ok(keys
            .into_iter()
            .filter_map(|key| Some((key, self.loads.get(&key, 0).ok()?)))
            .collect())
    }

    /// Forgets an endpoint whose connections are no longer counted.
    pub fn delete_load(&mut self, key: &LoadKey) -> Result<(), WriteError> {
        ignore_absent(self.loads.remove(key)).map_err(writing(map::LOADS))
    }

    /// What each Service port was given.
    pub fn service_counts(&self) -> Result<BTreeMap<ServiceKey, ServiceCounts>, ReadError> {
        let counts = sys::elements(self.service_counts_fd.as_fd()).map_err(MapError::IoError);
        let counts = counts.map_err(reading(map::SERVICE_COUNTS))?;
        Ok(counts.into_iter().collect())
    }

    /// Connections whose ends may both be on this node, by the cookie of the
    /// client's socket.
    pub fn pairs(&self) -> Result<BTreeMap<u64, Pair>, ReadError> {
        self.pairs.all()
    }

    /// What the programs were told of splicing.
    pub fn splice_config(&self) -> Result<SpliceConfig, ReadError> {
        let config = self.pairs.config.get(&0, 0);
        config.map_err(reading(map::SPLICE_CONFIG))
    }

    /// Whether the operator has switched the splice off.
    pub fn is_switched_off(&self) -> Result<bool, ReadError> {
        self.pairs.is_switched_off()
    }

    /// Switches the splice off or on.
    pub fn switch(&mut self, off: bool) -> Result<(), WriteError> {
        self.pairs.switch(off)
    }

    /// The endpoint that a client keeps to, if it does. Looking does not count as
    /// use of the entry (`htab_lru_map_lookup_elem_sys` in `kernel/bpf/hashtab.c`).
    pub fn affinity(&self, client: &AffinityKey) -> Result<Option<Affinity>, ReadError> {
        match self.affinity.get(client, 0) {
            Ok(affinity) => Ok(Some(affinity)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(reading(map::AFFINITY)(error)),
        }
    }

    /// The route of a Service port, if there is one.
    pub fn route(&self, frontend: &Frontend) -> Option<Route> {
        let key = service_key(frontend);
        let record = self.record(key).filter(is_whole);
        let record = record.or_else(|| self.record(key))?;
        Some(decode(&record).1)
    }

    /// The name of a Service port, if it is still there.
    pub fn name(&self, service: &ServiceKey) -> Option<ServiceName> {
        self.names.get(service, 0).ok()
    }

    /// How full the maps are that can become full.
    pub fn fill(&self) -> Result<Vec<Fill>, ReadError> {
        let fill = |map, used, capacity| Fill {
            map,
            used,
            capacity,
        };
        let pins = &self.pins;
        let services = count::<ServiceKey, ServiceEntry>(pins, map::SERVICES)?;
        let slots = count::<SlotKey, Slot>(pins, map::SLOTS)?;
        let left_alone = count::<u64, LeftAlone>(pins, map::LEFT_ALONE)?;
        let loads = count::<LoadKey, u64>(pins, map::LOADS)?;
        let pairs = count::<u64, Pair>(pins, map::PAIRS)?;
        Ok(vec![
            fill(map::SERVICES, services, capacity::SERVICES),
            fill(map::SLOTS, slots, capacity::SLOTS),
            fill(map::LEFT_ALONE, left_alone, capacity::LEFT_ALONE),
            fill(map::LOADS, loads, capacity::LOADS),
            fill(map::PAIRS, pairs, capacity::PAIRS),
            fill(map::SPLICE, members(&self.splice)?, capacity::SPLICE),
        ])
    }

    fn record(&self, key: ServiceKey) -> Option<Record> {
        let entry = self.services.get(&key, 0).ok()?;
        let name = self
            .names
            .get(&key, 0)
            .unwrap_or(ServiceName::new("", "", ""));
        let count = entry
            .tiers()
            .iter()
            .map(|tier| tier.start() + tier.count())
            .max()?;
        let slot = |index| {
            self.slots
                .get(&SlotKey::new(entry.table_id(), index), 0)
                .ok()
        };
        let slots = (0..count).map_while(slot).collect();
        Some(Record {
            key,
            name,
            entry,
            slots,
        })
    }
}

impl Maps for KernelMaps {
    fn put_slots(&mut self, slots: &[(SlotKey, Slot)]) -> Result<(), WriteError> {
        for chunk in slots.chunks(BATCH) {
            let (keys, values): (Vec<_>, Vec<_>) = chunk.iter().copied().unzip();
            match sys::update_batch(self.slots_fd.as_fd(), &keys, &values) {
                // A kernel without batches (before 5.6).
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    for (key, value) in chunk {
                        self.slots
                            .insert(key, value, 0)
                            .map_err(writing(map::SLOTS))?;
                    }
                }
                result => result.map_err(|source| WriteError::new(map::SLOTS, source))?,
            }
        }
        Ok(())
    }

    fn delete_slots(&mut self, slots: &[SlotKey]) -> Result<(), WriteError> {
        for key in slots {
            ignore_absent(self.slots.remove(key)).map_err(writing(map::SLOTS))?;
        }
        Ok(())
    }

    fn put_service(
        &mut self,
        key: ServiceKey,
        name: ServiceName,
        entry: ServiceEntry,
    ) -> Result<(), WriteError> {
        self.names
            .insert(key, name, 0)
            .map_err(writing(map::NAMES))?;
        self.services
            .insert(key, entry, 0)
            .map_err(writing(map::SERVICES))
    }

    fn delete_service(&mut self, key: ServiceKey) -> Result<(), WriteError> {
        ignore_absent(self.services.remove(&key)).map_err(writing(map::SERVICES))?;
        ignore_absent(self.names.remove(&key)).map_err(writing(map::NAMES))?;
        ignore_absent(self.service_counts.remove(&key)).map_err(writing(map::SERVICE_COUNTS))
    }

    fn put_client(&mut self, cgroup: u64, client: LeftAlone) -> Result<(), WriteError> {
        self.left_alone
            .insert(cgroup, client, 0)
            .map_err(writing(map::LEFT_ALONE))
    }

    fn delete_client(&mut self, cgroup: u64) -> Result<(), WriteError> {
        ignore_absent(self.left_alone.remove(&cgroup)).map_err(writing(map::LEFT_ALONE))
    }

    fn put_wish(&mut self, address: IpAddr, wish: Wish) -> Result<(), WriteError> {
        self.wishes
            .insert(address::from_ip(address), u32::from(wish as u8), 0)
            .map_err(writing(map::WISHES))
    }

    fn delete_wish(&mut self, address: IpAddr) -> Result<(), WriteError> {
        ignore_absent(self.wishes.remove(&address::from_ip(address))).map_err(writing(map::WISHES))
    }

    fn put_node(&mut self, node: Node) -> Result<(), WriteError> {
        let node = match self.node() {
            Ok(old) => node.with_metrics(old.metrics()),
            Err(_) => node,
        };
        self.node.set(0, node, 0).map_err(writing(map::NODE))
    }
}

/// Whether all slots were there: otherwise the entry was replaced meanwhile.
fn is_whole(record: &Record) -> bool {
    record
        .entry
        .tiers()
        .iter()
        .all(|tier| (tier.start() + tier.count()) as usize <= record.slots.len())
}

fn open<T>(
    pins: &Pins,
    name: &'static str,
    kind: impl FnOnce(MapData) -> Map,
) -> Result<T, ReadError>
where
    T: TryFrom<Map, Error = MapError>,
{
    MapData::from_pin(pins.map(name))
        .and_then(|data| kind(data).try_into())
        .map_err(reading(name))
}

fn open_fd(pins: &Pins, name: &'static str) -> Result<OwnedFd, ReadError> {
    let failed = |error| MapError::IoError(error);
    sys::open_pinned(&pins.map(name))
        .map_err(failed)
        .map_err(reading(name))
}

/// The keys of a map that others may change meanwhile, each once. (After a
/// deletion the kernel may begin again at the first bucket.)
fn keys<K: Pod + Ord>(
    keys: impl Iterator<Item = Result<K, MapError>>,
    map: &'static str,
) -> Result<BTreeSet<K>, ReadError> {
    keys.collect::<Result<_, _>>().map_err(reading(map))
}

/// How many elements a pinned hash map has.
fn count<K: Pod, V: Pod>(pins: &Pins, name: &'static str) -> Result<usize, ReadError> {
    let map = open_fd(pins, name)?;
    sys::count::<K, V>(map.as_fd())
        .map_err(MapError::IoError)
        .map_err(reading(name))
}

fn ignore_absent(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(())
        }
        result => result,
    }
}

fn reading(map: &'static str) -> impl FnOnce(MapError) -> ReadError {
    move |source| ReadError {
        map,
        source: Box::new(source),
    }
}

fn writing(map: &'static str) -> impl FnOnce(MapError) -> WriteError {
    move |error| {
        let source = match error {
            MapError::SyscallError(error) => error.io_error,
            error => io::Error::other(error),
        };
        WriteError::new(map, source)
    }
}
