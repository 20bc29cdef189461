//! Spill files in the log's directory.
//!
//! Invariants:
//! - A file with its final name is whole and on stable storage, its name included.
//! - A file is removed only if the metadata does not name it: then the data tier, the ring or a
//!   newer spill file has its contents.
//! - Files of another pool or of a higher epoch are never removed.

use crate::disk::file_disk::written_at;
use crate::overlay::SpillLayers;
use crate::overlay::extents::{Piece, Source};
use crate::overlay::spill_layer::SpillLayer;
use crate::overlay::spill_resident::{SPILL_EXTENSION, SpillBytes, SpillFileId};
use crate::spill::{self, SpillReader, SpillSeed, SpillSink};
use block::env::{Clock, Random};
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The spill files that the metadata names, oldest first, for each volume that has any.
pub type SpillFilesWanted = BTreeMap<VolumeId, Vec<SpillFileId>>;

/// A spill file that the metadata names and that is missing here or does not verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSpillFile {
    /// The volume of the file.
    pub volume: VolumeId,
    /// The identity of the file.
    pub file: SpillFileId,
    /// Its path.
    pub path: PathBuf,
    /// The fault, for people.
    pub why: String,
}

impl SpillBytes for File {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }
}

impl SpillSink for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
}

/// The findings, before anything is changed.
pub(crate) struct FoundSpills {
    pub(crate) layers: SpillLayers,
    pub(crate) missing: Vec<MissingSpillFile>,
    redundant: Vec<PathBuf>,
}

fn is_spill(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("spill-"))
}

fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| {
        let what = format!("list the spill files in {}", dir.display());
        Error::with_source(ErrorKind::Io, what, e)
    };
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let kind = path.extension().and_then(|kind| kind.to_str());
        if is_spill(&path) && matches!(kind, Some(SPILL_EXTENSION | "tmp")) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the count and the length in bytes of the spill files in the directory of a log that is
/// not open.
///
/// # Errors
/// `Io` if the directory or a file cannot be read.
pub fn weigh(dir: &Path) -> Result<(u64, u64)> {
    let (mut count, mut bytes) = (0, 0);
    for path in
        list(dir)?.iter().filter(|path| path.extension().is_some_and(|e| e == SPILL_EXTENSION))
    {
        let metadata = std::fs::metadata(path).map_err(|e| {
            Error::with_source(ErrorKind::Io, format!("look at {}", path.display()), e)
        })?;
        count += 1;
        bytes += metadata.len();
    }
    Ok((count, bytes))
}

impl FoundSpills {
    /// Returns the findings of a directory without spill files, when none is named.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn none() -> FoundSpills {
        FoundSpills { layers: SpillLayers::default(), missing: Vec::new(), redundant: Vec::new() }
    }
}

/// Opens the files that the metadata names and lists those that may be removed. Changes nothing.
///
/// # Errors
/// `Invalid` and `Fenced` for a file of another pool or of a higher epoch; `Io`.
pub(crate) fn find(
    dir: &Path,
    wanted: &SpillFilesWanted,
    reader: &SpillReader<'_>,
    clock: &dyn Clock,
) -> Result<FoundSpills> {
    let mut found =
        FoundSpills { layers: SpillLayers::default(), missing: Vec::new(), redundant: Vec::new() };
    let mut named = HashSet::new();
    for (volume, files) in wanted {
        let mut layers = Vec::with_capacity(files.len());
        for file in files {
            let path = dir.join(file.file_name(*volume));
            let layer = open_one(&path, *volume, *file, reader, clock);
            named.insert(path.clone());
            layers.push(Arc::new(match layer {
                Ok(layer) => layer,
                // A fault that may be temporary (no descriptors, no permission) is no loss: the
                // open fails.
                Err(error) if !is_gone(&error) => return Err(error),
                Err(error) => {
                    let (volume, why) = (*volume, error.chain());
                    found.missing.push(MissingSpillFile { volume, file: *file, path, why });
                    SpillLayer::missing(*file)
                }
            }));
        }
        found.layers.insert(*volume, layers);
    }
    for path in list(dir)? {
        if named.contains(&path) {
            continue;
        }
        let is_complete = path.extension().is_some_and(|kind| kind == SPILL_EXTENSION);
        if is_complete && let Err(error) = check_ours(&path, reader) {
            return Err(error);
        }
        found.redundant.push(path);
    }
    Ok(found)
}

/// Returns whether the file is missing, does not verify, or cannot be read from its disk.
fn is_gone(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
    error.kind() == ErrorKind::Corrupt || source.is_some_and(crate::disk::unreadable::is_eio)
}

/// Refuses a file of another owner. Damage does not matter, as nothing needs the file.
fn check_ours(path: &Path, reader: &SpillReader<'_>) -> Result<()> {
    let name = path.display().to_string();
    let file = File::open(path)
        .map_err(|e| Error::with_source(ErrorKind::Io, format!("open spill file {name}"), e))?;
    match spill::read_header(&name, &file, reader) {
        Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
        _ => Ok(()),
    }
}

fn open_one(
    path: &Path,
    volume: VolumeId,
    id: SpillFileId,
    reader: &SpillReader<'_>,
    clock: &dyn Clock,
) -> Result<SpillLayer> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|e| {
        let kind = match e.kind() {
            io::ErrorKind::NotFound => ErrorKind::Corrupt,
            _ => ErrorKind::Io,
        };
        Error::with_source(kind, format!("open spill file {name}"), e)
    })?;
    let since = written_at(&file, clock);
    Ok(spill::open(name, Box::new(file), volume, id, reader)?.since(since))
}

impl FoundSpills {
    /// Removes the files that nothing names.
    pub(crate) fn clean(&mut self) {
        remove(&std::mem::take(&mut self.redundant));
    }
}

/// Removes files. A file that cannot be removed is harmless: the next open tries again.
pub(crate) fn remove(paths: &[PathBuf]) {
    for path in paths {
        match std::fs::remove_file(path) {
            Ok(()) => tracing::debug!(path = %path.display(), "the log removed a spill file"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(
                    path = %path.display(), %error,
                    "could not remove a spill file; it stays until the next start"
                );
            }
        }
    }
}

/// Makes a random id for a new file.
pub(crate) fn fresh_id(random: &dyn Random) -> [u8; 16] {
    let mut id = [0; 16];
    random.fill(&mut id);
    id
}

/// Writes a spill file, makes it durable, and opens it. Leaves nothing behind on failure.
///
/// # Errors
/// `Io`, also for a full disk; those of `read`.
pub(crate) fn create(
    dir: &Path,
    seed: &SpillSeed,
    pieces: &[Piece],
    key: &PoolKey,
    clock: &dyn Clock,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<SpillLayer> {
    let path = dir.join(seed.id.file_name(seed.volume));
    let making = path.with_extension("tmp");
    let reader = SpillReader { pool: seed.pool, epoch: seed.epoch, key };
    let made = create_as(&making, seed, pieces, key, read).and_then(|()| {
        let named = std::fs::rename(&making, &path).and_then(|()| File::open(dir)?.sync_all());
        named.map_err(|e| {
            Error::with_source(ErrorKind::Io, format!("name {}", path.display()), e)
        })?;
        open_one(&path, seed.volume, seed.id, &reader, clock)
    });
    // No metadata names it yet, and the space may be needed.
    made.inspect_err(|_| remove(&[making, path.clone()]))
}

fn create_as(
    path: &Path,
    seed: &SpillSeed,
    pieces: &[Piece],
    key: &PoolKey,
    read: &dyn Fn(&Source) -> Result<Bytes>,
) -> Result<()> {
    let failed = |e| Error::with_source(ErrorKind::Io, format!("write {}", path.display()), e);
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).map_err(failed)?;
    spill::write(&mut file, seed, pieces, key, read)?;
    file.sync_all().map_err(failed)
}
