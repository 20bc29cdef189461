//! Records which clients have the volumes.
//!
//! Invariants:
//! - A change that was answered is in the log, on stable storage of a quorum: the next owner knows the clients, on
//!   whichever machine it runs.
//! - A change waits for log space only for a bounded time, and leaves nothing in the queue of the log.

use super::Pool;
use crate::client_record::ClientRecord;
use crate::record::VolumeState;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result, VolumeId};
use std::time::Duration;

/// Longest wait of such a change for other changes and for log space. Chosen by hand: a client that attaches waits as
/// long for requests of its predecessor.
const WAIT_MAX: Duration = Duration::from_secs(8);

impl Pool {
    /// Records durably that a volume is attached to exactly these clients.
    ///
    /// # Errors
    /// `NotFound`: it was removed. `Unavailable`: the log has no room, or another change takes too long; nothing was
    /// changed. Those of writing the log.
    #[async_recursion]
    pub async fn record_clients(&self, id: VolumeId, clients: Vec<ClientRecord>) -> Result<()> {
        let mut given_up = std::pin::pin!(tokio::time::sleep(WAIT_MAX));
        let _one_at_a_time = tokio::select! {
            guard = self.changes.lock() => guard,
            () = &mut given_up => {
                let what = format!(
                    "record the clients of volume {}: another change of the pool is under way; try again",
                    self.shared.name_of(id)
                );
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        };
        let Some(volume) = self.volumes().into_iter().find(|volume| volume.id() == id) else {
            let is_served = |state| state == VolumeState::Present;
            let known = self.volumes.lock().records.get(&id.0).map(|record| record.state);
            if clients.is_empty() && !known.is_some_and(is_served) {
                return Ok(()); // no client outlives its volume
            }
            let what = format!(
                "record the clients of volume {}: it is not served",
                self.shared.name_of(id)
            );
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let record = volume.update_clients(clients, given_up).await.map_err(|error| {
            let what = match error.kind() {
                ErrorKind::Unavailable => {
                    "record the clients of the volume: the write log does not take it; try again, and if the log is \
                     full, once the object store takes data"
                }
                _ => "record the clients of the volume",
            };
            Error::with_source(error.kind(), what, error)
        })?;
        self.volumes.lock().records.insert(id.0, record);
        Ok(())
    }
}
