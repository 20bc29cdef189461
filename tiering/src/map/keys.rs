//! Keys of the metadata database, and the sealing of its values.
//!
//! Invariants:
//! - A value is a list of sealed records. The merge operator only appends, so compaction needs no
//!   key, and a record is opened exactly as it was written.
//! - A record is sealed with its dedicated key as associated data: a value that was moved to another key
//!   does not open.
//! - A nonce is 8 random bytes for each [`Sealer`] plus a counter, and a sealer is used for one
//!   commit.
//! - Decoding never panics; a value that does not open is `Corrupt`, and the error names the key.
//!
//! Byte tables: docs/format-map.md. The meaning of the plaintext is left to other modules.

use super::layers::LayerId;
use crate::varint::{get_varint, put_varint};
use block::env::{Random, SystemRandom};
use block::seal::{Algorithm, PoolKey, SALT_BYTES, SealKey, TAG_BYTES};
use block::units::{array_at, u16_at, u32_at};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use parking_lot::RwLock;

/// Version of a sealed record: its first byte, and part of the associated data.
const RECORD_VERSION: u8 = 1;
const NONCE_BYTES: usize = 12;

const MAGIC: &[u8; 4] = b"SPMD";
/// Version of the metadata format: of the header, and of everything below it.
pub const FORMAT_VERSION: u16 = 1;
const HEADER_BYTES: usize = 4 + 2 + 1 + 1 + 3 * 4 + SALT_BYTES;
const AT_VERSION: usize = 4;
const AT_ALGORITHM: usize = 6; // then one zero byte
pub(super) const AT_READ_ONLY: usize = 12;
const AT_INCOMPATIBLE: usize = 16;
/// Incompatible feature: there are or were snapshots; pages may have copies.
const FEATURE_SNAPSHOTS: u32 = 1;
/// Incompatible feature: there are or were layers made from others.
const FEATURE_BASES: u32 = 2;
/// Incompatible feature: there are or were segments under keys of volumes.
const FEATURE_VOLUME_KEYS: u32 = 4;
/// Incompatible feature: deduplication is or was in use; pages may name frames that were written
/// for other blocks.
const FEATURE_DEDUP: u32 = 8;
/// Incompatible feature: there are or were segments in fragments.
const FEATURE_FRAGMENTS: u32 = 16;
/// Incompatible feature: segments move or moved between data stores and the object store, so one in fragments may be
/// an object, too.
const FEATURE_TIERS: u32 = 32;
const FEATURES_KNOWN: u32 = FEATURE_SNAPSHOTS
    | FEATURE_BASES
    | FEATURE_VOLUME_KEYS
    | FEATURE_DEDUP
    | FEATURE_FRAGMENTS
    | FEATURE_TIERS;
const AT_SALT: usize = 20;
const _: () = assert!(AT_SALT + SALT_BYTES == HEADER_BYTES);

/// Key of the header, the only value that is not sealed, because it holds the salt.
pub const HEADER_KEY: &[u8] = b"h";
/// Key of the root record.
pub const ROOT_KEY: &[u8] = b"r";

/// Key of the time that the pool was open; the last reads of segments are counted in it.
pub const OPEN_TIME_KEY: &[u8] = b"o";

/// First byte of each family of keys. The rest of a key is big-endian, so that scans run in order.
pub mod family {
    /// Volumes that are behind the others.
    pub const STALLED: u8 = b'a';
    /// Pages that name frames of a segment which were written for other blocks.
    pub const BACK_REFERENCE: u8 = b'b';
    /// Copies of map pages, for snapshots.
    pub const COPY: u8 = b'c';
    /// Results of deduplication for a volume.
    pub const FOUND: u8 = b'd';
    /// Fingerprints of the blocks of a segment.
    pub const FINGERPRINTS: u8 = b'f';
    /// Layers with removed snapshots.
    pub const PRUNE: u8 = b'g';
    /// Snapshot records.
    pub const SNAPSHOT: u8 = b'k';
    /// Layer records.
    pub const LAYER: u8 = b'l';
    /// Pages that keep counting replaced blocks.
    pub const KEPT: u8 = b'w';
    /// Live blocks of segments.
    pub const LIVE: u8 = b'n';
    /// Map pages.
    pub const PAGE: u8 = b'p';
    /// Segment records.
    pub const SEGMENT: u8 = b's';
    /// Times of the last reads of groups of segments.
    pub const READ_TIMES: u8 = b't';
    /// Volume records.
    pub const VOLUME: u8 = b'v';
    /// Range records.
    pub const RANGE: u8 = b'x';
}

/// Key of a layer record.
#[must_use]
pub fn layer_key(layer: LayerId) -> [u8; 9] {
    numbered(family::LAYER, layer.0)
}

/// Key of a segment record.
#[must_use]
pub fn segment_key(segment: u64) -> [u8; 9] {
    numbered(family::SEGMENT, segment)
}

/// Key of the live-block count of a segment.
#[must_use]
pub fn live_key(segment: u64) -> [u8; 9] {
    numbered(family::LIVE, segment)
}

/// Key of the times of the last reads of a group of segments.
#[must_use]
pub fn read_times_key(group: u64) -> [u8; 9] {
    numbered(family::READ_TIMES, group)
}

fn numbered(family: u8, number: u64) -> [u8; 9] {
    let mut key = [family; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// Key of the fingerprints of a segment.
#[must_use]
pub fn fingerprints_key(segment: u64) -> [u8; 9] {
    numbered(family::FINGERPRINTS, segment)
}

/// Key of a back-reference: the segment, and the layer and page that name it.
#[must_use]
pub fn back_reference_key(segment: u64, layer: LayerId, page: u32) -> [u8; 21] {
    let mut key = [family::BACK_REFERENCE; 21];
    key[1..9].copy_from_slice(&segment.to_be_bytes());
    key[9..17].copy_from_slice(&layer.0.to_be_bytes());
    key[17..].copy_from_slice(&page.to_be_bytes());
    key
}

/// Key of the deduplication results of a volume.
#[must_use]
pub fn found_key(volume: VolumeId) -> [u8; 5] {
    let mut key = [family::FOUND; 5];
    key[1..].copy_from_slice(&volume.0.to_be_bytes());
    key
}

/// Key of a volume record.
#[must_use]
pub fn volume_key(volume: VolumeId) -> [u8; 5] {
    let mut key = [family::VOLUME; 5];
    key[1..].copy_from_slice(&volume.0.to_be_bytes());
    key
}

/// Key of the record of a volume that is behind the others.
#[must_use]
pub fn stalled_key(volume: VolumeId) -> [u8; 5] {
    let mut key = [family::STALLED; 5];
    key[1..].copy_from_slice(&volume.0.to_be_bytes());
    key
}

/// Key of a map page.
#[must_use]
pub fn page_key(layer: LayerId, page: u32) -> [u8; 13] {
    let mut key = [family::PAGE; 13];
    key[1..9].copy_from_slice(&layer.0.to_be_bytes());
    key[9..].copy_from_slice(&page.to_be_bytes());
    key
}

/// Key of a range record: layer, LSN of its window, ordinal within the window.
#[must_use]
pub fn range_key(layer: LayerId, lsn: Lsn, ordinal: u32) -> [u8; 21] {
    let mut key = [family::RANGE; 21];
    key[1..9].copy_from_slice(&layer.0.to_be_bytes());
    key[9..17].copy_from_slice(&lsn.0.to_be_bytes());
    key[17..].copy_from_slice(&ordinal.to_be_bytes());
    key
}

/// Key of a copy of a map page: layer, page, LSN of the newest snapshot that shows it.
#[must_use]
pub fn copy_key(layer: LayerId, page: u32, until: Lsn) -> [u8; 21] {
    let mut key = [family::COPY; 21];
    key[1..9].copy_from_slice(&layer.0.to_be_bytes());
    key[9..13].copy_from_slice(&page.to_be_bytes());
    key[13..].copy_from_slice(&until.0.to_be_bytes());
    key
}

/// Key of the record that says that a page keeps counting replaced blocks.
#[must_use]
pub fn kept_key(layer: LayerId, page: u32) -> [u8; 13] {
    let mut key = page_key(layer, page);
    key[0] = family::KEPT;
    key
}

/// Key of a snapshot record: layer, LSN.
#[must_use]
pub fn snapshot_key(layer: LayerId, lsn: Lsn) -> [u8; 17] {
    let mut key = [family::SNAPSHOT; 17];
    key[1..9].copy_from_slice(&layer.0.to_be_bytes());
    key[9..].copy_from_slice(&lsn.0.to_be_bytes());
    key
}

/// Key of a prune record.
#[must_use]
pub fn prune_key(layer: LayerId) -> [u8; 9] {
    numbered(family::PRUNE, layer.0)
}

/// The number in the key of a layer, a segment, its live blocks, or a group of segments.
#[must_use]
pub fn number_of(key: &[u8]) -> Option<u64> {
    if key.len() == 9 { array_at(key, 1).map(u64::from_be_bytes) } else { None }
}

/// The volume in a key that holds nothing else.
#[must_use]
pub fn volume_of(key: &[u8]) -> Option<VolumeId> {
    if key.len() == 5 { array_at(key, 1).map(|id| VolumeId(u32::from_be_bytes(id))) } else { None }
}

/// Layer and page number in a page key.
#[must_use]
pub fn page_of(key: &[u8]) -> Option<(LayerId, u32)> {
    if key.len() != 13 {
        return None;
    }
    let layer = array_at(key, 1).map(u64::from_be_bytes)?;
    Some((LayerId(layer), array_at(key, 9).map(u32::from_be_bytes)?))
}

/// Layer, LSN and ordinal in a range key.
#[must_use]
pub fn range_of(key: &[u8]) -> Option<(LayerId, Lsn, u32)> {
    if key.len() != 21 {
        return None;
    }
    let layer = array_at(key, 1).map(u64::from_be_bytes)?;
    let lsn = array_at(key, 9).map(u64::from_be_bytes)?;
    Some((LayerId(layer), Lsn(lsn), array_at(key, 17).map(u32::from_be_bytes)?))
}

/// Layer, page and LSN in the key of a copy.
#[must_use]
pub fn copy_of(key: &[u8]) -> Option<(LayerId, u32, Lsn)> {
    if key.len() != 21 {
        return None;
    }
    let layer = array_at(key, 1).map(u64::from_be_bytes)?;
    let page = array_at(key, 9).map(u32::from_be_bytes)?;
    Some((LayerId(layer), page, Lsn(array_at(key, 13).map(u64::from_be_bytes)?)))
}

/// Layer and LSN in the key of a snapshot.
#[must_use]
pub fn snapshot_of(key: &[u8]) -> Option<(LayerId, Lsn)> {
    if key.len() != 17 {
        return None;
    }
    let layer = array_at(key, 1).map(u64::from_be_bytes)?;
    Some((LayerId(layer), Lsn(array_at(key, 9).map(u64::from_be_bytes)?)))
}

/// Segment, layer and page in the key of a back-reference.
#[must_use]
pub fn back_reference_of(key: &[u8]) -> Option<(u64, LayerId, u32)> {
    if key.len() != 21 || key.first() != Some(&family::BACK_REFERENCE) {
        return None;
    }
    let segment = array_at(key, 1).map(u64::from_be_bytes)?;
    let layer = array_at(key, 9).map(u64::from_be_bytes)?;
    Some((segment, LayerId(layer), array_at(key, 17).map(u32::from_be_bytes)?))
}

/// A key in words, for example "page 42 of layer 7".
#[must_use]
pub fn name_of(key: &[u8]) -> String {
    if let Some((layer, page)) = page_of(key) {
        return format!("page {page} of layer {layer}");
    }
    if key.first() == Some(&family::COPY)
        && let Some((layer, page, until)) = copy_of(key)
    {
        return format!("copy {until} of page {page} of layer {layer}");
    }
    if let Some((segment, layer, page)) = back_reference_of(key) {
        return format!("back-reference from segment {segment} to page {page} of layer {layer}");
    }
    if let Some((layer, lsn)) = snapshot_of(key) {
        return format!("snapshot {lsn} of layer {layer}");
    }
    if let Some((layer, lsn, ordinal)) = range_of(key) {
        return format!("range {lsn}.{ordinal} of layer {layer}");
    }
    if let Some(volume) = volume_of(key) {
        if key.first() == Some(&family::STALLED) {
            return format!("spill files of volume {volume}");
        }
        if key.first() == Some(&family::FOUND) {
            return format!("what deduplication has found for volume {volume}");
        }
        return format!("record of volume {volume}");
    }
    let kind = match key.first() {
        Some(b'h') => "metadata header",
        Some(b'r') => "metadata root",
        Some(b'o') => "time that the pool was open",
        Some(&family::LAYER) => "layer",
        Some(&family::PRUNE) => "removed snapshots of layer",
        Some(&family::SEGMENT) => "record of segment",
        Some(&family::LIVE) => "live blocks of segment",
        Some(&family::READ_TIMES) => "last reads of group of segments",
        Some(&family::FINGERPRINTS) => "fingerprints of segment",
        _ => "metadata key",
    };
    match number_of(key) {
        Some(number) => format!("{kind} {number}"),
        None if key.len() == 1 => kind.to_owned(),
        None => format!("{kind} {key:02x?}"),
    }
}

/// A `Corrupt` error that names the key and the problem with its value.
#[must_use]
pub fn corrupt(key: &[u8], what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("read metadata, {}: {what}", name_of(key)))
}

/// The plain header: format, algorithm, feature bits and the salt of the metadata key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; HEADER_BYTES],
    algorithm: Algorithm,
}

impl Header {
    /// A header with a fresh salt.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Header {
        let mut salt = [0; SALT_BYTES];
        SystemRandom.fill(&mut salt);
        Header::with_salt(algorithm, salt)
    }

    pub(super) fn with_salt(algorithm: Algorithm, salt: [u8; SALT_BYTES]) -> Header {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[AT_VERSION..AT_ALGORITHM].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[AT_ALGORITHM] = algorithm as u8;
        bytes[AT_SALT..].copy_from_slice(&salt);
        Header { bytes, algorithm }
    }

    /// The stored bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// `Corrupt` if the bytes are not a header, `Unsupported` if a later version wrote it.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let bytes: [u8; HEADER_BYTES] =
            bytes.try_into().map_err(|_| corrupt(HEADER_KEY, "wrong length"))?;
        if !bytes.starts_with(MAGIC) {
            return Err(corrupt(HEADER_KEY, "not the metadata of a pool"));
        }
        let version = u16_at(&bytes, AT_VERSION).unwrap_or(0);
        let incompatible = u32_at(&bytes, AT_INCOMPATIBLE).unwrap_or(0);
        let algorithm = Algorithm::from_u8(bytes[AT_ALGORITHM]);
        match algorithm {
            Some(algorithm) if version == FORMAT_VERSION && incompatible & !FEATURES_KNOWN == 0 => {
                Ok(Header { bytes, algorithm })
            }
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "open metadata: written by a later version (format {version}, features {incompatible:#x})"
                ),
            )),
        }
    }

    /// The header of metadata that has snapshots.
    #[must_use]
    pub fn with_snapshots(&self) -> Header {
        self.with_feature(FEATURE_SNAPSHOTS)
    }

    /// The header of metadata that has layers made from others.
    #[must_use]
    pub fn with_bases(&self) -> Header {
        self.with_feature(FEATURE_BASES)
    }

    /// The header of metadata that has segments under keys of volumes.
    #[must_use]
    pub fn with_volume_keys(&self) -> Header {
        self.with_feature(FEATURE_VOLUME_KEYS)
    }

    /// Whether there are or were segments under keys of volumes.
    #[must_use]
    pub fn has_volume_keys(&self) -> bool {
        self.features() & FEATURE_VOLUME_KEYS != 0
    }

    /// The header of metadata for which deduplication was used.
    #[must_use]
    pub fn with_dedup(&self) -> Header {
        self.with_feature(FEATURE_DEDUP)
    }

    /// Whether deduplication is or was in use.
    #[must_use]
    pub fn has_dedup(&self) -> bool {
        self.features() & FEATURE_DEDUP != 0
    }

    /// The header of metadata that has segments in fragments.
    #[must_use]
    pub fn with_fragments(&self) -> Header {
        self.with_feature(FEATURE_FRAGMENTS)
    }

    /// Whether there are or were segments in fragments.
    #[must_use]
    pub fn has_fragments(&self) -> bool {
        self.features() & FEATURE_FRAGMENTS != 0
    }

    /// The header of metadata whose segments move between data stores and the object store.
    #[must_use]
    pub fn with_tiers(&self) -> Header {
        self.with_feature(FEATURE_TIERS)
    }

    /// Whether segments move or moved between data stores and the object store.
    #[must_use]
    pub fn has_tiers(&self) -> bool {
        self.features() & FEATURE_TIERS != 0
    }

    /// Whether there are or were layers made from others.
    #[must_use]
    pub fn has_bases(&self) -> bool {
        self.features() & FEATURE_BASES != 0
    }

    fn with_feature(&self, feature: u32) -> Header {
        let mut bytes = self.bytes;
        let features = self.features() | feature;
        bytes[AT_INCOMPATIBLE..AT_SALT].copy_from_slice(&features.to_le_bytes());
        Header { bytes, ..*self }
    }

    /// Whether there are or were snapshots.
    #[must_use]
    pub fn has_snapshots(&self) -> bool {
        self.features() & FEATURE_SNAPSHOTS != 0
    }

    fn features(&self) -> u32 {
        u32_at(&self.bytes, AT_INCOMPATIBLE).unwrap_or_default()
    }

    /// Checks that this version may change the metadata.
    ///
    /// # Errors
    /// `Unsupported` if a later version uses features that only readers may ignore.
    pub fn check_writable(&self) -> Result<()> {
        match u32_at(&self.bytes, AT_READ_ONLY) {
            Some(0) => Ok(()),
            features => {
                let features = features.unwrap_or_default();
                let what = format!(
                    "open metadata for writing: a later version wrote it (read-only features \
                     {features:#x})"
                );
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }

    /// The metadata key of the pool.
    #[must_use]
    pub fn key(&self, pool_key: &PoolKey) -> SealKey {
        pool_key.derive(self.algorithm, &self.bytes[AT_SALT..], "metadata")
    }
}

/// Opens sealed records. The header is part of the root record's associated data, so it cannot be
/// altered undetected either.
#[derive(Debug)]
pub struct Opener {
    key: SealKey,
    header: RwLock<Header>,
}

impl Opener {
    /// Creates an opener for the metadata that `header` belongs to.
    #[must_use]
    pub fn new(header: Header, pool_key: &PoolKey) -> Opener {
        Opener { key: header.key(pool_key), header: RwLock::new(header) }
    }

    /// Whether `header` belongs to the same metadata; its features may differ.
    #[must_use]
    pub fn is_for(&self, header: &Header) -> bool {
        let plain = |header: &Header| {
            let mut bytes = header.bytes;
            bytes[AT_INCOMPATIBLE..AT_SALT].fill(0);
            bytes
        };
        plain(&self.header()) == plain(header)
    }

    /// The current header.
    #[must_use]
    pub fn header(&self) -> Header {
        *self.header.read()
    }

    /// Records that the database now has this header, for which [`Opener::is_for`] must hold.
    pub fn set_header(&self, header: Header) {
        *self.header.write() = header;
    }

    /// Appends the associated data of `key` to `out`.
    fn associated(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.push(RECORD_VERSION);
        out.extend_from_slice(key);
        if key == ROOT_KEY {
            out.extend_from_slice(&self.header.read().bytes);
        }
    }

    /// Opens every record of a value, oldest first, and passes its plaintext to `each`.
    ///
    /// # Errors
    /// `Corrupt`, naming the key; errors of `each`.
    pub fn open_all(
        &self,
        key: &[u8],
        value: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut associated = Vec::with_capacity(64);
        self.associated(key, &mut associated);
        let mut buffer = Vec::new();
        let mut rest = value;
        while !rest.is_empty() {
            let (nonce, sealed, after) = split(rest).map_err(|what| corrupt(key, what))?;
            buffer.clear();
            buffer.extend_from_slice(sealed);
            let plain = self.key.open_with(nonce, &associated, &mut buffer).map_err(|_| {
                corrupt(key, "authentication failed: altered, or another pool's key")
            })?;
            each(plain)?;
            rest = after;
        }
        Ok(())
    }

    /// Opens a value that consists of one record.
    ///
    /// # Errors
    /// `Corrupt`, naming the key.
    pub fn open_one(&self, key: &[u8], value: &[u8]) -> Result<Vec<u8>> {
        let mut plain = None;
        self.open_all(key, value, |bytes| {
            if plain.replace(bytes.to_vec()).is_some() {
                return Err(corrupt(key, "more than one record"));
            }
            Ok(())
        })?;
        plain.ok_or_else(|| corrupt(key, "no record"))
    }

    /// Creates the sealer of one commit, with its own nonces.
    #[must_use]
    pub fn sealer(&self) -> Sealer<'_> {
        let mut random = [0; 8];
        SystemRandom.fill(&mut random);
        self.sealer_with(random)
    }

    /// Creates a sealer. `random` must be different for each sealer of a header.
    pub(super) fn sealer_with(&self, random: [u8; 8]) -> Sealer<'_> {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..8].copy_from_slice(&random);
        Sealer { opener: self, nonce, counter: 0, associated: Vec::with_capacity(64) }
    }
}

type Parts<'a> = ([u8; NONCE_BYTES], &'a [u8], &'a [u8]);

fn split(record: &[u8]) -> Result<Parts<'_>, &'static str> {
    let (version, rest) = record.split_first().ok_or("truncated record")?;
    if *version != RECORD_VERSION {
        return Err("record of an unknown version");
    }
    let (length, taken) = get_varint(rest).ok_or("truncated record")?;
    let nonce = array_at(rest, taken).ok_or("truncated record")?;
    let sealed_at = taken + NONCE_BYTES;
    let length = usize::try_from(length).map_err(|_| "record too long")?;
    let end = sealed_at.checked_add(length).ok_or("record too long")?;
    let sealed = rest.get(sealed_at..end).ok_or("truncated record")?;
    if sealed.len() < TAG_BYTES {
        return Err("record too short");
    }
    Ok((nonce, sealed, rest.get(end..).unwrap_or_default()))
}

/// Seals the records of one commit.
#[derive(Debug)]
pub struct Sealer<'a> {
    opener: &'a Opener,
    nonce: [u8; NONCE_BYTES],
    counter: u32,
    associated: Vec<u8>,
}

impl Sealer<'_> {
    /// Seals `plain` for `key`.
    #[must_use]
    pub fn seal(&mut self, key: &[u8], plain: &[u8]) -> Vec<u8> {
        self.opener.associated(key, &mut self.associated);
        self.seal_bound(plain)
    }

    /// Seals the root record under another header.
    #[must_use]
    pub fn seal_root(&mut self, header: &Header, plain: &[u8]) -> Vec<u8> {
        self.associated.clear();
        self.associated.push(RECORD_VERSION);
        self.associated.extend_from_slice(ROOT_KEY);
        self.associated.extend_from_slice(&header.bytes);
        self.seal_bound(plain)
    }

    /// Seals `plain` with the data in `associated`.
    fn seal_bound(&mut self, plain: &[u8]) -> Vec<u8> {
        self.counter = self.counter.checked_add(1).expect("a commit has fewer than 2^32 records");
        self.nonce[8..].copy_from_slice(&self.counter.to_le_bytes());
        let mut record = Vec::with_capacity(1 + 5 + NONCE_BYTES + plain.len() + TAG_BYTES);
        record.push(RECORD_VERSION);
        put_varint(&mut record, (plain.len() + TAG_BYTES) as u64);
        record.extend_from_slice(&self.nonce);
        let at = record.len();
        record.extend_from_slice(plain);
        let tag = self.opener.key.seal_with(self.nonce, &self.associated, &mut record[at..]);
        record.extend_from_slice(&tag);
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opener() -> Opener {
        Opener::new(Header::new(Algorithm::default()), &PoolKey::new([9; 32]))
    }

    #[test]
    fn records_open_in_order_and_only_under_their_key() {
        let opener = opener();
        let mut sealer = opener.sealer();
        let key = page_key(LayerId(7), 42);
        let mut value = sealer.seal(&key, b"first");
        value.extend(sealer.seal(&key, b"second"));
        let mut plain = Vec::new();
        opener
            .open_all(&key, &value, |bytes| {
                plain.push(bytes.to_vec());
                Ok(())
            })
            .unwrap();
        assert_eq!(plain, [b"first".to_vec(), b"second".to_vec()]);

        let other = page_key(LayerId(7), 43);
        let error = opener.open_all(&other, &value, |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("page 43 of layer 7"), "{error}");
        assert!(opener.open_one(&key, &value).is_err());
    }

    #[test]
    fn a_flipped_or_missing_byte_is_corrupt() {
        let opener = opener();
        let value = opener.sealer().seal(ROOT_KEY, b"root record");
        assert_eq!(opener.open_one(ROOT_KEY, &value).unwrap(), b"root record");
        for at in 0..value.len() {
            let mut flipped = value.clone();
            flipped[at] ^= 1;
            assert_eq!(opener.open_one(ROOT_KEY, &flipped).unwrap_err().kind(), ErrorKind::Corrupt);
            assert_eq!(
                opener.open_one(ROOT_KEY, &value[..at]).unwrap_err().kind(),
                ErrorKind::Corrupt
            );
        }
    }

    #[test]
    fn the_header_is_bound_to_the_root() {
        let pool_key = PoolKey::new([9; 32]);
        let header = Header::new(Algorithm::Aes256Gcm);
        let value = Opener::new(header, &pool_key).sealer().seal(ROOT_KEY, b"root");
        let decoded = Header::decode(header.bytes()).unwrap();
        assert_eq!(decoded, header);
        assert!(Opener::new(decoded, &pool_key).open_one(ROOT_KEY, &value).is_ok());
        let mut altered = header;
        altered.bytes[8] = 1; // a compatible feature bit
        assert!(Opener::new(altered, &pool_key).open_one(ROOT_KEY, &value).is_err());
        let mut later = header.bytes;
        later[AT_INCOMPATIBLE] = 64;
        assert_eq!(Header::decode(&later).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(Header::decode(&later[1..]).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn keys_sort_and_parse_back() {
        assert!(page_key(LayerId(1), u32::MAX) < page_key(LayerId(2), 0));
        assert_eq!(page_of(&page_key(LayerId(3), 9)), Some((LayerId(3), 9)));
        assert_eq!(range_of(&range_key(LayerId(3), Lsn(8), 2)), Some((LayerId(3), Lsn(8), 2)));
        assert_eq!(volume_of(&volume_key(VolumeId(5))), Some(VolumeId(5)));
        assert_eq!(number_of(&segment_key(77)), Some(77));
        assert_eq!(name_of(&live_key(4)), "live blocks of segment 4");
        assert_eq!(name_of(ROOT_KEY), "metadata root");
    }
}
