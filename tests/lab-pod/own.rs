//! A process that owns a lab, for tests that kill such a one.

use std::io::{self, Read};

use anyhow::{Context, Result};

use lab::{Lab, Place};

use crate::socket;

pub(crate) fn run(label: &str) -> Result<()> {
    let mut lab = Lab::new(label)?;
    let node = lab.node("n1")?;
    lab.node("n2")?;
    let pod = node.pod("web", None)?;
    let _server = pod.serve("0.0.0.0:80", "web")?;
    socket::print(&lab.name())?;
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("wait for the end of standard input")?;
    Ok(())
}
