//! The report of a walk of everything that a store holds of a pool.

use crate::record::{VolumeRecord, VolumeState};
use block::VolumeId;
use bytes::Bytes;
use tiering::{FsckReport, VolumeKeys};

/// Findings of a walk.
#[derive(Debug)]
pub struct PoolReport {
    /// Volumes that are present or can be restored.
    pub volume_count: usize,
    /// Findings of the data tier.
    pub report: FsckReport,
    /// Volumes whose dedicated key is missing, one sentence each.
    pub without_key: Vec<String>,
}

impl PoolReport {
    /// All problems, one sentence each; of many, the first ones.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.report.differences.iter().chain(&self.without_key).cloned().collect()
    }

    /// Number of problems, including those that are not listed.
    #[must_use]
    pub fn problem_count(&self) -> u64 {
        self.report.difference_count + self.without_key.len() as u64
    }
}

/// Describes the volumes whose dedicated key is missing.
#[must_use]
pub fn without_key(records: &[(VolumeId, Bytes)], keys: &VolumeKeys) -> Vec<String> {
    let named = |(_, bytes): &(VolumeId, Bytes)| {
        let record = VolumeRecord::decode(bytes).ok()?;
        let is_lost = record.state != VolumeState::Purged && !keys.has(record.key());
        is_lost.then(|| {
            format!(
                "volume {}: its dedicated key is not below volumekeys/: nothing of it can be read",
                record.name
            )
        })
    };
    records.iter().filter_map(named).collect()
}
