//! The state of attached volumes, for administrators: lists, conditions, and users of volumes.

use super::{Attached, AttachedList, AttachedState, Attachments, changeable};
use crate::blocking::blocking;
use crate::device::Device;
use crate::in_use;
use crate::record::AttachOptions;
use crate::volumes::Volumes;
use async_recursion::async_recursion;
use block::conditions::Report;
use block::{ConditionKind, Result, VolumeId};
use std::path::PathBuf;

/// An attached volume as shown to administrators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentInfo {
    /// Name of the volume.
    pub volume: String,
    /// The block device; absent if it is not served.
    pub device: Option<PathBuf>,
    /// The link with a stable name that leads to it.
    pub link: PathBuf,
    /// The options with which it was attached.
    pub options: AttachOptions,
    /// The device has an exclusive user: a mounted file system, swap, a RAID.
    pub is_in_use: bool,
    /// Read requests since this daemon began to serve it.
    pub read_count: u64,
    /// Write requests since this daemon began to serve it.
    pub write_count: u64,
    /// Flush requests since this daemon began to serve it.
    pub flush_count: u64,
    /// Discard requests since this daemon began to serve it. They include requests to write zeroes
    /// if the driver counts those as discards.
    pub discard_count: u64,
    /// Bytes read since this daemon began to serve it.
    pub read_bytes: u64,
    /// Bytes of write requests since this daemon began to serve it, including requests that failed.
    pub written_bytes: u64,
    /// Requests that failed.
    pub failure_count: u64,
    /// Reason why it is not served.
    pub failure: Option<String>,
}

impl<V: Volumes> Attachments<V> {
    /// Raises a condition for each attached volume that is not served and for each silent client,
    /// and clears those of the others.
    #[async_recursion]
    pub async fn show(&self) {
        self.volumes.report_clients();
        // The holder of the lock is attaching or detaching, and reports the result itself.
        let Ok(live) = self.live.try_lock() else { return };
        if let Some(live) = live.as_ref() {
            self.show_live(live);
        }
    }

    /// Like [`Attachments::show`], for the caller that holds the lock.
    pub(super) fn show_live(&self, live: &AttachedList<V>) {
        let mut failing = Vec::new();
        for (id, attached) in live {
            let name = self.name_of(*id);
            let failure = match &attached.state {
                AttachedState::Failed { error, .. } => Some(error.clone()),
                AttachedState::Served(served) => match served.device.try_lock() {
                    Some(mut slot) => slot.as_mut().and_then(Device::failure),
                    None => {
                        failing.push(name); // unchanged
                        continue;
                    }
                },
            };
            let Some(failure) = failure else { continue };
            let report = Report::new(
                format!(
                    "volume {name} is attached but not served; its device waits: {}",
                    failure.chain()
                ),
                "programs that use the device wait, or get errors",
                format!(
                    "remove the cause and attach the volume again, as it was attached, or give the device up with \
                     `spindle detach --force {name}`"
                ),
            );
            self.conditions.raise(ConditionKind::DeviceNotServed, &name, report);
            failing.push(name);
        }
        self.conditions.retain(ConditionKind::DeviceNotServed, |name| {
            failing.iter().any(|failing| failing == name)
        });
    }

    /// The attached volumes, by name.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping.
    #[async_recursion]
    pub async fn list(&self) -> Result<Vec<AttachmentInfo>> {
        let mut live = self.live.lock().await;
        let live = changeable(&mut live)?;
        // The devices are queried concurrently: one that does not answer takes seconds.
        let infos = live.values().map(|attached| self.info(attached, true));
        let mut infos = futures::future::join_all(infos).await;
        infos.sort_by(|a, b| a.volume.cmp(&b.volume));
        Ok(infos)
    }

    /// Tells whether a device of a volume, here or on another machine, waits while there is no
    /// daemon.
    pub fn has_users(&self) -> bool {
        self.has_devices() || self.volumes.has_clients()
    }

    /// Tells whether a volume is a device of this machine.
    pub fn has_devices(&self) -> bool {
        // If the lock is taken, an attach or a detach is under way, which is not waited for.
        let live = self.live.try_lock();
        live.map_or(true, |live| live.as_ref().is_some_and(|live| !live.is_empty()))
    }

    /// `checks_use`: reports whether the device is in use, which can take seconds.
    pub(super) async fn info(
        &self,
        attached: &Attached<V::Reservation>,
        checks_use: bool,
    ) -> AttachmentInfo {
        let volume = self.name_of(VolumeId(attached.record.volume));
        let mut info = AttachmentInfo {
            link: self.links.path_of(&volume),
            volume,
            device: None,
            options: attached.record.options,
            is_in_use: false,
            read_count: 0,
            write_count: 0,
            flush_count: 0,
            discard_count: 0,
            read_bytes: 0,
            written_bytes: 0,
            failure_count: 0,
            failure: None,
        };
        match &attached.state {
            AttachedState::Failed { error, .. } => info.failure = Some(error.chain()),
            AttachedState::Served(served) => {
                let device = served.device.clone();
                let seen = blocking(move || {
                    let mut slot = device.lock();
                    let Some(device) = &mut *slot else { return Ok(None) };
                    let failure = device.failure();
                    let is_in_use = match failure {
                        None if checks_use => in_use::is_in_use(&device.path()).unwrap_or(true),
                        _ => false,
                    };
                    Ok(Some((device.path(), failure, is_in_use, device.statistics())))
                });
                if let Ok(Some((path, failure, is_in_use, statistics))) = seen.await {
                    info.device = Some(path);
                    info.failure = failure.map(|error| error.chain());
                    info.is_in_use = is_in_use;
                    info.read_count = statistics.read_count;
                    info.write_count = statistics.write_count;
                    info.flush_count = statistics.flush_count;
                    info.discard_count = statistics.discard_count;
                    info.read_bytes = statistics.read_bytes;
                    info.written_bytes = statistics.written_bytes;
                    info.failure_count = statistics.failure_count;
                }
            }
        }
        info
    }

    /// Describes where a volume is attached, for messages: the link of its device, or its clients.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping.
    #[async_recursion]
    pub async fn user_of(&self, volume: VolumeId) -> Result<Option<String>> {
        let mut live = self.live.lock().await;
        if changeable(&mut live)?.contains_key(&volume) {
            return Ok(Some(self.links.path_of(&self.name_of(volume)).display().to_string()));
        }
        let labels = self.volumes.clients_of(volume);
        Ok((!labels.is_empty()).then(|| format!("a device of client {}", labels.join(", "))))
    }
}
