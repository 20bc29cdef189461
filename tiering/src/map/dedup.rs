//! Deduplication records in the metadata: back-references, fingerprints of segments, and results.
//!
//! Invariants:
//! - A back-reference from the segment exists for every page that names a frame which was written
//!   neither for the page's own layer and blocks nor for those of the layers it was made from. It
//!   names the page's layer, or one of the layers above for the page with the same number. It is
//!   put in the batch that makes the reference, and deleted with the segment's record.
//! - Pages that no longer name the segment may have back-references until a sweep drops them.

use super::commit::draft::Draft;
use super::keys::{
    self, back_reference_key, back_reference_of, family, fingerprints_key, found_key,
};
use super::{LayerId, Map, Writer, after, entries, get};
use crate::dedup::Found;
use crate::dedup::fingerprints::{self, FrameFingerprints};
use crate::fail_point;
use block::units::u64_at;
use block::{Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

pub(super) const BACK_REFERENCE_VERSION: u8 = 1;
/// Back-references read at a time.
const REFERENCES_STEP: usize = if cfg!(test) { 64 } else { 4096 };
const FOUND_VERSION: u8 = 1;
const FOUND_BYTES: usize = 1 + 8 + 8;

/// Pages that name blocks of a segment which were not written for them: the layers by page number.
pub(crate) type BackReferences = BTreeMap<u32, Vec<LayerId>>;

/// Segments with their fingerprints, and the segment to continue after.
pub(crate) type FingerprintsStep = (Vec<(u64, Vec<FrameFingerprints>)>, Option<u64>);

pub(super) fn decode_found(volume: VolumeId, bytes: &[u8]) -> Result<Found> {
    let read =
        || Some(Found { block_count: u64_at(bytes, 1)?, duplicate_count: u64_at(bytes, 9)? });
    match read() {
        Some(found) if bytes.len() == FOUND_BYTES && bytes[0] == FOUND_VERSION => Ok(found),
        _ => Err(keys::corrupt(&found_key(volume), "not a count of deduplication")),
    }
}

pub(super) fn encode_found(found: &Found) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FOUND_BYTES);
    bytes.push(FOUND_VERSION);
    bytes.extend_from_slice(&found.block_count.to_le_bytes());
    bytes.extend_from_slice(&found.duplicate_count.to_le_bytes());
    bytes
}

impl Draft<'_> {
    pub(super) fn put_back_reference(&mut self, segment: u64, layer: LayerId, page: u32) {
        self.put(&back_reference_key(segment, layer, page), &[BACK_REFERENCE_VERSION]);
    }

    pub(super) fn put_fingerprints(&mut self, segment: u64, frames: &[FrameFingerprints]) {
        self.put(&fingerprints_key(segment), &fingerprints::encode(frames));
    }

    /// Deletes the deduplication records of a segment.
    pub(super) fn forget_dedup(&mut self, segment: u64, references: Option<&BackReferences>) {
        self.delete(&fingerprints_key(segment));
        for (page, layers) in references.into_iter().flatten() {
            for layer in layers {
                self.delete(&back_reference_key(segment, *layer, *page));
            }
        }
    }
}

impl Map {
    /// Whether deduplication is or was in use.
    pub(crate) fn has_dedup(&self) -> bool {
        self.opener.header().has_dedup()
    }

    /// Results of deduplication, by volume.
    pub(crate) fn found(&self) -> BTreeMap<VolumeId, Found> {
        self.found.read().clone()
    }

    /// Up to `count_max` back-references of a segment, and whether there may be more.
    ///
    /// # Errors
    /// `Corrupt`, naming the key; database errors.
    pub(crate) async fn back_references(
        &self,
        segment: u64,
        count_max: usize,
    ) -> Result<(BackReferences, bool)> {
        let mut found = BackReferences::new();
        if !self.has_dedup() {
            return Ok((found, false));
        }
        let from = back_reference_key(segment, LayerId(0), 0).to_vec();
        let until = back_reference_key(segment, LayerId(u64::MAX), u32::MAX).to_vec();
        let range = (Bound::Included(from), Bound::Included(until));
        let read = entries(&self.db(), range.0, range.1, count_max).await?;
        for (key, value) in &read {
            let Some((_, layer, page)) = back_reference_of(key) else {
                return Err(keys::corrupt(key, "not the key of a back-reference"));
            };
            self.open_back_reference(key, value)?;
            found.entry(page).or_default().push(layer);
        }
        Ok((found, read.len() == count_max))
    }

    /// Up to `count_max` back-references of a segment after `last`, in order of their keys.
    ///
    /// # Errors
    /// Like [`Map::back_references`].
    pub(crate) async fn back_references_after(
        &self,
        segment: u64,
        last: Option<(LayerId, u32)>,
        count_max: usize,
    ) -> Result<Vec<(LayerId, u32)>> {
        if !self.has_dedup() {
            return Ok(Vec::new());
        }
        let from = match last {
            Some((layer, page)) => {
                Bound::Excluded(back_reference_key(segment, layer, page).to_vec())
            }
            None => Bound::Included(back_reference_key(segment, LayerId(0), 0).to_vec()),
        };
        let until = back_reference_key(segment, LayerId(u64::MAX), u32::MAX).to_vec();
        let mut found = Vec::new();
        for (key, value) in entries(&self.db(), from, Bound::Included(until), count_max).await? {
            let Some((_, layer, page)) = back_reference_of(&key) else {
                return Err(keys::corrupt(&key, "not the key of a back-reference"));
            };
            self.open_back_reference(&key, &value)?;
            found.push((layer, page));
        }
        Ok(found)
    }

    fn open_back_reference(&self, key: &[u8], value: &[u8]) -> Result<()> {
        match self.opener.open_one(key, value)?[..] {
            [BACK_REFERENCE_VERSION] => Ok(()),
            _ => Err(keys::corrupt(key, "not a back-reference")),
        }
    }

    /// Whether the page of a layer, or the same page of one of the layers it was made from, has a
    /// back-reference from a segment.
    ///
    /// # Errors
    /// Like [`Map::back_references`].
    pub(crate) async fn is_referenced_back(
        &self,
        segment: u64,
        layer: LayerId,
        page: u32,
    ) -> Result<bool> {
        if !self.has_dedup() {
            return Ok(false);
        }
        let layers = self.layers();
        let parent = |layer: &LayerId| layers.get(*layer).and_then(|record| record.parent);
        for layer in std::iter::successors(Some(layer), parent) {
            if self.has_back_reference(segment, layer, page).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The segments with these numbers that have a back-reference to a page of one of these layers.
    ///
    /// # Errors
    /// Like [`Map::back_references`].
    pub(crate) async fn referenced_from(
        &self,
        segments: std::ops::RangeInclusive<u64>,
        layers: &BTreeSet<LayerId>,
    ) -> Result<BTreeSet<u64>> {
        let mut found = BTreeSet::new();
        if !self.has_dedup() {
            return Ok(found);
        }
        let mut from =
            Bound::Included(back_reference_key(*segments.start(), LayerId(0), 0).to_vec());
        let until = back_reference_key(*segments.end(), LayerId(u64::MAX), u32::MAX).to_vec();
        loop {
            let until = Bound::Included(until.clone());
            let read = entries(&self.db(), from, until, REFERENCES_STEP).await?;
            for (key, _) in &read {
                let Some((segment, layer, _)) = back_reference_of(key) else {
                    return Err(keys::corrupt(key, "not the key of a back-reference"));
                };
                if layers.contains(&layer) {
                    found.insert(segment);
                }
            }
            match read.last() {
                Some((key, _)) if read.len() == REFERENCES_STEP => {
                    from = Bound::Excluded(key.to_vec())
                }
                _ => return Ok(found),
            }
        }
    }

    /// Whether the page has a back-reference from a segment.
    ///
    /// # Errors
    /// Like [`Map::back_references`].
    pub(crate) async fn has_back_reference(
        &self,
        segment: u64,
        layer: LayerId,
        page: u32,
    ) -> Result<bool> {
        let key = back_reference_key(segment, layer, page);
        match get(&self.db(), &key).await? {
            Some(value) => self.open_back_reference(&key, &value).map(|()| true),
            None => Ok(false),
        }
    }

    /// For checks: up to `count_max` keys of back-references or of fingerprints after `last`, or
    /// from the first one on if it is `None`. Each comes with its segment and with the result of
    /// opening its value.
    ///
    /// # Errors
    /// Database errors; `Corrupt` for a malformed key.
    pub(crate) async fn dedup_keys_after(
        &self,
        is_fingerprints: bool,
        last: Option<&[u8]>,
        count_max: usize,
    ) -> Result<Vec<(Vec<u8>, u64, Result<()>)>> {
        let family = if is_fingerprints { family::FINGERPRINTS } else { family::BACK_REFERENCE };
        let from = match last {
            Some(key) => Bound::Excluded(key.to_vec()),
            None => Bound::Included(vec![family]),
        };
        let mut found = Vec::new();
        for (key, value) in entries(&self.db(), from, after(family), count_max).await? {
            let segment = match is_fingerprints {
                true => keys::number_of(&key),
                false => back_reference_of(&key).map(|(segment, _, _)| segment),
            };
            let wrong = || keys::corrupt(&key, "not a key of deduplication");
            let segment = segment.ok_or_else(wrong)?;
            let opened = match is_fingerprints {
                true => self
                    .opener
                    .open_one(&key, &value)
                    .and_then(|plain| decode_fingerprints(segment, &plain).map(drop)),
                false => self.open_back_reference(&key, &value),
            };
            found.push((key.to_vec(), segment, opened));
        }
        Ok(found)
    }

    /// For checks: the errors of all deduplication results that do not open.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn damaged_found(&self) -> Result<Vec<Error>> {
        let from = Bound::Included(vec![family::FOUND]);
        let read = entries(&self.db(), from, after(family::FOUND), usize::MAX).await?;
        let check = |(key, value): &(Bytes, Bytes)| {
            let volume = keys::volume_of(key).unwrap_or_default();
            let opened = self.opener.open_one(key, value);
            opened.and_then(|plain| decode_found(volume, &plain)).err()
        };
        Ok(read.iter().filter_map(check).collect())
    }

    /// Looks at up to `count_max` back-references after `last` and drops those of pages that no
    /// longer name their segment in any state, if the pages of layers made from theirs do not name
    /// it either. Returns the key to continue after, if there may be more, and the number dropped.
    ///
    /// # Errors
    /// Like [`Map::commit`]. A page that does not open keeps its back-references.
    pub(crate) async fn sweep_back_references(
        &self,
        writer: &mut Writer,
        last: Option<&[u8]>,
        count_max: usize,
    ) -> Result<(Option<Vec<u8>>, u64)> {
        self.check(writer)?;
        let found = self.dedup_keys_after(false, last, count_max).await?;
        let next = found.last().filter(|_| found.len() == count_max).map(|(key, ..)| key.clone());
        let mut draft = Draft::new(self);
        let mut dropped_count = 0;
        for (key, segment, _) in found {
            let Some((_, layer, page)) = back_reference_of(&key) else { continue };
            if !self.is_named_by(segment, layer, page).await? {
                draft.delete(&key);
                dropped_count += 1;
            }
        }
        if dropped_count > 0 {
            self.write(writer, draft.batch).await?;
            fail_point!("sweep-written");
        }
        Ok((next, dropped_count))
    }

    /// Whether any stored state of a page, or of the same page of a layer made from its layer,
    /// names a segment.
    async fn is_named_by(&self, segment: u64, layer: LayerId, page: u32) -> Result<bool> {
        let below = match self.seeded_bugs.swept_without_clones {
            true => Vec::new(),
            false => self.layers().descendants(layer),
        };
        for layer in std::iter::once(layer).chain(below) {
            let seen = match self.page_for_reclaim(layer, page).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(true),
                seen => seen?,
            };
            if seen.stored().any(|run| run.segment == segment) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The fingerprints of a segment, if it has any.
    ///
    /// # Errors
    /// `Corrupt`, naming the segment; database errors.
    pub(crate) async fn fingerprints(
        &self,
        segment: u64,
    ) -> Result<Option<Vec<FrameFingerprints>>> {
        if !self.has_dedup() {
            return Ok(None);
        }
        let key = fingerprints_key(segment);
        let Some(value) = get(&self.db(), &key).await? else { return Ok(None) };
        decode_fingerprints(segment, &self.opener.open_one(&key, &value)?).map(Some)
    }

    /// The fingerprints of segments after number `last`. Those that do not open are skipped.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn fingerprints_after(
        &self,
        last: u64,
        count_max: usize,
    ) -> Result<FingerprintsStep> {
        let from = Bound::Excluded(fingerprints_key(last).to_vec());
        let read = entries(&self.db(), from, after(family::FINGERPRINTS), count_max).await?;
        let mut found = Vec::with_capacity(read.len());
        let mut next = None;
        for (key, value) in &read {
            let Some(segment) = keys::number_of(key) else { continue };
            next = Some(segment);
            let opened = self.opener.open_one(key, value);
            match opened.and_then(|plain| decode_fingerprints(segment, &plain)) {
                Ok(frames) => found.push((segment, frames)),
                Err(error) => tracing::debug!(
                    error = %error.chain(),
                    "could not read the fingerprints of a segment; they are passed over"
                ),
            }
        }
        Ok((found, next.filter(|_| read.len() == count_max)))
    }
}

/// Decodes the fingerprints of a segment.
///
/// # Errors
/// `Corrupt`, naming the segment.
pub(super) fn decode_fingerprints(segment: u64, bytes: &[u8]) -> Result<Vec<FrameFingerprints>> {
    let wrong = || keys::corrupt(&fingerprints_key(segment), "not a list of fingerprints");
    fingerprints::decode(bytes).ok_or_else(wrong)
}
