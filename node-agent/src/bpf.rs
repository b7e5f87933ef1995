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
mod maps;
mod pins;
mod pod_cgroups;
mod self_check;
mod sys;

pub use cgroup::{Cgroup, CgroupError};
pub use client::{Client, ClientError};
pub use features::{
    Features, MissingFeature, Offsets, Splicing, check_privileges, may_enter_namespaces,
};
pub use inspect::{Attachment, ProgramState, cgroup_path, programs};
pub use loader::{LoadError, Loaded, Loader};
pub use maps::{Fill, KernelMaps, ReadError, UdpClients, splice_members};
pub use pins::{Pins, PinsError, PinsLock};
pub use pod_cgroups::{PodCgroups, pod_cgroup, uid_in};
pub use self_check::{SelfCheckError, self_check};
pub use sys::netns_cookie_of;
