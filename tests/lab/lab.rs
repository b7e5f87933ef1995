//! A lab: its fabric and its nodes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::address::{self, GATEWAY};
use crate::cgroup;
use crate::cleanup::Owner;
use crate::network::{Builder, Namespace};
use crate::node::{self, Node};

/// Nodes and pods under one name. Dropping it removes all of them.
pub struct Lab {
    shared: Arc<Shared>,
    fabric: Namespace,
    nodes: Vec<(u8, Namespace)>,
    owner: Owner,
}

/// What may differ between labs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// When agents' logs are printed.
    pub logs: LogOutput,
    /// Processors that receive packet steering spreads packets over, as a bit
    /// mask: it shows reordering that one queue hides. 0 leaves it off.
    pub steering: u32,
}

/// When an agent's log is printed to standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogOutput {
    /// Whenever an agent ends: the test harness shows it only for failed tests.
    #[default]
    Captured,
    /// When the thread panics. For programs that are not tests.
    OnPanic,
}

/// What nodes and pods need of their lab.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) cgroup: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) builder: Builder,
    pub(crate) options: Options,
}

impl Lab {
    /// Makes an empty lab. Several may exist at once, also under one label.
    pub fn new(label: &str) -> Result<Self> {
        Self::with(label, Options::default())
    }

    /// As [`Lab::new`], with other than the usual options.
    pub fn with(label: &str, options: Options) -> Result<Self> {
        let owner = Owner::new(label)?;
        let cgroup = cgroup::root()?.join(owner.name());
        cgroup::create(&cgroup)?;
        let setup = cgroup.join("setup");
        cgroup::create(&setup)?;
        let shared = Shared {
            name: owner.name().to_owned(),
            cgroup,
            folder: owner.folder(),
            builder: Builder::new(setup),
            options,
        };
        let fabric = shared.add_namespace(&format!("{}-net", shared.name), &[])?;
        shared
            .builder
            .ip(&fabric, &fabric_batch())
            .context("make the fabric")?;
        Ok(Self {
            shared: Arc::new(shared),
            fabric,
            nodes: Vec::new(),
            owner,
        })
    }

    /// The lab's unique name, which begins the names of all that it makes.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The lab's folder, for scratch files. It goes with the lab.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// Adds a node. The first is number 1: 192.168.77.1, pods in 10.244.1.0/24.
    pub fn node(&mut self, name: &str) -> Result<Node> {
        let number = u8::try_from(self.nodes.len() + 1).unwrap_or(GATEWAY);
        ensure!(
            number <= address::MAX_NODES,
            "a lab has at most {} nodes",
            address::MAX_NODES
        );
        let node = node::create(&self.shared, &self.fabric, name, number)
            .with_context(|| format!("make node {name}"))?;
        self.introduce(&node)
            .with_context(|| format!("route to node {name}"))?;
        self.nodes.push((number, node.namespace().clone()));
        Ok(node)
    }

    /// Removes the lab, as dropping it does, but says what went wrong.
    pub fn close(mut self) -> Result<()> {
        self.owner.close()
    }

    /// Routes between the new node and the earlier ones.
    fn introduce(&self, node: &Node) -> Result<()> {
        let routes: String = self
            .nodes
            .iter()
            .map(|(number, _)| node::peer_batch(*number))
            .collect();
        self.shared.builder.ip(node.namespace(), &routes)?;
        let route = node::peer_batch(node.number());
        self.nodes
            .iter()
            .try_for_each(|(_, earlier)| self.shared.builder.ip(earlier, &route))
    }
}

impl Shared {
    pub(crate) fn add_namespace(&self, name: &str, sysctls: &[(&str, &str)]) -> Result<Namespace> {
        let steering = format!("{:x}", self.options.steering);
        let mut all = vec![
            // Addresses are unique by construction; detection would delay them.
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
        ];
        if self.options.steering != 0 {
            // Taken over by the queues of devices that are made later.
            all.push(("net/core/rps_default_mask", &steering));
        }
        all.extend(sysctls);
        self.builder.add_namespace(name, &all)
    }
}

/// The bridge is also every node's default gateway. It forwards nothing, so
/// what nobody translates or routes is lost without an answer.
fn fabric_batch() -> String {
    format!(
        "link set lo up\n\
         link add br0 address {mac} type bridge stp_state 0 mcast_snooping 0\n\
         link set br0 up\n\
         addr add {v4}/24 dev br0\n\
         addr add {v6}/64 dev br0 nodad\n",
        mac = address::node_mac(GATEWAY),
        v4 = address::node_v4(GATEWAY),
        v6 = address::node_v6(GATEWAY),
    )
}

/// Creates a folder, naming it in the error.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}
