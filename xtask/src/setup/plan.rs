//! Which steps follow from what is missing and what the machine offers.

use std::collections::{BTreeMap, BTreeSet};

use ebpf_toolchain::Compiler;

use super::machine::{Machine, Package, User};
use super::requirement::{
    CLIPPY_PACKAGES, COMPILER_PACKAGES, Install, LINKER_PACKAGES, Requirement,
};
use super::step::{LinkerFrom, Step, as_root};

/// What to do.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Plan {
    /// In this order.
    pub(super) steps: Vec<Step>,
    /// What a person has to do.
    pub(super) advice: Vec<String>,
}

/// Where the compiler for BPF comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Debian,
    Nightly,
}

/// Whether apt does not know a package that it may know after an update.
pub(super) fn wants_package_lists(machine: &Machine, missing: &[&Requirement]) -> bool {
    let (Some(packages), User::Root) = (&machine.packages, machine.user) else {
        return false;
    };
    let wanted = missing
        .iter()
        .flat_map(|it| packages_for(it.install, Way::Debian));
    wanted
        .into_iter()
        .any(|package| !packages.contains_key(*package))
}

/// The plan.
pub(super) fn plan(machine: &Machine, missing: &[&Requirement]) -> Plan {
    let way = way(machine);
    let mut plan = Plan::default();
    let mut packages = BTreeSet::new();
    for requirement in missing {
        plan.add(requirement, way, machine);
        packages.extend(packages_for(requirement.install, way));
    }
    plan.add_packages(packages, machine);
    plan
}

impl Plan {
    /// For people.
    pub(super) fn lines(&self) -> Vec<String> {
        let steps = self.steps.iter().map(Step::to_string);
        steps.chain(self.advice.iter().cloned()).collect()
    }

    /// Everything but packages.
    fn add(&mut self, requirement: &Requirement, way: Way, machine: &Machine) {
        let step = match (requirement.install, way) {
            (Install::Compiler, Way::Nightly) => Step::Nightly,
            (Install::Linker, Way::Debian) => Step::Linker(LinkerFrom::DebianLlvm),
            (Install::Linker, Way::Nightly) if machine.binstall => {
                Step::Linker(LinkerFrom::Release)
            }
            (Install::Linker, Way::Nightly) => Step::Linker(LinkerFrom::OtherLlvm),
            (Install::BpfClippy, Way::Nightly) => Step::Component {
                name: "clippy",
                toolchain: Some("nightly"),
            },
            (Install::Component(name), _) => Step::Component {
                name,
                toolchain: None,
            },
            (Install::Kubernetes, _) => Step::Kubernetes,
            (Install::GoModules, _) => Step::GoModules,
            (Install::Nodes, _) => Step::Nodes,
            (Install::ByHand, _) => return self.advise(requirement),
            (Install::Compiler | Install::BpfClippy, Way::Debian) | (Install::Packages(_), _) => {
                return;
            }
        };
        let possible = match step {
            Step::Linker(_) => true,
            Step::Kubernetes | Step::GoModules | Step::Nodes => machine.go,
            _ => machine.rustup,
        };
        if possible {
            self.steps.push(step);
        } else {
            self.advise(requirement);
        }
    }

    /// Packages come first, since bpf-linker is built from some of them.
    fn add_packages(&mut self, mut wanted: BTreeSet<&'static str>, machine: &Machine) {
        let no_packages = BTreeMap::new();
        let known = machine.packages.as_ref().unwrap_or(&no_packages);
        wanted.retain(|package| known.get(*package) != Some(&Package::Installed));
        if wanted.is_empty() {
            return;
        }
        let names: Vec<_> = wanted.iter().copied().collect();
        if machine.packages.is_none() {
            let names = names.join(" ");
            self.advice
                .push(format!("without apt, install what Debian has in: {names}"));
            return;
        }
        if machine.user == User::Root {
            self.steps.insert(0, Step::Packages(wanted));
            return;
        }
        self.advice.push(format!("as root: {}", as_root(&wanted)));
        // It would fail for want of these packages.
        if LINKER_PACKAGES
            .iter()
            .any(|package| wanted.contains(package))
        {
            self.steps
                .retain(|step| *step != Step::Linker(LinkerFrom::DebianLlvm));
            self.advice
                .push("and then again: cargo xtask setup".to_owned());
        }
    }

    fn advise(&mut self, requirement: &Requirement) {
        self.advice
            .push(format!("{}: {}", requirement.name, requirement.advice));
    }
}

/// A compiler that is there decides; else apt, if it has all that is needed.
fn way(machine: &Machine) -> Way {
    let has = |package: &&str| {
        machine
            .packages
            .as_ref()
            .is_some_and(|packages| packages.contains_key(*package))
    };
    match machine.compiler {
        Some(Compiler::Nightly) => Way::Nightly,
        Some(Compiler::Prebuilt { .. }) if LINKER_PACKAGES.iter().all(has) => Way::Debian,
        None if COMPILER_PACKAGES.iter().chain(LINKER_PACKAGES).all(has) => Way::Debian,
        _ => Way::Nightly,
    }
}

fn packages_for(install: Install, way: Way) -> &'static [&'static str] {
    match (install, way) {
        (Install::Packages(packages), _) => packages,
        (Install::Compiler, Way::Debian) => COMPILER_PACKAGES,
        (Install::Linker, Way::Debian) => LINKER_PACKAGES,
        (Install::BpfClippy, Way::Debian) => CLIPPY_PACKAGES,
        _ => &[],
    }
}

#[cfg(test)]
mod tests;
