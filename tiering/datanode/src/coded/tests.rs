use super::*;
use block::Epoch;
use block::env::SystemRandom;
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tiering::segment::{FrameAt, SegmentBuilder, SegmentNumber, SegmentSeed};
use tiering::testing::{Answer, IllStore, Op, Rng, Rule};

const POOL: [u8; 16] = *b"pool identity 16";

struct World {
    stores: Vec<IllStore>,
    objects: Arc<InMemory>,
    coded: CodedSegments,
}

/// A pool with one store for each failure domain.
fn world(scheme: &str, store_count: usize) -> World {
    let stores: Vec<IllStore> = (0..store_count).map(|_| IllStore::default()).collect();
    let objects = Arc::new(InMemory::new());
    let of = |(number, store): (usize, &IllStore)| {
        let id = StoreId(number as u32 + 1);
        let info = StoreInfo { id, domain: format!("node {number}"), weight: 1 };
        let fragments: Arc<dyn FragmentStore> =
            Arc::new(crate::ObjectFragments::new(Arc::new(store.clone())));
        (info, fragments)
    };
    let members = stores.iter().enumerate().map(of).collect();
    let scheme = scheme.parse().expect("a scheme");
    let coded = CodedSegments::new(POOL, scheme, members, ObjectSegments::new(objects.clone()));
    World { stores, objects, coded }
}

impl World {
    fn store(&self, id: u32) -> &IllStore {
        &self.stores[id as usize - 1]
    }

    /// Nothing that the store has can be had.
    fn kill(&self, id: u32) {
        self.store(id).add(Rule { op: None, ..Rule::for_good(Op::Get, "", Answer::Internal) });
    }

    fn heal(&self) {
        self.stores.iter().for_each(IllStore::heal);
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

#[tokio::test]
async fn healthy_read_of_a_frame_is_one_request() {
    let world = world("4+2", 6);
    let (sealed, frames) = segment(1, 60);
    let stored = world.put(&sealed).await;
    let fragments = fragments(&stored);
    assert_eq!((fragments.data, fragments.parity, fragments.generation), (4, 2, 1));
    let mut used = fragments.stores.clone();
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

#[tokio::test]
async fn any_two_stores_may_be_lost_and_one_more_is_an_error_that_heals() {
    let world = world("4+2", 6);
    let (sealed, frames) = segment(2, 40);
    let stored = world.put(&sealed).await;
    for first in 1..=6 {
        for second in first + 1..=6 {
            [first, second].into_iter().for_each(|id| world.kill(id));
            reads_right(&world, &stored, &sealed, &frames).await;
            assert_eq!(
                world.coded.size_of(&Coded::of(&stored).unwrap().unwrap()).await.unwrap(),
                sealed.bytes.len() as u64
            );
            let third = (1..=6).find(|id| *id != first && *id != second).expect("six stores");
            world.kill(third);
            let whole = 0..sealed.bytes.len() as u64;
            let error = world.coded.read(&stored, whole).await.unwrap_err();
            assert!(!matches!(error, Error::NotFound { .. }), "the stores do not answer: {error}");
            world.heal();
        }
    }
    assert!(world.coded.counts().degraded_reads > 0);
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test]
async fn fragments_that_are_gone_are_not_an_outage() {
    let world = world("4+2", 6);
    let (sealed, frames) = segment(3, 40);
    let stored = world.put(&sealed).await;
    let names = names(&sealed.info.name(), fragments(&stored));
    for (id, name) in &names[..2] {
        world.coded.member(*id).expect("a store").store.delete(name).await.expect("it deletes");
    }
    reads_right(&world, &stored, &sealed, &frames).await;
    let (id, name) = &names[2];
    world.coded.member(*id).expect("a store").store.delete(name).await.expect("it deletes");
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

#[tokio::test]
async fn bytes_that_do_not_verify_are_read_from_elsewhere() {
    let world = world("4+2", 6);
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

#[tokio::test]
async fn fragment_of_another_segment_counts_for_nothing() {
    let world = world("2+1", 3);
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

#[tokio::test]
async fn store_that_fails_is_replaced_and_without_another_one_the_debt_is_recorded() {
    let world = world("4+2", 7);
    let (sealed, frames) = segment(7, 40);
    world.kill(4);
    let stored = world.put(&sealed).await;
    assert!(!fragments(&stored).stores.contains(&4), "{stored:?}");
    assert!(!fragments(&stored).stores.contains(&Fragments::NOWHERE));
    // Two stores away, and no substitute for one of them.
    world.kill(5);
    let (second, second_frames) = segment(8, 40);
    let in_debt = world.put(&second).await;
    let missing = fragments(&in_debt).stores.iter().filter(|id| **id == Fragments::NOWHERE).count();
    assert_eq!((missing, world.coded.counts().missing_writes), (1, 1));
    reads_right(&world, &in_debt, &second, &second_frames).await;
    // With a third one gone, a later loss would be final.
    world.kill(6);
    let (third, _) = segment(9, 40);
    assert!(world.coded.put(&third).await.is_err());
    world.heal();
    let again = world.put(&third).await;
    assert!(!fragments(&again).stores.contains(&Fragments::NOWHERE));
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test]
async fn no_two_fragments_share_a_domain() {
    let stores: Vec<(StoreInfo, Arc<dyn FragmentStore>)> = (0..12)
        .map(|number| {
            let domain = format!("rack {}", number % 3);
            let info = StoreInfo { id: StoreId(number + 1), domain, weight: 1 };
            let store = crate::ObjectFragments::new(Arc::new(InMemory::new()));
            (info, Arc::new(store) as Arc<dyn FragmentStore>)
        })
        .collect();
    let objects = ObjectSegments::new(Arc::new(InMemory::new()));
    let scheme = "2+1".parse().expect("a scheme");
    let coded = CodedSegments::new(POOL, scheme, stores.clone(), objects.clone());
    for number in 1..20 {
        let (sealed, _) = segment(number, 40);
        let placement = coded.put(&sealed).await.expect("three racks");
        let Placement::Fragments(fragments) = placement else { panic!("{placement:?}") };
        let racks: std::collections::BTreeSet<u32> =
            fragments.stores.iter().map(|id| (id - 1) % 3).collect();
        assert_eq!(racks.len(), 3, "{fragments:?}");
    }
    // Three racks are too few for six fragments: five would be needed at least.
    let scheme = "4+2".parse().expect("a scheme");
    let coded = CodedSegments::new(POOL, scheme, stores, objects);
    let error = coded.put(&segment(30, 40).0).await.unwrap_err();
    assert!(error.to_string().contains("6 failure domains"), "{error}");
}

#[tokio::test]
async fn small_segment_is_stored_whole() {
    let world = world("4+2", 6);
    let (sealed, frames) = segment(10, 3);
    let stored = world.put(&sealed).await;
    let fragments = fragments(&stored);
    assert_eq!((fragments.data, fragments.parity, fragments.stores.len()), (1, 2, 3));
    let two = fragments.stores[..2].to_vec();
    two.into_iter().for_each(|id| world.kill(id));
    reads_right(&world, &stored, &sealed, &frames).await;
}

#[tokio::test]
async fn everything_of_a_segment_is_listed_and_deleted() {
    let world = world("2+1", 5);
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

#[tokio::test]
async fn placement_of_a_later_version_is_refused() {
    let world = world("4+2", 6);
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
