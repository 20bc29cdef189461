//! Attaches volumes: checks, the reservation, the record, and the new device.
//!
//! Invariant: the list names a device, with the settings that the kernel gets, before the kernel
//! has it, and its number before it can be used.

use super::{Attached, AttachedList, AttachedState, AttachmentInfo, Attachments, changeable};
use crate::blocking::blocking;
use crate::device::{self, Device, IO_BYTES_MAX};
use crate::record::{AttachOptions, DeviceRecord, Driver, read, write};
use crate::seeded_bugs::seeded_bugs;
use crate::volumes::{Volume as _, Volumes};
use async_recursion::async_recursion;
use block::env::random_bytes;
use block::{Error, ErrorKind, Result, VolumeId};

/// Most queues that a device gets by default, and the fraction (one in this number) of the queues
/// still possible. Chosen by hand: with the default budget the first devices get four queues, and
/// the eleventh gets one.
const QUEUES_MAX: u16 = 4;
const QUEUES_PART: u64 = 4;

impl<V: Volumes> Attachments<V> {
    /// Attaches a volume.
    ///
    /// # Errors
    /// `NotFound`: there is no such volume. `Busy`: it is attached, or other clients have it open,
    /// or another pool has its link. `Unsupported`, `Denied`: this machine lacks a feature or a
    /// permission. `Invalid`: the options. `Unavailable`: the daemon is stopping.
    #[async_recursion]
    pub async fn attach(&self, name: &str, options: AttachOptions) -> Result<AttachmentInfo> {
        let attached = self.attach_unreported(name, options).await;
        self.show().await;
        attached
    }

    async fn attach_unreported(
        &self,
        name: &str,
        options: AttachOptions,
    ) -> Result<AttachmentInfo> {
        let mut live = self.live.lock().await;
        let live = changeable(&mut live)
            .map_err(|error| error.context(format!("attach volume {name}")))?;
        let volume = self.volumes.find_named(name).ok_or_else(|| {
            let what =
                format!("attach volume {name}: there is none; `spindle volume list` shows all");
            Error::new(ErrorKind::NotFound, what)
        })?;
        let id = volume.id();
        match live.get(&id).map(|attached| &attached.state) {
            Some(AttachedState::Served(_)) => {
                let link = self.links.path_of(name);
                let what = format!("attach volume {name}: it is attached as {}", link.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            Some(&AttachedState::Failed { is_ours, .. }) => {
                return self.attach_again(live, id, name, is_ours, options).await;
            }
            None => {}
        }
        let options = self.with_queues(live, options)?;
        self.links.check(name)?;
        blocking(move || device::check(options.driver)).await?;
        self.volumes.end_leftovers(id).await?; // a closed connection must not block it
        let reservation = self.volumes.reserve(id, name, options.is_shared)?;
        self.volumes.quiesce(id).await?;
        // From now on the volume stays as it is: until here it could be removed, or lose writes.
        let volume =
            self.volumes.find_named(name).filter(|now| now.id() == id).ok_or_else(|| {
                let what =
                    format!("attach volume {name}: it was removed or renamed meanwhile; try again");
                Error::new(ErrorKind::NotFound, what)
            })?;
        let cookie = u64::from_le_bytes(random_bytes());
        let mut record = DeviceRecord {
            volume: id.0,
            number: None,
            cookie,
            epoch: self.epoch.0,
            had_lost_writes: volume.has_lost_writes(),
            is_write_through: false, // known, like its number, when it is added
            options,
        };
        // This drops leftovers of a failed attach from the list.
        self.write(live)?;
        let sizes = volume.size_changes(); // subscribed before the kernel learns a size
        match self.add(&volume, &mut record).await {
            Ok(device) => {
                let served = self.serve(&volume, sizes, device, reservation);
                live.insert(id, Attached { record, state: AttachedState::Served(served) });
                // It has no users yet, and its partition table may still be on its way.
                Ok(self.info(&live[&id], false).await)
            }
            Err(error) => {
                let error = error.context(format!("attach volume {name}"));
                Err(self.keep_failed(live, record, reservation, error).await)
            }
        }
    }

    /// Keeps the remains of a failed attach in the list, if the kernel has any. Returns the error
    /// to report.
    async fn keep_failed(
        &self,
        live: &mut AttachedList<V>,
        record: DeviceRecord,
        reservation: V::Reservation,
        mut error: Error,
    ) -> Error {
        let (id, asked) = (VolumeId(record.volume), record.clone());
        if blocking(move || device::is_there(&asked)).await.unwrap_or(true) {
            // The driver still has it, so it must be found again.
            error = error.context(
                "make a device, of which the kernel keeps a part (attach the volume again, or give \
                 the device up with `spindle detach --force`)",
            );
            let reservation = Some(reservation);
            let state = AttachedState::Failed { error: error.clone(), reservation, is_ours: true };
            live.insert(id, Attached { record, state });
        }
        if let Err(late) = self.write(live) {
            tracing::warn!(
                volume = self.name_of(id), error = %late.chain(),
                "could not remove a volume whose attach failed from the list; the next start \
                 attaches it, unless you attach or detach it before"
            );
        }
        error
    }

    /// Adds a device to the kernel and notes its number in `record` and on disk.
    pub(super) async fn add(
        &self,
        volume: &V::Volume,
        record: &mut DeviceRecord,
    ) -> Result<Device> {
        record.number = None;
        record.is_write_through = volume.is_write_through();
        let parts = self.parts(volume, record);
        let (path, planned, recording) =
            (self.path.clone(), record.clone(), self.recording.clone());
        let added = blocking(move || {
            let enter = |record: DeviceRecord| {
                let _recording = recording.lock();
                let mut records = read(&path)?;
                records.retain(|other| other.volume != record.volume);
                records.push(record);
                write(&path, records)
            };
            // This precedes the kernel's device, so that any leftover can be found, with the
            // settings that the kernel was told.
            let is_late = seeded_bugs().cache_noted_late;
            enter(DeviceRecord {
                is_write_through: planned.is_write_through && !is_late,
                ..planned.clone()
            })?;
            Device::add(&parts, &planned, |number| {
                if seeded_bugs().ends_in_attach {
                    std::process::abort();
                }
                enter(DeviceRecord { number: Some(number), ..planned.clone() })
            })
        });
        let device = added.await?;
        record.number = Some(device.number());
        record.options.queue_count = device.queue_count(); // the kernel may give fewer
        Ok(device)
    }

    /// Returns the options with their number of queues, for which there is memory.
    fn with_queues(&self, live: &AttachedList<V>, options: AttachOptions) -> Result<AttachOptions> {
        if options.driver != Driver::Ublk {
            return Ok(options); // its connections have their own bound
        }
        let others = live.values().map(|live| &live.record.options);
        let taken = others.filter(|options| options.driver == Driver::Ublk);
        let taken: u64 = taken.map(|options| u64::from(options.queue_count)).sum();
        let room = self.payload_bytes_max / ublk::own_bytes(IO_BYTES_MAX);
        let queue_count = match options.queue_count {
            0 => {
                let processors = std::thread::available_parallelism().map_or(1, usize::from);
                queues_of_choice(room.saturating_sub(taken), processors)
            }
            asked => asked,
        };
        let queues = taken + u64::from(queue_count);
        if queues <= room {
            return Ok(AttachOptions { queue_count, ..options });
        }
        let what = format!(
            "attach: {queues} queues of devices need {} bytes of memory for requests, and the budget has {}; \
             raise `memory`, or attach with fewer queues",
            queues * ublk::own_bytes(IO_BYTES_MAX),
            self.payload_bytes_max
        );
        Err(Error::new(ErrorKind::Full, what))
    }
}

/// Default number of queues of a device: as many as processors, but only a part of those that the
/// memory still has room for, so that many devices fit, and at least one.
pub(super) fn queues_of_choice(room: u64, processors: usize) -> u16 {
    let few = u16::try_from(room / QUEUES_PART).unwrap_or(u16::MAX);
    let wanted = u16::try_from(processors).unwrap_or(u16::MAX).min(QUEUES_MAX);
    wanted.min(few).max(1)
}
