//! Probe results in, steps out.

use std::path::PathBuf;

use super::*;
use crate::setup::requirement::{Need, REQUIREMENTS};

/// All requirements that something is missing for, by name.
fn requirements(names: &[&str]) -> Vec<&'static Requirement> {
    let found: Vec<_> = REQUIREMENTS
        .iter()
        .filter(|it| names.contains(&it.name))
        .collect();
    assert_eq!(found.len(), names.len(), "{names:?}");
    found
}

fn everything() -> Vec<&'static Requirement> {
    REQUIREMENTS.iter().collect()
}

/// A machine whose apt has all packages, in this state.
fn debian(package: Package, user: User) -> Machine {
    let all = REQUIREMENTS
        .iter()
        .flat_map(|it| packages_for(it.install, Way::Debian));
    let packages = all.map(|name| ((*name).to_owned(), package)).collect();
    Machine {
        packages: Some(packages),
        user,
        rustup: true,
        ..Machine::default()
    }
}

fn lines(machine: &Machine, missing: &[&str]) -> Vec<String> {
    plan(machine, &requirements(missing)).lines()
}

#[test]
fn nothing_missing_is_nothing_to_do() {
    let machine = debian(Package::Installed, User::Root);
    assert_eq!(plan(&machine, &[]), Plan::default());
    assert!(!wants_package_lists(&machine, &[]));
}

#[test]
fn debian_gets_packages_first_and_then_the_linker_with_their_llvm() {
    let plan = plan(&debian(Package::Available, User::Root), &everything());
    let [Step::Packages(packages), rest @ ..] = plan.steps.as_slice() else {
        panic!("packages come first: {plan:?}");
    };
    for package in [
        "rustc-web",
        "llvm-22-dev",
        "rust-web-clippy",
        "iproute2",
        "bpftool",
    ] {
        assert!(packages.contains(package), "{package} in {packages:?}");
    }
    assert!(rest.contains(&Step::Linker(LinkerFrom::DebianLlvm)));
    assert!(!rest.contains(&Step::Nightly));
}

#[test]
fn installed_packages_are_not_installed_again() {
    let mut machine = debian(Package::Installed, User::Root);
    let steps = lines(&machine, &["bpf-linker"]);
    assert_eq!(
        steps,
        ["installing bpf-linker 0.13.0 from source (about 2 minutes)"]
    );
    let packages = machine.packages.as_mut().unwrap();
    packages.insert("g++".to_owned(), Package::Available);
    assert_eq!(
        lines(&machine, &["bpf-linker"])[0],
        "installing Debian packages: g++"
    );
}

#[test]
fn a_user_is_told_what_root_has_to_type() {
    let plan = plan(
        &debian(Package::Available, User::Other),
        &requirements(&["bpf-linker", "ip"]),
    );
    assert_eq!(plan.steps, []);
    let command = "as root: apt-get update && apt-get install -y --no-install-recommends g++ \
                   iproute2 libpolly-22-dev libzstd-dev llvm-22-dev zlib1g-dev";
    assert_eq!(plan.advice, [command, "and then again: cargo xtask setup"]);
}

#[test]
fn a_distribution_without_the_packages_takes_the_nightly() {
    let mut machine = debian(Package::Available, User::Root);
    machine.packages.as_mut().unwrap().remove("rustc-web");
    let missing = requirements(&["BPF compiler", "bpf-linker", "clippy for BPF", "ip"]);
    let expected = [
        Step::Packages(BTreeSet::from(["iproute2"])),
        Step::Nightly,
        Step::Linker(LinkerFrom::OtherLlvm),
        Step::Component {
            name: "clippy",
            toolchain: Some("nightly"),
        },
    ];
    assert_eq!(plan(&machine, &missing).steps, expected);
    machine.binstall = true;
    assert_eq!(
        plan(&machine, &missing).steps[2],
        Step::Linker(LinkerFrom::Release)
    );
}

#[test]
fn without_apt_the_tools_are_named() {
    let machine = Machine {
        rustup: true,
        user: User::Root,
        ..Machine::default()
    };
    assert_eq!(
        lines(&machine, &["ip", "bpftool"]),
        ["without apt, install what Debian has in: bpftool iproute2"],
    );
}

#[test]
fn without_rustup_and_apt_a_person_has_to_act() {
    let advice = plan(
        &Machine::default(),
        &requirements(&["BPF compiler", "clippy"]),
    )
    .advice;
    assert!(
        advice[0].starts_with("BPF compiler: install Debian's rustc-web"),
        "{advice:?}"
    );
    assert_eq!(advice[1], "clippy: `rustup component add clippy`");
}

#[test]
fn the_compiler_that_is_there_decides_how_the_linker_is_built() {
    let mut machine = debian(Package::Available, User::Root);
    machine.compiler = Some(Compiler::Nightly);
    let from = |machine: &Machine| plan(machine, &requirements(&["bpf-linker"])).steps.pop();
    assert_eq!(from(&machine), Some(Step::Linker(LinkerFrom::OtherLlvm)));
    machine.compiler = Some(Compiler::Prebuilt {
        rustc: PathBuf::new(),
    });
    assert_eq!(from(&machine), Some(Step::Linker(LinkerFrom::DebianLlvm)));
}

#[test]
fn package_lists_are_read_only_where_that_can_help() {
    let missing = requirements(&["ip"]);
    let mut machine = debian(Package::Available, User::Root);
    assert!(!wants_package_lists(&machine, &missing));
    machine.packages.as_mut().unwrap().clear();
    assert!(wants_package_lists(&machine, &missing));
    assert!(!wants_package_lists(&machine, &requirements(&["kubectl"])));
    machine.user = User::Other;
    assert!(!wants_package_lists(&machine, &missing));
}

#[test]
fn each_requirement_has_a_name_of_its_own_and_advice() {
    let names: BTreeSet<_> = REQUIREMENTS.iter().map(|it| it.name).collect();
    assert_eq!(names.len(), REQUIREMENTS.len());
    assert!(
        REQUIREMENTS
            .iter()
            .all(|it| !it.advice.is_empty() && Need::ALL.contains(&it.need))
    );
}

#[test]
fn kubernetes_is_built_where_there_is_go_and_asked_for_elsewhere() {
    let mut machine = debian(Package::Installed, User::Root);
    let advice = lines(&machine, &["Kubernetes"]);
    assert!(
        matches!(&advice[..], [line] if line.contains("install Go")),
        "{advice:?}"
    );
    machine.go = true;
    let plan = plan(&machine, &requirements(&["Kubernetes", "kubelet"]));
    assert_eq!(plan.steps, [Step::Kubernetes, Step::Nodes]);
}
