//! The log's state machine: takes entries from the queue, builds batches, places them in the ring,
//! and turns the disk's completions into acknowledgements. It has no thread, never waits, and reads
//! time only from the clock that it was given.
//!
//! Invariants:
//! - Batches are retired in order: no entry is visible or acknowledged before every earlier batch
//!   has been written whole, here and by a quorum of the members if there are any.
//! - Only one sync runs at a time. It covers exactly the batches that were written when it was
//!   requested.
//! - An entry counts as durable once it is visible, and on stable storage of a quorum.
//! - Batches gather while the own disk is busy, not while the members are: the round trip to them
//!   does not limit how many batches are under way. The queue's room does.
//! - A file is written over only after all its entries are destaged.
//! - Before acknowledgements may run ahead of stable storage, a batch that announces it
//!   (`acks_before_sync`) is on stable storage. So a log whose last batch lacks this mark ends where
//!   its acknowledgements did.
//! - After the first failed request nothing more is submitted.

mod files;
mod retiring;

use crate::format::batch::{self, BatchHeader, Predecessor};
use crate::format::entry::EntryRow;
use crate::options::{LogOptions, RESERVE_BYTES, Wait, batch_bytes, payload_bytes_max};
use crate::overlay::Generation;
use crate::replicas::Replicas;
use crate::ring::layout::{FileState, Head, LiveFile, RingConfig};
use crate::ring::queue::{BatchSize, Pending};
use crate::ring::shared_ring::SharedRing;
use crate::ring::walk::At;
use block::env::{Clock, Disk, DiskCompletion, DiskRequest, IoBuffer, Random};
use block::seal::SALT_BYTES;
use block::{Error, Lsn, Position};
use bytes::Bytes;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of batches on their way to the own disk, for disks that do not complete writes inside the call
/// (direct I/O). Chosen by hand. Buffered writes complete inside the call and are never in flight.
const IN_FLIGHT_MAX: usize = 4;
/// Ring files made ahead of need. Chosen by hand: at 1 GB/s a file lasts 64 ms.
const FILES_AHEAD: u32 = 2;
/// Ticks without a batch after which the next ring file is made before a write needs it. Chosen by
/// hand: a second, so that the whole ring exists within a minute of idleness.
const TICKS_TO_MAKE: u32 = 5;
/// Maximum rounds of one step. Chosen by hand: a task that steps for others does not do so for
/// long.
const ROUNDS_MAX: u32 = 8;
/// Rounds after which a requested sync starts although there is more to write.
const ROUNDS_TO_SYNC: u32 = 4;
/// Ticks without a batch after which the log goes quiet. Chosen by hand: about five seconds, so
/// that only a writer that was idle for that long waits for a sync when it returns.
const TICKS_QUIET: u32 = 25;
/// Ticks after which written batches are synced unasked although more keep coming.
const TICKS_UNSYNCED_MAX: u32 = 5;

/// Largest batch, in bytes, whose write-back to the device may begin before its acknowledgement.
/// Chosen by hand: handing over more takes longer than it saves.
const SYNC_NEXT_BYTES_MAX: u64 = 64 << 10;

/// Whether a batch can be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Yes,
    /// A file is being made.
    Soon,
    /// Entries must be destaged first.
    Full,
}

struct InFlight {
    token: u64,
    is_written: bool,
    header: BatchHeader,
    slot: u32,
    offset: u64,
    end_position: u64,
    entries: Vec<Pending>,
    rows: Vec<EntryRow>,
    /// Room in the queue that its entries keep, in bytes.
    room: u64,
}

/// A batch that is ready to be written.
struct Encoded {
    header: BatchHeader,
    buffer: IoBuffer,
}

struct Syncing {
    token: u64,
    sequence: u64,
    lsn: Lsn,
}

/// The place at which a core continues.
pub(crate) struct CoreStart {
    pub(crate) config: RingConfig,
    /// Everything before it is on stable storage.
    pub(crate) head: Head,
    pub(crate) live: VecDeque<LiveFile>,
    pub(crate) files: Vec<FileState>,
    /// Whether a possible loss of an earlier run has been dealt with.
    pub(crate) is_settled: bool,
    /// The other members of the log, which have been given every batch up to the head.
    pub(crate) replicas: Option<Arc<dyn Replicas>>,
}

/// The state machine. One caller at a time steps it.
pub(crate) struct Core {
    config: RingConfig,
    random: Arc<dyn Random>,
    clock: Arc<dyn Clock>,
    head: Head,
    live: VecDeque<LiveFile>,
    files: Vec<FileState>,
    replicas: Option<Arc<dyn Replicas>>,
    /// Batches that are not retired.
    in_flight: VecDeque<InFlight>,
    /// Files with written batches that no sync covers yet.
    dirty: BTreeSet<u32>,
    syncing: Option<Syncing>,
    /// Every batch up to it has been written to the own disk.
    written_sequence: u64,
    written_lsn: Lsn,
    written_position: u64,
    retired_sequence: u64,
    retired_lsn: Lsn,
    /// Every batch up to it is on stable storage of the own disk.
    durable_sequence: u64,
    durable_lsn: Lsn,
    /// Every batch up to it is retired, and on stable storage of a quorum.
    committed_sequence: u64,
    committed_lsn: Lsn,
    /// Sequence and last LSN of the retired batches after it.
    uncommitted: VecDeque<(u64, Lsn)>,
    /// The log syncs until this batch is durable, even if no caller asks.
    sync_sequence_wanted: u64,
    sync_position: u64,
    /// Rises by one with each batch that was flushed at once, falls by two with each other one.
    flushes_expected: u8,
    /// The batch that announced acknowledgements ahead of stable storage.
    acks_before_sync_sequence: Option<u64>,
    /// The durable LSN in the newest batch.
    announced_durable_lsn: Lsn,
    /// Whether a possible loss of an earlier run has been dealt with.
    is_settled: bool,
    is_closing: bool,
    is_clean_written: bool,
    tick_sequence: u64,
    ticks_unsynced: u32,
    ticks_idle: u32,
    /// Whether the last file that was requested could not be made.
    is_refused: bool,
    next_token: u64,
    completions: Vec<DiskCompletion>,
    buffers: Vec<IoBuffer>,
}

impl Core {
    /// Makes a core that continues at `start`.
    pub(crate) fn new(start: CoreStart, random: Arc<dyn Random>, clock: Arc<dyn Clock>) -> Self {
        let CoreStart { mut config, head, live, files, is_settled, replicas } = start;
        let batch_bytes_max = &mut config.options.batch_bytes_max;
        *batch_bytes_max = (*batch_bytes_max).min(payload_bytes_max(config.file_bytes));
        assert_eq!(live.back().map(|file| file.slot), Some(head.slot));
        let retired_sequence = head.sequence - 1;
        let retired_lsn = Lsn(head.next_lsn.0 - 1);
        Core {
            config,
            random,
            clock,
            head,
            live,
            files,
            replicas,
            in_flight: VecDeque::new(),
            dirty: BTreeSet::new(),
            syncing: None,
            written_sequence: retired_sequence,
            written_lsn: retired_lsn,
            written_position: head.position,
            retired_sequence,
            retired_lsn,
            durable_sequence: retired_sequence,
            durable_lsn: retired_lsn,
            committed_sequence: retired_sequence,
            committed_lsn: retired_lsn,
            uncommitted: VecDeque::new(),
            sync_sequence_wanted: 0,
            sync_position: head.position,
            flushes_expected: 0,
            acks_before_sync_sequence: None,
            announced_durable_lsn: retired_lsn,
            is_settled,
            is_closing: false,
            is_clean_written: false,
            tick_sequence: retired_sequence,
            ticks_unsynced: 0,
            ticks_idle: 0,
            is_refused: false,
            next_token: 1 << 32,
            completions: Vec::new(),
            buffers: Vec::new(),
        }
    }

    /// Does all the work that is possible without waiting. If others keep adding work, it ends
    /// after a few rounds with [`SharedRing::dirty`] set: the caller must step again or wake another
    /// thread to do so.
    pub(crate) fn step(&mut self, disk: &mut dyn Disk, shared: &SharedRing) {
        for round in 1.. {
            if shared.is_failed() {
                return;
            }
            let is_reaped = self.reap(disk, shared);
            let is_written = self.advance_written();
            let is_retired = self.retire(shared);
            let is_released = self.free_files(shared);
            let is_submitted = self.submit_batches(disk, shared);
            let is_closed = self.go_on_closing(disk, shared);
            let is_any =
                is_reaped || is_written || is_retired || is_released || is_submitted || is_closed;
            // The sync comes late, so that it covers all earlier writes; but a stream of writers
            // must not keep the flushers waiting.
            let is_sync_due = !is_any || round % ROUNDS_TO_SYNC == 0;
            let is_synced = is_sync_due && self.start_sync(disk, shared);
            if !is_any && !is_synced {
                return;
            }
            if round == ROUNDS_MAX {
                shared.dirty.set();
                return;
            }
        }
    }

    /// Called a few times a second. Syncs batches that no caller asked to sync and, once the log is
    /// idle, writes a batch without entries that records how far the log is durable.
    pub(crate) fn tick(&mut self, disk: &mut dyn Disk, shared: &SharedRing) {
        self.step(disk, shared);
        if shared.is_failed() || self.is_closing {
            return;
        }
        for state in &mut self.files {
            if *state == FileState::Refused {
                *state = FileState::Absent;
            }
        }
        self.prepare_files(disk);
        let is_idle = self.head.sequence - 1 == self.tick_sequence && self.in_flight.is_empty();
        self.tick_sequence = self.head.sequence - 1;
        self.ticks_unsynced += 1;
        self.ticks_idle = if is_idle { self.ticks_idle.saturating_add(1) } else { 0 };
        // After a refusal no file is made ahead: the remaining space is for others until a write
        // needs it.
        if is_idle && self.ticks_idle.is_multiple_of(TICKS_TO_MAKE) && !self.is_refused {
            self.make_next_file(disk);
        }
        let is_quieting = self.acks_before_sync() && self.ticks_idle >= TICKS_QUIET;
        if self.written_sequence > self.durable_sequence {
            if is_idle || self.ticks_unsynced >= TICKS_UNSYNCED_MAX {
                self.sync_sequence_wanted = self.written_sequence;
            }
        } else if is_idle && (self.announced_durable_lsn < self.durable_lsn || is_quieting) {
            if is_quieting {
                self.acks_before_sync_sequence = None;
            }
            self.write_marker(disk, shared, false);
            self.tick_sequence = self.head.sequence - 1;
        }
        self.step(disk, shared);
    }

    /// Starts an orderly close; it is done once [`Core::is_closed`]. Nothing may be queued
    /// later.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    /// Confirms that a possible loss of acknowledged entries has been recorded durably: later
    /// batches no longer report it.
    pub(crate) fn settle(&mut self) {
        self.is_settled = true;
    }

    /// Returns whether everything is durable, including the clean mark if there was room for it.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closing
            && self.is_clean_written
            && self.in_flight.is_empty()
            && self.durable_sequence == self.head.sequence - 1
            && self.committed_sequence == self.head.sequence - 1
    }

    /// Returns whether a close waits for nothing but the other members.
    pub(crate) fn awaits_members(&self) -> bool {
        self.replicas.is_some() && self.unwritten() == 0 && self.syncing.is_none()
    }

    fn acks_before_sync(&self) -> bool {
        self.acks_before_sync_sequence.is_some()
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    // --- batches ---

    fn submit_batches(&mut self, disk: &mut dyn Disk, shared: &SharedRing) -> bool {
        let mut is_any = false;
        while self.unwritten() < IN_FLIGHT_MAX as u64 {
            let Some((entries, room)) = self.take_entries(disk, shared) else { break };
            self.submit_entries(entries, room, disk, shared);
            is_any = true;
        }
        is_any
    }

    /// Number of batches that are on their way to the own disk.
    fn unwritten(&self) -> u64 {
        self.head.sequence - 1 - self.written_sequence
    }

    /// Takes the entries of the next batch, if one is due and there is a place for it.
    fn take_entries(
        &mut self,
        disk: &mut dyn Disk,
        shared: &SharedRing,
    ) -> Option<(Vec<Pending>, u64)> {
        let mut queue = shared.queue.lock();
        let batch_bytes_max = self.config.options.batch_bytes_max;
        let BatchSize { count, bytes, sealed_bytes } = queue.next_batch(batch_bytes_max);
        if count == 0 {
            return None;
        }
        // The disk is busy: gather more, unless the gathered entries are worth a write of their
        // own.
        if self.unwritten() > 0 && bytes < batch_bytes_max / 2 {
            return None;
        }
        let extent_limit = self.config.options.entry_count_max;
        let room = if shared.overlay.extent_count() >= extent_limit {
            Room::Full
        } else {
            self.make_room(batch_bytes(count, sealed_bytes) as u64, RESERVE_BYTES, disk)
        };
        shared.counters.is_full.store(room == Room::Full, Ordering::Relaxed);
        if room != Room::Yes {
            drop(queue);
            if room == Room::Full {
                on_full(shared);
            }
            return None;
        }
        let entries: Vec<Pending> = queue.pending.drain(..count).collect();
        shared.set_taken(Lsn(queue.next_lsn.0 - 1 - queue.pending.len() as u64));
        let room = entries.iter().map(|p| u64::from(p.room)).sum();
        Some((entries, room))
    }

    fn submit_entries(
        &mut self,
        entries: Vec<Pending>,
        room: u64,
        disk: &mut dyn Disk,
        shared: &SharedRing,
    ) {
        if self.acks_before_sync_sequence.is_none()
            && entries.iter().any(|p| p.wait == Wait::Written)
        {
            self.acks_before_sync_sequence = Some(self.head.sequence);
            self.sync_sequence_wanted = self.head.sequence;
        }
        let mut rows: Vec<EntryRow> = entries.iter().map(|p| p.row).collect();
        let mut header = self.next_header(shared.destaged());
        let counters = &shared.counters;
        let buffer = self.encode(&mut header, &mut rows, &entries);
        counters.entry_count.fetch_add(u64::from(header.entry_count), Ordering::Relaxed);
        self.submit(Encoded { header, buffer }, rows, entries, room, disk, shared);
        self.count(&header, shared);
    }

    fn count(&self, header: &BatchHeader, shared: &SharedRing) {
        let counters = &shared.counters;
        counters.batch_count.fetch_add(1, Ordering::Relaxed);
        counters.batch_bytes.fetch_add(u64::from(header.batch_bytes), Ordering::Relaxed);
        shared.position.store(self.head.position, Ordering::Release);
    }

    fn next_header(&self, trim_lsn: Lsn) -> BatchHeader {
        let mut salt = [0; SALT_BYTES];
        self.random.fill(&mut salt);
        BatchHeader {
            algorithm: self.config.options.algorithm,
            is_opening: false,
            is_clean: false,
            acks_before_sync: self.acks_before_sync(),
            is_settled: self.is_settled,
            has_snapshots: false,
            pool: self.config.identity.pool,
            chain: self.config.chain,
            open: self.config.open,
            boot: self.config.identity.boot_id,
            epoch: self.config.identity.epoch,
            sequence: self.head.sequence,
            configuration: self.config.identity.configuration,
            first_lsn: self.head.next_lsn,
            durable_lsn: self.durable_lsn,
            commit_lsn: self.committed_lsn,
            trim_lsn,
            entry_count: 0,
            batch_bytes: 0,
            payload_bytes: 0,
            previous: self.head.previous,
            salt,
        }
    }

    /// Encodes a batch for the head. Advances the head's checksum chain but not its position.
    fn encode(
        &mut self,
        header: &mut BatchHeader,
        rows: &mut [EntryRow],
        entries: &[Pending],
    ) -> IoBuffer {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        let key = self.config.key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
        let payloads = entries.iter().map(|p| &p.entry.payload[..]);
        let checksum = batch::encode(header, rows, payloads, &key, &mut buffer)
            .expect("a batch is at most a file");
        self.head.previous = Predecessor::of(header, checksum);
        buffer
    }

    fn submit(
        &mut self,
        Encoded { header, buffer }: Encoded,
        rows: Vec<EntryRow>,
        entries: Vec<Pending>,
        room: u64,
        disk: &mut dyn Disk,
        shared: &SharedRing,
    ) {
        let (slot, offset, token) = (self.head.slot, self.head.offset, self.token());
        let bytes = u64::from(header.batch_bytes);
        self.head.offset += bytes;
        self.head.position += bytes;
        self.head.sequence += 1;
        self.head.next_lsn = header.next_lsn();
        self.announced_durable_lsn = header.durable_lsn;
        self.live.back_mut().expect("the head's file is live").last_lsn = header.last_lsn();
        let end_position = self.head.position;
        let is_written = self.config.seeded_bugs.ack_before_write;
        let is_awaited =
            self.is_flush_expected() || entries.iter().any(|p| p.wait == Wait::Durable);
        let is_sync_next = bytes <= SYNC_NEXT_BYTES_MAX && is_awaited;
        if let Some(replicas) = &self.replicas {
            let position = Position { epoch: header.epoch, sequence: header.sequence };
            shared.places.lock().push(At { slot, offset }, &header);
            replicas.append(position, Bytes::copy_from_slice(buffer.as_slice()), is_awaited);
        }
        self.in_flight.push_back(InFlight {
            token,
            is_written,
            header,
            slot,
            offset,
            end_position,
            entries,
            rows,
            room,
        });
        disk.submit(DiskRequest::Write { token, file: slot, offset, buffer, is_sync_next });
    }

    /// Writes a batch without entries. Returns false, without effect, if there is no room for one.
    fn write_marker(&mut self, disk: &mut dyn Disk, shared: &SharedRing, is_clean: bool) -> bool {
        // The last place in a file is for the opening batch that follows a close.
        let keep = if is_clean { batch_bytes(0, 0) as u64 } else { RESERVE_BYTES / 2 };
        if self.head.offset + batch_bytes(0, 0) as u64 + keep > self.config.file_bytes {
            return false;
        }
        let mut header = self.next_header(shared.destaged());
        header.is_clean = is_clean;
        let buffer = self.encode(&mut header, &mut [], &[]);
        self.sync_sequence_wanted = header.sequence;
        self.submit(Encoded { header, buffer }, Vec::new(), Vec::new(), 0, disk, shared);
        self.count(&header, shared);
        true
    }

    // --- stable storage ---

    fn start_sync(&mut self, disk: &mut dyn Disk, shared: &SharedRing) -> bool {
        let is_asked = shared.sync_wanted() > self.durable_lsn
            || self.sync_sequence_wanted > self.durable_sequence
            || self.is_flush_expected()
            || self.written_position - self.sync_position >= self.config.options.unsynced_bytes_max;
        if !is_asked || self.syncing.is_some() || self.written_sequence == self.durable_sequence {
            return false;
        }
        let token = self.token();
        self.syncing =
            Some(Syncing { token, sequence: self.written_sequence, lsn: self.written_lsn });
        self.sync_position = self.written_position;
        if let Some(replicas) = &self.replicas {
            replicas.want_sync(self.written_sequence);
        }
        shared.counters.sync_count.fetch_add(1, Ordering::Relaxed);
        let files = std::mem::take(&mut self.dirty).into_iter().collect();
        if self.config.seeded_bugs.flush_ignored {
            self.on_synced(shared);
        } else {
            disk.submit(DiskRequest::Sync { token, files });
        }
        true
    }

    fn go_on_closing(&mut self, disk: &mut dyn Disk, shared: &SharedRing) -> bool {
        if !self.is_closing || self.is_clean_written || !self.in_flight.is_empty() {
            return false;
        }
        // Entries that found no room before the end are not acknowledged, and their waiters learn
        // it.
        shared.queue.lock().clear();
        if self.retired_sequence > self.committed_sequence {
            let is_new = self.sync_sequence_wanted < self.retired_sequence;
            self.sync_sequence_wanted = self.retired_sequence;
            return is_new;
        }
        self.is_clean_written = true;
        self.write_marker(disk, shared, true)
    }
}

/// Number of extents at which a generation is frozen, however little of the log it has used.
pub(crate) fn extents_to_freeze(options: &LogOptions) -> u64 {
    options.entry_count_max / 4
}

/// Freezes the visible entries and notifies destage.
pub(crate) fn freeze(shared: &SharedRing) -> Option<Arc<Generation>> {
    let frozen = shared.overlay.freeze();
    if frozen.is_some() {
        shared.notify_changed();
    }
    frozen
}

/// Makes sure that there is something to destage: no batch can be placed until a generation is
/// released.
fn on_full(shared: &SharedRing) {
    if shared.overlay.next_frozen().is_none() {
        freeze(shared);
    }
}

fn io_error(what: &str, error: io::Error) -> Error {
    crate::disk::failure::error_of(what.to_owned(), error)
}
