//! Builds etcd and Kubernetes' programs from their Go modules in `tests/kube`,
//! into a folder outside the checkout, for all checkouts of this machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use lab::kubernetes::{PROGRAMS, VERSION, programs};

use crate::command::{announce, command, root, run};

/// Builds them all. The folder appears when it is whole, so that a build that
/// was broken off is not taken for one.
pub(super) fn build() -> Result<()> {
    let folder = programs()?;
    let mut unfinished = folder.clone().into_os_string();
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    fs::create_dir_all(&unfinished).with_context(|| format!("create {}", unfinished.display()))?;
    for program in PROGRAMS {
        announce(&format!("building {program}"));
        build_program(program, &unfinished)?;
    }
    fs::rename(&unfinished, &folder).with_context(|| format!("create {}", folder.display()))
}

fn build_program(program: &str, folder: &Path) -> Result<()> {
    let (module, package) = match program {
        "etcd" => ("etcd", "go.etcd.io/etcd/server/v3".to_owned()),
        _ => ("kubernetes", format!("k8s.io/kubernetes/cmd/{program}")),
    };
    // What `kubectl version` and the API server say of themselves.
    let version = format!("-s -w -X k8s.io/component-base/version.gitVersion=v{VERSION}");
    let mut go = command("go");
    go.current_dir(root().join("tests/kube").join(module));
    go.env("CGO_ENABLED", "0");
    // With the name of each package, since a program takes minutes.
    go.args(["build", "-v", "-trimpath", "-ldflags", &version, "-o"]);
    run(go.arg(folder.join(program)).arg(package))
}
