//! Opening the log: recovery, the spill files, and the start of the thread.
//!
//! Invariants:
//! - A log that is refused keeps its contents.
//! - Everything from outside the directory, time and randomness included, is in [`LogOpening`].

use super::thread::start_thread;
use super::{DrivenCore, Log, LogInner, LogNotes, LogThread, Noted};
use crate::disk::LogDisk;
use crate::disk::file_disk::FileDisk;
use crate::disk::mounted::mounted;
use crate::disk::state_files::{StateFiles, StateKeeper};
use crate::options::{LogIdentity, LogOptions, SPARE_FILES_MIN, payload_bytes_max};
use crate::replicas::QuorumTail;
use crate::ring::batch_places::ChainId;
use crate::ring::core::{Core, CoreStart};
use crate::ring::drive::StepLock;
use crate::ring::layout::{FileState, RingConfig};
use crate::ring::opening::OpenArgs;
use crate::ring::recovery::{self, Opened, Recovery};
use crate::ring::shared_ring::SharedRing;
use crate::seeded_bugs::{SeededBugs, seeded_bugs};
use crate::spill::SpillReader;
use crate::spill::dir::{self as spill_dir, FoundSpills, SpillFilesWanted};
use crate::throttle::gate::ThrottleGate;
use block::env::{Clock, Random, SystemClock, SystemRandom};
use block::seal::PoolKey;
use block::{Lsn, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Log {
    /// Opens the log in `dir`, or creates one. `destaged` is the LSN up to which the data tier
    /// holds everything. Blocks while the log is read back; starts the log's threads. A log that is
    /// refused keeps its contents.
    ///
    /// # Errors
    /// `Invalid`: options that cannot work, or the log of another pool. `Busy`: open elsewhere.
    /// `Fenced`: a higher epoch wrote it. `Corrupt`: damaged below the part known to be on stable
    /// storage, inconsistent with the data tier (entries missing in between, or the tier rolled
    /// back), or lacking files (see [`crate::is_incomplete`]). `Unsupported`: a later program wrote
    /// it. `Io`: the file system failed. `Full`: no room for the opening batch.
    pub fn open(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
    ) -> Result<(Log, Recovery)> {
        Self::open_with_spill_files(dir, identity, key, options, destaged, &SpillFilesWanted::new())
    }

    /// Like [`Log::open`], with the spill files that the data tier's metadata names. Other spill
    /// files are removed: their contents are in the data tier or in the ring.
    ///
    /// # Errors
    /// Those of [`Log::open`]. A missing or damaged spill file is no error: it is listed in
    /// [`Recovery::missing_spill_files`].
    pub fn open_with_spill_files(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
        wanted: &SpillFilesWanted,
    ) -> Result<(Log, Recovery)> {
        let sources = LogSources { wanted: wanted.clone(), ..LogSources::default() };
        Self::open_from(dir, identity, key, options, destaged, &sources)
    }

    /// Like [`Log::open`], with everything about the log that is kept outside its directory.
    ///
    /// # Errors
    /// Those of [`Log::open`]; also `Corrupt` if the log does not end where its members have decided.
    pub fn open_from(
        dir: &Path,
        identity: LogIdentity,
        key: PoolKey,
        options: LogOptions,
        destaged: Lsn,
        sources: &LogSources,
    ) -> Result<(Log, Recovery)> {
        let seeded_bugs = seeded_bugs();
        let (clock, random) = (Arc::new(SystemClock), Arc::new(SystemRandom));
        LogOpening { dir, identity, key, options, destaged, sources, seeded_bugs, clock, random }
            .open()
    }
}

/// What is known of a log outside its directory.
#[derive(Clone, Debug, Default)]
pub struct LogSources {
    /// Spill files that the data tier's metadata names. Others are removed.
    pub wanted: SpillFilesWanted,
    /// Notes about a failure.
    pub notes: LogNotes,
    /// The end of the log, if its members have decided on it. Otherwise the directory alone tells.
    pub quorum: Option<QuorumTail>,
}

/// The arguments of an open.
pub(crate) struct LogOpening<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) identity: LogIdentity,
    pub(crate) key: PoolKey,
    pub(crate) options: LogOptions,
    pub(crate) destaged: Lsn,
    pub(crate) sources: &'a LogSources,
    pub(crate) seeded_bugs: SeededBugs,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Arc<dyn Random>,
}

/// The device of the log, and the records beside its ring.
pub(crate) struct LogDevice {
    pub(crate) disk: Box<dyn LogDisk>,
    pub(crate) keeper: Box<dyn StateKeeper>,
    pub(crate) spills: FoundSpills,
    /// The mounted file system that holds the log; `None` if it is not known.
    pub(crate) mount: Option<u64>,
}

impl LogOpening<'_> {
    /// Opens the log; see [`Log::open`].
    pub(super) fn open(self) -> Result<(Log, Recovery)> {
        let LogOpening { dir, identity, options, .. } = self;
        options.check()?;
        let disk = FileDisk::open(dir, options.io_mode, Arc::clone(&self.clock))?;
        let reader = SpillReader { pool: identity.pool, epoch: identity.epoch, key: &self.key };
        let spills = spill_dir::find(dir, &self.sources.wanted, &reader, &*self.clock)?;
        let LogNotes { beside, heard } = &self.sources.notes;
        let keeper = Box::new(StateFiles::new(dir, beside, heard));
        let mount = mounted(dir);
        self.open_on(LogDevice { disk: Box::new(disk), keeper, spills, mount })
    }

    /// Opens the log on its device.
    pub(crate) fn open_on(self, device: LogDevice) -> Result<(Log, Recovery)> {
        let LogDevice { mut disk, keeper, mut spills, mount } = device;
        let LogOpening { identity, options, destaged, .. } = self;
        let args = OpenArgs {
            identity,
            key: self.key.clone(),
            options,
            destaged,
            random: &*self.random,
            clock: &*self.clock,
            seeded_bugs: self.seeded_bugs,
            // Taken before recovery rewrites the tail of the log.
            written_at: disk.written_at(),
            made_count: disk.made_count(),
            keeper: &*keeper,
            mount,
            quorum: self.sources.quorum.as_ref(),
        };
        let mut opened = recovery::open(&mut *disk, &args)?;
        // An earlier program or a crash may have left ready files unrecorded; record them before
        // anything is written there.
        let is_ready = |state: &&FileState| **state == FileState::Ready;
        let ready = opened.files.iter().filter(is_ready).count();
        let ready = u32::try_from(ready).expect("file count");
        disk.note_made(ready)?;
        spills.clean();
        opened.overlay.set_spill_layers(std::mem::take(&mut spills.layers));
        opened.recovery.missing_spill_files = std::mem::take(&mut spills.missing);
        let recovery = opened.recovery.clone();
        warn_of_other_size(&opened.config, &options);
        let inner = self.start(opened, disk, ready, keeper)?;
        Ok((Log { inner }, recovery))
    }

    /// Starts the log that recovery has found. `ready_count` is the number of existing ring files.
    fn start(
        self,
        opened: Opened,
        mut disk: Box<dyn LogDisk>,
        ready_count: u32,
        keeper: Box<dyn StateKeeper>,
    ) -> Result<Arc<LogInner>> {
        let LogOpening { identity, options, destaged, seeded_bugs, .. } = self;
        let file_bytes = opened.config.file_bytes;
        let ring_bytes = file_bytes * u64::from(opened.config.file_count);
        // The head's, and one for openings.
        let has_spare =
            self.sources.quorum.is_some() && opened.config.file_count as usize >= SPARE_FILES_MIN;
        let spare_count = if has_spare { 2 } else { 1 };
        let shared = SharedRing::new(
            opened.overlay,
            opened.recovery.last_lsn,
            destaged,
            options.queue_bytes_max,
            opened.head.position,
        );
        shared.set_destaged(destaged, opened.released_position);
        let chain = ChainId { pool: identity.pool, chain: opened.config.chain };
        shared.counters.made_count.store(ready_count, Ordering::Relaxed);
        let replicas = self.sources.quorum.as_ref().map(|quorum| Arc::clone(&quorum.replicas));
        if let Some(replicas) = &replicas {
            let position = opened.opening.position();
            *shared.places.lock() = opened.places;
            replicas.append(position, opened.opening.bytes, true);
            replicas.on_own(position.sequence, position.sequence);
        }
        let start = CoreStart {
            config: opened.config,
            head: opened.head,
            live: opened.live,
            files: opened.files,
            is_settled: opened.recovery.is_tail_proven,
            replicas: replicas.clone(),
        };
        let mut core = Core::new(start, Arc::clone(&self.random), Arc::clone(&self.clock));
        core.prepare_files(&mut *disk);
        let gate = ThrottleGate::new(
            options.slow_from_percent,
            options.generation_bytes_max,
            Arc::clone(&self.clock),
            seeded_bugs.gate_by_waiter,
        );
        let inner = Arc::new(LogInner {
            shared,
            reader: disk.reader(),
            driven: StepLock::new(DrivenCore { core, disk }),
            gate,
            seeded_bugs,
            clock: self.clock,
            random: self.random,
            key: self.key,
            dir: self.dir.to_owned(),
            identity,
            options,
            usable_bytes: ring_bytes - spare_count * file_bytes,
            file_bytes,
            ring_bytes,
            payload_bytes_max: payload_bytes_max(file_bytes),
            replicas,
            chain,
            lease: tokio::sync::Notify::new(),
            thread: LogThread::default(),
            noted: Noted::new(keeper, opened.state),
        });
        start_thread(&inner)?;
        Ok(inner)
    }
}

fn warn_of_other_size(config: &RingConfig, options: &LogOptions) {
    let file_bytes = config.file_bytes;
    let ring_bytes = file_bytes * u64::from(config.file_count);
    if (file_bytes, ring_bytes) != (options.file_bytes, options.ring_bytes) {
        tracing::warn!(
            ring_bytes,
            file_bytes,
            asked_ring_bytes = options.ring_bytes,
            asked_file_bytes = options.file_bytes,
            "the write log keeps the size that it was made with"
        );
    }
}
