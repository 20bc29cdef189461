//! The log on disk: a member's ring, and the owner's write log on the same files.

use crate::local::OpenLog;
use crate::member::{FoundLog, MemberLog};
use crate::owned::OwnersLog;
use block::{Error, ErrorKind, Position, Result};
use bytes::Bytes;
use replication::{Batch, LogIndex};
use std::path::PathBuf;
use std::sync::Arc;
use uuid::Uuid;
use wal::{FollowerFound, FollowerLog, LogOptions, WeakLog};

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

    fn start(&self) -> u64 {
        FollowerLog::start(self).sequence + 1
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

    fn read_batches(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        let closed = || Error::new(ErrorKind::Unavailable, "read the write log: it is closed");
        self.upgrade().ok_or_else(closed)?.read_batches(sequence, bytes_max)
    }
}

/// Returns the way to open the ring in `dir`, for [`LocalOptions`](crate::LocalOptions). A new ring gets
/// the sizes of `options`.
#[must_use]
pub fn open_ring(dir: PathBuf, pool: Uuid, options: LogOptions) -> Arc<OpenLog> {
    Arc::new(move |synced| {
        let (mut log, found) = FollowerLog::open(&dir, pool.into_bytes(), options)?;
        // What the page cache shows may be lost by a failed sync of an earlier process.
        log.rewrite(synced)?;
        Ok((Box::new(log), found_log(&found)))
    })
}

fn found_log(found: &FollowerFound) -> FoundLog {
    let mut index = LogIndex::new(found.before);
    let ends = found.epochs.iter().skip(1).map(|(_, first)| first - 1).chain([found.last]);
    for ((epoch, first), last) in found.epochs.iter().zip(ends) {
        for sequence in *first..=last {
            index.push(Position { epoch: *epoch, sequence });
        }
    }
    FoundLog { index, damaged: found.is_end_damaged.then(|| found.last + 1) }
}
