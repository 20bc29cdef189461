//! Tests of the NVMe cache's promises.

use super::file::FILE_NAME;
use super::*;
use crate::keys::KeyId;
use crate::segment::build::{SegmentBuilder, SegmentSeed};
use crate::segment::{SegmentNumber, verify_frame};
use crate::testing::{Rng, seeds};
use block::Epoch;
use block::env::ManualClock;
use block::seal::{Algorithm, PoolKey};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const POOL: [u8; 16] = [9; 16];
const MIB: u64 = 1 << 20;

/// A segment of `frames` frames of up to four blocks, mostly incompressible.
pub(super) fn segment(rng: &mut Rng, frames: usize) -> (SegmentInfo, Bytes, Vec<FrameAt>) {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
    let seed = SegmentSeed {
        pool: POOL,
        epoch: Epoch(1),
        number: SegmentNumber(rng.below(1 << 40) + 1),
        id,
        algorithm: Algorithm::default(),
        key: KeyId::POOL,
    };
    let mut builder = SegmentBuilder::new(seed, &PoolKey::new([7; 32]), 1, 0);
    let frames = (0..frames)
        .map(|n| {
            let count = (rng.below(4) + 1) as usize * 4096;
            let plain = rng.bytes(count, 90);
            builder.push(1, n as u64 * 16, &plain)
        })
        .collect();
    let sealed = builder.finish();
    (sealed.info, sealed.bytes, frames)
}

fn options(dir: &Path, bytes: u64) -> CacheOptions {
    CacheOptions::new(dir, bytes)
}

fn open(dir: &Path, bytes: u64) -> FrameCache {
    FrameCache::open(&options(dir, bytes), POOL).unwrap()
}

fn get(cache: &FrameCache, info: &SegmentInfo, at: FrameAt) -> Option<Vec<u8>> {
    match cache.find(&info.id, at)? {
        Found::Memory(sealed) => Some(sealed.to_vec()),
        Found::Disk(place) => {
            let mut buffer = AlignedBuffer::default();
            let count = at.sealed_bytes as usize;
            let bytes = cache.read(place, &mut buffer, count)?.to_vec();
            let mut now = vec![0; count];
            assert!(!cache.read_now(place, &mut now) || now == bytes);
            Some(bytes)
        }
    }
}

/// The frame's bytes in the object.
fn stored(object: &Bytes, at: FrameAt) -> &[u8] {
    &object[at.offset as usize..(at.offset + at.sealed_bytes) as usize]
}

fn hit_count(cache: &FrameCache, info: &SegmentInfo, object: &Bytes, frames: &[FrameAt]) -> usize {
    let is_right = |at: &&FrameAt| match get(cache, info, **at) {
        Some(bytes) => {
            assert!(bytes == stored(object, **at), "{at:?} of {info}");
            true
        }
        None => false,
    };
    frames.iter().filter(is_right).count()
}

#[tokio::test]
async fn frames_and_segments_are_found_while_they_wait_and_once_they_are_written() {
    for io in [CacheIo::Buffered, CacheIo::Direct] {
        for seed in seeds(4) {
            let mut rng = Rng::new(seed);
            let dir = tempfile::tempdir().unwrap();
            let cache =
                FrameCache::open(&CacheOptions { io, ..options(dir.path(), 64 * MIB) }, POOL)
                    .unwrap();
            let mut segments = Vec::new();
            for n in 0..6 {
                let count = rng.below(200) as usize + 1;
                let (info, object, frames) = segment(&mut rng, count);
                if n % 2 == 0 {
                    cache.insert_segment(&info, object.clone());
                } else {
                    for &at in &frames {
                        cache.insert(&info.id, at, stored(&object, at));
                    }
                }
                assert_eq!(hit_count(&cache, &info, &object, &frames), count, "SEED={seed}");
                segments.push((info, object, frames));
            }
            cache.flush().await;
            assert_eq!(cache.status().pending_bytes, 0);
            for (info, object, frames) in &segments {
                assert_eq!(hit_count(&cache, info, object, frames), frames.len(), "SEED={seed}");
            }
            let (other, _, frames) = segment(&mut rng, 3);
            assert!(get(&cache, &other, frames[0]).is_none());
        }
    }
}

#[tokio::test]
async fn cache_survives_restart_and_kill() {
    for seed in seeds(4) {
        let mut rng = Rng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let (info, object, frames) = segment(&mut rng, 500);
        let (other, other_object, other_frames) = segment(&mut rng, 40);
        let cache = open(dir.path(), 64 * MIB);
        cache.insert_segment(&info, object.clone());
        cache.flush().await;
        // A kill leaves the file as it is while the cache is in use.
        let killed = tempfile::tempdir().unwrap();
        std::fs::copy(dir.path().join(FILE_NAME), killed.path().join(FILE_NAME)).unwrap();
        cache.insert_segment(&other, other_object.clone());
        cache.close().await;
        drop(cache);
        for (dir, other_count) in [(dir.path(), 40), (killed.path(), 0)] {
            let cache = open(dir, 64 * MIB);
            cache.flush().await;
            assert_eq!(hit_count(&cache, &info, &object, &frames), 500, "SEED={seed}");
            let found = hit_count(&cache, &other, &other_object, &other_frames);
            assert_eq!(found, other_count, "SEED={seed}");
            // New frames do not overwrite those that were found.
            let (third, third_object, third_frames) = segment(&mut rng, 100);
            cache.insert_segment(&third, third_object.clone());
            cache.flush().await;
            assert_eq!(hit_count(&cache, &third, &third_object, &third_frames), 100);
            assert_eq!(hit_count(&cache, &info, &object, &frames), 500, "SEED={seed}");
        }
    }
}

/// Number of frames found after a kill in the middle of a write whose bytes differ from the stored
/// ones.
async fn bad_count_after_a_kill(seed: u64, seeded_bugs: SeededBugs) -> usize {
    let mut rng = Rng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut segments = Vec::new();
    let options = options(dir.path(), 8 * MIB);
    let cache = FrameCache::open_seeded(&options, POOL, seeded_bugs).unwrap();
    // Often more than the cache holds, so that the next frames go where others lie.
    let segment_count = rng.below(30) + 1;
    let last = rng.below(segment_count);
    for n in 0..segment_count {
        if n == last {
            cache.shared.file.kill_after(rng.below(2 * MIB));
        }
        let (info, object, frames) = segment(&mut rng, 100);
        if rng.below(2) == 0 {
            cache.insert_segment(&info, object.clone());
        } else {
            for &at in &frames {
                cache.insert(&info.id, at, stored(&object, at));
            }
        }
        cache.flush().await;
        segments.push((info, object, frames));
    }
    cache.close().await;
    drop(cache);
    let cache = FrameCache::open(&options, POOL).unwrap();
    cache.flush().await;
    let is_bad = |(info, object, at): &(SegmentInfo, Bytes, FrameAt)| {
        get(&cache, info, *at).is_some_and(|bytes| bytes != stored(object, *at))
    };
    let frames = segments
        .iter()
        .flat_map(|(info, object, frames)| frames.iter().map(|&at| (*info, object.clone(), at)));
    frames.filter(is_bad).count()
}

#[tokio::test]
async fn kill_during_a_write_leaves_no_partial_frame() {
    let seeded_bugs = SeededBugs { directory_first: true, ..SeededBugs::default() };
    let mut seeded_count = 0;
    for seed in seeds(10) {
        let bad_count = bad_count_after_a_kill(seed, SeededBugs::default()).await;
        assert_eq!(bad_count, 0, "SEED={seed}");
        seeded_count += bad_count_after_a_kill(seed, seeded_bugs).await;
    }
    assert!(seeded_count > 0, "a pack that is named before it is there goes unnoticed");
}

#[tokio::test]
async fn files_are_private_and_those_of_another_pool_or_size_are_discarded() {
    let dir = tempfile::tempdir().unwrap();
    let cache_dir = dir.path().join("made/by/us");
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    let path = cache_dir.join(FILE_NAME);
    let cache = open(&cache_dir, 8 * MIB);
    assert!(FrameCache::open(&options(&cache_dir, 8 * MIB), POOL).is_err(), "it is locked");
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    assert_eq!(cache_dir.metadata().unwrap().mode() & 0o777, 0o700);
    cache.insert_segment(&info, object.clone());
    cache.close().await;
    drop(cache);
    let cache = FrameCache::open(&options(&cache_dir, 8 * MIB), [1; 16]).unwrap();
    cache.flush().await;
    assert_eq!(cache.status().frame_count, 0, "another pool's");
    cache.insert_segment(&info, object.clone());
    cache.close().await;
    drop(cache);
    let cache = FrameCache::open(&options(&cache_dir, 16 * MIB), [1; 16]).unwrap();
    cache.flush().await;
    assert_eq!(cache.status().frame_count, 0, "another region size");
    drop(cache);
    std::fs::write(&path, b"something else altogether").unwrap();
    // The thread of the last cache may hold its file a moment longer.
    let cache = loop {
        match FrameCache::open(&options(&cache_dir, 8 * MIB), POOL) {
            Ok(cache) => break cache,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    };
    cache.insert_segment(&info, object.clone());
    cache.flush().await;
    assert_eq!(hit_count(&cache, &info, &object, &frames), 50);
    assert!(FrameCache::open(&options(dir.path(), MIB), POOL).is_err(), "too small");
}

#[tokio::test]
async fn cache_stays_in_budget_and_keeps_frames_in_use() {
    for seed in seeds(3) {
        let mut rng = Rng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path(), 8 * MIB);
        let (hot, hot_object, hot_frames) = segment(&mut rng, 15);
        cache.insert_segment(&hot, hot_object.clone());
        let mut last = None;
        for _ in 0..40 {
            cache.flush().await;
            assert_eq!(hit_count(&cache, &hot, &hot_object, &hot_frames), 15, "SEED={seed}");
            let (info, object, frames) = segment(&mut rng, 100);
            cache.insert_segment(&info, object.clone());
            last = Some((info, object, frames));
        }
        cache.flush().await;
        let (info, object, frames) = last.unwrap();
        assert_eq!(hit_count(&cache, &info, &object, &frames), 100, "the newest is there");
        let status = cache.status();
        assert!(status.evicted_region_count >= 20, "SEED={seed} {status:?}");
        assert!(status.reinserted_count >= 15, "SEED={seed} {status:?}");
        assert!(status.frame_count * 8192 < 9 * MIB && status.used_bytes <= 8 * MIB, "{status:?}");
        assert!(dir.path().join(FILE_NAME).metadata().unwrap().len() <= 8 * MIB);
        // A restart afterwards finds exactly the same frames.
        let before = status.frame_count;
        cache.close().await;
        drop(cache);
        let cache = open(dir.path(), 8 * MIB);
        cache.flush().await;
        assert_eq!(hit_count(&cache, &info, &object, &frames), 100, "SEED={seed}");
        assert_eq!(hit_count(&cache, &hot, &hot_object, &hot_frames), 15, "SEED={seed}");
        assert_eq!(cache.status().frame_count, before, "SEED={seed}");
    }
}

#[tokio::test]
async fn the_index_bounds_the_frames() {
    let mut rng = Rng::new(1);
    let dir = tempfile::tempdir().unwrap();
    let small = CacheOptions { index_bytes: 16 << 10, ..options(dir.path(), 64 * MIB) };
    let cache = FrameCache::open(&small, POOL).unwrap();
    let limit = cache.shared.index.entry_count_max() as u64;
    assert!((700..900).contains(&limit));
    let mut last = None;
    for _ in 0..20 {
        let (info, object, frames) = segment(&mut rng, 100);
        cache.insert_segment(&info, object.clone());
        cache.flush().await;
        last = Some((info, object, frames));
        let status = cache.status();
        assert!(status.frame_count <= limit, "{status:?}");
    }
    let (info, object, frames) = last.unwrap();
    let found = hit_count(&cache, &info, &object, &frames);
    assert!(found > 50, "a nearly full index loses few: {found}");
}

#[tokio::test]
async fn frames_beyond_the_waiting_room_are_dropped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    let none = CacheOptions { pending_bytes_max: 20_000, ..options(dir.path(), 8 * MIB) };
    let cache = FrameCache::open(&none, POOL).unwrap();
    cache.insert_segment(&info, object.clone());
    assert_eq!((cache.status().dropped_count, cache.status().pending_bytes), (1, 0));
    for &at in &frames {
        cache.insert(&info.id, at, stored(&object, at));
        assert!(cache.status().pending_bytes <= 20_000);
    }
    assert!(cache.status().dropped_count > 1);
    cache.flush().await;
    let found = hit_count(&cache, &info, &object, &frames);
    assert!(found > 0 && found < 50, "{found}");
    assert_eq!(cache.status().pending_bytes, 0);
}

/// Makes the cache file a memory file, so that a test can take its space away.
fn memory_file(dir: &Path) -> std::os::fd::OwnedFd {
    let file = rustix::fs::memfd_create("cache", MemfdFlags::ALLOW_SEALING).unwrap();
    let target = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::os::unix::fs::symlink(target, dir.join(FILE_NAME)).unwrap();
    file
}

#[tokio::test]
async fn a_disk_that_fails_to_write_turns_it_off_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let file = memory_file(dir.path());
    let cache = open(dir.path(), 8 * MIB);
    rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    cache.insert_segment(&info, object.clone());
    cache.flush().await;
    let status = cache.status();
    assert!(!status.is_on && status.error_count == 1, "{status:?}");
    assert_eq!(conditions_of(&cache), [ConditionKind::CacheFailing]);
    assert_eq!(hit_count(&cache, &info, &object, &frames), 0);
    cache.insert_segment(&info, object);
    cache.flush().await;
    assert_eq!(cache.status().pending_bytes, 0);
}

#[tokio::test]
async fn a_disk_that_fills_up_later_stops_its_growth_only() {
    let mut rng = Rng::new(1);
    let dir = tempfile::tempdir().unwrap();
    let file = memory_file(dir.path());
    let cache = open(dir.path(), 8 * MIB);
    for round in 0..30 {
        let (info, object, frames) = segment(&mut rng, 100);
        cache.insert_segment(&info, object.clone());
        cache.flush().await;
        assert_eq!(hit_count(&cache, &info, &object, &frames), 100);
        if round == 3 {
            rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        }
    }
    let status = cache.status();
    assert!(status.is_on && status.error_count == 1, "{status:?}");
    assert!(status.used_bytes < 8 * MIB && status.evicted_region_count > 0, "{status:?}");
}

fn conditions_of(cache: &FrameCache) -> Vec<ConditionKind> {
    cache.shared.conditions.list().into_iter().map(|condition| condition.kind).collect()
}

async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = SystemClock.now();
    while !is_so() {
        assert!(SystemClock.since(begun) < Duration::from_secs(30), "{what} does not come");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn full_cache_disk_is_reported_until_the_cache_grows() {
    let mut rng = Rng::new(1);
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), 8 * MIB);
    let region_bytes = cache.shared.region_bytes;
    let size_bytes = cache.shared.sequences.len() as u64 * region_bytes;
    wait_until("the first look", || cache.status().unreserved_bytes == size_bytes).await;
    assert_eq!(conditions_of(&cache), []);
    // The disk is smaller than the configured cache; the condition says so before the disk is full.
    cache.shared.file.set_free_bytes(2 * region_bytes);
    wait_until("the condition", || conditions_of(&cache) == [ConditionKind::CacheShrunk]).await;
    async fn fill(cache: &FrameCache, rng: &mut Rng) {
        for _ in 0..150 {
            // Two regions hold several of these.
            let (info, object, frames) = segment(rng, 20);
            cache.insert_segment(&info, object.clone());
            cache.flush().await;
            assert_eq!(hit_count(cache, &info, &object, &frames), 20);
        }
    }
    fill(&cache, &mut rng).await;
    let status = cache.status();
    assert!(status.is_on && status.used_bytes == 2 * region_bytes, "{status:?}");
    assert_eq!(status.unreserved_bytes, size_bytes - 2 * region_bytes);
    let what = cache.shared.conditions.list()[0].report.what.clone();
    assert!(what.contains("should have 7 MiB and has 2 MiB"), "{what}");
    // The space of one region is left to others. When there is more, the cache grows without a
    // restart.
    cache.shared.file.set_free_bytes(region_bytes);
    fill(&cache, &mut rng).await;
    assert_eq!(cache.status().used_bytes, 2 * region_bytes);
    cache.shared.file.set_free_bytes(size_bytes * 2);
    wait_until("the end of the condition", || conditions_of(&cache).is_empty()).await;
    fill(&cache, &mut rng).await;
    let status = cache.status();
    assert_eq!((status.used_bytes, status.unreserved_bytes), (size_bytes, 0), "{status:?}");
    cache.close().await;
}

#[tokio::test]
async fn cache_on_a_full_disk_starts_once_space_appears() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), 8 * MIB);
    cache.shared.file.set_free_bytes(0);
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    cache.insert_segment(&info, object.clone());
    cache.flush().await;
    assert_eq!(hit_count(&cache, &info, &object, &frames), 0);
    assert_eq!(conditions_of(&cache), [ConditionKind::CacheShrunk]);
    assert!(cache.status().is_on);
    cache.shared.file.set_free_bytes(64 * MIB);
    wait_until("the end of the condition", || conditions_of(&cache).is_empty()).await;
    cache.insert_segment(&info, object.clone());
    cache.flush().await;
    assert_eq!(hit_count(&cache, &info, &object, &frames), 50);
}

#[tokio::test]
async fn frames_that_do_not_verify_are_a_condition() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), 8 * MIB);
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    cache.insert_segment(&info, object);
    cache.flush().await;
    for at in &frames[..2] {
        let Some(Found::Disk(place)) = cache.find(&info.id, *at) else { panic!("it is there") };
        cache.reject(
            &FrameRef { info, placement: crate::segment::Placement::Object, at: *at },
            place,
            &SegmentError::Authentication,
        );
    }
    let list = cache.shared.conditions.list();
    assert_eq!((list.len(), list[0].kind), (1, ConditionKind::CacheFailing));
    assert!(list[0].report.what.contains("gave 2 frames"), "{list:?}");
    assert_eq!(list[0].subject, dir.path().display().to_string());
}

#[tokio::test]
async fn truncated_cache_file_causes_misses_then_turns_it_off() {
    let dir = tempfile::tempdir().unwrap();
    let (info, object, frames) = segment(&mut Rng::new(1), 50);
    let cache = open(dir.path(), 8 * MIB);
    cache.insert_segment(&info, object.clone());
    cache.flush().await;
    let path = dir.path().join(FILE_NAME);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert_eq!(hit_count(&cache, &info, &object, &frames), 0);
    assert!(!cache.status().is_on, "after {READ_ERROR_COUNT_MAX} failing reads");
    drop(cache);
}

#[tokio::test]
async fn damage_of_any_kind_is_detected_without_a_panic() {
    for seed in seeds(30) {
        let mut rng = Rng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path(), 8 * MIB);
        let mut segments = Vec::new();
        for _ in 0..3 {
            let (info, object, frames) = segment(&mut rng, 60);
            cache.insert_segment(&info, object.clone());
            segments.push((info, object, frames));
        }
        cache.close().await;
        drop(cache);
        let path = dir.path().join(FILE_NAME);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let length = file.metadata().unwrap().len();
        for _ in 0..20 {
            let count = rng.below(8192) as usize;
            let (at, bytes) = (4096 + rng.below(length - 4096), rng.bytes(count, 60));
            file.write_all_at(&bytes, at).unwrap();
        }
        if rng.below(3) == 0 {
            file.set_len(rng.below(length)).unwrap();
        }
        drop(file);
        let cache = open(dir.path(), 8 * MIB);
        cache.flush().await;
        for (info, object, frames) in &segments {
            for &at in frames {
                let Some(bytes) = get(&cache, info, at) else { continue };
                let is_complete = verify_frame(&info.id, at, &bytes).is_ok();
                assert_eq!(is_complete, bytes == stored(object, at), "SEED={seed} {at:?}");
            }
        }
        let (info, object, frames) = segment(&mut rng, 60);
        cache.insert_segment(&info, object.clone());
        cache.flush().await;
        let found = hit_count(&cache, &info, &object, &frames);
        assert_eq!(found, 60, "SEED={seed} {:?}", cache.status());
    }
}

/// Simulates a loss of power during a run that was not closed: the cache file has directories
/// without their frames.
async fn lose_power(dir: &Path, object: &Bytes, info: &SegmentInfo, lost: &Path) {
    let cache = open(dir, 8 * MIB);
    cache.insert_segment(info, object.clone());
    cache.flush().await;
    std::fs::copy(dir.join(FILE_NAME), lost.join(FILE_NAME)).unwrap();
    lose_frames(&lost.join(FILE_NAME));
}

/// Zeroes everything except the file header and the first block of the first pack, which holds its
/// directory.
fn lose_frames(path: &Path) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    file.write_all_at(&vec![0; length as usize - 8192], 8192).unwrap();
}

/// Reads frames as the tier does, and rejects those that do not verify. Returns how many were
/// counted as expected, and how many as damage of the disk.
fn reject_bad(cache: &FrameCache, info: SegmentInfo, frames: &[FrameAt]) -> (u64, u64) {
    for &at in frames {
        let Some(Found::Disk(place)) = cache.find(&info.id, at) else { continue };
        let mut buffer = AlignedBuffer::default();
        let bytes = cache.read(place, &mut buffer, at.sealed_bytes as usize).unwrap();
        if let Err(error) = verify_frame(&info.id, at, bytes) {
            cache.reject(
                &FrameRef { info, placement: crate::segment::Placement::Object, at },
                place,
                &error,
            );
        }
    }
    let told = cache.shared.rejected.take(SystemClock.now());
    (told.unproven_count, told.proven_count)
}

#[tokio::test]
async fn frames_lost_with_power_are_expected_until_overwritten() {
    let (dir, lost) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut rng = Rng::new(1);
    let (info, object, frames) = segment(&mut rng, 60);
    lose_power(dir.path(), &object, &info, lost.path()).await;
    let cache = open(lost.path(), 8 * MIB);
    cache.flush().await;
    let (expected, damaged) = reject_bad(&cache, info, &frames[..30]);
    assert!(expected > 20 && damaged == 0, "{expected} and {damaged}");
    cache.close().await;
    drop(cache);
    // An orderly end of a later run proves nothing about frames written before it.
    let cache = open(lost.path(), 8 * MIB);
    cache.flush().await;
    let (expected, damaged) = reject_bad(&cache, info, &frames);
    assert!(expected > 50 && damaged == 0, "{expected} and {damaged}");
    let (own, own_object, own_frames) = segment(&mut rng, 60);
    cache.insert_segment(&own, own_object.clone());
    cache.close().await;
    let Some(Found::Disk(place)) = cache.find(&own.id, own_frames[59]) else { panic!("its own") };
    drop(cache);
    // But it does prove its own frames.
    let file = std::fs::OpenOptions::new().write(true).open(lost.path().join(FILE_NAME)).unwrap();
    file.write_all_at(&[0; 64], place.at).unwrap();
    let cache = open(lost.path(), 8 * MIB);
    cache.flush().await;
    assert_eq!(reject_bad(&cache, own, &own_frames), (0, 1));
}

#[tokio::test]
async fn frames_of_a_closed_cache_that_do_not_verify_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (info, object, frames) = segment(&mut Rng::new(1), 60);
    let cache = open(dir.path(), 8 * MIB);
    cache.insert_segment(&info, object.clone());
    cache.close().await;
    drop(cache);
    lose_frames(&dir.path().join(FILE_NAME));
    let cache = open(dir.path(), 8 * MIB);
    cache.flush().await;
    let (expected, damaged) = reject_bad(&cache, info, &frames);
    assert!(expected == 0 && damaged > 50, "{expected} and {damaged}");
}

#[tokio::test]
async fn trusting_an_unclosed_file_is_detected() {
    let (dir, lost) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (info, object, frames) = segment(&mut Rng::new(1), 60);
    lose_power(dir.path(), &object, &info, lost.path()).await;
    let seeded_bugs = SeededBugs { unclosed_trusted: true, ..SeededBugs::default() };
    let cache = FrameCache::open_seeded(&options(lost.path(), 8 * MIB), POOL, seeded_bugs).unwrap();
    cache.flush().await;
    let (_, damaged) = reject_bad(&cache, info, &frames);
    assert!(damaged > 0, "the seeded bug goes unnoticed");
}

#[tokio::test]
async fn damage_is_a_condition_until_an_hour_has_passed_without_more() {
    let dir = tempfile::tempdir().unwrap();
    let (info, object, frames) = segment(&mut Rng::new(1), 60);
    let cache = open(dir.path(), 8 * MIB);
    cache.insert_segment(&info, object);
    cache.close().await;
    drop(cache);
    lose_frames(&dir.path().join(FILE_NAME));
    let clock = ManualClock::new();
    let options = CacheOptions { clock: Arc::new(clock.clone()), ..options(dir.path(), 8 * MIB) };
    let cache = FrameCache::open(&options, POOL).unwrap();
    cache.flush().await;
    assert!(reject_bad(&cache, info, &frames[..30]).1 > 0);
    clock.advance(BAD_LASTS - Duration::from_secs(1));
    assert!(reject_bad(&cache, info, &frames[30..]).1 > 0);
    // The time since the first damage has passed, and the writer looks.
    clock.advance(Duration::from_secs(1));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(conditions_of(&cache), [ConditionKind::CacheFailing]);
    clock.advance(BAD_LASTS);
    wait_until("the end", || conditions_of(&cache).is_empty()).await;
}
