//! Reads and writes the address in the context of a socket address hook.

use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::programs::SockAddrContext;
use shunt_common::address;

/// An address and a port, network byte order.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    pub(crate) ip: [u8; 16],
    pub(crate) port: [u8; 2],
}

/// Which of the context's fields hold the address.
#[derive(Clone, Copy)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    /// The address that the hook was called with.
    #[inline(always)]
    pub(crate) fn read(self, ctx: &SockAddrContext) -> Address {
        // SAFETY: the kernel passes a valid context; the verifier checks that
        // each access is one that it allows.
        let context = unsafe { &*ctx.sock_addr };
        let ip = match self {
            Self::V4 => address::mapped(context.user_ip4.to_ne_bytes()),
            Self::V6 => bytes(&context.user_ip6),
        };
        Address {
            ip,
            port: (context.user_port as u16).to_ne_bytes(),
        }
    }

    /// Replaces it. For V4 the address must be a mapped one.
    #[inline(always)]
    pub(crate) fn write(self, ctx: &SockAddrContext, to: &Address) {
        // Read anew, or the compiler keeps a pointer to the field from `read` for
        // later, which the verifier refuses as a modified context pointer.
        // SAFETY: it is a plain pointer.
        let context = unsafe { (&raw const ctx.sock_addr).read_volatile() };
        // SAFETY: as in `read`; no other reference to the context is alive.
        let context = unsafe { &mut *context };
        let words = words(&to.ip);
        match self {
            Self::V4 => context.user_ip4 = words[3],
            Self::V6 => {
                let fields: *mut u32 = (&raw mut context.user_ip6).cast();
                for (index, word) in words.into_iter().enumerate() {
                    // SAFETY: user_ip6 has four words. Volatile, since the
                    // compiler would merge two stores into one that older
                    // kernels refuse (bpf_ctx_wide_access_ok, Linux 5.3).
                    unsafe { fields.add(index).write_volatile(word) };
                }
            }
        }
        context.user_port = u32::from(u16::from_ne_bytes(to.port));
    }
}

/// The socket that the hook was called for.
#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the kernel passes a valid context, which always has a socket.
    unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk }
}

#[inline(always)]
fn bytes(words: &[u32; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for index in 0..4 {
        let word: *const u32 = &raw const words[index];
        // SAFETY: `word` points into the context. Volatile for the same reason
        // as in `write`.
        let word = unsafe { word.read_volatile() }.to_ne_bytes();
        bytes[index * 4] = word[0];
        bytes[index * 4 + 1] = word[1];
        bytes[index * 4 + 2] = word[2];
        bytes[index * 4 + 3] = word[3];
    }
    bytes
}

#[inline(always)]
fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let word = |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    [word(0), word(4), word(8), word(12)]
}
