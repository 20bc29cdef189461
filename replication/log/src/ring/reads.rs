//! Reads of the ring that continue past places that the disk does not read (EIO). Such a place may
//! not be needed, and code that needs it can ask.
//!
//! Invariants:
//! - Unread bytes are zeroes in the caller's buffer, and their place is recorded. Every other error
//!   goes to the caller.
//! - The number of such places is bounded, so that a disk that reads nothing does not hold up an
//!   open.

use crate::disk::unreadable::is_eio;
use block::env::DiskReader;
use block::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::io;

/// Bytes that are given up together. Batches begin at multiples of it.
const BLOCK_BYTES: usize = 4096;
/// Maximum number of unreadable blocks, 1 MiB in all. Chosen by hand: a disk may take seconds to
/// give up on one.
const BLOCKS_MAX: usize = 256;

/// A part of a log file that the disk does not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadablePlace {
    /// The file's name.
    pub file: String,
    /// Byte offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl fmt::Display for UnreadablePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {} at offset {}", self.len, self.file, self.offset)
    }
}

pub(crate) struct Reads<'a> {
    pub(crate) reader: &'a dyn DiskReader,
    /// File and block.
    unreadable: RefCell<BTreeSet<(u32, u64)>>,
}

impl<'a> Reads<'a> {
    pub(crate) fn new(reader: &'a dyn DiskReader) -> Self {
        Reads { reader, unreadable: RefCell::default() }
    }

    pub(crate) fn name(&self, slot: u32) -> String {
        self.reader.name(slot)
    }

    /// Fills `buf`, with zeroes where the disk does not read.
    ///
    /// # Errors
    /// `Io`: an error other than EIO, or too many EIOs.
    pub(crate) fn read(&self, slot: u32, offset: u64, buf: &mut [u8]) -> Result<()> {
        // If a part of the range is known to be unreadable, the rest is read around it.
        if !self.is_unreadable(slot, offset, buf.len()) {
            match self.reader.read_at(slot, offset, buf) {
                Ok(()) => return Ok(()),
                Err(error) if is_eio(&error) => {}
                Err(error) => return Err(self.failed(slot, offset, error)),
            }
        }
        // Split at the block boundary in the middle, down to single blocks.
        let first = offset / BLOCK_BYTES as u64;
        let end = (offset + buf.len() as u64).div_ceil(BLOCK_BYTES as u64);
        if end - first <= 1 {
            buf.fill(0);
            return self.note(slot, first);
        }
        let middle = (first + (end - first) / 2) * BLOCK_BYTES as u64;
        let (left, right) =
            buf.split_at_mut(usize::try_from(middle - offset).expect("in the buffer"));
        self.read(slot, offset, left)?;
        self.read(slot, middle, right)
    }

    fn note(&self, slot: u32, block: u64) -> Result<()> {
        let mut unreadable = self.unreadable.borrow_mut();
        unreadable.insert((slot, block));
        if unreadable.len() <= BLOCKS_MAX {
            return Ok(());
        }
        let what = format!(
            "open the write log: the disk does not read more than {BLOCKS_MAX} blocks of \
             {BLOCK_BYTES} bytes, the last one in {} at offset {}. Nothing was changed. Bring the \
             disk back, or copy the log's directory to another disk with a tool that continues \
             past errors, and keep the original",
            self.name(slot),
            block * BLOCK_BYTES as u64
        );
        Err(Error::new(ErrorKind::Io, what))
    }

    fn failed(&self, slot: u32, offset: u64, error: io::Error) -> Error {
        let what = format!("read log file {} at offset {offset}", self.name(slot));
        Error::with_source(ErrorKind::Io, what, error)
    }

    /// Returns whether a part of the range is known to be unreadable.
    pub(crate) fn is_unreadable(&self, slot: u32, offset: u64, len: usize) -> bool {
        let block = |at: u64| (slot, at / BLOCK_BYTES as u64);
        let end = (slot, (offset + len as u64).div_ceil(BLOCK_BYTES as u64));
        self.unreadable.borrow().range(block(offset)..end).next().is_some()
    }

    /// Lists the places found unreadable, with adjacent blocks joined.
    pub(crate) fn places(&self) -> Vec<UnreadablePlace> {
        let mut places: Vec<(u32, UnreadablePlace)> = Vec::new();
        for (slot, block) in self.unreadable.borrow().iter() {
            let offset = block * BLOCK_BYTES as u64;
            match places.last_mut() {
                Some((of, place)) if of == slot && place.offset + place.len == offset => {
                    place.len += BLOCK_BYTES as u64;
                }
                _ => {
                    let (file, len) = (self.name(*slot), BLOCK_BYTES as u64);
                    places.push((*slot, UnreadablePlace { file, offset, len }));
                }
            }
        }
        places.into_iter().map(|(_, place)| place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// One file of a few blocks, filled with the numbers of the blocks.
    struct Reader {
        bad: Vec<u64>,
        read_count: AtomicUsize,
    }

    impl DiskReader for Reader {
        fn files(&self) -> io::Result<Vec<(u32, u64)>> {
            Ok(vec![(0, 1 << 20)])
        }

        fn read_at(&self, _: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            self.read_count.fetch_add(1, Ordering::Relaxed);
            let end = offset + buf.len() as u64;
            if self.bad.iter().any(|block| block * 4096 < end && (block + 1) * 4096 > offset) {
                return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
            }
            (offset..).zip(buf).for_each(|(at, byte)| *byte = (at / 4096) as u8);
            Ok(())
        }

        fn name(&self, _: u32) -> String {
            "ring".into()
        }
    }

    fn reader(bad: &[u64]) -> Reader {
        Reader { bad: bad.to_vec(), read_count: AtomicUsize::new(0) }
    }

    #[test]
    fn bytes_around_unreadable_blocks_are_read() {
        let reader = reader(&[5, 6, 9]);
        let reads = Reads::new(&reader);
        let mut bytes = vec![0xff; 16 * 4096];
        reads.read(0, 0, &mut bytes).unwrap();
        for (block, found) in bytes.chunks(4096).enumerate() {
            let expected = if [5, 6, 9].contains(&block) { 0 } else { block as u8 };
            assert!(found.iter().all(|byte| *byte == expected), "block {block}");
        }
        let place = |block: u64, count: u64| UnreadablePlace {
            file: "ring".into(),
            offset: block * 4096,
            len: count * 4096,
        };
        assert_eq!(reads.places(), [place(5, 2), place(9, 1)]);
        assert!(reads.is_unreadable(0, 4 * 4096, 4097) && !reads.is_unreadable(0, 4 * 4096, 4096));
        assert!(
            reads.is_unreadable(0, 6 * 4096 + 4000, 1) && !reads.is_unreadable(0, 7 * 4096, 8192)
        );
        assert!(!reads.is_unreadable(1, 5 * 4096, 4096));
        // A header in a known unreadable block is not tried again.
        let before = reader.read_count.load(Ordering::Relaxed);
        let mut header = [1; 192];
        reads.read(0, 5 * 4096, &mut header).unwrap();
        assert_eq!((header, reader.read_count.load(Ordering::Relaxed)), ([0; 192], before));
    }

    #[test]
    fn a_disk_that_reads_nothing_is_given_up_soon() {
        let reader = reader(&(0..4096).collect::<Vec<_>>());
        let error = Reads::new(&reader).read(0, 0, &mut vec![0; 4096 * 4096]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(reader.read_count.load(Ordering::Relaxed) < 3 * BLOCKS_MAX);
    }
}
