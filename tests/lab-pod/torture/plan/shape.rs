//! Drawing a plan.

use lab::pattern::Random;
use lab::torture::Scenario;

use super::{End, Ending, Mark, Plan, Side, Style, VICTIM, Writers};

/// The fewest calls of a direction are at most `1 << CALLS_BITS`: some hundreds
/// in fact, since most are smaller than they could be. A level-triggered reader
/// makes one a round of its loop, and has to be done well within the patience.
const CALLS_BITS: u64 = 6;
const MAX_CALL_BITS: u64 = 18;

/// The writer may go on to a position once it has received enough, and rested.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Gate {
    /// A position in what this end sends.
    pub(in super::super) until: u64,
    pub(in super::super) when: WhenReceived,
    pub(in super::super) pause_ms: u64,
}

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum WhenReceived {
    AtLeast(u64),
    /// The peer's half-close.
    End,
}

pub(super) fn draw(seed: u64, id: u64, random: &mut Random) -> Plan {
    let (shape, gates) = draw_shape(id, random);
    let writers = (shape == "writers").then(|| Writers {
        threads: 2 + below(random, 3) as u8,
        records: 20 + below(random, 300) as u32,
    });
    let [client_gates, server_gates] = gates;
    let mut plan = Plan {
        seed,
        id,
        scenario: Scenario::default(),
        ending: Ending::Orderly,
        writers,
        client: draw_end(random, client_gates, &server_gates),
        server: draw_end(random, server_gates, &[]),
    };
    // Its reads are of the client's stream, which was not drawn yet above.
    let volume = plan.client.send;
    draw_reader(random, &mut plan.server, volume);
    if plan.writers.is_none() {
        plan.ending = draw_ending(id, random, &plan);
    } else {
        plan.client.half_close = true;
        // A window of less than a packet opens at the pace of TCP's timers.
        plan.server.small_buffers = false;
        plan.client.small_buffers = false;
    }
    finish(random, &mut plan);
    plan.scenario = Scenario {
        shape: shape.to_owned(),
        ending: ending_name(&plan).to_owned(),
    };
    plan
}

type Gates = [Vec<Gate>; 2];

fn draw_shape(id: u64, random: &mut Random) -> (&'static str, Gates) {
    match below(random, 100) {
        0..18 => ("stream up", [stream(random, 0), Vec::new()]),
        18..30 => ("stream down", [Vec::new(), stream(random, 0)]),
        30..48 => ("duplex", [stream(random, 0), stream(random, 0)]),
        48..78 => ("turns", turns(random)),
        78..96 => ("mixed", mixed(random)),
        // Its ends are not prepared for a kill.
        _ if id & VICTIM != 0 => ("turns", turns(random)),
        _ => ("writers", [Vec::new(), Vec::new()]),
    }
}

/// One or more runs of bytes with pauses between.
fn stream(random: &mut Random, from: u64) -> Vec<Gate> {
    let volume = volume(random);
    let parts = 1 + below(random, 4);
    (1..=parts)
        .map(|part| Gate {
            until: from + (volume * part).div_ceil(parts),
            when: WhenReceived::AtLeast(0),
            pause_ms: pause(random),
        })
        .collect()
}

/// Requests and responses.
fn turns(random: &mut Random) -> Gates {
    let (mut up, mut down) = (Vec::new(), Vec::new());
    let (mut requested, mut answered) = (0, 0);
    let bits = [6 + below(random, 11), 6 + below(random, 13)];
    for _ in 0..=below(random, 24) {
        let before = answered;
        requested += size(random, bits[0]);
        answered += size(random, bits[1]);
        up.push(Gate {
            until: requested,
            when: WhenReceived::AtLeast(before),
            pause_ms: pause(random) / 2,
        });
        down.push(Gate {
            until: answered,
            when: WhenReceived::AtLeast(requested),
            pause_ms: if below(random, 4) == 0 {
                below(random, 30)
            } else {
                0
            },
        });
    }
    [up, down]
}

/// Turns, then streams: the directions change their kind.
fn mixed(random: &mut Random) -> Gates {
    let [mut up, mut down] = turns(random);
    let end = |gates: &[Gate]| gates.last().map_or(0, |gate| gate.until);
    if below(random, 2) == 0 {
        let more = stream(random, end(&up));
        up.extend(more);
    }
    if below(random, 2) == 0 {
        let more = stream(random, end(&down));
        down.extend(more);
    }
    [up, down]
}

fn draw_end(random: &mut Random, gates: Vec<Gate>, peer: &[Gate]) -> End {
    let send = gates.last().map_or(0, |gate| gate.until);
    let mut end = End {
        style: draw_style(random),
        nodelay: below(random, 2) == 0,
        small_buffers: below(random, 10) == 0,
        send,
        gates,
        write_bits: call_bits(random, send),
        read_bits: 0,
        rest: None,
        stop: None,
        half_close: below(random, 2) == 0,
        mark: None,
    };
    draw_reader(random, &mut end, peer.last().map_or(0, |gate| gate.until));
    end
}

fn draw_reader(random: &mut Random, end: &mut End, volume: u64) {
    end.read_bits = call_bits(random, volume);
    end.rest = (below(random, 5) == 0).then(|| (16 + below(random, 200), 1 + below(random, 20)));
    end.stop =
        (below(random, 5) == 0).then(|| (below(random, volume + 1), 100 + below(random, 400)));
}

fn draw_style(random: &mut Random) -> Style {
    match below(random, 100) {
        0..20 => Style::Level,
        20..40 => Style::Edge,
        40..58 => Style::ShortRead,
        58..76 => Style::Count,
        76..93 => Style::Tokio,
        _ => Style::Blocking,
    }
}

fn draw_ending(id: u64, random: &mut Random, plan: &Plan) -> Ending {
    let after = below(random, plan.client.send + plan.server.send + 1);
    if id & VICTIM != 0 {
        return Ending::Killed { side: Side::Client };
    }
    match below(random, 100) {
        0..8 => Ending::Reset {
            by: Side::Client,
            after,
        },
        8..16 => Ending::Reset {
            by: Side::Server,
            after,
        },
        16..21 => Ending::Unread {
            by: Side::Client,
            after,
        },
        21..26 => Ending::Unread {
            by: Side::Server,
            after,
        },
        26..28 => Ending::Killed { side: Side::Server },
        _ => Ending::Orderly,
    }
}

/// What depends on the ending, and the marks.
fn finish(random: &mut Random, plan: &mut Plan) {
    let all = plan.client.send + plan.server.send;
    if plan.ending != Ending::Orderly {
        // Whoever does not end it waits for the end.
        plan.client.half_close = true;
        plan.server.half_close = true;
    } else if below(random, 4) == 0 {
        wait_for_end(random, plan);
    }
    for end in [&mut plan.client, &mut plan.server] {
        let kind = match below(random, 30) {
            0..3 => Mark::LowWater,
            3 => Mark::ZeroCopy,
            4 => Mark::Timestamping,
            _ => continue,
        };
        end.mark = Some((kind, below(random, all + 1)));
    }
}

/// One end answers only what came before the peer's half-close.
fn wait_for_end(random: &mut Random, plan: &mut Plan) {
    let (first, last) = if below(random, 2) == 0 {
        (&mut plan.client, &mut plan.server)
    } else {
        (&mut plan.server, &mut plan.client)
    };
    let needs_more = |gate: &Gate| matches!(gate.when, WhenReceived::AtLeast(1..));
    if !first.half_close || first.gates.iter().any(needs_more) {
        return;
    }
    last.send += size(random, 16);
    last.gates.push(Gate {
        until: last.send,
        when: WhenReceived::End,
        pause_ms: pause(random),
    });
}

fn ending_name(plan: &Plan) -> &'static str {
    match plan.ending {
        Ending::Orderly if plan.client.half_close || plan.server.half_close => "half-close",
        Ending::Orderly => "close",
        Ending::Reset {
            by: Side::Client, ..
        } => "reset by client",
        Ending::Reset {
            by: Side::Server, ..
        } => "reset by server",
        Ending::Unread {
            by: Side::Client, ..
        } => "unread at client",
        Ending::Unread {
            by: Side::Server, ..
        } => "unread at server",
        Ending::Killed { side: Side::Client } => "killed client",
        Ending::Killed { side: Side::Server } => "killed server",
    }
}

/// Bytes of a stream: mostly few, at times some megabytes.
fn volume(random: &mut Random) -> u64 {
    let bits = match below(random, 100) {
        0..3 => 23,
        3..20 => 20,
        _ => 4 + below(random, 14),
    };
    size(random, bits)
}

/// Half of them within the time before a promotion, some beyond any.
fn pause(random: &mut Random) -> u64 {
    match below(random, 10) {
        0..6 => 0,
        6..9 => below(random, 100),
        _ => 200 + below(random, 500),
    }
}

/// A size of up to so many bits for calls that have to move so many bytes.
fn call_bits(random: &mut Random, volume: u64) -> u64 {
    let least = u64::from(volume.max(1).ilog2()).saturating_sub(CALLS_BITS);
    least + below(random, MAX_CALL_BITS + 1 - least)
}

/// 1 to `1 << bits`, each power of two as likely as another.
pub(in super::super) fn size(random: &mut Random, bits: u64) -> u64 {
    let limit = 1 << below(random, bits + 1);
    1 + below(random, limit)
}

fn below(random: &mut Random, limit: u64) -> u64 {
    random.below(limit)
}
