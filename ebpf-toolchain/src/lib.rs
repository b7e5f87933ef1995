//! Finds a Rust toolchain that can build BPF programs.
//!
//! Two are known, and `cargo xtask setup` installs whichever the machine has
//! packages for:
//! - Debian's `rustc-web` with `libstd-rust-web-dev-bpf`, which ships a core
//!   library that is already built for the BPF targets;
//! - rustup's nightly with `rust-src`, which builds core itself.
//!
//! Both link with [bpf-linker], whose LLVM must not be older than rustc's.
//! Used by `node-agent/build.rs` and by xtask, so that both mean the same one.
//!
//! [bpf-linker]: https://github.com/aya-rs/bpf-linker

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The BPF target of a little-endian machine.
pub const TARGET: &str = "bpfel-unknown-none";

/// Where Debian's packages put their compiler.
const SYSTEM_RUSTC: &str = "/usr/bin/rustc";

/// A compiler that can build for [`TARGET`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Compiler {
    /// A rustc with a ready-made core library for BPF.
    Prebuilt {
        /// Path of the compiler.
        rustc: PathBuf,
    },
    /// rustup's nightly with the source of core.
    Nightly,
}

/// What has to be there before the BPF programs can be built, and is not.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Missing {
    /// Neither of the two compilers.
    Compiler,
    /// The linker.
    Linker,
}

impl Compiler {
    /// Finds one; the ready-made core library is preferred, since it is
    /// released and not a nightly.
    pub fn find() -> Result<Self, Missing> {
        let rustc = PathBuf::from(SYSTEM_RUSTC);
        if has_prebuilt_core(&rustc) {
            return Ok(Self::Prebuilt { rustc });
        }
        if nightly_has_source() {
            return Ok(Self::Nightly);
        }
        Err(Missing::Compiler)
    }

    /// A cargo command for the BPF target: `subcommand` is `build` or `clippy`.
    /// The caller adds package, target directory and profile.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut cargo = match self {
            Self::Prebuilt { rustc } => {
                let mut cargo = Command::new("cargo");
                cargo.env("RUSTC", rustc);
                // aya-ebpf uses feature(asm_experimental_arch), and a released
                // compiler accepts features only with this.
                cargo.env("RUSTC_BOOTSTRAP", "1");
                cargo.args([subcommand, "--target", TARGET]);
                cargo
            }
            Self::Nightly => {
                let mut cargo = Command::new("rustup");
                cargo.args(["run", "nightly", "cargo", subcommand, "--target", TARGET]);
                cargo.args(["-Z", "build-std=core"]);
                cargo.env_remove("RUSTC");
                cargo
            }
        };
        // Set by an outer cargo; they would override the choice made here.
        cargo.env_remove("RUSTC_WORKSPACE_WRAPPER");
        cargo.env_remove("RUSTC_WRAPPER");
        cargo.env_remove("RUSTUP_TOOLCHAIN");
        cargo.env("CARGO_ENCODED_RUSTFLAGS", rust_flags());
        // What is inlined differs, and then the verifier refuses connect4.
        cargo.env("CARGO_INCREMENTAL", "0");
        cargo
    }
}

/// Whether bpf-linker can be run.
pub fn find_linker() -> Result<(), Missing> {
    match Command::new("bpf-linker").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(()),
        _ => Err(Missing::Linker),
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Compiler => {
                "no Rust compiler for BPF was found: run `cargo xtask setup`, or install \
                 Debian's rustc-web and libstd-rust-web-dev-bpf, or `rustup toolchain install \
                 nightly --component rust-src`"
            }
            Self::Linker => {
                "bpf-linker was not found on PATH: run `cargo xtask setup`, or \
                 `cargo install bpf-linker`"
            }
        })
    }
}

impl std::error::Error for Missing {}

fn rust_flags() -> OsString {
    // aya-ebpf's bindings choose a few structs by the machine they will run on.
    let arch = std::env::consts::ARCH;
    let flags = [
        format!("--cfg=bpf_target_arch=\"{arch}\""),
        "-Clinker=bpf-linker".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        "-Cdebuginfo=2".to_owned(),
    ];
    flags.join("\x1f").into()
}

fn has_prebuilt_core(rustc: &Path) -> bool {
    let arguments = ["--print", "target-libdir", "--target", TARGET];
    let Some(directory) = stdout_of(Command::new(rustc).args(arguments)) else {
        return false;
    };
    let Ok(entries) = std::fs::read_dir(directory) else {
        return false;
    };
    entries
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-"))
}

fn nightly_has_source() -> bool {
    let mut rustc = Command::new("rustup");
    rustc.args(["run", "nightly", "rustc", "--print", "sysroot"]);
    stdout_of(&mut rustc).is_some_and(|sysroot| {
        Path::new(&sysroot)
            .join("lib/rustlib/src/rust/library/core")
            .is_dir()
    })
}

fn stdout_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    if !output.status.success() {
        return None;
    }
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
