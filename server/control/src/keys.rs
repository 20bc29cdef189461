//! Owns the key ring of a pool: its data keys, wrapped once for every way to open it.
//!
//! Invariants:
//! - Data keys are random, made once, and leave this process only wrapped. Rotation makes a new
//!   wrapping; it never touches data.
//! - A ring is an immutable numbered object (`keyring/<number>`). A change writes the next one,
//!   which is read back and opened with the new secret before the earlier ones are deleted.
//! - Every slot is bound to the pool, its own number, kind and parameters. The whole ring is sealed
//!   under the newest data key, so that slots can be neither forged, moved nor dropped.
//! - A wrong secret is told apart from a damaged ring, and changes nothing.
//! - A pool that has anything in its store never gets a new key ring.

mod apart;
mod printed;
mod source;

pub use source::{KeySource, Secret, SlotKind};

use crate::chain::{ALGORITHM, Chain, Created, Document, Format, corrupt, seal_document};
use crate::store::Store;
use async_recursion::async_recursion;
use block::env::{random_bytes, random_uuid};
use block::hex::{from_hex, to_hex, vec_from_hex};
use block::quantities;
use block::seal::{KEY_BYTES, PoolKey, SALT_BYTES};
use block::units::{array_at, u32_at};
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use source::{Material, PASSPHRASE_BYTES_MIN, RECOVERY_PREFIX};
use std::path::{Path, PathBuf};
use uuid::Uuid;
use zeroize::Zeroizing;

/// Folder of the chain of the volumes' dedicated keys in the pool's prefix, and the purpose of its seal.
pub const VOLUME_KEYS_FOLDER: &str = "volumekeys";
/// Keeps the seal of a ring apart from every other use of a data key.
const PURPOSE: &str = "keyring";
/// Slots in a ring: one for daily use, and some recovery keys.
const SLOT_COUNT_MAX: usize = 8;
/// Numbers from 1 on whose objects are read before a ring that no listing shows counts as gone.
/// Chosen by hand: each change of the keys takes one number, and a pool sees few.
const UNLISTED_LOOK_COUNT: u64 = 32;
/// Most recovery keys that are valid at the same time.
const RECOVERY_COUNT_MAX: usize = 4;
/// Data keys in a ring. Chosen by hand: far above the need of a rotation of data keys.
const DATA_KEY_COUNT_MAX: usize = 64;
/// Bytes of one data key in a slot: its number and the key.
const ENTRY_BYTES: usize = 4 + KEY_BYTES;
/// Rings kept after a change that revokes nothing.
const KEEP_COUNT: usize = 3;
/// argon2id of new slots. Source: RFC 9106, section 4, second recommended option.
const ARGON2: Argon2Cost = Argon2Cost { memory_kib: 64 * 1024, pass_count: 3, lane_count: 4 };

/// Cost of stretching a passphrase, as stored in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Argon2Cost {
    memory_kib: u32,
    pass_count: u32,
    lane_count: u32,
}

impl Argon2Cost {
    /// Bounds the work that a forged ring can cause.
    fn is_sane(self) -> bool {
        (8..=1024 * 1024).contains(&self.memory_kib)
            && (1..=64).contains(&self.pass_count)
            && (1..=16).contains(&self.lane_count)
            && self.memory_kib >= 8 * self.lane_count
    }
}

/// One way to open the ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Slot {
    id: u32,
    kind: SlotKind,
    /// Seconds since 1970, for display.
    created_at: u64,
    salt: String,
    argon2: Option<Argon2Cost>,
    nonce: String,
    sealed: String,
}

/// The contents of a ring object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RingBody {
    format: Format,
    pool: Uuid,
    number: u64,
    /// The ring is of a copy that has its dedicated key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_apart: bool,
    /// Random: tells our own create from another's after an ambiguous answer.
    nonce: String,
    slots: Vec<Slot>,
}

/// One data key, and the number by which the pool's parts refer to it.
#[derive(Clone, Debug)]
pub struct DataKey {
    /// Never 0, ascending.
    pub id: u32,
    /// The key.
    pub key: PoolKey,
}

/// An opened key ring.
#[derive(Debug)]
pub struct KeyRing {
    chain: Chain,
    body: RingBody,
    data_keys: Vec<DataKey>,
}

/// The result of a rotation, for the person who asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotated {
    /// Kind of the new slot.
    pub kind: SlotKind,
    /// Instructions for the future use of the pool.
    pub message: String,
}

/// The secret that opens the pool from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewKey {
    /// A key file, created if it is missing. A key file that opens the pool now is replaced in
    /// place.
    File {
        /// Path on the machine of the daemon.
        path: PathBuf,
    },
    /// A passphrase.
    Passphrase {
        /// The passphrase itself: the request never leaves the machine.
        secret: Secret,
    },
    /// The output of a command.
    Command {
        /// Program and arguments.
        command: Vec<String>,
    },
}

impl KeyRing {
    /// Opens the ring of the pool in `store`, or makes one if the store is empty. A missing key
    /// file is created together with the ring.
    ///
    /// # Errors
    /// `Denied` for a wrong secret, `NotFound` for a missing one, `Corrupt` for a damaged ring, or
    /// for one that is gone while the pool is not.
    #[async_recursion]
    pub async fn open_or_create(store: &Store, source: &KeySource) -> Result<KeyRing> {
        let chain = Chain::new(store, "keyring");
        if chain.newest_number().await?.is_some() {
            return KeyRing::open(store, source).await;
        }
        check_empty(store).await?;
        let material = match source {
            KeySource::RecoveryFile(_) => {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!("store {} holds no pool that a recovery key could open", store.url()),
                ));
            }
            KeySource::File(path) if !path.exists() => {
                let key = source::make_key_file(path)?;
                tracing::warn!(
                    path = %path.display(),
                    "spindle made a new key file; keep a copy elsewhere, or run `spindle key \
                     backup`: without the key, the volumes cannot be read"
                );
                Material::Key(SlotKind::KeyFile, key)
            }
            other => load_durable(other).await?,
        };
        check_strength(&material)?;
        let key = PoolKey::new(random_bytes());
        let data_keys = vec![DataKey { id: 1, key }];
        let mut body = RingBody {
            format: Format::CURRENT,
            pool: random_uuid(),
            number: 1,
            is_apart: false,
            nonce: fresh_nonce(),
            slots: Vec::new(),
        };
        body.slots.push(make_slot(&body, &material, &data_keys).await?);
        let ring = KeyRing { chain, body, data_keys };
        match ring.chain.create(1, &ring.sealed()?).await? {
            Created::Ours => Ok(ring),
            // Another node made the pool at the same moment; its ring opens only with its own
            // secret.
            Created::Lost => KeyRing::open(store, source).await,
        }
    }

    /// Tells whether `store` holds a pool's ring, under any secret. Writes nothing.
    ///
    /// # Errors
    /// Those of listing the store.
    #[async_recursion]
    pub async fn exists(store: &Store) -> Result<bool> {
        Ok(Chain::new(store, "keyring").newest_number().await?.is_some())
    }

    /// Like [`KeyRing::exists`], for a pool that existed before: false for an empty store.
    ///
    /// # Errors
    /// `Corrupt` for a store that has lost only its ring.
    #[async_recursion]
    pub async fn exists_or_refuse(store: &Store) -> Result<bool> {
        let exists = KeyRing::exists(store).await?;
        if !exists {
            check_empty(store).await?;
        }
        Ok(exists)
    }

    /// Opens the ring of an existing pool.
    ///
    /// # Errors
    /// Those of [`KeyRing::open_or_create`]; `NotFound` for a store without a pool.
    #[async_recursion]
    pub async fn open(store: &Store, source: &KeySource) -> Result<KeyRing> {
        let chain = Chain::new(store, "keyring");
        let Some((number, bytes)) = chain.newest().await? else {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("store {} holds no pool", store.url()),
            ));
        };
        let KeySource::File(path) = source else {
            let material = source.load().await?;
            return open_bytes(chain, number, &bytes, &material).await;
        };
        // An interrupted rotation in place leaves the new key beside the old one.
        let next = next_path(path);
        let current = source.load().await.map_err(|error| missing_key_file(path, error));
        let outcome = match &current {
            Ok(material) => open_bytes(chain.clone(), number, &bytes, material).await,
            Err(error) => Err(error.clone()),
        };
        if outcome.is_ok() || !next.exists() {
            return outcome;
        }
        let Ok(material) = KeySource::File(next.clone()).load().await else { return outcome };
        match open_bytes(chain, number, &bytes, &material).await {
            Ok(ring) => {
                rename_durably(&next, path)?;
                tracing::info!(
                    path = %path.display(),
                    "spindle finished a key rotation that was cut short"
                );
                Ok(ring)
            }
            Err(_) => outcome,
        }
    }

    /// The pool's identity.
    #[must_use]
    pub fn pool(&self) -> Uuid {
        self.body.pool
    }

    /// The data key that seals new data.
    #[must_use]
    pub fn newest(&self) -> &DataKey {
        self.data_keys.last().expect("a ring holds at least one data key")
    }

    /// All data keys, ascending by number.
    #[must_use]
    pub fn data_keys(&self) -> &[DataKey] {
        &self.data_keys
    }

    /// Tells whether a recovery key was made. Without one the loss of the secret loses the pool.
    #[must_use]
    pub fn has_recovery(&self) -> bool {
        self.body.slots.iter().any(|slot| slot.kind == SlotKind::Recovery)
    }

    /// Kinds of the slots and their creation times, for status.
    #[must_use]
    pub fn slots(&self) -> Vec<(SlotKind, u64)> {
        self.body.slots.iter().map(|slot| (slot.kind, slot.created_at)).collect()
    }

    /// Adds a recovery key and returns its printed form, which is not stored anywhere. With
    /// `replace`, earlier recovery keys stop working.
    ///
    /// # Errors
    /// `Full` if there are four already; `Busy` if another process changed the ring.
    #[async_recursion]
    pub async fn add_recovery(&mut self, replace: bool) -> Result<Secret> {
        let key = Zeroizing::new(random_bytes::<KEY_BYTES>());
        let printed = Secret::from_zeroizing(printed::encode(RECOVERY_PREFIX, &key));
        let material = Material::Key(SlotKind::Recovery, key);
        self.refresh().await?;
        let mut slots = self.body.slots.clone();
        if replace {
            slots.retain(|slot| slot.kind != SlotKind::Recovery);
        }
        let recovery_count = slots.iter().filter(|slot| slot.kind == SlotKind::Recovery).count();
        if recovery_count >= RECOVERY_COUNT_MAX {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "{recovery_count} recovery keys are valid already; use --replace, after which \
                     only the new one is"
                ),
            ));
        }
        self.replace(slots, &material).await?;
        if replace {
            self.revoke().await?;
        } else if let Err(error) = self.chain.prune(KEEP_COUNT).await {
            tracing::warn!(error = %error.chain(), "could not delete old key rings");
        }
        Ok(printed)
    }

    /// Replaces every slot except the recovery keys by one that `new` opens. The earlier secret no
    /// longer opens the pool.
    ///
    /// # Errors
    /// `Invalid` for a weak passphrase; `Busy` if another process changed the ring. The old secret
    /// still opens it then.
    #[async_recursion]
    pub async fn rotate(&mut self, new: &NewKey) -> Result<Rotated> {
        match new {
            NewKey::File { path } => self.rotate_to_file(path).await,
            NewKey::Passphrase { secret } => {
                self.rotate_to(&KeySource::Passphrase(secret.clone())).await?;
                self.revoke().await?;
                Ok(Rotated {
                    kind: SlotKind::Passphrase,
                    message: "the pool opens with the new passphrase only: start spindle with \
                              --passphrase-file, --passphrase-fd or --passphrase-env"
                        .to_owned(),
                })
            }
            NewKey::Command { command } => {
                self.rotate_to(&KeySource::Command(command.clone())).await?;
                self.revoke().await?;
                Ok(Rotated {
                    kind: SlotKind::Command,
                    message: "the pool opens with the output of the new key command only: set \
                              keys.source = \"command\" and keys.command in the configuration"
                        .to_owned(),
                })
            }
        }
    }

    async fn rotate_to_file(&mut self, path: &Path) -> Result<Rotated> {
        self.refresh().await?;
        let next = next_path(path);
        self.finish_rename(path, &next).await?;
        let is_current = match (KeySource::File(path.to_owned())).load().await {
            Ok(material) => self.is_opened_by(&material).await,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                source::make_key_file(path)?;
                false
            }
            Err(error) => return Err(error),
        };
        if is_current {
            // An existing file is used, never deleted: an earlier rotation whose outcome is unknown
            // may turn out to have put it in force.
            if !next.exists() {
                source::make_key_file(&next)?;
            }
            self.rotate_to(&KeySource::File(next.clone())).await?;
            rename_durably(&next, path)?;
        } else {
            self.rotate_to(&KeySource::File(path.to_owned())).await?;
        }
        self.revoke().await?;
        Ok(Rotated {
            kind: SlotKind::KeyFile,
            message: format!(
                "the pool opens with the key file {} only; copies of the old key are useless now",
                path.display()
            ),
        })
    }

    /// Completes a rotation in place that was cut short before its last step, and removes an
    /// incomplete next key file, which was never used.
    async fn finish_rename(&self, path: &Path, next: &Path) -> Result<()> {
        match (KeySource::File(next.to_owned())).load().await {
            Ok(material) if self.is_opened_by(&material).await => rename_durably(next, path),
            Err(error) if error.kind() == ErrorKind::Invalid => {
                std::fs::remove_file(next).map_err(|error| {
                    let context = format!("remove {}", next.display());
                    Error::with_source(ErrorKind::Io, context, error)
                })
            }
            _ => Ok(()),
        }
    }

    /// Writes a ring with `source` and the recovery keys. The old rings stay.
    async fn rotate_to(&mut self, source: &KeySource) -> Result<()> {
        let material = load_durable(source).await?;
        check_strength(&material)?;
        self.refresh().await?;
        let mut slots = self.body.slots.clone();
        slots.retain(|slot| slot.kind == SlotKind::Recovery);
        self.replace(slots, &material).await
    }

    /// Deletes the rings that the old secret opens.
    async fn revoke(&self) -> Result<()> {
        self.chain.delete_below(self.body.number).await.map_err(|error| {
            error.context("the new key is in force, but the old key ring is still there")
        })
    }

    /// Takes over the changes of another process: an authentic newer ring of the same data keys.
    async fn refresh(&mut self) -> Result<()> {
        let Some((number, bytes)) = self.chain.newest().await? else {
            return Err(corrupt(&self.chain.name(self.body.number), "it is gone"));
        };
        if number == self.body.number {
            return Ok(());
        }
        let name = self.chain.name(number);
        let document = Document::parse(&name, &bytes)?;
        document.verify(&self.newest().key, PURPOSE)?;
        let body: RingBody = document.body()?;
        if body.number != number || body.pool != self.body.pool || number < self.body.number {
            return Err(corrupt(&name, "it is not the successor of the ring that was opened"));
        }
        self.body = body;
        Ok(())
    }

    async fn is_opened_by(&self, material: &Material) -> bool {
        for slot in &self.body.slots {
            let is_kind = slot.kind == material.kind();
            if is_kind && open_slot(&self.body, slot, material).await.is_ok() {
                return true;
            }
        }
        false
    }

    /// Writes the next ring: `slots` and one more for `material`.
    async fn replace(&mut self, slots: Vec<Slot>, material: &Material) -> Result<()> {
        let mut body = RingBody {
            format: Format::CURRENT,
            pool: self.body.pool,
            number: self.body.number + 1,
            is_apart: false,
            nonce: fresh_nonce(),
            slots,
        };
        let slot = make_slot(&body, material, &self.data_keys).await?;
        body.slots.push(slot);
        let next = KeyRing { chain: self.chain.clone(), body, data_keys: self.data_keys.clone() };
        let number = next.body.number;
        let unknown = |error: Error| {
            error.context(
                "the key may or may not have changed, so either the old or the new one opens the \
                 pool",
            )
        };
        if next.chain.create(number, &next.sealed()?).await.map_err(unknown)? == Created::Lost {
            return Err(Error::new(
                ErrorKind::Busy,
                "change the key ring: another process changed it at the same moment; try again",
            ));
        }
        let bytes = next.chain.read_back(number).await.map_err(unknown)?;
        let proven = open_bytes(next.chain.clone(), number, &bytes, material).await?;
        if proven.body != next.body {
            return Err(corrupt(
                &next.chain.name(number),
                "it differs from the ring that was written",
            ));
        }
        self.body = next.body;
        Ok(())
    }

    fn sealed(&self) -> Result<bytes::Bytes> {
        seal_document(&self.newest().key, PURPOSE, &self.body)
    }
}

fn fresh_nonce() -> String {
    to_hex(&random_bytes::<16>())
}

/// Path of a key file that replaces `path`, until it is in force.
fn next_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".next");
    PathBuf::from(name)
}

fn rename_durably(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).and_then(|()| block::durable_file::sync_parent(to)).map_err(|error| {
        let context = format!("rename {} to {}", from.display(), to.display());
        Error::with_source(ErrorKind::Io, context, error)
    })
}

fn missing_key_file(path: &Path, error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound {
        return error;
    }
    error.context(format!(
        "the pool exists, but its key file {} does not: put it back or name it with --key-file, \
         or use --recovery-key-file",
        path.display()
    ))
}

/// Refuses a store with data but without a ring, as a new ring would open nothing.
async fn check_empty(store: &Store) -> Result<()> {
    let parts = ["origin", "manifest", "segments", "metadata", VOLUME_KEYS_FOLDER];
    if let Some((part, _)) = store.first_below(&parts).await? {
        match part {
            "origin" => {
                let what = format!(
                    "store {}: a restore was begun there and not finished; repeat `spindle restore`, or choose \
                     another store",
                    store.url()
                );
                return Err(Error::new(ErrorKind::NotFound, what));
            }
            _ => {
                let rings = Chain::new(store, PURPOSE);
                for number in 1..=UNLISTED_LOOK_COUNT {
                    if rings.read(number).await?.is_some() {
                        return Err(rings.unlisted(number));
                    }
                }
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "store {}: the key ring is gone, but {part}/ is not empty. Restore the \
                         objects below keyring/; a new key would open nothing",
                        store.url()
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Loads the secret that is about to seal a ring, and makes its key file durable.
async fn load_durable(source: &KeySource) -> Result<Material> {
    let material = source.load().await?;
    if let KeySource::File(path) = source {
        source::make_durable(path)?;
    }
    Ok(material)
}

fn check_strength(material: &Material) -> Result<()> {
    match material {
        Material::Phrase(kind, secret) if secret.expose().len() < PASSPHRASE_BYTES_MIN => {
            Err(Error::new(
                ErrorKind::Invalid,
                format!("the {kind} gives fewer than {PASSPHRASE_BYTES_MIN} characters"),
            ))
        }
        Material::Phrase(kind, secret) => match source::oddity(secret.expose()) {
            Some(oddity) => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the {kind} {oddity}, which is easily left out when it is typed later; take \
                     that out, and try again (nothing was changed)"
                ),
            )),
            None => Ok(()),
        },
        Material::Key(..) => Ok(()),
    }
}

/// The data to which a slot is bound. `number` is not part of it on purpose: slots move to the next
/// ring unchanged, and the seal of the ring says which slots belong to it.
fn associated(body: &RingBody, slot: &Slot) -> Vec<u8> {
    let argon2 = slot.argon2.map_or([0; 3], |c| [c.memory_kib, c.pass_count, c.lane_count]);
    format!(
        "spindle keyring slot 1 {} {} {} {} {:?}",
        body.pool, slot.id, slot.kind, slot.salt, argon2
    )
    .into_bytes()
}

async fn make_slot(body: &RingBody, material: &Material, keys: &[DataKey]) -> Result<Slot> {
    if body.slots.len() >= SLOT_COUNT_MAX {
        return Err(Error::new(ErrorKind::Full, "the key ring has no free slot"));
    }
    let argon2 = matches!(material, Material::Phrase(..)).then_some(ARGON2);
    let slot = Slot {
        id: body.slots.iter().map(|slot| slot.id).max().unwrap_or(0) + 1,
        kind: material.kind(),
        created_at: quantities::unix_seconds_now(),
        salt: to_hex(&random_bytes::<SALT_BYTES>()),
        argon2,
        nonce: to_hex(&random_bytes::<12>()),
        sealed: String::new(),
    };
    wrap(body, slot, material, keys).await
}

/// Puts the data keys into an otherwise complete slot.
async fn wrap(
    body: &RingBody,
    mut slot: Slot,
    material: &Material,
    keys: &[DataKey],
) -> Result<Slot> {
    let nonce = from_hex(&slot.nonce).expect("whoever makes a slot gives it 12 bytes");
    let key = wrapping_key(&slot, material).await?;
    let mut bytes = Zeroizing::new(Vec::with_capacity(keys.len() * ENTRY_BYTES + 16));
    for entry in keys {
        bytes.extend_from_slice(&entry.id.to_le_bytes());
        bytes.extend_from_slice(entry.key.expose());
    }
    let tag = key.seal_with(nonce, &associated(body, &slot), &mut bytes);
    bytes.extend_from_slice(&tag);
    slot.sealed = to_hex(&bytes);
    Ok(slot)
}

/// Derives the key-wrapping key of a slot: stretched if the secret is a phrase, then bound to the
/// slot's salt.
async fn wrapping_key(slot: &Slot, material: &Material) -> Result<block::seal::SealKey> {
    let wrong = || Error::new(ErrorKind::Corrupt, format!("key slot {} is damaged", slot.id));
    let salt: [u8; SALT_BYTES] = from_hex(&slot.salt).ok_or_else(wrong)?;
    let root = match (material, slot.argon2) {
        (Material::Key(_, key), None) => PoolKey::new(**key),
        (Material::Phrase(_, secret), Some(cost)) if cost.is_sane() => {
            stretch(secret.clone(), salt, cost).await?
        }
        _ => return Err(wrong()),
    };
    Ok(root.derive(ALGORITHM, &salt, "keyring slot"))
}

/// Runs argon2id on a thread that may block: it takes a tenth of a second on purpose.
async fn stretch(secret: Secret, salt: [u8; SALT_BYTES], cost: Argon2Cost) -> Result<PoolKey> {
    let work = move || {
        let params = argon2::Params::new(
            cost.memory_kib,
            cost.pass_count,
            cost.lane_count,
            Some(KEY_BYTES),
        )?;
        let argon2 =
            argon2::Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, params);
        let mut key = Zeroizing::new([0u8; KEY_BYTES]);
        argon2.hash_password_into(secret.expose().as_bytes(), &salt, &mut key[..])?;
        Ok::<_, argon2::Error>(PoolKey::new(*key))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(key)) => Ok(key),
        Ok(Err(error)) => {
            Err(Error::new(ErrorKind::Invalid, format!("stretch the passphrase: {error}")))
        }
        Err(error) => Err(Error::with_source(ErrorKind::Io, "stretch the passphrase", error)),
    }
}

async fn open_slot(body: &RingBody, slot: &Slot, material: &Material) -> Result<Vec<DataKey>> {
    let wrong = || Error::new(ErrorKind::Corrupt, format!("key slot {} is damaged", slot.id));
    let nonce: [u8; 12] = from_hex(&slot.nonce).ok_or_else(wrong)?;
    let mut sealed = Zeroizing::new(vec_from_hex(&slot.sealed).ok_or_else(wrong)?);
    let key = wrapping_key(slot, material).await?;
    let plain = key.open_with(nonce, &associated(body, slot), &mut sealed)?;
    let entries = plain.chunks_exact(ENTRY_BYTES);
    if !entries.remainder().is_empty() || !(1..=DATA_KEY_COUNT_MAX).contains(&entries.len()) {
        return Err(wrong());
    }
    let keys: Option<Vec<DataKey>> = entries
        .map(|entry| {
            let key = PoolKey::new(array_at(entry, 4)?);
            Some(DataKey { id: u32_at(entry, 0)?, key })
        })
        .collect();
    let keys = keys.ok_or_else(wrong)?;
    if !keys.is_sorted_by(|a, b| a.id < b.id) {
        return Err(wrong());
    }
    Ok(keys)
}

async fn open_bytes(
    chain: Chain,
    number: u64,
    bytes: &[u8],
    material: &Material,
) -> Result<KeyRing> {
    let name = chain.name(number);
    let document = Document::parse(&name, bytes)?;
    let body: RingBody = document.body()?;
    if body.number != number {
        return Err(corrupt(&name, "it was written under another number"));
    }
    if body.slots.len() > SLOT_COUNT_MAX {
        return Err(corrupt(&name, "it has too many slots"));
    }
    let kind = material.kind();
    if !body.slots.iter().any(|slot| slot.kind == kind) {
        let mut kinds: Vec<String> = body.slots.iter().map(|slot| slot.kind.to_string()).collect();
        kinds.dedup();
        return Err(Error::new(
            ErrorKind::Denied,
            format!("the pool is not opened by a {kind}, but by: {}", kinds.join(", ")),
        ));
    }
    for slot in &body.slots {
        if slot.kind != kind {
            continue;
        }
        let Ok(data_keys) = open_slot(&body, slot, material).await else { continue };
        let newest = data_keys.last().ok_or_else(|| corrupt(&name, "it holds no key"))?;
        document.verify(&newest.key, PURPOSE)?;
        return Ok(KeyRing { chain, body, data_keys });
    }
    Err(Error::new(
        ErrorKind::Denied,
        format!(
            "wrong {kind}: it does not open the key ring of pool {}. Nothing was changed",
            body.pool
        ),
    ))
}

#[cfg(test)]
mod tests;
