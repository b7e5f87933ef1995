//! Loads the object, adopts pinned maps, attaches and pins the programs.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{MapInfo, SockHash};
use aya::programs::links::FdLink;
use aya::programs::{CgroupAttachMode, Program, ProgramError};
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_obj::generated::bpf_attach_type::BPF_CGROUP_SETSOCKOPT;
use shunt_common::{
    Affinity, AffinityKey, Connection, EndKey, Flows, Health, HealthConfig, HealthKey, Heartbeat,
    LeftAlone, LoadKey, Node, Pair, ProbeKey, ServiceCounts, ServiceEntry, ServiceKey, ServiceName,
    Slot, SlotKey, SocketKey, SpliceConfig, SpliceMode, UdpClient, map,
};

use super::cgroup::{Cgroup, CgroupError};
use super::features::{Features, MissingFeature, Splicing};
use super::manage::Manage;
use super::pins::Pins;
use super::{splice_calls, sys};

/// The object that build.rs made.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/shunt-bpf.o"));

/// A program and what it is for. They are attached in this order: what a call
/// relies on comes before the hooks that translate it.
pub(super) struct ProgramRow {
    pub(super) name: &'static str,
    purpose: Purpose,
}

/// What a program is for. Without those for routing there is no shunt; it goes on
/// without the others where the kernel refuses them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Purpose {
    Routing,
    /// It notices what does not answer.
    Health,
    Splicing,
    /// It leaves marks on sockets that are spliced, and costs all others a little:
    /// it is only attached while any may be.
    Marking,
    /// The same for splice(2), as far as this kernel lets it: see
    /// [`splice_calls`].
    WatchingCalls,
}

const fn row(name: &'static str, purpose: Purpose) -> ProgramRow {
    ProgramRow { name, purpose }
}

const fn routing(name: &'static str) -> ProgramRow {
    row(name, Purpose::Routing)
}

pub(super) const PROGRAMS: [ProgramRow; 15] = [
    row("redirect", Purpose::Splicing),
    row("setsockopt", Purpose::Marking),
    row("tcp_splice_read", Purpose::WatchingCalls),
    row("sys_enter", Purpose::WatchingCalls),
    row("sock_ops", Purpose::Splicing),
    row("watch_connects", Purpose::Health),
    routing("sock_release"),
    routing("getpeername4"),
    routing("getpeername6"),
    routing("recvmsg4"),
    routing("recvmsg6"),
    routing("sendmsg4"),
    routing("sendmsg6"),
    routing("connect4"),
    routing("connect6"),
];

/// Run by the agent, and attached to nothing.
const MANAGE: &str = "manage";

/// Name, key size and value size of each pinned map, bytes.
const MAPS: &[(&str, usize, usize)] = &[
    (
        map::SERVICES,
        size_of::<ServiceKey>(),
        size_of::<ServiceEntry>(),
    ),
    (map::SLOTS, size_of::<SlotKey>(), size_of::<Slot>()),
    (
        map::NAMES,
        size_of::<ServiceKey>(),
        size_of::<ServiceName>(),
    ),
    (
        map::SERVICE_COUNTS,
        size_of::<ServiceKey>(),
        size_of::<ServiceCounts>(),
    ),
    (map::NODE, 4, size_of::<Node>()),
    (map::HEARTBEAT, 4, size_of::<Heartbeat>()),
    (map::COUNTERS, 4, size_of::<u64>()),
    (map::CONNECTIONS, 4, size_of::<Connection>()),
    (map::UDP_CLIENTS, 8, size_of::<UdpClient>()),
    (map::FLOWS, 4, size_of::<Flows>()),
    (
        map::AFFINITY,
        size_of::<AffinityKey>(),
        size_of::<Affinity>(),
    ),
    (map::LEFT_ALONE, size_of::<u64>(), size_of::<LeftAlone>()),
    (map::LOADS, size_of::<LoadKey>(), size_of::<u64>()),
    (map::HEALTH, size_of::<HealthKey>(), size_of::<Health>()),
    (map::PROBES, size_of::<ProbeKey>(), size_of::<u32>()),
    (map::HEALTH_GATE, 4, size_of::<u64>()),
    (map::HEALTH_CONFIG, 4, size_of::<HealthConfig>()),
    (map::HEALTH_EVENTS, 0, 0),
    (map::NAMESPACES, 16, size_of::<u64>()),
    (map::ADDRESSES, size_of::<u64>(), 16),
    (map::CLIENTS, size_of::<SocketKey>(), size_of::<u64>()),
    (map::ENDS, 4, size_of::<EndKey>()),
    (map::PAIRS, size_of::<u64>(), size_of::<Pair>()),
    (map::WISHES, 16, size_of::<u32>()),
    (map::SPLICE_CONFIG, 4, size_of::<SpliceConfig>()),
    (map::SPLICE_SWITCH, 4, size_of::<u32>()),
    (map::SPLICE_EVENTS, 0, 0),
    (map::SPLICERS, size_of::<u64>(), size_of::<u64>()),
    (map::SPLICE, size_of::<EndKey>(), 4),
];

/// Loads the programs of one node.
pub struct Loader<'a> {
    pins: &'a Pins,
    features: &'a Features,
}

/// Loaded programs whose maps are pinned.
pub struct Loaded {
    ebpf: Ebpf,
    splicing: Splicing,
    can_refuse: bool,
    /// Why connects are not watched, if they are not.
    unwatched: Option<String>,
}

/// Why the programs are not loaded or attached.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel lacks something.
    #[error(transparent)]
    Missing(#[from] MissingFeature),
    /// The cgroup can't be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The object or its maps.
    #[error("cannot load the BPF object")]
    Object(#[source] EbpfError),
    /// The object has no such program or map: it is from another build.
    #[error("the BPF object has no {0}")]
    Absent(&'static str),
    /// A program was refused.
    #[error("the kernel refused the program {program}: please report this with its log")]
    Program {
        /// The program.
        program: &'static str,
        /// The verifier's log.
        #[source]
        source: Box<ProgramError>,
    },
    /// A pinned map has another layout.
    #[error(
        "the pinned map {path} has another layout, of another build with the same layout version: \
         remove it with `shunt uninstall`"
    )]
    Layout {
        /// The pin.
        path: PathBuf,
    },
    /// A link can't be made, replaced or pinned.
    #[error("cannot {action} the link of {program}")]
    Link {
        /// What was tried.
        action: &'static str,
        /// The program.
        program: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl<'a> Loader<'a> {
    /// A loader that pins at `pins`, for a kernel that has `features`.
    pub fn new(pins: &'a Pins, features: &'a Features) -> Self {
        Self { pins, features }
    }

    /// Loads the programs; maps that are pinned already are adopted.
    pub fn load(&self) -> Result<Loaded, LoadError> {
        self.features.require()?;
        self.check_layout()?;
        // The one sure way to know whether a helper can be used is to use it.
        match self.load_with(true) {
            Err(LoadError::Program { program, .. })
                if program.starts_with("connect") || program.starts_with("sendmsg") =>
            {
                self.load_with(false)
            }
            result => result,
        }
    }

    fn load_with(&self, can_refuse: bool) -> Result<Loaded, LoadError> {
        let splicing = self.features.splicing();
        let mut ebpf = self.load_object(can_refuse)?;
        for row in rows(|purpose| purpose == Purpose::Routing) {
            load_program(&mut ebpf, row.name)?;
        }
        let unwatched = if self.features.sock_ops {
            let mut health = rows(|purpose| purpose == Purpose::Health);
            let loaded = health.try_for_each(|row| load_program(&mut ebpf, row.name));
            loaded.err().map(|error| with_cause(&error))
        } else {
            Some("this kernel has no sock_ops programs".to_owned())
        };
        let splicing = match splicing {
            Splicing::Available(offsets) => match load_splice_programs(&mut ebpf) {
                Ok(()) => Splicing::Available(offsets),
                Err(error) => Splicing::Unavailable(error.to_string()),
            },
            unavailable => unavailable,
        };
        Ok(Loaded {
            ebpf,
            splicing,
            can_refuse,
            unwatched,
        })
    }

    fn load_object(&self, can_refuse: bool) -> Result<Ebpf, LoadError> {
        let can_refuse = u8::from(can_refuse);
        let host_netns = sys::netns_cookie().unwrap_or(0);
        let mut loader = EbpfLoader::new();
        loader
            .override_global("CAN_REFUSE", &can_refuse, true)
            .override_global("HOST_NETNS", &host_netns, true);
        loader.override_global("SYS_SPLICE", &splice_calls::NUMBER, true);
        if let Ok(offsets) = &self.features.offsets {
            for (global, flag) in &offsets.flags {
                loader.override_global(global, flag, true);
            }
            for (global, offset) in &offsets.fields {
                loader.override_global(global, offset, true);
            }
        }
        for (name, _, _) in MAPS {
            loader.map_pin_path(name, self.pins.map(name));
        }
        loader.load(OBJECT).map_err(LoadError::Object)
    }

    /// aya takes whatever is pinned under the name of a map. A value that is
    /// larger than ours would be copied beyond our buffer.
    fn check_layout(&self) -> Result<(), LoadError> {
        for (name, key_size, value_size) in MAPS.iter().copied() {
            let path = self.pins.map(name);
            let Ok(info) = MapInfo::from_pin(&path) else {
                continue;
            };
            let sizes = (info.key_size() as usize, info.value_size() as usize);
            if sizes != (key_size, value_size) {
                return Err(LoadError::Layout { path });
            }
        }
        Ok(())
    }
}

impl Loaded {
    /// Whether connections can be spliced.
    pub fn splicing(&self) -> &Splicing {
        &self.splicing
    }

    /// Why dead endpoints are not noticed, if they are not.
    pub fn unwatched(&self) -> Option<&str> {
        self.unwatched.as_deref()
    }

    /// Whether a connect can be refused with ECONNREFUSED.
    pub fn can_refuse(&self) -> bool {
        self.can_refuse
    }

    /// Whether the host's network namespace is known.
    pub fn knows_host(&self) -> bool {
        sys::netns_cookie().is_ok()
    }

    /// The program that does what the agent asks for with pairs.
    pub fn manage(&self) -> Result<Manage, LoadError> {
        let Some(Program::SchedClassifier(program)) = self.ebpf.program(MANAGE) else {
            return Err(LoadError::Absent(MANAGE));
        };
        let program = program.fd().and_then(|fd| Ok(fd.try_clone()?));
        let program = program.map_err(|source| refused(MANAGE, source))?;
        Ok(Manage::new(program))
    }

    /// Attaches every program below `cgroup` and pins its link; in links that
    /// are pinned already the program is replaced. Those that leave marks are not
    /// attached if nothing is to be spliced, but replaced all the same, until
    /// [`stop_marking`].
    pub fn attach(
        &mut self,
        cgroup: &Cgroup,
        pins: &Pins,
        mode: SpliceMode,
    ) -> Result<(), LoadError> {
        let can_splice = matches!(self.splicing, Splicing::Available(_));
        for row in &PROGRAMS {
            let pin = pins.link(row.name);
            let is_wanted = match row.purpose {
                Purpose::Routing => true,
                Purpose::Health => self.unwatched.is_none(),
                Purpose::Splicing => can_splice,
                Purpose::Marking => can_splice && (mode != SpliceMode::Off || pin.exists()),
                Purpose::WatchingCalls => false,
            };
            if is_wanted {
                self.attach_one(row.name, cgroup, &pin)?;
            }
        }
        Ok(())
    }

    /// Attaches what sees splice(2) and says what it is called.
    ///
    /// # Errors
    ///
    /// Why this kernel does not let it, in words.
    pub fn watch_splice_calls(&mut self, pins: &Pins) -> Result<&'static str, String> {
        splice_calls::watch(&mut self.ebpf, pins)
    }

    fn attach_one(
        &mut self,
        name: &'static str,
        cgroup: &Cgroup,
        pin: &Path,
    ) -> Result<(), LoadError> {
        if let Program::SkMsg(_) = program(&mut self.ebpf, name)? {
            return self.attach_to_sockhash(name);
        }
        let program = program(&mut self.ebpf, name)?;
        if let Ok(link) = sys::open_pinned(pin) {
            let failed = |source| LoadError::Link {
                action: "replace the program in",
                program: name,
                source,
            };
            let info = sys::link_info(link.as_fd()).map_err(failed)?;
            if info.cgroup_id == Some(cgroup.id()) {
                let fd = program.fd().map_err(|source| refused(name, source))?;
                return sys::update_link(link.as_fd(), fd.as_fd()).map_err(failed);
            }
        }
        let link = attach_to_cgroup(program, cgroup, name)?;
        pin_link(link, name, pin)
    }

    /// The attachment lives as long as the map, and replaces an earlier one.
    /// Sockets that are in the map keep the program that they got when they
    /// were inserted (`sock_map_link` in `net/core/sock_map.c`).
    fn attach_to_sockhash(&mut self, name: &'static str) -> Result<(), LoadError> {
        let map = self
            .ebpf
            .map(map::SPLICE)
            .ok_or(LoadError::Absent(map::SPLICE))?;
        let map = SockHash::<_, EndKey>::try_from(map)
            .map_err(|error| LoadError::Object(error.into()))?;
        let failed = |source| LoadError::Link {
            action: "make",
            program: name,
            source,
        };
        let fd = map.fd().try_clone().map_err(failed)?;
        let Program::SkMsg(program) = program(&mut self.ebpf, name)? else {
            return Err(LoadError::Absent(name));
        };
        let id = program
            .attach(&fd)
            .map_err(|source| refused(name, source))?;
        let link = program
            .take_link(id)
            .map_err(|source| refused(name, source))?;
        // Dropping it would detach the program.
        std::mem::forget(link);
        Ok(())
    }
}

/// Detaches what leaves marks on sockets, since none is spliced.
pub fn stop_marking(pins: &Pins) -> io::Result<()> {
    for row in rows(|purpose| purpose == Purpose::Marking) {
        match fs::remove_file(pins.link(row.name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    ignore_splice_calls(pins)
}

/// Detaches what sees splice(2).
pub fn ignore_splice_calls(pins: &Pins) -> io::Result<()> {
    splice_calls::ignore(pins)
}

fn rows(wanted: impl Fn(Purpose) -> bool) -> impl Iterator<Item = &'static ProgramRow> {
    PROGRAMS.iter().filter(move |row| wanted(row.purpose))
}

/// An error and what the kernel said.
fn with_cause(error: &LoadError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

fn load_splice_programs(ebpf: &mut Ebpf) -> Result<(), LoadError> {
    rows(|purpose| matches!(purpose, Purpose::Splicing | Purpose::Marking))
        .map(|row| row.name)
        .chain([MANAGE])
        .try_for_each(|name| load_program(ebpf, name))
}

fn load_program(ebpf: &mut Ebpf, name: &'static str) -> Result<(), LoadError> {
    let loaded = match program(ebpf, name)? {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockopt(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::SkMsg(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => return Err(LoadError::Absent(name)),
    };
    loaded.map_err(|source| refused(name, source))
}

fn attach_to_cgroup(
    program: &mut Program,
    cgroup: &Cgroup,
    name: &'static str,
) -> Result<NewLink, LoadError> {
    let file = cgroup.file()?;
    // A bpf_link without flags, which coexists with the links of others.
    let mode = CgroupAttachMode::Single;
    let link = match program {
        Program::CgroupSockAddr(program) => {
            let link = program
                .attach(file, mode)
                .and_then(|id| program.take_link(id));
            link.map(|link| link.try_into().map_err(io::Error::other))
        }
        Program::CgroupSock(program) => {
            let link = program
                .attach(file, mode)
                .and_then(|id| program.take_link(id));
            link.map(|link| link.try_into().map_err(io::Error::other))
        }
        // aya gives the links of these no way to be pinned.
        Program::CgroupSockopt(program) => {
            let program = program.fd().map_err(|source| refused(name, source))?;
            let link = sys::create_link(program.as_fd(), file.as_fd(), BPF_CGROUP_SETSOCKOPT);
            return link.map(NewLink::Own).map_err(|source| LoadError::Link {
                action: "make",
                program: name,
                source,
            });
        }
        Program::SockOps(program) => {
            let link = program
                .attach(file, mode)
                .and_then(|id| program.take_link(id));
            link.map(|link| link.try_into().map_err(io::Error::other))
        }
        _ => return Err(LoadError::Absent(name)),
    };
    link.map_err(|source| refused(name, source))?
        .map(NewLink::Aya)
        .map_err(|source| LoadError::Link {
            action: "make",
            program: name,
            source,
        })
}

/// A link that ends with this process until it is pinned.
pub(super) enum NewLink {
    Aya(FdLink),
    Own(OwnedFd),
}

impl NewLink {
    fn pin(self, path: &Path) -> io::Result<()> {
        match self {
            Self::Aya(link) => link.pin(path).map(drop).map_err(io::Error::other),
            Self::Own(link) => sys::pin(link.as_fd(), path),
        }
    }
}

/// Pins under the final name by renaming, so that an older link, which this
/// one replaces, is detached only when the new one is in place.
pub(super) fn pin_link(link: NewLink, name: &'static str, pin: &Path) -> Result<(), LoadError> {
    let failed = |source| LoadError::Link {
        action: "pin",
        program: name,
        source,
    };
    // A bpffs has no names with a dot (`bpf_lookup` in `kernel/bpf/inode.c`).
    let temporary = pin.with_file_name(format!("new-{name}"));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    link.pin(&temporary).map_err(failed)?;
    fs::rename(&temporary, pin).map_err(failed)
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Program, LoadError> {
    ebpf.program_mut(name).ok_or(LoadError::Absent(name))
}

fn refused(program: &'static str, source: ProgramError) -> LoadError {
    LoadError::Program {
        program,
        source: Box::new(source),
    }
}
