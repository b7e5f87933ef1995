//! The first process of a cluster's node: it gives the node its own file systems,
//! and holds them until standard input ends.
//!
//! kubelet and containerd write to fixed places. Here these are the node's own, in
//! a mount namespace that goes with its last process, so that the machine keeps
//! nothing.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::socket;

#[derive(Args)]
pub(crate) struct NodeArgs {
    /// Its host name.
    name: String,
    /// The lab's folder, which stays where it is.
    #[arg(long)]
    lab: PathBuf,
    /// The node's folder, in that of the lab. `bpf` in it is its bpf file system.
    #[arg(long)]
    folder: PathBuf,
    /// The node's cgroup, which becomes the root of what it sees.
    #[arg(long)]
    cgroup: PathBuf,
    /// The cgroup in it that its own processes belong to.
    #[arg(long)]
    host_cgroup: PathBuf,
}

/// What kubelet sets to values of its own, though they are the whole machine's
/// (`setupKernelTunables` in `pkg/kubelet/cm/container_manager_linux.go`, 1.37.2).
const MACHINE_WIDE: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// Where the lab's folder is while /run is replaced.
const ASIDE: &str = "/var/lib/lab";

pub(crate) fn run(args: &NodeArgs) -> Result<()> {
    enter_namespaces(args)?;
    own_system(args).context("mount /sys")?;
    own_folders(args).context("mount the node's folders")?;
    own_sysctls(&args.folder).context("cover sysctls")?;
    // Pods mount into the node, and see what is mounted there.
    propagate(MsFlags::MS_SHARED)?;
    socket::print(&args.name)?;
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("wait for the owner")?;
    Ok(())
}

/// The root of a cgroup namespace is where the process is that makes it.
fn enter_namespaces(args: &NodeArgs) -> Result<()> {
    join(&args.cgroup)?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP)
        .context("make namespaces")?;
    join(&args.host_cgroup)?;
    propagate(MsFlags::MS_PRIVATE)?;
    fs::write("/proc/sys/kernel/hostname", &args.name).context("set the host name")
}

fn join(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0")
        .with_context(|| format!("enter {}", cgroup.display()))
}

/// The node's network devices, cgroups and BPF pins.
fn own_system(args: &NodeArgs) -> Result<()> {
    bind(&args.folder.join("bpf"), Path::new("/mnt"))?;
    mount_new("sysfs", "/sys")?;
    mount_new("cgroup2", "/sys/fs/cgroup")?;
    let (from, to) = ("/mnt", "/sys/fs/bpf");
    mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>).context("move bpffs")
}

/// The lab's folder is below /run, and is put back there.
fn own_folders(args: &NodeArgs) -> Result<()> {
    let kubelet = args.folder.join("kubelet");
    let log = args.folder.join("log");
    for folder in [&kubelet, &log.join("containers"), &log.join("pods")] {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    bind(&log, Path::new("/var/log"))?;
    mount_new("tmpfs", "/var/lib")?;
    for folder in [ASIDE, "/var/lib/kubelet"] {
        fs::create_dir(folder).with_context(|| format!("create {folder}"))?;
    }
    bind(&kubelet, Path::new("/var/lib/kubelet"))?;
    bind(&args.lab, Path::new(ASIDE))?;
    mount_new("tmpfs", "/run")?;
    fs::create_dir_all(&args.lab).context("create the lab's folder again")?;
    bind(Path::new(ASIDE), &args.lab)
}

/// Files in their place take what kubelet writes, and the machine's own stay.
fn own_sysctls(folder: &Path) -> Result<()> {
    for name in MACHINE_WIDE {
        let sysctl = Path::new("/proc/sys").join(name);
        let Ok(value) = fs::read(&sysctl) else {
            continue;
        };
        let own = folder.join(name.replace('/', "."));
        fs::write(&own, value).with_context(|| format!("write {}", own.display()))?;
        bind(&own, &sysctl)?;
    }
    Ok(())
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(from), to, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("bind {} to {}", from.display(), to.display()))
}

fn mount_new(kind: &str, at: &str) -> Result<()> {
    mount(Some(kind), at, Some(kind), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("mount {kind} at {at}"))
}

fn propagate(how: MsFlags) -> Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, how | MsFlags::MS_REC, none).context("set propagation")
}
