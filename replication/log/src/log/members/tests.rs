//! Tests of a log that has other members, as far as its handle shows them.

use super::super::Log;
use super::super::opening::{LogOpening, LogSources};
use crate::TailLoss;
use crate::disk::file_disk::FileDisk;
use crate::format::batch::BatchHeader;
use crate::format::entry::EntryKind;
use crate::options::{IoMode, LogIdentity, LogOptions, NewEntry, Wait};
use crate::replicas::{QuorumTail, Replicas};
use crate::ring::follower_log::{FollowerLog, FollowerOpening};
use crate::ring::recovery::Recovery;
use crate::seeded_bugs::SeededBugs;
use block::env::{Clock, ManualClock, SystemClock, SystemRandom};
use block::seal::{KEY_BYTES, PoolKey};
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result, VolumeId};
use bytes::Bytes;
use parking_lot::Mutex;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Members whose answers a test chooses.
#[derive(Default)]
struct Chosen {
    appended: Mutex<Vec<(Position, Lsn)>>,
    bytes: Mutex<Vec<Bytes>>,
    acknowledged: AtomicU64,
    committed: AtomicU64,
    sync_wanted: AtomicU64,
    is_without_lease: AtomicBool,
}

impl Replicas for Chosen {
    fn append(&self, position: Position, bytes: Bytes, _is_sync: bool) {
        let header = BatchHeader::decode(&bytes).unwrap();
        self.appended.lock().push((position, header.last_lsn()));
        self.bytes.lock().push(bytes);
    }

    fn on_own(&self, written: u64, synced: u64) {
        assert!(synced <= written);
    }

    fn want_sync(&self, sequence: u64) {
        self.sync_wanted.fetch_max(sequence, Ordering::Relaxed);
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    fn has_lease(&self) -> bool {
        !self.is_without_lease.load(Ordering::Relaxed)
    }
}

fn open_at(
    dir: &Path,
    epoch: u64,
    quorum: QuorumTail,
    seeded_bugs: SeededBugs,
    clock: Arc<dyn Clock>,
) -> Result<(Log, Recovery)> {
    open_ring(dir, epoch, (quorum, seeded_bugs), clock, (64 << 20, 8 << 20))
}

fn options((ring_bytes, file_bytes): (u64, u64)) -> LogOptions {
    LogOptions { ring_bytes, file_bytes, generation_bytes_max: file_bytes, ..LogOptions::default() }
}

fn open_ring(
    dir: &Path,
    epoch: u64,
    (quorum, seeded_bugs): (QuorumTail, SeededBugs),
    clock: Arc<dyn Clock>,
    sizes: (u64, u64),
) -> Result<(Log, Recovery)> {
    let options = options(sizes);
    let sources = LogSources { quorum: Some(quorum), ..LogSources::default() };
    let opening = LogOpening {
        dir,
        identity: LogIdentity {
            pool: [1; 16],
            epoch: Epoch(epoch),
            configuration: epoch,
            boot_id: [1; 16],
            served_epoch: Epoch(0),
        },
        key: PoolKey::new([3; KEY_BYTES]),
        options,
        destaged: Lsn::NONE,
        sources: &sources,
        seeded_bugs,
        clock,
        random: Arc::new(SystemRandom),
    };
    opening.open()
}

/// Opens an empty log whose members have acknowledged the opening batch.
fn open(dir: &Path) -> (Log, Arc<Chosen>) {
    let members = Arc::new(Chosen::default());
    let quorum = QuorumTail {
        position: Position::START,
        predecessor: None,
        loss: None,
        replicas: Arc::clone(&members) as _,
    };
    let (log, _) =
        open_at(dir, 1, quorum, SeededBugs::default(), Arc::new(SystemClock)).expect("it opens");
    let opening = members.appended.lock()[0].0;
    assert_eq!(opening, Position { epoch: Epoch(1), sequence: 1 });
    members.acknowledged.store(1, Ordering::Relaxed);
    members.committed.store(1, Ordering::Relaxed);
    log.on_replicas();
    (log, members)
}

fn marker() -> NewEntry {
    NewEntry::marker()
}

async fn is_pending(future: &mut (impl Future + Unpin)) -> bool {
    for _ in 0..20 {
        let polled = std::future::poll_fn(|context| {
            Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending())
        });
        if !polled.await {
            return false;
        }
        tokio::task::yield_now().await;
    }
    true
}

#[tokio::test]
async fn writes_and_flushes_wait_for_the_members() {
    let dir = tempfile::tempdir().unwrap();
    let (log, members) = open(dir.path());
    let mut write = pin!(log.append(marker(), Wait::Written));
    assert!(is_pending(&mut write).await, "its own disk is no quorum");
    let sequence = members.appended.lock().last().unwrap().0.sequence;
    // The first write after a pause is answered once it is durable: it announces the later ones.
    members.acknowledged.store(sequence, Ordering::Relaxed);
    log.on_replicas();
    assert!(is_pending(&mut write).await, "no quorum has synced it");
    while members.sync_wanted.load(Ordering::Relaxed) < sequence {
        tokio::task::yield_now().await;
    }
    members.committed.store(sequence, Ordering::Relaxed);
    log.on_replicas();
    assert_eq!(write.await.unwrap(), Lsn(1));
    let mut second = pin!(log.append(marker(), Wait::Written));
    assert!(is_pending(&mut second).await);
    members.acknowledged.store(sequence + 1, Ordering::Relaxed);
    log.on_replicas();
    assert_eq!(second.await.unwrap(), Lsn(2));
    let mut flush = pin!(log.flush());
    assert!(is_pending(&mut flush).await, "only the own disk has it");
    members.committed.store(sequence + 1, Ordering::Relaxed);
    log.on_replicas();
    assert_eq!(flush.await.unwrap(), Lsn(2));
}

#[tokio::test]
async fn owner_without_a_lease_does_not_serve() {
    let dir = tempfile::tempdir().unwrap();
    let (log, members) = open(dir.path());
    log.await_lease().await.unwrap();
    members.is_without_lease.store(true, Ordering::Relaxed);
    let mut read = Box::pin(log.await_lease());
    assert!(is_pending(&mut read).await);
    members.is_without_lease.store(false, Ordering::Relaxed);
    log.on_replicas();
    read.await.unwrap();
    members.is_without_lease.store(true, Ordering::Relaxed);
    let mut read = Box::pin(log.await_lease());
    assert!(is_pending(&mut read).await);
    log.fail(Error::new(ErrorKind::Fenced, "another owner has the pool"));
    assert_eq!(read.await.unwrap_err().kind(), ErrorKind::Fenced);
}

/// Opens the log again, at `position`, under the second epoch.
fn reopened(dir: &Path, position: Position, seeded_bugs: SeededBugs) -> (Result<Recovery>, u64) {
    let members = Arc::new(Chosen::default());
    let loss = Some(TailLoss::Reboot);
    let quorum =
        QuorumTail { position, predecessor: None, loss, replicas: Arc::clone(&members) as _ };
    let opened = open_at(dir, 2, quorum, seeded_bugs, Arc::new(SystemClock));
    let first = members.appended.lock().first().map_or(0, |(position, _)| position.sequence);
    (opened.map(|(_, recovery)| recovery), first)
}

#[tokio::test]
async fn log_continues_only_where_its_members_decided() {
    let tail = Position { epoch: Epoch(1), sequence: 1 };
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    for wrong in [Position { epoch: Epoch(1), sequence: 2 }, Position::START] {
        let error = reopened(dir.path(), wrong, SeededBugs::default()).0.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.chain().contains("its members have decided"), "{}", error.chain());
    }
    let (recovery, first) = reopened(dir.path(), tail, SeededBugs::default());
    assert_eq!(first, 2, "the members may have acknowledged the earlier opening batch");
    assert_eq!(recovery.unwrap().tail_loss, Some(TailLoss::Reboot));
    // The seeded bug is seen by the same check.
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let bug = SeededBugs { opening_replaced: true, ..SeededBugs::default() };
    assert_eq!(reopened(dir.path(), tail, bug).1, 1);
}

#[tokio::test]
async fn member_learns_that_the_disk_failed_under_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let has_failed = || {
        FollowerLog::open(dir.path(), [1; 16], options((64 << 20, 8 << 20))).unwrap().1.has_failed
    };
    assert!(!has_failed(), "there is no log");
    drop(open(dir.path()));
    assert!(!has_failed());
    let replaced = |position, seeded_bugs| reopened(dir.path(), position, seeded_bugs).0.unwrap();
    let tail = |sequence: u64| Position { epoch: Epoch(sequence.min(2)), sequence };
    replaced(tail(1), SeededBugs::default());
    let members: Arc<Chosen> = Arc::default();
    let quorum = QuorumTail { position: tail(2), predecessor: None, loss: None, replicas: members };
    let opened = open_at(dir.path(), 2, quorum, SeededBugs::default(), Arc::new(SystemClock));
    let log = opened.unwrap().0;
    log.inner.shared.fail_of_disk(Error::new(ErrorKind::Io, "sync the write log"));
    log.inner.wait_noted();
    drop(log);
    assert!(has_failed());
    assert!(has_failed(), "until a later run has written");
    replaced(tail(3), SeededBugs::default());
    assert!(!has_failed());
    std::fs::write(dir.path().join("ring.state"), b"no state").unwrap();
    assert!(has_failed(), "it may have said so");
}

#[tokio::test]
async fn close_without_a_quorum_ends_and_reports_it() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::new();
    let members = Arc::new(Chosen::default());
    let quorum = QuorumTail {
        position: Position::START,
        predecessor: None,
        loss: None,
        replicas: Arc::clone(&members) as _,
    };
    let opened = open_at(dir.path(), 1, quorum, SeededBugs::default(), Arc::new(clock.clone()));
    let (log, _) = opened.unwrap();
    let write = tokio::spawn(log.append(marker(), Wait::Written));
    let closing = std::thread::spawn(move || log.close());
    while !closing.is_finished() {
        clock.advance(Duration::from_millis(100));
        tokio::task::yield_now().await;
    }
    let error = closing.join().unwrap().unwrap_err();
    assert!(error.chain().contains("too few of its members answer"), "{}", error.chain());
    assert!(write.await.unwrap().is_err(), "nothing unanswered counts as done");
}

/// A log in a small ring that is always full, and a member's copy of it.
struct FullRing {
    dir: tempfile::TempDir,
    member: FollowerLog,
    tail: Position,
    seeded_bugs: SeededBugs,
}

const SMALL_RING: (u64, u64) = (8 << 20, 2 << 20);

impl FullRing {
    fn new(seeded_bugs: SeededBugs) -> FullRing {
        let dir = tempfile::tempdir().unwrap();
        let member_dir = dir.path().join("member");
        let (disk, random) = (
            FileDisk::open(&member_dir, IoMode::default(), Arc::new(SystemClock)).unwrap(),
            Arc::new(SystemRandom),
        );
        let opening = FollowerOpening {
            disk: Box::new(disk),
            random,
            pool: [1; 16],
            options: options(SMALL_RING),
            made_count: None,
        };
        let (member, _) = opening.open_with(seeded_bugs).unwrap();
        FullRing { dir, member, tail: Position::START, seeded_bugs }
    }

    /// Opens the log under the next epoch. The members acknowledge everything at once.
    fn open(&mut self) -> Result<(Log, Arc<Chosen>)> {
        let members = Arc::new(Chosen::default());
        members.acknowledged.store(u64::MAX, Ordering::Relaxed);
        members.committed.store(u64::MAX, Ordering::Relaxed);
        let replicas = Arc::clone(&members) as _;
        let quorum = QuorumTail { position: self.tail, predecessor: None, loss: None, replicas };
        let (dir, epoch) = (self.dir.path().join("owner"), self.tail.epoch.0 + 1);
        let (log, _) =
            open_ring(&dir, epoch, (quorum, self.seeded_bugs), Arc::new(SystemClock), SMALL_RING)?;
        self.send(&members)?;
        Ok((log, members))
    }

    /// Gives the member what the owner has written.
    fn send(&mut self, members: &Chosen) -> Result<()> {
        let batches = std::mem::take(&mut *members.bytes.lock());
        self.member.write(&batches)?;
        self.tail = self.member.tail();
        Ok(())
    }

    /// Fills the ring, opens the log often, and lets the store take what it has.
    async fn run(&mut self) -> Result<()> {
        let entry = |content: u8| NewEntry {
            volume: VolumeId(1),
            kind: EntryKind::Write,
            start_sector: 0,
            sector_count: 256,
            payload: Bytes::from(vec![content; 128 << 10]),
        };
        let (log, members) = self.open()?;
        while !log.status().is_full {
            let write = std::pin::pin!(log.append(entry(1), Wait::Written));
            let _ = tokio::time::timeout(Duration::from_millis(50), write).await;
        }
        self.send(&members)?;
        log.fail(Error::new(ErrorKind::Io, "the process is killed"));
        drop(log);
        for _ in 0..300 {
            let (log, _) = self.open()?;
            log.fail(Error::new(ErrorKind::Io, "the process is killed"));
        }
        let (log, members) = self.open()?;
        for content in 2..40 {
            let mut write = std::pin::pin!(log.append(entry(content), Wait::Written));
            while tokio::time::timeout(Duration::from_millis(20), write.as_mut()).await.is_err() {
                log.freeze();
                let Some(generation) = log.overlay().next_frozen() else { continue };
                log.make_durable(generation.last_lsn()).await?;
                log.release(&generation);
            }
            self.member.release(log.destaged_lsn(), u64::MAX);
            self.send(&members)?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn full_ring_can_be_opened_hundreds_of_times_and_is_used_again() {
    FullRing::new(SeededBugs::default()).run().await.unwrap();
    let bug = SeededBugs { spare_used: true, ..SeededBugs::default() };
    assert_eq!(FullRing::new(bug).run().await.unwrap_err().kind(), ErrorKind::Full);
}
