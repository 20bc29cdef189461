//! The volumes that devices show, as this crate needs them: the caller implements these traits.
//!
//! Invariants:
//! - A volume that is reserved for a device stays as it is: it is not removed, made smaller, or
//!   given to a client that wants it alone, as long as the reservation lives.
//! - The names and states that these traits return are plain values of the moment of the call.

use block::{BlockDevice, Epoch, Result, VolumeId};
use std::sync::Arc;
use tokio::sync::watch;

#[cfg(test)]
pub(crate) mod twin;

/// The volumes of a pool, and the reservations on them.
pub trait Volumes: Send + Sync + 'static {
    /// An open volume, held as long as the value lives.
    type Volume: Volume;
    /// The right of one device to a volume, given up when it is dropped.
    type Reservation: Send + Sync + 'static;
    /// The exports of the NBD server that also serves connections of the kernel.
    type Exports: nbd::Exports<Device = <Self::Volume as Volume>::Session>;

    /// Finds a volume that is served; `None` if there is none.
    fn find(&self, id: VolumeId) -> Option<Self::Volume>;

    /// Finds the volume that is served under a name; `None` if there is none.
    fn find_named(&self, name: &str) -> Option<Self::Volume>;

    /// Name of a volume for messages, even if it is not served any more.
    fn name_of(&self, id: VolumeId) -> String;

    /// Reserves a volume, which people know as `name`, for a device. `is_shared`: other clients may
    /// write to it, too.
    ///
    /// # Errors
    /// `Busy`: the volume has a device already, or a client that does not share it, or it is just
    /// being changed.
    fn reserve(&self, id: VolumeId, name: &str, is_shared: bool) -> Result<Self::Reservation>;

    /// Finishes or drops the requests of connections that their clients have closed.
    ///
    /// # Errors
    /// `Unavailable`: it takes too long; try again. Errors of the write log.
    fn end_leftovers(&self, id: VolumeId) -> impl Future<Output = Result<()>> + Send;

    /// Like [`Volumes::end_leftovers`], and also waits for requests of an earlier device. To be
    /// called before a device is used.
    ///
    /// # Errors
    /// `Unavailable`: earlier requests are still in the write log; try again. Errors of the log.
    fn quiesce(&self, id: VolumeId) -> impl Future<Output = Result<()>> + Send;

    /// Labels of the clients on other machines, or in other processes, that have a volume attached.
    fn clients_of(&self, id: VolumeId) -> Vec<String>;

    /// Ends the attachments of all clients to a volume by force, durably.
    ///
    /// # Errors
    /// `Unavailable`: they are ended, but requests are still running or queued; try again. Errors
    /// of writing the list of clients.
    fn end_clients(&self, id: VolumeId) -> impl Future<Output = Result<()>> + Send;

    /// Reports whether any client has a volume attached.
    fn has_clients(&self) -> bool;

    /// Raises a condition for each client that does not answer, and clears those of the others.
    fn report_clients(&self);
}

/// An open volume.
pub trait Volume: Send + Sync + 'static {
    /// The volume as one device uses it.
    type Session: BlockDevice;

    /// Its identity.
    fn id(&self) -> VolumeId;

    /// Its current name.
    fn name(&self) -> String;

    /// Reports whether each of its writes is on stable storage before it is acknowledged, so that
    /// the kernel can be told that the device has no volatile cache.
    fn is_write_through(&self) -> bool;

    /// Reports whether acknowledged writes may be gone, and an administrator has not accepted that.
    fn has_lost_writes(&self) -> bool;

    /// Reports whether users of a device that was last served in `epoch`, when
    /// [`Volume::has_lost_writes`] was `had_lost_writes`, have seen writes that are gone.
    fn has_lost_writes_since(&self, epoch: Epoch, had_lost_writes: bool) -> bool;

    /// Reports the size in bytes whenever it changes.
    fn size_changes(&self) -> watch::Receiver<u64>;

    /// Opens the volume for a device, whose reservation the caller keeps. `is_write_through`: the
    /// kernel is told that the device has no volatile cache, and never flushes it.
    fn session(&self, is_write_through: bool) -> Arc<Self::Session>;
}
