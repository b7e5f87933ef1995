//! The first bytes of a connection: which plan the server has to follow.

use super::plan::Plan;

/// Length of the header in bytes.
pub(super) const HEADER: usize = 24;
const MAGIC: &[u8; 8] = b"torture\n";

/// Magic, seed, number; big-endian.
pub(super) fn header(plan: &Plan) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&plan.seed.to_be_bytes());
    header[16..].copy_from_slice(&plan.id.to_be_bytes());
    header
}

/// Seed and number; `None` if these are other bytes.
pub(super) fn parse(header: [u8; HEADER]) -> Option<(u64, u64)> {
    let number = |range: std::ops::Range<usize>| {
        let bytes = header[range]
            .try_into()
            .expect("the ranges have eight bytes");
        u64::from_be_bytes(bytes)
    };
    (&header[..8] == MAGIC).then(|| (number(8..16), number(16..24)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_back_and_a_foreign_one_refused() {
        let written = header(&Plan::new(7, 1 << 40));
        assert_eq!(parse(written), Some((7, 1 << 40)));
        let mut foreign = written;
        foreign[3] ^= 1;
        assert_eq!(parse(foreign), None);
    }
}
