//! `shunt uninstall`.

use anyhow::{Result, bail};
use clap::Args;

use super::{PinsArgs, print};
use crate::bpf::{Pins, check_privileges, splice_members};

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
    let own = args.pins.pins();
    let others = own.others();
    let layouts: Vec<&Pins> = own
        .exist()
        .then_some(&own)
        .into_iter()
        .chain(&others)
        .collect();
    if layouts.is_empty() {
        return print(&format!(
            "Nothing to do: no pins in {}.",
            own.directory().display()
        ));
    }
    let locks: Result<Vec<_>, _> = layouts.iter().map(|pins| pins.lock()).collect();
    let _locks = locks?;
    // A map that can't be opened was removed by hand.
    let members = layouts.iter().map(|pins| splice_members(pins).unwrap_or(0));
    let members: usize = members.sum();
    if members > 0 && !args.force {
        bail!(
            "{members} sockets of spliced connections are open (see `shunt sockets`), and what \
             their readers have not read yet would be lost: take them back to TCP with `shunt \
             splice off` while an agent runs, close them, or use --force"
        );
    }
    for pins in layouts {
        pins.remove()?;
        print(&format!("Removed {}.", pins.directory().display()))?;
    }
    Ok(())
}
