//! However a lab ends, nothing of it is left.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests are not recognised as tests"
)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::sys::signal::{SigHandler, Signal, kill, killpg, signal};
use nix::unistd::Pid;

use lab::{Lab, Place, remains};

#[test]
fn a_dropped_lab_leaves_nothing() {
    let mut lab = Lab::new("drop").unwrap();
    let node = lab.node("n1").unwrap();
    let pod = node.pod("web", None).unwrap();
    let mut sleeper = pod.command("sleep").arg("1000").spawn().unwrap();
    let name = lab.name().to_owned();
    // The lab's cgroup, three namespaces, the bpffs, folder and lock.
    assert_eq!(remains(&name).unwrap().len(), 7, "{:?}", remains(&name));
    drop(lab);
    assert_eq!(sleeper.wait().unwrap().signal(), Some(9));
    assert_eq!(remains(&name).unwrap(), [""; 0]);
}

#[test]
fn a_panic_leaves_nothing() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let result = thread::spawn(move || {
        let mut lab = Lab::new("panic").unwrap();
        let _node = lab.node("n1").unwrap();
        sender.send(lab.name().to_owned()).unwrap();
        panic!("on purpose");
    })
    .join();
    assert!(result.is_err());
    assert_eq!(remains(&receiver.recv().unwrap()).unwrap(), [""; 0]);
}

#[test]
fn a_killed_owner_leaves_nothing() {
    for deadly in [Signal::SIGINT, Signal::SIGKILL] {
        let (mut owner, name) = own_lab("killed");
        assert!(!remains(&name).unwrap().is_empty());
        // As a terminal does it: to all of the process group.
        killpg(pid(owner.id()), deadly).unwrap();
        assert_eq!(owner.wait().unwrap().signal(), Some(deadly as i32));
        wait_until_gone(&name);
    }
}

#[test]
fn sweep_removes_a_lab_that_lost_owner_and_reaper() {
    let (mut owner, name) = own_lab("swept");
    assert!(
        !lab::sweep().unwrap().contains(&name),
        "an owned lab is no prey"
    );
    let reaper = child_with_argument(owner.id(), &name);
    kill(pid(reaper), Signal::SIGKILL).unwrap();
    owner.kill().unwrap();
    owner.wait().unwrap();
    let namespace = format!("{name}-n1");
    assert!(
        lab::leftovers()
            .unwrap()
            .iter()
            .any(|path| path.ends_with(&namespace))
    );
    assert!(lab::sweep().unwrap().contains(&name));
    assert_eq!(remains(&name).unwrap(), [""; 0]);
}

/// Another process that has made a lab, and the lab's name.
fn own_lab(label: &str) -> (Child, String) {
    let mut owner = Command::new(env!("CARGO_BIN_EXE_lab-pod"));
    owner
        .args(["own-lab", label])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    // Shells start background jobs with SIGINT ignored, which is inherited.
    let heed_interrupts = || {
        // SAFETY: setting the default action runs no handler.
        unsafe { signal(Signal::SIGINT, SigHandler::SigDfl) }?;
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed;
    // the closure makes one, sigaction.
    unsafe { owner.pre_exec(heed_interrupts) };
    let mut owner = owner.spawn().unwrap();
    let mut line = String::new();
    let stdout = owner.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    (owner, serde_json::from_str(&line).unwrap())
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(id.try_into().unwrap())
}

fn child_with_argument(parent: u32, argument: &str) -> u32 {
    let children = format!("/proc/{parent}/task/{parent}/children");
    let children = fs::read_to_string(children).unwrap();
    let has_argument = |pid: &&str| {
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split('\0').any(|one| one == argument)
    };
    children
        .split_whitespace()
        .find(has_argument)
        .unwrap()
        .parse()
        .unwrap()
}

fn wait_until_gone(name: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !remains(name).unwrap().is_empty() {
        assert!(
            Instant::now() < deadline,
            "{:?} stay",
            remains(name).unwrap()
        );
        thread::sleep(Duration::from_millis(10));
    }
}
