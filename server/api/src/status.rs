//! The state of a pool: its owner, what is at risk, and the counters of each part.
//!
//! Invariant: counters count since the start of the daemon unless they say otherwise.

use crate::key::KeySlotInfo;
use crate::member::MembersInfo;
use crate::node::NodeStatus;
use crate::restore::RestoreInfo;
use crate::volume::DedupInfo;
use block::quantities::ByteSize;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// Data that the store lacks: it is on this machine, or on those of the log's members.
    pub at_risk: AtRisk,
    /// The members of the write log; absent for a log on one machine without a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<MembersInfo>,
    /// The write log.
    pub log: LogInfo,
    /// The destage job.
    pub destage: DestageInfo,
    /// The data tier.
    pub tier: TierInfo,
    /// Space in the store.
    pub space: SpaceInfo,
    /// The data stores; absent if segments are objects of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_stores: Option<DataStoresInfo>,
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
    /// Place of the directory in its cluster; absent if it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeStatus>,
    /// Memory budget in bytes.
    pub memory_bytes_max: u64,
    /// Ways to open the pool.
    pub key_slots: Vec<KeySlotInfo>,
    /// There is a recovery key.
    pub has_recovery_key: bool,
    /// The conditions for operators, one line each.
    pub warnings: Vec<String>,
    /// Current conditions, oldest first.
    pub conditions: Vec<ConditionInfo>,
    /// Counts for each kind of condition, by the name in the manual.
    pub condition_counts: BTreeMap<String, ConditionCount>,
    /// Number of conditions that were raised but not listed because there were too many.
    pub condition_excluded_count: u64,
}

/// The data stores, which hold the segments in fragments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataStoresInfo {
    /// Scheme of new segments, such as `4+2`: numbers of data and parity fragments.
    pub scheme: String,
    /// The media group of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The stores.
    pub stores: Vec<DataStoreInfo>,
    /// Requests for ranges of fragments since the start.
    pub read_count: u64,
    /// Reads whose fragment was not had in time, and was made from others.
    pub degraded_read_count: u64,
    /// Reads that were tried another way because the answer was late.
    pub hedged_read_count: u64,
    /// Fragments that another store was asked to take, too, because one was late.
    #[serde(default)]
    pub hedged_write_count: u64,
    /// Reads of the object of a segment in fragments, too few of which were had.
    #[serde(default)]
    pub object_read_count: u64,
    /// Bytes of fragments written since the start.
    pub written_bytes: u64,
    /// Fragments for which no store was left since the start.
    pub missing_write_count: u64,
    /// What the segments would survive, as the last walk through all of them has counted; absent before the first
    /// and if no daemon runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redundancy: Option<RedundancyInfo>,
    /// Space by tier, as the same walk has counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space: Option<TierSpaceInfo>,
    /// Segments that lack fragments and wait to be rebuilt.
    pub rebuild_left_count: u64,
    /// Estimated seconds until there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild_left_seconds: Option<u64>,
    /// Fragments that were rebuilt since the start.
    pub rebuilt_count: u64,
    /// Bytes of them.
    pub rebuilt_bytes: u64,
    /// Reason why the last segment could not be rebuilt, until one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild_failure: Option<String>,
    /// The check of all segments after the last rebuild; absent before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild_check: Option<RebuildCheckInfo>,
    /// The job of `data rebalance`; absent if it has moved nothing since the start, and is not to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebalance: Option<RebalanceInfo>,
    /// The job that moves segments between the data stores and the object store; absent if they stay in the data stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<TiersInfo>,
}

/// The job that moves segments between the data stores and the object store. The first counts are those of its last walk
/// through all segments, without those that were done since; the others are since the start of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TiersInfo {
    /// Where segments are to be: `both` or `object-store`.
    pub tiers: String,
    /// Seconds without a read after which a segment is cold.
    pub cold_after_seconds: u64,
    /// Segments to be copied to the object store.
    pub to_copy_count: u64,
    /// Bytes of them.
    pub to_copy_bytes: u64,
    /// Segments to be dropped from the data stores.
    pub to_drop_count: u64,
    /// Bytes of them.
    pub to_drop_bytes: u64,
    /// Segments to be brought back to the data stores.
    pub to_bring_back_count: u64,
    /// Bytes of them.
    pub to_bring_back_bytes: u64,
    /// Segments copied.
    pub copied_count: u64,
    /// Bytes of them.
    pub copied_bytes: u64,
    /// Segments dropped.
    pub dropped_count: u64,
    /// Bytes of them.
    pub dropped_bytes: u64,
    /// Segments brought back.
    pub brought_back_count: u64,
    /// Bytes of them.
    pub brought_back_bytes: u64,
    /// Objects that were not what their fragments are, and were rewritten.
    pub rewritten_count: u64,
    /// The data stores have little room: segments are dropped before they are cold, and none are brought back.
    #[serde(default)]
    pub is_short: bool,
    /// Reason why the last segment could not be moved, until one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The check after a rebuild: the data stores list their fragments, and a sample of the segments is verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildCheckInfo {
    /// It has ended, and all segments had all fragments: the rebuild is done.
    pub is_whole: bool,
    /// The stores of which segments name fragments.
    pub store_count: u64,
    /// Those of them that have listed theirs.
    pub listed_count: u64,
    /// Segments of the pool when it began.
    pub segment_count: u64,
    /// Segments that were verified by checksum.
    pub verified_count: u64,
    /// Fragments that were missing or damaged, and were rebuilt.
    pub found_count: u64,
    /// Estimated seconds until it ends; absent until the stores have listed theirs, and once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_seconds: Option<u64>,
}

/// The job that moves fragments to where they would be if their segments were written now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebalanceInfo {
    /// It is to run, until nothing is left to move or it is stopped.
    pub is_running: bool,
    /// All segments of the pool, as the last walk through them has counted.
    pub segment_count: u64,
    /// Segments of which that walk has found fragments to move.
    pub misplaced_count: u64,
    /// Those of them that are left.
    pub left_count: u64,
    /// Fragments that wait for a store that fails.
    pub waiting_count: u64,
    /// Fragments moved since the start of the daemon.
    pub moved_count: u64,
    /// Bytes of them.
    pub moved_bytes: u64,
    /// Estimated seconds until `left_count` is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_seconds: Option<u64>,
    /// Reason why the last segment could not be moved, until one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// What the segments of a pool would survive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedundancyInfo {
    /// The segments by what they survive, the fewest losses first.
    pub survivals: Vec<SurvivalInfo>,
    /// Segments that lack fragments.
    pub lacking_count: u64,
    /// Bytes of them.
    pub lacking_bytes: u64,
}

/// In place of a number of losses: of all data stores, because the object store has the segments, too.
pub const ANY_LOSS: u8 = u8::MAX;

/// Segments that survive the same number of further losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurvivalInfo {
    /// Number of further data stores that may be lost, whichever they are; 255: all of them, because the object store has
    /// the segments, too; absent: the segments cannot be read now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub losses: Option<u8>,
    /// Bytes of the segments.
    pub bytes: u64,
}

/// Tells in words how many further losses of data stores the parts of the data survive, and their bytes; `None` if there is
/// no part. The parts come in the order of their losses, those first that cannot be read.
#[must_use]
pub fn survival_words(parts: impl Iterator<Item = (Option<u8>, u64)>) -> Option<String> {
    let parts: Vec<(Option<u8>, u64)> = parts.collect();
    let is_all = parts.len() == 1;
    let mut is_any_said = false;
    let part = |(losses, bytes): (Option<u8>, u64)| {
        let subject = if is_all { "everything".to_owned() } else { ByteSize(bytes).rounded() };
        let is_first = !std::mem::replace(&mut is_any_said, true);
        match losses {
            None => format!("{subject} CANNOT BE READ until stores are back"),
            Some(0) => format!("{subject} would be LOST with one more store"),
            Some(ANY_LOSS) => format!("{subject} survives the loss of all data stores"),
            Some(losses) if !is_first => format!("{subject} of any {losses}"),
            Some(1) => format!("{subject} survives the loss of any store"),
            Some(losses) => format!("{subject} survives the loss of any {losses} stores"),
        }
    };
    let said: Vec<String> = parts.into_iter().rev().map(part).collect();
    (!said.is_empty()).then(|| said.join(", "))
}

/// Space that segments take, by tier: objects of the pool's store, fragments on data stores, and both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierSpaceInfo {
    /// Segments that are only objects.
    pub object_count: u64,
    /// Bytes of them.
    pub object_bytes: u64,
    /// Segments in fragments.
    pub coded_count: u64,
    /// Bytes of them, without parity.
    pub coded_bytes: u64,
    /// Those of them that are objects, too.
    #[serde(default)]
    pub copied_count: u64,
    /// Bytes of their objects.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Bytes of their stored fragments of data, without headers and checksums.
    pub data_bytes: u64,
    /// Bytes of their stored fragments of parity, and of further copies of small segments.
    pub parity_bytes: u64,
}

/// A data store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataStoreInfo {
    /// Its URL.
    pub url: String,
    /// Its failure domain.
    pub domain: String,
    /// The media group of a drive of a data node, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Its share of new fragments, relative to the others.
    pub weight: u32,
    /// `data drain` or `data replace` takes it out: it gets no new fragments, and those on it move to others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_draining: bool,
    /// `data replace` or its media group has added it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_added: bool,
    /// The configuration of the owner names it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_configured: bool,
    /// It is draining or leaving, and no segment needs it any more, as the last walk has found.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_empty: bool,
    /// Fragments on it that segments name, as the last walk has counted; absent before the first and if no daemon runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fragment_count: Option<u64>,
    /// Bytes of them, about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fragment_bytes: Option<u64>,
    /// Bytes that it can hold, as it was last asked; absent for a bucket, and if it did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Bytes of them that are free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// It is no longer configured, and gets no new fragments.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_leaving: bool,
    /// It has been away for so long that its fragments are rebuilt elsewhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_lost: bool,
    /// The cause of its last failure, while it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
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
    pub stalled: Vec<StalledInfo>,
}

/// A volume that is behind the others in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StalledInfo {
    /// Its id.
    pub volume: u32,
    /// Its name.
    pub name: String,
    /// First write that the store may lack.
    pub since_lsn: u64,
    /// Bytes of it that only the log has.
    pub log_bytes: u64,
    /// Bytes of it that only spill files have.
    pub spill_bytes: u64,
    /// Number of its spill files.
    pub spill_file_count: u64,
    /// It refuses writes.
    pub is_refusing_writes: bool,
    /// It is not served, because a spill file is missing here.
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
    pub reopen_count: u64,
    /// Frames found in memory since the start.
    pub memory_hit_count: u64,
    /// Frames found in the NVMe cache.
    pub cache_hit_count: u64,
    /// Frames read from the store.
    pub store_frame_count: u64,
    /// Frames and objects that arrived damaged from the store and were read once more.
    pub store_refetch_count: u64,
    /// Frames that were damaged the second time, too: their copy in the store is bad.
    pub store_bad_count: u64,
    /// Segments that were damaged or missing in the store and were repaired from a copy, since the
    /// start.
    pub repaired_count: u64,
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
    pub held_count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_the_data_is_said_with_what_it_survives() {
        let said = |parts: &[(Option<u8>, u64)]| survival_words(parts.iter().copied());
        assert_eq!(said(&[]), None);
        for (losses, words) in [
            (None, "everything CANNOT BE READ until stores are back"),
            (Some(0), "everything would be LOST with one more store"),
            (Some(1), "everything survives the loss of any store"),
            (Some(3), "everything survives the loss of any 3 stores"),
            (Some(ANY_LOSS), "everything survives the loss of all data stores"),
        ] {
            assert_eq!(said(&[(losses, 5)]).as_deref(), Some(words));
        }
        let all = [(None, 1 << 20), (Some(0), 5 << 20), (Some(1), 30 << 20), (Some(2), 1 << 30)];
        assert_eq!(
            said(&all).as_deref(),
            Some(
                "1.00 GiB survives the loss of any 2 stores, 30.0 MiB of any 1, 5.00 MiB would be LOST with one more store, \
                 1.00 MiB CANNOT BE READ until stores are back"
            )
        );
        let all = [(Some(1), 5 << 20), (Some(2), 30 << 20), (Some(ANY_LOSS), 1 << 30)];
        assert_eq!(
            said(&all).as_deref(),
            Some(
                "1.00 GiB survives the loss of all data stores, 30.0 MiB of any 2, 5.00 MiB of any 1"
            )
        );
    }
}
