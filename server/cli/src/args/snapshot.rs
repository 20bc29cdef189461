//! Commands about snapshots, and the requests that they send.

use super::PoolArgs;
use api::Request;
use api::snapshot::{Keep, ScheduleChange, SnapshotRequest};
use clap::Subcommand;

/// Commands about snapshots.
#[derive(Clone, Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Create a snapshot: `snapshot create db@monday`, or of several volumes at the same instant: `db,wal@monday`
    Create {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME, or VOLUME,VOLUME@NAME
        snapshot: String,
    },
    /// List snapshots, oldest first
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// List only the snapshots of this volume
        volume: Option<String>,
        /// Show the space that each snapshot alone holds, which returns when it is removed
        #[arg(long)]
        space: bool,
    },
    /// List the byte ranges that changed from one snapshot to a later one, sorted, for backup programs
    Diff {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Earlier snapshot: VOLUME@NAME
        older: String,
        /// Later snapshot of the same volume: VOLUME@NAME
        newer: String,
    },
    /// Create snapshots of a volume by schedule, or show which snapshots its schedule keeps and removes next
    Schedule {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        volume: String,
        /// Times in UTC as a cron expression: "0 * * * *", @hourly, @daily; without it, the schedule is only shown
        cron: Option<String>,
        /// Keep the newest snapshot of each of the last COUNT hours that have any; without any count: 24 hours, 7 days,
        /// 4 weeks and 12 months
        #[arg(long, value_name = "COUNT", requires = "cron")]
        hourly: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT days that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        daily: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT weeks that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        weekly: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT months that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        monthly: Option<u32>,
        /// End the schedule; its snapshots stay
        #[arg(long, conflicts_with = "cron")]
        off: bool,
    },
    /// Set a volume that is not in use back to one of its snapshots; all snapshots stay
    Rollback {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME
        snapshot: String,
    },
    /// Remove a snapshot that no client has open and no clone depends on
    Rm {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME
        snapshot: String,
    },
}

impl SnapshotCommand {
    pub(super) fn request(&self) -> (&PoolArgs, Request) {
        let (pool, request) = match self {
            SnapshotCommand::Create { pool, snapshot } => {
                (pool, SnapshotRequest::Create { snapshot: snapshot.clone() })
            }
            SnapshotCommand::List { pool, volume, space } => {
                (pool, SnapshotRequest::List { volume: volume.clone(), space: *space })
            }
            SnapshotCommand::Diff { pool, older, newer } => {
                let (older, newer) = (older.clone(), newer.clone());
                (pool, SnapshotRequest::Diff { older, newer, offset: 0 })
            }
            SnapshotCommand::Schedule {
                pool,
                volume,
                cron,
                hourly,
                daily,
                weekly,
                monthly,
                off,
            } => {
                let keep = keep_of([*hourly, *daily, *weekly, *monthly]);
                let change = match (cron, off) {
                    (Some(cron), _) => Some(ScheduleChange::Set { cron: cron.clone(), keep }),
                    (None, true) => Some(ScheduleChange::Off),
                    (None, false) => None,
                };
                (pool, SnapshotRequest::Schedule { volume: volume.clone(), change })
            }
            SnapshotCommand::Rollback { pool, snapshot } => {
                (pool, SnapshotRequest::Rollback { snapshot: snapshot.clone() })
            }
            SnapshotCommand::Rm { pool, snapshot } => {
                (pool, SnapshotRequest::Remove { snapshot: snapshot.clone() })
            }
        };
        (pool, Request::Snapshot(request))
    }
}

/// Returns the counts to keep: the default without any flag, otherwise 0 for a flag that is absent.
fn keep_of(counts: [Option<u32>; 4]) -> Keep {
    if counts.iter().all(Option::is_none) {
        return Keep::default();
    }
    let [hourly, daily, weekly, monthly] = counts.map(|count| count.unwrap_or(0));
    Keep { hourly, daily, weekly, monthly }
}
