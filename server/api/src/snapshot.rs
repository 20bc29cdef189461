//! Snapshots, their schedules, and the differences between two of them.

use serde::{Deserialize, Serialize};

/// A request about snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum SnapshotRequest {
    /// Makes a snapshot of each of several volumes, at the same instant. `Busy` if one of that name
    /// exists.
    Create {
        /// `VOLUME@NAME`, or several volumes before the `@`, separated by commas.
        snapshot: String,
    },
    /// Lists all snapshots, or those of one volume.
    List {
        /// Name of the volume.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<String>,
        /// Includes the space that each alone holds, which requires a walk of the changed metadata.
        #[serde(default)]
        space: bool,
    },
    /// Lists the changes from one snapshot to a later one of the same volume.
    Diff {
        /// `VOLUME@NAME`, the older one.
        older: String,
        /// `VOLUME@NAME`.
        newer: String,
        /// Start at this byte.
        #[serde(default)]
        offset: u64,
    },
    /// Shows the next actions of a volume's schedule of snapshots, after changing it if requested.
    Schedule {
        /// Name of the volume.
        volume: String,
        /// The change; absent: none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        change: Option<ScheduleChange>,
    },
    /// Rolls a volume back to one of its snapshots. `Busy` while it is in use.
    Rollback {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
    /// Removes a snapshot. `Busy` while a client has it open, or a clone depends on it.
    Remove {
        /// `VOLUME@NAME`.
        snapshot: String,
    },
}

/// A change of a volume's schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScheduleChange {
    /// Sets or replaces the schedule.
    Set {
        /// Times in the format of cron.
        cron: String,
        /// Snapshots to keep.
        keep: Keep,
    },
    /// Ends the schedule; its snapshots stay.
    Off,
}

/// Number of snapshots that a schedule keeps: the newest one of each of the last hours, days, weeks
/// (from Monday on) and months that have any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// Number of hours.
    pub hourly: u32,
    /// Number of days.
    pub daily: u32,
    /// Number of weeks.
    pub weekly: u32,
    /// Number of months.
    pub monthly: u32,
}

impl Default for Keep {
    fn default() -> Self {
        Keep { hourly: 24, daily: 7, weekly: 4, monthly: 12 }
    }
}

/// A snapshot in reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
