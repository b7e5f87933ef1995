//! Finds the cgroup v2 directory to attach to.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// The inode number of the root of a cgroup hierarchy (`kernfs_root.ino`
/// starts at 1). A private cgroup namespace shows another directory as its
/// root, which has another number.
const ROOT_INODE: u64 = 1;

/// A cgroup v2 directory. Programs attached to it see the sockets of every
/// process below it.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
    id: u64,
}

/// Why there is no cgroup to attach to.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// None is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted (looked in /proc/self/mountinfo and /proc/1/mountinfo): \
         mount one with `mount -t cgroup2 none /sys/fs/cgroup`, or in a container mount the \
         host's /sys/fs/cgroup; --cgroup names a directory"
    )]
    NotMounted,
    /// `--cgroup` names something else.
    #[error(
        "{path} is not a directory of a cgroup v2 hierarchy: leave --cgroup out to use the root \
         of the machine, or see `mount -t cgroup2` for where it is mounted"
    )]
    NotCgroup2 {
        /// What was named.
        path: PathBuf,
    },
    /// It can't be looked at.
    #[error("cannot open the cgroup {path}: check --cgroup and that shunt may read it")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Cgroup {
    /// The directory that `--cgroup` names, or the root of the machine.
    pub fn find(named: Option<&Path>) -> Result<Self, CgroupError> {
        match named {
            Some(path) => Self::open(path),
            None => Self::root(),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its id, as `bpftool` and the links show it: the inode number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// An open descriptor of the directory.
    pub fn file(&self) -> Result<File, CgroupError> {
        File::open(&self.path).map_err(|source| CgroupError::Open {
            path: self.path.clone(),
            source,
        })
    }

    fn open(path: &Path) -> Result<Self, CgroupError> {
        let path = path.to_owned();
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(source) => return Err(CgroupError::Open { path, source }),
        };
        match statfs(&path) {
            Ok(stat) if stat.filesystem_type() == CGROUP2_SUPER_MAGIC && metadata.is_dir() => {
                Ok(Self {
                    path,
                    id: metadata.ino(),
                })
            }
            Ok(_) => Err(CgroupError::NotCgroup2 { path }),
            Err(errno) => Err(CgroupError::Open {
                path,
                source: errno.into(),
            }),
        }
    }

    /// The root of the machine's hierarchy: the mount that we see, or, inside a
    /// private cgroup namespace, the one that process 1 sees.
    fn root() -> Result<Self, CgroupError> {
        let mut fallback = None;
        for mount in mounts_of_machine("cgroup2") {
            let Ok(cgroup) = Self::open(&mount) else {
                continue;
            };
            if cgroup.id == ROOT_INODE {
                return Ok(cgroup);
            }
            fallback.get_or_insert(cgroup);
        }
        fallback.ok_or(CgroupError::NotMounted)
    }
}

/// The mounts of a type that this process sees, and then those that process 1 does.
pub(super) fn mounts_of_machine(kind: &str) -> Vec<PathBuf> {
    let views = [
        ("/proc/self/mountinfo", ""),
        ("/proc/1/mountinfo", "/proc/1/root"),
    ];
    let of_view = |(mountinfo, prefix)| {
        let text = fs::read_to_string(mountinfo).unwrap_or_default();
        let mounts = mounts(&text, kind).into_iter();
        mounts.map(move |it| PathBuf::from(format!("{prefix}{it}")))
    };
    views.into_iter().flat_map(of_view).collect()
}

/// The mount points of a type (proc(5), "/proc/pid/mountinfo": the type follows the
/// separator "-").
fn mounts(mountinfo: &str, kind: &str) -> Vec<String> {
    let mount_point = |line: &str| {
        let (fields, rest) = line.split_once(" - ")?;
        let is_of_kind = rest.split(' ').next() == Some(kind);
        let point = fields.split(' ').nth(4)?;
        is_of_kind.then(|| unescape(point))
    };
    mountinfo.lines().filter_map(mount_point).collect()
}

/// Space, tab, newline and backslash are written as octal numbers.
fn unescape(path: &str) -> String {
    path.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mounts_are_found_on_pure_and_hybrid_hosts() {
        let pure = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mounts(pure, "cgroup2"), ["/sys/fs/cgroup"]);
        assert!(mounts(pure, "cgroup").is_empty());
        let hybrid = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mounts(hybrid, "cgroup2"), ["/sys/fs/cgroup/unified"]);
        assert_eq!(mounts(hybrid, "cgroup"), ["/sys/fs/cgroup/cpu"]);
        assert!(mounts("garbage\n1 2 3 - cgroup2\n", "cgroup2").is_empty());
    }

    #[test]
    fn a_directory_elsewhere_is_refused_with_what_to_do() {
        let error = Cgroup::find(Some(Path::new("/tmp")))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/tmp is not a directory of a cgroup v2"),
            "{error}"
        );
        let error = Cgroup::find(Some(Path::new("/no/such")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("cannot open the cgroup /no/such"), "{error}");
    }
}
