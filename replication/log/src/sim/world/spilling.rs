//! Stalled volumes of a run: their data goes to spill files and, later, to the data tier.
//!
//! Invariants:
//! - A spill file counts only while the data tier names it, as in the product.

use super::*;

impl World {
    /// Writes spill files for the volumes that cannot be destaged: those that already have some, and
    /// occasionally another one.
    pub(super) fn spill_some(
        &mut self,
        process: &Process,
        generation: &Generation,
    ) -> Result<Vec<LayersOf>, String> {
        let mut changed = Vec::new();
        for (volume, pieces) in generation.volumes() {
            if !self.named_spills.contains_key(&volume.0) && !self.rng.chance(15) {
                continue;
            }
            let (first, last) = (generation.first_lsn(), generation.last_lsn());
            let new = self.write_spill_file(process, volume, first, last, &pieces)?;
            let mut layers = process.shared.overlay.spill_layers_of(volume);
            layers.push(new);
            if layers.len() > 2
                && let Some(index) = spill::cheapest_pair(&layers, |older, newer| {
                    let overlay = &process.shared.overlay;
                    self.plan.seeded_bugs.sides_joined
                        || !overlay.is_snapshot_between(volume, older.last_lsn, newer.first_lsn)
                })
            {
                let pair = &layers[index..index + 2];
                let (first, last) = (pair[0].id().first_lsn, pair[1].id().last_lsn);
                let merged =
                    self.write_spill_file(process, volume, first, last, &spill::merge(pair))?;
                layers.splice(index..index + 2, [merged]);
            }
            self.stats.spilled += 1;
            changed.push((volume, layers));
        }
        Ok(changed)
    }

    fn write_spill_file(
        &mut self,
        process: &Process,
        volume: VolumeId,
        first_lsn: Lsn,
        last_lsn: Lsn,
        pieces: &[Piece],
    ) -> Result<Arc<SpillLayer>, String> {
        let mut id = SpillFileId { first_lsn, last_lsn, id: [0; 16] };
        self.random.fill(&mut id.id);
        let seed = SpillSeed {
            pool: self.identity.pool,
            epoch: self.identity.epoch,
            algorithm: self.options.algorithm,
            volume,
            id,
        };
        let key = PoolKey::new(KEY);
        let mut sink = SimSpill::default();
        spill::write(&mut sink, &seed, pieces, &key, &|source| match source {
            Source::LogResident(resident) => resident.read(&*process.reader, &key),
            Source::SpillResident(resident) => resident.read(),
            other => panic!("{other:?} needs no reading"),
        })
        .map_err(|e| e.chain())?;
        self.spill_files.insert(id.file_name(volume), sink);
        self.open_spill(volume, id)
    }

    fn open_spill(&self, volume: VolumeId, id: SpillFileId) -> Result<Arc<SpillLayer>, String> {
        let name = id.file_name(volume);
        let bytes = self.spill_files.get(&name).ok_or_else(|| format!("{name} is gone"))?;
        let key = PoolKey::new(KEY);
        let reader =
            SpillReader { pool: self.identity.pool, epoch: self.identity.epoch, key: &key };
        let layer = spill::open(name, Box::new(bytes.clone()), volume, id, &reader);
        layer.map(Arc::new).map_err(|e| e.chain())
    }

    /// Opens the spill files that the metadata names and removes the others, like the open of a log.
    pub(super) fn open_spills(&mut self) -> Result<SpillLayers, String> {
        let mut found = SpillLayers::new();
        let mut named = std::collections::BTreeSet::new();
        for (volume, files) in &self.named_spills {
            let volume = VolumeId(*volume);
            named.extend(files.iter().map(|file| file.file_name(volume)));
            let layers: Result<_, _> =
                files.iter().map(|id| self.open_spill(volume, *id)).collect();
            found.insert(volume, layers?);
        }
        self.spill_files.retain(|name, _| named.contains(name));
        Ok(found)
    }

    /// Simulates a catch-up window: the tier takes in all spill files of a volume.
    pub(super) fn catch_up(&mut self, process: &Process) -> Result<(), String> {
        let Some((&volume, _)) = self.named_spills.iter().next() else { return Ok(()) };
        let id = VolumeId(volume);
        for piece in spill::merge(&process.shared.overlay.spill_layers_of(id)) {
            let tags = tags_of(&*process.reader, &piece.source, piece.sector_count)?;
            let sectors = (piece.start_sector..).map(|sector| (volume, sector));
            self.tier.extend(sectors.zip(tags));
        }
        self.named_spills.remove(&volume);
        self.stats.caught_up += 1;
        self.check_tier()?;
        if self.rng.chance(30) {
            process.shared.fail(block::Error::new(ErrorKind::Io, "crashes before the files go"));
        } else {
            process.shared.overlay.change_spill_layers(vec![(id, Vec::new())]);
        }
        Ok(())
    }
}
