//! Where objects come from: the Kubernetes API, or a folder of manifests. Both
//! send the same [`Event`]s; the first batch that ends with
//! [`Event::Synced`] completes the first full list.

pub mod folder;
mod kubernetes;
mod manifest;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

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
#[derive(Debug)]
pub struct SourceHealth {
    /// One bit for each part of the source that has not answered yet, or whose
    /// last answer was an error.
    failing: AtomicU32,
    errors: AtomicU64,
}

impl Default for SourceHealth {
    fn default() -> Self {
        Self {
            failing: AtomicU32::new(u32::MAX),
            errors: AtomicU64::new(0),
        }
    }
}

impl SourceHealth {
    /// Of a source with so many parts, at most 32, none of which has answered.
    fn expect(&self, parts: u32) {
        self.failing.store((1 << parts) - 1, Ordering::Relaxed);
    }

    fn answered(&self, part: u32) {
        self.failing.fetch_and(!(1 << part), Ordering::Relaxed);
    }

    fn failed(&self, part: u32) {
        self.failing.fetch_or(1 << part, Ordering::Relaxed);
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether every part of the source answered when it was last asked.
    pub fn is_connected(&self) -> bool {
        self.failing.load(Ordering::Relaxed) == 0
    }

    /// How many answers were errors.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
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
