//! Decoding of a range of one lost data fragment, for the read of a frame.
//!
//! The decoder of [`crate::codec`] transforms whole blocks of 65,536 points, whatever the length. But a
//! lost fragment is a linear function of the fragments that are read instead: over GF(2), each bit of a
//! symbol adds a constant to the symbol at the same place of the lost one. A [`Pattern`] holds these
//! constants, which the decoder itself computes once, so both give the same bytes whatever the field.

use crate::codec::{failed, invalid};
use crate::cuts::UNIT_BYTES;
use crate::scheme::{CodecId, Scheme};
use block::Result;
use reed_solomon_simd::ReedSolomonDecoder;
use std::ops::Range;

/// Bits of a symbol.
const SYMBOL_BITS: usize = 16;
/// Symbols of a unit. Byte n of a unit is the low byte of symbol n, and byte 32 + n its high byte. Source:
/// crate reed-solomon-simd 3, `engine`, and Leopard-RS.
const UNIT_SYMBOLS: usize = UNIT_BYTES / 2;

/// How a lost data fragment follows from others. Cheap to keep: 32 bytes for each source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    sources: Vec<usize>,
    /// For each source, what each bit of a symbol adds.
    constants: Vec<[u16; SYMBOL_BITS]>,
}

impl Pattern {
    /// Computes the pattern of a lost data fragment and of the fragments that are read instead, as many as
    /// there are data fragments. Takes up to a millisecond.
    ///
    /// # Errors
    /// `Invalid` if these do not determine the lost one, or the scheme stores whole images.
    pub fn new(scheme: Scheme, lost: usize, sources: &[usize]) -> Result<Pattern> {
        let data = scheme.data();
        let is_ordered = sources.windows(2).all(|pair| pair[0] < pair[1]);
        let is_possible = lost < data
            && sources.len() == data
            && is_ordered
            && sources.iter().all(|source| *source < scheme.fragments() && *source != lost)
            && scheme.codec() == CodecId::ReedSolomon16;
        if !is_possible {
            return Err(invalid("decode a fragment: the others do not determine it"));
        }
        // Each source has its own unit, in which the first symbols have one bit each.
        let bytes = data * UNIT_BYTES;
        let mut decoder = ReedSolomonDecoder::new(data, scheme.parity(), bytes).map_err(failed)?;
        for (unit, source) in sources.iter().enumerate() {
            let mut shard = vec![0; bytes];
            for bit in 0..SYMBOL_BITS {
                let high = bit / 8 * UNIT_SYMBOLS;
                shard[unit * UNIT_BYTES + high + bit] = 1 << (bit % 8);
            }
            match source.checked_sub(data) {
                None => decoder.add_original_shard(*source, shard),
                Some(parity) => decoder.add_recovery_shard(parity, shard),
            }
            .map_err(failed)?;
        }
        let decoded = decoder.decode().map_err(failed)?;
        let restored = decoded.restored_original(lost);
        let restored = restored.ok_or_else(|| invalid("decode a fragment: it was not restored"))?;
        let (units, _) = restored.as_chunks::<UNIT_BYTES>();
        let constants = |unit: &[u8; UNIT_BYTES]| {
            std::array::from_fn(|bit| u16::from_le_bytes([unit[bit], unit[UNIT_SYMBOLS + bit]]))
        };
        Ok(Pattern { sources: sources.to_vec(), constants: units.iter().map(constants).collect() })
    }

    /// Indexes of the fragments that are read, in order.
    #[must_use]
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The range of payloads that has to be read of each source to decode `range` of the lost one: whole
    /// units. A source that ends before its end counts as if zeroes followed.
    #[must_use]
    pub fn units_of(range: &Range<usize>) -> Range<usize> {
        range.start / UNIT_BYTES * UNIT_BYTES..range.end.next_multiple_of(UNIT_BYTES)
    }

    /// Decodes whole units of the lost fragment from the same range of each source. Sources that are
    /// shorter than the others count as if zeroes followed. Returns `bytes` bytes.
    ///
    /// # Errors
    /// `Invalid` for another number of sources, or a length that is not in units.
    pub fn decode(&self, ranges: &[&[u8]], bytes: usize) -> Result<Vec<u8>> {
        let is_long = ranges.iter().any(|range| range.len() > bytes);
        if ranges.len() != self.sources.len() || !bytes.is_multiple_of(UNIT_BYTES) || is_long {
            return Err(invalid("decode a fragment: the ranges of the others do not fit"));
        }
        let mut decoded = vec![0; bytes];
        for (constants, range) in self.constants.iter().zip(ranges) {
            let (sums, _) = decoded.as_chunks_mut::<UNIT_BYTES>();
            let (units, rest) = range.as_chunks::<UNIT_BYTES>();
            for (sum, unit) in sums.iter_mut().zip(units) {
                add(constants, unit, sum);
            }
            if let Some(sum) = sums.get_mut(units.len()).filter(|_| !rest.is_empty()) {
                let mut unit = [0; UNIT_BYTES];
                unit[..rest.len()].copy_from_slice(rest);
                add(constants, &unit, sum);
            }
        }
        Ok(decoded)
    }
}

/// Adds to the symbols of a unit what those of a source contribute. Written for the vectorizer: it does the
/// same with each symbol, without a table.
fn add(constants: &[u16; SYMBOL_BITS], unit: &[u8; UNIT_BYTES], sum: &mut [u8; UNIT_BYTES]) {
    let mut symbols = [0u16; UNIT_SYMBOLS];
    let mut sums = [0u16; UNIT_SYMBOLS];
    for at in 0..UNIT_SYMBOLS {
        symbols[at] = u16::from_le_bytes([unit[at], unit[UNIT_SYMBOLS + at]]);
    }
    for (bit, constant) in constants.iter().enumerate() {
        for at in 0..UNIT_SYMBOLS {
            let is_set = 0u16.wrapping_sub(symbols[at] >> bit & 1);
            sums[at] ^= constant & is_set;
        }
    }
    for at in 0..UNIT_SYMBOLS {
        let [low, high] = sums[at].to_le_bytes();
        sum[at] ^= low;
        sum[UNIT_SYMBOLS + at] ^= high;
    }
}
