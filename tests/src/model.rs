//! What a volume may read as, sector by sector, given what was sent and what was acknowledged.
//!
//! Invariants:
//! - An acknowledged request excludes all that was acknowledged before it was sent. Two requests
//!   whose times overlap may have happened in either order, per sector.
//! - After a crash a sector holds one of its possible contents; what it was seen to hold is the
//!   only possibility from then on. A request that was never acknowledged may be seen or not, but
//!   it cannot appear once it was seen missing.
//! - A request that covers part of a sector is let in only while the sector has one possible
//!   content and nothing else touches it, so its effect is known to the byte.
//! - A snapshot may hold, sector by sector, what the volume may have held at any moment between the
//!   command and its answer; and all of it at the same moment.

use crate::stamp::{SECTOR_BYTES, Stamp, describe};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

const SECTOR: u64 = SECTOR_BYTES as u64;

/// Contents of one sector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    /// The whole sector as this request wrote it.
    Stamped(u64),
    /// The whole sector as any request with this pattern writes it.
    Pattern(u8),
    /// Parts of several requests.
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
    /// Empty means zero, for ever known.
    possible: Vec<Possible>,
    is_exclusive: bool,
    reader_count: u32,
}

/// What a request does to the range it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Writes the stamps of the request.
    Write,
    /// Writes what each request with this pattern writes, at any place: blocks that are alike.
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

/// One request, kept to explain findings.
#[derive(Clone, Debug)]
struct Told {
    words: String,
    acked: Option<u64>,
}

/// The volume that patterns say they belong to.
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
    /// Of a snapshot: between these times of its volume it was made, as far as what was seen of it tells.
    instant: Option<(u64, u64)>,
}

impl VolumeModel {
    /// A window of `sector_count` sectors from `start_sector` of volume number `volume`, all zero.
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

    /// A snapshot is about to be asked for.
    ///
    /// # Panics
    /// Where another one is being made.
    pub fn snapshot_begins(&mut self) {
        assert!(self.snapshot.is_none(), "one snapshot at a time");
        let mut snapshot = self.copy();
        snapshot.crashed();
        self.snapshot = Some(Box::new(snapshot));
    }

    /// The answer has come, or none ever will: what the snapshot may hold.
    ///
    /// # Panics
    /// Where none was begun.
    pub fn snapshot_ends(&mut self) -> VolumeModel {
        let mut snapshot = *self.snapshot.take().expect("it was begun");
        snapshot.instant = Some((snapshot.clock, self.clock));
        snapshot
    }

    /// Another volume, or a snapshot, with these contents; of its requests it knows nothing.
    #[must_use]
    pub fn copy(&self) -> VolumeModel {
        let (sectors, told) = (self.sectors.clone(), std::collections::HashMap::new());
        VolumeModel { sectors, told, snapshot: None, instant: None, ..*self }
    }

    /// The window in bytes of the volume.
    #[must_use]
    pub fn window(&self) -> Range<u64> {
        let count = u64::try_from(self.sectors.len()).expect("fits");
        self.start_sector * SECTOR..(self.start_sector + count) * SECTOR
    }

    /// Notes that a request is about to be sent, and returns the bytes it writes (for `Write`).
    /// `None` when it would touch what others make unpredictable: send something else.
    pub fn send(
        &mut self,
        sequence: u64,
        effect: Effect,
        range: Range<u64>,
    ) -> Option<(Sent, Vec<u8>)> {
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        let is_whole =
            |sector: u64| range.start <= sector * SECTOR && (sector + 1) * SECTOR <= range.end;
        for sector in sectors.clone() {
            let state = self.sector(sector);
            let is_known = state.possible.len() < 2 && state.is_settled();
            if state.is_exclusive || state.reader_count > 0 || !(is_whole(sector) || is_known) {
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
            let content = if !is_whole(sector) {
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
            let is_exclusive = !is_whole(sector);
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
                // It may have been made before: nothing is excluded there.
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
            // What was acknowledged before this one was sent is overwritten.
            state.possible.retain(|other| other.acked.is_none_or(|acked| acked > sent));
        }
    }

    /// Claims a range for a read: false while a write to it is in flight.
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

    /// Checks what a read that [`VolumeModel::read_begins`] let in returned.
    ///
    /// # Errors
    /// Every sector that holds something else, explained.
    pub fn read_ends(&mut self, range: &Range<u64>, bytes: &[u8]) -> Result<(), String> {
        for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
            self.sector_mut(sector).reader_count -= 1;
        }
        // Only whole sectors settle what they hold.
        let start = range.start.next_multiple_of(SECTOR);
        let skipped = usize_of(start - range.start);
        let whole = bytes.get(skipped..).unwrap_or(&[]);
        self.observe("read", start, &whole[..whole.len() / SECTOR_BYTES * SECTOR_BYTES])
    }

    /// Forgets claims of reads and writes whose answer never came.
    pub fn crashed(&mut self) {
        for state in &mut self.sectors {
            state.is_exclusive = false;
            state.reader_count = 0;
        }
    }

    /// Checks the volume after a crash and a restart; what it holds is the only truth from here.
    ///
    /// # Errors
    /// Every sector that holds what it cannot hold, explained.
    pub fn recovered(&mut self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.observe("recovered", offset, bytes)
    }

    /// Forgets how old requests read, once they cannot be in any sector's past of interest.
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

    /// What one sector of a snapshot holds says when it was made.
    fn narrow(&mut self, sector: u64, bytes: &[u8]) -> Result<(), String> {
        let Some((first, last)) = self.instant else { return Ok(()) };
        let all = &self.sector(sector).possible;
        let matching = all.iter().filter(|one| self.bytes_of(sector, &one.content) == bytes);
        // From when it was sent until what was sent after its answer was answered.
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

    /// The possibility that `bytes` are, settled; the inner `None` is a sector never written.
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

    /// The bytes of a sector with one possible content.
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

    /// Nothing is in flight.
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
    fn an_overwrite_excludes_what_was_acknowledged_before_it_was_sent() {
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
    fn a_snapshot_holds_what_was_there_at_some_moment_while_it_was_made() {
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
