//! A disk that forgets, tears, reorders and fails.
//!
//! Invariants:
//! - A write changes the page cache; only a sync that was submitted after the write completed
//!   promises that it reaches the platter. At a power cut each sector of 512 bytes that no sync
//!   covers is there or not, for itself.
//! - A sync that fails leaves its pages clean and unwritten: later syncs do not write them.

use super::Rng;
use crate::format::batch::BatchHeader;
use block::env::{Disk, DiskCompletion, DiskReader, DiskRequest};
use block::units::{crc32c, crc32c_parts};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

const SECTOR: usize = 512;

#[derive(Clone, Debug, Default)]
struct SimFile {
    /// On the platter.
    stable: Vec<u8>,
    /// In the page cache: what reads see.
    cache: Vec<u8>,
    /// Sectors written and not covered by a sync.
    dirty: BTreeSet<usize>,
}

/// What outlives a process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Platter {
    files: BTreeMap<u32, SimFile>,
}

impl Platter {
    /// The machine loses power: only the platter counts, and chance where nothing was promised.
    pub(crate) fn cut_power(&mut self, rng: &mut Rng) {
        let kept_percent = [0, 10, 50, 90, 100][rng.index(5)];
        for file in self.files.values_mut() {
            for sector in std::mem::take(&mut file.dirty) {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                if rng.chance(kept_percent) {
                    file.stable[range.clone()].copy_from_slice(&file.cache[range]);
                }
            }
            file.cache.clone_from(&file.stable);
        }
    }

    /// Flips one bit of one file, on the platter and in the cache.
    pub(crate) fn flip(&mut self, rng: &mut Rng) -> (u32, usize) {
        let numbers: Vec<u32> = self.files.keys().copied().collect();
        let number = numbers[rng.index(numbers.len())];
        let file = self.files.get_mut(&number).expect("listed");
        // Most of a file is empty; damage where something is.
        let used: Vec<usize> = (0..file.cache.len() / SECTOR)
            .filter(|s| file.cache[s * SECTOR..(s + 1) * SECTOR].iter().any(|b| *b != 0))
            .collect();
        let at = used[rng.index(used.len())] * SECTOR + rng.index(SECTOR);
        let mask = 1 << rng.below(8);
        file.cache[at] ^= mask;
        file.stable[at] ^= mask;
        (number, at)
    }

    /// Makes the batch with the highest number, where it has no entries, say that all before it was closed in order,
    /// with right checksums and without the key. False where it says so already, or has entries.
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
        // Clean, and not unsettled; see docs/format-log.md for the offsets.
        block[11] = block[11] & !8 | 2;
        let crc = crc32c(&block[..160]);
        block[160..164].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c_parts(&[&block[..164], &block[168..]]);
        block[164..168].copy_from_slice(&crc.to_le_bytes());
        file.stable.clone_from(&file.cache);
        true
    }

    /// As the directory of a log remembers: what is made is there for good.
    pub(crate) fn made_count(&self) -> Option<u32> {
        let made = u32::try_from(self.files.len()).expect("a small ring");
        (made > 0).then_some(made)
    }

    fn write(&mut self, number: u32, offset: usize, bytes: &[u8]) {
        let file = self.files.get_mut(&number).expect("the log writes to files that exist");
        assert!(offset.is_multiple_of(4096) && bytes.len().is_multiple_of(4096), "unaligned write");
        file.cache[offset..offset + bytes.len()].copy_from_slice(bytes);
        file.dirty.extend(offset / SECTOR..(offset + bytes.len()) / SECTOR);
    }
}

/// How often things fail, in percent of requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) write: u64,
    pub(crate) sync: u64,
    pub(crate) create: u64,
}

struct Pending {
    request: DiskRequest,
    /// For a sync: what was dirty when it was submitted.
    covers: Vec<(u32, usize)>,
}

/// The disk as one process sees it.
pub(crate) struct SimDisk {
    platter: Arc<Mutex<Platter>>,
    rng: Rng,
    pending: Vec<Pending>,
    done: Vec<DiskCompletion>,
    pub(crate) faults: Faults,
    /// Writes complete at once, as buffered ones do.
    is_immediate: bool,
    /// After as many requests the machine stops: nothing has an effect any more.
    pub(crate) stops_after: Option<u64>,
}

impl SimDisk {
    pub(crate) fn new(platter: Arc<Mutex<Platter>>, seed: u64, is_immediate: bool) -> Self {
        SimDisk {
            platter,
            rng: Rng::new(seed),
            pending: Vec::new(),
            done: Vec::new(),
            faults: Faults::default(),
            is_immediate,
            stops_after: None,
        }
    }

    /// Ends one request, any one. False when there was none.
    pub(crate) fn run_one(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let index = self.rng.index(self.pending.len());
        let pending = self.pending.swap_remove(index);
        self.execute(pending);
        true
    }

    /// The process dies: what was under way may have happened, in part.
    pub(crate) fn kill(mut self) {
        let mut platter = self.platter.lock();
        for pending in self.pending.drain(..) {
            if let DiskRequest::Write { file, offset, buffer, .. } = pending.request {
                let pages = buffer.len() / 4096;
                let kept = self.rng.index(pages + 1) * 4096;
                platter.write(file, offset as usize, &buffer.as_slice()[..kept]);
            }
        }
    }

    fn is_stopped(&mut self) -> bool {
        match &mut self.stops_after {
            None => false,
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
        }
    }

    fn execute(&mut self, pending: Pending) {
        let is_stopped = self.is_stopped();
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
            DiskRequest::Sync { token, .. } => {
                let is_failing = self.rng.chance(self.faults.sync);
                if !is_stopped {
                    self.sync(&pending.covers, is_failing);
                }
                let result = if is_stopped || is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: None }
            }
            DiskRequest::Create { token, file, len, header } => {
                let is_failing = is_stopped || self.rng.chance(self.faults.create);
                if !is_failing {
                    let mut bytes = header;
                    bytes.resize(len as usize, 0);
                    let made =
                        SimFile { stable: bytes.clone(), cache: bytes, dirty: BTreeSet::new() };
                    let before = self.platter.lock().files.insert(file, made);
                    assert!(before.is_none(), "file {file} was made twice");
                }
                let result = if is_failing { Err(failed()) } else { Ok(()) };
                DiskCompletion { token, result, buffer: None }
            }
        };
        self.done.push(completion);
    }

    fn sync(&mut self, covers: &[(u32, usize)], is_failing: bool) {
        let mut platter = self.platter.lock();
        for &(number, sector) in covers {
            let file = platter.files.get_mut(&number).expect("exists");
            if !is_failing {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                file.stable[range.clone()].copy_from_slice(&file.cache[range]);
            }
            file.dirty.remove(&sector);
        }
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
        let bytes = platter.files[&file].cache.get(from..from + buf.len());
        buf.copy_from_slice(bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn name(&self, file: u32) -> String {
        format!("sim-{file}")
    }
}
