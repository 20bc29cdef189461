//! Reading the entries of a log that is not open: one that was set aside, or that another machine left.
//!
//! Invariants:
//! - Nothing is locked or changed.
//! - Entries come in log order, each as it was appended, and none before the batch that holds it was verified
//!   and authenticated.

use crate::format::batch;
use crate::format::entry::{EntryKind, EntryRow};
use crate::ring::inspect::DirReader;
use crate::ring::reads::Reads;
use crate::ring::recovery::read_ring;
use crate::ring::walk::Walk;
use crate::seeded_bugs::seeded_bugs;
use block::env::DiskReader;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::path::Path;

/// An entry of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchivedEntry {
    /// Its place in the log.
    pub lsn: Lsn,
    /// The volume; 0 for an entry of the pool.
    pub volume: VolumeId,
    /// What it does.
    pub kind: EntryKind,
    /// First sector of its range, of 512 bytes.
    pub start_sector: u64,
    /// Sectors of its range.
    pub sector_count: u64,
    /// Its payload.
    pub payload: Bytes,
}

/// The end of a log that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveEnd {
    /// Newest entry that could be read.
    pub last_lsn: Lsn,
    /// Newest entry that any batch declares to have been on stable storage. If it is beyond `last_lsn`, the
    /// log is damaged.
    pub durable_lsn: Lsn,
}

/// Hands the entries of the log in `dir` beyond `since` to `visit`, in log order. Blocks.
///
/// # Errors
/// `NotFound` if the directory holds no log of a ring; `Invalid` for a log of another pool; `Corrupt` for another key,
/// and if entries between `since` and the first one of the log are missing; `Io` if it cannot be read; those of `visit`.
pub fn read_entries(
    dir: &Path,
    pool: [u8; 16],
    key: &PoolKey,
    since: Lsn,
    visit: &mut dyn FnMut(ArchivedEntry) -> Result<()>,
) -> Result<ArchiveEnd> {
    let context = || format!("read the log in {}", dir.display());
    let reader = DirReader::open(dir)
        .map_err(|error| Error::with_source(ErrorKind::Io, context(), error))?;
    read_from(&reader, pool, key, since, visit).map_err(|error| error.context(context()))
}

fn read_from(
    reader: &dyn DiskReader,
    pool: [u8; 16],
    key: &PoolKey,
    since: Lsn,
    visit: &mut dyn FnMut(ArchivedEntry) -> Result<()>,
) -> Result<ArchiveEnd> {
    let files =
        reader.files().map_err(|e| Error::with_source(ErrorKind::Io, "list the log's files", e))?;
    if files.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "the directory holds no log"));
    }
    let reads = Reads::new(reader);
    let ring = read_ring(&reads, &files, pool)?;
    let mut walk = Walk::new(&reads, pool, ring, since, seeded_bugs());
    let starts = walk.starts(since.next())?.map_err(|oldest| {
        let what = format!(
            "its first entry is {}, and the entries from {} on are missing",
            oldest.first_lsn,
            since.next()
        );
        Error::new(ErrorKind::Corrupt, what)
    })?;
    for start in starts {
        walk.begin(start);
        while walk.advance()? {
            take(&walk, key, since, visit)?;
        }
        if walk.newest.is_some() {
            break;
        }
    }
    walk.search_rest()?;
    Ok(ArchiveEnd { last_lsn: walk.last_lsn(), durable_lsn: walk.seen.durable_lsn })
}

/// Opens the batch that the walk has taken.
fn take(
    walk: &Walk<'_>,
    key: &PoolKey,
    since: Lsn,
    visit: &mut dyn FnMut(ArchivedEntry) -> Result<()>,
) -> Result<()> {
    let taken = walk.newest.expect("the walk has taken one");
    let (header, bytes) = (&taken.header, walk.newest_bytes());
    if header.last_lsn() <= since || header.entry_count == 0 {
        return Ok(());
    }
    let bad = |error| walk.bad(ErrorKind::Corrupt, taken.at, error);
    let key = key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
    batch::authenticate(bytes, &key).map_err(bad)?;
    let payloads = &bytes[header.payload_at().expect("decoded")..];
    for (row, index) in batch::open_table(header, bytes, &key).map_err(bad)?.iter().zip(0u32..) {
        let lsn = Lsn(header.first_lsn.0 + u64::from(index));
        if lsn <= since {
            continue;
        }
        let from = row.payload_offset as usize;
        let mut sealed = payloads[from..from + row.sealed_bytes()].to_vec();
        let length = batch::open_payload(row, lsn, index, &key, &mut sealed).map_err(bad)?.len();
        sealed.truncate(length);
        let &EntryRow { volume, kind, start_sector, sector_count, .. } = row;
        let payload = Bytes::from(sealed);
        visit(ArchivedEntry { lsn, volume, kind, start_sector, sector_count, payload })?;
    }
    Ok(())
}
