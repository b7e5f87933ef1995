//! What this kernel and this process can do, found by trying.

use std::fs;

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::{is_map_supported, is_program_supported};
use nix::unistd::Uid;

use super::offsets::Offsets;

/// The result of the probes.
#[derive(Clone, Debug)]
pub struct Features {
    /// Programs of type cgroup_sock_addr: the connect and getpeername hooks.
    pub sock_addr: bool,
    /// Socket storage maps.
    pub socket_storage: bool,
    /// Programs of type sock_ops.
    pub sock_ops: bool,
    /// Programs of type sk_msg and the map that they work on.
    pub sk_msg: bool,
    /// Offsets in the kernel's structs, or why they are not known.
    pub offsets: Result<Offsets, String>,
}

/// Whether connections can be spliced.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Splicing {
    /// They can, with these offsets.
    Available(Offsets),
    /// They stay plain TCP, for this reason.
    Unavailable(String),
}

/// Something that shunt can't do without.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MissingFeature {
    /// Not root.
    #[error(
        "shunt needs root, or the capabilities CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: run it \
         with sudo, or as a privileged container"
    )]
    Privileges,
    /// An old or small kernel.
    #[error(
        "this kernel has no {what} ({config}): shunt needs Linux {since} or newer, built with \
         {config}; kube-proxy goes on alone"
    )]
    Kernel {
        /// The feature.
        what: &'static str,
        /// The kernel's build option.
        config: &'static str,
        /// The first kernel that has it.
        since: &'static str,
    },
}

impl Features {
    /// Tries each of them; takes a few milliseconds and needs privileges.
    pub fn probe() -> Self {
        let program = |program_type| is_program_supported(program_type).unwrap_or(false);
        let map = |map_type| is_map_supported(map_type).unwrap_or(false);
        Self {
            sock_addr: program(ProgramType::CgroupSockAddr),
            socket_storage: map(MapType::SkStorage),
            sock_ops: program(ProgramType::SockOps),
            sk_msg: program(ProgramType::SkMsg) && map(MapType::SockHash),
            offsets: Offsets::of_kernel().map_err(|error| error.to_string()),
        }
    }

    /// Fails if routing is not possible.
    pub fn require(&self) -> Result<(), MissingFeature> {
        if !self.sock_addr {
            let what = "BPF programs for connect() (type cgroup_sock_addr)";
            return Err(MissingFeature::Kernel {
                what,
                config: "CONFIG_CGROUP_BPF",
                since: "5.10",
            });
        }
        if !self.socket_storage {
            let what = "BPF socket storage";
            return Err(MissingFeature::Kernel {
                what,
                config: "CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF",
                since: "5.10",
            });
        }
        Ok(())
    }

    /// Whether splicing is possible, and if not, why.
    pub fn splicing(&self) -> Splicing {
        if !self.sock_ops {
            return Splicing::Unavailable("this kernel has no sock_ops programs".to_owned());
        }
        if !self.sk_msg {
            let reason = "this kernel has no sk_msg programs (CONFIG_BPF_STREAM_PARSER)";
            return Splicing::Unavailable(reason.to_owned());
        }
        match &self.offsets {
            Ok(offsets) => Splicing::Available(offsets.clone()),
            Err(reason) => Splicing::Unavailable(reason.clone()),
        }
    }
}

/// Fails early with what to do, where the kernel would only say EPERM.
pub fn check_privileges() -> Result<(), MissingFeature> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    // Without /proc, only the user id is known.
    let enough =
        effective_capabilities(&status).map_or_else(|| Uid::effective().is_root(), suffice);
    if enough {
        Ok(())
    } else {
        Err(MissingFeature::Privileges)
    }
}

/// Whether this process may enter the network namespaces of all others: they are
/// found through `/proc/PID/ns`, which the kernel guards as it does ptrace(2).
/// Without /proc, that is not known, and taken to be so.
pub fn may_enter_namespaces() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let (sys_ptrace, sys_admin) = (19, 21);
    effective_capabilities(&status)
        .is_none_or(|it| it >> sys_ptrace & 1 == 1 && it >> sys_admin & 1 == 1)
}

/// Numbers of `include/uapi/linux/capability.h`. CAP_SYS_ADMIN stands for
/// CAP_BPF and CAP_PERFMON (capabilities(7)).
fn suffice(capabilities: u64) -> bool {
    let has = |number: u32| capabilities >> number & 1 == 1;
    let (net_admin, sys_admin, perfmon, bpf) = (12, 21, 38, 39);
    has(net_admin) && (has(sys_admin) || has(perfmon) && has(bpf))
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFSETS: Offsets = Offsets {
        fields: Vec::new(),
        flags: Vec::new(),
    };

    fn all() -> Features {
        Features {
            sock_addr: true,
            socket_storage: true,
            sock_ops: true,
            sk_msg: true,
            offsets: Ok(OFFSETS),
        }
    }

    #[test]
    fn a_kernel_without_connect_hooks_is_refused_with_what_it_needs() {
        let error = Features {
            sock_addr: false,
            ..all()
        }
        .require()
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("cgroup_sock_addr") && error.contains("CONFIG_CGROUP_BPF"),
            "{error}"
        );
        let error = Features {
            socket_storage: false,
            ..all()
        }
        .require()
        .unwrap_err();
        assert!(error.to_string().contains("socket storage"), "{error}");
    }

    #[test]
    fn a_kernel_without_splicing_still_routes_and_says_why() {
        for (features, reason) in [
            (
                Features {
                    sock_ops: false,
                    ..all()
                },
                "sock_ops",
            ),
            (
                Features {
                    sk_msg: false,
                    ..all()
                },
                "sk_msg",
            ),
            (
                Features {
                    offsets: Err("no BTF".to_owned()),
                    ..all()
                },
                "no BTF",
            ),
        ] {
            features.require().unwrap();
            let Splicing::Unavailable(why) = features.splicing() else {
                panic!("{features:?}")
            };
            assert!(why.contains(reason), "{why}");
        }
        assert_eq!(all().splicing(), Splicing::Available(OFFSETS));
    }

    #[test]
    fn root_or_three_capabilities_suffice() {
        let bit = |number: u32| 1_u64 << number;
        assert!(suffice(bit(12) | bit(21)));
        assert!(suffice(bit(12) | bit(38) | bit(39)));
        assert!(!suffice(bit(12) | bit(39)) && !suffice(bit(21)) && !suffice(0));
        assert_eq!(
            effective_capabilities("Name:\tx\nCapEff:\t0000000000001000\n"),
            Some(0x1000)
        );
    }
}
