//! What replies hold, and `-o json` prints: one home for each shape.

use crate::keys::SlotKind;
use crate::record::Durability;
use crate::schedule::Keep;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A volume, as the admin sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeInfo {
    /// Identity within the pool.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// As configured; `auto` where it was left to the pool.
    pub durability: Durability,
    /// No write is accepted.
    pub is_read_only: bool,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Seconds since 1970 when it was removed, for a volume that can still be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed_at: Option<u64>,
    /// Seconds since 1970 from which a removed volume is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purge_at: Option<u64>,
    /// Answered writes may be gone: clients on other machines are refused.
    #[serde(default)]
    pub is_stepped_back: bool,
    /// The store holds it less far than the other volumes.
    #[serde(default)]
    pub is_aside: bool,
    /// Nothing of it is served, because a side file is missing here, or its own key is gone.
    #[serde(default)]
    pub is_closed: bool,
    /// What it was made from and still depends on: `VOLUME@NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// It is being made independent of that: bytes of its size that are done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted_bytes: Option<u64>,
    /// Seconds since 1970 from which it is removed by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
    /// Id of the volume that its own key was made for: clones share it. Absent: it is under the pool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_key: Option<u32>,
    /// What deduplication has found; absent where it is off and nothing was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupInfo>,
    /// What did not follow a request that was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// What deduplication has found, of a volume or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DedupInfo {
    /// Blocks that are stored already are looked for, of the volume or of some volume.
    pub is_on: bool,
    /// Blocks of 4 KiB that were destaged with it since the volumes were made, those of zeroes aside.
    pub block_count: u64,
    /// Of these, blocks that were stored already.
    pub duplicate_count: u64,
    /// Blocks for each that was stored; 0 before any was.
    pub ratio: f64,
}

/// A snapshot, as the admin sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Name of its volume.
    pub volume: String,
    /// Its own name.
    pub name: String,
    /// Where it is in the history of the pool: snapshots of one instant have the same.
    pub lsn: u64,
    /// Size of the volume then, in bytes.
    pub size_bytes: u64,
    /// Seconds since 1970.
    pub created_at: u64,
    /// The store has it. Until then it is on this machine only.
    pub is_in_store: bool,
    /// Bytes of the store that it alone holds, where that was asked for and it is there: an estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<u64>,
}

/// A copy of the pool in another store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyInfo {
    /// Where it is.
    pub url: String,
    /// Settings and credentials are in variables that begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the beginning of one state to that of the next.
    pub interval_seconds: u64,
    /// Only when snapshots have come or gone.
    pub is_snapshots_only: bool,
    /// Bytes a second, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// It has a key of its own: what opens the pool does not open it.
    #[serde(default)]
    pub has_own_key: bool,
    /// Names of the volumes that it is of; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<String>>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// A daemon brings it up to date; otherwise nothing more than this is known.
    pub is_running: bool,
    /// The newest whole state there; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<CopyStateInfo>,
    /// Seconds by which it is behind the pool, 0 where it has everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<u64>,
    /// Bytes that the pool has got since that state: an estimate.
    pub lag_bytes: u64,
    /// It may have keys of volumes that were destroyed since.
    #[serde(default)]
    pub has_destroyed_keys: bool,
    /// Thousandths of the pass that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_permille: Option<u64>,
    /// Bytes copied since the start.
    pub copied_bytes: u64,
    /// Objects copied since the start.
    pub copied_count: u64,
    /// Objects deleted in the copy since the start.
    pub deleted_count: u64,
    /// Objects there that no newer state needs and that are not deleted yet.
    pub waiting_count: u64,
    /// Segments that were damaged, or missing, in the pool's store.
    pub damaged_count: u64,
    /// Why it is not brought up to date, while that lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Seconds for which that has lasted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_seconds: Option<u64>,
}

/// A whole state of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStateInfo {
    /// Its number, counting up.
    pub number: u64,
    /// When the pool was so, in seconds since 1970.
    pub as_of: u64,
    /// Everything of the pool's history up to here is in it.
    pub destaged_lsn: u64,
    /// Segments.
    pub segment_count: u64,
    /// Bytes of them.
    pub segment_bytes: u64,
    /// Volumes of which it has less than of the others.
    pub aside_count: u64,
}

/// A schedule as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleSet {
    /// As cron has it.
    pub cron: String,
    /// What is kept.
    pub keep: Keep,
}

/// A volume's schedule, and what it does next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleInfo {
    /// Name of the volume.
    pub volume: String,
    /// When it comes, in the words of cron, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// What is kept, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Seconds since 1970 when it comes next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_at: Option<u64>,
    /// Snapshots that it has made, oldest first.
    pub snapshots: Vec<ScheduledInfo>,
}

/// A snapshot that a schedule has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduledInfo {
    /// Its name.
    pub name: String,
    /// Seconds since 1970.
    pub created_at: u64,
    /// Why it is kept when the schedule comes next; absent: it is removed then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_as: Option<String>,
}

/// What differs between two snapshots of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffInfo {
    /// Sorted, disjoint.
    pub extents: Vec<DiffExtent>,
    /// Where to go on, if there may be more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
}

/// Bytes that differ, or that were written anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffExtent {
    /// Where, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
    /// The newer one has nothing there: it reads as zeroes.
    pub is_hole: bool,
}

/// The state of a pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Version of the daemon.
    pub version: String,
    /// The pool's identity.
    pub pool: String,
    /// Its name.
    pub name: String,
    /// Where its data is.
    pub store: String,
    /// The owner's term.
    pub epoch: u64,
    /// Host of the owner.
    pub host: String,
    /// Process of the owner.
    pub pid: u32,
    /// Seconds since 1970.
    pub opened_at: u64,
    /// No daemon runs: the pool was opened for this request only.
    pub is_offline: bool,
    /// Where clients connect.
    pub endpoints: Vec<String>,
    /// Volumes that are present.
    pub volume_count: u64,
    /// What only this machine has.
    pub at_risk: AtRisk,
    /// The write log.
    pub log: LogInfo,
    /// The way to the store.
    pub destage: DestageInfo,
    /// The data tier.
    pub tier: TierInfo,
    /// What the store holds.
    #[serde(default)]
    pub space: SpaceInfo,
    /// What deduplication has found, of all volumes that are there; absent where no volume has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupInfo>,
    /// What the pool was restored from, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<RestoreInfo>,
    /// The NBD server; absent where no daemon runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<NbdInfo>,
    /// The read cache on disk; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheInfo>,
    /// Memory budget in bytes.
    pub memory_bytes_max: u64,
    /// What opens the pool.
    #[serde(default)]
    pub key_slots: Vec<KeySlotInfo>,
    /// A recovery key was made.
    pub has_recovery_key: bool,
    /// What a person should know or do: the conditions, one line each.
    pub warnings: Vec<String>,
    /// The conditions that last, the oldest first.
    #[serde(default)]
    pub conditions: Vec<ConditionInfo>,
    /// Each kind of condition, by the name that the manual lists.
    #[serde(default)]
    pub condition_counts: BTreeMap<String, ConditionCount>,
    /// Conditions that were raised and are not listed, because there were too many.
    #[serde(default)]
    pub condition_excluded_count: u64,
}

/// Conditions of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionCount {
    /// Raised since the start.
    pub raised_count: u64,
    /// Those that last.
    pub lasting_count: u64,
}

/// A condition that lasts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConditionInfo {
    /// Its kind, one of those that the manual lists.
    pub kind: String,
    /// Names the one of its kind: a volume, an object, a copy, a job.
    pub subject: String,
    /// States the fact and its cause.
    pub what: String,
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// Seconds for which it has lasted.
    pub seconds: u64,
    /// States what it costs while it lasts.
    pub cost: String,
    /// States what to do.
    pub remedy: String,
}

impl From<block::Condition> for ConditionInfo {
    fn from(condition: block::Condition) -> Self {
        let since = condition.since.duration_since(std::time::UNIX_EPOCH);
        ConditionInfo {
            kind: condition.kind.id().to_owned(),
            subject: condition.subject,
            what: condition.report.what,
            since: since.map_or(0, |since| since.as_secs()),
            seconds: condition.lasts.as_secs(),
            cost: condition.report.cost,
            remedy: condition.report.remedy,
        }
    }
}

impl ConditionInfo {
    /// The condition as one line of `warnings`.
    #[must_use]
    pub fn line(&self) -> String {
        let ConditionInfo { what, cost, remedy, seconds, .. } = self;
        let parts = [what, cost, remedy].into_iter().filter(|part| !part.is_empty());
        let parts: Vec<&str> = parts.map(String::as_str).collect();
        format!("{} (for {seconds} s)", parts.join("; "))
    }
}

/// What a pool was restored from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreInfo {
    /// Where the copy is.
    pub url: String,
    /// Number of the state there.
    pub state: u64,
    /// When the copied pool was so, in seconds since 1970.
    pub as_of: u64,
    /// The pool has everything, and does not need the copy any more.
    pub is_whole: bool,
    /// Bytes that are still to be fetched; at most, until the metadata is here.
    pub left_bytes: u64,
    /// Bytes fetched since the start.
    pub done_bytes: u64,
    /// Seconds left at the pace since the start, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_seconds: Option<u64>,
    /// Segments that were damaged, or missing, in the copy.
    pub bad_count: u64,
}

/// The NBD server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdInfo {
    /// Open connections.
    pub connection_count: u64,
    /// Connections refused since the start because there were too many.
    pub refused_count: u64,
    /// Requests answered since the start.
    pub request_count: u64,
    /// Of them, answered with an error.
    pub error_count: u64,
    /// Memory for requests in flight that is in use, in bytes.
    pub payload_bytes: u64,
}

/// The read cache on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheInfo {
    /// It works. It turns itself off until the next start when its disk fails too often.
    pub is_on: bool,
    /// Frames that it holds.
    pub frame_count: u64,
    /// Bytes of its disk in use.
    pub used_bytes: u64,
    /// Bytes that wait in memory to be written.
    pub pending_bytes: u64,
    /// Frames written since the start.
    pub insert_count: u64,
    /// Frames not written because too much was waiting.
    pub dropped_count: u64,
    /// Frames whose copy here did not verify; each was read from the store instead.
    pub bad_count: u64,
    /// Reads and writes of its disk that failed.
    pub error_count: u64,
}

/// One way to open the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySlotInfo {
    /// What opens it.
    pub kind: SlotKind,
    /// Seconds since 1970.
    pub created_at: u64,
}

/// What would be lost should this machine never come back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AtRisk {
    /// Age of the oldest write that is not in the store, in seconds.
    pub oldest_seconds: f64,
    /// Bytes of writes that are not in the store.
    pub bytes: u64,
}

/// The write log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogInfo {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes there are.
    pub ring_bytes: u64,
    /// Newest entry.
    pub last_lsn: u64,
    /// Newest entry on stable storage.
    pub durable_lsn: u64,
    /// Newest entry in the store.
    pub destaged_lsn: u64,
    /// Why the log serves no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The way to the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestageInfo {
    /// Windows made durable since the start.
    pub window_count: u64,
    /// Bytes of volumes in them.
    pub destaged_bytes: u64,
    /// Bytes of the objects made of them.
    pub stored_bytes: u64,
    /// Attempts that failed since the start.
    pub failure_count: u64,
    /// Why the latest attempt failed, while that lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Volumes that the store holds less far than the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aside: Vec<AsideInfo>,
}

/// A volume that the store holds less far than the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsideInfo {
    /// Its id.
    pub volume: u32,
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// First write that the store may lack.
    pub since_lsn: u64,
    /// Bytes of it that only the log has.
    pub log_bytes: u64,
    /// Bytes of it that only side files have.
    pub side_bytes: u64,
    /// Its side files.
    pub side_file_count: u64,
    /// It accepts no more writes.
    pub is_refusing_writes: bool,
    /// Nothing of it is served, because a side file is missing here.
    pub is_closed: bool,
    /// What is in the way.
    pub reason: String,
}

/// The data tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierInfo {
    /// Metadata commits since the pool was made.
    pub commit_number: u64,
    /// Large trims whose pages wait to be deleted.
    pub range_count: u64,
    /// Uploads that failed and were tried again since the start.
    pub upload_retry_count: u64,
    /// Why the last upload failed, until one succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_failure: Option<String>,
    /// Why the last read from the store failed, until one succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_failure: Option<String>,
    /// Times that the metadata database had ended and was opened anew since the start.
    #[serde(default)]
    pub reopen_count: u64,
    /// Frames found in memory since the start.
    pub memory_hit_count: u64,
    /// Frames found in the NVMe cache.
    pub cache_hit_count: u64,
    /// Frames read from the store.
    pub store_frame_count: u64,
    /// Frames and objects that arrived damaged from the store and were read once more.
    #[serde(default)]
    pub store_refetch_count: u64,
    /// Frames that were damaged then, too: their copy in the store is bad.
    #[serde(default)]
    pub store_bad_count: u64,
    /// Segments that were damaged or missing in the store and were put back from a copy, since the start.
    #[serde(default)]
    pub mended_count: u64,
}

/// What the store holds, and how space comes back. All of it in segments; the metadata comes on top.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpaceInfo {
    /// What the first four say is not known before all segments were looked at once after the start.
    pub is_known: bool,
    /// Segments.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub stored_bytes: u64,
    /// The part of them that is live, estimated.
    pub live_bytes: u64,
    /// Stored bytes for each live one.
    pub space_amplification: f64,
    /// Bytes of segments that were reclaimed since the start.
    pub reclaimed_bytes: u64,
    /// Bytes of segments that live data was moved to, since the start.
    pub moved_bytes: u64,
    /// Bytes of the metadata written since the start.
    pub metadata_bytes: u64,
    /// Bytes written to the store for each that destage wrote, since the start; 0 before it has written.
    pub write_amplification: f64,
    /// Segments that cannot be reclaimed.
    pub stuck_count: u64,
    /// Segments that were reclaimed and are not deleted yet, because copies still need them.
    #[serde(default)]
    pub held_count: u64,
}

/// How the pool's scrub stands: the newest, or the one that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// A daemon serves the pool, so that it goes on.
    pub is_served: bool,
    /// It is under way.
    pub is_running: bool,
    /// It was stopped before it had looked at everything, and goes on when it is started again.
    pub is_stopped: bool,
    /// When it began, in seconds since 1970; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<u64>,
    /// When it had looked at everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<u64>,
    /// When the next one begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_at: Option<u64>,
    /// Thousandths of the numbers of segments that are done.
    pub permille: u64,
    /// Its pace.
    pub bytes_per_second: u64,
    /// Seconds from the start of one to that of the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Segments that were looked at.
    pub segment_count: u64,
    /// Frames in those that are whole.
    pub frame_count: u64,
    /// Bytes of their objects.
    pub object_bytes: u64,
    /// Segments that were put back from copies.
    pub mended_count: u64,
    /// Segments that are damaged or missing, and that no copy has.
    pub bad_count: u64,
    /// The first of them; also those of the run before, until they are looked at again.
    pub bad: Vec<BadSegmentInfo>,
    /// Why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Since how many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_seconds: Option<u64>,
}

/// A segment that is damaged or missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadSegmentInfo {
    /// Its number.
    pub number: u64,
    /// Path of its object below the pool's prefix.
    pub object: String,
    /// What is wrong with it, and with what copies have of it.
    pub why: String,
}

/// What `spindle fsck` found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckInfo {
    /// Volumes that are present or can be restored.
    pub volume_count: u64,
    /// Segments that the metadata names.
    pub segment_count: u64,
    /// Bytes of their objects, all of them read.
    pub object_bytes: u64,
    /// Frames verified.
    pub frame_count: u64,
    /// Map pages walked.
    pub page_count: u64,
    /// Blocks that volumes have stored.
    pub block_count: u64,
    /// Segments that were reclaimed during the check; what was in them was not looked at again.
    #[serde(default)]
    pub reclaimed_count: u64,
    /// How many things are wrong. 0: the pool is consistent.
    pub problem_count: u64,
    /// The first of them, one sentence each.
    pub problems: Vec<String>,
    /// Numbers of segments whose counts of live blocks are wrong: `repair_counts` takes them.
    #[serde(default)]
    pub miscounted: Vec<u64>,
}
