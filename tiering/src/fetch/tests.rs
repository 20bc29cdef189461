//! Guarantees of reading frames.

use super::*;
use crate::cache::CacheOptions;
use crate::keys::{KeyId, VolumeKeys};
use crate::segment::build::{SegmentBuilder, SegmentSeed};
use crate::segment::{FrameAt, Placement, SegmentNumber};
use crate::segment_store::ObjectSegments;
use crate::testing::{Fault, FaultStore, Op, Rng, seeds};
use block::Epoch;
use block::env::ManualClock;
use block::seal::{Algorithm, PoolKey};
use object_store::ObjectStoreExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const POOL: [u8; 16] = [3; 16];
const MIB: u64 = 1 << 20;

fn pool_key() -> PoolKey {
    PoolKey::new([7; 32])
}

fn frame_of_segment(info: SegmentInfo, at: FrameAt) -> FrameRef {
    FrameRef { info, placement: Placement::Object, at }
}

fn open(store: &Arc<FaultStore>, pool: [u8; 16], options: FramesOptions) -> Frames {
    let segments = Arc::new(ObjectSegments::new(store.clone()));
    let keys = PoolKeys { pool, pool_key: pool_key(), volume_keys: VolumeKeys::default() };
    Frames::open(segments, keys, options)
}

/// A store with segments, and their contents.
struct World {
    store: Arc<FaultStore>,
    frames: Vec<FrameRef>,
    plain: Vec<Vec<u8>>,
    objects: Vec<(SegmentInfo, Bytes)>,
}

impl World {
    async fn new(rng: &mut Rng, segments: u64, frames_each: usize) -> World {
        let store = Arc::new(FaultStore::default());
        let mut world = World { store, frames: vec![], plain: vec![], objects: vec![] };
        for number in 1..=segments {
            world.add_segment(rng, number, frames_each).await;
        }
        world.store.take_calls();
        world
    }

    async fn add_segment(&mut self, rng: &mut Rng, number: u64, frames: usize) {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
        let algorithm = [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm][(number % 2) as usize];
        let (epoch, number) = (Epoch(1), SegmentNumber(number));
        let seed = SegmentSeed { pool: POOL, epoch, number, id, algorithm, key: KeyId::POOL };
        let mut builder = SegmentBuilder::new(seed, &pool_key(), 1, 0);
        let mut places = Vec::new();
        for n in 0..frames {
            let plain = rng.bytes((rng.clone().below(4) + 1) as usize * 4096, 60);
            places.push(builder.push(1, n as u64 * 16, &plain));
            self.plain.push(plain);
        }
        let sealed = builder.finish();
        self.frames.extend(places.iter().map(|&at| frame_of_segment(sealed.info, at)));
        self.store.put(&sealed.info.object_path(), sealed.bytes.clone().into()).await.unwrap();
        self.objects.push((sealed.info, sealed.bytes));
    }

    fn open(&self, options: FramesOptions) -> Frames {
        open(&self.store, POOL, options)
    }

    fn get_count(&self) -> usize {
        self.store.call_count(Op::Get)
    }

    async fn check(&self, frames: &Frames, wanted: &[usize], access: Access) {
        let refs: Vec<FrameRef> = wanted.iter().map(|&n| self.frames[n].clone()).collect();
        let read = frames.read_many(&refs, access).await.unwrap();
        for (&n, plain) in wanted.iter().zip(read) {
            assert!(plain == self.plain[n], "frame {n}");
        }
    }

    async fn check_all(&self, frames: &Frames) {
        for n in 0..self.frames.len() {
            let plain = frames.read(&self.frames[n]).await.unwrap();
            assert!(plain == self.plain[n], "frame {n}");
        }
    }
}

fn bare() -> FramesOptions {
    FramesOptions { memory_bytes: 0, stream_bytes: 0, ..FramesOptions::default() }
}

fn cached(dir: &Path) -> FramesOptions {
    FramesOptions { cache: Some(CacheOptions::new(dir, 64 * MIB)), ..bare() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_of_reading_gives_the_same_bytes() {
    for seed in seeds(6) {
        let mut rng = Rng::new(seed);
        let world = World::new(&mut rng, 4, 60).await;
        let dir = tempfile::tempdir().unwrap();
        let frames = world.open(FramesOptions {
            memory_bytes: rng.below(2) * MIB,
            stream_bytes: rng.below(2) * MIB,
            cache: (rng.below(3) > 0).then(|| CacheOptions::new(dir.path(), 8 * MIB)),
            store_read_count_max: 3,
            ..FramesOptions::default()
        });
        let mut tasks = Vec::new();
        let world = Arc::new(world);
        for _ in 0..4 {
            let (world, frames, mut rng) =
                (world.clone(), frames.clone(), Rng::new(rng.next_u64()));
            tasks.push(tokio::spawn(async move {
                for _ in 0..60 {
                    let count = rng.below(20) as usize;
                    let first = rng.below(220) as usize;
                    let mut wanted: Vec<usize> = (first..first + count).collect();
                    if rng.below(2) == 0 {
                        wanted = (0..count).map(|_| rng.below(240) as usize).collect();
                    }
                    let access = [Access::Random, Access::Sequential][rng.below(2) as usize];
                    if rng.below(4) == 0 {
                        let refs: Vec<_> =
                            wanted.iter().map(|&n| world.frames[n].clone()).collect();
                        frames.read_ahead(&refs);
                    }
                    world.check(&frames, &wanted, access).await;
                }
            }));
        }
        for task in tasks {
            task.await.unwrap_or_else(|error| panic!("SEED={seed}: {error}"));
        }
        assert!(world.store.gets_running_max() <= 3, "SEED={seed}: the bound on store reads");
        frames.close().await;
        world.check_all(&frames).await;
    }
}

#[tokio::test]
async fn readers_of_one_frame_share_a_request_despite_cancellation() {
    let world = World::new(&mut Rng::new(1), 1, 3).await;
    let frames = world.open(bare());
    world.store.hold_gets(true);
    let mut tasks = Vec::new();
    for _ in 0..20 {
        let (frames, frame) = (frames.clone(), world.frames[1].clone());
        tasks.push(tokio::spawn(async move { frames.read(&frame).await }));
        tokio::task::yield_now().await;
    }
    while world.get_count() == 0 {
        tokio::task::yield_now().await;
    }
    tasks.remove(0).abort();
    world.store.hold_gets(false);
    for task in tasks {
        assert!(task.await.unwrap().unwrap() == world.plain[1]);
    }
    assert_eq!(world.get_count(), 1);
    assert_eq!(frames.status().flight_count, 0);
}

#[tokio::test]
async fn adjacent_frames_are_one_request_and_distant_ones_are_not() {
    let world = World::new(&mut Rng::new(1), 2, 100).await;
    let frames = world.open(bare());
    world.check(&frames, &[7, 5, 6, 8, 9, 5], Access::Random).await;
    assert_eq!(world.get_count(), 1);
    let start = world.frames[5].at.offset;
    let end = world.frames[9].at.offset + world.frames[9].at.sealed_bytes;
    let call = world.store.take_calls().remove(0);
    assert_eq!(call.range, Some(format!("bytes={start}-{}", end - 1)));
    world.check(&frames, &[0, 99, 100, 199], Access::Random).await;
    assert_eq!(world.get_count(), 4, "two segments, two ends each");
    world.store.take_calls();
    world.check(&frames, &[42], Access::Random).await;
    let at = world.frames[42].at;
    let range = format!("bytes={}-{}", at.offset, at.offset + at.sealed_bytes - 1);
    assert_eq!(world.store.take_calls()[0].range, Some(range), "exactly the frame");
}

#[tokio::test]
async fn passing_failures_are_waited_out_and_lasting_ones_are_not() {
    let world = World::new(&mut Rng::new(1), 1, 3).await;
    let frames = world.open(bare());
    world.store.fail_next(Op::Get, 3);
    world.check(&frames, &[1], Access::Random).await;
    assert!(frames.status().store_retry_count >= 2);
    assert_eq!(frames.status().store_failure, None, "it answers again");
    world.store.set_away(true);
    let quick = FramesOptions { retry_duration_max: Duration::from_millis(200), ..bare() };
    let frames = world.open(quick);
    let error = frames.read(&world.frames[0]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(frames.status().store_failure.is_some());
    world.store.set_away(false);
    world.check(&frames, &[0], Access::Random).await;
    // A store that never answers counts as failing too.
    let hung = FramesOptions {
        attempt_timeout: Duration::from_millis(20),
        retry_duration_max: Duration::from_millis(100),
        ..bare()
    };
    let frames = world.open(hung);
    world.store.hold_gets(true);
    let error = frames.read(&world.frames[0]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    world.store.hold_gets(false);
    world.check(&frames, &[0], Access::Random).await;
}

#[tokio::test]
async fn read_waits_two_minutes_for_an_absent_store() {
    let world = World::new(&mut Rng::new(1), 1, 3).await;
    let clock = ManualClock::new();
    let frames = world.open(FramesOptions { clock: Arc::new(clock.clone()), ..bare() });
    world.store.set_away(true);
    let read = tokio::spawn({
        let (frames, frame) = (frames.clone(), world.frames[0].clone());
        async move { frames.read(&frame).await }
    });
    let failed_again = async || {
        let before = frames.status().store_retry_count;
        while frames.status().store_retry_count <= before {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    failed_again().await;
    failed_again().await;
    clock.advance(Duration::from_secs(110));
    failed_again().await;
    let failure = frames.status().store_failure.unwrap();
    assert!(!read.is_finished(), "it waits: {failure:?}");
    assert!(failure.lasts >= Duration::from_secs(110) && failure.age.is_zero(), "{failure:?}");
    clock.advance(Duration::from_secs(10));
    let error = read.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
}

#[tokio::test]
async fn a_bad_object_is_a_final_error_that_names_it() {
    let world = World::new(&mut Rng::new(1), 3, 10).await;
    let frames = world.open(bare());
    let path = |n: usize| world.objects[n].0.object_path();
    let hit = world.frames[4].at.offset as usize + 100;
    world.store.damage(&path(0), |bytes| bytes[hit] ^= 4).await;
    world.store.take_calls();
    let error = frames.read(&world.frames[4]).await.unwrap_err();
    assert_eq!((error.kind(), world.get_count()), (ErrorKind::Corrupt, 2), "read twice, no more");
    let text = error.chain();
    assert!(text.contains(path(0).as_ref()) && text.contains("frame 4"), "{text}");
    assert!(text.contains("segment 1 ") && text.contains("checksum"), "{text}");
    assert_eq!(frames.status().store_bad_count, 1);
    world.check(&frames, &[3, 5], Access::Random).await;
    let error = frames.read_many(&world.frames[3..6], Access::Random).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);

    let whole = world.objects[1].1.len();
    for cut in [0, 200, world.frames[15].at.offset as usize + 1, whole - 1] {
        world.store.damage(&path(1), |bytes| bytes.truncate(cut)).await;
        let read = frames.read(&world.frames[15]).await;
        if cut < whole - 1 {
            assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt, "cut to {cut}");
        }
        world.store.damage(&path(1), |bytes| *bytes = world.objects[1].1.to_vec()).await;
    }
    world.store.damage(&path(1), |bytes| *bytes = world.objects[2].1.to_vec()).await;
    let error = frames.read(&world.frames[15]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "another segment's bytes");

    for at in [
        FrameAt { sealed_bytes: 0, ..world.frames[25].at },
        FrameAt { sealed_bytes: u32::MAX, ..world.frames[25].at },
        FrameAt { offset: u32::MAX - 5, ..world.frames[25].at },
        FrameAt { frame_index: 7, ..world.frames[25].at },
        FrameAt { offset: world.frames[25].at.offset + 1, ..world.frames[25].at },
    ] {
        let error = frames.read(&frame_of_segment(world.frames[25].info, at)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{at:?}");
    }
    frames.read_ahead(&[FrameRef {
        at: FrameAt { sealed_bytes: u32::MAX, ..world.frames[25].at },
        ..world.frames[25].clone()
    }]);
    world.store.delete(&path(2)).await.unwrap();
    world.store.take_calls();
    let error = frames.read(&world.frames[25]).await.unwrap_err();
    assert_eq!((error.kind(), world.get_count()), (ErrorKind::NotFound, 1));
    assert!(error.chain().contains(path(2).as_ref()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_transfer_is_read_once_more_and_never_remembered() {
    let world = World::new(&mut Rng::new(1), 1, 100).await;
    let dir = tempfile::tempdir().unwrap();
    let frames = world.open(cached(dir.path()));
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    world.check(&frames, &[42], Access::Random).await;
    assert_eq!((world.get_count(), frames.status().store_refetch_count), (2, 1));

    // Only the bad frame of a run is read again. A bit in the middle of the run flips.
    world.store.take_calls();
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    world.check(&frames, &(0..9).collect::<Vec<_>>(), Access::Sequential).await;
    let (first, last) = (world.frames[0].at, world.frames[8].at);
    let middle = first.offset + (last.offset + last.sealed_bytes - first.offset) / 2;
    let hit = world.frames.iter().rfind(|frame| frame.at.offset <= middle).unwrap().at;
    let range = format!("bytes={}-{}", hit.offset, hit.offset + hit.sealed_bytes - 1);
    let calls = world.store.take_calls();
    assert_eq!((calls.len(), &calls[1].range), (2, &Some(range)));
    let status = frames.status();
    assert_eq!((status.store_refetch_count, status.store_bad_count), (2, 0));
    frames.flush_cache().await;
    world.store.set_away(true);
    world.check(&frames, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 42], Access::Random).await;
    world.store.set_away(false);

    // Large runs are opened on another thread.
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    world.check(&frames, &(10..42).chain(43..100).collect::<Vec<_>>(), Access::Random).await;
    assert_eq!(frames.status().store_refetch_count, 3);

    // A bad result of read-ahead is not cached either.
    let ahead = FramesOptions { stream_bytes: MIB, ..bare() };
    let frames = world.open(ahead);
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    frames.read_ahead(&world.frames[..10]);
    while frames.status().flight_count > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.store.clear_injected(), 0);
    world.check(&frames, &(0..10).collect::<Vec<_>>(), Access::Sequential).await;
    assert_eq!(frames.status().store_refetch_count, 1);

    // An object that is bad twice is corrupt.
    let frames = world.open(bare());
    world.store.inject(Op::Get, "segments", 2, Fault::Flipped);
    let error = frames.read(&world.frames[7]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let status = frames.status();
    assert_eq!((status.store_refetch_count, status.store_bad_count), (1, 1));
    world.check(&frames, &[7], Access::Random).await;
}

#[tokio::test]
async fn a_short_body_is_a_failure_that_may_pass() {
    let world = World::new(&mut Rng::new(1), 1, 20).await;
    let frames = world.open(bare());
    world.store.inject(Op::Get, "segments", 3, Fault::Short);
    world.check(&frames, &[3], Access::Random).await;
    assert_eq!(world.store.clear_injected(), 0);
    let status = frames.status();
    assert_eq!((status.store_refetch_count, status.store_bad_count), (0, 0));
    assert!(status.store_retry_count >= 2, "{status:?}");

    let quick = FramesOptions { retry_duration_max: Duration::from_millis(200), ..bare() };
    let frames = world.open(quick);
    world.store.inject(Op::Get, "segments", u64::MAX, Fault::Short);
    let error = frames.read(&world.frames[3]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(error.chain().contains("arrived instead of"), "{}", error.chain());
    world.store.clear_injected();
    world.check(&frames, &[3], Access::Random).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_nvme_cache_serves_without_the_store_also_after_a_restart() {
    let world = World::new(&mut Rng::new(1), 3, 100).await;
    let dir = tempfile::tempdir().unwrap();
    let frames = world.open(cached(dir.path()));
    frames.insert_segment(&world.objects[0].0, world.objects[0].1.clone());
    world.check(&frames, &(0..100).collect::<Vec<_>>(), Access::Random).await;
    assert_eq!(world.get_count(), 0, "what was destaged is there at once");
    world.check_all(&frames).await;
    frames.flush_cache().await;
    world.store.set_away(true);
    world.check_all(&frames).await;
    frames.close().await;
    drop(frames);
    let frames = world.open(cached(dir.path()));
    frames.flush_cache().await;
    world.check_all(&frames).await;
    world.check(&frames, &(0..300).rev().collect::<Vec<_>>(), Access::Sequential).await;
    assert_eq!(frames.status().cache_hit_count, 600);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_copy_in_the_nvme_cache_is_dropped_and_fetched_again() {
    let world = World::new(&mut Rng::new(1), 1, 50).await;
    let dir = tempfile::tempdir().unwrap();
    let frames = world.open(cached(dir.path()));
    frames.insert_segment(&world.objects[0].0, world.objects[0].1.clone());
    frames.flush_cache().await;
    let path = dir.path().join(crate::cache::file::FILE_NAME);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut bytes = vec![0; 4 << 20];
    let count = file.read_at(&mut bytes, 0).unwrap();
    for at in (4096 + 8192..count).step_by(4096) {
        file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
    }
    world.check_all(&frames).await;
    let status = frames.status();
    let bad_count = status.cache.as_ref().unwrap().bad_count;
    assert!(bad_count > 20 && bad_count == status.store_frame_count, "{status:?}");
    frames.flush_cache().await;
    world.store.set_away(true);
    world.check_all(&frames).await;
    assert_eq!(frames.status().cache.unwrap().bad_count, bad_count, "good copies came back");
}

#[tokio::test]
async fn a_cache_that_cannot_be_opened_is_left_off() {
    let world = World::new(&mut Rng::new(1), 1, 5).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let frames = world.open(cached(file.path()));
    assert_eq!(frames.status().cache, None);
    world.check_all(&frames).await;
}

#[tokio::test]
async fn memory_keeps_to_its_budget_and_a_scan_does_not_sweep_it() {
    let world = World::new(&mut Rng::new(1), 6, 100).await;
    let options = FramesOptions { memory_bytes: 2 * MIB, stream_bytes: MIB, ..bare() };
    let frames = world.open(options);
    let hot: Vec<usize> = (0..60).collect();
    for _ in 0..3 {
        world.check(&frames, &hot, Access::Random).await;
    }
    world.store.take_calls();
    for n in 100..600 {
        world.check(&frames, &[n], Access::Sequential).await;
    }
    assert!(frames.status().memory_used_bytes <= 3 * MIB, "{:?}", frames.status());
    world.store.take_calls();
    world.check(&frames, &hot, Access::Random).await;
    assert_eq!(world.get_count(), 0, "the hot frames are still in memory");
    for n in 100..600 {
        world.check(&frames, &[n], Access::Random).await;
    }
    assert!(frames.status().memory_used_bytes <= 3 * MIB, "{:?}", frames.status());
}

#[tokio::test]
async fn read_ahead_is_bounded_and_makes_the_read_a_hit() {
    let world = World::new(&mut Rng::new(1), 2, 100).await;
    let options = FramesOptions { stream_bytes: MIB, ..bare() };
    let frames = world.open(options);
    frames.read_ahead(&world.frames[..30]);
    while frames.status().flight_count > 0 {
        tokio::task::yield_now().await;
    }
    world.store.take_calls();
    world.check(&frames, &(0..30).collect::<Vec<_>>(), Access::Sequential).await;
    assert_eq!((world.get_count(), frames.status().memory_hit_count), (0, 30));
    // A reader that comes while the fetch is under way waits for it instead of asking again.
    world.store.hold_gets(true);
    frames.read_ahead(&world.frames[50..60]);
    let reader = {
        let (frames, frame) = (frames.clone(), world.frames[55].clone());
        tokio::spawn(async move { frames.read(&frame).await })
    };
    while world.get_count() == 0 {
        tokio::task::yield_now().await;
    }
    world.store.hold_gets(false);
    assert!(reader.await.unwrap().unwrap() == world.plain[55]);
    assert_eq!(world.get_count(), 1);
    // Far more than the budget: the excess is dropped and counted, and the store is not flooded.
    world.store.hold_gets(true);
    for _ in 0..5 {
        frames.read_ahead(&world.frames);
    }
    let status = frames.status();
    assert!(status.ahead_dropped_count > 100 && status.flight_count < 110, "{status:?}");
    world.store.hold_gets(false);
    while frames.status().flight_count > 0 {
        tokio::task::yield_now().await;
    }
    let off = world.open(bare());
    off.read_ahead(&world.frames);
    assert_eq!((off.status().flight_count, off.status().ahead_dropped_count), (0, 200));
    // Read-ahead never fails a caller. If the store is away, the read itself reports it.
    world.store.take_calls();
    world.store.set_away(true);
    let quick = FramesOptions { retry_duration_max: Duration::ZERO, stream_bytes: MIB, ..bare() };
    let quick = world.open(quick);
    quick.read_ahead(&world.frames[..10]);
    while quick.status().flight_count > 0 {
        tokio::task::yield_now().await;
    }
    world.store.set_away(false);
    world.check(&quick, &[0, 1, 2], Access::Sequential).await;
}

#[tokio::test]
async fn directories_and_whole_segments_are_checked() {
    let mut rng = Rng::new(1);
    let world = World::new(&mut rng, 2, 3000).await;
    let frames = world.open(bare());
    let (info, object) = &world.objects[0];
    let segment = StoredSegment::from(*info);
    let entries = frames.read_directory(&segment).await.unwrap();
    assert!(entries.iter().map(|entry| entry.at).eq(world.frames[..3000].iter().map(|f| f.at)));
    let report = frames.check_segment(&segment).await.unwrap();
    let plain_bytes: usize = world.plain[..3000].iter().map(Vec::len).sum();
    assert_eq!((report.plain_bytes, report.damaged.len()), (plain_bytes as u64, 0));
    let hit = world.frames[70].at.offset as usize + 3;
    world.store.damage(&info.object_path(), |bytes| bytes[hit] ^= 1).await;
    let report = frames.check_segment(&segment).await.unwrap();
    assert_eq!(report.damaged.len(), 1);
    assert_eq!(report.damaged[0].0, world.frames[70].at);
    for at in [10, object.len() - 10, object.len() - 100] {
        world.store.damage(&info.object_path(), |bytes| *bytes = object.to_vec()).await;
        world.store.damage(&info.object_path(), |bytes| bytes[at] ^= 1).await;
        assert_eq!(frames.check_segment(&segment).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(frames.read_directory(&segment).await.unwrap_err().kind(), ErrorKind::Corrupt);
    }
    // A single bad transfer does not mean a bad object; a second one does.
    world.store.damage(&info.object_path(), |bytes| *bytes = object.to_vec()).await;
    let before = frames.status().store_refetch_count;
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    assert_eq!(frames.check_segment(&segment).await.unwrap().damaged, []);
    world.store.inject(Op::Get, "segments", 2, Fault::Flipped);
    assert_eq!(frames.check_segment(&segment).await.unwrap().damaged.len(), 1);
    world.store.inject(Op::Get, "segments", 1, Fault::Flipped);
    frames.read_directory(&segment).await.unwrap();
    assert_eq!(frames.status().store_refetch_count, before + 3);

    let other = world.objects[1].1.to_vec();
    world.store.damage(&info.object_path(), |bytes| *bytes = other).await;
    assert_eq!(frames.read_directory(&segment).await.unwrap_err().kind(), ErrorKind::Corrupt);
    let stranger = open(&world.store, [4; 16], bare());
    let error = stranger.read_directory(&world.objects[1].0.into()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "another pool's");
}
