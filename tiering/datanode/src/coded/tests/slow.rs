//! Stores that are slow, while reads of the others hide it.

use super::*;

/// The condition of a store, if there is one.
fn shown(world: &World) -> Vec<(String, String)> {
    let slow = world.conditions.list().into_iter();
    let slow = slow.filter(|one| one.kind == ConditionKind::DataStoreSlow);
    slow.map(|one| (one.subject, one.report.what)).collect()
}

/// Lets each store answer reads in as many milliseconds, by number.
fn read_in(world: &World, millis: [u64; 4]) {
    for (number, millis) in (1..).zip(millis) {
        let member = world.coded.member(number).expect("there are four");
        (0..100).for_each(|_| member.health().note_time(Duration::from_millis(millis)));
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_stays_slow_is_a_condition_until_it_is_quick_again() {
    let world = world("2+1", 4).await;
    let pass = async |seconds: u64| {
        world.clock.advance(Duration::from_secs(seconds));
        world.coded.look().await;
    };
    // All are as slow, as a network makes them, and then one is not.
    read_in(&world, [40, 45, 50, 55]);
    pass(1).await;
    pass(100).await;
    assert_eq!(shown(&world), []);
    read_in(&world, [4, 40, 6, 5]);
    pass(1).await;
    pass(59).await;
    assert_eq!(shown(&world), [], "it may be busy for a while");
    pass(1).await;
    let found = shown(&world);
    assert_eq!(found.len(), 1);
    let (subject, what) = &found[0];
    assert_eq!(subject, "store 2");
    assert!(what.contains("40.0 ms") && what.contains("5.0 ms"), "{what}");
    read_in(&world, [4, 7, 6, 5]);
    pass(1).await;
    assert_eq!(shown(&world), []);
    // Tenths of a millisecond are no reason, whatever their ratio.
    read_in(&world, [1, 9, 1, 1]);
    pass(1).await;
    pass(100).await;
    assert_eq!(shown(&world), []);
    // One that is passed over is slow, too, until it counts as away.
    let member = world.coded.member(3).expect("there are four");
    (0..3).for_each(|_| member.health().note_late());
    world.clock.advance(Duration::from_millis(25));
    member.health().note_late();
    pass(1).await;
    pass(60).await;
    assert!(shown(&world)[0].1.contains("in time"), "{:?}", shown(&world));
    world.store(3).add(Rule::for_good(Op::Get, "", Answer::Internal));
    pass(60).await;
    assert_eq!(shown(&world), [], "it is away");
}
