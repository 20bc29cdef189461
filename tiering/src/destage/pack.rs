//! Cuts extents of sectors into blocks and packs the blocks into frames. Pure logic.
//!
//! Invariants:
//! - Blocks are returned in address order, and every input sector is returned once.
//! - A frame ends at a multiple of the frame size and never spans a gap. So data that was written
//!   in sequence is read with few frames, and no block lies in two of them.

use super::{BLOCK, SECTOR, WindowExtent};
use crate::map::LayerId;
use block::units::{SECTOR_BYTES, SECTORS_PER_BLOCK};
use bytes::{Bytes, BytesMut};

/// Whole blocks to be stored as one frame.
pub(crate) struct Piece {
    pub layer: LayerId,
    pub first_block: u64,
    pub plaintext: Bytes,
    /// One for each block, or empty if they are not wanted.
    pub fingerprints: Vec<u64>,
}

/// A block of which the window has only some sectors.
pub(super) struct Partial {
    pub block: u64,
    pub bytes: BytesMut,
    /// One bit per sector.
    pub have: u8,
}

/// Output of splitting the extents of a volume, in order of block.
pub(super) enum Item {
    Whole { first_block: u64, bytes: Bytes },
    Merge(Partial),
}

/// Cuts sorted extents of sectors into whole blocks and blocks that must be completed.
#[derive(Default)]
pub(super) struct Splitter {
    pub items: Vec<Item>,
    partial: Option<Partial>,
}

impl Splitter {
    /// Adds one extent; returns the whole blocks that it unmaps.
    pub fn add<H>(
        &mut self,
        extent: &WindowExtent<H>,
        payload: Option<&Bytes>,
    ) -> Option<(u64, u64)> {
        let mut unmapped = None;
        let mut sector = extent.start_sector;
        let end = extent.start_sector + extent.sector_count;
        while sector < end {
            let block = sector / SECTORS_PER_BLOCK;
            let within = sector % SECTORS_PER_BLOCK;
            let at = ((sector - extent.start_sector) * SECTOR_BYTES) as usize;
            let taken;
            if within == 0 && end - sector >= SECTORS_PER_BLOCK {
                self.end();
                let block_count = (end - sector) / SECTORS_PER_BLOCK;
                taken = block_count * SECTORS_PER_BLOCK;
                match payload {
                    Some(payload) => {
                        let bytes = payload.slice(at..at + (taken * SECTOR_BYTES) as usize);
                        self.items.push(Item::Whole { first_block: block, bytes });
                    }
                    None => unmapped = Some((block, block_count)),
                }
            } else {
                taken = (SECTORS_PER_BLOCK - within).min(end - sector);
                let part =
                    payload.map(|payload| &payload[at..at + (taken * SECTOR_BYTES) as usize]);
                self.add_part(block, within as usize, taken as usize, part);
            }
            sector += taken;
        }
        unmapped
    }

    fn add_part(&mut self, block: u64, within: usize, sectors: usize, part: Option<&[u8]>) {
        if self.partial.as_ref().is_some_and(|partial| partial.block != block) {
            self.end();
        }
        let partial = self.partial.get_or_insert_with(|| Partial {
            block,
            bytes: BytesMut::zeroed(BLOCK),
            have: 0,
        });
        if let Some(part) = part {
            partial.bytes[within * SECTOR..][..part.len()].copy_from_slice(part);
        }
        for sector in within..within + sectors {
            partial.have |= 1 << sector;
        }
    }

    /// Ends the open block; no further sectors of it will follow.
    pub fn end(&mut self) {
        match self.partial.take() {
            Some(Partial { block, bytes, have: u8::MAX }) => {
                self.items.push(Item::Whole { first_block: block, bytes: bytes.freeze() });
            }
            Some(partial) => self.items.push(Item::Merge(partial)),
            None => {}
        }
    }
}

/// Packs whole blocks, in order, into frames that end at multiples of the frame size, so that data
/// that was written in sequence is read with few frames and none is read twice.
pub(crate) struct Packer {
    layer: LayerId,
    frame_blocks: u64,
    first_block: u64,
    block_count: u64,
    parts: Vec<Bytes>,
    fingerprints: Vec<u64>,
}

impl Packer {
    /// Creates a packer. `frame_blocks` is 1 to 16.
    pub fn new(layer: LayerId, frame_blocks: u8) -> Packer {
        Packer {
            layer,
            frame_blocks: frame_blocks.into(),
            first_block: 0,
            block_count: 0,
            parts: Vec::new(),
            fingerprints: Vec::new(),
        }
    }

    /// Adds whole blocks, which must come after all earlier added ones. `fingerprints` has one for
    /// each block or is empty; for one packer it is always the same of the two.
    pub fn add(
        &mut self,
        mut block: u64,
        mut bytes: Bytes,
        mut fingerprints: &[u64],
        pieces: &mut Vec<Piece>,
    ) {
        while !bytes.is_empty() {
            if self.first_block + self.block_count != block {
                pieces.extend(self.end());
            }
            if self.block_count == 0 {
                self.first_block = block;
            }
            let room = self.frame_blocks - block % self.frame_blocks;
            let taken = room.min((bytes.len() / BLOCK) as u64);
            self.parts.push(bytes.split_to(taken as usize * BLOCK));
            let (these, rest) = fingerprints.split_at(fingerprints.len().min(taken as usize));
            self.fingerprints.extend_from_slice(these);
            fingerprints = rest;
            self.block_count += taken;
            block += taken;
            if taken == room {
                pieces.extend(self.end());
            }
        }
    }

    /// Returns the open frame, if any.
    pub fn end(&mut self) -> Option<Piece> {
        let plaintext = match self.parts.len() {
            0 => return None,
            1 => self.parts.pop()?,
            _ => self.parts.concat().into(),
        };
        self.parts.clear();
        self.block_count = 0;
        let (layer, first_block) = (self.layer, self.first_block);
        let fingerprints = std::mem::take(&mut self.fingerprints);
        Some(Piece { layer, first_block, plaintext, fingerprints })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExtentContent;
    use super::*;
    use crate::testing::{Rng, seeds};
    use std::collections::BTreeMap;

    /// Returns a distinct fingerprint for each block, by which it can be recognized.
    fn marks(first_block: u64, bytes: &[u8]) -> Vec<u64> {
        (first_block..first_block + (bytes.len() / BLOCK) as u64).map(|block| block * 7).collect()
    }

    /// Compares ordered extents, some of which touch inside a block, with a model that has one
    /// entry per sector.
    #[test]
    fn every_sector_comes_out_once_in_frames_that_do_not_straddle() {
        for seed in seeds(200) {
            let mut rng = Rng::new(seed);
            let frame_blocks = 1 + rng.below(16);
            let mut packer = Packer::new(LayerId(3), u8::try_from(frame_blocks).unwrap());
            let mut splitter = Splitter::default();
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            let mut unmapped: BTreeMap<u64, u64> = BTreeMap::new();
            let mut sector = rng.below(50);
            for mark in 1..30u8 {
                let sector_count = 1 + rng.below(60);
                let is_data = rng.below(3) > 0;
                let mark = if is_data { mark } else { 0 };
                let payload = Bytes::from(vec![mark; sector_count as usize * SECTOR]);
                let extent = WindowExtent {
                    start_sector: sector,
                    sector_count,
                    content: if is_data { ExtentContent::Data(()) } else { ExtentContent::Zero },
                };
                unmapped.extend(splitter.add(&extent, is_data.then_some(&payload)));
                model.extend((sector..sector + sector_count).map(|sector| (sector, mark)));
                sector += sector_count + if rng.below(2) == 0 { 0 } else { rng.below(20) };
            }
            splitter.end();
            let mut pieces = Vec::new();
            for item in splitter.items {
                match item {
                    Item::Whole { first_block, bytes } => {
                        let fingerprints = marks(first_block, &bytes);
                        packer.add(first_block, bytes, &fingerprints, &mut pieces)
                    }
                    Item::Merge(partial) => {
                        for within in (0..8).filter(|within| partial.have & (1 << within) == 0) {
                            let missing = model.insert(partial.block * 8 + within, 0xee);
                            assert_eq!(missing, None, "SEED={seed}");
                        }
                        let mut bytes = partial.bytes;
                        for within in (0..8).filter(|within| partial.have & (1 << within) == 0) {
                            bytes[within * SECTOR..][..SECTOR].fill(0xee);
                        }
                        let fingerprints = marks(partial.block, &bytes);
                        packer.add(partial.block, bytes.freeze(), &fingerprints, &mut pieces);
                    }
                }
            }
            pieces.extend(packer.end());
            for (first_block, block_count) in unmapped {
                for sector in first_block * 8..(first_block + block_count) * 8 {
                    assert_eq!(model.remove(&sector), Some(0), "SEED={seed}");
                }
            }
            let mut end = 0;
            for piece in pieces {
                let block_count = (piece.plaintext.len() / BLOCK) as u64;
                let last_block = piece.first_block + block_count - 1;
                assert!(piece.first_block >= end);
                assert_eq!(piece.first_block / frame_blocks, last_block / frame_blocks);
                end = last_block + 1;
                assert_eq!(piece.fingerprints, marks(piece.first_block, &piece.plaintext));
                for (index, bytes) in piece.plaintext.chunks(SECTOR).enumerate() {
                    let mark = model.remove(&(piece.first_block * 8 + index as u64));
                    assert_eq!(mark, Some(bytes[0]), "SEED={seed}");
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                }
            }
            assert!(model.is_empty(), "SEED={seed}: {model:?}");
        }
    }
}
