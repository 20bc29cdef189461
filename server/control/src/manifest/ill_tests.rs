//! Tests of ownership in a store that gives wrong answers, and of giving a pool back.

use super::node_dir::*;
use super::*;
use object_store::ObjectStore;
use std::sync::Arc;
use tempfile::TempDir;
use tiering::testing::{Answer, IllStore, Op, Rule};

const POOL: Uuid = Uuid::from_u128(7);

fn key() -> PoolKey {
    PoolKey::new([3; 32])
}

fn node() -> (TempDir, NodeDir) {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeDir::open(&dir.path().join("pool")).unwrap();
    (dir, node)
}

fn store(ill: &IllStore) -> Store {
    Store::from_objects("ill", Arc::new(ill.clone()) as Arc<dyn ObjectStore>)
}

async fn acquire_with(store: &Store, node: &NodeDir, terms: Terms) -> Result<Ownership> {
    Ownership::acquire(store, node, &key(), POOL, "main", terms).await
}

/// Acquires ownership like a successful opening.
async fn open(store: &Store, node: &NodeDir) -> Result<Ownership> {
    let ownership = acquire_with(store, node, Terms::default()).await?;
    ownership.settle(node)?;
    Ok(ownership)
}

async fn take_over(store: &Store, node: &NodeDir) -> Result<Ownership> {
    acquire_with(store, node, Terms { take_over: TakeOver::Forced, ..Terms::default() }).await
}

#[tokio::test]
async fn empty_listings_do_not_end_a_running_pool() {
    let ill = IllStore::default();
    let ((_dir, a), store) = (node(), store(&ill));
    let owner = open(&store, &a).await.unwrap();
    for count in [1, 3] {
        ill.add(Rule { count, ..Rule::once(Op::List, "manifest", Answer::EmptyList) });
        owner.check().await.unwrap();
    }
    assert_eq!(ill.injected_count(), 4);
    ill.add(Rule::for_good(Op::List, "manifest", Answer::EmptyList));
    let unknown = owner.check().await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unavailable, "{}", unknown.chain());
}

#[tokio::test]
async fn passing_conflicts_refuse_no_start_and_no_orderly_stop() {
    let ill = IllStore::default();
    let ((_dir, a), (_other_dir, b), store) = (node(), node(), store(&ill));
    ill.add(Rule { count: 2, ..Rule::once(Op::Put, "manifest/", Answer::Conflict) });
    let owner = open(&store, &a).await.unwrap();
    ill.add(Rule { count: 2, ..Rule::once(Op::Put, "manifest/", Answer::Conflict) });
    owner.release().await.unwrap();
    assert_eq!(ill.injected_count(), 4);
    open(&store, &b).await.unwrap();
}

#[tokio::test]
async fn store_that_shows_nothing_for_a_moment_was_not_rolled_back() {
    let ill = IllStore::default();
    let ((_dir, a), store) = (node(), store(&ill));
    open(&store, &a).await.unwrap().release().await.unwrap();
    ill.add(Rule { count: 4, ..Rule::once(Op::List, "manifest", Answer::EmptyList) });
    let owner = open(&store, &a).await.unwrap();
    assert_eq!(owner.epoch(), Epoch(2));
}

#[tokio::test]
async fn store_that_never_lists_its_manifests_was_not_rolled_back() {
    let ill = IllStore::default();
    let ((_dir, a), store) = (node(), store(&ill));
    open(&store, &a).await.unwrap().release().await.unwrap();
    ill.add(Rule::for_good(Op::List, "manifest", Answer::EmptyList));
    let error = open(&store, &a).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(error.chain().contains("the listing lacks"), "{}", error.chain());
    ill.heal();
    assert_eq!(open(&store, &a).await.unwrap().epoch(), Epoch(2));
}

#[tokio::test]
async fn failed_opening_of_a_released_pool_leaves_it_released() {
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let ill = IllStore::default();
    let store = store(&ill);
    open(&store, &a).await.unwrap().release().await.unwrap();
    let failed = acquire_with(&store, &b, Terms::default()).await.unwrap();
    assert!(failed.give_back(&b).await.unwrap());
    assert_eq!(failed.check().await.unwrap_err().kind(), ErrorKind::Fenced);
    let newest = read(&store, &key()).await.unwrap().unwrap();
    assert_eq!((newest.owner.node_id, newest.epoch), (a.node_id(), 2));
    // Its first owner continues where it was.
    let owner = open(&store, &a).await.unwrap();
    assert_eq!(owner.epoch(), Epoch(3));
    assert!(owner.may_replay(Epoch(1)) && !owner.is_forced());
    owner.release().await.unwrap();
    // The same holds when the first owner's own opening fails.
    let failed = acquire_with(&store, &a, Terms::default()).await.unwrap();
    assert!(failed.give_back(&a).await.unwrap());
    let owner = open(&store, &a).await.unwrap();
    assert!(owner.may_replay(Epoch(1)));
    owner.give_back(&a).await.unwrap();
    // Also after the directory has recorded the epoch.
    assert!(open(&store, &a).await.unwrap().may_replay(Epoch(1)));
    open(&store, &a).await.unwrap().release().await.unwrap();
    open(&store, &c).await.unwrap();
}

#[tokio::test]
async fn failed_take_over_gives_the_pool_back_to_its_owner() {
    let ((_a_dir, a), (_b_dir, b), (_c_dir, c)) = (node(), node(), node());
    let store = store(&IllStore::default());
    let crashed = open(&store, &a).await.unwrap();
    for _ in 0..2 {
        let failed = take_over(&store, &b).await.unwrap();
        assert!(failed.is_forced());
        assert!(failed.give_back(&b).await.unwrap());
        // The previous owner is fenced anyway, and no other directory takes the contents of its
        // log.
        assert_eq!(crashed.check().await.unwrap_err().kind(), ErrorKind::Fenced);
        for other in [&b, &c] {
            let refused = open(&store, other).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy, "{}", refused.chain());
        }
    }
    let owner = open(&store, &a).await.unwrap();
    assert!(owner.may_replay(crashed.epoch()) && !owner.is_forced());
    assert_eq!(owner.epoch(), Epoch(4), "no epoch is held twice");
}

#[tokio::test]
async fn failed_opening_of_ones_own_pool_leaves_it_open_there() {
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let store = store(&IllStore::default());
    let crashed = open(&store, &a).await.unwrap();
    for _ in 0..ATTEMPT_COUNT_MAX + 1 {
        let failed = acquire_with(&store, &a, Terms::default()).await.unwrap();
        assert!(!failed.give_back(&a).await.unwrap());
    }
    assert_eq!(open(&store, &b).await.unwrap_err().kind(), ErrorKind::Busy);
    assert!(open(&store, &a).await.unwrap().may_replay(crashed.epoch()));
}

#[tokio::test]
async fn failed_opening_of_a_new_pool_or_a_removed_one_changes_nothing() {
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let store = store(&IllStore::default());
    let failed = acquire_with(&store, &a, Terms::default()).await.unwrap();
    assert!(failed.give_back(&a).await.unwrap());
    open(&store, &b).await.unwrap().remove(block::quantities::unix_seconds_now()).await.unwrap();
    let restoring = Terms { restores: true, ..Terms::default() };
    for node in [&a, &b] {
        let failed = acquire_with(&store, node, restoring).await.unwrap();
        assert!(failed.give_back(node).await.unwrap());
        let refused = open(&store, node).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "it is still removed");
    }
    acquire_with(&store, &b, restoring).await.unwrap();
}

#[tokio::test]
async fn pool_taken_by_a_create_of_unknown_outcome_is_given_back() {
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let ill = IllStore::default();
    let store = store(&ill);
    open(&store, &a).await.unwrap().release().await.unwrap();
    // It is created, but then the store does not say whether it is the highest.
    let failing = Rule::once(Op::List, "manifest", Answer::Denied);
    ill.add(Rule { skipped_count: 1, ..failing });
    let error = open(&store, &b).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{}", error.chain());
    open(&store, &a).await.unwrap().release().await.unwrap();
}
