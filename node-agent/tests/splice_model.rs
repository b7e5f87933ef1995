//! Walks every interleaving of a writer, a reader, the network, the kernel's side
//! of the splice and the agent's real [`step`], for one direction of one pair and a
//! bounded number of messages, agent crashes and orders to leave.
//!
//! The kernel is modelled after `ebpf-programs/src/{splice,manage}.rs` and
//! `net/ipv4/tcp_bpf.c`: a send decides first and puts its bytes somewhere later;
//! redirected bytes are read before those of TCP; FIONREAD tells of redirected
//! bytes only, while a socket is in the map. An operation of the agent is one step.
//!
//! In every state: bytes are read in order, and none is lost. From every state: once
//! nobody writes any more, all is read within a bounded number of turns of network,
//! reader and agent, and a pair that was told to leave is out of the map.

use std::collections::{HashSet, VecDeque};

use node_agent::splice::step::{Event, Phase, Step, step};
use shunt_common::{EndState, Operation, Pair, SpliceReason, Stage, Task};

/// Messages that are written.
const MESSAGES: u8 = 3;
/// Agent crashes, and orders to leave, of one run.
const CRASHES: u8 = 1;
const LEAVES: u8 = 1;
/// Turns of everybody but the writer, within which all has to be read.
const TURNS: usize = 64;

/// What of the rules is in force: each is switched off once, which must be found.
#[derive(Clone, Copy)]
struct Rules {
    /// Redirect only when the peer has read all that TCP carried.
    order: bool,
    /// Once redirected, always, or never again.
    latch: bool,
    /// And so once the agent relies on it.
    confirm: bool,
    /// The agent wakes readers.
    kick: bool,
    /// A socket stays in the map while a sender is inside its peer.
    senders: bool,
    /// A new agent takes care of pairs that are out of the map.
    adopt: bool,
}

const ALL: Rules = Rules {
    order: true,
    latch: true,
    confirm: true,
    kick: true,
    senders: true,
    adopt: true,
};

/// How the application reads.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Style {
    /// Is told again as long as there is something.
    Level,
    /// Reads until EAGAIN.
    Edge,
    /// Takes a short read for the end (tokio).
    ShortRead,
    /// Asks FIONREAD after a full read (nginx).
    Fionread,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct World {
    style: Style,
    written: u8,
    /// The send that has decided: whether to redirect, and its message.
    inside: Option<(bool, u8)>,
    flight: Vec<u8>,
    received: Vec<u8>,
    redirected: Vec<u8>,
    read: u8,
    /// What the reader will be told when it waits.
    event: bool,
    awake: bool,
    /// Messages that TCP was given, that arrived, and that were read.
    write_seq: u8,
    received_seq: u8,
    copied_seq: u8,
    /// The writer's and the reader's socket are in the map.
    member: [bool; 2],
    /// The agent relies on the next message to be redirected.
    confirmed: bool,
    stage: u8,
    frozen: bool,
    promotions: u8,
    /// The agent; `None` while it is dead.
    phase: Option<Phase>,
    /// The kernel has told of a latch.
    latched_event: bool,
    /// The agent is about to wake the reader.
    kick: bool,
    crashes: u8,
    leaves: u8,
}

/// Something that must not be.
type Fault = &'static str;
/// The world after a step, if there was one to take.
type Moved = Result<Option<World>, Fault>;

impl World {
    fn new(style: Style) -> Self {
        Self {
            style,
            written: 0,
            inside: None,
            flight: Vec::new(),
            received: Vec::new(),
            redirected: Vec::new(),
            read: 0,
            event: false,
            awake: false,
            write_seq: 0,
            received_seq: 0,
            copied_seq: 0,
            member: [false; 2],
            confirmed: false,
            stage: Stage::Idle as u8,
            frozen: false,
            promotions: 0,
            phase: Some(Phase::Promoting { busy: 1 }),
            latched_event: false,
            kick: false,
            crashes: CRASHES,
            leaves: LEAVES,
        }
    }

    /// What may happen next.
    fn successors(&self, rules: Rules) -> Result<Vec<Self>, Fault> {
        let mut next = Vec::new();
        let mut add = |world: Option<Self>| next.extend(world);
        add(self.begin_write(rules));
        add(self.end_write());
        add(self.arrive());
        add(self.read()?);
        add(self.agent(rules)?);
        add(self.told());
        add(self.kicked(rules));
        if self.crashes > 0 && self.phase.is_some() {
            let mut world = self.clone();
            world.crashes -= 1;
            world.phase = None;
            world.kick = false;
            add(Some(world));
        }
        add(self.revive(rules));
        if self.leaves > 0 && self.phase.is_some() {
            let mut world = self.clone();
            world.leaves -= 1;
            world.leave(SpliceReason::SwitchedOff);
            add(Some(world));
        }
        Ok(next)
    }

    /// sk_msg, where the writer's socket is in the map.
    fn begin_write(&self, rules: Rules) -> Option<Self> {
        if self.written == MESSAGES || self.inside.is_some() {
            return None;
        }
        let mut world = self.clone();
        let message = world.written;
        world.written += 1;
        let engaged = world.stage == Stage::Engaged as u8;
        let latched = world.stage == Stage::Latched as u8;
        let may = world.member[0] && world.member[1] && !world.frozen && !latched;
        let in_order = !rules.order || world.write_seq == world.copied_seq;
        let redirect = may && in_order;
        if redirect {
            world.stage = Stage::Engaged as u8;
        } else if may && (engaged && rules.latch || world.confirmed && rules.confirm) {
            world.stage = Stage::Latched as u8;
            world.latched_event = true;
        }
        world.inside = Some((redirect, message));
        Some(world)
    }

    fn end_write(&self) -> Option<Self> {
        let (redirect, message) = self.inside?;
        let mut world = self.clone();
        world.inside = None;
        if !redirect {
            world.flight.push(message);
            world.write_seq += 1;
        } else if world.member[1] {
            world.redirected.push(message);
            world.event = true;
        }
        // Else it is lost: the reader's socket has left the map.
        Some(world)
    }

    fn arrive(&self) -> Option<Self> {
        let mut world = self.clone();
        if world.flight.is_empty() {
            return None;
        }
        world.received.push(world.flight.remove(0));
        world.received_seq += 1;
        world.event = true;
        Some(world)
    }

    /// One recv() and what the application makes of it.
    fn read(&self) -> Result<Option<Self>, Fault> {
        let mut world = self.clone();
        if !world.awake {
            let is_readable = !world.redirected.is_empty() || !world.received.is_empty();
            if !(world.event || world.style == Style::Level && is_readable) {
                return Ok(None);
            }
            world.event = false;
            world.awake = true;
            return Ok(Some(world));
        }
        // A buffer that holds everything, or one that holds one message.
        let is_full = world.style == Style::Fionread;
        let from_tcp = world.redirected.is_empty();
        let queue = if from_tcp {
            &mut world.received
        } else {
            &mut world.redirected
        };
        if queue.is_empty() {
            world.awake = false;
            return Ok(Some(world));
        }
        let count = if is_full { 1 } else { queue.len() };
        for message in queue.drain(..count).collect::<Vec<_>>() {
            if message != world.read {
                return Err("a byte was read out of order, or one before it was lost");
            }
            world.read += 1;
            world.copied_seq += u8::from(from_tcp);
        }
        let fionread = if world.member[1] {
            world.redirected.len()
        } else {
            world.received.len()
        };
        match world.style {
            Style::ShortRead => world.awake = false,
            Style::Fionread if fionread == 0 => world.awake = false,
            _ => {}
        }
        Ok(Some(world))
    }

    /// The operation that the phase asks for, and what comes of it.
    fn agent(&self, rules: Rules) -> Result<Option<Self>, Fault> {
        let Some(phase) = self.phase else {
            return Ok(None);
        };
        if self.kick {
            // It does one thing after the other.
            return Ok(None);
        }
        let mut world = self.clone();
        let event = match phase.operation() {
            None => return Ok(None),
            Some(operation) => world.manage(operation, rules)?,
        };
        world.note(step(phase, Event::Answer(&event)));
        Ok(Some(world))
    }

    fn manage(&mut self, operation: Operation, rules: Rules) -> Result<Task, Fault> {
        let mut task = Task::new(1, operation, [0; 2]);
        task.verdict = SpliceReason::Eligible as u32;
        match operation {
            Operation::Promote if self.member == [false; 2] => {
                self.member = [true; 2];
                self.stage = Stage::Idle as u8;
                self.frozen = false;
                self.confirmed = false;
                self.promotions = 1;
            }
            Operation::Promote => task.verdict = SpliceReason::Refused as u32,
            Operation::Freeze => self.frozen = true,
            Operation::Release => {
                let sender_inside = self.member[0] && self.inside.is_some();
                if self.member[1]
                    && (!sender_inside || !rules.senders)
                    && self.redirected.is_empty()
                {
                    self.member[1] = false;
                }
                if self.member[0] && !sender_inside {
                    self.member[0] = false;
                }
            }
            Operation::Confirm => self.confirmed = self.member[0],
            Operation::Inspect => {}
        }
        if !self.redirected.is_empty() && !self.member[1] {
            return Err("a socket left the map with redirected bytes unread");
        }
        let [writer, reader] = &mut task.ends;
        for (end, member) in [&mut *writer, &mut *reader].into_iter().zip(self.member) {
            end.flags = EndState::FOUND;
            if member {
                end.flags |= EndState::MEMBER;
            }
        }
        if self.stage == Stage::Engaged as u8 {
            writer.flags |= EndState::ENGAGED;
        }
        if self.stage == Stage::Latched as u8 {
            writer.flags |= EndState::LATCHED;
        }
        if !self.redirected.is_empty() {
            reader.flags |= EndState::REDIRECTED_UNREAD;
        }
        writer.write_seq = self.write_seq.into();
        reader.copied_seq = self.copied_seq.into();
        reader.received_seq = self.received_seq.into();
        // Busy enough to be worth it whenever it is looked at.
        writer.segments = 0;
        Ok(task)
    }

    fn note(&mut self, next: Option<Step>) {
        let Some(next) = next else {
            self.phase = None;
            return;
        };
        self.kick |= next.kick[1];
        // How often it was looked at matters only for how long to wait, beyond the
        // first looks; what was given up is not taken up again.
        self.phase = Some(match next.phase {
            Phase::Draining {
                reason,
                looks,
                copied,
            } => Phase::Draining {
                reason,
                looks: looks.min(2),
                copied,
            },
            Phase::Watching { .. } => Phase::Cooling(SpliceReason::Quiet),
            phase => phase,
        });
    }

    fn leave(&mut self, reason: SpliceReason) {
        if let Some(phase) = self.phase {
            self.note(step(phase, Event::Leave(reason)));
        }
    }

    /// The agent reads the event of a latch.
    fn told(&self) -> Option<Self> {
        if !self.latched_event || self.phase.is_none() {
            return None;
        }
        let mut world = self.clone();
        world.latched_event = false;
        world.leave(SpliceReason::Order);
        Some(world)
    }

    fn kicked(&self, rules: Rules) -> Option<Self> {
        if !self.kick {
            return None;
        }
        let mut world = self.clone();
        world.kick = false;
        world.event |= rules.kick;
        Some(world)
    }

    /// A new agent finds what the kernel has.
    fn revive(&self, rules: Rules) -> Option<Self> {
        if self.phase.is_some() {
            return None;
        }
        let mut pair = Pair::EMPTY;
        pair.promotions = if rules.adopt { self.promotions } else { 0 };
        for (end, member) in [&mut pair.client, &mut pair.server]
            .into_iter()
            .zip(self.member)
        {
            end.member = u8::from(member);
            end.frozen = u8::from(self.frozen);
        }
        pair.client.stage = self.stage;
        let mut world = self.clone();
        world.phase = Some(match Phase::adopt(&pair) {
            Phase::Watching { .. } => Phase::Cooling(SpliceReason::Quiet),
            phase => phase,
        });
        Some(world)
    }

    /// Lets everybody but the writer go on, in turn.
    fn settle(&self, rules: Rules) -> Result<(), Fault> {
        let mut world = self.clone();
        for _ in 0..TURNS {
            let steps: [&dyn Fn(&Self) -> Moved; 7] = [
                &|it| Ok(it.end_write()),
                &|it| Ok(it.arrive()),
                &|it| it.read(),
                &|it| Ok(it.revive(rules)),
                &|it| Ok(it.told()),
                &|it| Ok(it.kicked(rules)),
                &|it| it.agent(rules),
            ];
            let mut moved = false;
            for step in steps {
                if let Some(next) = step(&world)? {
                    moved |= next != world;
                    world = next;
                }
            }
            if !moved {
                break;
            }
        }
        if world.read != world.written {
            return Err("a reader sleeps with bytes waiting, or they are lost");
        }
        if world.leaves == 0 && world.crashes == CRASHES && world.member != [false; 2] {
            return Err("a pair that was told to leave is still in the map");
        }
        Ok(())
    }
}

/// How many states there are, or the first fault.
fn explore(style: Style, rules: Rules) -> Result<usize, String> {
    let start = World::new(style);
    let mut seen = HashSet::from([start.clone()]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        let fault = |fault| format!("{fault}: {world:#?}");
        world.settle(rules).map_err(fault)?;
        for next in world.successors(rules).map_err(fault)? {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    Ok(seen.len())
}

const STYLES: [Style; 4] = [Style::Level, Style::Edge, Style::ShortRead, Style::Fionread];

#[test]
fn no_interleaving_reorders_loses_or_forgets_a_byte() {
    for style in STYLES {
        let states = explore(style, ALL).unwrap_or_else(|fault| panic!("{style:?}: {fault}"));
        println!("{style:?}: {states} states");
        assert!(states > 1000, "{style:?}: {states}");
    }
}

#[test]
fn the_search_finds_a_fault_for_each_rule_that_is_switched_off() {
    let faults = |rules: Rules| STYLES.map(|style| explore(style, rules).err());
    let order = Rules {
        order: false,
        ..ALL
    };
    assert!(faults(order).iter().all(Option::is_some), "order");
    let latch = Rules {
        latch: false,
        confirm: false,
        ..ALL
    };
    assert!(faults(latch).iter().any(Option::is_some), "latch");
    let confirm = Rules {
        confirm: false,
        ..ALL
    };
    assert!(faults(confirm)[3].is_some(), "confirm");
    let kick = Rules { kick: false, ..ALL };
    assert_eq!(
        faults(kick).map(|it| it.is_some()),
        [false, false, true, true],
        "kick"
    );
    let senders = Rules {
        senders: false,
        ..ALL
    };
    assert!(faults(senders).iter().all(Option::is_some), "senders");
    let adopt = Rules {
        adopt: false,
        ..ALL
    };
    assert_eq!(
        faults(adopt).map(|it| it.is_some()),
        [false, false, true, true],
        "adopt"
    );
}
