//! Recovery of attached volumes after a restart, and attaching them again after a failure.
//!
//! Invariants:
//! - A device is served again only if it is in the list, with its cookie, and its volume still has
//!   the state that the device's users have seen.
//! - A failed attachment stays in the list, and keeps its reservation of the volume.

use super::{
    AT_ONCE_MAX, AttachOptions, Attached, AttachedState, AttachmentInfo, Attachments, DeviceRecord,
    Served,
};
use super::{AttachedList, changeable};
use crate::blocking::blocking;
use crate::device::{self, Device};
use crate::volumes::{Volume as _, Volumes};
use block::env::random_bytes;
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use futures::{StreamExt, stream};
use std::collections::BTreeMap;

/// An attached volume that is not served, with its reservation.
struct BegunRecovery<R> {
    id: VolumeId,
    /// No other node has owned the pool since it was last served.
    is_ours: bool,
    record: DeviceRecord,
    reservation: Option<R>,
}

/// The result of serving a volume again.
enum RecoveryOutcome<R> {
    Served(Attached<R>),
    /// Its device is gone for good.
    Gone,
    Failed(Error, Attached<R>),
}

/// Takes what is needed to serve an attached volume again; `None` if it is served.
fn begin<R>(
    live: &mut BTreeMap<VolumeId, Attached<R>>,
    id: VolumeId,
    is_ours: bool,
) -> Option<BegunRecovery<R>> {
    let attached = live.get_mut(&id)?;
    match &mut attached.state {
        AttachedState::Failed { reservation, .. } => {
            let (record, reservation) = (attached.record.clone(), reservation.take());
            Some(BegunRecovery { id, is_ours, record, reservation })
        }
        AttachedState::Served(_) => None,
    }
}

/// Enters the result into the list.
///
/// # Errors
/// The error for which the volume is not served.
fn enter<R>(
    live: &mut BTreeMap<VolumeId, Attached<R>>,
    id: VolumeId,
    outcome: RecoveryOutcome<R>,
) -> Result<()> {
    match outcome {
        RecoveryOutcome::Served(served) => {
            live.insert(id, served);
            Ok(())
        }
        RecoveryOutcome::Gone => {
            live.remove(&id);
            Ok(())
        }
        RecoveryOutcome::Failed(error, kept) => {
            live.insert(id, kept);
            Err(error)
        }
    }
}

impl<V: Volumes> Attachments<V> {
    /// Serves again the volumes that were attached when the last daemon ended. `is_ours` tells
    /// whether this directory has owned the pool without interruption since an epoch. Failures are
    /// kept with the attachment and logged: the daemon still serves its other clients.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping. Errors of writing the list.
    pub async fn recover(&self, is_ours: impl Fn(Epoch) -> bool) -> Result<()> {
        let mut live = self.live.lock().await;
        let live = changeable(&mut live)?;
        if live.is_empty() {
            return Ok(()); // write nothing if nothing was ever attached
        }
        let volumes: Vec<(VolumeId, bool)> = live
            .iter()
            .map(|(id, attached)| (*id, is_ours(Epoch(attached.record.epoch))))
            .collect();
        // One that has to wait for its driver, or for another process, does not delay the others.
        let begun = volumes.iter().filter_map(|(id, is_ours)| {
            let begun = begin(live, *id, *is_ours)?;
            Some(self.recover_begun(begun))
        });
        let begun: Vec<_> = begun.collect();
        let recovered: Vec<_> = stream::iter(begun).buffer_unordered(AT_ONCE_MAX).collect().await;
        for (id, outcome) in recovered {
            // A failed attachment is in the list, with its error.
            let _ = enter(live, id, outcome);
        }
        self.show_live(live);
        self.write(live)
    }

    /// Serves an entry of `live` again if possible. The volume cannot be used by others before the
    /// outcome is known.
    async fn recover_into(
        &self,
        live: &mut AttachedList<V>,
        id: VolumeId,
        is_ours: bool,
    ) -> Result<()> {
        let Some(begun) = begin(live, id, is_ours) else { return Ok(()) };
        let (id, outcome) = self.recover_begun(begun).await;
        enter(live, id, outcome)
    }

    async fn recover_begun(
        &self,
        mut begun: BegunRecovery<V::Reservation>,
    ) -> (VolumeId, RecoveryOutcome<V::Reservation>) {
        let served = self.recover_one(&mut begun).await;
        let BegunRecovery { id, is_ours, record, reservation } = begun;
        let outcome = match served {
            Ok(Some(served)) => {
                RecoveryOutcome::Served(Attached { record, state: AttachedState::Served(served) })
            }
            Ok(None) => RecoveryOutcome::Gone,
            Err(error) => {
                let is_shared = record.options.is_shared;
                let reservation = reservation
                    .or_else(|| self.volumes.reserve(id, &self.name_of(id), is_shared).ok());
                let state = AttachedState::Failed { error: error.clone(), reservation, is_ours };
                RecoveryOutcome::Failed(error, Attached { record, state })
            }
        };
        (id, outcome)
    }

    /// Serves a volume again, or removes its device for good: `None`. The reservation that this
    /// daemon already has is taken if the device is served. The record becomes that of a new device
    /// if one is needed, even if that fails, because parts of the device may stay in the kernel.
    async fn recover_one(
        &self,
        begun: &mut BegunRecovery<V::Reservation>,
    ) -> Result<Option<Served<V::Reservation>>> {
        let BegunRecovery { id, is_ours, record, reservation } = begun;
        let volume = self.volumes.find(*id);
        let refused = match &volume {
            None => Some("its volume was removed"),
            Some(_) if !*is_ours => {
                Some("another node has owned the pool since it was last served")
            }
            // After a reboot there is no device, and no user that has seen the lost writes.
            Some(volume)
                if volume.has_lost_writes_since(Epoch(record.epoch), record.had_lost_writes) =>
            {
                let asked = record.clone();
                let is_there = blocking(move || device::is_there(&asked)).await?;
                is_there.then_some("its volume has lost writes that were acknowledged")
            }
            Some(_) => None,
        };
        let (Some(volume), None) = (volume, refused) else {
            tracing::error!(
                volume = record.volume, device = ?record.number, reason = refused,
                "could not serve a device again; its users get errors, as it is removed from the \
                 kernel: attach the volume again"
            );
            self.remove_from_kernel(record).await?;
            return Ok(None);
        };
        let name = volume.name();
        if reservation.is_none() {
            *reservation = Some(self.volumes.reserve(*id, &name, record.options.is_shared)?);
        }
        let sizes = volume.size_changes(); // subscribe before the kernel is told a size
        let (parts, known) = (self.parts(&volume, record), record.clone());
        let recovered = blocking(move || Device::recover(&parts, &known)).await?;
        record.epoch = self.epoch.0;
        record.had_lost_writes = volume.has_lost_writes();
        let device = match recovered {
            Some(device) => {
                record.number = Some(device.number());
                record.options.queue_count = device.queue_count(); // as the device was made
                device
            }
            // The machine was restarted, or the device never existed, or is unusable but still held
            // open: the new device must be distinguishable from that one.
            None => {
                record.cookie = u64::from_le_bytes(random_bytes());
                self.add(&volume, record).await?
            }
        };
        tracing::info!(
            volume = name, device = %device.path().display(),
            "the daemon serves a device again"
        );
        let reservation = reservation.take().expect("it was asked for above");
        Ok(Some(self.serve(&volume, sizes, device, reservation)))
    }

    /// Serves an attached volume again that is not served, with its old options: its device may be
    /// waiting in the kernel.
    pub(super) async fn attach_again(
        &self,
        live: &mut AttachedList<V>,
        id: VolumeId,
        name: &str,
        is_ours: bool,
        options: AttachOptions,
    ) -> Result<AttachmentInfo> {
        let what = format!("attach volume {name}: it was attached, and is not served");
        let made = live[&id].record.options;
        if (made.driver, made.is_shared) != (options.driver, options.is_shared) {
            let other = match (made.driver == options.driver, made.is_shared) {
                (false, _) => "by the other driver (--nbd)",
                (true, true) => "with --shared",
                (true, false) => "without --shared",
            };
            let what = format!(
                "{what}: it was {other}; attach it so, or `spindle detach --force` it first"
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        // Make the writes of an earlier device's users visible first.
        self.volumes.quiesce(id).await?;
        let again = self.recover_into(live, id, is_ours).await;
        let written = self.write(live);
        again.map_err(|error| error.context(what))?;
        written.map_err(|error| error.context(format!("attach volume {name}")))?;
        match live.get(&id) {
            Some(attached) => Ok(self.info(attached, true).await),
            None => {
                let what = format!(
                    "attach volume {name}: its old device had become unusable, and is gone; attach \
                     it once more"
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }
}
