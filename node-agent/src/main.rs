//! The program `shunt`.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use clap::Parser as _;
use node_agent::cli::Cli;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
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
