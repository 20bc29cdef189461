//! The configuration of a daemon: defaults, then `spindle.toml`, then flags.
//!
//! Owns the options, their ranges and explanations, the file's format, and the division of the memory
//! budget. Refuses to know what is done with them: it hands each part its own options, such as a
//! [`PoolConfig`].
//!
//! Invariants:
//! - Every option is one row of [`options::OPTIONS`]. The example file and `config show` are
//!   made from those rows; tests compare the rows with the types here, and check that
//!   docs/operations.md names every key.
//! - An unknown key is an error that names its line and the nearest known key.
//! - A [`Config`] that exists is valid: every value is in its range and the memory budget fits.
//! - No secret is ever part of a configuration, only the place where it is found.

pub mod budget;
mod data_stores;
mod dnode;
pub mod options;
mod unknown;

pub use budget::Budget;
pub use data_stores::{DATA_STORE_COUNT_MAX, DataSettings, DataStoreSettings};
pub use dnode::{DnodeSettings, DriveSettings, DriveUrl};

use block::env::SystemClock;
use block::quantities::{self, ByteSize, Span};
use block::seal::Algorithm;
use block::units::{SECTOR_BYTES, VOLUME_BYTES_MAX};
use block::{Error, ErrorKind, Result};
use control::keys::{KeySource, NewKey};
use engine::config::{DataConfig, PoolConfig, VolumeConfig};
use engine::data_stores::DataStores;
use engine::destage::{DestageOptions, ReclaimPace};
use engine::record::Durability;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tiering::ReclaimOptions;
use tiering::cache::CacheOptions;
use wal::{IoMode, LogOptions};

/// Every option, spelled as in `spindle.toml`. [`options::OPTIONS`] explains each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(
    missing_docs,
    reason = "options::OPTIONS documents every field, and a test holds it to that"
)]
pub struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    pub name: String,
    pub memory: ByteSize,
    pub lock_memory: bool,
    pub deleted_retention: Span,
    pub log: LogSettings,
    pub data: DataSettings,
    pub cache: CacheSettings,
    pub memory_cache: MemoryCacheSettings,
    pub destage: DestageSettings,
    pub reclaim: ReclaimSettings,
    pub encryption: EncryptionSettings,
    pub nbd: NbdSettings,
    pub keys: KeySettings,
    pub dnode: DnodeSettings,
    pub volumes: Vec<VolumeSettings>,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct LogSettings {
    pub size: ByteSize,
    pub file_size: ByteSize,
    pub io: LogIo,
    pub detection: Span,
}

/// The way in which the log files are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogIo {
    /// The method that measured faster: buffered.
    #[default]
    Auto,
    /// Through the page cache.
    Buffered,
    /// `O_DIRECT`.
    Direct,
}

/// `[cache]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct CacheSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    pub size: ByteSize,
}

/// `[memory_cache]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct MemoryCacheSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<ByteSize>,
}

/// `[destage]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct DestageSettings {
    pub max_age: Span,
    pub segment_size: ByteSize,
    pub compression_level: i32,
}

/// `[reclaim]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct ReclaimSettings {
    pub space_percent: u32,
    pub rate: ByteSize,
}

/// `[encryption]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct EncryptionSettings {
    pub cipher: Cipher,
}

/// AEAD cipher of new data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cipher {
    /// The faster one on this machine.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// RFC 8439.
    #[serde(rename = "chacha20-poly1305")]
    ChaCha20Poly1305,
    /// NIST SP 800-38D.
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
}

impl Cipher {
    /// The algorithm as headers name it.
    #[must_use]
    pub fn algorithm(self) -> Algorithm {
        match self {
            Cipher::Auto => Algorithm::of_this_cpu(),
            Cipher::ChaCha20Poly1305 => Algorithm::ChaCha20Poly1305,
            Cipher::Aes256Gcm => Algorithm::Aes256Gcm,
        }
    }
}

/// `[nbd]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct NbdSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix: Option<PathBuf>,
    pub allow_plain_remote: bool,
    pub allow_resize: bool,
    pub connection_count_max: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_memory: Option<ByteSize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSettings>,
}

/// `[nbd.tls]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct TlsSettings {
    pub cert: PathBuf,
    pub key: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub clients: BTreeMap<String, Vec<String>>,
}

/// `[keys]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct KeySettings {
    pub source: KeyKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passphrase_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passphrase_env: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passphrase_fd: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery_file: Option<PathBuf>,
}

/// The kind of secret that opens the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyKind {
    /// A key file.
    #[default]
    File,
    /// A passphrase.
    Passphrase,
    /// The output of a command.
    Command,
    /// A recovery key.
    Recovery,
}

/// `[[volumes]]`: created if missing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "see Settings")]
pub struct VolumeSettings {
    pub name: String,
    pub size: ByteSize,
    /// Unset: an existing volume keeps its durability, and a new one gets auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durability: Option<Durability>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedicated_key: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<bool>,
}

impl VolumeSettings {
    fn wanted(&self) -> VolumeConfig {
        VolumeConfig {
            name: self.name.clone(),
            size_bytes: self.size.0,
            durability: self.durability,
            is_read_only: self.read_only,
            dedicated_key: self.dedicated_key,
            dedup: self.dedup,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            dir: None,
            store: None,
            name: "main".to_owned(),
            memory: ByteSize(1 << 30),
            lock_memory: false,
            deleted_retention: Span::from_secs(7 * 86_400),
            log: LogSettings::default(),
            data: DataSettings::default(),
            cache: CacheSettings::default(),
            memory_cache: MemoryCacheSettings::default(),
            destage: DestageSettings::default(),
            reclaim: ReclaimSettings::default(),
            encryption: EncryptionSettings::default(),
            nbd: NbdSettings::default(),
            keys: KeySettings::default(),
            dnode: DnodeSettings::default(),
            volumes: Vec::new(),
        }
    }
}

impl Default for LogSettings {
    fn default() -> Self {
        LogSettings {
            size: ByteSize(2 << 30),
            file_size: ByteSize(64 << 20),
            io: LogIo::Auto,
            detection: Span::from_secs(1),
        }
    }
}

impl Default for CacheSettings {
    fn default() -> Self {
        CacheSettings { dir: None, size: ByteSize(10 << 30) }
    }
}

impl Default for DestageSettings {
    fn default() -> Self {
        DestageSettings {
            max_age: Span::from_secs(30),
            segment_size: ByteSize(32 << 20),
            compression_level: 1,
        }
    }
}

impl Default for ReclaimSettings {
    fn default() -> Self {
        ReclaimSettings { space_percent: 130, rate: ByteSize(200 << 20) }
    }
}

impl Default for NbdSettings {
    fn default() -> Self {
        NbdSettings {
            listen: None,
            unix: None,
            allow_plain_remote: false,
            allow_resize: false,
            connection_count_max: 256,
            payload_memory: None,
            tls: None,
        }
    }
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No setting: the default.
    Default,
    /// `spindle.toml`.
    File(PathBuf),
    /// A flag of this name.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// A value that a flag sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// Dotted key, as in [`options::OPTIONS`].
    pub key: &'static str,
    /// The flag, with its hyphens.
    pub flag: &'static str,
    /// The value.
    pub value: toml::Value,
}

/// The effective configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    settings: Settings,
    dir: PathBuf,
    budget: Budget,
    origins: BTreeMap<String, Origin>,
}

impl Config {
    /// Loads defaults, then `file`, then `overrides`. For a volume named by both, values of the
    /// flag replace those of the file.
    ///
    /// # Errors
    /// `Invalid` with the line or flag, the mistake and the allowed values; `NotFound` for a
    /// missing file.
    pub fn load(file: Option<&Path>, overrides: &[Override]) -> Result<Config> {
        let mut table = toml::Table::new();
        let mut origins = BTreeMap::new();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path).map_err(|error| {
                let kind = match error.kind() {
                    std::io::ErrorKind::NotFound => ErrorKind::NotFound,
                    _ => ErrorKind::Io,
                };
                Error::with_source(kind, format!("read {}", path.display()), error)
            })?;
            table = unknown::parse(path, &text)?;
            for key in flatten(&table).into_keys() {
                origins.insert(key, Origin::File(path.to_owned()));
            }
        }
        for change in overrides {
            merge(&mut table, change);
            origins.insert(change.key.to_owned(), Origin::Flag(change.flag));
        }
        let settings = Settings::deserialize(table).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("configuration: {}", error.message()))
        })?;
        Config::resolve(settings, origins)
    }

    /// Fills in values that depend on others, and checks everything.
    fn resolve(mut settings: Settings, origins: BTreeMap<String, Origin>) -> Result<Config> {
        let Some(dir) = settings.dir.clone() else {
            return Err(invalid("no directory is named: use --dir DIR, or dir = in the file"));
        };
        let dir = std::path::absolute(&dir).map_err(|error| {
            Error::with_source(ErrorKind::Invalid, format!("dir {}", dir.display()), error)
        })?;
        settings.dir = Some(dir.clone());
        if settings.store.is_none() {
            settings.store = Some(dir.join("store").display().to_string());
        }
        settings.cache.dir.get_or_insert_with(|| dir.join("cache"));
        if settings.nbd.listen.is_none() && settings.nbd.unix.is_none() {
            settings.nbd.listen = Some(vec!["127.0.0.1:10809".to_owned()]);
            settings.nbd.unix = Some(dir.join("nbd.sock"));
        }
        if settings.keys.source == KeyKind::File {
            settings.keys.file.get_or_insert_with(|| dir.join("spindle.key"));
        }
        control::store::check_url(settings.store.as_deref().unwrap_or_default())?;
        check_ranges(&settings)?;
        settings.data.check()?;
        settings.dnode.settle()?;
        check_volumes(&settings.volumes)?;
        check_listeners(&settings.nbd)?;
        key_source(&settings.keys)?;
        let budget = Budget::divide(&settings)?;
        Ok(Config { settings, dir, budget, origins })
    }

    /// Every option, including values that depend on others.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The pool's local directory, absolute.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// URL or directory of the store.
    #[must_use]
    pub fn store_url(&self) -> &str {
        self.settings.store.as_deref().unwrap_or_default()
    }

    /// Directory of the read cache, or `None` if its size is 0.
    #[must_use]
    pub fn cache_dir(&self) -> Option<&Path> {
        self.settings.cache.dir.as_deref().filter(|_| self.settings.cache.size.0 > 0)
    }

    /// The memory budget, divided.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What the engine needs to know of it. `data_stores` opens what `[data]` names.
    #[must_use]
    pub fn pool(&self, data_stores: Arc<dyn DataStores>) -> PoolConfig {
        let (settings, budget) = (self.settings(), self.budget());
        let log = &settings.log;
        let default = LogOptions::default();
        PoolConfig {
            dir: self.dir().to_owned(),
            store_url: self.store_url().to_owned(),
            name: settings.name.clone(),
            keys: self.key_source(),
            key_file: settings.keys.file.clone(),
            retention: settings.deleted_retention.duration(),
            volumes: settings.volumes.iter().map(VolumeSettings::wanted).collect(),
            log: LogOptions {
                ring_bytes: log.size.0,
                file_bytes: log.file_size.0,
                io_mode: match log.io {
                    LogIo::Auto => IoMode::default(),
                    LogIo::Buffered => IoMode::Buffered,
                    LogIo::Direct => IoMode::Direct,
                },
                algorithm: settings.encryption.cipher.algorithm(),
                payload_memory_bytes: budget.log_payload_bytes,
                entry_count_max: budget.extent_count_max,
                generation_bytes_max: default.generation_bytes_max.min(log.size.0 / 8),
                ..default
            },
            destage: DestageOptions {
                max_age: settings.destage.max_age.duration(),
                reclaim: ReclaimPace {
                    reclaim: ReclaimOptions {
                        target_percent: settings.reclaim.space_percent.into(),
                    },
                    rate: settings.reclaim.rate.0,
                },
                ..DestageOptions::default()
            },
            data: self.data(),
            memory_bytes_max: budget.total_bytes,
            connection_count_max: u64::from(settings.nbd.connection_count_max)
                + nbd::RESERVED_COUNT as u64,
            machine_files: vec![devices::FILE],
            clock: Arc::new(SystemClock),
            data_stores,
            log_members: None,
        }
    }

    fn data(&self) -> DataConfig {
        let (settings, budget) = (self.settings(), self.budget());
        DataConfig {
            algorithm: settings.encryption.cipher.algorithm(),
            zstd_level: settings.destage.compression_level,
            segment_bytes: settings.destage.segment_size.0,
            memory_cache_bytes: budget.memory_cache_bytes,
            stream_bytes: budget.stream_bytes,
            cache: self.cache_dir().map(|dir| CacheOptions {
                index_bytes: budget.cache_index_bytes,
                pending_bytes_max: budget.cache_pending_bytes,
                ..CacheOptions::new(dir, settings.cache.size.0)
            }),
            cache_index_wanted_bytes: budget.cache_index_wanted_bytes,
            map_cache_bytes: budget.map_cache_bytes,
            metadata_cache_bytes: budget.metadata_cache_bytes,
        }
    }

    /// The secret that opens the pool.
    ///
    /// # Panics
    /// Never: a configuration that exists was checked.
    #[must_use]
    pub fn key_source(&self) -> KeySource {
        key_source(&self.settings.keys).expect("checked when the configuration was made")
    }

    /// The target of a key rotation: `new`, or the configured key file.
    #[must_use]
    pub fn new_key(&self, new: Option<NewKey>) -> NewKey {
        new.unwrap_or_else(|| {
            let configured = self.settings.keys.file.clone();
            NewKey::File { path: configured.unwrap_or_else(|| self.dir.join("spindle.key")) }
        })
    }

    /// One row for each option: key, value as TOML (`None` if unset), and the value's source.
    #[must_use]
    pub fn rows(&self) -> Vec<(String, Option<String>, Origin)> {
        let table = toml::Table::try_from(&self.settings).unwrap_or_default();
        let mut values = flatten(&table);
        let origin = |key: &str| self.origins.get(key).cloned().unwrap_or(Origin::Default);
        let is_in_list = |key: &str| {
            key.rsplit_once('.').is_some_and(|(section, _)| options::LISTS.contains(&section))
        };
        let mut rows: Vec<_> = options::OPTIONS
            .iter()
            .filter(|option| !is_in_list(option.key))
            .map(|option| {
                let value = values.remove(option.key).map(|value| value.to_string());
                (option.key.to_owned(), value, origin(option.key))
            })
            .collect();
        for list in options::LISTS {
            if let Some(value) = values.remove(*list) {
                rows.push(((*list).to_owned(), Some(value.to_string()), origin(list)));
            }
        }
        rows
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

/// Dotted keys of all values. Arrays and the free-form table of TLS clients count as values.
fn flatten(table: &toml::Table) -> BTreeMap<String, toml::Value> {
    let mut flat = BTreeMap::new();
    let mut rest: Vec<(String, &toml::Table)> = vec![(String::new(), table)];
    while let Some((prefix, table)) = rest.pop() {
        for (key, value) in table {
            let key = format!("{prefix}{key}");
            match value {
                toml::Value::Table(inner) if key != "nbd.tls.clients" => {
                    rest.push((format!("{key}."), inner));
                }
                other => {
                    flat.insert(key, other.clone());
                }
            }
        }
    }
    flat
}

/// Sets a dotted key. Volumes are added by name; everything else is replaced.
fn merge(table: &mut toml::Table, change: &Override) {
    if change.key == "volumes" {
        let name = |value: &toml::Value| {
            value.get("name").and_then(toml::Value::as_str).map(str::to_owned)
        };
        let volumes =
            table.entry("volumes").or_insert_with(|| toml::Value::Array(Vec::new())).as_array_mut();
        if let (Some(volumes), Some(added)) = (volumes, change.value.as_array()) {
            for volume in added {
                match volumes.iter_mut().find(|known| name(known) == name(volume)) {
                    Some(toml::Value::Table(known)) => {
                        if let Some(changes) = volume.as_table() {
                            known.extend(changes.clone());
                        }
                    }
                    _ => volumes.push(volume.clone()),
                }
            }
        }
        return;
    }
    if change.key == "keys.source" {
        // A flag that names another secret replaces the file's whole section about keys.
        table.remove("keys");
    }
    let mut table = table;
    let mut parts = change.key.split('.').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            table.insert(part.to_owned(), change.value.clone());
            return;
        }
        let inner = table.entry(part).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        match inner.as_table_mut() {
            Some(inner) => table = inner,
            None => return, // the file's own value has the wrong type and is refused as such
        }
    }
}

/// Most files of a write log. Source: docs/format.md, the number of a file in its header.
const LOG_FILE_COUNT_MAX: u64 = 65_536;

fn check_ranges(settings: &Settings) -> Result<()> {
    quantities::check_name("pool", &settings.name)
        .map_err(|why| invalid(format!("name: {why}")))?;
    let log = &settings.log;
    size_in("log.file_size", log.file_size, 1 << 20, 256 << 20)?;
    size_in("log.size", log.size, 16 << 20, 1 << 40)?;
    if !log.file_size.0.is_multiple_of(4096) {
        return Err(invalid("log.file_size must be a multiple of 4096 bytes"));
    }
    if !log.size.0.is_multiple_of(log.file_size.0) || log.size.0 / log.file_size.0 < 4 {
        return Err(invalid(format!(
            "log.size {} must be a multiple of log.file_size {} and at least four files",
            log.size, log.file_size
        )));
    }
    let (detection, min) = (log.detection.duration(), Duration::from_millis(200));
    if detection < min || detection > Duration::from_secs(60) {
        return Err(invalid(format!("log.detection {}: must be from 200ms to 60s", log.detection)));
    }
    let file_count = log.size.0 / log.file_size.0;
    if file_count > LOG_FILE_COUNT_MAX {
        return Err(invalid(format!(
            "log.size {} with log.file_size {} is {file_count} files; at most {LOG_FILE_COUNT_MAX} \
             are possible: make log.file_size larger",
            log.size, log.file_size
        )));
    }
    if settings.cache.size.0 != 0 {
        size_in("cache.size", settings.cache.size, 64 << 20, 1 << 50)?;
    }
    size_in("destage.segment_size", settings.destage.segment_size, 1 << 20, 256 << 20)?;
    let level = settings.destage.compression_level;
    if !(-7..=19).contains(&level) {
        return Err(invalid(format!("destage.compression_level {level}: must be from -7 to 19")));
    }
    let percent = settings.reclaim.space_percent;
    if !(105..=1000).contains(&percent) {
        return Err(invalid(format!("reclaim.space_percent {percent}: must be from 105 to 1000")));
    }
    let rate = settings.reclaim.rate;
    if !(1 << 20..=1 << 40).contains(&rate.0) {
        return Err(invalid(format!("reclaim.rate {rate}: must be from 1MiB to 1TiB a second")));
    }
    let (age, hour) = (settings.destage.max_age, Span::from_secs(3600));
    if !(Span::from_secs(1)..=hour).contains(&age) {
        return Err(invalid(format!("destage.max_age {age}: must be from 1s to 1h")));
    }
    if settings.deleted_retention > Span::from_secs(3650 * 86_400) {
        return Err(invalid("deleted_retention: must be at most 3650d"));
    }
    let count = settings.nbd.connection_count_max;
    if !(1..=65_536).contains(&count) {
        return Err(invalid(format!("nbd.connection_count_max {count}: must be from 1 to 65536")));
    }
    Ok(())
}

fn size_in(key: &str, size: ByteSize, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&size.0) {
        return Ok(());
    }
    let (min, max) = (ByteSize(min), ByteSize(max));
    Err(invalid(format!("{key} {size}: must be from {min} to {max}")))
}

fn check_volumes(volumes: &[VolumeSettings]) -> Result<()> {
    for (index, volume) in volumes.iter().enumerate() {
        quantities::check_name("volume", &volume.name).map_err(invalid)?;
        check_volume_size(&volume.name, volume.size.0)?;
        if volumes.iter().take(index).any(|earlier| earlier.name == volume.name) {
            return Err(invalid(format!("volume {} is configured twice", volume.name)));
        }
    }
    Ok(())
}

/// Checks that a volume may have this size, in bytes.
///
/// # Errors
/// `Invalid` with the range.
pub fn check_volume_size(name: &str, size_bytes: u64) -> Result<()> {
    if size_bytes == 0 || size_bytes > VOLUME_BYTES_MAX || !size_bytes.is_multiple_of(SECTOR_BYTES)
    {
        return Err(invalid(format!(
            "volume {name}: size {} is not allowed: a multiple of {SECTOR_BYTES} bytes, up to {}",
            ByteSize(size_bytes),
            ByteSize(VOLUME_BYTES_MAX)
        )));
    }
    Ok(())
}

fn check_listeners(nbd: &NbdSettings) -> Result<()> {
    for address in nbd.listen.as_deref().unwrap_or_default() {
        let is_host_port = address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !is_host_port {
            return Err(invalid(format!(
                "nbd.listen {address:?}: write HOST:PORT, like 127.0.0.1:10809 or [::1]:0"
            )));
        }
        if !is_loopback(address) && nbd.tls.is_none() && !nbd.allow_plain_remote {
            return Err(invalid(format!(
                "nbd.listen {address} can be reached from other machines, and without TLS anybody \
                 there can read and write the volumes. Configure [nbd.tls], listen on 127.0.0.1, \
                 or set nbd.allow_plain_remote = true (--allow-plain-remote) in a trusted network"
            )));
        }
    }
    let Some(tls) = &nbd.tls else { return Ok(()) };
    if tls.client_ca.is_none() && !tls.clients.is_empty() {
        return Err(invalid(
            "nbd.tls.clients needs nbd.tls.client_ca: without it no client's name is verified",
        ));
    }
    Ok(())
}

/// Tells whether `host:port` can be reached only from this machine.
fn is_loopback(address: &str) -> bool {
    if let Ok(address) = address.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn key_source(keys: &KeySettings) -> Result<KeySource> {
    let missing = |key: &str| {
        let source = match keys.source {
            KeyKind::File => "file",
            KeyKind::Passphrase => "passphrase",
            KeyKind::Command => "command",
            KeyKind::Recovery => "recovery",
        };
        invalid(format!("keys.source = \"{source}\" needs {key}"))
    };
    match keys.source {
        KeyKind::File => keys.file.clone().map(KeySource::File).ok_or_else(|| missing("keys.file")),
        KeyKind::Passphrase => {
            match (&keys.passphrase_file, &keys.passphrase_env, keys.passphrase_fd) {
                (Some(path), None, None) => Ok(KeySource::PassphraseFile(path.clone())),
                (None, Some(name), None) => Ok(KeySource::PassphraseEnv(name.clone())),
                (None, None, Some(number)) => Ok(KeySource::PassphraseFd(number)),
                _ => Err(missing(
                    "exactly one of keys.passphrase_file, keys.passphrase_env and \
                     keys.passphrase_fd",
                )),
            }
        }
        KeyKind::Command => match &keys.command {
            Some(command) if !command.is_empty() => Ok(KeySource::Command(command.clone())),
            _ => Err(missing("keys.command, a list of the program and its arguments")),
        },
        KeyKind::Recovery => keys
            .recovery_file
            .clone()
            .map(KeySource::RecoveryFile)
            .ok_or_else(|| missing("keys.recovery_file")),
    }
}

#[cfg(test)]
mod tests;
