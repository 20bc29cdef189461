//! The keys of volumes that have one of their own: a chain of documents in the pool's store, `volumekeys/<number>`.
//!
//! Invariants:
//! - A key is durable in the store before anything is sealed with it. The document of the highest number counts.
//! - A key is destroyed by a document without it, after which every earlier document is deleted. Only keys of volumes
//!   that this owner knows to be purged are destroyed, and only while no other volume uses them.
//! - A new owner first writes the next document, if there is any. A change by an earlier owner then collides with that
//!   number, so it can no longer destroy anything.
//! - Keys leave this process only sealed under the pool's data key.

use async_recursion::async_recursion;
use block::env::random_bytes;
use block::hex::{from_hex, to_hex, vec_from_hex};
use block::seal::{KEY_BYTES, PoolKey, SALT_BYTES};
use block::units::{array_at, u32_at};
use block::{Epoch, Error, ErrorKind, Result};
use control::chain::{ALGORITHM, Chain, Created, Format, corrupt, seal_document};
use control::store::Store;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use tiering::{KeyId, VolumeKeys};
use uuid::Uuid;
use zeroize::Zeroizing;

/// Folder of the chain in the pool's prefix, and the purpose of its seal.
pub use control::keys::VOLUME_KEYS_FOLDER as FOLDER;
/// Purpose for which the key that seals the volume keys is derived.
const PURPOSE: &str = "volume keys";
/// Most keys of a pool. Chosen by hand: a third of a document's capacity.
pub const COUNT_MAX: usize = 1024;
/// Bytes of one key in a document: its number and the key.
const ENTRY_BYTES: usize = 4 + KEY_BYTES;
/// Documents kept while none of them holds a destroyed key.
const KEEP_COUNT: usize = 2;
/// Attempts to write a document. Each may have reached the store without an answer.
const TRY_COUNT: u32 = 4;

/// The contents of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    format: Format,
    pool: Uuid,
    number: u64,
    /// Epoch of the owner that wrote it.
    epoch: u64,
    /// Number of the document in which a key was last destroyed, or 0.
    destroyed_in: u64,
    /// Random, and used only once.
    salt: String,
    /// The keys, ascending by number: each a u32 in little-endian order and 32 bytes. The tag follows.
    sealed: String,
    /// Random: tells our own create from another's after an ambiguous answer.
    nonce: String,
}

type Keys = BTreeMap<KeyId, PoolKey>;

/// The keys as the store holds them.
#[derive(Clone, Debug, Default)]
struct State {
    number: u64,
    epoch: u64,
    destroyed_in: u64,
    keys: Keys,
    /// Earlier documents may hold keys that were destroyed.
    is_prune_owed: bool,
}

/// Associated data of the sealed keys.
fn associated(pool: Uuid, number: u64, epoch: u64) -> String {
    format!("spindle volume keys 1 {pool} {number} {epoch}")
}

fn body_of(key: &PoolKey, pool: Uuid, state: &State, salt: [u8; SALT_BYTES]) -> Body {
    let mut plain = Zeroizing::new(Vec::with_capacity(state.keys.len() * ENTRY_BYTES + 16));
    for (id, secret) in &state.keys {
        plain.extend_from_slice(&id.0.to_le_bytes());
        plain.extend_from_slice(secret.expose());
    }
    let aad = associated(pool, state.number, state.epoch);
    let tag = key.derive(ALGORITHM, &salt, PURPOSE).seal(0, aad.as_bytes(), &mut plain);
    let mut sealed = to_hex(&plain);
    sealed.push_str(&to_hex(&tag));
    Body {
        format: Format::CURRENT,
        pool,
        number: state.number,
        epoch: state.epoch,
        destroyed_in: state.destroyed_in,
        salt: to_hex(&salt),
        sealed,
        nonce: to_hex(&random_bytes::<16>()),
    }
}

fn keys_of(name: &str, key: &PoolKey, body: &Body) -> Result<Keys> {
    let unreadable = || corrupt(name, "the keys in it are unreadable");
    let salt = from_hex::<SALT_BYTES>(&body.salt).ok_or_else(unreadable)?;
    let mut sealed = Zeroizing::new(vec_from_hex(&body.sealed).ok_or_else(unreadable)?);
    let aad = associated(body.pool, body.number, body.epoch);
    let plain = key
        .derive(ALGORITHM, &salt, PURPOSE)
        .open(0, aad.as_bytes(), &mut sealed)
        .map_err(|_| unreadable())?;
    let mut keys = Keys::new();
    if !plain.len().is_multiple_of(ENTRY_BYTES) || plain.len() / ENTRY_BYTES > COUNT_MAX {
        return Err(unreadable());
    }
    for entry in plain.chunks_exact(ENTRY_BYTES) {
        let (Some(id), Some(secret)) = (u32_at(entry, 0), array_at(entry, 4)) else {
            return Err(unreadable());
        };
        if id == 0 || keys.insert(KeyId(id), PoolKey::new(secret)).is_some() {
            return Err(unreadable());
        }
    }
    Ok(keys)
}

async fn read(store: &Store, key: &PoolKey, pool: Uuid) -> Result<State> {
    let chain = Chain::new(store, FOLDER);
    let Some((number, body)) = chain.newest_body::<Body>(key).await? else {
        return Ok(State::default());
    };
    let name = chain.name(number);
    if body.pool != pool || body.number != number {
        return Err(corrupt(&name, "it belongs elsewhere"));
    }
    let keys = keys_of(&name, key, &body)?;
    let (epoch, destroyed_in) = (body.epoch, body.destroyed_in);
    Ok(State { number, epoch, destroyed_in, keys, is_prune_owed: true })
}

/// Reads the keys that the store of a pool or of a copy holds; empty if no volume has its own. Changes nothing.
///
/// # Errors
/// `Corrupt` or `Unsupported` for a document that cannot be read; those of reading the store.
#[async_recursion]
pub async fn load(store: &Store, key: &PoolKey, pool: Uuid) -> Result<VolumeKeys> {
    Ok(load_with_destroyed(store, key, pool).await?.0)
}

/// Like [`load`], with the number of the document in which a key was last destroyed, or 0.
#[async_recursion]
pub async fn load_with_destroyed(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
) -> Result<(VolumeKeys, u64)> {
    let (table, state) = (VolumeKeys::default(), read(store, key, pool).await?);
    for (id, secret) in state.keys {
        table.insert(id, secret);
    }
    Ok((table, state.destroyed_in))
}

/// Copies the newest document of a store to a copy, and leaves no other document there. Returns its number, or `None`
/// if there is none.
///
/// # Errors
/// `Busy` if the other store has a later one; those of both stores.
pub(crate) async fn copy(from: &Store, to: &Store) -> Result<Option<u64>> {
    let (source, target) = (Chain::new(from, FOLDER), Chain::new(to, FOLDER));
    let Some((number, bytes)) = source.newest().await? else { return Ok(None) };
    let is_there = target.newest().await?.is_some_and(|there| there == (number, bytes.clone()));
    if !is_there && target.create(number, &bytes).await? == Created::Lost {
        let what = format!("copy the keys of volumes to {}: it has later ones", to.url());
        return Err(Error::new(ErrorKind::Busy, what));
    }
    // An earlier call may have been cut short before this.
    target.delete_below(number).await?;
    Ok(Some(number))
}

/// Gives a pool that is restored from a copy the copy's keys, in a document of the same number. Its epoch is at most
/// that of the restored state, `epoch`: later owners of the first pool are not owners of this one. Can be repeated.
///
/// # Errors
/// `Busy` if the pool's store has a later one; those of [`load`]; those of writing.
pub(crate) async fn bring(
    from: &Store,
    to: &Store,
    (key, pool): (&PoolKey, Uuid),
    epoch: u64,
) -> Result<()> {
    let mut state = read(from, key, pool).await?;
    if state.number == 0 {
        return Ok(());
    }
    state.epoch = state.epoch.min(epoch);
    let target = Chain::new(to, FOLDER);
    if target.newest_number().await? != Some(state.number) {
        let body = body_of(key, pool, &state, random_bytes());
        let bytes = seal_document(key, FOLDER, &body)?;
        if target.create(state.number, &bytes).await? == Created::Lost {
            let what = format!("bring the keys of volumes to {}: it has later ones", to.url());
            return Err(Error::new(ErrorKind::Busy, what));
        }
    }
    // An earlier call may have been cut short before this.
    target.delete_below(state.number).await
}

/// The keys of an open pool, which this process owns.
pub(crate) struct VolumeKeyRing {
    store: Store,
    key: PoolKey,
    pool: Uuid,
    epoch: Epoch,
    table: VolumeKeys,
    state: tokio::sync::Mutex<State>,
    destroyed_in: AtomicU64,
}

impl VolumeKeyRing {
    /// Reads the keys, and prevents earlier owners from changing them.
    ///
    /// # Errors
    /// `Fenced` if a later owner has opened the keys; those of [`load`].
    pub(crate) async fn open(
        store: &Store,
        key: &PoolKey,
        pool: Uuid,
        epoch: Epoch,
    ) -> Result<VolumeKeyRing> {
        for _ in 0..TRY_COUNT {
            let state = read(store, key, pool).await?;
            if state.epoch > epoch.0 {
                return Err(fenced(state.epoch));
            }
            let table = VolumeKeys::default();
            for (id, secret) in &state.keys {
                table.insert(*id, secret.clone());
            }
            let is_settled = state.number == 0 || state.epoch == epoch.0;
            let ring = VolumeKeyRing {
                store: store.clone(),
                key: key.clone(),
                pool,
                epoch,
                table,
                destroyed_in: AtomicU64::new(state.destroyed_in),
                state: tokio::sync::Mutex::new(state),
            };
            if is_settled {
                return Ok(ring);
            }
            let written = ring.write(&mut *ring.state.lock().await, None).await;
            match written {
                Ok(()) => return Ok(ring),
                // The last change of an earlier owner, made while it still owned the pool, is taken over too.
                Err(error) if error.kind() == ErrorKind::Busy => {}
                Err(error) => return Err(error),
            }
        }
        let what = "open the keys of volumes: they change all the time; is another owner at work?";
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// The keys, for the data tier.
    pub(crate) fn table(&self) -> &VolumeKeys {
        &self.table
    }

    /// Number of the document in which a key was last destroyed, or 0.
    pub(crate) fn destroyed_in(&self) -> u64 {
        self.destroyed_in.load(Ordering::Acquire)
    }

    /// Makes a key for a new volume. The key is durable when this returns.
    ///
    /// # Errors
    /// `Full` if there are too many; `Fenced` if the pool has another owner; those of the store.
    pub(crate) async fn make(&self, volume: u32) -> Result<KeyId> {
        let mut state = self.state.lock().await;
        let id = KeyId(volume);
        let mut keys = state.keys.clone();
        // An existing key of that number is of a volume whose creation failed, and has sealed nothing.
        let secret = PoolKey::new(random_bytes());
        keys.insert(id, secret.clone());
        if keys.len() > COUNT_MAX {
            let what = format!(
                "make a key for the volume: {COUNT_MAX} volumes of the pool have one of their own already"
            );
            return Err(Error::new(ErrorKind::Full, what));
        }
        self.write(&mut state, Some((keys, false))).await?;
        self.table.insert(id, secret);
        Ok(id)
    }

    /// Destroys keys that no volume uses: no document of the store holds them when this returns. Keys that are gone
    /// already are skipped.
    ///
    /// # Errors
    /// Those of [`VolumeKeyRing::make`]; the keys may still exist.
    pub(crate) async fn destroy(&self, ids: &BTreeSet<KeyId>) -> Result<()> {
        let mut state = self.state.lock().await;
        let mut keys = state.keys.clone();
        keys.retain(|id, _| !ids.contains(id));
        if keys.len() != state.keys.len() {
            self.write(&mut state, Some((keys, true))).await?;
        }
        if state.is_prune_owed {
            let pruned = Chain::new(&self.store, FOLDER).delete_below(state.number).await;
            pruned.map_err(|error| error.context("delete the earlier documents of volume keys"))?;
            state.is_prune_owed = false;
        }
        Ok(())
    }

    /// Writes the next document, either with `keys`, whose flag says whether keys are destroyed with it, or with the
    /// same keys.
    async fn write(&self, state: &mut State, keys: Option<(Keys, bool)>) -> Result<()> {
        let chain = Chain::new(&self.store, FOLDER);
        for _ in 0..TRY_COUNT {
            let number = state.number + 1;
            let mut next = State { number, epoch: self.epoch.0, ..state.clone() };
            if let Some((keys, is_destroyed)) = &keys {
                next.keys.clone_from(keys);
                if *is_destroyed {
                    (next.destroyed_in, next.is_prune_owed) = (number, true);
                }
            }
            let body = body_of(&self.key, self.pool, &next, random_bytes());
            let created = chain.create(number, &seal_document(&self.key, FOLDER, &body)?).await?;
            if created == Created::Ours {
                *state = next;
                self.destroyed_in.store(state.destroyed_in, Ordering::Release);
                if !state.is_prune_owed
                    && let Err(error) = chain.prune(KEEP_COUNT).await
                {
                    tracing::debug!(
                        error = %error.chain(),
                        "could not delete old lists of volume keys"
                    );
                }
                return Ok(());
            }
            let found = read(&self.store, &self.key, self.pool).await?;
            match found.epoch {
                later if later > self.epoch.0 => return Err(fenced(later)),
                // An unanswered attempt of ours has reached the store. Its contents are ignored, because its caller was
                // told that it failed.
                ours if ours == self.epoch.0 => {
                    (state.number, state.is_prune_owed) = (found.number, true);
                }
                _ => break,
            }
        }
        let what =
            "change the keys of volumes: another process did so at the same moment; try again";
        Err(Error::new(ErrorKind::Busy, what))
    }
}

fn fenced(epoch: u64) -> Error {
    let what = format!("change the keys of volumes: the owner of epoch {epoch} has the pool");
    Error::new(ErrorKind::Fenced, what)
}

#[cfg(test)]
mod tests;
