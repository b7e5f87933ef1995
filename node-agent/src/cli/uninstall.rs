//! `shunt uninstall`.

use anyhow::{Result, bail};
use clap::Args;

use super::{PinsArgs, print};
use crate::bpf::{KernelMaps, check_privileges};

/// Detaches and unpins everything that shunt has put into this kernel, and
/// nothing else. kube-proxy goes on alone. Stop the agent first.
#[derive(Args, Debug)]
pub(super) struct UninstallArgs {
    /// Also while spliced connections are open: bytes that their readers have
    /// not read yet are lost.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    pins: PinsArgs,
}

pub(super) fn uninstall(args: &UninstallArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    if !pins.exist() {
        return print(&format!(
            "Nothing to do: no pins in {}.",
            pins.directory().display()
        ));
    }
    let _lock = pins.lock()?;
    // A map that can't be opened has another layout or was removed by hand.
    let members = KernelMaps::open(&pins)
        .and_then(|maps| maps.splice_members())
        .unwrap_or(0);
    if members > 0 && !args.force {
        bail!(
            "{members} sockets of spliced connections are open (see `shunt sockets`), and what \
             their readers have not read yet would be lost: close the connections first, or use \
             --force"
        );
    }
    pins.remove()?;
    print(&format!("Removed {}.", pins.directory().display()))
}
