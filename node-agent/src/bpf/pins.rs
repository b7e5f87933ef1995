//! Where maps and links are pinned, and who may write there.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use shunt_common::LAYOUT_VERSION;

/// The directory of one layout version, `<root>/v<layout>`. Maps are pinned in
/// it by name, links in `links/` by the name of their program.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
    layout: u32,
}

/// Why the pins can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    /// The directory is not on a bpffs.
    #[error(
        "{path} is not on a bpf file system: mount one with `mount -t bpf bpf {mount}`, or name \
         a directory on one with --pins"
    )]
    NoBpffs {
        /// The directory for the pins.
        path: PathBuf,
        /// Where a bpffs would help.
        mount: PathBuf,
    },
    /// Another agent holds the lock.
    #[error(
        "another shunt agent is running with the pins in {path}: stop it first (two agents would \
         undo each other's work)"
    )]
    Locked {
        /// The directory of the pins.
        path: PathBuf,
    },
    /// No agent has been here.
    #[error("no pins of shunt in {path}: is the agent installed here, or is --pins another?")]
    Absent {
        /// The directory of the pins.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Held by the one process that may change the pins. The kernel drops it with
/// the process, also after SIGKILL.
#[derive(Debug)]
pub struct PinsLock {
    _lock: Flock<File>,
}

impl Pins {
    /// The default of `--pins`.
    pub const DEFAULT_ROOT: &str = "/sys/fs/bpf/shunt";

    /// The pins of this version's layout below `root`.
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            layout: LAYOUT_VERSION,
        }
    }

    /// The pins of other layouts, which an older or a newer shunt left.
    pub fn others(&self) -> Vec<Self> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let layout = |name: &str| name.strip_prefix('v')?.parse().ok();
        let layouts = entries.filter_map(|entry| layout(&entry.file_name().to_string_lossy()));
        let mut layouts: Vec<u32> = layouts.filter(|layout| *layout != self.layout).collect();
        layouts.sort_unstable();
        let pins = |layout| Self {
            root: self.root.clone(),
            layout,
        };
        layouts.into_iter().map(pins).collect()
    }

    /// The directory of this layout.
    pub fn directory(&self) -> PathBuf {
        self.root.join(format!("v{}", self.layout))
    }

    /// The pin of a map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    /// The directory of the links.
    pub fn links(&self) -> PathBuf {
        self.directory().join("links")
    }

    /// The pin of the link of a program.
    pub fn link(&self, program: &str) -> PathBuf {
        self.links().join(program)
    }

    /// Makes the directories, for root only.
    pub fn create(&self) -> Result<(), PinsError> {
        self.check_bpffs()?;
        let links = self.links();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&links)
            .map_err(|source| PinsError::Io {
                action: "create",
                path: links,
                source,
            })
    }

    /// Whether an agent has pinned something here.
    pub fn exist(&self) -> bool {
        self.directory().is_dir()
    }

    /// Fails unless an agent has pinned something here.
    pub fn require(&self) -> Result<(), PinsError> {
        if self.exist() {
            Ok(())
        } else {
            Err(PinsError::Absent {
                path: self.directory(),
            })
        }
    }

    /// Takes the lock, or says that another process has it.
    pub fn lock(&self) -> Result<PinsLock, PinsError> {
        let path = self.directory();
        let directory = File::open(&path).map_err(|source| PinsError::Io {
            action: "open",
            path: path.clone(),
            source,
        })?;
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(PinsLock { _lock: lock }),
            Err((_, Errno::EWOULDBLOCK)) => Err(PinsError::Locked { path }),
            Err((_, errno)) => Err(PinsError::Io {
                action: "lock",
                path,
                source: errno.into(),
            }),
        }
    }

    /// Unpins everything; links first, which detaches their programs. What is
    /// not shunt's is left alone.
    pub fn remove(&self) -> Result<(), PinsError> {
        self.detach()?;
        remove_files(&self.directory())?;
        remove_directory(&self.directory())?;
        // Another layout version may have its pins here.
        match fs::remove_dir(&self.root) {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => Err(PinsError::Io {
                action: "remove",
                path: self.root.clone(),
                source: error,
            }),
            _ => Ok(()),
        }
    }

    /// Unpins the links, which detaches their programs; the maps stay.
    pub fn detach(&self) -> Result<(), PinsError> {
        remove_files(&self.links())?;
        remove_directory(&self.links())
    }

    fn check_bpffs(&self) -> Result<(), PinsError> {
        // The pins may not be there yet; their nearest parent tells.
        let existing = self.root.ancestors().find(|path| path.exists());
        let on_bpffs = existing
            .and_then(|path| statfs(path).ok())
            .is_some_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC);
        if on_bpffs {
            return Ok(());
        }
        let mount = self.root.parent().unwrap_or(&self.root).to_owned();
        Err(PinsError::NoBpffs {
            path: self.root.clone(),
            mount,
        })
    }
}

fn remove_files(directory: &Path) -> Result<(), PinsError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| PinsError::Io {
            action,
            path,
            source,
        }
    };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed("read", directory))?,
    };
    for entry in entries {
        let path = entry.map_err(failed("read", directory))?.path();
        fs::remove_file(&path).map_err(failed("remove", &path))?;
    }
    Ok(())
}

fn remove_directory(path: &Path) -> Result<(), PinsError> {
    match fs::remove_dir(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(PinsError::Io {
            action: "remove",
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_on_no_bpffs_is_refused_with_the_command_that_helps() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("shunt");
        let error = Pins::new(&root).create().unwrap_err().to_string();
        let hint = format!("mount -t bpf bpf {}", directory.path().display());
        assert!(error.contains(&hint), "{error}");
    }

    #[test]
    fn only_one_holds_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let pins = Pins::new(directory.path());
        fs::create_dir(pins.directory()).unwrap();
        let held = pins.lock().unwrap();
        assert!(matches!(pins.lock(), Err(PinsError::Locked { .. })));
        drop(held);
        pins.lock().unwrap();
    }
}
