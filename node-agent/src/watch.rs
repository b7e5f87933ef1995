//! Where objects come from: the Kubernetes API, or a folder of manifests. Both
//! send the same [`Event`]s; the first batch that ends with
//! [`Event::Synced`] completes the first full list.

pub mod folder;
mod kubernetes;
mod manifest;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use crate::state::{Event, State};

pub use folder::FolderError;
pub use kubernetes::KubernetesError;

/// A source of objects.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// The manifests of a folder.
    Folder(PathBuf),
    /// The API of the cluster that this pod runs in, or of the kubeconfig.
    Kubernetes,
}

/// How a source is doing, for monitoring.
#[derive(Debug, Default)]
pub struct SourceHealth {
    parts: Mutex<Vec<Part>>,
    errors: AtomicU64,
}

/// A part of a source, such as the watch of one kind of objects.
#[derive(Clone, Debug, Default)]
struct Part {
    /// Whether it has ever answered.
    answered: bool,
    /// When it failed, unless it has told anything since.
    failed: Option<Instant>,
}

/// A watch that goes on after an error has nothing to tell until something
/// changes. So an error counts for as long as the next one could take: two times
/// 30 s, the longest wait of kube's backoff and its timeout for connections, and
/// some more.
const ERROR_COUNTS: Duration = Duration::from_secs(90);

impl SourceHealth {
    /// Of a source with so many parts, none of which has answered.
    fn expect(&self, parts: usize) {
        *self.parts() = vec![Part::default(); parts];
    }

    fn answered(&self, part: usize) {
        self.parts()[part] = Part {
            answered: true,
            failed: None,
        };
    }

    fn failed(&self, part: usize, now: Instant) {
        self.parts()[part].failed = Some(now);
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether every part of the source has answered, and none has failed lately.
    pub fn is_connected(&self, now: Instant) -> bool {
        let lately = |failed: Instant| now.saturating_duration_since(failed) < ERROR_COUNTS;
        let parts = self.parts();
        let is_well = |part: &Part| part.answered && !part.failed.is_some_and(lately);
        !parts.is_empty() && parts.iter().all(is_well)
    }

    /// How many answers were errors.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a source can't go on.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The API.
    #[error(transparent)]
    Kubernetes(#[from] KubernetesError),
    /// It stopped without a reason.
    #[error("the source of objects ended unexpectedly")]
    Ended,
}

/// All that there is now, once, and what is wrong with it. Nothing is waited for.
pub async fn read(source: &Source, node_name: &str) -> Result<(State, Vec<String>), WatchError> {
    match source {
        Source::Folder(directory) => Ok(folder::read(directory)?),
        Source::Kubernetes => Ok(kubernetes::read(node_name).await?),
    }
}

/// Sends events until the receiver is gone. Whatever can be waited out (an API
/// server that restarts, a folder that is replaced) is waited out.
pub async fn run(
    source: Source,
    node_name: String,
    sender: Sender<Vec<Event>>,
    health: Arc<SourceHealth>,
) -> Result<(), WatchError> {
    match source {
        Source::Folder(directory) => Ok(folder::follow(&directory, &sender, &health).await?),
        Source::Kubernetes => Ok(kubernetes::follow(&node_name, &sender, &health).await?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_connected_while_every_part_answers() {
        let now = Instant::now();
        let health = SourceHealth::default();
        assert!(!health.is_connected(now), "not before it is asked");
        health.expect(2);
        health.answered(0);
        assert!(!health.is_connected(now));
        health.answered(1);
        assert!(health.is_connected(now));

        health.failed(1, now);
        health.answered(0);
        assert!(!health.is_connected(now));
        assert!(
            health.is_connected(now + ERROR_COUNTS),
            "it has nothing to tell"
        );
        health.answered(1);
        assert!(health.is_connected(now));
        assert_eq!(health.errors(), 1);
    }
}
