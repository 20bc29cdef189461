//! The writes of a client to numbered blocks, and a comparison with the contents read afterwards.
//!
//! Invariants:
//! - Every write of a block has other contents: the block's number and the write's number, in every
//!   word.
//! - A block with an unanswered write is not written again: the write may or may not be there, and
//!   nothing else is in doubt.

use block::Result;

/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 4096;
/// Blocks that are written: 16 MiB, so that a second of writes comes to each of them. Chosen by hand.
pub(super) const BLOCK_COUNT: u64 = 4096;
/// Distance of a block from the one written before, prime to [`BLOCK_COUNT`]. Chosen by hand.
const STRIDE: u64 = 1117;
/// Bytes of one read of the comparison.
const READ_BYTES: usize = 1 << 20;

/// A write of one block, with its number, the first of which is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// The number of the block.
    pub(super) block: u64,
    /// The number of the write.
    pub(super) sequence: u64,
}

impl Write {
    /// Returns the offset in the volume.
    pub(super) fn offset(self) -> u64 {
        self.block * BLOCK_BYTES as u64
    }

    /// Fills `bytes` with the contents.
    pub(super) fn fill(self, bytes: &mut [u8]) {
        let mut state = (self.sequence << 16 | self.block).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (head, body) = bytes.split_at_mut(16);
        head[..8].copy_from_slice(&self.block.to_le_bytes());
        head[8..].copy_from_slice(&self.sequence.to_le_bytes());
        for word in body.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
    }

    /// Returns the write whose contents `bytes` seem to be.
    fn named_in(bytes: &[u8]) -> Write {
        let word = |at: usize| {
            let word = bytes[at..at + 8].try_into().expect("a block has two words");
            u64::from_le_bytes(word)
        };
        Write { block: word(0), sequence: word(8) }
    }
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// The number of its newest acknowledged write; 0 if there is none.
    acknowledged: u64,
    /// The number of a write without an answer.
    unanswered: Option<u64>,
}

/// All writes so far.
pub(super) struct History {
    blocks: Vec<Known>,
    /// The block of each write.
    writes: Vec<u64>,
    /// The block that the newest write went to.
    newest: u64,
    acknowledged_count: u64,
}

/// Findings of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Findings {
    /// Blocks with acknowledged writes that hold an earlier content.
    pub(super) lost_count: u64,
    /// Blocks that hold anything that was never written there.
    pub(super) wrong_count: u64,
}

impl History {
    pub(super) fn new() -> History {
        let blocks = vec![Known::default(); BLOCK_COUNT as usize];
        History { blocks, writes: Vec::new(), newest: 0, acknowledged_count: 0 }
    }

    /// Chooses the next write, which has no answer yet. Panics if all blocks have unanswered writes.
    pub(super) fn begin(&mut self) -> Write {
        let is_free = |block: &u64| self.blocks[*block as usize].unanswered.is_none();
        let block = (1..=BLOCK_COUNT)
            .map(|step| (self.newest + step * STRIDE) % BLOCK_COUNT)
            .find(is_free)
            .expect("few writes are in flight");
        self.newest = block;
        self.writes.push(block);
        let write = Write { block, sequence: self.writes.len() as u64 };
        self.blocks[block as usize].unanswered = Some(write.sequence);
        write
    }

    /// Records the answer to a write.
    pub(super) fn acknowledge(&mut self, write: Write) {
        let known = &mut self.blocks[write.block as usize];
        debug_assert_eq!(known.unanswered, Some(write.sequence));
        *known = Known { acknowledged: write.sequence, unanswered: None };
        self.acknowledged_count += 1;
    }

    /// Returns the number of acknowledged writes.
    pub(super) fn acknowledged_count(&self) -> u64 {
        self.acknowledged_count
    }

    /// Returns the number of writes without an answer.
    pub(super) fn unanswered_count(&self) -> u64 {
        self.writes.len() as u64 - self.acknowledged_count
    }

    /// Reads all blocks with `read`, which fills a buffer from an offset, and compares them.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn compare(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Findings> {
        let mut findings = Findings::default();
        let mut buffer = vec![0; READ_BYTES];
        let blocks_a_read = READ_BYTES / BLOCK_BYTES;
        for first in (0..BLOCK_COUNT).step_by(blocks_a_read) {
            read(first * BLOCK_BYTES as u64, &mut buffer)?;
            for (block, bytes) in (first..).zip(buffer.chunks_exact(BLOCK_BYTES)) {
                match self.judge(block, bytes) {
                    Verdict::Right => {}
                    Verdict::Lost => findings.lost_count += 1,
                    Verdict::Wrong => findings.wrong_count += 1,
                }
            }
        }
        Ok(findings)
    }

    fn judge(&self, block: u64, bytes: &[u8]) -> Verdict {
        let known = self.blocks[block as usize];
        let sequence = match bytes.iter().all(|byte| *byte == 0) {
            true => 0, // never written
            false => match self.write_in(block, bytes) {
                Some(sequence) => sequence,
                None => return Verdict::Wrong,
            },
        };
        if sequence == known.acknowledged || Some(sequence) == known.unanswered {
            return Verdict::Right;
        }
        Verdict::Lost
    }

    /// Returns the number of the write of this block that `bytes` are from; `None` if it is none of them.
    fn write_in(&self, block: u64, bytes: &[u8]) -> Option<u64> {
        let named = Write::named_in(bytes);
        let index = usize::try_from(named.sequence.checked_sub(1)?).ok()?;
        if named.block != block || self.writes.get(index) != Some(&block) {
            return None;
        }
        let mut wanted = vec![0; BLOCK_BYTES];
        named.fill(&mut wanted);
        (wanted == bytes).then_some(named.sequence)
    }
}

/// The judgement of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It holds its newest acknowledged write, or the unanswered one.
    Right,
    /// It holds an earlier content.
    Lost,
    /// It holds anything else.
    Wrong,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A volume in memory that carries every write out.
    struct Volume(Vec<u8>);

    impl Volume {
        fn new() -> Volume {
            Volume(vec![0; BLOCK_COUNT as usize * BLOCK_BYTES])
        }

        fn block(&mut self, block: u64) -> &mut [u8] {
            &mut self.0[block as usize * BLOCK_BYTES..][..BLOCK_BYTES]
        }

        fn write(&mut self, write: Write) {
            write.fill(self.block(write.block));
        }

        fn findings(&self, history: &History) -> (u64, u64) {
            let read = |offset: u64, bytes: &mut [u8]| {
                bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
                Ok(())
            };
            let Findings { lost_count, wrong_count } = history.compare(read).unwrap();
            (lost_count, wrong_count)
        }
    }

    /// Two acknowledged writes of each block, in turn.
    fn written() -> (History, Volume) {
        let (mut history, mut volume) = (History::new(), Volume::new());
        for _ in 0..2 * BLOCK_COUNT {
            let write = history.begin();
            volume.write(write);
            history.acknowledge(write);
        }
        (history, volume)
    }

    #[test]
    fn every_block_is_written_in_turn() {
        let (history, volume) = written();
        assert_eq!((history.acknowledged_count(), history.unanswered_count()), (8192, 0));
        assert!(history.blocks.iter().all(|known| known.acknowledged > BLOCK_COUNT));
        assert_eq!(volume.findings(&history), (0, 0));
    }

    #[test]
    fn earlier_contents_of_acknowledged_blocks_are_lost_writes() {
        let (history, mut volume) = written();
        let first = history.writes.iter().position(|block| *block == 7).unwrap() as u64 + 1;
        volume.write(Write { block: 7, sequence: first });
        assert_eq!(volume.findings(&history), (1, 0));
        // As if the block had never been written.
        volume.block(4095).fill(0);
        assert_eq!(volume.findings(&history), (2, 0));
    }

    #[test]
    fn contents_that_were_never_written_there_are_wrong_reads() {
        let (history, mut volume) = written();
        // The write of another block, a write that was never made, and half of an earlier write.
        let newest = history.blocks[9].acknowledged;
        Write { block: 9, sequence: newest }.fill(volume.block(10));
        assert_eq!(volume.findings(&history), (0, 1));
        let unmade = Write { block: 11, sequence: history.writes.len() as u64 + 1 };
        volume.write(unmade);
        assert_eq!(volume.findings(&history), (0, 2));
        let first = history.writes.iter().position(|block| *block == 12).unwrap() as u64 + 1;
        let mut torn = vec![0; BLOCK_BYTES];
        Write { block: 12, sequence: first }.fill(&mut torn);
        let half = BLOCK_BYTES / 2;
        volume.block(12)[half..].copy_from_slice(&torn[half..]);
        assert_eq!(volume.findings(&history), (0, 3));
        // One byte is enough.
        volume.block(13)[4095] ^= 1;
        assert_eq!(volume.findings(&history), (0, 4));
    }

    #[test]
    fn unanswered_write_may_be_there_or_not() {
        let (mut history, mut volume) = written();
        let open = history.begin();
        assert_eq!((history.acknowledged_count(), history.unanswered_count()), (8192, 1));
        assert_eq!(volume.findings(&history), (0, 0));
        volume.write(open);
        assert_eq!(volume.findings(&history), (0, 0));
        // Nothing older than the newest acknowledged write.
        volume.block(open.block).fill(0);
        assert_eq!(volume.findings(&history), (1, 0));
        // Its block is not written again.
        for _ in 0..2 * BLOCK_COUNT {
            let write = history.begin();
            assert_ne!(write.block, open.block);
            history.acknowledge(write);
        }
    }
}
