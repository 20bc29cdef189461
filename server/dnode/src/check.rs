//! A fragment is verified where it is stored: a scrub need not send those of parity.
//!
//! Invariant: a part of the payload is in memory at a time, beside the copy of the directory and the checksums.

use crate::seeded_bugs::seeded_bugs;
use bytes::Bytes;
use erasure::fragment::{CHECKED_BYTES, FragmentHeader, HEADER_BYTES};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, Result};
use std::ops::Range;

/// Bytes that are read at a time. Chosen by hand: large for a drive, small for the memory.
const PART_BYTES: usize = 256 * CHECKED_BYTES;

/// Verifies all of a fragment. Returns its header; `None` if it does not verify, or is of a later version.
///
/// # Errors
/// Those of the drive.
pub(crate) async fn check(objects: &dyn ObjectStore, path: &Path) -> Result<Option<Bytes>> {
    let stored = objects.head(path).await?.size;
    if stored < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let read = |range: Range<usize>| objects.get_range(path, range.start as u64..range.end as u64);
    let header_bytes = read(0..HEADER_BYTES).await?;
    let Ok(header) = FragmentHeader::decode(&header_bytes) else { return Ok(None) };
    if stored != header.fragment_bytes() as u64 {
        return Ok(None);
    }
    let trailer = read(header.directory_range().start..header.fragment_bytes()).await?;
    let Ok(checksums) = header.checksums(&trailer) else { return Ok(None) };
    let len = header.payload_bytes();
    for begin in (0..len).step_by(PART_BYTES) {
        let range = begin..(begin + PART_BYTES).min(len);
        let part = read(header.range_of(&range)).await?;
        let is_right = part.len() == range.len() && checksums.verify(begin, &part);
        if !is_right && !seeded_bugs().payload_unchecked {
            return Ok(None);
        }
    }
    Ok(Some(header_bytes))
}
