//! Where objects come from: the Kubernetes API, or a folder of manifests. Both
//! send the same [`Event`]s; the first batch that ends with
//! [`Event::Synced`] completes the first full list.

pub mod folder;
mod kubernetes;
mod manifest;

use std::path::PathBuf;

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
) -> Result<(), WatchError> {
    match source {
        Source::Folder(directory) => Ok(folder::follow(&directory, &sender).await?),
        Source::Kubernetes => Ok(kubernetes::follow(&node_name, &sender).await?),
    }
}
