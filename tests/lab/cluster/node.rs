//! A node of a cluster: containerd, kubelet and kube-proxy.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::{programs, search_path, wait_for};
use crate::binary::{self, target_binary};
use crate::image::PAUSE;
use crate::kubernetes::{ControlPlane, KubeProxy, Running, User, log_end};
use crate::lab::{Lab, create_folder};
use crate::node::Node;
use crate::place::Place as _;
use crate::pod::PODS;
use crate::process::Process;

/// A running node. Dropping it kills its programs; containers go with the lab.
pub struct KubeNode<'a> {
    machine: &'a Node,
    proxy: Option<KubeProxy<'a>>,
    kubelet: Running,
    containerd: Running,
    /// Holds the node's file systems.
    holder: Process,
}

impl<'a> KubeNode<'a> {
    pub(super) fn start(
        lab: &Lab,
        machine: &'a Node,
        plane: &ControlPlane<'_>,
        images: &[PathBuf],
    ) -> Result<Self> {
        remove_blackhole(machine)?;
        remove_pods_cgroups(machine)?;
        let holder = hold(lab, machine)?;
        write_configuration(machine, plane)?;
        let folder = machine.folder();
        let config = folder.join("containerd.toml");
        let mut command = enter(machine, &holder, programs()?.join("containerd"));
        command.arg("--config").arg(config);
        let mut containerd = run(command, folder, "containerd")?;
        wait_for("containerd answers", || {
            check(&mut containerd, folder, "containerd")?;
            Ok(ctr(machine, &holder, &["version"]).is_ok())
        })?;
        for archive in images {
            let archive = archive.display().to_string();
            ctr(machine, &holder, &["images", "import", &archive])?;
        }
        let mut command = enter(machine, &holder, programs()?.join("kubelet"));
        command
            .arg("--config")
            .arg(folder.join("kubelet.yaml"))
            .arg("--kubeconfig")
            .arg(folder.join("kubelet.kubeconfig"))
            .args(["--hostname-override", machine.name()])
            .args(["--node-ip", &machine.ipv4().to_string()]);
        Ok(Self {
            kubelet: run(command, folder, "kubelet")?,
            machine,
            proxy: None,
            containerd,
            holder,
        })
    }

    /// The lab's side of it.
    pub fn machine(&self) -> &'a Node {
        self.machine
    }

    /// A command that runs in the node's host network and sees its file systems.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        enter(self.machine, &self.holder, program)
    }

    /// Takes note of an archive of an image.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let archive = archive.display().to_string();
        ctr(self.machine, &self.holder, &["images", "import", &archive])
    }

    pub(super) fn start_proxy(&mut self, plane: &ControlPlane<'_>) -> Result<()> {
        self.proxy = Some(plane.kube_proxy_of_kubelet(self.machine)?);
        Ok(())
    }

    /// Fails, with its last words, if one of the programs has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        let folder = self.machine.folder();
        check(&mut self.containerd, folder, "containerd")?;
        check(&mut self.kubelet, folder, "kubelet")
    }
}

/// The plugin `ptp` has a route for each pod, as the lab does for its own.
fn remove_blackhole(machine: &Node) -> Result<()> {
    let pods = pods(machine);
    let mut command = machine.command("ip");
    command.args(["route", "del", "blackhole", &pods]);
    let status = command.status().context("start ip")?;
    ensure!(status.success(), "ip cannot delete the route to {pods}");
    Ok(())
}

/// The kubelet makes these. In such as it finds it takes back a protection of
/// memory, which fails without controllers (`qos_container_manager_linux.go` in
/// `pkg/kubelet/cm`, 1.37.2).
fn remove_pods_cgroups(machine: &Node) -> Result<()> {
    let mut cgroup = machine.node_cgroup().join(PODS);
    while cgroup != machine.node_cgroup() {
        fs::remove_dir(&cgroup).with_context(|| format!("remove {}", cgroup.display()))?;
        cgroup.pop();
    }
    Ok(())
}

fn hold(lab: &Lab, machine: &Node) -> Result<Process> {
    let mut command = machine.command(binary::lab_pod()?);
    command
        .args(["node", machine.name(), "--lab"])
        .arg(lab.folder())
        .arg("--folder")
        .arg(machine.folder())
        .arg("--cgroup")
        .arg(machine.node_cgroup())
        .arg("--host-cgroup")
        .arg(machine.cgroup());
    let mut holder = Process::start(command)?;
    let name: String = holder.report().context("make the node's file systems")?;
    ensure!(name == machine.name(), "the node says that it is {name}");
    Ok(holder)
}

/// A command in the node's namespaces, which `holder` holds.
fn enter(machine: &Node, holder: &Process, program: impl AsRef<Path>) -> Command {
    let mut command = machine.command("nsenter");
    command
        .args(["--target", &holder.id().to_string()])
        .args(["--mount", "--uts", "--cgroup", "--"])
        .arg(program.as_ref())
        .env("PATH", search_path());
    command
}

fn ctr(machine: &Node, holder: &Process, args: &[&str]) -> Result<()> {
    let mut command = enter(machine, holder, programs()?.join("ctr"));
    command.args(["--namespace", "k8s.io"]).args(args);
    let output = command.output().context("start ctr")?;
    if output.status.success() {
        return Ok(());
    }
    bail!(
        "ctr {args:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The addresses of the node's pods.
fn pods(machine: &Node) -> String {
    crate::address::pod_cidr_v4(machine.number())
}

fn run(mut command: Command, folder: &Path, program: &str) -> Result<Running> {
    let log = folder.join(format!("{program}.log"));
    let log = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    Ok(Running(child))
}

fn check(running: &mut Running, folder: &Path, program: &str) -> Result<()> {
    match running.0.try_wait().context("look after a program")? {
        None => Ok(()),
        Some(status) => bail!("{program} ended ({status}): {}", log_end(folder, program)),
    }
}

fn write_configuration(machine: &Node, plane: &ControlPlane<'_>) -> Result<()> {
    let folder = machine.folder();
    let network = folder.join("network");
    for folder in [&network, &folder.join("plugins")] {
        create_folder(folder)?;
    }
    let write = |path: PathBuf, text: String| {
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    };
    write(
        network.join("pods.conflist"),
        network_configuration(machine),
    )?;
    let text = containerd_configuration(machine)?;
    write(folder.join("containerd.toml"), text)?;
    let text = kubelet_configuration(machine, plane.authority());
    write(folder.join("kubelet.yaml"), text)?;
    let user = User::new(&format!("system:node:{}", machine.name()), "system:nodes");
    plane.write_kubeconfig(&folder.join("kubelet.kubeconfig"), user.token())
}

fn network_configuration(machine: &Node) -> String {
    let folder = machine.folder().join("addresses");
    let (folder, pods) = (folder.display(), pods(machine));
    format!(
        r#"{{"cniVersion": "1.0.0", "name": "pods", "plugins": [{{"type": "ptp", "ipMasq": false,
"ipam": {{"type": "host-local", "dataDir": "{folder}", "ranges": [[{{"subnet": "{pods}"}}]],
"routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}"#
    )
}

/// containerd's defaults, for /run is the node's own, but for places on the disk, and for what a lab can't do: raise
/// nobody's priority at the killing for memory, and make devices.
fn containerd_configuration(machine: &Node) -> Result<String> {
    let folder = machine.folder().display();
    let programs = programs()?;
    let programs = programs.display();
    let runtime = target_binary("lab-runc", "LAB_RUNC_BIN")?;
    let runtime = runtime.display();
    Ok(format!(
        "version = 4
root = '{folder}/containerd'
imports = []
disabled_plugins = [
  'io.containerd.nri.v1.nri', 'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.erofs',
  'io.containerd.differ.v1.erofs', 'io.containerd.snapshotter.v1.zfs',
  'io.containerd.internal.v1.opt',
]
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    runtime_path = '{programs}/containerd-shim-runc-v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '{runtime}'
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{programs}']
    conf_dir = '{folder}/network'
"
    ))
}

fn kubelet_configuration(machine: &Node, authority: &Path) -> String {
    let folder = machine.folder().display();
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
healthzBindAddress: 127.0.0.1
readOnlyPort: 0
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {authority}}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: /
enforceNodeAllocatable: []
failSwapOn: false
volumePluginDir: {folder}/plugins
# There is no name server.
resolvConf: ''
clusterDomain: cluster.local
# A lab may not have the right to go lower.
oomScoreAdj: 0
# The disk is everybody's.
evictionHard: {{memory.available: 100Mi, nodefs.available: 0%, imagefs.available: 0%}}
makeIPTablesUtilChains: false
nodeStatusUpdateFrequency: 5s
syncFrequency: 10s
",
        address = machine.ipv4(),
        authority = authority.display(),
    )
}
