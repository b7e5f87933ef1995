//! Commands of clients. Those that are written for this check every byte.

use std::process::Command;

use anyhow::{Context, Result};

use super::servers::postgres;
use super::{Programs, sources};
use crate::place::Place;

impl Programs {
    /// A client in Go, by its name in `tests/programs/go`, for so many seconds.
    pub fn go_client(&self, place: &impl Place, name: &str, to: &str, seconds: u32) -> Command {
        let mut command = place.command(self.go());
        command.args([name, "-to", to, "-for", &format!("{seconds}s"), "-folder"]);
        command.arg(&self.bodies);
        command
    }

    /// Node's http.
    pub fn node_client(&self, place: &impl Place, to: &str, seconds: u32) -> Result<Command> {
        let (host, port) = to.rsplit_once(':').context("an address with a port")?;
        let mut command = place.command("node");
        command
            .arg(sources().join("node/client.js"))
            .args([host, port]);
        command.arg(&self.bodies).arg(seconds.to_string());
        Ok(command)
    }

    /// java.net.http.
    pub fn java_client(&self, place: &impl Place, to: &str, seconds: u32) -> Command {
        let mut command = self.java_command(place, "Client");
        command.arg(to).arg(&self.bodies).arg(seconds.to_string());
        command
    }

    pub(super) fn java_command(&self, place: &impl Place, class: &str) -> Command {
        let mut command = place.command("java");
        // Short-lived: no more compilers than it needs.
        command.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]);
        command.arg(&self.built).arg(class);
        command
    }

    /// Python's requests, whose sockets are in blocking mode.
    pub fn requests(&self, place: &impl Place, to: &str, seconds: u32) -> Command {
        self.python_client(place, &["client.py"], to, seconds)
    }

    /// A WebSocket client in Python's asyncio.
    pub fn web_socket_client(&self, place: &impl Place, to: &str, seconds: u32) -> Command {
        self.python_client(place, &["web_socket.py", "ask"], to, seconds)
    }

    fn python_client(
        &self,
        place: &impl Place,
        program: &[&str],
        to: &str,
        seconds: u32,
    ) -> Command {
        let mut command = place.command("/usr/bin/python3");
        command.current_dir(sources().join("python")).args(program);
        command.arg(to).arg(&self.bodies).arg(seconds.to_string());
        command
    }

    /// pgbench.
    pub fn pgbench(&self, place: &impl Place, to: &str) -> Result<Command> {
        let (host, port) = to.rsplit_once(':').context("an address with a port")?;
        let mut command = place.command(postgres("pgbench")?);
        command.args(["-h", host, "-p", port, "-U", "postgres"]);
        Ok(command)
    }
}
