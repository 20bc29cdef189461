//! Every pattern of losses, golden bytes, and the library against itself.

use super::*;
use crate::cuts::UNIT_BYTES;
use reed_solomon_simd::ReedSolomonEncoder;

/// Bytes that a formula gives, so that golden bytes depend on nothing else.
pub(crate) fn image(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Cuts of an image whose frames have many lengths.
pub(crate) fn cuts(scheme: Scheme, len: usize) -> Cuts {
    let borders: Vec<u32> = (0..).map(|frame: u32| 96 + frame * 33 + frame % 7).collect_while(len);
    Cuts::new(scheme, u32::try_from(len).expect("short"), &borders)
}

trait CollectWhile {
    fn collect_while(self, len: usize) -> Vec<u32>;
}

impl<I: Iterator<Item = u32>> CollectWhile for I {
    fn collect_while(self, len: usize) -> Vec<u32> {
        self.take_while(|border| (*border as usize) < len).collect()
    }
}

/// Calls `each` with every set of `count` of the indexes below `all`.
fn subsets(all: usize, count: usize, each: &mut impl FnMut(&[usize])) {
    fn extend(all: usize, count: usize, set: &mut Vec<usize>, each: &mut impl FnMut(&[usize])) {
        if set.len() == count {
            return each(set);
        }
        let first = set.last().map_or(0, |last| last + 1);
        for next in first..all {
            set.push(next);
            extend(all, count, set, each);
            set.pop();
        }
    }
    extend(all, count, &mut Vec::new(), each);
}

fn without<'a>(payloads: &'a [Payload<'a>], lost: &[usize]) -> Vec<Option<&'a [u8]>> {
    let found = |(index, payload): (usize, &'a Payload<'a>)| {
        (!lost.contains(&index)).then_some(payload.as_ref())
    };
    payloads.iter().enumerate().map(found).collect()
}

/// The image, made from the fragments that were found.
fn decode(scheme: Scheme, cuts: &Cuts, found: &[Option<&[u8]>]) -> Result<Vec<u8>> {
    let data: Vec<usize> = (0..scheme.data()).collect();
    Ok(rebuild(scheme, cuts, found, &data)?.concat())
}

#[test]
fn every_pattern_of_losses_gives_the_image_and_the_fragments() {
    for scheme in Scheme::ALL {
        let image = image(64 * scheme.data() * 3 + 7);
        let cuts = cuts(scheme, image.len());
        let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
        assert_eq!(payloads.len(), scheme.fragments());
        let mut count = 0;
        for losses in 0..=scheme.parity() {
            subsets(scheme.fragments(), losses, &mut |lost| {
                let found = without(&payloads, lost);
                assert_eq!(
                    decode(scheme, &cuts, &found).expect("enough"),
                    image,
                    "{scheme} {lost:?}"
                );
                let rebuilt = rebuild(scheme, &cuts, &found, lost).expect("enough");
                for (index, rebuilt) in lost.iter().zip(rebuilt) {
                    assert!(rebuilt == payloads[*index].as_ref(), "{scheme} {lost:?}: {index}");
                }
                count += 1;
            });
        }
        println!("{scheme}: {count} patterns");
        let lost: Vec<usize> = (0..=scheme.parity()).collect();
        let error = decode(scheme, &cuts, &without(&payloads, &lost)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
    }
}

#[test]
fn every_pattern_makes_each_lost_fragment_from_any_others() {
    for scheme in Scheme::ALL.into_iter().filter(|scheme| scheme.codec() != CodecId::Whole) {
        let image = image(64 * scheme.data() * 2 + 29);
        let cuts = cuts(scheme, image.len());
        let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
        for losses in 1..=scheme.parity() {
            subsets(scheme.fragments(), losses, &mut |lost| {
                let left: Vec<usize> =
                    (0..scheme.fragments()).filter(|index| !lost.contains(index)).collect();
                // The first and the last of those that may be read.
                for sources in [&left[..scheme.data()], &left[left.len() - scheme.data()..]] {
                    let ranges: Vec<&[u8]> =
                        sources.iter().map(|source| payloads[*source].as_ref()).collect();
                    let pattern = Pattern::new(scheme, lost, sources).expect("enough");
                    let made = pattern.make(&ranges, cuts.coded_bytes()).expect("they fit");
                    for (index, made) in lost.iter().zip(made) {
                        let (payload, rest) = made.split_at(payloads[*index].len());
                        assert!(
                            payload == payloads[*index].as_ref()
                                && rest.iter().all(|byte| *byte == 0),
                            "{scheme}: {index} of {lost:?} from {sources:?}"
                        );
                    }
                }
            });
        }
    }
}

#[test]
fn part_of_a_lost_fragment_is_decoded_from_the_same_part_of_others() {
    let scheme = Scheme::new(4, 2).expect("a scheme");
    let image = image(40_000);
    let cuts = cuts(scheme, image.len());
    let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
    let pattern = Pattern::new(scheme, &[1], &[0, 2, 3, 5]).expect("enough");
    assert_eq!(pattern.sources(), [0, 2, 3, 5]);
    let piece = payloads[1].len();
    for range in [0..1, 63..65, 64..128, 4000..8097, piece - 1..piece, 0..piece] {
        let units = Pattern::units_of(&range);
        let part = |source: &usize| {
            let payload = payloads[*source].as_ref();
            &payload[units.start.min(payload.len())..units.end.min(payload.len())]
        };
        let parts: Vec<&[u8]> = pattern.sources().iter().map(part).collect();
        let made = pattern.make(&parts, units.len()).expect("they fit");
        let inner = range.start - units.start..range.end - units.start;
        assert_eq!(made[0][inner], payloads[1][range.clone()], "{range:?}");
    }
    for wrong in [&[0, 1, 2, 3][..], &[0, 2, 3], &[0, 2, 3, 6], &[0, 3, 2, 4], &[0, 2, 2, 4]] {
        assert!(Pattern::new(scheme, &[1], wrong).is_err(), "{wrong:?}");
    }
    assert!(Pattern::new(scheme, &[6], &[0, 1, 2, 3]).is_err(), "beyond the scheme");
    assert!(pattern.make(&[&[0; 64][..]; 3], 64).is_err());
    assert!(pattern.make(&[&[0; 65][..]; 4], 64).is_err());
    assert!(pattern.make(&[&[0; 64][..]; 4], 65).is_err());
}

#[test]
fn images_of_all_small_lengths_are_coded() {
    for scheme in [Scheme::new(2, 1), Scheme::new(4, 2)].map(|scheme| scheme.expect("a scheme")) {
        for len in (0..200).chain([UNIT_BYTES * 4 - 1, UNIT_BYTES * 4, UNIT_BYTES * 4 + 1]) {
            let image = image(len);
            let cuts = cuts(scheme, len);
            let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
            let found = without(&payloads, &[0]);
            assert_eq!(
                decode(scheme, &cuts, &found).expect("enough"),
                image,
                "{scheme}, {len} bytes"
            );
        }
    }
}

#[test]
fn fragments_that_do_not_fit_are_refused() {
    let scheme = Scheme::new(2, 1).expect("a scheme");
    let image = image(1000);
    let cuts = cuts(scheme, 1000);
    assert!(encode(scheme, &cuts, &image[..999]).is_err());
    let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
    let short = &payloads[0][1..];
    let error = decode(scheme, &cuts, &[Some(short), None, Some(&payloads[2])]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(decode(scheme, &cuts, &[Some(&payloads[0]), Some(&payloads[1])]).is_err());
    assert!(rebuild(scheme, &cuts, &without(&payloads, &[]), &[3]).is_err());
}

/// The library's bytes are part of the format: another release of it has to make the same.
#[test]
fn parity_has_its_golden_bytes() {
    let mut lines = String::new();
    for scheme in Scheme::ALL {
        let image = image(64 * scheme.data());
        let ends: Vec<u32> = (1..=scheme.data() as u32).map(|piece| 64 * piece).collect();
        let cuts = Cuts::from_ends(scheme, &ends).expect("they are in order");
        let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
        for (index, payload) in payloads.iter().enumerate().skip(scheme.data()) {
            let hex: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
            lines.push_str(&format!("{scheme} {index} {hex}\n"));
        }
    }
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        print!("{lines}");
    }
    assert_eq!(lines, include_str!("../../testdata/parity.hex"));
}

/// Pieces around the length of a block that is multiplied at once, with the encoder of the library, which wants them padded.
#[test]
fn pieces_of_many_lengths_have_the_parity_of_the_library() {
    let scheme = Scheme::new(8, 2).expect("a scheme");
    let lengths = [8191, 8192, 8193, 0, 16384, 64, 1, 16383];
    let ends: Vec<u32> = lengths
        .iter()
        .scan(0, |end, length| {
            *end += length;
            Some(*end)
        })
        .collect();
    let cuts = Cuts::from_ends(scheme, &ends).expect("they are in order");
    let image = image(ends[7] as usize);
    let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
    assert_eq!(cuts.coded_bytes(), 16384);
    let mut encoder = ReedSolomonEncoder::new(8, 2, 16384).expect("the scheme is possible");
    for piece in &payloads[..8] {
        let mut padded = piece.to_vec();
        padded.resize(16384, 0);
        encoder.add_original_shard(padded).expect("its length is right");
    }
    let encoded = encoder.encode().expect("all are there");
    for (parity, of_library) in payloads[8..].iter().zip(encoded.recovery_iter()) {
        assert!(parity.as_ref() == of_library);
    }
    let all = without(&payloads, &[]);
    for lost in [[0, 1], [2, 4], [3, 8], [5, 7], [6, 9], [8, 9]] {
        let rebuilt = rebuild(scheme, &cuts, &without(&payloads, &lost), &lost).expect("enough");
        for (index, rebuilt) in lost.iter().zip(rebuilt) {
            assert!(Some(&*rebuilt) == all[*index], "{index} of {lost:?}");
        }
    }
}

/// The code of the library with its slow engine, which shares nothing with the fast ones but the tables.
#[test]
fn fast_engines_agree_with_the_plain_one() {
    use reed_solomon_simd::engine::Naive;
    use reed_solomon_simd::rate::{DefaultRateEncoder, RateEncoder};
    for scheme in Scheme::ALL.into_iter().filter(|scheme| scheme.codec() != CodecId::Whole) {
        let image = image(128 * scheme.data());
        let ends: Vec<u32> = (1..=scheme.data() as u32).map(|piece| 128 * piece).collect();
        let cuts = Cuts::from_ends(scheme, &ends).expect("they are in order");
        let payloads = encode(scheme, &cuts, &image).expect("the cuts are its own");
        let mut plain =
            DefaultRateEncoder::new(scheme.data(), scheme.parity(), 128, Naive::new(), None)
                .expect("the scheme is possible");
        for piece in image.chunks(128) {
            plain.add_original_shard(piece).expect("its length is right");
        }
        let encoded = plain.encode().expect("all are there");
        for (parity, plain) in payloads[scheme.data()..].iter().zip(encoded.recovery_iter()) {
            assert!(parity.as_ref() == plain, "{scheme}");
        }
    }
}
