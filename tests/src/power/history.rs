//! The requests of clients and their answers, and the possible contents of a volume after a loss of
//! power.
//!
//! Invariants:
//! - A request is durable at a mark if it was answered with FUA before the mark, or if it was
//!   answered before a flush was sent that was answered before the mark.
//! - A durable request excludes the effects of requests that were over before it was sent, and no
//!   others.
//! - Requests are whole sectors, so a sector holds the bytes of one of them, or zeroes.

use crate::model::Effect;
use crate::seed::Random;
use crate::stamp::{SECTOR_BYTES, Stamp, describe};
use std::fmt::Write as _;
use std::ops::Range;

const SECTOR: u64 = SECTOR_BYTES as u64;

#[derive(Clone, Debug)]
struct Op {
    effect: Effect,
    sectors: Range<u64>,
    is_fua: bool,
    sent: u64,
    acked: Option<u64>,
    /// The time of its answer or of its server's death: it has no effect after this.
    over: Option<u64>,
}

#[derive(Clone, Debug)]
struct Flush {
    volume: usize,
    sent: u64,
    acked: Option<u64>,
}

/// The window of one volume that requests go to.
#[derive(Clone, Debug)]
struct Window {
    first_sector: u64,
    /// Requests that touch the window, by sector, oldest first.
    sectors: Vec<Vec<u32>>,
}

/// All requests and answers. Time is a counter.
pub struct History {
    run: u64,
    clock: u64,
    windows: Vec<Window>,
    ops: Vec<(usize, Op)>,
    flushes: Vec<Flush>,
    /// The time of each mark.
    marks: Vec<u64>,
}

/// A write, trim or write-zeroes that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpId(usize);

/// A flush that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushId(usize);

impl History {
    /// Makes a history of zeroed volumes with these windows: first sector and number of sectors.
    #[must_use]
    pub fn new(run: u64, windows: &[(u64, usize)]) -> History {
        let window = |&(first_sector, count): &(u64, usize)| Window {
            first_sector,
            sectors: vec![Vec::new(); count],
        };
        let windows = windows.iter().map(window).collect();
        History { run, clock: 0, windows, ops: Vec::new(), flushes: Vec::new(), marks: Vec::new() }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Notes a request about to be sent, for bytes that are whole sectors of the window, and
    /// returns the bytes that it writes.
    pub fn send(
        &mut self,
        volume: usize,
        effect: Effect,
        bytes: &Range<u64>,
        is_fua: bool,
    ) -> (OpId, Vec<u8>) {
        assert!(bytes.start.is_multiple_of(SECTOR) && bytes.end.is_multiple_of(SECTOR));
        assert!(
            !matches!(effect, Effect::Pattern(_)),
            "requests here are told apart by their bytes"
        );
        let (id, sent) = (self.ops.len(), self.tick());
        let sectors = bytes.start / SECTOR..bytes.end / SECTOR;
        let index = u32::try_from(id).expect("a run has fewer requests");
        let window = &mut self.windows[volume];
        for sector in sectors.clone() {
            window.sectors[index_of(sector - window.first_sector)].push(index);
        }
        let mut payload = Vec::new();
        if effect == Effect::Write {
            let stamp = self.stamp(volume, id, sectors.start);
            payload = crate::stamp::stamped(self.run, stamp, index_of(sectors.end - sectors.start));
        }
        let op = Op { effect, sectors, is_fua, sent, acked: None, over: None };
        self.ops.push((volume, op));
        (OpId(id), payload)
    }

    /// Notes its answer.
    pub fn answered(&mut self, id: OpId) {
        let now = self.tick();
        let op = &mut self.ops[id.0].1;
        (op.acked, op.over) = (Some(now), Some(now));
    }

    /// Notes a flush about to be sent.
    pub fn send_flush(&mut self, volume: usize) -> FlushId {
        let sent = self.tick();
        self.flushes.push(Flush { volume, sent, acked: None });
        FlushId(self.flushes.len() - 1)
    }

    /// Notes its answer.
    pub fn flushed(&mut self, id: FlushId) {
        self.flushes[id.0].acked = Some(self.tick());
    }

    /// Notes the server's death: requests without an answer have had their effect or will have
    /// none.
    pub fn died(&mut self) {
        let now = self.tick();
        for (_, op) in &mut self.ops {
            op.over.get_or_insert(now);
        }
    }

    /// Numbers this moment. The caller puts the number into the device's log of writes before the
    /// next mark is made.
    pub fn mark(&mut self) -> usize {
        let now = self.tick();
        self.marks.push(now);
        self.marks.len() - 1
    }

    /// Returns the number of requests and of flushes.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.ops.len(), self.flushes.len())
    }

    /// Selects the requests that no cut after the mark may lose.
    fn durable(&self, volume: usize, mark: Option<usize>) -> impl Fn(&Op) -> bool + use<> {
        let now = mark.map_or(0, |mark| self.marks[mark]);
        let is_before = move |acked: Option<u64>| acked.is_some_and(|acked| acked < now);
        let flushes = self.flushes.iter();
        let of_volume = flushes.filter(|flush| flush.volume == volume && is_before(flush.acked));
        let flushed = of_volume.map(|flush| flush.sent).max().unwrap_or(0);
        move |op: &Op| {
            (op.is_fua && is_before(op.acked)) || op.acked.is_some_and(|acked| acked < flushed)
        }
    }

    /// Checks the bytes of `volume` from byte `offset` on, read after a cut that came after `mark`
    /// (`None`: before the first). Returns how many of its sectors a durable request determines.
    ///
    /// # Errors
    /// Every sector with impossible contents, explained.
    pub fn check(
        &self,
        volume: usize,
        mark: Option<usize>,
        offset: u64,
        bytes: &[u8],
    ) -> Result<u64, String> {
        let is_durable = self.durable(volume, mark);
        let (mut durable_count, mut wrong_count, mut text) = (0, 0u64, String::new());
        for (bytes, sector) in bytes.chunks_exact(SECTOR_BYTES).zip(offset / SECTOR..) {
            let window = &self.windows[volume];
            let touching = &window.sectors[index_of(sector - window.first_sector)];
            let op = |id: &u32| &self.ops[*id as usize].1;
            let durable: Vec<u64> =
                touching.iter().map(op).filter(|op| is_durable(op)).map(|op| op.sent).collect();
            let newest = durable.iter().copied().max();
            let is_possible =
                |op: &Op| op.over.is_none_or(|over| newest.is_none_or(|newest| over > newest));
            let holds = |id: &&u32| {
                let op = op(id);
                is_possible(op) && self.is_content(volume, **id, op, sector, bytes)
            };
            let is_zero = || bytes.iter().all(|byte| *byte == 0);
            durable_count += u64::from(newest.is_some());
            if touching.iter().rev().any(|id| holds(&id)) || (newest.is_none() && is_zero()) {
                continue;
            }
            wrong_count += 1;
            if wrong_count <= 6 {
                let possible = touching.iter().filter(|id| is_possible(op(id)));
                self.explain(&mut text, sector, bytes, possible, &is_durable);
            }
        }
        if wrong_count == 0 {
            return Ok(durable_count);
        }
        Err(format!("volume {volume}: {wrong_count} sector(s) wrong after the cut:\n{text}"))
    }

    fn is_content(&self, volume: usize, id: u32, op: &Op, sector: u64, bytes: &[u8]) -> bool {
        match op.effect {
            Effect::Zero => bytes.iter().all(|byte| *byte == 0),
            Effect::Write => {
                let mut expected = [0; SECTOR_BYTES];
                self.stamp(volume, id as usize, sector).fill(self.run, &mut expected);
                expected == bytes
            }
            Effect::Pattern(_) => unreachable!("none is let in"),
        }
    }

    fn stamp(&self, volume: usize, id: usize, sector: u64) -> Stamp {
        let volume = u8::try_from(volume).expect("few volumes");
        Stamp { volume, sector, sequence: u64::try_from(id).expect("fits") + 1 }
    }

    fn explain<'a>(
        &self,
        text: &mut String,
        sector: u64,
        bytes: &[u8],
        possible: impl Iterator<Item = &'a u32>,
        is_durable: &impl Fn(&Op) -> bool,
    ) {
        let told = |id: usize| match self.ops.get(id) {
            None => "of no request".to_owned(),
            Some((volume, op)) => format!(
                "request {id} ({:?} of volume {volume}, sectors {:?}, sent at {}, answered at {:?}{}{})",
                op.effect,
                op.sectors,
                op.sent,
                op.acked,
                if op.is_fua { ", FUA" } else { "" },
                if is_durable(op) { ", DURABLE" } else { "" }
            ),
        };
        let _ = writeln!(text, "  sector {sector} holds");
        for (stamp, words) in describe(self.run, bytes) {
            let id = stamp.and_then(|stamp| usize::try_from(stamp.sequence).ok());
            let origin = id.and_then(|id| id.checked_sub(1)).map(told).unwrap_or_default();
            let _ = writeln!(text, "    {words}{origin}");
        }
        let _ = writeln!(text, "   but may hold only");
        for id in possible {
            let _ = writeln!(text, "    {}", told(*id as usize));
        }
    }

    /// Chooses a random mark, if there is one.
    pub fn any_mark(&self, random: &mut Random) -> Option<usize> {
        let count = u64::try_from(self.marks.len()).expect("fits");
        (count > 0).then(|| usize::try_from(random.below(count)).expect("below a length"))
    }
}

fn index_of(number: u64) -> usize {
    usize::try_from(number).expect("64-bit machine")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history() -> History {
        History::new(5, &[(8, 8)])
    }

    fn write(history: &mut History, sectors: Range<u64>, is_fua: bool) -> (OpId, Vec<u8>) {
        history.send(0, Effect::Write, &(sectors.start * SECTOR..sectors.end * SECTOR), is_fua)
    }

    fn check(history: &History, mark: Option<usize>, sector: u64, bytes: &[u8]) -> bool {
        history.check(0, mark, sector * SECTOR, bytes).is_ok()
    }

    #[test]
    fn only_a_flush_that_was_sent_after_the_answer_makes_a_write_durable() {
        let mut history = history();
        let (one, bytes) = write(&mut history, 8..9, false);
        let early = history.send_flush(0);
        history.answered(one);
        history.flushed(early);
        let first = history.mark();
        assert!(check(&history, Some(first), 8, &[0; 512]), "it was answered too late for it");
        let late = history.send_flush(0);
        history.flushed(late);
        let second = history.mark();
        assert!(check(&history, Some(first), 8, &[0; 512]), "at the first mark nothing changed");
        assert!(!check(&history, Some(second), 8, &[0; 512]));
        assert!(check(&history, Some(second), 8, &bytes));
        assert!(check(&history, None, 8, &[0; 512]) && check(&history, None, 8, &bytes));
        assert!(!check(&history, None, 8, &[7; 512]), "bytes of nobody");
    }

    #[test]
    fn durable_write_excludes_writes_finished_before_it_was_sent() {
        let mut history = history();
        let (one, first) = write(&mut history, 8..9, false);
        history.answered(one);
        let (two, second) = write(&mut history, 8..9, false);
        let (three, third) = write(&mut history, 8..9, true);
        history.answered(three);
        let mark = history.mark();
        assert!(!check(&history, Some(mark), 8, &first), "older than a durable write");
        assert!(check(&history, Some(mark), 8, &second), "its time overlaps that of the durable");
        assert!(check(&history, Some(mark), 8, &third));
        assert!(!check(&history, Some(mark), 8, &[0; 512]));
        history.answered(two);
        history.died();
        let (four, fourth) = write(&mut history, 8..9, true);
        history.answered(four);
        let mark = history.mark();
        assert!(check(&history, Some(mark), 8, &fourth));
        assert!(
            !check(&history, Some(mark), 8, &second) && !check(&history, Some(mark), 8, &third)
        );
    }

    #[test]
    fn a_request_without_an_answer_is_over_when_its_server_is_dead() {
        let mut history = history();
        let (_, lost) = write(&mut history, 8..10, false);
        let mark = history.mark();
        assert!(check(&history, Some(mark), 8, &lost), "it may be there");
        let mut half = lost.clone();
        half[512..].fill(0);
        assert!(check(&history, Some(mark), 8, &half), "by sectors");
        history.died();
        let (zero, _) = history.send(0, Effect::Zero, &(8 * SECTOR..10 * SECTOR), true);
        history.answered(zero);
        let mark = history.mark();
        assert!(!check(&history, Some(mark), 8, &lost), "it came back from the dead");
        assert_eq!(history.check(0, Some(mark), 8 * SECTOR, &[0; 1024]), Ok(2));
        let message = history.check(0, Some(mark), 8 * SECTOR, &lost).unwrap_err();
        assert!(message.contains("2 sector(s) wrong") && message.contains("DURABLE"), "{message}");
    }
}
