//! A member whose disk fails, or whose file system was unmounted: what its next start proves.

use super::{MemoryLog, POOL, page_cache};
use crate::local::{LocalMember, LocalOptions};
use crate::member::{FoundLog, MemberLog};
use block::env::SystemClock;
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use replication::{Answer, Batch, Document, Proof, Request};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

/// A log in memory whose syncs a test lets fail.
#[derive(Clone, Default)]
struct FailingLog {
    log: MemoryLog,
    is_failing: Arc<AtomicBool>,
}

impl MemberLog for FailingLog {
    fn write(&mut self, batches: &[Batch]) -> Result<()> {
        self.log.write(batches)
    }

    fn cut(&mut self, sequence: u64) -> Result<()> {
        self.log.cut(sequence)
    }

    fn reset(&mut self, before: Position) -> Result<()> {
        self.log.reset(before)
    }

    fn sync(&mut self) -> Result<()> {
        match self.is_failing.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Io, "sync the log")),
            false => Ok(()),
        }
    }

    fn read(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        self.log.read(sequence, bytes_max)
    }

    fn release(&mut self, trim_lsn: Lsn, last: u64) {
        self.log.release(trim_lsn, last);
    }

    fn start(&self) -> u64 {
        1
    }

    fn last(&self) -> u64 {
        self.log.last()
    }
}

/// A directory with a member that is started several times.
struct Node {
    options: LocalOptions,
    log: FailingLog,
    page_cache: Arc<Mutex<Uuid>>,
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        let log = FailingLog::default();
        let cache = Arc::new(Mutex::new(page_cache(dir.path())));
        let open_log = {
            let (log, cache) = (log.clone(), Arc::clone(&cache));
            move |_synced| {
                let (index, page_cache) = (log.log.index(), *cache.lock());
                let found = FoundLog { index, damaged: None, page_cache, has_failed: false };
                let log: Box<dyn MemberLog> = Box::new(log.clone());
                Ok((log, found))
            }
        };
        let options = LocalOptions {
            dir: dir.path().to_owned(),
            pool: POOL,
            clock: Arc::new(SystemClock),
            open_log: Arc::new(open_log),
        };
        LocalMember::create(&options, Uuid::from_u128(1)).unwrap();
        Node { options, log, page_cache: cache, dir }
    }

    fn start(&self) -> Result<LocalMember> {
        LocalMember::start(self.options.clone())
    }

    /// Starts the member, and returns its document.
    async fn document(&self) -> Document {
        self.start().unwrap().state().await.unwrap().0
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Hands a member the batch with this sequence.
async fn append(member: &LocalMember, sequence: u64, is_sync: bool) -> Result<Option<Answer>> {
    let at = |sequence| Position { epoch: Epoch(u64::from(sequence > 0)), sequence };
    let batch = Batch { position: at(sequence), bytes: Bytes::from_static(b"batch") };
    let request = Request::Append {
        epoch: Epoch(1),
        previous: at(sequence - 1),
        batches: vec![batch],
        proven_at: None,
        is_sync,
        lease: None,
        configuration: 1,
        trim_lsn: Lsn::NONE,
    };
    member.ask(request).await
}

#[tokio::test]
async fn failed_disk_is_noted_in_the_document() {
    let node = Node::new();
    let member = node.start().unwrap();
    append(&member, 1, true).await.unwrap();
    append(&member, 2, false).await.unwrap();
    drop(member);
    assert_eq!(node.document().await.proof, Proof::All, "a killed process loses nothing");
    let member = node.start().unwrap();
    node.log.is_failing.store(true, Ordering::Relaxed);
    let answer = append(&member, 3, true).await;
    assert!(!matches!(answer, Ok(Some(_))), "{answer:?}");
    assert!(member.state().await.is_err(), "this waits until it has ended");
    drop(member);
    node.log.is_failing.store(false, Ordering::Relaxed);
    // The page cache still shows everything, and the note says so.
    assert_eq!(node.log.log.index().tail().sequence, 3);
    assert_eq!(node.document().await.proof, Proof::Synced);
}

#[tokio::test]
async fn start_whose_sync_fails_is_noted_and_stores_nothing_else() {
    let node = Node::new();
    append(&node.start().unwrap(), 1, false).await.unwrap();
    let before = node.document().await;
    node.log.is_failing.store(true, Ordering::Relaxed);
    assert_eq!(node.start().err().unwrap().kind(), ErrorKind::Io);
    node.log.is_failing.store(false, Ordering::Relaxed);
    let after = node.document().await;
    assert_eq!(after, Document { proof: Proof::Synced, run: before.run + 1, ..before });
}

#[tokio::test]
async fn unmounted_file_system_leaves_the_proof_of_what_was_synced() {
    let node = Node::new();
    let member = node.start().unwrap();
    append(&member, 1, true).await.unwrap();
    let note = std::fs::read(node.dir().join("member.note")).unwrap();
    append(&member, 2, false).await.unwrap();
    drop(member);
    // The file system came back with an earlier note and without the batch that was not synced.
    std::fs::write(node.dir().join("member.note"), note).unwrap();
    node.log.clone().cut(1).unwrap();
    *node.page_cache.lock() = Uuid::from_u128(8);
    assert_eq!(node.document().await.proof, Proof::Synced);
}
