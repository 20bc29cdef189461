//! Volumes: requests, and their state in replies.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The promise of an acknowledged write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// `Flush` for clients on this machine, `Write` for those that reach it over a network.
    #[default]
    Auto,
    /// The write survives a crash of the daemon; after a flush, also a loss of power.
    Flush,
    /// The write survives a crash of the daemon and a loss of power.
    Write,
    /// Like `Flush`, and a flush also waits until the store has the data.
    Store,
}

/// A request about volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum VolumeRequest {
    /// Makes a volume. `Busy` if it exists.
    Create {
        /// Its name.
        name: String,
        /// Its size in bytes, a multiple of 512.
        size_bytes: u64,
        /// Durability of acknowledged writes.
        #[serde(default)]
        durability: Durability,
        /// Encrypts it with a key that no other volume uses, except its clones.
        #[serde(default)]
        dedicated_key: bool,
        /// Does not store blocks again that are already stored.
        #[serde(default)]
        dedup: bool,
    },
    /// Lists all volumes, including removed ones that can be restored.
    List {},
    /// Shows one volume.
    Show {
        /// Its name.
        name: String,
    },
    /// Resizes a volume.
    Resize {
        /// Its name.
        name: String,
        /// The new size in bytes.
        size_bytes: u64,
        /// Allows it to become smaller; the data beyond the new end is lost. Without this,
        /// shrinking is `Invalid`.
        #[serde(default)]
        shrink: bool,
    },
    /// Changes settings of a volume. Absent fields stay as they are.
    Set {
        /// Its name.
        name: String,
        /// Durability of acknowledged writes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        durability: Option<Durability>,
        /// Refuses writes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        is_read_only: Option<bool>,
        /// Does not store blocks again that are already stored.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dedup: Option<bool>,
    },
    /// Removes a volume.
    Remove {
        /// Its name.
        name: String,
        /// The extent of the removal.
        #[serde(default)]
        mode: RemoveMode,
    },
    /// Brings a removed volume back.
    Restore {
        /// Its name.
        name: String,
    },
    /// Confirms that no client from before a loss of writes is still running, and serves remote
    /// clients again. `Invalid` if no writes of the volume were lost.
    AcceptLoss {
        /// Its name.
        name: String,
        /// Discards the writes that only a missing spill file holds.
        #[serde(default)]
        discard_local_writes: bool,
    },
    /// Renames a volume. `Busy` if the name is taken, or the volume is in use.
    Rename {
        /// Its name.
        name: String,
        /// Its new name.
        new_name: String,
    },
    /// Makes a clone independent of its origin, in the background. `Invalid` if it already is.
    Promote {
        /// Its name.
        name: String,
    },
    /// Makes a volume with the contents of a snapshot. `Busy` if a volume of that name exists.
    Clone {
        /// `VOLUME@NAME`.
        snapshot: String,
        /// Name of the new volume.
        name: String,
        /// Seconds after which it is removed automatically; absent: never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ttl_seconds: Option<u64>,
    },
    /// Makes a volume with the contents that another one has in a log that the pool went on without. `NotFound`
    /// without such a log; `Busy` if a volume of the new name exists. For the machine that has the log.
    Recover {
        /// Name of the new volume.
        name: String,
        /// Name of the volume whose writes the log has.
        of: String,
        /// Directory of the log; absent: the one that was set aside in the directory of the daemon.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        log: Option<PathBuf>,
    },
}

/// A volume that was made from a log that the pool went on without.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecoveredInfo {
    /// Name of the new volume.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Name of the volume whose writes the log has.
    pub of: String,
    /// Directory of the log.
    pub log: PathBuf,
    /// Name of the snapshots that keep the state from which the pool went on.
    pub base: String,
    /// Entries of the volume that only this log has.
    pub entry_count: u64,
    /// Bytes that these entries wrote.
    pub written_bytes: u64,
    /// What the new volume lacks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The extent of the removal of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoveMode {
    /// The volume can be restored for the configured time.
    #[default]
    Restorable,
    /// The volume is removed at once, beyond recovery.
    Now,
    /// Like `Now`, and the volume's dedicated key is destroyed. `Invalid` for a volume without one,
    /// `Busy` if other volumes need it.
    Erase,
}

/// A volume in reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeInfo {
    /// Identity within the pool.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// As configured; `auto` if the choice was left to the pool.
    pub durability: Durability,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Seconds since 1970 at the removal, for a volume that can still be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed_at: Option<u64>,
    /// Seconds since 1970 from which a removed volume is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purge_at: Option<u64>,
    /// Acknowledged writes may be gone: clients on other machines are refused.
    pub has_lost_writes: bool,
    /// The volume is behind the others in the store.
    pub is_stalled: bool,
    /// It is not served, because a spill file is missing here, or its dedicated key is gone.
    pub is_closed: bool,
    /// Snapshot that it was made from and still depends on: `VOLUME@NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Progress of making it independent, in bytes of its size that are done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted_bytes: Option<u64>,
    /// Seconds since 1970 from which it is removed automatically.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
    /// Id of the volume that its dedicated key was made for; clones share it. Absent: it uses the
    /// pool's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedicated_key: Option<u32>,
    /// Results of deduplication; absent if it is off and no duplicates were found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupInfo>,
    /// Problem that remains after the request was carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Results of deduplication, of one volume or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DedupInfo {
    /// Deduplication is on for the volume, or for some volume.
    pub is_on: bool,
    /// Blocks of 4 KiB that were destaged with deduplication since the volumes were made, except
    /// blocks of zeroes.
    pub block_count: u64,
    /// Number of these blocks that were already stored.
    pub duplicate_count: u64,
    /// Blocks per stored block; 0 before any was stored.
    pub ratio: f64,
}
