//! The keys of volumes, as far as every request depends on them.

use super::Shared;
use crate::record::{VolumeRecord, VolumeState};
use block::{Error, ErrorKind, Result, VolumeId};
use std::sync::atomic::Ordering;

impl Shared {
    /// Tells the tier which keys the volumes use and which of them are deduplicated. Must be called
    /// before anything is destaged.
    pub(crate) fn register_volumes<'a>(&self, records: impl Iterator<Item = &'a VolumeRecord>) {
        for record in records {
            self.tier.set_dedup(VolumeId(record.id), record.is_dedup);
            self.tier.volume_keys().assign(VolumeId(record.id), record.key());
            if record.state == VolumeState::Present && !self.tier.volume_keys().has(record.key()) {
                self.is_any_keyless.store(true, Ordering::Release);
            }
            self.show_record(record);
        }
    }

    /// Fails for a volume whose key is gone.
    pub(crate) fn check_key(&self, volume: VolumeId) -> Result<()> {
        let keys = self.tier.volume_keys();
        if !self.is_any_keyless.load(Ordering::Acquire) || keys.has(keys.of(volume)) {
            return Ok(());
        }
        let what = format!(
            "open volume {volume}: its dedicated key was destroyed, or the objects below volumekeys/ in the store are gone. \
             Without it nothing can be read: bring them back from a version or a copy of the bucket, and restart spindle"
        );
        Err(Error::new(ErrorKind::Denied, what))
    }
}
