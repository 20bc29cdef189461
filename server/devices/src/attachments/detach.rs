//! Detaches volumes: from devices of this machine, and by force from clients.

use super::{Attached, AttachedList, AttachedState, Attachments, DeviceSlot, changeable};
use crate::blocking::blocking;
use crate::device;
use crate::in_use;
use crate::record::DeviceRecord;
use crate::volumes::{Volume as _, Volumes};
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result, VolumeId};
use std::path::Path;

impl<V: Volumes> Attachments<V> {
    /// Detaches a volume, by its name, its link or its device. Without `is_forced` the device must
    /// be unused.
    ///
    /// # Errors
    /// `NotFound`: it is not attached. `Busy`: a file system or the like uses it, or a program has
    /// it open. `Unavailable`: the daemon is stopping.
    #[async_recursion]
    pub async fn detach(&self, target: &str, is_forced: bool) -> Result<String> {
        let detached = self.detach_unreported(target, is_forced).await;
        self.show().await;
        detached
    }

    async fn detach_unreported(&self, target: &str, is_forced: bool) -> Result<String> {
        let mut live = self.live.lock().await;
        let live =
            changeable(&mut live).map_err(|error| error.context(format!("detach {target}")))?;
        let id = match self.find(live, target) {
            Ok(id) => id,
            Err(error) => {
                return self.detach_clients(target, is_forced).await.unwrap_or(Err(error));
            }
        };
        let attached = &live[&id];
        let name = self.name_of(id);
        match &attached.state {
            AttachedState::Served(served) => {
                let removed = remove_served(&name, served.device.clone(), is_forced).await;
                if let Err(error) = removed {
                    if served.device.lock().is_none() {
                        let gone = live.remove(&id).expect("found above");
                        live.insert(id, gone.failed(&error));
                    }
                    return Err(error);
                }
                served.resizes.abort();
            }
            AttachedState::Failed { error, .. } if !is_forced => {
                let what = format!(
                    "detach volume {name}: its device is not served ({}); --force removes it, and its \
                     users get errors",
                    error.chain()
                );
                return Err(Error::new(ErrorKind::Busy, what));
            }
            AttachedState::Failed { .. } => self.remove_from_kernel(&attached.record).await?,
        }
        let DeviceRecord { number, options, .. } = attached.record;
        let device = number.map(|number| device::path_of(options.driver, number));
        self.links.remove(&name, device.as_deref());
        let gone = live.remove(&id).expect("found above");
        if let Err(error) = self.write(live) {
            // The list still names it, and the next daemon would create the device again.
            let error = error.context(format!(
                "detach volume {name}: its device is gone, but the list of devices still names it; \
                 try again"
            ));
            live.insert(id, gone.failed(&error));
            return Err(error);
        }
        Ok(name)
    }

    fn find(&self, live: &AttachedList<V>, target: &str) -> Result<VolumeId> {
        let path = Path::new(target);
        let is_it = |(id, attached): (&VolumeId, &Attached<V::Reservation>)| {
            let name = self.name_of(*id);
            let DeviceRecord { number, options, .. } = attached.record;
            let device = number.map(|number| device::path_of(options.driver, number));
            target == name || path == self.links.path_of(&name) || Some(path) == device.as_deref()
        };
        let found = live.iter().find(|(id, attached)| is_it((id, attached)));
        found.map(|(id, _)| *id).ok_or_else(|| {
            let what = format!(
                "detach {target}: it is not attached; `spindle attach list` shows all that are"
            );
            Error::new(ErrorKind::NotFound, what)
        })
    }

    /// Ends the attachments that clients have of a volume. `None` if there are none.
    async fn detach_clients(&self, name: &str, is_forced: bool) -> Option<Result<String>> {
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
}

/// Removes the served device of a volume from the kernel. The slot is empty afterwards, unless the
/// device stays served.
///
/// # Errors
/// `Busy`: it is in use, or just being detached. Errors of the kernel.
async fn remove_served(name: &str, slot: DeviceSlot, is_forced: bool) -> Result<()> {
    let name = name.to_owned();
    let removed = blocking(move || {
        let mut slot = slot.lock();
        let Some(device) = slot.take() else {
            let what = format!("detach volume {name}: that is under way already");
            return Err(Error::new(ErrorKind::Busy, what));
        };
        let what = format!("detach volume {name}");
        if !is_forced && let Err(error) = in_use::check_unused(&what, &device.path()) {
            *slot = Some(device);
            return Err(error);
        }
        device.remove(is_forced)
    });
    removed.await
}
