//! DNS through a ClusterIP, by resolvers that know nothing of shunt.
//!
//! Where no kube-proxy is there, an answer shows that shunt has translated.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

mod resolver;
mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lab::fixture::{PATIENCE, READY, control_plane, json, start, wait_until};
use lab::kubernetes::{ProxyMode, list};
use lab::{Agent, Lab, Node, Place as _, Pod};

use resolver::{Answer, Library, Lookups, build, command, etc};
use server::{
    BIG, BIG_STRINGS, CLUSTER_IPS, DnsServer, MANY, MANY_ADDRESSES, WEB, WEB_ADDRESSES, WHO,
    service, slices,
};

/// A node with a DNS server, a client, and the agent.
struct Stage {
    node: Node,
    client: Pod,
    _server: DnsServer,
    _agent: Agent,
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let node = lab.node("n1").unwrap();
        let client = node.pod("client", None).unwrap();
        let server = DnsServer::start(&node, 1);
        let [v4, v6] = slices(&[&server]);
        let objects = list(&[service("None"), v4, v6]);
        node.write_manifest("dns.json", &objects).unwrap();
        let agent = start(&node, &[]);
        Self {
            node,
            client,
            _server: server,
            _agent: agent,
        }
    }

    fn count(&self, counter: &str) -> u64 {
        let status = json(&self.node, &["status"]);
        status["counters"][counter].as_u64().unwrap()
    }

    /// Does something, and returns by how much a counter has grown.
    fn counted<T>(&self, counter: &str, what: impl FnOnce() -> T) -> (T, u64) {
        let before = self.count(counter);
        let result = what();
        (result, self.count(counter) - before)
    }

    fn dig(&self, args: &[&str]) -> String {
        let mut dig = self.client.command("dig");
        let output = dig.args(["+tries=1", "+time=10"]).args(args).output();
        let output = output.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{args:?}: {text}");
        text
    }

    /// What `getent ahosts` shows.
    fn getent(&self, etc: &Path, name: &str) -> Vec<String> {
        let mut getent = command(&self.client, etc, "getent");
        let output = getent.args(["ahosts", name]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{etc:?}: {text}");
        let mut addresses: Vec<_> = text
            .lines()
            .filter(|it| it.contains("STREAM"))
            .map(|it| it.split_whitespace().next().unwrap().to_owned())
            .collect();
        addresses.sort();
        addresses
    }
}

#[test]
fn dig_is_answered_over_udp_and_tcp_and_falls_back() {
    let mut lab = Lab::new("dig").unwrap();
    let stage = Stage::new(&mut lab);
    for cluster_ip in CLUSTER_IPS {
        let at = format!("@{cluster_ip}");
        let shown = format!(";; SERVER: {cluster_ip}#53({cluster_ip})");
        for (args, protocol, expected) in [
            (&[WEB, "A"][..], "UDP", WEB_ADDRESSES[0]),
            (&[WEB, "AAAA"], "UDP", WEB_ADDRESSES[1]),
            (&[WEB, "A", "+tcp"], "TCP", WEB_ADDRESSES[0]),
            (&["none.shop.test", "A"], "UDP", "status: NXDOMAIN"),
        ] {
            let args = [&[at.as_str()], args].concat();
            let (text, connects) = stage.counted("connect_node", || stage.dig(&args));
            assert!(text.contains(expected), "{text}");
            assert!(text.contains(&format!("{shown} ({protocol})")), "{text}");
            assert!(!text.contains("unexpected source"), "{text}");
            assert_eq!(connects, 1, "{text}");
        }

        let (text, connects) = stage.counted("connect_node", || stage.dig(&[&at, BIG, "TXT"]));
        assert!(
            text.contains(";; Truncated, retrying in TCP mode."),
            "{text}"
        );
        assert!(text.contains(&format!("{shown} (TCP)")), "{text}");
        assert_eq!(text.matches("\"0123456789").count(), BIG_STRINGS, "{text}");
        assert_eq!(connects, 2, "{text}");
    }
}

#[test]
fn the_resolver_of_glibc_is_answered() {
    let mut lab = Lab::new("glibc").unwrap();
    let stage = Stage::new(&mut lab);
    for cluster_ip in CLUSTER_IPS {
        for options in ["attempts:1", "attempts:1 use-vc"] {
            let etc = etc(&lab, cluster_ip, options);
            let (addresses, connects) = stage.counted("connect_node", || stage.getent(&etc, WEB));
            assert_eq!(addresses, WEB_ADDRESSES, "{etc:?}");
            assert!(connects > 0, "{etc:?}");
            // Truncated, and then asked for over TCP.
            let addresses = stage.getent(&etc, MANY);
            assert_eq!(addresses.len(), MANY_ADDRESSES, "{etc:?}");
        }
    }
}

#[test]
fn the_resolver_of_musl_is_answered() {
    let mut lab = Lab::new("musl").unwrap();
    let stage = Stage::new(&mut lab);
    let program = build(&lab, Library::Musl);
    for cluster_ip in CLUSTER_IPS {
        let etc = etc(&lab, cluster_ip, "attempts:1");
        let mut lookups = Lookups::start(&stage.client, &etc, &program);
        let (answer, sources) = stage.counted("source_names", || lookups.ask(WEB));
        assert_eq!(answer.error, "", "{answer:?}");
        let mut addresses = answer.addresses;
        addresses.sort();
        assert_eq!(addresses, WEB_ADDRESSES);
        // One answer for each family of addresses.
        assert_eq!(sources, 2);
    }
}

/// What became of the lookups of a client.
#[derive(Debug, Default)]
struct Outcome {
    done: u64,
    /// In words of the library.
    failures: BTreeMap<String, u64>,
    /// Of the last lookup.
    addresses: Vec<String>,
}

/// A client that asks the same again and again.
struct Client {
    name: String,
    outcome: Mutex<Outcome>,
}

impl Client {
    fn ask_until(&self, is_over: &AtomicBool, mut lookups: Lookups) {
        while !is_over.load(Ordering::Relaxed) {
            let Answer { error, addresses } = lookups.ask(WHO);
            let mut outcome = self.outcome.lock().unwrap();
            outcome.done += 1;
            if !error.is_empty() {
                *outcome.failures.entry(error).or_default() += 1;
            }
            outcome.addresses = addresses;
        }
    }
}

fn done(clients: &[Client]) -> Vec<u64> {
    let done = clients.iter().map(|it| it.outcome.lock().unwrap().done);
    done.collect()
}

/// Becomes true when it goes out of scope, so that nothing is waited for in vain.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts a client on a pod whose lookups go to this server.
struct Clients<'a> {
    lab: &'a Lab,
    server: &'a DnsServer,
    programs: [(Library, PathBuf); 2],
}

impl Clients<'_> {
    /// One of each library.
    fn start(&self, node: &Node, cluster_ip: &str) -> [(Client, Lookups); 2] {
        let pod = self.pod(node, cluster_ip);
        [0, 1].map(|index| {
            let library = self.programs[index].0;
            let client = Client {
                name: format!("{library:?} on {}, {cluster_ip}", node.name()),
                outcome: Mutex::default(),
            };
            (client, self.lookups(&pod, cluster_ip, index))
        })
    }

    /// Makes pods until one has affinity to the server, as half of them do.
    fn pod(&self, node: &Node, cluster_ip: &str) -> Pod {
        let family = if cluster_ip.contains(':') { "v6" } else { "v4" };
        let mut pods = (0..32).map(|it| node.pod(&format!("{family}c{it}"), None).unwrap());
        let is_sent_there = |pod: &Pod| {
            let answer = self.lookups(pod, cluster_ip, 0).ask(WHO);
            answer.addresses == [self.server.identity()]
        };
        pods.find(is_sent_there).unwrap()
    }

    fn lookups(&self, pod: &Pod, cluster_ip: &str, index: usize) -> Lookups {
        let (library, program) = &self.programs[index];
        // With kube-proxy alone, a lookup without an answer asks again after the
        // time that is set for each attempt, or, with musl, for all of them.
        let options = match library {
            Library::Glibc => "timeout:5 attempts:5",
            Library::Musl => "timeout:60 attempts:10",
        };
        Lookups::start(pod, &etc(self.lab, cluster_ip, options), program)
    }
}

/// On two nodes: with shunt, and with kube-proxy alone.
#[test]
fn no_lookup_fails_when_an_endpoint_falls_silent_and_is_gone() {
    let mut lab = Lab::new("dnsgone").unwrap();
    let nodes = ["n1", "n2"].map(|name| lab.node(name).unwrap());
    let servers = [1, 2].map(|number| DnsServer::start(&nodes[0], number));
    let plane = control_plane(&nodes[1]);
    let [v4, v6] = slices(&[&servers[0], &servers[1]]);
    plane.apply(&list(&[service("ClientIP"), v4, v6])).unwrap();
    let _proxies = nodes
        .each_ref()
        .map(|it| plane.kube_proxy(it, ProxyMode::Nftables).unwrap());
    let mut agent = nodes[0].agent_of_cluster(plane.kubeconfig(), &[]).unwrap();
    agent.wait_for_log(READY, PATIENCE).unwrap();
    let starter = Clients {
        lab: &lab,
        server: &servers[0],
        programs: [Library::Glibc, Library::Musl].map(|it| (it, build(&lab, it))),
    };
    let places = nodes
        .iter()
        .flat_map(|node| CLUSTER_IPS.map(|it| (node, it)));
    let (clients, lookups): (Vec<_>, Vec<_>) = places
        .flat_map(|(node, it)| starter.start(node, it))
        .unzip();

    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = Over(&is_over);
        for (client, lookups) in clients.iter().zip(lookups) {
            scope.spawn(|| client.ask_until(over.0, lookups));
        }
        wait_until("all are answered", || {
            done(&clients).iter().all(|it| *it > 20)
        });
        servers[0].fall_silent();
        wait_until("all wait for an answer", || {
            let before = done(&clients);
            thread::sleep(Duration::from_millis(300));
            done(&clients) == before
        });
        let before = done(&clients);
        plane.apply(&list(&slices(&[&servers[1]]))).unwrap();
        wait_until("all are answered again", || {
            let mut both = done(&clients).into_iter().zip(&before);
            both.all(|(now, before)| now > before + 20)
        });
    });
    for Client { name, outcome } in &clients {
        let outcome = outcome.lock().unwrap();
        assert!(outcome.failures.is_empty(), "{name}: {outcome:?}");
        assert_eq!(outcome.addresses, [servers[1].identity()], "{name}");
    }
}
