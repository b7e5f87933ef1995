//! `cargo xtask image`: shunt's container image as an OCI archive.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use lab::image::Image;

use crate::build::{Profile, binaries};
use crate::command::announce;

/// Where to write it.
#[derive(Args, Debug)]
pub(crate) struct ImageArgs {
    /// The archive.
    #[arg(long, value_name = "FILE", default_value = "target/shunt-image.tar")]
    output: PathBuf,
}

/// What the image may hold at most.
const MAX_BYTES: u64 = 40 << 20;

/// Builds the program and writes the archive.
pub(crate) fn run(args: &ImageArgs) -> Result<()> {
    let shunt = binaries(Profile::Image)?.shunt;
    let bytes = shunt.metadata().context("look at the program")?.len();
    ensure!(
        bytes < MAX_BYTES,
        "the program has {bytes} bytes: an image of that size is not wanted on every node"
    );
    announce(&format!("writing {}", args.output.display()));
    let image = Image::of_shunt(&shunt)?;
    image.write(&args.output)?;
    println!("{}: {}", image.name, args.output.display());
    println!(
        "into a registry: skopeo copy oci-archive:{} docker://REGISTRY/shunt:{}",
        args.output.display(),
        env!("CARGO_PKG_VERSION")
    );
    Ok(())
}
