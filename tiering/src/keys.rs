//! Keys of volumes: what the frames of some segments are sealed with instead of the pool's key.
//!
//! Invariants:
//! - A segment holds blocks of volumes that share one key. Its directory is sealed with the pool's key at any rate, so
//!   that reclaim, scrub and fsck know where everything lies when nobody can read the blocks any more.
//! - The key of a volume never changes, and goes to the volumes that are made from it.
//! - A key that is missing is an error wherever something would be sealed or opened with it: nothing falls back to the
//!   pool's key.

use block::VolumeId;
use block::seal::PoolKey;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

/// Names a key: 0 is the pool's, another number the one that was made for the volume with that id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub u32);

impl KeyId {
    /// The pool's.
    pub const POOL: KeyId = KeyId(0);

    /// It is the pool's.
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
    /// Volumes that do not use the pool's key.
    of: HashMap<VolumeId, KeyId>,
}

/// The keys of volumes that are there, and which volumes use them. Cheap to clone; all clones are one.
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

    /// A volume uses a key, which need not be there, and none that was said before: its id may be that of a volume that
    /// was not made in the end. Before anything of the volume is destaged.
    pub fn assign(&self, volume: VolumeId, id: KeyId) {
        let mut table = self.0.write();
        match id.is_pool() {
            true => table.of.remove(&volume),
            false => table.of.insert(volume, id),
        };
    }

    /// The key that a volume uses.
    #[must_use]
    pub fn of(&self, volume: VolumeId) -> KeyId {
        self.0.read().of.get(&volume).copied().unwrap_or(KeyId::POOL)
    }

    /// It is there; the pool's always is.
    #[must_use]
    pub fn has(&self, id: KeyId) -> bool {
        id.is_pool() || self.0.read().keys.contains_key(&id)
    }

    /// The keys that are there.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<KeyId> {
        self.0.read().keys.keys().copied().collect()
    }

    pub(crate) fn remove(&self, id: KeyId) {
        self.0.write().keys.remove(&id);
    }

    /// What the frames of a segment are sealed under; `pool_key` for the pool's id.
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
