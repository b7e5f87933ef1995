//! Builds etcd, Kubernetes' programs and what nodes run from their Go modules in
//! `tests/kube`, into folders outside the checkout, for all checkouts of this
//! machine.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use lab::kubernetes::VERSION;
use lab::{cluster, kubernetes};

use crate::command::{announce, command, root, run};

/// Builds the control plane and kube-proxy.
pub(super) fn build() -> Result<()> {
    build_all(&kubernetes::programs()?, &kubernetes::PROGRAMS)
}

/// Builds what nodes run.
pub(super) fn build_nodes() -> Result<()> {
    build_all(&cluster::programs()?, &cluster::PROGRAMS)
}

/// Builds those that are missing. Each appears when it is whole, so that a build
/// that was broken off is not taken for one, and the next goes on where it ended.
fn build_all(folder: &Path, programs: &[&str]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    for program in programs {
        let path = folder.join(program);
        if path.is_file() {
            continue;
        }
        announce(&format!("building {program}"));
        let unfinished = folder.join(format!("{program}.unfinished"));
        build_program(program, &unfinished)?;
        fs::rename(unfinished, &path).with_context(|| format!("create {}", path.display()))?;
    }
    Ok(())
}

fn build_program(program: &str, path: &Path) -> Result<()> {
    let (module, package) = source(program);
    // What `kubectl version` and the API server say of themselves.
    let version = format!("-s -w -X k8s.io/component-base/version.gitVersion=v{VERSION}");
    let mut go = command("go");
    go.current_dir(root().join("tests/kube").join(module));
    go.env("CGO_ENABLED", "0");
    // With the name of each package, since a program takes minutes.
    go.args(["build", "-v", "-trimpath", "-ldflags", &version, "-o"]);
    go.arg(path);
    if module == "containerd" {
        go.args(["-tags", CONTAINERD_TAGS]);
    }
    run(go.arg(package))
}

/// What containerd can do without here: drivers of disks.
const CONTAINERD_TAGS: &str = "no_btrfs,no_zfs,no_devmapper";

/// The module of a program in `tests/kube`, and its package.
fn source(program: &str) -> (&'static str, String) {
    let plugins = "github.com/containernetworking/plugins/plugins";
    match program {
        "etcd" => ("etcd", "go.etcd.io/etcd/server/v3".to_owned()),
        "containerd" | "containerd-shim-runc-v2" | "ctr" => (
            "containerd",
            format!("github.com/containerd/containerd/v2/cmd/{program}"),
        ),
        "loopback" | "ptp" => ("cni", format!("{plugins}/main/{program}")),
        "host-local" => ("cni", format!("{plugins}/ipam/{program}")),
        _ => ("kubernetes", format!("k8s.io/kubernetes/cmd/{program}")),
    }
}
