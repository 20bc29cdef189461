//! Keys of volumes, with which the frames of some segments are sealed instead of the pool's key.
//!
//! Invariants:
//! - A segment holds blocks of volumes that share one key. Its directory is always sealed with the
//!   pool's key, so that reclaim, scrub and fsck know the place of every frame even if its blocks
//!   can no longer be read.
//! - The key of a volume never changes, and passes to the volumes that are made from it.
//! - A missing key is an error wherever data would be sealed or opened with it: nothing falls back
//!   to the pool's key.

use block::VolumeId;
use block::seal::PoolKey;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

/// Identifies a key: 0 is the pool's, any other number the key that was made for the volume with
/// that id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub u32);

impl KeyId {
    /// The pool's key.
    pub const POOL: KeyId = KeyId(0);

    /// Returns whether it is the pool's key.
    #[must_use]
    pub fn is_pool(self) -> bool {
        self == KeyId::POOL
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_pool() {
            true => f.write_str("the pool's key"),
            false => write!(f, "the key that was made for volume {}", self.0),
        }
    }
}

#[derive(Default)]
struct Table {
    keys: BTreeMap<KeyId, PoolKey>,
    /// Keys of the volumes that do not use the pool's key.
    of: HashMap<VolumeId, KeyId>,
}

/// The identity of a pool, and the keys that its data is under.
#[derive(Clone, Debug)]
pub struct PoolKeys {
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// Root key of the pool.
    pub pool_key: PoolKey,
    /// Keys of volumes.
    pub volume_keys: VolumeKeys,
}

/// The keys of volumes that are present, and the volumes that use them. It is cheap to clone; all
/// clones share one table.
#[derive(Clone, Default)]
pub struct VolumeKeys(Arc<RwLock<Table>>);

impl fmt::Debug for VolumeKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VolumeKeys").field(&self.ids()).finish()
    }
}

impl VolumeKeys {
    /// Adds a key. Panics for the pool's id.
    pub fn insert(&self, id: KeyId, key: PoolKey) {
        assert!(!id.is_pool(), "the pool's key is elsewhere");
        self.0.write().keys.insert(id, key);
    }

    /// Assigns a key to a volume before anything of the volume is destaged. The key need not be
    /// present. It replaces an earlier assignment, because the id may have belonged to a volume
    /// whose creation failed.
    pub fn assign(&self, volume: VolumeId, id: KeyId) {
        let mut table = self.0.write();
        match id.is_pool() {
            true => table.of.remove(&volume),
            false => table.of.insert(volume, id),
        };
    }

    /// Returns the key that a volume uses.
    #[must_use]
    pub fn of(&self, volume: VolumeId) -> KeyId {
        self.0.read().of.get(&volume).copied().unwrap_or(KeyId::POOL)
    }

    /// Returns whether a key is present; the pool's always is.
    #[must_use]
    pub fn has(&self, id: KeyId) -> bool {
        id.is_pool() || self.0.read().keys.contains_key(&id)
    }

    /// Returns the keys that are present.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<KeyId> {
        self.0.read().keys.keys().copied().collect()
    }

    pub(crate) fn remove(&self, id: KeyId) {
        self.0.write().keys.remove(&id);
    }

    /// Returns the root key of a segment's frames; `pool_key` for the pool's id.
    pub(crate) fn root(&self, id: KeyId, pool_key: &PoolKey) -> Option<PoolKey> {
        match id.is_pool() {
            true => Some(pool_key.clone()),
            false => self.0.read().keys.get(&id).cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_falls_back_to_the_pools_key() {
        let (keys, pool) = (VolumeKeys::default(), PoolKey::new([1; 32]));
        assert_eq!(keys.of(VolumeId(7)), KeyId::POOL);
        keys.assign(VolumeId(7), KeyId(7));
        keys.assign(VolumeId(9), KeyId(7));
        assert_eq!(keys.of(VolumeId(9)), KeyId(7));
        assert!(!keys.has(KeyId(7)) && keys.root(KeyId(7), &pool).is_none());
        keys.insert(KeyId(7), PoolKey::new([2; 32]));
        assert_eq!(keys.root(KeyId(7), &pool).unwrap().expose(), &[2; 32]);
        assert_eq!(keys.root(KeyId::POOL, &pool).unwrap().expose(), &[1; 32]);
        assert!(!format!("{keys:?}").contains("2, 2"), "a key is not shown");
        keys.assign(VolumeId(8), KeyId(7));
        keys.assign(VolumeId(8), KeyId::POOL);
        assert_eq!(keys.of(VolumeId(8)), KeyId::POOL, "what was said last counts");
        keys.clone().remove(KeyId(7));
        assert!(keys.root(keys.of(VolumeId(9)), &pool).is_none());
    }
}
