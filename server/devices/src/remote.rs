//! Attaches a volume of another machine, or of another process, as a device of this machine's
//! kernel.
//!
//! A separate process without a pool serves it: it relays bytes between the kernel's nbd driver and
//! the server, reconnects, and encrypts if the URI asks for it.
//!
//! Invariants:
//! - The device outlives the process: the kernel keeps everything needed to continue in the
//!   device's identifier.
//! - An attachment is recorded here before the server is asked for it, until the kernel has it. If
//!   no answer comes, the same command asks for the same attachment again, and `detach` takes it
//!   back.
//! - An attachment that the server was asked to end is never asked for again, because that request
//!   may still be on its way. The server is asked until it answers, before it is asked for another
//!   one.
//! - A server that has ended the attachment ends the device: its users get errors, and never see
//!   later writes of others.
//! - The export may have several addresses (see `route`), under one attachment. The kernel keeps the
//!   list with the device; a process with another list that shares an address serves the same one.

use crate::blocking::blocking;
use crate::identifiers;
use crate::locks::{Locks, is_served, lock_path};
use addresses::Addresses;
use attempt::{Attempt, attempt_path, choose, end, forget, release};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use identity::reservation_of;
use link::{link, unlink};
use nbd::client::Reached;
use nbd::kernel::{self, Device};
use nbd::wire::{Intent, ReservationRequest};
use relay::Relay;
use route::Route;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::watch;
use uuid::Uuid;

mod addresses;
mod attempt;
mod detach;
mod identity;
mod link;
mod relay;
mod route;
mod tap;
mod traffic;

pub use detach::detach;

/// Time for relays to end at an orderly stop. Requests in flight are sent again later.
const LEAVE_GRACE: Duration = Duration::from_millis(500);

/// Longest wait for programs that only read the start of devices, such as udev, to close a removed
/// one. Chosen by hand.
const GONE_WAIT: Duration = Duration::from_secs(1);
const DISCONNECTED_IN_USE: &str =
    "its device was disconnected while something used it: unmount that, and attach again";
/// Time between two attempts to reach a server. Chosen by hand.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Options for attaching a volume of another machine.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Addresses of the export, as the user wrote them: `URI,URI,…`.
    pub uris: String,
    /// 512 to 4096 bytes.
    pub logical_block_bytes: u32,
    /// Time without this process after which requests fail.
    pub dead_timeout: Duration,
    /// Other clients may write to the volume, too.
    pub is_shared: bool,
}

/// Checks that a list of URIs names an export.
///
/// # Errors
/// `Invalid`, with the expected form.
pub fn check_uris(uris: &str) -> Result<()> {
    Addresses::parse(uris).map(drop)
}

/// Attaches the volume of a list of URIs and serves its device until `stopped`, or until the device is gone.
/// Calls `announce` with the device and the link to it.
///
/// # Errors
/// `Busy`: another process serves it. `Fenced`: the server refuses this machine; the device is
/// gone. Errors of the kernel and of reaching the server.
pub async fn serve(
    options: &RemoteOptions,
    stopped: impl Future<Output = ()>,
    announce: impl FnOnce(&Path, &Path),
) -> Result<()> {
    let asked = Addresses::parse(&options.uris)?;
    let mut locks = Locks::default();
    locks.take(asked.lock_names())?;
    blocking(kernel::check).await?;
    tokio::pin!(stopped);
    let found = match find(&asked)? {
        Some(found) => {
            locks.take(found.addresses.lock_names())?;
            continued(found).await?
        }
        None => None,
    };
    // The device is named after the addresses that it was made with.
    let target = found.as_ref().map_or(&asked, |found| &found.addresses).clone();
    let path = attempt_path(&target);
    let attachment = match &found {
        Some(found) => found.attachment,
        None => tokio::select! {
            attachment = choose(&target, &path) => attachment?,
            () = &mut stopped => return Ok(()),
        },
    };
    let reservation = reservation_of(target.export(), attachment, options.is_shared);
    let intent = if found.is_some() { Intent::Go } else { Intent::Attach };
    let request = ReservationRequest { intent, ..reservation.clone() };
    let route = Route::new(asked);
    let reached = tokio::select! {
        reached = reach(&route, &request, found.is_some()) => reached,
        () = &mut stopped => return Ok(()),
    };
    let first = match (reached, &found) {
        (Err(error), Some(_)) if error.kind() == ErrorKind::Fenced => {
            let identifier = identifiers::of_remote(&target, attachment);
            blocking(move || kernel::delete(&identifier).map(drop)).await?;
            unlink(&target);
            return Err(error.context("the device is gone: its users get errors"));
        }
        (reached, _) => reached?,
    };
    route.show_in(address_path(&target));
    let (relay, device_options) = Relay::new(options, route, &target, reservation, first);
    // Before the kernel has the device, so that no change is missed.
    let (refusal, sizes) = (relay.refusal(), relay.size_changes());
    let made = blocking({
        let (relay, options, is_found) = (relay.clone(), device_options, found.is_some());
        move || match Device::recover(&relay, &options)? {
            Some(device) => Ok(device),
            None if is_found => Err(Error::new(ErrorKind::Busy, DISCONNECTED_IN_USE)),
            None => Device::add(&relay, &options),
        }
    });
    let device = match made.await {
        Ok(device) => device,
        Err(error) => {
            if found.is_none() {
                release(&target, attachment).await;
            }
            return Err(error.context(format!("attach {target}")));
        }
    };
    forget(&path); // the kernel knows it from here on
    let path = device.path();
    let link = link(&target, &path);
    announce(&path, &link);
    let served = ServedDevice { target, attachment, device, refusal, sizes };
    served.until(stopped).await
}

/// A device that this process serves.
struct ServedDevice {
    target: Addresses,
    attachment: Uuid,
    device: Device,
    /// Set when the server refuses the attachment for good.
    refusal: watch::Receiver<Option<Error>>,
    /// Size of the export.
    sizes: watch::Receiver<u64>,
}

impl ServedDevice {
    /// Serves the device until `stopped`, until it is detached, or until the server refuses it.
    async fn until(self, mut stopped: Pin<&mut impl Future<Output = ()>>) -> Result<()> {
        let ServedDevice { target, attachment, mut device, mut refusal, mut sizes } = self;
        let path = device.path();
        loop {
            tokio::select! {
                () = &mut stopped => {
                    return blocking(move || {
                        device.leave(LEAVE_GRACE);
                        Ok(())
                    })
                    .await;
                }
                // The device was detached.
                () = device.gone() => {
                    tracing::info!(device = %path.display(), "the kernel disconnected the device");
                    // Record this before the process can end and lose it.
                    if let Err(error) = Attempt::Over(attachment).write(&attempt_path(&target)) {
                        tracing::warn!(error = %error.chain(), "could not record the end of an attachment");
                    }
                    unlink(&target);
                    let removed = blocking(move || device.remove()).await;
                    release(&target, attachment).await;
                    return removed;
                }
                refused = refusal.wait_for(Option::is_some) => {
                    let error = refused.ok().and_then(|error| error.clone());
                    blocking(move || device.remove()).await?;
                    unlink(&target);
                    let error = error.unwrap_or_else(|| Error::new(ErrorKind::Fenced, "refused"));
                    return Err(error.context("the device is gone: its users get errors"));
                }
                Ok(()) = sizes.changed() => {
                    let size_bytes = *sizes.borrow_and_update();
                    device = blocking(move || {
                        if let Err(error) = device.resize(size_bytes) {
                            tracing::warn!(
                                error = %error.chain(),
                                "could not resize the device; the kernel still reports the old size"
                            );
                        }
                        Ok(device)
                    })
                    .await?;
                }
            }
        }
    }
}

/// Returns a device of this machine if its attachment shall continue. The caller must hold its
/// locks.
///
/// # Errors
/// `Busy`: an attachment that is over is still in use. Kernel errors.
async fn continued(found: Found) -> Result<Option<Found>> {
    let Found { addresses: target, attachment } = &found;
    if Attempt::read(&attempt_path(target)) != Some(Attempt::Over(*attachment)) {
        return Ok(Some(found));
    }
    // The process that ended it did not get to its device, or the device is disconnected but held
    // open. The kernel then keeps its identifier, by which it would be taken for the next
    // attachment.
    let identifier = identifiers::of_remote(target, *attachment);
    let is_gone = blocking(move || {
        kernel::delete(&identifier)?;
        let until = SystemClock.now() + GONE_WAIT;
        loop {
            let is_gone = kernel::find(&identifier)?.is_none();
            if is_gone || SystemClock.now() >= until {
                return Ok(is_gone);
            }
            std::thread::sleep(GONE_WAIT / 50);
        }
    });
    if !is_gone.await? {
        return Err(Error::new(ErrorKind::Busy, DISCONNECTED_IN_USE));
    }
    unlink(target);
    Ok(None)
}

/// Reaches the server for the first time. If there is a device, its users wait for it, so this
/// retries while the server is unavailable.
async fn reach(
    route: &Route,
    reservation: &ReservationRequest,
    is_waited_for: bool,
) -> Result<Reached> {
    let mut was_said = false;
    loop {
        match route.open(reservation).await {
            Err(error) if is_waited_for && error.kind() == ErrorKind::Unavailable => {
                if !was_said {
                    tracing::warn!(
                        error = %error.chain(),
                        "could not replace a connection of a device; trying again"
                    );
                    was_said = true;
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
            outcome => return outcome,
        }
    }
}

/// A device of this machine for an export elsewhere.
struct Found {
    /// The addresses that it was made with.
    addresses: Addresses,
    attachment: Uuid,
}

/// Finds this machine's device of an export, by any of its addresses.
fn find(asked: &Addresses) -> Result<Option<Found>> {
    Ok(kernel::identifiers()?
        .iter()
        .filter_map(|one| found_of(one))
        .find(|found| found.addresses.meets(asked)))
}

fn found_of(identifier: &str) -> Option<Found> {
    let (uris, attachment) = identifiers::remote_of(identifier)?;
    Some(Found { addresses: Addresses::parse(uris).ok()?, attachment })
}

/// A device of this machine for an export elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteDevice {
    /// Path of the device.
    pub device: PathBuf,
    /// The addresses that it was made with.
    pub addresses: Vec<String>,
    /// The address in use; `None` while no process serves it.
    pub address: Option<String>,
    /// A process serves it; `None` if that cannot be found out.
    pub is_served: Option<bool>,
}

/// Lists this machine's devices for exports elsewhere. Blocks.
///
/// # Errors
/// `Unsupported` if /sys cannot be read.
pub fn list() -> Result<Vec<RemoteDevice>> {
    let mut devices = Vec::new();
    for identifier in kernel::identifiers()? {
        let Some(found) = found_of(&identifier) else { continue };
        let Some(number) = kernel::find(&identifier)? else { continue };
        let is_served = is_served(&identifier);
        // A process that was killed has left its file.
        let shown = std::fs::read_to_string(address_path(&found.addresses)).ok();
        devices.push(RemoteDevice {
            device: kernel::block_path(number),
            addresses: found.addresses.all().iter().map(ToString::to_string).collect(),
            address: shown.filter(|_| is_served != Some(false)),
            is_served,
        });
    }
    devices.sort_by(|a, b| a.device.cmp(&b.device));
    Ok(devices)
}

/// Path of the file that shows the address that a device uses.
fn address_path(named: &Addresses) -> PathBuf {
    lock_path(&named.to_string()).with_extension("address")
}
