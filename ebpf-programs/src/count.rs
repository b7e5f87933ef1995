//! The maps `counters` and `service_counts`.

use core::arch::asm;

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::btf_maps::{HashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use shunt_common::{Counter, ServiceCounts, ServiceKey, capacity};

#[btf_map(name = "counters")]
static COUNTERS: PerCpuArray<u64, { Counter::COUNT }> = PerCpuArray::new();

#[btf_map(name = "service_counts")]
static SERVICE_COUNTS: HashMap<
    ServiceKey,
    ServiceCounts,
    { capacity::SERVICES },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();

/// Adds one to a counter of this CPU.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the helper returned a pointer to this CPU's value, and a
        // program is not moved to another CPU while it runs.
        unsafe { *value += 1 };
    }
}

/// Counts that a Service port was given an endpoint. The agent removes the counts
/// of a Service port with its route.
///
/// A function of its own, which takes no stack of the hooks.
#[inline(never)]
pub(crate) fn count_service(key: &ServiceKey, is_local: bool) {
    let Some(counts) = service_counts(key) else {
        return;
    };
    // SAFETY: the map's memory, which is kept until the program ends.
    let (connects, local) = unsafe { (&raw mut (*counts).connects, &raw mut (*counts).local) };
    add(connects, 1);
    if is_local {
        add(local, 1);
    }
}

#[inline(always)]
fn service_counts(key: &ServiceKey) -> Option<*mut ServiceCounts> {
    SERVICE_COUNTS.get_ptr_mut(key).or_else(|| {
        let none = ServiceCounts {
            connects: 0,
            local: 0,
        };
        // Another CPU may have been first.
        let _ = SERVICE_COUNTS.insert(key, none, BPF_NOEXIST.into());
        SERVICE_COUNTS.get_ptr_mut(key)
    })
}

/// Adds to a counter in a map, and wraps around, so that adding `u64::MAX`
/// takes one off. The target has the instruction, but core has no function for
/// it, since the first CPUs of BPF had no compare-and-swap.
#[inline(always)]
pub(crate) fn add(count: *mut u64, value: u64) {
    // SAFETY: an aligned u64 of a map, whose memory is kept until the program
    // ends.
    unsafe {
        asm!(
            "lock *(u64 *)({count} + 0) += {value}",
            count = in(reg) count,
            value = in(reg) value,
            options(nostack),
        );
    }
}
