//! Sizes of devices, which follow the sizes of their volumes.
//!
//! Invariant: the kernel never gets an older size after a newer one, which would cut off data of
//! the device's users.

use super::{AttachedState, Attachments, DeviceSlot};
use crate::blocking::blocking;
use crate::volumes::{Volume as _, Volumes};
use async_recursion::async_recursion;
use block::{Conditions, Job, Result, VolumeId};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Starts the job that tells the kernel about changes of the size of volume `name`, until it is
/// aborted.
pub(super) fn follow(
    name: String,
    device: DeviceSlot,
    mut sizes: watch::Receiver<u64>,
    conditions: Conditions,
) -> JoinHandle<()> {
    let job = Job::new(
        format!("size of the device of volume {name}"),
        "the kernel is not told a new size of the volume",
    );
    let follow = async move {
        while sizes.changed().await.is_ok() {
            let (device, newest) = (device.clone(), sizes.clone());
            let resized = blocking(move || set_newest(&device, &newest));
            if let Err(error) = resized.await {
                tracing::warn!(
                    volume = name, error = %error.chain(),
                    "could not resize the device of a volume; the kernel still reports the old size"
                );
            }
        }
    };
    // Without it, the process continues; a panic is a condition.
    tokio::spawn(async move {
        let _ = job.run(&conditions, follow).await;
    })
}

impl<V: Volumes> Attachments<V> {
    /// Makes the device of a volume follow its size. Returns, for display, the reason if the device
    /// does not follow, or not yet.
    #[async_recursion]
    pub async fn why_size_stays(&self, volume: VolumeId) -> Option<String> {
        let device = {
            // The holder of the lock is attaching or detaching, which is not waited for.
            let live = self.live.try_lock().ok()?;
            match &live.as_ref()?.get(&volume)?.state {
                AttachedState::Served(served) => served.device.clone(),
                AttachedState::Failed { .. } => return None, // it follows when it is served again
            }
        };
        let newest = self.volumes.find(volume)?.size_changes();
        match blocking(move || set_newest(&device, &newest)).await {
            Ok(true) => None,
            Ok(false) => Some(
                "its device follows as soon as no request to it is in flight for a moment"
                    .to_owned(),
            ),
            Err(error) => Some(format!(
                "could not resize its device, which keeps its size until it is detached and \
                 attached: {}",
                error.chain()
            )),
        }
    }
}

/// Tells the kernel the newest size of a volume. The holder of the device does so, because an older
/// size would cut off data of its users. Returns whether the device has it now. Blocks.
fn set_newest(device: &DeviceSlot, newest: &watch::Receiver<u64>) -> Result<bool> {
    let mut slot = device.lock();
    let Some(device) = &mut *slot else { return Ok(true) };
    let size_bytes = *newest.borrow();
    device.resize(size_bytes)?;
    Ok(device.has_size(size_bytes))
}
