//! `shunt mount-bpffs`: for the image, which holds no other program.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::print;

/// Mounts a bpf file system, if there is none: systemd does so, other nodes may not.
#[derive(Args, Debug)]
pub(super) struct MountArgs {
    /// Where.
    #[arg(value_name = "DIR", default_value = "/sys/fs/bpf")]
    directory: PathBuf,
}

pub(super) fn mount_bpffs(args: &MountArgs) -> Result<()> {
    let directory = &args.directory;
    let shown = directory.display();
    fs::metadata(directory).with_context(|| {
        format!("no folder {shown}: is this a Linux with CONFIG_BPF_SYSCALL, and /sys mounted?")
    })?;
    let found = statfs(directory).with_context(|| format!("cannot look at {shown}"))?;
    if found.filesystem_type() == BPF_FS_MAGIC {
        return print(&format!("{shown} is a bpf file system."));
    }
    let none = None::<&str>;
    mount(Some("bpf"), directory, Some("bpf"), MsFlags::empty(), none).with_context(|| {
        format!("cannot mount a bpf file system on {shown}: this needs root and CAP_SYS_ADMIN")
    })?;
    print(&format!("Mounted a bpf file system on {shown}."))
}
