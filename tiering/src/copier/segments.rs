//! Copies the segments of a state. Each one is verified while it is copied, and damaged or missing
//! ones are recorded.

use super::replaced::Replaced;
use super::transfer::{each, source_error, target_error};
use super::{Copier, Held, STEP, damaged_path, held_of, path_of};
use crate::leftovers::Hold;
use crate::map::Map;
use crate::map::records::{Root, SegmentRecord};
use crate::repair::Finding;
use crate::segment::{SegmentInfo, SegmentNumber, StoredSegment};
use crate::segment_store::SegmentStore;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::{ObjectStoreExt, PutPayload};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time after which a segment that was damaged or missing in the pool's store is examined again: it
/// may have been repaired, or only the transfer was damaged.
const BAD_AGAIN: Duration = Duration::from_secs(3600);

/// Time after which a segment that could not be read while others could is examined again. Chosen
/// by hand: it costs one request.
const UNREADABLE_AGAIN: Duration = Duration::from_secs(60);
/// Maximum number of segments that a pass without a new state retries. Chosen by hand.
const COMPLETED_MAX: usize = 64;

/// A segment that was not intact in the pool's store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bad {
    found: Found,
    /// The finding under which it was counted.
    first: Found,
    /// Time at which it is examined again; `None` means with the next pass.
    again_at: Option<Instant>,
}

impl Bad {
    /// Creates the record of a segment whose mark the copy had before this start.
    pub(super) fn of_listing() -> Bad {
        Bad { found: Found::Damaged, first: Found::Damaged, again_at: None }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.again_at.is_none_or(|at| now >= at)
    }
}

/// State of a segment in the pool's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Whole,
    Damaged,
    Missing,
    /// It cannot be read, while others can.
    Unreadable,
    /// The pool was restored from a copy that lacked it on purpose.
    Excluded,
}

impl Copier {
    /// Copies the segments of the state. Returns how many it has, and their bytes.
    pub(super) async fn copy_segments(
        &mut self,
        map: &Map,
        root: &Root,
        hold: &Hold,
        replaced: &mut Replaced,
    ) -> Result<(u64, u64)> {
        let (mut count, mut bytes, mut last) = (0, 0, 0);
        let mut is_any_excluded = false;
        loop {
            let (records, next) = map.live_after(last, STEP).await?;
            let end = next.unwrap_or(u64::MAX);
            let named: BTreeMap<u64, SegmentRecord> =
                records.iter().map(|(record, _)| (record.info.number.0, record.clone())).collect();
            let named = self.needed(map, named, last + 1..=end).await?;
            let has = |number: &u64, held: &Held| {
                named.get(number).is_some_and(|record| held_of(&record.info) == *held)
            };
            let mut gone_numbers = Vec::new();
            let gone =
                self.segments.range(last + 1..=end).filter(|(number, held)| !has(number, held));
            for (number, held) in gone {
                match named.contains_key(number) {
                    // It belongs to an undone history of the pool. The referenced segment is copied
                    // under its own name.
                    true => self.strays.push(path_of(*number, *held)),
                    false => gone_numbers.push(*number),
                }
            }
            for number in gone_numbers {
                // A record that does not open was skipped; the object in the copy may be the only
                // one left.
                match map.find_segment(number).await {
                    Ok(None) => replaced.segments.push(number),
                    Ok(Some(_)) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        self.note_bad(number, Found::Damaged);
                    }
                    Err(error) => return Err(error),
                }
            }
            let is_wanted = |info: &SegmentInfo| match self.bad.get(&info.number.0) {
                Some(bad) => bad.is_due(self.source.pool.clock.now()),
                None => self.segments.get(&info.number.0) != Some(&held_of(info)),
            };
            let missing = named.values().filter(|record| is_wanted(&record.info));
            let missing: Vec<StoredSegment> = missing.map(SegmentRecord::stored).collect();
            let this = &*self;
            let (copied, done) = each(missing, |segment| async move {
                let info = segment.info;
                let found = this.copy_segment(&segment).await?;
                this.progress.looked_segment.fetch_max(info.number.0, Ordering::Relaxed);
                Ok((info, found))
            })
            .await;
            for (info, found) in copied {
                is_any_excluded |= found == Found::Excluded;
                self.note(&info, found);
            }
            done?;
            count += named.len() as u64;
            bytes += named.values().map(|record| u64::from(record.info.object_bytes)).sum::<u64>();
            let Some(next) = next else {
                if is_any_excluded {
                    let what = "copy the pool: it was restored from a copy of some volumes, and \
                                still has records of the segments that this copy lacked on \
                                purpose; a state without them is copied instead";
                    return Err(Error::new(ErrorKind::Unavailable, what));
                }
                return Ok((count, bytes));
            };
            last = next;
            hold.release_below(last + 1);
            self.progress.set_pass(last, root.next_segment);
        }
    }

    /// Retries copying segments that the newest published state lacks because they could not be
    /// read or were missing.
    pub(super) async fn complete(&mut self) -> Result<()> {
        let is_wanted = |bad: &Bad| {
            bad.is_due(self.source.pool.clock.now())
                && matches!(bad.found, Found::Unreadable | Found::Missing)
        };
        let due = self.bad.iter().filter(|(_, bad)| is_wanted(bad)).map(|(number, _)| *number);
        let due: Vec<u64> = due.take(COMPLETED_MAX).collect();
        for number in due {
            let _hold = self.source.segments.leftovers.hold_one(SegmentNumber(number));
            let Some(record) = self.source.metadata.map.find_segment(number).await? else {
                continue;
            };
            let found = self.copy_segment(&record.stored()).await?;
            self.note(&record.info, found);
        }
        Ok(())
    }

    fn note(&mut self, info: &SegmentInfo, found: Found) {
        let number = info.number.0;
        match found {
            Found::Whole => {
                if let Some(bad) = self.bad.remove(&number) {
                    self.strays.push(damaged_path(number));
                    if matches!(bad.first, Found::Missing | Found::Unreadable) {
                        self.progress.missing_count.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            }
            Found::Damaged | Found::Missing | Found::Unreadable => self.note_bad(number, found),
            Found::Excluded => {}
        }
        if matches!(found, Found::Whole | Found::Damaged) {
            self.segments.insert(number, held_of(info));
        }
    }

    /// Counts a bad segment once, and sets the time of its next examination.
    fn note_bad(&mut self, number: u64, found: Found) {
        let pause = if found == Found::Unreadable { UNREADABLE_AGAIN } else { BAD_AGAIN };
        let first = self.bad.get(&number).map(|bad| bad.first);
        let is_new = first.is_none();
        let again_at = Some(self.source.pool.clock.now() + pause);
        self.bad.insert(number, Bad { found, first: first.unwrap_or(found), again_at });
        let count = match found {
            Found::Missing | Found::Unreadable => &self.progress.missing_count,
            Found::Whole | Found::Damaged | Found::Excluded => &self.progress.damaged_count,
        };
        count.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    async fn copy_segment(&self, segment: &StoredSegment) -> Result<Found> {
        self.pace.wait(u64::from(segment.info.object_bytes)).await;
        self.places.with(self.copy_segment_now(segment)).await
    }

    /// Reads the object from the pool's store, even if its size is not the expected one.
    async fn read_segment(&self, segment: &StoredSegment) -> Result<Bytes> {
        match self.source.segments.frames.read_object(segment).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let read = self.source.segments.store.read_whole(segment).await;
                read.map_err(|cause| source_error(&segment.info.object_path(), cause))
            }
            read => read,
        }
    }

    async fn copy_segment_now(&self, segment: &StoredSegment) -> Result<Found> {
        let info = &segment.info;
        let path = info.object_path();
        let (mut is_second, mut is_damaged, mut is_healed) = (false, false, false);
        let seeded_bugs = self.source.pool.seeded_bugs;
        let object = loop {
            let object = match self.read_segment(segment).await {
                Ok(object) => object,
                Err(error) if error.kind() == ErrorKind::Unreadable => {
                    // Another copy may have it; the pool's store then has it again.
                    let healed = self.source.repair.heal_now(segment).await?;
                    match healed {
                        Finding::Whole { .. } | Finding::Repaired { .. } if !is_healed => {
                            is_healed = true;
                            continue;
                        }
                        Finding::Gone => return Err(reclaimed()),
                        _ => return Ok(Found::Unreadable),
                    }
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    // Reclaim will forget it soon.
                    let may_be = self.source.exclusions.may_be_excluded(info.number.0);
                    let is_excluded = (may_be && self.source.exclusions.is_counting_out())
                        || self.source.exclusions.is_excluded(info.number.0).await?;
                    if is_excluded {
                        return Ok(Found::Excluded);
                    }
                    self.check_missing(info).await?;
                    return Ok(Found::Missing);
                }
                Err(error) => return Err(error.context("copy the pool")),
            };
            match self.source.pool.verify(info, &object).await? {
                None => break object,
                // The transfer may have been bad, not the object.
                Some(_) if !is_second => is_second = true,
                Some(why) => {
                    if !seeded_bugs.damage_overwrites && self.has_whole(segment).await? {
                        return Ok(Found::Whole);
                    }
                    // Write the mark first, so that a later run knows that this segment must be
                    // examined again.
                    let mark = damaged_path(info.number.0);
                    let marked = self.target.put(&mark, PutPayload::new());
                    marked.await.map_err(|cause| target_error(format!("copy {path}"), cause))?;
                    tracing::error!(
                        object = %path, why,
                        "a segment is damaged in the pool's store, and was copied as it is; \
                         `spindle fsck` names its data"
                    );
                    is_damaged = true;
                    break object;
                }
            }
        };
        let bytes = object.len() as u64;
        let put = self.copied.replace(segment, object).await;
        put.map_err(|cause| target_error(format!("copy {path}"), cause))?;
        self.count(bytes);
        Ok(if is_damaged { Found::Damaged } else { Found::Whole })
    }

    /// Returns whether the segment in the copy is intact: it was copied before the damage, or was
    /// put there since.
    async fn has_whole(&self, segment: &StoredSegment) -> Result<bool> {
        let info = &segment.info;
        let object = match self.copied.read_whole(segment).await {
            Ok(object) => object,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(cause) => {
                let doing = format!("read {} of the copy", info.name());
                return Err(target_error(doing, cause));
            }
        };
        Ok(self.source.pool.verify(info, &object).await?.is_none())
    }

    /// Logs a missing segment as damage. Fails if the pool no longer references it, or is no longer
    /// owned by this process, because then it may have been reclaimed.
    async fn check_missing(&self, info: &SegmentInfo) -> Result<()> {
        let named = {
            let writer = self.source.metadata.writer.lock().await;
            self.source.metadata.map.check(&writer)?;
            self.source.metadata.map.find_segment(info.number.0).await?
        };
        if named.is_none_or(|record| !record.is_of(info)) {
            return Err(reclaimed());
        }
        if !self.source.pool.seeded_bugs.missing_unowned {
            self.source.pool.check_owner().await?;
        }
        tracing::error!(
            object = %info.object_path(),
            "a segment is missing in the pool's store, and so in the copy; `spindle fsck` names \
             its data"
        );
        Ok(())
    }
}

fn reclaimed() -> Error {
    let what = "copy the pool: it has reclaimed a segment of the state that was being copied; a newer state is \
                copied instead";
    Error::new(ErrorKind::Unavailable, what)
}
