//! Where the programs run: a node with an agent that splices all that it may.

use std::fs;
use std::process::Command;

use anyhow::Result;
use lab::fixture::{Service, json, start, wait_until};
use lab::programs::{self, Programs};
use lab::{Agent, Lab, Node, Place as _, Pod};

/// Where the two hops' servers listen: what clients connect to, and what is behind
/// that.
pub(crate) const PORTS: [(u16, &str); 2] = [(7001, "front"), (7002, "back")];
/// The Services before them.
pub(crate) const FRONT: &str = "10.96.1.1:80";
pub(crate) const BACK: &str = "10.96.1.2:80";
/// How long a client asks.
pub(crate) const SECONDS: u32 = 2;

pub(crate) struct Stage {
    pub(crate) programs: Programs,
    pub(crate) client: Pod,
    /// Where the front is.
    pub(crate) front: Pod,
    /// Where the back is.
    pub(crate) back: Pod,
    _agent: Agent,
    pub(crate) node: Node,
}

/// Servers, and a client that can be run again and again.
pub(crate) struct Running<'a> {
    pub(crate) servers: Vec<programs::Running>,
    pub(crate) client: Box<dyn Fn() -> Result<Command> + 'a>,
}

impl Stage {
    pub(crate) fn new(lab: &mut Lab) -> Result<Self> {
        let programs = Programs::new(lab.folder())?;
        let node = lab.node("n1")?;
        let [client, front, back] = ["client", "front", "back"].map(|name| node.pod(name, None));
        let (client, front, back) = (client?, front?, back?);
        let ends = [(FRONT, &front), (BACK, &back)];
        for ((service, pod), (target_port, name)) in ends.into_iter().zip(PORTS) {
            let service = Service {
                name,
                cluster_ip: service.trim_end_matches(":80"),
                endpoints: vec![(pod.ipv4().into(), "n1")],
                target_port,
                ..Service::default()
            };
            node.write_manifest(&format!("{name}.yaml"), &service.yaml())?;
        }
        let agent = start(&node, &["--splice", "auto", "--splice-after", "0ms"]);
        wait_until("the self-test has passed", || {
            let splicing = &json(&node, &["status"])["splicing"];
            splicing["available"] == true && splicing["self_test"] == "passed"
        });
        Ok(Self {
            programs,
            client,
            front,
            back,
            _agent: agent,
            node,
        })
    }

    /// Ends what a program has left, such as workers of a server that was killed.
    pub(crate) fn clear(&self) -> Result<()> {
        for pod in [&self.client, &self.front, &self.back] {
            pod.kill_all()?;
            wait_until("the pod is empty", || {
                let events = fs::read_to_string(pod.cgroup().join("cgroup.events"));
                events.is_ok_and(|text| text.contains("populated 0"))
            });
        }
        Ok(())
    }

    /// The port of the front.
    pub(crate) fn front_port(&self) -> u16 {
        PORTS[0].0
    }

    /// The port of what is behind it.
    pub(crate) fn back_port(&self) -> u16 {
        PORTS[1].0
    }

    /// A command in the client's pod.
    pub(crate) fn client(&self, program: &str, args: &[&str]) -> Command {
        let mut command = self.client.command(program);
        command.args(args);
        command
    }
}
