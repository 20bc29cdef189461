//! The life of a kernel block device: creation, take-over and removal.
//!
//! Invariants:
//! - A device is identified by its number and the caller's cookie together. A device with another
//!   cookie is never touched.
//! - The caller learns the number before the device can be used, so that every device is on record.
//! - All calls block, some for seconds: use them only on threads that may block.

use crate::abi::{Info, feature, state};
use crate::control::Control;
use crate::memory::Memory;
use crate::params::params;
use crate::queue::{self, Counters, QueueArgs};
use crate::seeded_bugs::seeded_bugs;
use crate::table;
use crate::wakes::Wakes;
use block::env::{Clock, SystemClock};
use block::units::SECTOR_BYTES;
use block::{BlockDevice, Error, ErrorKind, Result};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for a device whose server is ending. Chosen by hand: a process with much memory
/// takes a second or two to end.
const RECOVERY_WAIT: Duration = Duration::from_secs(30);
/// Longest wait before the removal of a device whose server may be ending. Chosen by hand: if the
/// server lives, a person waits this long.
const END_WAIT: Duration = Duration::from_secs(2);
/// Longest wait for the nodes in `/dev`.
const NODE_WAIT: Duration = Duration::from_secs(10);
/// Pause between two checks of a state that is not signalled.
const POLL: Duration = Duration::from_millis(5);

/// The parameters of a new device. Sizes in bytes.
#[derive(Clone, Debug)]
pub struct Options {
    /// The value by which the caller recognizes the device.
    pub cookie: u64,
    /// Hardware queues, at least 1, each with its own thread.
    pub queue_count: u16,
    /// Requests in flight per queue: 1 to [`crate::QUEUE_DEPTH_MAX`].
    pub queue_depth: u16,
    /// Largest payload of a request: a multiple of 4096, at most [`crate::IO_BYTES_MAX`].
    pub io_bytes_max: u32,
    /// 512 or 4096.
    pub logical_block_bytes: u32,
    /// The payload memory of its queues: [`crate::own_bytes`] for each, and what they borrow.
    pub memory: Arc<Memory>,
}

/// The counts of a device since it was added or taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Number of reads.
    pub read_count: u64,
    /// Number of writes.
    pub write_count: u64,
    /// Number of flushes.
    pub flush_count: u64,
    /// Number of discards, including requests to write zeroes.
    pub discard_count: u64,
    /// Number of requests that were answered with an error.
    pub failure_count: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// A device that this process serves. Dropping it stops serving, like [`Device::leave`] without a
/// grace period.
pub struct Device {
    number: u32,
    cookie: u64,
    control: Control,
    threads: Threads,
    logical_block_bytes: u32,
}

/// Checks whether this machine can have such devices.
///
/// # Errors
/// `Unsupported` or `Denied`, with the missing requirement and the remedy.
pub fn check() -> Result<()> {
    Control::open().map(drop)
}

/// Finds the number of the device with this cookie.
///
/// # Errors
/// Those of the driver and of [`check`].
pub fn find(cookie: u64) -> Result<Option<u32>> {
    let mut control = Control::open()?;
    for number in numbers() {
        if control.info(number)?.is_some_and(|info| info.cookie == cookie) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// Lists the numbers of all ublk devices of the kernel.
fn numbers() -> Vec<u32> {
    let entries = std::fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.file_name())).collect()
}

/// Removes a device that no process serves. Its users get errors. Without a `cookie` the device may
/// belong to any program.
///
/// # Errors
/// `NotFound`: there is none with this number and cookie. `Busy`: a living process serves it.
pub fn delete(number: u32, cookie: Option<u64>) -> Result<()> {
    let mut control = Control::open()?;
    let until = SystemClock.now() + END_WAIT;
    loop {
        let info = control.info(number)?;
        let is_meant = |info: &Info| cookie.is_none_or(|cookie| cookie == info.cookie);
        let Some(info) = info.filter(is_meant) else {
            let what = format!("remove ublk device {number}: there is no such device");
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        if !is_served(&info) || seeded_bugs().removes_served {
            break;
        }
        if SystemClock.now() >= until {
            let what = format!(
                "remove ublk device {number}: process {} serves it; detach it there",
                info.server_pid
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        // The server may be ending.
        std::thread::sleep(POLL);
    }
    control.stop(number)?;
    control.delete(number)
}

/// Whether a device has no server, so that its requests wait for one. Waits for a server that is
/// ending.
///
/// # Errors
/// Those of the driver and of [`check`].
pub fn is_waiting(number: u32) -> Result<bool> {
    let mut control = Control::open()?;
    let until = SystemClock.now() + END_WAIT;
    loop {
        let Some(info) = control.info(number)? else { return Ok(false) };
        // The server may live in another process namespace, where only the driver sees it.
        let is_ending = info.state == state::LIVE && !is_alive(info.server_pid);
        if !is_ending || SystemClock.now() >= until {
            return Ok(info.state == state::QUIESCED);
        }
        std::thread::sleep(POLL);
    }
}

/// Whether a living process other than this one is recorded as the server.
fn is_served(info: &Info) -> bool {
    let own = i32::try_from(std::process::id()).expect("process numbers are small");
    info.server_pid > 0
        && info.server_pid != own
        && matches!(info.state, state::LIVE | state::DEAD)
        && is_alive(info.server_pid)
}

/// Whether a process is alive. A zombie is not.
fn is_alive(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name before it may contain any character. Source: proc_pid_stat(5).
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X'))
}

impl Device {
    /// Adds a device whose number the driver chooses. `note` receives the number before the device
    /// can be used; if `note` fails, the device is removed again. Call it within the context of a
    /// runtime, on a thread that may block.
    ///
    /// # Errors
    /// `Unsupported`, `Denied`: see [`check`]. `Invalid`: bad options. `Unavailable`: the device
    /// does not answer reads, and this kernel must not wait for it. `Io`: the driver failed.
    /// Otherwise those of `note`.
    pub fn add<D: BlockDevice>(
        device: &Arc<D>,
        options: &Options,
        note: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Device> {
        check_options(options)?;
        let limits = device.limits();
        let params = params(&limits, options.logical_block_bytes, options.io_bytes_max)?;
        let mut control = Control::open()?;
        if table::is_read_at_start() && !seeded_bugs().leaves_table_unread {
            tokio::runtime::Handle::current().block_on(table::read_ends(&**device, table::WAIT))?;
        }
        let resize = control.features() & feature::UPDATE_SIZE;
        let wanted = Info {
            queue_count: options.queue_count,
            queue_depth: options.queue_depth,
            state: state::DEAD,
            io_bytes_max: options.io_bytes_max,
            device: u32::MAX,
            server_pid: -1,
            flags: feature::USER_RECOVERY
                | feature::USER_RECOVERY_REISSUE
                | feature::CMD_IOCTL_ENCODE
                | feature::USER_COPY
                | resize,
            cookie: options.cookie,
        };
        let info = control.add(&wanted)?;
        let number = info.device;
        let started =
            note(number).and_then(|()| control.set_params(number, &params)).and_then(|()| {
                let threads = Threads::start(device, options, &info)?;
                control.start(number)?;
                wait_for(&block_path(number))?;
                Ok(threads)
            });
        match started {
            Ok(threads) => {
                let logical_block_bytes = options.logical_block_bytes;
                let cookie = options.cookie;
                Ok(Device { number, cookie, control, threads, logical_block_bytes })
            }
            Err(error) => {
                if let Err(late) = control.stop(number).and_then(|()| control.delete(number)) {
                    tracing::warn!(
                        number, error = %late.chain(),
                        "could not delete an unfinished ublk device"
                    );
                }
                Err(error)
            }
        }
    }

    /// Takes over the device that an earlier process served. Returns `None` if no device has this
    /// number and cookie any more (the machine was rebooted), or if it never started.
    ///
    /// # Errors
    /// `Busy`: another process serves it, or has not ended after a long wait. Otherwise those of
    /// [`Device::add`]. The device then stays as it is.
    pub fn recover<D: BlockDevice>(
        number: u32,
        device: &Arc<D>,
        options: &Options,
    ) -> Result<Option<Device>> {
        let mut control = Control::open()?;
        let until = SystemClock.now() + RECOVERY_WAIT;
        let info = loop {
            let Some(info) = control.info(number)?.filter(|info| info.cookie == options.cookie)
            else {
                return Ok(None);
            };
            match info.state {
                // An earlier process died before it had started the device, or while removing it.
                state::DEAD => {
                    control.delete(number)?;
                    return Ok(None);
                }
                state::QUIESCED | state::FAIL_IO => break info,
                _ if SystemClock.now() >= until => {
                    let what = format!(
                        "take over ublk device {number}: process {} serves it still",
                        info.server_pid
                    );
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                // Its server is ending; the driver notices when the server's last file is closed.
                _ => std::thread::sleep(POLL),
            }
        };
        control.start_recovery(number, until)?;
        // The original parameters of the device remain.
        let made = Options {
            queue_count: info.queue_count,
            queue_depth: info.queue_depth,
            io_bytes_max: info.io_bytes_max,
            ..options.clone()
        };
        let threads = Threads::start(device, &made, &info)?;
        control.end_recovery(number)?;
        let logical_block_bytes = options.logical_block_bytes;
        let cookie = options.cookie;
        let mut recovered = Device { number, cookie, control, threads, logical_block_bytes };
        recovered.follow_size(device.limits().size_bytes);
        Ok(Some(recovered))
    }

    /// Tells the kernel a size that changed while the device had no server. If that fails, logs
    /// that the device keeps its size; requests past the volume's end then get errors.
    fn follow_size(&mut self, size_bytes: u64) {
        let path = format!("/sys/block/ublkb{}/size", self.number);
        let known = std::fs::read_to_string(path).ok().and_then(|text| size_of(&text));
        if known.is_none_or(|known| known == size_bytes) {
            return;
        }
        if let Err(error) = self.resize(size_bytes) {
            tracing::warn!(
                device = %self.path().display(), device_bytes = known, volume_bytes = size_bytes,
                error = %error.chain(),
                "could not resize the device of a volume; it keeps its size until you detach and \
                 attach the volume"
            );
        }
    }

    /// Returns the device's number: 3 for `/dev/ublkb3`.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of hardware queues that the kernel granted: at most one per processor.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        u16::try_from(self.threads.threads.len())
            .expect("there are as many as were asked for at most")
    }

    /// Returns the path of the block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        block_path(self.number)
    }

    /// Returns the counts of the device.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let Counters { reads, writes, flushes, discards, failures, read_bytes, written_bytes } =
            &*self.threads.counters;
        Statistics {
            read_count: reads.load(Ordering::Relaxed),
            write_count: writes.load(Ordering::Relaxed),
            flush_count: flushes.load(Ordering::Relaxed),
            discard_count: discards.load(Ordering::Relaxed),
            failure_count: failures.load(Ordering::Relaxed),
            read_bytes: read_bytes.load(Ordering::Relaxed),
            written_bytes: written_bytes.load(Ordering::Relaxed),
        }
    }

    /// Tells the kernel the volume's new size.
    ///
    /// # Errors
    /// `Unsupported`: the kernel cannot change it. `Invalid`: not a multiple of the logical block.
    /// `NotFound`: another program removed the device.
    pub fn resize(&mut self, size_bytes: u64) -> Result<()> {
        if !size_bytes.is_multiple_of(u64::from(self.logical_block_bytes)) {
            let what = format!(
                "resize ublk device {}: {size_bytes} bytes are no multiple of its logical block of {}",
                self.number, self.logical_block_bytes
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if !self.is_ours()? {
            let what = format!("resize ublk device {}: somebody else removed it", self.number);
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        self.control.update_size(self.number, size_bytes / SECTOR_BYTES)
    }

    /// Whether the number still belongs to this device. Another program may have removed it, and
    /// the number may have gone to another device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_ours(&mut self) -> Result<bool> {
        let info = self.control.info(self.number)?;
        // The driver does not report a device whose node is missing.
        let is_there = || numbers().contains(&self.number);
        Ok(info.map_or_else(is_there, |info| {
            info.cookie == self.cookie || seeded_bugs().goes_by_number
        }))
    }

    /// Whether another program removed the device, so that no more requests arrive.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.threads.threads.iter().all(|(_, thread)| thread.is_finished())
    }

    /// Answers the requests in progress within `grace`, and stops serving. The device stays; the
    /// next process gets the unanswered requests.
    pub fn leave(mut self, grace: Duration) {
        self.threads.leave(grace);
    }

    /// Removes the device from the kernel; its open users get errors from then on. Requests in
    /// flight are answered first: without a `grace` all of them, otherwise those that end within
    /// it, while the others fail.
    ///
    /// A device that another program has already removed is no error.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn remove(mut self, grace: Option<Duration>) -> Result<()> {
        if let Some(grace) = grace {
            // The kernel waits for the requests of queues with a server, however long they take.
            self.threads.leave(grace);
        }
        if !self.is_ours()? {
            return Ok(());
        }
        self.control.stop(self.number)?;
        self.threads.join();
        self.control.delete(self.number)
    }
}

/// The queues of a device. Dropping them ends them.
struct Threads {
    threads: Vec<(Arc<Wakes>, JoinHandle<()>)>,
    counters: Arc<Counters>,
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.leave(Duration::ZERO);
    }
}

impl Threads {
    /// Starts the queues, and returns when all of them can take requests.
    fn start<D: BlockDevice>(device: &Arc<D>, options: &Options, info: &Info) -> Result<Threads> {
        let node = Arc::new(open_node(info.device)?);
        let counters = Arc::new(Counters::default());
        let mut made = Threads { threads: Vec::new(), counters: counters.clone() };
        let (announce, announced) = mpsc::channel();
        for queue in 0..info.queue_count {
            let io = |error| Error::with_source(ErrorKind::Io, "start a ublk queue", error);
            let wakes = Wakes::new(info.queue_depth).map_err(io)?;
            let args = QueueArgs {
                device: device.clone(),
                node: node.clone(),
                number: info.device,
                queue,
                depth: info.queue_depth,
                io_bytes_max: info.io_bytes_max,
                memory: options.memory.clone(),
                counters: counters.clone(),
                wakes: wakes.clone(),
                runtime: tokio::runtime::Handle::current(),
            };
            let announce = announce.clone();
            let thread = std::thread::Builder::new()
                .name(format!("ublk-{}-{queue}", info.device))
                .spawn(move || queue::serve(args, move |outcome| drop(announce.send(outcome))))
                .map_err(io)?;
            made.threads.push((wakes, thread));
        }
        drop(announce);
        for outcome in announced {
            outcome?;
        }
        Ok(made)
    }

    fn leave(&mut self, grace: Duration) {
        self.threads.iter().for_each(|(wakes, _)| wakes.leave());
        let until = SystemClock.now() + grace;
        while SystemClock.now() < until
            && self.threads.iter().any(|(_, thread)| !thread.is_finished())
        {
            std::thread::sleep(POLL);
        }
        self.threads.iter().for_each(|(wakes, _)| wakes.leave_now());
        self.join();
    }

    fn join(&mut self) {
        for (_, thread) in self.threads.drain(..) {
            // A thread that panics ends the process.
            let _ = thread.join();
        }
    }
}

fn check_options(options: &Options) -> Result<()> {
    let Options { queue_count, queue_depth, io_bytes_max, .. } = *options;
    let wrong = match () {
        () if queue_count == 0 || queue_count > 128 => "1 to 128 queues",
        () if queue_depth == 0 || queue_depth > crate::QUEUE_DEPTH_MAX => "a depth of 1 to 4096",
        () if io_bytes_max == 0
            || io_bytes_max > crate::IO_BYTES_MAX
            || !io_bytes_max.is_multiple_of(4096) =>
        {
            "requests of a multiple of 4096 bytes, at most 32 MiB"
        }
        () => return Ok(()),
    };
    Err(Error::new(ErrorKind::Invalid, format!("make a ublk device: it takes {wrong}")))
}

/// Converts a count of sectors in the kernel's text to bytes.
fn size_of(text: &str) -> Option<u64> {
    text.trim_end().parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)
}

fn block_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// Opens the character device for the kernel's requests. Only one process can have it open.
fn open_node(number: u32) -> Result<File> {
    let path = PathBuf::from(format!("/dev/ublkc{number}"));
    wait_for(&path)?;
    let until = SystemClock.now() + NODE_WAIT;
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open");
    loop {
        // None of its operations blocks. Without this flag, a ring would pass possibly blocking
        // ones to a thread.
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(nonblocking);
        match options.open(&path) {
            Ok(node) => return Ok(node),
            // udev may not have set the owner yet, and an earlier server's last file may still be
            // closing.
            Err(error) if SystemClock.now() >= until => {
                let what = format!("open {}", path.display());
                return Err(Error::with_source(ErrorKind::Io, what, error));
            }
            Err(_) => std::thread::sleep(POLL),
        }
    }
}

fn wait_for(path: &std::path::Path) -> Result<()> {
    let until = SystemClock.now() + NODE_WAIT;
    while !path.exists() {
        if SystemClock.now() >= until {
            let what = format!(
                "wait for {}: the kernel has the device, but nothing makes its node; is /dev a \
                 devtmpfs, or udev running?",
                path.display()
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_that_the_kernel_knows_is_read() {
        assert_eq!(size_of("131072\n"), Some(64 << 20));
        assert_eq!((size_of(""), size_of("x\n")), (None, None));
    }

    #[test]
    fn a_device_is_served_while_its_process_lives() {
        let of = |server_pid: i32, state: u16| Info {
            queue_count: 1,
            queue_depth: 1,
            state,
            io_bytes_max: 4096,
            device: 0,
            server_pid,
            flags: 0,
            cookie: 1,
        };
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(other.id()).unwrap();
        assert!(is_served(&of(pid, state::LIVE)));
        assert!(!is_served(&of(pid, state::QUIESCED)), "its server has gone");
        assert!(!is_served(&of(-1, state::LIVE)));
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!is_served(&of(own, state::LIVE)), "what we have is ours to remove");
        other.kill().unwrap();
        let until = SystemClock.now() + Duration::from_secs(10);
        while is_served(&of(pid, state::LIVE)) {
            assert!(SystemClock.now() < until, "a process that has ended does not serve");
            std::thread::sleep(POLL);
        }
        other.wait().unwrap();
    }
}
