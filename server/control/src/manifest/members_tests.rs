//! Tests of pools whose log has members: changes of the members, and take-overs by a member.

use super::*;
use crate::store::testing::{Fault, FaultyStore};
use object_store::ObjectStore;
use tempfile::TempDir;
use tiering::testing::{Answer, IllStore, Op, Rng, Rule, seeds};

const POOL: Uuid = Uuid::from_u128(7);

fn key() -> PoolKey {
    PoolKey::new([3; 32])
}

fn node() -> (TempDir, NodeDir) {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeDir::open(&dir.path().join("pool")).unwrap();
    (dir, node)
}

fn ill_store(ill: &IllStore) -> Store {
    Store::from_objects("ill", Arc::new(ill.clone()) as Arc<dyn ObjectStore>)
}

fn members(nodes: &[&NodeDir], quorum: usize) -> Configuration {
    let member = |node: &&NodeDir| Member {
        id: node.node_id(),
        node: Uuid::from_u128(!node.node_id().as_u128()),
        node_name: "db1".to_owned(),
    };
    let members = nodes.iter().map(member).collect();
    Configuration { members, quorum, degraded: Degraded::Block, away: Vec::new() }
}

async fn take(store: &Store, node: &NodeDir, take_over: TakeOver) -> Result<Ownership> {
    let terms = Terms { take_over, ..Terms::default() };
    let ownership = Ownership::acquire(store, node, &key(), POOL, "main", terms).await?;
    ownership.settle(node)?;
    Ok(ownership)
}

async fn newest(store: &Store) -> Manifest {
    read(store, &key()).await.unwrap().unwrap()
}

#[track_caller]
fn ours(changed: Result<Changed>) -> u64 {
    match changed.unwrap() {
        Changed::Ours(number) => number,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused<T>(outcome: Result<T>, kind: ErrorKind, words: &str) {
    let error = outcome.err().expect("it is refused");
    assert_eq!(error.kind(), kind, "{}", error.chain());
    assert!(error.chain().contains(words), "it does not say {words:?}: {}", error.chain());
}

/// A pool that `nodes` keep, open at the first of them.
async fn pool_of(store: &Store, nodes: &[&NodeDir], quorum: usize) -> Ownership {
    let owner = take(store, nodes[0], TakeOver::No).await.unwrap();
    let wanted = members(nodes, quorum);
    ours(owner.change_configuration(nodes[0], &wanted).await);
    owner
}

#[test]
fn rules_of_a_configuration() {
    let nodes: Vec<(TempDir, NodeDir)> = (0..3).map(|_| node()).collect();
    let (a, b, c) = (&nodes[0].1, &nodes[1].1, &nodes[2].1);
    for (wanted, needed) in [
        (members(&[a], 1), 1),
        (members(&[a, b], 2), 1),
        (members(&[a, b, c], 2), 2),
        (members(&[c, b, a], 3), 1),
    ] {
        wanted.check(a.node_id()).unwrap();
        assert_eq!(wanted.recovery_quorum(), needed);
    }
    let mut same_node = members(&[a, b, c], 2);
    same_node.members[2].node = same_node.members[1].node;
    let mut nameless = members(&[a], 1);
    nameless.members[0].node_name.clear();
    let mut long = members(&[a], 1);
    long.members[0].node_name = "x".repeat(NODE_NAME_BYTES_MAX + 1);
    let mut many = members(&[a], 9);
    many.members = (0..=MEMBER_COUNT_MAX)
        .map(|number| Member {
            id: Uuid::from_u128(number as u128),
            node: Uuid::from_u128(number as u128),
            node_name: "x".to_owned(),
        })
        .collect();
    for (wrong, words) in [
        (members(&[a, b], 1), "not more than half"),
        (members(&[a, b, c], 1), "not more than half"),
        (members(&[], 0), "not more than half"),
        (members(&[a, b], 3), "more than all 2"),
        (members(&[a], usize::MAX), "more than all 1"),
        (members(&[a, b, b], 2), "named twice"),
        (members(&[b, c], 2), "the owner is not a member"),
        (same_node, "on one node"),
        (nameless, "name"),
        (long, "name"),
        (many, "more than 16"),
    ] {
        refused(wrong.check(a.node_id()), ErrorKind::Invalid, words);
    }
}

#[tokio::test]
async fn change_is_the_next_link_and_all_clones_continue_from_it() {
    let memory = FaultyStore::new(Fault::None);
    let store = memory.store();
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let owner = take(&store, &a, TakeOver::ByQuorum).await.unwrap();
    assert!(!owner.is_by_quorum(), "a pool without members opens as always");
    let clone = owner.clone();
    let (first, second) = (members(&[&a, &b], 2), members(&[&a, &b, &c], 2));
    for (number, wanted) in [(2, &first), (3, &second), (3, &second), (4, &first)] {
        assert_eq!(ours(owner.change_configuration(&a, wanted).await), number);
        let found = newest(&store).await;
        assert_eq!((found.number, found.epoch), (number, 1));
        assert_eq!(found.owner, owner.manifest().owner);
        assert_eq!(found.configuration.as_ref(), Some(wanted));
        assert_eq!(*clone.manifest(), found);
        clone.check().await.unwrap();
        assert!(!clone.is_forced());
    }
    let invalid = owner.change_configuration(&a, &members(&[&b, &c], 2)).await;
    refused(invalid, ErrorKind::Invalid, "owner is not a member");
    assert_eq!(newest(&store).await.number, 4);
    clone.release().await.unwrap();
    assert_eq!(newest(&store).await.configuration, Some(first.clone()));
    let late = owner.change_configuration(&a, &second).await;
    refused(late, ErrorKind::Fenced, "closed here");
    refused(owner.check().await, ErrorKind::Fenced, "closed here");
}

#[tokio::test]
async fn member_takes_the_pool_over_and_gives_up_nothing() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let wanted = members(&[&a, &b, &c], 2);
    let first = pool_of(&store, &[&a, &b, &c], 2).await;
    let second = take(&store, &b, TakeOver::ByQuorum).await.unwrap();
    assert!(second.is_by_quorum() && !second.is_forced());
    assert_eq!((second.epoch(), second.manifest().number), (Epoch(2), 3));
    assert_eq!(second.manifest().configuration, Some(wanted.clone()));
    assert_eq!(second.previous().unwrap().configuration, Some(wanted.clone()));
    refused(first.check().await, ErrorKind::Fenced, "taken over");
    let change = first.change_configuration(&a, &members(&[&a, &b], 2)).await.unwrap();
    assert!(matches!(change, Changed::Fenced(_)), "{change:?}");
    refused(first.release().await, ErrorKind::Fenced, "taken over");
    second.check().await.unwrap();
    // The owner takes its own pool after a crash, and any member a released one.
    drop(second);
    let again = take(&store, &b, TakeOver::ByQuorum).await.unwrap();
    assert!(again.is_by_quorum() && !again.is_forced() && again.may_replay(Epoch(2)));
    again.release().await.unwrap();
    let third = take(&store, &c, TakeOver::ByQuorum).await.unwrap();
    assert!(third.is_by_quorum() && !third.is_forced() && !third.may_replay(Epoch(2)));
    assert_eq!(third.manifest().configuration, Some(wanted));
}

#[tokio::test]
async fn only_members_open_a_pool_with_members_without_force() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let owner = pool_of(&store, &[&a, &b], 2).await;
    for is_released in [false, true] {
        if is_released {
            owner.release().await.unwrap();
        }
        for take_over in [TakeOver::No, TakeOver::ByQuorum, TakeOver::Alone] {
            let outcome = take(&store, &c, take_over).await;
            refused(outcome, ErrorKind::Denied, "is not a member of its log, which is on db1, db1");
        }
        let looked = look(&store, &c, &key(), (POOL, "main"), Duration::ZERO).await;
        refused(looked, ErrorKind::Denied, "is not a member");
        let looked = look(&store, &b, &key(), (POOL, "main"), Duration::ZERO).await.unwrap();
        assert_eq!(looked.is_some(), is_released);
        // The directory's own log is not enough either.
        for member in [&a, &b] {
            let outcome = take(&store, member, TakeOver::No).await;
            refused(outcome, ErrorKind::Denied, "does not ask them");
        }
    }
    assert_eq!(newest(&store).await.number, 3, "nothing was written");
    // A member that was removed is told so.
    let owner = take(&store, &a, TakeOver::ByQuorum).await.unwrap();
    b.join(POOL).unwrap();
    ours(owner.change_configuration(&a, &members(&[&a, &c], 2)).await);
    refused(take(&store, &b, TakeOver::ByQuorum).await, ErrorKind::Denied, "is no longer a member");
    // Force leaves the members behind.
    let forced = take(&store, &b, TakeOver::Forced).await.unwrap();
    assert!(forced.is_forced() && !forced.is_by_quorum());
    assert_eq!(forced.manifest().configuration, None);
    refused(owner.check().await, ErrorKind::Fenced, "taken over");
    refused(take(&store, &a, TakeOver::ByQuorum).await, ErrorKind::Busy, "is open on");
    drop(forced);
    assert!(!take(&store, &b, TakeOver::No).await.unwrap().is_by_quorum());
}

#[tokio::test]
async fn copy_of_a_members_directory_is_no_member() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (b_dir, b)) = (node(), node());
    drop(pool_of(&store, &[&a, &b], 2).await);
    // This one has never owned the pool.
    b.join(POOL).unwrap();
    b.join(POOL).unwrap();
    refused(b.join(Uuid::from_u128(8)), ErrorKind::Denied, "belongs to pool");
    let copy = b_dir.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    std::fs::copy(b.path().join("node.json"), copy.join("node.json")).unwrap();
    let copied = NodeDir::open(&copy).unwrap();
    assert_eq!(copied.node_id(), b.node_id());
    for take_over in [TakeOver::ByQuorum, TakeOver::Alone] {
        refused(take(&store, &copied, take_over).await, ErrorKind::Denied, "is a copy of the one");
    }
    let original = take(&store, &b, TakeOver::ByQuorum).await.unwrap();
    assert!(!original.is_forced());
    let forced = take(&store, &copied, TakeOver::Forced).await.unwrap();
    assert!(forced.is_forced());
}

#[tokio::test]
async fn of_two_members_one_continues_alone() {
    for _ in 0..10 {
        let store = FaultyStore::new(Fault::None).store();
        let ((_a_dir, a), (_b_dir, b)) = (node(), node());
        drop(pool_of(&store, &[&a, &b], 2).await);
        let both =
            tokio::join!(take(&store, &a, TakeOver::Alone), take(&store, &b, TakeOver::Alone));
        let (winner, node, other) = match both {
            (Ok(winner), Err(_)) => (winner, &a, &b),
            (Err(_), Ok(winner)) => (winner, &b, &a),
            (first, second) => panic!("not exactly one: {} {}", first.is_ok(), second.is_ok()),
        };
        let alone = members(&[&a, &b], 2).alone(node.node_id());
        assert_eq!(winner.manifest().configuration, alone);
        assert_eq!(alone.unwrap().away, members(&[other], 1).members);
        assert!(winner.is_by_quorum() && !winner.is_forced());
        for take_over in [TakeOver::ByQuorum, TakeOver::Alone] {
            refused(take(&store, other, take_over).await, ErrorKind::Denied, "a member of its log");
        }
        // Once it has caught up, it is admitted again, and is as good as the other one.
        ours(winner.change_configuration(node, &members(&[node, other], 2)).await);
        assert!(!take(&store, other, TakeOver::ByQuorum).await.unwrap().is_forced());
    }
}

#[tokio::test]
async fn member_that_is_below_the_quorum_does_not_continue_alone() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let owner = pool_of(&store, &[&a, &b, &c], 2).await;
    for node in [&a, &b] {
        refused(take(&store, node, TakeOver::Alone).await, ErrorKind::Denied, "below the quorum");
    }
    owner.check().await.unwrap();
    ours(owner.change_configuration(&a, &members(&[&a, &b, &c], 3)).await);
    let alone = take(&store, &b, TakeOver::Alone).await.unwrap();
    let expected = members(&[&a, &b, &c], 3).alone(b.node_id());
    assert_eq!(alone.manifest().configuration, expected);
}

#[tokio::test]
async fn take_over_needs_a_store_that_can_create_conditionally() {
    let memory = FaultyStore::new(Fault::LacksConditions);
    let ((_a_dir, a), store) = (node(), memory.store());
    let sound = FaultyStore::new(Fault::None);
    drop(pool_of(&sound.store(), &[&a], 1).await);
    let name = object_name(2);
    memory.set(&name, sound.bytes(&name).await).await;
    let outcome = take(&store, &a, TakeOver::ByQuorum).await;
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(memory.names().await, [name]);
}

/// The put has or has not had its effect, and then the store answers nothing.
#[tokio::test]
async fn unknown_change_is_settled_by_its_own_bytes() {
    for is_done in [false, true] {
        let ill = IllStore::default();
        let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), ill_store(&ill));
        let owner = take(&store, &a, TakeOver::No).await.unwrap();
        let (wanted, other) = (members(&[&a, &b], 2), members(&[&a], 1));
        let silence = || {
            if is_done {
                ill.add(Rule::once(Op::Put, "manifest/", Answer::DoneButFailed));
            }
            for (op, path) in [(Op::Put, "manifest/"), (Op::Get, "manifest/"), (Op::List, "")] {
                ill.add(Rule::for_good(op, path, Answer::Internal));
            }
        };
        silence();
        for _ in 0..2 {
            let unknown = owner.change_configuration(&a, &wanted).await.unwrap();
            assert!(matches!(unknown, Changed::Unknown(_)), "{unknown:?}");
            let busy = owner.change_configuration(&a, &other).await;
            refused(busy, ErrorKind::Busy, "not known yet");
            assert_eq!(owner.check().await.unwrap_err().kind(), ErrorKind::Unavailable);
        }
        assert_eq!(owner.manifest().number, 1);
        ill.heal();
        // Another part of the process asks while this one does not know.
        owner.clone().check().await.unwrap();
        let busy = owner.change_configuration(&a, &other).await;
        refused(busy, ErrorKind::Busy, "not known yet");
        assert_eq!(ours(owner.change_configuration(&a, &wanted).await), 2);
        assert_eq!(ill.names().await, [object_name(1), object_name(2)]);
        assert_eq!(ours(owner.change_configuration(&a, &other).await), 3);
        // The same for the end of the term.
        silence();
        assert_eq!(owner.release().await.unwrap_err().kind(), ErrorKind::Unavailable);
        ill.heal();
        refused(owner.change_configuration(&a, &wanted).await, ErrorKind::Fenced, "closed here");
        if is_done {
            refused(owner.check().await, ErrorKind::Fenced, "closed here");
        }
        owner.release().await.unwrap();
        owner.release().await.unwrap();
        assert_eq!(ill.names().await.len(), 4);
        assert!(newest(&store).await.is_released);
    }
}

#[tokio::test]
async fn end_of_the_term_follows_a_change_of_unknown_outcome() {
    for is_done in [false, true] {
        let ill = IllStore::default();
        let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), ill_store(&ill));
        let owner = take(&store, &a, TakeOver::No).await.unwrap();
        let wanted = members(&[&a, &b], 2);
        if is_done {
            ill.add(Rule::once(Op::Put, "manifest/", Answer::DoneButFailed));
        }
        ill.add(Rule::for_good(Op::Put, "manifest/", Answer::Internal));
        ill.add(Rule::for_good(Op::Get, "manifest/", Answer::Internal));
        let unknown = owner.change_configuration(&a, &wanted).await.unwrap();
        assert!(matches!(unknown, Changed::Unknown(_)), "{unknown:?}");
        ill.heal();
        assert_eq!(owner.remove(50).await.unwrap(), 50);
        assert_eq!(owner.remove(60).await.unwrap(), 50, "the time is that of the removal");
        let last = newest(&store).await;
        assert_eq!((last.number, last.configuration), (3, Some(wanted)));
    }
}

#[tokio::test]
async fn unknown_change_loses_to_a_take_over() {
    let ill = IllStore::default();
    let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), ill_store(&ill));
    let owner = pool_of(&store, &[&a, &b], 2).await;
    ill.add(Rule::for_good(Op::Put, "manifest/", Answer::Internal));
    let alone = members(&[&a], 1);
    let unknown = owner.change_configuration(&a, &alone).await.unwrap();
    assert!(matches!(unknown, Changed::Unknown(_)), "{unknown:?}");
    ill.heal();
    let next = take(&store, &b, TakeOver::ByQuorum).await.unwrap();
    refused(owner.check().await, ErrorKind::Fenced, "taken over");
    for _ in 0..2 {
        let lost = owner.change_configuration(&a, &alone).await.unwrap();
        assert!(matches!(lost, Changed::Fenced(_)), "{lost:?}");
    }
    next.check().await.unwrap();
    assert_eq!(newest(&store).await.configuration, Some(members(&[&a, &b], 2)));
}

/// An owner changes its members while the store gives wrong answers and another member takes over
/// at some time. A change that is ours is what the next owner finds, and only a take-over fences.
#[tokio::test]
async fn ill_answers_let_no_change_be_lost_or_made_twice() {
    let (mut injected_count, mut unknown_count, mut fenced_count) = (0, 0, 0);
    for seed in seeds(60) {
        let ill = IllStore::default();
        ill.set_hang_time(Duration::from_millis(1));
        let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), ill_store(&ill));
        let owner = pool_of(&store, &[&a, &b], 2).await;
        let (mut rng, mut known, mut taker) = (Rng::new(seed), members(&[&a, &b], 2), None);
        let mut under_way: Option<Configuration> = None;
        for turn in 0..8u64 {
            if taker.is_none() && rng.below(8) == 0 {
                let next = take(&store, &b, TakeOver::ByQuorum).await.unwrap();
                let found = next.manifest().configuration.clone();
                let may = [Some(known.clone()), under_way.clone()];
                assert!(may.contains(&found), "SEED={seed}: a change was lost");
                taker = Some(next);
            }
            let next = match known.degraded {
                Degraded::Block => Degraded::Solo,
                Degraded::Solo => Degraded::Store,
                Degraded::Store => Degraded::Block,
            };
            let another = Configuration { degraded: next, ..known.clone() };
            let wanted = under_way.take().unwrap_or(another);
            ill.answer_randomly(seed.wrapping_add(turn), 40, Answer::ALL);
            let changed = owner.change_configuration(&a, &wanted).await.unwrap();
            let checked = owner.check().await;
            ill.heal();
            let is_fenced = matches!(&checked, Err(error) if error.kind() == ErrorKind::Fenced);
            assert!(!is_fenced || taker.is_some(), "SEED={seed}: {checked:?}");
            assert!(checked.is_err() || taker.is_none(), "SEED={seed}: it is deposed");
            match changed {
                Changed::Ours(number) => {
                    let found = newest(&store).await;
                    assert!(taker.is_none(), "SEED={seed}: it is deposed");
                    assert_eq!((found.number, found.configuration), (number, Some(wanted.clone())));
                    known = wanted;
                }
                Changed::Fenced(_) => {
                    assert!(taker.is_some(), "SEED={seed}: no other owner was there");
                    fenced_count += 1;
                }
                Changed::Unknown(_) => {
                    under_way = Some(wanted);
                    unknown_count += 1;
                }
            }
        }
        if let Some(taker) = taker {
            taker.check().await.unwrap();
        }
        injected_count += ill.injected_count();
    }
    println!("{injected_count} wrong answers, {unknown_count} unknown, {fenced_count} fenced");
    assert!(unknown_count > 0 && fenced_count > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_beside_changes_never_take_an_own_link_for_a_strangers() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let owner = take(&store, &a, TakeOver::No).await.unwrap();
    let checks: Vec<_> = (0..4)
        .map(|_| {
            let owner = owner.clone();
            tokio::spawn(async move {
                let mut count = 0;
                while owner.manifest().number < 61 {
                    owner.check().await.unwrap();
                    count += 1;
                }
                count
            })
        })
        .collect();
    for round in 0..60 {
        let wanted = [members(&[&a, &b], 2), members(&[&a], 1)];
        ours(owner.change_configuration(&a, &wanted[round % 2]).await);
    }
    for check in checks {
        assert!(check.await.unwrap() > 0);
    }
}

#[tokio::test]
async fn changes_leave_few_links_and_the_directory_knows_the_newest() {
    let ill = IllStore::default();
    let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), ill_store(&ill));
    let owner = take(&store, &a, TakeOver::No).await.unwrap();
    for round in 0..10 {
        let wanted = [members(&[&a, &b], 2), members(&[&a], 1)];
        ours(owner.change_configuration(&a, &wanted[round % 2]).await);
    }
    let names = ill.names().await;
    assert_eq!((names.len(), names.last()), (KEEP_COUNT, Some(&object_name(11))));
    // A store that does not list the chain was not rolled back: the directory asks by name.
    ill.add(Rule::for_good(Op::List, "manifest", Answer::EmptyList));
    let error = take(&store, &a, TakeOver::ByQuorum).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    // Before the directory has recorded the term, nothing is deleted.
    ill.heal();
    let terms = Terms { take_over: TakeOver::ByQuorum, ..Terms::default() };
    let unsettled = Ownership::acquire(&store, &a, &key(), POOL, "main", terms).await.unwrap();
    for round in 0..4 {
        let wanted = [members(&[&a, &b], 2), members(&[&a], 1)];
        ours(unsettled.change_configuration(&a, &wanted[round % 2]).await);
    }
    assert!(ill.names().await.contains(&object_name(11)));
}

#[tokio::test]
async fn failed_opening_by_a_member_leaves_the_members_as_they_were() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let wanted = members(&[&a, &b], 2);
    drop(pool_of(&store, &[&a, &b], 2).await);
    for (node, take_over, is_back) in [
        (&b, TakeOver::ByQuorum, true),
        (&b, TakeOver::Alone, true),
        (&b, TakeOver::Forced, true),
        (&a, TakeOver::ByQuorum, false),
        (&a, TakeOver::Alone, false),
        (&a, TakeOver::Forced, false),
    ] {
        let terms = Terms { take_over, ..Terms::default() };
        let failed = Ownership::acquire(&store, node, &key(), POOL, "main", terms).await.unwrap();
        assert_eq!(failed.give_back(node).await.unwrap(), is_back, "{take_over:?}");
        let found = newest(&store).await;
        assert_eq!(found.configuration.as_ref(), Some(&wanted), "{take_over:?}");
        assert_eq!(found.owner.node_id, a.node_id());
    }
    // The directory still counts as the one that had it open, with its own log.
    let own = take(&store, &a, TakeOver::Forced).await.unwrap();
    assert!(!own.is_forced() && own.may_replay(Epoch(1)));
    ours(own.change_configuration(&a, &wanted).await);
    drop(own);
    // After the directory has recorded the epoch of a pool that was released.
    take(&store, &a, TakeOver::ByQuorum).await.unwrap().release().await.unwrap();
    let failed = take(&store, &a, TakeOver::Alone).await.unwrap();
    assert!(failed.give_back(&a).await.unwrap());
    let found = newest(&store).await;
    assert_eq!((found.is_released, found.configuration), (true, Some(wanted)));
    assert!(!take(&store, &b, TakeOver::ByQuorum).await.unwrap().is_forced());
}

#[tokio::test]
async fn watcher_learns_of_newer_links_from_one_listing() {
    let ill = IllStore::default();
    let ((_a_dir, a), store) = (node(), ill_store(&ill));
    let owner = take(&store, &a, TakeOver::No).await.unwrap();
    ill.take_requests();
    assert_eq!(newer_than(&store, 1).await.unwrap(), None);
    assert_eq!(ill.take_requests().len(), 1);
    ours(owner.change_configuration(&a, &members(&[&a], 1)).await);
    assert_eq!(newer_than(&store, 1).await.unwrap(), Some(2));
    assert_eq!(newer_than(&store, 2).await.unwrap(), None);
    ill.add(Rule { count: 2, ..Rule::once(Op::List, "manifest", Answer::EmptyList) });
    assert_eq!(newer_than(&store, 1).await.unwrap(), Some(2));
    refused(newer_than(&store, 9).await, ErrorKind::Corrupt, "is gone");
}

#[tokio::test]
async fn impossible_configuration_is_refused_as_damaged() {
    let memory = FaultyStore::new(Fault::None);
    let ((_a_dir, a), (_b_dir, b), store) = (node(), node(), memory.store());
    drop(pool_of(&store, &[&a, &b], 2).await);
    let sound = newest(&store).await;
    for wrong in [members(&[&a, &b], 1), members(&[&a, &b], 3), members(&[&b], 1)] {
        let manifest = Manifest { configuration: Some(wrong), ..sound.clone() };
        memory.set(&object_name(2), seal_document(&key(), PURPOSE, &manifest).unwrap()).await;
        let error = read(&store, &key()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("configuration is impossible"), "{error}");
    }
}

const GOLDEN: &str = include_str!("../../testdata/manifest-configuration-v1.txt");

#[tokio::test]
async fn golden_manifest_with_a_configuration_of_version_1() {
    let member = |number: u128| Member {
        id: Uuid::from_u128(number),
        node: Uuid::from_u128(0x100 + number),
        node_name: format!("db{number}"),
    };
    let manifest = Manifest {
        format: Format::CURRENT,
        pool: POOL,
        name: "main".to_owned(),
        number: 12,
        previous_number: 11,
        epoch: 9,
        owner_since_epoch: 9,
        owner: Owner {
            node_id: Uuid::from_u128(2),
            host: "db2".to_owned(),
            pid: 4321,
            opened_at: 1_700_000_000,
        },
        is_released: false,
        removed_at: None,
        held_epoch: None,
        is_purging: false,
        forced_epoch: Some(8),
        configuration: Some(Configuration {
            members: (1..=3).map(member).collect(),
            quorum: 2,
            degraded: Degraded::Solo,
            away: Vec::new(),
        }),
        nonce: "f0".repeat(16),
    };
    let salt = [0xc0; block::seal::SALT_BYTES];
    let written = crate::chain::seal_document_with(salt, &key(), PURPOSE, &manifest).unwrap();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        return print!("{}", std::str::from_utf8(&written).unwrap());
    }
    assert_eq!(written, GOLDEN);
    let memory = FaultyStore::new(Fault::None);
    memory.set(&object_name(12), GOLDEN).await;
    assert_eq!(read(&memory.store(), &key()).await.unwrap(), Some(manifest));
}

#[test]
fn members_that_are_away_are_part_of_the_configuration() {
    let id = Uuid::from_u128;
    let member = |n| Member { id: id(n), node: id(10 + n), node_name: format!("n{n}") };
    let all = Configuration {
        members: [1, 2, 3].map(member).into(),
        quorum: 2,
        degraded: Degraded::Store,
        away: Vec::new(),
    };
    let alone = all.alone(id(2)).unwrap();
    let text = r#"{"members":[{"id":"00000000-0000-0000-0000-000000000002","node":"00000000-0000-0000-0000-00000000000c","node_name":"n2"}],"quorum":1,"degraded":"store","away":[{"id":"00000000-0000-0000-0000-000000000001","node":"00000000-0000-0000-0000-00000000000b","node_name":"n1"},{"id":"00000000-0000-0000-0000-000000000003","node":"00000000-0000-0000-0000-00000000000d","node_name":"n3"}]}"#;
    assert_eq!(serde_json::to_string(&alone).unwrap(), text);
    assert_eq!(serde_json::from_str::<Configuration>(text).unwrap(), alone);
    alone.check(id(2)).unwrap();
    assert_eq!(all.alone(id(9)), None);
    // Another one leaves those out that were left out before.
    let two = alone.with(member(1));
    assert_eq!((two.quorum, two.members.len(), two.away.len()), (2, 2, 1));
    assert_eq!(two.without(|one| one.id == id(2)).away, [member(3), member(2)]);
    // A directory that was wiped comes back under another identity.
    let back = two.with(Member { id: id(7), ..member(3) });
    assert_eq!((back.quorum, back.members.len(), back.away.len()), (2, 3, 0));
    back.check(id(2)).unwrap();
    let twice = Configuration { away: vec![member(1)], ..back };
    assert!(twice.check(id(2)).unwrap_err().to_string().contains("named twice"));
}
