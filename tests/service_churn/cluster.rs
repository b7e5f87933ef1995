//! Random Services over a fixed set of pods, and their random changes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lab::Pod;
use lab::kubernetes::Write;
use lab::random::Random;
use serde_json::{Value, json};

pub(crate) const NAMESPACE: &str = "churn";
pub(crate) const TARGET_PORT: u16 = 8080;
/// Pods that may come to be endpoints of a Service.
const CANDIDATES: usize = 6;
/// One Service in so many is fickle.
const FICKLE_EVERY: usize = 5;

/// A pod that serves both protocols, for as long as the test.
pub(crate) struct Backend {
    pub(crate) pod: Pod,
    pub(crate) node: &'static str,
    pub(crate) zone: &'static str,
}

/// What clients of a Service may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It has a usable endpoint after each single write.
    Steady,
    /// At times it has none, or is not there.
    Fickle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    NotReady,
    /// Terminating, and still serving.
    Draining,
    /// Terminating, and not serving any more.
    Drained,
}

#[derive(Clone, Copy)]
struct Endpoint {
    /// Which of the backends.
    backend: usize,
    state: State,
}

/// A Service of one port.
pub(crate) struct Service {
    number: usize,
    pub(crate) kind: Kind,
    /// Which backends its endpoints are taken from.
    candidates: Vec<usize>,
    slices: BTreeMap<String, Vec<Endpoint>>,
    /// Of slices; never used again.
    numbers: usize,
    exists: bool,
    /// Whether it was ever without usable endpoints.
    pub(crate) was_unusable: bool,
}

/// All Services.
pub(crate) struct Cluster<'a> {
    random: Random,
    backends: &'a [Backend],
    pub(crate) services: Vec<Service>,
}

impl<'a> Cluster<'a> {
    pub(crate) fn new(seed: u64, services: usize, backends: &'a [Backend]) -> Self {
        let mut random = Random::new(seed);
        let services = (0..services)
            .map(|number| Service::new(number, backends.len(), &mut random))
            .collect();
        Self {
            random,
            backends,
            services,
        }
    }

    pub(crate) fn objects(&self) -> Vec<Value> {
        let services = self.services.iter();
        services.flat_map(|it| it.objects(self.backends)).collect()
    }

    /// One change of each of so many Services, and how many there are. Each verb
    /// comes once, since each is a call of kubectl.
    pub(crate) fn change(&mut self, services: usize) -> (Vec<Write>, usize) {
        let mut chosen = BTreeSet::new();
        while chosen.len() < services {
            chosen.insert(self.random.below(self.services.len()));
        }
        let changes = chosen
            .into_iter()
            .map(|index| self.services[index].change(self.backends, &mut self.random));
        let changes: Vec<_> = changes.filter(|it| !it.is_empty()).collect();
        let mut writes = changes.concat();
        // Nothing of a Service is written before it is created, or after it is
        // deleted; what moves between slices is created first.
        writes.sort_by_key(|write| match write {
            Write::Create(_) => 0,
            Write::Replace(_) => 1,
            Write::Delete { .. } => 2,
        });
        (writes, changes.len())
    }

    /// The names of pods that may ever answer for a Service.
    pub(crate) fn may_answer(&self, service: &Service, id: &str) -> bool {
        let mut candidates = service.candidates.iter();
        candidates.any(|it| self.backends[*it].pod.name() == id)
    }
}

impl Service {
    fn new(number: usize, backends: usize, random: &mut Random) -> Self {
        let first = random.below(backends);
        let step = random.pick(&[1, 5, 7]);
        let candidates = (0..CANDIDATES).map(|it| (first + it * step) % backends);
        let candidates: Vec<_> = candidates.collect();
        let endpoint = |backend: &usize| Endpoint {
            backend: *backend,
            state: State::Ready,
        };
        let endpoints = candidates[..1 + random.below(4)].iter().map(endpoint);
        Self {
            number,
            kind: if number.is_multiple_of(FICKLE_EVERY) {
                Kind::Fickle
            } else {
                Kind::Steady
            },
            slices: BTreeMap::from([(format!("s{number}-0"), endpoints.collect())]),
            candidates,
            numbers: 1,
            exists: true,
            was_unusable: false,
        }
    }

    pub(crate) fn is_udp(&self) -> bool {
        self.number / FICKLE_EVERY % 2 == 1
    }

    fn is_ipv6(&self) -> bool {
        self.number % 4 == 3
    }

    /// Where its clients go.
    pub(crate) fn address(&self) -> SocketAddr {
        let number = u16::try_from(self.number + 256).expect("there are few");
        let [high, low] = number.to_be_bytes();
        let ip: IpAddr = if self.is_ipv6() {
            Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, number).into()
        } else {
            Ipv4Addr::new(10, 96, high, low).into()
        };
        SocketAddr::new(ip, 80)
    }

    fn name(&self) -> String {
        format!("s{}", self.number)
    }

    fn protocol(&self) -> &'static str {
        if self.is_udp() { "UDP" } else { "TCP" }
    }

    /// As kube-proxy sees it: ready ones, or else those that still serve.
    fn is_usable(&self) -> bool {
        let mut endpoints = self.slices.values().flatten();
        self.exists && endpoints.any(|it| matches!(it.state, State::Ready | State::Draining))
    }

    fn change(&mut self, backends: &[Backend], random: &mut Random) -> Vec<Write> {
        let before = self.slices.clone();
        let writes = match (self.kind, random.below(100)) {
            (Kind::Fickle, 0..30) if self.exists => self.delete(),
            (Kind::Fickle, _) if !self.exists => self.create(backends),
            (_, 0..30) => self.add(backends, random),
            (_, 30..50) => self.remove(backends, random),
            (_, 50..80) => self.set_state(backends, random),
            (_, 80..90) => self.split(backends, random),
            _ => self.merge(backends),
        };
        if self.is_usable() {
            return writes;
        }
        if self.kind == Kind::Steady {
            self.slices = before;
            return Vec::new();
        }
        self.was_unusable = true;
        writes
    }

    fn delete(&mut self) -> Vec<Write> {
        self.exists = false;
        let slices = self.slices.keys();
        let mut writes = vec![delete("Service", &self.name())];
        writes.extend(slices.map(|it| delete("EndpointSlice", it)));
        writes
    }

    fn create(&mut self, backends: &[Backend]) -> Vec<Write> {
        self.exists = true;
        let objects = self.objects(backends).into_iter();
        objects.map(Write::Create).collect()
    }

    fn add(&mut self, backends: &[Backend], random: &mut Random) -> Vec<Write> {
        let is_new = |it: &&usize| {
            let mut all = self.slices.values().flatten();
            all.all(|endpoint| endpoint.backend != **it)
        };
        let Some(backend) = self.candidates.iter().copied().find(|it| is_new(&it)) else {
            return Vec::new();
        };
        let slice = self.any_slice(random);
        let endpoints = self.slices.entry(slice.clone()).or_default();
        endpoints.push(Endpoint {
            backend,
            state: random.pick(&[State::Ready, State::Ready, State::NotReady]),
        });
        vec![self.replace(&slice, backends)]
    }

    fn remove(&mut self, backends: &[Backend], random: &mut Random) -> Vec<Write> {
        let slice = self.any_slice(random);
        let endpoints = self.slices.entry(slice.clone()).or_default();
        if endpoints.is_empty() {
            return Vec::new();
        }
        endpoints.remove(random.below(endpoints.len()));
        vec![self.replace(&slice, backends)]
    }

    fn set_state(&mut self, backends: &[Backend], random: &mut Random) -> Vec<Write> {
        let slice = self.any_slice(random);
        let endpoints = self.slices.entry(slice.clone()).or_default();
        if endpoints.is_empty() {
            return Vec::new();
        }
        let index = random.below(endpoints.len());
        endpoints[index].state = random.pick(&[
            State::Ready,
            State::Ready,
            State::NotReady,
            State::Draining,
            State::Drained,
        ]);
        vec![self.replace(&slice, backends)]
    }

    /// Half of a slice into a new one. In between, both have it.
    fn split(&mut self, backends: &[Backend], random: &mut Random) -> Vec<Write> {
        let slice = self.any_slice(random);
        let endpoints = self.slices.entry(slice.clone()).or_default();
        let half = endpoints.split_off(endpoints.len() / 2);
        let new = format!("s{}-{}", self.number, self.numbers);
        self.numbers += 1;
        self.slices.insert(new.clone(), half);
        vec![
            Write::Create(self.slice_object(&new, backends)),
            self.replace(&slice, backends),
        ]
    }

    /// The last slice into the first. In between, both have it.
    fn merge(&mut self, backends: &[Backend]) -> Vec<Write> {
        if self.slices.len() < 2 {
            return Vec::new();
        }
        let (gone, endpoints) = self.slices.pop_last().expect("there are two");
        let first = self.slices.keys().next().expect("there are two").clone();
        self.slices
            .entry(first.clone())
            .or_default()
            .extend(endpoints);
        vec![
            self.replace(&first, backends),
            delete("EndpointSlice", &gone),
        ]
    }

    fn any_slice(&self, random: &mut Random) -> String {
        let names: Vec<_> = self.slices.keys().cloned().collect();
        random.pick(&names)
    }

    fn replace(&self, slice: &str, backends: &[Backend]) -> Write {
        Write::Replace(self.slice_object(slice, backends))
    }

    fn objects(&self, backends: &[Backend]) -> Vec<Value> {
        let slices = self.slices.keys();
        let mut objects = vec![self.object()];
        objects.extend(slices.map(|it| self.slice_object(it, backends)));
        objects
    }

    fn object(&self) -> Value {
        let ip = self.address().ip();
        let has_affinity = self.number % 10 == 9;
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "namespace": NAMESPACE, "name": self.name() },
            "spec": {
                "clusterIP": ip,
                "clusterIPs": [ip],
                "sessionAffinity": if has_affinity { "ClientIP" } else { "None" },
                "ports": [{ "port": 80, "protocol": self.protocol() }],
            },
        })
    }

    fn slice_object(&self, name: &str, backends: &[Backend]) -> Value {
        let endpoints = self.slices[name].iter();
        let endpoints: Vec<_> = endpoints
            .map(|it| self.endpoint(*it, &backends[it.backend]))
            .collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": NAMESPACE,
                "name": name,
                "labels": { "kubernetes.io/service-name": self.name() },
            },
            "addressType": if self.is_ipv6() { "IPv6" } else { "IPv4" },
            "ports": [{ "port": TARGET_PORT, "protocol": self.protocol() }],
            "endpoints": endpoints,
        })
    }

    fn endpoint(&self, endpoint: Endpoint, backend: &Backend) -> Value {
        let address: IpAddr = if self.is_ipv6() {
            backend.pod.ipv6().into()
        } else {
            backend.pod.ipv4().into()
        };
        let state = endpoint.state;
        json!({
            "addresses": [address],
            "nodeName": backend.node,
            "zone": backend.zone,
            "conditions": {
                "ready": state == State::Ready,
                "serving": matches!(state, State::Ready | State::Draining),
                "terminating": matches!(state, State::Draining | State::Drained),
            },
        })
    }
}

fn delete(kind: &'static str, name: &str) -> Write {
    Write::Delete {
        kind,
        namespace: NAMESPACE.to_owned(),
        name: name.to_owned(),
    }
}
