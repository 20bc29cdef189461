//! Conditions of the daemon: their log lines, and the texts of those that are raised in several places.
//!
//! Invariants:
//! - A condition is raised and cleared where its cause arises and ends. The `lookout` does so for conditions that only
//!   time or a disk reveals.
//! - The log says once that a condition was raised, and once that it has ended.

use crate::record::{VolumeRecord, VolumeState};
use crate::superseded::SupersededLog;
use block::conditions::{Change, Report};
use block::{ConditionKind, Conditions};
use tracing::{Level, event};

/// Subject of the conditions that exist once per pool.
pub(crate) const POOL: &str = "pool";
/// Subject of the conditions of the write log.
pub(crate) const LOG: &str = "log";
/// Subject of the conditions of the process.
pub(crate) const PROCESS: &str = "process";

/// The level of the log line. An error needs a person; a notice says that something is left to do while all is well.
fn level_of(kind: ConditionKind) -> Level {
    use ConditionKind as K;
    match kind {
        K::PoolStopped
        | K::ObjectMissing
        | K::VolumeStalled
        | K::WritesLost
        | K::KeyMissing
        | K::QuorumLost
        | K::RestoreIncomplete
        | K::SegmentsDamaged
        | K::ReclaimBlocked
        | K::JobDied
        | K::DeviceNotServed => Level::ERROR,
        K::NoRecoveryKey => Level::INFO,
        _ => Level::WARN,
    }
}

/// Writes the log line of a condition that was raised or has ended.
pub(crate) fn log(change: Change<'_>) {
    macro_rules! raised {
        ($level:expr, $condition:expr) => {
            event!(
                $level,
                condition = $condition.kind.id(),
                subject = $condition.subject,
                cost = $condition.report.cost,
                remedy = $condition.report.remedy,
                "{}",
                $condition.report.what
            )
        };
    }
    match change {
        Change::Raised(condition) => match level_of(condition.kind) {
            Level::ERROR => raised!(Level::ERROR, condition),
            Level::INFO => raised!(Level::INFO, condition),
            _ => raised!(Level::WARN, condition),
        },
        Change::Cleared(condition) => event!(
            Level::INFO,
            condition = condition.kind.id(),
            subject = condition.subject,
            seconds = condition.lasts.as_secs(),
            "the condition has ended"
        ),
    }
}

/// Sets or clears the conditions that follow from a volume's newest record.
pub(crate) fn show_record(conditions: &Conditions, record: &VolumeRecord, has_key: bool) {
    let name = &record.name;
    let is_present = record.state == VolumeState::Present;
    let lost_writes = (is_present && record.has_lost_writes).then(|| {
        Report::new(
            format!(
                "clients on other machines are refused volume {name}: answered writes may be gone since a reboot, a \
                 take-over or a loss or failure of the write log"
            ),
            "a file system that such a client had mounted would become corrupt if the client went \
             on",
            format!(
                "unmount or restart the programs that used the volume until then, and run `spindle \
                 volume accept-loss {name}`"
            ),
        )
    });
    conditions.set(ConditionKind::WritesLost, name, lost_writes);
    let keyless = (is_present && !has_key).then(|| {
        Report::new(
            format!("the volume's dedicated key is not in the store: volume {name} is not served"),
            "nothing of the volume can be read",
            "bring the newest objects below volumekeys/ back from a version or copy of the bucket, and restart spindle",
        )
    });
    conditions.set(ConditionKind::KeyMissing, name, keyless);
}

/// Shows the logs that the pool went on without, and that have writes that nothing else has.
pub(crate) fn show_superseded(conditions: &Conditions, logs: &[SupersededLog]) {
    for SupersededLog { dir, summary } in logs {
        let (entries, bytes) = (summary.contents.entry_count, summary.contents.payload_bytes);
        let bytes = bytes.saturating_add(summary.spill_bytes);
        let report = (entries > 0 || summary.spill_file_count > 0).then(|| {
            Report::new(
                format!(
                    "the pool went on without the log in {}, which holds up to {entries} changes with {bytes} bytes of \
                     data",
                    dir.display()
                ),
                "writes that were acknowledged may be in that log alone",
                "make a volume from it with `spindle volume create NAME --from-superseded VOLUME`, compare, and move the \
                 log to another directory once you have what you need",
            )
        });
        conditions.set(ConditionKind::LogSuperseded, &dir.display().to_string(), report);
    }
}

/// Clears the conditions of a name that no volume has any longer.
pub(crate) fn forget_volume(conditions: &Conditions, name: &str) {
    for kind in [ConditionKind::WritesLost, ConditionKind::KeyMissing, ConditionKind::VolumeStalled]
    {
        conditions.clear(kind, name);
    }
}

/// Sets or clears the condition that no recovery key was made.
pub fn show_recovery_key(conditions: &Conditions, is_made: bool) {
    let report = (!is_made).then(|| {
        Report::new(
            "no recovery key was made",
            "nothing opens the pool if its key file or passphrase is lost",
            "run `spindle key backup`, and keep its output elsewhere",
        )
    });
    conditions.set(ConditionKind::NoRecoveryKey, POOL, report);
}

/// Sets or clears the conditions that follow from the recovery of a log that was just opened. They last until the next
/// opening.
pub(crate) fn show_recovery(conditions: &Conditions, recovery: &wal::Recovery) {
    let report = (!recovery.is_tail_proven).then(|| {
        let reason = recovery.lost_reason.as_deref().unwrap_or("it is not known why");
        Report::new(
            format!("writes that were answered but never flushed may be gone: {reason}"),
            "programs on volumes that lost writes see the disk as it was a moment before",
            "check these programs; the condition lasts until the next start",
        )
    });
    conditions.set(ConditionKind::LogTailUnproven, LOG, report);
    let unreadable = recovery.unreadable.first().map(|first| {
        let bytes: u64 = recovery.unreadable.iter().map(|place| place.len).sum();
        Report::new(
            format!(
                "the disk of the write log does not read {bytes} bytes of it, none of which is needed; the first are \
                 {first}"
            ),
            "none yet; if the disk fails to read a needed part, the log does not open, and it may \
             be the only copy of writes",
            "stop spindle in order, which copies everything to the store, and give the log another \
             disk; the condition lasts until the next start",
        )
    });
    conditions.set(ConditionKind::LogUnreadable, LOG, unreadable);
}

/// Raises the condition that the pool has stopped for good.
pub(crate) fn show_stopped(conditions: &Conditions, why: &str) {
    let report = Report::new(
        format!("the pool has stopped: {why}"),
        "nothing is served any more",
        "remove the cause, then restart spindle; if another owner has the pool, leave it stopped \
         here",
    );
    conditions.raise(ConditionKind::PoolStopped, POOL, report);
}

/// Sets or clears the condition that the store does not say who owns the pool. `failure` is the reason.
pub(crate) fn show_contact(conditions: &Conditions, failure: Option<&str>) {
    let report = failure.map(|failure| {
        Report::new(
            format!("could not ask the store who owns the pool: {failure}"),
            "writes go on until the log is full; another owner would be noticed late",
            "check the store, the network and the credentials",
        )
    });
    conditions.set(ConditionKind::StoreUnavailable, "contact", report);
}

/// Descriptors that a pool uses besides those of connections and the ring: spill files, the metadata's requests, the
/// admin socket, devices. Chosen by hand: twice the number seen in a busy pool.
const DESCRIPTORS_BESIDE: u64 = 256;

/// Checks whether the process may open as many files as its configuration can ask for. `limit` is that of this process,
/// `None` if it has none.
pub(crate) fn show_descriptors(
    conditions: &Conditions,
    limit: Option<u64>,
    connection_count_max: u64,
    ring_file_count: u64,
) {
    // Each connection has a second descriptor, which tells whether its client is still there. Files of the ring are
    // open twice: for writing and for reading.
    let wanted = 2 * connection_count_max + 2 * ring_file_count + DESCRIPTORS_BESIDE;
    let report = limit.filter(|limit| *limit < wanted).map(|limit| {
        Report::new(
            format!(
                "the process may have {limit} files open, and {connection_count_max} connections and {ring_file_count} \
                 files of the log may need {wanted}"
            ),
            "connections are refused, and spill files cannot be written, when all are in use",
            format!("raise `LimitNOFILE` of the unit (`ulimit -Hn`) to {wanted}, or lower `nbd.connection_count_max`"),
        )
    });
    conditions.set(ConditionKind::DescriptorLimit, PROCESS, report);
}

#[cfg(test)]
mod tests;
