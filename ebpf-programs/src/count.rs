//! The map `counters`.

use aya_ebpf::btf_maps::PerCpuArray;
use aya_ebpf::macros::btf_map;
use shunt_common::Counter;

#[btf_map(name = "counters")]
static COUNTERS: PerCpuArray<u64, { Counter::COUNT }> = PerCpuArray::new();

/// Adds one to a counter of this CPU.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the helper returned a pointer to this CPU's value, and a
        // program is not moved to another CPU while it runs.
        unsafe { *value += 1 };
    }
}
