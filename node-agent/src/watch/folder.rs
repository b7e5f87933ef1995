//! A folder of manifests, and its changes.
//!
//! Whatever a writer does, no object may vanish that is meant to stay: a file
//! is read when its writer closes it or renames it into place; one that is
//! suddenly blank is believed only when it stays so; and while a document of a
//! file can't be read, the objects that the file held before are kept.

mod contents;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use self::contents::{Contents, Update};
use crate::state::{Event, State};
use crate::watch::SourceHealth;

/// Changes that come within this time are read together.
const GATHER: Duration = Duration::from_millis(2);
/// How long a file must stay blank to be believed.
const BLANK: Duration = Duration::from_millis(200);
/// How often to look for a folder that is gone.
const RETURN: Duration = Duration::from_millis(200);

/// Why the folder can't be read.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// It is not there, or is no folder, or may not be read.
    #[error(
        "cannot read the folder of manifests {path}: --from (`shunt explain`: --manifests) needs a \
         folder with Service, EndpointSlice and Node manifests (*.yaml, *.yml, *.json)"
    )]
    Read {
        /// The folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Its changes can't be followed.
    #[error(
        "cannot follow the changes of {path}: is fs.inotify.max_user_instances or \
         max_user_watches exhausted?"
    )]
    Watch {
        /// The folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: notify::Error,
    },
}

/// All that the folder holds now, and what is wrong with it.
pub fn read(directory: &Path) -> Result<(State, Vec<String>), FolderError> {
    let mut state = State::default();
    let update = Contents::default().rescan(read_all(directory)?);
    update
        .events
        .into_iter()
        .chain([Event::Synced])
        .for_each(|event| state.apply(event));
    Ok((state, update.complaints))
}

/// Sends what the folder holds, and then its changes, until the receiver is
/// gone.
pub(super) async fn follow(
    directory: &Path,
    sender: &Sender<Vec<Event>>,
    health: &SourceHealth,
) -> Result<(), FolderError> {
    health.expect(1);
    let failed = |source| FolderError::Read {
        path: directory.to_owned(),
        source,
    };
    // Changes are told with absolute paths.
    let directory = &std::path::absolute(directory).map_err(failed)?;
    let mut contents = Contents::default();
    // A folder that is not there at the start is a mistake; later it may return.
    let (mut watcher, mut changes) = watch(directory)?;
    let mut first = contents.rescan(read_all(directory)?);
    first.events.push(Event::Synced);
    health.answered(0);
    let mut alive = send(first, sender).await;
    let mut blank = BTreeMap::new();
    while alive {
        let seen = next(directory, &mut changes, &blank).await;
        if seen.folder_gone {
            health.failed(0, std::time::Instant::now());
            warn!(folder = %directory.display(), "the folder of manifests is gone; its objects are kept until it is back");
            (watcher, changes) = wait_for_return(directory).await;
            info!(folder = %directory.display(), "the folder of manifests is back");
            health.answered(0);
            alive = send(rescan(&mut contents, directory), sender).await;
            continue;
        }
        let update = if seen.everything {
            rescan(&mut contents, directory)
        } else {
            read_changed(&mut contents, seen.files, &mut blank)
        };
        alive = send(update, sender).await;
    }
    drop(watcher);
    Ok(())
}

/// What has changed.
#[derive(Debug, Default)]
struct Seen {
    files: BTreeSet<PathBuf>,
    /// Something that is not a manifest, such as the symlink of a ConfigMap
    /// volume, or more than could be told.
    everything: bool,
    /// The folder that was followed is gone, though another may be in its place.
    folder_gone: bool,
}

type Changes = UnboundedReceiver<notify::Result<notify::Event>>;

/// Waits for changes, or until a blank file is due to be read again.
async fn next(directory: &Path, changes: &mut Changes, blank: &BTreeMap<PathBuf, Instant>) -> Seen {
    let mut seen = Seen::default();
    let due = blank.values().min().copied();
    tokio::select! {
        Some(change) = changes.recv() => seen.add(directory, change),
        () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        else => seen.folder_gone = true,
    }
    if due.is_none() || !seen.files.is_empty() {
        sleep(GATHER).await;
    }
    while let Ok(change) = changes.try_recv() {
        seen.add(directory, change);
    }
    let now = Instant::now();
    seen.files.extend(
        blank
            .iter()
            .filter(|(_, due)| **due <= now)
            .map(|(path, _)| path.clone()),
    );
    seen
}

impl Seen {
    fn add(&mut self, directory: &Path, change: notify::Result<notify::Event>) {
        let Ok(event) = change else {
            self.everything = true;
            return;
        };
        self.everything |= event.need_rescan();
        match event.kind {
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
                if event.paths.iter().any(|path| path == directory) =>
            {
                self.folder_gone = true;
            }
            EventKind::Access(AccessKind::Close(AccessMode::Write))
            | EventKind::Modify(ModifyKind::Name(_) | ModifyKind::Metadata(_))
            | EventKind::Remove(_) => self.add_paths(event.paths),
            // A new file is read when its writer closes it; a link has none.
            EventKind::Create(_) if event.paths.iter().any(|path| is_link(path)) => {
                self.add_paths(event.paths);
            }
            _ => {}
        }
    }

    fn add_paths(&mut self, paths: Vec<PathBuf>) {
        for path in paths {
            if is_manifest(&path) {
                self.files.insert(path);
            } else {
                self.everything = true;
            }
        }
    }
}

fn watch(directory: &Path) -> Result<(RecommendedWatcher, Changes), FolderError> {
    let failed = |source| FolderError::Watch {
        path: directory.to_owned(),
        source,
    };
    // A missing folder is told as such, and not by inotify.
    fs::read_dir(directory).map_err(|source| FolderError::Read {
        path: directory.to_owned(),
        source,
    })?;
    let (sender, changes) = unbounded_channel();
    let mut watcher = notify::recommended_watcher(move |change| {
        // The receiver is gone only when nobody follows any more.
        let _ = sender.send(change);
    })
    .map_err(failed)?;
    watcher
        .watch(directory, RecursiveMode::NonRecursive)
        .map_err(failed)?;
    Ok((watcher, changes))
}

async fn wait_for_return(directory: &Path) -> (RecommendedWatcher, Changes) {
    loop {
        if let Ok(watching) = watch(directory) {
            return watching;
        }
        sleep(RETURN).await;
    }
}

fn rescan(contents: &mut Contents, directory: &Path) -> Update {
    match read_all(directory) {
        Ok(files) => contents.rescan(files),
        Err(error) => Update {
            complaints: vec![error.to_string()],
            ..Update::default()
        },
    }
}

fn read_changed(
    contents: &mut Contents,
    files: BTreeSet<PathBuf>,
    blank: &mut BTreeMap<PathBuf, Instant>,
) -> Update {
    let mut update = Update::default();
    let now = Instant::now();
    for path in files {
        let text = read_file(&path);
        let is_blank = text
            .as_ref()
            .is_some_and(|text| matches!(text, Ok(it) if it.trim().is_empty()));
        if is_blank && contents.has_objects(&path) {
            let due = *blank.entry(path.clone()).or_insert(now + BLANK);
            if now < due {
                continue;
            }
        }
        blank.remove(&path);
        update.add(contents.update(path, text));
    }
    update
}

async fn send(update: Update, sender: &Sender<Vec<Event>>) -> bool {
    for complaint in update.complaints {
        warn!("{complaint}");
    }
    update.events.is_empty() || sender.send(update.events).await.is_ok()
}

/// Every manifest, by path.
fn read_all(directory: &Path) -> Result<BTreeMap<PathBuf, io::Result<String>>, FolderError> {
    let failed = |source| FolderError::Read {
        path: directory.to_owned(),
        source,
    };
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if is_manifest(&path)
            && let Some(text) = read_file(&path)
        {
            files.insert(path, text);
        }
    }
    Ok(files)
}

/// `None` if there is no such file.
fn read_file(path: &Path) -> Option<io::Result<String>> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Ok(metadata) if metadata.is_dir() => return None,
        _ => {}
    }
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        result => Some(result),
    }
}

/// Hidden files are other programs' own, such as an editor's.
fn is_manifest(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_none_or(|name| name.to_string_lossy().starts_with('.'));
    let extension = path.extension().and_then(|extension| extension.to_str());
    !hidden && matches!(extension, Some("yaml" | "yml" | "json"))
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|it| it.is_symlink() || it.is_dir() || it.nlink() > 1)
}

#[cfg(test)]
mod tests;
