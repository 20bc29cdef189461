//! Map pages: where the blocks of one MiB of a layer are. This code is pure: bytes and lists in,
//! lists out.
//!
//! A page is stored as a list of operands. An operand holds the blocks that one window assigned
//! within the page, or an *image*, which is the whole page. Byte table:
//! docs/format-map.md#page-operand.
//!
//! Invariants:
//! - The runs of an operand and of a [`Page`] are sorted by block and disjoint; none is empty and
//!   none leaves the page.
//! - Assignments are absolute: applying an operand twice has the same result as applying it once.
//! - A page never depends on the order in which blocks were assigned within one window, because the
//!   extents of a window are disjoint.
//! - Decoding never panics and never allocates more than a full page needs.
//!
//! The module does not seal and does no I/O. It knows nothing of ranges except the LSN below which
//! a page is cut.

use super::commit::Placed;
use crate::segment::FrameAt;
use crate::varint::{get_varint, put_varint};
use block::Lsn;
use block::units::BLOCK_BYTES;

/// Blocks of 4 KiB in one page: 1 MiB of address space. Chosen by hand: a full page of scattered
/// 4 KiB writes stays below one 4 KiB block of the database, and an operand costs about 80 bytes.
pub const PAGE_BLOCKS: u64 = 256;
/// Bytes of address space of one page.
pub const PAGE_BYTES: u64 = PAGE_BLOCKS * BLOCK_BYTES;

/// First of the two versions of the operand encoding that this build reads. Written whenever it can
/// express the operand.
const OPERAND_VERSION: u8 = 1;
/// Second version, with the kinds that pages with snapshots need.
const OPERAND_VERSION_KEEPING: u8 = 2;
const KIND_DELTA: u8 = 0;
const KIND_IMAGE: u8 = 1;
/// A delta whose replaced blocks stay counted.
const KIND_KEEPING_DELTA: u8 = 2;
/// An image that follows a copy. The copy's LSN comes after the operand's own.
const KIND_IMAGE_AFTER_COPY: u8 = 3;

const FLAG_MAPPED: u64 = 1;
/// The run begins the frame that follows the previous mapped run's frame in the same segment.
const FLAG_NEXT_FRAME: u64 = 2;

/// Consecutive blocks of one page that lie in one frame, or that hold nothing.
///
/// 24 bytes, because a page cache holds millions of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Segment number, or 0 if the blocks are unmapped and read as zeroes.
    pub segment: u64,
    /// Index of the frame in its segment.
    pub frame_index: u32,
    /// Byte offset of the frame in its segment.
    pub offset: u32,
    /// Bytes of the frame as stored, header and tag included.
    pub sealed_bytes: u32,
    /// First block, within the page.
    pub first: u8,
    /// Last block, within the page, inclusive.
    pub last: u8,
    /// Block of the frame's plaintext that `first` stands for.
    pub within: u8,
}

impl Run {
    /// A run of blocks that hold nothing. `first <= last`.
    #[must_use]
    pub fn hole(first: u8, last: u8) -> Run {
        Run { segment: 0, frame_index: 0, offset: 0, sealed_bytes: 0, first, last, within: 0 }
    }

    /// Whether the run names a frame.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.segment != 0
    }

    /// Number of blocks, 1 to 256.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }

    /// Each block of a mapped run, as its numbers within the page and within the frame.
    pub fn blocks(&self) -> impl Iterator<Item = (u8, u8)> + use<> {
        let (first, within) = (self.first, self.within);
        // Decoding ensures that both stay below 256.
        (self.first..=self.last).map(move |block| (block, within.saturating_add(block - first)))
    }

    /// The part of the run from `first` to `last`, which must lie inside it.
    fn part(&self, first: u8, last: u8) -> Run {
        debug_assert!(self.first <= first && first <= last && last <= self.last);
        let within = if self.is_mapped() { self.within + (first - self.first) } else { 0 };
        Run { first, last, within, ..*self }
    }

    /// Whether `next` starts where this run ends, in the page and in the frame.
    fn continues_into(&self, next: &Run) -> bool {
        self.last.checked_add(1) == Some(next.first)
            && self.segment == next.segment
            && self.frame_index == next.frame_index
            && self.offset == next.offset
            && self.sealed_bytes == next.sealed_bytes
            && (!self.is_mapped()
                || u32::from(self.within) + self.count() == u32::from(next.within))
    }
}

/// The blocks that one window assigned within a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// LSN of the window.
    pub lsn: Lsn,
    /// How it applies to the page.
    pub kind: OperandKind,
    /// Sorted and disjoint.
    pub runs: Vec<Run>,
}

/// How an operand applies to its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandKind {
    /// It replaces the blocks of its runs.
    Delta {
        /// Replaced blocks stay counted as live until the page gets an image, because a snapshot
        /// may show them.
        keeps: bool,
    },
    /// The runs are the whole page: blocks outside them are unmapped.
    Image {
        /// LSN of the newest copy of the page when it was written, or `Lsn::NONE`.
        copy: Lsn,
    },
}

impl Operand {
    /// Whether the runs are the whole page.
    #[must_use]
    pub fn is_image(&self) -> bool {
        matches!(self.kind, OperandKind::Image { .. })
    }
}

/// A page as a reader sees it, with every operand applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Sorted and disjoint. Explicit holes are kept, because a layer with a parent must distinguish
    /// "nothing here" from "look in the parent".
    pub runs: Box<[Run]>,
    /// LSN of its oldest stored operand, or `Lsn::NONE`.
    pub first_lsn: Lsn,
    /// LSN of its newest stored operand, or `Lsn::NONE`.
    pub last_lsn: Lsn,
    /// Number of its stored operands; 0 if the database has no value.
    pub operand_count: u32,
    /// A range record hides some of the stored operands. The writer subtracts their blocks from the
    /// live counts when it replaces them.
    pub has_hidden: bool,
    /// Replaced blocks are still counted, see [`OperandKind::Delta`].
    pub has_kept: bool,
    /// See [`OperandKind::Image`].
    pub copy: Lsn,
}

impl Page {
    /// Runs that overlap the blocks from `first` to `last`, clipped to them, without the gaps.
    pub fn runs_between(&self, first: u8, last: u8) -> impl Iterator<Item = Run> + '_ {
        let start = self.runs.partition_point(|run| run.last < first);
        self.runs[start..]
            .iter()
            .take_while(move |run| run.first <= last)
            .map(move |run| run.part(run.first.max(first), run.last.min(last)))
    }

    /// Number of blocks that are in a frame.
    #[must_use]
    pub fn mapped_count(&self) -> u32 {
        self.runs.iter().filter(|run| run.is_mapped()).map(Run::count).sum()
    }

    /// Bytes of memory that it takes, with an estimate for the overhead of the allocation.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of::<Page>() + 32 + self.runs.len() * size_of::<Run>()
    }
}

/// Applies `newer` over `older`. Both are sorted and disjoint, and so is the result.
#[must_use]
pub fn assign(older: &[Run], newer: &[Run]) -> Vec<Run> {
    let mut result = Vec::with_capacity(older.len() + newer.len());
    let mut rest = older.iter().copied();
    let mut current = rest.next();
    for new in newer {
        // Older runs before the new one stay.
        while let Some(old) = current {
            if old.first >= new.first {
                break;
            }
            if old.last < new.first {
                push(&mut result, old);
                current = rest.next();
            } else {
                push(&mut result, old.part(old.first, new.first - 1));
                current = Some(old.part(new.first, old.last));
            }
        }
        // Older runs under it go.
        while let Some(old) = current {
            if old.first > new.last {
                break;
            }
            current = if old.last > new.last {
                Some(old.part(new.last + 1, old.last))
            } else {
                rest.next()
            };
        }
        push(&mut result, *new);
    }
    for old in current.into_iter().chain(rest) {
        push(&mut result, old);
    }
    result
}

fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(before) if before.continues_into(&run) => before.last = run.last,
        _ => runs.push(run),
    }
}

/// Sorts the runs of one window and joins adjacent ones. They must be disjoint.
pub fn normalize(runs: &mut Vec<Run>) {
    runs.sort_unstable_by_key(|run| run.first);
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs.drain(..) {
        debug_assert!(joined.last().is_none_or(|before| before.last < run.first));
        push(&mut joined, run);
    }
    *runs = joined;
}

/// Folds operands, oldest first, into a page. Operands of windows up to `cut` are hidden by a range
/// record and ignored.
#[must_use]
pub fn fold(operands: &[Operand], cut: Lsn) -> Page {
    let is_keeping = |operand: &Operand| matches!(operand.kind, OperandKind::Delta { keeps: true });
    let copy = operands.iter().rev().find_map(|operand| match operand.kind {
        OperandKind::Image { copy } => Some(copy),
        OperandKind::Delta { .. } => None,
    });
    Page {
        runs: fold_runs(operands, cut).into_boxed_slice(),
        first_lsn: operands.first().map_or(Lsn::NONE, |first| first.lsn),
        last_lsn: operands.last().map_or(Lsn::NONE, |last| last.lsn),
        operand_count: u32::try_from(operands.len()).unwrap_or(u32::MAX),
        has_hidden: operands.iter().any(|operand| operand.lsn <= cut),
        has_kept: operands.iter().any(is_keeping),
        copy: copy.unwrap_or_default(),
    }
}

/// The combined runs of operands, oldest first, ignoring those of windows up to `cut`.
#[must_use]
pub fn fold_runs(operands: &[Operand], cut: Lsn) -> Vec<Run> {
    let start = operands.iter().rposition(Operand::is_image).unwrap_or(0);
    let mut runs: Vec<Run> = Vec::new();
    for operand in &operands[start..] {
        if operand.lsn > cut {
            runs = if runs.is_empty() || operand.is_image() {
                operand.runs.clone()
            } else {
                assign(&runs, &operand.runs)
            };
        }
    }
    runs
}

/// Runs whose blocks the operands of a page count as live, hidden by a range or not, in no order:
/// their combined runs, and the runs that keeping deltas have replaced.
#[must_use]
pub fn counted(operands: &[Operand]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut kept: Vec<Run> = Vec::new();
    for operand in operands {
        match operand.kind {
            OperandKind::Image { .. } => {
                kept.clear();
                runs.clone_from(&operand.runs);
            }
            OperandKind::Delta { keeps } => {
                if keeps {
                    for_each_replaced(&runs, &operand.runs, |run| kept.push(run));
                }
                runs = assign(&runs, &operand.runs);
            }
        }
    }
    runs.extend(kept);
    runs.retain(Run::is_mapped);
    runs
}

/// The runs in `runs` (in any order) of which at least one block is elsewhere or missing in
/// `other`.
#[must_use]
pub fn difference_of_all(runs: &[Run], other: &[Run]) -> Vec<Run> {
    let is_other = |run: &&Run| !difference(std::slice::from_ref(run), other).is_empty();
    runs.iter().filter(is_other).copied().collect()
}

/// The mapped parts of `runs` that `other` does not have at the same blocks.
#[must_use]
pub fn difference(runs: &[Run], other: &[Run]) -> Vec<Run> {
    let other = places(other);
    let mut result = Vec::new();
    for run in runs.iter().filter(|run| run.is_mapped()) {
        for block in run.first..=run.last {
            let part = run.part(block, block);
            if place(&part) != other[usize::from(block)] {
                push(&mut result, part);
            }
        }
    }
    result
}

/// Calls `lost` for the mapped parts of `older` that `newer` replaces.
pub fn for_each_replaced(older: &[Run], newer: &[Run], mut lost: impl FnMut(Run)) {
    let mut at = 0;
    for new in newer {
        while at < older.len() && older[at].last < new.first {
            at += 1;
        }
        let mut index = at;
        while let Some(old) = older.get(index).filter(|old| old.first <= new.last) {
            if old.is_mapped() {
                lost(old.part(old.first.max(new.first), old.last.min(new.last)));
            }
            index += 1;
        }
    }
}

/// The parts of `new` whose blocks are in `current` exactly where `expected` has them. They may be
/// re-pointed, because they have not been written since `expected` was read.
#[must_use]
pub fn unchanged(current: &[Run], expected: &[Run], new: &[Run]) -> Vec<Run> {
    let (current, expected) = (places(current), places(expected));
    let is_same = |block: u8| {
        let place = expected[usize::from(block)];
        place.is_some() && place == current[usize::from(block)]
    };
    let mut same = Vec::with_capacity(new.len());
    for run in new {
        let mut start = None;
        for block in run.first..=run.last {
            start = match (is_same(block), start) {
                (true, None) => Some(block),
                (false, Some(first)) => {
                    push(&mut same, run.part(first, block - 1));
                    None
                }
                (_, start) => start,
            };
        }
        if let Some(first) = start {
            push(&mut same, run.part(first, run.last));
        }
    }
    same
}

/// The blocks of `runs` (sorted) that have moved, each at the place that `to` returns for its
/// segment, frame and block of the frame.
#[must_use]
pub fn relocated(runs: &[Run], to: impl Fn((u64, u32, u8)) -> Option<Placed>) -> Vec<Run> {
    let mut moved = Vec::new();
    for run in runs.iter().filter(|run| run.is_mapped()) {
        for (block, within) in run.blocks() {
            if let Some(placed) = to((run.segment, run.frame_index, within)) {
                let (first, last, within) = (block, block, placed.within);
                let FrameAt { frame_index, offset, sealed_bytes } = placed.at;
                let segment = placed.segment;
                push(
                    &mut moved,
                    Run { segment, frame_index, offset, sealed_bytes, first, last, within },
                );
            }
        }
    }
    moved
}

/// Blocks that `newer` has elsewhere than `older`, or not at all, as ranges of blocks (last one
/// included), each with `true` if it is unmapped in `newer`.
#[must_use]
pub fn changed(older: &[Run], newer: &[Run]) -> Vec<(u8, u8, bool)> {
    let (older, newer) = (places(older), places(newer));
    let mut ranges: Vec<(u8, u8, bool)> = Vec::new();
    for (block, (old, new)) in (0..=u8::MAX).zip(older.iter().zip(&newer)) {
        if old == new {
            continue;
        }
        match ranges.last_mut() {
            Some((_, last, is_hole))
                if last.checked_add(1) == Some(block) && *is_hole == new.is_none() =>
            {
                *last = block;
            }
            _ => ranges.push((block, block, new.is_none())),
        }
    }
    ranges
}

/// Segment, frame and block of the frame.
type Place = Option<(u64, u32, u16)>;

/// The place of the first block of a run.
fn place(run: &Run) -> Place {
    run.is_mapped().then(|| (run.segment, run.frame_index, run.within.into()))
}

/// The place of each block of a page.
fn places(runs: &[Run]) -> [Place; PAGE_BLOCKS as usize] {
    let mut places = [None; PAGE_BLOCKS as usize];
    for run in runs.iter().filter(|run| run.is_mapped()) {
        for block in run.first..=run.last {
            let within = u16::from(run.within) + u16::from(block - run.first);
            places[usize::from(block)] = Some((run.segment, run.frame_index, within));
        }
    }
    places
}

/// Reasons why bytes are not an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Written by a later version.
    #[error("operand version {0} is not known")]
    Version(u8),
    /// The bytes end too early or continue past the end of the operand.
    #[error("operand has the wrong length")]
    Length,
    /// A number is out of the range that the format allows.
    #[error("operand holds a number out of range")]
    Range,
}

/// Encodes an operand. `runs` must be sorted and disjoint.
pub fn encode(lsn: Lsn, kind: OperandKind, runs: &[Run], out: &mut Vec<u8>) {
    let (version, code) = match kind {
        OperandKind::Delta { keeps: false } => (OPERAND_VERSION, KIND_DELTA),
        OperandKind::Delta { keeps: true } => (OPERAND_VERSION_KEEPING, KIND_KEEPING_DELTA),
        OperandKind::Image { copy: Lsn::NONE } => (OPERAND_VERSION, KIND_IMAGE),
        OperandKind::Image { .. } => (OPERAND_VERSION_KEEPING, KIND_IMAGE_AFTER_COPY),
    };
    out.push(version);
    out.push(code);
    put_varint(out, lsn.0);
    if let OperandKind::Image { copy } = kind
        && copy != Lsn::NONE
    {
        put_varint(out, copy.0);
    }
    put_varint(out, runs.len() as u64);
    let mut end = 0u64;
    let mut before = Run::hole(0, 0);
    for run in runs {
        put_varint(out, u64::from(run.first) - end);
        let is_next = run.is_mapped() && before.is_mapped() && follows(&before, run);
        let flags = if run.is_mapped() { FLAG_MAPPED } else { 0 }
            | if is_next { FLAG_NEXT_FRAME } else { 0 };
        put_varint(out, u64::from(run.count() - 1) << 2 | flags);
        if run.is_mapped() {
            if !is_next {
                put_varint(out, zigzag(run.segment, before.segment));
                put_varint(out, zigzag(run.frame_index.into(), before.frame_index.into()));
                put_varint(out, zigzag(run.offset.into(), before.offset.into()));
                put_varint(out, run.within.into());
            }
            put_varint(out, run.sealed_bytes.into());
            before = *run;
        }
        end = u64::from(run.last) + 1;
    }
}

fn follows(before: &Run, run: &Run) -> bool {
    run.within == 0
        && run.segment == before.segment
        && before.frame_index.checked_add(1) == Some(run.frame_index)
        && before.offset.checked_add(before.sealed_bytes) == Some(run.offset)
}

/// Decodes an operand that takes all of `bytes`.
///
/// # Errors
/// [`PageError`] for any bytes that [`encode`] does not write.
pub fn decode(bytes: &[u8]) -> Result<Operand, PageError> {
    let mut reader = Reader { bytes };
    let version = reader.byte()?;
    if version != OPERAND_VERSION && version != OPERAND_VERSION_KEEPING {
        return Err(PageError::Version(version));
    }
    let code = reader.byte()?;
    let lsn = Lsn(reader.varint()?);
    let kind = match (version, code) {
        (OPERAND_VERSION, KIND_DELTA) => OperandKind::Delta { keeps: false },
        (OPERAND_VERSION, KIND_IMAGE) => OperandKind::Image { copy: Lsn::NONE },
        (OPERAND_VERSION_KEEPING, KIND_KEEPING_DELTA) => OperandKind::Delta { keeps: true },
        (OPERAND_VERSION_KEEPING, KIND_IMAGE_AFTER_COPY) => {
            let copy = Lsn(reader.varint()?);
            if copy == Lsn::NONE || copy >= lsn {
                return Err(PageError::Range);
            }
            OperandKind::Image { copy }
        }
        _ => return Err(PageError::Range),
    };
    let count = reader.varint()?;
    if count > PAGE_BLOCKS {
        return Err(PageError::Range);
    }
    let mut runs = Vec::with_capacity(usize::try_from(count).map_err(|_| PageError::Range)?);
    let mut end = 0u64;
    let mut before = Run::hole(0, 0);
    for _ in 0..count {
        let run = reader.run(end, &before)?;
        if run.is_mapped() {
            before = run;
        }
        end = u64::from(run.last) + 1;
        runs.push(run);
    }
    if reader.bytes.is_empty() { Ok(Operand { lsn, kind, runs }) } else { Err(PageError::Length) }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, PageError> {
        let (first, rest) = self.bytes.split_first().ok_or(PageError::Length)?;
        self.bytes = rest;
        Ok(*first)
    }

    fn varint(&mut self) -> Result<u64, PageError> {
        let (value, taken) = get_varint(self.bytes).ok_or(PageError::Length)?;
        self.bytes = self.bytes.get(taken..).ok_or(PageError::Length)?;
        Ok(value)
    }

    fn relative(&mut self, to: u64) -> Result<u64, PageError> {
        Ok(unzigzag(self.varint()?, to))
    }

    fn relative_u32(&mut self, to: u32) -> Result<u32, PageError> {
        u32::try_from(self.relative(to.into())?).map_err(|_| PageError::Range)
    }

    fn run(&mut self, end: u64, before: &Run) -> Result<Run, PageError> {
        let first = end.checked_add(self.varint()?).ok_or(PageError::Range)?;
        let head = self.varint()?;
        let last = first.checked_add(head >> 2).ok_or(PageError::Range)?;
        let (Ok(first), Ok(last)) = (u8::try_from(first), u8::try_from(last)) else {
            return Err(PageError::Range);
        };
        let mut run = Run::hole(first, last);
        if head & FLAG_MAPPED == 0 {
            return if head & FLAG_NEXT_FRAME == 0 { Ok(run) } else { Err(PageError::Range) };
        }
        if head & FLAG_NEXT_FRAME == 0 {
            run.segment = self.relative(before.segment)?;
            run.frame_index = self.relative_u32(before.frame_index)?;
            run.offset = self.relative_u32(before.offset)?;
            run.within = u8::try_from(self.varint()?).map_err(|_| PageError::Range)?;
        } else {
            run.segment = before.segment;
            run.frame_index = before.frame_index.checked_add(1).ok_or(PageError::Range)?;
            run.offset = before.offset.checked_add(before.sealed_bytes).ok_or(PageError::Range)?;
        }
        run.sealed_bytes = u32::try_from(self.varint()?).map_err(|_| PageError::Range)?;
        if run.segment == 0 || u32::from(run.within) + run.count() > 256 {
            return Err(PageError::Range);
        }
        Ok(run)
    }
}

fn zigzag(value: u64, base: u64) -> u64 {
    let difference = value.wrapping_sub(base).cast_signed();
    (difference.wrapping_shl(1) ^ (difference >> 63)).cast_unsigned()
}

fn unzigzag(coded: u64, base: u64) -> u64 {
    let difference = (coded >> 1) ^ (coded & 1).wrapping_neg();
    base.wrapping_add(difference)
}

#[cfg(test)]
mod tests;
