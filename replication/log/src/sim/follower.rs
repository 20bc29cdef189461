//! A member's ring under a simulated disk: random batches, cuts, resets and crashes, compared with a
//! list.
//!
//! Invariants of the product that a run checks after each crash:
//! - The log is a beginning of what was written, byte for byte, with all that was synced. What was
//!   cut or reset is gone.
//! - Batches with entries that are not destaged are there, whatever the ring has written over.
//! - An end is reported as damaged only after a crash.

mod tests;

use super::disk::{Faults, Platter, SimDisk};
use super::{Rng, SimRandom};
use crate::format::batch::{self, BatchHeader, Predecessor};
use crate::format::entry::{EntryKind, EntryRow};
use crate::format::succession;
use crate::options::LogOptions;
use crate::ring::follower_log::{FollowerFound, FollowerLog, FollowerOpening};
use crate::seeded_bugs::SeededBugs;
use block::env::IoBuffer;
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use block::{Epoch, ErrorKind, Lsn, Position, VolumeId};
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;

const POOL: [u8; 16] = [1; 16];
const CHAIN: [u8; 16] = [2; 16];
const FILE_BYTES: u64 = 256 << 10;

/// A batch of the simulated owners.
#[derive(Clone, Debug)]
struct Made {
    header: BatchHeader,
    checksum: u32,
    bytes: Bytes,
}

impl Made {
    fn sequence(&self) -> u64 {
        self.header.sequence
    }

    fn position(&self) -> Position {
        Position { epoch: self.header.epoch, sequence: self.header.sequence }
    }
}

/// The change of the log that was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Nothing,
    Cut(u64),
    Reset,
}

/// Events of a run, so that a test can tell that it covered enough.
#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    batches: u64,
    crashes: u64,
    cuts: u64,
    resets: u64,
    full: u64,
    released: u64,
    released_by_owner: u64,
    refused: u64,
    written_again: u64,
    damaged: u64,
}

struct FollowerWorld {
    rng: Rng,
    seeded_bugs: SeededBugs,
    faults: Faults,
    platter: Arc<Mutex<Platter>>,
    options: LogOptions,
    is_immediate: bool,
    key: PoolKey,
    /// Position before the first batch, and the LSN of its first entry.
    before: (Position, Lsn),
    batches: Vec<Made>,
    /// Batches that were cut, newest first.
    cut: Vec<Made>,
    /// Batches that the process was about to write when it failed.
    attempted: Vec<Made>,
    doing: Doing,
    synced: u64,
    trim_lsn: Lsn,
    /// The highest trim LSN that any written batch had.
    trim_written: Lsn,
    may_be_damaged: bool,
    /// Whether the machine stops while the log is in use: files cannot be made then, either.
    may_stop: bool,
    /// Whether a damaged end was found and the log has not been changed since.
    has_damaged_end: bool,
    stats: Stats,
}

impl FollowerWorld {
    fn new(seed: u64, seeded_bugs: SeededBugs, faults: Faults) -> Self {
        let mut rng = Rng::new(seed);
        FollowerWorld {
            seeded_bugs,
            faults,
            platter: Arc::default(),
            options: LogOptions {
                ring_bytes: (2 + rng.below(3)) * FILE_BYTES,
                file_bytes: FILE_BYTES,
                generation_bytes_max: FILE_BYTES,
                ..LogOptions::default()
            },
            is_immediate: rng.chance(50),
            key: PoolKey::new([5; KEY_BYTES]),
            before: (Position::START, Lsn(1)),
            batches: Vec::new(),
            cut: Vec::new(),
            attempted: Vec::new(),
            doing: Doing::Nothing,
            synced: 0,
            trim_lsn: Lsn::NONE,
            trim_written: Lsn::NONE,
            may_be_damaged: false,
            may_stop: false,
            has_damaged_end: false,
            stats: Stats::default(),
            rng,
        }
    }

    fn run(&mut self, crashes: u64) -> Result<(), String> {
        for _ in 0..crashes {
            let Some(mut log) = self.open()? else { continue };
            let is_failed = self.live(&mut log)?;
            drop(log);
            self.crash(is_failed);
        }
        self.open().map(|_| ())
    }

    /// Opens the log and checks it. `None` if the process failed before it could serve.
    fn open(&mut self) -> Result<Option<FollowerLog>, String> {
        let mut disk = SimDisk::new(Arc::clone(&self.platter), self.rng.next(), self.is_immediate);
        disk.faults = self.faults;
        self.may_stop = self.rng.chance(50);
        if self.may_stop {
            disk.stop_after(self.rng.below(60));
        }
        let opening = FollowerOpening {
            disk: Box::new(disk),
            random: Arc::new(SimRandom::new(self.rng.next())),
            pool: POOL,
            options: self.options,
            made_count: self.platter.lock().made_count(),
        };
        let (mut log, found) =
            opening.open_with(self.seeded_bugs).map_err(|e| format!("no open: {}", e.chain()))?;
        let known = [&self.batches[..], &self.attempted].concat();
        let before = (self.before, self.synced, self.trim_written, self.doing, known);
        self.check_found(&log, &found)?;
        let is_ready = log.rewrite(self.synced).and_then(|()| log.sync()).is_ok();
        if is_ready {
            self.synced = self.last();
        } else {
            // What was found may be in the page cache only.
            (self.before, self.synced, self.trim_written, self.doing, self.batches) = before;
            self.crash(true);
        }
        Ok(is_ready.then_some(log))
    }

    fn last(&self) -> u64 {
        self.batches.last().map_or(self.before.0.sequence, Made::sequence)
    }

    /// Checks an opened log against the list, which becomes what was found.
    fn check_found(&mut self, log: &FollowerLog, found: &FollowerFound) -> Result<(), String> {
        let doing = std::mem::replace(&mut self.doing, Doing::Nothing);
        let mut known = std::mem::take(&mut self.batches);
        known.extend(std::mem::take(&mut self.attempted));
        let least = match doing {
            Doing::Nothing => self.synced,
            Doing::Cut(sequence) => self.synced.min(sequence),
            Doing::Reset => 0,
        };
        self.stats.damaged += u64::from(found.is_end_damaged);
        self.has_damaged_end = found.is_end_damaged;
        if found.is_end_damaged && !self.may_be_damaged {
            return Err("an end is reported as damaged without a crash".into());
        }
        if found.last == 0 && (least <= self.before.0.sequence || doing == Doing::Reset) {
            // What was reset is not recorded before the first batch.
            (self.before, self.synced) = ((Position::START, Lsn(1)), 0);
            self.trim_written = Lsn::NONE;
            return Ok(());
        }
        if found.last < least {
            return Err(format!("found up to {}, synced up to {least}", found.last));
        }
        let (start, last) = (found.before.sequence, found.last);
        let is_kept = |made: &&Made| (start + 1..=last).contains(&made.sequence());
        let expected: Vec<&Made> = known.iter().filter(is_kept).collect();
        let all = read_all(log, start)?;
        if doing != Doing::Reset {
            let is_same = all.len() == expected.len()
                && all.iter().zip(&expected).all(|(one, made)| one.1 == made.bytes);
            if !is_same || all.last().map(|(position, _)| *position) != Some(log.tail()) {
                return Err(format!("{start} to {last} is not what was written"));
            }
            let is_needed = |made: &&Made| {
                made.header.last_lsn() > self.trim_written && made.header.entry_count > 0
            };
            let needed = known.iter().find(is_needed).map_or(u64::MAX, Made::sequence);
            if start >= needed && needed <= last {
                return Err(format!("the log begins behind {start}, and {needed} is not destaged"));
            }
        }
        self.check_epochs(found, &all)?;
        self.batches = known.into_iter().filter(|made| made.sequence() <= last).collect();
        self.synced = self.synced.min(last);
        if doing == Doing::Reset {
            // The caller resets it again.
            self.batches.clear();
            (self.before, self.synced) = ((log.tail(), Lsn(1)), 0);
            self.doing = Doing::Reset;
        }
        Ok(())
    }

    fn check_epochs(&self, found: &FollowerFound, all: &[(Position, Bytes)]) -> Result<(), String> {
        let mut epochs: Vec<(Epoch, u64)> = Vec::new();
        for (position, _) in all {
            if epochs.last().is_none_or(|(epoch, _)| *epoch != position.epoch) {
                epochs.push((position.epoch, position.sequence));
            }
        }
        if found.epochs == epochs { Ok(()) } else { Err(format!("epochs {:?}", found.epochs)) }
    }

    /// Uses the log until it fails, or for a while. Returns whether it failed.
    fn live(&mut self, log: &mut FollowerLog) -> Result<bool, String> {
        if self.doing == Doing::Reset && self.reset(log).is_err() {
            return Ok(true);
        }
        for _ in 0..self.rng.below(60) {
            let outcome = match self.rng.below(100) {
                0..60 => self.write(log)?,
                60..72 => log.sync().map(|()| self.synced = self.last()),
                72..80 => self.cut(log),
                80..82 => self.reset(log),
                82..88 => {
                    self.write_nonsense(log)?;
                    Ok(())
                }
                88..91 => {
                    self.release(log);
                    Ok(())
                }
                91..94 => {
                    self.trim_lsn = self.some_lsn();
                    Ok(())
                }
                _ => {
                    self.check_reads(log)?;
                    Ok(())
                }
            };
            match outcome {
                Err(error) if error.kind() == ErrorKind::Io => return Ok(true),
                Err(error) => return Err(format!("an odd error: {}", error.chain())),
                Ok(()) => {}
            }
            let tail = self.batches.last().map_or(self.before.0, Made::position);
            if log.tail() != tail {
                return Err(format!("the log ends at {}, not at {tail}", log.tail()));
            }
        }
        Ok(false)
    }

    /// Returns an LSN between the present trim LSN and the newest entry.
    fn some_lsn(&mut self) -> Lsn {
        let newest = self.batches.last().map_or(self.before.1.0 - 1, |b| b.header.last_lsn().0);
        let span = newest.saturating_sub(self.trim_lsn.0);
        Lsn(self.trim_lsn.0 + self.rng.below(span + 1))
    }

    /// Says what the store has, as an owner does whose log is this one up to some batch.
    fn release(&mut self, log: &mut FollowerLog) {
        self.trim_lsn = self.some_lsn();
        let before = (log.start(), log.tail());
        let last = before.1.sequence - self.rng.below(before.1.sequence - before.0.sequence + 1);
        log.release(self.trim_lsn, last);
        self.trim_written = self.trim_written.max(self.trim_lsn);
        self.stats.released_by_owner += u64::from(log.start() > before.0);
    }

    fn write(&mut self, log: &mut FollowerLog) -> Result<block::Result<()>, String> {
        let (mut run, count): (Vec<Made>, _) = (Vec::new(), 1 + self.rng.below(4));
        for _ in 0..count {
            let before = run.last().or(self.batches.last()).cloned();
            // An owner may send again what another one had cut.
            let again = self.rng.chance(60).then(|| self.cut.last().cloned()).flatten();
            let follows = |made: &Made| {
                before.as_ref().is_some_and(|before| {
                    succession::follows(&before.header, before.checksum, &made.header)
                })
            };
            let next = match again.filter(follows) {
                Some(again) => {
                    self.cut.pop();
                    self.stats.written_again += 1;
                    again
                }
                None => self.make(before.as_ref()),
            };
            run.push(next);
        }
        let bytes: Vec<Bytes> = run.iter().map(|made| made.bytes.clone()).collect();
        let outcome = log.write(&bytes);
        let written = match &outcome {
            Ok(()) => run.len(),
            Err(_) => run.iter().take_while(|made| made.sequence() <= log.tail().sequence).count(),
        };
        let trims = run.iter().map(|made| made.header.trim_lsn);
        self.trim_written = trims.chain([self.trim_written]).max().expect("at least one");
        self.attempted = run.split_off(written);
        self.stats.batches += written as u64;
        self.batches.extend(run);
        self.has_damaged_end &= written == 0;
        if matches!(&outcome, Err(error) if error.kind() == ErrorKind::Full) {
            self.attempted.clear();
            self.stats.full += 1;
            let newest = self.batches.last().expect("it is full").header.last_lsn();
            // A ring whose next file cannot be made has only one.
            let is_short = self.faults.create > 0 || self.may_stop;
            if !log.is_full() || (self.trim_lsn >= newest && !is_short) {
                return Err("full, although everything is destaged".into());
            }
            if self.rng.chance(70) {
                self.trim_lsn = self.some_lsn();
            }
            return Ok(Ok(()));
        }
        self.stats.released += u64::from(log.start() > self.before.0);
        Ok(outcome)
    }

    /// Makes a batch behind `before`, or the first one.
    fn make(&mut self, before: Option<&Made>) -> Made {
        let mut open = [0; 16];
        open[..8].copy_from_slice(&self.rng.next().to_le_bytes());
        let (position, next_lsn, previous) = match before {
            Some(made) => {
                let names = Predecessor::of(&made.header, made.checksum);
                (made.position(), made.header.next_lsn(), names)
            }
            None if self.before.0 == Position::START => {
                (Position::START, self.before.1, Predecessor::default())
            }
            None => {
                let Position { epoch, .. } = self.before.0;
                (self.before.0, self.before.1, Predecessor { epoch, open, checksum: 7 })
            }
        };
        let is_opening = before.is_none() || self.rng.chance(10);
        let epoch = position.epoch.0.max(1) + u64::from(is_opening);
        let run = before.map_or(open, |made| made.header.open);
        let trim_lsn = self.trim_lsn.min(Lsn(next_lsn.0 - 1));
        let header = BatchHeader {
            algorithm: Algorithm::Aes256Gcm,
            is_opening,
            is_clean: false,
            acks_before_sync: true,
            is_settled: true,
            has_snapshots: false,
            pool: POOL,
            chain: CHAIN,
            open: if is_opening { open } else { run },
            boot: [3; 16],
            epoch: Epoch(epoch),
            sequence: position.sequence + 1,
            configuration: 4,
            first_lsn: next_lsn,
            durable_lsn: trim_lsn,
            commit_lsn: trim_lsn,
            trim_lsn,
            entry_count: 0,
            batch_bytes: 0,
            payload_bytes: 0,
            previous,
            salt: [9; 16],
        };
        let longest = if self.rng.chance(10) { 120 } else { 20 };
        let sector_count = if self.rng.chance(10) { 0 } else { 1 + self.rng.below(longest) };
        self.encode(header, sector_count)
    }

    /// Seals a batch of one write of so many sectors, or without entries.
    fn encode(&mut self, mut header: BatchHeader, sector_count: u64) -> Made {
        let payload = self.rng.next().to_le_bytes().repeat(64 * sector_count as usize);
        let mut rows = Vec::new();
        if sector_count > 0 {
            rows.push(EntryRow {
                volume: VolumeId(1),
                kind: EntryKind::Write,
                start_sector: 0,
                sector_count,
                payload_offset: 0,
                payload_bytes: payload.len() as u32,
            });
        }
        let payloads = rows.iter().map(|_| &payload[..]).collect::<Vec<_>>().into_iter();
        let key = self.key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
        let mut buffer = IoBuffer::default();
        let checksum = batch::encode(&mut header, &mut rows, payloads, &key, &mut buffer);
        let bytes = Bytes::copy_from_slice(buffer.as_slice());
        Made { header, checksum: checksum.expect("a small batch"), bytes }
    }

    /// Offers a batch that must be refused.
    fn write_nonsense(&mut self, log: &mut FollowerLog) -> Result<(), String> {
        let before = self.batches.last().cloned();
        let right = self.make(before.as_ref());
        let header = right.header;
        let sectors = u64::from(header.payload_bytes) / 512;
        let wrong = match self.rng.below(7) {
            0 => {
                let (mut bytes, at) = (right.bytes.to_vec(), self.rng.index(right.bytes.len()));
                bytes[at] ^= 1 << self.rng.below(8);
                bytes.into()
            }
            1 => right.bytes.slice(..self.rng.index(right.bytes.len())),
            2 => Bytes::from([&right.bytes[..], &[0; 4096]].concat()),
            3 => self.encode(BatchHeader { pool: [8; 16], ..header }, sectors).bytes,
            4 => {
                let sequence = header.sequence + 1;
                self.encode(BatchHeader { sequence, ..header }, sectors).bytes
            }
            5 => {
                let epoch = Epoch(header.previous.epoch.0.wrapping_sub(1).min(header.epoch.0));
                let previous = Predecessor { epoch, ..header.previous };
                self.encode(BatchHeader { previous, ..header }, sectors).bytes
            }
            _ if log.chain().is_some() => {
                self.encode(BatchHeader { chain: [8; 16], ..header }, sectors).bytes
            }
            _ => Bytes::from_static(b"SPDLBTCH"),
        };
        if log.write(std::slice::from_ref(&wrong)).is_ok() {
            return Err("a batch was stored that does not follow".into());
        }
        // Nothing of the call is stored, also not what came before.
        if log.write(&[right.bytes, wrong]).is_ok() {
            return Err("a batch was stored that does not follow another".into());
        }
        self.stats.refused += 1;
        Ok(())
    }

    fn cut(&mut self, log: &mut FollowerLog) -> block::Result<()> {
        let start = log.start().sequence;
        let last = self.last();
        let span = if self.rng.chance(80) { (last - start).min(4) } else { last - start };
        let sequence = last - self.rng.below(span + 1);
        if sequence == start {
            return Ok(()); // all of it, which is a reset
        }
        self.doing = Doing::Cut(sequence);
        log.cut(sequence)?;
        (self.doing, self.has_damaged_end) = (Doing::Nothing, false);
        let keep = self.batches.partition_point(|made| made.sequence() <= sequence);
        let dropped = self.batches.split_off(keep);
        if !dropped.is_empty() {
            self.stats.cuts += 1;
            self.cut = dropped.into_iter().rev().collect();
        }
        self.synced = self.synced.min(sequence);
        Ok(())
    }

    fn reset(&mut self, log: &mut FollowerLog) -> block::Result<()> {
        let sequence = if self.rng.chance(50) { self.last() + 5 } else { 1 + self.rng.below(40) };
        let before = Position { epoch: Epoch(2 + self.rng.below(3)), sequence };
        self.doing = Doing::Reset;
        log.reset(before)?;
        (self.doing, self.has_damaged_end) = (Doing::Nothing, false);
        self.stats.resets += 1;
        let next_lsn = Lsn(1 + self.rng.below(1000));
        self.before = (before, next_lsn);
        self.batches.clear();
        self.cut.clear();
        self.synced = 0;
        self.trim_lsn = Lsn(if self.rng.chance(50) { next_lsn.0 - 1 } else { 0 });
        self.trim_written = Lsn::NONE;
        Ok(())
    }

    fn check_reads(&mut self, log: &FollowerLog) -> Result<(), String> {
        let start = log.start().sequence;
        let after = start + self.rng.below(self.last() + 1 - start);
        let bytes_max = self.rng.below(200 << 10) as usize;
        let read = log.read(after, bytes_max).map_err(|e| e.chain())?;
        let expected = self.batches.iter().filter(|made| made.sequence() > after);
        let bytes: usize = read.iter().map(|(_, bytes)| bytes.len()).sum();
        if (bytes > bytes_max && read.len() > 1) || (read.is_empty() && after < self.last()) {
            return Err(format!("{} batches of {bytes} bytes for {bytes_max}", read.len()));
        }
        for ((position, bytes), made) in read.iter().zip(expected) {
            if (*position, bytes) != (made.position(), &made.bytes) {
                return Err(format!("{position} is not what was written"));
            }
        }
        let is_refused = start == 0 || log.read(start - 1, 1).is_err();
        let is_empty = self.batches.is_empty();
        if is_refused || is_empty { Ok(()) } else { Err("a released batch is read".into()) }
    }

    /// Ends the process, and sometimes the machine.
    fn crash(&mut self, is_failed: bool) {
        self.stats.crashes += 1;
        self.may_be_damaged = is_failed || self.has_damaged_end;
        if self.rng.chance(30) {
            self.platter.lock().write_back(&mut self.rng, 0);
        }
        if is_failed && self.rng.chance(50) {
            self.platter.lock().drop_clean(&mut self.rng);
        }
        if self.rng.chance(50) {
            self.may_be_damaged = true;
            self.platter.lock().cut_power(&mut self.rng);
        }
    }
}

/// Reads all batches of a log behind `start`.
fn read_all(log: &FollowerLog, start: u64) -> Result<Vec<(Position, Bytes)>, String> {
    let mut all: Vec<(Position, Bytes)> = Vec::new();
    loop {
        let after = all.last().map_or(start, |(position, _)| position.sequence);
        let more = log.read(after, 100 << 10).map_err(|e| e.chain())?;
        if more.is_empty() {
            return Ok(all);
        }
        all.extend(more);
    }
}
