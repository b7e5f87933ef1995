//! A node: network namespace, cgroup, bpffs, and its place in the fabric.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};

use crate::address::{self, GATEWAY};
use crate::cgroup;
use crate::lab::{Shared, create_folder};
use crate::network::{Entry, Namespace};
use crate::place::Place;
use crate::pod::{self, Pod};

/// Last parts of the pod addresses in use, shared with the pods.
pub(crate) type Taken = Mutex<BTreeSet<u8>>;

/// A node of a [`Lab`](crate::Lab). Its [`Place`] is the host network.
pub struct Node {
    pub(crate) shared: Arc<Shared>,
    name: String,
    number: u8,
    /// Holds the cgroups of the host processes and of the pods.
    node_cgroup: PathBuf,
    /// Of the host processes.
    cgroup: PathBuf,
    folder: PathBuf,
    manifests: PathBuf,
    bpffs: PathBuf,
    fabric: Namespace,
    entry: Entry,
    pods: Arc<Taken>,
}

impl Place for Node {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn cgroup(&self) -> &Path {
        &self.cgroup
    }
}

impl Node {
    /// The name within the lab.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's address on the fabric.
    pub fn ipv4(&self) -> Ipv4Addr {
        address::node_v4(self.number)
    }

    /// The node's IPv6 address on the fabric.
    pub fn ipv6(&self) -> Ipv6Addr {
        address::node_v6(self.number)
    }

    /// The cgroup that holds the node's host processes and all its pods: where
    /// its agent attaches.
    pub fn node_cgroup(&self) -> &Path {
        &self.node_cgroup
    }

    /// Mount point of the node's own bpffs.
    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// Folder for Kubernetes objects as YAML, which the node's agent watches.
    pub fn manifests(&self) -> &Path {
        &self.manifests
    }

    /// Scratch folder of the node.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Puts a file into [`Node::manifests`], whole in one step.
    pub fn write_manifest(&self, file: &str, yaml: &str) -> Result<()> {
        // The folder is watched, so the unfinished file is elsewhere.
        let unfinished = self.folder.join(file);
        fs::write(&unfinished, yaml).with_context(|| format!("write {}", unfinished.display()))?;
        fs::rename(&unfinished, self.manifests.join(file))
            .with_context(|| format!("move manifest {file} into place"))
    }

    /// Removes a file from [`Node::manifests`].
    pub fn remove_manifest(&self, file: &str) -> Result<()> {
        fs::remove_file(self.manifests.join(file))
            .with_context(|| format!("remove manifest {file}"))
    }

    /// Starts a pod's namespace and cgroup; processes are the caller's. Without
    /// an address it gets the lowest free one. The IPv6 address reads alike.
    pub fn pod(&self, name: &str, ipv4: Option<&str>) -> Result<Pod> {
        let number = self
            .reserve(ipv4)
            .with_context(|| format!("address of pod {name}"))?;
        pod::create(self, name, number, pod::uid(self.number, number))
            .with_context(|| format!("make pod {name}"))
    }

    /// As [`Node::pod`], with the uid that the API server has given it.
    pub fn pod_with_uid(&self, name: &str, uid: &str) -> Result<Pod> {
        let number = self.reserve(None)?;
        pod::create(self, name, number, uid.to_owned()).with_context(|| format!("make pod {name}"))
    }

    /// Loses every packet between this node and the fabric, as a broken switch
    /// does: links stay up everywhere, and nobody gets an error.
    pub fn cut(&self) -> Result<()> {
        self.set_port("nomaster")
    }

    /// Undoes [`Node::cut`].
    pub fn restore(&self) -> Result<()> {
        self.set_port("master br0")
    }

    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        self.entry
            .namespace()
            .expect("create() gives every node one")
    }

    pub(crate) fn pods(&self) -> &Arc<Taken> {
        &self.pods
    }

    fn reserve(&self, ipv4: Option<&str>) -> Result<u8> {
        let mut pods = self
            .pods
            .lock()
            .expect("nothing panics while it holds the lock");
        let number = match ipv4 {
            Some(address) => address::pod_number(self.number, address)?,
            None => (2..255)
                .find(|n| !pods.contains(n))
                .context("all addresses are taken")?,
        };
        ensure!(
            pods.insert(number),
            "{} is taken",
            address::pod_v4(self.number, number)
        );
        Ok(number)
    }

    /// Takes the port out of the bridge or puts it back. (Setting the port's
    /// state would not last: the next carrier event enables it again.)
    fn set_port(&self, setting: &str) -> Result<()> {
        let batch = format!("link set port{} {setting}\n", self.number);
        self.shared
            .builder
            .ip(&self.fabric, &batch)
            .with_context(|| format!("set the port of {} to {setting}", self.name))
    }
}

pub(crate) fn create(
    shared: &Arc<Shared>,
    fabric: &Namespace,
    name: &str,
    number: u8,
) -> Result<Node> {
    let node_cgroup = shared.cgroup.join(name);
    let cgroup = node_cgroup.join("host");
    cgroup::create(&node_cgroup)?;
    cgroup::create(&cgroup)?;
    let mut pods = node_cgroup.clone();
    for part in pod::PODS.split('/') {
        pods.push(part);
        cgroup::create(&pods)?;
    }
    let folder = shared.folder.join(name);
    let manifests = folder.join("manifests");
    let bpffs = folder.join("bpf");
    create_folder(&manifests)?;
    create_folder(&bpffs)?;
    mount(
        Some("bpf"),
        &bpffs,
        Some("bpf"),
        MsFlags::empty(),
        None::<&str>,
    )
    .with_context(|| format!("mount bpffs at {}", bpffs.display()))?;

    let namespace = shared.add_namespace(
        &format!("{}-{name}", shared.name),
        &[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
        ],
    )?;
    shared.builder.ip(fabric, &port_batch(&namespace, number))?;
    shared.builder.ip(&namespace, &node_batch(number))?;
    Ok(Node {
        shared: Arc::clone(shared),
        name: name.to_owned(),
        number,
        entry: Entry::new(&cgroup, Some(namespace))?,
        node_cgroup,
        cgroup,
        folder,
        manifests,
        bpffs,
        fabric: fabric.clone(),
        pods: Arc::default(),
    })
}

/// In the fabric: the veth to the node.
fn port_batch(node: &Namespace, number: u8) -> String {
    format!(
        "link add port{number} type veth peer name eth0 address {mac} netns {node}\n\
         link set port{number} addrgenmode none\n\
         link set port{number} master br0 up\n",
        mac = address::node_mac(number),
        node = node.name(),
    )
}

/// In the node. Pod addresses that no pod has are lost, as under Calico;
/// everything unknown goes to the fabric.
fn node_batch(number: u8) -> String {
    format!(
        "link set lo up\n\
         link set eth0 addrgenmode none\n\
         link set eth0 up\n\
         addr add {v4}/24 dev eth0\n\
         addr add {v6}/64 dev eth0 nodad\n\
         {gateway}\
         route add default via {gateway_v4}\n\
         route add ::/0 via {gateway_v6}\n\
         route add blackhole {pods_v4}\n\
         route add blackhole {pods_v6}\n",
        v4 = address::node_v4(number),
        v6 = address::node_v6(number),
        gateway = neighbour_batch(GATEWAY),
        gateway_v4 = address::node_v4(GATEWAY),
        gateway_v6 = address::node_v6(GATEWAY),
        pods_v4 = address::pod_cidr_v4(number),
        pods_v6 = address::pod_cidr_v6(number),
    )
}

/// In any other node: the way to node `number` and its pods.
pub(crate) fn peer_batch(number: u8) -> String {
    format!(
        "{neighbour}\
         route add {pods_v4} via {v4}\n\
         route add {pods_v6} via {v6}\n",
        neighbour = neighbour_batch(number),
        pods_v4 = address::pod_cidr_v4(number),
        pods_v6 = address::pod_cidr_v6(number),
        v4 = address::node_v4(number),
        v6 = address::node_v6(number),
    )
}

/// Permanent neighbours: the fabric stands for a routed network, where a dead
/// node is silence. With address resolution, connects to one would end early
/// in EHOSTUNREACH.
fn neighbour_batch(number: u8) -> String {
    let mac = address::node_mac(number);
    format!(
        "neigh replace {} lladdr {mac} dev eth0 nud permanent\n\
         neigh replace {} lladdr {mac} dev eth0 nud permanent\n",
        address::node_v4(number),
        address::node_v6(number),
    )
}
