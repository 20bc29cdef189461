//! Spill files: the data of a volume that cannot be destaged, from generations that were destaged
//! without it. In memory each is a *spill layer*: the index of its contents, below all generations.
//!
//! Invariants:
//! - A spill file is whole and on stable storage before it gets its name, and it never changes
//!   afterwards. It counts only while the metadata of the data tier names it, by its random id.
//! - Data read from it is authenticated. Data that did not verify when the file was made is *lost*:
//!   until it is written over, reading it is an error, and never yields zeroes or older contents.
//! - Only the index is in memory.

use crate::format::FormatError;
use crate::format::spill::{
    SPILL_HEADER_BYTES, SPILL_KEY_PURPOSE, SpillContent, SpillHeader, SpillRow, open_table,
    seal_table,
};
use crate::overlay::extents::{Cut, ExtentMap, Piece, Source, Weight};
use crate::overlay::spill_layer::SpillLayer;
use crate::overlay::spill_resident::{SpillBytes, SpillFile, SpillFileId};
use block::seal::{Algorithm, PoolKey};
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use std::io;
use std::sync::Arc;

pub(crate) mod dir;

/// The destination of a spill file's bytes.
pub(crate) trait SpillSink {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// The parameters of a new spill file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpillSeed {
    pub(crate) pool: [u8; 16],
    pub(crate) epoch: Epoch,
    pub(crate) algorithm: Algorithm,
    pub(crate) volume: VolumeId,
    pub(crate) id: SpillFileId,
}

/// Writes a spill file with `pieces`, which are sorted and disjoint. `read` fetches a payload; if it
/// returns `Corrupt`, the piece is recorded as lost.
///
/// # Errors
/// Those of `sink`, as `Io`; those of `read` other than `Corrupt`.
pub(crate) fn write(
    sink: &mut dyn SpillSink,
    seed: &SpillSeed,
    pieces: &[Piece],
    key: &PoolKey,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<()> {
    let failed = |e| {
        let what = format!("write spill file {}", seed.id.file_name(seed.volume));
        Error::with_source(ErrorKind::Io, what, e)
    };
    let file_key = key.derive(seed.algorithm, &seed.id.id, SPILL_KEY_PURPOSE);
    let mut rows: Vec<SpillRow> = Vec::with_capacity(pieces.len());
    let mut offset = 0;
    for (index, piece) in (0u64..).zip(pieces) {
        let (content, payload) = content_of(piece, offset, seed, read)?;
        let (start_sector, sector_count) = (piece.start_sector, piece.sector_count);
        let row = SpillRow { start_sector, sector_count, content };
        if let Some(payload) = payload {
            let mut sealed = Vec::with_capacity(payload.len() + block::seal::TAG_BYTES);
            sealed.extend_from_slice(&payload);
            let tag = file_key.seal(index, &row.encode(), &mut sealed);
            sealed.extend_from_slice(&tag);
            sink.write_at(SPILL_HEADER_BYTES as u64 + offset, &sealed).map_err(failed)?;
            offset += sealed.len() as u64;
        }
        rows.push(row);
    }
    let mut header = SpillHeader {
        algorithm: seed.algorithm,
        pool: seed.pool,
        id: seed.id.id,
        epoch: seed.epoch,
        first_lsn: seed.id.first_lsn,
        last_lsn: seed.id.last_lsn,
        volume: seed.volume,
        row_count: 0,
        payload_bytes: 0,
        table_checksum: 0,
    };
    let table = seal_table(&mut header, &rows, &file_key);
    let table = table.expect("the overlay holds fewer than 2^32 extents");
    sink.write_at(SPILL_HEADER_BYTES as u64 + offset, &table).map_err(failed)?;
    sink.write_at(0, &header.encode()).map_err(failed)
}

/// Returns the row for a piece, and its payload.
fn content_of(
    piece: &Piece,
    offset: u64,
    seed: &SpillSeed,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<(SpillContent, Option<Bytes>)> {
    let lsn = match &piece.source {
        Source::Zeroes { is_trim: true } => return Ok((SpillContent::Trim, None)),
        Source::Zeroes { is_trim: false } => return Ok((SpillContent::Zero, None)),
        Source::Lost { lsn } => return Ok((SpillContent::Lost { lsn: *lsn }, None)),
        Source::Payload(bytes) => {
            return Ok((SpillContent::Write { offset }, Some(bytes.clone())));
        }
        Source::LogResident(resident) => resident.lsn(),
        Source::SpillResident(resident) => resident.last_lsn(),
        Source::Beneath => unreachable!("a layer's extents are its own"),
    };
    match read(&piece.source) {
        Ok(bytes) => Ok((SpillContent::Write { offset }, Some(bytes))),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::error!(
                volume = seed.volume.0,
                start_sector = piece.start_sector,
                sector_count = piece.sector_count,
                lsn = lsn.0,
                error = %error.chain(),
                "a write is lost: it does not verify any more and was not in the store; write \
                 these sectors again, as reads of them fail until then"
            );
            Ok((SpillContent::Lost { lsn }, None))
        }
        Err(error) => Err(error),
    }
}

/// The identity and the key of the reader, against which a spill file is checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpillReader<'a> {
    pub(crate) pool: [u8; 16],
    /// Epoch of the reader.
    pub(crate) epoch: Epoch,
    pub(crate) key: &'a PoolKey,
}

/// Reads the header of a spill file and checks that it is for us.
///
/// # Errors
/// `Invalid`: of another pool. `Fenced`: of a higher epoch. `Unsupported`, `Corrupt`, `Io`.
pub(crate) fn read_header(
    name: &str,
    bytes: &dyn SpillBytes,
    reader: &SpillReader<'_>,
) -> Result<SpillHeader> {
    let failed = |e| io_error(format!("read spill file {name}"), e);
    let refuse = |kind, why: &str| Err(Error::new(kind, format!("open spill file {name}: {why}")));
    let length = bytes.len().map_err(failed)?;
    let mut header = [0; SPILL_HEADER_BYTES];
    if length < SPILL_HEADER_BYTES as u64 {
        return refuse(ErrorKind::Corrupt, "it is cut short");
    }
    bytes.read_at(0, &mut header).map_err(failed)?;
    let header = SpillHeader::decode(&header).map_err(|e| format_error(name, e))?;
    if header.pool != reader.pool {
        let why = format!(
            "it belongs to another pool, of whose volume {} it holds {length} bytes that may be nowhere else; \
             bring it back to the log's directory of that pool",
            header.volume
        );
        return refuse(ErrorKind::Invalid, &why);
    }
    if header.epoch > reader.epoch {
        let why = format!("epoch {} wrote it, and this is {}", header.epoch, reader.epoch);
        return refuse(ErrorKind::Fenced, &why);
    }
    if header.file_bytes() != Some(length) {
        return refuse(ErrorKind::Corrupt, "its length differs from its header");
    }
    Ok(header)
}

/// Opens a spill file. Verifies header and table; payloads are verified when they are read.
///
/// # Errors
/// Those of [`read_header`].
pub(crate) fn open(
    name: String,
    bytes: Box<dyn SpillBytes>,
    volume: VolumeId,
    id: SpillFileId,
    reader: &SpillReader<'_>,
) -> Result<SpillLayer> {
    let header = read_header(&name, &*bytes, reader)?;
    let found =
        SpillFileId { first_lsn: header.first_lsn, last_lsn: header.last_lsn, id: header.id };
    if (header.volume, found) != (volume, id) {
        let what = format!("open spill file {name}: it says that it is another one");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let (at, len) = header.table().expect("decoded");
    let mut table = vec![0; usize::try_from(len).expect("the file is that long")];
    bytes.read_at(at, &mut table).map_err(|e| io_error(format!("read spill file {name}"), e))?;
    let key = reader.key.derive(header.algorithm, &header.id, SPILL_KEY_PURPOSE);
    let rows = open_table(&header, &mut table, &key).map_err(|e| format_error(&name, e))?;
    let file = Arc::new(SpillFile { name, id, key, bytes });
    Ok(SpillLayer::index(&file, &rows))
}

fn format_error(name: &str, error: FormatError) -> Error {
    let kind = if error.is_unsupported() { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
    Error::with_source(kind, format!("open spill file {name}"), error)
}

/// Builds the error of a read. A file that ends early is as bad as one with other bytes.
fn io_error(what: String, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound => ErrorKind::Corrupt,
        _ => ErrorKind::Io,
    };
    Error::with_source(kind, what, error)
}

/// Merges layers, given oldest first, into the contents that they show together.
pub(crate) fn merge<'a>(layers: impl IntoIterator<Item = &'a Arc<SpillLayer>>) -> Vec<Piece> {
    let mut merged = ExtentMap::default();
    let mut weight = Weight::default();
    for layer in layers {
        for piece in layer.extents.iter() {
            let range = (piece.start_sector, piece.sector_count);
            merged.insert(range, piece.source, &mut weight, &Cut::default());
        }
    }
    merged.iter().collect()
}

/// Returns the index of the older layer of the adjacent pair that costs least to rewrite. Both
/// layers must be whole, and `may_join` must allow the pair.
pub(crate) fn cheapest_pair(
    layers: &[Arc<SpillLayer>],
    may_join: impl Fn(SpillFileId, SpillFileId) -> bool,
) -> Option<usize> {
    let cost = |layer: &SpillLayer| layer.weight.payload_bytes + layer.weight.extent_count * 32;
    let pairs = layers.windows(2).enumerate();
    let whole = pairs.filter(|(_, pair)| {
        pair.iter().all(|layer| layer.is_complete) && may_join(pair[0].id(), pair[1].id())
    });
    whole.min_by_key(|(_, pair)| cost(&pair[0]) + cost(&pair[1])).map(|(index, _)| index)
}

#[cfg(test)]
mod tests;
