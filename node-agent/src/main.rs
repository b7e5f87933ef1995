//! The program `shunt`.

use std::process::ExitCode;

fn main() -> ExitCode {
    node_agent::cli::main()
}
