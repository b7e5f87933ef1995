//! The command line.

mod agent;
mod explain;
mod mount_bpffs;
mod pause;
mod plan;
mod routes;
mod sockets;
mod source;
mod splice;
mod status;
mod top;
mod uninstall;

use std::io::{self, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use shunt_common::{ServiceKey, address};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::bpf::{KernelMaps, Pins};

/// The whole program: logs to standard error, does what the arguments say, and
/// says why it failed.
pub fn main() -> ExitCode {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .with_env_var("SHUNT_LOG")
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_env_filter(filter)
        .init();
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

#[expect(
    clippy::print_stderr,
    reason = "this is where a program says why it failed"
)]
fn report(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}

/// Makes calls between pods on the same node take the short way.
#[derive(Debug, Parser)]
#[command(name = "shunt", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Agent(agent::AgentArgs),
    Explain(explain::ExplainArgs),
    Plan(plan::PlanArgs),
    Routes(routes::RoutesArgs),
    Sockets(sockets::SocketsArgs),
    Splice(splice::SpliceArgs),
    Status(status::StatusArgs),
    Top(top::TopArgs),
    Uninstall(uninstall::UninstallArgs),
    #[command(hide = true)]
    MountBpffs(mount_bpffs::MountArgs),
    /// Waits for SIGTERM or SIGINT.
    #[command(hide = true)]
    Pause,
}

/// How to print.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Output {
    /// A table for people.
    #[default]
    Table,
    /// A table with everything in it.
    Wide,
    /// For programs.
    Json,
}

/// Where the pins are.
#[derive(Args, Debug)]
struct PinsArgs {
    /// Directory on a bpffs where shunt pins its maps and links.
    #[arg(long, value_name = "DIR", default_value = Pins::DEFAULT_ROOT)]
    pins: PathBuf,
}

impl PinsArgs {
    fn pins(&self) -> Pins {
        Pins::new(&self.pins)
    }
}

impl Cli {
    /// Does what it says.
    ///
    /// # Errors
    ///
    /// With everything that a person needs to mend the cause.
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Agent(args) => agent::agent(args),
            Command::Explain(args) => explain::explain_service(&args),
            Command::Plan(args) => plan::plan(args),
            Command::Routes(args) => routes::routes(&args),
            Command::Sockets(args) => sockets::sockets(&args),
            Command::Splice(args) => splice::splice(&args),
            Command::Status(args) => status::status(&args),
            Command::Top(args) => top::top(&args),
            Command::Uninstall(args) => uninstall::uninstall(&args),
            Command::MountBpffs(args) => mount_bpffs::mount_bpffs(&args),
            Command::Pause => pause::pause(),
        }
    }
}

/// Writes a line to standard output; that its reader has gone (`| head`) is no
/// error.
fn print(text: &str) -> Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// `namespace/service:port` of a Service port, or the ClusterIP if the name is gone.
fn service_name(maps: &KernelMaps, key: &ServiceKey) -> String {
    let Some(name) = maps.name(key) else {
        let port = u16::from_be_bytes(key.port());
        return SocketAddr::from((address::to_ip(key.address()), port)).to_string();
    };
    let port = if name.port().is_empty() {
        String::new()
    } else {
        format!(":{}", name.port())
    };
    format!("{}/{}{port}", name.namespace(), name.service())
}
