//! Child processes.

use std::env;
use std::ffi::OsStr;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The root of the project.
pub(crate) fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask is a folder of the project")
}

/// A command in the root of the project. It finds what `cargo install` put
/// into cargo's own folder, also where the user's PATH does not have it.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(path) = with_folder(&path, cargo_bin()) {
        command.env("PATH", path);
    }
    command
}

/// Runs a command to its end, with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("start {}", text(command)))?;
    if status.success() {
        return Ok(());
    }
    bail!("{} failed ({status})", text(command))
}

/// Whether a command can be run and succeeds; its output is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    command(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether a program is on the PATH, or where administrators' programs are.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(usual)
        .any(|folder| folder.join(program).is_file())
}

/// Says what a long step does.
pub(crate) fn announce(step: &str) {
    println!("==> {step}");
}

/// The command as it would be typed, without its environment.
pub(crate) fn text(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(OsStr::to_string_lossy));
    words.join(" ")
}

/// Where `cargo install` puts programs.
fn cargo_bin() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    Some(home?.join("bin"))
}

/// The search path with the folder before it; `None` if it is there already,
/// since a changed PATH makes cargo build the BPF programs again.
fn with_folder(path: &OsStr, folder: Option<PathBuf>) -> Option<OsString> {
    let folder = folder?;
    if env::split_paths(path).any(|it| it == folder) {
        return None;
    }
    env::join_paths([folder].into_iter().chain(env::split_paths(path))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cargo_folder_comes_first_and_only_once() {
        let path = |text: &str, folder: &str| {
            with_folder(OsStr::new(text), Some(PathBuf::from(folder)))
                .map(|path| path.into_string().unwrap())
        };
        assert_eq!(
            path("/usr/bin:/bin", "/cargo"),
            Some("/cargo:/usr/bin:/bin".to_owned())
        );
        assert_eq!(path("/usr/bin:/cargo", "/cargo"), None);
    }
}
