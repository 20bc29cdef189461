//! Clients that have volumes attached or open, as seen by commands about devices.

use super::{Attachments, changeable};
use block::{Error, ErrorKind, Result, VolumeId};
use engine::claims::{ClientInfo, Unattached};

impl Attachments {
    /// Ends the attachments that clients have of a volume. `None` if there are none.
    pub(super) async fn detach_clients(
        &self,
        name: &str,
        is_forced: bool,
    ) -> Option<Result<String>> {
        let volume = self.pool.volume(name)?;
        let labels = self.claims.holders_of(volume.id().0);
        if labels.is_empty() {
            return None;
        }
        if !is_forced {
            let what = format!(
                "detach volume {name}: it is attached to client {}; detach it there, or use --force: the \
                 client is refused from then on, and its users get errors",
                labels.join(", ")
            );
            return Some(Err(Error::new(ErrorKind::Busy, what)));
        }
        let ended = self.claims.fence(volume.id().0).await;
        Some(ended.map(|_| name.to_owned()))
    }

    /// Clients that have volumes attached.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        self.claims.list(|volume| self.name_of(volume))
    }

    /// Names the clients with NBD connections that may write to a volume.
    pub(crate) fn connections_of(&self, volume: VolumeId) -> Option<String> {
        self.claims.connections_of(volume.0)
    }

    /// Finishes or drops the requests of connections that their clients have closed.
    ///
    /// # Errors
    /// `Unavailable`: it takes too long; try again.
    pub(crate) async fn end_leftovers(&self, volume: VolumeId) -> Result<()> {
        self.claims.end_leftovers(volume.0).await
    }

    /// Keeps a volume from being attached as long as the returned guard lives.
    ///
    /// # Errors
    /// `Busy`: it is attached.
    pub(crate) fn keep_unattached(&self, volume: VolumeId, name: &str) -> Result<Unattached> {
        self.claims.keep_unattached(volume.0, name)
    }

    /// Describes where a volume is attached, for messages: the link of its device, or its clients.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping.
    pub async fn user_of(&self, volume: VolumeId) -> Result<Option<String>> {
        let mut live = self.live.lock().await;
        if changeable(&mut live)?.contains_key(&volume.0) {
            return Ok(Some(self.links.join(self.name_of(volume.0)).display().to_string()));
        }
        let labels = self.claims.holders_of(volume.0);
        Ok((!labels.is_empty()).then(|| format!("a device of client {}", labels.join(", "))))
    }
}
