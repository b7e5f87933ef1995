//! A pod: network namespace and cgroup on a node, reached by routes.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, umount2};

use crate::address::{self, POD_GATEWAY_V4, POD_GATEWAY_V6};
use crate::cgroup;
use crate::lab::Shared;
use crate::network::{self, Entry, Namespace};
use crate::node::{Node, Taken};
use crate::place::Place;

/// A pod of a [`Node`].
pub struct Pod {
    shared: Arc<Shared>,
    name: String,
    uid: String,
    node: u8,
    number: u8,
    taken: Arc<Taken>,
    node_namespace: Namespace,
    namespace_name: String,
    /// Of the pod, as the kubelet makes it.
    pod_cgroup: PathBuf,
    /// Of its container, below.
    cgroup: PathBuf,
    entry: Entry,
}

impl Place for Pod {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn cgroup(&self) -> &Path {
        &self.cgroup
    }
}

impl Pod {
    /// The name within the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The uid, which names the pod's cgroup.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The pod's address.
    pub fn ipv4(&self) -> Ipv4Addr {
        address::pod_v4(self.node, self.number)
    }

    /// The pod's IPv6 address: 10.244.1.5 has fd00:10:244:1::5.
    pub fn ipv6(&self) -> Ipv6Addr {
        address::pod_v6(self.node, self.number)
    }

    /// Gives the pod all addresses of a network, such as `10.250.0.0/16`: the
    /// node routes it there, and a server on 0.0.0.0 answers for each.
    pub fn add_network(&self, network: &str) -> Result<()> {
        let builder = &self.shared.builder;
        builder.ip(
            &self.node_namespace,
            &format!("route add {network} dev pod{}\n", self.number),
        )?;
        let namespace = self.entry.namespace().context("a pod has a namespace")?;
        builder.ip(namespace, &format!("route add local {network} dev lo\n"))
    }

    /// Ends the pod as a node does: kills its processes, then removes its
    /// routes, link, namespace and cgroup. Name and address are free again.
    pub fn remove(self) -> Result<()> {
        cgroup::remove(&self.pod_cgroup)?;
        self.shared.builder.ip(
            &self.node_namespace,
            &format!("link del pod{}\n", self.number),
        )?;
        let path = Path::new(network::NAMES).join(&self.namespace_name);
        umount2(&path, MntFlags::MNT_DETACH)
            .with_context(|| format!("unmount {}", path.display()))?;
        fs::remove_file(&path).with_context(|| format!("delete {}", path.display()))?;
        self.taken
            .lock()
            .expect("nothing panics while it holds the lock")
            .remove(&self.number);
        Ok(())
    }
}

/// Where pods' cgroups are, below the node's.
pub(crate) const PODS: &str = "kubepods/burstable";

/// One for each address, which is enough within a lab.
pub(crate) fn uid(node: u8, number: u8) -> String {
    format!("00000000-0000-4000-8000-{node:06x}{number:06x}")
}

pub(crate) fn create(node: &Node, name: &str, number: u8, uid: String) -> Result<Pod> {
    let shared = Arc::clone(&node.shared);
    // As the kubelet's cgroupfs driver does it, for a pod that asks for less than
    // it may have.
    let pod_cgroup = node.node_cgroup().join(format!("{PODS}/pod{uid}"));
    let cgroup = pod_cgroup.join(name);
    cgroup::create(&pod_cgroup)?;
    cgroup::create(&cgroup)?;
    let namespace_name = format!("{}-{name}", node.namespace().name());
    let namespace = shared.add_namespace(&namespace_name, &[])?;
    shared.builder.ip(
        node.namespace(),
        &node_batch(&namespace, node.number(), number),
    )?;
    shared
        .builder
        .ip(&namespace, &pod_batch(node.number(), number))?;
    Ok(Pod {
        shared,
        name: name.to_owned(),
        uid,
        node: node.number(),
        number,
        taken: Arc::clone(node.pods()),
        node_namespace: node.namespace().clone(),
        namespace_name,
        entry: Entry::new(&cgroup, Some(namespace))?,
        pod_cgroup,
        cgroup,
    })
}

/// In the node: its end of the veth, with the pods' gateway, and the route.
/// `src` keeps the node's own connects from using the gateway address.
fn node_batch(pod: &Namespace, node: u8, number: u8) -> String {
    format!(
        "link add pod{number} type veth peer name eth0 netns {pod}\n\
         link set pod{number} addrgenmode none\n\
         link set pod{number} up\n\
         addr add {POD_GATEWAY_V4}/32 dev pod{number} scope link\n\
         addr add {POD_GATEWAY_V6}/64 dev pod{number} nodad\n\
         route add {pod_v4}/32 dev pod{number} src {node_v4}\n\
         route add {pod_v6}/128 dev pod{number} src {node_v6}\n",
        pod = pod.name(),
        pod_v4 = address::pod_v4(node, number),
        pod_v6 = address::pod_v6(node, number),
        node_v4 = address::node_v4(node),
        node_v6 = address::node_v6(node),
    )
}

/// In the pod: host addresses, everything through the node.
fn pod_batch(node: u8, number: u8) -> String {
    format!(
        "link set lo up\n\
         link set eth0 addrgenmode none\n\
         link set eth0 up\n\
         addr add {v4}/32 dev eth0\n\
         addr add {v6}/128 dev eth0 nodad\n\
         route add {POD_GATEWAY_V4} dev eth0 scope link\n\
         route add default via {POD_GATEWAY_V4} dev eth0\n\
         route add ::/0 via {POD_GATEWAY_V6} dev eth0\n",
        v4 = address::pod_v4(node, number),
        v6 = address::pod_v6(node, number),
    )
}
