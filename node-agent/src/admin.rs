//! What monitoring asks the agent: `/metrics` and `/healthz`.
//!
//! Counters and maps are read when they are asked for, from the pinned maps, as
//! `shunt status` does. Invariant: whatever happens to the address, the agent
//! goes on routing; an address that is taken is tried again.

mod metrics;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{error, info};

use crate::agent::since_boot_ns;
use crate::bpf::{Pins, ReadError};
use crate::watch::SourceHealth;

/// How long to wait before an address that can't be had is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Where metrics are served, for `shunt status`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Served {
    /// Nowhere: it was not asked for.
    #[default]
    Off,
    /// Here.
    At(SocketAddr),
    /// Not here, though it was asked for.
    Failed(SocketAddr, String),
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => Ok(()),
            Self::At(address) => write!(f, "http://{address}/metrics"),
            Self::Failed(address, error) => write!(f, "NOT SERVED at {address}: {error}"),
        }
    }
}

/// How far the agent is, as it says itself.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Progress {
    /// The table is written and the programs are attached.
    pub ready: bool,
    /// When the table was last found or made to be what the objects ask for.
    pub in_step: Option<SystemTime>,
    /// Operations that were done.
    pub writes: u64,
    /// Operations that failed, each time they did.
    pub failed_writes: u64,
    /// Service ports in the table.
    pub routes: usize,
    /// Service ports that could not be written, and are tried again.
    pub pending_routes: usize,
    /// UDP sockets that were destroyed, since their endpoint stopped serving.
    pub udp_sockets_destroyed: usize,
    /// How often it looked for what is to be done.
    pub reconciliations: u64,
    /// Objects that can't be right.
    pub rejected_objects: usize,
    /// Documents that can't be read.
    pub unreadable_documents: usize,
}

/// What the handlers need.
#[derive(Clone, Debug)]
pub struct Admin {
    pins: Pins,
    progress: Arc<Mutex<Progress>>,
    source: Arc<SourceHealth>,
}

impl Admin {
    /// For the agent with these pins and this source.
    pub fn new(pins: Pins, source: Arc<SourceHealth>) -> Self {
        Self {
            pins,
            progress: Arc::default(),
            source,
        }
    }

    /// Takes note of how far the agent is.
    pub fn note(&self, change: impl FnOnce(&mut Progress)) {
        // Whoever panicked with it has changed numbers only.
        let progress = self.progress.lock();
        change(&mut progress.unwrap_or_else(PoisonError::into_inner));
    }

    /// Serves at `address` for ever, and tells what became of it.
    pub async fn serve(self, address: SocketAddr, told: watch::Sender<Served>) {
        let router = Router::new()
            .route("/metrics", get(metrics_page))
            .route("/healthz", get(health_page))
            .with_state(self);
        loop {
            let error = match TcpListener::bind(address).await {
                Ok(listener) => {
                    // With port 0 the kernel chooses one.
                    let address = listener.local_addr().unwrap_or(address);
                    info!(%address, "serving /metrics and /healthz");
                    told.send_replace(Served::At(address));
                    match axum::serve(listener, router.clone()).await {
                        Ok(()) => return,
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            let failed = Served::Failed(address, error.to_string());
            if *told.borrow() != failed {
                error!(
                    %address, %error,
                    "metrics cannot be served here: choose another --metrics-addr, or free this \
                     one; trying again, and routing meanwhile"
                );
            }
            told.send_replace(failed);
            sleep(RETRY).await;
        }
    }

    fn progress(&self) -> Progress {
        let progress = self.progress.lock();
        progress.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `Err` with what is wrong.
    fn health(&self) -> Result<(), String> {
        if !self.progress().ready {
            return Err("the first full list of objects is not there yet".to_owned());
        }
        let maps = metrics::open(&self.pins).map_err(|error| error.to_string())?;
        let heartbeat = maps.heartbeat().map_err(|error| error.to_string())?;
        if heartbeat.is_stale(since_boot_ns()) {
            return Err("the agent is silent, and connects pass to kube-proxy".to_owned());
        }
        Ok(())
    }
}

async fn metrics_page(State(admin): State<Admin>) -> Response {
    // Walking the maps takes system calls.
    let text = spawn_blocking(move || metrics::text(&admin)).await;
    match text {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Ok(Err(error)) => failure(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn health_page(State(admin): State<Admin>) -> Response {
    match spawn_blocking(move || admin.health()).await {
        Ok(Ok(())) => "ok\n".into_response(),
        Ok(Err(reason)) => failure(StatusCode::SERVICE_UNAVAILABLE, reason),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

fn failure(status: StatusCode, reason: String) -> Response {
    (status, reason + "\n").into_response()
}

/// Metrics can't be told.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// They can't be written as text.
    #[error("cannot write the metrics as text")]
    Format(#[from] std::fmt::Error),
}
