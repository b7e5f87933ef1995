//! Running processes in a node or pod.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;

use crate::binary;
use crate::network::Entry;
use crate::process::{Process, Server};
use crate::report::ConnectReport;

/// A node (host network) or a pod: somewhere that processes run.
pub trait Place {
    /// The way in. Only the lab can make one, so only it makes places.
    fn entry(&self) -> &Entry;

    /// The cgroup that the place's processes are put into.
    fn cgroup(&self) -> &Path;

    /// A command that will run here: the child enters cgroup and network
    /// namespace before it becomes `program`. It dies with the lab.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.entry().command(program)
    }

    /// Kills all processes here, at once, and leaves the place as it is.
    fn kill_all(&self) -> Result<()> {
        std::fs::write(self.cgroup().join("cgroup.kill"), "1")
            .with_context(|| format!("kill {}", self.cgroup().display()))
    }

    /// Runs `lab-pod` here to its end and reads the last report it printed.
    fn lab_pod<T: DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        let output = self
            .command(binary::lab_pod()?)
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("run lab-pod {args:?}"))?;
        ensure!(
            output.status.success(),
            "lab-pod {args:?} failed ({})",
            output.status
        );
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text
            .lines()
            .last()
            .with_context(|| format!("lab-pod {args:?} was silent"))?;
        serde_json::from_str(last).with_context(|| format!("report of lab-pod {args:?}: {last}"))
    }

    /// Starts `lab-pod` here; its reports are read through the [`Process`].
    fn start_lab_pod(&self, args: &[&str]) -> Result<Process> {
        let mut command = self.command(binary::lab_pod()?);
        command.args(args);
        Process::start(command)
    }

    /// Starts `lab-pod serve`, which answers `id` and echoes, and waits until
    /// it listens.
    fn serve(&self, listen: impl Display, id: &str) -> Result<Server> {
        let listen = listen.to_string();
        Server::start(self.start_lab_pod(&["serve", "--listen", &listen, "--id", id])?)
    }

    /// As [`Place::serve`], over UDP: answers `id` to each datagram.
    fn serve_udp(&self, listen: impl Display, id: &str) -> Result<Server> {
        let listen = listen.to_string();
        Server::start(self.start_lab_pod(&["serve", "--udp", "--listen", &listen, "--id", id])?)
    }

    /// Connects once from here and reports who answered.
    fn connect(&self, to: impl Display) -> Result<ConnectReport> {
        self.lab_pod(&["connect", &to.to_string()])
    }
}
