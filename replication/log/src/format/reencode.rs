//! Decodes a file or a batch and encodes it again, for the fuzz targets, which check that decoders
//! take any bytes and accept only bytes that the encoders could have written.
//!
//! Invariants:
//! - Pure, like the rest of this folder: it takes bytes of strangers and never panics.
//! - It decodes in the order in which recovery does, and everything: also each payload.

use super::batch::{self, BatchHeader};
use super::file::FileHeader;
use super::spill::{self, SPILL_HEADER_BYTES, SpillHeader};
use super::{FormatError, made, part, state};
use block::env::IoBuffer;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Lsn, Result};

/// The kinds of bytes that a log consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPart {
    /// The header of a ring file.
    RingFile,
    /// The count of ring files that were made.
    FileCount,
    /// The state of the log.
    State,
    /// One batch; bytes after it are ignored.
    Batch,
    /// A whole spill file.
    SpillFile,
}

/// Decodes `bytes` with the pool's key and returns what the encoders make of the result. Only
/// batches and spill files need the key.
///
/// # Errors
/// `Unsupported` if a later program wrote the bytes, `Corrupt` for all others that are refused.
pub fn reencode(kind: LogPart, bytes: &[u8], key: &PoolKey) -> Result<Vec<u8>> {
    let encoded = match kind {
        LogPart::RingFile => FileHeader::decode(bytes).map(|header| header.encode()),
        LogPart::FileCount => made::decode(bytes).map(|count| made::encode(count).to_vec()),
        LogPart::State => state::decode(bytes).map(|state| state::encode(&state).to_vec()),
        LogPart::Batch => reencode_batch(bytes, key),
        LogPart::SpillFile => reencode_spill_file(bytes, key),
    };
    encoded.map_err(|error| {
        let kind_of_error = match error.is_unsupported() {
            true => ErrorKind::Unsupported,
            false => ErrorKind::Corrupt,
        };
        Error::with_source(kind_of_error, format!("decode {kind:?}"), error)
    })
}

fn reencode_batch(bytes: &[u8], key: &PoolKey) -> Result<Vec<u8>, FormatError> {
    let mut header = BatchHeader::decode(bytes)?;
    batch::verify(&header, bytes)?;
    let seal = key.derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
    batch::authenticate(bytes, &seal)?;
    let mut rows = batch::open_table(&header, bytes, &seal)?;
    let mut at = header.payload_at().ok_or(FormatError::Range)?;
    let mut payloads = Vec::with_capacity(rows.len());
    for (index, row) in (0u32..).zip(&rows) {
        let mut sealed = part(bytes, at, row.sealed_bytes())?.to_vec();
        let lsn = Lsn(header.first_lsn.0.saturating_add(u64::from(index)));
        payloads.push(batch::open_payload(row, lsn, index, &seal, &mut sealed)?.to_vec());
        at = at.checked_add(row.sealed_bytes()).ok_or(FormatError::Range)?;
    }
    let (payloads, mut buffer) = (payloads.iter().map(Vec::as_slice), IoBuffer::default());
    batch::encode(&mut header, &mut rows, payloads, &seal, &mut buffer)
        .ok_or(FormatError::Range)?;
    Ok(buffer.as_slice().to_vec())
}

fn reencode_spill_file(bytes: &[u8], key: &PoolKey) -> Result<Vec<u8>, FormatError> {
    let mut header = SpillHeader::decode(bytes)?;
    let (at, len) = header.table().ok_or(FormatError::Range)?;
    let at = usize::try_from(at).map_err(|_| FormatError::Range)?;
    let len = usize::try_from(len).map_err(|_| FormatError::Range)?;
    let seal = key.derive(header.algorithm, &header.id, spill::SPILL_KEY_PURPOSE);
    let rows = spill::open_table(&header, &mut part(bytes, at, len)?.to_vec(), &seal)?;
    let mut payloads = Vec::new();
    let mut at = SPILL_HEADER_BYTES;
    for (index, row) in (0u32..).zip(&rows) {
        let len = usize::try_from(row.sealed_bytes()).map_err(|_| FormatError::Range)?;
        if len == 0 {
            continue;
        }
        let mut sealed = part(bytes, at, len)?.to_vec();
        let plain = spill::open_spill_payload(row, index, &seal, &mut sealed)?;
        let tag = seal.seal(u64::from(index), &row.encode(), plain);
        payloads.extend_from_slice(plain);
        payloads.extend_from_slice(&tag);
        at = at.checked_add(len).ok_or(FormatError::Range)?;
    }
    let table = spill::seal_table(&mut header, &rows, &seal).ok_or(FormatError::Range)?;
    Ok([&header.encode()[..], &payloads, &table].concat())
}
