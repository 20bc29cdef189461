//! Decodes the log that the kernel's device mapper target `log-writes` keeps of a device.
//!
//! Invariants:
//! - The code is pure: the caller reads the bytes.
//! - Numbers that do not fit the log are errors, never a panic.
//!
//! Source of the format: Linux, `drivers/md/dm-log-writes.c`, `struct log_write_super` and
//! `struct log_write_entry`. Little-endian:
//!
//! | block | at | field |
//! |---|---|---|
//! | first | 0 | u64 magic |
//! | | 8 | u64 version, 1 |
//! | | 16 | u64 entries |
//! | | 24 | u32 bytes of a block, a power of two |
//! | entry | 0 | u64 first block on the device |
//! | | 8 | u64 blocks |
//! | | 16 | u64 flags: 1 flush, 2 FUA, 4 discard, 8 mark, 16 metadata |
//! | | 24 | u64 bytes of the mark's text, which follows in the same block |
//!
//! An entry is one block; the blocks that were written follow it, except after a discard.

use std::ops::Range;

/// Decoded bytes of the first block, and of an entry without a mark's text.
pub const HEADER_BYTES: usize = 32;
const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
const METADATA: u64 = 16;

/// The contents of the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Super {
    /// Number of complete entries.
    pub entry_count: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

/// An event of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A write of bytes from the log to the device.
    Write {
        /// First byte on the device.
        offset: u64,
        /// Place of the bytes in the log.
        at: Range<u64>,
        /// Whether it was on stable storage when it was answered.
        is_durable: bool,
    },
    /// A range of the device was discarded.
    Discard(Range<u64>),
    /// Everything before is on stable storage.
    Flush,
    /// A mark that the test has set.
    Mark(String),
}

fn number(bytes: &[u8], at: usize) -> Result<u64, String> {
    let field = bytes.get(at..at + 8).ok_or("the log of writes ends inside a header")?;
    Ok(u64::from_le_bytes(field.try_into().expect("eight bytes")))
}

/// Decodes the first block.
///
/// # Errors
/// When it is not a first block, or has another version.
pub fn decode_super(bytes: &[u8]) -> Result<Super, String> {
    if number(bytes, 0)? != MAGIC {
        return Err("not a log of writes".to_owned());
    }
    let version = number(bytes, 8)?;
    if version != 1 {
        return Err(format!("a log of writes of version {version}"));
    }
    let (entry_count, block_bytes) = (number(bytes, 16)?, number(bytes, 24)? & 0xffff_ffff);
    if !(512..=65536).contains(&block_bytes) || !block_bytes.is_power_of_two() {
        return Err(format!("a log of writes with blocks of {block_bytes} bytes"));
    }
    Ok(Super { entry_count, block_bytes })
}

/// Decodes the entry with the block `bytes` at byte `at` of the log. Returns its events in order (a
/// write that also flushed is two events), and the place of the next entry.
///
/// # Errors
/// When its numbers make no sense.
pub fn decode_entry(bytes: &[u8], at: u64, block_bytes: u64) -> Result<(Vec<Event>, u64), String> {
    let (block, block_count) = (number(bytes, 0)?, number(bytes, 8)?);
    let (flags, text_bytes) = (number(bytes, 16)?, number(bytes, 24)?);
    let wrong = |what: &str| format!("entry of the log of writes at byte {at}: {what}");
    if flags & !(FLUSH | FUA | DISCARD | MARK | METADATA) != 0 {
        return Err(wrong(&format!("unknown flags {flags:#x}")));
    }
    let scaled = |count: u64| count.checked_mul(block_bytes);
    let (Some(offset), Some(length)) = (scaled(block), scaled(block_count)) else {
        return Err(wrong("a range past the end of all devices"));
    };
    let data_at = at.checked_add(block_bytes).ok_or_else(|| wrong("past the end of the log"))?;
    let range = |start: u64| Some(start..start.checked_add(length)?);
    if flags & MARK != 0 {
        let end = usize::try_from(text_bytes).ok().and_then(|n| n.checked_add(HEADER_BYTES));
        let text = end.and_then(|end| bytes.get(HEADER_BYTES..end));
        let text = text.ok_or_else(|| wrong("a mark longer than its block"))?;
        return Ok((vec![Event::Mark(String::from_utf8_lossy(text).into_owned())], data_at));
    }
    if flags & DISCARD != 0 {
        let range = range(offset).ok_or_else(|| wrong("a discard past the end"))?;
        return Ok((vec![Event::Discard(range)], data_at));
    }
    let data = range(data_at).ok_or_else(|| wrong("data past the end of the log"))?;
    let next = data.end;
    let mut events = Vec::new();
    if flags & FLUSH != 0 {
        events.push(Event::Flush);
    }
    if length > 0 {
        events.push(Event::Write { offset, at: data, is_durable: flags & FUA != 0 });
    }
    Ok((events, next))
}

/// Decodes a whole log; `read` fills a buffer from a byte of it.
///
/// # Errors
/// When the log makes no sense, or `read` fails.
pub fn decode(
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), String>,
) -> Result<Vec<Event>, String> {
    let mut header = [0; HEADER_BYTES];
    read(0, &mut header)?;
    let Super { entry_count, block_bytes } = decode_super(&header)?;
    let mut block = vec![0; usize::try_from(block_bytes).expect("at most 64 KiB")];
    let (mut events, mut at) = (Vec::new(), block_bytes);
    for _ in 0..entry_count {
        read(at, &mut block)?;
        let (more, next) = decode_entry(&block, at, block_bytes)?;
        events.extend(more);
        at = next;
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Random;

    fn entry(block: u64, count: u64, flags: u64, text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [block, count, flags, text.len() as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(text.as_bytes());
        bytes.resize(512, 0);
        bytes
    }

    fn log(entries: &[(Vec<u8>, usize)]) -> Vec<u8> {
        let mut bytes = b"rhswfsj\0".to_vec(); // as a kernel wrote it
        bytes.extend_from_slice(&1u64.to_le_bytes());
        bytes.extend_from_slice(&(entries.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&512u64.to_le_bytes());
        bytes.resize(512, 0);
        for (entry, data_bytes) in entries {
            bytes.extend_from_slice(entry);
            bytes.resize(bytes.len() + data_bytes, 0xaa);
        }
        bytes
    }

    fn decode_bytes(log: &[u8]) -> Result<Vec<Event>, String> {
        decode(|at, buffer| {
            let at = usize::try_from(at).map_err(|_| "far")?;
            let end = at.checked_add(buffer.len()).ok_or("far")?;
            buffer.copy_from_slice(log.get(at..end).ok_or("past the end")?);
            Ok(())
        })
    }

    #[test]
    fn log_lists_events_in_order() {
        let log = log(&[
            (entry(8, 2, 0, ""), 1024),
            (entry(100, 50, DISCARD, ""), 0),
            (entry(0, 0, FLUSH, ""), 0),
            (entry(0, 0, MARK, "17"), 0),
            (entry(3, 1, FUA | METADATA, ""), 512),
            (entry(4, 1, FLUSH | FUA, ""), 512),
        ]);
        let write = |offset, at: Range<u64>, is_durable| Event::Write { offset, at, is_durable };
        let expected = vec![
            write(4096, 1024..2048, false),
            Event::Discard(51200..76800),
            Event::Flush,
            Event::Mark("17".to_owned()),
            write(1536, 4096..4608, true),
            Event::Flush,
            write(2048, 5120..5632, true),
        ];
        assert_eq!(decode_bytes(&log), Ok(expected));
    }

    #[test]
    fn rubbish_is_an_error_and_never_a_panic() {
        let good = log(&[(entry(8, 2, 0, ""), 1024), (entry(0, 0, MARK, "mark"), 0)]);
        assert!(decode_bytes(&good).is_ok());
        assert!(decode_bytes(&good[..1000]).is_err(), "a cut log");
        assert!(decode_bytes(&[0; 512]).unwrap_err().contains("not a log"));
        for (at, value) in [(8, 2u64), (24, 511), (24, 1 << 20), (16, 3)] {
            let mut bad = good.clone();
            bad[at..at + 8].copy_from_slice(&value.to_le_bytes());
            assert!(decode_bytes(&bad).is_err(), "{value} at {at}");
        }
        let mut random = Random::new(1, 0);
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..random.between(1, 8) {
                let at = random.below(bad.len() as u64) as usize;
                bad[at] = random.bits() as u8;
            }
            // Any result will do, but no panic.
            let _ = decode_bytes(&bad);
        }
    }
}
