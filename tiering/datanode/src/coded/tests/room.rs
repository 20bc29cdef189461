//! The room of the stores: what they tell decides which of them get fragments, and is shown.

use super::*;
use crate::RoomTeller;

/// What a store tells of its room, and how often it was asked.
#[derive(Clone, Debug, Default)]
struct Teller(Arc<Mutex<(Option<Room>, u32)>>);

#[async_trait::async_trait]
impl RoomTeller for Teller {
    async fn room(&self) -> Result<Option<Room>> {
        let mut told = self.0.lock();
        told.1 += 1;
        Ok(told.0.clone())
    }
}

impl Teller {
    /// Tells from now on that this many thousandths of a TiB are free.
    fn tell(&self, thousandths: u64, wear: Option<&str>) {
        let total_bytes = 1 << 40;
        let free_bytes = total_bytes / 1000 * thousandths;
        let room = Room { total_bytes, free_bytes, wear: wear.map(str::to_owned) };
        self.0.lock().0 = Some(room);
    }
}

/// A pool over stores that tell their room, each in a failure domain of its own.
async fn told(scheme: &str, store_count: u32) -> (World, Vec<Teller>) {
    let mut world = world(scheme, 0).await;
    let mut tellers = Vec::new();
    for id in 1..=store_count {
        let (ill, teller) = (IllStore::default(), Teller::default());
        let plain = named(id, format!("node {id}"), Arc::new(ill.clone()), &world.clock).await;
        let clock = Arc::new(world.clock.clone());
        let store = ObjectFragments::new(Arc::new(ill.clone()), witness(), clock);
        let store = Arc::new(store.with_room(Arc::new(teller.clone())));
        world.coded.add(NamedStore { store, ..plain });
        world.stores.push(ill);
        tellers.push(teller);
    }
    (world, tellers)
}

/// Lets the stores be asked again.
async fn pass(world: &World) {
    world.clock.advance(Duration::from_secs(10));
    world.coded.look().await;
}

/// The conditions of this kind: their subjects and what they say.
fn shown(world: &World, kind: ConditionKind) -> Vec<(String, String)> {
    let found = world.conditions.list().into_iter().filter(|one| one.kind == kind);
    found.map(|one| (one.subject, one.report.what)).collect()
}

#[tokio::test(start_paused = true)]
async fn store_that_is_nearly_full_is_a_condition_until_it_has_room() {
    let (world, tellers) = told("2+1", 3).await;
    let full = |world: &World| shown(world, ConditionKind::DataStoreFull);
    for (thousandths, is_shown) in [(51, false), (49, true), (59, true), (61, false), (51, false)] {
        tellers[1].tell(thousandths, None);
        pass(&world).await;
        let found = full(&world);
        assert_eq!(found.len(), usize::from(is_shown), "{thousandths}: {found:?}");
        if let Some((subject, what)) = found.first() {
            assert_eq!(subject, "store 2");
            assert!(what.contains("of 1.00 TiB are free"), "{what}");
        }
    }
    tellers[1].tell(1, None);
    pass(&world).await;
    world.coded.forget(StoreId(2));
    assert_eq!(full(&world), []);
}

#[tokio::test(start_paused = true)]
async fn drive_that_wears_out_is_a_condition() {
    let (world, tellers) = told("2+1", 3).await;
    tellers[2].tell(500, Some("nvme0n1: 97 % of its rated writes are used"));
    pass(&world).await;
    let found = shown(&world, ConditionKind::DataStoreWearing);
    assert_eq!(found.len(), 1);
    assert!(found[0].0 == "store 3" && found[0].1.contains("97 %"), "{found:?}");
    // It stays while the store is away, and ends with another drive.
    world.kill(3);
    pass(&world).await;
    assert_eq!(shown(&world, ConditionKind::DataStoreWearing).len(), 1);
    tellers[2].tell(500, None);
    world.heal().await;
    assert_eq!(shown(&world, ConditionKind::DataStoreWearing), []);
}

#[tokio::test(start_paused = true)]
async fn room_is_asked_for_from_time_to_time_and_never_of_a_store_that_is_away() {
    let (world, tellers) = told("2+1", 3).await;
    let asked = || tellers.iter().map(|teller| teller.0.lock().1).collect::<Vec<_>>();
    for _ in 0..5 {
        world.coded.look().await;
        world.clock.advance(Duration::from_secs(1));
    }
    assert_eq!(asked(), [1, 1, 1]);
    let (sealed, frames) = segment(1, 20);
    let stored = world.put(&sealed).await;
    reads_right(&world, &stored, &sealed, &frames).await;
    assert_eq!(asked(), [1, 1, 1], "no request asks");
    world.kill(1);
    pass(&world).await;
    assert_eq!(asked(), [1, 2, 2]);
    assert!(world.coded.states()[0].room.is_none());
    tellers[1].tell(500, None);
    pass(&world).await;
    assert!(world.coded.states()[1].room.as_ref().is_some_and(|room| room.total_bytes == 1 << 40));
}

#[tokio::test(start_paused = true)]
async fn full_store_gets_fragments_only_when_there_is_no_other() {
    let (world, tellers) = told("2+1", 4).await;
    tellers[1].tell(10, None);
    pass(&world).await;
    let (sealed, _) = segment(1, 20);
    let uses = async |number: u64| {
        let (sealed, _) = segment(number, 20);
        fragments(&world.put(&sealed).await).stores().collect::<BTreeSet<u32>>()
    };
    for number in 2..20 {
        assert_eq!(uses(number).await, BTreeSet::from([1, 3, 4]));
    }
    // The others are too few without it.
    world.kill(4);
    pass(&world).await;
    assert_eq!(uses(20).await, BTreeSet::from([1, 2, 3]));
    tellers.iter().for_each(|teller| teller.tell(0, None));
    pass(&world).await;
    let stored = world.put(&sealed).await;
    let used: BTreeSet<u32> = fragments(&stored).stores().collect();
    assert_eq!(used, BTreeSet::from([1, 2, 3]), "the stores themselves say whether they are full");
}

#[tokio::test(start_paused = true)]
async fn no_share_grows_while_a_rebalance_is_under_way() {
    let (world, tellers) = told("2+1", 6).await;
    let mut all = Vec::new();
    for number in 200..260 {
        let (sealed, _) = segment(number, 20);
        all.push(world.put(&sealed).await);
    }
    let misplaced = |world: &World, all: &[StoredSegment]| -> usize {
        all.iter().map(|stored| world.coded.misplaced(stored).fragment_count).sum()
    };
    world.coded.set_rebalancing(true);
    tellers[0].tell(100, None);
    pass(&world).await;
    let count = misplaced(&world, &all);
    assert!(count > 3, "{count}");
    for stored in &mut all {
        (*stored, _) = world.rebalanced(stored).await;
    }
    // What has left makes room there, and does not come back.
    tellers[0].tell(500, None);
    pass(&world).await;
    assert_eq!(misplaced(&world, &all), 0);
    // Nor if the store says for a while that it does not know its room.
    tellers[0].0.lock().0 = None;
    pass(&world).await;
    tellers[0].tell(500, None);
    pass(&world).await;
    assert_eq!(misplaced(&world, &all), 0);
    world.coded.set_rebalancing(false);
    pass(&world).await;
    assert_eq!(misplaced(&world, &all), count, "a later rebalance brings them back");
}

#[tokio::test(start_paused = true)]
async fn rebalance_that_has_ended_finds_nothing_until_a_step_is_crossed() {
    let (world, tellers) = told("2+1", 6).await;
    let mut all = Vec::new();
    for number in 200..260 {
        let (sealed, _) = segment(number, 20);
        all.push(world.put(&sealed).await);
    }
    let misplaced = |world: &World, all: &[StoredSegment]| -> usize {
        all.iter().map(|stored| world.coded.misplaced(stored).fragment_count).sum()
    };
    pass(&world).await;
    assert_eq!(misplaced(&world, &all), 0);
    tellers[0].tell(100, None);
    pass(&world).await;
    let count = misplaced(&world, &all);
    assert!(count > 3, "{count}");
    for stored in &mut all {
        (*stored, _) = world.rebalanced(stored).await;
    }
    assert_eq!(misplaced(&world, &all), 0);
    // Fragments that have left make room there, less than half a step.
    for thousandths in [99, 110, 130, 138, 101] {
        tellers[0].tell(thousandths, None);
        pass(&world).await;
        assert_eq!(misplaced(&world, &all), 0, "{thousandths}");
    }
    tellers[0].tell(500, None);
    pass(&world).await;
    assert_eq!(misplaced(&world, &all), count, "they come back");
}
