//! The agent: events in, map writes out.
//!
//! Everything that waits is here and in [`watch`]; everything that
//! decides is in [`state`](crate::state), [`plan`](crate::plan) and
//! [`diff`](crate::diff). The order at the start:
//! 1. load the programs and adopt the pinned maps, whatever is in them;
//! 2. wait for the first full list of objects, and prune nothing before;
//! 3. write the differences, and the first heartbeat;
//! 4. attach, or replace the programs inside the links that are there.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nix::time::{ClockId, clock_gettime};
use shunt_common::{Clients, Heartbeat, LoadKey, SpliceMode, address};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};
use tracing::{debug, error, info, warn};

use crate::admin::{Admin, Served};
use crate::apply::{Applier, WriteError};
use crate::bpf::{
    Cgroup, CgroupError, Features, KernelMaps, LoadError, Loaded, Loader, MissingFeature, Pins,
    PinsError, PodCgroups, ReadError, Splicing, UdpClients, check_privileges, ignore_splice_calls,
    self_check, splice_members, stop_marking,
};
use crate::cleanup::{self, Cleaner};
use crate::diff::diff;
use crate::health;
use crate::model::Object;
use crate::plan::{Policy, opted_out, plan};
use crate::splice::{Follower, Settings, StartError};
use crate::state::{Event, State};
use crate::watch::{self, Source, SourceHealth, WatchError};

/// How often the heartbeat is written.
const BEAT: Duration = Duration::from_secs(1);
/// Wait before failed writes are tried again; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How often to look for the cgroup of a pod that is to be left alone and has
/// none yet, where no change is told.
const POD_CGROUPS: Duration = Duration::from_secs(1);
/// Batches of events that wait for the agent.
const QUEUE: usize = 64;

/// What the agent is told to do.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node that it runs on.
    pub node_name: String,
    /// Where Services, EndpointSlices and Nodes come from.
    pub source: Source,
    /// What to prefer.
    pub policy: Policy,
    /// The cgroup to attach to; the machine's root by default.
    pub cgroup: Option<PathBuf>,
    /// Where to pin.
    pub pins: Pins,
    /// Where to serve `/metrics` and `/healthz`, if anywhere.
    pub metrics_address: Option<SocketAddr>,
    /// Whether the connects of the host's own processes are translated.
    pub host_processes: bool,
    /// What to do about connects that get no answer.
    pub health: health::Settings,
    /// What to splice.
    pub splice: Settings,
    /// Whether processes that use splice(2) are looked for.
    pub watch_splice_calls: bool,
    /// The programs pass everything once the heartbeat is older than this.
    pub stale_after: Duration,
}

/// Why the agent can't start or go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Something that shunt can't do without.
    #[error(transparent)]
    Missing(#[from] MissingFeature),
    /// The pins can't be used.
    #[error(transparent)]
    Pins(#[from] PinsError),
    /// The cgroup can't be used.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The programs can't be loaded or attached.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Host processes can't be told apart.
    #[error(
        "--host-processes off: this kernel has no cookies of network namespaces \
         (SO_NETNS_COOKIE, Linux 5.14), so that host processes cannot be told apart; leave the \
         flag out, or annotate the Services that they call with shunt.dev/mode: off"
    )]
    HostProcesses,
    /// The maps can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The programs can't be told what to do about connects that get no answer.
    #[error("cannot write what to do about dead endpoints")]
    Health(#[source] WriteError),
    /// The heartbeat can't be written.
    #[error("cannot write the heartbeat")]
    Heartbeat(#[source] WriteError),
    /// No thread can be had.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Pairs can't be followed.
    #[error(transparent)]
    Splice(#[from] StartError),
    /// The source of objects ended.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// Signals can't be caught.
    #[error("cannot catch signals")]
    Signal(#[source] std::io::Error),
}

/// Runs until SIGTERM or SIGINT. Maps and links stay pinned.
pub async fn run(config: Config) -> Result<(), AgentError> {
    check_privileges()?;
    let features = Features::probe();
    let cgroup = Cgroup::find(config.cgroup.as_deref())?;
    config.pins.create()?;
    let _lock = config.pins.lock()?;
    let health = Arc::<SourceHealth>::default();
    let admin = Admin::new(config.pins.clone(), Arc::clone(&health));
    let mut agent = Agent::start(&config, &features, cgroup, admin.clone())?;

    let (sender, mut events) = mpsc::channel(QUEUE);
    let mut source = tokio::spawn(watch::run(
        config.source.clone(),
        config.node_name.clone(),
        sender,
        health,
    ));
    let (told, mut served) = tokio::sync::watch::channel(Served::Off);
    agent.note_served(&served.borrow_and_update());
    let serving = config
        .metrics_address
        .map(|address| tokio::spawn(admin.serve(address, told)));
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AgentError::Signal)?;
    let mut beat = interval(BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);

    loop {
        let wake = agent.next_wake();
        tokio::select! {
            Some(batch) = events.recv() => {
                agent.observe(batch);
                while let Ok(batch) = events.try_recv() {
                    agent.observe(batch);
                }
                agent.reconcile()?;
            }
            () = sleep_until(wake.into()) => agent.reconcile()?,
            () = agent.pod_cgroups.changed() => agent.look_for_pods()?,
            _ = beat.tick() => {
                agent.beat()?;
                agent.stop_marking();
            }
            Ok(()) = served.changed() => agent.note_served(&served.borrow_and_update()),
            ended = &mut source => return Err(source_ended(ended).into()),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    if let Some(serving) = serving {
        serving.abort();
        agent.note_served(&Served::Off);
    }
    info!(
        stale_after = %humantime::format_duration(config.stale_after),
        "stopped; the routes stay in force until they are stale, then kube-proxy answers"
    );
    Ok(())
}

/// Reads the kernel's side once and then follows the events.
struct Agent<'a> {
    config: &'a Config,
    admin: Admin,
    cgroup: Cgroup,
    pod_cgroups: PodCgroups,
    loaded: Loaded,
    maps: KernelMaps,
    applier: Applier,
    /// `None` if this kernel can't destroy sockets.
    cleaner: Option<Cleaner>,
    /// `None` before the programs are attached, or where nothing can be spliced.
    follower: Option<Follower>,
    state: State,
    attached: bool,
    /// Whether programs of an earlier agent may leave marks on sockets, which they
    /// need not once none is spliced.
    stops_marking: bool,
    started: Instant,
    /// Failed writes are due again then.
    retry_at: Option<Instant>,
    retry_wait: Duration,
    /// Writes that failed last time.
    pending: usize,
    /// Slots to be deleted are due then.
    retire_at: Option<Instant>,
    /// The pods' cgroups are to be looked at again then.
    look_at: Option<Instant>,
}

impl<'a> Agent<'a> {
    fn start(
        config: &'a Config,
        features: &Features,
        cgroup: Cgroup,
        admin: Admin,
    ) -> Result<Self, AgentError> {
        let loaded = Loader::new(&config.pins, features).load()?;
        if let Splicing::Unavailable(reason) = loaded.splicing() {
            warn!(%reason, "splicing is off; connections are still routed");
        }
        if !loaded.can_refuse() {
            warn!(
                "this kernel cannot refuse connects (bpf_set_retval, Linux 5.18): kube-proxy does"
            );
        }
        if !config.host_processes && !loaded.knows_host() {
            return Err(AgentError::HostProcesses);
        }
        if let Some(reason) = loaded.unwatched() {
            warn!(%reason, "dead endpoints are not noticed; connections are still routed");
        }
        let mut maps = KernelMaps::open(&config.pins)?;
        let watched = config.health.config(health::tick());
        maps.health.configure(watched).map_err(AgentError::Health)?;
        let now = Instant::now();
        let applier = Applier::adopt(&maps.snapshot()?, now);
        info!(
            node = %config.node_name,
            pins = %config.pins.directory().display(),
            cgroup = %cgroup.path().display(),
            adopted = applier.actual().routes.len(),
            "started, waiting for the first full list"
        );
        Ok(Self {
            config,
            cleaner: start_cleaner(&config.pins, admin.clone())?,
            admin,
            pod_cgroups: PodCgroups::new(cgroup.path()),
            cgroup,
            loaded,
            maps,
            applier,
            follower: None,
            state: State::default(),
            attached: false,
            stops_marking: false,
            started: now,
            retry_at: None,
            retry_wait: RETRY_MIN,
            pending: 0,
            retire_at: Some(now),
            look_at: None,
        })
    }

    fn observe(&mut self, batch: Vec<Event>) {
        for mut event in batch {
            if let Event::Apply(Object::EndpointSlice(slice)) = &mut event {
                slice.forget_pods();
            }
            self.state.apply(event);
        }
    }

    /// Makes the maps what the state asks for.
    fn reconcile(&mut self) -> Result<(), AgentError> {
        self.admin.note(|progress| progress.reconciliations += 1);
        if !self.state.is_synced() {
            // Nothing is due before: what is would wake this loop at once, again and
            // again.
            (self.retire_at, self.look_at) = (None, None);
            return Ok(());
        }
        let now = Instant::now();
        // While a cgroup is lacking, not each batch brings another look.
        let is_due = self.look_at.map(|due| due <= now);
        if is_due.unwrap_or_else(|| self.lacks_cgroup()) {
            self.look(now);
        }
        let desired = plan(&self.state, &self.config.node_name, &self.config.policy);
        let ops = diff(self.applier.actual(), &desired);
        self.pending = 0;
        if !ops.is_empty() {
            self.apply(ops, now)?;
        }
        self.delete_retired(now);
        if !self.attached {
            self.attach()?;
            self.start_splicing()?;
            for other in self.config.pins.others() {
                retire_layout(&other);
            }
        }
        if let Some(follower) = &self.follower {
            follower.set_wishes(!self.applier.actual().wishes.is_empty());
        }
        if let Some(cleaner) = &mut self.cleaner {
            cleaner.observe(&self.state);
        }
        self.note_progress();
        Ok(())
    }

    /// For `/metrics` and `/healthz`.
    fn note_progress(&self) {
        let (routes, state) = (self.applier.actual().routes.len(), &self.state);
        let in_step = self.pending == 0;
        self.admin.note(|progress| {
            progress.ready = self.attached;
            progress.routes = routes;
            progress.pending_routes = self.pending;
            progress.rejected_objects = state.rejected();
            progress.unreadable_documents = state.unreadable();
            if in_step {
                progress.in_step = Some(SystemTime::now());
            }
        });
    }

    /// For `shunt status`.
    fn note_served(&mut self, served: &Served) {
        if let Err(error) = self.maps.put_metrics(&served.to_string()) {
            warn!(error = %chain(&error), "where metrics are served could not be noted");
        }
    }

    /// Some pods may have a cgroup now.
    fn look_for_pods(&mut self) -> Result<(), AgentError> {
        self.look_at = Some(Instant::now());
        self.reconcile()
    }

    fn look(&mut self, now: Instant) {
        let found = self.pod_cgroups.look();
        let is_none_there = found.is_empty();
        self.state.apply(Event::PodCgroups(found));
        self.look_at = self.lacks_cgroup().then_some(now + POD_CGROUPS);
        if is_none_there && self.lacks_cgroup() {
            self.pod_cgroups.warn_of_version_1();
        }
    }

    /// Whether a pod is to be left alone whose cgroup is not known.
    fn lacks_cgroup(&self) -> bool {
        opted_out(&self.state, &self.config.node_name)
            .any(|(pod, _)| self.state.cgroup_of(pod).is_none())
    }

    fn apply(&mut self, ops: Vec<crate::diff::Op>, now: Instant) -> Result<(), AgentError> {
        let some_before = self.leaves_pods_alone();
        let applied = self.applier.apply(ops, &mut self.maps, now);
        if self.leaves_pods_alone() != some_before {
            self.beat()?;
        }
        self.forget_loads();
        debug!(
            done = applied.done,
            failed = applied.failed.len(),
            "applied"
        );
        self.pending = applied.failed.len();
        self.admin.note(|progress| {
            progress.writes += applied.done as u64;
            progress.failed_writes += applied.failed.len() as u64;
        });
        let Some((_, error)) = applied.failed.first() else {
            self.retry_at = None;
            self.retry_wait = RETRY_MIN;
            return Ok(());
        };
        error!(
            error = %chain(error),
            failed = applied.failed.len(),
            retry_in = %humantime::format_duration(self.retry_wait),
            "a part of the table could not be written"
        );
        self.retry_at = Some(now + self.retry_wait);
        self.retry_wait = (self.retry_wait * 2).min(RETRY_MAX);
        Ok(())
    }

    fn leaves_pods_alone(&self) -> bool {
        !self.applier.actual().left_alone.is_empty()
    }

    /// Forgets the numbers of connections that nothing reads any more.
    fn forget_loads(&mut self) {
        let loads = match self.maps.loads() {
            Ok(loads) => loads,
            Err(error) => return warn!(error = %chain(&error), "cannot read the loads"),
        };
        let routes = &self.applier.actual().routes;
        for (endpoint, _) in loads.iter().filter(|(_, count)| **count == 0) {
            let address = endpoint_of(endpoint);
            let limited = routes
                .values()
                .filter(|route| route.max_local_connections.is_some());
            let mut tiers = limited.flat_map(|route| &route.tiers);
            if tiers.any(|tier| tier.endpoints.iter().any(|it| it.address == address)) {
                continue;
            }
            if let Err(error) = self.maps.delete_load(endpoint) {
                warn!(error = %chain(&error), "cannot forget a load");
            }
        }
    }

    fn delete_retired(&mut self, now: Instant) {
        self.retire_at = match self.applier.delete_retired(&mut self.maps, now) {
            Ok(next) => next,
            Err(error) => {
                warn!(error = %chain(&error), "old slots could not be deleted");
                Some(now + RETRY_MAX)
            }
        };
    }

    fn attach(&mut self) -> Result<(), AgentError> {
        self.attached = true;
        self.beat()?;
        let mode = self.config.splice.mode;
        self.loaded.attach(&self.cgroup, &self.config.pins, mode)?;
        self.stops_marking = mode == SpliceMode::Off;
        // Whoever waits for the words below may ask `/healthz` at once.
        self.note_progress();
        let cgroup = self.cgroup.path().display().to_string();
        match self_check(&self.maps, &cgroup) {
            Ok(()) => info!(
                routes = self.applier.actual().routes.len(),
                after = ?self.started.elapsed(),
                "ready: the table is written, the programs are attached and see connects"
            ),
            Err(error) => error!(error = %chain(&error), "the self-check failed"),
        }
        Ok(())
    }

    fn start_splicing(&mut self) -> Result<(), AgentError> {
        let mode = self.config.splice.mode;
        if matches!(self.loaded.splicing(), Splicing::Available(_)) {
            if mode != SpliceMode::Off {
                self.watch_splice_calls();
            }
            let manage = self.loaded.manage()?;
            self.follower = Some(Follower::start(
                &self.config.pins,
                manage,
                self.config.splice,
            )?);
        }
        Ok(())
    }

    /// Before anything is promoted.
    fn watch_splice_calls(&mut self) {
        let pins = &self.config.pins;
        if !self.config.watch_splice_calls {
            if let Err(error) = ignore_splice_calls(pins) {
                warn!(%error, "cannot detach the programs that see splice(2)");
            }
            return;
        }
        match self.loaded.watch_splice_calls(pins) {
            Ok(by) => info!(by, "splice(2) is seen, and its users are left alone"),
            Err(reason) => warn!(
                %reason,
                "splice(2) is not seen: a process that reads a spliced connection by it would \
                 wait for ever; leave --splice at opt-in, and out of Services of such processes"
            ),
        }
    }

    fn stop_marking(&mut self) {
        let pins = &self.config.pins;
        if !self.stops_marking || splice_members(pins).is_ok_and(|members| members > 0) {
            return;
        }
        match stop_marking(pins) {
            Ok(()) => self.stops_marking = false,
            Err(error) => warn!(%error, "cannot detach the programs that mark sockets"),
        }
    }

    fn beat(&mut self) -> Result<(), AgentError> {
        // Before the table is written, an old one must not look fresh.
        if !self.attached {
            return Ok(());
        }
        let stale_after = u64::try_from(self.config.stale_after.as_nanos()).unwrap_or(u64::MAX);
        let pods = if self.leaves_pods_alone() {
            Clients::SOME_PODS
        } else {
            0
        };
        let host = if self.config.host_processes {
            0
        } else {
            Clients::HOST
        };
        let clients = Clients(pods | host);
        let heartbeat =
            Heartbeat::new(since_boot_ns(), stale_after, std::process::id()).leaving_alone(clients);
        self.maps.beat(heartbeat).map_err(AgentError::Heartbeat)
    }

    /// When something is due even if no event comes.
    fn next_wake(&self) -> Instant {
        let far = Instant::now() + RETRY_MAX;
        [self.retry_at, self.retire_at, self.look_at]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(far)
    }
}

fn start_cleaner(pins: &Pins, admin: Admin) -> Result<Option<Cleaner>, AgentError> {
    if let Err(reason) = cleanup::probe() {
        warn!(%reason, "connected UDP sockets stay with an endpoint that is gone");
        return Ok(None);
    }
    let count = move |sockets| admin.note(|progress| progress.udp_sockets_destroyed += sockets);
    let cleaner = Cleaner::start(UdpClients::open(pins)?, count).map_err(AgentError::Thread)?;
    Ok(Some(cleaner))
}

fn endpoint_of(load: &LoadKey) -> SocketAddr {
    let port = u16::from_be_bytes(load.port());
    SocketAddr::new(address::to_ip(load.address()), port)
}

/// Takes out the programs of another version, whose work this one's now do.
fn retire_layout(other: &Pins) {
    let pins = other.directory().display().to_string();
    let _lock = match other.lock() {
        Ok(lock) => lock,
        Err(error) => {
            return warn!(%pins, error = %chain(&error), "the pins of another version stay");
        }
    };
    // The splice of an open connection holds what its reader has not read yet.
    let members = splice_members(other).unwrap_or(0);
    let done = if members == 0 {
        other.remove()
    } else {
        other.detach()
    };
    match done {
        Ok(()) if members == 0 => info!(%pins, "removed the programs and maps of another version"),
        Ok(()) => warn!(
            %pins,
            sockets = members,
            "detached the programs of another version; its maps stay until the next start, for \
             the spliced connections that are open"
        ),
        Err(error) => warn!(%pins, error = %chain(&error), "the pins of another version stay"),
    }
}

/// Time since boot, suspended time included, as the programs read it with
/// `bpf_ktime_get_boot_ns`.
pub fn since_boot_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(Duration::from)
        .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

fn source_ended(ended: Result<Result<(), WatchError>, tokio::task::JoinError>) -> WatchError {
    match ended {
        Ok(Err(error)) => error,
        Ok(Ok(())) | Err(_) => WatchError::Ended,
    }
}

/// An error with its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
