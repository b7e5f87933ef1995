//! A real cluster on lab nodes: a control plane on a node of its own, and nodes
//! with containerd, kubelet and kube-proxy.
//!
//! Everything runs in the cgroups and network namespaces of the lab, and each
//! node's file systems are in a mount namespace ([`node`]), so that the lab's end
//! is the cluster's too, and the machine keeps nothing.

mod node;

use std::env;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};

pub use self::node::KubeNode;
use crate::image::Image;
use crate::kubernetes::{self, ControlPlane, Running, User, cached, start_program};
use crate::lab::Lab;
use crate::node::Node;

/// Version of containerd, as in `tests/kube/containerd/go.mod`.
const CONTAINERD_VERSION: &str = "2.4.2";
/// Version of the network plugins, as in `tests/kube/cni/go.mod`.
const CNI_VERSION: &str = "1.10.0";

/// What the nodes run, beside the programs of the control plane.
pub const PROGRAMS: [&str; 8] = [
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "host-local",
    "kube-scheduler",
    "kubelet",
    "loopback",
    "ptp",
];

/// Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(300);

/// The lab nodes that a cluster is on.
pub struct Machines {
    nodes: Vec<Node>,
    control: Node,
}

/// A running cluster; dropping it kills its programs.
pub struct Cluster<'a> {
    nodes: Vec<KubeNode<'a>>,
    _controllers: [Running; 2],
    plane: ControlPlane<'a>,
}

impl Machines {
    /// Adds `count` nodes, `n1` and so on, and one for the control plane.
    pub fn add(lab: &mut Lab, count: usize) -> Result<Self> {
        let nodes: Result<_> = (1..=count).map(|it| lab.node(&format!("n{it}"))).collect();
        Ok(Self {
            nodes: nodes?,
            control: lab.node("control")?,
        })
    }

    /// The lab's side of the cluster's nodes: cgroups, bpf file systems, the cable.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
}

impl<'a> Cluster<'a> {
    /// Starts everything and waits until all nodes are ready. They hold the images
    /// of these archives, since they have no registry: [`write_images`] makes those
    /// that are needed. `progress` is told each step.
    pub fn start(
        lab: &Lab,
        machines: &'a Machines,
        images: &[PathBuf],
        mut progress: impl FnMut(&str),
    ) -> Result<Self> {
        let users = users(&machines.nodes);
        progress("etcd and kube-apiserver");
        let plane = ControlPlane::start_for_nodes(&machines.control, &users)?;
        let controllers = start_controllers(&plane, &machines.control)?;
        let mut cluster = Self {
            plane,
            _controllers: controllers,
            nodes: Vec::new(),
        };
        for machine in &machines.nodes {
            progress(&format!("containerd and kubelet of {}", machine.name()));
            let node = KubeNode::start(lab, machine, &cluster.plane, images)
                .with_context(|| format!("start node {}", machine.name()))?;
            cluster.nodes.push(node);
        }
        cluster.start_proxies(&mut progress)?;
        progress("waiting until the nodes are ready");
        cluster.wait_for_nodes()?;
        Ok(cluster)
    }

    /// Runs kubectl with all rights and returns what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.plane.kubectl(args)
    }

    /// Creates or changes the objects of a manifest.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        self.plane.apply(manifest)
    }

    /// The control plane.
    pub fn plane(&mut self) -> &mut ControlPlane<'a> {
        &mut self.plane
    }

    /// The nodes.
    pub fn nodes(&self) -> &[KubeNode<'a>] {
        &self.nodes
    }

    /// Writes a kubectl for people into a folder: the API server's address means
    /// something only in the lab's network.
    pub fn write_kubectl(&self, machines: &Machines, folder: &Path) -> Result<PathBuf> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let script = folder.join("kubectl");
        let text = format!(
            "#!/bin/sh\nexec nsenter --net=/run/netns/{} {} --kubeconfig {} \"$@\"\n",
            machines.control.namespace().name(),
            kubernetes::programs()?.join("kubectl").display(),
            self.plane.kubeconfig().display(),
        );
        fs::write(&script, text).with_context(|| format!("write {}", script.display()))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("make {} executable", script.display()))?;
        Ok(script)
    }

    /// kube-proxy waits for the address that the kubelet gives its node.
    fn start_proxies(&mut self, progress: &mut impl FnMut(&str)) -> Result<()> {
        for node in &mut self.nodes {
            let name = node.machine().name();
            progress(&format!("kube-proxy of {name}"));
            let field = "jsonpath={.status.addresses[0].address}";
            wait_for(&format!("node {name} has an address"), || {
                let address = self.plane.kubectl(&["get", "node", name, "-o", field]);
                node.check()?;
                Ok(address.is_ok_and(|it| !it.is_empty()))
            })?;
            node.start_proxy(&self.plane)?;
        }
        Ok(())
    }

    fn wait_for_nodes(&mut self) -> Result<()> {
        let count = self.nodes.len();
        let field = "jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}";
        wait_for("all nodes are ready", || {
            for node in &mut self.nodes {
                node.check()?;
            }
            let states = self.plane.kubectl(&["get", "nodes", "-o", field])?;
            Ok(states.split(' ').filter(|it| *it == "True").count() == count)
        })?;
        // Pods can't be made before that.
        wait_for("the default account is there", || {
            let account = ["get", "serviceaccount", "default"];
            Ok(self.plane.kubectl(&account).is_ok())
        })
    }
}

/// Where the programs of the nodes are, as
/// [`kubernetes::programs`](crate::kubernetes::programs).
///
/// # Errors
///
/// Neither folder is known.
pub fn programs() -> Result<PathBuf> {
    let kubernetes = crate::kubernetes::VERSION;
    cached(&format!(
        "node-{kubernetes}-{CONTAINERD_VERSION}-{CNI_VERSION}"
    ))
}

/// Writes the images of shunt, of `lab-pod`, and what each pod begins with.
///
/// # Errors
///
/// A program can't be read, or the folder can't be written.
pub fn write_images(folder: &Path, shunt: &Path, lab_pod: &Path) -> Result<Vec<PathBuf>> {
    let images = [
        ("shunt.tar", Image::of_shunt(shunt)?),
        ("lab-pod.tar", Image::of_lab_pod(lab_pod)?),
        ("pause.tar", Image::of_pause(lab_pod)?),
    ];
    let write = |(file, image): (&str, Image)| {
        let archive = folder.join(file);
        image.write(&archive)?;
        Ok(archive)
    };
    images.into_iter().map(write).collect()
}

/// Everybody who speaks to the API server; their roles are the API server's own.
fn users(nodes: &[Node]) -> Vec<User> {
    let mut users = vec![
        User::new("system:kube-controller-manager", ""),
        User::new("system:kube-scheduler", ""),
    ];
    let of_node = |node: &Node| User::new(&format!("system:node:{}", node.name()), "system:nodes");
    users.extend(nodes.iter().map(of_node));
    users
}

fn start_controllers(plane: &ControlPlane<'_>, control: &Node) -> Result<[Running; 2]> {
    let folder = control.folder();
    let start = |program: &str, path: PathBuf, more: &[String]| {
        let kubeconfig = folder.join(format!("{program}.kubeconfig"));
        let user = User::new(&format!("system:{program}"), "");
        plane.write_kubeconfig(&kubeconfig, user.token())?;
        let mut arguments = vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            "--leader-elect=false".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
        ];
        arguments.extend_from_slice(more);
        start_program(control, folder, &path, &arguments)
    };
    let manager = "kube-controller-manager";
    let manager_path = kubernetes::programs()?.join(manager);
    let scheduler = "kube-scheduler";
    Ok([
        start(manager, manager_path, &plane.accounts_arguments())?,
        start(scheduler, programs()?.join(scheduler), &[])?,
    ])
}

/// Waits until it holds.
fn wait_for(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds()? {
        ensure!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// The search path, for programs that look for others where administrators' are.
fn search_path() -> String {
    let path = env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

#[cfg(test)]
mod tests {
    use super::{CNI_VERSION, CONTAINERD_VERSION};

    #[test]
    fn the_versions_are_those_of_the_modules() {
        let containerd = include_str!("../kube/containerd/go.mod");
        assert!(containerd.contains(&format!("containerd/containerd/v2 v{CONTAINERD_VERSION}")));
        let plugins = include_str!("../kube/cni/go.mod");
        assert!(plugins.contains(&format!("containernetworking/plugins v{CNI_VERSION}")));
    }
}
