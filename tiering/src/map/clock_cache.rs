//! An in-memory map with a byte budget, for decoded map pages and segment records.
//!
//! Invariants:
//! - The bytes of all entries, as the caller counts them, stay within the budget. An entry larger
//!   than its shard's share is not kept.
//! - An entry that was read since the hand last passed survives that pass (the CLOCK rule), so a
//!   single scan does not evict entries that are read repeatedly.
//!
//! While it holds a lock, it calls no foreign code other than `Hash`, `Eq` and the closures of
//! [`ClockCache::retain`] and [`ClockCache::insert_if`].

use block::env::random_bytes;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

const SHARD_COUNT: usize = 16;

/// Estimated bytes of an entry besides its value: hash index, slot, and reference count.
pub const ENTRY_OVERHEAD_BYTES: usize = 112;

/// The cache: see the module.
pub struct ClockCache<K, V> {
    shards: Box<[Mutex<Shard<K, V>>]>,
    shard_bytes_max: usize,
    /// Has taken a random number, so that clients cannot choose keys of one shard.
    hasher: DefaultHasher,
}

struct Shard<K, V> {
    index: HashMap<K, usize>,
    slots: Vec<Slot<K, V>>,
    hand: usize,
    bytes: usize,
}

struct Slot<K, V> {
    key: K,
    value: V,
    bytes: usize,
    was_read: bool,
}

impl<K: Hash + Eq + Clone, V: Clone> ClockCache<K, V> {
    /// Creates a cache that keeps at most `bytes_max`; 0 keeps nothing.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let shard =
            || Mutex::new(Shard { index: HashMap::new(), slots: Vec::new(), hand: 0, bytes: 0 });
        let mut hasher = DefaultHasher::new();
        hasher.write(&random_bytes::<8>());
        ClockCache {
            shards: (0..SHARD_COUNT).map(|_| shard()).collect(),
            shard_bytes_max: bytes_max / SHARD_COUNT,
            hasher,
        }
    }

    fn shard(&self, key: &K) -> &Mutex<Shard<K, V>> {
        let mut hasher = self.hasher.clone();
        key.hash(&mut hasher);
        // The hash map inside uses the low bits.
        &self.shards[(hasher.finish() >> 57) as usize % SHARD_COUNT]
    }

    /// The value of `key`, if it is in the cache.
    pub fn get(&self, key: &K) -> Option<V> {
        let mut shard = self.shard(key).lock();
        let at = *shard.index.get(key)?;
        let slot = &mut shard.slots[at];
        slot.was_read = true;
        Some(slot.value.clone())
    }

    /// Stores `value`, which takes `bytes`, in place of the previous value of `key`.
    pub fn insert(&self, key: K, value: V, bytes: usize) {
        self.insert_if(key, value, bytes, || true);
    }

    /// Like [`ClockCache::insert`], but only if `is_current` returns true while the entry's shard
    /// is locked. A caller that first changes the state read by `is_current` and then calls
    /// `insert` or `remove` for the key therefore always prevails.
    pub fn insert_if(&self, key: K, value: V, bytes: usize, is_current: impl FnOnce() -> bool) {
        let bytes = bytes + ENTRY_OVERHEAD_BYTES;
        let mut shard = self.shard(&key).lock();
        if !is_current() {
            return;
        }
        shard.remove(&key);
        if bytes > self.shard_bytes_max {
            return;
        }
        while shard.bytes + bytes > self.shard_bytes_max {
            shard.evict_one();
        }
        let at = shard.slots.len();
        shard.slots.push(Slot { key: key.clone(), value, bytes, was_read: false });
        shard.index.insert(key, at);
        shard.bytes += bytes;
    }

    /// Removes `key`.
    pub fn remove(&self, key: &K) {
        self.shard(key).lock().remove(key);
    }

    /// Removes every key for which `keep` returns false.
    pub fn retain(&self, keep: impl Fn(&K) -> bool) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let mut at = 0;
            while at < shard.slots.len() {
                if keep(&shard.slots[at].key) {
                    at += 1;
                } else {
                    shard.remove_at(at);
                }
            }
        }
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    /// Number of entries.
    pub fn entry_count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().slots.len()).sum()
    }
}

impl<K: Hash + Eq + Clone, V> Shard<K, V> {
    fn remove(&mut self, key: &K) {
        if let Some(&at) = self.index.get(key) {
            self.remove_at(at);
        }
    }

    fn remove_at(&mut self, at: usize) {
        let slot = self.slots.swap_remove(at);
        self.bytes -= slot.bytes;
        self.index.remove(&slot.key);
        if let Some(moved) = self.slots.get(at) {
            self.index.insert(moved.key.clone(), at);
        }
    }

    /// Evicts one entry. The shard must not be empty.
    fn evict_one(&mut self) {
        loop {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slot = &mut self.slots[self.hand];
            if !std::mem::take(&mut slot.was_read) {
                self.remove_at(self.hand);
                return;
            }
            self.hand += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_holds_and_recently_read_entries_stay() {
        let cache = ClockCache::new(16 * 100 * (ENTRY_OVERHEAD_BYTES + 8));
        for round in 0..20u64 {
            for key in 0..1000u64 {
                cache.insert(round * 1000 + key, key, 8);
                if key % 10 == 0 {
                    for hot in 0..50u64 {
                        cache.get(&hot);
                    }
                }
                assert!(cache.bytes() <= 16 * 100 * (ENTRY_OVERHEAD_BYTES + 8));
            }
        }
        assert!(cache.entry_count() > 1000, "{} entries", cache.entry_count());
        let kept = (0..50u64).filter(|hot| cache.get(hot).is_some()).count();
        assert_eq!(kept, 50);
    }

    #[test]
    fn removing_and_replacing_keep_the_count_exact() {
        let cache = ClockCache::new(1 << 20);
        for key in 0..100u32 {
            cache.insert(key, key, 100);
            cache.insert(key, key + 1, 50);
        }
        assert_eq!(cache.entry_count(), 100);
        assert_eq!(cache.bytes(), 100 * (50 + ENTRY_OVERHEAD_BYTES));
        cache.retain(|key| key % 2 == 0);
        assert_eq!((cache.entry_count(), cache.get(&2), cache.get(&3)), (50, Some(3), None));
        for key in 0..100u32 {
            cache.remove(&key);
        }
        assert_eq!((cache.entry_count(), cache.bytes()), (0, 0));
        let none = ClockCache::new(0);
        none.insert(1, 1, 1);
        assert_eq!(none.get(&1), None);
    }
}
