//! Clients that have volumes attached, as seen by commands about devices.

use super::{Attachments, changeable};
use crate::volumes::{Volume as _, Volumes};
use block::{Error, ErrorKind, Result, VolumeId};

impl<V: Volumes> Attachments<V> {
    /// Ends the attachments that clients have of a volume. `None` if there are none.
    pub(super) async fn detach_clients(
        &self,
        name: &str,
        is_forced: bool,
    ) -> Option<Result<String>> {
        let id = self.volumes.find_named(name)?.id();
        let labels = self.volumes.clients_of(id);
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
        let ended = self.volumes.end_clients(id).await;
        Some(ended.map(|()| name.to_owned()))
    }

    /// Describes where a volume is attached, for messages: the link of its device, or its clients.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping.
    pub async fn user_of(&self, volume: VolumeId) -> Result<Option<String>> {
        let mut live = self.live.lock().await;
        if changeable(&mut live)?.contains_key(&volume) {
            return Ok(Some(self.links.join(self.name_of(volume)).display().to_string()));
        }
        let labels = self.volumes.clients_of(volume);
        Ok((!labels.is_empty()).then(|| format!("a device of client {}", labels.join(", "))))
    }
}
