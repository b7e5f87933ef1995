//! What processes do to spliced sockets that only TCP can do, with the real agent.
#![expect(clippy::unwrap_used, reason = "a test fails this way")]

use lab::fixture::{Service, json, start, wait_until};
use lab::report::SessionReport;
use lab::{Agent, Lab, Node, Place as _, Pod, Process, Server};
use serde_json::Value;

const CART: &str = "10.96.0.10:80";

/// A node that splices what its pods ask of their one Service.
struct Spliced {
    node: Node,
    client: Pod,
    _web: (Pod, Server),
}

impl Spliced {
    fn new(lab: &mut Lab) -> Self {
        let node = lab.node("n1").unwrap();
        let [client, web] = ["client", "web"].map(|name| node.pod(name, None).unwrap());
        let server = web.serve("0.0.0.0:8080", "web").unwrap();
        let service = Service {
            endpoints: vec![(web.ipv4().into(), "n1")],
            annotations: &[("shunt.dev/splice", "on")],
            ..Service::default()
        };
        node.write_manifest("cart.yaml", &service.yaml()).unwrap();
        Self {
            node,
            client,
            _web: (web, server),
        }
    }

    fn start(&self, args: &[&str]) -> Agent {
        let args = [&["--splice-after", "0ms"], args].concat();
        let agent = start(&self.node, &args);
        wait_until("the self-test has passed", || {
            json(&self.node, &["status"])["splicing"]["self_test"] == "passed"
        });
        agent
    }

    fn connect(&self) -> Session<'_> {
        Session {
            node: &self.node,
            process: self.client.start_lab_pod(&["polled", CART]).unwrap(),
        }
    }

    fn program(&self, name: &str) -> Value {
        let status = json(&self.node, &["status"]);
        let programs = status["programs"].as_array().unwrap();
        let program = programs.iter().find(|program| program["name"] == name);
        program.unwrap().clone()
    }
}

/// The one connection.
struct Session<'a> {
    node: &'a Node,
    process: Process,
}

impl Session<'_> {
    /// The errno of a command, if it failed.
    fn command(&mut self, line: &str) -> Option<String> {
        let report: SessionReport = self.process.command(line).unwrap();
        report.errno
    }

    fn ask(&mut self) {
        assert_eq!(self.command("ask 20"), None);
    }

    fn row(&self) -> Value {
        json(self.node, &["sockets"])["sockets"][0].clone()
    }

    /// Asks until that has made it spliced.
    fn wait_until_spliced(&mut self) {
        wait_until("it is spliced", || {
            self.ask();
            let row = self.row();
            row["to_server"]["spliced"] == true && row["to_client"]["spliced"] == true
        });
    }

    /// Waits until it is plain TCP again, without a message of its own.
    fn wait_until_plain(&self, reason: &str) {
        wait_until(reason, || {
            let row = self.row();
            row["state"] == "paired" && row["reason"] == reason
        });
    }
}

#[test]
fn an_option_that_only_tcp_has_ends_the_splice_and_its_end_allows_it_again() {
    let mut lab = Lab::new("options").unwrap();
    let spliced = Spliced::new(&mut lab);
    let _agent = spliced.start(&[]);
    let mut session = spliced.connect();
    for (option, on, off, reason) in [
        ("SO_RCVLOWAT", "2", "1", "low_water"),
        ("SO_ZEROCOPY", "1", "0", "zero_copy"),
        ("SO_TIMESTAMP", "1", "0", "timestamps"),
        ("SO_TIMESTAMPING", "24", "0", "timestamps"),
        ("SO_PEEK_OFF", "0", "-1", "marked"),
        ("TCP_REPAIR", "1", "0", "repair"),
    ] {
        session.wait_until_spliced();
        assert_eq!(
            session.command(&format!("set {option} {on}")),
            None,
            "{option}"
        );
        session.wait_until_plain(reason);
        assert_eq!(
            session.command(&format!("set {option} {off}")),
            None,
            "{option}"
        );
        session.ask();
    }
    session.wait_until_spliced();
    // Whether the kernel has such a layer or not.
    session.command("set TCP_ULP tls");
    session.wait_until_plain("upper_layer");
}

#[test]
fn other_options_take_the_value_that_they_are_given_and_leave_the_splice() {
    let mut lab = Lab::new("others").unwrap();
    let spliced = Spliced::new(&mut lab);
    let _agent = spliced.start(&[]);
    let mut session = spliced.connect();
    session.wait_until_spliced();
    let before = session.row()["promotions"].clone();
    for option in [
        "SO_RCVLOWAT 1",
        "TCP_NODELAY 0",
        "SO_KEEPALIVE 1",
        "IP_TOS 16",
    ] {
        assert_eq!(session.command(&format!("set {option}")), None, "{option}");
    }
    session.ask();
    let row = session.row();
    assert_eq!(
        (&row["state"], &row["promotions"]),
        (&"promoted".into(), &before)
    );
}

#[test]
fn a_mark_that_is_made_while_no_agent_runs_ends_the_splice_once_one_does() {
    let mut lab = Lab::new("orphan").unwrap();
    let spliced = Spliced::new(&mut lab);
    let agent = spliced.start(&[]);
    let mut session = spliced.connect();
    session.wait_until_spliced();
    agent.stop().unwrap();
    assert_eq!(session.command("set SO_RCVLOWAT 2"), None);
    let _agent = spliced.start(&[]);
    session.wait_until_plain("low_water");
    assert_eq!(session.command("set SO_RCVLOWAT 1"), None);
    session.wait_until_spliced();
}

#[test]
fn sockets_are_only_marked_while_any_may_be_spliced() {
    let mut lab = Lab::new("attached").unwrap();
    let spliced = Spliced::new(&mut lab);
    let is_attached = || spliced.program("setsockopt")["attached"] == true;
    let agent = start(&spliced.node, &["--splice", "off"]);
    assert!(!is_attached());
    agent.stop().unwrap();
    let agent = spliced.start(&[]);
    assert!(is_attached());
    let mut session = spliced.connect();
    session.wait_until_spliced();
    agent.stop().unwrap();
    let _agent = start(&spliced.node, &["--splice", "off"]);
    wait_until("the hook is gone with the splice", || !is_attached());
    assert_eq!(session.row()["state"], "paired");
    session.ask();
}

const WATCH: &[&str] = &["--splice-calls", "watch"];

#[test]
fn a_connection_that_was_read_by_splice_is_never_promoted() {
    let mut lab = Lab::new("early").unwrap();
    let spliced = Spliced::new(&mut lab);
    let _agent = spliced.start(WATCH);
    let mut session = spliced.connect();
    assert_eq!(session.command("splice").as_deref(), Some("EAGAIN"));
    wait_until("it is looked at", || {
        assert_eq!(session.command("splice-ask 20"), None);
        session.row()["reason"] == "splice_call"
    });
    assert_eq!(session.row()["promotions"], 0);
}

#[test]
fn a_splice_call_takes_what_its_container_has_back_to_tcp() {
    let mut lab = Lab::new("late").unwrap();
    let spliced = Spliced::new(&mut lab);
    let _agent = spliced.start(WATCH);
    let mut session = spliced.connect();
    session.wait_until_spliced();
    assert_eq!(session.command("splice").as_deref(), Some("EAGAIN"));
    session.wait_until_plain("splice_call");
    assert_eq!(session.command("splice-ask 20"), None);
    drop(session);

    // Another process in its container, which has not called it.
    let mut session = spliced.connect();
    wait_until("it is looked at", || {
        session.ask();
        session.row()["reason"] == "splice_call"
    });
    assert_eq!(session.row()["promotions"], 0);
}

#[test]
fn splice_calls_are_watched_if_wanted_while_any_may_be_spliced() {
    let mut lab = Lab::new("watched").unwrap();
    let spliced = Spliced::new(&mut lab);
    let by = || json(&spliced.node, &["status"])["splicing"]["splice_calls"].clone();
    let agent = start(&spliced.node, &["--splice", "off"]);
    assert!(by().is_null());
    agent.stop().unwrap();
    let agent = spliced.start(WATCH);
    let name = by().as_str().unwrap().to_owned();
    assert_eq!(spliced.program(&name)["attached"], true);
    agent.stop().unwrap();
    let agent = spliced.start(&[]);
    assert!(by().is_null());
    agent.stop().unwrap();
    spliced.start(WATCH).stop().unwrap();
    assert_eq!(by(), *name, "it outlasts the agent");
    let _agent = start(&spliced.node, &["--splice", "off"]);
    wait_until("it is gone with the splice", || by().is_null());
}
