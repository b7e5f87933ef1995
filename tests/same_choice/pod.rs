//! Random endpoints.
//!
//! Where slices contradict each other about an address, what kube-proxy does is
//! left to chance, but for one thing: of two entries, the one that is not
//! terminating counts. So an address has the same entry everywhere, and beside
//! it at most a twin that is terminating.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use lab::random::Random;
use serde_json::{Value, json};

pub(crate) const ZONES: [&str; 2] = ["z1", "z2"];
/// shunt and kube-proxy run on the first.
pub(crate) const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Addresses of each node and kind of hints; few, so that slices share them.
const ADDRESSES: usize = 12;

/// Which hints the endpoints of a slice have: hints count only where every
/// ready endpoint has one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hints {
    None,
    Zones,
    Nodes,
    Both,
    /// Each endpoint its own.
    Mixed,
}

pub(crate) const HINTS: [Hints; 5] = [
    Hints::None,
    Hints::Zones,
    Hints::Nodes,
    Hints::Both,
    Hints::Mixed,
];

/// What EndpointSlices say of one address.
#[derive(Clone)]
pub(crate) struct Pod {
    hints: Hints,
    pub(crate) entry: Value,
    /// The entry of another pod that had the address before.
    pub(crate) twin: Value,
}

/// Any address whose endpoint has such hints, and the number of its node.
pub(crate) fn address(hints: Hints, is_ipv6: bool, random: &mut Random) -> (IpAddr, usize) {
    let node = random.below(NODES.len());
    let last = hints as usize * ADDRESSES + random.below(ADDRESSES) + 2;
    let number = |it: usize| u8::try_from(it).expect("there are few");
    let (subnet, last) = (number(node + 1), number(last));
    let address = if is_ipv6 {
        let [subnet, last] = [subnet, last].map(u16::from);
        Ipv6Addr::new(0xfd00, 0x10, 0x244, subnet, 0, 0, 0, last).into()
    } else {
        Ipv4Addr::new(10, 244, subnet, last).into()
    };
    (address, node)
}

impl Pod {
    pub(crate) fn new(address: IpAddr, node: usize, hints: Hints, random: &mut Random) -> Self {
        let mut entry = json!({ "addresses": [address] });
        if random.percent(10) {
            // The API allows more; kube-proxy reads the first.
            let others = [
                IpAddr::from([10, 244, 9, 9]),
                "fd00:10:244:9::9".parse().expect("it is one"),
            ];
            entry["addresses"] = json!([address, others[usize::from(address.is_ipv6())]]);
        }
        if random.percent(95) {
            entry["nodeName"] = json!(NODES[node]);
        }
        if random.percent(90) {
            entry["zone"] = json!(ZONES[node % ZONES.len()]);
        }
        let mut pod = Self {
            hints,
            twin: entry.clone(),
            entry,
        };
        pod.change(random);
        pod
    }

    /// Other conditions and other hints.
    pub(crate) fn change(&mut self, random: &mut Random) {
        self.entry["conditions"] = conditions(random);
        self.entry["hints"] = hints(self.hints, random);
        self.twin = self.entry.clone();
        if self.entry["conditions"]["terminating"] != true {
            self.twin["conditions"] = json!({
                "ready": random.percent(30),
                "serving": random.percent(70),
                "terminating": true,
            });
            self.twin["hints"] = hints(self.hints, random);
        }
    }
}

/// Each may be absent, which means ready, serving and not terminating.
fn conditions(random: &mut Random) -> Value {
    let mut conditions = json!({});
    for (name, often) in [("ready", 70), ("serving", 70), ("terminating", 25)] {
        if random.percent(75) {
            conditions[name] = json!(random.percent(often));
        }
    }
    conditions
}

fn hints(hints: Hints, random: &mut Random) -> Value {
    let mut some = |names: &[&str]| -> Vec<Value> {
        let first = random.below(names.len());
        let count = 1 + usize::from(random.percent(20));
        let names = (first..first + count).map(|index| names[index % names.len()]);
        names.map(|name| json!({ "name": name })).collect()
    };
    let (zones, nodes) = (some(&ZONES), some(&NODES));
    match hints {
        Hints::None => Value::Null,
        Hints::Zones => json!({ "forZones": zones }),
        Hints::Nodes => json!({ "forNodes": nodes }),
        Hints::Both => json!({ "forZones": zones, "forNodes": nodes }),
        Hints::Mixed => {
            let all = [
                Value::Null,
                json!({ "forZones": zones }),
                json!({ "forNodes": nodes }),
            ];
            random.pick(&all)
        }
    }
}
