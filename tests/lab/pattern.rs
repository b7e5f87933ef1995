//! Streams of pseudo-random bytes in which each byte follows from its
//! position, and the check that what arrived is such a stream.
//!
//! Each aligned group of eight bytes is SplitMix64's output for its number.
//! That mixing is a bijection, so the bytes also tell the position they belong
//! to, which names the fault: moved, lost or doubled bytes still have one.

use crate::report::Misplaced;

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
const MULTIPLIERS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// One stream.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u64,
    length: u64,
}

impl Pattern {
    /// A stream of `length` bytes; other seeds give other streams.
    pub fn new(seed: u64, length: u64) -> Self {
        Self {
            seed: mix(seed),
            length,
        }
    }

    /// Bytes in the stream.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Writes the bytes that begin at `position`.
    pub fn fill(&self, position: u64, buffer: &mut [u8]) {
        let skip = (position % 8) as usize;
        let head = buffer.len().min((8 - skip) % 8);
        let (first, aligned) = buffer.split_at_mut(head);
        first.copy_from_slice(&self.group(position / 8)[skip..][..head]);
        let mut number = position.div_ceil(8);
        let mut groups = aligned.chunks_exact_mut(8);
        for group in &mut groups {
            group.copy_from_slice(&self.group(number));
            number += 1;
        }
        let last = groups.into_remainder();
        let length = last.len();
        last.copy_from_slice(&self.group(number)[..length]);
    }

    /// Where bytes belong, if they are of this stream. Needs 15 to be sure of
    /// holding one whole group.
    pub fn locate(&self, bytes: &[u8]) -> Option<u64> {
        bytes
            .windows(8)
            .take(8)
            .enumerate()
            .find_map(|(offset, group)| {
                let group = u64::from_le_bytes(group.try_into().ok()?);
                let number = unmix(group)
                    .wrapping_sub(self.seed)
                    .wrapping_mul(inverse(GAMMA));
                let position = number.checked_mul(8)?;
                (position < self.length).then(|| position.checked_sub(offset as u64))?
            })
    }

    fn group(&self, number: u64) -> [u8; 8] {
        mix(self.seed.wrapping_add(number.wrapping_mul(GAMMA))).to_le_bytes()
    }
}

/// Checks a stream as it arrives.
pub struct Verifier {
    pattern: Pattern,
    position: u64,
    wrong: u64,
    first_wrong: Option<Misplaced>,
    expected: Vec<u8>,
}

impl Verifier {
    /// Expects the stream from its start.
    pub fn new(pattern: Pattern) -> Self {
        Self {
            pattern,
            position: 0,
            wrong: 0,
            first_wrong: None,
            expected: Vec::new(),
        }
    }

    /// Takes the next bytes.
    pub fn accept(&mut self, bytes: &[u8]) {
        let mut expected = std::mem::take(&mut self.expected);
        expected.resize(bytes.len(), 0);
        self.pattern.fill(self.position, &mut expected);
        // Comparing slices is many times quicker than comparing bytes.
        if expected != bytes {
            self.note_wrong(&expected, bytes);
        }
        self.position += bytes.len() as u64;
        self.expected = expected;
    }

    /// Bytes taken so far.
    pub fn received(&self) -> u64 {
        self.position
    }

    /// Bytes that were wrong at their position, or beyond the end.
    pub fn wrong(&self) -> u64 {
        self.wrong + self.position.saturating_sub(self.pattern.length)
    }

    /// The first wrong byte.
    pub fn first_wrong(&self) -> Option<Misplaced> {
        self.first_wrong
    }

    fn note_wrong(&mut self, expected: &[u8], bytes: &[u8]) {
        let differ = |index: &usize| expected[*index] != bytes[*index];
        let first = (0..bytes.len()).find(differ);
        self.wrong += (0..bytes.len()).filter(differ).count() as u64;
        if let (None, Some(index)) = (self.first_wrong, first) {
            self.first_wrong = Some(Misplaced {
                position: self.position + index as u64,
                belongs_at: self.pattern.locate(&bytes[index..]),
            });
        }
    }
}

/// Small random numbers that repeat with their seed.
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0) % limit
    }
}

/// SplitMix64's output function.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(MULTIPLIERS[0]);
    z = (z ^ (z >> 27)).wrapping_mul(MULTIPLIERS[1]);
    z ^ (z >> 31)
}

fn unmix(mut z: u64) -> u64 {
    z = (z ^ (z >> 31) ^ (z >> 62)).wrapping_mul(inverse(MULTIPLIERS[1]));
    z = (z ^ (z >> 27) ^ (z >> 54)).wrapping_mul(inverse(MULTIPLIERS[0]));
    z ^ (z >> 30) ^ (z >> 60)
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration: each step
/// doubles the bits that are right, beginning with three.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut step = 0;
    while step < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 100_000;

    fn stream() -> (Pattern, Vec<u8>) {
        let pattern = Pattern::new(7, LENGTH as u64);
        let mut bytes = vec![0; LENGTH];
        pattern.fill(0, &mut bytes);
        (pattern, bytes)
    }

    fn verify(pattern: Pattern, bytes: &[u8]) -> Verifier {
        let mut verifier = Verifier::new(pattern);
        let mut random = Random::new(1);
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(1 + random.below(3000) as usize));
            verifier.accept(now);
            rest = later;
        }
        verifier
    }

    #[test]
    fn any_piece_is_as_in_the_whole() {
        let (pattern, bytes) = stream();
        for position in 0..20 {
            for length in 0..40 {
                let mut piece = vec![0; length];
                pattern.fill(position as u64, &mut piece);
                assert_eq!(piece, bytes[position..][..length], "{length} at {position}");
            }
        }
    }

    #[test]
    fn the_right_stream_is_right() {
        let (pattern, bytes) = stream();
        let verifier = verify(pattern, &bytes);
        assert_eq!((verifier.received(), verifier.wrong()), (LENGTH as u64, 0));
        assert_eq!(verifier.first_wrong(), None);
    }

    #[test]
    fn one_flipped_bit_is_found_and_placed() {
        let (pattern, mut bytes) = stream();
        bytes[54_321] ^= 0x10;
        let verifier = verify(pattern, &bytes);
        assert_eq!(verifier.wrong(), 1);
        assert_eq!(verifier.first_wrong().unwrap().position, 54_321);
    }

    #[test]
    fn moved_bytes_tell_where_they_belong() {
        let (pattern, mut bytes) = stream();
        bytes[1000..9000].rotate_left(3001);
        let wrong = verify(pattern, &bytes).first_wrong().unwrap();
        assert_eq!(
            wrong,
            Misplaced {
                position: 1000,
                belongs_at: Some(4001)
            }
        );
    }

    #[test]
    fn a_lost_byte_is_not_only_a_short_stream() {
        let (pattern, mut bytes) = stream();
        bytes.remove(500);
        let wrong = verify(pattern, &bytes).first_wrong().unwrap();
        assert_eq!(wrong.belongs_at, Some(wrong.position + 1));
    }

    #[test]
    fn bytes_beyond_the_end_are_wrong() {
        let (pattern, mut bytes) = stream();
        let mut more = [0; 10];
        pattern.fill(LENGTH as u64, &mut more);
        bytes.extend(more);
        assert_eq!(verify(pattern, &bytes).wrong(), 10);
    }

    #[test]
    fn foreign_bytes_belong_nowhere() {
        let (pattern, _) = stream();
        assert_eq!(pattern.locate(&[0; 32]), None);
        assert_eq!(pattern.locate(&[]), None);
    }
}
