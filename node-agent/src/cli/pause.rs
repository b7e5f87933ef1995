//! `shunt pause`: for the image, which holds no other program.

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};

/// Waits for SIGTERM or SIGINT: the pods of a DaemonSet must not end by themselves.
pub(super) fn pause() -> Result<()> {
    let mut ends = SigSet::empty();
    ends.add(Signal::SIGTERM);
    ends.add(Signal::SIGINT);
    // The first process of a container gets only signals that it asks for.
    ends.thread_block().context("cannot block signals")?;
    ends.wait().context("cannot wait for a signal")?;
    Ok(())
}
