//! A member whose disk fails or is slow, or whose file system was unmounted: what it answers, and what its next
//! start proves.

use super::{MemoryLog, POOL, page_cache};
use crate::local::{LocalMember, LocalOptions};
use crate::member::{FoundLog, MemberLog};
use block::env::SystemClock;
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use replication::{Answer, Batch, Document, Proof, Request};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::error::TryRecvError;
use uuid::Uuid;

/// A log in memory whose syncs a test lets fail or wait.
#[derive(Clone, Default)]
struct FailingLog {
    log: MemoryLog,
    is_failing: Arc<AtomicBool>,
    gate: Arc<Gate>,
}

/// Holds syncs up.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    is_shut: bool,
    /// Syncs that have begun, those that wait included.
    begun_count: usize,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock();
        state.begun_count += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| state.is_shut);
    }

    fn set_shut(&self, is_shut: bool) {
        self.state.lock().is_shut = is_shut;
        self.changed.notify_all();
    }

    fn begun_count(&self) -> usize {
        self.state.lock().begun_count
    }

    /// Waits until this many syncs have begun.
    fn wait_for(&self, count: usize) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.begun_count < count);
    }
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
        self.gate.pass();
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

/// A request with the batch with this sequence.
fn request(sequence: u64, is_sync: bool) -> Request {
    let at = |sequence| Position { epoch: Epoch(u64::from(sequence > 0)), sequence };
    let batch = Batch { position: at(sequence), bytes: Bytes::from_static(b"batch") };
    Request::Append {
        epoch: Epoch(1),
        previous: at(sequence - 1),
        batches: vec![batch],
        proven_at: None,
        is_sync,
        lease: None,
        configuration: 1,
        trim_lsn: Lsn::NONE,
    }
}

/// Hands a member the batch with this sequence.
async fn append(member: &LocalMember, sequence: u64, is_sync: bool) -> Result<Option<Answer>> {
    member.ask(request(sequence, is_sync)).await
}

/// The sequences up to which the member says that it has synced its log.
fn synced(answer: &Answer) -> u64 {
    match answer {
        Answer::Appended { synced, .. } => *synced,
        other => panic!("{other:?}"),
    }
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

#[tokio::test]
async fn requests_that_wait_for_a_sync_share_the_next_one_and_are_answered_after_it() {
    let node = Node::new();
    let member = node.start().unwrap();
    append(&member, 1, true).await.unwrap();
    let gate = &node.log.gate;
    let before = gate.begun_count();
    gate.set_shut(true);
    let (sender, mut answers) = tokio::sync::mpsc::channel(8);
    member.request(request(2, true), &sender).await.unwrap();
    gate.wait_for(before + 1);
    for sequence in 3..=6 {
        member.request(request(sequence, sequence != 4), &sender).await.unwrap();
    }
    assert_eq!(answers.try_recv(), Err(TryRecvError::Empty), "answered before the sync");
    gate.set_shut(false);
    let mut seen = Vec::new();
    for _ in 2..=6 {
        seen.push(synced(&answers.recv().await.unwrap()));
    }
    assert_eq!(seen, [2, 3, 3, 5, 6]);
    assert_eq!(gate.begun_count(), before + 2);
}

#[tokio::test]
async fn requests_whose_shared_sync_fails_are_not_answered() {
    let node = Node::new();
    let member = node.start().unwrap();
    append(&member, 1, true).await.unwrap();
    let gate = &node.log.gate;
    let before = gate.begun_count();
    gate.set_shut(true);
    let (sender, mut answers) = tokio::sync::mpsc::channel(8);
    for sequence in 2..=4 {
        member.request(request(sequence, true), &sender).await.unwrap();
    }
    gate.wait_for(before + 1);
    node.log.is_failing.store(true, Ordering::Relaxed);
    gate.set_shut(false);
    drop(sender);
    assert_eq!(answers.recv().await, None);
    assert!(member.state().await.is_err(), "this waits until it has ended");
}
