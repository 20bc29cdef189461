//! Contents of the replies, also printed by `-o json`. Each shape is defined once.

use control::keys::SlotKind;
use engine::record::Durability;
use engine::schedule::Keep;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A volume in reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    #[serde(default)]
    pub is_stepped_back: bool,
    /// The volume is behind the others in the store.
    #[serde(default)]
    pub is_aside: bool,
    /// It is not served, because a side file is missing here, or its own key is gone.
    #[serde(default)]
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
    /// Id of the volume that its own key was made for; clones share it. Absent: it uses the pool's
    /// key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_key: Option<u32>,
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

/// A snapshot in reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Name of its volume.
    pub volume: String,
    /// Its own name.
    pub name: String,
    /// Position in the history of the pool; the same for snapshots of one instant.
    pub lsn: u64,
    /// Size of the volume at that time, in bytes.
    pub size_bytes: u64,
    /// Seconds since 1970.
    pub created_at: u64,
    /// The store has it. Until then it exists only on this machine.
    pub is_in_store: bool,
    /// Estimated bytes in the store that it alone holds, if requested and it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<u64>,
}

/// A copy of the pool in another store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyInfo {
    /// URL of the copy.
    pub url: String,
    /// Prefix of the variables with settings and credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    /// Seconds from the start of one state to the start of the next.
    pub interval_seconds: u64,
    /// States are made only when snapshots have come or gone.
    pub is_snapshots_only: bool,
    /// Maximum bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// It has a key of its own: the keys of the pool do not open it.
    #[serde(default)]
    pub has_own_key: bool,
    /// Names of the volumes that it contains; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<String>>,
    /// Seconds since 1970.
    pub created_at: u64,
    /// A daemon keeps it up to date; otherwise the fields below are unknown.
    pub is_running: bool,
    /// Newest complete state there; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<CopyStateInfo>,
    /// Seconds by which it is behind the pool; 0 if it has everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<u64>,
    /// Estimated bytes written to the pool since that state.
    pub lag_bytes: u64,
    /// It may have keys of volumes that were destroyed since.
    #[serde(default)]
    pub has_destroyed_keys: bool,
    /// Progress of the current pass, in thousandths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_permille: Option<u64>,
    /// Bytes copied since the start.
    pub copied_bytes: u64,
    /// Objects copied since the start.
    pub copied_count: u64,
    /// Objects deleted in the copy since the start.
    pub deleted_count: u64,
    /// Objects there that no newer state needs but that are not deleted yet.
    pub waiting_count: u64,
    /// Segments that were damaged, or missing, in the pool's store.
    pub damaged_count: u64,
    /// Reason why it is not being brought up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Duration of the failure in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_seconds: Option<u64>,
}

/// A complete state of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStateInfo {
    /// Number of the state, counting up.
    pub number: u64,
    /// Time of the pool's state, in seconds since 1970.
    pub as_of: u64,
    /// It contains everything in the pool's history up to here.
    pub destaged_lsn: u64,
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of the segments.
    pub segment_bytes: u64,
    /// Number of volumes whose state in it is older than that of the others.
    pub aside_count: u64,
}

/// A schedule in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleSet {
    /// Times in the format of cron.
    pub cron: String,
    /// Snapshots to keep.
    pub keep: Keep,
}

/// A volume's schedule and its next actions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleInfo {
    /// Name of the volume.
    pub volume: String,
    /// Times in the format of cron, if there is a schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// Snapshots to keep, if there is a schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Next time, in seconds since 1970.
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
    /// Reason why the next run keeps it; absent: the next run removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_as: Option<String>,
}

/// Differences between two snapshots of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffInfo {
    /// Sorted, disjoint.
    pub extents: Vec<DiffExtent>,
    /// Offset to continue at, if there may be more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
}

/// Bytes that differ, or that were rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffExtent {
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The newer snapshot has no data there and reads as zeroes.
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
    /// URL of its store.
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
    /// Addresses that clients connect to.
    pub endpoints: Vec<String>,
    /// Number of volumes that are present.
    pub volume_count: u64,
    /// Data that exists only on this machine.
    pub at_risk: AtRisk,
    /// The write log.
    pub log: LogInfo,
    /// The destage job.
    pub destage: DestageInfo,
    /// The data tier.
    pub tier: TierInfo,
    /// Space in the store.
    #[serde(default)]
    pub space: SpaceInfo,
    /// Results of deduplication, of all present volumes; absent if no volume uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupInfo>,
    /// Origin of a restored pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<RestoreInfo>,
    /// The NBD server; absent if no daemon runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<NbdInfo>,
    /// The read cache on disk; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheInfo>,
    /// Memory budget in bytes.
    pub memory_bytes_max: u64,
    /// Ways to open the pool.
    #[serde(default)]
    pub key_slots: Vec<KeySlotInfo>,
    /// There is a recovery key.
    pub has_recovery_key: bool,
    /// The conditions for operators, one line each.
    pub warnings: Vec<String>,
    /// Current conditions, oldest first.
    #[serde(default)]
    pub conditions: Vec<ConditionInfo>,
    /// Counts for each kind of condition, by the name in the manual.
    #[serde(default)]
    pub condition_counts: BTreeMap<String, ConditionCount>,
    /// Number of conditions that were raised but not listed because there were too many.
    #[serde(default)]
    pub condition_excluded_count: u64,
}

/// Conditions of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionCount {
    /// Raised since the start.
    pub raised_count: u64,
    /// Number of current ones.
    pub lasting_count: u64,
}

/// A current condition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConditionInfo {
    /// Its kind, one of those that the manual lists.
    pub kind: String,
    /// The affected object: a volume, an object, a copy, a job.
    pub subject: String,
    /// The fact and its cause.
    pub what: String,
    /// Start, in seconds since 1970.
    pub since: u64,
    /// Seconds for which it has lasted.
    pub seconds: u64,
    /// Effect while it lasts.
    pub cost: String,
    /// Action to take.
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

/// Origin of a restored pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreInfo {
    /// URL of the copy.
    pub url: String,
    /// Number of the state there.
    pub state: u64,
    /// Time of the copied pool's state, in seconds since 1970.
    pub as_of: u64,
    /// The pool is complete, and does not need the copy any more.
    pub is_whole: bool,
    /// Bytes that are still to be fetched; an upper bound until the metadata is here.
    pub left_bytes: u64,
    /// Bytes fetched since the start.
    pub done_bytes: u64,
    /// Estimated seconds left, from the pace since the start, once there is one.
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
    /// Number of these answered with an error.
    pub error_count: u64,
    /// Memory in use for requests in flight, in bytes.
    pub payload_bytes: u64,
}

/// The read cache on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheInfo {
    /// The cache works. It turns itself off until the next start if its disk fails too often.
    pub is_on: bool,
    /// Frames in the cache.
    pub frame_count: u64,
    /// Bytes of its disk in use.
    pub used_bytes: u64,
    /// Bytes that wait in memory to be written.
    pub pending_bytes: u64,
    /// Frames written since the start.
    pub insert_count: u64,
    /// Frames not written because too much was waiting.
    pub dropped_count: u64,
    /// Frames that did not verify in the cache and were read from the store instead.
    pub bad_count: u64,
    /// Failed reads and writes of its disk.
    pub error_count: u64,
}

/// One way to open the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySlotInfo {
    /// Kind of secret that opens it.
    pub kind: SlotKind,
    /// Seconds since 1970.
    pub created_at: u64,
}

/// Data that would be lost if this machine never came back.
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
    /// Size in bytes.
    pub ring_bytes: u64,
    /// Newest entry.
    pub last_lsn: u64,
    /// Newest entry on stable storage.
    pub durable_lsn: u64,
    /// Newest entry in the store.
    pub destaged_lsn: u64,
    /// Reason why the log no longer serves requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The destage job.
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
    /// Reason why the latest attempt failed, until one succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Volumes that are behind the others in the store.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aside: Vec<AsideInfo>,
}

/// A volume that is behind the others in the store.
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
    pub spill_bytes: u64,
    /// Number of its side files.
    pub spill_file_count: u64,
    /// It refuses writes.
    pub is_refusing_writes: bool,
    /// It is not served, because a side file is missing here.
    pub is_closed: bool,
    /// Reason.
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
    /// Reason why the last upload failed, until one succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_failure: Option<String>,
    /// Reason why the last read from the store failed, until one succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_failure: Option<String>,
    /// Number of times since the start that the metadata database had ended and was opened again.
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
    /// Frames that were damaged the second time, too: their copy in the store is bad.
    #[serde(default)]
    pub store_bad_count: u64,
    /// Segments that were damaged or missing in the store and were put back from a copy, since the start.
    #[serde(default)]
    pub mended_count: u64,
}

/// Contents of the store, and how space is reclaimed. Counts only segments; the metadata comes on
/// top.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpaceInfo {
    /// The next four fields are valid: all segments were looked at once since the start.
    pub is_known: bool,
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub stored_bytes: u64,
    /// Estimated bytes of them that are live.
    pub live_bytes: u64,
    /// Stored bytes per live byte.
    pub space_amplification: f64,
    /// Bytes of segments that were reclaimed since the start.
    pub reclaimed_bytes: u64,
    /// Bytes of segments that live data was moved to, since the start.
    pub moved_bytes: u64,
    /// Bytes of the metadata written since the start.
    pub metadata_bytes: u64,
    /// Bytes written to the store per byte that destage wrote, since the start; 0 before it has
    /// written.
    pub write_amplification: f64,
    /// Segments that cannot be reclaimed.
    pub stuck_count: u64,
    /// Segments that were reclaimed but not deleted yet, because copies still need them.
    #[serde(default)]
    pub held_count: u64,
}

/// State of the pool's scrub: the current run, or the newest one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// A daemon serves the pool, so the scrub makes progress.
    pub is_served: bool,
    /// It is under way.
    pub is_running: bool,
    /// It was stopped before it had checked everything, and continues when it is started again.
    pub is_stopped: bool,
    /// Start of the run, in seconds since 1970; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<u64>,
    /// End of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<u64>,
    /// Start of the next run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_at: Option<u64>,
    /// Progress through the numbers of segments, in thousandths.
    pub permille: u64,
    /// Pace.
    pub bytes_per_second: u64,
    /// Seconds from the start of one run to the start of the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Segments that were checked.
    pub segment_count: u64,
    /// Frames in the intact ones.
    pub frame_count: u64,
    /// Bytes of their objects.
    pub object_bytes: u64,
    /// Segments that were put back from copies.
    pub mended_count: u64,
    /// Segments that are damaged or missing and are in no copy.
    pub bad_count: u64,
    /// The first of these, including those of the previous run until they are checked again.
    pub bad: Vec<BadSegmentInfo>,
    /// Reason why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Seconds for which it has been waiting.
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
    /// Problem with it, and with its copies.
    pub why: String,
}

/// Findings of `spindle fsck`.
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
    /// Blocks stored by volumes.
    pub block_count: u64,
    /// Segments that were reclaimed during the check; their contents were not checked again.
    #[serde(default)]
    pub reclaimed_count: u64,
    /// Number of problems. 0: the pool is consistent.
    pub problem_count: u64,
    /// The first of them, one sentence each.
    pub problems: Vec<String>,
    /// Numbers of segments with wrong counts of live blocks, to be passed to `repair_counts`.
    #[serde(default)]
    pub miscounted: Vec<u64>,
}
