//! The real programs that a test and a benchmark run, as Debian has them, and how
//! they are installed without any of them being started.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::command::{command, is_installed, root, run, succeeds};

/// One of them.
struct Service {
    /// Where it is: a name on the PATH, or the end of a path.
    program: &'static str,
    package: &'static str,
    /// What would run after the next start of the machine.
    unit: Option<&'static str>,
}

const fn service(
    program: &'static str,
    package: &'static str,
    unit: Option<&'static str>,
) -> Service {
    Service {
        program,
        package,
        unit,
    }
}

const SERVICES: &[Service] = &[
    service("redis-server", "redis-server", Some("redis-server.service")),
    service("nginx", "nginx", Some("nginx.service")),
    service("haproxy", "haproxy", Some("haproxy.service")),
    service("memcached", "memcached", Some("memcached.service")),
    service("pg_lsclusters", "postgresql", Some("postgresql.service")),
    service("gunicorn", "gunicorn", None),
    service("iperf3", "iperf3", Some("iperf3.service")),
    service("curl", "curl", None),
    service("wrk", "wrk", None),
    service("node", "nodejs", None),
    service("javac", "default-jdk-headless", None),
];

/// Their packages, and those of Python's modules.
pub(super) const PACKAGES: &[&str] = &[
    "redis-server",
    "nginx",
    "haproxy",
    "memcached",
    "postgresql",
    "gunicorn",
    "iperf3",
    "curl",
    "wrk",
    "nodejs",
    "default-jdk-headless",
    "python3-requests",
    "python3-websockets",
];

/// Whether all are there.
pub(super) fn are_installed() -> bool {
    let modules = ["-c", "import gunicorn, requests, websockets"];
    SERVICES.iter().all(|it| is_installed(it.program)) && succeeds("/usr/bin/python3", &modules)
}

/// Whether the modules are there that the programs in Go are built from.
pub(super) fn has_go_modules() -> bool {
    let mut go = command("go");
    go.current_dir(go_sources()).env("GOPROXY", "off");
    go.env("GOFLAGS", "-mod=readonly")
        .args(["list", "-deps", "."]);
    go.output().is_ok_and(|output| output.status.success())
}

/// Fetches them.
pub(super) fn fetch_go_modules() -> Result<()> {
    let mut go = command("go");
    go.current_dir(go_sources());
    // Only those that are built: the modules themselves name many more.
    run(go.args(["build", "-o", "/dev/null", "."]))
}

fn go_sources() -> PathBuf {
    root().join("tests/programs/go")
}

/// While it is there, no script of a package starts anything: `invoke-rc.d` asks
/// policy-rc.d, and 101 means no (`/usr/share/doc/init-system-helpers` of Debian).
/// What was there before comes back when it is dropped.
pub(super) struct NothingStarts {
    policy: PathBuf,
    aside: PathBuf,
}

impl NothingStarts {
    /// From now on.
    pub(super) fn begin() -> Result<Self> {
        Self::begin_at(Path::new("/usr/sbin/policy-rc.d"))
    }

    fn begin_at(policy: &Path) -> Result<Self> {
        let mut aside = policy.as_os_str().to_owned();
        aside.push(".before-shunt-setup");
        let aside = PathBuf::from(aside);
        // If it is aside already, a setup was killed, and what is here is ours.
        if !aside.exists() {
            match fs::rename(policy, &aside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("move {}", policy.display()));
                }
                _ => {}
            }
        }
        let guard = Self {
            policy: policy.to_owned(),
            aside,
        };
        fs::write(policy, "#!/bin/sh\nexit 101\n")
            .and_then(|()| fs::set_permissions(policy, Permissions::from_mode(0o755)))
            .with_context(|| format!("write {}", policy.display()))?;
        Ok(guard)
    }
}

impl Drop for NothingStarts {
    fn drop(&mut self) {
        let result = fs::remove_file(&self.policy);
        let restored = match self.aside.exists() {
            true => fs::rename(&self.aside, &self.policy),
            false => result,
        };
        if let Err(error) = restored {
            println!("restore {}: {error}", self.policy.display());
        }
    }
}

/// Has systemd, where it runs, not start these at the next start of the machine.
/// Only for packages that were not there before.
pub(super) fn disable(packages: &BTreeSet<&'static str>) -> Result<()> {
    if !Path::new("/run/systemd/system").exists() {
        return Ok(());
    }
    let new = SERVICES.iter().filter(|it| packages.contains(it.package));
    for unit in new.filter_map(|it| it.unit) {
        run(command("systemctl").args(["disable", unit]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_of_before_comes_back() {
        let folder = std::env::temp_dir().join(format!("shunt-policy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let policy = folder.join("policy-rc.d");
        drop(NothingStarts::begin_at(&policy).unwrap());
        assert!(!policy.exists());
        fs::write(&policy, "before").unwrap();
        let guard = NothingStarts::begin_at(&policy).unwrap();
        assert!(fs::read_to_string(&policy).unwrap().ends_with("exit 101\n"));
        // A setup that was killed left its own here.
        std::mem::forget(guard);
        drop(NothingStarts::begin_at(&policy).unwrap());
        assert_eq!(fs::read_to_string(&policy).unwrap(), "before");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn each_program_has_a_package_that_is_installed() {
        assert!(SERVICES.iter().all(|it| PACKAGES.contains(&it.package)));
    }
}
