//! What this machine offers for installing things.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use ebpf_toolchain::Compiler;

use super::requirement::{
    CLIPPY_PACKAGES, COMPILER_PACKAGES, Install, LINKER_PACKAGES, REQUIREMENTS,
};
use crate::command::{command, is_installed};

/// The facts that a plan follows from.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    /// The compiler for BPF that is there.
    pub(super) compiler: Option<Compiler>,
    /// The packages that apt knows; `None` without apt.
    pub(super) packages: Option<BTreeMap<String, Package>>,
    pub(super) user: User,
    pub(super) rustup: bool,
    pub(super) go: bool,
    /// `cargo binstall`, which fetches programs that are built already.
    pub(super) binstall: bool,
}

/// Who runs this.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum User {
    Root,
    #[default]
    Other,
}

/// A Debian package that apt knows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Package {
    Installed,
    Available,
}

impl Machine {
    /// Looks.
    pub(super) fn probe() -> Self {
        Self {
            compiler: Compiler::find().ok(),
            packages: is_installed("apt-get").then(apt_packages),
            user: if is_root() { User::Root } else { User::Other },
            rustup: is_installed("rustup"),
            go: is_installed("go"),
            binstall: is_installed("cargo-binstall"),
        }
    }
}

/// Whether this process is root's.
pub(crate) fn is_root() -> bool {
    // The kernel gives /proc/self to the effective user.
    fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

fn apt_packages() -> BTreeMap<String, Package> {
    let mut policy = command("apt-cache");
    policy.env("LC_ALL", "C").arg("policy");
    policy
        .args(COMPILER_PACKAGES)
        .args(LINKER_PACKAGES)
        .args(CLIPPY_PACKAGES);
    for requirement in REQUIREMENTS {
        if let Install::Packages(packages) = requirement.install {
            policy.args(packages);
        }
    }
    let output = policy
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    parse_policy(&String::from_utf8_lossy(&output))
}

/// Reads what `apt-cache policy` prints: for each known package its name, and
/// indented below it the versions. Unknown packages are left out by apt.
fn parse_policy(text: &str) -> BTreeMap<String, Package> {
    let mut packages = BTreeMap::new();
    let mut name = "";
    for line in text.lines() {
        if !line.starts_with(' ') {
            name = line.trim_end_matches(':');
            continue;
        }
        let Some((field, value)) = line.trim().split_once(": ") else {
            continue;
        };
        match field {
            "Installed" if value != "(none)" => {
                packages.insert(name.to_owned(), Package::Installed);
            }
            "Candidate" if value != "(none)" => {
                packages
                    .entry(name.to_owned())
                    .or_insert(Package::Available);
            }
            _ => {}
        }
    }
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_installed_available_or_unknown() {
        let policy = "\
rustc-web:
  Installed: 1.96.0+dfsg1-1~deb12u2
  Candidate: 1.96.0+dfsg1-1~deb12u2
  Version table:
 *** 1.96.0+dfsg1-1~deb12u2 500
        100 /var/lib/dpkg/status
g++:
  Installed: (none)
  Candidate: 4:12.2.0-3
  Version table:
     4:12.2.0-3 500
bpftool:
  Installed: (none)
  Candidate: (none)
  Version table:
";
        let expected = [
            ("g++".to_owned(), Package::Available),
            ("rustc-web".to_owned(), Package::Installed),
        ];
        assert_eq!(parse_policy(policy), BTreeMap::from(expected));
    }
}
