//! Builds the BPF programs and puts the object where `bpf` includes it from.
//!
//! aya-build would do this, but it only knows rustup's nightly; shunt also
//! builds with a distribution's compiler (see the crate `ebpf-toolchain`).

use std::path::PathBuf;
use std::process::Command;

use ebpf_toolchain::{Compiler, TARGET, find_linker};

fn main() {
    if let Err(error) = build() {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), Box<dyn std::error::Error>> {
    for input in ["../common", "../ebpf-programs", "../Cargo.lock"] {
        println!("cargo::rerun-if-changed={input}");
    }
    println!("cargo::rerun-if-env-changed=PATH");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);

    let compiler = Compiler::find()?;
    find_linker()?;
    // A target directory of its own: the outer cargo holds the lock of the other.
    let target = out.join("bpf");
    let mut cargo = compiler.cargo("build");
    cargo
        .args(["--package", "ebpf-programs", "--release", "--target-dir"])
        .arg(&target);
    run(&mut cargo)?;

    let object = target.join(TARGET).join("release/shunt-bpf");
    std::fs::copy(&object, out.join("shunt-bpf.o"))?;
    Ok(())
}

fn run(command: &mut Command) -> Result<(), Box<dyn std::error::Error>> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        println!("cargo::warning={line}");
    }
    Err(format!(
        "building the BPF programs failed ({}): {command:?}",
        output.status
    )
    .into())
}
