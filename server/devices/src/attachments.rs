//! Volumes as devices of this machine's kernel: their list, their return after a restart, and their
//! removal.
//!
//! Invariants:
//! - `DIR/attachments.json` names a device before it can be used and until it is gone: a daemon
//!   that dies at any moment finds its devices again, and only its own.
//! - A device continues with a restarted daemon only if no other directory has owned the pool
//!   since: its users have seen a history of the volume that would otherwise no longer be the
//!   volume's own. If another directory has owned it, or the volume has lost writes since, the
//!   device is removed, and its users get errors.
//! - The list does not change after the devices are given up at a stop: it then belongs to the next
//!   daemon.
//! - Devices are served from this process's own volumes; they end before the log is closed.

use crate::blocking::blocking;
use crate::device::{Device, DeviceParts};
use crate::links::Links;
use crate::record::{AttachOptions, DeviceRecord, FILE, read, write};
use crate::unserved;
use crate::volumes::{Volume as _, Volumes};
use block::{Conditions, Epoch, Error, ErrorKind, Result, VolumeId};
use nbd::Server;
use parking_lot::Mutex as SyncMutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

mod attach;
mod detach;
mod ending;
mod recovery;
mod report;
mod sizes;

pub use report::AttachmentInfo;

/// Devices that come back, or end, at the same time. Chosen by hand: each takes one of the threads
/// that reads in flight need, too.
const AT_ONCE_MAX: usize = 8;

/// An attached volume, and the reservation `R` of its device.
struct Attached<R> {
    record: DeviceRecord,
    state: AttachedState<R>,
}

enum AttachedState<R> {
    Served(Served<R>),
    /// The device may be in the kernel, and this process does not serve it. No other client may
    /// write to the volume meanwhile: requests that wait in the kernel may still come.
    Failed {
        error: Error,
        reservation: Option<R>,
        /// No other node has owned the pool since the device was last served.
        is_ours: bool,
    },
}

impl<R> Attached<R> {
    /// The attachment after its device could not be served or removed, with its reservation.
    fn failed(self, error: &Error) -> Attached<R> {
        let reservation = match self.state {
            AttachedState::Served(served) => {
                served.resizes.abort();
                Some(served.reservation)
            }
            AttachedState::Failed { reservation, .. } => reservation,
        };
        let state = AttachedState::Failed { error: error.clone(), reservation, is_ours: true };
        Attached { record: self.record, state }
    }
}

/// A device, until it is ended.
type DeviceSlot = Arc<SyncMutex<Option<Device>>>;

struct Served<R> {
    device: DeviceSlot,
    /// Tells the kernel about changes of the volume's size.
    resizes: JoinHandle<()>,
    reservation: R,
}

/// The attached volumes by id.
type AttachedList<V> = BTreeMap<VolumeId, Attached<<V as Volumes>::Reservation>>;

/// The parts of [`Attachments`] besides its volumes.
pub struct AttachmentsOptions<E> {
    /// Directory of the pool, with the list of devices.
    pub dir: PathBuf,
    /// Name of the pool, which is the name of its folder of links.
    pub pool_name: String,
    /// Serves connections of the nbd driver.
    pub server: Server<E>,
    /// Epoch in which this daemon owns the pool.
    pub epoch: Epoch,
    /// Memory for payloads of all ublk devices, in bytes. Those of the nbd driver are connections
    /// of `server`.
    pub payload_bytes_max: u64,
    /// Where volumes that are not served are reported.
    pub conditions: Conditions,
}

/// The devices of a pool. It attaches and detaches nothing after [`Attachments::leave`] or
/// [`Attachments::abandon`].
pub struct Attachments<V: Volumes> {
    path: PathBuf,
    links: Links,
    volumes: V,
    /// Serves connections of the nbd driver.
    server: Server<V::Exports>,
    epoch: Epoch,
    payload_bytes_max: u64,
    conditions: Conditions,
    memory: Arc<ublk::Memory>,
    /// Held while a device's number is recorded, as several may arrive at a time.
    recording: Arc<SyncMutex<()>>,
    /// Absent once the daemon stops: the list on disk then belongs to the next daemon.
    live: Mutex<Option<AttachedList<V>>>,
}

impl<V: Volumes> Attachments<V> {
    /// Reads which of `volumes` were attached from the pool's directory. Serves none of them yet.
    ///
    /// # Errors
    /// `Corrupt`: the list is damaged, or of a later version.
    pub fn open(volumes: V, options: AttachmentsOptions<V::Exports>) -> Result<Attachments<V>> {
        let AttachmentsOptions { dir, pool_name, server, epoch, payload_bytes_max, conditions } =
            options;
        let path = dir.join(FILE);
        let records = read(&path)?;
        let waiting = || Error::new(ErrorKind::Unavailable, "the daemon is just starting");
        let live = records.into_iter().map(|record| {
            let state =
                AttachedState::Failed { error: waiting(), reservation: None, is_ours: false };
            (VolumeId(record.volume), Attached { record, state })
        });
        Ok(Attachments {
            path,
            links: Links::of_pool(&pool_name),
            volumes,
            server,
            epoch,
            payload_bytes_max,
            conditions,
            memory: ublk::Memory::new(payload_bytes_max),
            recording: Arc::default(),
            live: Mutex::new(Some(live.collect())),
        })
    }

    /// The volumes that devices show.
    #[must_use]
    pub fn volumes(&self) -> &V {
        &self.volumes
    }

    async fn remove_from_kernel(&self, record: &DeviceRecord) -> Result<()> {
        let record = record.clone();
        blocking(move || unserved::delete(&record).map(drop)).await
    }

    /// Takes up a device that the kernel has: makes its link, and lets it follow the size of the
    /// volume.
    fn serve(
        &self,
        volume: &V::Volume,
        sizes: watch::Receiver<u64>,
        device: Device,
        reservation: V::Reservation,
    ) -> Served<V::Reservation> {
        let name = volume.name();
        self.links.make(&name, &device.path());
        let device = Arc::new(SyncMutex::new(Some(device)));
        let resizes = sizes::follow(name, device.clone(), sizes, self.conditions.clone());
        Served { device, resizes, reservation }
    }

    fn name_of(&self, id: VolumeId) -> String {
        self.volumes.name_of(id)
    }

    fn parts(&self, volume: &V::Volume, record: &DeviceRecord) -> DeviceParts<V::Exports> {
        DeviceParts {
            shown: volume.session(record.is_write_through),
            name: volume.name(),
            server: self.server.clone(),
            memory: self.memory.clone(),
        }
    }

    fn write(&self, live: &AttachedList<V>) -> Result<()> {
        write(&self.path, live.values().map(|live| live.record.clone()).collect())
    }
}

/// The attached devices, while this daemon may change them.
///
/// # Errors
/// `Unavailable`: the daemon is stopping.
fn changeable<L>(live: &mut Option<L>) -> Result<&mut L> {
    live.as_mut().ok_or_else(|| {
        let what = "the daemon is stopping, and its devices wait for the next one; try again then";
        Error::new(ErrorKind::Unavailable, what)
    })
}

#[cfg(test)]
mod tests;
