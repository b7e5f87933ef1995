//! Guards of running processes.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;

use crate::report::Listening;

/// A running process that prints reports; dropping it kills it.
pub struct Process {
    child: Child,
    reports: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a command of a place; each line that it prints is a report.
    pub fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        let stdout = child.stdout.take().expect("stdout is piped");
        Ok(Self {
            child,
            reports: BufReader::new(stdout),
        })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next report.
    pub fn report<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.reports.read_line(&mut line).context("read a report")?;
        ensure!(!line.is_empty(), "it ended without the expected report");
        serde_json::from_str(&line).with_context(|| format!("parse report {line}"))
    }

    /// Writes a line to standard input and waits for the report that it brings.
    pub fn command<T: DeserializeOwned>(&mut self, line: &str) -> Result<T> {
        self.tell(line)?;
        self.report()
    }

    /// Writes a line to standard input.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("standard input")?;
        writeln!(stdin, "{line}").context("write to its standard input")
    }

    /// Closes standard input, which ends those that wait for it.
    pub fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Closes standard input, which ends those that wait for it, and waits for
    /// the last report.
    pub fn finish<T: DeserializeOwned>(mut self) -> Result<T> {
        self.close_input();
        let report = self.report()?;
        let status = self.child.wait().context("wait for its end")?;
        ensure!(status.success(), "it failed ({status})");
        Ok(report)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `lab-pod serve`; dropping it kills it.
pub struct Server {
    process: Process,
    address: SocketAddr,
}

impl Server {
    /// Waits until the process says that it listens.
    pub fn start(mut process: Process) -> Result<Self> {
        let Listening { listening } = process.report().context("wait for the server")?;
        Ok(Self {
            process,
            address: listening,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The process itself.
    pub fn process(&self) -> &Process {
        &self.process
    }
}
