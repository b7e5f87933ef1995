//! Connected UDP sockets whose endpoint stops serving, and all the others.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use std::net::IpAddr;

use lab::fixture::{PATIENCE, Service, dump, json, live_endpoints, start, wait_until};
use lab::report::{HttpReport, SessionReport};
use lab::{Agent, Lab, Node, Place, Pod, Process, Server};

const V4: &str = "10.96.0.10:80";
const MAPPED: &str = "[::ffff:10.96.0.10]:80";
const V6: &str = "[fd00:96::10]:80";
const PORT: u16 = 5353;

/// What its slice says of an endpoint that the pod `one` is.
#[derive(Clone, Copy)]
enum One {
    Ready,
    /// Serving, but on its way out.
    Draining,
    NotReady,
    Gone,
}

/// Two servers, over UDP and TCP, and a UDP Service of each family and a TCP
/// one, on one node.
struct Stage {
    node: Node,
    one: Pod,
    two: Pod,
    _running: Vec<Server>,
}

impl Stage {
    fn new(lab: &mut Lab) -> Self {
        let node = lab.node("n1").unwrap();
        let [one, two] = ["one", "two"].map(|name| node.pod(name, None).unwrap());
        let running = [&one, &two].map(|pod| {
            let v4 = pod.serve_udp(format!("{}:{PORT}", pod.ipv4()), pod.name());
            let v6 = pod.serve_udp(format!("[{}]:{PORT}", pod.ipv6()), pod.name());
            let tcp = pod.serve(format!("{}:{PORT}", pod.ipv4()), pod.name());
            [v4, v6, tcp].map(Result::unwrap)
        });
        Self {
            node,
            one,
            two,
            _running: running.into_iter().flatten().collect(),
        }
    }

    /// Writes the Services, and waits until the agent has them if there is one.
    fn write(&self, one: One, with_two: bool) {
        for (name, cluster_ip, protocol) in [
            ("dns", "10.96.0.10", "UDP"),
            ("dns6", "fd00:96::10", "UDP"),
            ("web", "10.96.0.11", "TCP"),
        ] {
            let address = |pod: &Pod| -> IpAddr {
                if name == "dns6" {
                    pod.ipv6().into()
                } else {
                    pod.ipv4().into()
                }
            };
            let mut endpoints = Vec::new();
            if !matches!(one, One::Gone) {
                endpoints.push((address(&self.one), "n1"));
            }
            if with_two {
                endpoints.push((address(&self.two), "n1"));
            }
            let service = Service {
                name,
                cluster_ip,
                protocol,
                target_port: PORT,
                endpoints,
                ..Service::default()
            };
            let conditions = match one {
                One::Ready | One::Gone => "{}",
                One::Draining => "{ready: false, serving: true, terminating: true}",
                One::NotReady => "{ready: false, serving: false}",
            };
            let address = format!("[\"{}\"], ", address(&self.one));
            let with_conditions = format!("{address}conditions: {conditions}, ");
            let yaml = service.yaml().replace(&address, &with_conditions);
            self.node
                .write_manifest(&format!("{name}.yaml"), &yaml)
                .unwrap();
        }
    }

    /// An agent that has looked for sockets once, as it does at its start: what
    /// happens from now on has to be noticed.
    fn start_agent(&self) -> Agent {
        let mut agent = start(&self.node, &[]);
        agent
            .wait_for_log("while no agent ran are gone", PATIENCE)
            .unwrap();
        agent
    }

    fn wait_for_endpoints(&self, count: usize) {
        wait_until("the tables are written", || {
            ["shop/dns", "shop/dns6", "shop/web"]
                .iter()
                .all(|service| live_endpoints(&self.node, service, "node").len() == count)
        });
    }

    /// A connected socket in a pod of its own.
    fn client(&self, name: &str, to: &str) -> Session {
        let pod = self.node.pod(name, None).unwrap();
        self.session(&pod, "connected-udp", to)
    }

    fn session(&self, place: &impl Place, kind: &str, to: &str) -> Session {
        let process = place.start_lab_pod(&["session", kind, to]).unwrap();
        let mut session = Session { process };
        session.expect_answer("one");
        session
    }

    /// A socket of each kind that must survive whatever becomes of endpoints.
    fn bystanders(&self) -> Vec<(&'static str, Session)> {
        let pod = |name| self.node.pod(name, None).unwrap();
        let direct = format!("{}:{PORT}", self.one.ipv4());
        vec![
            (
                "direct",
                self.session(&pod("direct"), "connected-udp", &direct),
            ),
            ("unconnected", self.session(&pod("loose"), "udp", V4)),
            ("unconnected, IPv6", self.session(&pod("loose6"), "udp", V6)),
            ("TCP", self.session(&pod("web"), "tcp", "10.96.0.11:80")),
            (
                "of the host",
                self.session(&self.node, "connected-udp", &direct),
            ),
        ]
    }
}

struct Session {
    process: Process,
}

impl Session {
    fn command(&mut self, line: &str) -> SessionReport {
        self.process.command(line).unwrap()
    }

    fn expect_answer(&mut self, id: &str) {
        let report = self.command("ask");
        assert_eq!(report.id.as_deref(), Some(id), "{report:?}");
    }

    fn expect_abort(&mut self) {
        let report = self.command("wait");
        assert_eq!(report.errno.as_deref(), Some("ECONNABORTED"), "{report:?}");
    }
}

/// Unconnected sockets may move; all others are where they were.
fn expect_undisturbed(bystanders: &mut [(&str, Session)]) {
    for (name, bystander) in bystanders {
        if !name.starts_with("unconnected") {
            bystander.expect_answer("one");
        }
    }
}

/// Clients in pods and in the host's network, over each way to connect.
fn clients(stage: &Stage) -> Vec<(String, Session)> {
    let mut clients = Vec::new();
    for (name, to) in [("v4", V4), ("mapped", MAPPED), ("v6", V6)] {
        let pod = stage.node.pod(name, None).unwrap();
        clients.push((name.to_owned(), stage.session(&pod, "connected-udp", to)));
        let host = stage.session(&stage.node, "connected-udp", to);
        clients.push((format!("{name} of the host"), host));
    }
    clients
}

#[test]
fn sockets_of_an_endpoint_that_is_gone_are_aborted_and_connect_to_another() {
    let mut lab = Lab::new("gone").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let _agent = stage.start_agent();
    let mut bystanders = stage.bystanders();
    let mut clients = clients(&stage);
    let before: Vec<_> = bystanders
        .iter_mut()
        .map(|(_, it)| it.command("ask").local)
        .collect();
    for (_, client) in &mut clients {
        client.process.tell("wait").unwrap();
    }

    stage.write(One::Gone, true);

    for (name, client) in &mut clients {
        let report: SessionReport = client.process.report().unwrap();
        assert_eq!(
            report.errno.as_deref(),
            Some("ECONNABORTED"),
            "{name}: {report:?}"
        );
        // As a socket that was never connected.
        let report = client.command("send");
        assert_eq!(
            report.errno.as_deref(),
            Some("EDESTADDRREQ"),
            "{name}: {report:?}"
        );
        let to = match name.split(' ').next().unwrap() {
            "v4" => V4,
            "mapped" => MAPPED,
            _ => V6,
        };
        assert_eq!(
            client.command(&format!("connect {to}")).errno,
            None,
            "{name}"
        );
        client.expect_answer("two");
    }
    for ((name, bystander), local) in bystanders.iter_mut().zip(before) {
        let report = bystander.command("ask");
        // The unconnected one has moved, all others are still there.
        let id = if name.starts_with("unconnected") {
            "two"
        } else {
            "one"
        };
        assert_eq!(report.id.as_deref(), Some(id), "{name}: {report:?}");
        assert_eq!(report.local, local, "{name}");
    }
}

/// One that only sends, as statsd's clients do, never waits for an error.
#[test]
fn a_socket_that_only_sends_gets_an_error_and_moves() {
    let mut lab = Lab::new("sends").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let _agent = stage.start_agent();
    let mut client = stage.client("client", V4);

    stage.write(One::NotReady, true);

    let mut errno = None;
    wait_until("sending fails", || {
        errno = client.command("send").errno;
        errno.is_some()
    });
    let expected = ["ECONNABORTED", "EDESTADDRREQ"].map(|it| Some(it.to_owned()));
    assert!(expected.contains(&errno), "{errno:?}");
    client.command(&format!("connect {V4}"));
    // Answers to what was sent before are still there to be read.
    wait_until("another answers", || {
        client.command("ask").id.as_deref() == Some("two")
    });
}

#[test]
fn an_endpoint_that_drains_keeps_its_sockets_until_it_no_longer_serves() {
    let mut lab = Lab::new("drains").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let mut agent = stage.start_agent();
    let mut client = stage.client("client", V4);
    let mut bystanders = stage.bystanders();
    // Something else stops serving at the same time, so that all are looked at.
    let mut aborted = stage.client("other", V6);

    stage.write(One::Draining, true);
    let dns6 = stage.node.manifests().join("dns6.yaml");
    let text = std::fs::read_to_string(&dns6).unwrap();
    stage
        .node
        .write_manifest(
            "dns6.yaml",
            &text.replace("serving: true", "serving: false"),
        )
        .unwrap();

    aborted.expect_abort();
    agent
        .wait_for_log("destroyed UDP sockets", PATIENCE)
        .unwrap();
    client.expect_answer("one");
    expect_undisturbed(&mut bystanders);

    stage.write(One::NotReady, true);
    client.expect_abort();
    expect_undisturbed(&mut bystanders);
}

#[test]
fn the_last_endpoint_takes_its_sockets_along() {
    let mut lab = Lab::new("last").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let address = "127.0.0.1:10270";
    let _agent = start(&stage.node, &["--metrics-addr", address]);
    let mut client = stage.client("client", V4);

    stage.write(One::Gone, false);

    client.expect_abort();
    let report = client.command(&format!("connect {V4}"));
    assert_eq!(report.errno.as_deref(), Some("ECONNREFUSED"));
    let metric = "\nshunt_udp_sockets_destroyed_total 1\n";
    wait_until("it is counted", || {
        let page: HttpReport = stage.node.lab_pod(&["get", address, "/metrics"]).unwrap();
        page.body.contains(metric)
    });
}

#[test]
fn only_the_last_connect_of_a_socket_counts() {
    let mut lab = Lab::new("again").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let _agent = stage.start_agent();
    let pod = stage.node.pod("client", None).unwrap();
    let mut aborted = stage.session(&pod, "connected-udp", V4);
    let mut direct = stage.session(&pod, "connected-udp", V4);
    let one = format!("{}:{PORT}", stage.one.ipv4());
    assert_eq!(direct.command(&format!("connect {one}")).errno, None);

    stage.write(One::Gone, true);

    aborted.expect_abort();
    direct.expect_answer("one");
}

#[test]
fn what_stopped_while_no_agent_ran_is_made_up_for() {
    let mut lab = Lab::new("later").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let agent = start(&stage.node, &[]);
    let mut client = stage.client("client", V4);
    let mut bystanders = stage.bystanders();

    agent.kill().unwrap();
    stage.write(One::Gone, true);
    let _agent = start(&stage.node, &[]);

    client.expect_abort();
    expect_undisturbed(&mut bystanders);
}

#[test]
fn sockets_of_what_goes_on_serving_are_left_alone() {
    let mut lab = Lab::new("stays").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, true);
    let mut agent = start(&stage.node, &[]);
    stage.wait_for_endpoints(2);
    let pod = stage.node.pod("client", None).unwrap();
    // So many that both endpoints are met, but for one run in 2^63.
    let mut clients: Vec<(String, Session)> = Vec::new();
    let met = |clients: &[(String, Session)], id: &str| clients.iter().any(|it| it.0 == id);
    while clients.len() < 64 && !(met(&clients, "one") && met(&clients, "two")) {
        let process = pod
            .start_lab_pod(&["session", "connected-udp", V4])
            .unwrap();
        let mut client = Session { process };
        let id = client.command("ask").id.unwrap();
        clients.push((id, client));
    }
    for id in ["one", "two"] {
        assert!(met(&clients, id), "{id} is never chosen");
    }

    stage.write(One::Gone, true);
    agent
        .wait_for_log("destroyed UDP sockets", PATIENCE)
        .unwrap();

    for (id, client) in &mut clients {
        if id == "two" {
            client.expect_answer("two");
        } else {
            client.expect_abort();
        }
    }
}

#[test]
fn what_is_kept_of_a_socket_goes_with_it() {
    let mut lab = Lab::new("release").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let _agent = start(&stage.node, &[]);
    let pod = stage.node.pod("client", None).unwrap();
    let records = || dump(&stage.node, "udp_clients").len();
    let client = stage.session(&pod, "connected-udp", V4);
    let mut other = stage.session(&pod, "connected-udp", V4);
    let _unconnected = stage.session(&pod, "udp", V4);
    assert_eq!(records(), 2);
    drop(client);
    wait_until("the socket is closed", || records() == 1);
    let one = format!("{}:{PORT}", stage.one.ipv4());
    other.command(&format!("connect {one}"));
    assert_eq!(records(), 0, "connected elsewhere");
}

#[test]
fn status_says_that_sockets_can_be_destroyed() {
    let mut lab = Lab::new("status").unwrap();
    let stage = Stage::new(&mut lab);
    stage.write(One::Ready, false);
    let _agent = start(&stage.node, &[]);
    let status = json(&stage.node, &["status"]);
    assert_eq!(status["udp_cleanup"]["available"], true, "{status}");
    let text = stage.node.shunt(&["status"]).unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("\nUDP       available"), "{text}");
}
