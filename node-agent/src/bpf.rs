//! The kernel's side: finds the cgroup and the bpffs, probes what this kernel
//! can do, loads the programs, adopts what an earlier agent pinned, attaches.
//!
//! Invariants:
//! - Maps and links are pinned below one directory, [`Pins`], and nothing of
//!   shunt lives outside it: removing the pins removes shunt.
//! - A program is replaced inside its link (`BPF_LINK_UPDATE`), so that at no
//!   time none is attached, and never two.
//!
//! Start at [`Loader`].

mod btf;
mod cgroup;
mod client;
mod features;
mod inspect;
mod loader;
mod manage;
mod maps;
mod namespaces;
mod netns_id;
mod offsets;
mod pidfd;
mod pins;
mod pod_cgroups;
mod self_check;
mod splice_calls;
mod sys;

pub use cgroup::{Cgroup, CgroupError};
pub use client::{Client, ClientError};
pub use features::{Features, MissingFeature, Splicing, check_privileges, may_enter_namespaces};
pub use inspect::{Attachment, ProgramState, cgroup_path, programs};
pub use loader::{LoadError, Loaded, Loader, ignore_splice_calls, stop_marking};
pub use manage::Manage;
pub use maps::{
    Fill, HealthMaps, KernelMaps, Pairs, ReadError, UdpClients, health_events, splice_events,
    splice_members,
};
pub use namespaces::visit_namespaces;
pub use netns_id::namespace_ids;
pub use offsets::Offsets;
pub use pidfd::{PidFd, repeat_low_water};
pub use pins::{Pins, PinsError, PinsLock};
pub use pod_cgroups::{PodCgroups, pod_cgroup, uid_in};
pub use self_check::{SelfCheckError, self_check};
pub use splice_calls::watched_by;
pub use sys::{netns_cookie as own_netns_cookie, netns_cookie_of, socket_cookie, unread_bytes};
