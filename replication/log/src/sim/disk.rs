//! A disk that forgets, tears, reorders and fails.
//!
//! Invariants:
//! - A write changes the page cache. Only a sync that was submitted after the write completed
//!   guarantees that it reaches the platter. At a power cut each sector of 512 bytes that no sync
//!   covers survives or not, independently of the others.
//! - A sector can be unreadable; writing it heals it.
//! - A failed sync or write-back leaves its pages clean and unwritten: later syncs do not write
//!   them, and the kernel drops them at any time, after which reads see the platter.
//! - The first sync requested after a failed write-back reports the failure, to any process; later
//!   syncs do not, unless the process was killed before it received the report. The moment between
//!   the two is not simulated.
//! - A file system that is shut down writes nothing more; an unmount drops the data that it has not
//!   written.

use super::Rng;
use crate::disk::state_files::{FoundState, StateKeeper};
use crate::format::batch::BatchHeader;
use crate::format::state::{LogState, Standing};
use block::env::{Disk, DiskCompletion, DiskReader, DiskRequest};
use block::units::{crc32c, crc32c_parts};
use block::{Error, ErrorKind};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

const SECTOR: usize = 512;
const PAGE: usize = 4096;

#[derive(Clone, Debug, Default)]
struct SimFile {
    /// Contents of the platter.
    stable: Vec<u8>,
    /// Contents of the page cache, which reads see.
    cache: Vec<u8>,
    /// Sectors that were written and are not covered by a sync.
    dirty: BTreeSet<usize>,
    /// Sectors that could not be written: clean in the cache, and not on the platter.
    unwritten: BTreeSet<usize>,
    /// Whether a write-back has failed without a report to any process.
    is_error_unseen: bool,
}

impl SimFile {
    fn keep(&mut self, sector: usize) {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        self.stable[range.clone()].copy_from_slice(&self.cache[range]);
    }

    fn drop_page(&mut self, page: usize) {
        let range = page * PAGE..(page + 1) * PAGE;
        self.cache[range.clone()].copy_from_slice(&self.stable[range]);
    }
}

/// The state that outlives a process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Platter {
    files: BTreeMap<u32, SimFile>,
    /// Counts the mounts of the file system.
    pub(crate) mount: u64,
    /// Whether the file system has shut down: nothing is written until it is mounted again.
    pub(crate) is_shut: bool,
    /// State of the log in its own directory, and beside it on another file system.
    state: Option<LogState>,
    state_beside: Option<LogState>,
    /// Files and sectors whose reads fail with EIO until they are written.
    unreadable: BTreeSet<(u32, usize)>,
}

impl Platter {
    /// Makes the kernel write some pages back unasked, or fail to.
    pub(crate) fn write_back(&mut self, rng: &mut Rng, fails_percent: u64) {
        let is_failing = self.is_shut || rng.chance(fails_percent);
        for file in self.files.values_mut() {
            let dirty = std::mem::take(&mut file.dirty);
            let pages: BTreeSet<usize> =
                dirty.iter().map(|sector| sector * SECTOR / PAGE).collect();
            let chosen: BTreeSet<usize> = pages.into_iter().filter(|_| rng.chance(50)).collect();
            for sector in dirty {
                if !chosen.contains(&(sector * SECTOR / PAGE)) {
                    file.dirty.insert(sector);
                } else if is_failing {
                    file.unwritten.insert(sector);
                    file.is_error_unseen = true;
                } else {
                    file.keep(sector);
                }
            }
        }
    }

    /// Drops some clean pages, as a kernel short of memory does. Returns true if one of them was
    /// never written.
    pub(crate) fn drop_clean(&mut self, rng: &mut Rng) -> bool {
        let mut is_any = false;
        for file in self.files.values_mut() {
            let pages: BTreeSet<usize> =
                file.unwritten.iter().map(|sector| sector * SECTOR / PAGE).collect();
            for page in pages.into_iter().filter(|_| rng.chance(50)) {
                file.drop_page(page);
                file.unwritten.retain(|sector| sector * SECTOR / PAGE != page);
                is_any = true;
            }
        }
        is_any
    }

    /// Unmounts the file system, which writes all that it can, and mounts it again.
    pub(crate) fn remount(&mut self) {
        for file in self.files.values_mut() {
            for sector in std::mem::take(&mut file.dirty) {
                if !self.is_shut {
                    file.keep(sector);
                }
            }
            file.cache.clone_from(&file.stable);
            (file.unwritten, file.is_error_unseen) = (BTreeSet::new(), false);
        }
        self.mount += 1;
        self.is_shut = false;
    }

    /// Cuts the power of the machine: the platter survives, and unsynced sectors survive by chance.
    pub(crate) fn cut_power(&mut self, rng: &mut Rng) {
        let kept_percent = [0, 10, 50, 90, 100][rng.index(5)];
        for file in self.files.values_mut() {
            for sector in std::mem::take(&mut file.dirty) {
                if rng.chance(kept_percent) && !self.is_shut {
                    file.keep(sector);
                }
            }
            file.cache.clone_from(&file.stable);
            (file.unwritten, file.is_error_unseen) = (BTreeSet::new(), false);
        }
        self.mount += 1;
        self.is_shut = false;
    }

    /// Flips one bit of one file, on the platter and in the cache. Returns its place.
    pub(crate) fn flip(&mut self, rng: &mut Rng) -> (u32, usize) {
        let (number, at) = self.somewhere(rng);
        let file = self.files.get_mut(&number).expect("listed");
        let mask = 1 << rng.below(8);
        file.cache[at] ^= mask;
        file.stable[at] ^= mask;
        (number, at)
    }

    /// Flips one bit of the batch with the highest number. Returns false if there is none.
    pub(crate) fn flip_newest(&mut self, rng: &mut Rng) -> bool {
        let blocks = self.files.iter().flat_map(|(number, file)| {
            file.cache.chunks(PAGE).enumerate().map(move |(index, block)| (*number, index, block))
        });
        let headers = blocks.filter_map(|(number, index, block)| {
            Some((BatchHeader::decode(block).ok()?.sequence, number, index))
        });
        let Some((_, number, index)) = headers.max() else { return false };
        let file = self.files.get_mut(&number).expect("found there");
        let (at, mask) = (index * PAGE + rng.index(PAGE), 1 << rng.below(8));
        file.cache[at] ^= mask;
        file.stable[at] ^= mask;
        true
    }

    /// Changes the batch with the highest number, if it has no entries, to claim that everything
    /// before it was closed in order, with correct checksums and without the key. Returns false if
    /// it claims so already or has entries.
    pub(crate) fn forge_newest(&mut self) -> bool {
        let blocks = self.files.iter().flat_map(|(number, file)| {
            file.cache.chunks(4096).enumerate().map(move |(index, block)| (*number, index, block))
        });
        let headers = blocks.filter_map(|(number, index, block)| {
            Some((BatchHeader::decode(block).ok()?, number, index))
        });
        let Some((header, number, index)) = headers.max_by_key(|(header, ..)| header.sequence)
        else {
            return false;
        };
        if header.entry_count > 0 || (header.is_clean && header.is_settled) {
            return false;
        }
        let file = self.files.get_mut(&number).expect("found there");
        let block = &mut file.cache[index * 4096..(index + 1) * 4096];
        // Sets clean and clears unsettled; see docs/format-log.md for the offsets.
        block[11] = block[11] & !8 | 2;
        let crc = crc32c(&block[..232]);
        block[232..236].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c_parts(&[&block[..236], &block[240..]]);
        block[236..240].copy_from_slice(&crc.to_le_bytes());
        file.stable.clone_from(&file.cache);
        true
    }

    /// Returns the number of files made, as a log's directory records it: created files never
    /// vanish.
    pub(crate) fn made_count(&self) -> Option<u32> {
        let made = u32::try_from(self.files.len()).expect("a small ring");
        (made > 0).then_some(made)
    }

    fn write(&mut self, number: u32, offset: usize, bytes: &[u8]) {
        let file = self.files.get_mut(&number).expect("the log writes to files that exist");
        assert!(offset.is_multiple_of(4096) && bytes.len().is_multiple_of(4096), "unaligned write");
        file.cache[offset..offset + bytes.len()].copy_from_slice(bytes);
        let sectors = offset / SECTOR..(offset + bytes.len()) / SECTOR;
        file.unwritten.retain(|sector| !sectors.contains(sector));
        for sector in sectors.clone() {
            self.unreadable.remove(&(number, sector));
        }
        file.dirty.extend(sectors);
    }

    /// Makes one sector of one file unreadable, usually one with data; returns its file and offset.
    pub(crate) fn spoil(&mut self, rng: &mut Rng) -> (u32, u64) {
        let (number, at) = self.somewhere(rng);
        self.unreadable.insert((number, at / SECTOR));
        (number, (at / SECTOR * SECTOR) as u64)
    }

    fn somewhere(&self, rng: &mut Rng) -> (u32, usize) {
        let numbers: Vec<u32> = self.files.keys().copied().collect();
        let number = numbers[rng.index(numbers.len())];
        let cache = &self.files[&number].cache;
        // Most of a file is empty; the fault should hit a sector with data.
        let used: Vec<usize> = (0..cache.len() / SECTOR)
            .filter(|s| cache[s * SECTOR..(s + 1) * SECTOR].iter().any(|b| *b != 0))
            .collect();
        (number, used[rng.index(used.len())] * SECTOR + rng.index(SECTOR))
    }
}

/// Rates of failures, in percent of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) write: u64,
    pub(crate) sync: u64,
    pub(crate) create: u64,
    /// Of write-backs by the kernel.
    pub(crate) write_back: u64,
    /// Shutdowns of the file system, in percent of runs.
    pub(crate) shutdown: u64,
    /// Unmounts and mounts between two runs, in percent.
    pub(crate) remount: u64,
}

struct Pending {
    request: DiskRequest,
    /// For a sync: the sectors that were dirty when it was submitted.
    covers: Vec<(u32, usize)>,
}

/// The disk from the view of one process.
pub(crate) struct SimDisk {
    platter: Arc<Mutex<Platter>>,
    rng: Rng,
    pending: Vec<Pending>,
    done: Vec<DiskCompletion>,
    /// Files of failed syncs of which the process has not been told yet.
    unheard: Vec<u32>,
    /// Whether any sync of this process has failed.
    pub(crate) has_failed_sync: bool,
    pub(crate) faults: Faults,
    /// Whether writes complete inside submit, like buffered ones.
    is_immediate: bool,
    stop: Arc<Mutex<Stop>>,
}

impl SimDisk {
    pub(crate) fn new(platter: Arc<Mutex<Platter>>, seed: u64, is_immediate: bool) -> Self {
        SimDisk {
            platter,
            rng: Rng::new(seed),
            pending: Vec::new(),
            done: Vec::new(),
            unheard: Vec::new(),
            has_failed_sync: false,
            faults: Faults::default(),
            is_immediate,
            stop: Arc::default(),
        }
    }

    /// Stops the machine after `count` requests: later ones have no effect.
    pub(crate) fn stop_after(&mut self, count: u64) {
        self.stop.lock().left = Some(count);
    }

    /// Returns the keeper of the log's state, with or without a place on another file system.
    pub(crate) fn keeper(&self, is_beside: bool) -> SimKeeper {
        let (platter, stop) = (Arc::clone(&self.platter), Arc::clone(&self.stop));
        SimKeeper { platter, stop, is_beside }
    }

    /// Completes one request at random. Returns false if there was none.
    pub(crate) fn run_one(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let index = self.rng.index(self.pending.len());
        let pending = self.pending.swap_remove(index);
        self.execute(pending);
        true
    }

    /// Returns the number of requests that have not completed.
    pub(crate) fn pending_count(&self) -> usize {
        self.pending.len()
    }

    /// Returns whether a sync has failed without the process being told.
    pub(crate) fn has_unheard_failure(&self) -> bool {
        !self.unheard.is_empty()
    }

    /// Kills the process: the requests under way may have taken effect, in whole or in part.
    pub(crate) fn kill(mut self) {
        let mut platter = self.platter.lock();
        for number in &self.unheard {
            platter.files.get_mut(number).expect("exists").is_error_unseen = true;
        }
        for pending in self.pending.drain(..) {
            if platter.is_shut {
                continue;
            }
            if let DiskRequest::Write { file, offset, buffer, .. } = pending.request {
                let pages = buffer.len() / 4096;
                let kept = self.rng.index(pages + 1) * 4096;
                platter.write(file, offset as usize, &buffer.as_slice()[..kept]);
            }
        }
    }

    fn execute(&mut self, pending: Pending) {
        let is_stopped = self.stop.lock().is_next_stopped() || self.platter.lock().is_shut;
        let failed = || io::Error::other("simulated fault");
        let completion = match pending.request {
            DiskRequest::Write { token, file, offset, buffer, .. } => {
                let is_failing = self.rng.chance(self.faults.write);
                let mut kept = buffer.len();
                if is_stopped {
                    kept = 0;
                } else if is_failing {
                    kept = self.rng.index(kept / 4096 + 1) * 4096;
                }
                self.platter.lock().write(file, offset as usize, &buffer.as_slice()[..kept]);
                let result = if is_stopped || is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: Some(buffer) }
            }
            DiskRequest::Sync { token, files } => {
                let mut is_failing = self.rng.chance(self.faults.sync);
                if !is_stopped {
                    is_failing |= self.is_error_seen(&files);
                    self.sync(&pending.covers, is_failing);
                }
                if is_failing && !is_stopped {
                    self.unheard.extend(files);
                    self.has_failed_sync = true;
                }
                let result = if is_stopped || is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: None }
            }
            DiskRequest::Clear { token } => {
                let is_failing = is_stopped || self.rng.chance(self.faults.write);
                if !is_failing {
                    self.platter.lock().files.clear();
                }
                let result = if is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: None }
            }
            DiskRequest::Create { token, file, len, header } => {
                let is_failing = is_stopped || self.rng.chance(self.faults.create);
                if !is_failing {
                    let mut bytes = header;
                    bytes.resize(len as usize, 0);
                    let made =
                        SimFile { stable: bytes.clone(), cache: bytes, ..SimFile::default() };
                    let before = self.platter.lock().files.insert(file, made);
                    assert!(before.is_none(), "file {file} was made twice");
                }
                let result = if is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: None }
            }
        };
        self.done.push(completion);
    }

    fn is_error_seen(&self, files: &[u32]) -> bool {
        let mut platter = self.platter.lock();
        let mut is_any = false;
        for number in files {
            let file = platter.files.get_mut(number).expect("exists");
            is_any |= std::mem::take(&mut file.is_error_unseen);
        }
        is_any
    }

    fn sync(&mut self, covers: &[(u32, usize)], is_failing: bool) {
        let mut platter = self.platter.lock();
        for &(number, sector) in covers {
            let file = platter.files.get_mut(&number).expect("exists");
            // A sector that is not dirty was written back meanwhile, or its write-back failed.
            if file.dirty.remove(&sector) {
                if is_failing {
                    file.unwritten.insert(sector);
                } else {
                    file.keep(sector);
                }
            }
        }
    }
}

/// The point at which the machine stops.
#[derive(Debug, Default)]
struct Stop {
    /// Number of requests that still take effect; `None` if all do.
    left: Option<u64>,
    has_stopped: bool,
}

impl Stop {
    fn is_next_stopped(&mut self) -> bool {
        match &mut self.left {
            None => {}
            Some(0) => self.has_stopped = true,
            Some(left) => *left -= 1,
        }
        self.has_stopped
    }
}

/// Keeps the state of the log on the platter; updates are immediate and whole.
pub(crate) struct SimKeeper {
    platter: Arc<Mutex<Platter>>,
    stop: Arc<Mutex<Stop>>,
    is_beside: bool,
}

impl StateKeeper for SimKeeper {
    fn found(&self) -> block::Result<Vec<FoundState>> {
        let platter = self.platter.lock();
        let beside = platter.state_beside.filter(|_| self.is_beside);
        let found = platter.state.into_iter().chain(beside);
        Ok(found.map(|state| FoundState { state: Some(state), is_own: true }).collect())
    }

    fn replace(&self, state: &LogState) -> block::Result<()> {
        // No stop is simulated between a failure that a process has seen and its note: no recovery
        // could tell.
        let is_stopped = match state.standing {
            Standing::Open => self.stop.lock().is_next_stopped(),
            Standing::Failed { .. } => self.stop.lock().has_stopped,
        };
        let mut platter = self.platter.lock();
        if is_stopped {
            return Err(Error::new(ErrorKind::Io, "the machine has stopped"));
        }
        if self.is_beside {
            platter.state_beside = Some(*state);
        }
        if platter.is_shut {
            return Err(Error::new(ErrorKind::Io, "the file system has shut down"));
        }
        platter.state = Some(*state);
        Ok(())
    }

    fn write_over(&self, state: &LogState) -> block::Result<()> {
        let is_shut = self.platter.lock().is_shut;
        self.replace(state)
            .or_else(|error| if self.is_beside && is_shut { Ok(()) } else { Err(error) })
    }
}

impl Disk for SimDisk {
    fn submit(&mut self, request: DiskRequest) {
        let mut covers = Vec::new();
        if let DiskRequest::Sync { files, .. } = &request {
            let platter = self.platter.lock();
            for number in files {
                covers.extend(platter.files[number].dirty.iter().map(|sector| (*number, *sector)));
            }
        }
        let is_now = self.is_immediate && matches!(request, DiskRequest::Write { .. });
        let pending = Pending { request, covers };
        if is_now { self.execute(pending) } else { self.pending.push(pending) }
    }

    fn reap(&mut self, completions: &mut Vec<DiskCompletion>) {
        self.unheard.clear();
        completions.append(&mut self.done);
    }

    fn wait(&mut self) {
        self.run_one();
    }

    fn reader(&self) -> Arc<dyn DiskReader> {
        Arc::new(SimReader(Arc::clone(&self.platter)))
    }
}

struct SimReader(Arc<Mutex<Platter>>);

impl DiskReader for SimReader {
    fn files(&self) -> io::Result<Vec<(u32, u64)>> {
        Ok(self.0.lock().files.iter().map(|(n, file)| (*n, file.cache.len() as u64)).collect())
    }

    fn read_at(&self, file: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let platter = self.0.lock();
        let from = offset as usize;
        let sectors = (file, from / SECTOR)..(file, (from + buf.len()).div_ceil(SECTOR));
        if platter.unreadable.range(sectors).next().is_some() {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
        }
        let bytes = platter.files[&file].cache.get(from..from + buf.len());
        buf.copy_from_slice(bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn name(&self, file: u32) -> String {
        format!("sim-{file}")
    }
}
