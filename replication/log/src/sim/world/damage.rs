//! Runs that end with damage: a flipped bit, a forged batch, sectors that the disk does not read.
//!
//! Invariants:
//! - The log is refused, or shows a true past. With unreadable sectors it shows exactly the
//!   contents that it would show without them.

use super::*;
use crate::format::FormatError;
use crate::ring::reads::Reads;
use crate::ring::walk::{FIRST_AT, Walk};

/// File, first byte, end.
type Range = (u32, u64, u64);

impl World {
    /// Runs, then makes `count` sectors unreadable: the log shows the same contents as without
    /// that, or is refused. Returns whether it was refused, and whether the place of a single
    /// sector required it to open (`Some(true)`) or to be refused (`Some(false)`).
    pub(crate) fn run_with_unreadable(
        &mut self,
        count: u64,
    ) -> Result<(bool, Option<bool>), String> {
        self.run()?;
        if self.rng.chance(50) {
            // Destages most of the log, as after a while of rest.
            let mut process = self.open_after_crashes()?;
            for _ in 0..8 {
                if process.shared.is_failed() {
                    break;
                }
                core::freeze(&process.shared);
                self.destage(&mut process)?;
                for _ in 0..20 {
                    process.core.step(&mut process.disk, &process.shared);
                    process.disk.run_one();
                }
            }
            self.crash(process)?;
        }
        if self.rng.chance(70) {
            // Continues without an opening batch that records how far the log was flushed.
            let mut process = self.open_after_crashes()?;
            self.live(&mut process)?;
            self.crash(process)?;
        }
        let whole = Arc::new(Mutex::new(self.platter.lock().clone()));
        let [needed, maybe] = self.places_needed(&whole)?;
        let (opened, _) = self.try_open(SimDisk::new(whole, 1, self.is_immediate));
        let last_lsn = opened.map_err(|e| e.chain())?.recovery.last_lsn;
        let mut place = None;
        for _ in 0..count {
            place = Some(self.platter.lock().spoil(&mut self.rng));
        }
        let is_in = |ranges: &[Range]| {
            let is_at = |(file, offset)| {
                ranges.iter().any(|(of, from, to)| *of == file && (*from..*to).contains(&offset))
            };
            place.is_some_and(is_at)
        };
        let must_open = match () {
            () if count > 1 || is_in(&maybe) => None,
            () => Some(!is_in(&needed)),
        };
        let disk = self.disk();
        let (opened, disk) = self.try_open(disk);
        let opened = match opened {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                if must_open == Some(true) {
                    return Err(format!("refused without {place:?}: {}", error.chain()));
                }
                return Ok((true, must_open));
            }
            Err(error) => return Err(format!("an odd error: {error:?}")),
            Ok(opened) => opened,
        };
        if opened.recovery.last_lsn != last_lsn {
            let found = opened.recovery.last_lsn;
            return Err(format!(
                "the log ends at {found} where {place:?} is not read, else at {last_lsn}"
            ));
        }
        if opened.recovery.unreadable.is_empty() && count == 1 {
            return Err(format!("{place:?} is not reported"));
        }
        self.check_opened(opened, disk)?;
        Ok((false, must_open))
    }

    /// Returns the ranges (file, from, to) whose bytes an open needs, and those for which it
    /// depends on other knowledge.
    fn places_needed(&self, platter: &Arc<Mutex<Platter>>) -> Result<[Vec<Range>; 2], String> {
        let reader = SimDisk::new(Arc::clone(platter), 1, true).reader();
        let reads = Reads::new(&*reader);
        let (pool, failed) = (self.identity.pool, |e: block::Error| e.chain());
        let files = reader.files().expect("simulated");
        let ring = recovery::read_ring(&reads, &files, pool).map_err(failed)?;
        let file_bytes = ring.file_bytes;
        let mut walk = Walk::new(&reads, pool, ring.clone(), self.destaged, self.plan.seeded_bugs);
        let starts = walk.starts(self.destaged.next()).map_err(failed)?.unwrap_or_default();
        let (mut needed, mut maybe) = (Vec::new(), Vec::new());
        for start in starts {
            walk.begin(start);
            while walk.advance().map_err(failed)? {
                let taken = walk.newest.expect("just taken");
                let (from, len) = (taken.at.offset, u64::from(taken.header.batch_bytes));
                let is_needed =
                    taken.header.last_lsn() > self.destaged && taken.header.entry_count > 0;
                // If a batch has no entries beyond the destaged ones, the batches behind it may or
                // may not be found without it.
                let place = (taken.at.slot, from, from + len);
                if is_needed {
                    needed.push(place);
                } else if taken.header.first_lsn > self.destaged {
                    maybe.push(place);
                }
            }
            if walk.newest.is_some() {
                break;
            }
        }
        let end = walk.end_at;
        let is_torn = matches!(walk.end, Some(FormatError::HeaderChecksum | FormatError::Checksum));
        let bytes = |from| if is_torn { file_bytes } else { from + 4096 };
        maybe.push((end.slot, end.offset, bytes(end.offset)));
        let next = (end.slot + 1) % ring.file_count;
        maybe.extend([next, 0].map(|slot| (slot, FIRST_AT, bytes(FIRST_AT))));
        Ok([needed, maybe])
    }

    /// Runs once, then forges the batch at the end of the log. Returns `None` if that batch cannot
    /// be forged, otherwise whether the log was refused.
    pub(crate) fn run_with_forgery(&mut self) -> Result<Option<bool>, String> {
        self.run()?;
        if !self.platter.lock().forge_newest() {
            return Ok(None);
        }
        let disk = self.disk();
        match self.try_open(disk).0 {
            Ok(_) => Ok(Some(false)),
            Err(error) if error.chain().contains("authentication failed") => Ok(Some(true)),
            Err(error) => Err(format!("an odd error: {error:?}")),
        }
    }

    /// Runs once, then damages one bit: the log is refused, or shows a true past. Returns whether
    /// it was refused.
    pub(crate) fn run_with_damage(&mut self) -> Result<bool, String> {
        self.run()?;
        self.platter.lock().flip(&mut self.rng);
        let disk = self.disk();
        let (opened, disk) = self.try_open(disk);
        match opened {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(true),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(true),
            Err(error) => Err(format!("an odd error: {error:?}")),
            Ok(opened) => self.check_opened(opened, disk).map(|()| false),
        }
    }

    /// Checks that the opened log shows a true past.
    fn check_opened(&mut self, opened: recovery::Opened, disk: SimDisk) -> Result<(), String> {
        let last_lsn = opened.recovery.last_lsn;
        opened.overlay.set_spill_layers(self.open_spills()?);
        let shared = SharedRing::new(opened.overlay, last_lsn, self.destaged, 1, 0);
        let start = CoreStart {
            config: opened.config,
            head: opened.head,
            live: opened.live,
            files: opened.files,
            is_settled: true,
            replicas: None,
        };
        let random = Arc::clone(&self.random);
        let core = Core::new(start, random, Arc::new(self.clock.clone()));
        let (reader, state) = (disk.reader(), opened.state);
        let process = Process { disk, core, shared, reader, state, member: None };
        self.check_contents(&process, last_lsn)
    }
}
