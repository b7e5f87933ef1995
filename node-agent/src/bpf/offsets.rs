//! Where the programs find fields of the kernel's structs; see
//! `ebpf-programs/src/kernel.rs`.

use super::btf::{Btf, BtfError};

/// Global in the object, struct, field. Structs that begin with another one
/// (`tcp_sock` with a `sock`) share its offsets.
const FIELDS: [(&str, &str, &str); 33] = [
    ("OFFSET_WRITE_SEQ", "tcp_sock", "write_seq"),
    ("OFFSET_COPIED_SEQ", "tcp_sock", "copied_seq"),
    ("OFFSET_RCV_NXT", "tcp_sock", "rcv_nxt"),
    ("OFFSET_DATA_SEGS_OUT", "tcp_sock", "data_segs_out"),
    ("OFFSET_NONAGLE", "tcp_sock", "nonagle"),
    ("OFFSET_ULP_OPS", "inet_connection_sock", "icsk_ulp_ops"),
    ("OFFSET_STATE", "sock", "__sk_common.skc_state"),
    ("OFFSET_SHUTDOWN", "sock", "sk_shutdown"),
    ("OFFSET_RMEM_ALLOC", "sock", "sk_backlog.rmem_alloc"),
    ("OFFSET_RCVLOWAT", "sock", "sk_rcvlowat"),
    ("OFFSET_SOCK_FLAGS", "sock", "__sk_common.skc_flags"),
    ("OFFSET_TSFLAGS", "sock", "sk_tsflags"),
    ("OFFSET_PEEK_OFF", "sock", "sk_peek_off"),
    ("OFFSET_USER_DATA", "sock", "sk_user_data"),
    ("OFFSET_SOCKET", "sock", "sk_socket"),
    ("OFFSET_FILE", "socket", "file"),
    ("OFFSET_FILE_FLAGS", "file", "f_flags"),
    ("OFFSET_FILE_INODE", "file", "f_inode"),
    ("OFFSET_INODE_NUMBER", "inode", "i_ino"),
    ("OFFSET_PSOCK_INGRESS", "sk_psock", "ingress_msg"),
    ("OFFSET_PSOCK_REFCOUNT", "sk_psock", "refcnt"),
    ("OFFSET_ERROR", "sock", "sk_err"),
    ("OFFSET_CGROUP", "sock", "sk_cgrp_data.cgroup"),
    ("OFFSET_KERNFS_NODE", "cgroup", "kn"),
    ("OFFSET_KERNFS_ID", "kernfs_node", "id"),
    ("OFFSET_TASK_FILES", "task_struct", "files"),
    ("OFFSET_FILE_TABLE", "files_struct", "fdt"),
    ("OFFSET_FILE_ARRAY", "fdtable", "fd"),
    ("OFFSET_FILE_PRIVATE", "file", "private_data"),
    ("OFFSET_INODE_MODE", "inode", "i_mode"),
    ("OFFSET_SOCKET_TYPE", "socket", "type"),
    ("OFFSET_SOCKET_SOCK", "socket", "sk"),
    ("OFFSET_FAMILY", "sock", "__sk_common.skc_family"),
];

/// Global in the object, flag of a socket.
const FLAGS: [(&str, &str); 2] = [
    ("ZERO_COPY_FLAG", "SOCK_ZEROCOPY"),
    ("TIMESTAMP_FLAG", "SOCK_RCVTSTAMP"),
];

/// A field that a kernel may be built without (`CONFIG_MPTCP`).
const OPTIONAL: (&str, &str, &str) = ("OFFSET_IS_MPTCP", "tcp_sock", "is_mptcp");
/// Where a system call's first argument is in `struct pt_regs` when it begins: `di` of
/// `arch/x86/include/asm/ptrace.h`, `regs[0]` of `arch/arm64/include/asm/ptrace.h`.
const FIRST_ARGUMENT: u32 = if cfg!(target_arch = "x86_64") {
    14 * 8
} else {
    0
};
/// What the programs take for a field that is not there.
const ABSENT: u32 = u32::MAX;

/// Offsets in the kernel's structs, in bytes, by the name of the global.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Offsets {
    pub(super) fields: Vec<(&'static str, u32)>,
    /// Masks in `sk_flags`, by the name of the global.
    pub(super) flags: Vec<(&'static str, u64)>,
}

impl Offsets {
    /// Of the running kernel.
    pub(super) fn of_kernel() -> Result<Self, BtfError> {
        let btf = Btf::of_kernel()?;
        let field = |(global, structure, path)| Ok((global, btf.offset(structure, path)?));
        let mut fields: Vec<_> = FIELDS.into_iter().map(field).collect::<Result<_, _>>()?;
        let (global, structure, path) = OPTIONAL;
        fields.push((global, btf.offset(structure, path).unwrap_or(ABSENT)));
        fields.push(("OFFSET_FIRST_ARGUMENT", FIRST_ARGUMENT));
        #[cfg(feature = "fault-injection")]
        if crate::fault::is(crate::fault::Fault::NoOrder) {
            // Type and protocol are side by side, and the same for both ends.
            let same = btf.offset("sock", "sk_type")?;
            for (global, offset) in &mut fields {
                if matches!(*global, "OFFSET_WRITE_SEQ" | "OFFSET_COPIED_SEQ") {
                    *offset = same;
                }
            }
        }
        let flag = |(global, name)| {
            let bit = btf.enumerator("sock_flags", name)?;
            Ok((global, 1_u64.checked_shl(bit).unwrap_or(0)))
        };
        let flags = FLAGS.into_iter().map(flag).collect::<Result<_, _>>()?;
        Ok(Self { fields, flags })
    }
}
