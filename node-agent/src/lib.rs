//! The agent and the command line of shunt.
//!
//! The data flows from top to bottom; see ARCHITECTURE.md.

pub mod model;
pub mod watch;

pub mod state;

pub mod plan;
pub mod serving;
pub mod tables;

pub mod diff;

pub mod apply;
pub mod bpf;
pub mod cleanup;
pub mod splice;

pub mod admin;
pub mod agent;

pub mod cli;
pub mod explain;
pub mod health;
pub mod report;

#[cfg(feature = "fault-injection")]
pub mod fault;
