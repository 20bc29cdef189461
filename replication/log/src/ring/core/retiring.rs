//! The core's view of what has been reached: completions of the disk, batches that are written,
//! visible, answered and on stable storage.
//!
//! Invariants: those of [`super`].

use super::{Core, IN_FLIGHT_MAX, InFlight, extents_to_freeze, freeze, io_error};
use crate::overlay::Incoming;
use crate::overlay::log_resident::{BatchPlace, LogResident};
use crate::ring::layout::FileState;
use crate::ring::shared_ring::SharedRing;
use block::env::{Disk, DiskCompletion, IoBuffer};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Consecutive batches, each flushed before the next one came, after which a flush is expected and
/// the sync starts with the acknowledgement. Chosen by hand: a database that commits is recognised
/// at once, a burst with a flush at its end never is.
const FLUSHES_EXPECTED_MIN: u8 = 4;
/// Upper limit of the count of such batches. Chosen by hand: a few batches without a flush end the
/// expectation.
const FLUSHES_EXPECTED_MAX: u8 = 8;

impl Core {
    pub(super) fn reap(&mut self, disk: &mut dyn Disk, shared: &SharedRing) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        disk.reap(&mut completions);
        let is_any = !completions.is_empty();
        for completion in completions.drain(..) {
            self.on_completion(completion, shared);
        }
        self.completions = completions;
        if is_any {
            self.prepare_files(disk);
        }
        is_any
    }

    fn on_completion(&mut self, completion: DiskCompletion, shared: &SharedRing) {
        let DiskCompletion { token, result, buffer } = completion;
        if let Some(buffer) = buffer {
            self.keep(buffer);
        }
        if let Some(batch) = self.in_flight.iter_mut().find(|batch| batch.token == token) {
            match result {
                Ok(()) => batch.is_written = true,
                Err(e) => {
                    let at = (batch.slot, batch.offset);
                    let what = format!("write log batch at file {}, {}", at.0, at.1);
                    shared.fail_of_disk(io_error(&what, e));
                }
            }
        } else if self.syncing.as_ref().is_some_and(|syncing| syncing.token == token) {
            match result {
                Ok(()) => self.on_synced(shared),
                Err(e) => shared.fail_of_disk(io_error("sync the write log", e)),
            }
        } else if let Some(slot) =
            self.files.iter().position(|state| *state == FileState::Creating(token))
        {
            match result {
                Ok(()) => {
                    self.files[slot] = FileState::Ready;
                    self.is_refused = false;
                    *shared.counters.refusal.lock() = None;
                    shared.counters.made_count.fetch_add(1, Ordering::Relaxed);
                }
                // The log continues with the files that it has.
                Err(e) => {
                    self.files[slot] = FileState::Refused;
                    self.is_refused = true;
                    *shared.counters.refusal.lock() = Some(e.to_string());
                }
            }
        }
    }

    pub(super) fn on_synced(&mut self, shared: &SharedRing) {
        let syncing = self.syncing.take().expect("a sync was in flight");
        self.durable_sequence = self.durable_sequence.max(syncing.sequence);
        self.durable_lsn = self.durable_lsn.max(syncing.lsn);
        self.ticks_unsynced = 0;
        self.report_own();
        if self.advance_committed() {
            self.announce(shared);
        }
    }

    fn report_own(&self) {
        if let Some(replicas) = &self.replicas {
            replicas.on_own(self.written_sequence, self.durable_sequence);
        }
    }

    /// Commits the retired batches that are on stable storage of a quorum. Returns whether there were
    /// any.
    fn advance_committed(&mut self) -> bool {
        let committed = match &self.replicas {
            Some(_) if self.config.seeded_bugs.commit_by_own_sync => self.durable_sequence,
            Some(replicas) => replicas.committed(),
            None => self.durable_sequence,
        };
        let before = self.committed_sequence;
        while let Some((sequence, lsn)) =
            self.uncommitted.pop_front_if(|(sequence, _)| *sequence <= committed)
        {
            (self.committed_sequence, self.committed_lsn) = (sequence, lsn);
        }
        self.committed_sequence != before
    }

    fn announce(&self, shared: &SharedRing) {
        let is_announcement_durable = self
            .acks_before_sync_sequence
            .is_some_and(|sequence| sequence <= self.committed_sequence);
        let acked = if is_announcement_durable { self.retired_lsn } else { self.committed_lsn };
        shared.advance(acked, self.committed_lsn);
    }

    fn keep(&mut self, buffer: IoBuffer) {
        // An entry larger than a batch leaves a large buffer, which is not worth keeping.
        let is_usual = buffer.capacity() <= self.config.options.batch_bytes_max * 2 + (64 << 10);
        if is_usual && self.buffers.len() < IN_FLIGHT_MAX {
            self.buffers.push(buffer);
        }
    }

    /// Notes the batches that have been written to the own disk, up to the first one that has not.
    /// Returns whether there were any.
    pub(super) fn advance_written(&mut self) -> bool {
        let known =
            usize::try_from(self.written_sequence - self.retired_sequence).expect("in memory");
        let before = self.written_sequence;
        for batch in self.in_flight.iter().skip(known).take_while(|batch| batch.is_written) {
            self.written_sequence = batch.header.sequence;
            self.written_lsn = batch.header.last_lsn();
            self.written_position = batch.end_position;
            self.dirty.insert(batch.slot);
        }
        let is_any = self.written_sequence != before;
        if is_any {
            self.report_own();
        }
        is_any
    }

    /// Makes the oldest batches visible and answered, up to the first one that is not yet written
    /// here or by a quorum. Returns whether there were any, or anything was committed.
    pub(super) fn retire(&mut self, shared: &SharedRing) -> bool {
        if shared.is_failed() {
            return false; // completions reaped together with the failure are not answered
        }
        let acknowledged = match &self.replicas {
            Some(_) if self.config.seeded_bugs.ack_without_quorum => self.written_sequence,
            Some(replicas) => replicas.acknowledged().min(self.written_sequence),
            None => self.written_sequence,
        };
        let mut is_any = false;
        while let Some(batch) =
            self.in_flight.pop_front_if(|batch| batch.header.sequence <= acknowledged)
        {
            self.retire_one(batch, shared);
            is_any = true;
        }
        is_any |= self.advance_committed();
        if is_any {
            self.announce(shared);
        }
        is_any
    }

    fn retire_one(&mut self, batch: InFlight, shared: &SharedRing) {
        let InFlight { header, slot, offset, end_position, entries, rows, room, .. } = batch;
        self.expect_flush(shared);
        self.retired_sequence = header.sequence;
        self.retired_lsn = header.last_lsn();
        self.uncommitted.push_back((header.sequence, header.last_lsn()));
        shared.give_back(room);
        if entries.is_empty() {
            return;
        }
        let payload_at =
            offset + u64::try_from(header.payload_at().expect("encoded")).expect("u32");
        let place = Arc::new(BatchPlace {
            file: slot,
            payload_at,
            first_lsn: header.first_lsn,
            algorithm: header.algorithm,
            salt: header.salt,
        });
        let incoming = entries.into_iter().zip(rows).zip(0u32..).map(|((pending, row), index)| {
            let resident = LogResident::new(Arc::clone(&place), row, index);
            Incoming::new(pending.entry, resident)
        });
        let now = || self.clock.now();
        let inserted = shared.overlay.insert(header.first_lsn, incoming, end_position, now);
        if inserted.is_frozen {
            shared.notify_changed();
        }
        let options = &self.config.options;
        if inserted.log_bytes >= options.generation_bytes_max
            || inserted.extent_count >= extents_to_freeze(options)
        {
            freeze(shared);
        }
    }

    /// Returns whether the next acknowledged entries will probably be flushed at once.
    pub(crate) fn is_flush_expected(&self) -> bool {
        self.flushes_expected >= FLUSHES_EXPECTED_MIN
    }

    /// Updates the expectation by whether the entries before this batch were flushed.
    fn expect_flush(&mut self, shared: &SharedRing) {
        self.flushes_expected = if shared.flushed() >= self.retired_lsn {
            (self.flushes_expected + 1).min(FLUSHES_EXPECTED_MAX)
        } else {
            self.flushes_expected.saturating_sub(2)
        };
        shared.is_flush_expected.store(self.is_flush_expected(), Ordering::Relaxed);
    }

    pub(super) fn free_files(&mut self, shared: &SharedRing) -> bool {
        let destaged = shared.destaged();
        let before = self.live.len();
        while self.live.len() > 1 && self.live[0].last_lsn <= destaged {
            self.live.pop_front();
        }
        if self.replicas.is_some() && self.live.len() != before {
            shared.places.lock().release(destaged);
        }
        self.live.len() != before
    }
}
