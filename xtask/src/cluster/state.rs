//! Who owns the cluster of this machine, if there is one.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// The owner holds a lock of this file for as long as it lives.
const FILE: &str = "/run/shunt-cluster.json";

/// A cluster that is up.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct State {
    /// The owner.
    pid: u32,
    /// The lab that it is on.
    pub(super) lab: String,
    /// A kubectl that reaches it.
    pub(super) kubectl: PathBuf,
}

/// The right to be the owner.
pub(super) struct Claim(File);

impl Claim {
    pub(super) fn take() -> Result<Self> {
        let file = File::options()
            .create(true)
            .write(true)
            .truncate(false)
            .open(FILE);
        let file = file.with_context(|| format!("open {FILE}"))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => bail!("a cluster is up, or on its way"),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("lock {FILE}")),
        }
    }

    /// Says where the cluster is, now that it is there.
    pub(super) fn publish(&self, lab: &str, kubectl: &Path) -> Result<()> {
        let state = State {
            pid: std::process::id(),
            lab: lab.to_owned(),
            kubectl: kubectl.to_owned(),
        };
        let text = serde_json::to_vec(&state).context("write JSON")?;
        self.0.set_len(0).context("empty the file")?;
        (&self.0)
            .write_all(&text)
            .with_context(|| format!("write {FILE}"))
    }
}

impl State {
    /// The cluster that is up, if there is one.
    pub(super) fn read() -> Result<Option<Self>> {
        let file = match File::open(FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.with_context(|| format!("open {FILE}"))?,
        };
        match file.try_lock_shared() {
            // Its owner is dead.
            Ok(()) => return Ok(None),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("lock {FILE}"));
            }
        }
        let text = fs::read(FILE).with_context(|| format!("read {FILE}"))?;
        ensure!(!text.is_empty(), "a cluster is on its way; try again later");
        serde_json::from_slice(&text)
            .with_context(|| format!("parse {FILE}"))
            .map(Some)
    }

    /// Ends the owner, and with it everything.
    pub(super) fn end_owner(&self) -> Result<()> {
        // The lock is still held, so that the number is the owner's.
        let status = Command::new("kill")
            .arg(self.pid.to_string())
            .status()
            .context("start kill")?;
        ensure!(status.success(), "cannot end process {}", self.pid);
        Ok(())
    }
}

/// Removes the file. Fine if there is none.
pub(super) fn forget() {
    // What stays is an unlocked file, which means the same.
    let _ = fs::remove_file(FILE);
}
