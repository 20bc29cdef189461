//! The possible contents of a volume, sector by sector, given the requests that were sent and
//! acknowledged.
//!
//! Invariants:
//! - An acknowledged request excludes the effects of all requests that were acknowledged before it
//!   was sent. Two requests whose times overlap may have happened in either order, per sector.
//! - After a crash a sector holds one of its possible contents; the content that was seen is the
//!   only possibility from then on. A request that was never acknowledged may be seen or not, but
//!   it cannot appear once it was seen missing.
//! - A request that covers part of a sector is allowed only while the sector has one possible
//!   content and no other request touches it, so its effect is known to the byte.
//! - A snapshot may hold any contents that the volume may have held at a moment between the command
//!   and its answer, with the same moment for all sectors.

use crate::stamp::{SECTOR_BYTES, Stamp, describe};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

const SECTOR: u64 = SECTOR_BYTES as u64;

/// Content of one sector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    /// The whole sector is as this request wrote it.
    Stamped(u64),
    /// The whole sector is as any request with this pattern writes it.
    Pattern(u8),
    /// The sector has parts of several requests.
    Mixed(Arc<[u8; SECTOR_BYTES]>),
}

#[derive(Clone, Debug)]
struct Possible {
    content: Content,
    sent: u64,
    acked: Option<u64>,
    sequence: u64,
}

#[derive(Clone, Debug, Default)]
struct Sector {
    /// Empty if the sector is known to be zero.
    possible: Vec<Possible>,
    is_exclusive: bool,
    reader_count: u32,
}

/// The effect of a request on its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Writes the stamps of the request.
    Write,
    /// Writes blocks that are equal for all requests with this pattern, at any place.
    Pattern(u8),
    /// Makes it zero: trim and write-zeroes.
    Zero,
}

/// A request that was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    sequence: u64,
    sectors: Range<u64>,
}

/// A request, kept to explain findings.
#[derive(Clone, Debug)]
struct Told {
    words: String,
    acked: Option<u64>,
}

/// The volume number that is used in the stamps of patterns.
const PATTERN_VOLUME: u8 = u8::MAX;
/// Sectors after which a pattern recurs: those of a block.
const PATTERN_SECTORS: u64 = 8;

/// The model of one volume. Time is a counter that only this volume's requests move.
#[derive(Clone)]
pub struct VolumeModel {
    volume: u8,
    run: u64,
    start_sector: u64,
    sectors: Vec<Sector>,
    clock: u64,
    told: std::collections::HashMap<u64, Told>,
    /// The snapshot that is being made.
    snapshot: Option<Box<VolumeModel>>,
    /// For a snapshot: the times of its volume between which it was made, as far as its sectors
    /// have shown.
    instant: Option<(u64, u64)>,
}

impl VolumeModel {
    /// Makes a window of `sector_count` sectors from `start_sector` of volume number `volume`, all
    /// zero.
    #[must_use]
    pub fn new(run: u64, volume: u8, start_sector: u64, sector_count: usize) -> VolumeModel {
        let sectors = vec![Sector::default(); sector_count];
        let told = std::collections::HashMap::new();
        VolumeModel {
            volume,
            run,
            start_sector,
            sectors,
            clock: 0,
            told,
            snapshot: None,
            instant: None,
        }
    }

    /// Notes that the command for a snapshot is about to be sent.
    ///
    /// # Panics
    /// When another snapshot is being made.
    pub fn snapshot_begins(&mut self) {
        assert!(self.snapshot.is_none(), "one snapshot at a time");
        let mut snapshot = self.copy();
        snapshot.crashed();
        self.snapshot = Some(Box::new(snapshot));
    }

    /// Notes that the command has been answered, or never will be. Returns the model of the
    /// snapshot.
    ///
    /// # Panics
    /// When no snapshot was begun.
    pub fn snapshot_ends(&mut self) -> VolumeModel {
        let mut snapshot = *self.snapshot.take().expect("it was begun");
        snapshot.instant = Some((snapshot.clock, self.clock));
        snapshot
    }

    /// Returns a model of another volume, or a snapshot, with these contents and without requests.
    #[must_use]
    pub fn copy(&self) -> VolumeModel {
        let (sectors, told) = (self.sectors.clone(), std::collections::HashMap::new());
        VolumeModel { sectors, told, snapshot: None, instant: None, ..*self }
    }

    /// Returns the window as a range of bytes of the volume.
    #[must_use]
    pub fn window(&self) -> Range<u64> {
        let count = u64::try_from(self.sectors.len()).expect("fits");
        self.start_sector * SECTOR..(self.start_sector + count) * SECTOR
    }

    /// Notes that a request is about to be sent, and returns the bytes that it writes (for
    /// `Write`). `None` if it would touch sectors that other requests make unpredictable: the
    /// caller sends another one.
    pub fn send(
        &mut self,
        sequence: u64,
        effect: Effect,
        range: Range<u64>,
    ) -> Option<(Sent, Vec<u8>)> {
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        let is_complete =
            |sector: u64| range.start <= sector * SECTOR && (sector + 1) * SECTOR <= range.end;
        for sector in sectors.clone() {
            let state = self.sector(sector);
            let is_known = state.possible.len() < 2 && state.is_settled();
            if state.is_exclusive || state.reader_count > 0 || !(is_complete(sector) || is_known) {
                return None;
            }
        }
        let mut payload = Vec::new();
        self.clock += 1;
        let sent = self.clock;
        for sector in sectors.clone() {
            let mut stamp = [0; SECTOR_BYTES];
            match effect {
                Effect::Write => {
                    Stamp { volume: self.volume, sector, sequence }.fill(self.run, &mut stamp);
                }
                Effect::Pattern(pattern) => {
                    self.pattern(sector, pattern).fill(self.run, &mut stamp)
                }
                Effect::Zero => {}
            }
            let from = usize_of(range.start.saturating_sub(sector * SECTOR));
            let to = usize_of((range.end - sector * SECTOR).min(SECTOR));
            let content = if !is_complete(sector) {
                let mut bytes = self.known(sector);
                bytes[from..to].copy_from_slice(&stamp[from..to]);
                Content::Mixed(Arc::new(bytes))
            } else {
                match effect {
                    Effect::Write => Content::Stamped(sequence),
                    Effect::Pattern(pattern) => Content::Pattern(pattern),
                    Effect::Zero => Content::Zero,
                }
            };
            if effect != Effect::Zero {
                payload.extend_from_slice(&stamp[from..to]);
            }
            let is_exclusive = !is_complete(sector);
            let possible = Possible { content, sent, acked: None, sequence };
            if let Some(snapshot) = &mut self.snapshot {
                snapshot.sector_mut(sector).add(possible.clone());
            }
            let state = self.sector_mut(sector);
            state.add(possible);
            state.is_exclusive = is_exclusive;
        }
        let words = format!("{effect:?} {}+{}", range.start, range.end - range.start);
        self.told.insert(sequence, Told { words, acked: None });
        Some((Sent { sequence, sectors }, payload))
    }

    /// Notes that a request was acknowledged.
    pub fn acked(&mut self, request: &Sent) {
        self.clock += 1;
        let now = self.clock;
        if let Some(told) = self.told.get_mut(&request.sequence) {
            told.acked = Some(now);
        }
        for sector in request.sectors.clone() {
            if let Some(snapshot) = &mut self.snapshot {
                // The snapshot may have been made before the request: it excludes nothing there.
                let possible = snapshot.sector_mut(sector).possible.iter_mut();
                let ours = possible.filter(|one| one.sequence == request.sequence);
                ours.for_each(|one| one.acked = Some(now));
            }
            let state = self.sector_mut(sector);
            state.is_exclusive = false;
            let mut sent = 0;
            for possible in &mut state.possible {
                if possible.sequence == request.sequence {
                    possible.acked = Some(now);
                    sent = possible.sent;
                }
            }
            // This request overwrites all that were acknowledged before it was sent.
            state.possible.retain(|other| other.acked.is_none_or(|acked| acked > sent));
        }
    }

    /// Reservations a range for a read; returns false while a write to it is in flight.
    pub fn read_begins(&mut self, range: Range<u64>) -> bool {
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        if sectors.clone().any(|sector| !self.sector(sector).is_settled()) {
            return false;
        }
        for sector in sectors {
            self.sector_mut(sector).reader_count += 1;
        }
        true
    }

    /// Checks the bytes that a read returned, after [`VolumeModel::read_begins`] allowed it.
    ///
    /// # Errors
    /// Every sector with other contents, explained.
    pub fn read_ends(&mut self, range: &Range<u64>, bytes: &[u8]) -> Result<(), String> {
        for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
            self.sector_mut(sector).reader_count -= 1;
        }
        // Only whole sectors narrow their possible contents.
        let start = range.start.next_multiple_of(SECTOR);
        let skipped = usize_of(start - range.start);
        let whole = bytes.get(skipped..).unwrap_or(&[]);
        self.observe("read", start, &whole[..whole.len() / SECTOR_BYTES * SECTOR_BYTES])
    }

    /// Forgets reservations of reads and writes that were never answered.
    pub fn crashed(&mut self) {
        for state in &mut self.sectors {
            state.is_exclusive = false;
            state.reader_count = 0;
        }
    }

    /// Checks the volume after a crash and a restart. Its contents are the only possible ones from
    /// here on.
    ///
    /// # Errors
    /// Every sector with impossible contents, explained.
    pub fn recovered(&mut self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.observe("recovered", offset, bytes)
    }

    /// Forgets the descriptions of old requests, once no sector can hold them.
    pub fn forget_words_before(&mut self, sequence: u64) {
        self.told.retain(|known, _| *known >= sequence);
    }

    fn observe(&mut self, when: &str, offset: u64, bytes: &[u8]) -> Result<(), String> {
        assert!(offset.is_multiple_of(SECTOR), "sectors are checked whole");
        let mut findings = Vec::new();
        for (bytes, sector) in bytes.chunks_exact(SECTOR_BYTES).zip(offset / SECTOR..) {
            match self.matching(sector, bytes) {
                Some(seen) => {
                    self.narrow(sector, bytes)?;
                    self.sector_mut(sector).possible = seen.into_iter().collect();
                }
                None => findings.push(sector),
            }
        }
        if findings.is_empty() {
            return Ok(());
        }
        let mut text =
            format!("volume {}: {} sector(s) {when} wrong:\n", self.volume, findings.len());
        for sector in findings.iter().take(12) {
            let start = usize_of((sector - offset / SECTOR) * SECTOR);
            self.explain(&mut text, *sector, &bytes[start..start + SECTOR_BYTES]);
        }
        Err(text)
    }

    /// Narrows the time at which a snapshot was made by the content of one of its sectors.
    fn narrow(&mut self, sector: u64, bytes: &[u8]) -> Result<(), String> {
        let Some((first, last)) = self.instant else { return Ok(()) };
        let all = &self.sector(sector).possible;
        let matching = all.iter().filter(|one| self.bytes_of(sector, &one.content) == bytes);
        // A content may be seen from the moment when it was sent, until a request that was sent
        // after its answer is answered.
        let overwritten = |one: &Possible| {
            let later =
                all.iter().filter(|other| one.acked.is_some_and(|acked| other.sent > acked));
            later.filter_map(|other| other.acked).min().unwrap_or(u64::MAX)
        };
        let spans = matching.map(|one| (one.sent, overwritten(one)));
        let hull = spans.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
        let Some((from, until)) = hull else { return Ok(()) };
        let narrowed = (first.max(from), last.min(until));
        if narrowed.0 > narrowed.1 {
            return Err(format!(
                "volume {}: the snapshot is of no moment: sector {sector} is as from {from} to {until}, the sectors before as \
                 from {first} to {last}\n",
                self.volume
            ));
        }
        self.instant = Some(narrowed);
        Ok(())
    }

    /// Returns the possibility that matches `bytes`; the inner `None` is a sector never written.
    fn matching(&self, sector: u64, bytes: &[u8]) -> Option<Option<Possible>> {
        let state = self.sector(sector);
        if state.possible.is_empty() {
            return bytes.iter().all(|byte| *byte == 0).then_some(None);
        }
        let seen = state.possible.iter().find(|one| self.bytes_of(sector, &one.content) == bytes);
        seen.map(|seen| Some(Possible { sent: 0, acked: Some(0), ..seen.clone() }))
    }

    fn explain(&self, text: &mut String, sector: u64, bytes: &[u8]) {
        let _ = writeln!(text, "  sector {sector} holds");
        for (stamp, words) in describe(self.run, bytes) {
            let origin = match stamp {
                None => String::new(),
                Some(stamp) if (stamp.volume, stamp.sector) == (self.volume, sector) => {
                    self.told_of(stamp.sequence)
                }
                Some(stamp) if stamp.volume == PATTERN_VOLUME => {
                    format!("sector {} of pattern {}", stamp.sector, stamp.sequence - 1)
                }
                Some(stamp) => format!(
                    "FOREIGN: volume {} sector {} request {}",
                    stamp.volume, stamp.sector, stamp.sequence
                ),
            };
            let _ = writeln!(text, "    {words}{origin}");
        }
        let _ = writeln!(text, "   but may hold only");
        for possible in &self.sector(sector).possible {
            let kind = match possible.content {
                Content::Zero => "zeroes of",
                Content::Stamped(_) | Content::Pattern(_) => "all of",
                Content::Mixed(_) => "a mixture that ends with",
            };
            let _ = writeln!(text, "    {kind} {}", self.told_of(possible.sequence));
        }
        if self.sector(sector).possible.is_empty() {
            let _ = writeln!(text, "    zeroes: never written");
        }
    }

    fn told_of(&self, sequence: u64) -> String {
        let known = self.told.get(&sequence);
        let words = known.map_or("of an earlier time", |told| &told.words);
        let fate = match known.map(|told| told.acked) {
            Some(Some(at)) => format!("acknowledged at {at}"),
            Some(None) => "never acknowledged".to_owned(),
            None => String::new(),
        };
        format!("request {sequence} ({words}) {fate}")
    }

    fn pattern(&self, sector: u64, pattern: u8) -> Stamp {
        let sector = sector % PATTERN_SECTORS;
        Stamp { volume: PATTERN_VOLUME, sector, sequence: 1 + u64::from(pattern) }
    }

    fn bytes_of(&self, sector: u64, content: &Content) -> [u8; SECTOR_BYTES] {
        let mut bytes = [0; SECTOR_BYTES];
        match content {
            Content::Zero => {}
            Content::Stamped(sequence) => {
                let stamp = Stamp { volume: self.volume, sector, sequence: *sequence };
                stamp.fill(self.run, &mut bytes);
            }
            Content::Pattern(pattern) => self.pattern(sector, *pattern).fill(self.run, &mut bytes),
            Content::Mixed(mixed) => bytes = **mixed,
        }
        bytes
    }

    /// Returns the bytes of a sector with one possible content.
    fn known(&self, sector: u64) -> [u8; SECTOR_BYTES] {
        match self.sector(sector).possible.first() {
            None => [0; SECTOR_BYTES],
            Some(possible) => self.bytes_of(sector, &possible.content),
        }
    }

    fn sector(&self, sector: u64) -> &Sector {
        &self.sectors[usize_of(sector - self.start_sector)]
    }

    fn sector_mut(&mut self, sector: u64) -> &mut Sector {
        &mut self.sectors[usize_of(sector - self.start_sector)]
    }
}

impl Sector {
    fn add(&mut self, possible: Possible) {
        if self.possible.is_empty() {
            let zero = Possible { content: Content::Zero, sent: 0, acked: Some(0), sequence: 0 };
            self.possible.push(zero);
        }
        self.possible.push(possible);
    }

    /// Whether no request is in flight.
    fn is_settled(&self) -> bool {
        self.possible.iter().all(|possible| possible.acked.is_some())
    }
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).expect("64-bit machine")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: u64 = 5;

    fn model() -> VolumeModel {
        VolumeModel::new(RUN, 0, 0, 16)
    }

    fn stamped(sequence: u64, sectors: Range<u64>) -> Vec<u8> {
        let first = Stamp { volume: 0, sector: sectors.start, sequence };
        crate::stamp::stamped(RUN, first, usize_of(sectors.end - sectors.start))
    }

    fn write(model: &mut VolumeModel, sequence: u64, range: Range<u64>) -> Sent {
        model.send(sequence, Effect::Write, range).expect("let in").0
    }

    #[test]
    fn an_acknowledged_write_must_be_there() {
        let mut model = model();
        let one = write(&mut model, 1, 0..1024);
        model.acked(&one);
        model.crashed();
        assert!(model.recovered(0, &[0; 1024]).unwrap_err().contains("acknowledged at"));
        model.recovered(0, &stamped(1, 0..2)).unwrap();
    }

    #[test]
    fn an_unacknowledged_write_may_be_old_or_new_by_sector_and_then_stays() {
        let mut model = model();
        write(&mut model, 1, 0..1024);
        model.crashed();
        let mut seen = stamped(1, 0..2);
        seen[512..].fill(0);
        model.recovered(0, &seen).unwrap();
        model.recovered(0, &seen).unwrap();
        model.recovered(0, &stamped(1, 0..2)).unwrap_err();
        model.recovered(0, &[0; 1024]).unwrap_err();
    }

    #[test]
    fn overwrite_excludes_writes_acknowledged_before_it_was_sent() {
        let mut model = model();
        let one = write(&mut model, 1, 0..512);
        model.acked(&one);
        let two = write(&mut model, 2, 0..512);
        model.recovered(0, &stamped(1, 0..1)).unwrap();
        let mut model = self::model();
        let one = write(&mut model, 1, 0..512);
        model.acked(&one);
        model.acked(&two.clone());
        let two = write(&mut model, 2, 0..512);
        model.acked(&two);
        let message = model.recovered(0, &stamped(1, 0..1)).unwrap_err();
        assert!(message.contains("request 1 (Write 0+512)"), "{message}");
    }

    #[test]
    fn requests_that_overlap_in_time_may_happen_in_either_order() {
        for winner in [1, 2] {
            let mut model = model();
            let one = write(&mut model, 1, 0..512);
            let two = write(&mut model, 2, 0..512);
            model.acked(&two);
            model.acked(&one);
            model.recovered(0, &stamped(winner, 0..1)).unwrap();
            model.recovered(0, &stamped(3 - winner, 0..1)).unwrap_err();
            model.recovered(0, &[0; 512]).unwrap_err();
        }
    }

    #[test]
    fn parts_of_sectors_are_known_to_the_byte() {
        let mut model = model();
        let one = write(&mut model, 1, 0..1024);
        assert!(model.send(2, Effect::Write, 100..600).is_none(), "the sectors are in flight");
        model.acked(&one);
        let (two, payload) = model.send(2, Effect::Write, 100..600).unwrap();
        assert!(model.send(3, Effect::Write, 0..512).is_none(), "a part is in flight");
        model.acked(&two);
        let mut expected = stamped(1, 0..2);
        expected[100..600].copy_from_slice(&payload);
        model.recovered(0, &stamped(1, 0..2)).unwrap_err();
        model.recovered(0, &expected).unwrap();
        let (three, _) = model.send(3, Effect::Zero, 10..20).unwrap();
        model.acked(&three);
        expected[10..20].fill(0);
        model.recovered(0, &expected).unwrap();
    }

    #[test]
    fn snapshot_shows_some_moment_during_its_creation() {
        let mut model = model();
        let one = write(&mut model, 1, 0..512);
        model.acked(&one);
        let before = write(&mut model, 2, 0..512);
        model.snapshot_begins();
        model.acked(&before);
        let during = write(&mut model, 3, 0..512);
        model.acked(&during);
        let snapshot = model.snapshot_ends();
        let after = write(&mut model, 4, 0..512);
        model.acked(&after);
        for (sequence, is_possible) in [(1, true), (2, true), (3, true), (4, false)] {
            let shown = snapshot.copy().recovered(0, &stamped(sequence, 0..1));
            assert_eq!(shown.is_ok(), is_possible, "request {sequence}");
        }
        snapshot.copy().recovered(0, &[0; 512]).unwrap_err();
        model.recovered(0, &stamped(3, 0..1)).unwrap_err();
        model.recovered(0, &stamped(4, 0..1)).unwrap();
    }

    #[test]
    fn a_snapshot_is_of_one_moment() {
        let shown = |first: u64, second: u64| {
            let mut model = model();
            model.snapshot_begins();
            for (sequence, sector) in [(1, 0), (2, 1)] {
                let sent = write(&mut model, sequence, sector * 512..(sector + 1) * 512);
                model.acked(&sent);
            }
            let mut snapshot = model.snapshot_ends();
            let bytes = |sequence: u64, sector: u64| match sequence {
                0 => vec![0; 512],
                _ => stamped(sequence, sector..sector + 1),
            };
            snapshot.recovered(0, &bytes(first, 0)).unwrap();
            snapshot.recovered(512, &bytes(second, 1))
        };
        shown(0, 0).unwrap();
        shown(1, 0).unwrap();
        shown(1, 2).unwrap();
        // The second write came after the answer to the first.
        assert!(shown(0, 2).unwrap_err().contains("of no moment"));
    }

    #[test]
    fn patterns_are_alike_wherever_they_are_written() {
        let mut model = VolumeModel::new(RUN, 0, 0, 32);
        let (one, first) = model.send(1, Effect::Pattern(3), 0..4096).unwrap();
        model.acked(&one);
        let (two, second) = model.send(2, Effect::Pattern(3), 8192..12288).unwrap();
        model.acked(&two);
        assert_eq!(first, second);
        let (_, other) = model.send(3, Effect::Pattern(4), 8192..12288).unwrap();
        assert_ne!(first, other);
        model.recovered(0, &first).unwrap();
        model.recovered(0, &other).unwrap_err();
    }

    #[test]
    fn reads_are_checked_and_foreign_bytes_are_named() {
        let mut model = model();
        let one = write(&mut model, 1, 0..512);
        assert!(!model.read_begins(0..512));
        model.acked(&one);
        assert!(model.read_begins(0..1024));
        assert!(model.send(2, Effect::Zero, 512..1024).is_none(), "it is being read");
        let mut bytes = stamped(1, 0..2);
        let message = model.read_ends(&(0..1024), &bytes).unwrap_err();
        assert!(message.contains("never written"), "{message}");
        bytes[512..].copy_from_slice(&stamped(1, 0..1));
        assert!(model.read_begins(0..1024));
        let message = model.read_ends(&(0..1024), &bytes).unwrap_err();
        assert!(message.contains("FOREIGN: volume 0 sector 0 request 1"), "{message}");
    }
}
