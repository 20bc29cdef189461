//! The log on disk: a member's ring, and the owner's write log on the same files.

use crate::local::OpenLog;
use crate::member::{FoundLog, MemberLog};
use crate::owned::OwnersLog;
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use replication::{Batch, LogIndex};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;
use wal::{FollowerFound, FollowerLog, LogOptions, WeakLog, is_log_failure};

impl MemberLog for FollowerLog {
    fn write(&mut self, batches: &[Batch]) -> Result<()> {
        let bytes: Vec<Bytes> = batches.iter().map(|batch| batch.bytes.clone()).collect();
        FollowerLog::write(self, &bytes)
    }

    fn cut(&mut self, sequence: u64) -> Result<()> {
        FollowerLog::cut(self, sequence)
    }

    fn reset(&mut self, before: Position) -> Result<()> {
        FollowerLog::reset(self, before)
    }

    fn sync(&mut self) -> Result<()> {
        FollowerLog::sync(self)
    }

    fn read(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        FollowerLog::read(self, sequence, bytes_max)
    }

    fn release(&mut self, trim_lsn: Lsn, last: u64) {
        FollowerLog::release(self, trim_lsn, last);
    }

    fn start(&self) -> u64 {
        FollowerLog::start(self).sequence + 1
    }

    fn last(&self) -> u64 {
        self.tail().sequence
    }
}

impl OwnersLog for WeakLog {
    fn on_replicas(&self) {
        if let Some(log) = self.upgrade() {
            log.on_replicas();
        }
    }

    fn fail(&self, error: Error) {
        if let Some(log) = self.upgrade() {
            log.fail(error);
        }
    }

    fn start(&self) -> u64 {
        self.upgrade().map_or(1, |log| log.first_batch())
    }

    fn trim_lsn(&self) -> Lsn {
        self.upgrade().map_or(Lsn::NONE, |log| log.destaged_lsn())
    }

    fn read_batches(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        let closed = || Error::new(ErrorKind::Unavailable, "read the write log: it is closed");
        self.upgrade().ok_or_else(closed)?.read_batches(sequence, bytes_max)
    }
}

/// Returns the way to open the ring in `dir`, for [`LocalOptions`](crate::LocalOptions). A new ring gets
/// the sizes of `options`. `page_cache` returns the identity of the page cache of a directory: that of
/// [`page_cache_of`], outside tests.
#[must_use]
pub fn open_ring(
    dir: PathBuf,
    pool: Uuid,
    options: LogOptions,
    page_cache: fn(&Path) -> Uuid,
) -> Arc<OpenLog> {
    Arc::new(move |synced| {
        let (log, found) = FollowerLog::open(&dir, pool.into_bytes(), options)?;
        // The open files keep the file system mounted from here on.
        member_log(log, &found, page_cache(&dir), synced)
    })
}

/// Returns an opened ring as the log of a member, given a sequence that was on stable storage.
///
/// # Errors
/// `Corrupt` or `Io` if a batch above it cannot be read.
pub fn member_log(
    mut log: FollowerLog,
    found: &FollowerFound,
    page_cache: Uuid,
    synced: u64,
) -> Result<(Box<dyn MemberLog>, FoundLog)> {
    // What the page cache shows may be lost by a failed sync of an earlier process.
    match log.rewrite(synced) {
        // The first sync fails with the same error, and the member's document then says so.
        Err(error) if is_log_failure(&error) => {}
        rewritten => rewritten?,
    }
    Ok((Box::new(log), found_log(found, page_cache)))
}

/// Identifies the page cache that holds the files of `dir`: the boot of the kernel, and the mounted file
/// system. If the kernel does not tell file systems apart (tmpfs, overlay, ZFS), the identity is one of this process:
/// a directory that it holds open keeps the file system mounted until the process ends.
#[must_use]
pub fn page_cache_of(dir: &Path) -> Uuid {
    match wal::mounted(dir) {
        Some(number) => block::env::page_cache_id(Some(number)),
        None => held_mounted(dir).unwrap_or_else(|| block::env::page_cache_id(None)),
    }
}

/// File systems that this process keeps mounted, by their device number, with their identities. There are as many as
/// there are disks with logs.
static HELD: Mutex<BTreeMap<u64, (File, Uuid)>> = Mutex::new(BTreeMap::new());

fn held_mounted(dir: &Path) -> Option<Uuid> {
    let dir = File::open(dir).ok()?;
    // The number belongs to this file system as long as it is mounted.
    let device = dir.metadata().ok()?.dev();
    let mut held = HELD.lock();
    let (_, id) = held.entry(device).or_insert_with(|| (dir, block::env::page_cache_id(None)));
    Some(*id)
}

fn found_log(found: &FollowerFound, page_cache: Uuid) -> FoundLog {
    let mut index = LogIndex::new(found.before);
    let ends = found.epochs.iter().skip(1).map(|(_, first)| first - 1).chain([found.last]);
    for ((epoch, first), last) in found.epochs.iter().zip(ends) {
        for sequence in *first..=last {
            index.push(Position { epoch: *epoch, sequence });
        }
    }
    let damaged = found.is_end_damaged.then(|| found.last + 1);
    FoundLog { index, damaged, page_cache, has_failed: found.has_failed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_cache_without_identity_is_known_by_its_process() {
        // tmpfs, which has no identity.
        let shared = Path::new("/dev/shm");
        if !shared.is_dir() || wal::mounted(shared).is_some() {
            return println!("skipped: /dev/shm is no tmpfs");
        }
        let dir = tempfile::tempdir_in(shared).unwrap();
        let first = page_cache_of(dir.path());
        assert_eq!(page_cache_of(dir.path()), first);
        assert_eq!(page_cache_of(shared), first, "it is the same file system");
        let elsewhere = tempfile::tempdir().unwrap();
        assert_ne!(page_cache_of(elsewhere.path()), first);
    }
}
