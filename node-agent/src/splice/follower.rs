//! Follows all pairs of this node.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aya::maps::{MapData, RingBuf};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shunt_common::{
    EventKind, OWN_NAMESPACE, Operation, Pair, SelfTest, SpliceConfig, SpliceEvent, SpliceMode,
    SpliceReason, Task,
};
use tracing::{debug, error, info, warn};

use super::kick::kick;
use super::namespaces::Namespaces;
use super::self_test::{self, Failure};
use super::step::{Event, Phase, Step, step};
use crate::bpf::{Manage, Pairs, Pins, ReadError, splice_events};

/// How often new pairs, the switch and lost events are looked for.
const TICK: Duration = Duration::from_millis(200);

/// What the operator wants of the splice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// Which connections.
    pub mode: SpliceMode,
    /// How old a connection has to be.
    pub after: Duration,
    /// Bytes that all readers together may hold unread.
    pub memory: u64,
    /// Pairs that may be spliced at once.
    pub max_pairs: usize,
    /// Pairs that may be promoted in a second.
    pub rate: u32,
}

/// The most and the least that one reader may hold unread, bytes.
const QUEUE_MAX: u64 = 4 << 20;
const QUEUE_MIN: u64 = 256 << 10;

impl Settings {
    /// How many pairs may be spliced at once: as many as were told, and as have
    /// room.
    fn max_members(&self) -> usize {
        let by_memory = self.memory / (2 * QUEUE_MIN);
        self.max_pairs
            .min(usize::try_from(by_memory).unwrap_or(usize::MAX))
    }

    /// What each of the two readers of a pair may hold unread, so that all of
    /// `members` pairs keep within the memory.
    fn queue_bytes(&self, members: usize) -> u32 {
        let share = self.memory / (2 * members.max(1) as u64);
        share.clamp(QUEUE_MIN, QUEUE_MAX) as u32
    }
}

/// The thread that follows the pairs; ends when this is dropped.
#[derive(Debug)]
pub struct Follower {
    stop: Arc<AtomicBool>,
    wishes: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    /// Adopts the pairs that are there and follows them.
    ///
    /// # Errors
    ///
    /// The maps can't be read, or no thread can be had.
    pub fn start(pins: &Pins, manage: Manage, settings: Settings) -> Result<Self, StartError> {
        let wishes = Arc::new(AtomicBool::new(false));
        let mut work = Work::new(pins, manage, settings, Arc::clone(&wishes))?;
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("splice".to_owned())
            .spawn(move || {
                work.test_kernel();
                while !is_stopped.load(Ordering::Relaxed) {
                    work.turn();
                }
            })
            .map_err(StartError::Thread)?;
        Ok(Self {
            stop,
            wishes,
            thread: Some(thread),
        })
    }
}

impl Follower {
    /// Whether some pod has a wish of its own, so that the programs look for it.
    pub fn set_wishes(&self, some: bool) {
        self.wishes.store(some, Ordering::Relaxed);
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // That it panicked was logged.
            let _ = thread.join();
        }
    }
}

/// Why pairs can't be followed.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The maps.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The own network namespace.
    #[error("cannot tell this process's network namespace")]
    Namespace(#[source] io::Error),
    /// The configuration can't be written.
    #[error("cannot tell the programs what to splice")]
    Configure(#[source] crate::apply::WriteError),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// A pair that is followed.
#[derive(Debug)]
struct Followed {
    phase: Phase,
    /// When to look again; none while it is in the kernel's hands.
    due: Option<Instant>,
    netns_cookies: [u64; 2],
}

struct Work {
    manage: Manage,
    pairs: Pairs,
    events: RingBuf<MapData>,
    settings: Settings,
    configured: SpliceConfig,
    namespaces: Namespaces,
    followed: BTreeMap<u64, Followed>,
    /// When which pair is due.
    agenda: BTreeSet<(Instant, u64)>,
    /// Pairs in the map, or on the way in or out.
    members: usize,
    /// Whether some pod has a wish of its own.
    wishes: Arc<AtomicBool>,
    is_off: bool,
    next_tick: Instant,
    /// Promotions that may be made now.
    tokens: f64,
    refilled: Instant,
    /// `EventsLost` as last seen.
    lost: u64,
}

impl Work {
    fn new(
        pins: &Pins,
        manage: Manage,
        settings: Settings,
        wishes: Arc<AtomicBool>,
    ) -> Result<Self, StartError> {
        let pairs = Pairs::open(pins)?;
        let now = Instant::now();
        let mut work = Self {
            manage,
            events: splice_events(pins)?,
            settings,
            configured: SpliceConfig::default(),
            namespaces: Namespaces::new().map_err(StartError::Namespace)?,
            followed: BTreeMap::new(),
            agenda: BTreeSet::new(),
            members: 0,
            wishes,
            is_off: false,
            next_tick: now,
            tokens: f64::from(settings.rate),
            refilled: now,
            lost: 0,
            pairs,
        };
        work.configure(true).map_err(StartError::Configure)?;
        let adopted = work.adopt(now)?;
        if adopted > 0 {
            info!(
                pairs = adopted,
                members = work.members,
                "adopted the pairs of an earlier agent"
            );
        }
        Ok(work)
    }

    /// Splices nothing if this kernel does not do what it takes.
    fn test_kernel(&mut self) {
        if self.settings.mode == SpliceMode::Off {
            return;
        }
        let result = self.run_self_test();
        self.configured.self_test_port = [0; 2];
        self.configured.self_test = match result {
            Ok(()) => SelfTest::Passed as u32,
            Err(Failure::Check(check)) => check as u32,
            Err(Failure::Io(_)) => SelfTest::Failed as u32,
        };
        if let Err(error) = result {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            error!(%error, cause, "nothing is spliced");
            self.settings.mode = SpliceMode::Off;
        }
        if let Err(error) = self.configure(true) {
            warn!(%error, "cannot tell the programs what to splice");
        }
    }

    fn run_self_test(&mut self) -> Result<(), Failure> {
        let listener = self_test::listener()?;
        self.configured.self_test_port = listener.local_addr()?.port().to_be_bytes();
        self.configure(true).map_err(io::Error::other)?;
        let queue_bytes = self.configured.queue_bytes;
        self_test::run(&self.manage, &self.pairs, &listener, queue_bytes)
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) {
        self.wait();
        let now = Instant::now();
        self.read_events(now);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.tick(now);
        }
        self.do_due(now);
    }

    fn wait(&mut self) {
        let next = self.agenda.first().map(|(due, _)| *due);
        let until = next.map_or(self.next_tick, |due| due.min(self.next_tick));
        let wait = until.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            return;
        }
        // The kernel counts in milliseconds; what is less is slept here.
        if wait < Duration::from_millis(1) {
            return thread::sleep(wait);
        }
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let mut events = [PollFd::new(self.events.as_fd(), PollFlags::POLLIN)];
        // A signal is no reason to stop.
        let _ = poll(&mut events, timeout);
    }

    fn read_events(&mut self, now: Instant) {
        let mut events = Vec::new();
        while let Some(item) = self.events.next() {
            events.extend(SpliceEvent::from_bytes(&item));
        }
        for event in events {
            let reason = u8::try_from(event.reason)
                .ok()
                .and_then(SpliceReason::from_u8);
            let reason = reason.unwrap_or(SpliceReason::Marked);
            match event.kind {
                kind if kind == EventKind::Paired as u32 => self.found(event.pair, now),
                // Which pairs have an end there, the kernel says.
                kind if kind == EventKind::Splicer as u32 => {
                    if let Err(error) = self.adopt(now) {
                        warn!(%error, "cannot read the pairs");
                    }
                }
                _ => self.leave(event.pair, reason, now),
            }
        }
    }

    /// A new pair. It is left alone until it is old enough.
    fn found(&mut self, key: u64, now: Instant) {
        #[cfg(feature = "fault-injection")]
        crate::fault::crash_at(crate::fault::Fault::CrashFound);
        let due = now + self.settings.after;
        let followed = Followed {
            phase: Phase::NEW,
            due: Some(due),
            netns_cookies: [0; 2],
        };
        if let Entry::Vacant(entry) = self.followed.entry(key) {
            entry.insert(followed);
            self.agenda.insert((due, key));
        }
    }

    /// The pair has to go back to TCP.
    fn leave(&mut self, key: u64, reason: SpliceReason, now: Instant) {
        #[cfg(feature = "fault-injection")]
        crate::fault::crash_at(crate::fault::Fault::CrashTold);
        let Some(followed) = self.followed.get(&key) else {
            return;
        };
        let phase = followed.phase;
        let next = step(phase, Event::Leave(reason));
        self.note(key, next, now);
    }

    fn tick(&mut self, now: Instant) {
        let is_off = self.pairs.is_switched_off();
        match is_off.map(|it| it || self.settings.mode == SpliceMode::Off) {
            Ok(is_off) if is_off != self.is_off => self.switch(is_off, now),
            Ok(_) => {}
            Err(error) => warn!(%error, "cannot read the switch of the splice"),
        }
        let elapsed = now.saturating_duration_since(self.refilled);
        self.refilled = now;
        let rate = f64::from(self.settings.rate);
        self.tokens = (self.tokens + elapsed.as_secs_f64() * rate).min(rate.max(1.0));
        match self.pairs.events_lost() {
            Ok(lost) if lost != self.lost => {
                self.lost = lost;
                warn!(lost, "events of the splice were lost; looking at all pairs");
                if let Err(error) = self.adopt(now) {
                    warn!(%error, "cannot read the pairs");
                }
            }
            Ok(_) => {}
            Err(error) => warn!(%error, "cannot read the counters"),
        }
        if let Err(error) = self.configure(false) {
            warn!(%error, "cannot tell the programs what to splice");
        }
    }

    fn switch(&mut self, is_off: bool, now: Instant) {
        self.is_off = is_off;
        info!(
            state = if is_off { "off" } else { "on" },
            members = self.members,
            "the splice was switched"
        );
        if is_off {
            let members: Vec<u64> = self.members().collect();
            for key in members {
                self.leave(key, SpliceReason::SwitchedOff, now);
            }
        }
    }

    fn members(&self) -> impl Iterator<Item = u64> {
        self.followed
            .iter()
            .filter(|(_, followed)| followed.phase.is_member())
            .map(|(key, _)| *key)
    }

    /// Takes in all pairs of the map that are not known. Those that are known are
    /// looked at again if they are promoted: an event about them may be lost.
    fn adopt(&mut self, now: Instant) -> Result<usize, ReadError> {
        let mut adopted = 0;
        let all = self.pairs.all()?;
        let closed: Vec<_> = self.members().filter(|it| !all.contains_key(it)).collect();
        for key in closed {
            self.leave(key, SpliceReason::Gone, now);
        }
        for (key, pair) in all {
            if !pair.is_complete() {
                continue;
            }
            let known = self.followed.get(&key).map(|followed| followed.phase);
            if known.is_some_and(|phase| phase != Phase::Spliced) {
                continue;
            }
            let phase = Phase::adopt(&pair);
            adopted += 1;
            self.put(key, phase, Some(now), cookies(&pair));
        }
        Ok(adopted)
    }

    fn put(&mut self, key: u64, phase: Phase, due: Option<Instant>, netns_cookies: [u64; 2]) {
        self.remove(key);
        self.members += usize::from(phase.is_member());
        self.agenda.extend(due.map(|due| (due, key)));
        let followed = Followed {
            phase,
            due,
            netns_cookies,
        };
        self.followed.insert(key, followed);
    }

    fn remove(&mut self, key: u64) {
        let Some(old) = self.followed.remove(&key) else {
            return;
        };
        self.members -= usize::from(old.phase.is_member());
        if let Some(due) = old.due {
            self.agenda.remove(&(due, key));
        }
    }

    /// Asks the kernel for everything that is due, in few calls.
    fn do_due(&mut self, now: Instant) {
        let mut due = Vec::new();
        while let Some((at, key)) = self.agenda.first().copied() {
            if at > now {
                break;
            }
            self.agenda.remove(&(at, key));
            if let Some(followed) = self.followed.get_mut(&key) {
                followed.due = None;
                due.push(key);
            }
        }
        let mut tasks = Vec::with_capacity(due.len());
        for key in due {
            match self.task(key, now) {
                Wanted::Task(task) => tasks.push(task),
                Wanted::Nothing => {
                    let phase = self.followed.get(&key).map(|followed| followed.phase);
                    let next = phase.and_then(|phase| step(phase, Event::Due));
                    self.note(key, next, now);
                }
                Wanted::Gone => self.remove(key),
                Wanted::Later(wait) => self.postpone(key, now + wait),
            }
        }
        self.keep_budget(&mut tasks, now);
        if tasks.is_empty() {
            return;
        }
        if let Err(error) = self.manage.run(&mut tasks) {
            warn!(%error, "cannot run the program that manages pairs");
            for task in &tasks {
                self.postpone(task.pair, now + TICK);
            }
            return;
        }
        #[cfg(feature = "fault-injection")]
        crate::fault::crash_after(&tasks);
        for task in &tasks {
            let Some(followed) = self.followed.get(&task.pair) else {
                continue;
            };
            let next = step(followed.phase, Event::Answer(task));
            debug!(pair = task.pair, phase = ?followed.phase, verdict = task.verdict, ends = ?task.ends, ?next, "pair");
            self.note(task.pair, next, now);
            if let Some(next) = next {
                self.kick(task, next.kick);
            }
        }
    }

    fn postpone(&mut self, key: u64, due: Instant) {
        if let Some(followed) = self.followed.get_mut(&key) {
            if let Some(old) = followed.due.replace(due) {
                self.agenda.remove(&(old, key));
            }
            self.agenda.insert((due, key));
        }
    }

    /// The task of a pair's phase.
    fn task(&mut self, key: u64, now: Instant) -> Wanted {
        let Some(followed) = self.followed.get_mut(&key) else {
            return Wanted::Gone;
        };
        let Some(operation) = followed.phase.operation() else {
            return Wanted::Nothing;
        };
        if followed.netns_cookies == [0; 2] {
            match self.pairs.get(key) {
                Some(pair) => followed.netns_cookies = cookies(&pair),
                None => return Wanted::Gone,
            }
        }
        let mut ids = [OWN_NAMESPACE; 2];
        for (id, cookie) in ids.iter_mut().zip(followed.netns_cookies) {
            match self.namespaces.id(cookie, now) {
                Some(known) => *id = known,
                // A namespace without processes has no sockets to promote; what
                // is in the map goes on, and is looked at again.
                None => return Wanted::Later(TICK),
            }
        }
        Wanted::Task(Task::new(key, operation, ids))
    }

    /// Lets only as many promotions through as the budget has, the busiest pairs
    /// first; the others wait.
    fn keep_budget(&mut self, tasks: &mut Vec<Task>, now: Instant) {
        let is_promotion = |task: &Task| task.operation == Operation::Promote as u32;
        let wanted = tasks.iter().filter(|task| is_promotion(task)).count();
        if wanted == 0 {
            return;
        }
        // They count as members already.
        let settled = self.members - wanted.min(self.members);
        let room = self.settings.max_members().saturating_sub(settled);
        let allowed = if self.is_off {
            0
        } else {
            wanted.min(room).min(self.tokens as usize)
        };
        self.tokens -= allowed as f64;
        let busy = |task: &Task| match self.followed.get(&task.pair).map(|it| it.phase) {
            Some(Phase::Promoting { busy }) => busy,
            _ => 0,
        };
        let mut promotions: Vec<Task> = tasks.extract_if(.., |task| is_promotion(task)).collect();
        promotions.sort_by_key(|task| Reverse(busy(task)));
        for late in promotions.split_off(allowed) {
            let Some(followed) = self.followed.get(&late.pair) else {
                continue;
            };
            let netns_cookies = followed.netns_cookies;
            self.put(late.pair, Phase::NEW, Some(now + TICK), netns_cookies);
        }
        tasks.extend(promotions);
    }

    /// Puts a pair where [`step`] says.
    fn note(&mut self, key: u64, next: Option<Step>, now: Instant) {
        let Some(next) = next else {
            return self.remove(key);
        };
        let Some(followed) = self.followed.get(&key) else {
            return;
        };
        let netns_cookies = followed.netns_cookies;
        if next.phase != followed.phase {
            debug!(pair = key, from = ?followed.phase, to = ?next.phase, "pair");
        }
        let due = next.wait.map(|wait| now + wait);
        self.put(key, next.phase, due, netns_cookies);
    }

    fn kick(&self, task: &Task, ends: [bool; 2]) {
        #[cfg(feature = "fault-injection")]
        if crate::fault::is(crate::fault::Fault::NoKick) {
            return;
        }
        for (end, wanted) in task.ends.iter().zip(ends) {
            if !wanted || end.inode == 0 {
                continue;
            }
            match kick(end.inode, end.tgid) {
                Ok(true) => {}
                Ok(false) => debug!(inode = end.inode, "no process has the socket any more"),
                Err(error) => warn!(%error, "cannot wake the readers of a socket"),
            }
        }
    }

    /// Tells the programs, if anything has changed.
    fn configure(&mut self, first: bool) -> Result<(), crate::apply::WriteError> {
        let config = SpliceConfig {
            queue_bytes: self.settings.queue_bytes(self.members),
            mode: self.settings.mode as u8,
            wishes: u8::from(self.wishes.load(Ordering::Relaxed)),
            self_test_port: self.configured.self_test_port,
            self_test: self.configured.self_test,
        };
        if first || config != self.configured {
            self.pairs.configure(config)?;
            self.configured = config;
        }
        Ok(())
    }
}

/// What there is to do for a pair that is due.
enum Wanted {
    Task(Task),
    /// No answer of the kernel is waited for.
    Nothing,
    Gone,
    Later(Duration),
}

fn cookies(pair: &Pair) -> [u64; 2] {
    [pair.client.netns_cookie, pair.server.netns_cookie]
}
