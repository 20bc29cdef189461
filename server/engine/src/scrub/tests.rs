//! The record of a scrub: its bytes, and its contents.

use super::*;
use crate::testing::open_on_clock;
use block::Epoch;
use block::env::ManualClock;
use block::seal::{Algorithm, SALT_BYTES};
use control::chain::{Document, seal_document_with};
use object_store::memory::InMemory;
use tiering::KeyId;
use tiering::segment::{SegmentInfo, SegmentNumber};

const GOLDEN: &str = include_str!("../../testdata/scrub-v1.txt");

fn looked(number: u64, finding: Finding) -> Scrubbed {
    let info = SegmentInfo {
        number: SegmentNumber(number),
        epoch: Epoch(3),
        id: [number as u8; 16],
        algorithm: Algorithm::default(),
        key: KeyId::POOL,
        object_bytes: 1000,
        frame_count: 5,
    };
    Scrubbed { info, finding }
}

fn bad(why: &str) -> Finding {
    Finding::Bad { why: why.to_owned() }
}

fn numbers(record: &ScrubRecord) -> Vec<u64> {
    record.bad.iter().map(|bad| bad.number).collect()
}

#[test]
fn golden_documents_of_version_1() {
    let mut record = ScrubRecord::new(Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888));
    record.begin(1_700_000_000, 50);
    record.note(&looked(7, Finding::Whole { frame_count: 5 }));
    let repaired = Finding::Repaired { why: "x".to_owned(), source: "/mnt/other".to_owned() };
    record.note(&looked(8, repaired));
    record.note(&looked(9, bad("the object is not in the store")));
    (record.number, record.nonce) = (4, "f0".repeat(16));
    let running = record.clone();
    record.every_seconds = Some(2_592_000);
    record.end(1_700_000_100);
    let key = PoolKey::new([0x42; 32]);
    let mut text = String::new();
    for one in [running, record] {
        let bytes = seal_document_with([0xc0; SALT_BYTES], &key, FOLDER, &one).unwrap();
        let document = Document::parse("scrub", &bytes).unwrap();
        document.verify(&key, FOLDER).unwrap();
        assert_eq!(document.body::<ScrubRecord>().unwrap(), one);
        assert!(document.verify(&key, "copies").is_err(), "each has a purpose of its own");
        text += std::str::from_utf8(&bytes).unwrap();
    }
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        print!("{text}");
    }
    assert_eq!(text, GOLDEN);
}

#[test]
fn bad_objects_are_remembered_until_the_next_check() {
    let mut record = ScrubRecord::new(Uuid::nil());
    record.begin(1000, 100);
    for number in [3, 5, 9, 20] {
        record.note(&looked(number, bad("gone")));
    }
    record.end(1100);
    assert_eq!((numbers(&record), record.bad_count), (vec![3, 5, 9, 20], 4));
    assert_eq!((record.position, record.next_at()), (99, None));
    record.every_seconds = Some(500);
    assert_eq!(record.next_at(), Some(1500));

    record.begin(1500, 120);
    assert_eq!((numbers(&record).len(), record.bad_count, record.next_at()), (4, 0, None));
    record.note(&looked(3, Finding::Whole { frame_count: 1 }));
    assert_eq!(numbers(&record), [5, 9, 20]);
    // 5 was reclaimed, 9 is bad again.
    record.note(&looked(9, bad("still")));
    assert_eq!(numbers(&record), [9, 20]);
    record.note(&looked(15, Finding::Gone));
    assert_eq!((record.position, record.segment_count, record.bad_count), (15, 2, 1));
    record.end(1600);
    assert_eq!(numbers(&record), [9]);
    assert_eq!(record.bad[0].why, "still");
}

#[test]
fn the_record_of_the_worst_pool_fits_a_document() {
    let mut record = ScrubRecord::new(Uuid::nil());
    record.begin(1000, 10_000);
    for number in 1..1000 {
        record.note(&looked(number, bad(&"ä\n\"".repeat(4000))));
    }
    assert_eq!((record.bad.len(), record.bad_count), (NAMED_MAX, 999));
    let key = PoolKey::new([1; 32]);
    let bytes = seal_document(&key, FOLDER, &record).unwrap();
    assert!(bytes.len() < 256 << 10, "{}", bytes.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_scrub_begins_once_its_time_has_passed() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let clock = ManualClock::new();
    let pool = open_on_clock(dir.path(), &objects, 1, Arc::new(clock.clone())).await;
    let store = Store::from_objects("memory", objects);
    let is_complete = watch::Sender::new(true).subscribe();
    let (key, id) = (PoolKey::new([9; 32]), Uuid::from_u128(7));
    let scrub = Scrub::offline(pool.clone(), store, key, id, is_complete);
    scrub.begin(None, Some(3600)).await.unwrap();
    let (inner, mut saved_at) = (&scrub.inner, clock.now());
    let started = |inner: &Inner| inner.record().unwrap().started_at;
    let first = started(inner);
    // The pool is empty, so the scrub ends at once.
    assert_eq!(inner.step(&mut saved_at).await.unwrap(), Duration::ZERO);
    assert!(!inner.record().unwrap().is_running());
    clock.advance(Duration::from_secs(3599));
    assert_eq!(inner.step(&mut saved_at).await.unwrap(), Duration::from_secs(1));
    assert_eq!(started(inner), first);
    clock.advance(Duration::from_secs(1));
    inner.step(&mut saved_at).await.unwrap();
    assert_eq!((started(inner), inner.record().unwrap().is_running()), (first + 3600, true));
    // A start that lies in the future, because the clock was put back, delays nothing.
    inner.step(&mut saved_at).await.unwrap();
    clock.jump(-3600);
    inner.step(&mut saved_at).await.unwrap();
    assert_eq!((started(inner), inner.record().unwrap().is_running()), (first, true));
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrub_says_for_how_long_it_has_failed() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let clock = ManualClock::new();
    let pool = open_on_clock(dir.path(), &objects, 1, Arc::new(clock.clone())).await;
    let store = Store::from_objects("memory", objects);
    let is_complete = watch::Sender::new(true).subscribe();
    let (key, id) = (PoolKey::new([9; 32]), Uuid::from_u128(7));
    let scrub = Scrub::offline(pool.clone(), store, key, id, is_complete);
    for minutes in [0, 1, 2] {
        let error = Error::new(ErrorKind::Unavailable, "no answer");
        scrub.inner.show_failure(Some(&error));
        let (_, lasts) = scrub.status().await.unwrap().failure.unwrap();
        assert_eq!(lasts, Duration::from_secs(60 * minutes));
        clock.advance(Duration::from_secs(60));
    }
    pool.close().await.unwrap();
}
