//! Owns chains of numbered objects in the store, `PREFIX/<number, 20 digits>`, and the sealed documents in them. The
//! manifest and the key ring are such chains.
//!
//! Invariants:
//! - Objects are written only by create-if-absent and never overwritten. Only the highest number counts.
//! - A create counts only if a listing afterwards shows nothing higher: a paused writer may create a number whose
//!   successors were made and deleted meanwhile.
//! - The newest object of a chain is never deleted.
//! - An ambiguous answer is settled by reading back: every document holds a random nonce, so equal bytes are our own. A
//!   number is lost only once another document was read there, or a listing has shown a higher number: a store that
//!   says "exists" and shows no object is asked again.
//! - One listing that shows too little proves nothing. An object that is known to exist is requested by its name, and
//!   the listing is repeated.
//! - A document is one line of JSON and one line that seals it: a checksum, which tells damage from a wrong key, and a
//!   tag under the pool key, which tells damage from forgery.

use crate::store::{Reason, Store};
use async_recursion::async_recursion;
use block::env::random_bytes;
use block::hex::{from_hex, to_hex};
use block::seal::{Algorithm, PoolKey, SALT_BYTES};
use block::units::crc32c;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tiering::listing::list_all;

/// Bytes of the largest document. Chosen by hand: a key ring with every slot used is 4 KiB.
const DOCUMENT_BYTES_MAX: usize = 256 * 1024;
/// Attempts of a create whose outcome stays unknown, of a read that races with deletes, and of a search for an object
/// that is known to exist. Chosen by hand: three seconds with the pauses, plus the time of the requests.
const ATTEMPT_COUNT_MAX: u32 = 6;
/// Listings that must agree that a chain is empty, unless other objects of the pool show that they are right.
const EMPTY_LOOK_COUNT: u32 = 3;
/// Looks that must agree that the newest object of a chain is gone. Chosen by hand: 25 s with the pauses. A server is
/// rarely ill for longer, and nothing is lost meanwhile.
const GONE_LOOK_COUNT: u32 = 9;
/// Pause before the second attempt; it doubles each time.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });
/// Names of one chain that are held in memory. Chosen by hand: a chain has a handful, or a few thousand if old ones
/// could not be deleted for weeks.
const NUMBER_COUNT_MAX: u64 = 100_000;

/// The outcome of a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// The object is ours and the highest.
    Ours,
    /// Another writer has this number or a higher one.
    Lost,
}

/// One chain of numbered objects.
#[derive(Clone, Debug)]
pub struct Chain {
    store: Store,
    objects: Arc<dyn ObjectStore>,
    prefix: &'static str,
}

impl Chain {
    /// Makes the chain of the objects below `prefix`. Sends no request.
    pub fn new(store: &Store, prefix: &'static str) -> Chain {
        Chain { store: store.clone(), objects: store.control(), prefix }
    }

    /// Name of an object, as errors show it.
    pub fn name(&self, number: u64) -> String {
        Chain::name_in(self.prefix, number)
    }

    /// Like [`Chain::name`], in any chain.
    pub(crate) fn name_in(prefix: &str, number: u64) -> String {
        format!("{prefix}/{number:020}")
    }

    fn path(&self, number: u64) -> ObjectPath {
        ObjectPath::from(self.name(number))
    }

    /// All existing numbers, ascending. Other objects below the prefix are ignored.
    pub(crate) async fn numbers(&self) -> Result<Vec<u64>> {
        let prefix = ObjectPath::from(self.prefix);
        let listed = list_all(&self.objects, Some(&prefix), NUMBER_COUNT_MAX)
            .await
            .map_err(|error| self.store.explain(&format!("list {}", self.prefix), error))?;
        let mut numbers: Vec<u64> = listed
            .iter()
            .filter_map(|meta| meta.location.filename())
            .filter(|name| name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_digit()))
            .filter_map(|name| name.parse().ok())
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The highest number, or `None` for an empty chain. A chain counts as empty once a listing shows other folders of
    /// the pool but not this one, or once several listings agree.
    #[async_recursion]
    pub async fn newest_number(&self) -> Result<Option<u64>> {
        for look in 0..EMPTY_LOOK_COUNT {
            if look > 0 {
                pause(look - 1).await;
            }
            if let Some(number) = self.numbers().await?.last() {
                return Ok(Some(*number));
            }
            // A directory has no other server whose listing may differ.
            if self.store.local_dir().is_some() {
                break;
            }
            let folders = self.store.folders().await;
            if !folders.is_empty() && !folders.contains(self.prefix) {
                break;
            }
        }
        Ok(None)
    }

    /// The highest number of a chain in which `number` was made: that one or a higher one. `None` once it is gone and
    /// several looks agree that there is no higher one either.
    ///
    /// # Errors
    /// `Unavailable` if `number` can be read but listings do not show it, so that higher ones are unknown; those of the
    /// store.
    pub(crate) async fn newest_from(&self, number: u64) -> Result<Option<u64>> {
        Ok(self.numbers_with(number).await?.and_then(|numbers| numbers.last().copied()))
    }

    /// All numbers of a chain in which `number` was made; see [`Chain::newest_from`].
    async fn numbers_with(&self, number: u64) -> Result<Option<Vec<u64>>> {
        let mut is_there = false;
        for look in 0..GONE_LOOK_COUNT {
            if look > 0 {
                pause(look - 1).await;
            }
            let numbers = self.numbers().await?;
            if numbers.last().is_some_and(|highest| *highest >= number) {
                return Ok(Some(numbers));
            }
            is_there |= self.read(number).await?.is_some();
            // After half of the looks it is certain that the listing is wrong.
            if is_there && look + 1 >= ATTEMPT_COUNT_MAX {
                break;
            }
        }
        match is_there {
            true => Err(self.unlisted(number)),
            false => Ok(None),
        }
    }

    /// The error for an object of a running pool that is gone, with all that followed it.
    pub(crate) fn gone(&self, number: u64) -> Error {
        let what = format!(
            "object {} is gone: the store was rolled back or emptied under the running pool",
            self.name(number)
        );
        Error::new(ErrorKind::Corrupt, what)
    }

    /// The error for an object that exists but is missing from listings.
    pub fn unlisted(&self, number: u64) -> Error {
        let what = format!(
            "list {}/: the listing lacks {}, which is there. Listings of this store are wrong, so \
             spindle does not act on them; check the store, or the proxy in front of it",
            self.prefix,
            self.name(number)
        );
        Error::new(ErrorKind::Unavailable, what)
    }

    /// The highest object. If the newest object is deleted while it is read, it has a successor, which is read instead.
    #[async_recursion]
    pub async fn newest(&self) -> Result<Option<(u64, Bytes)>> {
        for attempt in 0..ATTEMPT_COUNT_MAX {
            let Some(number) = self.newest_number().await? else { return Ok(None) };
            if let Some(bytes) = self.read(number).await? {
                return Ok(Some((number, bytes)));
            }
            pause(attempt).await;
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            format!("read the newest of {}: listed objects are not there", self.prefix),
        ))
    }

    /// The body of the highest object, sealed under `key` for the chain's name, with its number.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` for one that does not parse or verify; those of [`Chain::newest`].
    pub async fn newest_body<T: DeserializeOwned>(
        &self,
        key: &PoolKey,
    ) -> Result<Option<(u64, T)>> {
        self.newest_body_with(key, 0).await
    }

    /// Like [`Chain::newest_body`], for a reader that knows these incompatible features of the chain's documents.
    ///
    /// # Errors
    /// Like [`Chain::newest_body`].
    pub async fn newest_body_with<T: DeserializeOwned>(
        &self,
        key: &PoolKey,
        known: u64,
    ) -> Result<Option<(u64, T)>> {
        let Some((number, bytes)) = self.newest().await? else { return Ok(None) };
        let name = self.name(number);
        let document = Document::parse_with(&name, &bytes, known)?;
        document.verify(key, self.prefix)?;
        Ok(Some((number, document.body()?)))
    }

    /// Waits before a read is repeated that has shown less than is known. Returns false after enough attempts.
    pub(crate) async fn pause_before_retry(&self, attempt: u32) -> bool {
        let is_left = attempt + 1 < ATTEMPT_COUNT_MAX;
        if is_left {
            pause(attempt).await;
        }
        is_left
    }

    /// One object, or `None` if it does not exist.
    #[async_recursion]
    pub async fn read(&self, number: u64) -> Result<Option<Bytes>> {
        let name = self.name(number);
        let got = match self.objects.get(&self.path(number)).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.store.explain(&format!("read {name}"), error)),
        };
        if got.meta.size > DOCUMENT_BYTES_MAX as u64 {
            return Err(corrupt(&name, "it is far too large"));
        }
        match got.bytes().await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.store.explain(&format!("read {name}"), error)),
        }
    }

    /// Like [`Chain::read`], for an object that exists.
    ///
    /// # Errors
    /// `Unavailable` if several looks do not find it.
    pub(crate) async fn read_back(&self, number: u64) -> Result<Bytes> {
        for attempt in 0..ATTEMPT_COUNT_MAX {
            if let Some(bytes) = self.read(number).await? {
                return Ok(bytes);
            }
            pause(attempt).await;
        }
        let what = format!("read back {}: the store has no such object", self.name(number));
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// Creates `number`. `bytes` must hold a nonce of their own, so that equal bytes mean our object.
    ///
    /// # Errors
    /// If the outcome could not be learned: the object may exist or come to exist.
    #[async_recursion]
    pub async fn create(&self, number: u64, bytes: &Bytes) -> Result<Created> {
        if !self.put_absent(number, bytes).await? {
            return Ok(Created::Lost);
        }
        for attempt in 0..ATTEMPT_COUNT_MAX {
            match self.numbers().await?.last() {
                Some(highest) if *highest == number => return Ok(Created::Ours),
                Some(highest) if *highest > number => {
                    // Successors exist, so ours is not the newest and may go.
                    self.delete(number).await?;
                    return Ok(Created::Lost);
                }
                // The object was just created: the listing is wrong, and proves nothing about higher ones.
                _ => pause(attempt).await,
            }
        }
        Err(self.unlisted(number).context(format!("create {}", self.name(number))))
    }

    /// Puts the object. Returns whether `number` holds `bytes` afterwards, put there by us.
    async fn put_absent(&self, number: u64, bytes: &Bytes) -> Result<bool> {
        let (name, path) = (self.name(number), self.path(number));
        let mut attempt = 0;
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let put = self.objects.put_opts(&path, bytes.clone().into(), options);
            let Err(error) = put.await else { return Ok(true) };
            let reason = Reason::of(&error);
            let failure = self.store.explain(&format!("create {name}"), error);
            if matches!(reason, Reason::Denied | Reason::NoCredentials | Reason::Unsupported) {
                return Err(failure);
            }
            match self.read(number).await {
                Ok(Some(found)) => return Ok(found == *bytes),
                // The store refuses it as existing but does not show it. If it was created and deleted meanwhile, it
                // has a successor. Otherwise the store refuses because another request is under way, perhaps an earlier
                // attempt of this one.
                Ok(None) if reason == Reason::Exists && self.has_above(number).await => {
                    return Ok(false);
                }
                Ok(None) if reason == Reason::Exists && attempt + 1 >= ATTEMPT_COUNT_MAX => {
                    let what = format!(
                        "create {name}: the store says that it exists, and shows no such object; try again"
                    );
                    return Err(Error::with_source(ErrorKind::Unavailable, what, failure));
                }
                Ok(None) | Err(_) if attempt + 1 >= ATTEMPT_COUNT_MAX => return Err(failure),
                Ok(None) | Err(_) => {}
            }
            pause(attempt).await;
            attempt += 1;
        }
    }

    /// Tells whether a listing shows a number above this one. A failed listing shows nothing.
    async fn has_above(&self, number: u64) -> bool {
        self.numbers().await.is_ok_and(|numbers| numbers.last().is_some_and(|last| *last > number))
    }

    /// Deletes every object below `number`, which must exist. None of them is in the store when this returns.
    ///
    /// # Errors
    /// `Unavailable` if listings do not show `number`, and so may not show the objects below it either; `Corrupt` if
    /// `number` is gone; those of the store.
    #[async_recursion]
    pub async fn delete_below(&self, number: u64) -> Result<()> {
        let Some(numbers) = self.numbers_with(number).await? else {
            return Err(corrupt(&self.name(number), "it is gone"));
        };
        for old in numbers.into_iter().filter(|old| *old < number) {
            self.delete(old).await?;
        }
        Ok(())
    }

    /// Deletes all but the newest `keep_count` objects, at least 1, as far as a listing shows them.
    #[async_recursion]
    pub async fn prune(&self, keep_count: usize) -> Result<()> {
        let numbers = self.numbers().await?;
        let old_count = numbers.len().saturating_sub(keep_count.max(1));
        for number in numbers.iter().take(old_count) {
            self.delete(*number).await?;
        }
        Ok(())
    }

    async fn delete(&self, number: u64) -> Result<()> {
        match self.objects.delete(&self.path(number)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.store.explain(&format!("delete {}", self.name(number)), error)),
        }
    }
}

async fn pause(attempt: u32) {
    tokio::time::sleep(ATTEMPT_PAUSE * 2u32.saturating_pow(attempt.min(8))).await;
}

/// Makes the error of an object that does not verify: `why` is a clause such as `its checksum is wrong`.
pub fn corrupt(name: &str, why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("object {name} is damaged: {why}"))
}

/// Version and feature bits of a document: every root of a format carries them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Format {
    /// A reader refuses a version above its own.
    pub version: u32,
    /// Bits that a reader may ignore.
    pub(crate) compatible: u64,
    /// Bits that a writer must know.
    pub(crate) read_only_compatible: u64,
    /// Bits that every reader must know.
    pub(crate) incompatible: u64,
}

impl Format {
    /// Version 1 without features.
    pub const CURRENT: Format =
        Format { version: 1, compatible: 0, read_only_compatible: 0, incompatible: 0 };

    /// Version 1 with features that every reader must know.
    #[must_use]
    pub const fn with_incompatible(incompatible: u64) -> Format {
        Format { incompatible, ..Format::CURRENT }
    }
}

/// The format of a document, without its other fields.
#[derive(Deserialize)]
struct FormatOnly {
    format: Format,
}

/// The second line of a document.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealLine {
    crc32c: String,
    salt: String,
    tag: String,
}

/// Returns the bytes of a document with `body`, sealed under `key`.
pub fn seal_document<T: Serialize>(key: &PoolKey, purpose: &str, body: &T) -> Result<Bytes> {
    seal_document_with(random_bytes(), key, purpose, body)
}

/// Like [`seal_document`]; `salt` must be random and used once.
pub fn seal_document_with<T: Serialize>(
    salt: [u8; SALT_BYTES],
    key: &PoolKey,
    purpose: &str,
    body: &T,
) -> Result<Bytes> {
    let mut text = serde_json::to_string(body).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, format!("encode {purpose}"), error)
    })?;
    let tag = key.derive(ALGORITHM, &salt, purpose).seal(0, text.as_bytes(), &mut []);
    let seal = SealLine {
        crc32c: format!("{:08x}", crc32c(text.as_bytes())),
        salt: to_hex(&salt),
        tag: to_hex(&tag),
    };
    let seal = serde_json::to_string(&seal).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, format!("encode {purpose}"), error)
    })?;
    text.push('\n');
    text.push_str(&seal);
    text.push('\n');
    Ok(Bytes::from(text))
}

/// The cipher of document seals and key slots. It is fixed, because the pool's choice is not known before they are
/// read.
pub const ALGORITHM: Algorithm = Algorithm::ChaCha20Poly1305;

/// A document with a valid checksum. Its contents are not trusted before [`Document::verify`].
#[derive(Debug)]
pub struct Document<'a> {
    name: &'a str,
    body: &'a str,
    salt: [u8; SALT_BYTES],
    tag: [u8; 16],
}

impl<'a> Document<'a> {
    /// Splits `bytes`, the contents of the object `name`, and verifies checksum and format.
    pub fn parse(name: &'a str, bytes: &'a [u8]) -> Result<Document<'a>> {
        Document::parse_with(name, bytes, 0)
    }

    /// Like [`Document::parse`], for a reader that knows these incompatible features.
    fn parse_with(name: &'a str, bytes: &'a [u8], known: u64) -> Result<Document<'a>> {
        let text = std::str::from_utf8(bytes).map_err(|_| corrupt(name, "it is not text"))?;
        let (body, rest) = text.split_once('\n').ok_or_else(|| corrupt(name, "it is cut short"))?;
        let seal = rest.strip_suffix('\n').ok_or_else(|| corrupt(name, "it is cut short"))?;
        let seal: SealLine =
            serde_json::from_str(seal).map_err(|_| corrupt(name, "its seal is unreadable"))?;
        let checksum = from_hex::<4>(&seal.crc32c).map(u32::from_be_bytes);
        if checksum != Some(crc32c(body.as_bytes())) {
            return Err(corrupt(name, "its checksum differs"));
        }
        let (Some(salt), Some(tag)) = (from_hex(&seal.salt), from_hex(&seal.tag)) else {
            return Err(corrupt(name, "its seal is unreadable"));
        };
        let FormatOnly { format } =
            serde_json::from_str(body).map_err(|_| corrupt(name, "it has no format version"))?;
        if format.version > Format::CURRENT.version
            || format.incompatible & !known != 0
            || format.read_only_compatible != 0
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "object {name} was written by a newer spindle (format {}, features {:#x}); \
                     this build reads format {}. Use the newer version",
                    format.version,
                    (format.incompatible & !known) | format.read_only_compatible,
                    Format::CURRENT.version
                ),
            ));
        }
        Ok(Document { name, body, salt, tag })
    }

    /// The contents, which may be unverified.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.body).map_err(|error| {
            Error::with_source(
                ErrorKind::Corrupt,
                format!("object {} is damaged: its fields are wrong", self.name),
                error,
            )
        })
    }

    /// Checks whether the document was sealed under `key` for `purpose`.
    pub fn verify(&self, key: &PoolKey, purpose: &str) -> Result<()> {
        let mut tag = self.tag;
        key.derive(ALGORITHM, &self.salt, purpose)
            .open(0, self.body.as_bytes(), &mut tag)
            .map(|_| ())
            .map_err(|_| corrupt(self.name, "it is not authentic (altered, or of another pool)"))
    }
}

#[cfg(test)]
mod ill_tests;
#[cfg(test)]
mod tests;
