//! Tests of the log's handle that need to see its insides. Tests of durability are in
//! `tests/real_files.rs`.

use super::opening::LogOpening;
use super::thread::TICK;
use super::*;
use crate::TailLoss;
use crate::format::entry::EntryKind;
use crate::options::NewEntry;
use crate::overlay::extents::Source;
use crate::ring::recovery::Recovery;
use block::Epoch;
use block::env::{ManualClock, SystemClock, SystemRandom};
use block::seal::KEY_BYTES;
use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

/// At the initially assumed rate, with nine tenths of the log in use, this takes some 90 ms: far
/// more than the pauses of a busy machine.
const HELD_BYTES: usize = 3 << 20;

fn identity() -> LogIdentity {
    LogIdentity {
        pool: [1; 16],
        epoch: Epoch(1),
        boot_id: [1; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    }
}

fn options() -> LogOptions {
    LogOptions {
        ring_bytes: 64 << 20,
        file_bytes: 8 << 20,
        generation_bytes_max: 8 << 20,
        ..LogOptions::default()
    }
}

fn open_with(
    dir: &Path,
    options: LogOptions,
    seeded_bugs: SeededBugs,
    clock: Arc<dyn Clock>,
) -> Log {
    let opening = LogOpening {
        dir,
        identity: identity(),
        key: PoolKey::new([3; KEY_BYTES]),
        options,
        destaged: Lsn::NONE,
        sources: &LogSources::default(),
        seeded_bugs,
        clock,
        random: Arc::new(SystemRandom),
    };
    opening.open().expect("it opens").0
}

fn open(dir: &Path, seeded_bugs: SeededBugs) -> Log {
    open_with(dir, options(), seeded_bugs, Arc::new(SystemClock))
}

/// Opens a log of four small files, which does not slow its writers before it is full.
fn open_small(dir: &Path, seeded_bugs: SeededBugs) -> Log {
    let options = LogOptions {
        ring_bytes: 1 << 20,
        file_bytes: 256 << 10,
        generation_bytes_max: 128 << 10,
        slow_from_percent: 99,
        ..LogOptions::default()
    };
    open_with(dir, options, seeded_bugs, Arc::new(SystemClock))
}

fn sector(value: u8) -> NewEntry {
    NewEntry {
        volume: VolumeId(7),
        kind: EntryKind::Write,
        start_sector: 1 << 20,
        sector_count: 1,
        payload: Bytes::from(vec![value; 512]),
    }
}

/// Returns the last contents that [`sector`] has written.
fn sector_of(log: &Log) -> Option<u8> {
    match &log.overlay().lookup(VolumeId(7), 1 << 20, 1)[0].source {
        Source::Payload(bytes) => Some(bytes[0]),
        Source::Beneath => None,
        other => panic!("{other:?}"),
    }
}

/// Appends until the log is full; returns the append that waits.
async fn fill(log: &Log) -> Pin<Box<impl Future<Output = Result<Lsn>> + use<>>> {
    loop {
        let mut last = Box::pin(append(log, 64 << 10));
        let is_full = poll_fn(|context| {
            if last.as_mut().poll(context).is_ready() {
                return Poll::Ready(false);
            }
            context.waker().wake_by_ref();
            if log.status().is_full { Poll::Ready(true) } else { Poll::Pending }
        });
        if is_full.await {
            return last;
        }
    }
}

/// Polls once an append that has to wait.
async fn begun<T: Future<Output = Result<Lsn>>>(append: T) -> Pin<Box<T>> {
    let mut append = Box::pin(append);
    let is_ready = poll_fn(|context| Poll::Ready(append.as_mut().poll(context).is_ready())).await;
    assert!(!is_ready, "the log is full");
    append
}

/// Gives back the log space of all visible entries.
fn release_all(log: &Log) {
    log.freeze();
    // Not that of entries that arrive meanwhile.
    for _ in 0..log.status().frozen_count {
        log.release(&log.next_frozen().expect("it is frozen"));
    }
}

/// Drops a write to a sector while the log is full, then writes the sector again and returns its
/// contents.
async fn after_a_dropped_write(seeded_bugs: SeededBugs) -> Option<u8> {
    let dir = tempfile::tempdir().unwrap();
    let log = open_small(dir.path(), seeded_bugs);
    let filler = fill(&log).await;
    let gone = begun(log.append(sector(1), Wait::Written)).await;
    drop(gone);
    log.settle().await.unwrap(); // it does not wait for log space
    release_all(&log);
    filler.await.unwrap();
    log.append(NewEntry { start_sector: 0, ..sector(9) }, Wait::Durable).await.unwrap();
    sector_of(&log)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_append_to_a_full_log_is_never_written() {
    assert_eq!(after_a_dropped_write(SeededBugs::default()).await, None);
    let seeded_bugs = SeededBugs { kept_when_dropped: true, ..SeededBugs::default() };
    assert_eq!(after_a_dropped_write(seeded_bugs).await, Some(1), "the seeded bug was not noticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_append_to_a_full_log_is_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let log = open_small(dir.path(), SeededBugs::default());
    let alive = std::future::pending();
    log.append_unless(sector(1), Vec::new(), Wait::Durable, alive).await.unwrap();
    assert_eq!(sector_of(&log), Some(1));
    let filler = fill(&log).await;
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let rest = vec![NewEntry { start_sector: 0, ..sector(2) }];
    let waits = log.append_unless(sector(2), rest, Wait::Durable, async {
        let _ = told.await;
    });
    let waits = begun(waits).await;
    drop(tell);
    let error = waits.await.unwrap_err();
    assert!(error.to_string().contains("disconnected before there was room"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    release_all(&log);
    filler.await.unwrap();
    assert_eq!(sector_of(&log), None, "what was there before is in the store");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_waiting_for_log_space_keep_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let log = open_small(dir.path(), SeededBugs::default());
    let filler = fill(&log).await;
    let mut waiting = Vec::new();
    for value in 1..=9 {
        waiting.push(begun(log.append(sector(value), Wait::Written)).await);
    }
    let odd = waiting.split_off(8);
    drop(waiting.remove(3));
    release_all(&log);
    let mut lsns = vec![filler.await.unwrap()];
    for one in waiting.into_iter().chain(odd) {
        lsns.push(one.await.unwrap());
    }
    assert!(lsns.is_sorted(), "{lsns:?}");
    assert_eq!(sector_of(&log), Some(9));
}

fn append(log: &Log, payload_bytes: usize) -> impl Future<Output = Result<Lsn>> + use<> {
    let entry = NewEntry {
        volume: VolumeId(7),
        kind: EntryKind::Write,
        start_sector: 0,
        sector_count: payload_bytes as u64 / 512,
        payload: Bytes::from(vec![7; payload_bytes]),
    };
    log.append(entry, Wait::Written)
}

/// Fills a log and returns an append whose acknowledgement is held back.
async fn held_back(log: &Log) -> Pin<Box<impl Future<Output = Result<Lsn>> + use<>>> {
    while log.inner.fill() < 0.9 {
        append(log, 1 << 20).await.unwrap();
    }
    let mut held = Box::pin(append(log, HELD_BYTES));
    poll_fn(|context| {
        let is_answered = held.as_mut().poll(context).is_ready();
        assert!(!is_answered, "it is not held back");
        if log.inner.gate.is_closed() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    held
}

/// Returns whether others get their answers while a client that is held back never polls for its
/// own.
async fn others_go_on(seeded_bugs: SeededBugs) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), seeded_bugs);
    let _held = held_back(&log).await;
    let others = async {
        for _ in 0..4 {
            append(&log, 64 << 10).await.unwrap();
        }
    };
    let longest = Duration::from_nanos(4 * crate::throttle::DELAY_NS_MAX);
    tokio::time::timeout(longest, others).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_reply_does_not_hold_back_other_writers() {
    assert!(others_go_on(SeededBugs::default()).await);
    let seeded_bugs = SeededBugs { gate_by_waiter: true, ..SeededBugs::default() };
    assert!(!others_go_on(seeded_bugs).await, "the seeded bug was not noticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_runtime_opens_the_gate() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), SeededBugs::default());
    while log.inner.fill() < 0.9 {
        append(&log, 1 << 20).await.unwrap();
    }
    let log = std::thread::spawn(move || {
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        other.block_on(async {
            let mut held = Box::pin(append(&log, HELD_BYTES));
            poll_fn(|context| {
                assert!(held.as_mut().poll(context).is_pending(), "it is not held back");
                context.waker().wake_by_ref();
                if log.inner.gate.is_closed() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
        drop(other);
        log
    })
    .join()
    .unwrap();
    assert!(!log.inner.gate.is_closed(), "nothing else opens it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_append_fails_if_the_log_fails_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), SeededBugs::default());
    let held = held_back(&log).await;
    log.fail(Error::new(ErrorKind::Fenced, "another epoch"));
    assert_eq!(held.await.unwrap_err().kind(), ErrorKind::Fenced);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_append_is_answered_if_the_log_closes_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), SeededBugs::default());
    let held = held_back(&log).await;
    let closed = log.clone();
    tokio::task::spawn_blocking(move || closed.close()).await.unwrap().unwrap();
    let lsn = held.await.unwrap();
    assert!(lsn > Lsn::NONE && log.status().durable_lsn >= lsn);
}

/// Reads the entries beyond `since` of a log that is not open, and its end.
fn archived(dir: &Path, since: u64) -> Result<(Vec<crate::ArchivedEntry>, crate::ArchiveEnd)> {
    let (key, mut entries) = (PoolKey::new([3; KEY_BYTES]), Vec::new());
    let end = crate::read_entries(dir, [1; 16], &key, Lsn(since), &mut |entry| {
        entries.push(entry);
        Ok(())
    })?;
    Ok((entries, end))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_a_log_are_read_without_opening_it() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), SeededBugs::default());
    let trim = NewEntry { kind: EntryKind::Trim, payload: Bytes::new(), ..sector(0) };
    for entry in [sector(1), trim, NewEntry { volume: VolumeId(8), ..sector(2) }] {
        log.append(entry, Wait::Durable).await.unwrap();
    }
    tokio::task::spawn_blocking(move || log.close()).await.unwrap().unwrap();
    let files = || {
        let listed = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let contents =
            listed.filter(|path| path.is_file()).map(|path| std::fs::read(path).unwrap());
        contents.collect::<Vec<_>>()
    };
    let before = files();
    let (entries, end) = archived(dir.path(), 0).unwrap();
    assert_eq!((end.last_lsn, end.durable_lsn), (Lsn(3), Lsn(3)));
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| (entry.lsn.0, entry.volume.0, entry.kind, entry.payload.first().copied()))
        .collect();
    let wanted = [
        (1, 7, EntryKind::Write, Some(1)),
        (2, 7, EntryKind::Trim, None),
        (3, 8, EntryKind::Write, Some(2)),
    ];
    assert_eq!(seen, wanted);
    assert_eq!((entries[1].start_sector, entries[1].sector_count), (1 << 20, 1));
    assert_eq!(archived(dir.path(), 2).unwrap().0, entries[2..]);
    assert_eq!(archived(dir.path(), 3).unwrap().0, []);
    let refused = |pool, key| {
        let key = PoolKey::new([key; KEY_BYTES]);
        let read = crate::read_entries(dir.path(), pool, &key, Lsn::NONE, &mut |_| Ok(()));
        read.unwrap_err().kind()
    };
    assert_eq!(refused([2; 16], 3), ErrorKind::Invalid);
    assert_eq!(refused([1; 16], 4), ErrorKind::Corrupt);
    assert_eq!(before, files(), "nothing was changed");
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(archived(empty.path(), 0).unwrap_err().kind(), ErrorKind::NotFound);
}

/// Removes the newest batch from a ring file, like a kernel that drops pages that it could not
/// write.
fn drop_newest_batch(dir: &Path) {
    let path = dir.join("ring-00000.log");
    let mut bytes = std::fs::read(&path).unwrap();
    let is_batch = |at: &usize| bytes[*at..].starts_with(b"SPDLBTCH");
    let newest = (0..bytes.len()).step_by(4096).rfind(is_batch).expect("a batch");
    bytes[newest..newest + 4096].fill(0);
    std::fs::write(&path, bytes).unwrap();
}

fn reopened(dir: &Path, notes: &LogNotes) -> Recovery {
    let key = PoolKey::new([3; KEY_BYTES]);
    let sources = LogSources { notes: notes.clone(), ..LogSources::default() };
    let opened = Log::open_from(dir, identity(), key, options(), Lsn::NONE, &sources);
    let (log, recovery) = opened.expect("it opens");
    log.close().unwrap();
    recovery
}

/// Makes the disk of a log fail after two answered entries. Returns the note for others to keep.
async fn failed(dir: &Path) -> Vec<u8> {
    let log = open(dir, SeededBugs::default());
    for _ in 0..2 {
        append(&log, 512).await.unwrap();
    }
    assert!(log.failure().is_none() && log.failure_note().is_none());
    log.inner.driven.lock().as_ref().expect("it is open").disk.fill_up(0);
    let error = append(&log, 512).await.unwrap_err();
    assert!(crate::is_log_failure(&error), "{}", error.chain());
    assert!(log.failure().is_some_and(|error| crate::is_log_failure(&error)));
    let note = log.failure_note().expect("its disk has failed");
    let closed = log.clone();
    let error = tokio::task::spawn_blocking(move || closed.close()).await.unwrap().unwrap_err();
    assert!(crate::is_log_failure(&error), "{}", error.chain());
    note
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_log_with_all_acknowledged_entries_reports_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    failed(dir.path()).await;
    let recovery = reopened(dir.path(), &LogNotes::default());
    assert_eq!((recovery.last_lsn, recovery.tail_loss), (Lsn(2), None));
    assert!(recovery.is_tail_proven && !recovery.was_clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_log_without_an_acknowledged_entry_reports_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    failed(dir.path()).await;
    drop_newest_batch(dir.path());
    let recovery = reopened(dir.path(), &LogNotes::default());
    assert_eq!((recovery.last_lsn, recovery.tail_loss), (Lsn(1), Some(TailLoss::Failure)));
    let reason = recovery.lost_reason.expect("it says why");
    assert!(reason.ends_with("entries after 1 up to 2 were answered and are lost"), "{reason}");
    let again = reopened(dir.path(), &LogNotes::default());
    assert_eq!(again.tail_loss, Some(TailLoss::Failure), "the owner has not settled it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn note_from_elsewhere_reports_a_loss_and_excludes_none() {
    for has_lost in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let heard = vec![failed(dir.path()).await];
        // Simulates a note that could not be written here: the state says that the log is open.
        let path = dir.path().join("ring.state");
        let mut state = crate::format::state::decode(&std::fs::read(&path).unwrap()).unwrap();
        state.standing = crate::format::state::Standing::Open;
        std::fs::write(&path, crate::format::state::encode(&state)).unwrap();
        if has_lost {
            drop_newest_batch(dir.path());
        }
        let notes = LogNotes { heard, ..LogNotes::default() };
        let expected = has_lost.then_some(TailLoss::Failure);
        assert_eq!(reopened(dir.path(), &notes).tail_loss, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ages_and_unasked_syncs_follow_the_injected_clock() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::new();
    let log = open_with(dir.path(), options(), SeededBugs::default(), Arc::new(clock.clone()));
    assert_eq!(log.status().oldest_undestaged_age, None);
    append(&log, 512).await.unwrap();
    clock.advance(Duration::from_secs(90));
    append(&log, 512).await.unwrap();
    assert_eq!(log.status().oldest_undestaged_age, Some(Duration::from_secs(90)));
    // Without a flush the log thread syncs on its own after a few ticks, and it ticks by that clock.
    while log.status().durable_lsn < Lsn(2) {
        clock.advance(TICK);
        log.inner.thread.nudge();
        tokio::task::yield_now().await;
    }
    release_all(&log);
    assert_eq!(log.status().oldest_undestaged_age, None);
}
