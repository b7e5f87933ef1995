//! What the files of a folder hold, and what a change of one of them means;
//! pure.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::model::convert::Rejected;
use crate::model::{Object, ObjectRef};
use crate::state::Event;
use crate::watch::manifest::{Document, parse};

/// The files and the objects in them.
#[derive(Debug, Default)]
pub(super) struct Contents {
    files: BTreeMap<PathBuf, File>,
    /// Where each object is; the first by path counts.
    places: BTreeMap<ObjectRef, BTreeSet<PathBuf>>,
    /// The last number told.
    unreadable: usize,
}

/// What follows from a change.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// For the state.
    pub(super) events: Vec<Event>,
    /// For people.
    pub(super) complaints: Vec<String>,
}

#[derive(Debug, Default)]
struct File {
    objects: BTreeMap<ObjectRef, Result<Object, Rejected>>,
    /// Documents of which nothing is known: they can't be read now, and the
    /// file has never been read whole.
    unknown: usize,
    ever_whole: bool,
}

impl Update {
    pub(super) fn add(&mut self, other: Self) {
        self.events.extend(other.events);
        self.complaints.extend(other.complaints);
    }
}

impl Contents {
    /// Takes what the whole folder holds.
    pub(super) fn rescan(&mut self, files: BTreeMap<PathBuf, io::Result<String>>) -> Update {
        let mut update = Update::default();
        let gone: Vec<_> = self
            .files
            .keys()
            .filter(|path| !files.contains_key(*path))
            .cloned()
            .collect();
        for path in gone {
            update.add(self.update(path, None));
        }
        for (path, text) in files {
            update.add(self.update(path, Some(text)));
        }
        update
    }

    /// Takes what one file holds now; `None` if it is gone.
    pub(super) fn update(&mut self, path: PathBuf, text: Option<io::Result<String>>) -> Update {
        let mut update = Update::default();
        let old = self.files.remove(&path).unwrap_or_default();
        let new = text.map(|text| File::read(&path, text, &old, &mut update.complaints));
        let removed = new.is_none();
        let new = new.unwrap_or_default();
        let references: BTreeSet<ObjectRef> = old
            .objects
            .keys()
            .chain(new.objects.keys())
            .cloned()
            .collect();
        let before: Vec<_> = references
            .iter()
            .map(|it| self.winner(it).map(Path::to_owned))
            .collect();
        for reference in new.objects.keys() {
            self.places
                .entry(reference.clone())
                .or_default()
                .insert(path.clone());
        }
        for reference in old
            .objects
            .keys()
            .filter(|it| !new.objects.contains_key(*it))
        {
            self.leave(reference, &path);
        }
        if !removed {
            self.files.insert(path.clone(), new);
        }
        for (reference, before) in references.iter().zip(before) {
            let was = old
                .objects
                .get(reference)
                .filter(|_| before.as_deref() == Some(&*path));
            self.tell(reference, &path, before.as_deref(), was, &mut update);
        }
        self.tell_unreadable(&mut update);
        update
    }

    /// Whether the file is known to hold something.
    pub(super) fn has_objects(&self, path: &Path) -> bool {
        self.files
            .get(path)
            .is_some_and(|file| !file.objects.is_empty())
    }

    /// The event for one object, if anything changed about it.
    fn tell(
        &self,
        reference: &ObjectRef,
        changed: &Path,
        before: Option<&Path>,
        was: Option<&Result<Object, Rejected>>,
        update: &mut Update,
    ) {
        let Some(winner) = self.winner(reference) else {
            update.events.push(Event::Delete(reference.clone()));
            return;
        };
        if winner != changed && self.holds(changed, reference) {
            let (path, winner) = (changed.display(), winner.display());
            update.complaints.push(format!(
                "{path}: {reference} is in {winner} too, which counts"
            ));
        }
        let is = self
            .files
            .get(winner)
            .and_then(|file| file.objects.get(reference));
        let same = before == Some(winner) && (winner != changed || was == is);
        match is {
            Some(Ok(object)) if !same => update.events.push(Event::Apply(object.clone())),
            Some(Err(rejected)) if !same => {
                update
                    .complaints
                    .push(format!("{}: {rejected}", winner.display()));
                update.events.push(Event::Reject(rejected.clone()));
            }
            _ => {}
        }
    }

    fn tell_unreadable(&mut self, update: &mut Update) {
        let unreadable = self.files.values().map(|file| file.unknown).sum();
        if self.unreadable != unreadable {
            self.unreadable = unreadable;
            update.events.push(Event::Unreadable(unreadable));
        }
    }

    fn winner(&self, reference: &ObjectRef) -> Option<&Path> {
        self.places.get(reference)?.first().map(PathBuf::as_path)
    }

    fn holds(&self, path: &Path, reference: &ObjectRef) -> bool {
        self.files
            .get(path)
            .is_some_and(|file| file.objects.contains_key(reference))
    }

    fn leave(&mut self, reference: &ObjectRef, path: &Path) {
        if let Some(paths) = self.places.get_mut(reference) {
            paths.remove(path);
            if paths.is_empty() {
                self.places.remove(reference);
            }
        }
    }
}

impl File {
    fn read(
        path: &Path,
        text: io::Result<String>,
        old: &Self,
        complaints: &mut Vec<String>,
    ) -> Self {
        let mut file = Self::default();
        let mut unreadable = Vec::new();
        match text {
            Err(error) => unreadable.push(format!("cannot be read: {error}")),
            Ok(text) => {
                for document in parse(&text) {
                    match document {
                        Document::Unreadable(why) => unreadable.push(why),
                        Document::Objects(objects) => file.take(path, objects, complaints),
                    }
                }
            }
        }
        file.ever_whole = old.ever_whole || unreadable.is_empty();
        if !unreadable.is_empty() {
            file.unknown = if file.ever_whole { 0 } else { unreadable.len() };
            let kept = if file.ever_whole {
                "; the objects it held before stay"
            } else {
                ""
            };
            complaints.extend(
                unreadable
                    .iter()
                    .map(|why| format!("{}: {why}{kept}", path.display())),
            );
            for (reference, object) in &old.objects {
                file.objects
                    .entry(reference.clone())
                    .or_insert_with(|| object.clone());
            }
        }
        file
    }

    fn take(
        &mut self,
        path: &Path,
        objects: Vec<Result<Object, Rejected>>,
        complaints: &mut Vec<String>,
    ) {
        for object in objects {
            let reference = match &object {
                Ok(object) => object.reference(),
                Err(rejected) => rejected.object.clone(),
            };
            match self.objects.entry(reference) {
                Entry::Vacant(entry) => drop(entry.insert(object)),
                Entry::Occupied(entry) => complaints.push(format!(
                    "{}: {} is in it twice; the first counts",
                    path.display(),
                    entry.key()
                )),
            }
        }
    }
}
