//! Finding and removing what labs have made, by name.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use super::{PREFIX, STATE, folder, lock_path};
use crate::{cgroup, network};

/// A fork that was on its way when the owner died may still add something.
const PASSES: usize = 5;

/// The reaper: waits until standard input closes, then removes the lab.
pub fn reap(name: &str) -> Result<()> {
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("wait for the owner")?;
    remove(name)
}

/// Whatever exists of labs whose owner is dead, as paths.
pub fn leftovers() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for name in dead_labs()? {
        found.extend(remains(&name)?);
    }
    Ok(found)
}

/// Removes what is left of labs whose owner is dead, and returns their names.
pub fn sweep() -> Result<Vec<String>> {
    let labs = dead_labs()?;
    for name in &labs {
        remove(name)?;
    }
    Ok(labs)
}

/// Whatever exists of one lab, as paths: its cgroup, namespaces, mounts, files.
pub fn remains(name: &str) -> Result<Vec<String>> {
    let mut paths = vec![cgroup::root()?.join(name)];
    paths.extend(namespaces(name)?);
    paths.extend(mounts(name)?);
    paths.extend([folder(name), lock_path(name)]);
    paths.retain(|path| path.exists());
    Ok(paths
        .into_iter()
        .map(|path| path.display().to_string())
        .collect())
}

fn remove(name: &str) -> Result<()> {
    for _ in 0..PASSES {
        try_remove(name).with_context(|| format!("remove {name}"))?;
        if remains(name)?.is_empty() {
            return Ok(());
        }
    }
    bail!("cannot remove {name}: {:?} stay", remains(name)?)
}

/// Processes first: they hold everything else. All steps may find nothing.
fn try_remove(name: &str) -> Result<()> {
    cgroup::remove(&cgroup::root()?.join(name))?;
    for point in mounts(name)?.iter().rev() {
        unmount(point)?;
    }
    for path in namespaces(name)? {
        unmount(&path)?;
        unless_gone(fs::remove_file(&path))
            .with_context(|| format!("delete {}", path.display()))?;
    }
    unless_gone(fs::remove_dir_all(folder(name))).context("delete the lab's folder")?;
    unless_gone(fs::remove_file(lock_path(name))).context("delete the lab's lock")?;
    // The last lab turns off the light; others make this fail.
    let _ = fs::remove_dir(STATE);
    Ok(())
}

fn mounts(name: &str) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let folder = folder(name);
    Ok(cgroup::mounts(&table)
        .map(|mount| mount.point)
        .filter(|point| point.starts_with(&folder))
        .collect())
}

fn namespaces(name: &str) -> Result<Vec<PathBuf>> {
    let prefix = format!("{name}-");
    let names = names_in(Path::new(network::NAMES))?;
    Ok(names
        .into_iter()
        .filter(|file| file.starts_with(&prefix))
        .map(|file| Path::new(network::NAMES).join(file))
        .collect())
}

fn dead_labs() -> Result<Vec<String>> {
    let mut labs = BTreeSet::new();
    for place in [
        &cgroup::root()?,
        Path::new(network::NAMES),
        Path::new(STATE),
    ] {
        let names = names_in(place)?;
        labs.extend(names.iter().filter_map(|name| lab_of(name)));
    }
    labs.into_iter()
        .filter_map(|name| match is_owned(&name) {
            Ok(true) => None,
            Ok(false) => Some(Ok(name)),
            Err(error) => Some(Err(error).with_context(|| format!("look at {name}"))),
        })
        .collect()
}

/// The lab's name in the name of one of its things: prefix, label, process and
/// number, joined by dashes.
fn lab_of(name: &str) -> Option<String> {
    let name = name.strip_suffix(".lock").unwrap_or(name);
    let mut parts = name.splitn(5, '-');
    let (prefix, label, process, number) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let numeric = |part: &str| part.parse::<u32>().is_ok();
    (prefix == PREFIX && numeric(process) && numeric(number))
        .then(|| format!("{prefix}-{label}-{process}-{number}"))
}

fn is_owned(name: &str) -> io::Result<bool> {
    let lock = match File::open(lock_path(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    match lock.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn unmount(point: &Path) -> Result<()> {
    match umount2(point, MntFlags::MNT_DETACH) {
        // EINVAL: not, or no longer, a mount point.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("unmount {}", point.display())),
    }
}

fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("list {}", folder.display()))?,
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()
        .with_context(|| format!("list {}", folder.display()))
}

fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_tell_their_lab() {
        let lab = Some("shuntlab-demo-12-1".to_owned());
        for thing in ["", "-n1", "-n1-web", "-net", ".lock"] {
            assert_eq!(
                lab_of(&format!("shuntlab-demo-12-1{thing}")),
                lab,
                "{thing}"
            );
        }
        for other in [
            "shuntlab",
            "shuntlab-demo-12-x",
            "user.slice",
            "cni-demo-12-1",
        ] {
            assert_eq!(lab_of(other), None, "{other}");
        }
    }
}
