//! Pools over a real log and a store in memory, for tests.
//!
//! Invariants:
//! - Nothing is cached, so that reads use the bytes of the store.

use crate::client_record::ClientRecord;
use crate::config::{DataConfig, PoolConfig};
use crate::copies::target::{Pin, Target};
use crate::destage::DestageOptions;
use crate::pool::Pool;
use crate::reservations::Reservations;
use crate::volume_keys::VolumeKeyRing;
use block::env::{Clock, SystemClock};
use block::seal::{Algorithm, PoolKey};
use block::{Epoch, Error, ErrorKind, Result, WriteFlags};
use bytes::Bytes;
use control::keys::KeySource;
use control::store::Store;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tiering::{Tier, TierOptions};
use uuid::Uuid;
use wal::{Log, LogIdentity, LogOptions};

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// A small log, whose generations are small, too.
pub fn log_options() -> LogOptions {
    LogOptions {
        ring_bytes: 16 * MIB,
        file_bytes: 2 * MIB,
        generation_bytes_max: 2 * MIB,
        ..LogOptions::default()
    }
}

/// Oldest age of data that only the log holds.
pub const MAX_AGE: Duration = Duration::from_millis(200);

/// Opens a pool over `store` with its log in `dir`. Nothing is cached, so that reads use the bytes
/// of the store.
pub async fn open(dir: &Path, store: &Arc<impl ObjectStore>, epoch: u64) -> Arc<Pool> {
    open_with(dir, store, epoch, log_options(), MAX_AGE).await
}

/// Like [`open`], with other options of the log and of destage.
pub async fn open_with(
    dir: &Path,
    store: &Arc<impl ObjectStore>,
    epoch: u64,
    log_options: LogOptions,
    max_age: Duration,
) -> Arc<Pool> {
    open_as((dir, 1, Arc::new(SystemClock)), store, epoch, log_options, max_age).await.0
}

/// Like [`open`], with another clock.
pub async fn open_on_clock(
    dir: &Path,
    store: &Arc<impl ObjectStore>,
    epoch: u64,
    clock: Arc<dyn Clock>,
) -> Arc<Pool> {
    open_as((dir, 1, clock), store, epoch, log_options(), MAX_AGE).await.0
}

/// The same on a machine that has been booted `boot` times. The flag is true if the end of the log
/// is proven to be whole.
pub async fn open_after_boot(
    dir: &Path,
    store: &Arc<InMemory>,
    epoch: u64,
    boot: u8,
) -> (Arc<Pool>, bool) {
    open_as((dir, boot, Arc::new(SystemClock)), store, epoch, log_options(), MAX_AGE).await
}

async fn open_as(
    (dir, boot, clock): (&Path, u8, Arc<dyn Clock>),
    store: &Arc<impl ObjectStore>,
    epoch: u64,
    log_options: LogOptions,
    max_age: Duration,
) -> (Arc<Pool>, bool) {
    let key = PoolKey::new([9; 32]);
    let objects: Arc<dyn ObjectStore> = store.clone();
    let mut options = TierOptions::new(objects, [7; 16], key.clone(), Epoch(epoch));
    options.clock = clock;
    options.segment_bytes = 1 << 20;
    options.frames.memory_bytes = 0;
    options.frames.stream_bytes = 0;
    options.frames.cache = None;
    let keys_in = Store::from_objects("memory", store.clone());
    let pool_id = uuid::Uuid::from_u128(7);
    let keys = VolumeKeyRing::open(&keys_in, &key, pool_id, Epoch(epoch)).await.unwrap();
    options.volume_keys = keys.table().clone();
    let tier = Tier::open(options).await.unwrap();
    let identity = LogIdentity {
        pool: [7; 16],
        epoch: Epoch(epoch),
        boot_id: [boot; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    let (log_dir, destaged) = (dir.join("log"), tier.destaged_lsn());
    let spills = crate::opening::spill_files_wanted(&tier);
    let opened = tokio::task::spawn_blocking(move || {
        Log::open_with_spill_files(&log_dir, identity, key, log_options, destaged, &spills)
    });
    let (log, recovery) = opened.await.unwrap().unwrap();
    let destage =
        DestageOptions { max_age, retry: Duration::from_millis(20), ..DestageOptions::default() };
    let retention = Duration::from_secs(3600);
    let pool =
        Pool::start(log, (tier, keys), destage, retention, &recovery.missing_spill_files).unwrap();
    (pool, recovery.is_tail_proven)
}

/// Ends a pool like a killed process: nothing is flushed, and the files are released.
pub async fn kill(pool: Arc<Pool>) {
    pool.kill().await;
}

/// Returns `len` bytes that depend on `seed` and do not repeat.
pub fn pattern(seed: u64, len: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for byte in &mut bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (state >> 56) as u8;
    }
    bytes.into()
}

/// Flags of a write that need not be on stable storage.
pub const NO_FUA: WriteFlags = WriteFlags { fua: false };

/// Configures a small pool below `place`, served from its directory `dir`. Nothing is destaged
/// without a request.
pub fn pool_config(place: &Path, dir: &str) -> PoolConfig {
    let max_age = Duration::from_secs(3600);
    PoolConfig {
        dir: place.join(dir),
        store_url: place.join("store").display().to_string(),
        name: "main".to_owned(),
        keys: KeySource::File(place.join("key")),
        key_file: Some(place.join("key")),
        retention: Duration::from_secs(7 * 86_400),
        volumes: Vec::new(),
        log: LogOptions { ring_bytes: 16 * MIB, file_bytes: MIB, ..log_options() },
        destage: DestageOptions { max_age, ..DestageOptions::default() },
        data: DataConfig {
            algorithm: Algorithm::of_this_cpu(),
            zstd_level: 1,
            segment_bytes: 32 * MIB,
            memory_cache_bytes: 64 * MIB,
            stream_bytes: 32 * MIB,
            cache: None,
            cache_index_wanted_bytes: 0,
            map_cache_bytes: 64 * MIB,
            metadata_cache_bytes: 64 * MIB,
        },
        memory_bytes_max: 1024 * MIB,
        connection_count_max: 64,
        machine_files: vec!["devices.test"],
        clock: Arc::new(SystemClock),
        data_stores: Arc::new(crate::data_stores::NoDataStores),
        log_members: None,
    }
}

/// The clients of volumes, in memory in place of the records of the volumes.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    clients: Arc<Mutex<BTreeMap<u32, Vec<ClientRecord>>>>,
    /// Refuses changes.
    pub is_stuck: Arc<AtomicBool>,
}

impl Roster {
    /// Opens the reservations with the clients that were recorded.
    pub fn reservations(&self) -> Reservations {
        let found: Vec<_> = self.clients.lock().clone().into_iter().collect();
        let found = found
            .into_iter()
            .flat_map(|(volume, clients)| clients.into_iter().map(move |client| (volume, client)));
        let roster = self.clone();
        Reservations::new(Uuid::nil(), Epoch(1), found, move |volume, clients| {
            std::future::ready(roster.record(volume, clients))
        })
    }

    fn record(&self, volume: u32, clients: Vec<ClientRecord>) -> Result<()> {
        if self.is_stuck.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "record clients: the test refuses"));
        }
        self.clients.lock().insert(volume, clients);
        Ok(())
    }

    /// The recorded clients of a volume.
    pub fn clients(&self, volume: u32) -> Vec<ClientRecord> {
        self.clients.lock().get(&volume).cloned().unwrap_or_default()
    }
}

/// The documents of a copy, besides those that a pool has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDocument {
    /// The pool that the copy belongs to.
    Identity,
    /// The newest recovery point.
    State,
    /// A reader of a recovery point, in the object `pins/1`.
    Pin,
    /// The segments that are read most.
    Heat,
}

/// Reads one document of a copy in `store` as the daemon does. Returns whether it says anything.
///
/// # Errors
/// Those of the reader of that document.
pub async fn read_copy_document(
    store: &Store,
    key: &PoolKey,
    (pool, lineage): (Uuid, Uuid),
    document: CopyDocument,
) -> Result<bool> {
    let target = Target::of_store(store);
    match document {
        CopyDocument::Identity => target.check_there(key, (pool, lineage)).await.map(|()| true),
        CopyDocument::State => target.newest(key, pool).await.map(|state| state.is_some()),
        CopyDocument::Pin => target.has_pin(key, &Pin::named("pins/1")).await,
        CopyDocument::Heat => target.heat(key, pool).await.map(|segments| !segments.is_empty()),
    }
}
