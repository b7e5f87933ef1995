//! What is attached, for people.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aya_obj::generated::bpf_attach_type::BPF_SK_MSG_VERDICT;
use shunt_common::map;

use super::loader::PROGRAMS;
use super::pins::Pins;
use super::sys;

/// How deep below the cgroup root a directory is searched for by its id.
const MAX_DEPTH: u32 = 4;

/// One of shunt's programs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProgramState {
    /// Its name.
    pub name: &'static str,
    /// Where it is attached, if it is.
    pub attachment: Option<Attachment>,
}

/// Where a program is attached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Attachment {
    /// To a cgroup, by a link.
    Cgroup {
        /// Id of the program.
        program_id: u32,
        /// Id of the link.
        link_id: u32,
        /// Id of the cgroup; 0 once it is gone.
        cgroup_id: u64,
    },
    /// To a function or tracepoint of the kernel that is called like the program.
    Kernel {
        /// Id of the program.
        program_id: u32,
        /// Id of the link.
        link_id: u32,
    },
    /// To the map of spliced sockets.
    Map {
        /// Id of the program.
        program_id: u32,
    },
}

/// All programs, in the order of their attachment.
pub fn programs(pins: &Pins) -> Vec<ProgramState> {
    let state = |name: &'static str, is_sk_msg: bool| {
        let attachment = if is_sk_msg {
            on_map(pins)
        } else {
            by_link(pins, name)
        };
        ProgramState {
            name,
            attachment: attachment.ok().flatten(),
        }
    };
    PROGRAMS
        .iter()
        .map(|row| state(row.name, row.name == "redirect"))
        .collect()
}

/// The directory of a cgroup, by its id; only the upper levels are searched.
pub fn cgroup_path(root: &Path, id: u64) -> Option<PathBuf> {
    find(root, id, 0)
}

fn find(directory: &Path, id: u64, depth: u32) -> Option<PathBuf> {
    if fs::metadata(directory).ok()?.ino() == id {
        return Some(directory.to_owned());
    }
    if depth == MAX_DEPTH {
        return None;
    }
    let entries = fs::read_dir(directory).ok()?.flatten();
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories
        .into_iter()
        .find_map(|entry| find(&entry.path(), id, depth + 1))
}

fn by_link(pins: &Pins, program: &str) -> io::Result<Option<Attachment>> {
    let link = sys::open_pinned(&pins.link(program))?;
    let info = sys::link_info(link.as_fd())?;
    let (program_id, link_id) = (info.program_id, info.link_id);
    Ok(Some(match info.cgroup_id {
        Some(cgroup_id) => Attachment::Cgroup {
            program_id,
            link_id,
            cgroup_id,
        },
        None => Attachment::Kernel {
            program_id,
            link_id,
        },
    }))
}

fn on_map(pins: &Pins) -> io::Result<Option<Attachment>> {
    let map = sys::open_pinned(&pins.map(map::SPLICE))?;
    let programs = sys::attached_programs(map.as_fd(), BPF_SK_MSG_VERDICT as u32)?;
    Ok(programs
        .first()
        .map(|id| Attachment::Map { program_id: *id }))
}
