//! What one connection does, drawn from the run's seed and its number: both ends
//! make the same plan from the header that the client sends first.

mod shape;

use lab::pattern::Random;
use lab::torture::Scenario;

pub(super) use shape::{Gate, WhenReceived, size};

/// Connections of a helper that is going to be killed have this bit.
pub(super) const VICTIM: u64 = 1 << 63;

/// Both ends' parts.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) id: u64,
    pub(super) scenario: Scenario,
    pub(super) ending: Ending,
    /// Writers of one socket, if the connection is for these.
    pub(super) writers: Option<Writers>,
    pub(super) client: End,
    pub(super) server: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

/// How the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Each end closes once it has sent and received all.
    Orderly,
    /// One end closes with SO_LINGER 0 once so many bytes went either way.
    Reset { by: Side, after: u64 },
    /// One end stops reading once so many bytes went either way, and closes with
    /// bytes unread.
    Unread { by: Side, after: u64 },
    /// The process of one end is killed.
    Killed { side: Side },
}

/// Threads that send records on one socket without a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writers {
    pub(super) threads: u8,
    /// Of each thread.
    pub(super) records: u32,
}

/// What one end does.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) style: Style,
    pub(super) nodelay: bool,
    pub(super) small_buffers: bool,
    /// Bytes that it sends.
    pub(super) send: u64,
    /// When it may send them.
    pub(super) gates: Vec<Gate>,
    /// A write has up to `1 << write_bits` bytes, a read `1 << read_bits`.
    pub(super) write_bits: u64,
    pub(super) read_bits: u64,
    /// The reader rests once in so many reads, up to so many milliseconds.
    pub(super) rest: Option<(u64, u64)>,
    /// The reader stops for so many milliseconds once it has so many bytes.
    pub(super) stop: Option<(u64, u64)>,
    /// Says by SHUT_WR that it has sent all, and reads to the end, instead of
    /// closing once it has everything.
    pub(super) half_close: bool,
    /// What it sets on its socket once so many bytes went either way.
    pub(super) mark: Option<(Mark, u64)>,
}

/// How an end reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Level-triggered epoll.
    Level,
    /// Edge-triggered, reads until EAGAIN.
    Edge,
    /// Edge-triggered, takes a short read for drained.
    ShortRead,
    /// Edge-triggered, asks FIONREAD after a full read: 0 is drained.
    Count,
    /// The real tokio.
    Tokio,
    /// A blocking socket, a thread for each direction.
    Blocking,
}

/// A socket option that does no harm to TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// SO_RCVLOWAT 2, and 1 again some milliseconds later.
    LowWater,
    /// SO_ZEROCOPY without a send that asks for it.
    ZeroCopy,
    /// SO_TIMESTAMPING, which adds control messages only.
    Timestamping,
}

impl Plan {
    pub(super) fn new(seed: u64, id: u64) -> Self {
        let mut random = Random::new(Random::new(seed ^ id).below(u64::MAX));
        shape::draw(seed, id, &mut random)
    }

    pub(super) fn end(&self, side: Side) -> &End {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// The seed of the stream that this side sends.
    pub(super) fn stream_seed(&self, side: Side) -> u64 {
        let mixed = Random::new(self.seed ^ self.id.rotate_left(17)).below(u64::MAX);
        mixed ^ u64::from(side == Side::Server)
    }

    /// Whether the server's end is in a process that is going to be killed.
    pub(super) fn server_dies(&self) -> bool {
        self.ending == Ending::Killed { side: Side::Server }
    }
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Client => "client",
            Side::Server => "server",
        }
    }

    pub(super) fn peer(self) -> Self {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

impl Style {
    pub(super) fn name(self) -> &'static str {
        match self {
            Style::Level => "level-triggered",
            Style::Edge => "edge-triggered",
            Style::ShortRead => "short read = drained",
            Style::Count => "FIONREAD 0 = drained",
            Style::Tokio => "tokio",
            Style::Blocking => "blocking",
        }
    }
}

impl Mark {
    pub(super) fn name(self) -> &'static str {
        match self {
            Mark::LowWater => "SO_RCVLOWAT",
            Mark::ZeroCopy => "SO_ZEROCOPY",
            Mark::Timestamping => "SO_TIMESTAMPING",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_plan_follows_from_seed_and_number() {
        for id in 0..100 {
            let text = |seed| format!("{:?}", Plan::new(seed, id));
            assert_eq!(text(1), text(1));
            assert_ne!(text(1), text(2));
        }
    }

    #[test]
    fn every_style_ending_and_mark_occurs() {
        let plans: Vec<_> = (0..5000).map(|id| Plan::new(3, id)).collect();
        let ends = || plans.iter().flat_map(|plan| [&plan.client, &plan.server]);
        let styles: BTreeSet<_> = ends().map(|end| end.style.name()).collect();
        assert_eq!(styles.len(), 6);
        let marks: BTreeSet<_> = ends()
            .filter_map(|end| end.mark)
            .map(|it| it.0.name())
            .collect();
        assert_eq!(marks.len(), 3);
        let endings: BTreeSet<_> = plans
            .iter()
            .map(|plan| plan.scenario.ending.clone())
            .collect();
        let wanted = [
            "close",
            "half-close",
            "killed server",
            "reset by client",
            "reset by server",
            "unread at client",
            "unread at server",
        ];
        assert_eq!(endings, wanted.map(str::to_owned).into());
        let shapes: BTreeSet<_> = plans
            .iter()
            .map(|plan| plan.scenario.shape.clone())
            .collect();
        let wanted = [
            "duplex",
            "mixed",
            "stream down",
            "stream up",
            "turns",
            "writers",
        ];
        assert_eq!(shapes, wanted.map(str::to_owned).into());
    }

    #[test]
    fn who_is_going_to_be_killed_has_a_plan_for_it() {
        for id in 0..5000 {
            let plan = Plan::new(3, VICTIM | id);
            assert_eq!(plan.ending, Ending::Killed { side: Side::Client });
        }
    }

    #[test]
    fn no_gate_waits_for_what_never_comes() {
        for id in 0..20_000 {
            let plan = Plan::new(5, id);
            let mut sent = [0, 0];
            let mut next = [0, 0];
            // Each round opens what can open; all must have opened in the end.
            for _ in 0..200 {
                for (me, end) in [&plan.client, &plan.server].into_iter().enumerate() {
                    let peer = [&plan.server, &plan.client][me];
                    let peer_ended = sent[1 - me] == peer.send && peer.half_close;
                    while let Some(gate) = end.gates.get(next[me])
                        && match gate.when {
                            WhenReceived::AtLeast(bytes) => sent[1 - me] >= bytes,
                            WhenReceived::End => peer_ended,
                        }
                    {
                        sent[me] = gate.until;
                        next[me] += 1;
                    }
                }
            }
            assert_eq!(sent, [plan.client.send, plan.server.send], "{plan:?}");
        }
    }
}
