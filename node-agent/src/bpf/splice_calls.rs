//! Watches splice(2), by the one of two programs that this kernel lets in; see
//! `ebpf-programs/src/splice_calls.rs`.

use std::fs;
use std::io;

use aya::programs::{Program, ProgramError};
use aya::{Btf, Ebpf};

use super::loader::{NewLink, pin_link};
use super::pins::Pins;

/// Of the system call, on this architecture.
pub(super) static NUMBER: u64 = libc::SYS_splice.cast_unsigned();

/// Sees the calls for TCP sockets, and only those.
const FUNCTION: &str = "tcp_splice_read";
/// Sees all system calls of the node.
const TRACEPOINT: &str = "sys_enter";

/// Attaches one of the programs, the better one if it can be, in place of whatever
/// an earlier agent has attached; says which.
///
/// # Errors
///
/// Why neither can be, in words.
pub(super) fn watch(ebpf: &mut Ebpf, pins: &Pins) -> Result<&'static str, String> {
    let mut failures = Vec::new();
    for (name, other) in [(FUNCTION, TRACEPOINT), (TRACEPOINT, FUNCTION)] {
        let result = attach(ebpf, name).and_then(|link| {
            pin_link(link, name, &pins.link(name)).map_err(|error| error.to_string())
        });
        match result {
            Ok(()) => {
                remove(pins, other).map_err(|error| error.to_string())?;
                return Ok(name);
            }
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    Err(failures.join("; "))
}

/// Detaches them.
pub(super) fn ignore(pins: &Pins) -> io::Result<()> {
    remove(pins, FUNCTION)?;
    remove(pins, TRACEPOINT)
}

/// Which one is attached.
pub fn watched_by(pins: &Pins) -> Option<&'static str> {
    [FUNCTION, TRACEPOINT]
        .into_iter()
        .find(|name| pins.link(name).exists())
}

fn remove(pins: &Pins, name: &str) -> io::Result<()> {
    match fs::remove_file(pins.link(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn attach(ebpf: &mut Ebpf, name: &'static str) -> Result<NewLink, String> {
    let words = |error: ProgramError| match error {
        // The verifier's log is long, and the errno says enough here.
        ProgramError::LoadError { io_error, .. } => io_error.to_string(),
        other => other.to_string(),
    };
    match ebpf.program_mut(name) {
        Some(Program::FEntry(program)) => {
            let btf = Btf::from_sys_fs().map_err(|error| error.to_string())?;
            program.load(name, &btf).map_err(words)?;
            let id = program.attach().map_err(words)?;
            let link = program.take_link(id).map_err(words)?;
            Ok(NewLink::Aya(link.into()))
        }
        Some(Program::RawTracePoint(program)) => {
            program.load().map_err(words)?;
            let id = program.attach(name).map_err(words)?;
            let link = program.take_link(id).map_err(words)?;
            Ok(NewLink::Aya(link.into()))
        }
        _ => Err("the BPF object has no such program".to_owned()),
    }
}
