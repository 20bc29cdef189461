//! Volumes with a key of their own: created, shared with clones, and erased, across kills.

use super::*;
use crate::snapshot::SnapshotName;
use futures::StreamExt;
use object_store::ObjectStoreExt;

async fn ids(pool: &Pool) -> Vec<u32> {
    pool.volume_keys.table().ids().into_iter().map(|id| id.0).collect()
}

async fn create_own(pool: &Pool, name: &str) -> Result<Arc<Volume>> {
    let traits = VolumeTraits { dedicated_key: true, ..VolumeTraits::default() };
    pool.create_volume_with(name, MIB, Durability::Flush, traits).await
}

async fn key_documents(store: &InMemory) -> usize {
    store.list(Some(&ObjectPath::from("volumekeys"))).count().await
}

async fn snapshot(pool: &Pool, name: &str) {
    pool.create_snapshots(&name.parse::<SnapshotName>().unwrap()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_erased_with_its_key_once_nothing_depends_on_it() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    let plain = pool.create_volume("plain", MIB, Durability::Flush).await.unwrap();
    assert_eq!(key_documents(&store).await, 0);
    let own = create_own(&pool, "own").await.unwrap();
    let bytes = pattern(1, 256 << 10);
    for volume in [&plain, &own] {
        volume.write(0, bytes.clone(), NO_FUA).await.unwrap();
    }
    snapshot(&pool, "own@monday").await;
    pool.clone_volume("own", "monday", "clone", None).await.unwrap();
    pool.volume("clone").unwrap().write(0, pattern(2, 4096), NO_FUA).await.unwrap();
    pool.destage_all().await.unwrap();
    let erase = async |pool: &Arc<Pool>, name: &str| pool.erase_volume(name).await;
    let refused = async |pool: &Arc<Pool>, name: &str, kind: ErrorKind, words: &str| {
        let error = erase(pool, name).await.unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(words), "{error}");
    };
    refused(&pool, "plain", ErrorKind::Invalid, "no dedicated key").await;
    refused(&pool, "nobody", ErrorKind::NotFound, "nobody").await;
    refused(&pool, "clone", ErrorKind::Busy, "own").await;
    refused(&pool, "own", ErrorKind::Busy, "clone").await;
    drop((plain, own));
    // They are unchanged, with the same key, in another process and under another owner.
    kill(pool).await;
    let pool = open(dir.path(), &store, 2).await;
    assert_eq!(ids(&pool).await, [2]);
    let clone = pool.volume("clone").unwrap();
    assert!(read(&clone, 0, 4096).await.unwrap() == pattern(2, 4096)[..]);
    assert!(read(&clone, 4096, 4096).await.unwrap() == bytes[4096..8192]);
    drop(clone);
    pool.remove_volume("clone", false).await.unwrap();
    refused(&pool, "own", ErrorKind::Busy, "clone (removed, restorable)").await;
    pool.remove_volume("clone", true).await.unwrap();
    refused(&pool, "own", ErrorKind::Busy, "own@monday").await;
    assert!(read(&pool.volume("own").unwrap(), 0, 4096).await.unwrap() == bytes[..4096]);
    pool.remove_snapshot("own", "monday").await.unwrap();
    // The daemon ends between the two steps.
    *pool.shared.ends_at.lock() = Some("erase-purged");
    let _ = erase(&pool, "own").await.unwrap_err();
    kill(pool).await;
    let pool = open(dir.path(), &store, 3).await;
    assert!(pool.volume("own").is_none());
    assert_eq!(ids(&pool).await, [2]);
    erase(&pool, "own").await.unwrap();
    assert_eq!((ids(&pool).await.len(), key_documents(&store).await), (0, 1));
    refused(&pool, "own", ErrorKind::NotFound, "own").await;
    assert!(read(&pool.volume("plain").unwrap(), 0, bytes.len()).await.unwrap() == bytes[..]);
    kill(pool).await;
    // The volume is gone, whichever part of it the store had.
    let pool = open(dir.path(), &store, 4).await;
    assert!(!pool.shared.is_any_keyless.load(std::sync::atomic::Ordering::Acquire));
    pool.destage_all().await.unwrap();
    assert_eq!(pool.fsck().await.unwrap().problem_count(), 0);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_purged_volume_goes_once_the_store_knows() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    for name in ["first", "second"] {
        let volume = create_own(&pool, name).await.unwrap();
        volume.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
    }
    pool.remove_volume("first", true).await.unwrap();
    pool.remove_volume("second", false).await.unwrap();
    pool.destage_all().await.unwrap();
    pool.purge_expired().await.unwrap();
    assert_eq!(ids(&pool).await, [2], "one that can be restored keeps its key");
    pool.restore_volume("second").await.unwrap();
    assert!(read(&pool.volume("second").unwrap(), 0, 4096).await.unwrap() == pattern(1, 4096)[..]);
    pool.close().await.unwrap();
}

/// The objects with the keys are lost by mistake, and brought back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_served_of_a_volume_whose_key_is_missing() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    let bytes = pattern(1, 64 << 10);
    for (name, has_own) in [("plain", false), ("own", true)] {
        let volume = match has_own {
            true => create_own(&pool, name).await,
            false => pool.create_volume(name, MIB, Durability::Flush).await,
        };
        volume.unwrap().write(0, bytes.clone(), NO_FUA).await.unwrap();
    }
    pool.destage_all().await.unwrap();
    pool.close().await.unwrap();
    let listed = store.list(Some(&ObjectPath::from("volumekeys")));
    let found: Vec<ObjectPath> = listed.map_ok(|meta| meta.location).try_collect().await.unwrap();
    let mut kept = Vec::new();
    for path in &found {
        kept.push(store.get(path).await.unwrap().bytes().await.unwrap());
        store.delete(path).await.unwrap();
    }
    let pool = open(dir.path(), &store, 2).await;
    let own = pool.volume("own").unwrap();
    let mut buf = vec![0; 4096];
    for done in [
        own.read(0, &mut buf).await,
        own.write(0, bytes.slice(..4096), NO_FUA).await,
        own.write_zeroes(0, 4096, ZeroFlags::default()).await,
    ] {
        let error = done.unwrap_err();
        assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("key"), "{error}");
    }
    drop(own);
    assert!(read(&pool.volume("plain").unwrap(), 0, bytes.len()).await.unwrap() == bytes[..]);
    let found_bad = pool.fsck().await.unwrap();
    assert!(found_bad.problems().iter().any(|one| one.contains("volume own")), "{found_bad:?}");
    pool.close().await.unwrap();
    for (path, bytes) in found.iter().zip(kept) {
        store.put(path, bytes.into()).await.unwrap();
    }
    let pool = open(dir.path(), &store, 3).await;
    assert!(read(&pool.volume("own").unwrap(), 0, bytes.len()).await.unwrap() == bytes[..]);
    assert_eq!(pool.fsck().await.unwrap().problem_count(), 0);
    pool.close().await.unwrap();
}

/// A clone that fails leaves its id to the next volume, but not its key: that key would be
/// destroyed when the other volume is erased.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_clone_leaves_its_key_to_no_other_volume() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    let own = create_own(&pool, "own").await.unwrap();
    let key = own.record().key();
    drop(own);
    // Like a clone does before the store refuses it.
    pool.shared.tier.volume_keys().assign(VolumeId(2), key);
    let plain = pool.create_volume("plain", MIB, Durability::Flush).await.unwrap();
    assert_eq!(plain.id(), VolumeId(2));
    plain.write(0, pattern(1, 64 << 10), NO_FUA).await.unwrap();
    drop(plain);
    pool.destage_all().await.unwrap();
    pool.erase_volume("own").await.unwrap();
    pool.close().await.unwrap();
    let pool = open(dir.path(), &store, 2).await;
    let plain = pool.volume("plain").unwrap();
    assert!(read(&plain, 0, 64 << 10).await.unwrap() == pattern(1, 64 << 10)[..]);
    drop(plain);
    pool.close().await.unwrap();
}
