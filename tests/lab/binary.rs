//! Finding the programs of this workspace that were built beside the caller.

use std::env;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

/// Told by [`use_binaries`].
static BINARIES: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Has the lab use these programs, by their file names. For a caller that built
/// them itself: it can't set variables for its own process. Only the first call
/// counts.
pub fn use_binaries(paths: impl IntoIterator<Item = PathBuf>) {
    BINARIES.get_or_init(|| paths.into_iter().collect());
}

/// The path of a built program: as told by [`use_binaries`], from the variable
/// if it is set, else from the folder that the running program was built in
/// (`target/debug`, also for the tests in its `deps` and for `examples`).
pub fn target_binary(name: &str, variable: &str) -> Result<PathBuf> {
    let mut told = BINARIES.get().into_iter().flatten();
    if let Some(path) = told.find(|path| path.ends_with(name)) {
        return Ok(path.clone());
    }
    if let Some(path) = env::var_os(variable).map(PathBuf::from) {
        // Absolute, since processes may start in other folders.
        return path
            .canonicalize()
            .with_context(|| format!("{variable}={}", path.display()));
    }
    let mut folder = env::current_exe().context("find the running program")?;
    folder.pop();
    if folder.ends_with("deps") || folder.ends_with("examples") {
        folder.pop();
    }
    let path = folder.join(name);
    ensure!(
        path.exists(),
        "{} is not built; build it or set {variable}",
        path.display()
    );
    Ok(path)
}

/// The lab's own helper.
pub(crate) fn lab_pod() -> Result<PathBuf> {
    target_binary("lab-pod", "LAB_POD_BIN")
}
