//! Real programs in pods, unmodified: servers, clients, and what they are given.
//! `cargo xtask setup` installs them. Those in Go and Java are in
//! `tests/programs/`, and are built when they are needed.

mod clients;
mod servers;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

pub use self::servers::Nginx;
use crate::binary;
use crate::lab::create_folder;
use crate::pattern::Pattern;

/// Sizes of the bodies, in bytes: within a segment, a page, buffers, and more.
const BODIES: [usize; 5] = [1, 100, 4096, 65_536, 1_000_000];
/// How long a program may take to listen, or to end. Only a hang is ever this
/// long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a log, when a program has failed.
const LAST_WORDS: usize = 4000;

/// What all programs share.
pub struct Programs {
    /// Logs and configurations.
    folder: PathBuf,
    /// What servers serve and clients check: `body-SIZE`.
    bodies: PathBuf,
    /// Where the built programs are.
    built: PathBuf,
    /// Of the folders and logs so far, so that each has its own.
    number: AtomicU32,
}

/// A running server; dropping it kills it.
pub struct Running {
    name: String,
    child: Child,
    log: PathBuf,
}

/// The sources.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

impl Programs {
    /// Builds what has to be built, and writes the bodies, into a lab's folder.
    pub fn new(lab_folder: &Path) -> Result<Self> {
        let lab_pod = binary::lab_pod()?;
        let target = lab_pod.parent().context("lab-pod is in a folder")?;
        let folder = lab_folder.join("programs");
        let programs = Self {
            bodies: folder.join("bodies"),
            built: target.join("programs"),
            folder,
            number: AtomicU32::new(0),
        };
        create_folder(&programs.bodies)?;
        create_folder(&programs.built)?;
        build_go(&programs.go())?;
        build_java(&programs.built)?;
        for size in BODIES {
            let mut bytes = vec![0; size];
            Pattern::new(1, size as u64).fill(0, &mut bytes);
            fs::write(programs.bodies.join(format!("body-{size}")), bytes)
                .with_context(|| format!("write a body of {size} bytes"))?;
        }
        Ok(programs)
    }

    /// Where the bodies are.
    pub fn bodies(&self) -> &Path {
        &self.bodies
    }

    fn go(&self) -> PathBuf {
        self.built.join("programs-go")
    }

    /// A path that no other program has.
    fn path(&self, name: &str) -> PathBuf {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{name}-{number}"))
    }

    /// Starts a server, and waits until it listens in its pod.
    fn start(&self, name: &str, port: u16, mut command: Command) -> Result<Running> {
        let log = self.path(name);
        let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the log")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {name}: is it installed? `cargo xtask setup`"))?;
        let name = name.to_owned();
        let mut running = Running { name, child, log };
        running.wait_until_it_listens(port)?;
        Ok(running)
    }

    /// Runs a client to its end, and returns what it printed. One that takes too
    /// long hangs.
    pub fn finish(&self, name: &str, mut command: Command) -> Result<String> {
        let log = self.path(name);
        let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the log")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {command:?}: `cargo xtask setup` installs it"))?;
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().context("look after a client")? {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().context("kill a client")?;
                child.wait().context("wait for a client")?;
                bail!("it hangs: {command:?}\n{}", last_words(&log));
            }
            thread::sleep(Duration::from_millis(10));
        };
        let printed = last_words(&log);
        ensure!(
            status.success(),
            "it failed ({status}): {command:?}\n{printed}"
        );
        Ok(printed)
    }
}

impl Running {
    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed last.
    pub fn last_words(&self) -> String {
        last_words(&self.log)
    }

    fn wait_until_it_listens(&mut self, port: u16) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !listens(self.child.id(), port) {
            let name = &self.name;
            if let Some(status) = self.child.try_wait().context("look after a server")? {
                bail!("{name} ended ({status}): {}", self.last_words());
            }
            ensure!(
                Instant::now() < deadline,
                "{name} does not listen: {}",
                self.last_words()
            );
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether something listens at the port, in the network namespace of a process.
fn listens(pid: u32, port: u16) -> bool {
    let table = |name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let text = table("tcp") + &table("tcp6");
    text.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().and_then(|word| word.rsplit_once(':'));
        // TCP_LISTEN in include/net/tcp_states.h.
        let state = words.nth(1);
        local.is_some_and(|(_, text)| text == format!("{port:04X}")) && state == Some("0A")
    })
}

fn last_words(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let last = &bytes[bytes.len().saturating_sub(LAST_WORDS)..];
    String::from_utf8_lossy(last).into_owned()
}

/// Go itself knows what has changed.
fn build_go(program: &Path) -> Result<()> {
    let mut go = Command::new("go");
    go.current_dir(sources().join("go"));
    go.env("CGO_ENABLED", "0")
        .args(["build", "-trimpath", "-o"]);
    run(go.arg(program).arg("."))
}

fn build_java(folder: &Path) -> Result<()> {
    for name in ["Server", "Client"] {
        let source = sources().join(format!("java/{name}.java"));
        let class = folder.join(format!("{name}.class"));
        let changed = |path: &Path| path.metadata().and_then(|it| it.modified()).ok();
        if changed(&class) > changed(&source) {
            continue;
        }
        run(Command::new("javac").arg("-d").arg(folder).arg(source))?;
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("start {command:?}: `cargo xtask setup` says what is missing"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {words}");
    Ok(())
}
