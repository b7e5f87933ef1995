//! The first process of a pod, which holds its namespaces.

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

/// Until SIGTERM or SIGINT. Orphans of the pod become its children.
pub(crate) fn run() -> Result<()> {
    let mut signals = SigSet::empty();
    signals.extend([Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD]);
    signals.thread_block().context("block signals")?;
    while signals.wait().context("wait for a signal")? == Signal::SIGCHLD {
        reap();
    }
    Ok(())
}

fn reap() {
    // No child is left when it fails.
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            break;
        }
    }
}
