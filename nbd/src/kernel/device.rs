//! One device of the kernel's nbd driver, and its connections.
//!
//! Invariants:
//! - A connection that ends is replaced while the device exists, but only after all requests
//!   received on the old one have ended. The kernel repeats unanswered requests, and an older
//!   request that ran afterwards would undo newer writes.
//! - A device that is left keeps its requests, and gives them to the process that recovers it.

use super::driver::{self, Driver, Made};
use super::siblings::{Group, Siblings};
use block::env::{Clock, SystemClock};
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

/// Most connections of a device. Chosen by hand: the kernel has one queue for each.
pub const CONNECTION_COUNT_MAX: u16 = 16;
/// Requests in flight on one connection. Source: drivers/block/nbd.c of the kernel.
pub const QUEUE_DEPTH: u16 = 128;
/// Time after which the kernel checks whether the connection of an unanswered request has been
/// replaced, and if so repeats the request. With a single connection, the kernel does nothing else.
/// Chosen by hand: users of the device wait at most this long in addition to the restart itself.
const LOOK_MILLISECONDS: u32 = 2_000;
/// With several connections, the kernel declares one dead that owes an answer for this long, and
/// repeats the request on another. Source: the kernel's default.
const GIVE_UP_MILLISECONDS: u32 = 30_000;
/// Shortest and longest pause between attempts to replace a connection. Chosen by hand.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Buffer of a connection per direction. Chosen by hand: one large request.
const SOCKET_BYTES: usize = 1 << 20;
/// Pause between two checks whether a device is idle. Chosen by hand: a busy device is idle only
/// for moments.
const SIZE_WAIT: Duration = Duration::from_millis(2);
/// Minimum age of all connections of a device before its size is set. Requests that waited for the
/// connections do not count as in flight until the kernel has sent them again. Chosen by hand: two
/// of the kernel's checks, and a second.
const SETTLED: Duration = Duration::from_secs(5);
/// Time for running requests to end before a device is removed. Chosen by hand.
const END_WAIT: Duration = Duration::from_secs(5);

/// Tells connections to stop; the value is the end of their grace period.
pub type Stop = watch::Receiver<Option<Instant>>;

/// Answers the requests of a device.
pub trait Backend: Send + Sync + 'static {
    /// A connection to the backend that is not in use yet.
    type Connection: Send + 'static;

    /// Connects to the backend for the connection with this number, counted from 0. Called before
    /// the kernel gets the connection.
    ///
    /// # Errors
    /// The error is logged, and the call is repeated.
    fn dial(&self, connection: u16) -> impl Future<Output = Result<Self::Connection>> + Send;

    /// Answers the requests that the kernel sends on `stream`, with simple replies only, until the
    /// backend connection, the stream or `stop` ends. No request still runs when this returns.
    ///
    /// With several connections, the implementation must ask `siblings` before it starts a received
    /// request or batch of requests: see [`Siblings`].
    fn serve(
        &self,
        connection: Self::Connection,
        stream: UnixStream,
        siblings: Siblings,
        stop: Stop,
    ) -> impl Future<Output = ()> + Send;
}

/// The parameters of a device.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The kernel stores it with the device; the device is found again by it.
    pub identifier: String,
    /// In bytes, a multiple of the logical block.
    pub size_bytes: u64,
    /// 512 to 4096 bytes, a power of two. The device also reports it as its physical block.
    pub logical_block_bytes: u32,
    /// Transmission flags of the protocol.
    pub transmission_flags: u16,
    /// 1 to [`CONNECTION_COUNT_MAX`].
    pub connection_count: u16,
    /// Time for which requests wait while there is no connection, before they fail. Whole seconds.
    pub dead_timeout: Duration,
    /// Writes a value to a file in `/sys`. The kernel may wait for requests that this process
    /// serves. If this process is killed meanwhile, a thread that writes keeps it from ending.
    pub set_attribute: fn(&Path, &str) -> io::Result<()>,
}

/// The kernel's counts for a device since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Number of reads.
    pub read_count: u64,
    /// Number of writes.
    pub write_count: u64,
    /// Number of discards.
    pub discard_count: u64,
    /// Number of flushes.
    pub flush_count: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// Checks whether this machine can have such devices. Blocks.
///
/// # Errors
/// `Unsupported`, naming the missing part.
pub fn check() -> Result<()> {
    Driver::open().map(drop)
}

/// Finds the number of the connected device with an identifier. Blocks.
///
/// # Errors
/// `Unsupported` if /sys cannot be read.
pub fn find(identifier: &str) -> Result<Option<u32>> {
    driver::find(identifier)
}

/// Lists the identifiers of all connected devices that have one. Blocks.
///
/// # Errors
/// `Unsupported` if /sys cannot be read.
pub fn identifiers() -> Result<Vec<String>> {
    Ok(driver::identified()?.into_iter().map(|(_, identifier)| identifier).collect())
}

/// Returns the identifier of the device with this number, if it has one.
#[must_use]
pub fn identifier_of(number: u32) -> Option<String> {
    driver::identifier_of(number)
}

/// Ends the device with an identifier; its open users get errors. Returns its number, if it
/// existed. Blocks.
///
/// # Errors
/// Those of the driver.
pub fn delete(identifier: &str) -> Result<Option<u32>> {
    let Some(number) = driver::find(identifier)? else { return Ok(None) };
    Driver::open()?.disconnect(number)?;
    Ok(Some(number))
}

/// Ends a device, even of another program. Blocks.
///
/// # Errors
/// `NotFound`: it is not connected. `Busy`: the process that made it is alive. Otherwise those of
/// the driver.
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

/// Returns the path of the block device with this number.
#[must_use]
pub fn block_path(number: u32) -> PathBuf {
    driver::block_path(number)
}

/// A device that is served. Dropping it ends its connections; the device then waits for a process
/// that recovers it. The methods block, so call them only from threads that may block.
pub struct Device {
    number: u32,
    options: DeviceOptions,
    size_bytes: watch::Sender<u64>,
    stop: watch::Sender<Option<Instant>>,
    is_ending: Arc<AtomicBool>,
    /// Start of service of each connection; `None` while it is not served.
    served: Arc<Mutex<Vec<Option<Instant>>>>,
    links: JoinSet<()>,
    runtime: Handle,
    clock: Arc<dyn Clock>,
}

/// State that the connections of a device share.
struct Shared<B> {
    backend: Arc<B>,
    number: u32,
    identifier: String,
    is_ending: Arc<AtomicBool>,
    served: Arc<Mutex<Vec<Option<Instant>>>>,
    group: Arc<Group>,
    clock: Arc<dyn Clock>,
}

impl Device {
    /// Makes a device and serves it.
    ///
    /// # Errors
    /// `Unsupported`: the kernel lacks a feature. `Denied`: missing privileges. `Invalid`: bad
    /// options. Otherwise those of [`Backend::dial`].
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

    /// Serves a device that an earlier process left. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// Those of [`Device::add`].
    pub fn recover<B: Backend>(
        backend: &Arc<B>,
        options: &DeviceOptions,
    ) -> Result<Option<Device>> {
        check_options(options)?;
        let Some(number) = driver::find(&options.identifier)? else { return Ok(None) };
        let mut device = Device::of(number, options, Handle::current());
        let mut driver = Driver::open()?;
        // A device that was disconnected while a file system holds it still shows its identifier,
        // and may not be usable again. The size is not set here: the kernel would wait for the
        // requests in flight, and those for the connections.
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
            clock: Arc::new(SystemClock),
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
            clock: self.clock.clone(),
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

    /// Sets the time after which the kernel checks unanswered requests. Its default is 30 s.
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
        // The kernel first waits for all requests in flight, which need this process: do not wait
        // for it.
        self.runtime.spawn_blocking(move || {
            if let Err(error) = set(&path, &wanted) {
                tracing::warn!(
                    path = %path.display(), %error,
                    "could not set the kernel's timeout; requests in flight at a restart wait for \
                     30 s"
                );
            }
        });
    }

    /// Starts a task that makes the kernel follow [`Device::size_bytes`]. The volume may also have
    /// changed its size since the previous process served it.
    fn keep_size(&self) {
        let (number, identifier) = (self.number, self.options.identifier.clone());
        let (mut sizes, is_ending) = (self.size_bytes.subscribe(), self.is_ending.clone());
        let (served, clock) = (self.served.clone(), self.clock.clone());
        self.runtime.spawn(async move {
            loop {
                // The size may change again meanwhile.
                while !has_size(number, *sizes.borrow_and_update()) {
                    if is_ending.load(Ordering::Relaxed) {
                        return;
                    }
                    let is_settled = is_settled(&served.lock(), clock.now());
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
                        "could not resize the device of a volume; the kernel still reports the old \
                         size"
                    );
                }
                if sizes.changed().await.is_err() || is_ending.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
    }

    /// Returns the device's number: 3 for `/dev/nbd3`.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of connections between the kernel and this process, including those that
    /// are being replaced.
    #[must_use]
    pub fn connection_count(&self) -> u16 {
        self.options.connection_count
    }

    /// Whether the kernel shows this size, in bytes.
    #[must_use]
    pub fn has_size(&self, size_bytes: u64) -> bool {
        has_size(self.number, size_bytes)
    }

    /// Returns the path of the block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        driver::block_path(self.number)
    }

    /// Whether no connection is left and none can be made, because the device was disconnected by
    /// another program.
    #[must_use]
    pub fn is_gone(&mut self) -> bool {
        while self.links.try_join_next().is_some() {}
        self.links.is_empty()
    }

    /// Waits until the device [is gone](Device::is_gone). May be cancelled and called again.
    pub async fn gone(&mut self) {
        while self.links.join_next().await.is_some() {}
    }

    /// Returns the kernel's counts.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let text = std::fs::read_to_string(driver::sys_path(self.number).join("stat"));
        statistics_of(&text.unwrap_or_default())
    }

    /// Changes the size of the device. The kernel is told once all connections have existed for
    /// some seconds and the device is idle for a moment. Otherwise the kernel would wait for the
    /// requests in flight, and meanwhile block the replacement of a connection that those requests
    /// need.
    ///
    /// # Errors
    /// `Invalid` if the size is not a multiple of the logical block.
    pub fn resize(&mut self, size_bytes: u64) -> Result<()> {
        let options = DeviceOptions { size_bytes, ..self.options.clone() };
        check_options(&options)?;
        self.options = options;
        self.size_bytes.send_replace(size_bytes);
        Ok(())
    }

    /// Answers the requests in progress within `grace`, and stops serving. The device stays; the
    /// next process gets the unanswered requests.
    pub fn leave(mut self, grace: Duration) {
        self.is_ending.store(true, Ordering::Relaxed);
        self.stop.send_replace(Some(self.clock.now() + grace));
        self.join(grace + Duration::from_secs(1)); // the closing of connections takes a moment
    }

    /// Removes the device from the kernel; its open users get errors from then on.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn remove(mut self) -> Result<()> {
        self.is_ending.store(true, Ordering::Relaxed);
        // End the connections first: the driver, and with it all of netlink, would wait for a
        // connection that reads nothing. None may be replaced after this.
        self.stop.send_replace(Some(self.clock.now() + END_WAIT));
        self.join(END_WAIT + Duration::from_secs(1));
        // Another program may have ended the device, and made another one with its number.
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

/// Whether every connection has existed for a while.
fn is_settled(served: &[Option<Instant>], now: Instant) -> bool {
    served.iter().all(|since| since.is_some_and(|since| now - since >= SETTLED))
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

/// Sets the size. Blocks while requests are in flight.
fn set_size(number: u32, identifier: &str, size_bytes: u64) -> Result<()> {
    if has_size(number, size_bytes) {
        return Ok(());
    }
    Driver::open()?.reconfigure(number, identifier, Some(size_bytes), &[])
}

/// Serves one connection of a device, and replaces it whenever it ends.
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
        let begun = shared.clock.now();
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
                        shared.served.lock()[usize::from(index)] = Some(shared.clock.now());
                        let serving =
                            shared.backend.serve(connection, stream, siblings, stop.clone());
                        // A panic loses the connection, as an error does, and the connection is
                        // replaced.
                        if let Err(why) = block::jobs::caught(serving).await {
                            tracing::error!(
                                device = %device.display(), why,
                                "could not serve a connection of a device"
                            );
                        }
                        shared.served.lock()[usize::from(index)] = None;
                    }
                    Err(error) => tracing::warn!(
                        %error,
                        "could not set up a connection of a device"
                    ),
                }
            }
            Err(Unconnected::Gone(error)) => {
                tracing::warn!(
                    device = %device.display(), error = %error.chain(),
                    "a device was disconnected and is no longer served"
                );
                return;
            }
            Err(Unconnected::NotYet(error)) => {
                failure_count += 1;
                if failure_count.is_power_of_two() {
                    tracing::warn!(
                        device = %device.display(), error = %error.chain(), failure_count,
                        "could not replace a connection of a device; trying again"
                    );
                }
            }
        }
        if shared.is_ending.load(Ordering::Relaxed) {
            return;
        }
        if shared.clock.now() - begun > delay_max {
            delay = delay_min;
        }
        // The kernel needs a moment to see that a connection has ended. It closes at once a
        // connection that it has no use for yet.
        let mut stopping = stop.clone();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            _ = stopping.wait_for(Option::is_some) => return,
        }
        delay = (delay * 2).min(delay_max);
    }
}

/// The reason why there is no connection.
enum Unconnected {
    /// The device no longer exists.
    Gone(Error),
    /// Another attempt may succeed.
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

/// Makes a connection: the end of this process, and the kernel's.
fn pair(runtime: &Handle) -> Result<(UnixStream, OwnedFd)> {
    let failed = |error: io::Error| {
        Error::with_source(ErrorKind::Io, "make a connection for an nbd device", error)
    };
    let (ours, kernels) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    for end in [&ours, &kernels] {
        // Root may exceed the usual limit. Smaller buffers only cost more context switches.
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

/// Parses the kernel's counts. Source: Documentation/block/stat.rst of the kernel.
fn statistics_of(text: &str) -> Statistics {
    let fields: Vec<u64> =
        text.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    let field = |index: usize| fields.get(index).copied().unwrap_or(0);
    Statistics {
        read_count: field(0),
        write_count: field(4),
        discard_count: field(11),
        flush_count: field(15),
        // In sectors of 512 bytes, whatever the block size.
        read_bytes: field(2).saturating_mul(512),
        written_bytes: field(6).saturating_mul(512),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

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
    fn connections_are_settled_once_the_youngest_is_old_enough() {
        let clock = ManualClock::new();
        let mut served = vec![Some(clock.now()), None];
        clock.advance(SETTLED);
        assert!(!is_settled(&served, clock.now()), "one is not served");
        served[1] = Some(clock.now());
        clock.advance(SETTLED / 2);
        assert!(!is_settled(&served, clock.now()));
        clock.advance(SETTLED / 2);
        assert!(is_settled(&served, clock.now()));
    }

    #[test]
    fn kernel_statistics_are_parsed() {
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
