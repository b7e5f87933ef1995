//! Records of several writers in one stream: whole ones, each writer's in order.
//! How the writers' records mix is open, as it is in TCP.

use lab::pattern::{Pattern, Random, Verifier};

use super::plan::{Plan, Side, Writers};

/// Writer, nothing, length of the payload, number within the writer; big-endian.
const HEADER: usize = 8;
const MIN_PAYLOAD: u64 = 200;
const MAX_PAYLOAD: u64 = 4000;

/// What one writer sends.
pub(super) struct Records {
    writer: u8,
    count: u32,
    number: u32,
    position: u64,
    pattern: Pattern,
    random: Random,
}

impl Records {
    pub(super) fn new(plan: &Plan, writers: Writers, writer: u8) -> Self {
        let seed = plan.stream_seed(Side::Client) ^ u64::from(writer) << 8;
        Self {
            writer,
            count: writers.records,
            number: 0,
            position: 0,
            pattern: Pattern::new(seed, u64::MAX),
            random: Random::new(seed),
        }
    }

    /// Puts the next record into the buffer; `false` after the last.
    pub(super) fn next(&mut self, record: &mut Vec<u8>) -> bool {
        if self.number == self.count {
            return false;
        }
        let length = MIN_PAYLOAD + self.random.below(MAX_PAYLOAD - MIN_PAYLOAD);
        record.clear();
        record.extend([self.writer, 0]);
        record.extend((length as u16).to_be_bytes());
        record.extend(self.number.to_be_bytes());
        record.resize(HEADER + length as usize, 0);
        self.pattern.fill(self.position, &mut record[HEADER..]);
        self.position += length;
        self.number += 1;
        true
    }
}

/// Checks what comes.
pub(super) struct Checker {
    writers: Vec<(u32, Verifier)>,
    expected: u64,
    complete: u64,
    bytes: u64,
    pending: Vec<u8>,
}

impl Checker {
    pub(super) fn new(plan: &Plan, writers: Writers) -> Self {
        let one = |writer| {
            let seed = plan.stream_seed(Side::Client) ^ u64::from(writer) << 8;
            (0, Verifier::new(Pattern::new(seed, u64::MAX)))
        };
        Self {
            writers: (0..writers.threads).map(one).collect(),
            expected: u64::from(writers.threads) * u64::from(writers.records),
            complete: 0,
            bytes: 0,
            pending: Vec::new(),
        }
    }

    /// Takes the next bytes; an error says what is wrong with them.
    pub(super) fn accept(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.bytes += bytes.len() as u64;
        self.pending.extend_from_slice(bytes);
        let mut from = 0;
        while let Some(header) = self.pending[from..].first_chunk::<HEADER>() {
            let payload = usize::from(u16::from_be_bytes([header[2], header[3]]));
            let number = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
            let (writer, zero) = (header[0], header[1]);
            let place = format!(
                "record {number} of writer {writer}, {} whole ones",
                self.complete
            );
            let Some((next, verifier)) = self.writers.get_mut(usize::from(writer)) else {
                return Err(format!("no such writer: {place}"));
            };
            if zero != 0 || number != *next {
                return Err(format!("expected record {next}: {place}"));
            }
            let Some(record) = self.pending[from + HEADER..].get(..payload) else {
                break;
            };
            verifier.accept(record);
            if verifier.wrong() > 0 {
                return Err(format!("{:?} in {place}", verifier.first_wrong()));
            }
            *next += 1;
            self.complete += 1;
            from += HEADER + payload;
        }
        self.pending.drain(..from);
        Ok(())
    }

    /// Whole records so far.
    pub(super) fn complete(&self) -> u64 {
        self.complete
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// At the end of the stream.
    pub(super) fn finish(&self) -> Result<(), String> {
        if self.complete == self.expected && self.pending.is_empty() {
            return Ok(());
        }
        Err(format!("{} of {} records", self.complete, self.expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITERS: Writers = Writers {
        threads: 3,
        records: 50,
    };

    /// Records of all writers, mixed.
    fn stream(plan: &Plan) -> Vec<Vec<u8>> {
        let mut writers: Vec<_> = (0..3).map(|it| Records::new(plan, WRITERS, it)).collect();
        let mut random = Random::new(9);
        let (mut all, mut record) = (Vec::new(), Vec::new());
        while !writers.is_empty() {
            let index = random.below(writers.len() as u64) as usize;
            if writers[index].next(&mut record) {
                all.push(record.clone());
            } else {
                writers.remove(index);
            }
        }
        all
    }

    fn check(records: &[Vec<u8>]) -> Result<(), String> {
        let plan = Plan::new(1, 1);
        let mut checker = Checker::new(&plan, WRITERS);
        for piece in records.concat().chunks(777) {
            checker.accept(piece)?;
        }
        checker.finish()
    }

    #[test]
    fn a_mixture_of_whole_records_is_right() {
        assert_eq!(check(&stream(&Plan::new(1, 1))), Ok(()));
    }

    #[test]
    fn a_swap_of_two_records_of_one_writer_is_found() {
        let mut records = stream(&Plan::new(1, 1));
        let of_first: Vec<_> = (0..records.len())
            .filter(|it| records[*it][0] == 0)
            .collect();
        records.swap(of_first[3], of_first[4]);
        assert!(check(&records).is_err());
    }

    #[test]
    fn a_lost_record_a_lost_byte_and_a_wrong_one_are_found() {
        let records = stream(&Plan::new(1, 1));
        assert!(check(&records[..149]).is_err());
        let mut shorter = records.clone();
        shorter[70].remove(30);
        assert!(check(&shorter).is_err());
        let mut wrong = records;
        wrong[100][50] ^= 1;
        assert!(check(&wrong).is_err());
    }

    #[test]
    fn a_record_in_the_middle_of_another_is_found() {
        let mut records = stream(&Plan::new(1, 1));
        let inner = records.remove(41);
        let at = records[40].len() / 2;
        records[40].splice(at..at, inner);
        assert!(check(&records).is_err());
    }
}
