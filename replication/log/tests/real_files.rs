//! The log over real files: durability after a dropped process, an orderly close and damage.
#![expect(
    clippy::disallowed_methods,
    reason = "the log of these tests runs on real files in real time"
)]

use block::seal::{KEY_BYTES, PoolKey};
use block::{Epoch, ErrorKind, Lsn, VolumeId};
use bytes::Bytes;
use std::path::Path;
use std::time::{Duration, SystemTime};
use wal::{
    EntryKind, IoMode, Log, LogIdentity, LogOptions, NewEntry, Recovery, Source, SpillFilesWanted,
    Wait,
};

const VOLUME: VolumeId = VolumeId(7);

fn options(io_mode: IoMode) -> LogOptions {
    LogOptions {
        ring_bytes: 4 << 20,
        file_bytes: 1 << 20,
        generation_bytes_max: 1 << 20,
        unsynced_bytes_max: 256 << 10,
        io_mode,
        ..LogOptions::default()
    }
}

fn identity(epoch: u64, boot: u8) -> LogIdentity {
    LogIdentity {
        pool: [1; 16],
        epoch: Epoch(epoch),
        boot_id: [boot; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    }
}

fn key() -> PoolKey {
    PoolKey::new([3; KEY_BYTES])
}

fn open(dir: &Path, epoch: u64, destaged: u64) -> (Log, Recovery) {
    open_as(dir, identity(epoch, 1), destaged).expect("the log opens")
}

fn open_as(dir: &Path, id: LogIdentity, destaged: u64) -> block::Result<(Log, Recovery)> {
    Log::open(dir, id, key(), options(IoMode::Buffered), Lsn(destaged))
}

fn open_by(dir: &Path, io_mode: IoMode) -> (Log, Recovery) {
    Log::open(dir, identity(1, 1), key(), options(io_mode), Lsn(0)).expect("the log opens")
}

fn write(sector: u64, fill: u8, sectors: usize) -> NewEntry {
    NewEntry {
        volume: VOLUME,
        kind: EntryKind::Write,
        start_sector: sector,
        sector_count: sectors as u64,
        payload: Bytes::from(vec![fill; sectors * 512]),
    }
}

async fn contents(log: &Log, sector: u64) -> Option<u8> {
    let pieces = log.overlay().lookup(VOLUME, sector, 1);
    assert_eq!(pieces.len(), 1);
    match &pieces[0].source {
        Source::Payload(bytes) => Some(bytes[0]),
        Source::LogResident(resident) => {
            Some(log.read(resident).await.expect("reads").expect("is not released")[0])
        }
        Source::Zeroes { .. } => Some(0),
        Source::SpillResident(_) | Source::Lost { .. } | Source::Beneath => None,
    }
}

fn files_of(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "log"))
        .collect();
    files.sort();
    files
}

/// Ticks sync unrequested data within a second or so; this is about a hundred times faster.
#[tokio::test]
async fn where_each_write_is_flushed_the_sync_starts_with_the_answer() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    let mut started = 0;
    for round in 0..40u64 {
        // Every earlier sync was over when its flush was answered.
        let before = log.status().sync_count;
        log.append(write(round * 8, 1, 8), Wait::Written).await.unwrap();
        // The disk's thread may answer a moment before it starts the sync; a tick takes twice as
        // long.
        let until = std::time::Instant::now() + std::time::Duration::from_millis(100);
        while log.status().sync_count == before && round >= 8 && std::time::Instant::now() < until {
            tokio::task::yield_now().await;
        }
        started += u64::from(log.status().sync_count > before && round >= 8);
        log.flush().await.unwrap();
        let status = log.status();
        assert_eq!(status.durable_lsn, status.last_lsn);
    }
    assert!(started >= 24, "the sync had started in {started} of 32 rounds");
    log.close().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_entries_survive_a_drop_and_a_close() {
    for io_mode in [IoMode::Buffered, IoMode::Direct] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let open = |destaged| {
            Log::open(dir.path(), identity(1, 1), key(), options(io_mode), Lsn(destaged)).unwrap()
        };
        let (log, recovery) = open(0);
        assert!(recovery.is_new && recovery.was_clean && recovery.is_tail_proven);
        for n in 0..100u64 {
            let lsn = log.append(write(n * 8, n as u8, 8), Wait::Written).await.unwrap();
            assert_eq!(lsn, Lsn(n + 1));
        }
        drop(log);
        let (log, recovery) = open(0);
        assert_eq!((recovery.entry_count, recovery.last_lsn), (100, Lsn(100)));
        assert!(!recovery.was_clean && recovery.is_tail_proven);
        for n in 0..100u64 {
            assert_eq!(contents(&log, n * 8).await, Some(n as u8), "{io_mode:?} {n}");
        }
        assert_eq!(log.flush().await.unwrap(), Lsn(100));
        log.append(write(0, 0xee, 8), Wait::Durable).await.unwrap();
        assert_eq!(log.status().durable_lsn, Lsn(101));
        log.clone().close().unwrap();
        let after = log.append(write(0, 1, 8), Wait::Written).await.unwrap_err();
        assert_eq!(after.kind(), ErrorKind::Unavailable);
        drop(log);
        let (log, recovery) = open(0);
        assert!(recovery.was_clean && recovery.is_tail_proven);
        assert_eq!(recovery.last_lsn, Lsn(101));
        assert_eq!(contents(&log, 0).await, Some(0xee));
        assert_eq!(contents(&log, 8).await, Some(1));
        assert_eq!(contents(&log, 4096).await, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_laps_with_destage_and_a_dropped_process_keep_every_entry() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let mut destaged = 0;
    let mut expected = std::collections::HashMap::new();
    let mut fill = 0u8;
    for run in 1..=6u64 {
        let (log, recovery) = open(dir.path(), run, destaged);
        assert_eq!(recovery.entry_count, recovery.last_lsn.0 - destaged);
        for (&sector, &(lsn, value)) in &expected {
            if lsn > destaged {
                assert_eq!(contents(&log, sector).await, Some(value), "run {run} at {sector}");
            }
        }
        for n in 0..1500u64 {
            fill = fill.wrapping_add(1);
            let sector = (n * 37 % 256) * 16;
            let lsn = log.append(write(sector, fill, 16), Wait::Written).await.unwrap();
            expected.insert(sector, (lsn.0, fill));
            if log.status().used_bytes > 1 << 20
                && let Some(generation) = log.next_frozen()
            {
                destaged = generation.last_lsn().0;
                log.release(&generation);
            }
        }
        if run % 2 == 0 {
            log.close().unwrap();
        }
    }
    assert!(files_of(dir.path()).len() == 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_log_continues_once_something_is_released() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    let writer = tokio::spawn({
        let log = log.clone();
        async move {
            for n in 0..100u64 {
                log.append(write(n * 128, n as u8, 128), Wait::Written).await.unwrap();
            }
        }
    });
    let mut changes = log.changes();
    while !log.status().is_full {
        let _ = tokio::time::timeout(std::time::Duration::from_millis(20), changes.changed()).await;
    }
    assert!(!writer.is_finished());
    while !writer.is_finished() {
        if let Some(generation) = log.next_frozen() {
            log.release(&generation);
        }
        let _ = tokio::time::timeout(std::time::Duration::from_millis(20), changes.changed()).await;
    }
    writer.await.unwrap();
    assert_eq!(log.status().last_lsn, Lsn(100));
    log.close().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_distinct() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 3, 0);
    for n in 0..50 {
        log.append(write(n, 1, 1), Wait::Written).await.unwrap();
    }
    let busy = open_as(dir.path(), identity(3, 1), 0).err().unwrap();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    let generation = log.freeze().unwrap();
    assert_eq!((generation.first_lsn(), generation.last_lsn()), (Lsn(1), Lsn(50)));
    log.release(&generation);
    log.append(write(0, 2, 1), Wait::Durable).await.unwrap();
    drop(log);
    let kind = |id, destaged| open_as(dir.path(), id, destaged).err().map(|e| e.kind());
    assert_eq!(kind(identity(2, 1), 50), Some(ErrorKind::Fenced));
    assert_eq!(kind(LogIdentity { pool: [9; 16], ..identity(3, 1) }, 50), Some(ErrorKind::Invalid));
    let rolled_back = open_as(dir.path(), identity(3, 1), 40).err().unwrap();
    assert_eq!(rolled_back.kind(), ErrorKind::Corrupt);
    assert!(rolled_back.to_string().contains("rolled back"), "{rolled_back}");
    assert_eq!(kind(identity(4, 1), 50), None);
    assert_eq!(kind(identity(4, 1), 77), Some(ErrorKind::Corrupt));
    let other = Log::open(
        dir.path(),
        identity(4, 1),
        PoolKey::new([8; KEY_BYTES]),
        options(IoMode::Buffered),
        Lsn(50),
    );
    let wrong_key = other.err().unwrap();
    assert_eq!(wrong_key.kind(), ErrorKind::Corrupt);
    // A log in a wiped directory begins behind the data tier.
    std::fs::remove_dir_all(dir.path()).unwrap();
    let (_, recovery) = open(dir.path(), 5, 500);
    assert!(recovery.is_new);
    assert_eq!(recovery.last_lsn, Lsn(500));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_below_the_durable_lsn_is_refused_and_names_the_place() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    for n in 0..20 {
        log.append(write(n * 8, n as u8, 8), Wait::Durable).await.unwrap();
    }
    drop(log);
    let path = &files_of(dir.path())[0];
    let whole = std::fs::read(path).unwrap();
    for at in [4096 + 4096 + 10, 8192 + 300, 8192 + 5000, 12288 + 8192 + 4000] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        std::fs::write(path, &bytes).unwrap();
        let error = open_as(dir.path(), identity(1, 1), 0).err().expect("damage is seen");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("ring-00000.log"), "{error}");
        assert_eq!(std::fs::read(path).unwrap(), bytes, "a refused log was changed");
    }
    std::fs::write(path, &whole[..whole.len() - 5]).unwrap();
    let error = open_as(dir.path(), identity(1, 1), 0).err().expect("a short file is seen");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    std::fs::write(path, &whole).unwrap();
    assert_eq!(open(dir.path(), 1, 0).1.entry_count, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_ring_file_is_noticed_even_if_newest() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    for n in 0..9u64 {
        log.append(write(n * 512, n as u8, 512), Wait::Durable).await.unwrap();
    }
    while files_of(dir.path()).len() < 4 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    log.close().unwrap();
    let kept = tempfile::tempdir_in(".").unwrap();
    let put = |from: &Path, to: &Path| {
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    };
    put(dir.path(), kept.path());
    let files = files_of(dir.path());
    for first_gone in 0..files.len() {
        for file in &files[first_gone..] {
            std::fs::remove_file(file).unwrap();
        }
        let error = open_as(dir.path(), identity(2, 1), 0).err().expect("it is missed");
        let (said, name) = (error.chain(), files[first_gone].display().to_string());
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{said}");
        assert!(said.contains(&name) && said.contains("missing"), "{said}");
        assert!(wal::is_incomplete(&error), "{said}");
        assert_eq!(files_of(dir.path()), files[..first_gone], "nothing was changed");
        put(kept.path(), dir.path());
    }
    // A damaged count leaves the number of files unknown.
    let made = dir.path().join("ring.made");
    std::fs::write(&made, "ring.made").unwrap();
    let error = open_as(dir.path(), identity(2, 1), 0).err().expect("it is damaged");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.chain().contains("ring.made"), "{error}");
    // A log of a program that kept no count is opened as it is, and has a count from then on.
    std::fs::remove_file(&made).unwrap();
    std::fs::remove_file(&files[3]).unwrap();
    let (log, recovery) = open(dir.path(), 2, 0);
    assert_eq!(recovery.last_lsn, Lsn(9));
    drop(log);
    std::fs::remove_file(&files[2]).unwrap();
    let _ = std::fs::remove_file(&files[3]);
    let error = open_as(dir.path(), identity(3, 1), 0).err().expect("it is missed");
    assert!(error.chain().contains(&files[2].display().to_string()), "{}", error.chain());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_that_ends_below_the_destaged_lsn_is_refused() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    log.close().unwrap();
    let (files, older) = (files_of(dir.path()), tempfile::tempdir_in(".").unwrap());
    let made = dir.path().join("ring.made");
    let all = files.iter().chain([&made]);
    let kept: Vec<_> = all.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
    let put_back = || kept.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let (log, _) = open(dir.path(), 2, 0);
    assert_eq!(log.append(write(0, 2, 8), Wait::Written).await.unwrap(), Lsn(2));
    log.make_durable(Lsn(2)).await.unwrap();
    assert_eq!(log.status().durable_lsn, Lsn(2));
    log.close().unwrap();
    // Normally the log reaches the destaged LSN, even if everything is destaged.
    drop(open(dir.path(), 3, 1));
    drop(open(dir.path(), 4, 2));
    put_back();
    let error = open_as(dir.path(), identity(5, 1), 2).err().expect("it is an older copy");
    let said = error.chain();
    assert!(error.kind() == ErrorKind::Corrupt && wal::is_incomplete(&error), "{said}");
    for words in ["ends at LSN 1,", "up to LSN 2,", "an older copy", "nothing was changed"] {
        assert!(said.contains(words), "it does not say {words:?}: {said}");
    }
    // Batches after the end distinguish damage from an older copy.
    let mut damaged = kept[0].1.clone();
    damaged[3 * 4096] ^= 1;
    std::fs::write(&kept[0].0, damaged).unwrap();
    let error = open_as(dir.path(), identity(5, 1), 2).err().expect("it is damaged");
    assert!(!wal::is_incomplete(&error), "{error}");
    assert!(error.chain().contains("is damaged at offset"), "{}", error.chain());
    put_back();
    let is_kept = |(path, bytes): &(_, Vec<u8>)| std::fs::read(path).unwrap() == *bytes;
    assert!(kept.iter().all(is_kept), "it says that nothing was changed");
    // A log that reaches the destaged LSN is taken. So is a log made after the data tier, even if
    // the power fails while its first batch is written.
    drop(open(dir.path(), 5, 1));
    let (log, recovery) = open(older.path(), 6, 2);
    assert_eq!(recovery.last_lsn, Lsn(2));
    drop(log);
    drop(open(older.path(), 7, 2));
    let first = &files_of(older.path())[0];
    let mut bytes = std::fs::read(first).unwrap();
    bytes[4096..].fill(0);
    std::fs::write(first, bytes).unwrap();
    let (_, recovery) = open(older.path(), 8, 2);
    assert!(recovery.is_tail_proven && recovery.last_lsn == Lsn(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_has_failed_makes_nothing_durable() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    log.append(write(0, 2, 8), Wait::Written).await.unwrap();
    log.fail(block::Error::new(ErrorKind::Io, "the sync failed"));
    log.make_durable(Lsn(1)).await.unwrap();
    assert_eq!(log.make_durable(Lsn(3)).await.unwrap_err().kind(), ErrorKind::Io);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reboot_is_distinguished_from_restart() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let reopen = |boot| open_as(dir.path(), identity(1, boot), 0).unwrap();
    let (log, _) = reopen(1);
    log.append(write(0, 1, 1), Wait::Durable).await.unwrap();
    drop(log);
    let (log, recovery) = reopen(2);
    assert!(recovery.is_tail_proven, "nothing was acknowledged before it was durable");
    log.append(write(0, 2, 1), Wait::Written).await.unwrap();
    drop(log);
    assert!(reopen(2).1.is_tail_proven, "the same boot");
    let (log, _) = reopen(2);
    log.append(write(0, 2, 1), Wait::Written).await.unwrap();
    drop(log);
    let (log, recovery) = reopen(3);
    assert!(!recovery.is_tail_proven && recovery.lost_reason.is_some());
    drop(log);
    let (log, recovery) = reopen(3);
    assert!(!recovery.is_tail_proven, "it is said until it is settled");
    log.settle_tail();
    log.append(write(0, 2, 1), Wait::Durable).await.unwrap();
    drop(log);
    assert!(reopen(3).1.is_tail_proven);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_beyond_the_memory_budget_are_read_back_from_the_log() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let options = LogOptions { payload_memory_bytes: 8192, ..options(IoMode::Buffered) };
    let open = || Log::open(dir.path(), identity(1, 1), key(), options, Lsn(0)).unwrap().0;
    let mut log = open();
    for n in 0..60u64 {
        log.append(write(n * 8, n as u8 + 1, 8), Wait::Written).await.unwrap();
    }
    // Cuts an extent that is only in the log.
    log.append(write(50 * 8 + 2, 0xcc, 3), Wait::Written).await.unwrap();
    for _ in 0..2 {
        assert!(log.status().memory_bytes <= 8192);
        for n in 0..60u64 {
            assert_eq!(contents(&log, n * 8).await, Some(n as u8 + 1));
            assert_eq!(contents(&log, n * 8 + 7).await, Some(n as u8 + 1));
        }
        assert_eq!(contents(&log, 50 * 8 + 2).await, Some(0xcc));
        drop(log);
        log = open();
    }
    let pieces = log.overlay().lookup(VOLUME, 59 * 8, 8);
    let Source::LogResident(resident) = &pieces[0].source else { panic!("{pieces:?}") };
    let generation = log.freeze().unwrap();
    log.release(&generation);
    assert!(log.read(resident).await.unwrap().is_none(), "released");
    assert_eq!(contents(&log, 0).await, None);
}

#[tokio::test]
async fn nonsense_is_refused() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    let bad = [
        NewEntry { volume: VolumeId(0), ..write(0, 0, 1) },
        NewEntry { sector_count: 2, ..write(0, 0, 1) },
        NewEntry { sector_count: 0, payload: Bytes::new(), ..write(0, 0, 1) },
        NewEntry { kind: EntryKind::Trim, ..write(0, 0, 1) },
        write(u64::MAX, 0, 1),
        write(0, 0, log.payload_bytes_max() / 512 + 1),
    ];
    for entry in bad {
        let error = log.append(entry, Wait::Written).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let most = log.payload_bytes_max() / 512;
    assert_eq!(log.append(write(0, 0, most), Wait::Written).await.unwrap(), Lsn(1));
    let bad = LogOptions { file_bytes: 1000, ..LogOptions::default() };
    assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_to_the_last_flushed_batch_is_seen_once_the_log_was_idle() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    // The marker that records it comes unasked.
    while log.status().batch_count < 2 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    drop(log);
    let path = &files_of(dir.path())[0];
    let mut bytes = std::fs::read(path).unwrap();
    bytes[8192 + 1000] ^= 1;
    std::fs::write(path, &bytes).unwrap();
    let error = open_as(dir.path(), identity(1, 1), 0).err().expect("damage is seen");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_are_slowed_before_the_log_is_full() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    let append = |n: u64| log.append(write(n % 100 * 32, n as u8, 32), Wait::Written);
    // Nine tenths of the capacity of the ring, which has four files of 1 MiB.
    while log.status().used_bytes < 2_830_000 {
        append(1).await.unwrap();
    }
    // Each takes 16 KiB, at a quarter of the rate assumed before the first release.
    let begin = std::time::Instant::now();
    for n in 0..8 {
        append(n).await.unwrap();
    }
    let took = begin.elapsed();
    assert!(!log.status().is_full);
    assert!(took >= std::time::Duration::from_micros(2500), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_queue_makes_writers_wait_and_loses_none() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let options = LogOptions { queue_bytes_max: 8192, ..options(IoMode::Direct) };
    let (log, _) = Log::open(dir.path(), identity(1, 1), key(), options, Lsn(0)).unwrap();
    let tasks: Vec<_> = (0..64u64)
        .map(|n| tokio::spawn(log.append(write(n * 8, n as u8, 8), Wait::Written)))
        .collect();
    let mut lsns = Vec::new();
    for task in tasks {
        lsns.push(task.await.unwrap().unwrap());
    }
    lsns.sort_unstable();
    assert_eq!(lsns, (1..=64).map(Lsn).collect::<Vec<_>>());
}

/// Prints each LSN as it is answered; see the test that starts it.
async fn child(dir: &Path, io_mode: IoMode) {
    let (log, recovery) = open_by(dir, io_mode);
    let mut n = recovery.last_lsn.0;
    loop {
        let appends: Vec<_> = (0..4)
            .map(|_| {
                n += 1;
                let wait = if n % 7 == 0 { Wait::Durable } else { Wait::Written };
                log.append(write(n % 200 * 8, n as u8, 8), wait)
            })
            .collect();
        for append in appends {
            let lsn = append.await.unwrap();
            eprintln!("acked {lsn}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_acknowledged_before_a_kill_are_there() {
    use std::io::{BufRead, BufReader};
    let io_modes = [IoMode::Buffered, IoMode::Direct];
    if let Ok(dir) = std::env::var("LOG_CHILD_DIR") {
        let is_direct = std::env::var("LOG_CHILD_DIRECT").is_ok();
        return child(Path::new(&dir), io_modes[usize::from(is_direct)]).await;
    }
    let dir = tempfile::tempdir_in(".").unwrap();
    let mut acked = 0;
    for (kill_after, io_mode) in [1, 40, 90, 7, 60, 120].into_iter().zip(io_modes.iter().cycle()) {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["entries_acknowledged_before_a_kill_are_there", "--exact", "--nocapture"]);
        child.env("LOG_CHILD_DIR", dir.path());
        if *io_mode == IoMode::Direct {
            child.env("LOG_CHILD_DIRECT", "");
        }
        child.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut count = 0;
        for line in lines {
            let Some(lsn) = line.strip_prefix("acked ") else { continue };
            acked = acked.max(lsn.parse().unwrap());
            count += 1;
            if count == kill_after {
                child.kill().unwrap(); // SIGKILL; the lines still in the pipe are read on
            }
        }
        child.wait().unwrap();
        let (log, recovery) = open_by(dir.path(), *io_mode);
        assert!(recovery.last_lsn.0 >= acked, "{acked} acked, {io_mode:?}, {recovery:?}");
        assert!(recovery.is_tail_proven);
        let last = recovery.last_lsn.0;
        for n in last.saturating_sub(199).max(1)..=last {
            assert_eq!(contents(&log, n % 200 * 8).await, Some(n as u8), "entry {n}");
        }
        log.close().unwrap();
    }
}

/// Sets the modification time of every file in the directory to `age` ago.
fn backdate(dir: &Path, age: Duration) {
    for entry in std::fs::read_dir(dir).unwrap() {
        // A thread of the log may be about to give the ring's next file its name.
        match std::fs::File::options().write(true).open(entry.unwrap().path()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            file => file.unwrap().set_modified(SystemTime::now() - age).unwrap(),
        }
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn recovered_entry_is_as_old_as_its_log_file() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    assert_eq!(log.status().oldest_undestaged_age, None);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    assert!(log.status().oldest_undestaged_age.unwrap() < HOUR);
    drop(log);
    backdate(dir.path(), HOUR);
    let (log, _) = open(dir.path(), 1, 0);
    let age = log.status().oldest_undestaged_age.unwrap();
    assert!(age >= HOUR && age < 2 * HOUR, "{age:?} after an outage of an hour");
    // A younger entry beside it, in the same generation or the next one, changes nothing.
    log.append(write(8, 1, 8), Wait::Durable).await.unwrap();
    let frozen = log.freeze().unwrap();
    log.append(write(16, 1, 8), Wait::Durable).await.unwrap();
    assert!(log.status().oldest_undestaged_age.unwrap() >= HOUR);
    log.release(&frozen);
    assert!(log.status().oldest_undestaged_age.unwrap() < HOUR);
    drop(log);
    // Destaged entries have no age, and a clock that was set back gives none.
    backdate(dir.path(), HOUR);
    let (log, _) = open(dir.path(), 1, 3);
    assert_eq!(log.status().oldest_undestaged_age, None);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    drop(log);
    for file in files_of(dir.path()) {
        let file = std::fs::File::options().write(true).open(file).unwrap();
        file.set_modified(SystemTime::now() + HOUR).unwrap();
    }
    let (log, _) = open(dir.path(), 1, 3);
    assert!(log.status().oldest_undestaged_age.unwrap() < HOUR);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spilled_data_keeps_its_age() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open(dir.path(), 1, 0);
    log.append(write(0, 1, 8), Wait::Durable).await.unwrap();
    drop(log);
    backdate(dir.path(), HOUR);
    let (log, _) = open(dir.path(), 1, 0);
    let mut files = Vec::new();
    // Enough rounds that the oldest files are merged.
    for round in 1..=70u64 {
        if round > 1 {
            log.append(write(round * 8, 1, 8), Wait::Written).await.unwrap();
        }
        let frozen = log.freeze().unwrap();
        let change = log.write_spill_file(&frozen, VOLUME, false).await.unwrap();
        files = change.files();
        let obsolete = log.release_with(&frozen, vec![change]);
        log.remove_spill_files(obsolete).await;
        let status = log.status();
        assert_eq!(
            (status.oldest_undestaged_age, status.oldest_age()),
            (None, status.oldest_spilled_age)
        );
        assert!(status.oldest_age().unwrap() >= HOUR, "{status:?}");
    }
    assert!(files.len() < 70 && files[0].last_lsn > Lsn(1), "the oldest ones were merged");
    drop(log);
    // No file stores the time: after an open the age is that of the oldest file.
    backdate(dir.path(), HOUR / 2);
    let wanted = SpillFilesWanted::from([(VOLUME, files)]);
    let (log, recovery) = Log::open_with_spill_files(
        dir.path(),
        identity(1, 1),
        key(),
        options(IoMode::Buffered),
        Lsn(70),
        &wanted,
    )
    .unwrap();
    assert_eq!(recovery.missing_spill_files, Vec::new());
    let age = log.status().oldest_age().unwrap();
    assert!(age >= HOUR / 2 && age < HOUR, "{age:?}");
    let part = log.spill_part(VOLUME, u64::MAX).await.unwrap();
    let obsolete = log.drop_spilled(&part);
    log.remove_spill_files(obsolete).await;
    assert_eq!(log.status().oldest_age(), None);
}
