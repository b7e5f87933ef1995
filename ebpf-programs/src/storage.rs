//! Socket storage for hooks other than the socket address ones, for which
//! aya-ebpf's `SkStorage` has no accessors.

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::helpers::generated::bpf_sk_storage_get;

/// The value kept for `sk`.
///
/// # Safety
///
/// `sk` must be a socket pointer from the context of the running program.
#[inline(always)]
pub(crate) unsafe fn get<T>(map: &SkStorage<T>, sk: *mut bpf_sock) -> Option<*mut T> {
    // SAFETY: `sk` is the caller's promise; without the create flag the helper
    // reads no initial value.
    let value = unsafe { bpf_sk_storage_get(as_ptr(map), sk.cast(), ptr::null_mut(), 0) };
    (!value.is_null()).then_some(value.cast())
}

/// Keeps `value` for `sk` unless there is one already, and returns what is kept;
/// `None` if there is no memory for it.
///
/// # Safety
///
/// As for [`get`].
#[inline(always)]
pub(crate) unsafe fn create<T>(
    map: &SkStorage<T>,
    sk: *mut bpf_sock,
    value: &mut T,
) -> Option<*mut T> {
    let value = ptr::from_mut(value).cast();
    let flags = u64::from(BPF_SK_STORAGE_GET_F_CREATE);
    // SAFETY: `sk` is the caller's promise; the value has the map's value type.
    let stored = unsafe { bpf_sk_storage_get(as_ptr(map), sk.cast(), value, flags) };
    (!stored.is_null()).then_some(stored.cast())
}

/// As [`create`], with zeros for a value that would not fit on the stack.
///
/// # Safety
///
/// As for [`get`]; zeros must be a valid `T`.
#[inline(always)]
pub(crate) unsafe fn create_zeroed<T>(map: &SkStorage<T>, sk: *mut bpf_sock) -> Option<*mut T> {
    let flags = u64::from(BPF_SK_STORAGE_GET_F_CREATE);
    // SAFETY: `sk` is the caller's promise; without an initial value the helper
    // takes zeros (`bpf_sk_storage_get` in `net/core/bpf_sk_storage.c`).
    let stored = unsafe { bpf_sk_storage_get(as_ptr(map), sk.cast(), ptr::null_mut(), flags) };
    (!stored.is_null()).then_some(stored.cast())
}

#[inline(always)]
fn as_ptr<T>(map: &SkStorage<T>) -> *mut c_void {
    ptr::from_ref(map).cast_mut().cast()
}
