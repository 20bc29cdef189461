//! Failure domains that change while the pool runs: its nodes tell others than before.

use super::*;

#[tokio::test(start_paused = true)]
async fn fragments_that_share_a_changed_domain_are_moved_by_the_rebuild() {
    let world = world("2+1", 5).await;
    let (sealed, frames) = segment(300, 40);
    let stored = world.put(&sealed).await;
    let used: Vec<u32> = fragments(&stored).stores().collect();
    let found = world.coded.redundancy(&stored).expect("in fragments");
    assert!(!found.is_lacking && found.spare == Some(1));
    // Two of its stores turn out to be in one rack.
    used[..2].iter().for_each(|id| world.coded.set_domain(StoreId(*id), "rack a"));
    let found = world.coded.redundancy(&stored).expect("in fragments");
    assert!(found.is_lacking && found.spare == Some(0));
    assert_eq!(world.coded.misplaced(&stored), Misplaced::default(), "the rebuild comes first");
    let (stored, rebuilt) = world.rebuilt(&stored, Depth::Presence).await;
    assert_eq!((rebuilt.fragment_count, rebuilt.is_lacking), (1, false));
    let shares = |stored: &StoredSegment| {
        fragments(stored).stores().filter(|id| used[..2].contains(id)).count()
    };
    assert_eq!(shares(&stored), 1);
    reads_right(&world, &stored, &sealed, &frames).await;
    for number in 301..320 {
        let (sealed, _) = segment(number, 20);
        let stored = world.put(&sealed).await;
        assert!(shares(&stored) <= 1, "{stored:?}");
    }
}
