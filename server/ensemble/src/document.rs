//! The document of a member on disk: its identity, its promise, and what its log proves. The bytes are
//! described in docs/format-log.md, "Member".
//!
//! Invariants:
//! - It is locked before it is read, until it is dropped, so that nobody stores an older version over a
//!   newer one.
//! - It is replaced whole and synced; a crash leaves the old or the new version. Only a failure of the
//!   log is written over it in place if it cannot be replaced, which takes no space and no change of a
//!   directory: all bytes lie in one sector.
//! - Damage is an error and no empty document: the promise in it may bind the member.

use crate::seeded_bugs::seeded_bugs;
use block::durable_file::write_durably;
use block::units::{array_at, crc32c, u16_at, u32_at, u64_at};
use block::{Epoch, Error, ErrorKind, Result};
use replication::{Document, LEASE_NS_MAX, MemberId, Proof};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Name of the lock, in the directory of the log. The file stays, empty.
const LOCK: &str = "member.lock";
/// Attempts to take the lock, and the pause between them: a predecessor may just be ending, and a
/// process between fork and exec holds the locks of its parent. Chosen by hand.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
/// Name of the file, in the directory of the log.
pub(crate) const FILE: &str = "member.state";
/// Bytes of the file.
pub(crate) const BYTES: usize = 112;
/// Format version that this program writes.
const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"SPDLMEMB";
const AT_VERSION: usize = 8; //   u16
const AT_PROOF: usize = 10; //    u8: 0 nothing, 1 synced, 2 all; then 5 zero bytes
const AT_POOL: usize = 16; //     [u8; 16]
const AT_MEMBER: usize = 32; //   [u8; 16]
const AT_CACHE: usize = 48; //    [u8; 16]
const AT_RUN: usize = 64; //      u64
const AT_PROMISED: usize = 72; // u64
const AT_SYNCED: usize = 80; //   u64
const AT_LEASE: usize = 88; //    u64, nanoseconds; then 12 zero bytes
const AT_CRC: usize = 108; //     u32, CRC-32C of bytes 0..108
const _: () = assert!(AT_CRC + 4 == BYTES && BYTES <= 512);

/// The contents of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) pool: Uuid,
    pub(crate) member: MemberId,
    pub(crate) document: Document,
}

/// The reason why bytes were not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DocumentError {
    /// Not such a document, or a damaged one.
    Damaged,
    /// A later program wrote it.
    Version(u16),
}

pub(crate) fn encode(stored: &Stored) -> [u8; BYTES] {
    let Stored { pool, member, document } = stored;
    let mut bytes = [0; BYTES];
    let mut put = |at: usize, value: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + value.len()) {
            place.copy_from_slice(value);
        }
    };
    let proof = match document.proof {
        Proof::Nothing => 0,
        Proof::Synced => 1,
        Proof::All => 2,
    };
    put(0, MAGIC);
    put(AT_VERSION, &VERSION.to_le_bytes());
    put(AT_PROOF, &[proof]);
    put(AT_POOL, pool.as_bytes());
    put(AT_MEMBER, member.as_bytes());
    put(AT_CACHE, document.page_cache.as_bytes());
    put(AT_RUN, &document.run.to_le_bytes());
    put(AT_PROMISED, &document.promised.0.to_le_bytes());
    put(AT_SYNCED, &document.synced.to_le_bytes());
    put(AT_LEASE, &document.lease.to_le_bytes());
    let crc = crc32c(&bytes[..AT_CRC]);
    bytes[AT_CRC..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

pub(crate) fn decode(bytes: &[u8]) -> std::result::Result<Stored, DocumentError> {
    decode_known(bytes).ok_or(DocumentError::Damaged)?
}

fn decode_known(bytes: &[u8]) -> Option<std::result::Result<Stored, DocumentError>> {
    let is_one = bytes.len() == BYTES
        && bytes.starts_with(MAGIC)
        && u32_at(bytes, AT_CRC) == bytes.get(..AT_CRC).map(crc32c);
    if !is_one {
        return None;
    }
    let version = u16_at(bytes, AT_VERSION)?;
    if version != VERSION {
        return Some(Err(DocumentError::Version(version)));
    }
    let uuid = |at| array_at::<16>(bytes, at).map(Uuid::from_bytes);
    let proof = match *bytes.get(AT_PROOF)? {
        0 => Proof::Nothing,
        1 => Proof::Synced,
        2 => Proof::All,
        _ => return None,
    };
    let document = Document {
        page_cache: uuid(AT_CACHE)?,
        run: u64_at(bytes, AT_RUN)?,
        promised: Epoch(u64_at(bytes, AT_PROMISED)?),
        proof,
        synced: u64_at(bytes, AT_SYNCED)?,
        lease: u64_at(bytes, AT_LEASE)?,
    };
    let is_zero = |mut part: std::ops::Range<usize>| part.all(|at| bytes.get(at) == Some(&0));
    let is_sane = is_zero(AT_PROOF + 1..AT_POOL)
        && is_zero(AT_LEASE + 8..AT_CRC)
        && document.lease <= LEASE_NS_MAX;
    let stored = Stored { pool: uuid(AT_POOL)?, member: uuid(AT_MEMBER)?, document };
    is_sane.then_some(Ok(stored))
}

/// Reads the document in `dir`, of which a member may run; `None` if there is none.
///
/// # Errors
/// `Invalid` for a member of another pool; `Corrupt`, `Unsupported`, `Io`.
pub(crate) fn find(dir: &Path, pool: Uuid) -> Result<Option<Stored>> {
    let path = dir.join(FILE);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let what = format!("read {}", path.display());
            return Err(Error::with_source(ErrorKind::Io, what, error));
        }
    };
    let refuse = |kind, why: &str| {
        Err(Error::new(kind, format!("open the member of {}: {why}", path.display())))
    };
    match decode(&bytes) {
        Ok(stored) if stored.pool == pool => Ok(Some(stored)),
        Ok(stored) => {
            let why = format!("it belongs to pool {}, and not to pool {pool}", stored.pool);
            refuse(ErrorKind::Invalid, &why)
        }
        Err(DocumentError::Version(version)) => {
            let why = format!("a later program wrote it, in format version {version}");
            refuse(ErrorKind::Unsupported, &why)
        }
        Err(DocumentError::Damaged) => refuse(
            ErrorKind::Corrupt,
            "it is damaged, and with it the member's promise. Nothing was changed. Keep this directory, and \
             replace the member by one in another directory",
        ),
    }
}

/// Takes the lock of the member in `dir`.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file =
        open.map_err(|e| Error::with_source(ErrorKind::Io, format!("open {}", path.display()), e))?;
    for _ in 0..LOCK_TRIES {
        if file.try_lock().is_ok() || seeded_bugs().member_unlocked {
            return Ok(file);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    let what = format!("lock {}: the member of this directory runs already", path.display());
    Err(Error::new(ErrorKind::Busy, what))
}

/// The file of one member. One thread or process has it at a time.
#[derive(Debug)]
pub(crate) struct DocumentFile {
    path: PathBuf,
    _lock: File,
    pub(crate) stored: Stored,
}

impl DocumentFile {
    /// Makes the document of a member with an empty log in `dir`, the directory of the log.
    ///
    /// # Errors
    /// `Busy` if the directory has a member already; `Io`.
    pub(crate) fn create(dir: &Path, pool: Uuid, member: MemberId) -> Result<DocumentFile> {
        let path = dir.join(FILE);
        let lock = lock(dir)?;
        if path.exists() {
            let what = format!("make a member of the write log: {} exists", path.display());
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let (page_cache, promised, proof) = (Uuid::nil(), Epoch(0), Proof::All);
        let document = Document { page_cache, run: 0, promised, proof, synced: 0, lease: 0 };
        let mut file =
            DocumentFile { path, _lock: lock, stored: Stored { pool, member, document } };
        file.store(document)?;
        Ok(file)
    }

    /// Locks and reads the document in `dir`; `None` if there is none. Blocks for half a second if a
    /// member runs.
    ///
    /// # Errors
    /// `Busy` if a member runs; those of [`find`].
    pub(crate) fn open(dir: &Path, pool: Uuid) -> Result<Option<DocumentFile>> {
        let lock = lock(dir)?;
        let found = find(dir, pool)?;
        Ok(found.map(|stored| DocumentFile { path: dir.join(FILE), _lock: lock, stored }))
    }

    /// Replaces the document. Blocks until it is on stable storage.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn store(&mut self, document: Document) -> Result<()> {
        let stored = Stored { document, ..self.stored };
        write_durably(&self.path, &encode(&stored), 0o600)?;
        self.stored = stored;
        Ok(())
    }

    /// Stores the document of a member whose disk has failed: in place if the file cannot be replaced,
    /// as on a full disk.
    ///
    /// # Errors
    /// `Io`: neither was possible.
    pub(crate) fn store_failure(&mut self, document: Document) -> Result<()> {
        let Err(error) = self.store(document) else { return Ok(()) };
        let stored = Stored { document, ..self.stored };
        let write = || {
            let file = OpenOptions::new().write(true).open(&self.path)?;
            file.write_all_at(&encode(&stored), 0)?;
            file.sync_all()
        };
        write().map_err(|_: std::io::Error| error)?;
        self.stored = stored;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> Stored {
        Stored {
            pool: Uuid::from_bytes(*b"pool-pool-pool-p"),
            member: Uuid::from_bytes(*b"member-member-me"),
            document: Document {
                page_cache: Uuid::from_bytes(*b"cache-cache-cach"),
                run: 3,
                promised: Epoch(7),
                proof: Proof::Synced,
                synced: 1234,
                lease: 1_000_000_000,
            },
        }
    }

    #[test]
    fn golden_bytes_of_the_document_of_version_1() {
        let text = include_str!("../testdata/member-v1.hex");
        let hex: String = text.lines().filter_map(|line| line.split('#').next()).collect();
        let digits: Vec<u32> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
        let golden: Vec<u8> =
            digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect();
        let bytes = encode(&stored());
        assert_eq!(bytes[..], golden[..]);
        assert_eq!(decode(&bytes), Ok(stored()));
        for bit in 0..BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped).is_err(), "bit {bit}");
        }
        for len in 0..BYTES {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn failure_is_stored_without_a_change_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let Stored { pool, member, document } = stored();
        let mut file = DocumentFile::create(dir.path(), pool, member).unwrap();
        // In the way of a replacement.
        std::fs::create_dir_all(dir.path().join("member.tmp/x")).unwrap();
        assert_eq!(file.store(document).unwrap_err().kind(), ErrorKind::Io);
        file.store_failure(document).unwrap();
        let found = find(dir.path(), pool).unwrap();
        assert_eq!(found, Some(stored()));
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        assert_eq!(file.store_failure(document).unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn damaged_or_foreign_document_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let Stored { pool, member, document } = stored();
        assert!(DocumentFile::open(dir.path(), pool).unwrap().is_none());
        let mut file = DocumentFile::create(dir.path(), pool, member).unwrap();
        file.store(document).unwrap();
        let busy = DocumentFile::open(dir.path(), pool).unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Busy);
        drop(file);
        assert!(DocumentFile::create(dir.path(), pool, member).is_err());
        let found = DocumentFile::open(dir.path(), pool).unwrap().unwrap();
        assert_eq!(found.stored, stored());
        drop(found);
        let kind = |pool| DocumentFile::open(dir.path(), pool).unwrap_err().kind();
        assert_eq!(kind(Uuid::from_u128(1)), ErrorKind::Invalid);
        let path = dir.path().join(FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[70] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(kind(pool), ErrorKind::Corrupt);
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}
