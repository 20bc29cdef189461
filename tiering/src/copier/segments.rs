//! The segments of a state, copied: each one is verified on its way, and what is damaged or missing is noted.

use super::replaced::Replaced;
use super::transfer::{each, source_error, target_error};
use super::{Copier, Held, STEP, damaged_path, held_of, path_of, verify};
use crate::map::Map;
use crate::map::records::{Root, SegmentRecord};
use crate::orphans::Hold;
use crate::segment::SegmentInfo;
use block::{Error, ErrorKind, Result};
use object_store::{ObjectStoreExt, PutPayload};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A segment that was damaged or missing in the pool's store is looked at again after so long: it may have been mended,
/// or only what was read was damaged.
const BAD_AGAIN: Duration = Duration::from_secs(3600);

/// What the pool's store had of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Whole,
    Damaged,
    Missing,
    /// The pool was restored from a copy that was not to have it.
    LeftOut,
}

impl Copier {
    /// Returns how many segments the state has, and their bytes.
    pub(super) async fn copy_segments(
        &mut self,
        map: &Map,
        root: &Root,
        hold: &Hold,
        replaced: &mut Replaced,
    ) -> Result<(u64, u64)> {
        let (mut count, mut bytes, mut last) = (0, 0, 0);
        let mut is_any_left_out = false;
        loop {
            let (records, next) = map.live_after(last, STEP).await?;
            let end = next.unwrap_or(u64::MAX);
            let named: BTreeMap<u64, SegmentRecord> =
                records.iter().map(|(record, _)| (record.info.number.0, *record)).collect();
            let named = self.needed(map, named, (last + 1, end)).await?;
            let has = |number: &u64, held: &Held| {
                named.get(number).is_some_and(|record| held_of(&record.info) == *held)
            };
            let mut gone_numbers = Vec::new();
            let gone =
                self.segments.range(last + 1..=end).filter(|(number, held)| !has(number, held));
            for (number, held) in gone {
                match named.contains_key(number) {
                    // Of a life of the pool that was undone. It is copied under its own name.
                    true => self.strays.push(path_of(*number, *held)),
                    false => gone_numbers.push(*number),
                }
            }
            for number in gone_numbers {
                // A record that does not open was passed over: what the copy has of it may be all that there is.
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
                Some(at) => at.is_none_or(|at| at.elapsed() > BAD_AGAIN),
                None => self.segments.get(&info.number.0) != Some(&held_of(info)),
            };
            let missing: Vec<SegmentInfo> =
                named.values().map(|record| record.info).filter(is_wanted).collect();
            let this = &*self;
            let (copied, done) = each(missing, |info| async move {
                let found = this.copy_segment(&info).await?;
                this.progress.looked_segment.fetch_max(info.number.0, Ordering::Relaxed);
                Ok((info, found))
            })
            .await;
            for (info, found) in copied {
                let number = info.number.0;
                match found {
                    Found::Whole => {
                        if self.bad.remove(&number).is_some() {
                            self.strays.push(damaged_path(number));
                        }
                    }
                    Found::Damaged | Found::Missing => self.note_bad(number, found),
                    Found::LeftOut => {
                        is_any_left_out = true;
                        continue;
                    }
                }
                if found != Found::Missing {
                    self.segments.insert(number, held_of(&info));
                }
            }
            done?;
            count += named.len() as u64;
            bytes += named.values().map(|record| u64::from(record.info.object_bytes)).sum::<u64>();
            let Some(next) = next else {
                if is_any_left_out {
                    let what = "copy the pool: it was restored from a copy of some volumes, and what that lacked on purpose \
                                is not forgotten yet; a state without it is copied instead";
                    return Err(Error::new(ErrorKind::Unavailable, what));
                }
                return Ok((count, bytes));
            };
            last = next;
            hold.release_below(last + 1);
            self.progress.set_pass(last, root.next_segment);
        }
    }

    /// Counts it once, and notes when it was found.
    fn note_bad(&mut self, number: u64, found: Found) {
        let is_new = self.bad.insert(number, Some(Instant::now())).is_none();
        let count = match found {
            Found::Missing => &self.progress.missing_count,
            Found::Whole | Found::Damaged | Found::LeftOut => &self.progress.damaged_count,
        };
        count.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    async fn copy_segment(&self, info: &SegmentInfo) -> Result<Found> {
        self.pace.wait(u64::from(info.object_bytes)).await;
        let _place = self.inner.copy_places.acquire().await;
        let path = info.object_path();
        let (mut is_second, mut is_damaged) = (false, false);
        let planted = self.inner.options.planted;
        let object = loop {
            let object = match self.inner.store.get(&path).await {
                Ok(got) => got.bytes().await,
                Err(cause) => Err(cause),
            };
            let object = match object {
                Ok(object) => object,
                Err(object_store::Error::NotFound { .. }) => {
                    // Reclaim forgets it soon.
                    let may_be = self.inner.may_be_left_out(info.number.0);
                    let is_left_out = (may_be && self.inner.is_counting_out())
                        || self.inner.is_left_out(info.number.0).await?;
                    if is_left_out {
                        return Ok(Found::LeftOut);
                    }
                    self.check_missing(info).await?;
                    return Ok(Found::Missing);
                }
                Err(cause) => return Err(source_error(&path, cause)),
            };
            match verify(&self.inner, info, &object).await? {
                None => break object,
                // The way may have been bad, not the object.
                Some(_) if !is_second => is_second = true,
                Some(why) => {
                    if !planted.damage_overwrites && self.has_whole(info).await? {
                        return Ok(Found::Whole);
                    }
                    // Before it: whoever copies next knows that this one is to be looked at again.
                    let mark = damaged_path(info.number.0);
                    let marked = self.target.put(&mark, PutPayload::new());
                    marked.await.map_err(|cause| target_error(format!("copy {path}"), cause))?;
                    tracing::error!(
                        object = %path, why,
                        "a segment is damaged in the pool's store, and was copied as it is; `spindle fsck` says what \
                         it holds"
                    );
                    is_damaged = true;
                    break object;
                }
            }
        };
        let bytes = object.len() as u64;
        let put = self.target.put(&path, object.into()).await;
        put.map_err(|cause| target_error(format!("copy {path}"), cause))?;
        self.count(bytes);
        Ok(if is_damaged { Found::Damaged } else { Found::Whole })
    }

    /// What the copy has of a segment is whole: it was copied before the damage, or put there since.
    async fn has_whole(&self, info: &SegmentInfo) -> Result<bool> {
        let path = info.object_path();
        let failed = |cause| target_error(format!("read {path} of the copy"), cause);
        let object = match self.target.get(&path).await {
            Ok(got) => got.bytes().await.map_err(failed)?,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(cause) => return Err(failed(cause)),
        };
        Ok(verify(&self.inner, info, &object).await?.is_none())
    }

    /// A segment that was not there is damage only if the pool still names it, and is still ours: whoever has it now may
    /// have reclaimed that.
    async fn check_missing(&self, info: &SegmentInfo) -> Result<()> {
        let named = {
            let writer = self.inner.writer.lock().await;
            self.inner.map.check(&writer)?;
            self.inner.map.find_segment(info.number.0).await?
        };
        if named.is_none_or(|record| record.info != *info) {
            let what = "copy the pool: it has reclaimed a segment of the state that was being copied; a newer state is \
                        copied instead";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        if !self.inner.options.planted.missing_unowned {
            self.inner.check_owner().await?;
        }
        tracing::error!(
            object = %info.object_path(),
            "a segment is missing in the pool's store, and so in the copy; `spindle fsck` says what it held"
        );
        Ok(())
    }
}
