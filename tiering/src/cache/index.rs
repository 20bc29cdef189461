//! In-memory index of the cache file, from frame to position: a hash table of fixed size.
//!
//! Invariants:
//! - It never allocates after its creation: 16 bytes per slot, with at most four of five slots in
//!   use, so 20 bytes per frame. The bound is [`Index::entry_count_max`].
//! - It only nominates frames: a key is a 64-bit hash, and readers verify the frame.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of shards, so that readers and the writer rarely contend. Chosen by hand.
const SHARD_COUNT: usize = 32;
/// Bytes per slot.
const SLOT_BYTES: usize = 16;
/// Flag in a slot's value: the frame was read since it was inserted.
const HIT: u64 = 1 << 63;

/// A slot: key and value. Key 0 marks an empty slot.
type Slot = (u64, u64);

/// The index: see the module.
pub struct Index {
    shards: Vec<Mutex<Box<[Slot]>>>,
    entry_count: AtomicUsize,
    entry_count_max: usize,
}

/// Key of the frame at `offset` of the segment with this id: a 64-bit hash, never 0. Ids are
/// random, so no seed is needed.
#[must_use]
pub fn key_of(id: &[u8; 16], offset: u32) -> u64 {
    let id = u128::from_le_bytes(*id);
    let (low, high) = (id as u64, (id >> 64) as u64);
    let mixed = mix(low ^ mix(high.wrapping_add(u64::from(offset))));
    mixed.max(1)
}

/// Finalizer of splitmix64: every input bit changes every output bit.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Index {
    /// Creates a table of about `bytes` bytes of memory, which is touched as the table fills.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let slots = (bytes / SLOT_BYTES / SHARD_COUNT).max(16);
        let shards = (0..SHARD_COUNT).map(|_| Mutex::new(vec![(0, 0); slots].into())).collect();
        let entry_count_max = slots * SHARD_COUNT / 5 * 4;
        Index { shards, entry_count: AtomicUsize::new(0), entry_count_max }
    }

    /// Maximum number of entries.
    #[must_use]
    pub fn entry_count_max(&self) -> usize {
        self.entry_count_max
    }

    /// Current number of entries.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entry_count.load(Ordering::Relaxed)
    }

    /// The position of the frame; marks the frame as read.
    #[must_use]
    pub fn get(&self, key: u64) -> Option<u64> {
        let mut slots = self.shard(key).lock();
        let at = find(&slots, key).ok()?;
        slots[at].1 |= HIT;
        Some(slots[at].1 & !HIT)
    }

    /// Whether the frame is in the index. Does not mark it as read.
    #[must_use]
    pub fn contains(&self, key: u64) -> bool {
        find(&self.shard(key).lock(), key).is_ok()
    }

    /// Adds or moves a frame; `value` must be below 2^63. Returns `false` if its shard is full,
    /// which happens only near [`Index::entry_count_max`].
    pub fn insert(&self, key: u64, value: u64) -> bool {
        assert!(key != 0 && value & HIT == 0, "a key is not 0, an offset below 2^63");
        let mut slots = self.shard(key).lock();
        match find(&slots, key) {
            Ok(at) => slots[at].1 = value,
            Err(Some(at)) => {
                slots[at] = (key, value);
                self.entry_count.fetch_add(1, Ordering::Relaxed);
            }
            Err(None) => return false,
        }
        true
    }

    /// Removes the frame if it still lies at `value`. Returns `Some(true)` if it was read since it
    /// was inserted, `Some(false)` if not, and `None` if it does not lie there.
    pub fn remove(&self, key: u64, value: u64) -> Option<bool> {
        let mut slots = self.shard(key).lock();
        let at = find(&slots, key).ok().filter(|&at| slots[at].1 & !HIT == value)?;
        let was_hit = slots[at].1 & HIT != 0;
        close_gap(&mut slots, at);
        self.entry_count.fetch_sub(1, Ordering::Relaxed);
        Some(was_hit)
    }

    /// Removes all entries whose value lies in `range`. Meant for a region whose directory is lost.
    pub fn remove_range(&self, range: std::ops::Range<u64>) {
        for shard in &self.shards {
            let mut slots = shard.lock();
            let mut at = 0;
            while at < slots.len() {
                if slots[at].0 == 0 || !range.contains(&(slots[at].1 & !HIT)) {
                    at += 1;
                    continue;
                }
                // The entry that moves into the gap comes from a later slot or was already
                // examined, so examine this slot again.
                close_gap(&mut slots, at);
                self.entry_count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn shard(&self, key: u64) -> &Mutex<Box<[Slot]>> {
        &self.shards[key as usize % SHARD_COUNT]
    }
}

/// Preferred slot of a key: its upper bits, spread evenly over any number of slots.
fn home(key: u64, slot_count: usize) -> usize {
    ((u128::from(key) * slot_count as u128) >> 64) as usize
}

/// The slot of `key`; otherwise the empty slot where it would go, if any.
fn find(slots: &[Slot], key: u64) -> Result<usize, Option<usize>> {
    let mut at = home(key, slots.len());
    for _ in 0..slots.len() {
        match slots[at].0 {
            0 => return Err(Some(at)),
            found if found == key => return Ok(at),
            _ => at = if at + 1 == slots.len() { 0 } else { at + 1 },
        }
    }
    Err(None)
}

/// Empties slot `gap` and moves later entries back into it where possible, so that no tombstones
/// accumulate.
fn close_gap(slots: &mut [Slot], mut gap: usize) {
    let count = slots.len();
    let mut at = gap;
    for _ in 0..count {
        at = if at + 1 == count { 0 } else { at + 1 };
        if slots[at].0 == 0 {
            break;
        }
        // The entry may move back unless its home lies after the gap, cyclically in (gap, at].
        let distance_home = (at + count - home(slots[at].0, count)) % count;
        let distance_gap = (at + count - gap) % count;
        if distance_home >= distance_gap {
            slots[gap] = slots[at];
            gap = at;
        }
    }
    slots[gap] = (0, 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, seeds};
    use std::collections::HashMap;

    #[test]
    fn it_behaves_as_a_map_while_it_is_not_full() {
        for seed in seeds(20) {
            let mut rng = Rng::new(seed);
            let index = Index::new(16 * 32 * 40);
            let mut model: HashMap<u64, (u64, bool)> = HashMap::new();
            for step in 0..20_000 {
                let key = key_of(&[rng.below(60) as u8; 16], rng.below(30) as u32);
                let value = rng.below(1000);
                match rng.below(4) {
                    0 | 1 if model.len() < index.entry_count_max() * 3 / 4 => {
                        if index.insert(key, value) {
                            model.insert(key, (value, false));
                        }
                    }
                    2 => {
                        let expected = model.get_mut(&key).map(|entry| {
                            entry.1 = true;
                            entry.0
                        });
                        assert_eq!(index.get(key), expected, "SEED={seed} step {step}");
                    }
                    _ => {
                        let at = model.get(&key).map_or(value, |entry| entry.0);
                        let expected = model.remove(&key).map(|entry| entry.1);
                        assert_eq!(index.remove(key, at + 1), None, "SEED={seed}");
                        assert_eq!(index.remove(key, at), expected, "SEED={seed} step {step}");
                    }
                }
                assert_eq!(index.entry_count(), model.len(), "SEED={seed}");
            }
            index.remove_range(200..700);
            model.retain(|_, entry| !(200..700).contains(&entry.0));
            assert_eq!(index.entry_count(), model.len(), "SEED={seed}");
            for (key, (value, _)) in model {
                assert_eq!(index.get(key), Some(value), "SEED={seed}");
            }
        }
    }

    #[test]
    fn a_full_shard_refuses_and_loses_nothing() {
        let index = Index::new(0);
        let keys: Vec<u64> = (0..5000).map(|n| key_of(&[1; 16], n)).collect();
        let kept: Vec<u64> =
            keys.iter().copied().filter(|&key| index.insert(key, key >> 1)).collect();
        assert_eq!(kept.len(), 16 * SHARD_COUNT);
        assert!(kept.iter().all(|&key| index.get(key) == Some(key >> 1)));
        assert!(kept.iter().all(|&key| index.remove(key, key >> 1) == Some(true)));
        assert_eq!(index.entry_count(), 0);
    }
}
