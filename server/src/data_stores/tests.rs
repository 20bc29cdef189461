//! Pools over data stores in directories: how places become stores, what is refused, and what losses do.

mod doctor;
mod rebuild;
mod tiers;

use super::*;
use crate::serve::open_offline;
use block::{BlockDevice, WriteFlags};
use bytes::Bytes;
use config::Override;
use control::chain::Format;
use control::store::StoreOptions;
use engine::open_pool::OpenPool;
use engine::opening::Opening;
use engine::record::Durability;
use identity::Identity;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A pool below a directory, and the directories of its data stores.
struct Place {
    dir: tempfile::TempDir,
    scheme: &'static str,
    tiers: &'static str,
    stores: Vec<PathBuf>,
}

impl Place {
    /// Makes the directories of this many data stores.
    fn new(scheme: &'static str, store_count: usize) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let stores = (0..store_count).map(|number| dir.path().join(format!("nvme{number}")));
        let stores: Vec<PathBuf> = stores.collect();
        stores.iter().for_each(|store| std::fs::create_dir(store).unwrap());
        Place { dir, scheme, tiers: "data-stores", stores }
    }

    fn config(&self, pool: &str) -> Config {
        let (set, place) = (self.set(pool), self.dir.path());
        let text = |key, value: String| set(key, toml::Value::String(value));
        let path = |name: &str| place.join(pool).join(name).display().to_string();
        let stores = self.stores.iter().map(|store| store.display().to_string());
        let stores = stores.map(toml::Value::String).collect();
        let all = vec![
            text("dir", path("node")),
            text("store", path("store")),
            text("keys.file", path("key")),
            text("log.size", "16MiB".to_owned()),
            text("log.file_size", "1MiB".to_owned()),
            text("cache.size", "0".to_owned()),
            text("memory_cache.size", "0".to_owned()),
            text("destage.max_age", "1h".to_owned()),
            text("data.tiers", self.tiers.to_owned()),
            text("data.scheme", self.scheme.to_owned()),
            set("data.stores", toml::Value::Array(stores)),
        ];
        let configured = if self.scheme.is_empty() { all.len() - 2 } else { all.len() };
        Config::load(None, &all[..configured]).unwrap()
    }

    fn set(&self, pool: &str) -> impl Fn(&'static str, toml::Value) -> Override {
        std::fs::create_dir_all(self.dir.path().join(pool)).unwrap();
        |key, value| Override { key, flag: "--test", value }
    }

    async fn open(&self) -> Result<OpenPool> {
        open_offline(&self.config("one"), Opening::OrNew).await
    }

    async fn refused(&self) -> String {
        let error = self.open().await.err().expect("it must be refused");
        error.chain()
    }

    /// Takes a store away, as if its disk were not mounted: its directory is empty.
    fn unmount(&self, index: usize) {
        std::fs::rename(&self.stores[index], self.aside(index)).unwrap();
        std::fs::create_dir(&self.stores[index]).unwrap();
    }

    fn mount(&self, index: usize) {
        std::fs::remove_dir(&self.stores[index]).expect("nothing was written there");
        std::fs::rename(self.aside(index), &self.stores[index]).unwrap();
    }

    fn aside(&self, index: usize) -> PathBuf {
        self.stores[index].with_extension("not-mounted")
    }
}

const BLOCK: usize = 64 << 10;
const BLOCK_COUNT: u64 = 40;

/// Contents that do not compress.
fn contents(number: u64) -> Bytes {
    let mut rng = tiering::testing::Rng::new(number);
    rng.bytes(BLOCK, 100).into()
}

async fn write(open: &OpenPool, from: u64) {
    write_blocks(open, from, 0..BLOCK_COUNT).await;
}

/// Writes some of the blocks, which are destaged as one segment.
async fn write_blocks(open: &OpenPool, from: u64, blocks: std::ops::Range<u64>) {
    let volume = match open.pool.volume("db") {
        Some(volume) => volume,
        None => {
            let size = BLOCK_COUNT * BLOCK as u64;
            open.pool.create_volume("db", size, Durability::Flush).await.unwrap();
            open.pool.volume("db").unwrap()
        }
    };
    for number in blocks {
        let data = contents(from + number);
        volume.write(number * BLOCK as u64, data, WriteFlags { fua: false }).await.unwrap();
    }
    volume.flush().await.unwrap();
    open.pool.destage_all().await.unwrap();
}

async fn read(open: &OpenPool, from: u64) -> Result<()> {
    let volume = open.pool.volume("db").unwrap();
    for number in 0..BLOCK_COUNT {
        let mut read = vec![0; BLOCK];
        volume.read(number * BLOCK as u64, &mut read).await?;
        assert!(read == contents(from + number), "block {number}");
    }
    Ok(())
}

fn file_count(dir: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        count += if path.is_dir() { file_count(&path) } else { 1 };
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_over_directories_survives_the_loss_of_any_and_one_more_heals() {
    let mut place = Place::new("2+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let status = open.data_stores.as_ref().unwrap().status();
    assert_eq!((status.scheme.as_str(), status.stores.len()), ("2+1", 3));
    assert!(status.written_bytes > 0, "{status:?}");
    open.close().await.unwrap();
    let segments = place.dir.path().join("one/store/segments");
    assert!(!segments.exists() || file_count(&segments) == 0, "segments are in fragments");
    let mut degraded_count = 0;
    for lost in 0..3 {
        place.unmount(lost);
        let open = place.open().await.unwrap();
        read(&open, 100).await.unwrap();
        let stores = open.data_stores.as_ref().unwrap();
        stores.look().await;
        let url = place.stores[lost].display().to_string();
        assert!(open.conditions.is_raised(ConditionKind::DataStoreAway, &url));
        degraded_count += stores.status().degraded_read_count;
        open.close().await.unwrap();
        place.mount(lost);
    }
    assert!(degraded_count > 0, "one of them had what was read");
    let open = Arc::new(place.open().await.unwrap());
    place.unmount(0);
    place.unmount(2);
    // One too many: the read waits for a store, and ends when one is back.
    let waiting = open.clone();
    let reading = tokio::spawn(async move { read(&waiting, 100).await });
    let failures = || {
        let stores = open.data_stores.as_ref().unwrap().status().stores;
        stores.iter().filter(|store| store.failure.is_some()).count()
    };
    while failures() < 2 {
        assert!(!reading.is_finished());
        tokio::task::yield_now().await;
    }
    place.mount(0);
    reading.await.unwrap().unwrap();
    let open = Arc::into_inner(open).unwrap();
    // Writes go on without the third store, and nothing is written to its mount point.
    write(&open, 300).await;
    assert!(open.data_stores.as_ref().unwrap().status().missing_write_count > 0);
    read(&open, 300).await.unwrap();
    open.close().await.unwrap();
    place.mount(2);
    // Without data stores in the configuration the pool keeps those that it has.
    place.scheme = "";
    let found = engine::fsck::fsck(&pool_config(&place.config("one"))).await.unwrap();
    assert!(found.report.is_clean(), "{:?}", found.report);
    let open = place.open().await.unwrap();
    read(&open, 300).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_that_cannot_be_stores_are_refused_and_left_as_they_are() {
    let mut place = Place::new("1+1", 2);
    place.open().await.unwrap().close().await.unwrap();
    // The stores of another pool.
    let error = open_offline(&place.config("two"), Opening::OrNew).await.err().unwrap().chain();
    assert!(error.contains("belongs to pool"), "{error}");
    let good = place.stores.clone();
    // A directory under two names.
    let link = place.dir.path().join("link");
    std::os::unix::fs::symlink(&good[0], &link).unwrap();
    place.stores = vec![good[0].clone(), link, good[1].clone()];
    assert!(place.refused().await.contains("are the same place"));
    // A pool's own store, and fragments without an identity.
    place.stores = vec![good[0].clone(), good[1].clone(), place.dir.path().join("one/store")];
    assert!(place.refused().await.contains("holds a pool"));
    let stray = place.dir.path().join("stray");
    std::fs::create_dir_all(stray.join("fragments/0000000000000001")).unwrap();
    std::fs::write(stray.join("fragments/0000000000000001/x"), "x").unwrap();
    place.stores = vec![good[0].clone(), good[1].clone(), stray.clone()];
    assert!(place.refused().await.contains("is missing there"));
    assert_eq!(file_count(&stray), 1);
    // An identity of a later version, and one that is damaged.
    std::fs::remove_dir_all(stray.join("fragments")).unwrap();
    for (text, word) in [("{\"version\":2}", "update it"), ("{\"ver", "damaged")] {
        std::fs::write(stray.join(identity::PATH), text).unwrap();
        assert!(place.refused().await.contains(word));
    }
    // A missing directory does not keep a pool from opening that has its other stores.
    let missing = place.dir.path().join("missing");
    place.stores = vec![good[0].clone(), good[1].clone(), missing.clone()];
    let open = place.open().await.unwrap();
    let subject = missing.display().to_string();
    assert!(open.conditions.is_raised(ConditionKind::DataStoreAway, &subject));
    open.close().await.unwrap();
    assert!(!missing.exists());
    // A new pool does not begin without one.
    let mut new = Place::new("1+1", 2);
    std::fs::remove_dir(&new.stores[1]).unwrap();
    assert!(new.refused().await.contains("is not there"));
    new.stores.truncate(2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_is_found_by_its_identity_and_one_that_is_not_configured_is_leaving() {
    let mut place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    open.close().await.unwrap();
    // Two disks have changed their mount points.
    let aside = place.aside(0);
    std::fs::rename(&place.stores[0], &aside).unwrap();
    std::fs::rename(&place.stores[1], &place.stores[0]).unwrap();
    std::fs::rename(&aside, &place.stores[1]).unwrap();
    let open = place.open().await.unwrap();
    read(&open, 100).await.unwrap();
    let status = open.data_stores.as_ref().unwrap().status();
    // A busy machine may be late.
    assert_eq!(status.degraded_read_count, status.hedged_read_count, "{status:?}");
    open.close().await.unwrap();
    // One dies, and the others move up: nothing is taken for the one that died.
    let dead = place.aside(0);
    std::fs::rename(&place.stores[0], &dead).unwrap();
    std::fs::rename(&place.stores[1], &place.stores[0]).unwrap();
    std::fs::rename(&place.stores[2], &place.stores[1]).unwrap();
    std::fs::create_dir(&place.stores[2]).unwrap();
    let open = place.open().await.unwrap();
    read(&open, 100).await.unwrap();
    open.close().await.unwrap();
    assert_eq!(file_count(&place.stores[2]), 0, "it is not made a store by itself");
    std::fs::remove_dir(&place.stores[2]).unwrap();
    std::fs::rename(&place.stores[1], &place.stores[2]).unwrap();
    std::fs::rename(&place.stores[0], &place.stores[1]).unwrap();
    std::fs::rename(&dead, &place.stores[0]).unwrap();
    place.open().await.unwrap().close().await.unwrap();
    let left = place.stores.pop().unwrap();
    let open = place.open().await.unwrap();
    read(&open, 100).await.unwrap();
    let before = file_count(&left);
    write(&open, 200).await;
    assert_eq!(file_count(&left), before, "a store that leaves gets nothing new");
    read(&open, 200).await.unwrap();
    let status = open.data_stores.as_ref().unwrap().status();
    let leaving: Vec<_> = status.stores.iter().filter(|store| store.is_leaving).collect();
    assert_eq!(leaving.len(), 1);
    assert_eq!(leaving[0].url, left.display().to_string());
    open.close().await.unwrap();
    // A scheme that is changed affects new segments.
    place.stores.push(left);
    place.scheme = "2+1";
    let open = place.open().await.unwrap();
    read(&open, 200).await.unwrap();
    write(&open, 400).await;
    read(&open, 400).await.unwrap();
    assert_eq!(open.data_stores.as_ref().unwrap().status().scheme, "2+1");
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheme_may_change_while_segments_are_rebuilt_in_their_own() {
    let mut place = Place::new("2+1", 5);
    let open = place.open().await.unwrap();
    for part in 0..8 {
        write_blocks(&open, 100, part * 5..part * 5 + 5).await;
    }
    // One segment in ten has nothing on these two.
    let drained = place.stores[..2].to_vec();
    stores_of(&open).drain(&[url(&drained[0]), url(&drained[1])]).await.unwrap();
    let (_, lacking) = open.pool.tier().redundancy().await.unwrap();
    assert!(lacking.len() > 1, "{lacking:?}");
    let depth = tiering::segment_store::Depth::Presence;
    open.pool.tier().rebuild(lacking[0], depth).await.unwrap();
    open.close().await.unwrap();
    place.scheme = "1+1";
    let open = place.open().await.unwrap();
    assert_eq!(stores_of(&open).status().scheme, "1+1");
    read(&open, 100).await.unwrap();
    let (_, left) = open.pool.tier().redundancy().await.unwrap();
    assert_eq!(left.len(), lacking.len() - 1);
    write_blocks(&open, 100, 0..5).await;
    let named = rebuild(&open).await;
    for store in &drained {
        assert!(!named.contains(&state(&open, store).number), "{named:?}");
    }
    let (found, _) = open.pool.tier().redundancy().await.unwrap();
    assert!(found.bytes.keys().all(|spare| *spare == Some(1)), "{found:?}");
    read(&open, 100).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn domains_that_have_become_too_few_are_a_condition() {
    let mut place = Place::new("2+1", 3);
    place.open().await.unwrap().close().await.unwrap();
    // The list of an owner that had one store more, and whose configuration is gone.
    let config = pool_config(&place.config("one"));
    let store = Store::open(&config.store_url, &StoreOptions::default()).unwrap();
    let keys = control::keys::KeyRing::open(&store, &config.keys).await.unwrap();
    let (key, pool) = (&keys.newest().key, keys.pool());
    let (number, list) = list::read(&store, key, pool).await.unwrap();
    let mut list = list.expect("it was made");
    list.stores[0].is_leaving = true;
    list::write(&store, key, pool, number + 1, &list).await.unwrap();
    place.scheme = "";
    place.stores.clear();
    let open = place.open().await.unwrap();
    assert!(open.conditions.is_raised(ConditionKind::DataStoresFew, POOL));
    write(&open, 100).await;
    read(&open, 100).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purge_takes_the_fragments_along_and_leaves_what_is_not_the_pools() {
    let place = Place::new("1+1", 2);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    open.close().await.unwrap();
    let notes = place.stores[0].join("notes");
    std::fs::write(&notes, "kept").unwrap();
    place.unmount(1);
    let config = pool_config(&place.config("one"));
    engine::removal::remove(&config, |_| Ok(())).await.unwrap();
    let purged = engine::removal::purge(&config, true).await.unwrap();
    assert!(purged.object_count > 1, "{purged:?}");
    assert_eq!(file_count(&place.stores[0]), 1, "only the notes are left");
    // The fragments of the other one are left: their keys are gone.
    assert_eq!(file_count(&place.stores[1]), 0);
    assert!(file_count(&place.aside(1)) > 1);
}

fn url(path: &Path) -> String {
    path.display().to_string()
}

fn stores_of(open: &OpenPool) -> Arc<dyn OpenDataStores> {
    open.data_stores.clone().expect("it has data stores")
}

/// The state of a store, by its directory.
fn state(open: &OpenPool, dir: &Path) -> DataStoreStatus {
    let stores = stores_of(open).status().stores;
    stores.into_iter().find(|store| store.url == url(dir)).expect("it is in the list")
}

/// Walks and rebuilds until nothing is lacking. Returns the numbers of the stores that segments name.
async fn rebuild(open: &OpenPool) -> BTreeSet<u32> {
    loop {
        let (found, lacking) = open.pool.tier().redundancy().await.unwrap();
        if lacking.is_empty() {
            return found.stores.into_keys().collect();
        }
        for number in lacking {
            open.pool
                .tier()
                .rebuild(number, tiering::segment_store::Depth::Presence)
                .await
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drained_store_gets_nothing_and_is_emptied_while_the_pool_runs() {
    let mut place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let drained = place.stores[0].clone();
    let names = [url(&drained)];
    let refused = stores_of(&open).drain(&["/nowhere".to_owned()]).await.unwrap_err();
    assert!(refused.chain().contains("data list"), "{}", refused.chain());
    stores_of(&open).drain(&names).await.unwrap();
    stores_of(&open).drain(&names).await.expect("it is draining already");
    let both = [url(&place.stores[0]), url(&place.stores[1])];
    let refused = stores_of(&open).drain(&both).await.unwrap_err().chain();
    assert!(refused.contains("1 failure domains") && refused.contains("needs 2"), "{refused}");
    assert!(!state(&open, &place.stores[1]).is_draining, "nothing was changed");
    let before = file_count(&drained);
    write(&open, 200).await;
    assert_eq!(file_count(&drained), before, "it gets nothing new");
    let number = state(&open, &drained).number;
    assert!(!rebuild(&open).await.contains(&number), "nothing names it");
    read(&open, 200).await.unwrap();
    open.close().await.unwrap();
    // The flag outlives the owner.
    let open = place.open().await.unwrap();
    let found = state(&open, &drained);
    assert!(found.is_draining && !found.is_leaving, "{found:?}");
    read(&open, 200).await.unwrap();
    stores_of(&open).undrain(&names).await.unwrap();
    stores_of(&open).undrain(&names).await.expect("it is not draining");
    let before = file_count(&drained);
    // Each segment is on two of the three stores.
    let mut last = 200;
    while file_count(&drained) <= before {
        last += 100;
        assert!(last < 5000, "it gets fragments again");
        write(&open, last).await;
    }
    // It is taken out of the configuration, and forgotten once it is empty.
    stores_of(&open).drain(&names).await.unwrap();
    open.close().await.unwrap();
    place.stores.remove(0);
    let open = place.open().await.unwrap();
    assert!(state(&open, &drained).is_leaving);
    let refused = stores_of(&open).undrain(&names).await.unwrap_err().chain();
    assert!(refused.contains("no longer configured"), "{refused}");
    let named = rebuild(&open).await;
    stores_of(&open).forget_unnamed(&named).await.unwrap();
    assert_eq!(stores_of(&open).status().stores.len(), 2);
    read(&open, last).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_store_is_replaced_and_the_list_has_the_new_one_until_it_is_configured() {
    let mut place = Place::new("1+1", 2);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let (dead, new) = (place.stores[1].clone(), place.dir.path().join("new"));
    place.unmount(1);
    stores_of(&open).look().await;
    let by = |dir: &Path| NewDataStore { url: url(dir), ..NewDataStore::default() };
    let replace = async |new: &NewDataStore| {
        let replaced = stores_of(&open).replace(&url(&dead), new).await;
        replaced.map_err(|error| error.chain())
    };
    // What cannot be a store is refused, and changes nothing.
    assert!(replace(&by(&new)).await.unwrap_err().contains("not there"), "a missing directory");
    assert!(replace(&by(&place.stores[0])).await.unwrap_err().contains("already"));
    assert!(replace(&by(&dead)).await.unwrap_err().contains("name another directory"));
    let pool = place.dir.path().join("one/store");
    assert!(replace(&by(&pool)).await.unwrap_err().contains("holds a pool"));
    std::fs::create_dir(&new).unwrap();
    let same = NewDataStore { domain: Some(url(&place.stores[0])), ..by(&new) };
    assert!(replace(&same).await.unwrap_err().contains("1 failure domains"));
    assert_eq!(file_count(&new), 0, "nothing was written there");
    assert!(!state(&open, &dead).is_draining);
    // The failure domain of the dead one is free.
    let same = NewDataStore { domain: Some(url(&dead)), weight: Some(3), ..by(&new) };
    replace(&same).await.unwrap();
    replace(&same).await.expect("the answer may have been lost");
    let found = state(&open, &new);
    assert!(found.is_added && !found.is_leaving && found.weight == 3, "{found:?}");
    assert!(state(&open, &dead).is_draining);
    let (dead_number, new_number) = (state(&open, &dead).number, found.number);
    let named = rebuild(&open).await;
    assert!(named.contains(&new_number) && !named.contains(&dead_number), "{named:?}");
    read(&open, 100).await.unwrap();
    write(&open, 200).await;
    assert!(file_count(&new) > 1, "it gets fragments");
    open.close().await.unwrap();
    // An owner whose configuration does not know it yet keeps it.
    let open = place.open().await.unwrap();
    assert!(state(&open, &new).is_added && !state(&open, &new).is_leaving);
    read(&open, 200).await.unwrap();
    open.close().await.unwrap();
    // The configuration names it in place of the dead one.
    place.stores[1] = new.clone();
    let open = place.open().await.unwrap();
    assert!(state(&open, &dead).is_leaving && !state(&open, &new).is_leaving);
    let named = rebuild(&open).await;
    stores_of(&open).forget_unnamed(&named).await.unwrap();
    assert_eq!(stores_of(&open).status().stores.len(), 2, "the dead one is forgotten");
    read(&open, 200).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_is_replaced_gives_its_failure_domain_to_the_new_one() {
    let place = Place::new("1+1", 2);
    let open = place.open().await.unwrap();
    let [second, third, fourth] =
        ["second", "third", "fourth"].map(|name| place.dir.path().join(name));
    [&second, &third, &fourth].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let by = |dir: &Path| NewDataStore { url: url(dir), ..NewDataStore::default() };
    let in_rack = NewDataStore { domain: Some("rack a".to_owned()), ..by(&second) };
    stores_of(&open).replace(&url(&place.stores[0]), &in_rack).await.unwrap();
    stores_of(&open).replace(&url(&second), &by(&third)).await.unwrap();
    assert_eq!(state(&open, &third).domain, "rack a");
    // Unless another one is named, or the old one was a domain of its own.
    let elsewhere = NewDataStore { domain: Some("rack b".to_owned()), ..by(&fourth) };
    stores_of(&open).replace(&url(&third), &elsewhere).await.unwrap();
    assert_eq!(state(&open, &fourth).domain, "rack b");
    let fifth = place.dir.path().join("fifth");
    std::fs::create_dir(&fifth).unwrap();
    stores_of(&open).replace(&url(&place.stores[1]), &by(&fifth)).await.unwrap();
    assert_eq!(state(&open, &fifth).domain, url(&fifth));
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_fail_do_not_count_among_those_that_are_left() {
    let place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    let drained = [url(&place.stores[0])];
    place.unmount(2);
    stores_of(&open).look().await;
    let refused = stores_of(&open).drain(&drained).await.unwrap_err().chain();
    assert!(refused.contains("1 failure domains that work now"), "{refused}");
    assert!(!state(&open, &place.stores[0]).is_draining, "nothing was changed");
    // The one that fails may be drained itself.
    stores_of(&open).drain(&[url(&place.stores[2])]).await.unwrap();
    stores_of(&open).undrain(&[url(&place.stores[2])]).await.unwrap();
    place.mount(2);
    stores_of(&open).look().await;
    stores_of(&open).drain(&drained).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_after_a_failed_one_is_written_even_if_it_changes_nothing() {
    let place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    let (names, folder) = ([url(&place.stores[0])], place.dir.path().join("one/store/data-stores"));
    let config = pool_config(&place.config("one"));
    let store = Store::open(&config.store_url, &StoreOptions::default()).unwrap();
    let keys = control::keys::KeyRing::open(&store, &config.keys).await.unwrap();
    let newest = async || list::read(&store, &keys.newest().key, keys.pool()).await.unwrap();
    stores_of(&open).drain(&names).await.unwrap();
    let (number, _) = newest().await;
    stores_of(&open).drain(&names).await.expect("it is draining already");
    assert_eq!(newest().await.0, number, "nothing has changed");
    // An attempt ends without an answer, and the store has the new list.
    let aside = folder.with_extension("aside");
    std::fs::rename(&folder, &aside).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    stores_of(&open).undrain(&names).await.unwrap_err();
    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(&aside, &folder).unwrap();
    let mut undrained = newest().await.1.unwrap();
    undrained.stores.iter_mut().for_each(|entry| entry.is_draining = false);
    let (key, pool) = (&keys.newest().key, keys.pool());
    list::write(&store, key, pool, number + 1, &undrained).await.unwrap();
    assert!(state(&open, &place.stores[0]).is_draining, "as far as the owner knows");
    stores_of(&open).drain(&names).await.unwrap();
    let (last, found) = newest().await;
    assert!(last > number + 1 && found.unwrap().stores.iter().any(|entry| entry.is_draining));
    stores_of(&open).drain(&names).await.unwrap();
    assert_eq!(newest().await.0, last);
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_whose_list_of_data_stores_is_gone_is_neither_opened_nor_called_safe() {
    let mut place = Place::new("1+1", 2);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    open.close().await.unwrap();
    std::fs::remove_dir_all(place.dir.path().join("one/store/data-stores")).unwrap();
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        assert!(error.chain().contains("data-stores/"), "{}", error.chain());
    };
    for is_configured in [true, false] {
        if !is_configured {
            place.scheme = "";
            place.stores.clear();
        }
        let config = pool_config(&place.config("one"));
        refused(engine::closed_pool::look(&config).await.err().expect("it is refused"));
        refused(engine::fsck::fsck(&config).await.expect_err("it is refused"));
    }
    refused(place.open().await.err().expect("it is refused"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn added_store_that_is_not_configured_leaves_once_it_is_drained() {
    let place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let (old, new) = (place.stores[0].clone(), place.dir.path().join("new"));
    std::fs::create_dir(&new).unwrap();
    let store = NewDataStore { url: url(&new), ..NewDataStore::default() };
    stores_of(&open).replace(&url(&old), &store).await.unwrap();
    stores_of(&open).undrain(&[url(&old)]).await.unwrap();
    stores_of(&open).drain(&[url(&new)]).await.unwrap();
    assert!(!state(&open, &new).is_leaving, "segments that are being written may have it");
    open.close().await.unwrap();
    let open = place.open().await.unwrap();
    assert!(state(&open, &new).is_leaving);
    stores_of(&open).undrain(&[url(&new)]).await.unwrap();
    assert!(!state(&open, &new).is_leaving);
    stores_of(&open).drain(&[url(&new)]).await.unwrap();
    open.close().await.unwrap();
    let open = place.open().await.unwrap();
    let named = rebuild(&open).await;
    stores_of(&open).forget_unnamed(&named).await.unwrap();
    assert_eq!(stores_of(&open).status().stores.len(), 3);
    read(&open, 100).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_store_gets_its_share_by_a_rebalance_that_outlives_its_owner() {
    let mut place = Place::new("1+1", 3);
    let fourth = place.stores.pop().unwrap();
    let open = place.open().await.unwrap();
    for from in [100, 200, 300] {
        write(&open, from).await;
    }
    open.close().await.unwrap();
    place.stores.push(fourth.clone());
    let open = place.open().await.unwrap();
    assert!(!stores_of(&open).status().is_rebalancing);
    stores_of(&open).set_rebalancing(true).await.unwrap();
    open.close().await.unwrap();
    let open = place.open().await.unwrap();
    assert!(stores_of(&open).status().is_rebalancing);
    let (found, misplaced) = open.pool.tier().imbalance().await.unwrap();
    assert!(found.segment_count > 0 && found.waiting_count == 0, "{found:?}");
    assert_eq!(found.fragment_count, misplaced.len() as u64, "one of each goes to the new store");
    let mut moved_count = 0;
    for number in misplaced {
        // The segments of earlier writes are reclaimed meanwhile.
        let Some(report) = open.pool.tier().rebalance(number).await.unwrap() else { continue };
        assert_eq!((report.fragment_count, report.is_lacking), (1, false));
        moved_count += 1;
        read(&open, 300).await.unwrap();
    }
    let (left, misplaced) = open.pool.tier().imbalance().await.unwrap();
    assert_eq!((left.fragment_count, misplaced.len()), (0, 0));
    let (counted, lacking) = open.pool.tier().redundancy().await.unwrap();
    assert!(lacking.is_empty());
    let contents = counted.stores.get(&state(&open, &fourth).number).copied().unwrap_or_default();
    assert!(contents.fragment_count <= moved_count, "{contents:?}");
    stores_of(&open).set_rebalancing(false).await.unwrap();
    assert!(!stores_of(&open).status().is_rebalancing);
    open.close().await.unwrap();
}

#[test]
fn documents_have_golden_bytes() {
    let entry = StoreEntry {
        number: 0x1234_5678,
        id: "8f1d7e6c-0000-4000-8000-000000000001".to_owned(),
        url: "/mnt/nvme0/spindle".to_owned(),
        env_prefix: None,
        domain: "drive 0".to_owned(),
        weight: 2,
        is_leaving: false,
        is_draining: false,
        is_added: false,
        is_domain_given: false,
    };
    let pool = Uuid::from_bytes([7; 16]);
    let identity = Identity::of(pool, pool, &entry).encode().unwrap();
    let text = "{\"version\":1,\"pool\":\"07070707-0707-0707-0707-070707070707\",\
                \"lineage\":\"07070707-0707-0707-0707-070707070707\",\"number\":305419896,\"id\":\"8f1d7e6c-0000-4000-8000-000000000001\"}\n";
    assert_eq!(identity, text);
    let leaving = StoreEntry {
        env_prefix: Some("DR_".to_owned()),
        is_leaving: true,
        url: "s3://far/pool".to_owned(),
        ..entry.clone()
    };
    let by_command =
        StoreEntry { is_draining: true, is_added: true, is_domain_given: true, ..entry.clone() };
    let stores = vec![entry, leaving];
    let list = List { scheme: "4+2".to_owned(), stores, is_rebalancing: false };
    let text = "{\"scheme\":\"4+2\",\"stores\":[{\"number\":305419896,\"id\":\"8f1d7e6c-0000-4000-8000-000000000001\",\
                \"url\":\"/mnt/nvme0/spindle\",\"domain\":\"drive 0\",\"weight\":2},{\"number\":305419896,\
                \"id\":\"8f1d7e6c-0000-4000-8000-000000000001\",\"url\":\"s3://far/pool\",\"env_prefix\":\"DR_\",\
                \"domain\":\"drive 0\",\"weight\":2,\"is_leaving\":true}]}";
    assert_eq!(serde_json::to_string(&list).unwrap(), text);
    // A document without what commands set is that of before them.
    assert_eq!(serde_json::from_str::<List>(text).unwrap(), list);
    assert_eq!(list.format(), Format::CURRENT);
    let changed = List { stores: vec![by_command], is_rebalancing: true, scheme: "4+2".to_owned() };
    let text = "{\"scheme\":\"4+2\",\"stores\":[{\"number\":305419896,\"id\":\"8f1d7e6c-0000-4000-8000-000000000001\",\
                \"url\":\"/mnt/nvme0/spindle\",\"domain\":\"drive 0\",\"weight\":2,\"is_draining\":true,\"is_added\":true,\
                \"is_domain_given\":true}],\
                \"is_rebalancing\":true}";
    assert_eq!(serde_json::to_string(&changed).unwrap(), text);
    assert_eq!(serde_json::from_str::<List>(text).unwrap(), changed);
    let format = serde_json::to_string(&changed.format()).unwrap();
    assert_eq!(
        format,
        "{\"version\":1,\"compatible\":0,\"read_only_compatible\":0,\"incompatible\":1}"
    );
    let later = List { scheme: "40+4".to_owned(), ..list };
    assert!(later.scheme().unwrap_err().to_string().contains("update it"));
}
