//! cgroup v2: where it is mounted, and removing whole trees of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context, Result, bail};

/// How long killed processes may take to leave their cgroup.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The mount point of the cgroup v2 hierarchy: /sys/fs/cgroup on most hosts,
/// /sys/fs/cgroup/unified on hybrid ones.
pub(crate) fn root() -> Result<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    root_in(&table).context("no cgroup v2 hierarchy is mounted whole")
}

fn root_in(mountinfo: &str) -> Option<PathBuf> {
    mounts(mountinfo)
        .find(|mount| mount.kind == "cgroup2" && mount.root == "/")
        .map(|mount| mount.point)
}

/// One line of mountinfo.
pub(crate) struct Mount<'a> {
    root: &'a str,
    pub(crate) point: PathBuf,
    kind: &'a str,
}

pub(crate) fn mounts(mountinfo: &str) -> impl DoubleEndedIterator<Item = Mount<'_>> {
    mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        Some(Mount {
            root: left.next()?,
            // The kernel writes a space as \040; labs' paths have none.
            point: PathBuf::from(left.next()?.replace("\\040", " ")),
            kind: right.split(' ').next()?,
        })
    })
}

pub(crate) fn create(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| format!("create cgroup {}", path.display()))
}

/// Kills every process in the tree and removes it. Fine if there is none.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::write(path.join("cgroup.kill"), "1") {
        Ok(()) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("kill cgroup {}", path.display()));
        }
    }
    wait_until_empty(path)?;
    remove_tree(path).with_context(|| format!("remove cgroup {}", path.display()))
}

fn wait_until_empty(path: &Path) -> Result<()> {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    loop {
        match fs::read_to_string(path.join("cgroup.events")) {
            Ok(events) if events.contains("populated 0") => return Ok(()),
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(error).context("read cgroup.events"),
            Ok(_) if Instant::now() > deadline => {
                bail!("processes in {} outlive SIGKILL", path.display())
            }
            Ok(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Only the directories of a cgroup can be removed, and only bottom up.
fn remove_tree(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Err(error) if is_gone(&error) => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(path) {
        Err(error) if is_gone(&error) => Ok(()),
        other => other,
    }
}

/// ENODEV comes from a file of a cgroup that was removed meanwhile.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
39 31 0:36 / /sys/fs/cgroup/pids rw shared:3 master:2 - cgroup cgroup rw,pids
40 31 0:38 /kubepods /mnt rw,relatime - cgroup2 cgroup2 rw
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn finds_the_whole_hierarchy_on_a_hybrid_host() {
        assert_eq!(
            root_in(HYBRID).unwrap(),
            Path::new("/sys/fs/cgroup/unified")
        );
    }

    #[test]
    fn a_bind_mount_of_a_part_is_not_the_root() {
        assert_eq!(root_in(HYBRID.lines().nth(2).unwrap()), None);
    }
}
