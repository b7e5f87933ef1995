//! The command line.

mod agent;
mod explain;
mod plan;
mod routes;
mod sockets;
mod source;
mod splice;
mod status;
mod uninstall;

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bpf::Pins;

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
    Uninstall(uninstall::UninstallArgs),
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
            Command::Uninstall(args) => uninstall::uninstall(&args),
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
