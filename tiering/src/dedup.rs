//! Deduplication: a block that is stored already is not stored again.
//!
//! A fingerprint nominates a stored block, the bytes of both are compared, and the map then names the stored one. For reclaim,
//! each page that names a frame which was not written for it has a *back-reference* from the segment.
//!
//! Invariants:
//! - Nothing is taken for a duplicate but what was read back and is equal, byte for byte.
//! - A segment is either used by a destage that has found duplicates in it, or looked into by reclaim, never both: a
//!   reference that reclaim does not see is never made.
//! - Blocks under different keys are never duplicates of each other.
//! - The index is in memory, bounded, and made anew from the metadata after a start; without it less is found.

pub(crate) mod fingerprints;
pub(crate) mod index;

use crate::keys::KeyId;
use crate::planted::Planted;
use crate::tier::{Inner, Tier};
use block::{Error, ErrorKind, Result, VolumeId};
use fingerprints::{Fingerprinter, FrameFingerprints};
use index::{Index, Location};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of memory that the index takes for a block, at most: hash tables are filled by half at least.
const ENTRY_BYTES: usize = 2 * (size_of::<Location>() + size_of::<u64>() + 1);
/// Segments whose fingerprints are read at a start, the newest ones. Chosen by hand: 128 GiB of segments of the default size.
const LOADED_SEGMENTS_MAX: u64 = 8192;
/// Segments that are known to be damaged, at most. Chosen by hand.
const BAD_MAX: usize = 65_536;
/// Segments whose fingerprints are read at a time.
const LOAD_STEP: usize = 16;

/// What deduplication has found for a volume, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks that were destaged, those of zeroes aside.
    pub block_count: u64,
    /// Of these, blocks that were stored already.
    pub duplicate_count: u64,
}

impl std::ops::AddAssign for Found {
    fn add_assign(&mut self, other: Found) {
        self.block_count = self.block_count.saturating_add(other.block_count);
        self.duplicate_count = self.duplicate_count.saturating_add(other.duplicate_count);
    }
}

/// Shortest time from the end of one sweep of the back-references to the next one. Chosen by hand: it reads a page of the map
/// for each.
const SWEEP_PAUSE: Duration = Duration::from_secs(3600);

/// Where the sweep of back-references is.
#[derive(Debug, Default)]
struct Sweep {
    /// Key that it goes on after; `None`: it is to begin.
    last: Option<Vec<u8>>,
    ended: Option<Instant>,
}

/// Counts for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DedupStatus {
    /// What was found, by volume, since each was made.
    pub found: BTreeMap<VolumeId, Found>,
    /// Blocks of which the index knows.
    pub index_block_count: u64,
    /// One in so many blocks is in the index.
    pub index_one_in: u64,
    /// Blocks that had the fingerprint of another one and were not equal to it, since the start.
    pub unequal_count: u64,
    /// Blocks that were nominated and could not be read, since the start.
    pub unread_count: u64,
}

/// Which segments are used, and by whom.
#[derive(Debug, Default)]
struct Uses {
    /// How many steps of reclaim look into them.
    victims: HashMap<u64, usize>,
    /// How many destages have found duplicates in them.
    pins: HashMap<u64, usize>,
    /// Segments that are damaged or missing in the store: nothing new is to depend on them.
    bad: HashSet<u64>,
    /// Segments below this number are in the store of the copy that the pool was restored from.
    floor: u64,
}

fn count_out(counts: &mut HashMap<u64, usize>, segment: u64) {
    if let Some(count) = counts.get_mut(&segment) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&segment);
        }
    }
}

/// Keeps reclaim from a segment, as long as it is there.
#[derive(Debug)]
pub(crate) struct Pin {
    segment: u64,
    uses: Arc<Mutex<Uses>>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        count_out(&mut self.uses.lock().pins, self.segment);
    }
}

/// Keeps destage from taking blocks of these segments for duplicates, as long as it is there.
#[derive(Debug)]
pub(crate) struct Victims {
    segments: Vec<u64>,
    uses: Arc<Mutex<Uses>>,
}

impl Drop for Victims {
    fn drop(&mut self) {
        let mut uses = self.uses.lock();
        for segment in &self.segments {
            count_out(&mut uses.victims, *segment);
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Dedup {
    volumes: Mutex<HashSet<VolumeId>>,
    pub index: Mutex<Index>,
    uses: Arc<Mutex<Uses>>,
    sweep: Mutex<Sweep>,
    planted: Planted,
    pub unequal_count: AtomicU64,
    pub unread_count: AtomicU64,
}

impl Dedup {
    /// With an index of so many bytes.
    pub fn new(index_bytes: usize, planted: Planted) -> Dedup {
        Dedup {
            volumes: Mutex::default(),
            index: Mutex::new(Index::new(index_bytes / ENTRY_BYTES)),
            uses: Arc::default(),
            sweep: Mutex::default(),
            planted,
            unequal_count: AtomicU64::new(0),
            unread_count: AtomicU64::new(0),
        }
    }

    pub fn has(&self, volume: VolumeId) -> bool {
        self.volumes.lock().contains(&volume)
    }

    /// Keeps reclaim from a segment; `None` while reclaim looks into it, and where nothing new is to depend on it.
    pub fn pin(&self, segment: u64) -> Option<Pin> {
        let mut uses = self.uses.lock();
        if uses.victims.contains_key(&segment) && !self.planted.unpinned {
            return None;
        }
        // Where there are more than are known, any may be.
        let is_bad = uses.bad.len() >= BAD_MAX || uses.bad.contains(&segment);
        if (is_bad || segment < uses.floor) && !self.planted.bad_reused {
            return None;
        }
        *uses.pins.entry(segment).or_default() += 1;
        Some(Pin { segment, uses: self.uses.clone() })
    }

    /// Takes those of the segments for reclaim that no destage uses.
    pub fn take_victims(&self, segments: impl Iterator<Item = u64>) -> Victims {
        let mut uses = self.uses.lock();
        let is_free = |segment: &u64| self.planted.unpinned || !uses.pins.contains_key(segment);
        let segments: Vec<u64> = segments.filter(is_free).collect();
        for segment in &segments {
            *uses.victims.entry(*segment).or_default() += 1;
        }
        Victims { segments, uses: self.uses.clone() }
    }

    /// A segment is damaged or missing in the store.
    pub fn note_bad(&self, segment: u64) {
        let mut uses = self.uses.lock();
        if uses.bad.len() < BAD_MAX {
            uses.bad.insert(segment);
        }
    }

    /// Nothing is wrong with it any more.
    pub fn note_well(&self, segment: u64) {
        self.uses.lock().bad.remove(&segment);
    }

    /// Segments that are gone.
    pub fn forget(&self, segments: impl Iterator<Item = u64>) {
        let segments: HashSet<u64> = segments.collect();
        if segments.is_empty() {
            return;
        }
        self.index.lock().forget_segments(&segments);
        self.uses.lock().bad.retain(|segment| !segments.contains(segment));
    }

    /// What was written, and is committed.
    pub fn add(&self, lists: &[(u64, Vec<FrameFingerprints>)]) {
        let mut index = self.index.lock();
        for (segment, frames) in lists {
            index.add(*segment, frames);
        }
    }
}

impl Victims {
    pub fn has(&self, segment: u64) -> bool {
        self.segments.contains(&segment)
    }
}

impl Inner {
    /// Makes fingerprints of the blocks under a key; `None`: the key is not there.
    pub(crate) fn fingerprinter(&self, key: KeyId) -> Option<Fingerprinter> {
        let root = self.options.volume_keys.root(key, &self.pool_key)?;
        Some(Fingerprinter::new(&root, &self.options.pool, self.options.fingerprint_mask))
    }
}

impl Tier {
    /// Blocks of volumes may have been found among what was stored: since the first time, for good.
    #[must_use]
    pub fn has_dedup(&self) -> bool {
        self.inner.map.has_dedup()
    }

    /// These segments are damaged or missing in the store: nothing is taken for a duplicate of what they hold until they are
    /// found to be whole.
    pub fn note_bad_segments(&self, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            self.inner.dedup.note_bad(number);
        }
    }

    /// Nothing is taken for a duplicate of what segments below this number hold: of a pool that was restored, until what it
    /// was restored from is in its own store.
    pub fn set_dedup_floor(&self, number: u64) {
        self.inner.dedup.uses.lock().floor = number;
    }

    /// From here on, what is destaged of a volume is looked for among what is stored, or is not. What was found stays.
    pub fn set_dedup(&self, volume: VolumeId, is_on: bool) {
        let mut volumes = self.inner.dedup.volumes.lock();
        match is_on {
            true => volumes.insert(volume),
            false => volumes.remove(&volume),
        };
    }

    /// Brings the fingerprints of what is stored into memory, of the newest segments. Call it once after a start, in the
    /// background, where a volume wants it; a future that is dropped has done a part.
    ///
    /// # Errors
    /// What the metadata says. A list that does not open is passed over.
    pub async fn load_fingerprints(&self) -> Result<()> {
        let inner = &self.inner;
        let is_wanted = inner.options.is_dedup || !inner.dedup.volumes.lock().is_empty();
        if !is_wanted {
            return Ok(());
        }
        let next = inner.next_segment.load(Ordering::SeqCst);
        let mut after = next.saturating_sub(LOADED_SEGMENTS_MAX);
        loop {
            let (lists, last) = inner.map.fingerprints_after(after, LOAD_STEP).await?;
            inner.dedup.add(&lists);
            match last {
                // What is written from here on adds itself.
                Some(last) if last < next => after = last,
                _ => return Ok(()),
            }
            tokio::task::yield_now().await;
        }
    }

    /// One step of background work: drops back-references of pages that share nothing any more, of up to `budget` that it
    /// looks at, once an hour. `false`: there is nothing to do for now. Call it at the lowest priority.
    ///
    /// # Errors
    /// As [`Tier::destage`].
    pub async fn sweep_back_references(&self, budget: usize) -> Result<bool> {
        self.inner.check_writable()?;
        let last = {
            let sweep = self.inner.dedup.sweep.lock();
            let is_due = sweep.ended.is_none_or(|ended| ended.elapsed() >= SWEEP_PAUSE);
            let is_urgent = self.inner.is_urgent.load(Ordering::Relaxed);
            if !self.inner.map.has_dedup() || is_urgent || (sweep.last.is_none() && !is_due) {
                return Ok(false);
            }
            sweep.last.clone()
        };
        let inner = self.inner.clone();
        let step = async move {
            let mut writer = inner.writer.lock().await;
            inner.map.sweep_back_references(&mut writer, last.as_deref(), budget.max(1)).await
        };
        let done = self.inner.background.spawn(step).await;
        let done = done
            .map_err(|cause| Error::with_source(ErrorKind::Io, "sweep back-references", cause))?;
        let (next, dropped_count) = done?;
        if dropped_count > 0 {
            tracing::debug!(dropped_count, "back-references of pages that share nothing any more");
        }
        let mut sweep = self.inner.dedup.sweep.lock();
        if next.is_none() {
            sweep.ended = Some(Instant::now());
        }
        sweep.last = next;
        Ok(sweep.last.is_some())
    }

    /// As after a while: a sweep is due at once.
    #[cfg(test)]
    pub(crate) fn sweep_again(&self) {
        self.inner.dedup.sweep.lock().ended = None;
    }

    /// Counts for status.
    #[must_use]
    pub fn dedup_status(&self) -> DedupStatus {
        let dedup = &self.inner.dedup;
        let (count, index_one_in) = dedup.index.lock().status();
        DedupStatus {
            found: self.inner.map.found(),
            index_block_count: count as u64,
            index_one_in,
            unequal_count: dedup.unequal_count.load(Ordering::Relaxed),
            unread_count: dedup.unread_count.load(Ordering::Relaxed),
        }
    }
}

/// An error that says of a segment that it is not to be used, rather than that nobody can be asked.
pub(crate) fn is_of_segment(kind: ErrorKind) -> bool {
    use ErrorKind::{Corrupt, Denied, NotFound, Unreadable, Unsupported};
    matches!(kind, Corrupt | NotFound | Unreadable | Unsupported | Denied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_has_one_kind_of_user() {
        let dedup = Dedup::new(1 << 20, Planted::default());
        let (first, second) = (dedup.pin(5).unwrap(), dedup.pin(5).unwrap());
        drop(first);
        let victims = dedup.take_victims([4, 5, 6].into_iter());
        assert!(victims.has(4) && !victims.has(5) && victims.has(6));
        assert!(dedup.pin(4).is_none() && dedup.pin(7).is_some());
        drop(second);
        assert!(dedup.take_victims([5].into_iter()).has(5));
        drop(victims);
        assert!(dedup.pin(4).is_some());
        assert!(dedup.uses.lock().pins.is_empty() && dedup.uses.lock().victims.is_empty());
    }
}
