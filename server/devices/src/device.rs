//! A device of the kernel, with either driver. Everything here blocks.

use crate::locks::lock_served;
use crate::record::{AttachOptions, DeviceRecord, Driver};
use crate::{identifiers, probe_process, udev};
use block::{BlockDevice, Error, ErrorKind, Result};
use nbd::handshake::Handshake;
use nbd::kernel::{Siblings, Stop};
use nbd::{Counters, Exports, KernelConnection, Place, Server, TlsMode};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::UnixStream;

/// Largest payload of a request to a ublk device. Chosen by hand: the kernel splits larger ones at
/// no extra cost.
pub(crate) const IO_BYTES_MAX: u32 = 512 << 10;

/// Time for requests in flight when a device is removed by force. Chosen by hand: a log with room
/// answers in a moment, and a full one may have none for hours.
const FORCE_GRACE: Duration = Duration::from_secs(5);

/// Parts of a device besides its record.
pub(crate) struct DeviceParts<E: Exports> {
    /// The volume that it shows.
    pub(crate) shown: Arc<E::Device>,
    /// Name of the volume.
    pub(crate) name: String,
    /// Serves connections of the nbd driver.
    pub(crate) server: Server<E>,
    /// Payloads of ublk queues.
    pub(crate) memory: Arc<ublk::Memory>,
}

/// A device that this process serves.
pub(crate) enum Device {
    Ublk(Box<ublk::Device>),
    /// With the lock that shows that a process serves it.
    Nbd(
        nbd::kernel::Device,
        Arc<Counters>,
        #[expect(dead_code, reason = "held, not used")] Option<File>,
    ),
}

/// Counters of a device since this daemon serves it, or, with the nbd driver, since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statistics {
    pub(crate) read_count: u64,
    pub(crate) write_count: u64,
    pub(crate) flush_count: u64,
    pub(crate) discard_count: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// Since this daemon serves it.
    pub(crate) failure_count: u64,
}

/// Checks that this machine supports such devices.
///
/// # Errors
/// `Unsupported` or `Denied`, naming what is missing.
pub(crate) fn check(driver: Driver) -> Result<()> {
    match driver {
        Driver::Ublk => ublk::check().map_err(|error| match error.kind() {
            ErrorKind::Unsupported => {
                error.context("use the ublk driver (or attach with `--nbd`, if the kernel has nbd)")
            }
            _ => error,
        }),
        Driver::Nbd => nbd::kernel::check(),
    }
}

/// Reports whether the kernel has the device of a record.
pub(crate) fn is_there(record: &DeviceRecord) -> Result<bool> {
    let found = match record.options.driver {
        Driver::Ublk => ublk::find(record.cookie)?,
        Driver::Nbd => nbd::kernel::find(&identifiers::of_volume(record.cookie))?,
    };
    Ok(found.is_some())
}

/// Path of the block device with a number.
pub(crate) fn path_of(driver: Driver, number: u32) -> PathBuf {
    match driver {
        Driver::Ublk => PathBuf::from(format!("/dev/ublkb{number}")),
        Driver::Nbd => nbd::kernel::block_path(number),
    }
}

impl Device {
    /// Adds the device of a record. Calls `note` with its number as soon as there is one.
    pub(crate) fn add<E: Exports>(
        parts: &DeviceParts<E>,
        record: &DeviceRecord,
        note: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Device> {
        match record.options.driver {
            Driver::Ublk => {
                let device = ublk::Device::add(&parts.shown, &ublk_options(parts, record), note)?;
                Ok(Device::Ublk(Box::new(device)))
            }
            Driver::Nbd => {
                let backend = Arc::new(Backend::of(parts, record)?);
                let lock = lock_served(&identifiers::of_volume(record.cookie))?;
                let device = nbd::kernel::Device::add(&backend, &nbd_options(parts, record))?;
                // The device is found by its identifier even if its number was not recorded.
                if let Err(error) = note(device.number()) {
                    device.remove()?;
                    return Err(error);
                }
                Ok(Device::Nbd(device, backend.counters.clone(), lock))
            }
        }
    }

    /// Takes over the device that an earlier process left for a record; `None` if there is none.
    pub(crate) fn recover<E: Exports>(
        parts: &DeviceParts<E>,
        record: &DeviceRecord,
    ) -> Result<Option<Device>> {
        match record.options.driver {
            Driver::Ublk => {
                let options = ublk_options(parts, record);
                let number = match record.number {
                    Some(number) => Some(number),
                    None => ublk::find(record.cookie)?,
                };
                let Some(number) = number else { return Ok(None) };
                let device = ublk::Device::recover(number, &parts.shown, &options)?;
                Ok(device.map(|device| Device::Ublk(Box::new(device))))
            }
            Driver::Nbd => {
                let backend = Arc::new(Backend::of(parts, record)?);
                let lock = lock_served(&identifiers::of_volume(record.cookie))?;
                let device = nbd::kernel::Device::recover(&backend, &nbd_options(parts, record))?;
                Ok(device.map(|device| Device::Nbd(device, backend.counters.clone(), lock)))
            }
        }
    }

    pub(crate) fn number(&self) -> u32 {
        match self {
            Device::Ublk(device) => device.number(),
            Device::Nbd(device, ..) => device.number(),
        }
    }

    /// Number of queues (ublk) or connections (nbd).
    pub(crate) fn queue_count(&self) -> u16 {
        match self {
            Device::Ublk(device) => device.queue_count(),
            Device::Nbd(device, ..) => device.connection_count(),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        match self {
            Device::Ublk(device) => device.path(),
            Device::Nbd(device, ..) => device.path(),
        }
    }

    /// Reason why requests no longer reach this process although the device was not detached.
    pub(crate) fn failure(&mut self) -> Option<Error> {
        let is_gone = match self {
            Device::Ublk(device) => device.is_gone(),
            Device::Nbd(device, ..) => device.is_gone(),
        };
        is_gone.then(|| {
            let what = format!(
                "another program has disconnected {}; detach the volume with --force, and attach it again",
                self.path().display()
            );
            Error::new(ErrorKind::NotFound, what)
        })
    }

    pub(crate) fn statistics(&self) -> Statistics {
        match self {
            Device::Ublk(device) => {
                let ublk::Statistics {
                    read_count,
                    write_count,
                    flush_count,
                    discard_count,
                    failure_count,
                    read_bytes,
                    written_bytes,
                } = device.statistics();
                Statistics {
                    read_count,
                    write_count,
                    flush_count,
                    discard_count,
                    read_bytes,
                    written_bytes,
                    failure_count,
                }
            }
            Device::Nbd(device, counters, _) => {
                let nbd::kernel::Statistics {
                    read_count,
                    write_count,
                    flush_count,
                    discard_count,
                    read_bytes,
                    written_bytes,
                } = device.statistics();
                Statistics {
                    read_count,
                    write_count,
                    flush_count,
                    discard_count,
                    read_bytes,
                    written_bytes,
                    failure_count: counters.errors.load(Ordering::Relaxed),
                }
            }
        }
    }

    pub(crate) fn resize(&mut self, size_bytes: u64) -> Result<()> {
        match self {
            Device::Ublk(device) => device.resize(size_bytes),
            Device::Nbd(device, ..) => device.resize(size_bytes),
        }
    }

    /// Reports whether the kernel has applied a new size, in bytes. The nbd driver applies it once
    /// it is idle for a moment.
    pub(crate) fn has_size(&self, size_bytes: u64) -> bool {
        match self {
            Device::Ublk(_) => true, // its command has returned
            Device::Nbd(device, ..) => device.has_size(size_bytes),
        }
    }

    pub(crate) fn leave(self, grace: Duration) {
        match self {
            Device::Ublk(device) => device.leave(grace),
            Device::Nbd(device, ..) => device.leave(grace),
        }
    }

    /// Removes the device from the kernel. With `is_forced`, requests that are not answered soon
    /// fail.
    pub(crate) fn remove(mut self, is_forced: bool) -> Result<()> {
        let is_ours = match &mut self {
            Device::Ublk(device) => device.is_ours().unwrap_or(false),
            Device::Nbd(device, ..) => !device.is_gone(),
        };
        if is_ours {
            // Before another program's device can get its number.
            udev::gone(&self.path());
        }
        match self {
            Device::Ublk(device) => device.remove(is_forced.then_some(FORCE_GRACE)),
            Device::Nbd(device, ..) => device.remove(),
        }
    }
}

fn ublk_options<E: Exports>(parts: &DeviceParts<E>, record: &DeviceRecord) -> ublk::Options {
    let AttachOptions { queue_count, queue_depth, logical_block_bytes, .. } = record.options;
    ublk::Options {
        cookie: record.cookie,
        queue_count,
        queue_depth,
        io_bytes_max: IO_BYTES_MAX,
        logical_block_bytes,
        memory: parts.memory.clone(),
    }
}

fn nbd_options<E: Exports>(
    parts: &DeviceParts<E>,
    record: &DeviceRecord,
) -> nbd::kernel::DeviceOptions {
    let limits = parts.shown.limits();
    nbd::kernel::DeviceOptions {
        identifier: identifiers::of_volume(record.cookie),
        size_bytes: limits.size_bytes,
        logical_block_bytes: record.options.logical_block_bytes,
        transmission_flags: Handshake::new(TlsMode::Off, false).transmission_flags(&limits),
        connection_count: record.options.queue_count,
        dead_timeout: Duration::from_secs(record.options.dead_timeout_seconds),
        set_attribute: probe_process::set_attribute,
    }
}

/// Answers the nbd driver from this process.
struct Backend<E: Exports> {
    server: Server<E>,
    /// Held as long as the device is served, so that other clients do not take the places of its
    /// connections.
    places: Vec<Place>,
    shown: Arc<E::Device>,
    name: String,
    counters: Arc<Counters>,
}

impl<E: Exports> Backend<E> {
    fn of(parts: &DeviceParts<E>, record: &DeviceRecord) -> Result<Backend<E>> {
        let (shown, name, server) = (parts.shown.clone(), parts.name.clone(), parts.server.clone());
        let places = (0..record.options.queue_count).map(|_| server.place());
        let places = places.collect::<Result<_>>()?;
        Ok(Backend { server, places, shown, name, counters: Arc::default() })
    }
}

impl<E: Exports> nbd::kernel::Backend for Backend<E> {
    type Connection = u16;

    async fn dial(&self, connection: u16) -> Result<u16> {
        Ok(connection)
    }

    async fn serve(&self, connection: u16, stream: UnixStream, siblings: Siblings, stop: Stop) {
        let kernel = KernelConnection {
            stream,
            device: self.shown.clone(),
            name: self.name.clone(),
            counters: self.counters.clone(),
            siblings,
        };
        let place = &self.places[usize::from(connection)];
        self.server.serve_kernel(place, kernel, stop).await;
    }
}
