//! Tests of removing, restoring and purging pools.

use super::*;
use crate::record::Durability;
use crate::testing::pool_config;
use block::{BlockDevice, WriteFlags};
use control::manifest::{NodeDir, Ownership, Terms};
use control::store::testing::{Fault, FaultyStore};
use std::path::Path;
use tempfile::TempDir;

const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// Configures a small pool below `place`, served from its directory `dir`.
fn config(place: &Path, dir: &str) -> PoolConfig {
    std::fs::create_dir_all(place.join(dir)).unwrap();
    pool_config(place, dir)
}

async fn write(open: &crate::open_pool::OpenPool, volume: &str, text: &'static [u8]) {
    let volume = open.pool.volume(volume).unwrap();
    volume.write(0, text.into(), WriteFlags { fua: false }).await.unwrap();
}

async fn read(config: &PoolConfig, volume: &str, byte_count: usize) -> Vec<u8> {
    let open = opening::open(config, Opening::Existing).await.unwrap();
    let mut bytes = vec![0; byte_count];
    open.pool.volume(volume).unwrap().read(0, &mut bytes).await.unwrap();
    open.close().await.unwrap();
    bytes
}

/// Retention by the clock of this machine.
fn kept(retention: Duration) -> Kept {
    Kept { retention, wall_seconds: quantities::unix_seconds_now(), proven_seconds: None }
}

#[track_caller]
fn says(error: &Error, kind: ErrorKind, words: &[&str]) {
    let said = error.chain();
    assert_eq!(error.kind(), kind, "{said}");
    for word in words {
        assert!(said.contains(word), "it does not say {word:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_pool_is_refused_until_it_is_restored_with_all_its_data() {
    let place = tempfile::tempdir().unwrap();
    let (here, elsewhere) = (config(place.path(), "a"), config(place.path(), "b"));
    let open = opening::open(&here, Opening::OrNew).await.unwrap();
    open.pool.create_volume("db", 1 << 20, Durability::Auto).await.unwrap();
    write(&open, "db", b"precious").await;
    // It is open, and the writes are in the log only.
    says(&remove(&here, |_| Ok(())).await.unwrap_err(), ErrorKind::Busy, &["in use by process"]);
    // Another directory does not take it.
    says(&remove(&elsewhere, |_| Ok(())).await.unwrap_err(), ErrorKind::Busy, &["is open on"]);
    open.close().await.unwrap();
    says(&restore(&here).await.unwrap_err(), ErrorKind::Invalid, &["not removed"]);
    says(&purge(&here, true).await.unwrap_err(), ErrorKind::Invalid, &["not removed", "pool rm"]);

    let removed = remove(&here, |_| Ok(())).await.unwrap();
    assert_eq!(removed.purge_at - removed.removed_at, WEEK.as_secs());
    let (at, until) = (quantities::utc(removed.removed_at), quantities::utc(removed.purge_at));
    let words = [at.as_str(), until.as_str(), "spindle pool restore"];
    for config in [&here, &elsewhere] {
        for opening in [Opening::Existing, Opening::OrNew, Opening::TakeOver] {
            let refused = opening::open(config, opening).await.err().expect("it is removed");
            says(&refused, ErrorKind::NotFound, &words);
        }
        says(&remove(config, |_| Ok(())).await.unwrap_err(), ErrorKind::NotFound, &words);
    }
    assert_eq!(crate::fsck::fsck(&here).await.unwrap().problems(), Vec::<String>::new());

    let restored = restore(&elsewhere).await.unwrap();
    assert_eq!((restored.pool, restored.volume_count), (removed.pool, 1));
    assert_eq!(read(&here, "db", 8).await, b"precious");
    assert_eq!(read(&elsewhere, "db", 8).await, b"precious");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_whose_data_cannot_go_to_the_store_is_not_removed() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let open = opening::open(&config, Opening::OrNew).await.unwrap();
    open.pool.create_volume("db", 1 << 20, Durability::Auto).await.unwrap();
    open.pool.destage_all().await.unwrap();
    write(&open, "db", b"only here").await;
    // A file where the folder should be: no segment can be made.
    let segments = place.path().join("store/segments");
    let _ = std::fs::remove_dir_all(&segments);
    std::fs::write(&segments, b"").unwrap();
    let refused = open.remove().await.unwrap_err();
    says(&refused, ErrorKind::Unavailable, &["it was not removed", "spindle status"]);
    std::fs::remove_file(&segments).unwrap();
    assert_eq!(read(&config, "db", 9).await, b"only here");
    remove(&config, |_| Ok(())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purge_keeps_objects_of_others() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "a");
    let open = opening::open(&config, Opening::OrNew).await.unwrap();
    open.pool.create_volume("db", 1 << 20, Durability::Auto).await.unwrap();
    write(&open, "db", b"precious").await;
    open.close().await.unwrap();
    let strangers = ["store/segments-of-others/1", "store/other/manifest/1", "beside/segments/1"];
    for name in strangers {
        let path = place.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"not of the pool").unwrap();
    }
    let removed = remove(&config, |_| Ok(())).await.unwrap();
    let early = purge(&config, false).await.unwrap_err();
    says(
        &early,
        ErrorKind::Busy,
        &[&quantities::utc(removed.purge_at), "--now", "nothing was deleted"],
    );
    restore(&config).await.unwrap();
    assert_eq!(read(&config, "db", 8).await, b"precious");
    remove(&config, |_| Ok(())).await.unwrap();

    let store = Store::open(&config.store_url, &StoreOptions::default()).unwrap();
    let listed =
        async || -> Vec<ObjectMeta> { store.bulk().list(None).try_collect().await.unwrap() };
    let before = listed().await;
    let purged = purge(&config, true).await.unwrap();
    let mut left: Vec<String> =
        listed().await.iter().map(|meta| meta.location.to_string()).collect();
    left.sort();
    assert_eq!(left, ["other/manifest/1", "segments-of-others/1"]);
    for name in strangers {
        assert_eq!(std::fs::read(place.path().join(name)).unwrap(), b"not of the pool", "{name}");
    }
    // All objects that were there except two, and the manifest that the purge began with.
    assert_eq!(purged.object_count, before.len() as u64 - 2 + 1);
    let before_bytes: u64 = before.iter().map(|meta| meta.size).sum();
    assert!(purged.object_bytes > before_bytes - 2 * 15, "{purged:?} of {before_bytes}");
    says(&purge(&config, true).await.unwrap_err(), ErrorKind::NotFound, &["holds no pool"]);
    let refused =
        opening::open(&config, Opening::OrNew).await.err().expect("the directory is of it");
    says(&refused, ErrorKind::NotFound, &["use another --dir"]);
}

/// Makes a removed pool in memory, with its node's directory and its key.
async fn removed_in_memory(fault: Fault) -> (Arc<FaultyStore>, TempDir, KeySource) {
    let memory = FaultyStore::new(fault);
    let dir = tempfile::tempdir().unwrap();
    let source = KeySource::File(dir.path().join("key"));
    let keys = KeyRing::open_or_create(&memory.store(), &source).await.unwrap();
    for name in ["segments/1/1-a", "segments/1/2-b", "metadata/wal/1.sst", "metadata/manifest/1"] {
        memory.set(name, name.to_owned()).await;
    }
    let ownership = acquire(&memory.store(), dir.path(), &keys, Terms::default()).await.unwrap();
    ownership.remove(quantities::unix_seconds_now()).await.unwrap();
    (memory, dir, source)
}

async fn acquire(store: &Store, dir: &Path, keys: &KeyRing, terms: Terms) -> Result<Ownership> {
    let node = NodeDir::open(&dir.join("pool"))?;
    Ownership::acquire(store, &node, &keys.newest().key, keys.pool(), "main", terms).await
}

#[tokio::test]
async fn interrupted_purge_can_be_repeated_but_not_undone() {
    // Four objects of data, one key ring, and the manifests of opening, removal and purge.
    const OBJECT_COUNT: u64 = 8;
    for cut in 0..OBJECT_COUNT {
        let (memory, dir, source) = removed_in_memory(Fault::RefusesDelete(cut)).await;
        let store = memory.store();
        let keys = KeyRing::open(&store, &source).await.unwrap();
        let error = purge_store(&store, &source, kept(WEEK), true, None).await.unwrap_err();
        says(&error, ErrorKind::Unavailable, &["cut short", "spindle pool purge` again"]);
        let left = memory.names().await;
        assert!(left.iter().any(|name| name.starts_with("manifest/")), "cut at {cut}: {left:?}");
        let has_data = left.iter().any(|name| DATA_FOLDERS.iter().any(|dir| name.starts_with(dir)));
        let has_key = left.iter().any(|name| name.starts_with("keyring/"));
        assert!(has_key || !has_data, "cut at {cut}, the key went before the data: {left:?}");
        for restores in [false, true] {
            let terms = Terms { restores, ..Terms::default() };
            let refused = acquire(&store, dir.path(), &keys, terms).await.unwrap_err();
            says(&refused, ErrorKind::NotFound, &["its purge has begun"]);
        }
        // It was allowed once; there is nothing left to wait for.
        let again = purge_store(&store, &source, kept(WEEK), false, None).await.unwrap();
        assert_eq!(again.object_count, left.len() as u64, "cut at {cut}");
        assert_eq!(memory.names().await, Vec::<String>::new(), "cut at {cut}");
    }
    let (memory, _dir, source) = removed_in_memory(Fault::None).await;
    let purged = purge_store(&memory.store(), &source, kept(WEEK), true, None).await.unwrap();
    assert_eq!(purged.object_count, OBJECT_COUNT);
}

#[tokio::test]
async fn a_pool_is_purged_when_its_time_has_passed() {
    let (memory, _dir, source) = removed_in_memory(Fault::None).await;
    let before = memory.names().await;
    let early =
        purge_store(&memory.store(), &source, kept(Duration::from_secs(60)), false, None).await;
    says(&early.unwrap_err(), ErrorKind::Busy, &["is kept until"]);
    assert_eq!(memory.names().await, before);
    // A clock that has jumped would show that the time has passed.
    let now = quantities::unix_seconds_now();
    let jumped = Kept { wall_seconds: now + 3600, ..kept(Duration::from_secs(1800)) };
    let jumped = Kept { proven_seconds: Some(now), ..jumped };
    let early = purge_store(&memory.store(), &source, jumped, false, None).await;
    says(&early.unwrap_err(), ErrorKind::Busy, &["the clock has jumped", "nothing was deleted"]);
    assert_eq!(memory.names().await, before);
    purge_store(&memory.store(), &source, kept(Duration::ZERO), false, None).await.unwrap();
    assert_eq!(memory.names().await, Vec::<String>::new());
}

#[tokio::test]
async fn of_a_restore_and_a_purge_at_the_same_moment_one_wins() {
    let (memory, dir, source) = removed_in_memory(Fault::None).await;
    let store = memory.store();
    let keys = KeyRing::open(&store, &source).await.unwrap();
    let key = &keys.newest().key;
    // The purge read the manifest before the restore, and continues after it.
    let seen = manifest::read(&store, key).await.unwrap().unwrap();
    let terms = Terms { restores: true, ..Terms::default() };
    let ownership = acquire(&store, dir.path(), &keys, terms).await.unwrap();
    let before = memory.names().await;
    let late = manifest::begin_purge(&store, key, &seen).await.unwrap_err();
    says(&late, ErrorKind::Busy, &["it was restored", "nothing was deleted"]);
    assert_eq!(memory.names().await, before);
    ownership.check().await.unwrap();
    let newest = manifest::read(&store, key).await.unwrap().unwrap();
    assert_eq!((newest.removed_at, newest.is_purging), (None, false));
}
