//! One volume of an open pool: the [`BlockDevice`] that every front end serves.
//!
//! Invariants:
//! - A read consults the overlay before the data tier, because data only moves in that direction: data that the overlay
//!   no longer has is in the tier.
//! - The order of two overlapping writes is the order of their LSNs. A change that is not aligned to sectors first
//!   reads its edge sectors, and excludes every other change of these from that read until its entries are answered, so
//!   it never puts old bytes back. Changes of other sectors do not wait.
//! - A request that is not aligned is one step in the history: its ends and the range between them are one group of
//!   entries.
//! - A dropped request has no late effect: its entries are in a batch of the log by then, or are never written.
//! - No request is answered before the log confirms the state that `durability` requires.
//! - A snapshot is a volume that cannot be changed: it shows nothing from behind its LSN.

use crate::client_record::ClientRecord;
use crate::ranges::{Ranges, Want};
use crate::record::{Durability, VolumeRecord};
use crate::seeded_bugs::seeded_bugs;
use crate::state::{Shared, lost};
use block::units::{SECTOR_BYTES, VOLUME_BYTES_MAX};
use block::{
    AllocationExtent, BlockDevice, Error, ErrorKind, Limits, Lsn, PayloadBuffer, Result, VolumeId,
    WriteFlags, ZeroFlags,
};
use bytes::{Bytes, BytesMut};
use parking_lot::RwLock as SyncRwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use wal::{EntryKind, NewEntry, Source, Wait};

/// Most payload bytes of one log entry: larger requests become several entries. Chosen by hand: an entry is sealed and
/// read back as a whole, and a read of 4 KiB of one that has left memory should not cost much more than those 4 KiB.
const ENTRY_PAYLOAD_BYTES_MAX: usize = block::device::PAYLOAD_BYTES_KEPT as usize;

/// Largest payload of one request, as announced to clients. Source: NBD protocol, "Block size constraints": every
/// client may send 32 MiB without asking.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// Lookups that are repeated when an entry leaves the log between lookup and read. Between two of them a whole
/// generation must be destaged, so this number in a row means a broken index.
const LOOKUP_COUNT_MAX: usize = 8;

/// A volume that is open for clients. Front ends hold it in an `Arc` and may keep it after the volume was removed:
/// every call then fails with `NotFound`.
pub struct Volume {
    id: VolumeId,
    shared: Arc<Shared>,
    record: SyncRwLock<VolumeRecord>,
    size_bytes: AtomicU64,
    is_present: AtomicBool,
    size_changed: watch::Sender<u64>,
    /// Changes of data lock their sectors first, and then hold this lock shared until they are answered. A change of
    /// the record holds it exclusively.
    changes: Arc<RwLock<()>>,
    /// Held from reading the record until the changed one is logged.
    record_changes: tokio::sync::Mutex<()>,
    ranges: Arc<Ranges>,
    /// Counts how often the volume became smaller.
    shrink_count: AtomicU64,
    /// Highest LSN that this volume was given in an answer, for `durability = "store"`.
    answered_lsn: AtomicU64,
    /// LSN of a snapshot; `None` for the volume itself.
    at: Option<Lsn>,
}

/// The sectors that a byte range covers completely, and the ragged bytes before and after.
#[derive(Debug, PartialEq, Eq)]
struct Split {
    head_bytes: u64,
    first_sector: u64,
    sector_count: u64,
    tail_bytes: u64,
}

impl Split {
    fn of(offset: u64, length: u64) -> Split {
        let end = offset + length;
        let first_sector = offset.div_ceil(SECTOR_BYTES);
        let end_sector = end / SECTOR_BYTES;
        if end_sector < first_sector {
            // Both ends lie inside one sector.
            return Split { head_bytes: length, first_sector, sector_count: 0, tail_bytes: 0 };
        }
        Split {
            head_bytes: first_sector * SECTOR_BYTES - offset,
            first_sector,
            sector_count: end_sector - first_sector,
            tail_bytes: end - end_sector * SECTOR_BYTES,
        }
    }

    fn is_aligned(&self) -> bool {
        self.head_bytes == 0 && self.tail_bytes == 0
    }
}

impl Volume {
    pub(crate) fn new(shared: Arc<Shared>, record: VolumeRecord) -> Arc<Volume> {
        Arc::new(Self::at(shared, record, None))
    }

    /// Opens the snapshot at `lsn`; `record` is [that of it](VolumeRecord::of_snapshot).
    pub(crate) fn snapshot(shared: Arc<Shared>, record: VolumeRecord, lsn: Lsn) -> Arc<Volume> {
        Arc::new(Self::at(shared, record, Some(lsn)))
    }

    fn at(shared: Arc<Shared>, record: VolumeRecord, at: Option<Lsn>) -> Volume {
        Volume {
            id: VolumeId(record.id),
            size_bytes: AtomicU64::new(record.size_bytes),
            is_present: AtomicBool::new(true),
            size_changed: watch::Sender::new(record.size_bytes),
            changes: shared.change_lock(VolumeId(record.id)),
            record_changes: tokio::sync::Mutex::default(),
            ranges: shared.ranges(VolumeId(record.id)),
            shrink_count: AtomicU64::new(0),
            record: SyncRwLock::new(record),
            // Entries that the log already holds were answered by a earlier run, to clients that may still be there.
            answered_lsn: AtomicU64::new(shared.log.status().acked_lsn.0),
            shared,
            at,
        }
    }

    /// Tells whether this is a snapshot of a volume.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.at.is_some()
    }

    /// The volume's identity within its pool.
    #[must_use]
    pub fn id(&self) -> VolumeId {
        self.id
    }

    /// The current record of the volume.
    #[must_use]
    pub fn record(&self) -> VolumeRecord {
        self.record.read().clone()
    }

    /// Reports the size in bytes whenever it changes.
    #[must_use]
    pub fn size_changes(&self) -> watch::Receiver<u64> {
        self.size_changed.subscribe()
    }

    /// Makes every request fail with `NotFound` from this call on.
    pub(crate) fn retire(&self) {
        self.is_present.store(false, Ordering::Release);
    }

    /// Undoes [`Volume::retire`], after a removal that failed.
    pub(crate) fn unretire(&self) {
        self.is_present.store(true, Ordering::Release);
    }

    /// Changes the record durably through the log. `change` runs while no write is in flight.
    pub(crate) async fn update_record(
        &self,
        change: impl FnOnce(&mut VolumeRecord) -> Result<()>,
    ) -> Result<VolumeRecord> {
        let _alone = self.changes.write().await;
        self.check_present()?;
        self.update_alone(change).await
    }

    /// Like [`Volume::update_record`], but accepts a volume with a missing spill file, as its record is here. Must not
    /// change its size.
    pub(crate) async fn update_record_of_any(
        &self,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Result<VolumeRecord> {
        let _alone = self.changes.write().await;
        self.shared.check_serving()?;
        self.check_not_removed()?;
        self.update_alone(|record| {
            change(record);
            Ok(())
        })
        .await
    }

    async fn update_alone(
        &self,
        change: impl FnOnce(&mut VolumeRecord) -> Result<()>,
    ) -> Result<VolumeRecord> {
        let _one_at_a_time = self.record_changes.lock().await;
        let mut record = self.record();
        let old_bytes = record.size_bytes;
        change(&mut record)?;
        let entry = self.shared.record_entry(&record)?;
        let logged = if record.size_bytes < old_bytes {
            // The range past the new end must read as zeroes if the volume grows again.
            self.size_bytes.store(record.size_bytes, Ordering::Release);
            self.shrink_count.fetch_add(1, Ordering::AcqRel);
            let trim = self.range_entry(
                EntryKind::Trim,
                record.size_bytes / SECTOR_BYTES,
                (old_bytes - record.size_bytes).div_ceil(SECTOR_BYTES),
            );
            self.shared.append_change(trim, vec![entry]).await
        } else {
            self.shared.append_change(entry, Vec::new()).await
        };
        if let Err(error) = logged {
            self.size_bytes.store(old_bytes, Ordering::Release);
            return Err(error);
        }
        self.shared.show_record(&record);
        self.size_bytes.store(record.size_bytes, Ordering::Release);
        *self.record.write() = record.clone();
        self.size_changed.send_replace(record.size_bytes);
        Ok(record)
    }

    /// Changes the clients in the record durably. Unlike other changes, this one does not wait for writes in flight:
    /// clients of a full log would keep others out. Gives up when `given_up` resolves before the log has room.
    pub(crate) async fn update_clients(
        &self,
        clients: Vec<ClientRecord>,
        given_up: impl Future<Output = ()> + Send,
    ) -> Result<VolumeRecord> {
        let mut given_up = std::pin::pin!(given_up);
        let _one_at_a_time = tokio::select! {
            guard = self.record_changes.lock() => guard,
            () = &mut given_up => {
                let what = "change the record of the volume: an earlier change waits for the write log";
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
        };
        self.shared.check_serving()?;
        self.check_not_removed()?;
        let mut record = self.record();
        record.clients = clients;
        let entry = self.shared.record_entry(&record)?;
        self.shared.log.append_unless(entry, Vec::new(), Wait::Durable, given_up).await?;
        *self.record.write() = record.clone();
        Ok(record)
    }

    fn range_entry(&self, kind: EntryKind, start_sector: u64, sector_count: u64) -> NewEntry {
        NewEntry { volume: self.id, kind, start_sector, sector_count, payload: Bytes::new() }
    }

    fn write_entry(&self, start_sector: u64, payload: Bytes) -> NewEntry {
        let sector_count = payload.len() as u64 / SECTOR_BYTES;
        NewEntry { volume: self.id, kind: EntryKind::Write, start_sector, sector_count, payload }
    }

    fn check_present(&self) -> Result<()> {
        // Reads need this check as well: a fenced owner does not know the next owner's writes.
        self.shared.check_serving()?;
        self.shared.check_open(self.id)?;
        self.check_not_removed()
    }

    fn check_not_removed(&self) -> Result<()> {
        if self.is_present.load(Ordering::Acquire) {
            return Ok(());
        }
        let name = &self.record.read().name;
        Err(Error::new(ErrorKind::NotFound, format!("access volume {name}: it was removed")))
    }

    /// `past_end` is the kind that the protocol requires for a range that leaves the volume.
    fn check_range(&self, offset: u64, length: u64, past_end: ErrorKind) -> Result<()> {
        self.check_present()?;
        let size_bytes = self.size_bytes.load(Ordering::Acquire);
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= size_bytes);
        if is_inside {
            return Ok(());
        }
        let name = &self.record.read().name;
        let what = format!(
            "access volume {name}: {length} bytes at {offset} leave its {size_bytes} bytes"
        );
        Err(Error::new(past_end, what))
    }

    fn check_change(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range(offset, length, ErrorKind::Full)?;
        let record = self.record.read();
        if record.is_read_only {
            let what = format!("change volume {}: it is read-only", record.name);
            return Err(Error::new(ErrorKind::Denied, what));
        }
        Ok(())
    }

    fn durability(&self) -> Durability {
        self.record.read().durability
    }

    fn wait_for(&self, fua: bool) -> Wait {
        match self.durability() {
            Durability::Write => Wait::Durable,
            _ if fua => Wait::Durable,
            Durability::Auto | Durability::Flush | Durability::Store => Wait::Written,
        }
    }

    /// Queues entries for whole sectors, at least one, at once and in order, and waits for all of them.
    async fn append_payload(&self, first_sector: u64, payload: Bytes, fua: bool) -> Result<Lsn> {
        // Changes without payload are still accepted: they may cover damaged data.
        self.shared.check_not_refused(self.id)?;
        let wait = self.wait_for(fua);
        // Otherwise the rest of one entry would keep the memory of all of them.
        let is_shared = payload.len() > ENTRY_PAYLOAD_BYTES_MAX;
        let mut rest = payload;
        let mut start_sector = first_sector;
        let mut queue = |rest: &mut Bytes| {
            let mut part = rest.split_to(rest.len().min(ENTRY_PAYLOAD_BYTES_MAX));
            if is_shared {
                let mut own = self.payload(part.len());
                own.extend_from_slice(&part);
                part = own.into_bytes();
            }
            let entry = self.write_entry(start_sector, part);
            start_sector += entry.sector_count;
            self.shared.log.append(entry, wait)
        };
        // Most writes are one entry, and need no list.
        let first = queue(&mut rest);
        let mut others = Vec::new();
        while !rest.is_empty() {
            others.push(queue(&mut rest));
        }
        if seeded_bugs().ack_before_submit && wait == Wait::Written {
            others.push(first);
            others.into_iter().for_each(|waiter| drop(tokio::spawn(waiter)));
            return Ok(Lsn::NONE);
        }
        let mut last_lsn = first.await?;
        for waiter in others {
            last_lsn = waiter.await?;
        }
        self.answered_lsn.fetch_max(last_lsn.0, Ordering::AcqRel);
        Ok(last_lsn)
    }

    /// Returns the error that the client of a failed request gets: if the log on this machine has failed, and others
    /// have it, it looks for the pool there instead of passing an error on.
    pub(crate) fn for_client(&self, error: Error) -> Error {
        let is_replicated = self.shared.is_replicated.load(Ordering::Acquire);
        match is_replicated && wal::is_log_failure(&error) {
            true => {
                let what = "serve the pool: the write log of this node has failed; another member of it takes the pool over";
                Error::with_source(ErrorKind::Fenced, what, error)
            }
            false => error,
        }
    }

    /// Tells whether a flush waits for the store.
    fn needs_store(&self) -> bool {
        self.durability() == Durability::Store
            || self.shared.flushes_to_store.load(Ordering::Acquire)
    }

    /// Waits until the store has a change that is durable once it is answered, where a flush waits for the store: FUA,
    /// and every change of a volume with `durability = "write"`. The caller must not hold the lock of the
    /// changes, so that no other request waits for the store.
    async fn wait_stored(&self, lsn: Lsn, fua: bool) -> Result<()> {
        if self.wait_for(fua) == Wait::Durable && self.needs_store() {
            return self.shared.wait_destaged_of(self.id, lsn).await;
        }
        Ok(())
    }

    /// Fills `buf` with whole sectors from `first_sector`.
    async fn read_sectors(&self, first_sector: u64, buf: &mut [u8]) -> Result<()> {
        for _ in 0..LOOKUP_COUNT_MAX {
            // False means that an entry was destaged and its log space given back between lookup and read. The next
            // lookup finds it in the tier.
            if self.read_sectors_once(first_sector, buf).await? {
                return Ok(());
            }
        }
        let what = format!("read volume {} sector {first_sector}: entry keeps moving", self.id);
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// Returns false if an entry left the log meanwhile; `buf` is then undefined.
    async fn read_sectors_once(&self, first_sector: u64, buf: &mut [u8]) -> Result<bool> {
        let sector_count = buf.len() as u64 / SECTOR_BYTES;
        let overlay = self.shared.log.overlay();
        let pieces = match self.at {
            None => overlay.lookup(self.id, first_sector, sector_count),
            Some(at) => overlay.lookup_at(self.id, at, first_sector, sector_count),
        };
        let mut rest = buf;
        for piece in pieces {
            let offset = piece.start_sector * SECTOR_BYTES;
            let piece_bytes = usize::try_from(piece.sector_count * SECTOR_BYTES)
                .expect("a piece is no longer than the buffer");
            let (part, after) = rest.split_at_mut(piece_bytes);
            rest = after;
            match piece.source {
                Source::Payload(bytes) => part.copy_from_slice(&bytes),
                Source::Zeroes { .. } => part.fill(0),
                Source::LogResident(handle) => {
                    let Some(bytes) = self.shared.log.read(&handle).await? else {
                        return Ok(false);
                    };
                    part.copy_from_slice(&bytes);
                }
                Source::SpillResident(handle) => {
                    part.copy_from_slice(&self.shared.log.read_spilled(&handle).await?);
                }
                Source::Lost { lsn } => {
                    return Err(lost(self.id, piece.start_sector, piece.sector_count, lsn));
                }
                Source::Beneath => match self.at {
                    None => self.shared.tier.read(self.id, offset, part).await?,
                    Some(at) => self.shared.tier.read_at(self.id, at, offset, part).await?,
                },
            }
        }
        assert!(rest.is_empty(), "the overlay's pieces cover the range");
        Ok(true)
    }

    /// Writes bytes that start or end inside a sector.
    async fn write_ragged(&self, offset: u64, payload: &[u8], fua: bool) -> Result<()> {
        let length = payload.len() as u64;
        let (first_sector, end_sector) = sectors_of(offset, length);
        let covered_bytes = usize::try_from((end_sector - first_sector) * SECTOR_BYTES)
            .expect("a payload fits in memory");
        let mut sectors = BytesMut::zeroed(covered_bytes);
        let held = self.ranges.hold(Want::Parts([first_sector, end_sector - 1])).await;
        let sector = SECTOR_BYTES as usize;
        let shared = loop {
            // The check is repeated, as the volume may have shrunk or gone meanwhile.
            self.check_change(offset, length)?;
            let shrink_count = self.shrink_count.load(Ordering::Acquire);
            self.read_sectors(first_sector, &mut sectors[..sector]).await?;
            if covered_bytes > sector {
                self.read_sectors(end_sector - 1, &mut sectors[covered_bytes - sector..]).await?;
            }
            if let Some(shared) = self.unshrunk_since(shrink_count).await {
                break shared;
            }
        };
        self.check_change(offset, length)?;
        let at = (offset % SECTOR_BYTES) as usize;
        sectors[at..at + payload.len()].copy_from_slice(payload);
        let lsn = self.append_payload(first_sector, sectors.freeze(), fua).await?;
        drop((shared, held));
        self.wait_stored(lsn, fua).await
    }

    /// Keeps the record from being changed. Returns `None` if the volume has become smaller since `shrink_count` was
    /// read: sectors that were read since may be out of date.
    async fn unshrunk_since(&self, shrink_count: u64) -> Option<RwLockReadGuard<'_, ()>> {
        let shared = self.changes.read().await;
        (self.shrink_count.load(Ordering::Acquire) == shrink_count).then_some(shared)
    }

    /// Makes a range read as zeroes, by a range entry for whole sectors and writes for the edges.
    async fn clear(&self, offset: u64, length: u64, kind: EntryKind, fua: bool) -> Result<()> {
        self.check_change(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let split = Split::of(offset, length);
        if !split.is_aligned() {
            return self.clear_ragged(offset, length, kind, fua).await;
        }
        if seeded_bugs().trim_lost {
            return Ok(());
        }
        let end_sector = split.first_sector + split.sector_count;
        let held = self.ranges.hold(Want::Whole(split.first_sector..end_sector)).await;
        let shared = self.changes.read().await;
        self.check_change(offset, length)?;
        let entry = self.range_entry(kind, split.first_sector, split.sector_count);
        let lsn = self.shared.log.append(entry, self.wait_for(fua)).await?;
        self.answered_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        drop((shared, held));
        self.wait_stored(lsn, fua).await
    }

    /// Like [`Volume::clear`], for a range that starts or ends inside a sector, as one step.
    async fn clear_ragged(
        &self,
        offset: u64,
        length: u64,
        kind: EntryKind,
        fua: bool,
    ) -> Result<()> {
        let split = Split::of(offset, length);
        let (first_sector, end_sector) = sectors_of(offset, length);
        let held = self.ranges.hold(Want::Parts([first_sector, end_sector - 1])).await;
        let (shared, entries) = loop {
            self.check_change(offset, length)?;
            let shrink_count = self.shrink_count.load(Ordering::Acquire);
            let mut entries = Vec::new();
            if split.head_bytes > 0 {
                let from = offset % SECTOR_BYTES;
                let head = self.read_cleared(first_sector, from..from + split.head_bytes).await?;
                entries.push(self.write_entry(first_sector, head));
            }
            if split.sector_count > 0 && !seeded_bugs().trim_lost {
                entries.push(self.range_entry(kind, split.first_sector, split.sector_count));
            }
            if split.tail_bytes > 0 {
                let tail = self.read_cleared(end_sector - 1, 0..split.tail_bytes).await?;
                entries.push(self.write_entry(end_sector - 1, tail));
            }
            if let Some(shared) = self.unshrunk_since(shrink_count).await {
                break (shared, entries);
            }
        };
        self.check_change(offset, length)?;
        self.shared.check_not_refused(self.id)?;
        let lsn = self.append_step(entries, self.wait_for(fua)).await?;
        self.answered_lsn.fetch_max(lsn.0, Ordering::AcqRel);
        drop((shared, held));
        self.wait_stored(lsn, fua).await
    }

    /// Appends entries, at least one, as one step.
    async fn append_step(&self, mut entries: Vec<NewEntry>, wait: Wait) -> Result<Lsn> {
        if seeded_bugs().step_torn {
            let mut last = Lsn::NONE;
            for entry in entries {
                last = self.shared.log.append(entry, wait).await?;
            }
            return Ok(last);
        }
        let first = entries.remove(0);
        self.shared.log.append_group(first, entries, wait).await
    }

    /// Reads a sector and clears some of its bytes.
    async fn read_cleared(&self, sector: u64, cleared: std::ops::Range<u64>) -> Result<Bytes> {
        let mut bytes = BytesMut::zeroed(SECTOR_BYTES as usize);
        self.read_sectors(sector, &mut bytes).await?;
        bytes[cleared.start as usize..cleared.end as usize].fill(0);
        Ok(bytes.freeze())
    }
}

/// The first sector that a byte range touches, and the one after the last.
fn sectors_of(offset: u64, length: u64) -> (u64, u64) {
    (offset / SECTOR_BYTES, (offset + length).div_ceil(SECTOR_BYTES))
}

impl BlockDevice for Volume {
    fn limits(&self) -> Limits {
        Limits {
            size_bytes: self.size_bytes.load(Ordering::Acquire),
            preferred_block_bytes: 4096,
            payload_bytes_max: PAYLOAD_BYTES_MAX,
            is_read_only: self.record.read().is_read_only,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.check_range(offset, buf.len() as u64, ErrorKind::Invalid)?;
        if buf.is_empty() {
            return Ok(());
        }
        let split = Split::of(offset, buf.len() as u64);
        if split.is_aligned() {
            self.read_sectors(split.first_sector, buf).await?;
            return self.shared.log.await_lease().await;
        }
        let first_sector = offset / SECTOR_BYTES;
        let end_sector = (offset + buf.len() as u64).div_ceil(SECTOR_BYTES);
        let covered_bytes = (end_sector - first_sector) * SECTOR_BYTES;
        let mut sectors = vec![0; usize::try_from(covered_bytes).expect("it fits in memory")];
        self.read_sectors(first_sector, &mut sectors).await?;
        let at = (offset % SECTOR_BYTES) as usize;
        buf.copy_from_slice(&sectors[at..at + buf.len()]);
        self.shared.log.await_lease().await
    }

    fn payload(&self, length: usize) -> PayloadBuffer {
        self.shared.log.payload(length)
    }

    async fn write(&self, offset: u64, payload: Bytes, flags: WriteFlags) -> Result<()> {
        self.check_change(offset, payload.len() as u64)?;
        if payload.is_empty() {
            return Ok(());
        }
        if !Split::of(offset, payload.len() as u64).is_aligned() {
            return self.write_ragged(offset, &payload, flags.fua).await;
        }
        let (first_sector, end_sector) = sectors_of(offset, payload.len() as u64);
        let held = self.ranges.hold(Want::Whole(first_sector..end_sector)).await;
        let shared = self.changes.read().await;
        self.check_change(offset, payload.len() as u64)?;
        let lsn = self.append_payload(first_sector, payload, flags.fua).await?;
        drop((shared, held));
        self.wait_stored(lsn, flags.fua).await
    }

    async fn flush(&self) -> Result<()> {
        self.check_present()?;
        if self.is_snapshot() {
            return Ok(()); // it was on stable storage before it became visible
        }
        let lsn = Lsn(self.answered_lsn.load(Ordering::Acquire));
        match self.durability() {
            // Every answer so far has waited for stable storage.
            Durability::Write => self.shared.check_serving()?,
            Durability::Auto | Durability::Flush | Durability::Store => {
                self.shared.log.flush().await?;
            }
        }
        // Asked afterwards: the log may have lost its quorum meanwhile, and go on with the store instead.
        match self.needs_store() {
            true => self.shared.wait_destaged_of(self.id, lsn).await,
            false => Ok(()),
        }
    }

    async fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.clear(offset, length, EntryKind::Trim, fua).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        if flags.fast_only {
            self.check_change(offset, length)?;
            // Whole sectors are one entry without payload. A ragged end reads its sector first, perhaps from the store.
            if length > 0 && !Split::of(offset, length).is_aligned() {
                let what = format!(
                    "zero {length} bytes at {offset} of volume {}: not fast, the range has no \
                     boundaries of {SECTOR_BYTES} bytes",
                    self.id
                );
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        }
        let kind = if flags.no_hole { EntryKind::Zero } else { EntryKind::Trim };
        self.clear(offset, length, kind, flags.fua).await
    }

    async fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        self.check_range(offset, length, ErrorKind::Invalid)?;
        let mut extents = Extents { list: Vec::new(), count_max: extent_count_max.max(1) };
        let first_sector = offset / SECTOR_BYTES;
        let end_sector = (offset + length).div_ceil(SECTOR_BYTES);
        let (overlay, sector_count) = (self.shared.log.overlay(), end_sector - first_sector);
        let pieces = match self.at {
            None => overlay.lookup(self.id, first_sector, sector_count),
            Some(at) => overlay.lookup_at(self.id, at, first_sector, sector_count),
        };
        for piece in pieces {
            let start = (piece.start_sector * SECTOR_BYTES).max(offset);
            let end =
                ((piece.start_sector + piece.sector_count) * SECTOR_BYTES).min(offset + length);
            let is_room = match piece.source {
                Source::Payload(_)
                | Source::LogResident(_)
                | Source::SpillResident(_)
                | Source::Lost { .. } => extents.push(end - start, false, false),
                Source::Zeroes { is_trim } => extents.push(end - start, is_trim, true),
                Source::Beneath => {
                    let (tier, range) = (&self.shared.tier, (start, end - start));
                    let beneath = match self.at {
                        None => {
                            tier.allocation(self.id, range.0, range.1, extent_count_max).await?
                        }
                        Some(at) => {
                            tier.allocation_at(self.id, at, range, extent_count_max).await?
                        }
                    };
                    let covered: u64 = beneath.iter().map(|run| run.length_bytes).sum();
                    beneath
                        .iter()
                        .all(|run| extents.push(run.length_bytes, run.is_hole, run.is_zero))
                        && covered == end - start
                }
            };
            if !is_room {
                break;
            }
        }
        // A client may take a hole for zeroes without reading it.
        self.shared.log.await_lease().await?;
        Ok(extents.list)
    }

    async fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range(offset, length, ErrorKind::Invalid)?;
        if self.at.is_none() {
            self.shared.tier.prefetch(self.id, offset, length);
        }
        Ok(())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        check_size(size_bytes)?;
        if self.is_snapshot() {
            let what = format!("resize {}: a snapshot stays as it is", self.record.read().name);
            return Err(Error::new(ErrorKind::Denied, what));
        }
        self.update_record(|record| {
            if size_bytes < record.size_bytes {
                let what = format!("resize volume {}: a client may not shrink it", record.name);
                return Err(Error::new(ErrorKind::Denied, what));
            }
            record.size_bytes = size_bytes;
            Ok(())
        })
        .await
        .map(drop)
    }
}

/// Checks a size: whole sectors, at least one, at most 1 PiB.
///
/// # Errors
/// `Invalid` with the nearest legal size.
pub fn check_size(size_bytes: u64) -> Result<()> {
    if size_bytes == 0 || size_bytes > VOLUME_BYTES_MAX || !size_bytes.is_multiple_of(SECTOR_BYTES)
    {
        let nearest = size_bytes.clamp(1, VOLUME_BYTES_MAX).next_multiple_of(SECTOR_BYTES);
        let what = format!(
            "check volume size {size_bytes}: it must be a multiple of 512 bytes, from 512 to 1 PiB; \
             the nearest is {nearest}"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

/// Allocation runs, merged while they are alike and counted against the caller's limit.
struct Extents {
    list: Vec<AllocationExtent>,
    count_max: usize,
}

impl Extents {
    /// Returns false once there is no room for another run.
    fn push(&mut self, length_bytes: u64, is_hole: bool, is_zero: bool) -> bool {
        if length_bytes == 0 {
            return true;
        }
        let run_count = self.list.len();
        match self.list.last_mut() {
            Some(last) if (last.is_hole, last.is_zero) == (is_hole, is_zero) => {
                last.length_bytes += length_bytes;
            }
            _ if run_count == self.count_max => return false,
            _ => self.list.push(AllocationExtent { length_bytes, is_hole, is_zero }),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_splits_into_ragged_ends_and_whole_sectors() {
        let split = |offset, length| {
            let split = Split::of(offset, length);
            (split.head_bytes, split.first_sector, split.sector_count, split.tail_bytes)
        };
        assert_eq!(split(0, 4096), (0, 0, 8, 0));
        assert_eq!(split(512, 512), (0, 1, 1, 0));
        assert_eq!(split(1, 511), (511, 1, 0, 0));
        assert_eq!(split(1, 512), (511, 1, 0, 1));
        assert_eq!(split(10, 20), (20, 1, 0, 0));
        assert_eq!(split(500, 1036), (12, 1, 2, 0));
        assert_eq!(split(0, 1), (0, 0, 0, 1));
        for offset in 0..1100u64 {
            for length in [1, 2, 100, 511, 512, 513, 1024, 1500] {
                let (head, first, count, tail) = split(offset, length);
                assert_eq!(head + count * SECTOR_BYTES + tail, length, "{offset}+{length}");
                assert!(count == 0 || first * SECTOR_BYTES == offset + head);
            }
        }
    }

    #[test]
    fn sizes_outside_the_limits_name_the_nearest_legal_one() {
        assert!(check_size(512).is_ok());
        assert!(check_size(VOLUME_BYTES_MAX).is_ok());
        for (size_bytes, nearest) in [(0, "512"), (1000, "1024"), (u64::MAX, "1125899906842624")] {
            let error = check_size(size_bytes).unwrap_err();
            assert!(error.to_string().ends_with(nearest), "{error}");
        }
    }
}
