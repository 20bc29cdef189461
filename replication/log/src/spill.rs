//! Side files: the data of a volume that cannot be destaged, from generations that were destaged
//! without it. In memory each is a *side layer*: the index of its contents, below all generations.
//!
//! Invariants:
//! - A side file is whole and on stable storage before it gets its name, and it never changes
//!   afterwards. It counts only while the metadata of the data tier names it, by its random id.
//! - Data read from it is authenticated. Data that did not verify when the file was made is *lost*:
//!   until it is written over, reading it is an error, and never yields zeroes or older contents.
//! - Only the index is in memory.

use crate::disk::unreadable;
use crate::format::FormatError;
use crate::format::side::{
    self, SIDE_HEADER_BYTES, SIDE_KEY_PURPOSE, SideContent, SideHeader, SideRow,
};
use crate::overlay::extents::{Cut, ExtentMap, Piece, Source, Weight};
use block::buffers::part_of;
use block::seal::{Algorithm, PoolKey, SALT_BYTES, SealKey};
use block::units::SECTOR_BYTES;
use block::{Epoch, Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

pub(crate) mod dir;

/// The identity of one side file of a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SideFileId {
    /// First LSN of the generations that it stands for.
    pub first_lsn: Lsn,
    /// Last LSN of those generations.
    pub last_lsn: Lsn,
    /// Random, fresh for each file.
    pub id: [u8; SALT_BYTES],
}

impl fmt::Debug for SideFileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        write!(f, "{}..{}-{id}", self.first_lsn, self.last_lsn)
    }
}

impl SideFileId {
    /// Returns the name of the file in the log's directory.
    #[must_use]
    pub fn file_name(&self, volume: VolumeId) -> String {
        let id: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("side-{volume}-{}-{id}.{SIDE_EXTENSION}", self.last_lsn)
    }
}

/// Extension of side files. It differs from that of ring files, because those are counted by
/// theirs.
pub(crate) const SIDE_EXTENSION: &str = "side";

/// The source of a side file's bytes.
pub(crate) trait SideBytes: Send + Sync + 'static {
    /// Fills `buf` from `offset`. Blocks.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
}

/// The destination of a side file's bytes.
pub(crate) trait SideSink {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// An open side file.
pub(crate) struct SideFile {
    name: String,
    id: SideFileId,
    key: SealKey,
    bytes: Box<dyn SideBytes>,
}

/// A payload, or a part of one, in a side file.
#[derive(Clone)]
pub struct SideResident {
    file: Arc<SideFile>,
    row: SideRow,
    index: u32,
    skip_sectors: u32,
    sector_count: u32,
}

impl SideResident {
    pub(crate) fn part(&self, skip: u64, count: u64) -> Self {
        assert!(skip + count <= u64::from(self.sector_count), "part of a side file's payload");
        let small = |sectors| u32::try_from(sectors).expect("within a payload");
        SideResident {
            file: Arc::clone(&self.file),
            row: self.row,
            index: self.index,
            skip_sectors: self.skip_sectors + small(skip),
            sector_count: small(count),
        }
    }

    /// Returns the last LSN of the file; the payload is at most this new.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.file.id.last_lsn
    }

    /// Reads, verifies and decrypts. Blocks.
    pub(crate) fn read(&self) -> Result<Bytes> {
        let SideContent::Write { offset } = self.row.content else {
            unreachable!("only a payload is read")
        };
        let offset = SIDE_HEADER_BYTES as u64 + offset;
        let place = || format!("side file {} at offset {offset}", self.file.name);
        let mut sealed = vec![0; usize::try_from(self.row.sealed_bytes()).expect("a payload")];
        let read = self.file.bytes.read_at(offset, &mut sealed);
        read.map_err(|e| unreadable::error_of(format!("read {}", place()), e))?;
        let length = side::open_side_payload(&self.row, self.index, &self.file.key, &mut sealed)
            .map_err(|e| Error::with_source(ErrorKind::Corrupt, format!("open {}", place()), e))?
            .len();
        sealed.truncate(length);
        let bytes_of = |sectors: u32| {
            usize::try_from(u64::from(sectors) * SECTOR_BYTES).expect("within a payload")
        };
        let from = bytes_of(self.skip_sectors);
        Ok(part_of(&Bytes::from(sealed), from..from + bytes_of(self.sector_count)))
    }
}

impl fmt::Debug for SideResident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SideResident({}, row {}, +{})", self.file.name, self.index, self.skip_sectors)
    }
}

/// The index of one side file, or the place of one that is missing.
#[derive(Debug)]
pub struct SideLayer {
    id: SideFileId,
    pub(crate) extents: ExtentMap,
    pub(crate) weight: Weight,
    /// Number of lost sectors.
    pub(crate) lost_sector_count: u64,
    /// Time of its oldest entry, as far as is known. After an open it is the time at which the file
    /// was written, which is not earlier. `None` if nothing is known or the file is missing.
    pub(crate) since: Option<Instant>,
    /// False if the file is missing or damaged, so that any sector may have been in it.
    is_whole: bool,
}

impl SideLayer {
    /// Returns the identity of its file.
    pub(crate) fn id(&self) -> SideFileId {
        self.id
    }

    /// Makes the layer of a file that cannot be read: every sector counts as lost.
    pub(crate) fn missing(id: SideFileId) -> SideLayer {
        let mut layer = SideLayer::empty(id, false);
        let sectors = crate::format::entry::SECTORS_MAX;
        layer.put(0, sectors, Source::Lost { lsn: id.last_lsn });
        layer
    }

    fn empty(id: SideFileId, is_whole: bool) -> SideLayer {
        SideLayer {
            id,
            extents: ExtentMap::default(),
            weight: Weight::default(),
            lost_sector_count: 0,
            since: None,
            is_whole,
        }
    }

    /// Returns the layer with the time of its oldest entry set.
    pub(crate) fn since(self, since: Option<Instant>) -> SideLayer {
        SideLayer { since, ..self }
    }

    fn put(&mut self, start: u64, count: u64, source: Source) {
        if let Source::Lost { .. } = source {
            self.lost_sector_count += count;
        }
        self.extents.insert((start, count), source, &mut self.weight, &Cut::default());
    }

    fn index(file: &Arc<SideFile>, rows: &[SideRow]) -> SideLayer {
        let mut layer = SideLayer::empty(file.id, true);
        for (index, row) in (0u32..).zip(rows) {
            let source = match row.content {
                SideContent::Write { .. } => Source::SideResident(SideResident {
                    file: Arc::clone(file),
                    row: *row,
                    index,
                    skip_sectors: 0,
                    sector_count: u32::try_from(row.sector_count).expect("a payload is bounded"),
                }),
                SideContent::Zero => Source::Zeroes { is_trim: false },
                SideContent::Trim => Source::Zeroes { is_trim: true },
                SideContent::Lost { lsn } => Source::Lost { lsn },
            };
            layer.put(row.start_sector, row.sector_count, source);
        }
        layer
    }
}

/// The parameters of a new side file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SideSeed {
    pub(crate) pool: [u8; 16],
    pub(crate) epoch: Epoch,
    pub(crate) algorithm: Algorithm,
    pub(crate) volume: VolumeId,
    pub(crate) id: SideFileId,
}

/// Writes a side file with `pieces`, which are sorted and disjoint. `read` fetches a payload; if it
/// returns `Corrupt`, the piece is recorded as lost.
///
/// # Errors
/// Those of `sink`, as `Io`; those of `read` other than `Corrupt`.
pub(crate) fn write(
    sink: &mut dyn SideSink,
    seed: &SideSeed,
    pieces: &[Piece],
    key: &PoolKey,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<()> {
    let failed = |e| {
        let what = format!("write side file {}", seed.id.file_name(seed.volume));
        Error::with_source(ErrorKind::Io, what, e)
    };
    let file_key = key.derive(seed.algorithm, &seed.id.id, SIDE_KEY_PURPOSE);
    let mut rows: Vec<SideRow> = Vec::with_capacity(pieces.len());
    let mut offset = 0;
    for (index, piece) in (0u64..).zip(pieces) {
        let (content, payload) = content_of(piece, offset, seed, read)?;
        let (start_sector, sector_count) = (piece.start_sector, piece.sector_count);
        let row = SideRow { start_sector, sector_count, content };
        if let Some(payload) = payload {
            let mut sealed = Vec::with_capacity(payload.len() + block::seal::TAG_BYTES);
            sealed.extend_from_slice(&payload);
            let tag = file_key.seal(index, &row.encode(), &mut sealed);
            sealed.extend_from_slice(&tag);
            sink.write_at(SIDE_HEADER_BYTES as u64 + offset, &sealed).map_err(failed)?;
            offset += sealed.len() as u64;
        }
        rows.push(row);
    }
    let mut header = SideHeader {
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
    let table = side::seal_table(&mut header, &rows, &file_key);
    let table = table.expect("the overlay holds fewer than 2^32 extents");
    sink.write_at(SIDE_HEADER_BYTES as u64 + offset, &table).map_err(failed)?;
    sink.write_at(0, &header.encode()).map_err(failed)
}

/// Returns the row for a piece, and its payload.
fn content_of(
    piece: &Piece,
    offset: u64,
    seed: &SideSeed,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<(SideContent, Option<Bytes>)> {
    let lsn = match &piece.source {
        Source::Zeroes { is_trim: true } => return Ok((SideContent::Trim, None)),
        Source::Zeroes { is_trim: false } => return Ok((SideContent::Zero, None)),
        Source::Lost { lsn } => return Ok((SideContent::Lost { lsn: *lsn }, None)),
        Source::Payload(bytes) => {
            return Ok((SideContent::Write { offset }, Some(bytes.clone())));
        }
        Source::LogResident(resident) => resident.lsn(),
        Source::SideResident(resident) => resident.last_lsn(),
        Source::Beneath => unreachable!("a layer's extents are its own"),
    };
    match read(&piece.source) {
        Ok(bytes) => Ok((SideContent::Write { offset }, Some(bytes))),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::error!(
                volume = seed.volume.0,
                start_sector = piece.start_sector,
                sector_count = piece.sector_count,
                lsn = lsn.0,
                error = %error.chain(),
                "a write is lost: it does not verify any more and was not in the store; reading \
                 these sectors fails until they are written over"
            );
            Ok((SideContent::Lost { lsn }, None))
        }
        Err(error) => Err(error),
    }
}

/// The identity and the key of the reader, against which a side file is checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SideReader<'a> {
    pub(crate) pool: [u8; 16],
    /// Epoch of the reader.
    pub(crate) epoch: Epoch,
    pub(crate) key: &'a PoolKey,
}

/// Reads the header of a side file and checks that it is for us.
///
/// # Errors
/// `Invalid`: of another pool. `Fenced`: of a higher epoch. `Unsupported`, `Corrupt`, `Io`.
pub(crate) fn read_header(
    name: &str,
    bytes: &dyn SideBytes,
    reader: &SideReader<'_>,
) -> Result<SideHeader> {
    let failed = |e| io_error(format!("read side file {name}"), e);
    let refuse = |kind, why: &str| Err(Error::new(kind, format!("open side file {name}: {why}")));
    let length = bytes.len().map_err(failed)?;
    let mut header = [0; SIDE_HEADER_BYTES];
    if length < SIDE_HEADER_BYTES as u64 {
        return refuse(ErrorKind::Corrupt, "it is cut short");
    }
    bytes.read_at(0, &mut header).map_err(failed)?;
    let header = SideHeader::decode(&header).map_err(|e| format_error(name, e))?;
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
        return refuse(ErrorKind::Corrupt, "its length is not what its header says");
    }
    Ok(header)
}

/// Opens a side file. Verifies header and table; payloads are verified when they are read.
///
/// # Errors
/// Those of [`read_header`].
pub(crate) fn open(
    name: String,
    bytes: Box<dyn SideBytes>,
    volume: VolumeId,
    id: SideFileId,
    reader: &SideReader<'_>,
) -> Result<SideLayer> {
    let header = read_header(&name, &*bytes, reader)?;
    let found =
        SideFileId { first_lsn: header.first_lsn, last_lsn: header.last_lsn, id: header.id };
    if (header.volume, found) != (volume, id) {
        let what = format!("open side file {name}: it says that it is another one");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let (at, len) = header.table().expect("decoded");
    let mut table = vec![0; usize::try_from(len).expect("the file is that long")];
    bytes.read_at(at, &mut table).map_err(|e| io_error(format!("read side file {name}"), e))?;
    let key = reader.key.derive(header.algorithm, &header.id, SIDE_KEY_PURPOSE);
    let rows = side::open_table(&header, &mut table, &key).map_err(|e| format_error(&name, e))?;
    let file = Arc::new(SideFile { name, id, key, bytes });
    Ok(SideLayer::index(&file, &rows))
}

fn format_error(name: &str, error: FormatError) -> Error {
    let kind = if error.is_unsupported() { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
    Error::with_source(kind, format!("open side file {name}"), error)
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
pub(crate) fn merge<'a>(layers: impl IntoIterator<Item = &'a Arc<SideLayer>>) -> Vec<Piece> {
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
    layers: &[Arc<SideLayer>],
    may_join: impl Fn(SideFileId, SideFileId) -> bool,
) -> Option<usize> {
    let cost = |layer: &SideLayer| layer.weight.payload_bytes + layer.weight.extent_count * 32;
    let pairs = layers.windows(2).enumerate();
    let whole = pairs.filter(|(_, pair)| {
        pair.iter().all(|layer| layer.is_whole) && may_join(pair[0].id(), pair[1].id())
    });
    whole.min_by_key(|(_, pair)| cost(&pair[0]) + cost(&pair[1])).map(|(index, _)| index)
}

#[cfg(test)]
mod tests;
