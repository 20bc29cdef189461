//! The settings of a pool, as the process hands them to the engine: its identity, its places and its
//! share of the memory.
//!
//! Invariants:
//! - The values are valid and within the memory budget: whoever makes them has checked them.
//! - No secret is part of it, except a passphrase that was typed in, which prints as `…`.

use crate::data_stores::DataStores;
use crate::destage::DestageOptions;
use crate::log_members::LogMembers;
use crate::record::Durability;
use block::env::Clock;
use block::seal::Algorithm;
use control::keys::KeySource;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tiering::cache::CacheOptions;
use wal::LogOptions;

/// Smallest share of the volume map, in bytes.
pub const MAP_BYTES_MIN: u64 = 16 << 20;
/// Smallest share of the metadata database, in bytes.
pub const METADATA_BYTES_MIN: u64 = 32 << 20;

/// Everything that opening and serving one pool depends on.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Directory of this node: identity, write log, devices, clients.
    pub dir: PathBuf,
    /// URL of the object store, with the pool's prefix.
    pub store_url: String,
    /// Name of the pool, for messages.
    pub name: String,
    /// Source of the secret that opens the key ring.
    pub keys: KeySource,
    /// The configured key file, also where another source opens the key ring.
    pub key_file: Option<PathBuf>,
    /// Time for which removed volumes can be restored.
    pub retention: Duration,
    /// Volumes that are made on first use.
    pub volumes: Vec<VolumeConfig>,
    /// The write log.
    pub log: LogOptions,
    /// Rules for moving data out of the log.
    pub destage: DestageOptions,
    /// The data tier.
    pub data: DataConfig,
    /// The whole memory budget of the process, in bytes, for reports.
    pub memory_bytes_max: u64,
    /// Connections of clients at a time, for the check of the limit of open files.
    pub connection_count_max: u64,
    /// Files in `dir` that belong to the machine and not to the pool: a copy of the directory does
    /// not take them over.
    pub machine_files: Vec<&'static str>,
    /// Time for schedules, upkeep and pauses. Timers are tokio's.
    pub clock: Arc<dyn Clock>,
    /// Where the segments are.
    pub data_stores: Arc<dyn DataStores>,
    /// The members of the write log, if this node is one of several.
    pub log_members: Option<Arc<dyn LogMembers>>,
}

/// A volume that the configuration names.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// Its name.
    pub name: String,
    /// Its size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Absent: an existing volume keeps its durability, and a new one gets `auto`.
    pub durability: Option<Durability>,
    /// Absent: as it is.
    pub is_read_only: Option<bool>,
    /// Give a new volume a dedicated key.
    pub dedicated_key: Option<bool>,
    /// Do not store blocks again that are already stored. Absent: as it is.
    pub dedup: Option<bool>,
}

/// Settings and memory of the data tier.
#[derive(Clone, Debug)]
pub struct DataConfig {
    /// Cipher of new data.
    pub algorithm: Algorithm,
    /// Level of zstd.
    pub zstd_level: i32,
    /// Size of a full segment, in bytes.
    pub segment_bytes: u64,
    /// Memory for decrypted frames, in bytes; may be 0.
    pub memory_cache_bytes: u64,
    /// Memory for sequential streams, in bytes.
    pub stream_bytes: u64,
    /// The read cache on disk, if there is one.
    pub cache: Option<CacheOptions>,
    /// Bytes that the index of the whole read cache would take.
    pub cache_index_wanted_bytes: u64,
    /// Memory for the volume map and the index of deduplication, in bytes.
    pub map_cache_bytes: u64,
    /// Memory for blocks of the metadata database, in bytes.
    pub metadata_cache_bytes: u64,
}
