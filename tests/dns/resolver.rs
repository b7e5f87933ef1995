//! Resolvers as applications have them: those of the C libraries, and dig.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lab::{Lab, Place as _, Pod, Process};
use serde::Deserialize;

/// A C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// Connected sockets; IPv4 and IPv6 addresses by one of them.
    Glibc,
    /// One unconnected socket for both questions, which takes answers from the
    /// name server only.
    Musl,
}

/// What a lookup came to.
#[derive(Debug, Deserialize)]
pub(crate) struct Answer {
    /// In words of the library; empty if there is none.
    pub(crate) error: String,
    pub(crate) addresses: Vec<String>,
}

/// A folder to be seen as /etc, with a name server and options of resolv.conf.
pub(crate) fn etc(lab: &Lab, name_server: &str, options: &str) -> PathBuf {
    let name: String =
        format!("etc-{name_server}-{options}").replace(|it: char| !it.is_ascii_alphanumeric(), "-");
    let folder = lab.folder().join(name);
    fs::create_dir_all(&folder).unwrap();
    let text = format!("nameserver {name_server}\noptions {options}\n");
    fs::write(folder.join("resolv.conf"), text).unwrap();
    // Not by way of what else the machine may have, such as systemd's resolver.
    fs::write(folder.join("nsswitch.conf"), "hosts: dns\n").unwrap();
    folder
}

/// A command that sees that folder as /etc.
pub(crate) fn command(pod: &Pod, etc: &Path, program: impl AsRef<Path>) -> Command {
    let script = "mount --bind \"$0\" /etc && exec \"$@\"";
    let mut command = pod.command("unshare");
    command
        .args(["--mount", "sh", "-c", script])
        .arg(etc)
        .arg(program.as_ref());
    command
}

/// Builds the program that looks names up.
pub(crate) fn build(lab: &Lab, library: Library) -> PathBuf {
    let (compiler, options) = match library {
        Library::Glibc => ("cc", &[][..]),
        Library::Musl => ("musl-gcc", &["-static"][..]),
    };
    let program = lab.folder().join(format!("lookup-{library:?}"));
    let status = Command::new(compiler)
        .args(options)
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/dns/lookup.c"))
        .status();
    assert!(status.unwrap().success(), "{compiler}");
    program
}

/// A process that looks up what it is told to.
pub(crate) struct Lookups(Process);

impl Lookups {
    pub(crate) fn start(pod: &Pod, etc: &Path, program: &Path) -> Self {
        Self(Process::start(command(pod, etc, program)).unwrap())
    }

    pub(crate) fn ask(&mut self, name: &str) -> Answer {
        self.0.command(name).unwrap()
    }
}
