//! The spill files of the log: they take the data of a stalled volume, so
//! that the log does not wait for it.
//!
//! Invariants:
//! - A spill file counts once the data tier's metadata names it. Until then it is a copy of data in
//!   the log, and removing it loses nothing.
//! - Files are removed only when neither the overlay nor that metadata names them.

use super::{Log, LogInner};
use crate::disk::unreadable;
use crate::overlay::extents::{Piece, Source};
use crate::overlay::spill_layer::SpillLayer;
use crate::overlay::spill_resident::{SpillFileId, SpillResident};
use crate::overlay::{Generation, LayersOf};
use crate::spill::dir as spill_dir;
use crate::spill::{self, SpillSeed};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use std::path::PathBuf;
use std::sync::Arc;

/// Pairs of neighbours merged with each new spill file of a volume that has too many. The pairs with
/// the least to write are chosen, so a merge writes a few percent of the volume's spilled data. Two,
/// so that the number of files falls.
const SPILL_MERGES_MAX: usize = 2;

/// The intended spill files of one volume.
#[derive(Clone, Debug)]
pub struct SpillChange {
    volume: VolumeId,
    layers: Vec<Arc<SpillLayer>>,
    /// Files that were written and merged into others before anything named them.
    passing: Vec<SpillFileId>,
}

impl SpillChange {
    /// Returns the volume of these files.
    #[must_use]
    pub fn volume(&self) -> VolumeId {
        self.volume
    }

    /// Lists the files that the metadata must name, oldest first.
    #[must_use]
    pub fn files(&self) -> Vec<SpillFileId> {
        self.layers.iter().map(|layer| layer.id()).collect()
    }
}

/// Contents of the oldest spill files of a volume.
#[derive(Clone, Debug)]
pub struct SpillPart {
    volume: VolumeId,
    /// The combined contents: sorted, disjoint extents.
    pub pieces: Vec<Piece>,
    files: Vec<SpillFileId>,
    /// The volume's other spill files, oldest first.
    pub rest: Vec<SpillFileId>,
}

impl SpillPart {
    /// Returns the LSN of the newest entry that the files may hold; `Lsn::NONE` if there are no
    /// files.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.files.last().map_or(Lsn::NONE, |file| file.last_lsn)
    }
}

/// Spill files that nothing names any more.
#[derive(Debug, Default)]
#[must_use = "the files stay until they are removed"]
pub struct ObsoleteSpillFiles(pub(super) Vec<PathBuf>);

impl Log {
    /// Reads a payload of a spill file; verifies and decrypts it.
    ///
    /// # Errors
    /// `Corrupt`, naming file and offset, if it does not verify; `Io` if it cannot be read.
    pub async fn read_spilled(&self, resident: &SpillResident) -> Result<Bytes> {
        let resident = resident.clone();
        let read = tokio::task::spawn_blocking(move || resident.read());
        read.await.map_err(|e| Error::with_source(ErrorKind::Io, "read a spill file", e))?
    }

    /// Writes the data of `volume` in `generation`, the oldest frozen one, to a spill file, so that
    /// the rest of the generation can be destaged alone. The file counts once the data tier's
    /// metadata names [`SpillChange::files`]; until then it is only a copy. A payload that no longer
    /// verifies is marked as lost. A payload that the disk does not read is marked as lost only if
    /// `are_unreadable_lost` says that the disk was given its time.
    ///
    /// # Errors
    /// `Io`, also if the disk is full: nothing is left of the file then. [`crate::is_unreadable`] tells
    /// the payloads that the disk does not read.
    pub async fn write_spill_file(
        &self,
        generation: &Arc<Generation>,
        volume: VolumeId,
        are_unreadable_lost: bool,
    ) -> Result<SpillChange> {
        let (inner, generation) = (Arc::clone(&self.inner), Arc::clone(generation));
        let write = move || inner.write_spill_file(&generation, volume, are_unreadable_lost);
        let write = tokio::task::spawn_blocking(write);
        write.await.map_err(|e| Error::with_source(ErrorKind::Io, "write a spill file", e))?
    }

    /// Merges the oldest spill files of `volume` for destage: at least one file, as many as fit into
    /// `payload_bytes_max`, and none beyond the first snapshot that separates two of them. Empty if
    /// the volume has none.
    ///
    /// # Errors
    /// `Io` if the work was cut short.
    pub async fn spill_part(&self, volume: VolumeId, payload_bytes_max: u64) -> Result<SpillPart> {
        self.spill_part_of(volume, payload_bytes_max, false).await
    }

    /// Like [`Log::spill_part`], for all spill files, regardless of size and snapshots.
    ///
    /// # Errors
    /// Those of [`Log::spill_part`].
    pub async fn all_spilled(&self, volume: VolumeId) -> Result<SpillPart> {
        self.spill_part_of(volume, u64::MAX, true).await
    }

    async fn spill_part_of(
        &self,
        volume: VolumeId,
        payload_bytes_max: u64,
        is_all: bool,
    ) -> Result<SpillPart> {
        let inner = Arc::clone(&self.inner);
        let merge = move || {
            let layers = inner.shared.overlay.spill_layers_of(volume);
            let mut bytes = 0;
            let mut last_lsn = Lsn::NONE;
            let overlay = &inner.shared.overlay;
            let fits = layers.iter().take_while(|layer| {
                let is_first = bytes == 0;
                bytes += layer.weight.payload_bytes.max(1);
                let before = std::mem::replace(&mut last_lsn, layer.id().last_lsn);
                let is_apart = || overlay.is_snapshot_between(volume, before, layer.id().first_lsn);
                is_all || is_first || (bytes <= payload_bytes_max && !is_apart())
            });
            let count = fits.count();
            let (taken, rest) = layers.split_at(count);
            SpillPart {
                volume,
                pieces: spill::merge(taken),
                files: taken.iter().map(|layer| layer.id()).collect(),
                rest: rest.iter().map(|layer| layer.id()).collect(),
            }
        };
        let merged = tokio::task::spawn_blocking(merge).await;
        merged.map_err(|e| Error::with_source(ErrorKind::Io, "merge spill files", e))
    }

    /// Drops the spill files of `part` once the data tier holds all of their contents and its
    /// metadata durably names only the volume's remaining files.
    pub fn drop_spilled(&self, part: &SpillPart) -> ObsoleteSpillFiles {
        let mut layers = self.inner.shared.overlay.spill_layers_of(part.volume);
        layers.retain(|layer| !part.files.contains(&layer.id()));
        let change = SpillChange { volume: part.volume, layers, passing: Vec::new() };
        let (changes, obsolete) = self.take_changes(vec![change]);
        self.inner.shared.overlay.change_spill_layers(changes);
        obsolete
    }

    /// Returns the files that were written for changes which will not be made and which no metadata
    /// can name.
    pub fn discard_spill_files(&self, changes: Vec<SpillChange>) -> ObsoleteSpillFiles {
        let mut obsolete = Vec::new();
        for change in changes {
            let kept = self.inner.shared.overlay.spill_layers_of(change.volume);
            let is_new = |id: &SpillFileId| kept.iter().all(|layer| layer.id() != *id);
            let names = change.files().into_iter().filter(is_new).chain(change.passing);
            obsolete.extend(names.map(|id| self.inner.dir.join(id.file_name(change.volume))));
        }
        ObsoleteSpillFiles(obsolete)
    }

    pub(super) fn take_changes(
        &self,
        changes: Vec<SpillChange>,
    ) -> (Vec<LayersOf>, ObsoleteSpillFiles) {
        let mut obsolete = Vec::new();
        for change in &changes {
            let kept = change.files();
            let before = self.inner.shared.overlay.spill_layers_of(change.volume);
            let gone = before.iter().map(|layer| layer.id()).filter(|id| !kept.contains(id));
            let names = gone.chain(change.passing.iter().copied());
            obsolete.extend(names.map(|id| self.inner.dir.join(id.file_name(change.volume))));
        }
        let layers = changes.into_iter().map(|change| (change.volume, change.layers));
        (layers.collect(), ObsoleteSpillFiles(obsolete))
    }

    /// Removes files that nothing names. The next open removes any that cannot be removed now.
    pub async fn remove_spill_files(&self, obsolete: ObsoleteSpillFiles) {
        if !obsolete.0.is_empty() {
            let removal = tokio::task::spawn_blocking(move || spill_dir::remove(&obsolete.0));
            if let Err(error) = removal.await {
                tracing::warn!(
                    %error,
                    "could not remove spill files; they stay until the next start"
                );
            }
        }
    }
}

impl LogInner {
    /// Implements [`Log::write_spill_file`]. Blocks.
    fn write_spill_file(
        &self,
        generation: &Generation,
        volume: VolumeId,
        are_unreadable_lost: bool,
    ) -> Result<SpillChange> {
        let (first_lsn, last_lsn) = (generation.first_lsn(), generation.last_lsn());
        let pieces = generation.pieces_of(volume);
        // All of the volume's data in the generation is at most this old; younger data counts as
        // this old.
        let since = generation.since;
        let mut fresh = Vec::new();
        let written = self.write_layers(volume, &mut fresh, |fresh| {
            let create = |first_lsn, last_lsn, pieces: &[Piece]| {
                self.create_spill(volume, first_lsn, last_lsn, pieces, are_unreadable_lost)
            };
            let new = create(first_lsn, last_lsn, &pieces)?.since(since);
            fresh.push(new.id());
            let mut layers = self.shared.overlay.spill_layers_of(volume);
            layers.push(Arc::new(new));
            let count_max = self.shared.overlay.spill_files_max(volume);
            for _ in 0..SPILL_MERGES_MAX {
                let index = spill::cheapest_pair(&layers, |older, newer| {
                    !self.shared.overlay.is_snapshot_between(
                        volume,
                        older.last_lsn,
                        newer.first_lsn,
                    )
                });
                let Some(index) = index.filter(|_| layers.len() > count_max) else { break };
                let pair = &layers[index..index + 2];
                let (first_lsn, last_lsn) = (pair[0].id().first_lsn, pair[1].id().last_lsn);
                let since = pair.iter().filter_map(|layer| layer.since).min();
                let merged = create(first_lsn, last_lsn, &spill::merge(pair))?.since(since);
                fresh.push(merged.id());
                layers.splice(index..index + 2, [Arc::new(merged)]);
            }
            Ok(layers)
        });
        let layers = written?;
        let is_used = |id: &SpillFileId| layers.iter().any(|layer| layer.id() == *id);
        fresh.retain(|id| !is_used(id));
        Ok(SpillChange { volume, layers, passing: fresh })
    }

    /// Runs `write`, which lists the files that it makes, and removes them if it fails: they will
    /// be written again, and the failure may be a lack of space.
    fn write_layers<T>(
        &self,
        volume: VolumeId,
        fresh: &mut Vec<SpillFileId>,
        write: impl FnOnce(&mut Vec<SpillFileId>) -> Result<T>,
    ) -> Result<T> {
        write(fresh).inspect_err(|_| {
            let paths: Vec<PathBuf> =
                fresh.iter().map(|id| self.dir.join(id.file_name(volume))).collect();
            spill_dir::remove(&paths);
        })
    }

    fn create_spill(
        &self,
        volume: VolumeId,
        first_lsn: Lsn,
        last_lsn: Lsn,
        pieces: &[Piece],
        are_unreadable_lost: bool,
    ) -> Result<SpillLayer> {
        let seed = SpillSeed {
            pool: self.identity.pool,
            epoch: self.identity.epoch,
            algorithm: self.options.algorithm,
            volume,
            id: SpillFileId { first_lsn, last_lsn, id: spill_dir::fresh_id(&*self.random) },
        };
        let read = |source: &Source| match source {
            Source::Payload(bytes) => Ok(bytes.clone()),
            Source::LogResident(resident) => resident.read(&*self.reader, &self.key),
            Source::SpillResident(resident) => resident.read(),
            Source::Zeroes { .. } | Source::Lost { .. } | Source::Beneath => {
                unreachable!("it has no payload")
            }
        };
        spill_dir::create(&self.dir, &seed, pieces, &self.key, &*self.clock, &|source| {
            match are_unreadable_lost {
                true => unreadable::read_or_lose(|| read(source)),
                false => read(source),
            }
        })
    }
}
