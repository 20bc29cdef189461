//! A device of the kernel, whichever driver it has. Everything here blocks.

use super::record::{AttachOptions, Driver, Record};
use crate::glue::exports::{Attachment, PoolExports};
use block::{BlockDevice, Error, ErrorKind, Result};
use nbd::handshake::Handshake;
use nbd::kernel::Stop;
use nbd::{Counters, KernelConnection, Place, Server, TlsMode};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::UnixStream;

/// Largest payload of a request to a ublk device. Chosen by hand: larger ones are cut by the kernel, and
/// cost no more.
pub(super) const IO_BYTES_MAX: u32 = 512 << 10;

/// What a device is made of, beside its record.
#[derive(Clone)]
pub(super) struct Parts {
    /// What it shows.
    pub(super) shown: Arc<Attachment>,
    /// Name of the volume.
    pub(super) name: String,
    /// Serves connections of the nbd driver.
    pub(super) server: Server<PoolExports>,
    /// Payloads of a ublk queue.
    pub(super) queue_bytes_max: u64,
}

/// A device that this process serves.
pub(super) enum Device {
    Ublk(Box<ublk::Device>),
    Nbd(nbd::kernel::Device, Arc<Counters>),
}

/// What a device has done since this daemon serves it, or, with the nbd driver, since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Statistics {
    pub(super) read_count: u64,
    pub(super) write_count: u64,
    pub(super) flush_count: u64,
    /// Since this daemon serves it.
    pub(super) failure_count: u64,
}

/// Looks whether this machine can have such devices.
///
/// # Errors
/// `Unsupported` or `Denied`: what is missing.
pub(super) fn check(driver: Driver) -> Result<()> {
    match driver {
        Driver::Ublk => ublk::check().map_err(|error| match error.kind() {
            ErrorKind::Unsupported => error.context("a kernel that has nbd can do with `--nbd`"),
            _ => error,
        }),
        Driver::Nbd => nbd::kernel::check(),
    }
}

/// Whether the kernel has the device of a record.
pub(super) fn is_there(record: &Record) -> Result<bool> {
    let found = match record.options.driver {
        Driver::Ublk => ublk::find(record.cookie)?,
        Driver::Nbd => nbd::kernel::find(&identifier(record.cookie))?,
    };
    Ok(found.is_some())
}

/// Takes out of the kernel what an earlier process left of a record; returns the device's path, if there
/// was one.
pub(super) fn delete(record: &Record) -> Result<Option<PathBuf>> {
    match record.options.driver {
        Driver::Nbd => {
            let deleted = nbd::kernel::delete(&identifier(record.cookie))?;
            Ok(deleted.map(nbd::kernel::block_path))
        }
        Driver::Ublk => {
            let number = match record.number {
                Some(number) => Some(number),
                None => ublk::find(record.cookie)?,
            };
            let Some(number) = number else { return Ok(None) };
            match ublk::delete(number, Some(record.cookie)) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
                Ok(()) => Ok(Some(path_of(Driver::Ublk, number))),
            }
        }
    }
}

/// Takes the device at a path out of the kernel, whoever made it.
///
/// # Errors
/// `Invalid`: it is no path of a device. `Busy`: a process serves it.
pub(super) fn delete_any(path: &str) -> Result<()> {
    let number = |prefix: &str| path.strip_prefix(prefix)?.parse::<u32>().ok();
    match (number("/dev/ublkb"), number("/dev/nbd")) {
        (Some(number), _) => ublk::delete(number, None),
        (None, Some(number)) => nbd::kernel::delete_any(number),
        (None, None) => {
            let what =
                format!("clean up {path}: name a device like /dev/ublkb0 or /dev/nbd0, or none");
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}

/// The block device of a number.
pub(super) fn path_of(driver: Driver, number: u32) -> PathBuf {
    match driver {
        Driver::Ublk => PathBuf::from(format!("/dev/ublkb{number}")),
        Driver::Nbd => nbd::kernel::block_path(number),
    }
}

impl Device {
    /// Adds the device of a record. `note` is told its number as early as there is one.
    pub(super) fn add(
        parts: &Parts,
        record: &Record,
        note: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Device> {
        match record.options.driver {
            Driver::Ublk => {
                let device = ublk::Device::add(&parts.shown, &ublk_options(parts, record), note)?;
                Ok(Device::Ublk(Box::new(device)))
            }
            Driver::Nbd => {
                let backend = Arc::new(Backend::of(parts));
                let device = nbd::kernel::Device::add(&backend, &nbd_options(parts, record))?;
                // It is found by its identifier, with or without its number.
                if let Err(error) = note(device.number()) {
                    device.remove()?;
                    return Err(error);
                }
                Ok(Device::Nbd(device, backend.counters.clone()))
            }
        }
    }

    /// Takes over what an earlier process left of a record; `None` where there is nothing.
    pub(super) fn recover(parts: &Parts, record: &Record) -> Result<Option<Device>> {
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
                let backend = Arc::new(Backend::of(parts));
                let device = nbd::kernel::Device::recover(&backend, &nbd_options(parts, record))?;
                Ok(device.map(|device| Device::Nbd(device, backend.counters.clone())))
            }
        }
    }

    pub(super) fn number(&self) -> u32 {
        match self {
            Device::Ublk(device) => device.number(),
            Device::Nbd(device, _) => device.number(),
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        match self {
            Device::Ublk(device) => device.path(),
            Device::Nbd(device, _) => device.path(),
        }
    }

    /// Why requests do not reach us any more, though nobody detached the device.
    pub(super) fn failure(&mut self) -> Option<Error> {
        let Device::Nbd(device, _) = self else { return None };
        device.is_gone().then(|| {
            let what = format!(
                "{} was disconnected by somebody else; detach the volume with --force, and attach it anew",
                device.path().display()
            );
            Error::new(ErrorKind::NotFound, what)
        })
    }

    pub(super) fn statistics(&self) -> Statistics {
        match self {
            Device::Ublk(device) => {
                let ublk::Statistics {
                    read_count, write_count, flush_count, failure_count, ..
                } = device.statistics();
                Statistics { read_count, write_count, flush_count, failure_count }
            }
            Device::Nbd(device, counters) => {
                let nbd::kernel::Statistics { read_count, write_count, flush_count, .. } =
                    device.statistics();
                let failure_count = counters.errors.load(Ordering::Relaxed);
                Statistics { read_count, write_count, flush_count, failure_count }
            }
        }
    }

    pub(super) fn resize(&mut self, size_bytes: u64) -> Result<()> {
        match self {
            Device::Ublk(device) => device.resize(size_bytes),
            Device::Nbd(device, _) => device.resize(size_bytes),
        }
    }

    pub(super) fn leave(self, grace: Duration) {
        match self {
            Device::Ublk(device) => device.leave(grace),
            Device::Nbd(device, _) => device.leave(grace),
        }
    }

    pub(super) fn remove(self) -> Result<()> {
        match self {
            Device::Ublk(device) => device.remove(),
            Device::Nbd(device, _) => device.remove(),
        }
    }
}

/// Whether something has a block device for itself: a mounted file system, swap, a device mapper target,
/// a RAID.
///
/// # Errors
/// Those of opening it.
pub(super) fn is_in_use(path: &Path) -> Result<bool> {
    use std::os::unix::fs::OpenOptionsExt;
    let flag = i32::try_from(rustix::fs::OFlags::EXCL.bits()).expect("a flag of open");
    match OpenOptions::new().read(true).custom_flags(flag).open(path) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
            Ok(true)
        }
        Err(error) => {
            let what = format!("look whether {} is in use", path.display());
            Err(Error::with_source(ErrorKind::Io, what, error))
        }
    }
}

fn ublk_options(parts: &Parts, record: &Record) -> ublk::Options {
    let AttachOptions { queue_count, queue_depth, logical_block_bytes, .. } = record.options;
    ublk::Options {
        cookie: record.cookie,
        queue_count,
        queue_depth,
        io_bytes_max: IO_BYTES_MAX,
        logical_block_bytes,
        payload_bytes_max: parts.queue_bytes_max,
    }
}

/// What the kernel knows a device of the nbd driver by.
fn identifier(cookie: u64) -> String {
    format!("spindle-{cookie:016x}")
}

fn nbd_options(parts: &Parts, record: &Record) -> nbd::kernel::DeviceOptions {
    let limits = parts.shown.limits();
    nbd::kernel::DeviceOptions {
        identifier: identifier(record.cookie),
        size_bytes: limits.size_bytes,
        logical_block_bytes: record.options.logical_block_bytes,
        transmission_flags: Handshake::new(TlsMode::Off, false).transmission_flags(&limits),
        connection_count: record.options.queue_count,
        dead_timeout: Duration::from_secs(record.options.dead_timeout_seconds),
    }
}

/// Answers the nbd driver from this process.
struct Backend {
    server: Server<PoolExports>,
    shown: Arc<Attachment>,
    name: String,
    counters: Arc<Counters>,
}

impl Backend {
    fn of(parts: &Parts) -> Backend {
        let Parts { shown, name, server, .. } = parts.clone();
        Backend { server, shown, name, counters: Arc::default() }
    }
}

impl nbd::kernel::Backend for Backend {
    type Connection = Place;

    async fn dial(&self, _connection: u16) -> Result<Place> {
        self.server.place()
    }

    async fn serve(&self, place: Place, stream: UnixStream, stop: Stop) {
        let kernel = KernelConnection {
            stream,
            device: self.shown.clone(),
            name: self.name.clone(),
            counters: self.counters.clone(),
        };
        self.server.serve_kernel(place, kernel, stop).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_its_path() {
        for wrong in ["", "db", "/dev/sda", "/dev/nbd", "/dev/nbd0p1", "/dev/ublkbx", "/dev/nbd-1"]
        {
            let error = delete_any(wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{wrong}");
        }
    }
}
