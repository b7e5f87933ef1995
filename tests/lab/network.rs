//! Network namespaces, their sysctls, and `ip` batches.
//!
//! `ip` itself is started inside the namespace it works on: `ip -n` would make
//! a mount namespace and remount /sys for every call.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

/// Where `ip netns` keeps the names of namespaces.
pub(crate) const NAMES: &str = "/run/netns";

/// An open network namespace; it lives at least as long as this handle.
#[derive(Clone)]
pub(crate) struct Namespace {
    name: String,
    file: Arc<File>,
}

impl Namespace {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Writes sysctls of the namespace. Keys are paths below /proc/sys.
    pub(crate) fn set(&self, sysctls: &[(&str, &str)]) -> Result<()> {
        let write_all = || -> Result<()> {
            setns(&self.file, CloneFlags::CLONE_NEWNET).context("enter")?;
            for (key, value) in sysctls {
                fs::write(Path::new("/proc/sys").join(key), value)
                    .with_context(|| format!("set {key} to {value}"))?;
            }
            Ok(())
        };
        // /proc/sys/net shows the namespace of the thread that opens it, so a
        // thread of its own leaves the caller where it is.
        thread::scope(|scope| {
            scope
                .spawn(write_all)
                .join()
                .expect("write_all does not panic")
        })
        .with_context(|| format!("network namespace {}", self.name))
    }
}

/// Puts new processes into a cgroup and a network namespace, between fork and
/// exec. Mount, process and user namespaces stay the caller's, so that pods see
/// the cgroup tree and bpffs.
#[derive(Clone)]
pub struct Entry {
    /// cgroup.procs, open for writing.
    procs: Arc<File>,
    namespace: Option<Namespace>,
}

impl Entry {
    pub(crate) fn new(cgroup: &Path, namespace: Option<Namespace>) -> Result<Self> {
        let path = cgroup.join("cgroup.procs");
        let procs = File::options()
            .write(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        Ok(Self {
            procs: Arc::new(procs),
            namespace,
        })
    }

    pub(crate) fn namespace(&self) -> Option<&Namespace> {
        self.namespace.as_ref()
    }

    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let entry = self.clone();
        let enter = move || entry.enter();
        // SAFETY: between fork and exec only async-signal-safe calls are
        // allowed; `enter` makes the system calls write and setns, no others.
        unsafe { command.pre_exec(enter) };
        command
    }

    fn enter(&self) -> io::Result<()> {
        // "0" is the writing process.
        (&*self.procs).write_all(b"0")?;
        if let Some(namespace) = &self.namespace {
            setns(&namespace.file, CloneFlags::CLONE_NEWNET)?;
        }
        Ok(())
    }
}

/// Runs the `ip` commands that build a lab, in a cgroup of the lab, so that
/// the reaper also finds one that was at work when the owner died.
pub(crate) struct Builder {
    cgroup: PathBuf,
}

impl Builder {
    pub(crate) fn new(cgroup: PathBuf) -> Self {
        Self { cgroup }
    }

    pub(crate) fn add_namespace(&self, name: &str, sysctls: &[(&str, &str)]) -> Result<Namespace> {
        self.run(None, &format!("netns add {name}\n"))?;
        let path = Path::new(NAMES).join(name);
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        let namespace = Namespace {
            name: name.to_owned(),
            file: Arc::new(file),
        };
        namespace.set(sysctls)?;
        Ok(namespace)
    }

    /// Runs the lines of `batch` as `ip` commands in the namespace.
    pub(crate) fn ip(&self, namespace: &Namespace, batch: &str) -> Result<()> {
        self.run(Some(namespace.clone()), batch)
            .with_context(|| format!("in network namespace {}", namespace.name))
    }

    fn run(&self, namespace: Option<Namespace>, batch: &str) -> Result<()> {
        let mut command = Entry::new(&self.cgroup, namespace)?.command("ip");
        command.args(["-batch", "-"]);
        feed(command, batch)
    }
}

/// Runs a command with the text as its standard input; its complaints become
/// the error.
fn feed(mut command: Command, input: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A program that fails early closes the pipe: its own words say more.
    let written = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child
        .wait_with_output()
        .with_context(|| format!("wait for {program}"))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let lines = input.lines().take(40).collect::<Vec<_>>().join("\n");
        bail!(
            "{program} failed ({}): {complaint}\nits input:\n{lines}",
            output.status
        );
    }
    written.with_context(|| format!("write to {program}"))
}
