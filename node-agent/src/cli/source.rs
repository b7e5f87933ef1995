//! Where `plan` and `explain` read objects.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use tracing::warn;

use crate::plan::Policy;
use crate::state::State;
use crate::tables::{NodeIdentity, Prefer};
use crate::watch::{self, Source};

/// The objects of a cluster, and the node to look from.
#[derive(Args, Debug)]
pub(super) struct SourceArgs {
    /// Read the Service, EndpointSlice and Node manifests in this folder. Without
    /// it, the Kubernetes API: of the cluster that this pod runs in, or of the
    /// kubeconfig.
    #[arg(long, value_name = "DIR")]
    pub(super) manifests: Option<PathBuf>,
    /// The node to look from.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: String,
    /// Which endpoints new connections try first, for Services that do not say.
    #[arg(long, value_enum, env = "SHUNT_PREFER", default_value_t)]
    prefer: Prefer,
}

/// What was read.
pub(super) struct Cluster {
    pub(super) state: State,
    pub(super) node: NodeIdentity,
    pub(super) policy: Policy,
}

impl SourceArgs {
    /// Reads all objects once; what is wrong with them is logged.
    pub(super) fn read(&self) -> Result<Cluster> {
        let source = self.manifests.clone();
        let source = source.map_or(Source::Kubernetes, Source::Folder);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the async runtime")?;
        let (state, complaints) = runtime.block_on(watch::read(&source, &self.node))?;
        for complaint in complaints {
            warn!("{complaint}");
        }
        let node = state.node(&self.node);
        if node.is_none() {
            warn!(node = %self.node, "there is no such Node, so that its zone is not known");
        }
        Ok(Cluster {
            node: NodeIdentity::of(&self.node, node),
            policy: Policy {
                prefer: self.prefer,
            },
            state,
        })
    }
}
