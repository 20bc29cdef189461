//! Tests of opening a pool: losses that are noticed, openings that are refused, and volumes that
//! lose writes.

use super::*;
use crate::marks::{LOG_LOST, LOG_MADE, settle_lost_writes};

use crate::pool::OldLog;
use crate::record::Durability;
use crate::testing::pool_config as config;
use block::{BlockDevice, WriteFlags};

async fn write_flushed(open: &OpenPool, text: &'static [u8]) {
    let volume = open.pool.volume("db").unwrap();
    volume.write(0, text.into(), WriteFlags { fua: false }).await.unwrap();
    volume.flush().await.unwrap();
}

fn has_lost_writes(open: &OpenPool) -> bool {
    open.pool.volume("db").unwrap().record().has_lost_writes
}

/// Ends a pool like a killed process: nothing is flushed or released.
async fn crash(open: OpenPool) {
    open.pool.fence(Error::new(ErrorKind::Io, "killed by the test"));
    open.close().await.unwrap_err();
}

/// Opens a new pool with one volume.
async fn made(config: &PoolConfig) -> OpenPool {
    let pool = open(config, Opening::OrNew).await.unwrap();
    pool.pool.create_volume("db", 1 << 20, Durability::Flush).await.unwrap();
    pool
}

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let said = error.chain();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{said}");
    for word in words {
        assert!(said.contains(word), "it does not say {word:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_log_in_its_place_is_refused_and_given_up_only_by_name() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let (log, older) = (place.path().join("a/log"), place.path().join("older"));
    let pool = made(&config).await;
    write_flushed(&pool, b"first").await;
    crash(pool).await;
    std::fs::create_dir(&older).unwrap();
    for entry in std::fs::read_dir(&log).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, older.join(path.file_name().unwrap())).unwrap();
    }
    let pool = open(&config, Opening::OrNew).await.unwrap();
    // The store has no trace of it.
    write_flushed(&pool, b"third").await;
    crash(pool).await;
    std::fs::rename(&log, place.path().join("newest")).unwrap();
    std::fs::rename(&older, &log).unwrap();
    let advice = ["move ", "a/log away and delete ", "a/log.made"];
    for _ in 0..2 {
        let error = open(&config, Opening::OrNew).await.err().expect("it is an older copy");
        says(&error, &["in epoch 1", "served epoch 2", "older copy", "nothing was changed"]);
        says(&error, &advice);
    }
    // Following half of the advice leads to the other half.
    std::fs::rename(&log, &older).unwrap();
    let error = open(&config, Opening::OrNew).await.err().expect("there is none");
    says(&error, &["holds no log"]);
    says(&error, &advice);
    // The newest log is still valid.
    std::fs::remove_dir_all(&log).unwrap_or_default();
    std::fs::rename(place.path().join("newest"), &log).unwrap();
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    let mut bytes = [0; 5];
    pool.pool.volume("db").unwrap().read(0, &mut bytes).await.unwrap();
    assert_eq!(&bytes, b"third");
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_was_given_up_makes_every_volume_lose_writes() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let give_up = || {
        std::fs::remove_dir_all(place.path().join("a/log")).unwrap();
        std::fs::remove_file(place.path().join("a/log.made")).unwrap();
    };
    let pool = made(&config).await;
    pool.pool.destage_all().await.unwrap();
    write_flushed(&pool, b"gone").await;
    crash(pool).await;
    give_up();
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(has_lost_writes(&pool), "nobody hears that writes are gone");
    let is_told = |pool: &OpenPool| pool.conditions.is_raised(ConditionKind::WritesLost, "db");
    assert!(is_told(&pool));
    // Recorded durably, and only once.
    crash(pool).await;
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(has_lost_writes(&pool));
    settle_lost_writes(&config.dir).unwrap();
    assert!(is_told(&pool), "a restart does not end it");
    pool.pool.accept_loss("db", false).await.unwrap();
    assert!(!is_told(&pool));
    crash(pool).await;
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    pool.close().await.unwrap();
    // If a process ended before any volume could record the loss, the next process does.
    give_up();
    make_mark(&config.dir, LOG_LOST).unwrap();
    make_mark(&config.dir, LOG_MADE).unwrap();
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(has_lost_writes(&pool));
    settle_lost_writes(&config.dir).unwrap();
    pool.pool.accept_loss("db", false).await.unwrap();
    pool.close().await.unwrap();
    // A released pool has lost nothing.
    give_up();
    let pool = open(&config, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    pool.close().await.unwrap();
}

/// Devices attached before the first loss, between the two, and after the second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_loss_counts_for_devices_attached_after_the_first() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let give_up = || {
        std::fs::remove_dir_all(place.path().join("a/log")).unwrap();
        std::fs::remove_file(place.path().join("a/log.made")).unwrap();
    };
    let pool = made(&config).await;
    pool.pool.destage_all().await.unwrap();
    let first = pool.ownership.epoch();
    crash(pool).await;
    for is_accepted in [false, true] {
        give_up();
        let pool = open(&config, Opening::OrNew).await.unwrap();
        settle_lost_writes(&config.dir).unwrap();
        let between = pool.ownership.epoch();
        pool.pool.destage_all().await.unwrap();
        let volume = pool.pool.volume("db").unwrap();
        assert!(volume.record().has_lost_writes_since(first, true));
        assert!(!volume.record().has_lost_writes_since(between, true));
        if is_accepted {
            pool.pool.accept_loss("db", false).await.unwrap();
            assert!(
                volume.record().has_lost_writes_since(first, false),
                "accepting undoes nothing"
            );
            assert!(!volume.record().has_lost_writes_since(between, false));
        }
        pool.pool.destage_all().await.unwrap();
        crash(pool).await;
        give_up();
        let pool = open(&config, Opening::OrNew).await.unwrap();
        settle_lost_writes(&config.dir).unwrap();
        let volume = pool.pool.volume("db").unwrap();
        assert!(volume.record().has_lost_writes_since(between, true), "the second was not seen");
        pool.pool.destage_all().await.unwrap();
        crash(pool).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_take_over_still_marks_lost_writes() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (config(place.path(), "a"), config(place.path(), "b"));
    let pool = made(&here).await;
    pool.pool.destage_all().await.unwrap();
    write_flushed(&pool, b"only here").await;
    // The pool is taken, and then the process is killed.
    let store = Store::open(&there.store_url, &StoreOptions::default()).unwrap();
    let keys = KeyRing::open(&store, &there.keys).await.unwrap();
    let node = NodeDir::open(&there.dir).unwrap();
    let terms = Terms { take_over: TakeOver::Forced, ..Terms::default() };
    let _owed = LossOwed::before(&there.dir, terms).unwrap();
    let key = &keys.newest().key;
    Ownership::acquire(&store, &node, key, keys.pool(), "main", terms).await.unwrap();
    drop(node);
    crash(pool).await;
    for _ in 0..2 {
        let pool = open(&there, Opening::OrNew).await.unwrap();
        assert!(has_lost_writes(&pool), "nobody hears that writes are gone");
        crash(pool).await;
    }
    settle_lost_writes(&there.dir).unwrap();
    let pool = open(&there, Opening::OrNew).await.unwrap();
    pool.pool.accept_loss("db", false).await.unwrap();
    pool.close().await.unwrap();
    // A take-over that takes nothing away leaves no duty.
    let pool = open(&there, Opening::TakeOver).await.unwrap();
    assert!(!has_lost_writes(&pool));
    assert!(!there.dir.join(TAKEN_OVER).exists());
    pool.close().await.unwrap();
}

/// Copies a directory with everything in it. Without another process: between its fork and its exec it
/// would hold the locks of the pools that other tests have open and close meanwhile.
fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy_tree(&path, &target),
            false => drop(std::fs::copy(&path, &target).unwrap()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_leaves_devices_to_the_original() {
    let place = tempfile::tempdir().unwrap();
    let original = config(place.path(), "a");
    made(&original).await.close().await.unwrap();
    let name = "devices.test";
    std::fs::write(original.dir.join(name), b"its own").unwrap();
    let copy = config(place.path(), "b");
    copy_tree(&original.dir, &copy.dir);
    open(&copy, Opening::OrNew).await.unwrap().close().await.unwrap();
    assert!(!copy.dir.join(name).exists());
    assert!(copy.dir.join(format!("{name}.of-the-original")).exists());
    assert!(original.dir.join(name).exists());
    // From then on the copy is a directory of its own.
    std::fs::write(copy.dir.join(name), b"of the copy").unwrap();
    open(&copy, Opening::OrNew).await.unwrap().close().await.unwrap();
    assert!(copy.dir.join(name).exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opening_cut_short_before_its_log_loses_no_writes() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (config(place.path(), "a"), config(place.path(), "b"));
    made(&here).await.close().await.unwrap();
    // The pool is taken, and then the process is killed.
    let store = Store::open(&there.store_url, &StoreOptions::default()).unwrap();
    let keys = KeyRing::open(&store, &there.keys).await.unwrap();
    let node = NodeDir::open(&there.dir).unwrap();
    let (key, terms) = (&keys.newest().key, Terms::default());
    Ownership::acquire(&store, &node, key, keys.pool(), "main", terms).await.unwrap();
    drop(node);
    let pool = open(&there, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    // Back in the first directory, the log there is superseded, and a new one continues above it.
    write_flushed(&pool, b"there").await;
    pool.close().await.unwrap();
    let pool = open(&here, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    crash(pool).await;
    let pool = open(&here, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    let mut bytes = [0; 5];
    pool.pool.volume("db").unwrap().read(0, &mut bytes).await.unwrap();
    assert_eq!(&bytes, b"there");
    pool.close().await.unwrap();
}

/// Offset, length and number of entries of each batch in a log file; layout in docs/format-log.md.
fn batches(path: &Path) -> Vec<(usize, usize, u32)> {
    let bytes = std::fs::read(path).unwrap();
    let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let starts = (4096..bytes.len()).step_by(4096);
    let found = starts.filter(|at| bytes[*at..].starts_with(b"SPDLBTCH"));
    found.map(|at| (at, usize::try_from(number(at + 148)).unwrap(), number(at + 144))).collect()
}

/// A power cut keeps a later batch but not the one before it. The next run writes its opening batch
/// before the stale one, and ends at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_batch_does_not_make_a_log_look_older() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let pool = made(&config).await;
    write_flushed(&pool, b"first").await;
    let volume = pool.pool.volume("db").unwrap();
    for sector in [8, 16] {
        volume.write(sector * 512, b"later"[..].into(), WriteFlags { fua: false }).await.unwrap();
    }
    crash(pool).await;
    let ring = place.path().join("a/log/ring-00000.log");
    let with_entries: Vec<_> =
        batches(&ring).into_iter().filter(|(.., count)| *count > 0).collect();
    let [.., (at, length, _), _] = with_entries[..] else { panic!("two writes, two batches") };
    let mut bytes = std::fs::read(&ring).unwrap();
    bytes[at..at + length].fill(0);
    std::fs::write(&ring, bytes).unwrap();
    for _ in 0..2 {
        let pool = open(&config, Opening::OrNew).await.expect("the log is whole");
        let mut bytes = [0; 5];
        pool.pool.volume("db").unwrap().read(0, &mut bytes).await.unwrap();
        assert_eq!(&bytes, b"first");
        crash(pool).await;
    }
    assert!(!place.path().join("a/log.superseded-1").exists());
}

/// Damage that hides the newer part of the own log makes it neither another owner's log nor an
/// older copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_log_of_the_owner_is_refused_not_stalled() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (config(place.path(), "a"), config(place.path(), "b"));
    // The pool has been elsewhere, so that an earlier epoch would count as superseded.
    made(&there).await.close().await.unwrap();
    let pool = open(&here, Opening::OrNew).await.unwrap();
    write_flushed(&pool, b"first").await;
    crash(pool).await;
    let pool = open(&here, Opening::OrNew).await.unwrap();
    write_flushed(&pool, b"third").await;
    crash(pool).await;
    let ring = place.path().join("a/log/ring-00000.log");
    let mut bytes = std::fs::read(&ring).unwrap();
    let (at, length, _) = batches(&ring).into_iter().find(|(.., count)| *count > 0).unwrap();
    bytes[at..at + length].fill(0);
    std::fs::write(&ring, bytes).unwrap();
    let error = open(&here, Opening::OrNew).await.err().expect("a flushed batch is gone");
    says(
        &error,
        &[
            &format!("is damaged at offset {at}"),
            "Nothing was changed",
            "Keep this log: it holds up to ",
        ],
    );
    assert!(!error.chain().contains("move ") && ring.exists(), "{}", error.chain());
}

/// A log that another owner has superseded is removed only if it proves that the store has all of
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn superseded_log_is_kept_unless_the_store_has_everything() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (config(place.path(), "a"), config(place.path(), "b"));
    let stalled = |epoch: u64| place.path().join(format!("a/log.superseded-{epoch}"));
    let pool = made(&here).await;
    write_flushed(&pool, b"first").await;
    pool.close().await.unwrap();
    open(&there, Opening::OrNew).await.unwrap().close().await.unwrap();
    let pool = open(&here, Opening::OrNew).await.unwrap();
    assert!(!stalled(1).exists(), "it was closed in order");
    write_flushed(&pool, b"third").await;
    crash(pool).await;
    let pool = open(&there, Opening::TakeOver).await.unwrap();
    pool.close().await.unwrap();
    let pool = open(&here, Opening::OrNew).await.unwrap();
    assert!(stalled(3).exists(), "a write is only there");
    pool.close().await.unwrap();
}

async fn read_of(open: &OpenPool, name: &str, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    open.pool.volume(name).expect("it is there").read(offset, &mut bytes).await.unwrap();
    bytes
}

/// The writes that the deposed owner alone has are a volume of their own, on the state from which the
/// pool went on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volume_is_made_from_a_log_that_the_pool_went_on_without() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (config(place.path(), "a"), config(place.path(), "b"));
    let pool = made(&here).await;
    let written = WriteFlags { fua: false };
    pool.pool.create_volume("idle", 1 << 20, Durability::Flush).await.unwrap();
    write_flushed(&pool, b"stored").await;
    let db = pool.pool.volume("db").unwrap();
    db.write(8192, b"trimmed"[..].into(), written).await.unwrap();
    pool.pool.destage_all().await.unwrap();
    db.write(0, b"lost 1"[..].into(), written).await.unwrap();
    db.write(4096, b"lost 2"[..].into(), written).await.unwrap();
    db.discard(8192, 4096, false).await.unwrap();
    pool.pool.resize_volume("db", 2 << 20, false).await.unwrap();
    db.write((2 << 20) - 512, vec![7; 512].into(), written).await.unwrap();
    let later = pool.pool.create_volume("later", 1 << 20, Durability::Flush).await.unwrap();
    later.write(512, vec![8; 512].into(), written).await.unwrap();
    crash(pool).await;

    let pool = open(&there, Opening::TakeOver).await.unwrap();
    assert_eq!(read_of(&pool, "db", 0, 6).await, b"stored");
    write_flushed(&pool, b"third ").await;
    // It has the id that `later` had.
    let other = pool.pool.create_volume("other", 1 << 20, Durability::Flush).await.unwrap();
    other.write(512, vec![9; 512].into(), written).await.unwrap();
    let kept = pool.pool.snapshots(None).unwrap();
    let [kept, of_idle] = &kept[..] else { panic!("{kept:?}") };
    assert_eq!(kept.record.name, format!("superseded-2-{}-3", pool.recovery.last_lsn.0));
    assert_eq!((&*of_idle.volume, &of_idle.record.name), ("idle", &kept.record.name));
    pool.close().await.unwrap();

    let pool = open(&here, Opening::OrNew).await.unwrap();
    let dir = here.dir.join("log.superseded-1");
    pool.show_superseded_logs()();
    assert!(
        pool.conditions.is_raised(ConditionKind::LogSuperseded, &dir.display().to_string()),
        "{:?}",
        pool.conditions.list()
    );
    let key = pool.keys.lock().await.newest().key.clone();
    let log = OldLog { dir, pool: pool.ownership.manifest().pool, key };
    let made = pool.pool.create_from_superseded("old", "db", &log).await.unwrap();
    assert_eq!((made.record.size_bytes, made.warning), (2 << 20, None));
    assert_eq!(made.entry_count, 5, "three writes, a trim, a size");
    assert_eq!(read_of(&pool, "old", 0, 6).await, b"lost 1");
    assert_eq!(read_of(&pool, "old", 4096, 6).await, b"lost 2");
    assert_eq!(read_of(&pool, "old", 8192, 7).await, [0; 7]);
    assert_eq!(read_of(&pool, "old", (2 << 20) - 512, 512).await, [7; 512]);
    assert_eq!(read_of(&pool, "db", 0, 6).await, b"third ", "the volume itself is unchanged");
    pool.pool.create_from_superseded("old-later", "later", &log).await.unwrap();
    assert_eq!(read_of(&pool, "old-later", 512, 512).await, [8; 512]);
    let fails = async |name, of, kind, words: &str| {
        let error = pool.pool.create_from_superseded(name, of, &log).await.expect_err("refused");
        assert_eq!(error.kind(), kind, "{}", error.chain());
        assert!(error.chain().contains(words), "{}", error.chain());
    };
    fails("old", "db", ErrorKind::Busy, "old").await;
    fails("new", "other", ErrorKind::NotFound, "has nothing of volume other").await;
    let names: Vec<_> = pool.pool.records().into_iter().map(|record| record.name).collect();
    assert!(!names.iter().any(|name| name.ends_with("-partial")), "{names:?}");
    // Without its snapshot, the state of a volume that was there is not known. A rename hides nothing.
    pool.pool.rename_volume("db", "db-2", std::future::ready(Ok(()))).await.unwrap();
    pool.pool.create_from_superseded("old-2", "db", &log).await.unwrap();
    assert_eq!(read_of(&pool, "old-2", 4096, 6).await, b"lost 2");
    let base = kept.record.name.clone();
    for clone in ["old", "old-2"] {
        pool.pool.remove_volume(clone, true).await.unwrap();
    }
    pool.pool.remove_snapshot("db-2", &base).await.unwrap();
    fails("new", "db", ErrorKind::NotFound, "it could not be made at that time").await;
    let elsewhere = OldLog { dir: here.dir.clone(), ..log.clone() };
    let error = pool.pool.create_from_superseded("new", "db", &elsewhere).await.unwrap_err();
    assert!(error.chain().contains("holds no log of this pool"), "{}", error.chain());
    pool.close().await.unwrap();
}

/// A flush that began while a quorum answered ends after the pool goes on alone: the store has to have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_under_way_waits_for_the_store_once_flushes_do() {
    let place = tempfile::tempdir().unwrap();
    let pool = made(&config(place.path(), "a")).await;
    let volume = pool.pool.volume("db").unwrap();
    for round in 0..20 {
        pool.pool.set_flushes_to_store(false);
        volume.write(0, vec![round; 512].into(), WriteFlags { fua: false }).await.unwrap();
        let written = pool.pool.log_status().last_lsn;
        let mut flush = Box::pin(volume.flush());
        let is_under_way = std::future::poll_fn(|context| {
            std::task::Poll::Ready(flush.as_mut().poll(context).is_pending())
        });
        if is_under_way.await {
            pool.pool.set_flushes_to_store(true);
            flush.await.unwrap();
            assert!(pool.pool.log_status().destaged_lsn >= written, "round {round}");
        }
    }
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_stops_is_a_condition() {
    let place = tempfile::tempdir().unwrap();
    let pool = made(&config(place.path(), "a")).await;
    assert!(!pool.conditions.is_raised(ConditionKind::PoolStopped, "pool"));
    pool.pool.fence(Error::new(ErrorKind::Fenced, "another has it"));
    assert!(pool.conditions.is_raised(ConditionKind::PoolStopped, "pool"));
    let told = pool.conditions.list().into_iter().map(|condition| condition.report.what);
    assert!(told.collect::<String>().contains("another has it"));
    pool.close().await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_that_is_larger_than_its_disk_is_a_condition() {
    let place = tempfile::tempdir().unwrap();
    let stat = rustix::fs::statvfs(place.path()).unwrap();
    if stat.f_bavail.saturating_mul(stat.f_frsize) >= 1 << 40 {
        println!("skipped: this disk holds the largest ring");
        return;
    }
    let mut config = config(place.path(), "a");
    (config.log.ring_bytes, config.log.file_bytes) = (1 << 40, 16 << 20);
    let pool = made(&config).await;
    let list = pool.conditions.list().into_iter();
    let short: Vec<_> = list.filter(|one| one.kind == ConditionKind::LogSpace).collect();
    assert_eq!((short.len(), &*short[0].subject), (1, "log"));
    assert!(short[0].report.what.contains("of its size"), "{short:?}");
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrub_whose_record_cannot_be_read_is_a_condition() {
    let place = tempfile::tempdir().unwrap();
    let pool = made(&config(place.path(), "a")).await;
    let record = place.path().join("store/scrub/00000000000000000001");
    std::fs::create_dir_all(record.parent().unwrap()).unwrap();
    std::fs::write(&record, b"rotten").unwrap();
    let scrub = pool.scrub().await.start().await;
    let list = pool.conditions.list().into_iter();
    let told: Vec<_> = list.filter(|one| one.kind == ConditionKind::ScrubFailing).collect();
    assert_eq!(told.len(), 1, "{:?}", pool.conditions.list());
    assert!(told[0].report.what.contains("could not read the progress of the scrub"), "{told:?}");
    scrub.stop(false).await;
    drop(scrub);
    pool.close().await.unwrap();
}

/// Makes an opening from `b` fail in the metadata, which the store has lost for a while.
async fn fails_without_metadata(place: &Path, b: &PoolConfig, opening: Opening) {
    let (metadata, away) = (place.join("store/metadata"), place.join("away"));
    std::fs::rename(&metadata, &away).unwrap();
    let error = open(b, opening).await.err().expect("the metadata is gone");
    says(&error, &["no metadata that names them", "Bring them back"]);
    assert!(!metadata.exists(), "nothing was made in its place");
    std::fs::rename(&away, &metadata).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_opening_elsewhere_leaves_the_pool_to_the_directory_that_closed_it() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (config(place.path(), "a"), config(place.path(), "b"));
    let pool = made(&a).await;
    write_flushed(&pool, b"kept").await;
    pool.close().await.unwrap();
    for _ in 0..2 {
        fails_without_metadata(place.path(), &b, Opening::OrNew).await;
        // From either directory.
        fails_without_metadata(place.path(), &a, Opening::OrNew).await;
    }
    for config in [&a, &b, &a] {
        let pool = open(config, Opening::OrNew).await.unwrap();
        let mut bytes = [0; 4];
        pool.pool.volume("db").unwrap().read(0, &mut bytes).await.unwrap();
        assert_eq!(&bytes, b"kept");
        assert!(!has_lost_writes(&pool));
        pool.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_take_over_loses_nothing_of_the_log_of_a_crashed_owner() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (config(place.path(), "a"), config(place.path(), "b"));
    let pool = made(&a).await;
    write_flushed(&pool, b"stored").await;
    pool.close().await.unwrap();
    let pool = open(&a, Opening::OrNew).await.unwrap();
    write_flushed(&pool, b"in log").await;
    crash(pool).await;
    fails_without_metadata(place.path(), &b, Opening::TakeOver).await;
    // Other directories need a take-over.
    let refused = open(&b, Opening::OrNew).await.err().expect("it is open on the other one");
    assert_eq!(refused.kind(), ErrorKind::Busy, "{}", refused.chain());
    let pool = open(&a, Opening::OrNew).await.unwrap();
    let mut bytes = [0; 6];
    pool.pool.volume("db").unwrap().read(0, &mut bytes).await.unwrap();
    assert_eq!(&bytes, b"in log");
    assert!(!has_lost_writes(&pool));
    pool.close().await.unwrap();
    // The failed directory has no duty left.
    let pool = open(&b, Opening::OrNew).await.unwrap();
    assert!(!has_lost_writes(&pool));
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opening_that_is_stopped_at_any_moment_leaves_the_pool_to_others() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (config(place.path(), "a"), config(place.path(), "b"));
    made(&a).await.close().await.unwrap();
    // The stop comes after this many turns of the opening's task.
    for turn_count in [0, 1, 2, 4, 8, 16, 32, 64, 128] {
        let stop = async {
            for _ in 0..turn_count {
                tokio::task::yield_now().await;
            }
        };
        let opened = open_until(&b, Opening::OrNew, std::pin::pin!(stop)).await.unwrap();
        if let Some(pool) = opened {
            pool.close().await.unwrap();
        }
        open(&a, Opening::OrNew).await.unwrap().close().await.unwrap();
    }
}
