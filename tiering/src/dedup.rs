//! Deduplication: a block that is stored already is not stored again.
//!
//! A fingerprint nominates a stored block, the bytes of both are compared, and the map then
//! references the stored one. For reclaim, each page that references a frame which was not written
//! for it has a *back-reference* from the segment.
//!
//! Invariants:
//! - A block counts as a duplicate only if the stored one was read back and is equal, byte for
//!   byte.
//! - A segment is either used by a destage that has found duplicates in it, or examined by reclaim,
//!   never both. So no reference is made that reclaim does not see.
//! - Blocks under different keys are never duplicates of each other.
//! - The index is in memory and bounded, and is rebuilt from the metadata after a start. Without it
//!   fewer duplicates are found.

pub(crate) mod fingerprints;
pub(crate) mod index;

use crate::keys::{KeyId, PoolKeys};
use crate::seeded_bugs::SeededBugs;
use block::{ErrorKind, VolumeId};
use fingerprints::{Fingerprinter, FrameFingerprints};
use index::{Index, Location};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// Maximum memory per block in the index, in bytes: hash tables are at least half full.
const ENTRY_BYTES: usize = 2 * (size_of::<Location>() + size_of::<u64>() + 1);
/// Maximum number of segments that are remembered as damaged. Chosen by hand.
const BAD_MAX: usize = 65_536;

/// Results of deduplication for a volume since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks that were destaged, without those of zeroes.
    pub block_count: u64,
    /// Blocks among these that were stored already.
    pub duplicate_count: u64,
}

impl std::ops::AddAssign for Found {
    fn add_assign(&mut self, other: Found) {
        self.block_count = self.block_count.saturating_add(other.block_count);
        self.duplicate_count = self.duplicate_count.saturating_add(other.duplicate_count);
    }
}

/// Progress of the sweep of back-references.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    /// Key after which the sweep continues; `None` means at the beginning.
    pub last: Option<Vec<u8>>,
    pub ended: Option<Instant>,
}

/// Counts for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DedupStatus {
    /// Results by volume, since the creation of each.
    pub found: BTreeMap<VolumeId, Found>,
    /// Blocks in the index.
    pub index_block_count: u64,
    /// The index contains one in this many blocks.
    pub index_one_in: u64,
    /// Blocks since the start whose fingerprint was that of a stored block but whose bytes
    /// differed.
    pub unequal_count: u64,
    /// Nominated blocks that could not be read, since the start.
    pub unread_count: u64,
}

/// Users of segments.
#[derive(Debug, Default)]
struct Uses {
    /// Number of reclaim steps that are examining each segment.
    victims: HashMap<u64, usize>,
    /// Number of destages that have found duplicates in each segment.
    pins: HashMap<u64, usize>,
    /// Segments that are damaged or missing in the store; nothing new may depend on them.
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

/// Protects a segment from reclaim until it is dropped.
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

/// Prevents destage from using blocks of these segments as duplicates until it is dropped.
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

/// State of deduplication; see the module.
pub(crate) struct Dedup {
    volumes: Mutex<HashSet<VolumeId>>,
    pub index: Mutex<Index>,
    uses: Arc<Mutex<Uses>>,
    pub sweep: Mutex<Sweep>,
    /// Keys of the fingerprints.
    keys: PoolKeys,
    /// Mask of the fingerprint bits that are compared; tests clear some of them.
    pub mask: u64,
    /// Whether every volume is deduplicated, for tests.
    pub is_forced: bool,
    seeded_bugs: SeededBugs,
    pub unequal_count: AtomicU64,
    pub unread_count: AtomicU64,
}

impl Dedup {
    /// Creates the state, with an index of `index_bytes`.
    pub fn new(index_bytes: usize, keys: PoolKeys, seeded_bugs: SeededBugs) -> Dedup {
        Dedup {
            keys,
            mask: u64::MAX,
            is_forced: false,
            volumes: Mutex::default(),
            index: Mutex::new(Index::new(index_bytes / ENTRY_BYTES)),
            uses: Arc::default(),
            sweep: Mutex::default(),
            seeded_bugs,
            unequal_count: AtomicU64::new(0),
            unread_count: AtomicU64::new(0),
        }
    }

    /// Returns the fingerprinter for a key; `None` if the key is not present.
    pub fn fingerprinter(&self, key: KeyId) -> Option<Fingerprinter> {
        let PoolKeys { pool, pool_key, volume_keys } = &self.keys;
        let root = volume_keys.root(key, pool_key)?;
        Some(Fingerprinter::new(&root, pool, self.mask))
    }

    /// Turns deduplication on or off for a volume.
    pub fn set(&self, volume: VolumeId, is_on: bool) {
        let mut volumes = self.volumes.lock();
        match is_on {
            true => volumes.insert(volume),
            false => volumes.remove(&volume),
        };
    }

    /// Returns whether a volume is deduplicated.
    pub fn is_used(&self) -> bool {
        self.is_forced || !self.volumes.lock().is_empty()
    }

    /// Excludes segments below this number.
    pub fn set_floor(&self, number: u64) {
        self.uses.lock().floor = number;
    }

    pub fn has(&self, volume: VolumeId) -> bool {
        self.volumes.lock().contains(&volume)
    }

    /// Protects a segment from reclaim. Returns `None` while reclaim examines the segment, or if
    /// nothing new may depend on it.
    pub fn pin(&self, segment: u64) -> Option<Pin> {
        let mut uses = self.uses.lock();
        if uses.victims.contains_key(&segment) && !self.seeded_bugs.unpinned {
            return None;
        }
        // If the list is full, any segment may be bad.
        let is_bad = uses.bad.len() >= BAD_MAX || uses.bad.contains(&segment);
        if (is_bad || segment < uses.floor) && !self.seeded_bugs.bad_reused {
            return None;
        }
        *uses.pins.entry(segment).or_default() += 1;
        Some(Pin { segment, uses: self.uses.clone() })
    }

    /// Takes for reclaim those of the segments that no destage uses.
    pub fn take_victims(&self, segments: impl Iterator<Item = u64>) -> Victims {
        let mut uses = self.uses.lock();
        let is_free = |segment: &u64| self.seeded_bugs.unpinned || !uses.pins.contains_key(segment);
        let segments: Vec<u64> = segments.filter(is_free).collect();
        for segment in &segments {
            *uses.victims.entry(*segment).or_default() += 1;
        }
        Victims { segments, uses: self.uses.clone() }
    }

    /// Marks a segment as damaged or missing in the store.
    pub fn note_bad(&self, segment: u64) {
        let mut uses = self.uses.lock();
        if uses.bad.len() < BAD_MAX {
            uses.bad.insert(segment);
        }
    }

    /// Removes the mark of a segment that is intact again.
    pub fn note_well(&self, segment: u64) {
        self.uses.lock().bad.remove(&segment);
    }

    /// Removes deleted segments from the index.
    pub fn forget(&self, segments: impl Iterator<Item = u64>) {
        let segments: HashSet<u64> = segments.collect();
        if segments.is_empty() {
            return;
        }
        self.index.lock().forget_segments(&segments);
        self.uses.lock().bad.retain(|segment| !segments.contains(segment));
    }

    /// Adds the fingerprints of committed segments.
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

/// Returns whether an error means that the segment cannot be used, rather than that the store does
/// not answer.
pub(crate) fn is_of_segment(kind: ErrorKind) -> bool {
    use ErrorKind::{Corrupt, Denied, NotFound, Unreadable, Unsupported};
    matches!(kind, Corrupt | NotFound | Unreadable | Unsupported | Denied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::VolumeKeys;
    use block::seal::PoolKey;

    #[test]
    fn a_segment_has_one_kind_of_user() {
        let (pool_key, volume_keys) = (PoolKey::new([7; 32]), VolumeKeys::default());
        let keys = PoolKeys { pool: [1; 16], pool_key, volume_keys };
        let dedup = Dedup::new(1 << 20, keys, SeededBugs::default());
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
