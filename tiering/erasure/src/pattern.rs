//! Fragments as products: the parity of an image, and fragments that were lost, whole or a range of them.
//!
//! The encoder and the decoder of reed-solomon-simd transform many blocks of points and cost several passes
//! over memory. But a fragment is a linear function of the fragments that determine it: each symbol of it
//! is a sum of the symbols at the same place of these, each times a constant of the field. A [`Pattern`]
//! holds the constants, which the encoder and the decoder themselves compute once, and multiplies with the
//! engine of the library, so both give the same bytes.

use crate::cuts::UNIT_BYTES;
use crate::scheme::{CodecId, FRAGMENTS_MAX, Scheme};
use block::{Error, ErrorKind, Result};
use reed_solomon_simd::engine::{DefaultEngine, Engine, GfElement, tables};
use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use std::iter::zip;
use std::ops::Range;
use std::sync::LazyLock;

/// A unit of a fragment, which holds 32 symbols of the field.
type Unit = [u8; UNIT_BYTES];

/// Symbols of a unit. Byte n of a unit is the low byte of symbol n, and byte 32 + n its high byte. Source:
/// crate reed-solomon-simd 3, `engine`, and Leopard-RS.
const UNIT_SYMBOLS: usize = UNIT_BYTES / 2;
/// Units that are multiplied at once: two blocks of them fit into the first cache of a core.
const BLOCK_UNITS: usize = 128;

const _: () =
    assert!(FRAGMENTS_MAX <= UNIT_SYMBOLS, "each source has a symbol of its own in a unit");

/// The engine with the fastest instructions of this machine. Its tables take 8 MiB, once.
static ENGINE: LazyLock<DefaultEngine> = LazyLock::new(DefaultEngine::new);

/// How some fragments follow from others. Cheap to keep: two bytes for each pair of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    sources: Vec<usize>,
    /// For each fragment that is made, the logarithm of the constant of each source.
    logarithms: Vec<Vec<GfElement>>,
}

impl Pattern {
    /// Computes the pattern of the fragments to make and of those that are read instead, as many as there
    /// are data fragments. Takes up to a millisecond if data fragments are lost.
    ///
    /// # Errors
    /// `Invalid` if these do not determine the others, or the scheme stores whole images.
    pub fn new(scheme: Scheme, made: &[usize], sources: &[usize]) -> Result<Pattern> {
        let is_new = |index: &usize| *index < scheme.fragments() && !sources.contains(index);
        let is_ordered = sources.windows(2).all(|pair| pair[0] < pair[1]);
        let is_possible = sources.len() == scheme.data()
            && is_ordered
            && sources.iter().all(|source| *source < scheme.fragments())
            && made.iter().all(is_new)
            && scheme.codec() == CodecId::ReedSolomon16;
        if !is_possible {
            return Err(invalid("decode a fragment: the others do not determine it"));
        }
        let images = images(scheme, sources)?;
        let logarithm = |unit: &Unit, source: usize| {
            let constant = u16::from_le_bytes([unit[source], unit[UNIT_SYMBOLS + source]]);
            // Any sources determine the others, so none counts for nothing.
            match constant {
                0 => Err(invalid("decode a fragment: one of the others does not matter")),
                _ => Ok(tables::get_exp_log().log[usize::from(constant)]),
            }
        };
        let row = |index: &usize| -> Result<Vec<GfElement>> {
            (0..sources.len()).map(|source| logarithm(&images[*index], source)).collect()
        };
        let logarithms = made.iter().map(row).collect::<Result<_>>()?;
        Ok(Pattern { sources: sources.to_vec(), logarithms })
    }

    /// Indexes of the fragments that are read, in order.
    #[must_use]
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The range of payloads that has to be read of each source to make `range` of the others: whole
    /// units. A source that ends before its end counts as if zeroes followed.
    #[must_use]
    pub fn units_of(range: &Range<usize>) -> Range<usize> {
        range.start / UNIT_BYTES * UNIT_BYTES..range.end.next_multiple_of(UNIT_BYTES)
    }

    /// Makes whole units of the fragments from the same range of each source. Sources that are shorter
    /// than the others count as if zeroes followed. Returns `bytes` bytes of each.
    ///
    /// # Errors
    /// `Invalid` for another number of sources, or a length that is not in units.
    pub fn make(&self, ranges: &[&[u8]], bytes: usize) -> Result<Vec<Vec<u8>>> {
        let is_long = ranges.iter().any(|range| range.len() > bytes);
        if ranges.len() != self.sources.len() || !bytes.is_multiple_of(UNIT_BYTES) || is_long {
            return Err(invalid("decode a fragment: the ranges of the others do not fit"));
        }
        // Not by a clone, which would write the zeroes.
        let mut made: Vec<Vec<u8>> = self.logarithms.iter().map(|_| vec![0; bytes]).collect();
        let mut products = [[0; UNIT_BYTES]; BLOCK_UNITS];
        for start in (0..bytes).step_by(BLOCK_UNITS * UNIT_BYTES) {
            let end = bytes.min(start + BLOCK_UNITS * UNIT_BYTES);
            for (row, made) in zip(&self.logarithms, &mut made) {
                let (sums, _) = made[start..end].as_chunks_mut();
                for (logarithm, range) in zip(row, ranges) {
                    let block = &range[start.min(range.len())..end.min(range.len())];
                    add_products(sums, block, *logarithm, &mut products);
                }
            }
        }
        Ok(made)
    }
}

/// Adds a block of a source times a constant. Panics if the block is longer than the sums or than `products`.
fn add_products(sums: &mut [Unit], block: &[u8], logarithm: GfElement, products: &mut [Unit]) {
    let products = &mut products[..block.len().div_ceil(UNIT_BYTES)];
    let (units, rest) = block.as_chunks();
    products[..units.len()].copy_from_slice(units);
    if let Some(last) = products.get_mut(units.len()) {
        *last = [0; UNIT_BYTES];
        last[..rest.len()].copy_from_slice(rest);
    }
    ENGINE.mul(products, logarithm);
    for (sum, product) in zip(sums, products) {
        zip(sum, product).for_each(|(sum, product)| *sum ^= *product);
    }
}

/// What all fragments are if symbol n of source n is one, and all others are zero: the constants.
fn images(scheme: Scheme, sources: &[usize]) -> Result<Vec<Unit>> {
    let (data, parity) = (scheme.data(), scheme.parity());
    let mut units = vec![[0; UNIT_BYTES]; scheme.fragments()];
    for (symbol, source) in sources.iter().enumerate() {
        units[*source][symbol] = 1;
    }
    let (lost, read): (Vec<usize>, Vec<usize>) =
        (0..data).partition(|index| !sources.contains(index));
    if !lost.is_empty() {
        let mut decoder = ReedSolomonDecoder::new(data, parity, UNIT_BYTES).map_err(failed)?;
        for index in read {
            decoder.add_original_shard(index, units[index]).map_err(failed)?;
        }
        for index in sources.iter().filter(|index| **index >= data) {
            decoder.add_recovery_shard(*index - data, units[*index]).map_err(failed)?;
        }
        let decoded = decoder.decode().map_err(failed)?;
        for index in lost {
            let restored = decoded.restored_original(index);
            let restored = restored.and_then(|bytes| bytes.try_into().ok());
            units[index] =
                restored.ok_or_else(|| invalid("decode a fragment: it was not restored"))?;
        }
    }
    let mut encoder = ReedSolomonEncoder::new(data, parity, UNIT_BYTES).map_err(failed)?;
    for unit in &units[..data] {
        encoder.add_original_shard(unit).map_err(failed)?;
    }
    let encoded = encoder.encode().map_err(failed)?;
    for (unit, made) in zip(&mut units[data..], encoded.recovery_iter()) {
        unit.copy_from_slice(made);
    }
    Ok(units)
}

fn failed(error: reed_solomon_simd::Error) -> Error {
    Error::with_source(ErrorKind::Invalid, "compute an erasure code", error)
}

pub(crate) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
