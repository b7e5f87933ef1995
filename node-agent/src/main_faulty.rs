//! The program `shunt-faulty`, for tests: see `fault`.

use std::process::ExitCode;

fn main() -> ExitCode {
    node_agent::cli::main()
}
