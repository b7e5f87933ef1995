//! Where all connections of this process hand in what came of them.

use std::sync::{Arc, Mutex, MutexGuard};

use lab::torture::TortureReport;

#[derive(Clone, Default)]
pub(super) struct Tally(Arc<Mutex<TortureReport>>);

impl Tally {
    pub(super) fn lock(&self) -> MutexGuard<'_, TortureReport> {
        self.0
            .lock()
            .expect("nothing panics while it holds the lock")
    }

    pub(super) fn note(&self, event: &str) {
        self.lock().note(event);
    }
}
