//! Writes the live blocks of the segments of a step to new segments.

use super::Reclaim;
use super::liveness::Liveness;
use super::referenced::NOBODY;
use super::relocate::ByPlace;
use super::victims::Victim;
use super::{
    BLOCK, FRAMES_AT_ONCE, Live, READS_AT_ONCE, SEGMENT_BYTES_MAX, STATES_AT_ONCE, VICTIMS_TIME_MAX,
};
use crate::destage::pack::{Packer, Piece};
use crate::destage::write::{SegmentWriter, Written};
use crate::fetch::Access;
use crate::map::LayerId;
use crate::map::records::SegmentRecord;
use crate::segment::FrameRef;
use block::buffers::part_of;
use block::{Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Live blocks that were rewritten, and the segments that are empty as a result.
pub(super) struct Rewritten {
    pub live: Vec<Live>,
    pub settled: Vec<(LayerId, u32)>,
    pub emptied: Vec<SegmentRecord>,
    pub written: Written,
    /// Bytes of frames that were read.
    pub read_bytes: u64,
    /// Moves by place: see [`super::referenced`].
    pub by_place: ByPlace,
}

/// Reason why a segment could not be rewritten.
enum Stopped {
    /// It cannot be read.
    Reading(Error),
    /// A new segment cannot be written.
    Writing(Error),
}

impl Reclaim {
    /// Writes the live blocks of the victims to new segments.
    pub(super) async fn rewrite_victims(self: &Arc<Self>, victims: &[Victim]) -> Result<Rewritten> {
        let segment_bytes = self.output.settings.segment_bytes.min(SEGMENT_BYTES_MAX);
        let mut writer = SegmentWriter::new(&self.output, 1, segment_bytes);
        // Segments with the same key follow one another, so that their blocks share new segments.
        let mut victims: Vec<&Victim> = victims.iter().collect();
        victims.sort_by_key(|victim| victim.record.info.key);
        let (mut live, mut emptied, mut read_bytes) = (Vec::new(), Vec::new(), 0);
        let (mut settled, mut blocks) = (Vec::new(), HashSet::new());
        let (mut state_count, mut nobody) = (0, 0);
        let mut by_place = ByPlace::default();
        let mut later = Vec::new();
        let begun = self.pool.clock.now();
        // Clear it also after a step that was dropped.
        self.state.lock().looking = None;
        for victim @ Victim { record, .. } in victims {
            if self.pool.clock.since(begun) > VICTIMS_TIME_MAX {
                later.push(victim.clone()); // do not waste the work done so far
                continue;
            }
            if self.pool.seeded_bugs.forget_unchecked {
                emptied.push(record.clone());
                continue;
            }
            self.state.lock().looking = Some(record.info.number.0);
            let look = self.look_into(record, &mut nobody, begun).await;
            self.state.lock().looking = None;
            let look = match look {
                Ok(Some(look)) => look,
                Ok(None) => continue, // forgotten meanwhile
                // It may be missing on purpose: then no volume of the copy has ever referenced it,
                // and the references of the dropped volumes are subtracted sooner or later.
                Err(error) if self.may_lack(record, &error) => match self.live_of(victim).await? {
                    0 => match self.look_at_excluded(record).await {
                        Ok(look) => look,
                        Err(error) => {
                            self.leave_alone(record, error)?;
                            continue;
                        }
                    },
                    _ if self.exclusions.is_counting_out() => {
                        self.state.lock().is_pass_wanted = true;
                        continue;
                    }
                    _ => {
                        self.leave_alone(record, error)?;
                        continue;
                    }
                },
                Err(error) => {
                    self.leave_alone(record, error)?;
                    continue;
                }
            };
            let is_too_much = state_count > 0 && state_count + look.state_count > STATES_AT_ONCE;
            if is_too_much || overlaps(&look.live, &blocks) {
                // The step would be too large, or the segment has another version of a block. It is
                // handled later.
                later.push(victim.clone());
                continue;
            }
            for one in &look.live {
                blocks.extend(one.blocks());
            }
            match self.rewrite(record, &look.live, &mut writer).await {
                Ok(bytes) => read_bytes += bytes,
                // The volumes were dropped together with their key, and their pages are being
                // dropped too.
                Err(Stopped::Reading(_)) if self.is_dropped_with_key(record, &look) => {
                    self.state.lock().is_pass_wanted = true;
                    continue;
                }
                // Blocks of it that were read are not moved either.
                Err(Stopped::Reading(error)) => {
                    self.leave_alone(record, error)?;
                    continue;
                }
                Err(Stopped::Writing(error)) => return Err(error),
            }
            state_count += look.state_count;
            let is_step =
                !look.live.is_empty() || !look.settled.is_empty() || !look.needless.is_empty();
            match look.is_cut {
                true if is_step => later.push(victim.clone()),
                // It is hidden only by ranges that are yet to be folded.
                true => self.state.lock().is_pass_wanted = true,
                false if look.has_hidden => {}
                false => emptied.push(record.clone()),
            }
            if let Some(references) = look.references {
                let number = record.info.number.0;
                if !look.live.is_empty() {
                    by_place.live.insert(number);
                }
                by_place.references.insert(number, references);
                let needless = look.needless.into_iter();
                by_place.needless.extend(needless.map(|(layer, page)| (number, layer, page)));
                by_place.naming.extend(look.naming);
                by_place.foreign.extend(look.foreign);
            }
            live.extend(look.live);
            settled.extend(look.settled);
        }
        settled.sort_unstable();
        settled.dedup();
        self.state.lock().victims.extend(later.into_iter().rev());
        let written = writer.finish().await?;
        Ok(Rewritten { live, settled, emptied, written, read_bytes, by_place })
    }

    /// Returns the present count: references may have been subtracted since it became a victim.
    async fn live_of(&self, victim: &Victim) -> Result<u32> {
        match victim.live {
            0 => Ok(0),
            _ if self.exclusions.is_counting_out() => Ok(victim.live),
            _ => self.metadata.map.live_blocks(victim.record.info.number.0).await,
        }
    }

    fn is_dropped_with_key(&self, record: &SegmentRecord, look: &Liveness) -> bool {
        // Blocks that only other pages reference are under no layer.
        let own = look.live.iter().map(|one| one.layer).filter(|layer| *layer != NOBODY);
        let naming = look.naming.iter().map(|(layer, _)| *layer);
        let volumes: BTreeSet<VolumeId> = own.chain(naming).map(LayerId::volume).collect();
        !self.pool.seeded_bugs.keyless_damaged
            && !self.pool.volume_keys.has(record.info.key)
            && !volumes.is_empty()
            && volumes.iter().all(|volume| self.metadata.is_dropping(|one| one == *volume))
    }

    fn may_lack(&self, record: &SegmentRecord, error: &Error) -> bool {
        error.kind() == ErrorKind::NotFound && self.exclusions.may_be_excluded(record.info.number.0)
    }

    /// Writes the live blocks of a segment, sorted, to new ones. Returns the bytes of their frames.
    async fn rewrite(
        &self,
        record: &SegmentRecord,
        live: &[Live],
        writer: &mut SegmentWriter,
    ) -> Result<u64, Stopped> {
        let key = record.info.key;
        if !live.is_empty() && !self.pool.volume_keys.has(key) {
            let what = format!("{}: volumes still name it, but {key} is not there", record.info);
            return Err(Stopped::Reading(Error::new(ErrorKind::NotFound, what)));
        }
        writer.set_key(key).await.map_err(Stopped::Writing)?;
        // If the segment has fingerprints, its blocks remain candidates for deduplication.
        let number = record.info.number.0;
        let fingerprinter = match live.is_empty() {
            true => None,
            false => match self.metadata.map.fingerprints(number).await {
                Ok(found) => found.and_then(|_| self.dedup.fingerprinter(key)),
                // Fingerprints decide nothing, so damage to them is ignored.
                Err(error) if error.kind() == ErrorKind::Corrupt => None,
                Err(error) => return Err(Stopped::Reading(error)),
            },
        };
        let mut frames: Vec<FrameRef> = Vec::new();
        for one in live {
            let frame = record.frame(one.from.at);
            if frames.last() != Some(&frame) {
                frames.push(frame);
            }
        }
        let read_bytes = frames.iter().map(|frame| u64::from(frame.at.sealed_bytes)).sum();
        let local_count =
            frames.iter().filter(|frame| self.segments.frames.is_local(frame)).count();
        writer.set_cached(2 * local_count > frames.len());
        let mut packer: Option<(LayerId, Packer)> = None;
        let mut pieces: Vec<Piece> = Vec::new();
        let mut rest = live;
        let mut reads =
            futures::stream::iter(frames.chunks(FRAMES_AT_ONCE).map(<[FrameRef]>::to_vec))
                .map(|frames| async move {
                    let read = self.segments.frames.read_many(&frames, Access::Once).await?;
                    Ok::<_, Error>((frames, read))
                })
                .buffered(READS_AT_ONCE);
        while let Some((frames, read)) = reads.try_next().await.map_err(Stopped::Reading)? {
            for (frame, plain) in frames.iter().zip(read) {
                let count = rest.iter().take_while(|one| one.from.at == frame.at).count();
                let (now, later) = rest.split_at(count);
                rest = later;
                for one in now {
                    if packer.as_ref().is_some_and(|(layer, _)| *layer != one.layer) {
                        pieces.extend(packer.take().and_then(|(_, mut packer)| packer.end()));
                    }
                    let (_, packer) = packer.get_or_insert_with(|| {
                        (one.layer, Packer::new(one.layer, self.output.settings.frame_blocks))
                    });
                    let bytes = blocks_of(record, frame, &plain, one).map_err(Stopped::Reading)?;
                    let fingerprints: Vec<u64> = fingerprinter
                        .map(|fingerprinter| fingerprinter.of_blocks(&bytes).collect())
                        .unwrap_or_default();
                    packer.add(one.first_block, bytes, &fingerprints, &mut pieces);
                }
            }
            for piece in pieces.drain(..) {
                writer.add(piece).await.map_err(Stopped::Writing)?;
            }
        }
        pieces.extend(packer.and_then(|(_, mut packer)| packer.end()));
        for piece in pieces {
            writer.add(piece).await.map_err(Stopped::Writing)?;
        }
        Ok(read_bytes)
    }
}

fn overlaps(live: &[Live], blocks: &HashSet<(LayerId, u64)>) -> bool {
    live.iter().any(|one| one.blocks().any(|block| blocks.contains(&block)))
}

/// Returns the bytes of live blocks within their frame.
fn blocks_of(record: &SegmentRecord, frame: &FrameRef, plain: &Bytes, one: &Live) -> Result<Bytes> {
    let start = usize::from(one.from.within) * BLOCK;
    let end = start + one.block_count as usize * BLOCK;
    if end > plain.len() {
        let index = frame.at.frame_index;
        let what =
            format!("{}, frame {index}: it holds fewer blocks than the map says", record.info);
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    // A segment gathers many of these; a single block must not keep a frame of sixteen blocks in
    // memory.
    Ok(part_of(plain, start..end))
}
