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
use crate::seeded_bugs::seeded_bugs;
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
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
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
}

/// The state of a drive, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveState {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
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
    clock: Arc<dyn Clock>,
    folders: tokio::sync::Mutex<HashMap<Uuid, Arc<Folder>>>,
    used_bytes: AtomicU64,
    pub(crate) width: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    /// Held while this process has the drive.
    lock: Option<File>,
    /// Why it is away, or its last failure.
    failure: Option<String>,
    /// Beginning of a look that has not ended.
    looking_since: Option<Instant>,
    space: Space,
}

/// The room of a drive at the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Space {
    capacity_bytes: u64,
    available_bytes: u64,
    pool_count: u64,
}

/// The folder of a pool on a drive.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) fence: Fence,
}

impl Drives {
    /// Opens the drives of the node in `home`. A drive that it has had before may be away. Waits for the disks.
    ///
    /// # Errors
    /// `Invalid` for a directory that cannot become a drive; `Busy` for one that another process has; `Corrupt`,
    /// `Unsupported` and `Io` for the list of drives in `home`.
    pub fn open(
        home: &Path,
        cluster: ClusterId,
        options: Vec<DriveOptions>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Arc<Drives>> {
        let mut known = read_known(home)?;
        let mut drives: Vec<Arc<Drive>> = Vec::new();
        for options in options {
            let id = known.drives.get(&options.name).copied();
            let doing = format!("open drive {} in {}", options.name, options.dir.display());
            let id = match id {
                Some(id) => id,
                None => {
                    let id = make(&options.dir, cluster)
                        .map_err(|error| error.context(doing.clone()))?;
                    known.drives.insert(options.name.clone(), id);
                    let text =
                        serde_json::to_string(&known).expect("names and ids are JSON") + "\n";
                    write_durably(&home.join(KNOWN), text.as_bytes(), 0o600)?;
                    id
                }
            };
            let drive = Drive {
                identity: Identity { version: VERSION, cluster: cluster.0, id },
                options,
                state: Mutex::default(),
                clock: Arc::clone(clock),
                folders: tokio::sync::Mutex::default(),
                used_bytes: AtomicU64::new(0),
                width: Arc::new(Semaphore::new(DRIVE_WIDTH)),
            };
            match drive.look() {
                Err(error) if error.kind() != ErrorKind::Unavailable => {
                    return Err(error.context(doing));
                }
                Err(error) => {
                    let error = error.chain();
                    tracing::warn!(drive = drive.options.name, error, "a drive is away");
                }
                Ok(()) => {}
            }
            drives.push(Arc::new(drive));
        }
        Ok(Arc::new(Drives(drives)))
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

    /// Looks at every drive: those that are back are served again. A drive that hangs holds up only the next look at
    /// itself.
    pub async fn look(&self) {
        let looks = self.0.iter().filter_map(|drive| {
            let mut state = drive.state.lock();
            if state.looking_since.is_some() {
                return None;
            }
            state.looking_since = Some(drive.clock.now());
            let drive = Arc::clone(drive);
            Some(tokio::task::spawn_blocking(move || drive.look_and_tell()))
        });
        let looks: Vec<_> = looks.collect();
        let _ = tokio::time::timeout(LOOK_MAX, futures::future::join_all(looks)).await;
    }

    /// Returns the state of every drive, without a request to it.
    #[must_use]
    pub fn states(&self) -> Vec<DriveState> {
        self.0.iter().map(|drive| drive.state()).collect()
    }
}

impl Drive {
    /// Checks that the drive is there, and takes it for this process. Waits for the disk.
    ///
    /// # Errors
    /// `Unavailable` if it is away; `Busy` if another process has it; `Denied` for one of another cluster.
    pub(crate) fn look(&self) -> Result<()> {
        let (looked, space) = (self.look_unnoted(), self.space());
        let mut state = self.state.lock();
        state.space = space.unwrap_or(state.space);
        state.failure = looked.as_ref().err().map(Error::chain);
        if looked.is_err() {
            state.lock = None;
        }
        looked
    }

    /// Looks, logs a change, and ends the look that is under way.
    fn look_and_tell(&self) {
        let before = self.state.lock().failure.clone();
        let looked = self.look();
        let name = &self.options.name;
        match (before, looked) {
            (None, Err(error)) => {
                tracing::warn!(drive = name, error = %error.chain(), "a drive is away");
            }
            (Some(_), Ok(())) => tracing::info!(drive = name, "a drive is back"),
            _ => {}
        }
        self.state.lock().looking_since = None;
    }

    fn look_unnoted(&self) -> Result<()> {
        let path = self.options.dir.join(IDENTITY);
        let away = |why: String| Err(Error::new(ErrorKind::Unavailable, why));
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
        if self.state.lock().lock.is_some() {
            return Ok(());
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
        // No request has come yet: unfinished files are leftovers.
        let used = self.clean_and_count().map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "read the folders of the drive", error)
        })?;
        self.used_bytes.store(used, Ordering::Relaxed);
        self.state.lock().lock = Some(lock);
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

    /// Returns the folder of a pool, which its owner may make.
    ///
    /// # Errors
    /// `Unavailable` if the drive is away, or a reader finds no folder; those of [`Fence::open`].
    pub(crate) async fn folder(
        self: &Arc<Self>,
        lineage: Uuid,
        is_owner: bool,
    ) -> Result<Arc<Folder>> {
        let mut folders = self.folders.lock().await;
        let (drive, known) = (Arc::clone(self), folders.contains_key(&lineage));
        let opened =
            tokio::task::spawn_blocking(move || drive.open_folder(lineage, is_owner, known));
        let opened = opened.await.map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "wait for the drive", error)
        })??;
        if let Some(folder) = opened {
            folders.insert(lineage, Arc::new(folder));
        }
        Ok(Arc::clone(folders.get(&lineage).expect("it was known or opened")))
    }

    /// Opens a folder, unless it is known, and is there.
    fn open_folder(&self, lineage: Uuid, is_owner: bool, is_known: bool) -> Result<Option<Folder>> {
        self.look()?;
        let dir = self.options.dir.join(lineage.to_string());
        if !dir.is_dir() {
            if !is_owner {
                let what = format!("drive {} has no folder of this pool", self.options.name);
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            let made = std::fs::create_dir(&dir).and_then(|()| sync_parent(&dir));
            made.map_err(|error| {
                Error::with_source(ErrorKind::Unavailable, format!("make {}", dir.display()), error)
            })?;
        } else if is_known {
            return Ok(None);
        }
        let fence = Fence::open(&dir)?;
        Ok((!is_known).then_some(Folder { objects: open_store(&dir)?.bulk(), fence }))
    }

    /// Takes room for an object; it is given back by [`Drive::release`]. Waits for the disk.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<()> {
        let full = |why: String| {
            Err(Error::new(ErrorKind::Full, format!("drive {} is full: {why}", self.options.name)))
        };
        let used = self.used_bytes.load(Ordering::Relaxed);
        if let Some(capacity) = self.options.capacity_bytes
            && used.saturating_add(bytes) > capacity
        {
            return full(format!("it stores {used} of {capacity} bytes"));
        }
        if let Ok(space) = rustix::fs::statvfs(&self.options.dir) {
            let free = space.f_bavail.saturating_mul(space.f_frsize);
            let reserve = space.f_blocks.saturating_mul(space.f_frsize) / RESERVE_DIVISOR;
            if bytes.saturating_add(reserve) > free {
                return full(format!(
                    "its file system has {free} bytes free, of which {reserve} stay free"
                ));
            }
        }
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Gives room back.
    pub(crate) fn release(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Notes whether the disk has answered a request.
    pub(crate) fn note(&self, failure: Option<&str>) {
        let mut state = self.state.lock();
        if let (None, Some(failure)) = (&state.failure, failure) {
            tracing::warn!(drive = self.options.name, error = failure, "a drive fails");
        }
        state.failure = failure.map(str::to_owned);
    }

    /// Returns the room of the file system.
    fn space(&self) -> Option<Space> {
        let found = rustix::fs::statvfs(&self.options.dir).ok()?;
        let total = found.f_blocks.saturating_mul(found.f_frsize);
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        let capacity = self.options.capacity_bytes.unwrap_or(total).min(total);
        let used = self.used_bytes.load(Ordering::Relaxed);
        let unreserved = free.saturating_sub(total / RESERVE_DIVISOR);
        let folders = std::fs::read_dir(&self.options.dir).ok()?.flatten();
        Some(Space {
            capacity_bytes: capacity,
            available_bytes: unreserved.min(capacity.saturating_sub(used)),
            pool_count: folders.filter(|entry| lineage_of(&entry.path()).is_some()).count() as u64,
        })
    }

    fn state(&self) -> DriveState {
        let state = self.state.lock();
        let hanging = state.looking_since.map(|since| self.clock.since(since));
        let hanging = hanging
            .filter(|time| *time > LOOK_MAX)
            .map(|time| format!("it has not answered for {} s", time.as_secs()));
        let DriveOptions { name, dir, .. } = self.options.clone();
        let Space { capacity_bytes, available_bytes, pool_count } = state.space;
        DriveState {
            name,
            dir,
            failure: hanging.or_else(|| state.failure.clone()),
            capacity_bytes,
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            available_bytes,
            pool_count,
        }
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
