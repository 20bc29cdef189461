//! One device of the kernel's nbd driver, and its connections.
//!
//! Invariants:
//! - A connection that ends is replaced for as long as the device is there, never before what came by
//!   the old one has ended: the kernel asks again for what was not answered, and an older request that
//!   ran after that would undo newer ones.
//! - A device that is left keeps its requests, and gives them to the process that recovers it.

use super::driver::{self, Driver, Made};
use super::siblings::{Group, Siblings};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Most connections of a device. Chosen by hand: the kernel has a queue for each.
pub const CONNECTION_COUNT_MAX: u16 = 16;
/// Requests in flight of a connection. Source: drivers/block/nbd.c of the kernel.
pub const QUEUE_DEPTH: u16 = 128;
/// After so long the kernel looks whether the connection of an unanswered request has been replaced,
/// and asks again if so. Chosen by hand: it is what users of the device wait at most beside the restart
/// itself. With one connection the kernel does no more than that.
const LOOK_MILLISECONDS: u32 = 2_000;
/// With several connections the kernel takes one that owes an answer for so long for dead and asks by
/// another. Source: the kernel's default.
const GIVE_UP_MILLISECONDS: u32 = 30_000;
/// Between two attempts to replace a connection. Chosen by hand.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Buffer of a connection for each direction. Chosen by hand: one large request.
const SOCKET_BYTES: usize = 1 << 20;
/// Between two looks whether a device is idle. Chosen by hand: a busy device is so for a moment only.
const SIZE_WAIT: Duration = Duration::from_millis(2);
/// How long a device's connections are there before its size is set. What waited for them is not counted
/// as in flight until the kernel has sent it again. Chosen by hand: two of its looks, and a second.
const SETTLED: Duration = Duration::from_secs(5);
/// For what runs to end before a device is removed. Chosen by hand.
const END_WAIT: Duration = Duration::from_secs(5);

/// Tells connections to stop, with the moment at which their grace ends.
pub type Stop = watch::Receiver<Option<tokio::time::Instant>>;

/// What answers the requests of a device.
pub trait Backend: Send + Sync + 'static {
    /// Something reached, and not in use yet.
    type Connection: Send + 'static;

    /// Reaches whatever answers, for the connection of this number, from 0. Called before the kernel is
    /// given it.
    ///
    /// # Errors
    /// It is tried again; the error is logged.
    fn dial(&self, connection: u16) -> impl Future<Output = Result<Self::Connection>> + Send;

    /// Answers the requests that the kernel sends by `stream`, simple replies only, until one of the
    /// three ends. After that none of them runs any more.
    ///
    /// With several connections, `siblings` is asked before each request, or batch of them, that was
    /// received: see [`Siblings`].
    fn serve(
        &self,
        connection: Self::Connection,
        stream: UnixStream,
        siblings: Siblings,
        stop: Stop,
    ) -> impl Future<Output = ()> + Send;
}

/// What a device is, and what the kernel does for it.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The kernel keeps it with the device: by it the device is found again.
    pub identifier: String,
    /// In bytes, a multiple of the logical block.
    pub size_bytes: u64,
    /// 512 to 4096 bytes, a power of two; what the device reports as its physical block too.
    pub logical_block_bytes: u32,
    /// As the protocol has them ("Transmission flags").
    pub transmission_flags: u16,
    /// 1 to [`CONNECTION_COUNT_MAX`].
    pub connection_count: u16,
    /// Requests wait for so long while there is no connection, then they fail. Whole seconds.
    pub dead_timeout: Duration,
    /// Writes a value into a file of `/sys`. The kernel may wait meanwhile for requests that this process serves: a
    /// thread of it that writes keeps it, killed, from ending.
    pub set_attribute: fn(&Path, &str) -> io::Result<()>,
}

/// What a device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests.
    pub read_count: u64,
    /// Requests.
    pub write_count: u64,
    /// Requests.
    pub discard_count: u64,
    /// Requests.
    pub flush_count: u64,
    /// Payloads.
    pub read_bytes: u64,
    /// Payloads.
    pub written_bytes: u64,
}

/// Looks whether this machine can have such devices. Blocks.
///
/// # Errors
/// `Unsupported`, saying what is missing.
pub fn check() -> Result<()> {
    Driver::open().map(drop)
}

/// The number of the device with an identifier, as it is connected now. Blocks.
///
/// # Errors
/// `Unsupported`: /sys cannot be read.
pub fn find(identifier: &str) -> Result<Option<u32>> {
    driver::find(identifier)
}

/// What all devices that are connected were made with, as far as they say. Blocks.
///
/// # Errors
/// `Unsupported`: /sys cannot be read.
pub fn identifiers() -> Result<Vec<String>> {
    Ok(driver::identified()?.into_iter().map(|(_, identifier)| identifier).collect())
}

/// What the device of a number was made with, as far as it says.
#[must_use]
pub fn identifier_of(number: u32) -> Option<String> {
    driver::identifier_of(number)
}

/// Ends the device with an identifier; whoever has it open gets errors. Returns its number, if there
/// was one. Blocks.
///
/// # Errors
/// Those of the driver.
pub fn delete(identifier: &str) -> Result<Option<u32>> {
    let Some(number) = driver::find(identifier)? else { return Ok(None) };
    Driver::open()?.disconnect(number)?;
    Ok(Some(number))
}

/// Ends a device, whoever made it. Blocks.
///
/// # Errors
/// `NotFound`: it is not connected. `Busy`: the process that made it lives. Those of the driver.
pub fn delete_any(number: u32) -> Result<()> {
    let path = driver::block_path(number);
    let Ok(pid) = std::fs::read_to_string(driver::sys_path(number).join("pid")) else {
        let what = format!("disconnect {}: it is not connected", path.display());
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    if std::path::Path::new("/proc").join(pid.trim()).exists() {
        let what = format!(
            "disconnect {}: process {} made it and lives; detach it there",
            path.display(),
            pid.trim()
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    Driver::open()?.disconnect(number)
}

/// The block device of a number.
#[must_use]
pub fn block_path(number: u32) -> PathBuf {
    driver::block_path(number)
}

/// A device that is served. Dropped, its connections end, and it waits for who recovers it. Its methods
/// block: they are for threads that may.
pub struct Device {
    number: u32,
    options: DeviceOptions,
    size_bytes: watch::Sender<u64>,
    stop: watch::Sender<Option<tokio::time::Instant>>,
    is_ending: Arc<AtomicBool>,
    /// Of each connection, since when it is served.
    served: Arc<Mutex<Vec<Option<Instant>>>>,
    links: JoinSet<()>,
    runtime: Handle,
}

/// What the connections of a device share.
struct Shared<B> {
    backend: Arc<B>,
    number: u32,
    identifier: String,
    is_ending: Arc<AtomicBool>,
    served: Arc<Mutex<Vec<Option<Instant>>>>,
    group: Arc<Group>,
}

impl Device {
    /// Makes a device and serves it.
    ///
    /// # Errors
    /// `Unsupported`: the kernel lacks something. `Denied`: no right to. `Invalid`: the options. Those of
    /// reaching the backend.
    pub fn add<B: Backend>(backend: &Arc<B>, options: &DeviceOptions) -> Result<Device> {
        check_options(options)?;
        let mut driver = Driver::open()?;
        let runtime = Handle::current();
        let (mut dialled, mut sockets) = (Vec::new(), Vec::new());
        for connection in 0..options.connection_count {
            let (ours, kernels) = pair(&runtime)?;
            dialled.push((runtime.block_on(backend.dial(connection))?, ours));
            sockets.push(kernels);
        }
        let made = Made {
            identifier: &options.identifier,
            size_bytes: options.size_bytes,
            logical_block_bytes: options.logical_block_bytes,
            transmission_flags: options.transmission_flags,
            dead_timeout: options.dead_timeout,
        };
        let number = driver.connect(&made, &sockets)?;
        drop(sockets);
        let mut device = Device::of(number, options, runtime);
        let shared = device.shared(backend);
        for (index, first) in (0..).zip(dialled) {
            device.link(&shared, index, Some(first));
        }
        device.set_timeouts();
        device.keep_size();
        Ok(device)
    }

    /// Serves a device that an earlier process left. `None`: it is not there.
    ///
    /// # Errors
    /// As [`Device::add`].
    pub fn recover<B: Backend>(
        backend: &Arc<B>,
        options: &DeviceOptions,
    ) -> Result<Option<Device>> {
        check_options(options)?;
        let Some(number) = driver::find(&options.identifier)? else { return Ok(None) };
        let mut device = Device::of(number, options, Handle::current());
        let mut driver = Driver::open()?;
        // A device that was disconnected while a file system holds it shows its identifier still, and may
        // not be usable again. The size is not set here: the kernel would wait for the requests in flight,
        // and those for the connections.
        match driver.reconfigure(number, &options.identifier, None, &[]) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            outcome => outcome?,
        }
        let shared = device.shared(backend);
        for index in 0..options.connection_count {
            device.link(&shared, index, None);
        }
        device.set_timeouts();
        device.keep_size();
        Ok(Some(device))
    }

    fn of(number: u32, options: &DeviceOptions, runtime: Handle) -> Device {
        Device {
            number,
            options: options.clone(),
            size_bytes: watch::Sender::new(options.size_bytes),
            stop: watch::Sender::new(None),
            is_ending: Arc::default(),
            served: Arc::new(Mutex::new(vec![None; usize::from(options.connection_count)])),
            links: JoinSet::new(),
            runtime,
        }
    }

    fn shared<B: Backend>(&self, backend: &Arc<B>) -> Arc<Shared<B>> {
        Arc::new(Shared {
            backend: backend.clone(),
            number: self.number,
            identifier: self.options.identifier.clone(),
            is_ending: self.is_ending.clone(),
            served: self.served.clone(),
            group: Group::new(self.options.connection_count),
        })
    }

    fn link<B: Backend>(
        &mut self,
        shared: &Arc<Shared<B>>,
        index: u16,
        first: Option<(B::Connection, UnixStream)>,
    ) {
        let link = link(shared.clone(), index, self.stop.subscribe(), first);
        self.links.spawn_on(link, &self.runtime);
    }

    /// How long requests wait for their answer before the kernel looks after them. Without it they do so
    /// for 30 s.
    fn set_timeouts(&self) {
        let milliseconds = match self.options.connection_count {
            1 => LOOK_MILLISECONDS,
            _ => GIVE_UP_MILLISECONDS,
        };
        let path = driver::sys_path(self.number).join("queue/io_timeout");
        let (wanted, set) = (milliseconds.to_string(), self.options.set_attribute);
        if std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == wanted) {
            return;
        }
        // The kernel waits for all requests in flight first, which wait for us: nobody waits for this.
        self.runtime.spawn_blocking(move || {
            if let Err(error) = set(&path, &wanted) {
                tracing::warn!(
                    path = %path.display(), %error,
                    "requests in flight at a restart wait for 30 s: the kernel's timeout could not be set"
                );
            }
        });
    }

    /// Has the kernel follow [`Device::size_bytes`]. The volume may have another one since the last
    /// process served it.
    fn keep_size(&self) {
        let (number, identifier) = (self.number, self.options.identifier.clone());
        let (mut sizes, is_ending) = (self.size_bytes.subscribe(), self.is_ending.clone());
        let served = self.served.clone();
        self.runtime.spawn(async move {
            loop {
                // It may change again meanwhile.
                while !has_size(number, *sizes.borrow_and_update()) {
                    if is_ending.load(Ordering::Relaxed) {
                        return;
                    }
                    let is_settled = is_settled(&served);
                    if is_settled && is_idle(number) {
                        break;
                    }
                    // A connection may be away for hours.
                    tokio::time::sleep(if is_settled { SIZE_WAIT } else { SETTLED / 10 }).await;
                }
                let size_bytes = *sizes.borrow_and_update();
                let identifier = identifier.clone();
                let set =
                    tokio::task::spawn_blocking(move || set_size(number, &identifier, size_bytes));
                if let Ok(Err(error)) = set.await {
                    tracing::warn!(
                        device = %driver::block_path(number).display(), error = %error.chain(),
                        "the device of a volume keeps its size"
                    );
                }
                if sizes.changed().await.is_err() || is_ending.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
    }

    /// The device's number: 3 for `/dev/nbd3`.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Connections between the kernel and this process, those that are being replaced included.
    #[must_use]
    pub fn connection_count(&self) -> u16 {
        self.options.connection_count
    }

    /// Whether the kernel has heard of a size, in bytes.
    #[must_use]
    pub fn has_size(&self, size_bytes: u64) -> bool {
        has_size(self.number, size_bytes)
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        driver::block_path(self.number)
    }

    /// No connection is left and none can be made, because somebody else disconnected the device.
    #[must_use]
    pub fn is_gone(&mut self) -> bool {
        while self.links.try_join_next().is_some() {}
        self.links.is_empty()
    }

    /// Waits until the device [is gone](Device::is_gone). May be dropped, and called again.
    pub async fn gone(&mut self) {
        while self.links.join_next().await.is_some() {}
    }

    /// What the kernel has counted.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let text = std::fs::read_to_string(driver::sys_path(self.number).join("stat"));
        statistics_of(&text.unwrap_or_default())
    }

    /// Says that the volume has another size. The kernel is told when the connections have been there for
    /// some seconds and the device is idle for a moment: it would wait for the requests in flight, keeping
    /// everybody from replacing a connection that they need.
    ///
    /// # Errors
    /// `Invalid`: no multiple of the logical block.
    pub fn resize(&mut self, size_bytes: u64) -> Result<()> {
        let options = DeviceOptions { size_bytes, ..self.options.clone() };
        check_options(&options)?;
        self.options = options;
        self.size_bytes.send_replace(size_bytes);
        Ok(())
    }

    /// Answers what was begun, within `grace`, and stops serving; the device stays, and the next process
    /// gets what was not answered.
    pub fn leave(mut self, grace: Duration) {
        self.is_ending.store(true, Ordering::Relaxed);
        self.stop.send_replace(Some(tokio::time::Instant::now() + grace));
        self.join(grace + Duration::from_secs(1)); // the goodbye takes a moment
    }

    /// Takes the device out of the kernel; whoever has it open gets errors from then on.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn remove(mut self) -> Result<()> {
        self.is_ending.store(true, Ordering::Relaxed);
        // The connections first: the driver would wait for one that takes nothing, and all of netlink
        // with it; and none may be replaced after this.
        self.stop.send_replace(Some(tokio::time::Instant::now() + END_WAIT));
        self.join(END_WAIT + Duration::from_secs(1));
        // Somebody else may have ended it, and made another of its number.
        if driver::identifier_of(self.number).as_deref() == Some(&self.options.identifier) {
            Driver::open()?.disconnect(self.number)?;
        }
        Ok(())
    }

    fn join(&mut self, wait: Duration) {
        let links = &mut self.links;
        let joined = self.runtime.block_on(tokio::time::timeout(wait, async {
            while links.join_next().await.is_some() {}
        }));
        if joined.is_err() {
            links.abort_all();
            self.runtime.block_on(async { while links.join_next().await.is_some() {} });
        }
    }
}

/// Every connection has been there for a while.
fn is_settled(served: &Mutex<Vec<Option<Instant>>>) -> bool {
    served.lock().iter().all(|since| since.is_some_and(|since| since.elapsed() >= SETTLED))
}

fn is_idle(number: u32) -> bool {
    let inflight = std::fs::read_to_string(driver::sys_path(number).join("inflight"));
    inflight.unwrap_or_default().split_ascii_whitespace().all(|count| count == "0")
}

/// Whether the kernel shows a device with this size.
fn has_size(number: u32, size_bytes: u64) -> bool {
    let sectors = std::fs::read_to_string(driver::sys_path(number).join("size"));
    sectors.is_ok_and(|text| text.trim().parse() == Ok(size_bytes / 512))
}

/// Blocks while requests are in flight.
fn set_size(number: u32, identifier: &str, size_bytes: u64) -> Result<()> {
    if has_size(number, size_bytes) {
        return Ok(());
    }
    Driver::open()?.reconfigure(number, identifier, Some(size_bytes), &[])
}

/// Keeps one connection of a device going.
async fn link<B: Backend>(
    shared: Arc<Shared<B>>,
    index: u16,
    stop: Stop,
    mut first: Option<(B::Connection, UnixStream)>,
) {
    let (delay_min, delay_max) = RETRY_DELAYS;
    let (mut delay, mut failure_count) = (delay_min, 0u64);
    let device = driver::block_path(shared.number);
    loop {
        let begun = Instant::now();
        let connected = match first.take() {
            Some(connected) => Ok(connected),
            None => reconnect(&shared, index).await,
        };
        if shared.is_ending.load(Ordering::Relaxed) {
            return;
        }
        match connected {
            Ok((connection, stream)) => {
                failure_count = 0;
                match shared.group.join(index, &stream) {
                    Ok(siblings) => {
                        shared.served.lock()[usize::from(index)] = Some(Instant::now());
                        let serving =
                            shared.backend.serve(connection, stream, siblings, stop.clone());
                        // Lost by that, as by an error: it is replaced.
                        if let Err(why) = block::jobs::caught(serving).await {
                            tracing::error!(
                                device = %device.display(), why,
                                "could not serve a connection of a device"
                            );
                        }
                        shared.served.lock()[usize::from(index)] = None;
                    }
                    Err(error) => tracing::warn!(%error, "a connection of a device was not served"),
                }
            }
            Err(Unconnected::Gone(error)) => {
                tracing::warn!(
                    device = %device.display(), error = %error.chain(),
                    "a device was disconnected and is not served any more"
                );
                return;
            }
            Err(Unconnected::NotYet(error)) => {
                failure_count += 1;
                if failure_count.is_power_of_two() {
                    tracing::warn!(
                        device = %device.display(), error = %error.chain(), failure_count,
                        "a connection of a device could not be replaced; trying again"
                    );
                }
            }
        }
        if shared.is_ending.load(Ordering::Relaxed) {
            return;
        }
        if begun.elapsed() > delay_max {
            delay = delay_min;
        }
        // The kernel needs a moment to see that a connection has ended; one that it has no use for yet
        // ends at once.
        let mut stopping = stop.clone();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            _ = stopping.wait_for(Option::is_some) => return,
        }
        delay = (delay * 2).min(delay_max);
    }
}

/// Why there is no connection.
enum Unconnected {
    /// There is no device to connect.
    Gone(Error),
    /// It is worth another attempt.
    NotYet(Error),
}

async fn reconnect<B: Backend>(
    shared: &Shared<B>,
    index: u16,
) -> std::result::Result<(B::Connection, UnixStream), Unconnected> {
    let connection = shared.backend.dial(index).await.map_err(|error| {
        let is_there = driver::is_connected(shared.number)
            && driver::identifier_of(shared.number).as_ref() == Some(&shared.identifier);
        if is_there { Unconnected::NotYet(error) } else { Unconnected::Gone(error) }
    })?;
    let (ours, kernels) = pair(&Handle::current()).map_err(Unconnected::NotYet)?;
    let (number, identifier) = (shared.number, shared.identifier.clone());
    let given = tokio::task::spawn_blocking(move || {
        Driver::open()?.reconfigure(number, &identifier, None, &[kernels])
    });
    let given = given.await.unwrap_or_else(|error| {
        Err(Error::with_source(ErrorKind::Io, "replace a connection", error))
    });
    match given {
        Ok(()) => Ok((connection, ours)),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Unconnected::Gone(error)),
        Err(error) => Err(Unconnected::NotYet(error)),
    }
}

/// A connection: our end, and the kernel's.
fn pair(runtime: &Handle) -> Result<(UnixStream, OwnedFd)> {
    let failed = |error: io::Error| {
        Error::with_source(ErrorKind::Io, "make a connection for an nbd device", error)
    };
    let (ours, kernels) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    for end in [&ours, &kernels] {
        // Root may have more than the usual limit. Smaller ones only cost switches between the two.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(end, SOCKET_BYTES);
    }
    ours.set_nonblocking(true).map_err(failed)?;
    let _entered = runtime.enter();
    Ok((UnixStream::from_std(ours).map_err(failed)?, kernels.into()))
}

fn check_options(options: &DeviceOptions) -> Result<()> {
    let block = options.logical_block_bytes;
    let wrong = match () {
        () if options.connection_count == 0 || options.connection_count > CONNECTION_COUNT_MAX => {
            "1 to 16 connections"
        }
        () if !block.is_power_of_two() || !(512..=4096).contains(&block) => {
            "a logical block of 512 to 4096 bytes"
        }
        () if !options.size_bytes.is_multiple_of(u64::from(block)) => {
            "a size that is a multiple of the logical block"
        }
        () if options.dead_timeout.as_secs() == 0 => "a dead timeout of at least 1 s",
        () => return Ok(()),
    };
    Err(Error::new(ErrorKind::Invalid, format!("make an nbd device: it takes {wrong}")))
}

/// Source: Documentation/block/stat.rst of the kernel.
fn statistics_of(text: &str) -> Statistics {
    let fields: Vec<u64> =
        text.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    let field = |index: usize| fields.get(index).copied().unwrap_or(0);
    Statistics {
        read_count: field(0),
        write_count: field(4),
        discard_count: field(11),
        flush_count: field(15),
        // In sectors of 512 bytes whatever the block: see `Documentation/block/stat.rst`.
        read_bytes: field(2).saturating_mul(512),
        written_bytes: field(6).saturating_mul(512),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_the_kernel_would_bend_are_refused() {
        let good = DeviceOptions {
            identifier: "spindle".to_owned(),
            size_bytes: 1 << 20,
            logical_block_bytes: 4096,
            transmission_flags: 1,
            connection_count: 1,
            set_attribute: |_, _| Ok(()),
            dead_timeout: Duration::from_secs(1),
        };
        check_options(&good).unwrap();
        for bad in [
            DeviceOptions { connection_count: 0, ..good.clone() },
            DeviceOptions { connection_count: 17, ..good.clone() },
            DeviceOptions { logical_block_bytes: 1000, ..good.clone() },
            DeviceOptions { size_bytes: (1 << 20) + 512, ..good.clone() },
            DeviceOptions { dead_timeout: Duration::from_millis(999), ..good },
        ] {
            assert_eq!(check_options(&bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
    }

    #[test]
    fn what_the_kernel_counts_is_read() {
        let text = "  10 1 2 3  20 4 5 6  0 7 8  30 9 9 9  40 5\n";
        let wanted = Statistics {
            read_count: 10,
            write_count: 20,
            discard_count: 30,
            flush_count: 40,
            read_bytes: 1024,
            written_bytes: 2560,
        };
        assert_eq!(statistics_of(text), wanted);
        assert_eq!(statistics_of(""), Statistics::default());
    }
}
