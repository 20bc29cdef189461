//! Segments on their way into the store: built, uploaded, cached.
//!
//! Invariants:
//! - At most [`SegmentWriter::new`]'s number of segments is in memory beside the one that is gathered.
//! - A segment is under one key.
//! - What a writer that is dropped has uploaded is abandoned; what [`SegmentWriter::finish`] returns,
//!   whoever commits it answers for.

use super::pack::Piece;
use super::{BLOCK, FOOTER_ROOM_BYTES, RETRY_PAUSE_MAX, RETRY_PAUSE_MIN, URGENT_LEVEL, micros};
use crate::fail_point;
use crate::keys::KeyId;
use crate::map::records::SegmentRecord;
use crate::map::{Change, Placed};
use crate::segment::build::FRAME_OVERHEAD_BYTES;
use crate::segment::{
    FrameAt, SealedSegment, SegmentBuilder, SegmentError, SegmentNumber, SegmentSeed,
};
use crate::tier::Inner;
use block::env::SystemRandom;
use block::{Error, ErrorKind, Result};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::task::JoinSet;

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteReport {
    pub segment_count: u64,
    pub object_bytes: u64,
    pub stored_block_count: u64,
    pub zero_block_count: u64,
    pub build_us: u64,
}

/// Segments that are durable in the store, in order of number, and what they mean to the map.
#[derive(Debug)]
pub(crate) struct Written {
    pub segments: Vec<SegmentRecord>,
    pub changes: Vec<Change>,
    pub report: WriteReport,
}

/// One of them.
struct Stored {
    record: Option<SegmentRecord>,
    changes: Vec<Change>,
    report: WriteReport,
}

/// See the module.
pub(crate) struct SegmentWriter {
    inner: Arc<Inner>,
    in_flight_max: usize,
    segment_bytes: usize,
    key: KeyId,
    is_cached: bool,
    /// Objects that the store may hold once this has begun; abandoned if it is dropped.
    names: Vec<Path>,
    group: Vec<Piece>,
    group_bytes: usize,
    running: JoinSet<Result<Stored>>,
    written: Written,
}

impl Drop for SegmentWriter {
    fn drop(&mut self) {
        self.inner.orphans.abandon(std::mem::take(&mut self.names));
    }
}

impl SegmentWriter {
    /// `in_flight_max` segments are built and uploaded at the same time, at least one; each is of
    /// `segment_bytes` before compression.
    pub fn new(inner: &Arc<Inner>, in_flight_max: usize, segment_bytes: usize) -> SegmentWriter {
        let written =
            Written { segments: Vec::new(), changes: Vec::new(), report: WriteReport::default() };
        SegmentWriter {
            inner: inner.clone(),
            in_flight_max: in_flight_max.max(1),
            segment_bytes,
            key: KeyId::POOL,
            is_cached: true,
            names: Vec::new(),
            group: Vec::new(),
            group_bytes: 0,
            running: JoinSet::new(),
            written,
        }
    }

    /// Whether what is written from here on enters the read cache; it does at first.
    pub fn set_cached(&mut self, is_cached: bool) {
        self.is_cached = is_cached;
    }

    /// What is added from here on is sealed under this key.
    pub async fn set_key(&mut self, key: KeyId) -> Result<()> {
        if self.key != key && !self.group.is_empty() && !self.inner.options.planted.mixed_keys {
            self.start_group().await?;
        }
        self.key = key;
        Ok(())
    }

    /// Adds a frame; waits where too many segments are under way.
    pub async fn add(&mut self, piece: Piece) -> Result<()> {
        self.group_bytes += piece.plaintext.len();
        self.group.push(piece);
        if self.group_bytes >= self.segment_bytes {
            self.start_group().await?;
        }
        Ok(())
    }

    /// Starts building what is gathered, once there is room for one more segment in memory.
    async fn start_group(&mut self) -> Result<()> {
        while self.running.len() >= self.in_flight_max {
            self.join_one().await?;
        }
        let pieces = std::mem::take(&mut self.group);
        self.group_bytes = 0;
        let number = SegmentNumber(self.inner.next_segment.fetch_add(1, Ordering::SeqCst));
        let options = &self.inner.options;
        let seed =
            SegmentSeed::new(options.pool, options.epoch, number, options.algorithm, &SystemRandom)
                .with_key(self.key);
        self.names.push(object_path(&seed));
        let inner = self.inner.clone();
        let stored = inner.store_segment(seed, pieces, self.is_cached);
        self.running.spawn_on(stored, &self.inner.background);
        Ok(())
    }

    async fn join_one(&mut self) -> Result<()> {
        let Some(joined) = self.running.join_next().await else { return Ok(()) };
        let stored =
            joined.map_err(|cause| Error::with_source(ErrorKind::Io, "store segment", cause))??;
        let Written { segments, changes, report } = &mut self.written;
        segments.extend(stored.record);
        changes.extend(stored.changes);
        report.segment_count += stored.report.segment_count;
        report.object_bytes += stored.report.object_bytes;
        report.stored_block_count += stored.report.stored_block_count;
        report.zero_block_count += stored.report.zero_block_count;
        report.build_us += stored.report.build_us;
        Ok(())
    }

    /// Waits for every segment. From here on the caller answers for the objects.
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
            report: self.written.report,
        };
        written.segments.sort_unstable_by_key(|record| record.info.number);
        Ok(written)
    }
}

impl Inner {
    /// Writes a segment's object, waiting for the store as long as it takes.
    async fn upload(&self, segment: &SealedSegment) -> Result<()> {
        let path = segment.info.object_path();
        let mut pause = RETRY_PAUSE_MIN;
        let mut has_differed = false;
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let payload = PutPayload::from_bytes(segment.bytes.clone());
            let failed = match self.store.put_opts(&path, payload, options).await {
                Ok(_) => {
                    self.uploads.clear();
                    return Ok(());
                }
                // An earlier attempt of ours may have arrived without our hearing of it.
                Err(
                    object_store::Error::AlreadyExists { .. }
                    | object_store::Error::Precondition { .. },
                ) => match self.store.get(&path).await {
                    Ok(found) => match found.bytes().await {
                        Ok(bytes) if bytes == segment.bytes => {
                            self.uploads.clear();
                            return Ok(());
                        }
                        // The transfer may have been bad: it is looked at once more.
                        Ok(_) if !has_differed => {
                            has_differed = true;
                            let source = "other bytes were read back".into();
                            object_store::Error::Generic { store: "upload", source }
                        }
                        Ok(_) => {
                            let what = format!("write {}: other bytes are there", segment.info);
                            return Err(Error::new(ErrorKind::Corrupt, what));
                        }
                        Err(failed) => failed,
                    },
                    Err(failed) => failed,
                },
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
            tracing::warn!(object = %path, error = %failed, "segment not written, trying again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Builds, uploads and, where asked to, caches one segment.
    async fn store_segment(
        self: Arc<Self>,
        seed: SegmentSeed,
        pieces: Vec<Piece>,
        is_cached: bool,
    ) -> Result<Stored> {
        let inner = self.clone();
        let built = tokio::task::spawn_blocking(move || build(&inner, seed, &pieces));
        let (segment, mut stored) = built
            .await
            .map_err(|cause| Error::with_source(ErrorKind::Io, "build segment", cause))??;
        fail_point!("destage-segment-built");
        if let Some(segment) = segment {
            self.upload(&segment).await?;
            fail_point!("destage-segment-uploaded");
            if is_cached {
                self.frames.insert_segment(&segment.info, segment.bytes.clone());
            }
            let block_count = u32::try_from(stored.report.stored_block_count)
                .expect("a segment has fewer than 2^24 blocks");
            stored.record = Some(SegmentRecord { info: segment.info, block_count });
            stored.report.segment_count = 1;
            stored.report.object_bytes = segment.info.object_bytes.into();
        }
        Ok(stored)
    }
}

/// Compresses and seals: the part that takes CPU.
fn build(
    inner: &Inner,
    seed: SegmentSeed,
    pieces: &[Piece],
) -> Result<(Option<SealedSegment>, Stored)> {
    let started = Instant::now();
    let root = inner.options.volume_keys.root(seed.key, &inner.pool_key);
    let root =
        root.ok_or_else(|| SegmentError::NoKey(seed.key).into_error("build segment".to_owned()))?;
    let plain_bytes: usize = pieces.iter().map(|piece| piece.plaintext.len()).sum();
    let number = seed.number.0;
    // Room for the worst case, that nothing compresses: growing means copying, and memory that is
    // never written to costs nothing.
    let room = plain_bytes + pieces.len() * FRAME_OVERHEAD_BYTES + FOOTER_ROOM_BYTES;
    let bytes = inner.buffers.take(room);
    let level = match inner.is_urgent.load(Ordering::Relaxed) {
        true => inner.options.zstd_level.min(URGENT_LEVEL),
        false => inner.options.zstd_level,
    };
    let mut builder = SegmentBuilder::new_in(seed, &inner.pool_key, &root, level, bytes);
    let mut stored = Stored {
        record: None,
        changes: Vec::with_capacity(pieces.len()),
        report: WriteReport::default(),
    };
    for piece in pieces {
        let mut at = 0;
        while at < piece.plaintext.len() {
            let is_zero = is_zero(&piece.plaintext[at..at + BLOCK]);
            let mut end = at + BLOCK;
            while end < piece.plaintext.len() && is_zero == is_zero_at(&piece.plaintext, end) {
                end += BLOCK;
            }
            let first_block = piece.first_block + (at / BLOCK) as u64;
            let block_count = ((end - at) / BLOCK) as u64;
            let placed = if is_zero {
                stored.report.zero_block_count += block_count;
                None
            } else {
                stored.report.stored_block_count += block_count;
                let at: FrameAt =
                    builder.push(piece.layer.0, first_block, &piece.plaintext[at..end]);
                Some(Placed { segment: number, at, within: 0 })
            };
            stored.changes.push(Change { layer: piece.layer, first_block, block_count, placed });
            at = end;
        }
    }
    let segment = (builder.frame_count() > 0).then(|| {
        let (info, bytes) = builder.finish_in();
        SealedSegment { info, bytes: inner.buffers.share(bytes) }
    });
    stored.report.build_us = micros(started);
    Ok((segment, stored))
}

fn is_zero_at(bytes: &[u8], at: usize) -> bool {
    is_zero(&bytes[at..at + BLOCK])
}

/// Most blocks that are not zero say so in their first bytes.
fn is_zero(block: &[u8]) -> bool {
    block.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

fn object_path(seed: &SegmentSeed) -> Path {
    crate::segment::SegmentInfo {
        number: seed.number,
        epoch: seed.epoch,
        id: seed.id,
        algorithm: seed.algorithm,
        key: seed.key,
        object_bytes: 0,
        frame_count: 0,
    }
    .object_path()
}
