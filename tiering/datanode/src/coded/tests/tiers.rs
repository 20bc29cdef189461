//! A data tier over stores of fragments and an object store: segments are copied, dropped and brought back.

use super::*;
use block::{Lsn, Result, VolumeId};
use std::sync::atomic::AtomicBool;
use tiering::Finding;
use tiering::rebuild::RebuildReport;
use tiering::segment_store::ANY_LOSS;
use tiering::testing::seed_bugs_of_tiers;
use tiering::tiers::{TierOutcome, TierPlan, TierPolicy, TierRoom, TierStep, Tiers};
use tiering::{ExtentContent, LogSource, OwnerCheck, Tier, TierOptions, Window, WindowExtent};

const VOLUME: VolumeId = VolumeId(1);
const HOUR: Duration = Duration::from_secs(3600);
/// Longer than fragments that have moved stay.
const STAY: Duration = Duration::from_secs(151);
const BOTH: TierPolicy = TierPolicy { tiers: Tiers::Both, cold_after: HOUR, free_min: 0 };

struct Payloads;

impl LogSource for Payloads {
    type Handle = Bytes;

    async fn read(&self, handle: &Bytes) -> Result<Bytes> {
        Ok(handle.clone())
    }
}

/// A pool whose segments have two tiers.
struct Pool {
    world: World,
    objects: IllStore,
    /// Another process has the pool.
    is_taken: Arc<AtomicBool>,
    segments: Arc<CodedSegments>,
    tier: Tier,
    epoch: u64,
}

type Opened = (Arc<CodedSegments>, Tier);

async fn open(
    world: &World,
    objects: &IllStore,
    is_taken: &Arc<AtomicBool>,
    (scheme, epoch): (&str, u64),
    tiers: Tiers,
) -> Opened {
    let mut members = Vec::new();
    for (id, store) in (1..).zip(&world.stores) {
        let store = Arc::new(store.clone());
        members.push(named(id, format!("node {id}"), store, &world.clock).await);
    }
    let segments = Arc::new(CodedSegments::new(CodedOptions {
        clock: Arc::new(world.clock.clone()),
        objects: ObjectSegments::new(Arc::new(objects.clone())),
        is_emptying: tiers == Tiers::ObjectStore,
        ..options(scheme, members, &world.objects)
    }));
    let key = PoolKey::new([7; KEY_BYTES]);
    let mut options = TierOptions::new(Arc::new(objects.clone()), POOL, key, Epoch(epoch));
    options.segments = Some(Arc::clone(&segments) as Arc<dyn SegmentStore>);
    (options.map.in_fragments, options.map.in_tiers) = (true, tiers.is_moving());
    options.clock = Arc::new(world.clock.clone());
    options.segment_bytes = 1 << 20;
    options.database.poll_interval = Duration::from_millis(20);
    options.frames.memory_bytes = 0;
    options.frames.stream_bytes = 0;
    let is_taken = Arc::clone(is_taken);
    options.owner_check = Some(OwnerCheck::new(move || {
        let is_taken = is_taken.load(Ordering::SeqCst);
        let fenced = || block::Error::new(block::ErrorKind::Fenced, "another process has it");
        Box::pin(async move { if is_taken { Err(fenced()) } else { Ok(()) } })
    }));
    seed_bugs_of_tiers(&mut options);
    (segments, Tier::open(options).await.expect("it opens"))
}

impl Pool {
    async fn new(scheme: &str, store_count: usize, tiers: Tiers) -> Pool {
        let (world, objects) = (world(scheme, store_count).await, IllStore::default());
        let is_taken = Arc::default();
        let (segments, tier) = open(&world, &objects, &is_taken, (scheme, 1), tiers).await;
        Pool { world, objects, is_taken, segments, tier, epoch: 1 }
    }

    /// Closes the pool and opens it again, with these tiers.
    async fn reopen(self, tiers: Tiers) -> Pool {
        let Pool { world, objects, is_taken, segments, tier, epoch } = self;
        tier.close().await.expect("the store answers");
        let (scheme, epoch) = (segments.scheme().to_string(), epoch + 1);
        let (segments, tier) = open(&world, &objects, &is_taken, (&scheme, epoch), tiers).await;
        Pool { world, objects, is_taken, segments, tier, epoch }
    }

    /// Writes a segment that has the bytes of the volume from an offset on. Returns the bytes.
    async fn write(&self, lsn: u64, offset: u64) -> Bytes {
        let bytes = Bytes::from(Rng::new(lsn).bytes(700 << 10, 100));
        let extent = WindowExtent {
            start_sector: offset / 512,
            sector_count: bytes.len() as u64 / 512,
            content: ExtentContent::Data(bytes.clone()),
        };
        let window = Window {
            last_lsn: Lsn(lsn),
            snapshots: Vec::new(),
            volume_records: Vec::new(),
            volumes: vec![(VOLUME, vec![extent])],
            stalled_volumes: Vec::new(),
            late: None,
        };
        self.tier.destage(window, &Payloads).await.expect("the stores answer");
        bytes
    }

    async fn read(&self, offset: u64, length: usize) -> Result<Bytes> {
        let mut found = vec![0; length];
        self.tier.read(VOLUME, offset, &mut found).await?;
        Ok(found.into())
    }

    async fn plan(&self, policy: TierPolicy) -> TierPlan {
        self.plan_with(policy, TierRoom::default()).await
    }

    async fn plan_with(&self, policy: TierPolicy, room: TierRoom) -> TierPlan {
        self.tier.tier_plan(policy, room).await.expect("the metadata answer")
    }

    async fn step(&self, number: u64, step: TierStep) -> TierOutcome {
        self.tier.change_tiers(number, step).await.expect("all stores answer")
    }

    /// Copies the only segment that was written. Returns its number.
    async fn copied(&self) -> u64 {
        let plan = self.plan(BOTH).await;
        let [number] = plan.copy[..] else { panic!("{plan:?}") };
        assert!(matches!(self.step(number, TierStep::Copy).await, TierOutcome::Done(_)));
        number
    }

    /// Copies the only segment, and drops it once it is cold.
    async fn dropped(&self) -> u64 {
        let number = self.copied().await;
        self.world.clock.advance(2 * HOUR);
        assert_eq!(self.plan(BOTH).await.drop, [number]);
        assert!(matches!(self.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
        number
    }

    /// The only object of a segment.
    async fn object(&self) -> Option<Path> {
        let folder = Path::from(tiering::segment::FOLDER);
        let listed: Vec<_> =
            self.objects.inner().list(Some(&folder)).try_collect().await.expect("it lists");
        assert!(listed.len() <= 1, "{listed:?}");
        listed.into_iter().next().map(|found| found.location)
    }

    async fn damage_object(&self) {
        let path = self.object().await.expect("it is there");
        let found = self.objects.inner().get(&path).await.expect("there");
        let mut bytes = found.bytes().await.expect("there").to_vec();
        bytes[5000] ^= 1;
        self.objects.inner().put(&path, bytes.into()).await.expect("it writes");
    }

    async fn rebuild(&self, number: u64) -> RebuildReport {
        let rebuilt = self.tier.rebuild(number, Depth::Presence).await;
        rebuilt.expect("the object is there").expect("the map has it")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segment_is_copied_and_dropped_when_cold_and_brought_back_when_hot() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    assert!(pool.object().await.is_some());
    assert_eq!(pool.plan(BOTH).await, TierPlan::default(), "it was just written");
    pool.world.clock.advance(HOUR / 2);
    assert_eq!(pool.read(0, 4096).await.expect("it is there"), bytes.slice(..4096));
    pool.world.clock.advance(HOUR - Duration::from_secs(1));
    assert_eq!(pool.plan(BOTH).await, TierPlan::default(), "it was read");
    pool.world.clock.advance(Duration::from_secs(1));
    let plan = pool.plan(BOTH).await;
    assert_eq!((&plan.drop[..], plan.to_drop.segment_count), (&[number][..], 1));
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    // Readers of before still find the fragments for a while.
    assert_eq!(pool.world.all_fragments().await.len(), 3);
    pool.world.clock.advance(STAY);
    assert_eq!(pool.plan(BOTH).await, TierPlan::default(), "and cold it stays");
    assert_eq!(pool.world.all_fragments().await, []);
    // A backup does not make it hot.
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
    assert_eq!(pool.plan(BOTH).await, TierPlan::default());
    for _ in 0..3 {
        assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
    }
    assert_eq!(pool.plan(BOTH).await.bring_back, [number]);
    assert!(matches!(pool.step(number, TierStep::BringBack).await, TierOutcome::Done(_)));
    assert_eq!(pool.world.all_fragments().await.len(), 3);
    assert_eq!(pool.plan(BOTH).await, TierPlan::default(), "it was read, and is an object, too");
    // Each tier has all of it.
    let path = pool.object().await.expect("the object stays");
    let object =
        pool.objects.inner().get(&path).await.expect("there").bytes().await.expect("there");
    pool.objects.inner().delete(&path).await.expect("it deletes");
    assert_eq!(pool.read(0, bytes.len()).await.expect("the fragments are there"), bytes);
    pool.objects.inner().put(&path, object.into()).await.expect("it writes");
    (1..=3).for_each(|id| pool.world.kill(id));
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
    assert!(pool.segments.counts().object_reads > 0);
    // Steps that have become needless change nothing.
    assert_eq!(pool.step(number, TierStep::Copy).await, TierOutcome::Needless);
    assert_eq!(pool.step(number, TierStep::BringBack).await, TierOutcome::Needless);
    assert_eq!(pool.step(number + 7, TierStep::Drop).await, TierOutcome::Needless);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_read_longest_ago_are_dropped_before_they_are_cold_while_room_is_short() {
    const MINUTE: Duration = Duration::from_secs(60);
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let mut numbers = Vec::new();
    for lsn in 1..=3 {
        pool.write(lsn, (lsn - 1) << 20).await;
        numbers.push(pool.copied().await);
    }
    // The fourth one is not copied.
    pool.write(4, 3 << 20).await;
    let uncopied = pool.plan(BOTH).await.copy;
    pool.world.clock.advance(10 * MINUTE);
    pool.read(0, 4096).await.expect("it is there");
    pool.world.clock.advance(10 * MINUTE);
    pool.read(2 << 20, 4096).await.expect("it is there");
    pool.world.clock.advance(5 * MINUTE);
    // The first was read 15 minutes ago, the second written 25 minutes ago, and the third read 5 minutes ago.
    let wants = |wanted_bytes| TierRoom { wanted_bytes, spare_bytes: 0 };
    assert_eq!(pool.plan_with(BOTH, wants(0)).await.drop, [] as [u64; 0]);
    assert_eq!(pool.plan_with(BOTH, wants(1)).await.drop, [numbers[1]]);
    let plan = pool.plan_with(BOTH, wants(u64::MAX)).await;
    assert_eq!(plan.drop, [numbers[1], numbers[0]], "the third stays, as does the fourth");
    assert_eq!((plan.copy, plan.to_drop.segment_count), (uncopied, 2));
    // What was dropped counts until the stores have told their room without it.
    let TierOutcome::Done(bytes) = pool.step(numbers[1], TierStep::Drop).await else {
        panic!("it was copied");
    };
    assert_eq!(pool.tier.leaving_bytes(), bytes);
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    assert_eq!(pool.tier.leaving_bytes(), bytes, "the fragments were just deleted");
    pool.world.clock.advance(STAY);
    assert_eq!(pool.tier.leaving_bytes(), 0);
    // Cold ones leave first, and count.
    pool.world.clock.advance(HOUR - 15 * MINUTE - STAY);
    let cold = pool.plan(BOTH).await;
    assert_eq!(cold.drop, [numbers[0]]);
    assert_eq!(pool.plan_with(BOTH, wants(1)).await, cold);
    assert_eq!(pool.plan_with(BOTH, wants(u64::MAX)).await.drop, [numbers[0], numbers[2]]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_segment_is_brought_back_only_while_there_is_room() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.dropped().await;
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    for _ in 0..4 {
        assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
    }
    let plan = pool.plan(BOTH).await;
    assert_eq!(plan.bring_back, [number]);
    let has = |spare_bytes| TierRoom { wanted_bytes: 0, spare_bytes };
    let too_little = plan.to_bring_back.bytes - 1;
    assert_eq!(pool.plan_with(BOTH, has(too_little)).await, TierPlan::default());
    assert_eq!(pool.plan_with(BOTH, has(too_little + 1)).await, plan);
    assert!(matches!(pool.step(number, TierStep::BringBack).await, TierOutcome::Done(_)));
    // It does not leave at once if others have taken the room.
    let wants_all = TierRoom { wanted_bytes: u64::MAX, spare_bytes: 0 };
    assert_eq!(pool.plan_with(BOTH, wants_all).await, TierPlan::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_since_the_last_read_outlives_the_owner_and_downtime_does_not_count() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    pool.write(1, 0).await;
    pool.write(2, 1 << 20).await;
    for number in pool.plan(BOTH).await.copy {
        pool.step(number, TierStep::Copy).await;
    }
    pool.world.clock.advance(HOUR / 2);
    pool.read(1 << 20, 4096).await.expect("it is there");
    let pool = pool.reopen(Tiers::Both).await;
    pool.world.clock.advance(HOUR / 2 - Duration::from_secs(5));
    assert_eq!(pool.plan(BOTH).await, TierPlan::default());
    pool.world.clock.advance(Duration::from_secs(10));
    let first = pool.plan(BOTH).await.drop;
    assert_eq!(first.len(), 1, "the other one was read half an hour later");
    // Closed for a year, with a clock that the next owner begins anew.
    let Pool { world, objects, is_taken, tier, .. } = pool;
    tier.close().await.expect("the store answers");
    world.clock.advance(HOUR * 24 * 365);
    let (segments, tier) = open(&world, &objects, &is_taken, ("2+1", 3), Tiers::Both).await;
    let pool = Pool { world, objects, is_taken, segments, tier, epoch: 3 };
    assert_eq!(pool.plan(BOTH).await.drop, first);
    pool.world.clock.advance(HOUR / 2);
    assert_eq!(pool.plan(BOTH).await.drop.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_that_differs_from_the_fragments_is_written_anew_and_not_relied_on() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    pool.world.clock.advance(2 * HOUR);
    pool.damage_object().await;
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Rewritten(_)));
    assert_eq!(pool.plan(BOTH).await.drop, [number], "it is still in both");
    let path = pool.object().await.expect("it is there");
    pool.objects.inner().delete(&path).await.expect("it deletes");
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Rewritten(_)));
    // Without fragments nothing can be compared.
    (1..=2).for_each(|id| pool.world.kill(id));
    let refused = pool.tier.change_tiers(number, TierStep::Drop).await.unwrap_err();
    assert!(refused.to_string().contains("read the fragments"), "{refused}");
    pool.world.heal().await;
    pool.segments.look().await;
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    assert_eq!(pool.world.all_fragments().await, []);
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is whole"), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrub_verifies_the_object_beside_fragments_and_writes_it_once_more() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    let scrub = async || {
        pool.tier.scrub_next(number - 1).await.expect("all answer").expect("it is there").finding
    };
    assert!(matches!(scrub().await, Finding::Whole { .. }));
    pool.damage_object().await;
    assert!(matches!(scrub().await, Finding::Repaired { .. }));
    let path = pool.object().await.expect("it is there");
    pool.objects.inner().delete(&path).await.expect("it deletes");
    assert!(matches!(scrub().await, Finding::Repaired { .. }));
    assert!(matches!(scrub().await, Finding::Whole { .. }));
    (1..=3).for_each(|id| pool.world.kill(id));
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is whole"), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_is_enough_once_the_stores_with_the_fragments_are_lost() {
    let pool = Pool::new("2+1", 3, Tiers::ObjectStore).await.reopen(Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    (1..=2).for_each(|id| pool.world.kill(id));
    pool.segments.look().await;
    pool.world.clock.advance(2 * HOUR);
    // An object that is not the segment is never all that there is.
    pool.damage_object().await;
    let refused = pool.tier.change_tiers(number, TierStep::Drop).await.unwrap_err();
    assert!(refused.to_string().contains("verify the object"), "{refused}");
    pool.damage_object().await;
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    let (redundancy, _) = pool.tier.redundancy().await.expect("the metadata answer");
    assert!(redundancy.stores.is_empty(), "nothing names the lost stores: {redundancy:?}");
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fragments_stay_until_the_metadata_without_them_is_durable() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    pool.write(1, 0).await;
    let number = pool.copied().await;
    pool.world.clock.advance(2 * HOUR);
    pool.is_taken.store(true, Ordering::SeqCst);
    let fenced = pool.tier.change_tiers(number, TierStep::Drop).await.unwrap_err();
    assert_eq!(fenced.kind(), block::ErrorKind::Fenced);
    assert_eq!(pool.world.all_fragments().await.len(), 3, "the record names them");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fragments_that_are_brought_back_are_none_that_a_store_had_before() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    pool.world.clock.advance(2 * HOUR);
    // A store is away when the fragments are deleted, and comes back with what it had.
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    pool.world.kill(2);
    pool.segments.look().await;
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    let stale = pool.world.all_fragments().await;
    assert!(matches!(stale[..], [(2, name)] if name.generation == 1), "{stale:?}");
    pool.world.stores.iter().for_each(IllStore::heal);
    pool.world.clock.advance(Duration::from_secs(60));
    pool.segments.look().await;
    // Twice, so that the second time is beyond the first.
    let mut highest = 1;
    for _ in 0..2 {
        assert!(matches!(pool.step(number, TierStep::BringBack).await, TierOutcome::Done(_)));
        let all = pool.world.all_fragments().await;
        let new = all.iter().filter(|(_, name)| name.generation > highest);
        assert_eq!(new.clone().count(), 3, "{all:?}");
        highest = new.map(|(_, name)| name.generation).max().expect("there are three");
        assert_eq!(pool.read(0, bytes.len()).await.expect("it is there"), bytes);
        pool.world.clock.advance(2 * HOUR);
        assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    }
    assert!(highest <= pool.tier.status().map.commit_number, "{highest}");
    // Those that have just been dropped stay for readers, and the stale one goes once they are gone.
    assert_eq!(pool.tier.sweep_unnamed().await.expect("all answer"), 0);
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    assert_eq!(pool.world.all_fragments().await, stale);
    assert_eq!(pool.tier.sweep_unnamed().await.expect("all answer"), 1);
    assert_eq!(pool.world.all_fragments().await, []);
    assert!(matches!(pool.step(number, TierStep::BringBack).await, TierOutcome::Done(_)));
    assert_eq!(pool.tier.sweep_unnamed().await.expect("all answer"), 0);
    assert_eq!(pool.world.all_fragments().await.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segment_is_brought_back_only_once_its_fragments_are_durable() {
    let pool = Pool::new("2+1", 4, Tiers::Both).await;
    pool.write(1, 0).await;
    let number = pool.dropped().await;
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    // One of the stores takes nothing, and nobody has noticed yet.
    let path = pool.object().await.expect("it is there");
    let name = SegmentName::parse(&path).expect("it is a segment");
    let id = pool.segments.candidates(&name.id, 3)[0];
    pool.world.store(id.0).add(Rule::for_good(Op::Put, "fragments/", Answer::Denied));
    assert!(matches!(pool.step(number, TierStep::BringBack).await, TierOutcome::Done(_)));
    let all = pool.world.all_fragments().await;
    assert_eq!(all.len(), 3, "{all:?}");
    assert!(all.iter().all(|(store, _)| *store != id.0), "{all:?}");
    let (redundancy, lacking) = pool.tier.redundancy().await.expect("the metadata answer");
    assert_eq!(lacking, [] as [u64; 0]);
    assert_eq!(redundancy.stores.len(), 3);
    assert!(redundancy.bytes.keys().eq([&Some(ANY_LOSS)]), "{redundancy:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segment_without_enough_fragments_is_made_anew_from_its_object() {
    let pool = Pool::new("2+1", 3, Tiers::Both).await;
    let bytes = pool.write(1, 0).await;
    let number = pool.copied().await;
    for (id, name) in pool.world.all_fragments().await.into_iter().take(2) {
        pool.world.store(id).inner().delete(&name.path()).await.expect("it deletes");
    }
    assert_eq!(pool.read(0, bytes.len()).await.expect("the object is there"), bytes);
    // An object that is not the segment makes nothing.
    pool.damage_object().await;
    let refused = pool.tier.rebuild(number, Depth::Presence).await.unwrap_err();
    assert!(refused.to_string().contains("verify the object"), "{refused}");
    assert_eq!(pool.world.all_fragments().await.len(), 1);
    pool.damage_object().await;
    let report = pool.rebuild(number).await;
    assert_eq!((report.fragment_count, report.is_lacking), (3, false));
    pool.world.clock.advance(STAY);
    pool.plan(BOTH).await;
    let all = pool.world.all_fragments().await;
    assert!(all.len() == 3 && all.iter().all(|(_, name)| name.generation > 1), "{all:?}");
    let path = pool.object().await.expect("it is there");
    pool.objects.inner().delete(&path).await.expect("it deletes");
    assert_eq!(pool.read(0, bytes.len()).await.expect("the fragments are there"), bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_moves_to_the_object_store_and_back() {
    let pool = Pool::new("2+1", 3, Tiers::DataStores).await;
    let first = pool.write(1, 0).await;
    assert_eq!(
        pool.plan(TierPolicy { tiers: Tiers::DataStores, ..BOTH }).await,
        TierPlan::default()
    );
    let pool = pool.reopen(Tiers::ObjectStore).await;
    let second = pool.write(2, 1 << 20).await;
    assert!(pool.object().await.is_some(), "new segments are objects");
    let policy = TierPolicy { tiers: Tiers::ObjectStore, ..BOTH };
    let number = pool.plan(policy).await.copy[0];
    assert!(matches!(pool.step(number, TierStep::Copy).await, TierOutcome::Done(_)));
    // Whatever its heat, and nothing is rebuilt of what leaves.
    pool.segments.set_weight(StoreId(1), 0);
    assert_eq!(pool.rebuild(number).await.fragment_count, 0);
    assert_eq!(pool.plan(policy).await.drop, [number]);
    assert!(matches!(pool.step(number, TierStep::Drop).await, TierOutcome::Done(_)));
    assert_eq!(pool.plan(policy).await, TierPlan::default());
    pool.world.clock.advance(STAY);
    pool.plan(policy).await;
    assert_eq!(pool.world.all_fragments().await, [], "the stores may leave");
    let (redundancy, _) = pool.tier.redundancy().await.expect("the metadata answer");
    assert!(redundancy.stores.is_empty() && redundancy.is_complete);
    assert_eq!(redundancy.space.objects.segment_count, 2);
    let pool = pool.reopen(Tiers::DataStores).await;
    let third = pool.write(3, 2 << 20).await;
    assert_eq!(pool.world.all_fragments().await.len(), 3);
    for (offset, bytes) in [(0, first), (1 << 20, second), (2 << 20, third)] {
        assert_eq!(pool.read(offset, bytes.len()).await.expect("it is there"), bytes);
    }
}

#[tokio::test(start_paused = true)]
async fn object_and_fragments_of_a_segment_are_deleted_both() {
    let world = world("2+1", 3).await;
    let (sealed, _) = segment(50, 40);
    let path = sealed.info.object_path();
    let copied = |stored: &StoredSegment| {
        let copied = Fragments { is_copied: true, ..fragments(stored).clone() };
        StoredSegment { info: stored.info, placement: Placement::Fragments(Arc::new(copied)) }
    };
    // As the placement says so.
    let stored = world.put(&sealed).await;
    world.coded.put_object(&sealed.info, sealed.bytes.clone()).await.expect("it writes");
    assert_eq!(
        world.coded.size(&sealed.info.name(), Some(&stored.placement)).await.unwrap(),
        sealed.bytes.len() as u64
    );
    world.coded.delete(&Leftover::from(&copied(&stored))).await.expect("it deletes");
    assert!(world.objects.head(&path).await.is_err());
    assert_eq!(world.all_fragments().await, []);
    // A pool that never had tiers asks its object store for nothing.
    let stored = world.put(&sealed).await;
    world.coded.put_object(&sealed.info, sealed.bytes.clone()).await.expect("it writes");
    world.coded.delete(&Leftover::from(&stored)).await.expect("it deletes");
    assert!(world.objects.head(&path).await.is_ok());
    // The commit that says so may have been lost.
    let stored = world.put(&sealed).await;
    world.coded.expect_objects();
    world.coded.delete(&Leftover::from(&stored)).await.expect("it deletes");
    assert!(world.objects.head(&path).await.is_err());
    assert_eq!(world.all_fragments().await, []);
}

#[tokio::test(start_paused = true)]
async fn segment_with_an_object_is_read_whatever_its_stores_do() {
    let world = world("2+1", 3).await;
    let (sealed, frames) = segment(51, 40);
    let stored = world.put(&sealed).await;
    world.coded.put_object(&sealed.info, sealed.bytes.clone()).await.expect("it writes");
    let copied = Fragments { is_copied: true, ..fragments(&stored).clone() };
    let copied =
        StoredSegment { info: stored.info, placement: Placement::Fragments(Arc::new(copied)) };
    reads_right(&world, &copied, &sealed, &frames).await;
    assert_eq!(world.coded.counts().object_reads, 0, "the data stores are asked first");
    (1..=3).for_each(|id| world.kill(id));
    reads_right(&world, &copied, &sealed, &frames).await;
    let any = RedundancyOf { spare: Some(ANY_LOSS), is_lacking: false };
    assert_eq!(world.coded.redundancy(&copied), Some(any));
    let size = world.coded.size(&sealed.info.name(), Some(&copied.placement)).await;
    assert_eq!(size.expect("the object is there"), sealed.bytes.len() as u64);
    let gone = world.coded.read_fragments(&copied).await;
    assert!(gone.is_err(), "what is compared with the object does not come from it");
    // Without the object it is not gone: the stores do not answer.
    world.objects.delete(&sealed.info.object_path()).await.expect("it deletes");
    let error = world.coded.read_whole(&copied).await.unwrap_err();
    assert!(!matches!(error, Error::NotFound { .. }), "{error}");
    world.heal().await;
    for index in 0..3 {
        world.lose(&copied, index).await;
    }
    let error = world.coded.read_whole(&copied).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
}
