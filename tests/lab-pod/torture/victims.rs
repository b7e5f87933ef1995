//! Helpers that are killed (SIGKILL) at random moments, one after the other.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};

use lab::pattern::Random;

use super::TortureArgs;
use super::plan::VICTIM;

/// A client that dies has so many connections.
const CONNECTIONS: u64 = 20;

/// Ends the killing.
pub(super) struct Victims {
    stopping: Arc<AtomicBool>,
    killer: JoinHandle<Result<u64>>,
}

impl Victims {
    /// How many were killed.
    pub(super) fn end(self) -> Result<u64> {
        self.stopping.store(true, Ordering::Relaxed);
        self.killer.join().expect("the killer does not panic")
    }
}

/// Processes that connect and are killed.
pub(super) fn clients(args: &TortureArgs, to: SocketAddr) -> Victims {
    let (seed, banks) = (args.seed, args.banks);
    let mut first = VICTIM | args.first_id;
    start(seed, move || {
        let mut command = own_command("--connect", to, banks)?;
        command.args(["--seed", &seed.to_string(), "--threads", "1"]);
        command.args([
            "--connections",
            &CONNECTIONS.to_string(),
            "--first-id",
            &first.to_string(),
        ]);
        first += CONNECTIONS;
        command
            .stdout(Stdio::null())
            .spawn()
            .context("start a client")
    })
}

/// Processes that listen and are killed; the first is there on return.
pub(super) fn servers(args: &TortureArgs, address: SocketAddr) -> Result<Victims> {
    let banks = args.banks;
    let mut spawn = move || {
        let mut command = own_command("--listen", address, banks)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a server")?;
        let stdout = child.stdout.take().context("its output")?;
        let mut line = String::new();
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("wait for a server")?;
        Ok(child)
    };
    let mut first = Some(spawn()?);
    Ok(start(u64::from(address.port()), move || {
        first.take().map_or_else(&mut spawn, Ok)
    }))
}

fn own_command(option: &str, address: SocketAddr, banks: u16) -> Result<Command> {
    let mut command = Command::new(env::current_exe().context("own path")?);
    command.args(["torture", "--victim", option, &address.to_string()]);
    command.args(["--banks", &banks.to_string()]);
    Ok(command)
}

fn start(seed: u64, mut spawn: impl FnMut() -> Result<Child> + Send + 'static) -> Victims {
    let stopping = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stopping);
    let killer = thread::spawn(move || {
        let mut random = Random::new(seed);
        let mut killed = 0;
        while !stop.load(Ordering::Relaxed) {
            let mut child = spawn()?;
            thread::sleep(Duration::from_millis(100 + random.below(1500)));
            child.kill().context("kill a helper")?;
            child.wait().context("wait for a killed helper")?;
            killed += 1;
        }
        Ok(killed)
    });
    Victims { stopping, killer }
}
