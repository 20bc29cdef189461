//! The note of a member's newest batch: how far it may have answered in the present page cache.
//!
//! Invariants:
//! - It is written after the batch and before the answer, and lowered before the log is cut. It lies in
//!   the page cache, where a killed process leaves it. It is never synced: a loss of power or an unmount
//!   may take it back to an earlier one, so it counts in its own page cache only. The document then says
//!   what the log proves.
//! - It is smaller than a page and written at once, so a killed process does not tear it.

use block::units::{array_at, crc32c, u32_at, u64_at};
use block::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use uuid::Uuid;

/// Name of the file, in the directory of the log.
const FILE: &str = "member.note";
const BYTES: usize = 32;
const AT_SEQUENCE: usize = 16; // u64, behind the identity of the page cache
const AT_ZERO: usize = 24; //     4 zero bytes
const AT_CRC: usize = 28; //      u32, CRC-32C of bytes 0..28

/// The note of one member.
#[derive(Debug)]
pub(crate) struct Note {
    file: File,
    page_cache: Uuid,
    noted: Option<u64>,
}

fn encode(page_cache: Uuid, sequence: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..AT_SEQUENCE].copy_from_slice(page_cache.as_bytes());
    bytes[AT_SEQUENCE..AT_ZERO].copy_from_slice(&sequence.to_le_bytes());
    let crc = crc32c(&bytes[..AT_CRC]);
    bytes[AT_CRC..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Returns the sequence of a note of this page cache. Other bytes are no note.
fn decode(bytes: &[u8], page_cache: Uuid) -> Option<u64> {
    let is_whole = bytes.len() == BYTES
        && u32_at(bytes, AT_CRC) == bytes.get(..AT_CRC).map(crc32c)
        && u32_at(bytes, AT_ZERO) == Some(0);
    let of_cache = array_at::<16>(bytes, 0).map(Uuid::from_bytes)?;
    u64_at(bytes, AT_SEQUENCE).filter(|_| is_whole && of_cache == page_cache)
}

impl Note {
    /// Opens the note in `dir`, the directory of the log.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn open(dir: &Path, page_cache: Uuid) -> Result<Note> {
        let path = dir.join(FILE);
        let open = || -> io::Result<Note> {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = file.open(&path)?;
            let mut bytes = [0; BYTES];
            let noted = match file.read_exact_at(&mut bytes, 0) {
                Ok(()) => decode(&bytes, page_cache),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
                Err(error) => return Err(error),
            };
            Ok(Note { file, page_cache, noted })
        };
        open().map_err(|e| Error::with_source(ErrorKind::Io, format!("open {}", path.display()), e))
    }

    /// Returns the sequence, if there is a note of this page cache.
    pub(crate) fn noted(&self) -> Option<u64> {
        self.noted
    }

    /// Notes that the log is written up to `sequence`.
    ///
    /// # Errors
    /// `Io`; nothing may be answered then.
    pub(crate) fn write(&mut self, sequence: u64) -> Result<()> {
        if self.noted != Some(sequence) {
            let written = self.file.write_all_at(&encode(self.page_cache, sequence), 0);
            written.map_err(|e| Error::with_source(ErrorKind::Io, "note the newest batch", e))?;
            self.noted = Some(sequence);
        }
        Ok(())
    }

    /// Notes that the log is about to end at `sequence` or before.
    ///
    /// # Errors
    /// `Io`; the log may not be cut then.
    pub(crate) fn lower(&mut self, sequence: u64) -> Result<()> {
        match self.noted {
            Some(noted) if noted > sequence => self.write(sequence),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_survives_the_process_and_not_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, next_cache) = (Uuid::from_u128(7), Uuid::from_u128(8));
        let mut note = Note::open(dir.path(), cache).unwrap();
        assert_eq!(note.noted(), None);
        note.write(5).unwrap();
        note.write(4).unwrap();
        drop(note);
        assert_eq!(Note::open(dir.path(), cache).unwrap().noted(), Some(4));
        assert_eq!(Note::open(dir.path(), next_cache).unwrap().noted(), None);
        let bytes = encode(cache, 4);
        for bit in 0..BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&flipped, cache), None, "bit {bit}");
        }
    }
}
