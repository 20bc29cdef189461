//! The drives of a data node: each is a directory with an identity, and has a folder for each pool.
//!
//! Invariants:
//! - A directory becomes a drive once, and only if it is empty. From then on nothing is written there unless
//!   it holds the identity: its disk may not be mounted.
//! - One process has a drive.
//! - A drive that fails takes no other one with it: each has its own places for requests, and few enough that
//!   one that hangs leaves threads for the others.
//! - More bytes than the capacity are never accepted, and the last part of a file system stays free.

use crate::fence::{FILE as FENCE_FILE, Fence};
use crate::messages::{DRIVE_COUNT_MAX, DriveOffer, DriveRoom};
use crate::seeded_bugs::seeded_bugs;
use crate::smart::WearWatch;
use block::durable_file::{sync_parent, write_durably};
use block::env::{Clock, random_uuid};
use block::{Error, ErrorKind, Result};
use cluster::ClusterId;
use control::store::{Store, StoreOptions};
use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use uuid::Uuid;

/// Name of the identity in a drive. Format: docs/format-peer.md.
const IDENTITY: &str = "spindle-drive.json";
/// Name of the list of drives in the directory of a node. Format: docs/format-peer.md.
const KNOWN: &str = "drives.json";
/// Version of both.
const VERSION: u32 = 1;
/// Requests at a time. Chosen by hand: a queue that keeps an NVMe drive busy.
pub const DRIVE_WIDTH: usize = 32;
/// Time after which a look counts as one at a drive that hangs. Chosen by hand.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Openings of folders at a time. Chosen by hand: those of a drive that hangs keep threads.
const OPENING_COUNT_MAX: usize = 4;
/// Part of a file system that stays free, so that deletions and repairs of it still work.
const RESERVE_DIVISOR: u64 = 100;
/// Name of a folder that a fresh ext4 file system has.
const LOST_AND_FOUND: &str = "lost+found";

/// A drive to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveOptions {
    /// Its name in URLs.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Most bytes to store; without, as many as the file system has.
    pub capacity_bytes: Option<u64>,
    /// Its media group: pools that name it have the drive as a data store.
    pub group: Option<String>,
    /// The label of what fails together with it; without, the node.
    pub domain: Option<String>,
}

/// The state of a drive, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveState {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Its media group.
    pub group: Option<String>,
    /// The label of its failure domain.
    pub domain: Option<String>,
    /// Why it is away, or the cause of its last failure, while it fails.
    pub failure: Option<String>,
    /// Bytes that it can store.
    pub capacity_bytes: u64,
    /// Bytes that it stores.
    pub used_bytes: u64,
    /// Bytes that it still takes.
    pub available_bytes: u64,
    /// Pools that have a folder.
    pub pool_count: u64,
    /// Why its disk should be replaced, if that is known.
    pub wear: Option<String>,
}

/// The identity of a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    version: u32,
    cluster: Uuid,
    id: Uuid,
}

/// The drives that a node has had, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    version: u32,
    drives: BTreeMap<String, Uuid>,
}

/// The drives of a node.
#[derive(Debug)]
pub struct Drives(Vec<Arc<Drive>>);

/// A drive.
#[derive(Debug)]
pub struct Drive {
    options: DriveOptions,
    identity: Identity,
    state: Mutex<State>,
    /// Held by the look that is under way.
    turn: Mutex<()>,
    /// Held while a fence is written.
    fencing: Arc<Mutex<()>>,
    clock: Arc<dyn Clock>,
    folders: Mutex<HashMap<Uuid, Arc<Folder>>>,
    /// Number of times that the drive has gone away: what was opened before is void.
    absences: watch::Sender<u64>,
    room: Mutex<Accounted>,
    openings: Arc<Semaphore>,
    pub(crate) width: Arc<Semaphore>,
    pub(crate) wear: WearWatch,
}

#[derive(Debug, Default)]
struct State {
    /// Held while this process has the drive.
    lock: Option<HeldLock>,
    /// Its folders were counted, and leftovers removed.
    is_counted: bool,
    /// Why it is away, as the last look has found.
    away: Option<String>,
    /// Its last failure to carry out a request, until it carries one out.
    failing: Option<String>,
    /// Beginning of a look that has not ended.
    looking_since: Option<Instant>,
    space: Space,
}

/// Bytes that a drive stores, and those of them that are being written.
#[derive(Clone, Copy, Debug, Default)]
struct Accounted {
    used: u64,
    pending: u64,
}

/// The lock of a drive, and the file that it is on.
#[derive(Debug)]
struct HeldLock {
    _file: File,
    /// Device and inode: another file of the same contents is on another mount.
    place: (u64, u64),
}

fn place_of(found: &std::fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// The room of a drive at the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Space {
    capacity_bytes: u64,
    /// Bytes that the file system has free, without those that stay free.
    unreserved_bytes: u64,
    pool_count: u64,
}

impl Space {
    /// Bytes that the drive takes beyond these.
    fn available_bytes(&self, used_bytes: u64) -> u64 {
        self.unreserved_bytes.min(self.capacity_bytes.saturating_sub(used_bytes))
    }
}

/// The folder of a pool on a drive.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// The directory of the objects.
    pub(crate) dir: PathBuf,
    pub(crate) fence: Fence,
    /// Objects that are being written.
    writing: Mutex<HashSet<ObjectPath>>,
}

/// An object that is being written.
pub(crate) struct Writing<'a>(&'a Folder, ObjectPath);

impl Folder {
    /// Begins to write an object; `None` if that is under way already.
    pub(crate) fn begin_write(&self, path: &ObjectPath) -> Option<Writing<'_>> {
        let is_first = self.writing.lock().insert(path.clone());
        is_first.then(|| Writing(self, path.clone()))
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writing.lock().remove(&self.1);
    }
}

/// Room that was taken for an object.
#[derive(Debug)]
pub(crate) struct Room {
    drive: Arc<Drive>,
    bytes: u64,
    is_kept: bool,
}

impl Room {
    /// Ends the writing: the object is stored, or the room is given back.
    pub(crate) fn end(mut self, is_stored: bool) {
        self.is_kept = is_stored;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut room = self.drive.room.lock();
        room.pending = room.pending.saturating_sub(self.bytes);
        if !self.is_kept {
            room.used = room.used.saturating_sub(self.bytes);
        }
    }
}

impl Drives {
    /// Opens the drives of the node in `home`. A drive that it has had before may be away, or late: it is served when it
    /// has answered.
    ///
    /// # Errors
    /// `Invalid` for a directory that cannot become a drive; `Busy` for one that another process has; `Corrupt`,
    /// `Unsupported` and `Io` for the list of drives in `home`.
    pub async fn open(
        home: &Path,
        cluster: ClusterId,
        options: Vec<DriveOptions>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Arc<Drives>> {
        let (home, for_drives) = (home.to_owned(), Arc::clone(clock));
        let made = tokio::task::spawn_blocking(move || {
            let mut known = read_known(&home)?;
            let drives = options.into_iter().map(|options| {
                let id = known_or_made(&home, &mut known, &options, cluster)?;
                Ok(Arc::new(Drive::new(options, cluster, id, &for_drives)))
            });
            drives.collect::<Result<Vec<_>>>()
        });
        let made = made
            .await
            .map_err(|error| Error::with_source(ErrorKind::Io, "open the drives", error))?;
        let drives = Drives(made?);
        for (drive, looked) in drives.0.iter().zip(drives.look().await) {
            let DriveOptions { name, dir, .. } = &drive.options;
            match looked {
                Some(Err(error)) if error.kind() != ErrorKind::Unavailable => {
                    return Err(error.context(format!("open drive {name} in {}", dir.display())));
                }
                _ => {}
            }
        }
        Ok(Arc::new(drives))
    }

    /// Finds a drive by its name; with an empty one, the only drive.
    ///
    /// # Errors
    /// `Invalid`, with the names of the drives.
    pub(crate) fn find(&self, name: &str) -> Result<&Arc<Drive>> {
        let found = match (name, &self.0[..]) {
            ("", [only]) => Some(only),
            _ => self.0.iter().find(|drive| drive.options.name == name),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.0.iter().map(|drive| &*drive.options.name).collect();
            let names = names.join(", ");
            let what = match name {
                "" => format!(
                    "the node has several drives; name one of them behind the node: {names}"
                ),
                _ => format!("the node has no drive {name}; it has {names}"),
            };
            Error::new(ErrorKind::Invalid, what)
        })
    }

    /// What the node reports to the others about its drives, also of those that are away.
    pub(crate) fn offers(&self) -> Vec<DriveOffer> {
        let offer = |drive: &Arc<Drive>| {
            let DriveOptions { name, group, domain, .. } = drive.options.clone();
            DriveOffer { id: drive.identity.id, name, group, domain }
        };
        self.0.iter().map(offer).take(DRIVE_COUNT_MAX).collect()
    }

    /// Looks at every drive: those that are back are served again. A drive that hangs holds up only the next look at
    /// itself. Returns the findings; `None` of a drive that has not answered yet.
    pub async fn look(&self) -> Vec<Option<Result<()>>> {
        let looks = self.0.iter().map(|drive| async move {
            {
                let mut state = drive.state.lock();
                if state.looking_since.is_some() {
                    return None;
                }
                state.looking_since = Some(drive.clock.now());
            }
            let to_look = Arc::clone(drive);
            let looking = tokio::task::spawn_blocking(move || to_look.look_and_tell());
            let looked = tokio::time::timeout(LOOK_MAX, looking).await.ok()?;
            // Without its disk, the directory is on another one.
            if let Ok(Ok(())) = looked {
                drive.wear.look(&drive.options.dir);
            }
            Some(looked.unwrap_or_else(|error| {
                Err(Error::with_source(ErrorKind::Unavailable, "look at a drive", error))
            }))
        });
        futures::future::join_all(looks).await
    }

    /// Returns the state of every drive, without a request to it.
    #[must_use]
    pub fn states(&self) -> Vec<DriveState> {
        self.0.iter().map(|drive| drive.state()).collect()
    }
}

impl Drive {
    fn new(options: DriveOptions, cluster: ClusterId, id: Uuid, clock: &Arc<dyn Clock>) -> Drive {
        Drive {
            identity: Identity { version: VERSION, cluster: cluster.0, id },
            options,
            state: Mutex::default(),
            turn: Mutex::default(),
            fencing: Arc::default(),
            clock: Arc::clone(clock),
            folders: Mutex::default(),
            absences: watch::Sender::new(0),
            room: Mutex::default(),
            openings: Arc::new(Semaphore::new(OPENING_COUNT_MAX)),
            width: Arc::new(Semaphore::new(DRIVE_WIDTH)),
            wear: WearWatch::new(Arc::clone(clock)),
        }
    }

    /// Checks that the drive is there, and takes it for this process. Waits for the disk.
    ///
    /// # Errors
    /// `Unavailable` if it is away; `Busy` if another process has it.
    pub(crate) fn look(&self) -> Result<()> {
        let _turn = self.turn.lock();
        let looked = self.look_in_turn();
        let space = self.space();
        let mut state = self.state.lock();
        state.space = space.unwrap_or(state.space);
        state.away = looked.as_ref().err().map(Error::chain);
        looked
    }

    /// Looks, logs a change, and ends the look that is under way.
    fn look_and_tell(&self) -> Result<()> {
        let before = self.state.lock().away.clone();
        let looked = self.look();
        let name = &self.options.name;
        match (before, &looked) {
            (None, Err(error)) => {
                tracing::warn!(drive = name, error = %error.chain(), "a drive is away");
            }
            (Some(_), Ok(())) => tracing::info!(drive = name, "a drive is back"),
            _ => {}
        }
        self.state.lock().looking_since = None;
        looked
    }

    /// Gives the drive up: it can be unmounted, and what was opened on it is void.
    fn leave(&self) {
        if self.state.lock().lock.take().is_some() {
            // Under the lock of the folders: an opening that is under way sees it, and keeps nothing of before.
            let mut folders = self.folders.lock();
            self.absences.send_modify(|count| *count += 1);
            folders.clear();
        }
    }

    /// Resolves when the drive has gone away since it had done so `absences` times.
    pub(crate) async fn gone_since(&self, absences: u64) {
        // The sender lives as long as the drive.
        let _ = self.absences.subscribe().wait_for(|count| *count != absences).await;
    }

    /// Checks that the path of the drive leads to the drive that this process has, which has not gone away since it had
    /// done so `absences` times. Waits for the disk.
    ///
    /// # Errors
    /// `Unavailable`.
    pub(crate) fn check_there(&self, absences: u64) -> Result<()> {
        let held = self.state.lock().lock.as_ref().map(|held| held.place);
        let there = std::fs::metadata(self.options.dir.join(IDENTITY)).ok();
        let is_there = held.is_some() && held == there.as_ref().map(place_of);
        let is_same = *self.absences.borrow() == absences;
        match (is_there && is_same) || seeded_bugs().drive_unchecked {
            true => Ok(()),
            false => {
                let what = format!(
                    "{} is not there: its disk may not be mounted",
                    self.options.dir.join(IDENTITY).display()
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
        }
    }

    fn look_in_turn(&self) -> Result<()> {
        let path = self.options.dir.join(IDENTITY);
        let away = |why: String| {
            self.leave();
            Err(Error::new(ErrorKind::Unavailable, why))
        };
        match read_identity(&path) {
            Ok(found) if found == self.identity || seeded_bugs().drive_unchecked => {}
            Ok(found) if found.cluster != self.identity.cluster => {
                return away(format!("{} is that of another cluster", path.display()));
            }
            Ok(_) => {
                return away(format!(
                    "{} is that of another drive: mount the right one there, or give this one another name",
                    path.display()
                ));
            }
            Err(_) if seeded_bugs().drive_unchecked => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return away(format!(
                    "{} is not there: its disk may not be mounted. A new disk needs another name",
                    path.display()
                ));
            }
            Err(error) => {
                return Err(Error::with_source(ErrorKind::Unavailable, "read its identity", error));
            }
        }
        let failed = |doing: &str, error| {
            Error::with_source(ErrorKind::Unavailable, format!("{doing} {}", path.display()), error)
        };
        let there = std::fs::metadata(&path).map_err(|error| failed("look at", error))?;
        let held = self.state.lock().lock.as_ref().map(|held| held.place);
        match held {
            Some(held) if held == place_of(&there) => return Ok(()),
            // It is mounted again, perhaps on another device: the lock is on a file that is gone.
            Some(_) => self.leave(),
            None => {}
        }
        let lock = File::open(&path).map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, format!("open {}", path.display()), error)
        })?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let what =
                    format!("another process serves {}: stop it first", self.options.dir.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            Err(error) => {
                let error = std::io::Error::from(error);
                return Err(Error::with_source(ErrorKind::Unavailable, "lock the drive", error));
            }
        }
        if !self.state.lock().is_counted {
            // No request has come yet: unfinished files are leftovers.
            let used = self.clean_and_count().map_err(|error| {
                Error::with_source(ErrorKind::Unavailable, "read the folders of the drive", error)
            })?;
            self.room.lock().used = used;
        }
        let place = place_of(&lock.metadata().map_err(|error| failed("look at", error))?);
        let mut state = self.state.lock();
        (state.lock, state.is_counted) = (Some(HeldLock { _file: lock, place }), true);
        Ok(())
    }

    fn clean_and_count(&self) -> std::io::Result<u64> {
        let mut used = 0;
        for entry in std::fs::read_dir(&self.options.dir)? {
            let dir = entry?.path();
            if lineage_of(&dir).is_some() {
                if let Ok(store) = open_store(&dir) {
                    ["fragments", "probe"].iter().for_each(|folder| store.clean_unfinished(folder));
                }
                used += bytes_below(&dir)?;
            }
        }
        Ok(used)
    }

    /// Returns the folder of a pool, which its owner may make, and how often the drive had gone away before.
    ///
    /// # Errors
    /// `Unavailable` if the drive is away, or a reader finds no folder; those of [`Fence::open`].
    pub(crate) async fn folder(
        self: &Arc<Self>,
        lineage: Uuid,
        is_owner: bool,
    ) -> Result<(Arc<Folder>, u64)> {
        let permit = Arc::clone(&self.openings).acquire_owned().await;
        let (drive, permit) = (Arc::clone(self), permit.expect("the semaphore is never closed"));
        let opened = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            drive.open_folder(lineage, is_owner)
        });
        opened.await.map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "wait for the drive", error)
        })?
    }

    fn open_folder(&self, lineage: Uuid, is_owner: bool) -> Result<(Arc<Folder>, u64)> {
        let absences = *self.absences.borrow();
        self.look()?;
        let dir = self.options.dir.join(lineage.to_string());
        let mut folders = self.folders.lock();
        self.check_there(absences)?;
        if !dir.is_dir() {
            if !is_owner {
                let what = format!("drive {} has no folder of this pool", self.options.name);
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            let made = std::fs::create_dir(&dir).and_then(|()| sync_parent(&dir));
            made.map_err(|error| {
                Error::with_source(ErrorKind::Unavailable, format!("make {}", dir.display()), error)
            })?;
        } else if let Some(folder) = folders.get(&lineage) {
            return Ok((Arc::clone(folder), absences));
        }
        let (fence, objects) =
            (Fence::open(&dir, Arc::clone(&self.fencing))?, open_store(&dir)?.bulk());
        self.check_there(absences)?;
        let folder = Arc::new(Folder { objects, dir, fence, writing: Mutex::default() });
        folders.insert(lineage, Arc::clone(&folder));
        Ok((folder, absences))
    }

    /// Takes room for an object. Waits for the disk.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Room> {
        let full = |why: String| {
            Err(Error::new(ErrorKind::Full, format!("drive {} is full: {why}", self.options.name)))
        };
        let space = rustix::fs::statvfs(&self.options.dir);
        let mut room = self.room.lock();
        let used = room.used;
        if let Some(capacity) = self.options.capacity_bytes
            && used.saturating_add(bytes) > capacity
        {
            return full(format!("it stores {used} of {capacity} bytes"));
        }
        if let Ok(space) = space {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            let kept = space.f_blocks.saturating_mul(space.f_frsize) / RESERVE_DIVISOR;
            let wanted = bytes.saturating_add(room.pending).saturating_add(kept);
            if wanted > free {
                return full(format!(
                    "its file system has {free} bytes free, of which {kept} stay free"
                ));
            }
        }
        room.used = used.saturating_add(bytes);
        room.pending = room.pending.saturating_add(bytes);
        Ok(Room { drive: Arc::clone(self), bytes, is_kept: false })
    }

    /// Takes no room, for an object that is stored already.
    pub(crate) fn reserve_nothing(self: &Arc<Self>) -> Room {
        Room { drive: Arc::clone(self), bytes: 0, is_kept: false }
    }

    /// Gives the room of a deleted object back.
    pub(crate) fn release(&self, bytes: u64) {
        let mut room = self.room.lock();
        room.used = room.used.saturating_sub(bytes);
    }

    /// Notes whether the disk has carried out a request.
    pub(crate) fn note(&self, failure: Option<&str>) {
        let mut state = self.state.lock();
        if let (None, Some(failure)) = (&state.failing, failure) {
            tracing::warn!(drive = self.options.name, error = failure, "a drive fails");
        }
        state.failing = failure.map(str::to_owned);
    }

    /// Returns the room of the file system.
    fn space(&self) -> Option<Space> {
        let found = rustix::fs::statvfs(&self.options.dir).ok()?;
        let total = found.f_blocks.saturating_mul(found.f_frsize);
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        let capacity = self.options.capacity_bytes.unwrap_or(total).min(total);
        let folders = std::fs::read_dir(&self.options.dir).ok()?.flatten();
        Some(Space {
            capacity_bytes: capacity,
            unreserved_bytes: free.saturating_sub(total / RESERVE_DIVISOR),
            pool_count: folders.filter(|entry| lineage_of(&entry.path()).is_some()).count() as u64,
        })
    }

    fn state(&self) -> DriveState {
        let state = self.state.lock();
        let hanging = state.looking_since.map(|since| self.clock.since(since));
        let hanging = hanging
            .filter(|time| *time > LOOK_MAX)
            .map(|time| format!("it has not answered for {} s", time.as_secs()));
        let DriveOptions { name, dir, group, domain, .. } = self.options.clone();
        let Space { capacity_bytes, pool_count, .. } = state.space;
        let used_bytes = self.room.lock().used;
        DriveState {
            name,
            dir,
            group,
            domain,
            failure: hanging.or_else(|| state.away.clone()).or_else(|| state.failing.clone()),
            capacity_bytes,
            used_bytes,
            available_bytes: state.space.available_bytes(used_bytes),
            pool_count,
            wear: self.wear.why(),
        }
    }

    /// Returns the room, as the last look has found the file system, without a request to it.
    pub(crate) fn room(&self) -> DriveRoom {
        let space = self.state.lock().space;
        let free_bytes = space.available_bytes(self.room.lock().used);
        let wear = self.wear.why().unwrap_or_default();
        DriveRoom { total_bytes: space.capacity_bytes, free_bytes, wear }
    }
}

/// Tells whether an owner may create or delete an object of this name.
pub(crate) fn is_changeable(path: &ObjectPath) -> bool {
    path.as_ref() != FENCE_FILE
}

fn open_store(dir: &Path) -> Result<Store> {
    let url = format!("file://{}", dir.display());
    Store::await_as(&url, &StoreOptions::default(), None)
}

/// The pool whose folder this is.
fn lineage_of(dir: &Path) -> Option<Uuid> {
    Uuid::parse_str(dir.file_name()?.to_str()?).ok().filter(|_| dir.is_dir())
}

fn bytes_below(dir: &Path) -> std::io::Result<u64> {
    let (mut used, mut dirs) = (0, vec![dir.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            match entry.metadata() {
                Ok(found) if found.is_dir() => dirs.push(entry.path()),
                Ok(found) => used += found.len(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(used)
}

fn read_known(home: &Path) -> Result<Known> {
    let path = home.join(KNOWN);
    let doing = || format!("read {}", path.display());
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Known { version: VERSION, drives: BTreeMap::new() });
        }
        Err(error) => return Err(Error::with_source(ErrorKind::Io, doing(), error)),
    };
    let known: Known = serde_json::from_slice(&text)
        .map_err(|error| Error::with_source(ErrorKind::Corrupt, doing(), error))?;
    match known.version {
        VERSION => Ok(known),
        other => {
            let what = format!("{}: it is of version {other}: update spindle", doing());
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

fn read_identity(path: &Path) -> Result<Identity> {
    let doing = || format!("read {}", path.display());
    let text = std::fs::read(path).map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Io,
        };
        Error::with_source(kind, doing(), error)
    })?;
    let found: Identity = serde_json::from_slice(&text)
        .map_err(|error| Error::with_source(ErrorKind::Corrupt, doing(), error))?;
    match found.version {
        VERSION => Ok(found),
        other => {
            let what = format!("{}: it is of version {other}: update spindle", doing());
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

/// Returns the id of a drive that the node has had, or makes one.
fn known_or_made(
    home: &Path,
    known: &mut Known,
    options: &DriveOptions,
    cluster: ClusterId,
) -> Result<Uuid> {
    let DriveOptions { name, dir, .. } = options;
    if let Some(id) = known.drives.get(name) {
        return Ok(*id);
    }
    let id = make(dir, cluster)
        .map_err(|error| error.context(format!("open drive {name} in {}", dir.display())))?;
    known.drives.insert(name.clone(), id);
    let text = serde_json::to_string(known).expect("names and ids are JSON") + "\n";
    write_durably(&home.join(KNOWN), text.as_bytes(), 0o600)?;
    Ok(id)
}

/// Makes an empty directory a drive, or takes over one of the same cluster, which another node had.
fn make(dir: &Path, cluster: ClusterId) -> Result<Uuid> {
    let invalid = |why: &str| Err(Error::new(ErrorKind::Invalid, why));
    match read_identity(&dir.join(IDENTITY)) {
        Ok(found) if found.cluster == cluster.0 => return Ok(found.id),
        Ok(_) => return invalid("it is a drive of another cluster; use another directory"),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let entries = std::fs::read_dir(dir).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, "the directory of a drive must exist", error)
    })?;
    if entries.flatten().any(|entry| entry.file_name() != LOST_AND_FOUND) {
        return invalid(
            "a new drive must be an empty directory, and this one is not; make one within it",
        );
    }
    let identity = Identity { version: VERSION, cluster: cluster.0, id: random_uuid() };
    let text = serde_json::to_string(&identity).expect("ids are JSON") + "\n";
    write_durably(&dir.join(IDENTITY), text.as_bytes(), 0o600)?;
    Ok(identity.id)
}
