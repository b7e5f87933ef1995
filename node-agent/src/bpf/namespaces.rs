//! Network namespaces, found by the processes that are in them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sched::{CloneFlags, setns};
use tracing::debug;

/// Enters the namespace of each process in turn, each namespace once, and calls
/// `look` there, until that has seen enough. The thread stays in the last one.
///
/// What fails for one namespace is returned, and the others go on. A process
/// that ends meanwhile is no failure: the sockets end with it. Nor is one that a
/// security module hides.
pub fn visit_namespaces(mut look: impl FnMut() -> io::Result<ControlFlow<()>>) -> Vec<io::Error> {
    let mut seen = BTreeSet::new();
    let mut failures = Vec::new();
    let processes = match fs::read_dir("/proc") {
        Ok(processes) => processes,
        Err(error) => return vec![error],
    };
    for process in processes.flatten() {
        let is_process = process.file_name().as_encoded_bytes()[0].is_ascii_digit();
        if !is_process {
            continue;
        }
        match enter(&process.path().join("ns/net"), &mut seen) {
            Ok(true) => match look() {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => break,
                Err(error) => failures.push(error),
            },
            Ok(false) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                debug!(process = ?process.file_name(), "hides its network namespace");
            }
            Err(error) => failures.push(error),
        }
    }
    failures
}

/// `false` if it was seen before.
fn enter(path: &Path, seen: &mut BTreeSet<u64>) -> io::Result<bool> {
    if seen.contains(&fs::metadata(path)?.ino()) {
        return Ok(false);
    }
    let namespace = File::open(path)?;
    if !seen.insert(namespace.metadata()?.ino()) {
        return Ok(false);
    }
    setns(&namespace, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
    Ok(true)
}

/// As `/proc` says of a process that has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}
