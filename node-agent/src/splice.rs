//! The splice, as far as the agent has to do with it: which pairs are promoted,
//! and that each one that leaves the splice does so without losing a byte or a
//! wake-up. What happens to messages is the kernel's
//! (`ebpf-programs/src/splice.rs`), and goes on without an agent.
//!
//! A thread of its own follows the pairs: [`step`] says what is next for each,
//! [`follower`] does it. It sleeps while nothing is promoted or given up.

mod follower;
mod kick;
mod namespaces;
mod self_test;
pub mod step;

pub use follower::{Follower, Settings, StartError};
