//! A client as the programs see it: by its cgroup and its network namespace.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, setns};

use super::sys;

/// A process as the programs see it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Client {
    /// The process that was looked at.
    pub pid: u32,
    /// Its cgroup v2 directory, from the root of the hierarchy, such as
    /// `/kubepods.slice/…`.
    pub cgroup: String,
    /// Cookie of its network namespace.
    pub netns_cookie: u64,
    /// Whether that is this process's own, which is the node's where shunt is
    /// meant to run.
    pub host_network: bool,
}

/// A process can't be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It is not there.
    #[error(
        "there is no process {pid}: give its id on the node (in a container of the DaemonSet, \
         hostPID shows these)"
    )]
    NoProcess {
        /// Its id.
        pid: u32,
    },
    /// A pod without a process that can be seen.
    #[error("no process of this node is in {directory}: has the pod ended, or not begun?")]
    Empty {
        /// The pod's cgroup.
        directory: PathBuf,
    },
    /// It is in no cgroup v2.
    #[error("process {pid} is in no cgroup v2 (/proc/{pid}/cgroup has no line 0::)")]
    NoCgroup {
        /// Its id.
        pid: u32,
    },
    /// Something about it can't be read.
    #[error("cannot read the {what} of process {pid}: run as root on the node")]
    Read {
        /// What.
        what: &'static str,
        /// Its id.
        pid: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Client {
    /// The process with this id, as this one sees it.
    pub fn of_process(pid: u32) -> Result<Self, ClientError> {
        let failed = move |what| move |source| ClientError::Read { what, pid, source };
        if !fs::exists(format!("/proc/{pid}")).unwrap_or(false) {
            return Err(ClientError::NoProcess { pid });
        }
        let host_cookie = sys::netns_cookie().map_err(failed("network namespace"))?;
        // A thread of its own, since it changes its namespaces.
        let look = thread::spawn(move || {
            let cgroup = cgroup(pid).map_err(failed("cgroup"))?;
            let netns_cookie = netns_cookie(pid).map_err(failed("network namespace"))?;
            Ok((cgroup, netns_cookie))
        });
        let (cgroup, netns_cookie) = look.join().expect("looking does not panic")?;
        Ok(Self {
            pid,
            cgroup: cgroup.ok_or(ClientError::NoCgroup { pid })?,
            netns_cookie,
            host_network: netns_cookie == host_cookie,
        })
    }
}

impl Client {
    /// The first process in a cgroup or below it.
    pub fn of_cgroup(directory: &Path) -> Result<Self, ClientError> {
        let pid = first_process(directory).ok_or_else(|| ClientError::Empty {
            directory: directory.to_owned(),
        })?;
        Self::of_process(pid)
    }
}

/// Processes that this one can't see have the number 0.
fn first_process(directory: &Path) -> Option<u32> {
    let processes = fs::read_to_string(directory.join("cgroup.procs")).ok()?;
    let mut own = processes.lines().filter_map(|line| line.parse().ok());
    own.find(|pid| *pid != 0).or_else(|| {
        let entries = fs::read_dir(directory).ok()?.flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|it| it.is_dir()));
        directories
            .into_iter()
            .find_map(|entry| first_process(&entry.path()))
    })
}

/// The path is told as seen from the reader's cgroup namespace, which in a
/// container may be its own (`proc_cgroup_show` in `kernel/cgroup/cgroup.c`): so
/// this thread goes to that of process 1 first. Where it may not, it reads what
/// it can.
fn cgroup(pid: u32) -> io::Result<Option<String>> {
    if let Ok(file) = File::open("/proc/1/ns/cgroup") {
        let _ = setns(file, CloneFlags::CLONE_NEWCGROUP);
    }
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    Ok(unified(&text).map(str::to_owned))
}

/// The line of the cgroup v2 hierarchy (cgroups(7), "/proc/pid/cgroup").
fn unified(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

fn netns_cookie(pid: u32) -> io::Result<u64> {
    let file = File::open(format!("/proc/{pid}/ns/net"))?;
    setns(file, CloneFlags::CLONE_NEWNET)?;
    sys::netns_cookie()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_cgroup_v2_is_found_on_pure_and_hybrid_hosts() {
        assert_eq!(unified("0::/kubepods.slice/x\n"), Some("/kubepods.slice/x"));
        assert_eq!(unified("12:cpu:/a\n1:name=systemd:/b\n0::/c\n"), Some("/c"));
        assert_eq!(unified("12:cpu:/a\n"), None);
    }

    #[test]
    fn a_process_that_is_not_there_is_told() {
        // Larger than any process id (PID_MAX_LIMIT is 2^22).
        let error = Client::of_process(1 << 23).unwrap_err();
        assert!(matches!(error, ClientError::NoProcess { .. }), "{error}");
    }
}
