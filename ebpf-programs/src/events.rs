//! The ring buffer `splice_events`: what the agent is told.

use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::btf_maps::RingBuf;
use aya_ebpf::macros::btf_map;
use shunt_common::{Counter, EventKind, SpliceEvent, SpliceReason, capacity};

use crate::count::count;

#[btf_map(name = "splice_events")]
static SPLICE_EVENTS: RingBuf<SpliceEvent, { capacity::SPLICE_EVENTS }> = RingBuf::new();

/// Tells the agent, and wakes it unless it is only about a new pair, which it
/// looks for now and then.
#[inline(always)]
pub(crate) fn tell(pair: u64, kind: EventKind, reason: SpliceReason) {
    let event = SpliceEvent {
        pair,
        kind: kind as u32,
        reason: reason as u32,
    };
    let flags = match kind {
        EventKind::Paired => BPF_RB_NO_WAKEUP,
        _ => BPF_RB_FORCE_WAKEUP,
    };
    let told = SPLICE_EVENTS.output(event, u64::from(flags));
    if told.is_err() {
        count(Counter::EventsLost);
    }
}
