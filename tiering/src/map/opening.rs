//! Opening the map: for its owner, for a reader, or over another handle of the same database.
//!
//! Invariants:
//! - An owner commits its epoch before anything else. A map in which a higher epoch has committed
//!   is not opened for writing.
//! - A new handle replaces the previous one only if it shows the same database, and for an owner
//!   only if its state is not older than the one known to be durable. Otherwise nothing changes.
//! - Nothing read from the previous state is cached beside the new one.

use super::clock_cache::ClockCache;
use super::database::Database;
use super::dedup::decode_found;
use super::keys::{
    self, HEADER_KEY, Header, Opener, ROOT_KEY, family, number_of, range_of, snapshot_of, volume_of,
};
use super::ranges::{Range, RangeList};
use super::records::{self, NamedSpillFile, Root};
use super::snapshots::{Prune, SnapshotList, decode_snapshot};
use super::space::SpaceCounter;
use super::{Health, LayerId, LayerList, LayerRecord, Map, MapOptions, State, Writer, after, get};
use crate::dedup::Found;
use crate::seeded_bugs::SeededBugs;
use block::seal::{Algorithm, PoolKey};
use block::{Epoch, Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use slatedb::WriteBatch;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::watch;

impl Map {
    /// Opens the map in `db`, creating it if the database is empty, and commits that `epoch` owns
    /// it.
    ///
    /// # Errors
    /// `Fenced` if a higher epoch has committed; `Corrupt`, also for the key of another pool;
    /// `Unsupported` for the metadata of a later version.
    pub async fn open(
        db: Arc<Database>,
        pool_key: &PoolKey,
        algorithm: Algorithm,
        epoch: Epoch,
        options: MapOptions,
    ) -> Result<(Map, Writer)> {
        let mut batch = WriteBatch::new();
        let (header, root) = match Self::find_root(&db, pool_key).await? {
            Some((header, root)) => (header, root),
            None => {
                let header = Header::new(algorithm);
                batch.put(HEADER_KEY, header.bytes());
                let destaged = Lsn::NONE;
                (header, Root { epoch, destaged, commit_number: 0, next_segment: 1 })
            }
        };
        check_epoch(&root, epoch)?;
        header.check_writable()?;
        let mut wanted = header;
        if options.in_fragments {
            wanted = wanted.with_fragments();
        }
        if options.in_tiers {
            wanted = wanted.with_tiers();
        }
        if wanted != header {
            batch.put(HEADER_KEY, wanted.bytes());
        }
        let header = wanted;
        let opener = Opener::new(header, pool_key);
        let loaded = Loaded::load(&db, &opener).await?;
        let root = commit_root(&db, &opener, Root { epoch, ..root }, batch).await?;
        Ok((Map::new(db, opener, &root, options, loaded), Writer::new(root)))
    }

    /// Replaces the database by another handle of the same database, which has fenced the previous
    /// one. Changes that the previous handle held but had not made durable are forgotten. `writer`
    /// accepts commits again. Reads see either the old or the new state, never a mixture.
    ///
    /// # Errors
    /// `Fenced` if a higher epoch has committed; `Corrupt` if it is another database, or an older
    /// state of it; database errors. Nothing has changed then.
    pub async fn reopen(
        &self,
        writer: &mut Writer,
        db: Arc<Database>,
        pool_key: &PoolKey,
    ) -> Result<()> {
        let found = Self::find_root(&db, pool_key).await?;
        let Some((header, root)) = found.filter(|(header, _)| self.opener.is_for(header)) else {
            return Err(keys::corrupt(HEADER_KEY, "another database is in its place"));
        };
        let (epoch, known) = (writer.root().epoch, writer.root().commit_number);
        check_epoch(&root, epoch)?;
        if root.commit_number < known {
            let what = format!("commit {known} was durable, it is back at {}", root.commit_number);
            return Err(keys::corrupt(ROOT_KEY, what));
        }
        let loaded = Loaded::load(&db, &self.opener).await?;
        // A commit with an unknown outcome may have changed its features.
        self.opener.set_header(header);
        let root =
            commit_root(&db, &self.opener, Root { epoch, ..root }, WriteBatch::new()).await?;
        if !self.replace(db, loaded, &root) {
            return Err(Error::new(ErrorKind::Unavailable, "open metadata: the pool is closing"));
        }
        *writer = Writer::new(root);
        Ok(())
    }

    /// Opens the map as it is, without writing anything. The writer refuses every change.
    ///
    /// # Errors
    /// `NotFound` if there is no map; those of [`Map::open`].
    pub async fn read_only(
        db: Arc<Database>,
        pool_key: &PoolKey,
        options: MapOptions,
    ) -> Result<(Map, Writer)> {
        let Some((header, root)) = Self::find_root(&db, pool_key).await? else {
            return Err(Error::new(ErrorKind::NotFound, "open metadata: there is none"));
        };
        let opener = Opener::new(header, pool_key);
        let loaded = Loaded::load(&db, &opener).await?;
        Ok((Map::new(db, opener, &root, options, loaded), Writer::new(root)))
    }

    /// Moves a reader to the newest state of the database.
    ///
    /// # Errors
    /// Like [`Map::read_only`]; nothing has changed then.
    pub async fn refresh(&self, db: Arc<Database>, pool_key: &PoolKey) -> Result<()> {
        let found = Self::find_root(&db, pool_key).await?;
        let Some((header, root)) = found.filter(|(header, _)| self.opener.is_for(header)) else {
            return Err(keys::corrupt(HEADER_KEY, "another database is in its place"));
        };
        let loaded = Loaded::load(&db, &self.opener).await?;
        self.opener.set_header(header);
        if !self.replace(db, loaded, &root) {
            return Err(Error::new(ErrorKind::Unavailable, "open metadata: it was closed"));
        }
        Ok(())
    }

    /// Replaces the current state. Returns `false`, without replacing it, if the map's health is
    /// final.
    fn replace(&self, db: Arc<Database>, loaded: Loaded, root: &Root) -> bool {
        let Loaded { ranges, layers, volume_records, stalled_volumes, snapshots, prunes, found } =
            loaded;
        let has_later = layers.has_later();
        let is_replaced = self.state.send_if_modified(|state| {
            let is_open = !matches!(state.health, Health::Final(_));
            if is_open {
                self.has_later_layers.store(has_later, Ordering::Release);
                *state = State { db, ranges, layers, health: Health::Well };
            }
            is_open
        });
        if is_replaced {
            // Before the caches are emptied: this stops pages read from the previous state from
            // being cached.
            self.generation.fetch_add(1, Ordering::SeqCst);
            self.pages.retain(|_| false);
            self.segments.retain(|_| false);
            self.live.retain(|_| false);
            self.generation.fetch_add(1, Ordering::SeqCst);
            *self.volume_records.write() = volume_records;
            *self.stalled_volumes.write() = stalled_volumes;
            *self.snapshots.write() = snapshots;
            *self.prunes.lock() = prunes;
            *self.found.write() = found;
            self.destaged.store(root.destaged.0, Ordering::Release);
            self.commit_number.store(root.commit_number, Ordering::Release);
        }
        is_replaced
    }

    /// Checks that `epoch` may open the map for writing.
    ///
    /// # Errors
    /// Like [`Map::open`].
    pub async fn check_owner(db: &Database, pool_key: &PoolKey, epoch: Epoch) -> Result<()> {
        match Self::find_root(db, pool_key).await? {
            Some((header, root)) => {
                check_epoch(&root, epoch).and_then(|()| header.check_writable())
            }
            None => Ok(()),
        }
    }

    /// Reads the header and the root record; `None` for a new database.
    async fn find_root(db: &Database, pool_key: &PoolKey) -> Result<Option<(Header, Root)>> {
        let header = get(db, HEADER_KEY).await?;
        match (header, get(db, ROOT_KEY).await?) {
            (Some(bytes), Some(root)) => {
                let header = Header::decode(&bytes)?;
                let opened = Opener::new(header, pool_key).open_one(ROOT_KEY, &root);
                // The owner may have committed its first snapshot between the two reads.
                if opened.is_err() && get(db, HEADER_KEY).await?.is_some_and(|now| now != bytes) {
                    return Box::pin(Self::find_root(db, pool_key)).await;
                }
                Ok(Some((header, Root::decode(&opened?)?)))
            }
            (None, None) => Ok(None),
            _ => Err(keys::corrupt(ROOT_KEY, "header and root do not belong together")),
        }
    }

    fn new(
        db: Arc<Database>,
        opener: Opener,
        root: &Root,
        options: MapOptions,
        loaded: Loaded,
    ) -> Map {
        Map {
            has_later_layers: AtomicBool::new(loaded.layers.has_later()),
            state: watch::Sender::new(State {
                db,
                ranges: loaded.ranges,
                layers: loaded.layers,
                health: Health::Well,
            }),
            opener,
            unread_records: AtomicU64::new(0),
            pages: ClockCache::new(options.page_cache_bytes),
            page_retain_bytes: options.page_cache_bytes / 4,
            segments: ClockCache::new(options.segment_cache_bytes * 3 / 4),
            live: ClockCache::new(options.segment_cache_bytes / 4),
            space: SpaceCounter::default(),
            volume_records: RwLock::new(loaded.volume_records),
            stalled_volumes: RwLock::new(loaded.stalled_volumes),
            snapshots: RwLock::new(loaded.snapshots),
            prunes: Mutex::new(loaded.prunes),
            found: RwLock::new(loaded.found),
            has_old_pages: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            repoints: AtomicU64::new(0),
            seeded_bugs: SeededBugs::default(),
            destaged: AtomicU64::new(root.destaged.0),
            commit_number: AtomicU64::new(root.commit_number),
        }
    }
}

/// Records, other than pages, that are kept in memory.
struct Loaded {
    ranges: RangeList,
    layers: LayerList,
    volume_records: BTreeMap<VolumeId, Bytes>,
    stalled_volumes: BTreeMap<VolumeId, Vec<NamedSpillFile>>,
    snapshots: SnapshotList,
    prunes: BTreeMap<LayerId, Prune>,
    found: BTreeMap<VolumeId, Found>,
}

impl Loaded {
    async fn load(db: &Database, opener: &Opener) -> Result<Loaded> {
        let mut ranges: Vec<(LayerId, Range)> = Vec::new();
        scan(db, family::RANGE, |key, value| {
            let (layer, lsn, ordinal) =
                range_of(key).ok_or_else(|| keys::corrupt(key, "not a range key"))?;
            let plain = opener.open_one(key, value)?;
            ranges.push((layer, Range::decode(layer, lsn, ordinal, &plain)?));
            Ok(())
        })
        .await?;
        let mut volume_records = BTreeMap::new();
        scan(db, family::VOLUME, |key, value| {
            let volume = volume_of(key).ok_or_else(|| keys::corrupt(key, "not a volume key"))?;
            volume_records.insert(volume, Bytes::from(opener.open_one(key, value)?));
            Ok(())
        })
        .await?;
        let mut stalled_volumes = BTreeMap::new();
        scan(db, family::STALLED, |key, value| {
            let volume = volume_of(key).ok_or_else(|| keys::corrupt(key, "not a volume key"))?;
            let plain = opener.open_one(key, value)?;
            stalled_volumes.insert(volume, records::decode_stalled(volume, &plain)?);
            Ok(())
        })
        .await?;
        let mut snapshots = BTreeMap::new();
        scan(db, family::SNAPSHOT, |key, value| {
            let (layer, lsn) =
                snapshot_of(key).ok_or_else(|| keys::corrupt(key, "not a snapshot's key"))?;
            let plain = opener.open_one(key, value)?;
            snapshots.insert((layer, lsn), decode_snapshot(layer, lsn, &plain)?);
            Ok(())
        })
        .await?;
        let mut prunes = BTreeMap::new();
        scan(db, family::PRUNE, |key, value| {
            let layer = number_of(key).ok_or_else(|| keys::corrupt(key, "not a layer's key"))?;
            let layer = LayerId(layer);
            prunes.insert(layer, Prune::decode(layer, &opener.open_one(key, value)?)?);
            Ok(())
        })
        .await?;
        let mut layers = BTreeMap::new();
        scan(db, family::LAYER, |key, value| {
            let layer = number_of(key).ok_or_else(|| keys::corrupt(key, "not a layer's key"))?;
            let layer = LayerId(layer);
            layers.insert(layer, LayerRecord::decode(layer, &opener.open_one(key, value)?)?);
            Ok(())
        })
        .await?;
        let mut found = BTreeMap::new();
        scan(db, family::FOUND, |key, value| {
            let volume = volume_of(key).ok_or_else(|| keys::corrupt(key, "not a volume key"))?;
            match opener.open_one(key, value).and_then(|plain| decode_found(volume, &plain)) {
                Ok(one) => drop(found.insert(volume, one)),
                // Nothing depends on this record; fsck reports it.
                Err(error) => tracing::debug!(
                    error = %error.chain(),
                    "could not read the findings of deduplication for a volume; they are passed \
                     over"
                ),
            }
            Ok(())
        })
        .await?;
        let (ranges, layers) = (RangeList::default().with(ranges), LayerList::new(layers));
        let snapshots = SnapshotList::new(snapshots, &layers);
        Ok(Loaded { ranges, layers, volume_records, stalled_volumes, snapshots, prunes, found })
    }
}

/// Calls `each` for every key and value of a family, in order.
async fn scan(
    db: &Database,
    family: u8,
    mut each: impl FnMut(&[u8], &[u8]) -> Result<()> + Send,
) -> Result<()> {
    let failed = |cause| db.failed("scan metadata", cause);
    let range = (Bound::Included(vec![family]), after(family));
    let mut found = db.scan(range).await.map_err(failed)?;
    while let Some(entry) = found.next().await.map_err(failed)? {
        each(&entry.key, &entry.value)?;
    }
    Ok(())
}

/// Commits `batch` and the next root record, as every opening for writing does. Returns the root.
async fn commit_root(
    db: &Database,
    opener: &Opener,
    before: Root,
    mut batch: WriteBatch,
) -> Result<Root> {
    let root = Root { commit_number: before.commit_number + 1, ..before };
    batch.put(ROOT_KEY, opener.sealer().seal(ROOT_KEY, &root.encode()));
    db.write(batch).await?;
    db.flush().await?;
    Ok(root)
}

fn check_epoch(root: &Root, epoch: Epoch) -> Result<()> {
    if root.epoch > epoch {
        let what = format!("open metadata as epoch {epoch}: epoch {} has committed", root.epoch);
        return Err(Error::new(ErrorKind::Fenced, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::database::DatabaseOptions;
    use crate::map::keys::AT_READ_ONLY;
    use object_store::ObjectStore;
    use object_store::memory::InMemory;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_reader_shows_the_state_that_it_was_opened_with() {
        let key = PoolKey::new([9; 32]);
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let options = DatabaseOptions::default();
        let db = Database::open(store.clone(), &options, None).await.unwrap();
        let db = Arc::new(db);
        let (algorithm, map) = (Algorithm::default(), MapOptions::default());
        let (_owner, writer) = Map::open(db.clone(), &key, algorithm, Epoch(1), map).await.unwrap();
        let reader = Database::read_only(store.clone(), &options).await.unwrap();
        let (before, first) = (reader.objects(), writer.root().commit_number);
        // The reader looks for a newer state at once. A later reader that finds one shows that it
        // had time to.
        let (header, mut root) = Map::find_root(&db, &key).await.unwrap().unwrap();
        let opener = Opener::new(header, &key);
        for _ in 0..20 {
            root = commit_root(&db, &opener, root, WriteBatch::new()).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        let later = Database::read_only(store, &options).await.unwrap();
        assert!(Map::find_root(&later, &key).await.unwrap().unwrap().1.commit_number > first);
        assert_eq!(Map::find_root(&reader, &key).await.unwrap().unwrap().1.commit_number, first);
        assert_eq!(reader.objects(), before);
        for db in [reader, later] {
            db.close().await.unwrap();
        }
        db.close().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn metadata_that_may_name_fragments_says_so_from_the_opening_on() {
        let key = PoolKey::new([9; 32]);
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let db = Database::open(store, &DatabaseOptions::default(), None).await.unwrap();
        let db = Arc::new(db);
        for (epoch, asked, expected) in [
            (1, (false, false), (false, false)),
            (2, (true, false), (true, false)),
            (3, (false, false), (true, false)),
            (4, (true, true), (true, true)),
            (5, (true, false), (true, true)),
        ] {
            let (in_fragments, in_tiers) = asked;
            let options = MapOptions { in_fragments, in_tiers, ..MapOptions::default() };
            let algorithm = Algorithm::default();
            let opened = Map::open(db.clone(), &key, algorithm, Epoch(epoch), options).await;
            drop(opened.unwrap());
            let (header, _) = Map::find_root(&db, &key).await.unwrap().unwrap();
            let found = (header.has_fragments(), header.has_tiers());
            assert_eq!(found, expected, "epoch {epoch}");
        }
        db.close().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn features_that_only_readers_may_ignore_keep_a_writer_out() {
        let key = PoolKey::new([9; 32]);
        let mut bytes = Header::new(Algorithm::default()).bytes().to_vec();
        bytes[AT_READ_ONLY] = 1;
        let header = Header::decode(&bytes).unwrap();
        let store = Arc::new(InMemory::new());
        let db = Database::open(store, &DatabaseOptions::default(), None).await.unwrap();
        let db = Arc::new(db);
        let mut batch = WriteBatch::new();
        batch.put(HEADER_KEY, header.bytes());
        let root = Root { epoch: Epoch(1), destaged: Lsn(3), commit_number: 1, next_segment: 1 };
        commit_root(&db, &Opener::new(header, &key), root, batch).await.unwrap();

        let (algorithm, options) = (Algorithm::default(), MapOptions::default());
        let opened = Map::open(db.clone(), &key, algorithm, Epoch(2), options).await;
        assert_eq!(opened.map(drop).unwrap_err().kind(), ErrorKind::Unsupported);
        let checked = Map::check_owner(&db, &key, Epoch(2)).await;
        assert_eq!(checked.unwrap_err().kind(), ErrorKind::Unsupported, "before the claim");
        let (map, _) = Map::read_only(db.clone(), &key, options).await.unwrap();
        assert_eq!(map.destaged_lsn(), Lsn(3));
        db.close().await.unwrap();
    }
}
