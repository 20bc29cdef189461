//! The owner's part of the data tier: it codes segments, reads blocks of them, and rebuilds, moves and
//! reclaims fragments.
//!
//! Invariants:
//! - A record is committed after the fragments that it names are stored.
//! - A fragment is deleted only at a place that the committed placement does not name, by the owner whose
//!   commit succeeded. Fragments of a change that was refused are left.
//! - Fewer fragments than are needed give an error, never zeroes.

use crate::stores::{Asked, Name, SEGMENTS_OF_EPOCH, Stores, owner_of};
use crate::tier::{Place, Record, Tier};
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use bytes::Bytes;
use erasure::fragment::FragmentHeader;
use erasure::{Cuts, Pattern, Scheme, codec};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;
use wal::Log;

/// Bytes of a block, which is a frame.
const FRAME: u32 = 512;
/// Time after which a segment may be written with a fragment less.
const WHOLE_WAIT: Duration = Duration::from_secs(3);
/// Rounds of checks that a store may be silent before its fragments are rebuilt at others.
const SILENT_ROUNDS: u32 = 2;
/// Times that the record of a block is looked at for one read.
const LOOKS: usize = 3;

/// The data tier as one owner has it.
pub(crate) struct Data {
    tier: Tier,
    stores: Stores,
    node: usize,
    epoch: Epoch,
    segment_count: Mutex<u64>,
    /// Of each store, the rounds of checks in a row without an answer.
    silences: Mutex<BTreeMap<usize, u32>>,
}

/// A segment before its record is committed.
struct Made {
    number: u64,
    scheme: Scheme,
    cuts: Cuts,
    fragments: Vec<Vec<u8>>,
}

impl Made {
    fn record(&self, places: Vec<Option<Place>>) -> Record {
        Record { number: self.number, scheme: self.scheme, cuts: self.cuts.clone(), places }
    }
}

fn fragment(
    number: u64,
    (scheme, cuts): (Scheme, &Cuts),
    (index, generation): (usize, u64),
    payload: &[u8],
) -> Vec<u8> {
    let header = FragmentHeader {
        owner: owner_of(number),
        scheme,
        index: u8::try_from(index).expect("a scheme has few fragments"),
        generation,
        cuts: cuts.clone(),
        directory_bytes: 0,
    };
    [&header.encode()[..], payload, &header.trailer(payload, &[])].concat()
}

fn unavailable(what: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

impl Data {
    pub(crate) fn new(tier: &Tier, stores: &Stores, node: usize, epoch: Epoch) -> Data {
        let (segment_count, silences) = Default::default();
        let (tier, stores) = (tier.clone(), stores.clone());
        Data { tier, stores, node, epoch, segment_count, silences }
    }

    /// Puts the blocks of a generation into a segment, and commits it with the LSN. `release` is called
    /// once the log needs them no more.
    pub(crate) async fn destage(
        &self,
        log: &Log,
        blocks: &BTreeMap<u64, Bytes>,
        up_to: Lsn,
        release: impl FnOnce(),
    ) -> Result<()> {
        if blocks.is_empty() {
            self.tier.commit_segment(self.epoch, None, &[], up_to)?;
            release();
            return Ok(());
        }
        let made = self.make(blocks)?;
        let offsets = (0..).map(|place: u32| place * FRAME);
        let named: Vec<(u64, u32)> = blocks.keys().copied().zip(offsets).collect();
        let _attempt = self.stores.attempt();
        if self.stores.has_bug("record-before-fragments") {
            let place = |index| {
                let store = self.home(made.number, index);
                Some(Place { store, generation: 1 })
            };
            let places: Vec<Option<Place>> = (0..made.fragments.len()).map(place).collect();
            self.tier.commit_segment(self.epoch, Some(made.record(places)), &named, up_to)?;
            release();
            let world = &self.stores.network.world;
            world.sleep(world.ms(30, 500)).await;
            self.put_all(log, &made).await?;
            return Ok(());
        }
        let places = self.put_all(log, &made).await?;
        self.tier.commit_segment(self.epoch, Some(made.record(places)), &named, up_to)?;
        self.stores.network.counts.add("segments destaged");
        release();
        Ok(())
    }

    fn make(&self, blocks: &BTreeMap<u64, Bytes>) -> Result<Made> {
        let number = {
            let mut count = self.segment_count.lock();
            *count += 1;
            self.epoch.0 * SEGMENTS_OF_EPOCH + *count
        };
        let mut image = Vec::new();
        blocks.values().for_each(|block| image.extend_from_slice(block));
        let image_bytes = u32::try_from(image.len()).expect("a few blocks");
        let borders: Vec<u32> = (0..image_bytes).step_by(FRAME as usize).collect();
        let scheme = self.stores.scheme;
        let cuts = Cuts::new(scheme, image_bytes, &borders);
        let payloads = codec::encode(scheme, &cuts, &image)?;
        let of = |(index, payload): (usize, &codec::Payload<'_>)| {
            fragment(number, (scheme, &cuts), (index, 1), payload)
        };
        let fragments = payloads.iter().enumerate().map(of).collect();
        Ok(Made { number, scheme, cuts: cuts.clone(), fragments })
    }

    /// Returns the store that a fragment of a new segment should have.
    fn home(&self, number: u64, index: usize) -> usize {
        let first = usize::try_from(number).expect("64 bits");
        match self.stores.has_bug("two-in-one-domain") {
            true => (first + index % 2) % self.stores.count,
            false => (first + index) % self.stores.count,
        }
    }

    /// Stores the fragments of a segment, with substitutes for stores that do not take them.
    async fn put_all(&self, log: &Log, made: &Made) -> Result<Vec<Option<Place>>> {
        let world = &self.stores.network.world;
        let begun = world.now();
        let mut places: Vec<Option<Place>> = vec![None; made.fragments.len()];
        let may_share = self.stores.has_bug("two-in-one-domain");
        loop {
            let mut refusing: BTreeSet<usize> = BTreeSet::new();
            for index in 0..places.len() {
                for turn in 0..self.stores.count {
                    if places[index].is_some() {
                        break;
                    }
                    let store = (self.home(made.number, index) + turn) % self.stores.count;
                    let is_used = places.iter().flatten().any(|place| place.store == store);
                    if refusing.contains(&store) || (is_used && !may_share) {
                        continue;
                    }
                    let name = Name { number: made.number, generation: 1, index };
                    let put = Asked::Put(name, made.fragments[index].clone());
                    match self.stores.call((self.node, store), self.epoch, put).await {
                        Ok(_) => places[index] = Some(Place { store, generation: 1 }),
                        Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
                        Err(_) => {
                            refusing.insert(store);
                        }
                    }
                }
            }
            let count = places.iter().flatten().count();
            let is_late = world.now() >= begun + WHOLE_WAIT;
            let may_miss = is_late && made.scheme.parity() > 1;
            if count == places.len() || (may_miss && count >= made.scheme.written_min()) {
                return Ok(places);
            }
            if log.failure().is_some() {
                return Err(unavailable("destage: the log has failed"));
            }
            self.stores.network.counts.add("destages that wait for stores");
            world.sleep(world.ms(200, 600)).await;
        }
    }

    /// Reads a block; `None` for one that was never written.
    pub(crate) async fn read(&self, block: u64) -> Result<Option<Vec<u8>>> {
        for _ in 0..LOOKS {
            let Some((record, at)) = self.tier.find(block) else { return Ok(None) };
            let located = record.cuts.locate(&(at..at + FRAME)).expect("no frame is cut");
            let (index, begin) = (located.0, located.1 as usize);
            let range = begin..begin + FRAME as usize;
            match self.part(&record, index, &range).await {
                Ok(bytes) if bytes.len() == range.len() => return Ok(Some(bytes)),
                Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
                // It may have moved, or its segment is reclaimed.
                Err(error)
                    if error.kind() == ErrorKind::NotFound && self.is_past(block, &record) =>
                {
                    continue;
                }
                _ => {}
            }
            if let Some(bytes) = self.decode(&record, index, &range).await? {
                self.stores.network.counts.add("reads decoded");
                return Ok(Some(bytes));
            }
            if !self.is_past(block, &record) {
                break;
            }
        }
        Err(unavailable("read a block: too few stores answer"))
    }

    /// Whether a block has another segment by now, or its segment another record.
    fn is_past(&self, block: u64, record: &Record) -> bool {
        self.tier.find(block).is_none_or(|(now, _)| now != *record)
    }

    async fn part(&self, record: &Record, index: usize, range: &Range<usize>) -> Result<Vec<u8>> {
        let place = record.places[index];
        let place = place
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "read a fragment: none was put"))?;
        let name = Name { number: record.number, generation: place.generation, index };
        self.stores.read((self.node, place.store), self.epoch, name, range).await
    }

    /// Makes a range of a data fragment from others; `None` if there are too few.
    async fn decode(
        &self,
        record: &Record,
        lost: usize,
        range: &Range<usize>,
    ) -> Result<Option<Vec<u8>>> {
        let units = Pattern::units_of(range);
        let (mut sources, mut parts) = (Vec::new(), Vec::new());
        for index in (0..record.scheme.fragments()).filter(|index| *index != lost) {
            if sources.len() == record.scheme.data() {
                break;
            }
            match self.part(record, index, &units).await {
                Ok(bytes) => {
                    sources.push(index);
                    parts.push(bytes);
                }
                Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
                Err(_) => {}
            }
        }
        if sources.len() < record.scheme.data() {
            return Ok(None);
        }
        let ranges: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let made = Pattern::new(record.scheme, &[lost], &sources)?.make(&ranges, units.len())?;
        let begin = range.start - units.start;
        Ok(Some(made[0][begin..begin + range.len()].to_vec()))
    }

    /// Checks all fragments once, and rebuilds those that are missing or damaged. Reclaims segments.
    pub(crate) async fn walk(&self, log: &Log) -> Result<()> {
        self.reclaim()?;
        let world = &self.stores.network.world;
        let (mut silent, mut heard): (BTreeSet<usize>, BTreeSet<usize>) = Default::default();
        let numbers: Vec<u64> = self.tier.records().iter().map(|record| record.number).collect();
        for number in numbers {
            for index in 0..self.stores.scheme.fragments() {
                if log.failure().is_some() {
                    return Ok(());
                }
                let Some(record) = self.tier.record(number) else { break };
                let is_wanted = match record.places[index] {
                    None => true,
                    Some(place) if silent.contains(&place.store) => self.is_lasting(place.store),
                    Some(place) => {
                        let name = Name { number, generation: place.generation, index };
                        let to = (self.node, place.store);
                        match self.stores.call(to, self.epoch, Asked::Check(name)).await {
                            // Some fragments move, as they do for the balance of stores.
                            Ok(_) => {
                                heard.insert(place.store);
                                world.chance(2)
                            }
                            Err(error) => match error.kind() {
                                ErrorKind::Fenced => return Err(error),
                                ErrorKind::Unavailable => {
                                    silent.insert(place.store);
                                    self.is_lasting(place.store)
                                }
                                _ => true,
                            },
                        }
                    }
                };
                if is_wanted {
                    self.rebuild(number, index, &mut silent).await?;
                }
            }
        }
        let mut silences = self.silences.lock();
        silences.retain(|store, _| !heard.contains(store));
        for store in silent.difference(&heard) {
            *silences.entry(*store).or_default() += 1;
        }
        Ok(())
    }

    fn is_lasting(&self, store: usize) -> bool {
        self.silences.lock().get(&store).is_some_and(|rounds| *rounds >= SILENT_ROUNDS)
    }

    /// Makes a fragment anew, at a store that has none of the segment, or at its own.
    async fn rebuild(&self, number: u64, index: usize, silent: &mut BTreeSet<usize>) -> Result<()> {
        let Some(record) = self.tier.record(number) else { return Ok(()) };
        let _attempt = self.stores.attempt();
        let mut found: Vec<Option<Vec<u8>>> = vec![None; record.scheme.fragments()];
        for other in (0..found.len()).filter(|other| *other != index) {
            let is_enough = found.iter().flatten().count() == record.scheme.data();
            let is_silent = record.places[other].is_none_or(|place| silent.contains(&place.store));
            if is_enough || is_silent {
                continue;
            }
            match self.part(&record, other, &(0..usize::MAX)).await {
                Ok(payload) => found[other] = Some(payload),
                Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
                Err(_) => {}
            }
        }
        if found.iter().flatten().count() < record.scheme.data() {
            return Ok(());
        }
        let found: Vec<Option<&[u8]>> = found.iter().map(Option::as_deref).collect();
        let payload = codec::rebuild(record.scheme, &record.cuts, &found, &[index])?.remove(0);
        let old = record.places[index];
        let generation = old.map_or(0, |old| old.generation) + 1;
        let of = (record.scheme, &record.cuts);
        let bytes = fragment(number, of, (index, generation), &payload);
        let name = Name { number, generation, index };
        let count = self.stores.count;
        let first = self.stores.network.world.below(count as u64);
        let first = usize::try_from(first).expect("an index");
        for store in (first..first + count).map(|store| store % count) {
            let others = record.places.iter().enumerate().filter(|(other, _)| *other != index);
            let is_used = others.filter_map(|(_, place)| *place).any(|place| place.store == store);
            if is_used || silent.contains(&store) {
                continue;
            }
            let put = Asked::Put(name, bytes.clone());
            match self.stores.call((self.node, store), self.epoch, put).await {
                Ok(_) => return self.move_to(name, old, Place { store, generation }).await,
                Err(error) if error.kind() == ErrorKind::Fenced => return Err(error),
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    silent.insert(store);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Names the new place of a fragment, and deletes it at the old one.
    async fn move_to(&self, name: Name, old: Option<Place>, new: Place) -> Result<()> {
        if self.stores.has_bug("old-deleted-before-record") {
            self.delete(name, old).await?;
        }
        if self.tier.set_placement(self.epoch, (name.number, name.index), old, new)? {
            self.stores.network.counts.add("fragments rebuilt");
            self.delete(name, old).await?;
        }
        Ok(())
    }

    /// Deletes a fragment at a place. One that does not answer keeps it for ever.
    async fn delete(&self, name: Name, place: Option<Place>) -> Result<()> {
        let Some(place) = place else { return Ok(()) };
        let asked = Asked::Delete(Name { generation: place.generation, ..name });
        match self.stores.call((self.node, place.store), self.epoch, asked).await {
            Err(error) if error.kind() == ErrorKind::Fenced => Err(error),
            _ => Ok(()),
        }
    }

    fn reclaim(&self) -> Result<()> {
        for record in self.tier.remove_unnamed(self.epoch)? {
            self.stores.network.counts.add("segments reclaimed");
            for (index, place) in record.places.iter().enumerate() {
                let Some(Place { store, generation }) = *place else { continue };
                let asked = Asked::Delete(Name { number: record.number, generation, index });
                self.stores.post((self.node, store), self.epoch, asked);
            }
        }
        Ok(())
    }
}
