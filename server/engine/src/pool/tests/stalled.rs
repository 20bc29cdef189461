//! Volumes that cannot be destaged: the others continue, nothing is lost, and the delay is
//! reported.

use super::*;
use crate::state::StalledVolume;
use block::ConditionKind;
use block::env::{Clock, SystemClock};
use object_store::{ObjectStoreExt, PutPayload};
use std::path::PathBuf;

const SECTOR: usize = 512;

/// Every segment that holds data so far, as it was before the damage.
struct Rotten(Vec<(ObjectPath, Bytes)>);

/// Damages every frame of every segment.
async fn rot(store: &InMemory) -> Rotten {
    let mut originals = Vec::new();
    for name in segments(store).await {
        let bytes = store.get(&name).await.unwrap().bytes().await.unwrap();
        let mut flipped = bytes.to_vec();
        for byte in flipped.iter_mut().skip(200).step_by(64) {
            *byte ^= 1;
        }
        store.put(&name, PutPayload::from(flipped)).await.unwrap();
        originals.push((name, bytes));
    }
    assert!(!originals.is_empty());
    Rotten(originals)
}

async fn heal(store: &InMemory, rotten: &Rotten) {
    for (name, bytes) in &rotten.0 {
        store.put(name, PutPayload::from(bytes.clone())).await.unwrap();
    }
}

fn spill_files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir.join("log")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let mut found: Vec<PathBuf> = paths.filter(|path| name(path).starts_with("spill-")).collect();
    found.sort();
    found
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = SystemClock.now() + Duration::from_secs(60);
    while !is_so() {
        assert!(SystemClock.now() < give_up, "{what}: not within a minute");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Two volumes. The first is behind: its 64 KiB at 0 do not verify in the store, and a sector at
/// 4096 in the log needs them.
struct World {
    dir: tempfile::TempDir,
    store: Arc<InMemory>,
    pool: Arc<Pool>,
    bad: Arc<Volume>,
    good: Arc<Volume>,
    rotten: Rotten,
}

impl World {
    async fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(InMemory::new());
        let pool = open(dir.path(), &store, 1).await;
        let bad = pool.create_volume("bad", 256 * MIB, Durability::Flush).await.unwrap();
        let good = pool.create_volume("good", 256 * MIB, Durability::Flush).await.unwrap();
        bad.write(0, pattern(1, 65536), NO_FUA).await.unwrap();
        pool.destage_all().await.unwrap();
        let rotten = rot(&store).await;
        bad.write(4096, pattern(2, SECTOR), NO_FUA).await.unwrap();
        World { dir, store, pool, bad, good, rotten }
    }

    async fn stall() -> World {
        let world = World::new().await;
        world.pool.destage_all().await.unwrap_err();
        assert_eq!(world.stalled().spill_file_count, 1);
        assert_eq!(spill_files(world.dir.path()).len(), 1);
        world
    }

    fn stalled(&self) -> StalledVolume {
        self.pool.destage_progress().stalled.get(&self.bad.id().0).cloned().unwrap_or_default()
    }

    async fn reopen(self, epoch: u64) -> World {
        let World { dir, store, pool, bad, good, rotten } = self;
        drop((bad, good));
        kill(pool).await;
        let pool = open(dir.path(), &store, epoch).await;
        let (bad, good) = (pool.volume("bad").unwrap(), pool.volume("good").unwrap());
        World { dir, store, pool, bad, good, rotten }
    }

    async fn close(self) {
        let World { pool, bad, good, .. } = self;
        drop((bad, good));
        pool.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_cannot_be_destaged_does_not_pin_the_log_of_the_others() {
    let world = World::new().await;
    let mut written = 0;
    while written < 40 * MIB {
        // More than twice the size of the log: without stalling the volume, this would wait
        // for ever.
        let bytes = pattern(written, 65536);
        let write = world.good.write(written % (32 * MIB), bytes, NO_FUA);
        tokio::time::timeout(Duration::from_secs(30), write).await.expect("pinned").unwrap();
        written += 65536;
    }
    let stalled = world.stalled();
    assert_eq!((stalled.spill_file_count, stalled.is_refusing_writes), (1, false));
    assert!(stalled.reason.contains("segment"), "{}", stalled.reason);
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    assert_eq!(read(&world.bad, 0, 512).await.unwrap_err().kind(), ErrorKind::Corrupt);
    // The store alone shows what it lacks, and waiting for it fails with the reason.
    let problems = world.pool.fsck().await.unwrap().problems();
    let is_behind = |line: &String| line.starts_with("volume 1 is behind the others");
    assert!(problems.iter().any(is_behind), "{problems:?}");
    assert_eq!(world.pool.destage_all().await.unwrap_err().kind(), ErrorKind::Unavailable);
    // Data that was set aside survives a kill like any other.
    let world = world.reopen(2).await;
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    let last = written - 65536;
    assert_eq!(read(&world.good, last % (32 * MIB), 65536).await.unwrap(), pattern(last, 65536));
    // The store heals (a copy was brought back): the volume catches up without any further writes.
    heal(&world.store, &world.rotten).await;
    until("back", || world.pool.destage_progress().stalled.is_empty()).await;
    assert_eq!(read(&world.bad, 0, 4096).await.unwrap(), pattern(1, 65536)[..4096]);
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    until("removed", || spill_files(world.dir.path()).is_empty()).await;
    assert_eq!(world.pool.fsck().await.unwrap().problems(), Vec::<String>::new());
    world.pool.destage_all().await.unwrap();
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_log_of_a_stalled_volume_refuses_it_alone() {
    let world = World::stall().await;
    // No spill file can be written for now, so that the ring fills up.
    let (log, away) = (world.dir.path().join("log"), world.dir.path().join("away"));
    std::fs::rename(&log, &away).unwrap();
    // Far more than the volume may keep in the ring and in spill files, all at once.
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..16u64 {
        let bad = world.bad.clone();
        writers.spawn(async move {
            for step in 0..80 {
                let offset = MIB + (writer * 80 + step) * 131_072;
                bad.write(offset, pattern(offset, 131_072), NO_FUA).await?;
            }
            Ok::<(), Error>(())
        });
    }
    until("full", || world.pool.log_status().is_full).await;
    let good = world.good.clone();
    let waiting = tokio::spawn(async move { good.write(0, pattern(0, 65536), NO_FUA).await });
    let failure = || world.pool.destage_progress().failure.unwrap_or_default();
    until("said", || failure().contains("stall volume 1")).await;
    assert!(!waiting.is_finished(), "the log was not full");
    std::fs::rename(&away, &log).unwrap();
    // The ring holds only the damaged volume, and none of its data can be destaged.
    tokio::time::timeout(Duration::from_secs(20), waiting)
        .await
        .expect("stalled")
        .unwrap()
        .unwrap();
    let mut longest = Duration::ZERO;
    let mut written = 0;
    while written < 24 * MIB || !world.stalled().is_refusing_writes {
        let started = SystemClock.now();
        let offset = written % (24 * MIB);
        let write = world.good.write(offset, pattern(offset, 65536), NO_FUA);
        tokio::time::timeout(Duration::from_secs(20), write).await.expect("stalled").unwrap();
        longest = longest.max(SystemClock.since(started));
        written += 65536;
    }
    println!("longest write of the other volume: {longest:?}");
    let mut refused_count = 0;
    while let Some(writer) = writers.join_next().await {
        if let Err(error) = writer.unwrap() {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(error.to_string().contains("cannot be destaged"), "{error}");
            refused_count += 1;
        }
    }
    assert!(refused_count > 0, "nobody was refused");
    assert_eq!(
        world.bad.write(0, pattern(3, 512), NO_FUA).await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    // A change without payload is accepted, because it may cover the damage.
    world.bad.discard(128 * MIB, MIB, false).await.unwrap();
    let stalled = world.stalled();
    let bytes = stalled.log_bytes + stalled.spill_bytes;
    assert!(bytes > 16 * MIB && bytes <= 3 * 16 * MIB, "{stalled:?}");
    // Reads continue, and writes do once the volume has healed.
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    world.bad.write(0, pattern(3, 512), NO_FUA).await.unwrap();
    assert_eq!(read(&world.good, 0, 65536).await.unwrap(), pattern(0, 65536));
    world.pool.destage_all().await.unwrap();
    world.close().await;
}

/// Contents of both volumes, in a few places.
async fn contents(world: &World) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for (volume, from, len) in
        [(&world.bad, 4096, 512), (&world.bad, 65536, 65536), (&world.good, 0, 65536)]
    {
        found.push(read(volume, from, len).await.unwrap());
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_between_any_steps_neither_loses_nor_reverts_data() {
    let steps = ["spill-start", "spill-written", "spill-committed", "spill-released"];
    for step in steps.into_iter().chain(["late-committed", "late-dropped"]) {
        println!("{step}");
        let is_late = step.starts_with("late");
        let mut world = World::stall().await;
        let (bad, good) = (pattern(7, 65536), pattern(8, 65536));
        world.bad.write(65536, bad.clone(), NO_FUA).await.unwrap();
        world.good.write(0, good.clone(), NO_FUA).await.unwrap();
        if is_late {
            world.pool.destage_all().await.unwrap_err();
        }
        let model = vec![pattern(2, 512).to_vec(), bad.to_vec(), good.to_vec()];
        assert_eq!(contents(&world).await, model, "{step}");
        *world.pool.shared.ends_at.lock() = Some(step);
        if is_late {
            heal(&world.store, &world.rotten).await;
        }
        until(step, || world.pool.shared.is_stopped()).await;
        world = world.reopen(2).await;
        assert_eq!(contents(&world).await, model, "{step}");
        // Only files that the metadata names exist.
        let named: usize = world.pool.stalled_volumes().values().map(Vec::len).sum();
        let found = spill_files(world.dir.path()).len();
        assert!(found == named || !is_late, "{step}: {found} files, {named} named");
        assert!(!is_late || named == 0, "{step}");
        // Data written and destaged from here on is newer than every spill file.
        heal(&world.store, &world.rotten).await;
        world.pool.destage_all().await.unwrap();
        world.bad.write(4096, pattern(20, 512), NO_FUA).await.unwrap();
        world.bad.write(65536, pattern(21, 65536), NO_FUA).await.unwrap();
        world.pool.destage_all().await.unwrap();
        world = world.reopen(3).await;
        let newer = vec![pattern(20, 512).to_vec(), pattern(21, 65536).to_vec(), good.to_vec()];
        assert_eq!(contents(&world).await, newer, "{step}");
        assert_eq!(spill_files(world.dir.path()), Vec::<PathBuf>::new(), "{step}");
        assert_eq!(world.pool.fsck().await.unwrap().problems(), Vec::<String>::new(), "{step}");
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writing_over_the_damage_brings_a_volume_back() {
    let world = World::stall().await;
    // The write replaces the whole block, whose other sectors cannot be read.
    world.bad.write(4096, pattern(5, 4096), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap();
    assert_eq!(read(&world.bad, 4096, 4096).await.unwrap(), pattern(5, 4096));
    assert_eq!(spill_files(world.dir.path()), Vec::<PathBuf>::new());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_with_many_spill_files_keeps_a_bounded_number_of_them() {
    let world = World::stall().await;
    for round in 0..80u64 {
        world.bad.write(65536 + round * 4096, pattern(round, 4096), NO_FUA).await.unwrap();
        let lsn = world.pool.shared.log.flush().await.unwrap();
        world.pool.shared.wait_destaged(lsn).await.unwrap();
    }
    let named: usize = world.pool.stalled_volumes().values().map(Vec::len).sum();
    assert_eq!(named, 64);
    until("merged files are gone", || spill_files(world.dir.path()).len() == named).await;
    let world = world.reopen(2).await;
    for round in 0..80u64 {
        let found = read(&world.bad, 65536 + round * 4096, 4096).await.unwrap();
        assert_eq!(found, pattern(round, 4096), "round {round}");
    }
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    for round in 0..80u64 {
        let found = read(&world.bad, 65536 + round * 4096, 4096).await.unwrap();
        assert_eq!(found, pattern(round, 4096), "round {round}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_or_damaged_spill_file_closes_its_volume_and_no_other() {
    let mut world = World::stall().await;
    world.good.write(0, pattern(8, 65536), NO_FUA).await.unwrap();
    let file = spill_files(world.dir.path()).remove(0);
    let whole = std::fs::read(&file).unwrap();
    for (epoch, is_missing) in [(2, true), (3, false)] {
        if is_missing {
            std::fs::remove_file(&file).unwrap();
        } else {
            let mut damaged = whole.clone();
            *damaged.last_mut().unwrap() ^= 1;
            std::fs::write(&file, damaged).unwrap();
        }
        world = world.reopen(epoch).await;
        for error in [
            read(&world.bad, 0, 512).await.unwrap_err(),
            world.bad.write(0, pattern(3, 512), NO_FUA).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            let said = error.to_string();
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            assert!(
                said.contains(&name) && said.contains("since LSN") || said.contains("from LSN")
            );
            assert!(said.contains("Bring it back") && !said.contains("volume rm"), "{said}");
        }
        assert!(world.stalled().is_closed && world.stalled().reason.contains("spill-1-"));
        assert!(world.pool.is_closed(&world.bad) && !world.pool.is_closed(&world.good));
        assert_eq!(read(&world.good, 0, 65536).await.unwrap(), pattern(8, 65536));
        world.good.write(0, pattern(8, 65536), NO_FUA).await.unwrap();
        assert!(world.pool.destage_all().await.is_err());
    }
    // The file is brought back: the volume is as if it had never been away.
    std::fs::write(&file, &whole).unwrap();
    let world = world.reopen(4).await;
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_machine_reports_missing_data_and_may_abandon_it() {
    let world = World::stall().await;
    world.good.write(0, pattern(8, 65536), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap_err();
    let World { pool, bad, good, store, dir: first, rotten } = world;
    drop((bad, good));
    kill(pool).await;
    let dir = tempfile::tempdir().unwrap();
    let pool = open(dir.path(), &store, 2).await;
    let (bad, good) = (pool.volume("bad").unwrap(), pool.volume("good").unwrap());
    assert_eq!(read(&good, 0, 65536).await.unwrap(), pattern(8, 65536));
    assert!(read(&bad, 4096, 512).await.is_err(), "old data as if it were the newest");
    let stalled = pool.destage_progress().stalled[&bad.id().0].clone();
    assert!(stalled.is_closed && stalled.since_lsn > 0 && stalled.reason.contains("spill-1-"));
    let problems = pool.fsck().await.unwrap().problems();
    assert!(problems.iter().any(|line| line.contains("volume 1 is behind")), "{problems:?}");
    // The first machine's file completes the volume here, too.
    drop((bad, good));
    kill(pool).await;
    for file in spill_files(first.path()) {
        std::fs::copy(&file, dir.path().join("log").join(file.file_name().unwrap())).unwrap();
    }
    let pool = open(dir.path(), &store, 3).await;
    let bad = pool.volume("bad").unwrap();
    assert_eq!(read(&bad, 4096, 512).await.unwrap(), pattern(2, 512));
    // Once given up, it is no longer behind.
    drop(bad);
    kill(pool).await;
    spill_files(dir.path()).iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let pool = open(dir.path(), &store, 4).await;
    pool.remove_volume("bad", true).await.unwrap();
    pool.destage_all().await.unwrap();
    assert!(pool.stalled_volumes().is_empty() && pool.destage_progress().stalled.is_empty());
    heal(&store, &rotten).await;
    assert_eq!(pool.fsck().await.unwrap().problems(), Vec::<String>::new());
    pool.close().await.unwrap();
}

/// Flips a bit in the payload of the newest large batch of the ring.
fn damage_newest_large_batch(dir: &Path) {
    let mut newest: Option<(u64, PathBuf, usize, usize)> = None;
    for entry in std::fs::read_dir(dir.join("log")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|kind| kind != "log") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for at in (4096..bytes.len()).step_by(4096) {
            if !bytes[at..].starts_with(b"SPDLBTCH") {
                continue;
            }
            let len = u32::from_le_bytes(bytes[at + 148..at + 152].try_into().unwrap()) as usize;
            let sequence = u64::from_le_bytes(bytes[at + 96..at + 104].try_into().unwrap());
            if len > 65536 && newest.as_ref().is_none_or(|(newest, ..)| sequence > *newest) {
                newest = Some((sequence, path.clone(), at, len));
            }
        }
    }
    let (_, path, at, len) = newest.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at + len / 2] ^= 1;
    // In place, because the log has the file open.
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes[at..at + len], at as u64).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rotten_log_data_is_an_error_until_overwritten() {
    // Nothing stays in memory, and nothing is destaged without a request: the ring has the only
    // copy.
    let options = LogOptions { payload_memory_bytes: 0, ..log_options() };
    let max_age = Duration::from_secs(3600);
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open_with(dir.path(), &store, 1, options, max_age).await;
    let bad = pool.create_volume("bad", 64 * MIB, Durability::Flush).await.unwrap();
    let good = pool.create_volume("good", 64 * MIB, Durability::Flush).await.unwrap();
    bad.write(0, pattern(1, 131_072), NO_FUA).await.unwrap();
    pool.destage_all().await.unwrap();
    bad.write(0, pattern(2, 131_072), NO_FUA).await.unwrap();
    damage_newest_large_batch(dir.path());
    bad.write(262_144, pattern(3, 4096), NO_FUA).await.unwrap();
    good.write(0, pattern(4, 4096), NO_FUA).await.unwrap();
    let failed = pool.destage_all().await.unwrap_err();
    assert!(failed.to_string().contains("lost"), "{failed}");
    let check = async |pool: &Pool, is_healed: bool| {
        let (bad, good) = (pool.volume("bad").unwrap(), pool.volume("good").unwrap());
        assert_eq!(read(&good, 0, 4096).await.unwrap(), pattern(4, 4096));
        assert_eq!(read(&bad, 262_144, 4096).await.unwrap(), pattern(3, 4096));
        for offset in (0..131_072).step_by(4096) {
            match read(&bad, offset, 4096).await {
                Ok(bytes) => {
                    assert!(is_healed && bytes == pattern(5, 131_072)[offset as usize..][..4096])
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt);
                    assert!(!is_healed && error.to_string().contains("lost"), "{error}");
                }
            }
        }
    };
    check(&pool, false).await;
    // The ring moves on, so that a restart does not reach the damage.
    for offset in (MIB..9 * MIB).step_by(131_072) {
        good.write(offset, pattern(offset, 131_072), NO_FUA).await.unwrap();
    }
    assert!(pool.destage_all().await.is_err());
    drop((bad, good));
    kill(pool).await;
    let pool = open_with(dir.path(), &store, 2, options, max_age).await;
    check(&pool, false).await;
    let bad = pool.volume("bad").unwrap();
    bad.write(0, pattern(5, 131_072), NO_FUA).await.unwrap();
    check(&pool, true).await;
    pool.destage_all().await.unwrap();
    check(&pool, true).await;
    assert_eq!(spill_files(dir.path()), Vec::<PathBuf>::new());
    drop(bad);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_with_durability_store_of_a_volume_that_is_behind_fails() {
    let world = World::stall().await;
    world.pool.configure_volume("bad", Some(Durability::Store), None, None).await.unwrap();
    let failed = world.bad.flush().await.unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Unavailable);
    assert!(failed.to_string().contains("on this machine only"), "{failed}");
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    world.bad.flush().await.unwrap();
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shrinking_and_growing_again_shows_no_old_contents() {
    let world = World::stall().await;
    world.bad.write(128 * MIB, pattern(9, 4096), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap_err();
    world.pool.resize_volume("bad", 64 * MIB, true).await.unwrap();
    world.pool.destage_all().await.unwrap_err();
    world.pool.resize_volume("bad", 256 * MIB, false).await.unwrap();
    let world = world.reopen(2).await;
    assert_eq!(read(&world.bad, 128 * MIB, 4096).await.unwrap(), [0; 4096]);
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    assert_eq!(read(&world.bad, 128 * MIB, 4096).await.unwrap(), [0; 4096]);
    assert_eq!(read(&world.bad, 4096, 512).await.unwrap(), pattern(2, 512));
    world.close().await;
}

/// Number of rounds that make a backlog of several catch-up windows.
const ROUNDS: u64 = 12;

/// Builds a backlog and returns the volume's contents. There is one spill file for each round, each
/// over the middle of the previous one.
async fn backlog(world: &World) -> Vec<u8> {
    let mut model = vec![0; 8 << 20];
    model[4096..4608].copy_from_slice(&pattern(2, SECTOR));
    for round in 0..ROUNDS {
        let at = 65536 + round * 262_144;
        let bytes = pattern(100 + round, 524_288);
        for (part, bytes) in bytes.chunks(131_072).enumerate() {
            let at = at + part as u64 * 131_072;
            world.bad.write(at, Bytes::copy_from_slice(bytes), NO_FUA).await.unwrap();
        }
        model[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        // Trims of many pages, with data above them.
        if round.is_multiple_of(5) {
            world.bad.discard((32 + round * 4) * MIB, 32 * MIB, false).await.unwrap();
        }
        let sparse = pattern(round, 4096);
        world.bad.write((40 + round * 4) * MIB, sparse, NO_FUA).await.unwrap();
        let lsn = world.pool.shared.log.flush().await.unwrap();
        world.pool.shared.wait_destaged(lsn).await.unwrap();
    }
    model
}

async fn check_backlog(volume: &Volume, model: &[u8]) {
    assert_eq!(read(volume, 4096, SECTOR).await.unwrap(), model[4096..4608]);
    let found = read(volume, 65536, model.len() - 65536).await.unwrap();
    assert!(found == model[65536..], "contents differ");
    // The trims of rounds 5 and 10 removed the writes of rounds 3, 4, 8 and 9.
    for round in 0..ROUNDS {
        let is_gone = [3, 4, 8, 9].contains(&round);
        let expected = if is_gone { vec![0; 4096] } else { pattern(round, 4096).to_vec() };
        let found = read(volume, (40 + round * 4) * MIB, 4096).await.unwrap();
        assert!(found == expected, "sparse write of round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_backlog_comes_back_in_parts_oldest_first() {
    let mut world = World::stall().await;
    let model = backlog(&world).await;
    let before = world.stalled();
    assert!(before.spill_bytes > 3 * 2 * MIB && before.spill_file_count >= ROUNDS, "{before:?}");
    // A crash in the middle: the files that are left are still needed, and there are no others.
    *world.pool.shared.ends_at.lock() = Some("late-committed");
    heal(&world.store, &world.rotten).await;
    until("committed", || world.pool.shared.is_stopped()).await;
    world = world.reopen(2).await;
    let named: usize = world.pool.stalled_volumes().values().map(Vec::len).sum();
    assert!(0 < named && named < before.spill_file_count as usize, "{named} files");
    check_backlog(&world.bad, &model).await;
    // The other volumes make progress between the parts.
    let mut since = 0;
    for round in 0..64 {
        let bytes = pattern(round, 65536);
        world.good.write(round * 65536, bytes, NO_FUA).await.unwrap();
        let stalled = world.stalled();
        assert!(stalled.spill_file_count == 0 || stalled.since_lsn >= since, "{stalled:?}");
        since = stalled.since_lsn;
    }
    world.pool.destage_all().await.unwrap();
    check_backlog(&world.bad, &model).await;
    assert_eq!(spill_files(world.dir.path()), Vec::<PathBuf>::new());
    let world = world.reopen(3).await;
    check_backlog(&world.bad, &model).await;
    assert_eq!(world.pool.fsck().await.unwrap().problems(), Vec::<String>::new());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_backlog_recovers_when_its_newest_part_covers_damage() {
    let world = World::stall().await;
    let mut model = backlog(&world).await;
    // Only the oldest file cannot be destaged: its sector needs a damaged block.
    let bytes = pattern(50, 4096);
    model[4096..8192].copy_from_slice(&bytes);
    world.bad.write(4096, bytes, NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap();
    check_backlog(&world.bad, &model).await;
    assert_eq!(spill_files(world.dir.path()), Vec::<PathBuf>::new());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_of_a_missing_spill_file_can_be_abandoned() {
    let world = World::stall().await;
    world.bad.write(65536, pattern(6, 65536), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap_err();
    // Data that only the ring has is newer than the missing data, too.
    world.bad.write(131_072, pattern(7, 65536), NO_FUA).await.unwrap();
    world.good.write(0, pattern(8, 65536), NO_FUA).await.unwrap();
    std::fs::remove_file(spill_files(world.dir.path()).remove(0)).unwrap();
    let world = world.reopen(2).await;
    heal(&world.store, &world.rotten).await;
    // The volume has lost writes as well. Recording that must not keep the pool from opening.
    world.pool.note_lost_writes(LostWrites::TakeOver, Epoch(2)).await.unwrap();
    let refused = world.pool.accept_loss("bad", false).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("--discard-local-writes"), "{refused}");
    assert!(read(&world.bad, 0, 512).await.is_err());
    let record = world.pool.accept_loss("bad", true).await.unwrap();
    assert!(!record.has_lost_writes);
    // State of the store before the first missing write, without anything that came later.
    let check = async |world: &World| {
        let found = read(&world.bad, 0, 262_144).await.unwrap();
        assert!(found[..65536] == pattern(1, 65536)[..], "the store's state differs");
        assert!(found[65536..].iter().all(|byte| *byte == 0), "something newer is left");
        assert_eq!(read(&world.good, 0, 65536).await.unwrap(), pattern(8, 65536));
    };
    check(&world).await;
    world.pool.destage_all().await.unwrap();
    let world = world.reopen(3).await;
    check(&world).await;
    assert_eq!(spill_files(world.dir.path()), Vec::<PathBuf>::new());
    assert_eq!(world.pool.fsck().await.unwrap().problems(), Vec::<String>::new());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_stalled_is_a_condition() {
    let world = World::stall().await;
    let conditions = world.pool.tier().conditions();
    let stalled = || {
        let list = conditions.list().into_iter();
        list.filter(|condition| condition.kind == ConditionKind::VolumeStalled).collect::<Vec<_>>()
    };
    assert_eq!(stalled().len(), 1, "{:?}", conditions.list());
    assert_eq!(stalled()[0].subject, "bad");
    let report = stalled()[0].report.clone();
    assert!(report.what.contains("volume bad cannot be destaged"), "{report:?}");
    assert!(report.cost.contains("in 1 spill files"), "{report:?}");
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    assert_eq!(stalled(), []);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_file_that_cannot_be_written_leaves_nothing_behind() {
    let world = World::stall().await;
    let other = world.pool.create_volume("other", 64 * MIB, Durability::Flush).await.unwrap();
    heal(&world.store, &world.rotten).await;
    world.pool.destage_all().await.unwrap();
    other.write(0, pattern(3, 65536), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap();
    let rotten = rot(&world.store).await;
    // Both are damaged in one generation, and the second volume's spill file cannot be written.
    *world.pool.shared.spill_fails_of.lock() = Some(other.id());
    world.bad.write(4096, pattern(4, SECTOR), NO_FUA).await.unwrap();
    other.write(4096, pattern(5, SECTOR), NO_FUA).await.unwrap();
    let failure = || world.pool.destage_progress().failure.unwrap_or_default();
    let wanted = format!("stall volume {}", other.id());
    until("said", || failure().contains(&wanted)).await;
    let is_failing =
        || world.pool.tier().conditions().is_raised(ConditionKind::DestageFailing, "pool");
    assert!(is_failing());
    until("nothing is left", || spill_files(world.dir.path()).is_empty()).await;
    *world.pool.shared.spill_fails_of.lock() = None;
    until("both are stalled", || world.pool.destage_progress().stalled.len() == 2).await;
    until("no failure is told", || !is_failing()).await;
    assert_eq!(read(&other, 4096, SECTOR).await.unwrap(), pattern(5, SECTOR));
    heal(&world.store, &rotten).await;
    world.pool.destage_all().await.unwrap();
    assert_eq!(read(&other, 4096, SECTOR).await.unwrap(), pattern(5, SECTOR));
    assert_eq!(read(&world.bad, 4096, SECTOR).await.unwrap(), pattern(4, SECTOR));
    drop(other);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_log_file_does_not_pin_other_volumes() {
    let options = LogOptions { payload_memory_bytes: 0, ..log_options() };
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open_with(dir.path(), &store, 1, options, Duration::from_secs(3600)).await;
    let bad = pool.create_volume("bad", 64 * MIB, Durability::Flush).await.unwrap();
    let good = pool.create_volume("good", 64 * MIB, Durability::Flush).await.unwrap();
    pool.destage_all().await.unwrap();
    bad.write(0, pattern(1, 131_072), NO_FUA).await.unwrap();
    for entry in std::fs::read_dir(dir.path().join("log")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "log") {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len(8192).unwrap();
            file.set_len(length).unwrap();
        }
    }
    let error = read(&bad, 0, 4096).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    for offset in (0..40 * MIB).step_by(131_072) {
        let write = good.write(offset, pattern(offset, 131_072), NO_FUA);
        tokio::time::timeout(Duration::from_secs(20), write).await.expect("pinned").unwrap();
    }
    assert!(read(&bad, 0, 4096).await.unwrap_err().to_string().contains("lost"));
    bad.write(0, pattern(2, 131_072), NO_FUA).await.unwrap();
    pool.destage_all().await.unwrap();
    assert_eq!(read(&bad, 0, 131_072).await.unwrap(), pattern(2, 131_072));
    drop((bad, good));
    pool.close().await.unwrap();
}
