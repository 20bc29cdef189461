//! Recovery's evaluation of a walk through the ring: builds the overlay and decides whether the log
//! is whole.
//!
//! Invariants:
//! - A bad batch ends the log only if nothing shows that it was on stable storage; otherwise the
//!   log is refused. The LSN that the data tier holds and the epoch that the directory has served
//!   count as such evidence.
//! - A refusal states the contents of the log: it may be the only copy.
//! - Nothing is written.

use crate::format::FormatError;
use crate::format::batch::{self, BatchHeader};
use crate::format::entry::{EntryKind, EntryRow};
use crate::overlay::log_resident::{BatchPlace, LogResident};
use crate::overlay::{Incoming, Overlay};
use crate::replicas::QuorumTail;
use crate::ring::batch_places::BatchPlaces;
use crate::ring::opening::OpenArgs;
use crate::ring::reads::Reads;
use crate::ring::walk::{At, Ring, Taken, Walk};
use block::seal::SealKey;
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

pub(crate) struct Scan<'a> {
    pub(crate) args: &'a OpenArgs<'a>,
    pub(crate) walk: Walk<'a>,
    pub(crate) overlay: Overlay,
    pub(crate) next_lsn: Lsn,
    pub(crate) released_position: Option<u64>,
    pub(crate) entry_count: u64,
    /// Batches that may not be on stable storage, in order.
    pub(crate) unproven: VecDeque<Taken>,
    /// All batches taken.
    pub(crate) places: BatchPlaces,
}

impl<'a> Scan<'a> {
    pub(crate) fn new(reads: &'a Reads<'a>, args: &'a OpenArgs<'a>, ring: Ring) -> Self {
        Scan {
            args,
            walk: Walk::new(reads, args.identity.pool, ring, args.destaged, args.seeded_bugs),
            overlay: Overlay::new(
                args.destaged,
                args.options.payload_memory_bytes,
                args.seeded_bugs,
            ),
            next_lsn: args.destaged.next(),
            released_position: None,
            entry_count: 0,
            unproven: VecDeque::new(),
            places: BatchPlaces::default(),
        }
    }

    pub(crate) fn run(&mut self) -> Result<()> {
        let starts = match self.walk.starts(self.args.destaged.next())? {
            Ok(starts) => starts,
            Err(oldest) => {
                self.walk.search_rest()?;
                return Err(self.begins_later(&oldest));
            }
        };
        for start in starts {
            self.walk.begin(start);
            while self.walk.advance()? {
                self.take()?;
            }
            if self.walk.newest.is_some() {
                break;
            }
        }
        self.walk.search_rest()?;
        self.check_end()
    }

    /// Processes the batch that the walk has taken.
    fn take(&mut self) -> Result<()> {
        let taken = self.walk.newest.expect("the walk has taken one");
        let header = taken.header;
        if header.epoch > self.args.identity.epoch {
            return Err(self.superseded(header.epoch, taken.at));
        }
        if header.trim_lsn > self.args.destaged {
            return Err(self.rolled_back(header.trim_lsn));
        }
        let key = self.args.key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
        match batch::authenticate(self.walk.newest_bytes(), &key) {
            Err(_) if self.args.seeded_bugs.tag_ignored => {}
            outcome => {
                outcome.map_err(|e| self.walk.bad(ErrorKind::Corrupt, taken.at, e))?;
            }
        }
        if header.last_lsn() > self.args.destaged && header.entry_count > 0 {
            if self.released_position.is_none() {
                self.released_position = Some(taken.begin_position());
                self.overlay.start_at(taken.begin_position());
            }
            self.take_entries(&taken, &key)?;
        }
        self.places.push(taken.at, &header);
        self.unproven.push_back(taken);
        while self.unproven.front().is_some_and(|t| t.header.next_lsn() <= header.durable_lsn) {
            self.unproven.pop_front();
        }
        Ok(())
    }

    fn take_entries(&mut self, taken: &Taken, key: &SealKey) -> Result<()> {
        let (header, at, bytes) = (&taken.header, taken.at, self.walk.newest_bytes());
        let corrupt = |e| self.walk.bad(ErrorKind::Corrupt, at, e);
        let rows = batch::open_table(header, bytes, key).map_err(corrupt)?;
        let payload_at = header.payload_at().expect("decoded");
        let payloads = &bytes[payload_at..];
        let place = Arc::new(BatchPlace {
            file: at.slot,
            payload_at: at.offset + payload_at as u64,
            first_lsn: header.first_lsn,
            algorithm: header.algorithm,
            salt: header.salt,
        });
        let mut incoming = Vec::with_capacity(rows.len());
        let mut sealed = Vec::new();
        for (row, index) in rows.iter().zip(0u32..) {
            let lsn = Lsn(header.first_lsn.0 + u64::from(index));
            if lsn <= self.args.destaged {
                continue;
            }
            let from = row.payload_offset as usize;
            sealed.clear();
            sealed.extend_from_slice(&payloads[from..from + row.sealed_bytes()]);
            let length = match batch::open_payload(row, lsn, index, key, &mut sealed) {
                Ok(plain) => plain.len(),
                Err(_) if self.args.seeded_bugs.torn_accepted => row.payload_bytes as usize,
                Err(e) => return Err(corrupt(e)),
            };
            // The overlay counts the length of a payload, so its buffer must have no room for the
            // tag.
            let mut payload = self.overlay.payloads().take(length);
            payload.extend_from_slice(&sealed[..length]);
            incoming.push(incoming_of(row, payload.into_bytes(), &place, index));
        }
        self.entry_count += incoming.len() as u64;
        let first = Lsn(header.next_lsn().0 - incoming.len() as u64);
        let first = if self.args.seeded_bugs.stale_accepted { self.next_lsn } else { first };
        if first != self.next_lsn {
            return Err(self.walk.bad(ErrorKind::Corrupt, at, FormatError::Range));
        }
        self.next_lsn = Lsn(first.0 + incoming.len() as u64);
        let came_at =
            self.args.written_at.get(&at.slot).copied().unwrap_or_else(|| self.args.clock.now());
        let inserted =
            self.overlay.insert(first, incoming.into_iter(), taken.end_position, || came_at);
        let options = &self.args.options;
        if inserted.log_bytes >= options.generation_bytes_max
            || inserted.extent_count >= options.entry_count_max / 4
        {
            self.overlay.freeze();
        }
        Ok(())
    }

    /// Checks that nothing below a durable LSN is missing, and no epoch that was served.
    fn check_end(&self) -> Result<()> {
        let (walk, destaged) = (&self.walk, self.args.destaged);
        if walk.seen.trim_lsn > destaged {
            return Err(self.rolled_back(walk.seen.trim_lsn));
        }
        if let Some(quorum) = self.args.quorum {
            // The batches of other machines tell nothing about this machine's disk.
            self.check_ends_at(quorum)?;
            return self.check_reaches_tier();
        }
        if let Some(at) = self.unknown_end() {
            return Err(self.unreadable(at));
        }
        if walk.seen.durable_lsn > walk.last_lsn().max(destaged) {
            return Err(self.damaged(walk.seen.durable_lsn));
        }
        self.check_reaches_tier()?;
        self.check_reaches_served()
    }

    /// Checks that the log ends where its members have decided.
    fn check_ends_at(&self, quorum: &QuorumTail) -> Result<()> {
        let decided = quorum.position;
        let found = self.walk.newest.map_or(Position::START, |newest| newest.position());
        let begins_there = self.walk.newest.is_none()
            && self.walk.seen.sequence == 0
            && quorum.predecessor.is_some();
        if found == decided || begins_there {
            return Ok(());
        }
        let why = format!("its members have decided that batch {decided} is its last, not {found}");
        Err(self.damaged_at_end(&why))
    }

    /// Returns an unreadable place that may hold acknowledged entries.
    fn unknown_end(&self) -> Option<At> {
        let walk = &self.walk;
        if self.args.seeded_bugs.unreadable_ends {
            return None;
        }
        if let Some(at) = walk.unknown_at {
            return (!self.is_nothing_behind()).then_some(at);
        }
        // The evidence that tells a torn batch from a damaged one lies behind it.
        let is_torn = matches!(walk.end, Some(FormatError::HeaderChecksum | FormatError::Checksum));
        (is_torn && walk.is_unreadable_behind_bad()).then_some(walk.bad_at)
    }

    /// Returns whether no entry behind the newest batch was ever acknowledged. This holds if that
    /// batch is the last one of an orderly close and no later epoch was served, or if its own epoch
    /// was not served.
    fn is_nothing_behind(&self) -> bool {
        let served = self.args.identity.served_epoch;
        self.walk.newest.is_some_and(|newest| {
            let header = newest.header;
            let is_last = header.is_clean && header.epoch == served;
            served > Epoch(0) && (is_last || header.epoch > served)
        })
    }

    fn unreadable(&self, at: At) -> Error {
        let walk = &self.walk;
        let name = walk.reads.name(at.slot);
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: the disk does not read {name} at offset {} or behind, where \
                 the batch after LSN {} may be, and nothing else tells whether that batch was \
                 acknowledged. Nothing was changed. Keep this log: {}. Try again, as the disk may \
                 read it later; or copy {name} to a healthy disk with a tool that continues past \
                 errors, keep the original, and start with the copy, which then ends where bytes \
                 are missing unless the log shows that they were flushed",
                at.offset,
                walk.last_lsn(),
                walk.seen.contents
            ),
        )
    }

    /// Builds the error of a log that ends although entries up to `known` were on stable storage.
    fn damaged(&self, known: Lsn) -> Error {
        let why = format!(
            "entries up to {known} were on stable storage and only those up to {} can be read",
            self.walk.last_lsn()
        );
        self.damaged_at_end(&why)
    }

    fn damaged_at_end(&self, why: &str) -> Error {
        let walk = &self.walk;
        let found = match walk.end {
            Some(FormatError::NoMagic) | None => "the batch that belongs there is not there".into(),
            Some(e) => e.to_string(),
        };
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: {} is damaged at offset {}: {found}; {why}. Nothing was changed. \
                 Keep this log: {}",
                walk.reads.name(walk.end_at.slot),
                walk.end_at.offset,
                walk.seen.contents
            ),
        )
    }

    /// Checks that the log reaches as far as the data tier: entries enter the data tier only after
    /// they are on stable storage here, so a log of this directory reaches that far. A log that
    /// does not may lack later entries too.
    fn check_reaches_tier(&self) -> Result<()> {
        let (walk, destaged) = (&self.walk, self.args.destaged);
        let last = walk.last_lsn();
        if last >= destaged || self.is_fresh() {
            return Ok(());
        }
        if self.has_more() {
            return Err(self.damaged(destaged));
        }
        let why = format!(
            "open the write log: it ends at LSN {last}, in {} at offset {}, but the store holds \
             entries up to LSN {destaged}, and those were on stable storage in the log before",
            walk.reads.name(walk.end_at.slot),
            walk.end_at.offset
        );
        Err(crate::ring::incomplete::error_of(why, walk.seen.contents))
    }

    /// Checks that the log reaches the served epoch: the opening batch of an epoch is on stable
    /// storage before anything is served in that epoch, so a log of this directory has an opening
    /// batch of at least the served epoch.
    fn check_reaches_served(&self) -> Result<()> {
        let (walk, served) = (&self.walk, self.args.identity.served_epoch);
        let found = match (&walk.newest, self.args.seeded_bugs.newest_by_sequence) {
            (Some(newest), false) => newest.header.epoch,
            (_, true) => walk.seen.newest_epoch,
            (None, false) => Epoch(0),
        };
        // A ring that was made but never served may have replaced a log that was given up.
        if found >= served || self.is_fresh() {
            return Ok(());
        }
        let why =
            format!("this directory has served epoch {served}, and this log ends in epoch {found}");
        if walk.seen.epoch >= served && self.has_more() {
            return Err(self.damaged_at_end(&why));
        }
        let why = format!("open the write log: {why}: newer writes are missing");
        Err(crate::ring::incomplete::error_of(why, walk.seen.contents))
    }

    /// Returns whether the ring was made but never served: it then holds at most one opening batch,
    /// which may be torn.
    fn is_fresh(&self) -> bool {
        self.walk.newest.is_none() && self.walk.seen.sequence <= 1
    }

    /// Returns whether there are later batches that were not taken.
    fn has_more(&self) -> bool {
        self.walk.newest.is_none_or(|newest| newest.header.sequence < self.walk.seen.sequence)
    }

    fn begins_later(&self, oldest: &BatchHeader) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: the data tier holds entries up to {}, the log begins with \
                 entry {}: the entries between are missing (was the store rolled back, or is this \
                 the log of a later store?). Nothing was changed. Keep this log: {}",
                self.args.destaged, oldest.first_lsn, self.walk.seen.contents
            ),
        )
    }

    fn superseded(&self, epoch: Epoch, at: At) -> Error {
        Error::new(
            ErrorKind::Fenced,
            format!(
                "open the write log: {} at offset {} was written in epoch {epoch}, this is epoch \
                 {}: another owner has taken the pool over",
                self.walk.reads.name(at.slot),
                at.offset,
                self.args.identity.epoch
            ),
        )
    }

    fn rolled_back(&self, trim_lsn: Lsn) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "open the write log: its entries up to {trim_lsn} were destaged, but the data tier \
                 holds entries only up to {}: the store was rolled back to an older state",
                self.args.destaged
            ),
        )
    }
}

pub(crate) fn incoming_of(
    row: &EntryRow,
    payload: Bytes,
    place: &Arc<BatchPlace>,
    index: u32,
) -> Incoming {
    let resident =
        (row.kind == EntryKind::Write).then(|| LogResident::new(Arc::clone(place), *row, index));
    Incoming {
        volume: row.volume,
        kind: row.kind,
        start_sector: row.start_sector,
        sector_count: row.sector_count,
        payload,
        resident,
    }
}
