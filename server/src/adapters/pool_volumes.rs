//! The volumes of the open pool as the devices of this machine's kernel need them, and the users of
//! volumes while no daemon runs.
//!
//! Invariants:
//! - A device has a reservation of its volume, like a client that attaches over the network.
//! - Without a daemon, a volume counts as free only if neither the list of devices in the directory nor the record of
//!   the volume names a user.

use crate::adapters::exports::PoolExports;
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use control::manifest::NodeDir;
use devices::Volumes;
use engine::open_pool::OpenPool;
use engine::pool::Pool;
use engine::record::Durability;
use engine::reservations::{ClientInfo, Reservation, Reservations};
use engine::session::Attachment;
use engine::volume::Volume;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

/// The devices of the open pool.
pub type Attachments = devices::Attachments<PoolVolumes>;

/// The way to free a volume that [`user_in`] names; the command to detach it may follow.
pub(crate) const FREE_OFFLINE: &str = "remove devices that no daemon is to serve again with `spindle attach \
    --cleanup`, or start the daemon and detach it first";

/// The volumes of the open pool, and the reservations on them.
pub struct PoolVolumes {
    pool: Arc<Pool>,
    reservations: Arc<Reservations>,
}

/// An open volume of the pool, held as long as this value lives.
pub struct PoolVolume(Arc<Volume>);

impl PoolVolumes {
    pub(crate) fn new(pool: Arc<Pool>, reservations: Arc<Reservations>) -> PoolVolumes {
        PoolVolumes { pool, reservations }
    }

    /// The reservations of devices and clients.
    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// Clients that have volumes attached.
    pub(crate) fn clients(&self) -> Vec<ClientInfo> {
        self.reservations.list(|volume| self.name_of(VolumeId(volume)))
    }
}

impl Volumes for PoolVolumes {
    type Volume = PoolVolume;
    type Reservation = Reservation;
    type Exports = PoolExports;

    fn find(&self, id: VolumeId) -> Option<PoolVolume> {
        self.pool.volumes().into_iter().find(|volume| volume.id() == id).map(PoolVolume)
    }

    fn find_named(&self, name: &str) -> Option<PoolVolume> {
        self.pool.volume(name).map(PoolVolume)
    }

    fn name_of(&self, id: VolumeId) -> String {
        let records = self.pool.records();
        let record = records.into_iter().find(|record| record.id == id.0);
        record.map_or_else(|| format!("number-{}", id.0), |record| record.name)
    }

    fn reserve(&self, id: VolumeId, name: &str, is_shared: bool) -> Result<Reservation> {
        self.reservations.attach(id.0, name, is_shared)
    }

    async fn end_leftovers(&self, id: VolumeId) -> Result<()> {
        self.reservations.end_leftovers(id.0).await
    }

    async fn quiesce(&self, id: VolumeId) -> Result<()> {
        self.reservations.settle(id.0).await
    }

    fn clients_of(&self, id: VolumeId) -> Vec<String> {
        self.reservations.holders_of(id.0)
    }

    async fn end_clients(&self, id: VolumeId) -> Result<()> {
        self.reservations.fence(id.0).await.map(drop)
    }

    fn has_clients(&self) -> bool {
        !self.clients().is_empty()
    }

    fn report_clients(&self) {
        let conditions = self.pool.tier().conditions();
        self.reservations.show_silent(conditions, |volume| self.name_of(VolumeId(volume)));
    }
}

impl devices::Volume for PoolVolume {
    type Session = Attachment;

    fn id(&self) -> VolumeId {
        self.0.id()
    }

    fn name(&self) -> String {
        self.0.record().name
    }

    fn is_write_through(&self) -> bool {
        self.0.record().durability == Durability::Write
    }

    fn has_lost_writes(&self) -> bool {
        self.0.record().has_lost_writes
    }

    fn has_lost_writes_since(&self, epoch: Epoch, had_lost_writes: bool) -> bool {
        self.0.record().has_lost_writes_since(epoch, had_lost_writes)
    }

    fn size_changes(&self) -> watch::Receiver<u64> {
        self.0.size_changes()
    }

    fn session(&self, is_write_through: bool) -> Arc<Attachment> {
        Arc::new(Attachment::local(self.0.clone(), is_write_through))
    }
}

/// Describes the user of a volume of `open`, according to its directory and the volume's record; `None` if it is not
/// attached. Without `volume`, any volume counts. For a process that opened the pool while no daemon runs.
///
/// # Errors
/// `Corrupt`: the list of devices is damaged, or of a later version.
pub(crate) fn user_in(open: &OpenPool, volume: Option<VolumeId>) -> Result<Option<String>> {
    if let Some(device) = devices::device_in(&open.config.dir, volume)? {
        return Ok(Some(device));
    }
    let records = open.pool.records();
    let meant = records.iter().filter(|record| volume.is_none_or(|volume| volume.0 == record.id));
    let client = meant.flat_map(|record| &record.clients).next();
    Ok(client.map(|client| format!("a device of client {}", client.label)))
}

/// Refuses to remove the pool while one of its volumes is attached.
///
/// # Errors
/// `Busy`, with the user; `Corrupt`: the list of devices is damaged.
pub(crate) fn check_detached(open: &OpenPool) -> Result<()> {
    let Some(user) = user_in(open, None)? else { return Ok(()) };
    let what = format!(
        "remove pool {}: a volume is attached as {user}; {FREE_OFFLINE}: `spindle attach list` shows which",
        open.ownership.manifest().name
    );
    Err(Error::new(ErrorKind::Busy, what))
}

/// Removes the devices that a daemon on `dir` left from the kernel. Returns a message for a person.
/// Blocks.
///
/// # Errors
/// `Busy`: a daemon runs, or a process serves some of the devices, for example if `dir` is a copy:
/// those stay.
pub(crate) fn clean_up(dir: &Path) -> Result<String> {
    devices::stacked::check(&[dir.to_owned()])?;
    // Held until the end, so that no daemon starts meanwhile.
    let _node = NodeDir::open(dir)?;
    devices::clean_up(dir)
}

#[cfg(test)]
mod tests;
