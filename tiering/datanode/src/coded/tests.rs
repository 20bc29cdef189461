//! Segments in fragments over stores in memory: losses, damage, stores that are away or hang.

use super::*;
use crate::{ObjectFragments, Verifier, Witness};
use block::Epoch;
use block::env::{ManualClock, SystemRandom};
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use erasure::fragment::{FragmentHeader, HEADER_BYTES};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::time::Duration;
use tiering::segment::{FrameAt, SegmentBuilder, SegmentNumber, SegmentSeed};
use tiering::testing::{Answer, IllStore, Op, Rng, Rule};

mod domains;
mod room;
mod simulation;
mod slow;
mod tiers;

const DEBT_AFTER: Duration = Duration::from_secs(10);
/// Time after which a store that is away counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(900);
const POOL: [u8; 16] = *b"pool identity 16";

struct World {
    stores: Vec<IllStore>,
    objects: Arc<InMemory>,
    clock: ManualClock,
    conditions: Conditions,
    coded: CodedSegments,
}

/// The witness of a store; the same in all of them.
fn witness() -> Witness {
    let lasts = Duration::ZERO;
    Witness { path: "fragment-store".into(), bytes: Bytes::from_static(b"it is there"), lasts }
}

fn options(scheme: &str, stores: Vec<NamedStore>, objects: &Arc<InMemory>) -> CodedOptions {
    CodedOptions {
        pool: POOL,
        scheme: scheme.parse().expect("a scheme"),
        stores,
        objects: ObjectSegments::new(objects.clone()),
        is_emptying: false,
        clock: Arc::new(ManualClock::new()),
        conditions: Conditions::default(),
        debt_after: DEBT_AFTER,
        lost_after: LOST_AFTER,
    }
}

/// Makes a store with this number, which is in the failure domain.
async fn named(
    id: u32,
    domain: String,
    store: Arc<dyn ObjectStore>,
    clock: &ManualClock,
) -> NamedStore {
    let Witness { path, bytes, .. } = witness();
    store.put(&path, bytes.into()).await.expect("it writes");
    let store = ObjectFragments::new(store, witness(), Arc::new(clock.clone()));
    let info = StoreInfo { id: StoreId(id), domain, weight: 1 };
    NamedStore { info, name: format!("store {id}"), store: Arc::new(store), width: 8 }
}

/// A pool with one store for each failure domain.
async fn world(scheme: &str, store_count: usize) -> World {
    let stores: Vec<IllStore> = (0..store_count).map(|_| IllStore::default()).collect();
    let objects = Arc::new(InMemory::new());
    let clock = ManualClock::new();
    let mut members = Vec::new();
    for (number, store) in stores.iter().enumerate() {
        let id = number as u32 + 1;
        members.push(named(id, format!("node {id}"), Arc::new(store.clone()), &clock).await);
    }
    let options =
        CodedOptions { clock: Arc::new(clock.clone()), ..options(scheme, members, &objects) };
    let conditions = options.conditions.clone();
    World { stores, objects, clock, conditions, coded: CodedSegments::new(options) }
}

impl World {
    fn store(&self, id: u32) -> &IllStore {
        &self.stores[id as usize - 1]
    }

    /// Nothing that the store has can be had.
    fn kill(&self, id: u32) {
        self.store(id).add(Rule { op: None, ..Rule::for_good(Op::Get, "", Answer::Internal) });
    }

    /// Everything answers again, and is asked again.
    async fn heal(&self) {
        self.stores.iter().for_each(IllStore::heal);
        self.clock.advance(Duration::from_secs(60));
        self.coded.look().await;
    }

    fn coded_of(&self, segment: &StoredSegment) -> Coded {
        self.coded.coded(segment).expect("this version").expect("in fragments")
    }

    /// Deletes a fragment from its store.
    async fn lose(&self, segment: &StoredSegment, index: usize) {
        let (id, name) = names(&segment.info.name(), fragments(segment))[index];
        self.store(id).inner().delete(&name.path()).await.expect("it is there");
    }

    async fn put(&self, segment: &SealedSegment) -> StoredSegment {
        let placement = self.coded.put(segment).await.expect("enough stores");
        StoredSegment { info: segment.info, placement }
    }
}

fn fragments(segment: &StoredSegment) -> &Fragments {
    match &segment.placement {
        Placement::Fragments(fragments) => fragments,
        Placement::Object => panic!("the segment is an object"),
    }
}

/// A segment, and its frames.
fn segment(number: u64, frame_count: usize) -> (SealedSegment, Vec<FrameAt>) {
    let number = SegmentNumber(number);
    let seed = SegmentSeed::new(POOL, Epoch(3), number, Algorithm::default(), &SystemRandom);
    let key = PoolKey::new([7; KEY_BYTES]);
    let mut builder = SegmentBuilder::new(seed, &key, 1, 1 << 20);
    let mut rng = Rng::new(number.0);
    let mut frames = Vec::new();
    for frame in 0..frame_count {
        let plain = rng.bytes((1 + frame % 16) * 4096, 100);
        frames.push(builder.push(1, frame as u64, &plain));
    }
    (builder.finish(), frames)
}

fn range(at: &FrameAt) -> Range<u64> {
    u64::from(at.offset)..u64::from(at.offset) + u64::from(at.sealed_bytes)
}

async fn reads_right(
    world: &World,
    stored: &StoredSegment,
    sealed: &SealedSegment,
    frames: &[FrameAt],
) {
    for at in frames {
        let bytes = world.coded.read(stored, range(at)).await.expect("enough are left");
        let range = range(at);
        assert!(bytes == sealed.bytes[range.start as usize..range.end as usize], "{at:?}");
    }
    let whole = world.coded.read_whole(stored).await.expect("enough are left");
    assert!(whole == sealed.bytes);
}

#[tokio::test(start_paused = true)]
async fn healthy_read_of_a_frame_is_one_request() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(1, 60);
    let stored = world.put(&sealed).await;
    let fragments = fragments(&stored);
    assert_eq!((fragments.data, fragments.parity), (4, 2));
    let mut used: Vec<u32> = fragments.stores().collect();
    used.sort_unstable();
    assert_eq!(used, [1, 2, 3, 4, 5, 6]);
    world.stores.iter().for_each(|store| drop(store.take_requests()));
    for at in &frames {
        let _ = world.coded.read(&stored, range(at)).await.expect("all are there");
    }
    let requests: usize = world.stores.iter().map(|store| store.take_requests().len()).sum();
    assert_eq!(requests, frames.len());
    assert_eq!(world.coded.counts().degraded_reads, 0);
    reads_right(&world, &stored, &sealed, &frames).await;
    // Bytes written for each byte of the segment.
    let ratio = world.coded.counts().written_bytes as f64 / sealed.bytes.len() as f64;
    assert!(ratio < 1.52, "{ratio}");
    // Frames beside each other are read at once, over the cuts.
    for pair in frames.windows(3) {
        let wide = range(&pair[0]).start..range(&pair[2]).end;
        let bytes = world.coded.read(&stored, wide.clone()).await.expect("all are there");
        assert!(bytes == sealed.bytes[wide.start as usize..wide.end as usize]);
    }
}

#[tokio::test(start_paused = true)]
async fn any_two_stores_may_be_lost_and_one_more_is_an_error_that_heals() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(2, 40);
    let stored = world.put(&sealed).await;
    for first in 1..=6 {
        for second in first + 1..=6 {
            [first, second].into_iter().for_each(|id| world.kill(id));
            reads_right(&world, &stored, &sealed, &frames).await;
            assert_eq!(
                world.coded.size_of(&world.coded_of(&stored)).await.unwrap(),
                sealed.bytes.len() as u64
            );
            let third = (1..=6).find(|id| *id != first && *id != second).expect("six stores");
            world.kill(third);
            let whole = 0..sealed.bytes.len() as u64;
            let error = world.coded.read(&stored, whole).await.unwrap_err();
            assert!(!matches!(error, Error::NotFound { .. }), "the stores do not answer: {error}");
            world.heal().await;
        }
    }
    assert!(world.coded.counts().degraded_reads > 0);
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn fragments_that_are_gone_are_not_an_outage() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(3, 40);
    let stored = world.put(&sealed).await;
    world.lose(&stored, 0).await;
    world.lose(&stored, 1).await;
    reads_right(&world, &stored, &sealed, &frames).await;
    world.lose(&stored, 2).await;
    let error = world.coded.read(&stored, range(&frames[0])).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    let size = world.coded.size(&sealed.info.name(), Some(&stored.placement)).await;
    assert!(matches!(size, Err(Error::NotFound { .. })));
    // The whole segment, from a copy, is written over what is left.
    let placement = world.coded.replace(&stored, sealed.bytes.clone()).await.expect("it writes");
    let stored = StoredSegment { info: sealed.info, placement };
    reads_right(&world, &stored, &sealed, &frames).await;
    assert_eq!(world.coded.counts().missing_writes, 0);
}

#[tokio::test(start_paused = true)]
async fn bytes_that_do_not_verify_are_read_from_elsewhere() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(4, 40);
    let stored = world.put(&sealed).await;
    let at = &frames[17];
    let expected = sealed.bytes.slice(range(at).start as usize..range(at).end as usize);
    let scheme = "4+2".parse().expect("a scheme");
    let cuts = erasure::Cuts::from_ends(scheme, &fragments(&stored).ends).expect("in order");
    let at_ends = at.offset..at.offset + at.sealed_bytes;
    let (own, offset) = cuts.locate(&at_ends).expect("a frame is in one piece");
    // A bit of the frame flips, then one at the same place of the fragments that are read instead.
    let others = (0..6).filter(|index| *index != own);
    for (flipped, index) in std::iter::once(own).chain(others).enumerate().take(3) {
        let (id, name) = names(&sealed.info.name(), fragments(&stored))[index];
        let (path, inner) = (name.path(), world.store(id).inner().clone());
        let found = inner.get(&path).await.expect("it is there");
        let mut bytes = found.bytes().await.expect("it is there").to_vec();
        bytes[256 + offset as usize] ^= 4;
        inner.put(&path, bytes.into()).await.expect("it writes");
        let again = world.coded.read_again(&stored, range(at)).await;
        match flipped {
            0 | 1 => assert!(again.expect("four are whole") == expected),
            _ => assert!(again.is_err(), "three are damaged"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn fragment_of_another_segment_counts_for_nothing() {
    let world = world("2+1", 3).await;
    let ((sealed, frames), (other, _)) = (segment(5, 40), segment(6, 40));
    let (stored, other) = (world.put(&sealed).await, world.put(&other).await);
    let (id, name) = names(&sealed.info.name(), fragments(&stored))[0];
    let (other_id, other_name) = names(&other.info.name(), fragments(&other))[0];
    let from = world.store(other_id).inner().clone();
    let foreign = from.get(&other_name.path()).await.expect("there");
    let foreign = foreign.bytes().await.expect("it is there");
    let to = world.store(id).inner().clone();
    to.put(&name.path(), foreign.into()).await.expect("it writes");
    let bytes = world.coded.read_again(&stored, range(&frames[0])).await.expect("two are whole");
    assert!(
        bytes == sealed.bytes[range(&frames[0]).start as usize..range(&frames[0]).end as usize]
    );
}

#[tokio::test(start_paused = true)]
async fn store_that_fails_is_replaced_and_without_another_one_the_debt_is_recorded() {
    let world = world("4+2", 7).await;
    let (sealed, frames) = segment(7, 40);
    world.kill(4);
    let stored = world.put(&sealed).await;
    assert!(!fragments(&stored).stores().any(|id| id == 4), "{stored:?}");
    assert!(!fragments(&stored).stores().any(|id| id == Fragments::NOWHERE));
    // Two stores away, and no substitute for one of them: it may be back soon.
    world.kill(5);
    let (second, second_frames) = segment(8, 40);
    world.coded.put(&second).await.unwrap_err();
    world.clock.advance(DEBT_AFTER);
    let in_debt = world.put(&second).await;
    let missing = fragments(&in_debt).stores().filter(|id| *id == Fragments::NOWHERE).count();
    assert_eq!((missing, world.coded.counts().missing_writes), (1, 1));
    reads_right(&world, &in_debt, &second, &second_frames).await;
    // With a third one gone, a later loss would be final.
    world.kill(6);
    let (third, _) = segment(9, 40);
    assert!(world.coded.put(&third).await.is_err());
    world.clock.advance(DEBT_AFTER);
    assert!(world.coded.put(&third).await.is_err());
    world.heal().await;
    let again = world.put(&third).await;
    assert!(!fragments(&again).stores().any(|id| id == Fragments::NOWHERE));
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn fragment_of_a_store_that_is_late_goes_to_another_one() {
    let world = world("4+2", 7).await;
    let (sealed, frames) = segment(7, 40);
    let late = world.coded.candidates(&sealed.info.id, 5)[2];
    world.store(late.0).add(Rule { op: None, ..Rule::for_good(Op::Put, "", Answer::Hang) });
    let in_time = tokio::time::timeout(Duration::from_secs(2), world.put(&sealed));
    let stored = in_time.await.expect("another store takes the fragment");
    assert!(fragments(&stored).stores().all(|id| id != late.0 && id != Fragments::NOWHERE));
    assert_eq!(world.coded.counts().hedged_writes, 1);
    let state = &world.coded.states()[late.0 as usize - 1];
    assert!(state.failure.is_none() && state.lateness.is_some(), "{state:?}");
    // The next segment does not wait for it again.
    let (second, _) = segment(8, 40);
    let at_once = tokio::time::timeout(Duration::from_millis(1), world.put(&second));
    let also = at_once.await.expect("the late store is not asked");
    assert!(fragments(&also).stores().all(|id| id != late.0 && id != Fragments::NOWHERE));
    reads_right(&world, &stored, &sealed, &frames).await;
    // Without another store, it is waited for until it counts as one that fails.
    let few = self::world("4+2", 6).await;
    few.store(3).add(Rule { op: None, ..Rule::for_good(Op::Put, "", Answer::Hang) });
    few.coded.put(&sealed).await.unwrap_err();
    assert_eq!(few.coded.counts().hedged_writes, 0);
    few.clock.advance(DEBT_AFTER);
    let in_debt = few.put(&sealed).await;
    assert!(fragments(&in_debt).stores().any(|id| id == Fragments::NOWHERE));
}

#[tokio::test(start_paused = true)]
async fn fragment_that_arrives_late_is_deleted_once_the_map_has_its_generation() {
    let world = world("4+2", 7).await;
    let (sealed, frames) = segment(7, 40);
    let late = world.coded.candidates(&sealed.info.id, 5)[2];
    world.store(late.0).set_hang_time(Duration::from_secs(5));
    world.store(late.0).add(Rule::for_good(Op::Put, "", Answer::Late));
    let stored = world.put(&sealed).await;
    assert!(fragments(&stored).stores().all(|id| id != late.0));
    let landed = async {
        while world.coded.strays().is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), landed).await.expect("it arrives");
    assert_eq!(world.all_fragments().await.len(), 7);
    // While the map has an earlier placement only, the write may be tried again, and name it.
    let mut before = Fragments::clone(fragments(&stored));
    before.places.iter_mut().for_each(|place| place.generation = 0);
    let before =
        StoredSegment { info: stored.info, placement: Placement::Fragments(Arc::new(before)) };
    world.coded.delete_strays(&before).await.expect("nothing is done");
    assert_eq!(world.all_fragments().await.len(), 7);
    world.coded.delete_strays(&stored).await.expect("it deletes");
    assert!(world.coded.strays().is_empty());
    is_exact(&world, &stored).await;
    reads_right(&world, &stored, &sealed, &frames).await;
    // A stray that the placement names after all is none, and those of a deleted segment go with it.
    let (id, name) = names(&stored.info.name(), fragments(&stored))[0];
    world.coded.strays.add(id, name);
    world.coded.delete_strays(&stored).await.expect("nothing is done");
    is_exact(&world, &stored).await;
    world.store(late.0).inner().put(&name.path(), "x".into()).await.expect("the memory writes");
    world.coded.strays.add(late.0, name);
    world.coded.delete(&Leftover::from(&stored)).await.expect("it deletes");
    assert_eq!(world.all_fragments().await, []);
}

#[tokio::test(start_paused = true)]
async fn store_that_fails_gets_its_substitute_from_a_late_one() {
    let world = world("4+2", 7).await;
    let (sealed, frames) = segment(7, 40);
    let order = world.coded.candidates(&sealed.info.id, 5);
    // The third is slower than the others and arrives before its substitute; another one fails later.
    world.store(order[2].0).set_hang_time(Duration::from_secs(2));
    world.store(order[2].0).add(Rule::for_good(Op::Put, "", Answer::Late));
    world.store(order[6].0).set_hang_time(Duration::from_secs(8));
    world.store(order[6].0).add(Rule::for_good(Op::Put, "", Answer::Late));
    world.store(order[4].0).set_hang_time(Duration::from_secs(5));
    world.store(order[4].0).add(Rule::for_good(Op::Put, "", Answer::Hang));
    let stored = world.put(&sealed).await;
    let stores: Vec<u32> = fragments(&stored).stores().collect();
    assert!(!stores.contains(&order[4].0) && stores.contains(&order[6].0), "{stores:?}");
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn no_two_fragments_share_a_domain() {
    let (objects, clock) = (Arc::new(InMemory::new()), ManualClock::new());
    let mut stores = Vec::new();
    for number in 0..12 {
        let domain = format!("rack {}", number % 3);
        stores.push(named(number + 1, domain, Arc::new(InMemory::new()), &clock).await);
    }
    let coded = CodedSegments::new(options("2+1", stores.clone(), &objects));
    for number in 1..20 {
        let (sealed, _) = segment(number, 40);
        let placement = coded.put(&sealed).await.expect("three racks");
        let Placement::Fragments(fragments) = placement else { panic!("{placement:?}") };
        let racks: std::collections::BTreeSet<u32> =
            fragments.stores().map(|id| (id - 1) % 3).collect();
        assert_eq!(racks.len(), 3, "{fragments:?}");
    }
    // Three racks are too few for six fragments: five would be needed at least.
    let coded = CodedSegments::new(options("4+2", stores, &objects));
    let error = coded.put(&segment(30, 40).0).await.unwrap_err();
    assert!(error.to_string().contains("6 failure domains"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn store_that_fails_does_not_hide_another_one_of_its_domain() {
    let (objects, clock) = (Arc::new(InMemory::new()), ManualClock::new());
    let stores: Vec<IllStore> = (0..4).map(|_| IllStore::default()).collect();
    let mut members = Vec::new();
    for (id, (store, domain)) in (1..).zip(stores.iter().zip(["a", "a", "b", "c"])) {
        members.push(named(id, domain.to_owned(), Arc::new(store.clone()), &clock).await);
    }
    let coded = CodedSegments::new(options("2+1", members, &objects));
    stores[0].add(Rule { op: None, ..Rule::for_good(Op::Get, "", Answer::Internal) });
    for number in 40..60 {
        let (sealed, _) = segment(number, 40);
        // The first one may find out that the store fails.
        let placement = match coded.put(&sealed).await {
            Ok(placement) => placement,
            Err(_) => coded.put(&sealed).await.expect("the other one of the domain takes it"),
        };
        let Placement::Fragments(fragments) = placement else { panic!("{placement:?}") };
        let mut used: Vec<u32> = fragments.stores().collect();
        used.sort_unstable();
        assert_eq!(used, [2, 3, 4]);
    }
}

#[tokio::test(start_paused = true)]
async fn small_segment_is_stored_whole() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(10, 3);
    let stored = world.put(&sealed).await;
    let fragments = fragments(&stored);
    assert_eq!((fragments.data, fragments.parity, fragments.places.len()), (1, 2, 3));
    let two: Vec<u32> = fragments.stores().take(2).collect();
    two.into_iter().for_each(|id| world.kill(id));
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn everything_of_a_segment_is_listed_and_deleted() {
    let world = world("2+1", 5).await;
    let (sealed, _) = segment(11, 40);
    let stored = world.put(&sealed).await;
    let object = segment(12, 4).0;
    ObjectSegments::new(world.objects.clone()).put(&object).await.expect("it writes");
    let names = async || {
        let listed: Vec<Listed> = world.coded.list(99).try_collect().await.expect("it lists");
        let name = |listed: &Listed| match listed {
            Listed::Segment { name, .. } => name.number.0,
            Listed::Foreign => 0,
        };
        listed.iter().map(name).collect::<Vec<u64>>()
    };
    assert_eq!(names().await, [11, 11, 11, 12]);
    assert!(world.coded.has_any(1).await.expect("it lists"));
    let name = sealed.info.name();
    assert!(world.coded.size(&name, None).await.expect("it lists") > 0);
    for placement in [None, Some(stored.placement.clone())] {
        let leftover = Leftover { name, placement };
        world.coded.delete(&leftover).await.expect("it deletes");
        world.coded.delete(&leftover).await.expect("nothing is there");
        assert_eq!(names().await, [12]);
        assert!(matches!(world.coded.size(&name, None).await, Err(Error::NotFound { .. })));
        assert_eq!(world.put(&sealed).await.info, sealed.info);
        assert_eq!(names().await.len(), 4);
    }
    // Objects of before are read and deleted as ever.
    let before = StoredSegment::from(object.info);
    assert_eq!(world.coded.read_whole(&before).await.expect("it is there"), object.bytes);
    world.coded.delete(&Leftover::from(&before)).await.expect("it deletes");
    assert!(world.coded.read(&before, 0..1).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn placement_of_a_later_version_is_refused() {
    let world = world("4+2", 6).await;
    let (sealed, _) = segment(13, 40);
    let stored = world.put(&sealed).await;
    for (data, codec) in [(5, 2), (4, 9), (4, 1)] {
        let later = Fragments { data, codec, ..fragments(&stored).clone() };
        let placement = Placement::Fragments(Arc::new(later));
        let segment = StoredSegment { info: sealed.info, placement };
        let error = world.coded.read(&segment, 0..1).await.unwrap_err();
        assert!(matches!(error, Error::NotImplemented { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn store_whose_witness_is_gone_is_away_and_not_empty() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(14, 40);
    let stored = world.put(&sealed).await;
    // Three disks are not mounted: their directories are empty.
    let mut contents = Vec::new();
    for id in 1..=3 {
        let inner = world.store(id).inner().clone();
        let listed: Vec<_> = inner.list(None).try_collect().await.expect("it lists");
        for found in listed {
            let bytes = inner.get(&found.location).await.expect("there").bytes().await;
            contents.push((id, found.location.clone(), bytes.expect("there")));
            inner.delete(&found.location).await.expect("it deletes");
        }
    }
    let error = world.coded.read_whole(&stored).await.unwrap_err();
    assert!(!matches!(error, Error::NotFound { .. }), "nothing is lost: {error}");
    world.coded.look().await;
    let away = world.conditions.list();
    assert_eq!(away.len(), 3, "{away:?}");
    assert!(away.iter().all(|one| one.kind == ConditionKind::DataStoreAway), "{away:?}");
    assert!(away[0].report.what.contains("not be mounted"), "{away:?}");
    // Nothing is written there, and the others are too few.
    assert!(world.coded.put(&segment(15, 40).0).await.is_err());
    for id in 1..=3 {
        assert_eq!(world.store(id).inner().list(None).count().await, 0, "store {id}");
    }
    for (id, path, bytes) in contents {
        world.store(id).inner().put(&path, bytes.into()).await.expect("it writes");
    }
    world.heal().await;
    assert!(world.conditions.list().is_empty());
    reads_right(&world, &stored, &sealed, &frames).await;
    let (sealed, frames) = segment(16, 40);
    let stored = world.put(&sealed).await;
    assert!(!fragments(&stored).stores().any(|id| id == Fragments::NOWHERE));
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn segment_on_stores_of_another_pool_is_an_object() {
    let world = world("2+1", 3).await;
    let (sealed, _) = segment(17, 40);
    let stored = world.put(&sealed).await;
    // The pool that was restored from a copy has stores of its own.
    let clock = ManualClock::new();
    let mut others = Vec::new();
    for id in 101..=103 {
        let store = Arc::new(InMemory::new());
        others.push(named(id, format!("node {id}"), store, &clock).await);
    }
    let restored = CodedSegments::new(options("2+1", others, &world.objects));
    let error = restored.read_whole(&stored).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    restored.replace(&stored, sealed.bytes.clone()).await.expect("it writes");
    assert_eq!(restored.read_whole(&stored).await.expect("it is there"), sealed.bytes);
    assert!(world.objects.head(&sealed.info.object_path()).await.is_ok());
    restored.delete(&Leftover::from(&stored)).await.expect("it deletes");
    assert!(world.objects.head(&sealed.info.object_path()).await.is_err());
    assert_eq!(world.coded.read_whole(&stored).await.expect("untouched"), sealed.bytes);
}

#[tokio::test(start_paused = true)]
async fn read_of_a_store_that_hangs_is_decoded_and_the_store_is_not_asked_each_time() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(18, 60);
    let stored = world.put(&sealed).await;
    for _ in 0..5 {
        reads_right(&world, &stored, &sealed, &frames).await;
    }
    let hanging = fragments(&stored).places[1].store;
    world.store(hanging).add(Rule { op: None, ..Rule::for_good(Op::Get, "", Answer::Hang) });
    for at in &frames {
        reads_right(&world, &stored, &sealed, std::slice::from_ref(at)).await;
        world.clock.advance(Duration::from_millis(10));
    }
    let counts = world.coded.counts();
    assert!(counts.hedged_reads > 0 && counts.hedged_reads < 20, "{counts:?}");
    world.store(hanging).take_requests();
    reads_right(&world, &stored, &sealed, &frames).await;
    let asked = world.store(hanging).take_requests().len();
    assert_eq!(asked, 0, "the store is away, and was asked");
    let state = &world.coded.states()[hanging as usize - 1];
    assert!(state.lateness.as_ref().is_some_and(|why| why.contains("in time")), "{state:?}");
    assert_eq!(state.failure, None, "it is late, and may be written");
    world.heal().await;
    let before = world.coded.counts().degraded_reads;
    reads_right(&world, &stored, &sealed, &frames).await;
    assert_eq!(world.coded.counts().degraded_reads, before);
}

#[tokio::test(start_paused = true)]
async fn with_one_parity_fragment_writes_go_on_without_a_store() {
    let world = world("2+1", 3).await;
    world.kill(2);
    let (sealed, frames) = segment(19, 40);
    world.coded.put(&sealed).await.unwrap_err();
    world.clock.advance(DEBT_AFTER);
    let stored = world.put(&sealed).await;
    let missing = fragments(&stored).stores().filter(|id| *id == Fragments::NOWHERE).count();
    assert_eq!(missing, 1);
    reads_right(&world, &stored, &sealed, &frames).await;
    world.kill(3);
    for _ in 0..2 {
        assert!(world.coded.put(&segment(20, 40).0).await.is_err());
        world.clock.advance(DEBT_AFTER);
    }
}

impl World {
    async fn rebuilt(&self, stored: &StoredSegment, depth: Depth) -> (StoredSegment, Rebuilt) {
        let rebuilt = self.coded.rebuild(stored, depth).await.expect("enough are left");
        let placement = rebuilt.placement.clone().unwrap_or_else(|| stored.placement.clone());
        let moved = StoredSegment { info: stored.info, placement };
        self.coded.delete_moved(stored, &moved.placement).await.expect("what answers deletes");
        (moved, rebuilt)
    }

    /// The names of all fragments, by the number of their store.
    async fn all_fragments(&self) -> Vec<(u32, FragmentName)> {
        let mut all = Vec::new();
        for (number, store) in self.stores.iter().enumerate() {
            let mut listing = store.inner().list(None);
            while let Some(found) = listing.try_next().await.expect("it lists") {
                let name = FragmentName::parse(&found.location);
                all.extend(name.map(|name| (number as u32 + 1, name)));
            }
        }
        all
    }
}

/// The placement names what is stored, and nothing else is.
async fn is_exact(world: &World, stored: &StoredSegment) {
    let mut named = names(&stored.info.name(), fragments(stored));
    named.sort_unstable();
    let mut all = world.all_fragments().await;
    all.sort_unstable();
    assert_eq!(named, all);
}

#[tokio::test(start_paused = true)]
async fn fragments_of_a_lost_store_are_made_anew_elsewhere() {
    let world = world("4+2", 8).await;
    let (sealed, frames) = segment(30, 40);
    let stored = world.put(&sealed).await;
    let whole = RedundancyOf { spare: Some(2), is_lacking: false };
    assert_eq!(world.coded.redundancy(&stored), Some(whole));
    let gone = fragments(&stored).places[1].store;
    world.kill(gone);
    world.coded.look().await;
    let away = RedundancyOf { spare: Some(1), is_lacking: false };
    assert_eq!(world.coded.redundancy(&stored), Some(away), "it may come back");
    world.clock.advance(LOST_AFTER);
    let lost = RedundancyOf { spare: Some(1), is_lacking: true };
    assert_eq!(world.coded.redundancy(&stored), Some(lost));
    let rebuilt = world.coded.rebuild(&stored, Depth::Presence).await.expect("five are left");
    assert_eq!((rebuilt.fragment_count, rebuilt.is_lacking), (1, false));
    let moved = StoredSegment { info: stored.info, placement: rebuilt.placement.expect("changed") };
    assert_eq!(world.coded.redundancy(&moved), Some(whole));
    let place = fragments(&moved).places[1];
    assert!(place.store != gone && place.generation == 2, "{place:?}");
    reads_right(&world, &moved, &sealed, &frames).await;
    let again = world.coded.rebuild(&moved, Depth::Checksums).await.expect("it is whole");
    assert!(again.placement.is_none() && again.fragment_count == 0, "{again:?}");
    // The old fragment is deleted when its store is back.
    world.coded.delete_moved(&stored, &moved.placement).await.expect("it does not wait for it");
    world.heal().await;
    world.coded.delete_moved(&stored, &moved.placement).await.expect("it is back");
    is_exact(&world, &moved).await;
}

#[tokio::test(start_paused = true)]
async fn debt_is_paid_when_stores_are_back() {
    let world = world("4+2", 6).await;
    world.kill(3);
    let (sealed, frames) = segment(31, 40);
    world.coded.put(&sealed).await.unwrap_err();
    world.clock.advance(DEBT_AFTER);
    let stored = world.put(&sealed).await;
    let debt = world.coded.redundancy(&stored);
    assert_eq!(debt, Some(RedundancyOf { spare: Some(1), is_lacking: true }));
    // No other failure domain is free, and nothing is read in vain.
    world.stores.iter().for_each(|store| drop(store.take_requests()));
    let (same, rebuilt) = world.rebuilt(&stored, Depth::Presence).await;
    assert!(rebuilt.is_lacking && rebuilt.fragment_count == 0, "{rebuilt:?}");
    assert!(same.placement.is(&stored.placement));
    world.heal().await;
    let (paid, rebuilt) = world.rebuilt(&stored, Depth::Presence).await;
    assert_eq!((rebuilt.fragment_count, rebuilt.is_lacking), (1, false));
    is_exact(&world, &paid).await;
    reads_right(&world, &paid, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn damaged_and_missing_fragments_are_found_by_their_checksums_and_made_anew() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(32, 40);
    for (flipped, gone) in [(0, 5), (4, 1), (5, 4)] {
        let stored = world.put(&sealed).await;
        world.lose(&stored, gone).await;
        let (id, name) = names(&sealed.info.name(), fragments(&stored))[flipped];
        let inner = world.store(id).inner().clone();
        let found = inner.get(&name.path()).await.expect("it is there");
        let mut bytes = found.bytes().await.expect("it is there").to_vec();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        inner.put(&name.path(), bytes.into()).await.expect("it writes");
        // The listing shows the missing one only.
        let shallow = world.coded.rebuild(&stored, Depth::Presence).await.expect("enough are left");
        assert!((1..=2).contains(&shallow.fragment_count), "{shallow:?}");
        let placement = shallow.placement.expect("changed");
        let shallow = StoredSegment { info: stored.info, placement };
        let (deep, rebuilt) = world.rebuilt(&shallow, Depth::Checksums).await;
        assert!(rebuilt.fragment_count <= 1 && !rebuilt.is_lacking, "{rebuilt:?}");
        world.coded.delete_moved(&stored, &deep.placement).await.expect("all answer");
        is_exact(&world, &deep).await;
        let again = world.coded.rebuild(&deep, Depth::Checksums).await.expect("it is whole");
        assert_eq!(again.fragment_count, 0);
        reads_right(&world, &deep, &sealed, &frames).await;
        world.coded.delete(&Leftover::from(&deep)).await.expect("it deletes");
    }
}

#[tokio::test(start_paused = true)]
async fn damaged_fragment_that_no_store_takes_anew_is_not_counted() {
    let world = world("4+2", 6).await;
    let (sealed, frames) = segment(34, 40);
    let stored = world.put(&sealed).await;
    let (id, name) = names(&sealed.info.name(), fragments(&stored))[5];
    let inner = world.store(id).inner().clone();
    let found = inner.get(&name.path()).await.expect("there").bytes().await.expect("there");
    let damaged = [&found[..400], &[!found[400]], &found[401..]].concat();
    inner.put(&name.path(), damaged.into()).await.expect("it writes");
    world.store(id).add(Rule::for_good(Op::Put, "", Answer::Internal));
    let (lacking, rebuilt) = world.rebuilt(&stored, Depth::Checksums).await;
    assert_eq!((rebuilt.fragment_count, rebuilt.is_lacking), (0, true));
    assert_eq!(fragments(&lacking).places[5].store, Fragments::NOWHERE);
    assert_eq!(fragments(&lacking).places[..5], fragments(&stored).places[..5]);
    let counted = world.coded.redundancy(&lacking);
    assert_eq!(counted, Some(RedundancyOf { spare: Some(1), is_lacking: true }));
    world.coded.delete_moved(&stored, &lacking.placement).await.expect("it deletes");
    reads_right(&world, &lacking, &sealed, &frames).await;
    // One that is only away is still counted on.
    world.heal().await;
    world.kill(fragments(&stored).places[0].store);
    world.store(id).add(Rule::for_good(Op::Put, "", Answer::Internal));
    let kept = world.coded.rebuild(&lacking, Depth::Checksums).await;
    assert!(kept.is_err() || kept.is_ok_and(|kept| kept.placement.is_none()));
    world.heal().await;
    let (whole, rebuilt) = world.rebuilt(&lacking, Depth::Presence).await;
    assert_eq!((rebuilt.fragment_count, rebuilt.is_lacking), (1, false));
    is_exact(&world, &whole).await;
}

#[tokio::test(start_paused = true)]
async fn fragments_of_an_attempt_that_has_failed_are_strays_until_the_next_one_names_them() {
    let world = world("4+2", 7).await;
    let (sealed, frames) = segment(35, 40);
    world.kill(3);
    world.kill(4);
    world.coded.put(&sealed).await.unwrap_err();
    assert_eq!(world.coded.strays(), [sealed.info.number]);
    assert_eq!(world.all_fragments().await.len(), 5);
    world.heal().await;
    world.coded.set_weight(StoreId(1), 0);
    let stored = world.put(&sealed).await;
    assert!(fragments(&stored).stores().all(|id| id != 1), "{stored:?}");
    assert!(world.all_fragments().await.len() > 6, "the first attempt has left some");
    world.coded.delete_strays(&stored).await.expect("it deletes");
    assert!(world.coded.strays().is_empty());
    is_exact(&world, &stored).await;
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn written_fragment_is_deleted_only_from_a_directory_without_its_disk() {
    let name = FragmentName { segment: segment(36, 1).0.info.name(), generation: 1, index: 0 };
    for (answer, is_left) in
        [(Answer::Internal, true), (Answer::Hang, true), (Answer::NotFound, false)]
    {
        let (ill, clock) = (IllStore::default(), ManualClock::new());
        let store = named(1, "one".to_owned(), Arc::new(ill.clone()), &clock).await.store;
        let path = witness().path.to_string();
        ill.add(Rule { skipped_count: 1, ..Rule::for_good(Op::Get, &path, answer) });
        let error = store.put(&name, vec![Bytes::from_static(b"fragment")]).await.unwrap_err();
        assert!(!matches!(error, Error::NotFound { .. }), "{error}");
        let found = ill.inner().head(&name.path()).await;
        assert_eq!(found.is_ok(), is_left, "{answer:?}");
    }
}

/// A store that verifies fragments itself, as a data node does.
#[derive(Debug)]
struct Verifying(IllStore);

#[async_trait::async_trait]
impl Verifier for Verifying {
    async fn verify(&self, path: &Path, _: u64) -> Result<Option<Bytes>> {
        let whole = self.0.inner().get(path).await?.bytes().await?;
        let verify = || {
            let header = FragmentHeader::decode(&whole).ok()?;
            let payload = whole.get(header.range_of(&(0..header.payload_bytes())))?;
            let trailer = whole.get(header.directory_range().start..)?;
            let is_right = header.checksums(trailer).ok()?.verify(0, payload);
            is_right.then(|| whole.slice(..HEADER_BYTES))
        };
        Ok(verify())
    }
}

#[tokio::test(start_paused = true)]
async fn fragments_that_their_stores_verify_are_not_sent() {
    let mut world = world("4+2", 6).await;
    let mut members = Vec::new();
    for (number, store) in world.stores.iter().enumerate() {
        let id = number as u32 + 1;
        let named = named(id, format!("node {id}"), Arc::new(store.clone()), &world.clock).await;
        let fragments =
            ObjectFragments::new(Arc::new(store.clone()), witness(), Arc::new(world.clock.clone()))
                .with_verifier(Arc::new(Verifying(store.clone())));
        members.push(NamedStore { store: Arc::new(fragments), ..named });
    }
    let clock = Arc::new(world.clock.clone());
    world.coded =
        CodedSegments::new(CodedOptions { clock, ..options("4+2", members, &world.objects) });
    let (sealed, frames) = segment(7, 40);
    let stored = world.put(&sealed).await;
    let asked = |world: &World| -> usize {
        let gets = |store: &IllStore| {
            let requests = store.take_requests();
            requests
                .iter()
                .filter(|(op, path)| *op == Op::Get && path.as_ref().starts_with("fragments/"))
                .count()
        };
        world.stores.iter().map(gets).sum()
    };
    asked(&world);
    let (stored, rebuilt) = world.rebuilt(&stored, Depth::Checksums).await;
    assert_eq!((rebuilt.fragment_count, asked(&world)), (0, 0));
    // One whose bytes are damaged, and then one that is whole and of another segment.
    let (id, name) = names(&stored.info.name(), fragments(&stored))[1];
    let mut bytes = world.store(id).inner().get(&name.path()).await.unwrap().bytes().await.unwrap();
    bytes = [&bytes[..300], &[!bytes[300]], &bytes[301..]].concat().into();
    world.store(id).inner().put(&name.path(), bytes.into()).await.unwrap();
    let (stored, rebuilt) = world.rebuilt(&stored, Depth::Checksums).await;
    assert_eq!(rebuilt.fragment_count, 1);
    let (other, _) = segment(8, 40);
    let other = world.put(&other).await;
    let (from, other_name) = names(&other.info.name(), fragments(&other))[2];
    let (id, name) = names(&stored.info.name(), fragments(&stored))[2];
    let bytes = world.store(from).inner().get(&other_name.path()).await.unwrap();
    let bytes = bytes.bytes().await.unwrap();
    world.store(id).inner().put(&name.path(), bytes.into()).await.unwrap();
    let (stored, rebuilt) = world.rebuilt(&stored, Depth::Checksums).await;
    assert_eq!(rebuilt.fragment_count, 1);
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_made_of_fragments_that_do_not_verify() {
    let world = world("2+1", 4).await;
    let (sealed, _) = segment(33, 40);
    let stored = world.put(&sealed).await;
    world.lose(&stored, 0).await;
    let (id, name) = names(&sealed.info.name(), fragments(&stored))[2];
    let inner = world.store(id).inner().clone();
    let bytes = inner.get(&name.path()).await.expect("there").bytes().await.expect("there");
    let mut damaged = bytes.to_vec();
    damaged[400] ^= 1;
    inner.put(&name.path(), damaged.into()).await.expect("it writes");
    let before = world.all_fragments().await;
    for depth in [Depth::Presence, Depth::Checksums] {
        assert!(world.coded.rebuild(&stored, depth).await.is_err(), "one is left of two");
    }
    assert_eq!(world.all_fragments().await, before, "and nothing was changed");
}

impl World {
    async fn rebalanced(&self, stored: &StoredSegment) -> (StoredSegment, Rebuilt) {
        let rebuilt = self.coded.rebalance(stored).await.expect("all answer");
        let placement = rebuilt.placement.clone().unwrap_or_else(|| stored.placement.clone());
        (StoredSegment { info: stored.info, placement }, rebuilt)
    }

    /// Adds a store in a failure domain of its own.
    async fn join(&mut self) -> u32 {
        let (id, store) = (self.stores.len() as u32 + 1, IllStore::default());
        self.stores.push(store.clone());
        let store = named(id, format!("node {id}"), Arc::new(store), &self.clock).await;
        self.coded.add(store);
        id
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_is_drained_while_it_is_used_gets_nothing_and_gives_what_it_has() {
    let world = world("4+2", 7).await;
    let mut all = Vec::new();
    for number in 40..60 {
        let (sealed, frames) = segment(number, 30);
        all.push((world.put(&sealed).await, sealed, frames));
    }
    world.coded.set_weight(StoreId(2), 0);
    assert_eq!(world.coded.states()[1].info.weight, 0);
    let (sealed, _) = segment(60, 30);
    let stored = world.put(&sealed).await;
    assert!(!fragments(&stored).stores().any(|id| id == 2));
    world.coded.delete(&Leftover::from(&stored)).await.expect("it deletes");
    let mut moved_count = 0;
    for (stored, sealed, frames) in &all {
        let had = fragments(stored).stores().filter(|id| *id == 2).count();
        let state = world.coded.redundancy(stored).expect("it is coded");
        assert_eq!(state, RedundancyOf { spare: Some(2), is_lacking: had > 0 });
        let (moved, rebuilt) = world.rebuilt(stored, Depth::Presence).await;
        assert_eq!(rebuilt.fragment_count, had as u64);
        assert!(!fragments(&moved).stores().any(|id| id == 2));
        reads_right(&world, &moved, sealed, frames).await;
        moved_count += had;
    }
    assert!(moved_count > 5, "{moved_count}");
    assert!(world.all_fragments().await.iter().all(|(id, _)| *id != 2), "it is empty");
    // With its weight it gets fragments again.
    world.coded.set_weight(StoreId(2), 1);
    let mut used = BTreeSet::new();
    for number in 61..70 {
        used.extend(fragments(&world.put(&segment(number, 30).0).await).stores());
    }
    assert!(used.contains(&2));
}

#[tokio::test(start_paused = true)]
async fn rebalance_moves_only_what_a_new_store_would_have_and_keeps_the_old_until_told() {
    let mut world = world("4+2", 8).await;
    let mut all = Vec::new();
    for number in 70..110 {
        let (sealed, frames) = segment(number, 30);
        let stored = world.put(&sealed).await;
        assert_eq!(world.coded.misplaced(&stored), Misplaced::default(), "it was just written");
        all.push((stored, sealed, frames));
    }
    let new = world.join().await;
    let mut share = 0;
    for (stored, sealed, frames) in &all {
        let wanted = world.coded.misplaced(stored);
        let (moved, rebuilt) = world.rebalanced(stored).await;
        assert_eq!(rebuilt.fragment_count, wanted.fragment_count as u64);
        assert!(wanted.fragment_count <= 1 && wanted.waiting_count == 0, "{wanted:?}");
        let places = fragments(stored).places.iter().zip(&fragments(&moved).places);
        let changed: Vec<_> = places.filter(|(old, new)| old != new).collect();
        assert_eq!(changed.len(), wanted.fragment_count);
        assert!(changed.iter().all(|(_, to)| to.store == new && to.generation == 2), "{changed:?}");
        share += changed.len();
        // Nothing is deleted before the metadata names the new placement: all six are at the old places.
        for (id, name) in names(&sealed.info.name(), fragments(stored)) {
            let found = world.store(id).inner().head(&name.path()).await;
            assert!(found.is_ok(), "{name} is gone from store {id}");
        }
        reads_right(&world, stored, sealed, frames).await;
        reads_right(&world, &moved, sealed, frames).await;
        world.coded.delete_moved(stored, &moved.placement).await.expect("all answer");
        reads_right(&world, &moved, sealed, frames).await;
        let whole = RedundancyOf { spare: Some(2), is_lacking: false };
        assert_eq!(world.coded.redundancy(&moved), Some(whole));
        // It is where it would be now, and does not move again.
        assert_eq!(world.coded.misplaced(&moved), Misplaced::default());
        assert!(world.rebalanced(&moved).await.1.placement.is_none());
    }
    // 6 of 9 stores have a fragment of each segment.
    assert!(share > 40 * 6 / 9 / 2, "{share}");
}

#[tokio::test(start_paused = true)]
async fn rebalance_leaves_segments_that_lack_fragments_and_waits_for_stores_that_are_away() {
    let mut world = world("2+1", 4).await;
    let mut all = Vec::new();
    for number in 120..150 {
        let (sealed, _) = segment(number, 30);
        all.push(world.put(&sealed).await);
    }
    let new = world.join().await;
    let moving = |world: &World| -> (usize, usize) {
        let all = all.iter().map(|stored| world.coded.misplaced(stored));
        all.fold((0, 0), |sum, one| (sum.0 + one.fragment_count, sum.1 + one.waiting_count))
    };
    let (count, waiting) = moving(&world);
    assert!(count > 5 && waiting == 0, "{count} {waiting}");
    // The new one is away for a while: everything waits for it, and nothing is written.
    world.kill(new);
    world.coded.look().await;
    assert_eq!(moving(&world), (0, count));
    let before = world.all_fragments().await;
    for stored in &all {
        assert!(world.rebalanced(stored).await.1.placement.is_none());
    }
    assert_eq!(world.all_fragments().await, before);
    // Once it is lost, nothing waits for it.
    world.clock.advance(LOST_AFTER);
    assert_eq!(moving(&world), (0, 0));
    world.heal().await;
    assert_eq!(moving(&world), (count, 0));
    // What leaves is for the rebuild.
    world.coded.set_weight(StoreId(1), 0);
    let on_first = |stored: &&StoredSegment| fragments(stored).stores().any(|id| id == 1);
    for stored in all.iter().filter(on_first) {
        assert_eq!(world.coded.misplaced(stored), Misplaced::default());
    }
}
