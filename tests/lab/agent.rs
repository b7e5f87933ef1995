//! The program under test, on a node of the lab.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::binary::target_binary;
use crate::lab::LogOutput;
use crate::node::Node;
use crate::place::Place;

/// A running `shunt agent`; dropping it kills it and prints its log, see
/// [`LogOutput`].
pub struct Agent {
    child: Child,
    log: PathBuf,
    /// Length of the log when this agent started.
    log_start: usize,
    output: LogOutput,
}

impl Node {
    /// Starts the agent in the host network, with everything that is the
    /// node's own: manifests, cgroup, pins.
    pub fn agent(&self, args: &[&str]) -> Result<Agent> {
        let mut command = self.command(shunt()?);
        command.args(["agent", "--from"]).arg(self.manifests());
        self.start_agent(command, args)
    }

    /// As [`Node::agent`], but the one that has faults if it is asked to.
    pub fn faulty_agent(&self, args: &[&str]) -> Result<Agent> {
        let mut command = self.command(target_binary("shunt-faulty", "SHUNT_FAULTY_BIN")?);
        command.args(["agent", "--from"]).arg(self.manifests());
        self.start_agent(command, args)
    }

    /// As [`Node::agent`], but it watches the API server of a kubeconfig.
    pub fn agent_of_cluster(&self, kubeconfig: &Path, args: &[&str]) -> Result<Agent> {
        let mut command = self.command(shunt()?);
        command.arg("agent").env("KUBECONFIG", kubeconfig);
        self.start_agent(command, args)
    }

    fn start_agent(&self, mut command: Command, args: &[&str]) -> Result<Agent> {
        let log = self.folder().join("agent.log");
        // Appending keeps the words of the agents before it.
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("open {}", log.display()))?;
        let length = file.metadata().context("length of the log")?.len();
        let child = command
            .args(["--node-name", self.name()])
            .arg("--cgroup")
            .arg(self.node_cgroup())
            .arg("--pins")
            .arg(self.pins())
            .args(args)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the log")?)
            .stderr(file)
            .spawn()
            .context("start shunt agent")?;
        Ok(Agent {
            child,
            log,
            log_start: usize::try_from(length).context("length of the log")?,
            output: self.shared.options.logs,
        })
    }

    /// Runs a command of the CLI against the node's pinned maps.
    pub fn shunt(&self, args: &[&str]) -> Result<Output> {
        self.shunt_command(args)?
            .output()
            .with_context(|| format!("run shunt {args:?}"))
    }

    /// The folder of the agent's pinned maps and links.
    pub fn pins(&self) -> PathBuf {
        self.bpffs().join("shunt")
    }

    /// That command, not started yet.
    pub fn shunt_command(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command(shunt()?);
        command
            .args(args)
            .arg("--pins")
            .arg(self.pins())
            .stdin(Stdio::null());
        Ok(command)
    }
}

impl Agent {
    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The log file of the node's agents.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Waits until this agent has logged the text.
    pub fn wait_for_log(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            // The status is asked for first, so that no last words are missed.
            let ended = self.child.try_wait().context("look after the agent")?;
            if self.read_log().contains(text) {
                return Ok(());
            }
            if let Some(status) = ended {
                bail!("the agent ended ({status}) before it logged {text:?}");
            }
            if Instant::now() > deadline {
                bail!("the agent did not log {text:?} within {timeout:?}");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until it has ended by itself.
    pub fn wait_for_end(mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait().context("look after the agent")? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the agent did not end within {timeout:?}");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it without warning (SIGKILL).
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill the agent")?;
        self.child
            .wait()
            .context("wait for the killed agent")
            .map(drop)
    }

    /// Asks it to end (SIGTERM) and waits.
    pub fn stop(mut self) -> Result<ExitStatus> {
        let pid = i32::try_from(self.child.id()).context("process id of the agent")?;
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("terminate the agent")?;
        self.child.wait().context("wait for the agent")
    }

    /// What this agent has logged.
    pub fn read_log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(bytes.get(self.log_start..).unwrap_or_default()).into_owned()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.output == LogOutput::Captured || thread::panicking() {
            #[expect(
                clippy::print_stderr,
                reason = "the harness captures it for failed tests"
            )]
            {
                eprintln!("---- {}\n{}", self.log.display(), self.read_log());
            }
        }
    }
}

fn shunt() -> Result<PathBuf> {
    target_binary("shunt", "SHUNT_BIN")
}
