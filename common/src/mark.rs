//! Marks: what a process does to a socket that only TCP can do.

use crate::SpliceReason;

/// Things that a process did to a socket, after which it must be plain TCP: a bit
/// each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mark(pub u8);

impl Mark {
    /// `SO_RCVLOWAT` of more than one: redirected bytes wake the reader at once.
    pub const LOW_WATER: Self = Self(1);
    /// `SO_ZEROCOPY`: no completion would ever come.
    pub const ZERO_COPY: Self = Self(1 << 1);
    /// `SO_TIMESTAMPING`, `SO_TIMESTAMP`, `SO_TIMESTAMPNS`: redirected bytes have no
    /// time.
    pub const TIMESTAMPS: Self = Self(1 << 2);
    /// `TCP_ULP`, such as kTLS.
    pub const UPPER_LAYER: Self = Self(1 << 3);
    /// `TCP_REPAIR`: somebody moves the connection.
    pub const REPAIR: Self = Self(1 << 4);
    /// splice(2) reads past redirected bytes.
    pub const SPLICE_CALL: Self = Self(1 << 5);
    /// `SO_PEEK_OFF`: a peek does not skip redirected bytes.
    pub const PEEK_OFFSET: Self = Self(1 << 6);

    /// What setting an option to a value means: a mark, and whether the socket gets
    /// it or loses it. `None` for options that are as good with a splice. The value
    /// is what the first bytes of the option's are as an integer.
    #[inline(always)]
    pub const fn of_option(level: i32, name: i32, value: i32) -> Option<(Self, bool)> {
        use option::*;
        Some(match (level, name) {
            // The kernel takes 0 for 1, and a negative one for the largest.
            (SOL_SOCKET, SO_RCVLOWAT) => (Self::LOW_WATER, value != 0 && value != 1),
            (SOL_SOCKET, SO_ZEROCOPY) => (Self::ZERO_COPY, value != 0),
            (
                SOL_SOCKET,
                SO_TIMESTAMP_OLD | SO_TIMESTAMPNS_OLD | SO_TIMESTAMPING_OLD | SO_TIMESTAMP_NEW
                | SO_TIMESTAMPNS_NEW | SO_TIMESTAMPING_NEW,
            ) => (Self::TIMESTAMPS, value != 0),
            (SOL_SOCKET, SO_PEEK_OFF) => (Self::PEEK_OFFSET, value >= 0),
            // -1 ends it too, in another way (`TCP_REPAIR_OFF_NO_WP`).
            (SOL_TCP, TCP_REPAIR) => (Self::REPAIR, value > 0),
            // The value is a name, and no layer is ever taken off again.
            (SOL_TCP, TCP_ULP) => (Self::UPPER_LAYER, true),
            _ => return None,
        })
    }

    /// Whether there is one.
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }

    /// Whether all of `other` are among these.
    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Why a pair with these is not spliced.
    #[inline(always)]
    pub const fn reason(self) -> SpliceReason {
        if self.has(Self::SPLICE_CALL) {
            SpliceReason::SpliceCall
        } else if self.has(Self::REPAIR) {
            SpliceReason::Repair
        } else if self.has(Self::UPPER_LAYER) {
            SpliceReason::UpperLayer
        } else if self.has(Self::LOW_WATER) {
            SpliceReason::LowWater
        } else if self.has(Self::ZERO_COPY) {
            SpliceReason::ZeroCopy
        } else if self.has(Self::TIMESTAMPS) {
            SpliceReason::Timestamps
        } else {
            SpliceReason::Marked
        }
    }
}

/// The marks of both ends, a field for each writer: setsockopt() of an end, which
/// runs under its socket's lock, and splice(2), which only ever adds its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Marks {
    /// Options of the client's socket.
    pub client_options: u8,
    /// Options of the server's socket.
    pub server_options: u8,
    /// [`Mark::SPLICE_CALL`], if either was read by splice(2).
    pub calls: u8,
    reserved: u8,
}

const _: () = assert!(size_of::<Marks>() == 4);

impl Marks {
    /// None.
    pub const NONE: Self = Self {
        client_options: 0,
        server_options: 0,
        calls: 0,
        reserved: 0,
    };

    /// Those of either end.
    #[inline(always)]
    pub const fn all(&self) -> Mark {
        Mark(self.client_options | self.server_options | self.calls)
    }
}

/// Options of `SOL_SOCKET` and `IPPROTO_TCP`, of `include/uapi/asm-generic/socket.h`
/// and `include/uapi/linux/tcp.h`.
mod option {
    pub(super) const SOL_SOCKET: i32 = 1;
    pub(super) const SO_RCVLOWAT: i32 = 18;
    pub(super) const SO_TIMESTAMP_OLD: i32 = 29;
    pub(super) const SO_TIMESTAMPNS_OLD: i32 = 35;
    pub(super) const SO_TIMESTAMPING_OLD: i32 = 37;
    pub(super) const SO_PEEK_OFF: i32 = 42;
    pub(super) const SO_ZEROCOPY: i32 = 60;
    pub(super) const SO_TIMESTAMP_NEW: i32 = 63;
    pub(super) const SO_TIMESTAMPNS_NEW: i32 = 64;
    pub(super) const SO_TIMESTAMPING_NEW: i32 = 65;

    pub(super) const SOL_TCP: i32 = 6;
    pub(super) const TCP_REPAIR: i32 = 19;
    pub(super) const TCP_ULP: i32 = 31;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_gives_a_mark_or_takes_it_back() {
        let check = |level, name, value, expected| {
            assert_eq!(
                Mark::of_option(level, name, value),
                expected,
                "{name} {value}"
            );
        };
        for (value, gets) in [(-1, true), (0, false), (1, false), (2, true)] {
            check(1, 18, value, Some((Mark::LOW_WATER, gets)));
        }
        for name in [29, 35, 37, 63, 64, 65] {
            check(1, name, 1, Some((Mark::TIMESTAMPS, true)));
            check(1, name, 0, Some((Mark::TIMESTAMPS, false)));
        }
        check(1, 60, 1, Some((Mark::ZERO_COPY, true)));
        check(1, 42, 0, Some((Mark::PEEK_OFFSET, true)));
        check(1, 42, -1, Some((Mark::PEEK_OFFSET, false)));
        for (value, gets) in [(1, true), (0, false), (-1, false)] {
            check(6, 19, value, Some((Mark::REPAIR, gets)));
        }
        let tls = i32::from_ne_bytes(*b"tls\0");
        check(6, 31, tls, Some((Mark::UPPER_LAYER, true)));
        // TCP_NODELAY and SO_KEEPALIVE, and names that mean something else elsewhere.
        for (level, name) in [(6, 1), (1, 9), (0, 18), (6, 18), (1, 19), (1, 31), (41, 60)] {
            check(level, name, 2, None);
        }
    }

    #[test]
    fn each_mark_has_a_bit_and_a_reason_of_its_own() {
        let marks = [
            (Mark::LOW_WATER, "low_water"),
            (Mark::ZERO_COPY, "zero_copy"),
            (Mark::TIMESTAMPS, "timestamps"),
            (Mark::UPPER_LAYER, "upper_layer"),
            (Mark::REPAIR, "repair"),
            (Mark::SPLICE_CALL, "splice_call"),
            (Mark::PEEK_OFFSET, "marked"),
        ];
        let mut seen = 0;
        for (mark, name) in marks {
            assert_eq!(mark.reason().name(), name);
            assert_eq!((mark.0.count_ones(), seen & mark.0), (1, 0), "{name}");
            seen |= mark.0;
        }
        let marks = Marks {
            server_options: Mark::LOW_WATER.0,
            ..Marks::NONE
        };
        assert!(marks.all().is_some() && !Marks::NONE.all().is_some());
    }
}
