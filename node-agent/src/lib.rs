//! The agent and the command line of shunt.
pub mod tables;
pub mod diff;
pub mod apply;
pub mod bpf;
