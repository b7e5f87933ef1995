//! The table of what shunt's development needs.

use std::path::Path;

use ebpf_toolchain::Compiler;
use lab::{cluster, kubernetes};

use super::services;
use crate::command::{is_installed, succeeds};

/// Which kind of work needs something.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Need {
    /// Everything that compiles the agent.
    Build,
    /// Linting.
    Lint,
    /// The lab: root tests, demo and benchmarks.
    Lab,
    /// The tests beside the lab.
    Test,
    /// Real programs, in a test and in a benchmark.
    Programs,
    /// A real Kubernetes control plane and kube-proxy in the lab.
    Kubernetes,
    /// Real nodes, beside that.
    Cluster,
}

/// One thing that has to be there.
#[derive(Debug)]
pub(super) struct Requirement {
    pub(super) name: &'static str,
    /// What it is for.
    pub(super) purpose: &'static str,
    pub(super) need: Need,
    /// Whether it is there.
    pub(super) probe: fn() -> bool,
    pub(super) install: Install,
    /// What a person can do if it can't be installed from here.
    pub(super) advice: &'static str,
}

/// How to install it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Install {
    /// A Rust compiler for BPF: Debian's or rustup's nightly.
    Compiler,
    /// bpf-linker, with the LLVM that fits the compiler.
    Linker,
    /// clippy of the compiler for BPF.
    BpfClippy,
    /// A component of the toolchain in use.
    Component(&'static str),
    /// Debian packages.
    Packages(&'static [&'static str]),
    /// Kubernetes' own programs, from their Go modules in `tests/kube`.
    Kubernetes,
    /// The Go modules of `tests/programs/go`.
    GoModules,
    /// What the nodes of a cluster run, from their Go modules in `tests/kube`.
    Nodes,
    /// Not from here; what needs it fails by itself.
    ByHand,
}

/// Debian's compiler, with a core library that is built for BPF already.
pub(super) const COMPILER_PACKAGES: &[&str] = &["rustc-web", "libstd-rust-web-dev-bpf"];
/// What bpf-linker is built from, with the LLVM of that compiler.
pub(super) const LINKER_PACKAGES: &[&str] = &[
    "llvm-22-dev",
    "libpolly-22-dev",
    "zlib1g-dev",
    "libzstd-dev",
    "g++",
];
/// clippy of that compiler.
pub(super) const CLIPPY_PACKAGES: &[&str] = &["rust-web-clippy"];

/// Where Debian's package puts clippy.
pub(crate) const SYSTEM_CLIPPY: &str = "/usr/bin/clippy-driver";

pub(super) const REQUIREMENTS: &[Requirement] = &[
    Requirement {
        name: "BPF compiler",
        purpose: "compiles the BPF programs",
        need: Need::Build,
        probe: || Compiler::find().is_ok(),
        install: Install::Compiler,
        advice: "install Debian's rustc-web and libstd-rust-web-dev-bpf, or rustup and then \
                 `rustup toolchain install nightly --component rust-src`",
    },
    Requirement {
        name: "bpf-linker",
        purpose: "links the BPF programs",
        need: Need::Build,
        probe: || succeeds("bpf-linker", &["--version"]),
        install: Install::Linker,
        advice: "`cargo binstall bpf-linker`, or put a release of \
                 https://github.com/aya-rs/bpf-linker on the PATH",
    },
    Requirement {
        name: "rustfmt",
        purpose: "formats the sources",
        need: Need::Lint,
        probe: || succeeds("cargo", &["fmt", "--version"]),
        install: Install::Component("rustfmt"),
        advice: "`rustup component add rustfmt`",
    },
    Requirement {
        name: "clippy",
        purpose: "lints the sources",
        need: Need::Lint,
        probe: || succeeds("cargo", &["clippy", "--version"]),
        install: Install::Component("clippy"),
        advice: "`rustup component add clippy`",
    },
    Requirement {
        name: "clippy for BPF",
        purpose: "lints the BPF programs, with the compiler that builds them",
        need: Need::Lint,
        probe: has_bpf_clippy,
        install: Install::BpfClippy,
        advice: "install Debian's rust-web-clippy, or `rustup component add clippy --toolchain \
                 nightly`, whichever belongs to the BPF compiler",
    },
    Requirement {
        name: "ip",
        purpose: "makes the lab's network namespaces",
        need: Need::Lab,
        probe: || is_installed("ip"),
        install: Install::Packages(&["iproute2"]),
        advice: "install iproute2 (`ip` must be on the PATH)",
    },
    Requirement {
        name: "bpftool",
        purpose: "shows the tests what is in the kernel",
        need: Need::Lab,
        probe: || is_installed("bpftool"),
        install: Install::Packages(&["bpftool"]),
        advice: "install bpftool (some distributions have it in linux-tools)",
    },
    Requirement {
        name: "kubectl",
        purpose: "renders deploy/ in one test, which fails without it",
        need: Need::Test,
        probe: || is_installed("kubectl"),
        install: Install::ByHand,
        advice: "see https://kubernetes.io/docs/tasks/tools/",
    },
    Requirement {
        name: "dnsmasq",
        purpose: "answers names in the test of DNS",
        need: Need::Test,
        probe: || is_installed("dnsmasq"),
        install: Install::Packages(&["dnsmasq-base"]),
        advice: "install dnsmasq (`dnsmasq` must be on the PATH; it need not run)",
    },
    Requirement {
        name: "dig",
        purpose: "asks for names in the test of DNS",
        need: Need::Test,
        probe: || is_installed("dig"),
        install: Install::Packages(&["bind9-dnsutils"]),
        advice: "install dig (BIND's utilities)",
    },
    Requirement {
        name: "musl-gcc",
        purpose: "builds a program with musl's resolver for the test of DNS",
        need: Need::Test,
        probe: || is_installed("musl-gcc"),
        install: Install::Packages(&["musl-tools"]),
        advice: "install musl with its wrapper of gcc (`musl-gcc` must be on the PATH)",
    },
    Requirement {
        name: "real programs",
        purpose: "servers and clients that a test and a benchmark splice",
        need: Need::Programs,
        probe: services::are_installed,
        install: Install::Packages(services::PACKAGES),
        advice: "install redis-server, nginx, haproxy, memcached, postgresql, gunicorn, iperf3, \
                 curl, wrk, node, a JDK, and Python's requests and websockets; none needs to run",
    },
    Requirement {
        name: "Go modules",
        purpose: "what the programs of tests/programs/go are built from",
        need: Need::Programs,
        probe: services::has_go_modules,
        install: Install::GoModules,
        advice: "install Go 1.26 or newer (https://go.dev/doc/install) and run this again",
    },
    Requirement {
        name: "nft",
        purpose: "writes kube-proxy's rules, and shows them to tests",
        need: Need::Kubernetes,
        probe: || is_installed("nft"),
        install: Install::Packages(&["nftables"]),
        advice: "install nftables (`nft` must be on the PATH)",
    },
    Requirement {
        name: "iptables",
        purpose: "writes the rules of kube-proxy's iptables mode",
        need: Need::Kubernetes,
        probe: || is_installed("iptables-restore") && is_installed("ip6tables-restore"),
        install: Install::Packages(&["iptables"]),
        advice: "install iptables (`iptables-restore` and `ip6tables-restore` must be on the PATH)",
    },
    Requirement {
        name: "Kubernetes",
        purpose: "API server and kube-proxy, which shunt is held against",
        need: Need::Kubernetes,
        probe: has_kubernetes,
        install: Install::Kubernetes,
        advice: "install Go 1.26 or newer (https://go.dev/doc/install) and run this again, or name \
                 a folder with the programs in SHUNT_KUBE_DIR",
    },
    Requirement {
        name: "runc",
        purpose: "runs the containers of a cluster's nodes",
        need: Need::Cluster,
        probe: || is_installed("runc"),
        install: Install::Packages(&["runc"]),
        advice: "install runc (`runc` must be on the PATH)",
    },
    Requirement {
        name: "kubelet",
        purpose: "makes nodes of a cluster, with containerd and network plugins",
        need: Need::Cluster,
        probe: has_nodes,
        install: Install::Nodes,
        advice: "install Go 1.26 or newer (https://go.dev/doc/install) and run this again, or name \
                 a folder with the programs in SHUNT_KUBE_DIR",
    },
];

impl Need {
    /// All of them.
    pub(crate) const ALL: &[Self] = &[
        Self::Build,
        Self::Lint,
        Self::Lab,
        Self::Test,
        Self::Programs,
        Self::Kubernetes,
        Self::Cluster,
    ];
}

fn has_kubernetes() -> bool {
    kubernetes::programs().is_ok_and(|folder| has_all(&folder, &kubernetes::PROGRAMS))
}

fn has_nodes() -> bool {
    cluster::programs().is_ok_and(|folder| has_all(&folder, &cluster::PROGRAMS))
}

fn has_all(folder: &Path, programs: &[&str]) -> bool {
    programs.iter().all(|it| folder.join(it).is_file())
}

fn has_bpf_clippy() -> bool {
    match Compiler::find() {
        Ok(Compiler::Prebuilt { .. }) => Path::new(SYSTEM_CLIPPY).is_file(),
        Ok(Compiler::Nightly) => {
            succeeds("rustup", &["run", "nightly", "cargo-clippy", "--version"])
        }
        Err(_) => false,
    }
}
