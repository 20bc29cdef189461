//! A device as a cut may have left it, built from the log of its writes.
//!
//! Invariants:
//! - Everything before the last flush is present, and so are later writes with FUA. Chance decides
//!   about each other later write: absent, whole, or some of its sectors.

use super::writelog::Event;
use crate::seed::Random;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The unit that a disk writes whole or not at all. Source: every disk's logical block, at least.
const SECTOR_BYTES: usize = 512;
/// Unit in which the device is copied. Chosen by hand.
const PART_BYTES: u64 = 64 << 10;

/// A moment at which the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Number of events that happened before the cut.
    pub event_index: usize,
    /// Whether some of the writes since the last flush are lost; otherwise none is.
    pub is_lossy: bool,
}

/// The device while the log is replayed. Cuts are taken in the order of their places.
pub struct Replay<'a> {
    events: &'a [Event],
    log: &'a File,
    /// The contents up to the last flush. Kept in a file, because the processes of a guest kernel
    /// have room for a few hundred MiB only.
    certain: File,
    certain_index: usize,
    device_bytes: u64,
    /// Numbers of the parts of it that were written.
    parts: BTreeSet<u64>,
}

impl<'a> Replay<'a> {
    /// Makes a device of zeroes, kept in a file of `dir`.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn new(
        events: &'a [Event],
        log: &'a File,
        dir: &Path,
        device_bytes: u64,
    ) -> io::Result<Replay<'a>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let certain = options.open(dir.join("certain"))?;
        let parts = BTreeSet::new();
        Ok(Replay { events, log, certain, certain_index: 0, device_bytes, parts })
    }

    /// Writes the device as the cut leaves it to a new file, and returns how many writes were lost
    /// or torn.
    ///
    /// # Errors
    /// When the log cannot be read or names a place outside the device, or the file cannot be
    /// written.
    ///
    /// # Panics
    /// When a cut comes before the last flush of an earlier one.
    pub fn image(&mut self, cut: Cut, random: &mut Random, path: &Path) -> io::Result<u64> {
        let past = &self.events[..cut.event_index];
        let flush = past.iter().rposition(|event| *event == Event::Flush).map_or(0, |at| at + 1);
        assert!(self.certain_index <= flush, "cuts are taken in order");
        for event in &self.events[self.certain_index..flush] {
            for (offset, piece) in self.pieces(event, |_| true)? {
                self.certain.write_all_at(&piece, offset)?;
                let last = (offset + piece.len() as u64).saturating_sub(1);
                self.parts.extend(offset / PART_BYTES..=last / PART_BYTES);
            }
        }
        self.certain_index = flush;
        let file = self.copy(path)?;
        let mut lost_count = 0;
        for event in &past[flush..] {
            let is_kept = matches!(event, Event::Write { is_durable: true, .. }) || !cut.is_lossy;
            let fate = if is_kept { Fate::Kept } else { Fate::random(random) };
            lost_count += u64::from(fate != Fate::Kept && !matches!(event, Event::Mark(_)));
            let pieces = match fate {
                Fate::Lost => Vec::new(),
                Fate::Kept => self.pieces(event, |_| true)?,
                Fate::Torn(percent) => self.pieces(event, |_| random.chance(percent))?,
                Fate::Prefix(sectors) => self.pieces(event, |index| index < sectors)?,
            };
            for (offset, piece) in pieces {
                file.write_all_at(&piece, offset)?;
            }
        }
        Ok(lost_count)
    }

    /// Copies the certain contents; parts that were never written stay holes.
    fn copy(&self, path: &Path) -> io::Result<File> {
        let file = File::create(path)?;
        file.set_len(self.device_bytes)?;
        self.certain.set_len(self.device_bytes)?;
        for part in &self.parts {
            let offset = part * PART_BYTES;
            let length = PART_BYTES.min(self.device_bytes - offset);
            let mut bytes = vec![0; usize::try_from(length).expect("small")];
            self.certain.read_exact_at(&mut bytes, offset)?;
            file.write_all_at(&bytes, offset)?;
        }
        Ok(file)
    }

    /// Returns the pieces of an event's data that reach the device, with their places.
    fn pieces(
        &self,
        event: &Event,
        mut is_there: impl FnMut(usize) -> bool,
    ) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let (start, end, bytes) = match event {
            Event::Flush | Event::Mark(_) => return Ok(Vec::new()),
            Event::Discard(range) => (range.start, range.end, None),
            Event::Write { offset, at, .. } => {
                (*offset, offset.saturating_add(at.end - at.start), Some(at))
            }
        };
        if end > self.device_bytes {
            return Err(io::Error::other(format!("outside of the device: {event:?}")));
        }
        let mut data = vec![0; usize::try_from(end - start).expect("a device fits in memory")];
        if let Some(at) = bytes {
            self.log.read_exact_at(&mut data, at.start)?;
        }
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        for (index, sector) in data.chunks(SECTOR_BYTES).enumerate() {
            if !is_there(index) {
                continue;
            }
            let offset = start + (index * SECTOR_BYTES) as u64;
            match pieces.last_mut() {
                Some((at, last)) if *at + last.len() as u64 == offset => {
                    last.extend_from_slice(sector);
                }
                _ => pieces.push((offset, sector.to_vec())),
            }
        }
        Ok(pieces)
    }
}

/// The fate of a write that was not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Lost,
    Kept,
    /// Each sector is present with this chance.
    Torn(u64),
    /// Its first sectors are present.
    Prefix(usize),
}

impl Fate {
    fn random(random: &mut Random) -> Fate {
        match random.below(10) {
            0..4 => Fate::Lost,
            4..8 => Fate::Kept,
            8 => Fate::Torn(random.between(5, 95)),
            _ => Fate::Prefix(usize::try_from(random.below(16)).expect("small")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes three blocks of 4 KiB: one before a flush, one after it, one after it with FUA.
    #[test]
    fn flushed_and_fua_writes_survive_and_others_by_chance() {
        let dir = tempfile::tempdir().unwrap();
        let log_path = dir.path().join("log");
        std::fs::write(&log_path, [[1; 4096], [2; 4096], [3; 4096]].concat()).unwrap();
        let log = File::open(&log_path).unwrap();
        let write = |index: u64, is_durable| Event::Write {
            offset: index * 4096,
            at: index * 4096..(index + 1) * 4096,
            is_durable,
        };
        let events = [write(0, false), Event::Flush, write(2, true), write(1, false)];
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let mut random = Random::new(seed, 0);
            let mut replay = Replay::new(&events, &log, dir.path(), 3 * 4096).unwrap();
            let path = dir.path().join("image");
            let cut = Cut { event_index: 4, is_lossy: seed % 10 != 0 };
            let lost_count = replay.image(cut, &mut random, &path).unwrap();
            let image = std::fs::read(&path).unwrap();
            assert!(image[..4096] == [1; 4096] && image[8192..] == [3; 4096]);
            let there = image[4096..8192].chunks(512).filter(|sector| **sector == [2; 512]).count();
            let zero = image[4096..8192].chunks(512).filter(|sector| **sector == [0; 512]).count();
            assert_eq!(there + zero, 8, "sectors are whole");
            assert!(cut.is_lossy || (there == 8 && lost_count == 0));
            assert!(lost_count > 0 || there == 8);
            seen.insert(there);
        }
        assert!(seen.contains(&0) && seen.contains(&8) && seen.len() > 4, "{seen:?}");
    }

    #[test]
    fn cut_before_the_flush_shows_no_later_events() {
        let dir = tempfile::tempdir().unwrap();
        let log_path = dir.path().join("log");
        std::fs::write(&log_path, [1; 4096]).unwrap();
        let log = File::open(&log_path).unwrap();
        let write = Event::Write { offset: 0, at: 0..4096, is_durable: false };
        let events = [write, Event::Discard(0..512), Event::Flush];
        let mut replay = Replay::new(&events, &log, dir.path(), 4096).unwrap();
        let path = dir.path().join("image");
        let mut image = |event_index| {
            let cut = Cut { event_index, is_lossy: false };
            replay.image(cut, &mut Random::new(1, 0), &path).unwrap();
            std::fs::read(&path).unwrap()
        };
        assert_eq!(image(0), [0; 4096]);
        assert_eq!(image(1), [1; 4096]);
        assert_eq!(image(3), [[0; 512].as_slice(), &[1; 3584]].concat());
        let far = [Event::Discard(4096..8192), Event::Flush];
        let mut replay = Replay::new(&far, &log, dir.path(), 4096).unwrap();
        let cut = Cut { event_index: 2, is_lossy: false };
        assert!(replay.image(cut, &mut Random::new(1, 0), &path).is_err());
    }
}
