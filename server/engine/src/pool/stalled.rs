//! Gives up the writes of a volume that only a missing spill file holds.

use super::Pool;
use crate::volume::Volume;
use block::{Error, ErrorKind, Result};

impl Pool {
    /// Resets a volume with a missing spill file to its state in the store.
    pub(super) async fn give_up_writes(
        &self,
        volume: &Volume,
        is_meant: bool,
        closed: Error,
    ) -> Result<()> {
        let name = volume.record().name;
        if !is_meant {
            let what = format!(
                "accept volume {name}: writes of it are missing. With --discard-local-writes it \
                 goes back to its state in the store, and they are lost for good"
            );
            return Err(Error::with_source(ErrorKind::Invalid, what, closed));
        }
        let lsn = self.shared.log.flush().await?;
        self.shared.wait_destaged(lsn).await?;
        // The data that was in the ring is now in a spill file on this machine, above the missing
        // one.
        tracing::warn!(
            volume = %name,
            "the volume goes back to its state in the store; the writes that the store lacks are \
             given up"
        );
        {
            let mut stalled = self.shared.stalled.lock();
            // Another caller may have done it meanwhile. A leftover mark would cost writes later.
            if !stalled.closed.contains_key(&volume.id()) {
                return Ok(());
            }
            stalled.given_up.insert(volume.id());
        }
        self.shared.try_catch_up().await?;
        self.shared.check_open(volume.id())
    }
}
