//! One run: a machine with a log, a data tier, and a model of the contents that may be read.
//!
//! Invariants of the product that a run checks after each crash:
//! - Every entry answered as durable survives a power cut. Every entry answered as written survives
//!   a crash of the process, and also a power cut, a failed write or sync (after which the kernel
//!   drops the data that it could not write) and an unmount if recovery says that the tail is
//!   proven.
//! - Recovery reports no loss if nothing has happened that could cause one.
//! - The contents found are the history up to one LSN: complete up to it, with nothing after it and
//!   nothing invented.

use super::disk::{Faults, Platter, SimDisk};
use super::member::SimMember;
use super::{Rng, SimRandom, SimSpill};
use crate::format::entry::EntryKind;
use crate::format::state::LogState;
use crate::options::{LogIdentity, LogOptions, NewEntry, Wait};
use crate::overlay::extents::{Piece, Source};
use crate::overlay::log_resident::LogResident;
use crate::overlay::spill_layer::SpillLayer;
use crate::overlay::spill_resident::SpillFileId;
use crate::overlay::{Generation, LayersOf, SpillLayers};
use crate::replicas::{QuorumTail, Replicas};
use crate::ring::core::{self, Core, CoreStart};
use crate::ring::inspect;
use crate::ring::opening::OpenArgs;
use crate::ring::queue::Group;
use crate::ring::recovery;
use crate::ring::shared_ring::SharedRing;
use crate::ring::tail;
use crate::seeded_bugs::SeededBugs;
use crate::spill::{self, SpillReader, SpillSeed};
use block::env::{Disk, DiskReader, ManualClock, Random};
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use block::{Epoch, ErrorKind, Lsn, VolumeId};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

mod damage;
mod quorum;
mod spilling;

const VOLUMES: u64 = 3;
const SECTORS: u64 = 96;

/// (volume, sector) -> its contents: the tag of the write, or 0 for zeroes. Absent: never touched.
type Contents = BTreeMap<(u32, u64), u64>;

#[derive(Clone, Debug)]
struct Entry {
    volume: u32,
    kind: EntryKind,
    start: u64,
    count: u64,
    tag: u64,
}

impl Entry {
    fn apply(&self, contents: &mut Contents) {
        let value = match self.kind {
            EntryKind::Write => self.tag,
            EntryKind::Zero | EntryKind::Trim => 0,
            EntryKind::VolumeRecord | EntryKind::Marker | EntryKind::Snapshot => return,
        };
        contents.extend((self.start..self.start + self.count).map(|s| ((self.volume, s), value)));
    }
}

/// The differences between runs, besides the seed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) seeded_bugs: SeededBugs,
    pub(crate) faults: Faults,
    /// Number of crashes before the run ends.
    pub(crate) runs: u64,
    /// Another member has the log, too.
    pub(crate) has_member: bool,
}

impl Plan {
    fn has_faults(&self) -> bool {
        self.faults != Faults::default()
    }
}

/// A process that has the log open.
struct Process {
    disk: SimDisk,
    core: Core,
    shared: SharedRing,
    reader: Arc<dyn DiskReader>,
    state: LogState,
    member: Option<Arc<SimMember>>,
}

pub(crate) struct World {
    rng: Rng,
    plan: Plan,
    random: Arc<SimRandom>,
    clock: ManualClock,
    options: LogOptions,
    is_immediate: bool,
    platter: Arc<Mutex<Platter>>,
    identity: LogIdentity,
    /// The entry with LSN `n` is at index `n - 1`.
    history: Vec<Entry>,
    next_tag: u64,
    /// The data tier.
    tier: Contents,
    destaged: Lsn,
    /// The spill files that the data tier's metadata names, oldest first.
    named_spills: BTreeMap<u32, Vec<SpillFileId>>,
    /// All spill files in the directory, by name.
    spill_files: BTreeMap<String, SimSpill>,
    acked: Lsn,
    durable: Lsn,
    /// False after the owner was told that acknowledged entries may be lost, until it has dealt
    /// with that.
    is_settled: bool,
    /// Whether the state of the log is also kept on another file system.
    is_beside: bool,
    /// Whether an event has happened that may lose acknowledged entries.
    may_be_lost: bool,
    /// Whether a settled loss may be reported again, because no batch records yet that it is
    /// settled.
    may_be_repeated: bool,
    /// Whether the previous run has failed and recorded how far it had acknowledged.
    is_failure_noted: bool,
    pub(crate) stats: Stats,
}

/// Events of a run, so that a test can tell that it covered enough.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) crashes: u64,
    pub(crate) recovery_crashes: u64,
    pub(crate) cuts: u64,
    pub(crate) entries: u64,
    pub(crate) lost_unacked: u64,
    pub(crate) failures: u64,
    pub(crate) full: u64,
    pub(crate) unproven: u64,
    pub(crate) clean: u64,
    pub(crate) spilled: u64,
    pub(crate) caught_up: u64,
    /// Volumes compared with the contents of a snapshot.
    pub(crate) snapshots: u64,
    /// Checks of the log as a superseded one, and those that found all of it in the data tier.
    pub(crate) summaries: u64,
    pub(crate) in_store: u64,
    /// Batches after which a flush was expected.
    pub(crate) expected: u64,
    pub(crate) shutdowns: u64,
    pub(crate) remounts: u64,
    /// Times that the kernel dropped data that it could not write.
    pub(crate) drops: u64,
    /// Recorded failures after which every acknowledged entry was found.
    pub(crate) noted_whole: u64,
    /// Runs at whose end everything was answered.
    pub(crate) answered: u64,
}

const KEY: [u8; KEY_BYTES] = [5; KEY_BYTES];

impl World {
    pub(crate) fn new(seed: u64, plan: Plan) -> Self {
        let mut rng = Rng::new(seed);
        let options = LogOptions {
            ring_bytes: (2 + rng.below(3)) * (256 << 10),
            file_bytes: 256 << 10,
            batch_bytes_max: [4096, 16 << 10, 64 << 10][rng.index(3)],
            algorithm: [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm][rng.index(2)],
            generation_bytes_max: 64 << 10,
            payload_memory_bytes: [0, 8 << 10, 1 << 20][rng.index(3)],
            unsynced_bytes_max: [16 << 10, 256 << 10][rng.index(2)],
            ..LogOptions::default()
        };
        World {
            random: Arc::new(SimRandom::new(rng.next())),
            clock: ManualClock::new(),
            is_immediate: rng.chance(50),
            options,
            plan,
            platter: Arc::default(),
            identity: LogIdentity {
                pool: [1; 16],
                epoch: Epoch(1),
                boot_id: [0; 16],
                served_epoch: Epoch(0),
                configuration: 0,
            },
            history: Vec::new(),
            next_tag: 1,
            tier: Contents::new(),
            destaged: Lsn::NONE,
            named_spills: BTreeMap::new(),
            spill_files: BTreeMap::new(),
            acked: Lsn::NONE,
            durable: Lsn::NONE,
            is_settled: true,
            is_beside: rng.chance(50),
            may_be_lost: false,
            may_be_repeated: false,
            is_failure_noted: false,
            stats: Stats::default(),
            rng,
        }
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.plan.runs {
            let mut process = self.open_after_crashes()?;
            self.live(&mut process)?;
            self.crash(process)?;
        }
        let process = self.open_after_crashes()?;
        process.disk.kill();
        Ok(())
    }

    /// Lets the log idle for a while. Returns the number of ring files that exist then, and the
    /// number of a full ring.
    pub(crate) fn files_after_idleness(&mut self) -> (u64, u64) {
        let mut process = self.open_after_crashes().expect("an empty log opens");
        for _ in 0..200 {
            process.core.tick(&mut process.disk, &process.shared);
            while process.disk.run_one() {}
        }
        let made = process.reader.files().expect("simulated").len() as u64;
        (made, self.options.ring_bytes / self.options.file_bytes)
    }

    fn disk(&mut self) -> SimDisk {
        SimDisk::new(Arc::clone(&self.platter), self.rng.next(), self.is_immediate)
    }

    fn try_open(&mut self, disk: SimDisk) -> (Result<recovery::Opened, block::Error>, SimDisk) {
        self.try_open_with(disk, None)
    }

    fn try_open_with(
        &mut self,
        mut disk: SimDisk,
        quorum: Option<&QuorumTail>,
    ) -> (Result<recovery::Opened, block::Error>, SimDisk) {
        let keeper = disk.keeper(self.is_beside);
        let mount = Some(self.platter.lock().mount);
        // Each open has an epoch of its own, as ownership arranges it.
        self.identity.epoch.0 += 1;
        let args = OpenArgs {
            identity: self.identity,
            key: PoolKey::new(KEY),
            options: self.options,
            destaged: self.destaged,
            random: &*self.random,
            clock: &self.clock,
            seeded_bugs: self.plan.seeded_bugs,
            written_at: std::collections::HashMap::new(),
            made_count: self.platter.lock().made_count(),
            keeper: &keeper,
            mount,
            quorum,
        };
        (recovery::open(&mut disk, &args), disk)
    }

    /// Checks the question that precedes an open: whether another owner has superseded the log. None
    /// has, so the answer may be yes only for an owner later than all that wrote it, and entries
    /// that are not in the data tier must not be reported as stored.
    fn check_not_superseded(&mut self) -> Result<(), String> {
        let reader = self.disk().reader();
        let (pool, seeded_bugs) = (self.identity.pool, self.plan.seeded_bugs);
        let ask =
            |since| inspect::superseded(&*reader, pool, since, seeded_bugs).map_err(|e| e.chain());
        if let Some(summary) = ask(self.identity.served_epoch)? {
            return Err(format!("an own log counts as superseded: {summary:?}"));
        }
        let Some(summary) = ask(Epoch(self.identity.epoch.0 + 1))? else { return Ok(()) };
        let is_all_stored = self.destaged >= self.acked.max(self.durable);
        if summary.is_in_store && !is_all_stored {
            return Err(format!("what only the log holds is said to be in the store: {summary:?}"));
        }
        let least = self.durable.0.saturating_sub(self.destaged.0);
        if summary.contents.entry_count < least {
            return Err(format!(
                "it holds {least} entries that are flushed, and more: {summary:?}"
            ));
        }
        self.stats.summaries += 1;
        self.stats.in_store += u64::from(summary.is_in_store);
        Ok(())
    }

    /// Opens the log, with crashes on the way.
    fn open_after_crashes(&mut self) -> Result<Process, String> {
        while self.rng.chance(30) {
            let mut disk = self.disk();
            disk.stop_after(self.rng.below(8));
            disk.faults = self.plan.faults;
            let (opened, disk) = self.try_open(disk);
            // A sync that fails makes recovery report a loss, and does not stop it.
            self.may_be_lost |= disk.has_failed_sync;
            match &opened {
                Ok(_) => self.note_open(&opened)?,
                Err(_) => self.may_be_lost |= self.plan.faults.sync + self.plan.faults.write > 0,
            }
            self.stats.recovery_crashes += 1;
            self.may_be_lost |= disk.has_unheard_failure();
            disk.kill();
            self.pass_time()?;
        }
        self.check_not_superseded()?;
        let disk = self.disk();
        let (opened, mut disk) = self.try_open(disk);
        self.note_open(&opened)?;
        // The directory records the epoch before anything is served; the crashes above came before
        // that.
        self.identity.served_epoch = self.identity.epoch;
        let opened = opened.map_err(|e| e.chain())?;
        let last_lsn = opened.recovery.last_lsn;
        disk.faults = self.plan.faults;
        opened.overlay.set_spill_layers(self.open_spills()?);
        for lsn in self.snapshots(self.destaged) {
            opened.overlay.set_snapshots(lsn, (1..=VOLUMES as u32).map(VolumeId).collect());
        }
        let shared =
            SharedRing::new(opened.overlay, last_lsn, self.destaged, 1 << 20, opened.head.position);
        shared.set_destaged(self.destaged, opened.released_position);
        let state = opened.state;
        let has_member = self.plan.has_member;
        let member = has_member.then(|| SimMember::new(opened.head.sequence - 1, last_lsn));
        let member = member.map(Arc::new);
        let start = CoreStart {
            config: opened.config,
            head: opened.head,
            live: opened.live,
            files: opened.files,
            is_settled: opened.recovery.is_tail_proven,
            replicas: member.clone().map(|member| -> Arc<dyn Replicas> { member }),
        };
        let random = Arc::clone(&self.random);
        let mut core = Core::new(start, random, Arc::new(self.clock.clone()));
        core.prepare_files(&mut disk);
        let reader = disk.reader();
        let process = Process { disk, core, shared, reader, state, member };
        self.check_contents(&process, last_lsn)?;
        self.check_snapshots(&process, last_lsn)?;
        Ok(process)
    }

    /// Checks that recovery's findings fit the promises made.
    fn note_open(&mut self, opened: &Result<recovery::Opened, block::Error>) -> Result<(), String> {
        let recovery = match opened {
            Ok(opened) => &opened.recovery,
            Err(error) => return Err(format!("the log does not open: {}", error.chain())),
        };
        let found = recovery.last_lsn;
        if found < self.durable || found.0 > self.history.len() as u64 {
            return Err(format!(
                "recovered up to {found}; durable {}, queued {}",
                self.durable,
                self.history.len()
            ));
        }
        if recovery.is_tail_proven && found < self.acked {
            return Err(format!("recovered up to {found}, acked {}, and proven", self.acked));
        }
        if recovery.is_tail_proven && !self.is_settled {
            return Err("what was lost is no longer said".into());
        }
        if !recovery.is_tail_proven && self.is_settled && !self.may_be_repeated {
            let reason = recovery.lost_reason.as_deref().unwrap_or_default();
            if !self.may_be_lost {
                return Err(format!("a loss is reported without a cause: {reason}"));
            }
            if self.is_failure_noted && found >= self.acked {
                return Err(format!("all is there, and a loss is reported: {reason}"));
            }
        }
        self.stats.noted_whole += u64::from(self.is_failure_noted && recovery.is_tail_proven);
        (self.may_be_lost, self.may_be_repeated, self.is_failure_noted) = (false, false, false);
        self.stats.unproven += u64::from(!recovery.is_tail_proven);
        self.stats.clean += u64::from(recovery.was_clean);
        self.stats.lost_unacked += self.history.len() as u64 - found.0;
        self.is_settled = recovery.is_tail_proven;
        self.history.truncate(found.0 as usize);
        // Recovery has made it durable.
        self.acked = found;
        self.durable = found;
        Ok(())
    }

    fn live(&mut self, process: &mut Process) -> Result<(), String> {
        let steps = self.rng.below(120);
        let is_shutting = self.rng.chance(self.plan.faults.shutdown);
        for step in 0..steps {
            if is_shutting && step == steps / 2 {
                self.platter.lock().is_shut = true;
                self.stats.shutdowns += 1;
            }
            self.one_action(process)?;
            if process.shared.is_failed() || process.core.is_closed() {
                self.stats.failures += u64::from(process.shared.is_failed());
                self.note_failure(process);
                break;
            }
        }
        self.check_all_is_answered(process)
    }

    /// Checks that everything in a batch is answered once the other member has caught up.
    fn check_all_is_answered(&mut self, process: &mut Process) -> Result<(), String> {
        let Process { disk, core, shared, member: Some(member), .. } = process else {
            return Ok(());
        };
        if self.plan.has_faults() || shared.is_failed() || core.is_closed() || self.rng.chance(70) {
            return Ok(());
        }
        for _ in 0..60 {
            member.catch_up();
            core.step(disk, shared);
            while disk.run_one() {}
        }
        let wanted = shared.sync_wanted().min(shared.taken());
        if !shared.is_failed() && (shared.acked() < shared.taken() || shared.durable() < wanted) {
            return Err(format!(
                "acked {} of {}, durable {} of {wanted}, and the member has all",
                shared.acked(),
                shared.taken(),
                shared.durable()
            ));
        }
        self.stats.answered += 1;
        self.observe(process)
    }

    /// Records a failure like the log thread.
    fn note_failure(&mut self, process: &Process) {
        let Some(acked) = process.shared.disk_failed_at() else { return };
        self.may_be_lost = true;
        let keeper = process.disk.keeper(self.is_beside);
        let is_excluded = self.plan.seeded_bugs.failure_not_noted;
        let noted = tail::note_failure_of(&process.state, acked, &keeper, is_excluded);
        self.is_failure_noted = noted.is_ok() && !is_excluded;
    }

    fn one_action(&mut self, process: &mut Process) -> Result<(), String> {
        let Process { disk, core, shared, member, .. } = process;
        if let Some(member) = member
            && self.rng.chance(25)
        {
            member.step(&mut self.rng);
        }
        match self.rng.below(100) {
            0..40 => self.append(shared),
            40..45 => shared.want_sync(shared.begin_flush()),
            45..46 => self.commit_in_turn(process)?,
            46..70 => {
                disk.run_one();
            }
            70..73 => core.tick(disk, shared),
            73..76 => {
                core::freeze(shared);
            }
            76..81 => self.destage(process)?,
            81..82 => self.catch_up(process)?,
            82..83 if self.rng.chance(20) => {
                shared.queue.lock().is_closed = true;
                core.close();
            }
            82..83 => self.write_back(),
            83..86 if !self.is_settled => {
                // The owner has durably recorded that clients must attach again.
                core.settle();
                self.is_settled = true;
                self.may_be_repeated = true;
            }
            _ => core.step(disk, shared),
        }
        self.observe(process)
    }

    /// Acts as a database that commits: each write is answered and flushed before the next one
    /// comes.
    fn commit_in_turn(&mut self, process: &mut Process) -> Result<(), String> {
        for _ in 0..self.rng.below(12) {
            self.append(&process.shared);
            for is_flush in [false, true] {
                if is_flush {
                    process.shared.want_sync(process.shared.begin_flush());
                }
                for _ in 0..6 {
                    process.core.step(&mut process.disk, &process.shared);
                    process.disk.run_one();
                    if let Some(member) = &process.member {
                        member.step(&mut self.rng);
                    }
                }
                self.observe(process)?;
            }
            self.stats.expected += u64::from(process.core.is_flush_expected());
        }
        Ok(())
    }

    fn observe(&mut self, process: &Process) -> Result<(), String> {
        self.acked = self.acked.max(process.shared.acked());
        self.durable = self.durable.max(process.shared.durable());
        let is_full = &process.shared.counters.is_full;
        self.stats.full += u64::from(is_full.load(std::sync::atomic::Ordering::Relaxed));
        let shared = &process.shared;
        process.member.as_ref().map_or(Ok(()), |one| one.check(shared.acked(), shared.durable()))
    }

    fn append(&mut self, shared: &SharedRing) {
        for _ in 0..1 + self.rng.below(3) {
            let kind = match self.rng.below(10) {
                0 => EntryKind::Trim,
                1 => EntryKind::Zero,
                2 => EntryKind::VolumeRecord,
                3 if self.rng.chance(50) => EntryKind::Marker,
                3 => EntryKind::Snapshot,
                _ => EntryKind::Write,
            };
            let start = self.rng.below(SECTORS);
            let longest = if self.rng.chance(10) { SECTORS } else { 9 };
            let count = (1 + self.rng.below(longest)).min(SECTORS - start);
            let volume = match kind {
                EntryKind::Snapshot => 0,
                _ => 1 + self.rng.below(VOLUMES) as u32,
            };
            let tag = self.next_tag;
            self.next_tag += 1;
            let entry = Entry { volume, kind, start, count, tag };
            let wait = if self.rng.chance(30) { Wait::Durable } else { Wait::Written };
            let new = new_entry(&entry);
            if shared.push(Group::one(new, wait, 0)).is_ok() {
                self.history.push(entry);
                self.stats.entries += 1;
            }
        }
    }

    /// Moves the oldest frozen generation into the tier.
    fn destage(&mut self, process: &mut Process) -> Result<(), String> {
        let Some(generation) = process.shared.overlay.next_frozen() else { return Ok(()) };
        if generation.first_lsn() != self.destaged.next() {
            return Err(format!("generation begins at {}", generation.first_lsn()));
        }
        if process.shared.durable() < generation.last_lsn() {
            // The tier is never ahead of stable storage.
            process.shared.want_sync(generation.last_lsn());
            return Ok(());
        }
        self.check_snapshots(process, generation.last_lsn())?;
        let layers = self.spill_some(process, &generation)?;
        if self.rng.chance(5) {
            // Leaves spill files that the metadata never names.
            process.shared.fail(block::Error::new(ErrorKind::Io, "crashes before the commit"));
            return Ok(());
        }
        for (volume, extents) in generation.volumes() {
            if layers.iter().any(|(id, _)| *id == volume) {
                continue;
            }
            for piece in extents {
                let tags = tags_of(&*process.reader, &piece.source, piece.sector_count)?;
                for (sector, tag) in (piece.start_sector..).zip(tags) {
                    self.tier.insert((volume.0, sector), tag);
                }
            }
        }
        self.destaged = generation.last_lsn();
        for (volume, layers) in &layers {
            self.named_spills.insert(volume.0, layers.iter().map(|layer| layer.id()).collect());
        }
        self.check_tier()?;
        // The process may die here, with the tier ahead of the LSN that the log knows.
        if self.rng.chance(80) {
            process.shared.overlay.release(&generation, layers);
            process.shared.set_destaged(generation.last_lsn(), generation.end_position);
        } else {
            process.shared.fail(block::Error::new(ErrorKind::Io, "crashes after the commit"));
        }
        Ok(())
    }

    /// Checks that the tier holds the history up to the destaged LSN, and for a volume that is
    /// stalled, up to the beginning of its first spill file.
    fn check_tier(&self) -> Result<(), String> {
        let mut expected = self.contents_at(self.destaged);
        for (&volume, files) in &self.named_spills {
            let before = self.contents_at(Lsn(files[0].first_lsn.0 - 1));
            expected.retain(|(of, _), _| *of != volume);
            expected.extend(before.range((volume, 0)..(volume, u64::MAX)));
        }
        let is_same = self.tier == expected;
        let why = || format!("the tier is not the history up to {}", self.destaged);
        is_same.then_some(()).ok_or_else(why)
    }

    fn contents_at(&self, lsn: Lsn) -> Contents {
        let mut contents = Contents::new();
        for entry in &self.history[..lsn.0 as usize] {
            entry.apply(&mut contents);
        }
        contents
    }

    /// Returns the snapshots in the history up to `lsn`.
    fn snapshots(&self, lsn: Lsn) -> Vec<Lsn> {
        let entries = self.history[..lsn.0 as usize].iter().zip(1..);
        let is_one = |(entry, _): &(&Entry, u64)| entry.kind == EntryKind::Snapshot;
        entries.filter(is_one).map(|(_, lsn)| Lsn(lsn)).collect()
    }

    /// Checks the snapshots that the tier has not passed yet: the overlay over the tier must show
    /// the contents at the snapshot.
    fn check_snapshots(&mut self, process: &Process, lsn: Lsn) -> Result<(), String> {
        let overlay = &process.shared.overlay;
        for at in self.snapshots(lsn) {
            let expected = self.contents_at(at);
            for volume in 1..=VOLUMES as u32 {
                let tier_has = match self.named_spills.get(&volume) {
                    Some(files) => Lsn(files[0].first_lsn.0 - 1),
                    None => self.destaged,
                };
                if at < tier_has {
                    continue;
                }
                let pieces = overlay.lookup_at(VolumeId(volume), at, 0, SECTORS);
                let found = self.read(process, volume, pieces)?;
                let of_it = expected.range((volume, 0)..(volume, u64::MAX));
                if !found.iter().eq(of_it) {
                    return Err(format!("the snapshot at {at} of volume {volume} differs"));
                }
                self.stats.snapshots += 1;
            }
        }
        Ok(())
    }

    /// Returns the contents that pieces of a volume show, over the tier.
    fn read(&self, process: &Process, volume: u32, pieces: Vec<Piece>) -> Result<Contents, String> {
        let mut found = Contents::new();
        for piece in pieces {
            let sectors = piece.start_sector..piece.start_sector + piece.sector_count;
            if matches!(piece.source, Source::Beneath) {
                let beneath = self.tier.range((volume, sectors.start)..(volume, sectors.end));
                found.extend(beneath.map(|(sector, tag)| (*sector, *tag)));
                continue;
            }
            let tags = tags_of(&*process.reader, &piece.source, piece.sector_count)?;
            found.extend(sectors.map(|s| (volume, s)).zip(tags));
        }
        Ok(found)
    }

    /// Checks that the overlay over the tier reads as the history up to `lsn`.
    fn check_contents(&self, process: &Process, lsn: Lsn) -> Result<(), String> {
        let expected = self.contents_at(lsn);
        let mut found = Contents::new();
        for volume in 1..=VOLUMES as u32 {
            let pieces = process.shared.overlay.lookup(VolumeId(volume), 0, SECTORS);
            found.extend(self.read(process, volume, pieces)?);
        }
        if found == expected { Ok(()) } else { Err(format!("contents differ at {lsn}")) }
    }

    fn crash(&mut self, process: Process) -> Result<(), String> {
        self.stats.crashes += 1;
        self.may_be_lost |= process.disk.has_unheard_failure();
        process.disk.kill();
        self.pass_time()?;
        Ok(())
    }

    /// Lets the kernel write back some pages, or fail to.
    fn write_back(&mut self) {
        let fails_percent = self.plan.faults.write_back;
        self.platter.lock().write_back(&mut self.rng, fails_percent);
        self.may_be_lost |= fails_percent > 0;
    }

    /// Simulates the time between two processes.
    fn pass_time(&mut self) -> Result<(), String> {
        if self.rng.chance(30) {
            self.write_back();
        }
        if self.rng.chance(50) {
            self.stats.drops += u64::from(self.platter.lock().drop_clean(&mut self.rng));
        }
        if self.rng.chance(50) {
            self.stats.cuts += 1;
            self.may_be_lost = true;
            self.platter.lock().cut_power(&mut self.rng);
            let boot = self.rng.next().to_le_bytes();
            self.identity.boot_id[..8].copy_from_slice(&boot);
        }
        let is_shut = self.platter.lock().is_shut;
        if is_shut && self.rng.chance(50) {
            let disk = self.disk();
            let (opened, disk) = self.try_open(disk);
            disk.kill();
            if opened.is_ok() {
                return Err("a log opens that nothing can be written to".into());
            }
        }
        if is_shut || self.rng.chance(self.plan.faults.remount) {
            self.stats.remounts += 1;
            self.may_be_lost = true;
            self.platter.lock().remount();
        }
        Ok(())
    }
}

fn new_entry(entry: &Entry) -> NewEntry {
    let payload = match entry.kind {
        EntryKind::Write => {
            let sector: Vec<u8> = entry.tag.to_le_bytes().repeat(64);
            Bytes::from(sector.repeat(entry.count as usize))
        }
        EntryKind::VolumeRecord | EntryKind::Snapshot => {
            Bytes::copy_from_slice(&entry.tag.to_le_bytes())
        }
        EntryKind::Zero | EntryKind::Trim | EntryKind::Marker => Bytes::new(),
    };
    let has_range = matches!(entry.kind, EntryKind::Write | EntryKind::Zero | EntryKind::Trim);
    NewEntry {
        volume: VolumeId(entry.volume),
        kind: entry.kind,
        start_sector: if has_range { entry.start } else { 0 },
        sector_count: if has_range { entry.count } else { 0 },
        payload,
    }
}

/// Returns the tag of each sector; a sector that does not repeat one tag is an error.
fn tags_of(reader: &dyn DiskReader, source: &Source, count: u64) -> Result<Vec<u64>, String> {
    let bytes = match source {
        Source::Payload(bytes) => bytes.clone(),
        Source::LogResident(resident) => read_resident(reader, resident)?,
        Source::Zeroes { .. } => return Ok(vec![0; count as usize]),
        Source::SpillResident(resident) => resident.read().map_err(|e| e.chain())?,
        Source::Lost { .. } | Source::Beneath => return Err(format!("nothing but {source:?}")),
    };
    if bytes.len() as u64 != count * 512 {
        return Err(format!("{} bytes for {count} sectors", bytes.len()));
    }
    let tags = bytes.chunks(512).map(|sector| {
        let tag = &sector[..8];
        let is_complete = sector.chunks(8).all(|part| part == tag);
        is_complete.then(|| u64::from_le_bytes(tag.try_into().expect("8 bytes")))
    });
    tags.collect::<Option<Vec<u64>>>().ok_or_else(|| "a torn or invented sector".into())
}

fn read_resident(reader: &dyn DiskReader, resident: &LogResident) -> Result<Bytes, String> {
    resident.read(reader, &PoolKey::new(KEY)).map_err(|e| e.chain())
}
