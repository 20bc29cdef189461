//! Gives up the writes of a volume that only a missing side file holds.

use super::Pool;
use crate::volume::Volume;
use block::{Error, ErrorKind, Result};

impl Pool {
    /// Resets a volume with a missing side file to its state in the store.
    pub(super) async fn give_up_writes(
        &self,
        volume: &Volume,
        is_meant: bool,
        closed: Error,
    ) -> Result<()> {
        let name = volume.record().name;
        if !is_meant {
            let what = format!(
                "accept volume {name}: writes of it are missing. With --discard-local-writes it goes back \
                 to what the store has, and they are lost for good"
            );
            return Err(Error::with_source(ErrorKind::Invalid, what, closed));
        }
        let lsn = self.shared.log.flush().await?;
        self.shared.wait_destaged(lsn).await?;
        // The data that was in the ring is now in a side file on this machine, above the missing
        // one.
        tracing::warn!(volume = %name, "goes back to what the store has: writes of it are given up");
        {
            let mut aside = self.shared.aside.lock();
            // Another caller may have done it meanwhile. A leftover mark would cost writes later.
            if !aside.closed.contains_key(&volume.id()) {
                return Ok(());
            }
            aside.given_up.insert(volume.id());
        }
        self.shared.try_late().await?;
        self.shared.check_open(volume.id())
    }
}
