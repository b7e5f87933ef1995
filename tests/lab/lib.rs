//! The lab: Kubernetes-like nodes and pods on one machine, for tests, demo and
//! benchmarks. Needs root and `ip`; what runs Kubernetes needs
//! what `cargo xtask setup` builds, too.
//!
//! A node is a network namespace and a cgroup; a pod is a namespace and a
//! cgroup below its node's. Nodes are joined by a bridge in a namespace of the
//! lab's own, so the host's network is never touched:
//!
//! ```text
//!            <lab>-net:  br0 192.168.77.254, fd00:192:168:77::254
//!                   port1 |                     | port2
//!  <lab>-n1:         eth0 192.168.77.1     eth0 192.168.77.2       :<lab>-n2
//!                    pod5 |                     | pod7
//!  <lab>-n1-client:  eth0 10.244.1.5       eth0 10.244.2.7         :<lab>-n2-web
//! ```
//!
//! Start with [`Lab::new`], [`Lab::node`] and [`Node::pod`]; run things through
//! the [`Place`] trait, which nodes and pods share.
//!
//! Invariant: everything a lab makes carries its name, and one process, the
//! reaper ([`cleanup`]), removes it by that name, whatever end the owner came to.

mod lab;

mod node;
mod pod;

mod place;
mod process;

mod agent;
pub mod kubernetes;

pub mod cluster;
pub mod image;

pub mod cleanup;

mod address;
mod binary;
mod cgroup;
mod network;

pub mod fixture;
pub mod pattern;
pub mod programs;
pub mod random;
pub mod report;
pub mod torture;

pub use agent::Agent;
pub use binary::{target_binary, use_binaries};
pub use cleanup::{leftovers, remains, sweep};
pub use lab::{Lab, LogOutput, Options};
pub use network::Entry;
pub use node::Node;
pub use place::Place;
pub use pod::Pod;
pub use process::{Process, Server};
