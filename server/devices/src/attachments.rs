//! Volumes as devices of this machine's kernel: their list, their return after a restart, and their removal.
//!
//! Invariants:
//! - `DIR/attachments.json` names a device before it can be used and until it is gone: a daemon that dies at any moment
//!   finds its devices again, and only its own.
//! - A device continues with a restarted daemon only if no other directory has owned the pool since: its users have
//!   seen a history of the volume that would otherwise no longer be the volume's own. If another directory has owned
//!   it, or the volume has stepped back since, the device is removed, and its users get errors.
//! - The list does not change after the devices are given up at a stop: it then belongs to the next daemon.
//! - Devices are served from this process's own volumes; they end before the log is closed.

use crate::device::{self, Device, IO_BYTES_MAX, Parts};
use crate::planted::planted;
use crate::record::{AttachOptions, Driver, FILE, Record, read, write};
use crate::volumes::{Volume, Volumes};
use crate::{in_use, unserved};
use block::conditions::Report;
use block::env::random_bytes;
use block::{ConditionKind, Conditions, Epoch, Error, ErrorKind, Result, VolumeId};
use nbd::Server;
use parking_lot::Mutex as SyncMutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

mod clients;
mod links;
mod recovery;

/// Directory of the links to devices. Source: udev rules of disks also put their links below `/dev`.
pub(crate) const LINKS: &str = "/dev/spindle";
/// Devices that come back, or end, at the same time. Chosen by hand: each takes one of the threads that reads in flight
/// need, too.
const AT_ONCE_MAX: usize = 8;
/// Most queues that a device gets by default, and the fraction (one in this number) of the queues still possible.
/// Chosen by hand: with the default budget the first devices get four queues, and the eleventh gets one.
const QUEUES_MAX: u16 = 4;
const QUEUES_PART: u64 = 4;
/// Time that requests in flight have at an orderly stop. The next daemon gets those that are not answered by then.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

/// An attached volume as shown to administrators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentInfo {
    /// Name of the volume.
    pub volume: String,
    /// The block device; absent if it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
    /// Discard requests since this daemon began to serve it. They include requests to write zeroes if the driver counts
    /// those as discards.
    #[serde(default)]
    pub discard_count: u64,
    /// Bytes read since this daemon began to serve it.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes of write requests since this daemon began to serve it, including requests that failed.
    #[serde(default)]
    pub written_bytes: u64,
    /// Requests that failed.
    pub failure_count: u64,
    /// Reason why it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// An attached volume, and the reservation `R` of its device.
struct Live<R> {
    record: Record,
    state: State<R>,
}

enum State<R> {
    Served(Served<R>),
    /// The device may be in the kernel, and this process does not serve it. No other client may write to the volume
    /// meanwhile: requests that wait in the kernel may still come.
    Failed {
        error: Error,
        reservation: Option<R>,
        /// No other node has owned the pool since the device was last served.
        is_ours: bool,
    },
}

/// A device, until it is ended.
type Slot = Arc<SyncMutex<Option<Device>>>;

struct Served<R> {
    device: Slot,
    /// Tells the kernel about changes of the volume's size.
    resizes: JoinHandle<()>,
    reservation: R,
}

/// The attached volumes by id.
type LiveList<V> = BTreeMap<VolumeId, Live<<V as Volumes>::Reservation>>;

/// The parts of [`Attachments`] besides its volumes.
pub struct Options<E> {
    /// Directory of the pool, with the list of devices.
    pub dir: PathBuf,
    /// Name of the pool, which is the name of its folder of links.
    pub pool_name: String,
    /// Serves connections of the nbd driver.
    pub server: Server<E>,
    /// Epoch in which this daemon owns the pool.
    pub epoch: Epoch,
    /// Memory for payloads of all ublk devices, in bytes. Those of the nbd driver are connections of `server`.
    pub payload_bytes_max: u64,
    /// Where volumes that are not served are reported.
    pub conditions: Conditions,
}

/// The devices of a pool. It attaches and detaches nothing after [`Attachments::leave`] or [`Attachments::abandon`].
pub struct Attachments<V: Volumes> {
    path: PathBuf,
    links: PathBuf,
    volumes: V,
    /// Serves connections of the nbd driver.
    server: Server<V::Exports>,
    epoch: Epoch,
    payload_bytes_max: u64,
    conditions: Conditions,
    memory: Arc<ublk::Memory>,
    /// Held while a device's number is recorded, as several may arrive at a time.
    noting: Arc<SyncMutex<()>>,
    /// Absent once the daemon stops: the list on disk then belongs to the next daemon.
    live: Mutex<Option<LiveList<V>>>,
}

impl<V: Volumes> Attachments<V> {
    /// Reads which of `volumes` were attached from the pool's directory. Serves none of them yet.
    ///
    /// # Errors
    /// `Corrupt`: the list is damaged, or of a later version.
    pub fn open(volumes: V, options: Options<V::Exports>) -> Result<Attachments<V>> {
        let Options { dir, pool_name, server, epoch, payload_bytes_max, conditions } = options;
        let path = dir.join(FILE);
        let records = read(&path)?;
        let waiting = || Error::new(ErrorKind::Unavailable, "the daemon is just starting");
        let live = records.into_iter().map(|record| {
            let state = State::Failed { error: waiting(), reservation: None, is_ours: false };
            (VolumeId(record.volume), Live { record, state })
        });
        Ok(Attachments {
            path,
            links: Path::new(LINKS).join(pool_name),
            volumes,
            server,
            epoch,
            payload_bytes_max,
            conditions,
            memory: ublk::Memory::new(payload_bytes_max),
            noting: Arc::default(),
            live: Mutex::new(Some(live.collect())),
        })
    }

    /// The volumes that devices show.
    #[must_use]
    pub fn volumes(&self) -> &V {
        &self.volumes
    }

    /// Raises a condition for each attached volume that is not served and for each silent client, and clears those of
    /// the others.
    pub async fn show(&self) {
        self.volumes.report_clients();
        // The holder of the lock is attaching or detaching, and reports the result itself.
        let Ok(live) = self.live.try_lock() else { return };
        if let Some(live) = live.as_ref() {
            self.show_live(live);
        }
    }

    fn show_live(&self, live: &LiveList<V>) {
        let mut failing = Vec::new();
        for (id, attached) in live {
            let name = self.name_of(*id);
            let failure = match &attached.state {
                State::Failed { error, .. } => Some(error.clone()),
                State::Served(served) => match served.device.try_lock() {
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
                    "an attached volume is not served; its device waits: volume {name}: {}",
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

    /// Attaches a volume.
    ///
    /// # Errors
    /// `NotFound`: there is no such volume. `Busy`: it is attached, or other clients have it open, or another pool has
    /// its link. `Unsupported`, `Denied`: this machine lacks a feature or a permission. `Invalid`: the options.
    /// `Unavailable`: the daemon is stopping.
    pub async fn attach(&self, name: &str, options: AttachOptions) -> Result<AttachmentInfo> {
        let attached = self.attach_unseen(name, options).await;
        self.show().await;
        attached
    }

    async fn attach_unseen(&self, name: &str, options: AttachOptions) -> Result<AttachmentInfo> {
        let mut live = self.live.lock().await;
        let live = changeable(&mut live)
            .map_err(|error| error.context(format!("attach volume {name}")))?;
        let volume = self.volumes.find_named(name).ok_or_else(|| {
            let what =
                format!("attach volume {name}: there is none; `spindle volume list` shows all");
            Error::new(ErrorKind::NotFound, what)
        })?;
        let id = volume.id();
        match live.get(&id).map(|attached| &attached.state) {
            Some(State::Served(_)) => {
                let link = self.links.join(name);
                let what = format!("attach volume {name}: it is attached as {}", link.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            Some(&State::Failed { is_ours, .. }) => {
                return self.attach_again(live, id, name, is_ours, options).await;
            }
            None => {}
        }
        let options = self.with_queues(live, options)?;
        self.check_link(name)?;
        blocking(move || device::check(options.driver)).await?;
        self.volumes.end_leftovers(id).await?; // a closed connection must not block it
        let reservation = self.volumes.reserve(id, name, options.is_shared)?;
        self.volumes.settle(id).await?;
        // From now on the volume stays as it is: until here it could be removed, or step back.
        let volume =
            self.volumes.find_named(name).filter(|now| now.id() == id).ok_or_else(|| {
                let what =
                    format!("attach volume {name}: it was removed or renamed meanwhile; try again");
                Error::new(ErrorKind::NotFound, what)
            })?;
        let cookie = u64::from_le_bytes(random_bytes());
        let mut record = Record {
            volume: id.0,
            number: None,
            cookie,
            epoch: self.epoch.0,
            is_stepped_back: volume.has_lost_writes(),
            is_write_through: false, // known, like its number, when it is added
            options,
        };
        // This drops leftovers of a failed attach from the list.
        self.write(live)?;
        let sizes = volume.size_changes(); // subscribed before the kernel learns a size
        match self.add(&volume, &mut record).await {
            Ok(device) => {
                let served = self.serve(&volume, sizes, device, reservation);
                live.insert(id, Live { record, state: State::Served(served) });
                // It has no users yet, and its partition table may still be on its way.
                Ok(self.info(&live[&id], false).await)
            }
            Err(error) => {
                let mut error = error.context(format!("attach volume {name}"));
                let asked = record.clone();
                if blocking(move || device::is_there(&asked)).await.unwrap_or(true) {
                    // The driver still has it, so it must be found again.
                    error = error.context(
                        "half a device stays; attach the volume again, or give it up with `spindle detach --force`",
                    );
                    let reservation = Some(reservation);
                    let state = State::Failed { error: error.clone(), reservation, is_ours: true };
                    live.insert(id, Live { record, state });
                }
                if let Err(late) = self.write(live) {
                    tracing::warn!(
                        volume = name, error = %late.chain(),
                        "the list still names a volume whose attach failed: the next start attaches it, unless it is \
                         attached or detached before"
                    );
                }
                Err(error)
            }
        }
    }

    /// Adds a device to the kernel and notes its number in `record` and on disk.
    async fn add(&self, volume: &V::Volume, record: &mut Record) -> Result<Device> {
        record.number = None;
        record.is_write_through = volume.is_write_through();
        let parts = self.parts(volume, record);
        let (path, noted, noting) = (self.path.clone(), record.clone(), self.noting.clone());
        let added = blocking(move || {
            let note = |record: Record| {
                let _noting = noting.lock();
                let mut records = read(&path)?;
                records.retain(|other| other.volume != record.volume);
                records.push(record);
                write(&path, records)
            };
            // This precedes the kernel's device, so that any leftover can be found, with the settings that the kernel
            // was told.
            let is_late = planted().cache_noted_late;
            note(Record { is_write_through: noted.is_write_through && !is_late, ..noted.clone() })?;
            Device::add(&parts, &noted, |number| {
                if planted().ends_in_attach {
                    std::process::abort();
                }
                note(Record { number: Some(number), ..noted.clone() })
            })
        });
        let device = added.await?;
        record.number = Some(device.number());
        record.options.queue_count = device.queue_count(); // the kernel may give fewer
        Ok(device)
    }

    fn serve(
        &self,
        volume: &V::Volume,
        mut sizes: watch::Receiver<u64>,
        device: Device,
        reservation: V::Reservation,
    ) -> Served<V::Reservation> {
        let name = volume.name();
        self.link(&name, &device.path());
        let device = Arc::new(SyncMutex::new(Some(device)));
        let resized = device.clone();
        let job = block::Job::new(
            format!("size of the device of volume {name}"),
            "the kernel is not told a new size of the volume",
        );
        let conditions = self.conditions.clone();
        let follow = async move {
            while sizes.changed().await.is_ok() {
                let (device, newest) = (resized.clone(), sizes.clone());
                let told = blocking(move || tell_size(&device, &newest));
                if let Err(error) = told.await {
                    tracing::warn!(
                        volume = name, error = %error.chain(),
                        "the device of a volume keeps its size"
                    );
                }
            }
        };
        // Without it, the process continues; a panic is a condition.
        let resizes = tokio::spawn(async move {
            let _ = job.run(&conditions, follow).await;
        });
        Served { device, resizes, reservation }
    }

    /// Makes the device of a volume follow its size. Returns, for display, the reason if the device does not follow, or
    /// not yet.
    pub async fn why_size_stays(&self, volume: VolumeId) -> Option<String> {
        let device = {
            // The holder of the lock is attaching or detaching, which is not waited for.
            let live = self.live.try_lock().ok()?;
            match &live.as_ref()?.get(&volume)?.state {
                State::Served(served) => served.device.clone(),
                State::Failed { .. } => return None, // it follows when it is served again
            }
        };
        let newest = self.volumes.find(volume)?.size_changes();
        match blocking(move || tell_size(&device, &newest)).await {
            Ok(true) => None,
            Ok(false) => Some(
                "its device follows as soon as no request to it is in flight for a moment"
                    .to_owned(),
            ),
            Err(error) => Some(format!(
                "its device keeps its size until it is detached and attached: {}",
                error.chain()
            )),
        }
    }

    /// Detaches a volume, by its name, its link or its device. Without `is_forced` the device must be unused.
    ///
    /// # Errors
    /// `NotFound`: it is not attached. `Busy`: a file system or the like uses it, or a program has it open.
    /// `Unavailable`: the daemon is stopping.
    pub async fn detach(&self, target: &str, is_forced: bool) -> Result<String> {
        let detached = self.detach_unseen(target, is_forced).await;
        self.show().await;
        detached
    }

    async fn detach_unseen(&self, target: &str, is_forced: bool) -> Result<String> {
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
            State::Served(served) => {
                let (slot, asked) = (served.device.clone(), name.clone());
                let detached = blocking(move || {
                    let mut slot = slot.lock();
                    let Some(device) = slot.take() else {
                        let what = format!("detach volume {asked}: that is under way already");
                        return Err(Error::new(ErrorKind::Busy, what));
                    };
                    let what = format!("detach volume {asked}");
                    if !is_forced && let Err(error) = in_use::check_unused(&what, &device.path()) {
                        *slot = Some(device);
                        return Err(error);
                    }
                    device.remove(is_forced)
                });
                if let Err(error) = detached.await {
                    if served.device.lock().is_none() {
                        served.resizes.abort();
                        let attached = live.get_mut(&id).expect("found above");
                        let failed = State::Failed {
                            error: error.clone(),
                            reservation: None,
                            is_ours: true,
                        };
                        if let State::Served(served) =
                            std::mem::replace(&mut attached.state, failed)
                        {
                            let reservation = Some(served.reservation);
                            attached.state =
                                State::Failed { error: error.clone(), reservation, is_ours: true };
                        }
                    }
                    return Err(error);
                }
                served.resizes.abort();
            }
            State::Failed { error, .. } if !is_forced => {
                let what = format!(
                    "detach volume {name}: its device is not served ({}); --force removes it, and its \
                     users get errors",
                    error.chain()
                );
                return Err(Error::new(ErrorKind::Busy, what));
            }
            State::Failed { .. } => self.remove_from_kernel(&attached.record).await?,
        }
        let Record { number, options, .. } = attached.record;
        let device = number.map(|number| device::path_of(options.driver, number));
        self.unlink(&name, device.as_deref());
        let gone = live.remove(&id).expect("found above");
        if let Err(error) = self.write(live) {
            // The list still names it, and the next daemon would create the device again.
            let error = error.context(format!(
                "detach volume {name}: its device is gone, and that could not be written down; try again"
            ));
            let reservation = match gone.state {
                State::Served(served) => Some(served.reservation),
                State::Failed { reservation, .. } => reservation,
            };
            let state = State::Failed { error: error.clone(), reservation, is_ours: true };
            live.insert(id, Live { record: gone.record, state });
            return Err(error);
        }
        Ok(name)
    }

    /// The attached volumes, by name.
    ///
    /// # Errors
    /// `Unavailable`: the daemon is stopping.
    pub async fn list(&self) -> Result<Vec<AttachmentInfo>> {
        let mut live = self.live.lock().await;
        let live = changeable(&mut live)?;
        // The devices are queried concurrently: one that does not answer takes seconds.
        let infos = live.values().map(|attached| self.info(attached, true));
        let mut infos = futures::future::join_all(infos).await;
        infos.sort_by(|a, b| a.volume.cmp(&b.volume));
        Ok(infos)
    }

    /// Tells whether a device of a volume, here or on another machine, waits while there is no daemon.
    pub fn has_users(&self) -> bool {
        // If the lock is taken, an attach or a detach is under way, which is not waited for.
        let has_devices = self
            .live
            .try_lock()
            .map_or(true, |live| live.as_ref().is_some_and(|live| !live.is_empty()));
        has_devices || self.volumes.has_clients()
    }

    /// Stops serving in order: requests that were begun are answered, and the devices wait for the next daemon.
    pub async fn leave(&self) {
        let leave = |served: Slot| {
            served.lock().take().into_iter().for_each(|device| device.leave(LEAVE_GRACE));
            Ok(())
        };
        for error in self.end_all(leave).await {
            tracing::error!(error = %error.chain(), "a device did not stop in order");
        }
    }

    /// Ends all served devices concurrently, as each may take seconds. Returns the errors.
    async fn end_all(
        &self,
        end: impl Fn(Slot) -> Result<()> + Copy + Send + 'static,
    ) -> Vec<Error> {
        let mut ending = tokio::task::JoinSet::new();
        let turns = Arc::new(tokio::sync::Semaphore::new(AT_ONCE_MAX));
        for served in self.take_served().await {
            let turns = turns.clone();
            ending.spawn(async move {
                let _turn = turns.acquire().await; // never closed
                blocking(move || end(served)).await
            });
        }
        let mut failures = Vec::new();
        while let Some(ended) = ending.join_next().await {
            let panicked = |cause| Error::with_source(ErrorKind::Io, "end a device", cause);
            failures.extend(ended.map_err(panicked).and_then(|ended| ended).err());
        }
        failures
    }

    /// Ends the devices of a pool that is no longer ours. Their users get errors, because later reads would not return
    /// what they wrote.
    pub async fn abandon(&self) {
        let remove =
            |served: Slot| served.lock().take().map_or(Ok(()), |device| device.remove(true));
        for error in self.end_all(remove).await {
            tracing::error!(error = %error.chain(), "a device could not be removed");
        }
    }

    async fn take_served(&self) -> Vec<Slot> {
        let all = self.live.lock().await.take();
        let served =
            all.into_iter().flat_map(BTreeMap::into_values).filter_map(|live| match live.state {
                State::Served(served) => {
                    served.resizes.abort();
                    Some(served.device)
                }
                State::Failed { .. } => None,
            });
        served.collect()
    }

    async fn remove_from_kernel(&self, record: &Record) -> Result<()> {
        let record = record.clone();
        blocking(move || unserved::delete(&record).map(drop)).await
    }

    fn name_of(&self, id: VolumeId) -> String {
        self.volumes.name_of(id)
    }

    fn find(&self, live: &LiveList<V>, target: &str) -> Result<VolumeId> {
        let path = Path::new(target);
        let is_it = |(id, attached): (&VolumeId, &Live<V::Reservation>)| {
            let name = self.name_of(*id);
            let Record { number, options, .. } = attached.record;
            let device = number.map(|number| device::path_of(options.driver, number));
            target == name || path == self.links.join(name) || Some(path) == device.as_deref()
        };
        let found = live.iter().find(|(id, attached)| is_it((id, attached)));
        found.map(|(id, _)| *id).ok_or_else(|| {
            let what =
                format!("detach {target}: it is not attached; `spindle attach list` shows what is");
            Error::new(ErrorKind::NotFound, what)
        })
    }

    /// `looks`: checks whether the device is in use.
    async fn info(&self, attached: &Live<V::Reservation>, looks: bool) -> AttachmentInfo {
        let volume = self.name_of(VolumeId(attached.record.volume));
        let mut info = AttachmentInfo {
            link: self.links.join(&volume),
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
            State::Failed { error, .. } => info.failure = Some(error.chain()),
            State::Served(served) => {
                let device = served.device.clone();
                let looked = blocking(move || {
                    let mut slot = device.lock();
                    let Some(device) = &mut *slot else { return Ok(None) };
                    let failure = device.failure();
                    let is_in_use = match failure {
                        None if looks => in_use::is_in_use(&device.path()).unwrap_or(true),
                        _ => false,
                    };
                    Ok(Some((device.path(), failure, is_in_use, device.statistics())))
                });
                if let Ok(Some((path, failure, is_in_use, statistics))) = looked.await {
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

    fn parts(&self, volume: &V::Volume, record: &Record) -> Parts<V::Exports> {
        Parts {
            shown: volume.session(record.is_write_through),
            name: volume.name(),
            server: self.server.clone(),
            memory: self.memory.clone(),
        }
    }

    /// Returns the options with their number of queues, for which there is memory.
    fn with_queues(&self, live: &LiveList<V>, options: AttachOptions) -> Result<AttachOptions> {
        if options.driver != Driver::Ublk {
            return Ok(options); // its connections have their own bound
        }
        let others = live.values().map(|live| &live.record.options);
        let taken = others.filter(|options| options.driver == Driver::Ublk);
        let taken: u64 = taken.map(|options| u64::from(options.queue_count)).sum();
        let room = self.payload_bytes_max / ublk::own_bytes(IO_BYTES_MAX);
        let queue_count = match options.queue_count {
            0 => {
                let processors = std::thread::available_parallelism().map_or(1, usize::from);
                queues_of_choice(room.saturating_sub(taken), processors)
            }
            asked => asked,
        };
        let queues = taken + u64::from(queue_count);
        if queues <= room {
            return Ok(AttachOptions { queue_count, ..options });
        }
        let what = format!(
            "attach: {queues} queues of devices need {} bytes of memory for requests, and the budget has {}; \
             raise `memory`, or attach with fewer queues",
            queues * ublk::own_bytes(IO_BYTES_MAX),
            self.payload_bytes_max
        );
        Err(Error::new(ErrorKind::Full, what))
    }

    fn write(&self, live: &LiveList<V>) -> Result<()> {
        write(&self.path, live.values().map(|live| live.record.clone()).collect())
    }
}

/// Tells the kernel the newest size of a volume. The holder of the device does so, because an older size would cut off
/// data of its users. Returns whether the device has it now. Blocks.
fn tell_size(device: &Slot, newest: &watch::Receiver<u64>) -> Result<bool> {
    let mut slot = device.lock();
    let Some(device) = &mut *slot else { return Ok(true) };
    let size_bytes = *newest.borrow();
    device.resize(size_bytes)?;
    Ok(device.has_size(size_bytes))
}

/// Default number of queues of a device: as many as processors, but only a part of those that the memory still has room
/// for, so that many devices fit, and at least one.
fn queues_of_choice(room: u64, processors: usize) -> u16 {
    let few = u16::try_from(room / QUEUES_PART).unwrap_or(u16::MAX);
    let wanted = u16::try_from(processors).unwrap_or(u16::MAX).min(QUEUES_MAX);
    wanted.min(few).max(1)
}

/// The attached devices, while this daemon may change them.
///
/// # Errors
/// `Unavailable`: the daemon is stopping.
fn changeable<L>(live: &mut Option<L>) -> Result<&mut L> {
    live.as_mut().ok_or_else(|| {
        let what = "the daemon is stopping, and its devices wait for the next one; try again then";
        Error::new(ErrorKind::Unavailable, what)
    })
}

/// Runs work on devices, which uses threads and commands that block.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::with_source(ErrorKind::Io, "work on a device", error))?
}

#[cfg(test)]
mod tests;
