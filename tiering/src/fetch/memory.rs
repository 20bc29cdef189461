//! Plaintext frames in memory, and the keys of segments.
//!
//! There are two caches, so that a scan cannot evict frames that other readers need. The *main*
//! cache serves random reads (S3-FIFO, which first evicts frames that were read only once). The
//! *stream* cache is small and first in, first out; sequential reads and their read-ahead pass
//! through it.
//!
//! Invariants:
//! - Each cache stays within its byte budget, which includes the overhead of an entry.
//! - A cache with a budget of 0 holds nothing.

use crate::keys::VolumeKeys;
use crate::segment::read::segment_key;
use crate::segment::{FrameRef, SegmentError, SegmentId, SegmentInfo};
use block::seal::{PoolKey, SealKey};
use bytes::Bytes;
use foyer::{Cache, CacheBuilder, EvictionConfig, FifoConfig, S3FifoConfig};
use parking_lot::RwLock;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Segment id and offset. Identifies bytes that never change.
pub type FrameKey = (u128, u32);

/// Returns the key of a frame.
#[must_use]
pub fn key_of(frame: &FrameRef) -> FrameKey {
    (u128::from_le_bytes(frame.info.id), frame.at.offset)
}

/// Memory overhead of an entry. Chosen by hand, from the sizes of foyer's record, its hash table
/// slot and the allocator's rounding.
const ENTRY_OVERHEAD_BYTES: usize = 192;
/// Shards of each cache. Chosen by hand: two to four threads read concurrently.
const SHARD_COUNT: usize = 8;

/// Hasher of frame keys. Ids are random already, so it only needs to mix in the offset.
#[derive(Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        let mixed = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_u128(&mut self, value: u128) {
        self.0 ^= (value as u64) ^ ((value >> 64) as u64);
    }
}

type FrameCache = Cache<FrameKey, Bytes, BuildHasherDefault<KeyHasher>>;

/// The two memory caches; see the module.
pub struct Memory {
    main: Option<FrameCache>,
    stream: Option<FrameCache>,
}

impl Memory {
    /// Creates the caches with budgets in bytes; 0 disables a cache.
    #[must_use]
    pub fn new(main_bytes: u64, stream_bytes: u64) -> Self {
        Memory {
            main: build(main_bytes, S3FifoConfig::default()),
            stream: build(stream_bytes, FifoConfig::default()),
        }
    }

    /// Returns a frame from either cache.
    #[must_use]
    pub fn get(&self, key: &FrameKey) -> Option<Bytes> {
        let found = |cache: &FrameCache| cache.get(key).map(|entry| entry.value().clone());
        self.main.as_ref().and_then(found).or_else(|| self.stream.as_ref().and_then(found))
    }

    /// Returns whether a frame is in either cache, without counting this as an access.
    #[must_use]
    pub fn contains(&self, key: &FrameKey) -> bool {
        let is_in = |cache: &FrameCache| cache.contains(key);
        self.main.as_ref().is_some_and(is_in) || self.stream.as_ref().is_some_and(is_in)
    }

    /// Inserts a frame into the main cache.
    pub fn insert_main(&self, key: FrameKey, plain: Bytes) {
        if let Some(cache) = &self.main {
            cache.insert(key, plain);
        }
    }

    /// Inserts a frame into the stream cache.
    pub fn insert_stream(&self, key: FrameKey, plain: Bytes) {
        if let Some(cache) = &self.stream {
            cache.insert(key, plain);
        }
    }

    /// Returns the bytes that both caches use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        let used = |cache: &Option<FrameCache>| cache.as_ref().map_or(0, |cache| cache.usage());
        (used(&self.main) + used(&self.stream)) as u64
    }
}

fn build(bytes: u64, eviction: impl Into<EvictionConfig>) -> Option<FrameCache> {
    (bytes > 0).then(|| {
        CacheBuilder::new(usize::try_from(bytes).unwrap_or(usize::MAX))
            .with_shards(SHARD_COUNT)
            .with_eviction_config(eviction)
            .with_hash_builder(BuildHasherDefault::default())
            .with_weighter(|_: &FrameKey, plain: &Bytes| plain.len() + ENTRY_OVERHEAD_BYTES)
            .build()
    })
}

type Slot = Option<(SegmentId, Arc<SealKey>)>;

/// Cache of the keys of frames. Deriving a key costs as much as decrypting a small frame.
pub struct Keys {
    pool_key: PoolKey,
    volume_keys: VolumeKeys,
    /// Direct-mapped by id: a new key replaces the one in its slot.
    slots: Vec<RwLock<Slot>>,
}

/// Number of cached keys: enough for 32 GiB of segments of 32 MiB; about 1 MiB of memory.
const KEY_COUNT: usize = 1024;

impl Keys {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(pool_key: PoolKey, volume_keys: VolumeKeys) -> Self {
        Keys { pool_key, volume_keys, slots: (0..KEY_COUNT).map(|_| RwLock::new(None)).collect() }
    }

    /// Returns the key of the pool.
    #[must_use]
    pub fn pool_key(&self) -> &PoolKey {
        &self.pool_key
    }

    /// Returns the keys of volumes.
    #[must_use]
    pub fn volume_keys(&self) -> &VolumeKeys {
        &self.volume_keys
    }

    /// Discards all derived keys.
    pub fn clear(&self) {
        for slot in &self.slots {
            *slot.write() = None;
        }
    }

    /// Returns the key of a segment's frames.
    ///
    /// # Errors
    /// `NoKey` when the volume's key is not present.
    pub fn of(&self, info: &SegmentInfo) -> Result<Arc<SealKey>, SegmentError> {
        let slot = &self.slots[u128::from_le_bytes(info.id) as usize % KEY_COUNT];
        if let Some((id, key)) = &*slot.read()
            && *id == info.id
        {
            return Ok(key.clone());
        }
        let root = self.volume_keys.root(info.key, &self.pool_key);
        let key = Arc::new(segment_key(&root.ok_or(SegmentError::NoKey(info.key))?, info));
        *slot.write() = Some((info.id, key.clone()));
        Ok(key)
    }
}
