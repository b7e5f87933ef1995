//! The one way in which labs end.
//!
//! Each lab has a reaper: a child process in a session of its own that holds
//! the read end of a pipe. When the owner drops the lab, panics, fails, is
//! interrupted or killed, the kernel closes the other end, and the reaper
//! removes everything that carries the lab's name.
//!
//! The owner also holds a file lock for as long as it lives. [`sweep`] removes
//! the labs whose lock is free: those that lost their reaper too.

mod remove;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use nix::unistd::setsid;

pub use remove::{leftovers, reap, remains, sweep};

use crate::binary;

/// Begins the names of all labs.
pub(crate) const PREFIX: &str = "shuntlab";

/// Each lab has a folder and a lock file here.
pub(crate) const STATE: &str = "/run/shunt-lab";

static LABS: AtomicU32 = AtomicU32::new(1);

/// Owns a lab's name; dropping it removes the lab.
pub(crate) struct Owner {
    name: String,
    reaper: Option<Child>,
    /// Locked until the process ends or the lab is gone.
    _lock: File,
}

impl Owner {
    /// Claims a new name and starts its reaper. `label` makes the name readable.
    pub(crate) fn new(label: &str) -> Result<Self> {
        ensure!(
            !label.is_empty()
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'_'),
            "lab name {label:?} may have only letters, digits and _"
        );
        let (name, lock) = loop {
            let number = LABS.fetch_add(1, Ordering::Relaxed);
            let name = format!("{PREFIX}-{label}-{}-{number}", process::id());
            if let Some(lock) = try_claim(&name).with_context(|| format!("claim {name}"))? {
                break (name, lock);
            }
        };
        let reaper = start_reaper(&name).inspect_err(|_| unclaim(&name))?;
        let owner = Self {
            name,
            reaper: Some(reaper),
            _lock: lock,
        };
        let folder = owner.folder();
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        Ok(owner)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn folder(&self) -> PathBuf {
        folder(&self.name)
    }

    /// Removes the lab, and says what went wrong.
    pub(crate) fn close(&mut self) -> Result<()> {
        let Some(mut reaper) = self.reaper.take() else {
            return Ok(());
        };
        drop(reaper.stdin.take());
        let status = reaper.wait().context("wait for the reaper")?;
        ensure!(
            status.success(),
            "the reaper of {} failed ({status})",
            self.name
        );
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            #[expect(clippy::print_stderr, reason = "drop has no other way to report")]
            {
                eprintln!("lab: {error:#}");
            }
        }
    }
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(format!("{STATE}/{name}"))
}

fn lock_path(name: &str) -> PathBuf {
    PathBuf::from(format!("{STATE}/{name}.lock"))
}

/// `None` if the name is taken, also by the remains of a dead lab.
fn try_claim(name: &str) -> io::Result<Option<File>> {
    fs::create_dir_all(STATE)?;
    let lock = match File::create_new(lock_path(name)) {
        Ok(lock) => lock,
        // NotFound: another lab's reaper has just removed the empty folder.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    lock.lock()?;
    // A sweep may have locked and deleted the file before we locked it.
    Ok((lock.metadata()?.nlink() > 0).then_some(lock))
}

/// Gives up a name that nothing was made under.
fn unclaim(name: &str) {
    // If it fails, a sweep does it later.
    let _ = fs::remove_file(lock_path(name));
    let _ = fs::remove_dir(STATE);
}

fn start_reaper(name: &str) -> Result<Child> {
    let mut command = Command::new(binary::lab_pod()?);
    command
        .args(["reap", name])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let own_session = || Ok(setsid().map(drop)?);
    // SAFETY: setsid is async-signal-safe, and the closure does nothing else.
    unsafe { command.pre_exec(own_session) };
    command.spawn().context("start the reaper (lab-pod reap)")
}
