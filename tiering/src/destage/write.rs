//! Writes segments to the store: builds, uploads and caches them.
//!
//! Invariants:
//! - Besides the segment being gathered, at most as many segments are in memory as
//!   [`SegmentWriter::new`] was given.
//! - All frames of a segment are sealed with one key.
//! - The uploads of a dropped writer are abandoned. The committer is responsible for the objects
//!   that [`SegmentWriter::finish`] returns.

use super::buffers::Buffers;
use super::pack::Piece;
use super::{BLOCK, FOOTER_ROOM_BYTES, RETRY_PAUSE_MAX, RETRY_PAUSE_MIN, URGENT_LEVEL, micros};
use crate::dedup::fingerprints::FrameFingerprints;
use crate::dedup::index::ByFingerprint;
use crate::fail_point;
use crate::keys::KeyId;
use crate::map::records::SegmentRecord;
use crate::map::{Change, Placed};
use crate::outage::Outage;
use crate::pool::{Metadata, Pool, Segments};
use crate::segment::build::FRAME_OVERHEAD_BYTES;
use crate::segment::{
    FrameAt, Placement, SealedSegment, SegmentBuilder, SegmentError, SegmentName, SegmentNumber,
    SegmentSeed,
};
use crate::segment_store::Leftover;
use block::env::SystemRandom;
use block::seal::Algorithm;
use block::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::task::JoinSet;

/// Counts of the data written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteReport {
    pub segment_count: u64,
    pub object_bytes: u64,
    pub stored_block_count: u64,
    pub zero_block_count: u64,
    /// Blocks that are equal to another one in the same segment.
    pub duplicate_count: u64,
    pub build_us: u64,
}

/// Segments that are durable in the store, in order of number, and the changes that they imply for
/// the map.
#[derive(Debug)]
pub(crate) struct Written {
    pub segments: Vec<SegmentRecord>,
    pub changes: Vec<Change>,
    /// Fingerprints, for the segments that have some.
    pub fingerprints: Vec<(u64, Vec<FrameFingerprints>)>,
    pub report: WriteReport,
}

/// One stored segment.
struct Stored {
    record: Option<SegmentRecord>,
    changes: Vec<Change>,
    fingerprints: Vec<FrameFingerprints>,
    report: WriteReport,
}

/// Size and compression of new segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteSettings {
    pub algorithm: Algorithm,
    pub zstd_level: i32,
    /// Bytes of uncompressed blocks that fill a segment.
    pub segment_bytes: usize,
    /// Blocks in a frame of sequential data.
    pub frame_blocks: u8,
    /// Maximum number of segments of a destage in memory.
    pub segments_in_flight_max: usize,
}

/// What all writers of a pool share.
pub(crate) struct Output {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
    pub settings: WriteSettings,
    pub buffers: Arc<Buffers>,
    /// The outage of uploads, if there is one.
    pub uploads: Outage,
    pub upload_retry_count: AtomicU64,
    /// See [`crate::Tier::set_urgent`].
    pub is_urgent: AtomicBool,
}

/// The writer; see the module.
pub(crate) struct SegmentWriter {
    output: Arc<Output>,
    in_flight_max: usize,
    segment_bytes: usize,
    key: KeyId,
    is_cached: bool,
    /// Whether blocks are compared with earlier ones of their segment.
    is_dedup: bool,
    /// Fingerprints of segments that are under way.
    under_way: ByFingerprint<()>,
    /// Segments that may be in the store once the upload has begun; abandoned if the writer is
    /// dropped.
    names: Vec<SegmentName>,
    group: Vec<Piece>,
    group_bytes: usize,
    running: JoinSet<Result<Stored>>,
    written: Written,
}

impl Drop for SegmentWriter {
    fn drop(&mut self) {
        let names = self.names.drain(..);
        self.output
            .segments
            .leftovers
            .abandon(names.map(|name| Leftover { name, placement: None }));
    }
}

impl SegmentWriter {
    /// Creates a writer that builds and uploads `in_flight_max` segments concurrently, at least
    /// one. Each holds `segment_bytes` before compression.
    pub fn new(output: &Arc<Output>, in_flight_max: usize, segment_bytes: usize) -> SegmentWriter {
        let written = Written {
            segments: Vec::new(),
            changes: Vec::new(),
            fingerprints: Vec::new(),
            report: WriteReport::default(),
        };
        SegmentWriter {
            output: output.clone(),
            in_flight_max: in_flight_max.max(1),
            segment_bytes,
            key: KeyId::POOL,
            is_cached: true,
            is_dedup: false,
            under_way: ByFingerprint::default(),
            names: Vec::new(),
            group: Vec::new(),
            group_bytes: 0,
            running: JoinSet::new(),
            written,
        }
    }

    /// Sets whether segments written from here on enter the read cache. The default is true.
    pub fn set_cached(&mut self, is_cached: bool) {
        self.is_cached = is_cached;
    }

    /// Enables deduplication within a segment for blocks that have fingerprints.
    pub fn set_dedup(&mut self) {
        self.is_dedup = true;
    }

    /// If a segment under way contains a block with one of these fingerprints, waits for all
    /// segments under way. Returns the segments that are done.
    pub async fn settle(
        &mut self,
        mut fingerprints: impl Iterator<Item = u64>,
    ) -> Result<&Written> {
        if fingerprints.any(|fingerprint| self.under_way.contains_key(&fingerprint)) {
            while !self.running.is_empty() {
                self.join_one().await?;
            }
        }
        if self.running.is_empty() {
            self.under_way.clear();
        }
        Ok(&self.written)
    }

    /// Seals frames that are added from here on with this key.
    pub async fn set_key(&mut self, key: KeyId) -> Result<()> {
        if self.key != key && !self.group.is_empty() && !self.output.pool.seeded_bugs.mixed_keys {
            self.start_group().await?;
        }
        self.key = key;
        Ok(())
    }

    /// Adds a frame. Waits if too many segments are under way.
    pub async fn add(&mut self, piece: Piece) -> Result<()> {
        self.group_bytes += piece.plaintext.len();
        self.group.push(piece);
        if self.group_bytes >= self.segment_bytes {
            self.start_group().await?;
        }
        Ok(())
    }

    /// Starts building the gathered frames, once there is room for one more segment in memory.
    async fn start_group(&mut self) -> Result<()> {
        while self.running.len() >= self.in_flight_max {
            self.join_one().await?;
        }
        let pieces = std::mem::take(&mut self.group);
        self.group_bytes = 0;
        if self.is_dedup {
            if self.running.is_empty() {
                self.under_way.clear();
            }
            let fingerprints = pieces.iter().flat_map(|piece| &piece.fingerprints);
            self.under_way.extend(fingerprints.map(|fingerprint| (*fingerprint, ())));
        }
        let number =
            SegmentNumber(self.output.metadata.next_segment.fetch_add(1, Ordering::SeqCst));
        let (pool, algorithm) = (&self.output.pool, self.output.settings.algorithm);
        let seed = SegmentSeed::new(pool.id, pool.epoch, number, algorithm, &SystemRandom)
            .with_key(self.key);
        self.names.push(seed.name());
        let output = self.output.clone();
        let stored = output.store_segment(seed, pieces, self.is_cached, self.is_dedup);
        self.running.spawn_on(stored, &self.output.pool.background);
        Ok(())
    }

    async fn join_one(&mut self) -> Result<()> {
        let Some(joined) = self.running.join_next().await else { return Ok(()) };
        let stored =
            joined.map_err(|cause| Error::with_source(ErrorKind::Io, "store segment", cause))??;
        let Written { segments, changes, fingerprints, report } = &mut self.written;
        if let Some(record) = stored.record.as_ref().filter(|_| !stored.fingerprints.is_empty()) {
            fingerprints.push((record.info.number.0, stored.fingerprints));
        }
        segments.extend(stored.record);
        changes.extend(stored.changes);
        report.duplicate_count += stored.report.duplicate_count;
        report.segment_count += stored.report.segment_count;
        report.object_bytes += stored.report.object_bytes;
        report.stored_block_count += stored.report.stored_block_count;
        report.zero_block_count += stored.report.zero_block_count;
        report.build_us += stored.report.build_us;
        Ok(())
    }

    /// Waits for every segment. From then on the caller is responsible for the objects.
    pub async fn finish(mut self) -> Result<Written> {
        if !self.group.is_empty() {
            self.start_group().await?;
        }
        while !self.running.is_empty() {
            self.join_one().await?;
        }
        self.names.clear();
        let mut written = Written {
            segments: std::mem::take(&mut self.written.segments),
            changes: std::mem::take(&mut self.written.changes),
            fingerprints: std::mem::take(&mut self.written.fingerprints),
            report: self.written.report,
        };
        written.segments.sort_unstable_by_key(|record| record.info.number);
        Ok(written)
    }
}

impl Output {
    /// Stores a segment, waiting for the store as long as it takes.
    async fn upload(&self, segment: &SealedSegment) -> Result<Placement> {
        let mut pause = RETRY_PAUSE_MIN;
        let mut has_differed = false;
        loop {
            let failed = match self.segments.store.put(segment).await {
                Ok(placement) => {
                    self.uploads.clear();
                    return Ok(placement);
                }
                // The transfer may have been bad, so the next attempt reads the segment once more.
                Err(failed @ object_store::Error::AlreadyExists { .. }) if !has_differed => {
                    has_differed = true;
                    failed
                }
                Err(object_store::Error::AlreadyExists { .. }) => {
                    let what = format!("write {}: other bytes are there", segment.info);
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
                Err(
                    failed @ (object_store::Error::NotSupported { .. }
                    | object_store::Error::NotImplemented { .. }),
                ) => {
                    let what = format!("write {}", segment.info);
                    return Err(Error::with_source(ErrorKind::Unsupported, what, failed));
                }
                Err(failed) => failed,
            };
            self.upload_retry_count.fetch_add(1, Ordering::Relaxed);
            self.uploads.note(&failed);
            tracing::debug!(
                object = %segment.info.name(), error = %failed,
                "could not write a segment; trying again"
            );
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Builds and uploads one segment, and caches it if requested.
    async fn store_segment(
        self: Arc<Self>,
        seed: SegmentSeed,
        pieces: Vec<Piece>,
        is_cached: bool,
        is_dedup: bool,
    ) -> Result<Stored> {
        let output = self.clone();
        let built = tokio::task::spawn_blocking(move || build(&output, seed, &pieces, is_dedup));
        let (segment, mut stored) = built
            .await
            .map_err(|cause| Error::with_source(ErrorKind::Io, "build segment", cause))??;
        fail_point!("destage-segment-built");
        if let Some(segment) = segment {
            let placement = self.upload(&segment).await?;
            fail_point!("destage-segment-uploaded");
            if is_cached {
                self.segments.frames.insert_segment(&segment.info, segment.bytes.clone());
            }
            let block_count = u32::try_from(stored.report.stored_block_count)
                .expect("a segment has fewer than 2^24 blocks");
            stored.record = Some(SegmentRecord { info: segment.info, placement, block_count });
            stored.report.segment_count = 1;
            stored.report.object_bytes = segment.info.object_bytes.into();
        }
        Ok(stored)
    }
}

/// Compresses and seals the frames: the part that takes CPU time.
fn build(
    output: &Output,
    seed: SegmentSeed,
    pieces: &[Piece],
    is_dedup: bool,
) -> Result<(Option<SealedSegment>, Stored)> {
    let started = output.pool.clock.now();
    let root = output.pool.volume_keys.root(seed.key, &output.pool.key);
    let root =
        root.ok_or_else(|| SegmentError::NoKey(seed.key).into_error("build segment".to_owned()))?;
    let plain_bytes: usize = pieces.iter().map(|piece| piece.plaintext.len()).sum();
    let number = seed.number.0;
    // Reserve room for the worst case, in which nothing compresses: growing means copying, and
    // memory that is never written to costs nothing.
    let room = plain_bytes + pieces.len() * FRAME_OVERHEAD_BYTES + FOOTER_ROOM_BYTES;
    let bytes = output.buffers.take(room);
    let level = match output.is_urgent.load(Ordering::Relaxed) {
        true => output.settings.zstd_level.min(URGENT_LEVEL),
        false => output.settings.zstd_level,
    };
    let mut builder = SegmentBuilder::new_in(seed, &output.pool.key, &root, level, bytes);
    let mut stored = Stored {
        record: None,
        changes: Vec::with_capacity(pieces.len()),
        fingerprints: Vec::new(),
        report: WriteReport::default(),
    };
    let mut seen =
        Seen { is_trusting: output.pool.seeded_bugs.fingerprints_trusted, ..Seen::default() };
    for piece in pieces {
        let mut at = 0;
        while at < piece.plaintext.len() {
            let first_block = piece.first_block + (at / BLOCK) as u64;
            let (kind, end) = seen.next_part(piece, at, is_dedup);
            let block_count = ((end - at) / BLOCK) as u64;
            let placed = match kind {
                Part::Zeroes => {
                    stored.report.zero_block_count += block_count;
                    None
                }
                Part::Duplicate(placed) => {
                    stored.report.duplicate_count += block_count;
                    Some(placed)
                }
                Part::New => {
                    stored.report.stored_block_count += block_count;
                    let frame: FrameAt =
                        builder.push(piece.layer.0, first_block, &piece.plaintext[at..end]);
                    let placed = Placed { segment: number, at: frame, within: 0 };
                    if !piece.fingerprints.is_empty() {
                        let fingerprints = piece.fingerprints[at / BLOCK..end / BLOCK].to_vec();
                        seen.add(placed, piece, at, &fingerprints);
                        stored.fingerprints.push(FrameFingerprints { at: frame, fingerprints });
                    }
                    Some(placed)
                }
            };
            let is_duplicate = matches!(kind, Part::Duplicate(_));
            let layer = piece.layer;
            stored.changes.push(Change { layer, first_block, block_count, placed, is_duplicate });
            at = end;
        }
    }
    let segment = (builder.frame_count() > 0).then(|| {
        let (info, bytes) = builder.finish_in();
        SealedSegment { info, bytes: output.buffers.share(bytes) }
    });
    stored.report.build_us = micros(output.pool.clock.since(started));
    Ok((segment, stored))
}

/// Classification of consecutive blocks of a piece.
enum Part {
    Zeroes,
    /// One block that is equal to one already in the segment.
    Duplicate(Placed),
    New,
}

/// Blocks of a segment under construction, by their fingerprints.
#[derive(Default)]
struct Seen<'a> {
    blocks: ByFingerprint<(Placed, &'a [u8])>,
    is_trusting: bool,
}

impl<'a> Seen<'a> {
    /// Classifies the blocks from `at` on, and returns the end of that part.
    fn next_part(&self, piece: &Piece, at: usize, is_dedup: bool) -> (Part, usize) {
        let block = |at: usize| &piece.plaintext[at..at + BLOCK];
        let fingerprint = |at: usize| piece.fingerprints.get(at / BLOCK).filter(|_| is_dedup);
        let duplicate = |at: usize| {
            let (placed, bytes) = self.blocks.get(fingerprint(at)?)?;
            (self.is_trusting || *bytes == block(at)).then_some(*placed)
        };
        let is_first_zero = is_zero(block(at));
        if !is_first_zero && let Some(placed) = duplicate(at) {
            return (Part::Duplicate(placed), at + BLOCK);
        }
        let mut end = at + BLOCK;
        while end < piece.plaintext.len() && is_first_zero == is_zero(block(end)) {
            // The next block may be equal to a block of this part, which is registered only when
            // the part is stored.
            let is_seen = |&before: &usize| fingerprint(before) == fingerprint(end);
            let is_own =
                fingerprint(end).is_some() && (at..end).step_by(BLOCK).any(|b| is_seen(&b));
            if !is_first_zero && (is_own || duplicate(end).is_some()) {
                break;
            }
            end += BLOCK;
        }
        (if is_first_zero { Part::Zeroes } else { Part::New }, end)
    }

    /// Adds the blocks of a frame, which begin at `at` in a piece. An existing entry of a
    /// fingerprint is kept.
    fn add(&mut self, placed: Placed, piece: &'a Piece, at: usize, fingerprints: &[u64]) {
        let blocks = piece.plaintext[at..].chunks_exact(BLOCK);
        for ((fingerprint, bytes), within) in fingerprints.iter().zip(blocks).zip(0u8..) {
            let placed = Placed { within, ..placed };
            self.blocks.entry(*fingerprint).or_insert((placed, bytes));
        }
    }
}

/// Returns whether a block contains only zeroes. Most other blocks are recognized from their first
/// bytes.
pub(super) fn is_zero(block: &[u8]) -> bool {
    block.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}
