//! `shunt splice`.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use super::{PinsArgs, print};
use crate::bpf::{KernelMaps, check_privileges, splice_members};

/// Shows whether connections are spliced, or switches that off or on, at once
/// and for all connections of this node. What was switched off stays so until it
/// is switched on again, also if the agent restarts.
#[derive(Args, Debug)]
pub(super) struct SpliceArgs {
    /// Off: take all connections back to TCP, and splice no more. On: splice again.
    #[arg(value_enum, value_name = "ON|OFF")]
    switch: Option<Switch>,
    #[command(flatten)]
    pins: PinsArgs,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Switch {
    Off,
    On,
}

/// How long to wait for all connections to be back.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn splice(args: &SpliceArgs) -> Result<()> {
    check_privileges()?;
    let pins = args.pins.pins();
    pins.require()?;
    let mut maps = KernelMaps::open(&pins)?;
    match args.switch {
        None => {
            let state = if maps.is_switched_off()? { "off" } else { "on" };
            let members = splice_members(&pins)?;
            return print(&format!("{state}, {members} sockets in the splice"));
        }
        Some(switch) => maps.switch(switch == Switch::Off)?,
    }
    if args.switch == Some(Switch::On) {
        return print("The splice is on.");
    }
    let start = Instant::now();
    loop {
        let members = splice_members(&pins)?;
        if members == 0 {
            return print("The splice is off; all connections are plain TCP.");
        }
        if start.elapsed() > PATIENCE {
            bail!(
                "the splice is off for what comes, but {members} sockets are still in it: their \
                 readers have not read what was sent to them, or no agent is running (see \
                 `shunt status` and `shunt sockets`)"
            );
        }
        thread::sleep(LOOK);
    }
}
