//! The ring buffer `splice_events`: what the agent is told.

use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::btf_maps::RingBuf;
use aya_ebpf::macros::btf_map;
use shunt_common::{Counter, EventKind, Mark, SpliceEvent, SpliceReason, capacity};

use crate::count::count;

#[btf_map(name = "splice_events")]
static SPLICE_EVENTS: RingBuf<SpliceEvent, { capacity::SPLICE_EVENTS }> = RingBuf::new();

/// Tells the agent, and wakes it unless it is only about a pair that is new or
/// closed, which it looks for now and then.
#[inline(always)]
pub(crate) fn tell(pair: u64, kind: EventKind, reason: SpliceReason) {
    let flags = match kind {
        EventKind::Paired | EventKind::Closed => BPF_RB_NO_WAKEUP,
        _ => BPF_RB_FORCE_WAKEUP,
    };
    put(pair, kind, reason, flags);
}

/// Tells the agent of a mark. Of a pair that is no member it need not know at once:
/// that it becomes one meanwhile is rare.
#[inline(always)]
pub(crate) fn tell_of_mark(pair: u64, mark: Mark, is_member: bool) {
    let flags = if is_member {
        BPF_RB_FORCE_WAKEUP
    } else {
        BPF_RB_NO_WAKEUP
    };
    put(pair, EventKind::Marked, mark.reason(), flags);
}

#[inline(always)]
fn put(pair: u64, kind: EventKind, reason: SpliceReason, flags: u32) {
    let event = SpliceEvent {
        pair,
        kind: kind as u32,
        reason: reason as u32,
    };
    let told = SPLICE_EVENTS.output(event, u64::from(flags));
    if told.is_err() {
        count(Counter::EventsLost);
    }
}
