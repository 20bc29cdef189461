//! A device of the kernel, with either driver. Everything here blocks.

use crate::planted::planted;
use crate::record::{AttachOptions, Driver, Record};
use crate::{probe_process, remote, udev};
use block::{BlockDevice, Error, ErrorKind, Result};
use nbd::handshake::Handshake;
use nbd::kernel::{Siblings, Stop};
use nbd::{Counters, Exports, KernelConnection, Place, Server, TlsMode};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use uuid::Uuid;

/// Folder of the locks of devices that are served.
const LOCKS: &str = "/run/spindle";
/// Largest payload of a request to a ublk device. Chosen by hand: the kernel splits larger ones at
/// no extra cost.
pub(crate) const IO_BYTES_MAX: u32 = 512 << 10;

/// Longest wait for programs that have a device open just for a moment. Chosen by hand: udev looks
/// at a device whenever a writer has closed it.
const CLOSE_WAIT: Duration = Duration::from_secs(1);
/// Longest wait for requests in flight when no program has the device open any more: a program may
/// have closed it while its writes are on their way. Chosen by hand: as long as a person would
/// wait.
const IDLE_WAIT: Duration = Duration::from_secs(15);
/// Time without requests in flight after which a device counts as idle. Chosen by hand: writeback
/// by the kernel makes no such pause.
const IDLE: Duration = Duration::from_millis(100);
/// Time for requests in flight when a device is removed by force. Chosen by hand: a log with room
/// answers in a moment, and a full one may have none for hours.
const FORCE_GRACE: Duration = Duration::from_secs(5);

/// Parts of a device besides its record.
pub(crate) struct Parts<E: Exports> {
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
            ErrorKind::Unsupported => error.context("a kernel that has nbd can do with `--nbd`"),
            _ => error,
        }),
        Driver::Nbd => nbd::kernel::check(),
    }
}

/// Reports whether the kernel has the device of a record.
pub(crate) fn is_there(record: &Record) -> Result<bool> {
    let found = match record.options.driver {
        Driver::Ublk => ublk::find(record.cookie)?,
        Driver::Nbd => nbd::kernel::find(&identifier(record.cookie))?,
    };
    Ok(found.is_some())
}

/// Removes the device that an earlier process left for a record from the kernel. Returns the
/// device's path if there was one.
///
/// # Errors
/// `Busy`: a process serves it, for example because `attachments.json` was copied from elsewhere.
pub(crate) fn delete(record: &Record) -> Result<Option<PathBuf>> {
    let deleted = delete_unserved(record)?;
    deleted.iter().for_each(|path| udev::gone(path));
    Ok(deleted)
}

fn delete_unserved(record: &Record) -> Result<Option<PathBuf>> {
    match record.options.driver {
        Driver::Nbd => {
            let identifier = identifier(record.cookie);
            let Some(number) = nbd::kernel::find(&identifier)? else { return Ok(None) };
            let _lock = lock_unserved(&nbd::kernel::block_path(number), &identifier)?;
            let deleted = nbd::kernel::delete(&identifier)?;
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

/// Removes the device at a path from the kernel, even if another program made it.
///
/// # Errors
/// `Invalid`: it is not the path of a device. `Busy`: a process serves it, or it is in use and its
/// server cannot be determined.
pub(crate) fn delete_any(path: &str) -> Result<()> {
    delete_any_unserved(path)?;
    udev::gone(Path::new(path));
    Ok(())
}

fn delete_any_unserved(path: &str) -> Result<()> {
    let number = |prefix: &str| path.strip_prefix(prefix)?.parse::<u32>().ok();
    match (number("/dev/ublkb"), number("/dev/nbd")) {
        (Some(number), _) => ublk::delete(number, None),
        (None, Some(number)) => {
            let identifier = nbd::kernel::identifier_of(number);
            let Some(identifier) = identifier.filter(|text| text.starts_with("spindle-")) else {
                // Another program's device. The program that connected it may have ended while the
                // kernel keeps serving it.
                if is_in_use(Path::new(path))? {
                    let what = format!(
                        "disconnect {path}: it is in use (`findmnt {path}`, `lsblk {path}` show by what), and not a \
                         device of spindle"
                    );
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                return nbd::kernel::delete_any(number);
            };
            let _lock = lock_unserved(Path::new(path), &identifier)?;
            nbd::kernel::delete(&identifier).map(drop)
        }
        (None, None) => {
            let what =
                format!("clean up {path}: name a device like /dev/ublkb0 or /dev/nbd0, or none");
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}

/// Reports whether a device belongs to one of spindle's drivers and its requests wait because no
/// process serves it. False if that cannot be determined.
pub(crate) fn is_waiting(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<u32>().ok();
    if let Some(number) = number("ublkb") {
        return ublk::is_waiting(number).unwrap_or(false);
    }
    let identifier = number("nbd").and_then(nbd::kernel::identifier_of);
    let Some(identifier) = identifier.filter(|text| text.starts_with("spindle-")) else {
        return false;
    };
    !is_locked(&lock_name(&identifier)).unwrap_or(true)
}

/// Takes the lock of a device of the nbd driver, which its serving process would hold.
pub(crate) fn lock_unserved(path: &Path, identifier: &str) -> Result<File> {
    lock(&lock_name(identifier)).map_err(|error| match error.kind() {
        ErrorKind::Busy => {
            let what = format!("clean up {}: a process serves it; detach it there", path.display());
            Error::new(ErrorKind::Busy, what)
        }
        _ => error,
    })
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
        parts: &Parts<E>,
        record: &Record,
        note: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Device> {
        match record.options.driver {
            Driver::Ublk => {
                let device = ublk::Device::add(&parts.shown, &ublk_options(parts, record), note)?;
                Ok(Device::Ublk(Box::new(device)))
            }
            Driver::Nbd => {
                let backend = Arc::new(Backend::of(parts, record)?);
                let lock = lock_of(record)?;
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
    pub(crate) fn recover<E: Exports>(parts: &Parts<E>, record: &Record) -> Result<Option<Device>> {
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
                let lock = lock_of(record)?;
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
                "{} was disconnected by somebody else; detach the volume with --force, and attach it anew",
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

/// Refuses to remove a block device that is in use: it is held exclusively, a program has it open,
/// or writes of a program that closed it are on their way; the last case is waited for. `what`
/// begins the message.
///
/// # Errors
/// `Busy`; errors opening it.
pub(crate) fn check_unused(what: &str, path: &Path) -> Result<()> {
    check_users(what, path)?;
    if planted().detached_at_once {
        return Ok(());
    }
    if !comes_to_rest(path) {
        let what = format!(
            "{what}: {} is in use: what was written to it before it was closed is still on its way \
             (`spindle status` shows whether the log has room); try again, or use --force, and that is lost",
            path.display()
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    // A new user may have come meanwhile.
    check_users(what, path)
}

fn check_users(what: &str, path: &Path) -> Result<()> {
    let what = if is_in_use(path)? {
        format!(
            "{what}: {} is in use; unmount it first (`findmnt {0}`, `lsblk {0}` show by what), or use \
             --force, and its users get errors",
            path.display()
        )
    } else if let Some(user) = opened_by(path) {
        format!(
            "{what}: {} is in use: {user} has it open; end that first, or use --force, and its users get \
             errors",
            path.display()
        )
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Busy, what))
}

/// Reports whether a block device is held exclusively: by a mounted file system, swap, a device
/// mapper target or a RAID.
///
/// # Errors
/// Errors opening it.
pub(crate) fn is_in_use(path: &Path) -> Result<bool> {
    let is_free = probe_process::is_free(path).map_err(|error| {
        let what = format!("look whether {} is in use", path.display());
        let kind = match error.kind() {
            std::io::ErrorKind::TimedOut => ErrorKind::Unavailable,
            _ => ErrorKind::Io,
        };
        Error::with_source(kind, what, error)
    })?;
    Ok(!is_free)
}

/// Finds a program that has a block device or a partition of it open, for messages. Waits for
/// programs that close it soon, such as udev. Best effort: processes that this one may not inspect
/// are missed.
fn opened_by(path: &Path) -> Option<String> {
    let numbers = numbers_of(path);
    let until = Instant::now() + CLOSE_WAIT;
    loop {
        if let Some(device) = loop_on(&numbers) {
            return Some(format!("{device} (losetup)"));
        }
        let user =
            processes().find(|pid| has_open(*pid, &numbers) || has_mapped(*pid, &numbers))?;
        if Instant::now() >= until {
            let name = std::fs::read_to_string(format!("/proc/{user}/comm")).unwrap_or_default();
            return Some(format!("process {user} ({})", name.trim_end()));
        }
        std::thread::sleep(CLOSE_WAIT / 20);
    }
}

/// Waits until the kernel has no request in flight to a block device. A program that closes a
/// device waits for its writes, but no longer shows up as having it open. Returns false if the
/// device does not become idle soon.
///
/// Writing back here would be simpler, but would keep this process, which serves the device, from
/// ever ending while the device takes nothing.
fn comes_to_rest(path: &Path) -> bool {
    let Some(name) = path.file_name() else { return true };
    let inflight = Path::new("/sys/block").join(name).join("inflight");
    let until = Instant::now() + IDLE_WAIT;
    let mut idle_since = None;
    loop {
        // Reads and writes, including flushes. Source: Documentation/ABI/stable/sysfs-block.
        let counts = std::fs::read_to_string(&inflight).unwrap_or_default();
        let now = Instant::now();
        if counts.split_ascii_whitespace().any(|count| count != "0") {
            idle_since = None;
        } else if now.duration_since(*idle_since.get_or_insert(now)) >= IDLE {
            return true;
        }
        if now >= until {
            return false;
        }
        std::thread::sleep(IDLE / 20);
    }
}

/// Major and minor numbers of a block device and of its partitions.
fn numbers_of(path: &Path) -> Vec<(u32, u32)> {
    let Some(name) = path.file_name() else { return Vec::new() };
    let system = Path::new("/sys/block").join(name);
    let entries = std::fs::read_dir(&system).into_iter().flatten().flatten();
    let partitions = entries.map(|entry| entry.path()).filter(|at| at.join("partition").exists());
    let number = |at: PathBuf| {
        let text = std::fs::read_to_string(at.join("dev")).ok()?;
        let (major, minor) = text.trim_end().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    [system.clone()].into_iter().chain(partitions).filter_map(number).collect()
}

/// Finds a loop device over a block device or a partition of it. The kernel does not report that as
/// exclusive use.
fn loop_on(numbers: &[(u32, u32)]) -> Option<String> {
    let names = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    names.map(|entry| entry.path()).find_map(|system| {
        let backing = std::fs::read_to_string(system.join("loop/backing_file")).ok()?;
        let is_it = is_block_of(Path::new(backing.trim_end()), numbers);
        is_it.then(|| system.file_name().map(|name| format!("/dev/{}", name.to_string_lossy())))?
    })
}

/// Reports whether a process has a block device mapped. It may have closed the file itself.
fn has_mapped(pid: u32, numbers: &[(u32, u32)]) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    // Address, rights, offset, device, inode, path. Source: man 5 proc_pid_maps.
    let mut paths = maps.lines().filter_map(|line| line.split_once(" /dev/"));
    paths.any(|(_, name)| is_block_of(&Path::new("/dev").join(name.trim()), numbers))
}

fn is_block_of(path: &Path, numbers: &[(u32, u32)]) -> bool {
    // Do not ask a file server, which may not answer.
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let mask = rustix::fs::StatxFlags::TYPE;
    rustix::fs::statx(rustix::fs::CWD, path, flags, mask).is_ok_and(|found| {
        let kind = rustix::fs::FileType::from_raw_mode(found.stx_mode.into());
        kind == rustix::fs::FileType::BlockDevice
            && numbers.contains(&(found.stx_rdev_major, found.stx_rdev_minor))
    })
}

/// Numbers of the other processes.
fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id())
}

fn has_open(pid: u32, numbers: &[(u32, u32)]) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.map(|file| file.path()).any(|file| is_block_of(&file, numbers))
}

fn ublk_options<E: Exports>(parts: &Parts<E>, record: &Record) -> ublk::Options {
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

/// Identifier by which the kernel knows a device of the nbd driver.
fn identifier(cookie: u64) -> String {
    format!("spindle-{cookie:016x}")
}

fn nbd_options<E: Exports>(parts: &Parts<E>, record: &Record) -> nbd::kernel::DeviceOptions {
    let limits = parts.shown.limits();
    nbd::kernel::DeviceOptions {
        identifier: identifier(record.cookie),
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
    fn of(parts: &Parts<E>, record: &Record) -> Result<Backend<E>> {
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

fn lock_of(record: &Record) -> Result<Option<File>> {
    match lock(&lock_name(&identifier(record.cookie))) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == ErrorKind::Busy => Err(error),
        Err(error) => {
            tracing::warn!(error = %error.chain(), "a device is not locked against `attach --cleanup`");
            Ok(None)
        }
    }
}

/// Name of the lock of a device, by its identifier. Devices for volumes of other machines are
/// locked by URI, before there is a device.
fn lock_name(identifier: &str) -> String {
    let remote = identifier.strip_prefix(remote::IDENTIFIER).and_then(|rest| {
        let (uri, _attachment) = rest.trim_start().rsplit_once(' ')?;
        Some(uri.to_owned())
    });
    remote.unwrap_or_else(|| identifier.to_owned())
}

/// Takes the lock that a process holds while it serves a device or is about to. The file names the
/// process.
///
/// # Errors
/// `Busy`: another process holds it. Errors of the file.
pub(crate) fn lock(name: &str) -> Result<File> {
    let path = lock_path(name);
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("lock {}", path.display()), error);
    std::fs::create_dir_all(LOCKS).map_err(failed)?;
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let mut file = file.map_err(failed)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = format!("attach {name}: another process serves its device");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Reports whether a process holds a lock, without taking it; `None` if that cannot be determined.
fn is_locked(name: &str) -> Option<bool> {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::metadata(lock_path(name)).ok()?;
    let process = holder_of(name)?.as_raw_nonzero().get();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let device = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    Some(has_lock(&locks, process, device, file.ino()))
}

/// Parses lines with number, kind, mode, access, process, and device and inode with colons. Source:
/// proc_locks(5).
fn has_lock(locks: &str, process: i32, (major, minor): (u32, u32), inode: u64) -> bool {
    let (process, inode) = (process.to_string(), inode.to_string());
    let device = format!("{major:02x}:{minor:02x}");
    let holds = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let kind = fields.next()?;
        let holder = fields.nth(2)?;
        let (its_device, its_inode) = fields.next()?.rsplit_once(':')?;
        // A process in a container has another number there; some file systems have another device
        // there.
        let is_it = its_inode == inode && (holder == process || its_device == device);
        Some(kind == "FLOCK" && is_it)
    };
    locks.lines().any(|line| holds(line).unwrap_or(false))
}

/// Process that holds a lock.
pub(crate) fn holder_of(name: &str) -> Option<rustix::process::Pid> {
    let text = std::fs::read_to_string(lock_path(name)).ok()?;
    rustix::process::Pid::from_raw(text.parse().ok()?)
}

/// Path of the lock of a device.
pub(crate) fn lock_path(name: &str) -> PathBuf {
    let name = Uuid::new_v5(&Uuid::NAMESPACE_URL, name.as_bytes());
    Path::new(LOCKS).join(format!("device-{}.lock", name.simple()))
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

    #[test]
    fn whether_a_lock_is_held_is_seen_without_taking_it() {
        let locks = "1: POSIX  ADVISORY  WRITE 12 00:2d:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 3491 00:1a:4711 0 EOF\n\
            2: -> FLOCK  ADVISORY  WRITE 9 00:1a:99 0 EOF\n";
        let (run, other) = ((0, 0x1a), (0, 0x2d));
        assert!(has_lock(locks, 3491, run, 4711));
        assert!(
            has_lock(locks, 1, run, 4711),
            "of a process that has another number in its container"
        );
        assert!(has_lock(locks, 3491, other, 4711), "on a file system of several devices");
        assert!(!has_lock(locks, 1, other, 4711), "of another file");
        assert!(!has_lock(locks, 12, other, 77), "of another kind");
        assert!(!has_lock(locks, 3491, run, 711) && !has_lock(locks, 9, run, 99));
        assert!(!has_lock("", 1, run, 1));
        // Check the format that this kernel writes.
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().unwrap();
        let (device, inode) = (file.metadata().unwrap().dev(), file.metadata().unwrap().ino());
        let device = (rustix::fs::major(device), rustix::fs::minor(device));
        let read = || std::fs::read_to_string("/proc/locks").unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(has_lock(&read(), own, device, inode), "{}", read());
        rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
        assert!(!has_lock(&read(), own, device, inode));
    }

    #[test]
    fn a_program_that_has_a_device_open_is_found() {
        let names = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        let mut devices = names.map(|entry| Path::new("/dev").join(entry.file_name()));
        let is_free = |path: &PathBuf| File::open(path).is_ok() && opened_by(path).is_none();
        let Some(device) = devices.find(is_free) else {
            return; // no disk here that we may read
        };
        let mut program = std::process::Command::new("sleep");
        program.arg("60").stdin(File::open(&device).unwrap());
        let mut program = program.spawn().unwrap();
        let said = opened_by(&device).unwrap();
        assert!(said.contains(&format!("process {} (sleep)", program.id())), "{said}");
        program.kill().unwrap();
        program.wait().unwrap();
        assert_eq!(opened_by(&device), None);
        // A program that ends soon is waited for.
        let mut program = std::process::Command::new("sleep");
        program.arg("0.2").stdin(File::open(&device).unwrap());
        let mut program = program.spawn().unwrap();
        assert_eq!(opened_by(&device), None);
        program.wait().unwrap();
    }
}
