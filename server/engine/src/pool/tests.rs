//! Tests of an open pool, over a real log and a store in memory.

use super::*;
use crate::client_record::ClientRecord;
use crate::reservations::HOLDER_COUNT_MAX;
use crate::session::Attachment;
use crate::testing::{MAX_AGE, MIB, NO_FUA, kill, log_options, open, open_with, pattern};
use block::env::{Clock, SystemClock};
use block::{BlockDevice, Epoch, WriteFlags, ZeroFlags};
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;
use wal::LogOptions;

mod clock;
mod dedicated_keys;
mod schedules;
mod stalled;

async fn read(volume: &Volume, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; len];
    volume.read(offset, &mut bytes).await?;
    Ok(bytes)
}

async fn segments(store: &InMemory) -> Vec<ObjectPath> {
    let listed = store.list(Some(&ObjectPath::from("segments")));
    let mut names: Vec<ObjectPath> =
        listed.map_ok(|meta| meta.location).try_collect().await.unwrap();
    names.sort();
    names
}

#[tokio::test]
async fn rest_of_a_long_write_retains_no_other_memory() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    // Nothing is destaged during the test.
    let pool = open_with(dir.path(), &store, 1, log_options(), Duration::from_secs(3600)).await;
    pool.create_volume("v", 4 * MIB, Durability::Flush).await.unwrap();
    let volume = pool.volume("v").unwrap();
    for length in [MIB as usize, 128 << 10] {
        let payload = Bytes::from(vec![7; length]);
        volume.write(0, payload.clone(), WriteFlags::default()).await.unwrap();
        assert_eq!(payload.is_unique(), length > 128 << 10, "of {length} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_kill_and_close() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("db", 64 * MIB, Durability::Auto).await.unwrap();
    let mut model = vec![0; 2 << 20];
    for step in 0..400u64 {
        let offset = (step * 7919 * 311) % (model.len() as u64 - 9000);
        let bytes = pattern(step, 1 + (step as usize * 613) % 9000);
        volume.write(offset, bytes.clone(), NO_FUA).await.unwrap();
        model[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        if step % 40 == 7 {
            let (from, length) = (offset / 2, 10_000);
            volume.write_zeroes(from, length, ZeroFlags::default()).await.unwrap();
            model[from as usize..][..length as usize].fill(0);
        }
        if step == 200 {
            pool.destage_all().await.unwrap();
        }
    }
    assert_eq!(read(&volume, 0, model.len()).await.unwrap(), model);
    drop(volume);
    kill(pool).await;
    let pool = open(dir.path(), &store, 2).await;
    let volume = pool.volume("db").unwrap();
    assert_eq!(read(&volume, 0, model.len()).await.unwrap(), model);
    assert_eq!(read(&volume, 333, 70_001).await.unwrap(), model[333..70_334]);
    pool.destage_all().await.unwrap();
    drop(volume);
    let (last_lsn, destaged_lsn) = pool.close().await.unwrap();
    assert_eq!(last_lsn, destaged_lsn);
    // Another machine, with an empty directory and the same store.
    let other = tempfile::tempdir().unwrap();
    let pool = open(other.path(), &store, 3).await;
    let volume = pool.volume("db").unwrap();
    assert_eq!(read(&volume, 0, model.len()).await.unwrap(), model);
    assert_eq!(pool.fsck().await.unwrap().problems(), Vec::<String>::new());
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_ragged_writes_keep_each_others_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("v", MIB, Durability::Flush).await.unwrap();
    // 64 writers, each repeatedly writing its own bytes of the same two sectors.
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..64u64 {
        let volume = volume.clone();
        writers.spawn(async move {
            for round in 0..20u8 {
                let bytes = Bytes::from(vec![round.wrapping_add(writer as u8); 16]);
                volume.write(writer * 16, bytes, NO_FUA).await.unwrap();
            }
        });
    }
    while let Some(writer) = writers.join_next().await {
        writer.unwrap();
    }
    let found = read(&volume, 0, 1024).await.unwrap();
    for writer in 0..64 {
        let wanted = 19u8.wrapping_add(writer as u8);
        assert_eq!(found[writer * 16..][..16], [wanted; 16], "bytes of writer {writer}");
    }
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fast_zeroes_are_refused_for_partial_sectors() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("a", MIB, Durability::Auto).await.unwrap();
    let written = pattern(1, 8192);
    for no_hole in [false, true] {
        let fast = ZeroFlags { fast_only: true, no_hole, ..ZeroFlags::default() };
        volume.write(0, written.clone(), NO_FUA).await.unwrap();
        for (offset, length) in [(1, 512), (0, 511), (512, 513), (100, 200), (8191, 2)] {
            let error = volume.write_zeroes(offset, length, fast).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{length} at {offset}: {error}");
        }
        assert_eq!(read(&volume, 0, 8192).await.unwrap(), written, "a refusal changes nothing");
        let outside = volume.write_zeroes(MIB - 1, 512, fast).await.unwrap_err();
        assert_eq!(outside.kind(), ErrorKind::Full, "never fast, and never at all");
        for (offset, length) in [(512, 512), (1024, 4096), (7, 0)] {
            volume.write_zeroes(offset, length, fast).await.unwrap();
        }
        assert_eq!(read(&volume, 0, 512).await.unwrap(), written[..512]);
        assert_eq!(read(&volume, 512, 4608).await.unwrap(), [0; 4608]);
        assert_eq!(read(&volume, 5120, 3072).await.unwrap(), written[5120..]);
        // Requests that may wait are served.
        let slow = ZeroFlags { no_hole, ..ZeroFlags::default() };
        volume.write_zeroes(1, 510, slow).await.unwrap();
        assert_eq!(read(&volume, 0, 1).await.unwrap(), written[..1]);
        assert_eq!(read(&volume, 1, 510).await.unwrap(), [0; 510]);
    }
    drop(volume);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_come_go_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let kind = |result: Result<_>| result.map(drop).unwrap_err().kind();
    let volume = pool.create_volume("a", MIB, Durability::Auto).await.unwrap();
    assert_eq!(kind(pool.create_volume("a", MIB, Durability::Auto).await), ErrorKind::Busy);
    assert_eq!(kind(pool.create_volume("b", 1000, Durability::Auto).await), ErrorKind::Invalid);
    assert_eq!(kind(pool.create_volume("/", MIB, Durability::Auto).await), ErrorKind::Invalid);
    volume.write(MIB - 4096, pattern(1, 4096), NO_FUA).await.unwrap();
    // Shrinking must be requested explicitly, and the data that was cut off does not come back.
    assert_eq!(
        pool.resize_volume("a", MIB / 2, false).await.unwrap_err().kind(),
        ErrorKind::Denied
    );
    pool.resize_volume("a", MIB / 2, true).await.unwrap();
    let past_end = volume.write(MIB - 4096, pattern(1, 4096), NO_FUA).await.unwrap_err();
    assert_eq!(past_end.kind(), ErrorKind::Full);
    assert_eq!(read(&volume, MIB / 2 - 1, 2).await.unwrap_err().kind(), ErrorKind::Invalid);
    pool.resize_volume("a", 2 * MIB, false).await.unwrap();
    assert_eq!(read(&volume, MIB - 4096, 4096).await.unwrap(), [0; 4096]);
    // A removed volume is gone for clients that still hold it, and comes back whole.
    volume.write(0, pattern(5, 4096), NO_FUA).await.unwrap();
    pool.remove_volume("a", false).await.unwrap();
    assert_eq!(read(&volume, 0, 1).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(pool.volume("a").is_none());
    let other = pool.create_volume("a", MIB, Durability::Auto).await.unwrap();
    assert_ne!(other.id(), volume.id());
    assert_eq!(pool.restore_volume("a").await.unwrap_err().kind(), ErrorKind::Busy);
    pool.remove_volume("a", true).await.unwrap();
    pool.restore_volume("a").await.unwrap();
    let again = pool.volume("a").unwrap();
    assert_eq!(again.id(), volume.id());
    assert_eq!(read(&again, 0, 4096).await.unwrap(), pattern(5, 4096));
    // A read-only volume refuses every change.
    pool.configure_volume("a", Some(Durability::Write), Some(true), None).await.unwrap();
    let denied = again.discard(0, 4096, false).await.unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::Denied);
    drop((volume, other, again));
    kill(pool).await;
    let pool = open(dir.path(), &store, 2).await;
    let volume = pool.volume("a").unwrap();
    assert!(volume.record().is_read_only);
    assert_eq!(read(&volume, 0, 4096).await.unwrap(), pattern(5, 4096));
    drop(volume);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_with_durability_store_waits_for_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("v", MIB, Durability::Store).await.unwrap();
    volume.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
    volume.flush().await.unwrap();
    // The machine vanishes: only the store is left.
    drop(volume);
    kill(pool).await;
    let other = tempfile::tempdir().unwrap();
    let pool = open(other.path(), &store, 2).await;
    let volume = pool.volume("v").unwrap();
    assert_eq!(read(&volume, 0, 4096).await.unwrap(), pattern(1, 4096));
    volume.write(4096, pattern(2, 4096), WriteFlags { fua: true }).await.unwrap();
    drop(volume);
    kill(pool).await;
    let other = tempfile::tempdir().unwrap();
    let pool = open(other.path(), &store, 3).await;
    let volume = pool.volume("v").unwrap();
    assert_eq!(read(&volume, 4096, 4096).await.unwrap(), pattern(2, 4096));
    drop(volume);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_of_any_volume_waits_for_the_store_while_it_has_to() {
    for durability in [Durability::Flush, Durability::Write] {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(InMemory::new());
        let hour = Duration::from_secs(3600);
        let pool = open_with(dir.path(), &store, 1, log_options(), hour).await;
        let volume = pool.create_volume("v", MIB, durability).await.unwrap();
        volume.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
        volume.flush().await.unwrap();
        assert_eq!(pool.tier().destaged_lsn(), Lsn::NONE, "the log is enough");
        pool.set_flushes_to_store(true);
        volume.flush().await.unwrap();
        let flushed = pool.tier().destaged_lsn();
        assert!(flushed > Lsn::NONE);
        volume.write(4096, pattern(2, 4096), WriteFlags { fua: true }).await.unwrap();
        let written = pool.tier().destaged_lsn();
        assert!(written > flushed);
        volume.write(12288, pattern(4, 4096), NO_FUA).await.unwrap();
        let is_stored = pool.tier().destaged_lsn() > written;
        assert_eq!(is_stored, durability == Durability::Write, "its writes need no flush");
        pool.set_flushes_to_store(false);
        let flushed = pool.tier().destaged_lsn();
        volume.write(8192, pattern(3, 4096), WriteFlags { fua: true }).await.unwrap();
        volume.flush().await.unwrap();
        assert_eq!(pool.tier().destaged_lsn(), flushed);
        drop(volume);
        pool.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_a_volume_are_in_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("v", MIB, Durability::Flush).await.unwrap();
    let id = volume.id();
    let client = |number| ClientRecord {
        pool: Uuid::nil(),
        client: Uuid::from_u128(number),
        boot: Uuid::nil(),
        attachment: Uuid::from_u128(number),
        label: "host".to_owned(),
        is_shared: true,
        attached_at: 1,
        epoch: 1,
        has_lost_writes: false,
    };
    pool.record_clients(id, vec![client(1)]).await.unwrap();
    // Other changes of the record keep them.
    pool.resize_volume("v", 2 * MIB, false).await.unwrap();
    volume.resize(3 * MIB).await.unwrap();
    pool.configure_volume("v", Some(Durability::Write), None, None).await.unwrap();
    drop(volume);
    kill(pool).await;
    let pool = open(dir.path(), &store, 2).await;
    let record = pool.volume("v").unwrap().record();
    assert_eq!((record.clients.clone(), record.size_bytes), (vec![client(1)], 3 * MIB));
    // As many as there may be fit, with the longest labels.
    let label = "x".repeat(255);
    let all =
        (0..HOLDER_COUNT_MAX).map(|n| ClientRecord { label: label.clone(), ..client(n as u128) });
    pool.record_clients(id, all.collect()).await.unwrap();
    pool.record_clients(id, Vec::new()).await.unwrap();
    // The log alone has said so far; now the metadata does.
    pool.record_clients(id, vec![client(2)]).await.unwrap();
    pool.destage_all().await.unwrap();
    kill(pool).await;
    let other = tempfile::tempdir().unwrap();
    let pool = open(other.path(), &store, 3).await;
    assert_eq!(pool.volume("v").unwrap().record().clients, vec![client(2)]);
    let snapshot = pool.volume("v").unwrap().record();
    drop(snapshot);
    pool.record_clients(id, Vec::new()).await.unwrap();
    pool.remove_volume("v", false).await.unwrap();
    pool.record_clients(id, Vec::new()).await.unwrap();
    let refused = pool.record_clients(id, vec![client(3)]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_never_gets_ahead_of_the_synced_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let volume = pool.create_volume("v", MIB, Durability::Flush).await.unwrap();
    for seed in 0..5 {
        volume.write(0, pattern(seed, 4096), NO_FUA).await.unwrap();
        volume.write(4096, pattern(seed, 4096), NO_FUA).await.unwrap();
        let last_lsn = pool.log_status().last_lsn;
        pool.shared.wait_destaged(last_lsn).await.unwrap();
        let durable_lsn = pool.log_status().durable_lsn;
        assert!(durable_lsn >= last_lsn, "{last_lsn} is in the store, {durable_lsn} is durable");
    }
    // A log that fails before it has synced keeps its last entries out of the store.
    volume.write(0, pattern(9, 4096), NO_FUA).await.unwrap();
    pool.shared.log.fail(Error::new(ErrorKind::Io, "the sync failed"));
    pool.shared.log.freeze();
    tokio::time::sleep(MAX_AGE * 3).await;
    let (log, destaged) = (pool.log_status(), pool.shared.tier.destaged_lsn());
    assert!(destaged <= log.durable_lsn && log.durable_lsn < log.last_lsn, "{destaged}: {log:?}");
    drop(volume);
    kill(pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_ends_waits_for_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    let never = Lsn(u64::MAX);
    let waiting = {
        let pool = pool.clone();
        tokio::spawn(async move { pool.shared.wait_destaged(never).await })
    };
    while !pool.shared.is_wanted() {
        tokio::task::yield_now().await;
    }
    pool.close().await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await.expect("it ends");
    assert_eq!(waited.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    // New waits do not begin either.
    let late = pool.shared.wait_destaged(never);
    let late = tokio::time::timeout(Duration::from_secs(30), late).await.expect("it ends");
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Unavailable);
}

/// Writes a few thousand times a second until told to end.
async fn burst(volume: Arc<Volume>, is_over: Arc<AtomicBool>) {
    while !is_over.load(Ordering::Relaxed) {
        for n in 0..8 {
            volume.write(n * 4096, pattern(n, 4096), NO_FUA).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_delays_a_generation_unless_a_caller_waits() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let log = LogOptions {
        ring_bytes: 256 * MIB,
        file_bytes: 8 * MIB,
        generation_bytes_max: 4 * MIB,
        ..LogOptions::default()
    };
    let pool = open_with(dir.path(), &store, 1, log, Duration::from_secs(3600)).await;
    let volume = pool.create_volume("v", MIB, Durability::Flush).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn(burst(volume.clone(), is_over.clone()));
    let destaged = || pool.destage_progress().window_count;
    // On a busy machine this may not be a burst; then try again.
    let mut tries = 0..30;
    loop {
        assert!(tries.next().is_some(), "no generation has waited");
        pool.shared.wait_destaged(pool.log_status().last_lsn).await.unwrap();
        let (begun, before) = (SystemClock.now(), pool.log_status());
        while pool.log_status().frozen_count == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let windows = destaged();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let log = pool.log_status();
        let rate =
            (log.batch_count - before.batch_count) as f64 / SystemClock.since(begun).as_secs_f64();
        let is_room = log.used_bytes < log.ring_bytes / 4 && log.frozen_count < 8;
        if rate > 3000.0 && is_room && destaged() == windows {
            break;
        }
    }
    // The burst is still running.
    let waited = pool.shared.wait_destaged(pool.log_status().last_lsn);
    tokio::time::timeout(Duration::from_secs(60), waited).await.expect("it is moved").unwrap();
    is_over.store(true, Ordering::Relaxed);
    writer.await.unwrap();
    // No caller waits for these.
    let until = SystemClock.now() + Duration::from_secs(60);
    while pool.log_status().frozen_count > 0 {
        assert!(SystemClock.now() < until, "{:?}", pool.log_status());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(volume);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_without_a_volatile_cache_are_stable_when_answered() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open_with(dir.path(), &store, 1, log_options(), Duration::from_secs(3600)).await;
    // Durability when the device was made, or changed since: the user of the device relies on what
    // it announced then.
    let volume = pool.create_volume("v", MIB, Durability::Flush).await.unwrap();
    for is_write_through in [false, true] {
        let device = Attachment::local(volume.clone(), is_write_through);
        assert_eq!(device.limits().has_volatile_cache, !is_write_through);
        assert_eq!(device.must_be_durable(), is_write_through);
        // The log also syncs on its own from time to time, so data may be stable earlier than
        // required.
        let is_stable = || {
            let log = pool.log_status();
            log.durable_lsn == log.last_lsn || !is_write_through
        };
        for round in 0..3 {
            device.write(0, pattern(round, 4096), NO_FUA).await.unwrap();
            assert!(is_stable(), "a write");
            device.write(512 * round, pattern(round, 100), NO_FUA).await.unwrap();
            assert!(is_stable(), "a ragged write");
            device.discard(8192, 8192, false).await.unwrap();
            assert!(is_stable(), "a discard");
            device.write_zeroes(0, 4096, ZeroFlags::default()).await.unwrap();
            assert!(is_stable(), "zeroes");
        }
    }
    drop(volume);
    pool.close().await.unwrap();
}
