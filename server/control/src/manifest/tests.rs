//! Tests of ownership and of the directory's identity.

use super::found::lock;
use super::node_dir::*;
use super::*;
use crate::store::StoreOptions;
use crate::store::testing::{Fault, FaultyStore};
use tempfile::TempDir;

const POOL: Uuid = Uuid::from_u128(7);

fn key() -> PoolKey {
    PoolKey::new([3; 32])
}

fn node() -> (TempDir, NodeDir) {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeDir::open(&dir.path().join("pool")).unwrap();
    (dir, node)
}

fn terms(take_over: bool) -> Terms {
    let take_over = if take_over { TakeOver::Forced } else { TakeOver::No };
    Terms { take_over, ..Terms::default() }
}

async fn acquire(store: &Store, node: &NodeDir, take_over: bool) -> Result<Ownership> {
    let ownership = Ownership::acquire(store, node, &key(), POOL, "main", terms(take_over)).await?;
    ownership.settle(node)?;
    Ok(ownership)
}

#[tokio::test]
async fn released_pool_opens_anywhere_under_the_next_epoch() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let first = acquire(&store, &a, false).await.unwrap();
    assert_eq!(first.epoch(), Epoch(1));
    assert!(first.previous().is_none());
    first.check().await.unwrap();
    first.release().await.unwrap();
    let second = acquire(&store, &b, false).await.unwrap();
    assert_eq!(second.epoch(), Epoch(2));
    assert!(!second.is_forced() && !first.is_forced());
    assert!(second.previous().unwrap().is_released);
    assert!(!second.may_replay(Epoch(1)) && second.may_replay(Epoch(2)));
    let newest = read(&store, &key()).await.unwrap().unwrap();
    assert_eq!(newest.owner.node_id, b.node_id());
}

#[tokio::test]
async fn a_pool_open_elsewhere_is_refused_and_a_take_over_fences() {
    let store = FaultyStore::new(Fault::None).store();
    let ((_a_dir, a), (_b_dir, b)) = (node(), node());
    let first = acquire(&store, &a, false).await.unwrap();
    let error = acquire(&store, &b, false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    for word in ["is open on", "since", "--take-over", &std::process::id().to_string()] {
        assert!(error.to_string().contains(word), "{error}");
    }
    first.check().await.unwrap();
    let second = acquire(&store, &b, true).await.unwrap();
    assert_eq!(second.epoch(), Epoch(2));
    assert!(second.is_forced() && !first.is_forced());
    assert_eq!(first.check().await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(first.release().await.unwrap_err().kind(), ErrorKind::Fenced);
    second.check().await.unwrap();
    // The old owner's log is superseded, for every next opener.
    second.release().await.unwrap();
    let third = acquire(&store, &a, false).await.unwrap();
    assert!(!third.may_replay(Epoch(1)) && !third.is_forced());
    // Every later owner knows since when the pool goes on without logs of that time.
    let forced = [&first, &second, &third].map(|owner| owner.manifest().forced_epoch);
    assert_eq!(forced, [None, Some(2), Some(2)]);
    let left_behind = [&a, &b].map(|node| third.manifest().left_behind_since(node.node_id()));
    assert_eq!(left_behind, [None, Some(Epoch(2))], "the owner's own log is never left behind");
}

#[tokio::test]
async fn the_same_directory_takes_its_pool_back_after_a_crash() {
    let store = FaultyStore::new(Fault::None).store();
    let (dir, a) = node();
    let path = a.path().to_owned();
    drop(a);
    for epoch in 1..=3 {
        let a = NodeDir::open(&path).unwrap();
        let owner = acquire(&store, &a, false).await.unwrap();
        assert_eq!(owner.epoch(), Epoch(epoch));
        assert!(owner.may_replay(Epoch(1)) && owner.may_replay(Epoch(epoch)));
        assert!(!owner.may_replay(Epoch(epoch + 1)) && !owner.is_forced());
        // Dropped without a release, like a process that dies.
    }
    drop(dir);
}

#[tokio::test]
async fn a_crash_between_create_and_record_is_no_obstacle() {
    for seed in 0..30 {
        let memory = FaultyStore::new(Fault::Ambiguous(seed));
        let store = memory.store();
        let (_dir, a) = node();
        let mut owners = 0;
        // Each attempt may have created a manifest without learning of it.
        for _ in 0..10 {
            if let Ok(owner) = acquire(&store, &a, false).await {
                owners += 1;
                owner.check().await.unwrap();
                assert!(owner.may_replay(Epoch(1)), "SEED={seed}");
            }
        }
        assert!(owners > 0, "SEED={seed}");
    }
}

/// Lets `count` nodes try at the same moment; returns those that won.
async fn race(store: &Store, count: usize, take_over: bool) -> Vec<Ownership> {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..count {
        let store = store.clone();
        let (dir, node) = node();
        tasks.spawn(async move {
            let outcome = acquire(&store, &node, take_over).await;
            drop(dir);
            outcome
        });
    }
    let mut winners = Vec::new();
    for outcome in tasks.join_all().await {
        match outcome {
            Ok(ownership) => winners.push(ownership),
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::Busy | ErrorKind::Unavailable),
                "{}",
                error.chain()
            ),
        }
    }
    winners
}

async fn count_current(winners: &[Ownership]) -> usize {
    let mut current = 0;
    for winner in winners {
        current += usize::from(winner.check().await.is_ok());
    }
    current
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_at_the_same_moment_exactly_one_wins() {
    for _ in 0..10 {
        let store = FaultyStore::new(Fault::None).store();
        let winners = race(&store, 24, false).await;
        assert_eq!(winners.len(), 1);
        assert_eq!(count_current(&winners).await, 1);
    }
    for _ in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().display().to_string();
        let store = Store::open(&url, &StoreOptions::default()).unwrap();
        let winners = race(&store, 16, false).await;
        assert_eq!(winners.len(), 1);
        assert_eq!(count_current(&winners).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_take_overs_exactly_one_is_left() {
    for _ in 0..10 {
        let store = FaultyStore::new(Fault::None).store();
        let winners = race(&store, 24, true).await;
        assert!(!winners.is_empty());
        assert_eq!(count_current(&winners).await, 1);
        let mut epochs: Vec<u64> = winners.iter().map(|winner| winner.epoch().0).collect();
        epochs.sort_unstable();
        epochs.dedup();
        assert_eq!(epochs.len(), winners.len(), "an epoch was granted twice");
    }
}

#[tokio::test]
async fn with_ambiguous_answers_at_most_one_wins() {
    for seed in 0..40 {
        let store = FaultyStore::new(Fault::Ambiguous(seed)).store();
        let winners = race(&store, 12, false).await;
        assert!(winners.len() <= 1, "SEED={seed}");
    }
}

#[tokio::test]
async fn a_damaged_manifest_is_refused_by_name() {
    let memory = FaultyStore::new(Fault::None);
    let store = memory.store();
    let (_dir, a) = node();
    acquire(&store, &a, false).await.unwrap();
    let name = "manifest/00000000000000000001";
    let bytes = memory.bytes(name).await;
    for at in (0..bytes.len()).step_by(7) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 0x10;
        memory.set(name, flipped).await;
        let error = acquire(&store, &a, true).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at}");
        assert!(error.to_string().contains(name), "{error}");
    }
    // Another pool's manifest, or an older one under a newer number, is refused, too.
    memory.set("manifest/00000000000000000002", bytes.clone()).await;
    assert_eq!(acquire(&store, &a, true).await.unwrap_err().kind(), ErrorKind::Corrupt);
    memory.remove("manifest/00000000000000000002").await;
    memory.set(name, bytes).await;
    let other = PoolKey::new([4; 32]);
    let error =
        Ownership::acquire(&store, &a, &other, POOL, "main", terms(true)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    acquire(&store, &a, false).await.unwrap();
}

#[tokio::test]
async fn a_store_rolled_back_under_us_is_noticed() {
    let memory = FaultyStore::new(Fault::None);
    let store = memory.store();
    let (_dir, a) = node();
    let first = acquire(&store, &a, false).await.unwrap();
    let old = memory.bytes("manifest/00000000000000000001").await;
    let second = acquire(&store, &a, false).await.unwrap();
    for name in memory.names().await {
        memory.remove(&name).await;
    }
    assert_eq!(second.check().await.unwrap_err().kind(), ErrorKind::Corrupt);
    memory.set("manifest/00000000000000000001", old).await;
    assert_eq!(second.check().await.unwrap_err().kind(), ErrorKind::Corrupt);
    let error = acquire(&store, &a, true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("rolled back"), "{error}");
    drop(first);
}

#[tokio::test]
async fn a_directory_belongs_to_one_pool() {
    let store = FaultyStore::new(Fault::None).store();
    let other = FaultyStore::new(Fault::None).store();
    let (_dir, a) = node();
    acquire(&store, &a, false).await.unwrap();
    let pool = Uuid::from_u128(8);
    let error = Ownership::acquire(&other, &a, &key(), pool, "x", terms(true)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("belongs to pool"), "{error}");
}

#[tokio::test]
async fn old_manifests_are_pruned_and_the_newest_stays() {
    let memory = FaultyStore::new(Fault::None);
    let store = memory.store();
    let (_dir, a) = node();
    for _ in 0..10 {
        acquire(&store, &a, false).await.unwrap().release().await.unwrap();
    }
    let names = memory.names().await;
    assert!(names.len() <= KEEP_COUNT + 1, "{names:?}");
    assert!(names.last().unwrap().ends_with("20"));
}

#[test]
fn second_process_is_refused_with_the_first_ones_id() {
    let (_dir, a) = node();
    let error = NodeDir::open(a.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    let (path, id) = (a.path().to_owned(), a.node_id());
    a.record(POOL, 1, 1).unwrap();
    drop(a);
    let again = NodeDir::open(&path).unwrap();
    assert_eq!(again.node_id(), id);
    drop(again);
    // Either of the two files is enough, and the other one is restored.
    for (name, bytes) in
        [("node.json", &b"{"[..]), ("node.backup.json", b""), ("node.json", b"\xff\x00")]
    {
        std::fs::write(path.join(name), bytes).unwrap();
        let again = NodeDir::open(&path).unwrap();
        assert_eq!(again.node_id(), id, "{name}");
        drop(again);
        let read = |name| std::fs::read(path.join(name)).unwrap();
        assert_eq!(read("node.json"), read("node.backup.json"));
    }
    for name in ["node.json", "node.backup.json"] {
        std::fs::remove_file(path.join(name)).unwrap();
        let again = NodeDir::open(&path).unwrap();
        assert_eq!(again.node_id(), id, "{name} was missing");
        drop(again);
        assert!(path.join(name).exists());
    }
    for name in ["node.json", "node.backup.json"] {
        std::fs::write(path.join(name), "{").unwrap();
    }
    assert_eq!(NodeDir::open(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    std::fs::remove_file(path.join("node.json")).unwrap();
    assert_eq!(NodeDir::open(&path).unwrap_err().kind(), ErrorKind::Corrupt, "no new identity");
}

#[tokio::test]
async fn directory_stays_unchanged_when_no_pool_was_opened() {
    let place = tempfile::tempdir().unwrap();
    let (missing, empty) = (place.path().join("a/missing"), place.path().join("empty"));
    let other = place.path().join("other");
    for dir in [&empty, &other] {
        std::fs::create_dir(dir).unwrap();
    }
    std::fs::write(other.join("notes"), "mine").unwrap();
    for (dir, names) in [(&missing, None), (&empty, Some(0)), (&other, Some(1))] {
        let node = NodeDir::open(dir).unwrap();
        assert!(dir.join("node.json").exists() && dir.join("lock").exists());
        drop(node);
        let left = std::fs::read_dir(dir).ok().map(Iterator::count);
        assert_eq!(left, names, "{}", dir.display());
    }
    // An identity that a pool may name as its owner stays.
    let store = FaultyStore::new(Fault::None).store();
    let node = NodeDir::open(&empty).unwrap();
    let id = node.node_id();
    acquire(&store, &node, false).await.unwrap();
    drop(node);
    assert_eq!(NodeDir::open(&empty).unwrap().node_id(), id);
}

#[test]
fn removed_lock_file_keeps_no_process_out() {
    let dir = tempfile::tempdir().unwrap();
    let held = lock(dir.path()).unwrap();
    std::fs::remove_file(dir.path().join("lock")).unwrap();
    let next = lock(dir.path()).unwrap();
    assert!(lock(dir.path()).is_err(), "the next one has the lock that is there");
    drop((held, next));
}

#[tokio::test]
async fn a_copied_directory_does_not_pass_for_the_original() {
    let store = FaultyStore::new(Fault::None).store();
    let (dir, a) = node();
    let owner = acquire(&store, &a, false).await.unwrap();
    let copy = dir.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    std::fs::copy(a.path().join("node.json"), copy.join("node.json")).unwrap();
    let b = NodeDir::open(&copy).unwrap();
    assert!(b.is_copy());
    let error = acquire(&store, &b, false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let said = error.to_string();
    for words in
        ["from a copy of", "or this directory is the copy", "a backup", "gives up the writes"]
    {
        assert!(said.contains(words), "it does not say {words:?}: {said}");
    }
    owner.check().await.unwrap();
    // By force the copy continues from the copied log, and the original is excluded for good.
    let taken = acquire(&store, &b, true).await.unwrap();
    assert!(taken.may_replay(Epoch(1)));
    assert!(taken.is_forced(), "what the original wrote since is not here");
    drop((owner, a));
    let a = NodeDir::open(&dir.path().join("pool")).unwrap();
    assert_eq!(acquire(&store, &a, false).await.unwrap_err().kind(), ErrorKind::Busy);
    assert!(!acquire(&store, &a, true).await.unwrap().may_replay(Epoch(1)));
}

/// Documents from `testdata/`. Files are added with each version, never edited.
const GOLDEN_MANIFEST: &str = include_str!("../../testdata/manifest-v1.txt");
const GOLDEN_NODE: &str = include_str!("../../testdata/node-v1.json");

#[tokio::test]
async fn golden_manifest_of_version_1() {
    let manifest = Manifest {
        format: Format::CURRENT,
        pool: POOL,
        name: "main".to_owned(),
        number: 12,
        previous_number: 11,
        epoch: 9,
        owner_since_epoch: 5,
        owner: Owner {
            node_id: Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
            host: "db1".to_owned(),
            pid: 4321,
            opened_at: 1_700_000_000,
        },
        is_released: true,
        removed_at: None,
        held_epoch: None,
        is_purging: false,
        forced_epoch: None,
        configuration: None,
        nonce: "f0".repeat(16),
    };
    let salt = [0xc0; block::seal::SALT_BYTES];
    let written = crate::chain::seal_document_with(salt, &key(), PURPOSE, &manifest).unwrap();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        return print!("{}", std::str::from_utf8(&written).unwrap());
    }
    assert_eq!(written, GOLDEN_MANIFEST);
    let memory = FaultyStore::new(Fault::None);
    memory.set("manifest/00000000000000000012", GOLDEN_MANIFEST).await;
    assert_eq!(read(&memory.store(), &key()).await.unwrap(), Some(manifest));
}

#[test]
fn golden_identity_of_a_directory_of_version_1() {
    let file = NodeFile {
        format: Format::CURRENT,
        node_id: Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        directory_inode: 1234,
        directory_made_at: None,
        pool: Some(POOL),
        epoch: 9,
        manifest: 0,
        attempts: vec!["f0".repeat(16)],
    };
    let written = serde_json::to_string_pretty(&file).unwrap();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        return println!("{written}");
    }
    assert_eq!(written, GOLDEN_NODE.trim_end());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("node.json"), GOLDEN_NODE).unwrap();
    let node = NodeDir::open(dir.path()).unwrap();
    assert_eq!(*node.file.lock(), file);
    assert!(node.is_copy(), "it is of another directory");
}

#[test]
fn a_directory_that_got_the_inode_of_its_original_is_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let node = NodeDir::open(dir.path()).unwrap();
    node.record(POOL, 9, 17).unwrap();
    let known = node.file.lock().clone();
    drop(node);
    assert!(!NodeDir::open(dir.path()).unwrap().is_copy());
    let Some(made_at) = known.directory_made_at else { return }; // the file system does not report it
    let path = dir.path().join("node.json");
    let other = NodeFile { directory_made_at: Some(made_at - 1), ..known.clone() };
    std::fs::write(&path, serde_json::to_string_pretty(&other).unwrap()).unwrap();
    assert!(NodeDir::open(dir.path()).unwrap().is_copy());
    // A file that an earlier version wrote does not record it either.
    let older = NodeFile { directory_made_at: None, ..known };
    let text = serde_json::to_string_pretty(&older).unwrap();
    assert!(!text.contains("made_at"));
    std::fs::write(&path, text).unwrap();
    assert!(!NodeDir::open(dir.path()).unwrap().is_copy());
}
