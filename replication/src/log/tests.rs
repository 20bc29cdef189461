//! The log's handle where its insides have to be seen. What survives what is in `tests/real_files.rs`.

use super::*;
use crate::format::entry::EntryKind;
use block::Epoch;
use block::seal::KEY_BYTES;
use std::future::poll_fn;
use std::task::Poll;

/// At the rate that is assumed first, with nine tenths of the log in use, that is some 90 ms: far more than what a busy
/// machine's pauses count for.
const HELD_BYTES: usize = 3 << 20;

fn open(dir: &Path, planted: Planted) -> Log {
    let identity =
        LogIdentity { pool: [1; 16], epoch: Epoch(1), boot_id: [1; 16], served_epoch: Epoch(0) };
    let options = LogOptions {
        ring_bytes: 64 << 20,
        file_bytes: 8 << 20,
        generation_bytes_max: 8 << 20,
        ..LogOptions::default()
    };
    let with = (identity, PoolKey::new([3; KEY_BYTES]));
    let opened = Log::open_planted(dir, with, options, Lsn::NONE, &SidesWanted::default(), planted);
    opened.expect("it opens").0
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

/// An entry whose acknowledgement is held back, by a log that was filled.
async fn held_back(log: &Log) -> Pin<Box<impl Future<Output = Result<Lsn>> + use<>>> {
    while log.inner.fill() < 0.9 {
        append(log, 1 << 20).await.unwrap();
    }
    let mut held = Box::pin(append(log, HELD_BYTES));
    poll_fn(|context| {
        let is_answered = held.as_mut().poll(context).is_ready();
        assert!(!is_answered, "it is not held back");
        if log.inner.pressure.lock().pace.is_closed() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    held
}

/// Whether others get their answers while somebody who is held back never looks for its own.
async fn others_go_on(planted: Planted) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), planted);
    let _held = held_back(&log).await;
    let others = async {
        for _ in 0..4 {
            append(&log, 64 << 10).await.unwrap();
        }
    };
    let longest = Duration::from_nanos(4 * crate::pace::DELAY_NS_MAX);
    tokio::time::timeout(longest, others).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_take_its_answer_holds_nobody_else_back() {
    assert!(others_go_on(Planted::default()).await);
    let planted = Planted { gate_by_waiter: true, ..Planted::default() };
    assert!(!others_go_on(planted).await, "the planted bug was not noticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_runtime_opens_the_gate() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), Planted::default());
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
                if log.inner.pressure.lock().pace.is_closed() {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            })
            .await;
        });
        drop(other);
        log
    })
    .join()
    .unwrap();
    assert!(!log.inner.pressure.lock().pace.is_closed(), "who would open it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_back_is_not_answered_once_the_log_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), Planted::default());
    let held = held_back(&log).await;
    log.fail(Error::new(ErrorKind::Fenced, "another epoch"));
    assert_eq!(held.await.unwrap_err().kind(), ErrorKind::Fenced);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_back_is_answered_though_the_log_ends_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), Planted::default());
    let held = held_back(&log).await;
    let closed = log.clone();
    tokio::task::spawn_blocking(move || closed.close()).await.unwrap().unwrap();
    let lsn = held.await.unwrap();
    assert!(lsn > Lsn::NONE && log.status().durable_lsn >= lsn);
}
