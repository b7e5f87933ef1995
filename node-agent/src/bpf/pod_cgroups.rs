//! Finds the cgroups of pods by their names, and follows their coming and going.
//!
//! The kubelet makes a cgroup for each pod before anything runs in it, named
//! `pod<uid>`, or with the systemd driver `…-pod<uid with _ for ->.slice`, below
//! one named `kubepods`, or `kubepods.slice`
//! (`pkg/kubelet/cm/pod_container_manager_linux.go` and
//! `pkg/kubelet/cm/cgroup_manager_linux.go` in kubernetes/kubernetes).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::DirEntryExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::warn;

use super::cgroup::mounts_of_machine;
use crate::state::PodCgroupIds;

/// Pods are 2 or 3 levels below the root, in nested clusters at up to 7.
const MAX_LEVEL: usize = 10;
/// A uid without its dashes.
const UID_DIGITS: usize = 32;

/// The pods' cgroups below one directory.
pub struct PodCgroups {
    root: PathBuf,
    /// `None` if this machine does not let us follow changes.
    watcher: Option<RecommendedWatcher>,
    watched: Vec<PathBuf>,
    changes: UnboundedReceiver<()>,
    has_warned: bool,
}

/// The directory of a pod's cgroup, by the uid in its name.
pub fn pod_cgroup(root: &Path, uid: &str) -> Option<PathBuf> {
    let mut found = Found::default();
    found.walk(root, 0, false);
    found.directories.remove(uid)
}

/// The uid of the pod that a cgroup is in, by the path of the cgroup.
pub fn uid_in(cgroup: &str) -> Option<String> {
    cgroup.split('/').find_map(pod_uid)
}

/// What a walk finds.
#[derive(Debug, Default)]
struct Found {
    ids: PodCgroupIds,
    /// The directories of the same, for those who look for one.
    directories: BTreeMap<Arc<str>, PathBuf>,
    /// Where pods are or will be.
    parents: Vec<PathBuf>,
}

impl PodCgroups {
    /// Those below `root`, a cgroup v2 directory.
    pub fn new(root: &Path) -> Self {
        let (sender, changes) = unbounded_channel();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Our own looks open directories, which is told too.
            if event.is_ok_and(|event| !event.kind.is_access()) {
                let _ = sender.send(());
            }
        });
        let watcher = watcher
            .inspect_err(|error| {
                warn!(%error, "cannot follow the cgroups of pods; looking at them from time to time");
            })
            .ok();
        Self {
            root: root.to_owned(),
            watcher,
            watched: Vec::new(),
            changes,
            has_warned: false,
        }
    }

    /// Waits until some may have come or gone.
    pub async fn changed(&mut self) {
        if self.changes.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
        while self.changes.try_recv().is_ok() {}
    }

    /// Looks at them.
    pub fn look(&mut self) -> PodCgroupIds {
        loop {
            let mut found = Found::default();
            found.walk(&self.root, 0, false);
            // What came before its parent was followed would be missed.
            if !self.follow(found.parents) {
                return found.ids;
            }
        }
    }

    /// Tells, once, if the pods have cgroups where no program can tell them apart.
    pub fn warn_of_version_1(&mut self) {
        if self.has_warned {
            return;
        }
        if let Some(pod) = any_pod(&mounts_of_machine("cgroup")) {
            self.has_warned = true;
            warn!(
                example = %pod.display(),
                "the pods of this node are in cgroup version 1: those that opted out, and those of \
                 a mesh, are translated all the same; let the kubelet use cgroup version 2, or \
                 annotate the Services that they call with shunt.dev/mode: off"
            );
        }
    }

    /// Follows these directories; returns whether any is new.
    fn follow(&mut self, parents: Vec<PathBuf>) -> bool {
        let Some(watcher) = &mut self.watcher else {
            return false;
        };
        let mut any_new = false;
        for parent in parents.iter().filter(|it| !self.watched.contains(it)) {
            // One that is gone again is no longer found.
            any_new |= watcher.watch(parent, RecursiveMode::NonRecursive).is_ok();
        }
        for gone in self.watched.iter().filter(|it| !parents.contains(it)) {
            let _ = watcher.unwatch(gone);
        }
        self.watched = parents;
        any_new
    }
}

/// The cgroup of any pod below one of these.
fn any_pod(hierarchies: &[PathBuf]) -> Option<PathBuf> {
    hierarchies.iter().find_map(|root| {
        let mut found = Found::default();
        found.walk(root, 0, false);
        found.directories.into_values().next()
    })
}

impl Found {
    /// `in_kubepods` is whether pods are expected right here.
    fn walk(&mut self, directory: &Path, level: usize, in_kubepods: bool) {
        if in_kubepods || level == 0 {
            self.parents.push(directory.to_owned());
        }
        let Ok(entries) = fs::read_dir(directory) else {
            return;
        };
        for entry in entries.flatten() {
            if !entry.file_type().is_ok_and(|it| it.is_dir()) {
                continue;
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if let Some(uid) = pod_uid(&name) {
                // The id of a cgroup is its inode number.
                let uid: Arc<str> = Arc::from(uid);
                self.directories.insert(Arc::clone(&uid), entry.path());
                self.ids.insert(uid, entry.ino());
            } else if level < MAX_LEVEL {
                let in_kubepods = in_kubepods || name.contains("kubepods");
                self.walk(&entry.path(), level + 1, in_kubepods);
            }
        }
    }
}

/// The uid in the name of a pod's cgroup.
fn pod_uid(name: &str) -> Option<String> {
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => name.strip_prefix("pod")?.to_owned(),
    };
    let mut digits = uid.bytes().filter(|it| *it != b'-');
    let is_uid = digits.all(|it| it.is_ascii_hexdigit())
        && uid.bytes().filter(|it| *it != b'-').count() == UID_DIGITS;
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "2f1b8f9c-5f3e-4a52-8c0e-1d2c3b4a5968";

    #[test]
    fn pods_are_known_by_the_names_of_both_drivers() {
        let check = |name: &str, expected: Option<&str>| {
            assert_eq!(pod_uid(name).as_deref(), expected, "{name}");
        };
        check(&format!("pod{UID}"), Some(UID));
        let slice = UID.replace('-', "_");
        check(&format!("kubepods-burstable-pod{slice}.slice"), Some(UID));
        check(&format!("kubelet-kubepods-pod{slice}.slice"), Some(UID));
        // A static pod: the hash of its file.
        let hash = "0f3d2b6a9c8e7f1a2b3c4d5e6f708192";
        check(&format!("pod{hash}"), Some(hash));
        for name in [
            "podman",
            "podruntime.slice",
            "kubepods-burstable.slice",
            "system-pod.slice",
        ] {
            check(name, None);
        }
    }

    #[test]
    fn pods_are_found_wherever_they_are() {
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join(format!("a/kubepods/burstable/pod{UID}"));
        fs::create_dir_all(pod.join("container")).unwrap();
        fs::create_dir_all(root.path().join("system.slice/x.service")).unwrap();
        let mut found = Found::default();
        found.walk(root.path(), 0, false);
        assert_eq!(found.ids.keys().map(|it| &**it).collect::<Vec<_>>(), [UID]);
        assert_eq!(pod_cgroup(root.path(), UID).as_ref(), Some(&pod));
        let elsewhere = root.path().join("system.slice");
        assert_eq!(any_pod(std::slice::from_ref(&elsewhere)), None);
        assert_eq!(
            any_pod(&[elsewhere, root.path().to_owned()]),
            Some(pod.clone())
        );
        let inside = pod.join("container");
        assert_eq!(uid_in(inside.to_str().unwrap()).as_deref(), Some(UID));
        let parents: Vec<_> = found
            .parents
            .iter()
            .map(|it| it.strip_prefix(root.path()).unwrap().to_str().unwrap())
            .collect();
        assert_eq!(parents, ["", "a/kubepods", "a/kubepods/burstable"]);
    }
}
