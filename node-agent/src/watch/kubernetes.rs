//! The Kubernetes API.
//!
//! Only what is used crosses the wire: selectors leave out what kube-proxy
//! leaves out (`pkg/proxy/config/config.go` and `cmd/kube-proxy/app/server.go`
//! in kubernetes/kubernetes), of Nodes and Pods only the own ones are watched,
//! and of Namespaces only those that opted out. Each
//! object is reduced to the model as soon as it is read.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use futures::stream::{BoxStream, select_all};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::Sender;
use tracing::{info, warn};

use crate::model::convert::{self, HEADLESS, MODE, PROXY_NAME, Rejected};
use crate::model::{Kind, Object, ObjectRef};
use crate::state::{Event, State};
use crate::watch::SourceHealth;

/// How many events are handed on together at most, so that a long list does not
/// wait for its end.
const BATCH: usize = 512;
/// How many objects are asked for at once.
const PAGE: u32 = 500;

/// Why the API can't be watched.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is no configuration.
    #[error(
        "no Kubernetes API is configured: run in a pod with a service account, or set KUBECONFIG, \
         or read the manifests of a folder with --from DIR (`shunt explain`: --manifests DIR)"
    )]
    Config(#[source] kube::config::InferConfigError),
    /// The configuration can't be used.
    #[error("cannot make a client for the Kubernetes API")]
    Client(#[source] kube::Error),
    /// It can't be asked.
    #[error(
        "cannot list {kind}s of the Kubernetes API: does it answer, and may this account list them?"
    )]
    List {
        /// Of which kind.
        kind: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Sends what the API holds, and then its changes, until the receiver is gone.
/// An API that is away is waited for.
pub(super) async fn follow(
    node_name: &str,
    sender: &Sender<Vec<Event>>,
    health: &Arc<SourceHealth>,
) -> Result<(), KubernetesError> {
    let config = config().await?;
    info!(api = %config.cluster_url, "watching the Kubernetes API");
    let client = Client::try_from(config).map_err(KubernetesError::Client)?;
    watch(client, node_name, sender, health).await;
    Ok(())
}

/// What the API holds now, and what is wrong with it. Also what the agent does
/// not ask for since it is left to other proxies, so that it can be explained.
pub(super) async fn read(node_name: &str) -> Result<(State, Vec<String>), KubernetesError> {
    let client = Client::try_from(config().await?).map_err(KubernetesError::Client)?;
    let own_node = ListParams::default().fields(&format!("metadata.name={node_name}"));
    let services = list(&client, ListParams::default(), service).await?;
    let slices = list(&client, ListParams::default(), endpoint_slice).await?;
    let nodes = list(&client, own_node, node).await?;
    let on_node = ListParams::default().fields(&format!("spec.nodeName={node_name}"));
    let pods = list(&client, on_node, pod).await?;
    let namespaces = list(&client, ListParams::default(), namespace).await?;
    let (mut state, mut complaints) = (State::default(), Vec::new());
    for object in [services, slices, nodes, pods, namespaces]
        .into_iter()
        .flatten()
    {
        state.apply(match object {
            Ok(object) => Event::Apply(object),
            Err(rejected) => {
                complaints.push(rejected.to_string());
                Event::Reject(rejected)
            }
        });
    }
    state.apply(Event::Synced);
    Ok((state, complaints))
}

async fn config() -> Result<kube::Config, KubernetesError> {
    kube::Config::infer().await.map_err(KubernetesError::Config)
}

/// All objects of a kind, page by page.
async fn list<K>(
    client: &Client,
    params: ListParams,
    convert: impl Fn(K) -> Result<Option<Object>, Rejected>,
) -> Result<Vec<Result<Object, Rejected>>, KubernetesError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<K>::all(client.clone());
    let mut params = params.limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api
            .list(&params)
            .await
            .map_err(|source| KubernetesError::List {
                kind: K::kind(&()).into_owned(),
                source: Box::new(source),
            })?;
        objects.extend(
            page.items
                .into_iter()
                .filter_map(|it| convert(it).transpose()),
        );
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(objects),
        }
    }
}

fn service(service: Service) -> Result<Option<Object>, Rejected> {
    Ok(Some(Object::Service(convert::service(service)?)))
}

fn endpoint_slice(slice: EndpointSlice) -> Result<Option<Object>, Rejected> {
    Ok(convert::endpoint_slice(slice)?.map(Object::EndpointSlice))
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the form of the other kinds, which can be rejected"
)]
fn pod(pod: Pod) -> Result<Option<Object>, Rejected> {
    Ok(Some(Object::Pod(convert::pod(&pod))))
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the form of the other kinds, which can be rejected"
)]
fn namespace(namespace: Namespace) -> Result<Option<Object>, Rejected> {
    Ok(Some(Object::Namespace(convert::namespace(
        &namespace.metadata,
    ))))
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the form of the other kinds, which can be rejected"
)]
fn node(node: Node) -> Result<Option<Object>, Rejected> {
    Ok(Some(Object::Node(convert::node(&node.metadata))))
}

async fn watch(
    client: Client,
    node_name: &str,
    sender: &Sender<Vec<Event>>,
    health: &Arc<SourceHealth>,
) {
    let not_another_proxys = format!("!{PROXY_NAME}");
    let not_headless = format!("!{HEADLESS}");
    let own_node = format!("metadata.name={node_name}");
    let on_node = format!("spec.nodeName={node_name}");
    let off = format!("{MODE}=off");
    let streams = [
        stream(&client, all().labels(&not_another_proxys), service),
        stream(&client, all().labels(&not_headless), endpoint_slice),
        stream(&client, all().fields(&own_node), node),
        stream(&client, all().fields(&on_node), pod),
        stream(&client, all().labels(&off), namespace),
    ];
    health.expect(streams.len());
    let mut trackers = streams.each_ref().map(|_| Tracker::default());
    let streams = (0..).zip(streams).map(|(index, stream)| {
        let health = Arc::clone(health);
        stream
            .filter_map(move |change| {
                let change = observe(&health, index, change);
                async move { change.map(|it| (index, it)) }
            })
            .boxed()
    });
    let mut changes = select_all(streams).ready_chunks(BATCH);
    let mut synced = false;
    while let Some(chunk) = changes.next().await {
        let mut events: Vec<Event> = chunk
            .into_iter()
            .flat_map(|(index, change)| trackers[index].observe(change))
            .collect();
        if !synced && trackers.iter().all(|tracker| tracker.listed) {
            synced = true;
            events.push(Event::Synced);
        }
        if !events.is_empty() && sender.send(events).await.is_err() {
            return;
        }
    }
}

/// Takes note of whether the API answered. An error is waited out.
fn observe(health: &SourceHealth, index: usize, change: Option<Change>) -> Option<Change> {
    match change {
        // A list that has only begun is no answer yet.
        Some(Change::ListBegins) => {}
        Some(_) => health.answered(index),
        None => health.failed(index, Instant::now()),
    }
    change
}

/// A change of one kind of objects, reduced to the model.
#[derive(Debug)]
enum Change {
    ListBegins,
    /// `None` if the object is nothing to be read.
    Seen(ObjectRef, Option<Result<Object, Rejected>>),
    Gone(ObjectRef),
    ListEnds,
}

/// Knows which objects of a kind the state has, so that those that are missing
/// from a new list can be deleted: after a watch was interrupted for too long
/// (410 Gone), the API tells what is, not what is gone.
#[derive(Debug, Default)]
struct Tracker {
    known: BTreeSet<ObjectRef>,
    /// While a list is read.
    seen: BTreeSet<ObjectRef>,
    /// Whether one list was read to its end.
    listed: bool,
}

impl Tracker {
    fn observe(&mut self, change: Change) -> Vec<Event> {
        match change {
            Change::ListBegins => {
                self.seen.clear();
                Vec::new()
            }
            Change::ListEnds => {
                self.listed = true;
                let seen = std::mem::take(&mut self.seen);
                let known = std::mem::replace(&mut self.known, seen);
                known
                    .difference(&self.known)
                    .cloned()
                    .map(Event::Delete)
                    .collect()
            }
            Change::Gone(reference) | Change::Seen(reference, None) => {
                let was_known = self.known.remove(&reference);
                self.seen.remove(&reference);
                if was_known {
                    vec![Event::Delete(reference)]
                } else {
                    Vec::new()
                }
            }
            Change::Seen(reference, Some(object)) => {
                self.known.insert(reference.clone());
                self.seen.insert(reference);
                vec![match object {
                    Ok(object) => Event::Apply(object),
                    Err(rejected) => {
                        warn!("{rejected}");
                        Event::Reject(rejected)
                    }
                }]
            }
        }
    }
}

/// The changes of one kind; `None` for an error, which is logged and waited out
/// with a growing delay.
fn stream<K>(
    client: &Client,
    config: watcher::Config,
    convert: impl Fn(K) -> Result<Option<Object>, Rejected> + Send + 'static,
) -> BoxStream<'static, Option<Change>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let kind = match K::kind(&()).as_ref() {
        "Service" => Kind::Service,
        "EndpointSlice" => Kind::EndpointSlice,
        "Pod" => Kind::Pod,
        "Namespace" => Kind::Namespace,
        _ => Kind::Node,
    };
    watcher(Api::<K>::all(client.clone()), config)
        .default_backoff()
        .inspect_err(move |error| warn!(?kind, %error, "the Kubernetes API did not answer as expected; trying again"))
        .map(move |event| Some(change(kind, event.ok()?, &convert)))
        .boxed()
}

fn change<K: Resource>(
    kind: Kind,
    event: watcher::Event<K>,
    convert: impl Fn(K) -> Result<Option<Object>, Rejected>,
) -> Change {
    match event {
        watcher::Event::Init => Change::ListBegins,
        watcher::Event::InitDone => Change::ListEnds,
        watcher::Event::Delete(object) => Change::Gone(reference(kind, object.meta())),
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
            let reference = reference(kind, object.meta());
            Change::Seen(reference, convert(object).transpose())
        }
    }
}

fn reference(kind: Kind, metadata: &ObjectMeta) -> ObjectRef {
    ObjectRef {
        kind,
        name: convert::name_of(kind, metadata),
    }
}

fn all() -> watcher::Config {
    watcher::Config::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> (ObjectRef, Object) {
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        };
        let service = Service {
            metadata,
            ..Service::default()
        };
        let object = Object::Service(convert::service(service).unwrap());
        (object.reference(), object)
    }

    fn seen(name: &str) -> Change {
        let (reference, object) = service(name);
        Change::Seen(reference, Some(Ok(object)))
    }

    #[test]
    fn a_new_list_deletes_what_is_missing_from_it() {
        let mut tracker = Tracker::default();
        for change in [Change::ListBegins, seen("a"), seen("b")] {
            tracker.observe(change);
        }
        assert!(!tracker.listed);
        assert_eq!(tracker.observe(Change::ListEnds), []);
        assert!(tracker.listed);

        tracker.observe(seen("c"));
        for change in [Change::ListBegins, seen("b")] {
            tracker.observe(change);
        }
        let deleted = tracker.observe(Change::ListEnds);
        assert_eq!(
            deleted,
            [Event::Delete(service("a").0), Event::Delete(service("c").0)]
        );
    }

    #[test]
    fn a_list_that_is_broken_off_deletes_nothing() {
        let mut tracker = Tracker::default();
        for change in [
            Change::ListBegins,
            seen("a"),
            Change::ListEnds,
            Change::ListBegins,
        ] {
            tracker.observe(change);
        }
        for change in [Change::ListBegins, seen("a")] {
            assert!(!matches!(tracker.observe(change)[..], [Event::Delete(_)]));
        }
        assert_eq!(tracker.observe(Change::ListEnds), []);
    }

    #[test]
    fn an_object_that_is_gone_is_deleted_once() {
        let mut tracker = Tracker::default();
        tracker.observe(seen("a"));
        let (reference, _) = service("a");
        assert_eq!(
            tracker.observe(Change::Gone(reference.clone())),
            [Event::Delete(reference.clone())]
        );
        assert_eq!(tracker.observe(Change::Gone(reference)), []);
    }
}
