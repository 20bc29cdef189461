//! The mutators: small changes of a valid input, for binary formats and for text.
//!
//! Invariants:
//! - The result is at most as long as the caller allows.
//! - All choices come from the generator that is passed in.

use ::tests::seed::Random;

/// Numbers at the edges of ranges.
const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    7,
    16,
    17,
    0x7f,
    0x80,
    0xff,
    0x100,
    511,
    512,
    4095,
    4096,
    4097,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Words in place of a word of a text.
const WORDS: &[&str] = &[
    "0",
    "1",
    "-1",
    "0.5",
    "1e999",
    "4294967295",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "true",
    "false",
    "null",
    "\"\"",
    "[]",
    "{}",
    "[[[[[[[[",
    "{\"a\":",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "\u{1f980}",
    "\0",
    "\n",
    "=",
    "@",
    "%00",
    "..",
    "/",
];

/// Changes `input` by one to four mutators. `others` are inputs to take parts from.
pub fn mutate(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>], bytes_max: usize) {
    for _ in 0..random.between(1, 4) {
        mutate_once(random, input, others);
        input.truncate(bytes_max);
    }
}

fn mutate_once(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>]) {
    let is_text = input.len() < 1 << 16 && std::str::from_utf8(input).is_ok();
    match random.below(if is_text { 14 } else { 11 }) {
        0 | 1 => flip_bit(random, input),
        2 => put_number(random, input),
        3 => put_number(random, input),
        4 => add_to_number(random, input),
        5 => input.truncate(place(random, input.len() + 1)),
        6 => extend(random, input),
        7 => remove(random, input),
        8 => repeat(random, input),
        9 => take_part(random, input, others),
        10 => splice(random, input, others),
        _ => replace_word(random, input),
    }
}

/// Returns a number below `end`, or 0 if there is none. Small numbers are likely, as headers are at
/// the front.
fn place(random: &mut Random, end: usize) -> usize {
    let end = u64::try_from(end).expect("fits").max(1);
    let near = if random.chance(50) { end.min(256) } else { end };
    usize::try_from(random.below(near)).expect("below a length")
}

fn range(random: &mut Random, len: usize) -> std::ops::Range<usize> {
    let start = place(random, len + 1);
    let count = place(random, len - start + 1);
    start..start + count
}

fn flip_bit(random: &mut Random, input: &mut [u8]) {
    let at = place(random, input.len());
    if let Some(byte) = input.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

/// Returns the place of a number of 1, 2, 4 or 8 bytes, which is aligned most of the time.
fn number_at(random: &mut Random, len: usize) -> Option<std::ops::Range<usize>> {
    let bytes = 1usize << random.below(4);
    let at = place(random, len);
    let at = if random.chance(80) { at - at % bytes } else { at };
    (at + bytes <= len).then_some(at..at + bytes)
}

fn put_number(random: &mut Random, input: &mut [u8]) {
    let Some(range) = number_at(random, input.len()) else { return };
    let number = if random.chance(80) { *random.pick(NUMBERS) } else { random.bits() };
    write_number(random, &mut input[range], number);
}

fn add_to_number(random: &mut Random, input: &mut [u8]) {
    let Some(range) = number_at(random, input.len()) else { return };
    let field = &mut input[range];
    let mut bytes = [0; 8];
    bytes[..field.len()].copy_from_slice(field);
    let number = u64::from_le_bytes(bytes);
    let step = random.between(1, 16);
    let number = match random.chance(50) {
        true => number.wrapping_add(step),
        false => number.wrapping_sub(step),
    };
    let len = field.len();
    field.copy_from_slice(&number.to_le_bytes()[..len]);
}

fn write_number(random: &mut Random, field: &mut [u8], number: u64) {
    let len = field.len();
    match random.chance(60) {
        true => field.copy_from_slice(&number.to_le_bytes()[..len]),
        false => field.copy_from_slice(&number.to_be_bytes()[8 - len..]),
    }
}

fn extend(random: &mut Random, input: &mut Vec<u8>) {
    let count = place(random, 4097);
    match random.below(3) {
        0 => input.resize(input.len() + count, 0),
        1 => input.resize(input.len() + count, 0xff),
        _ => {
            let at = input.len();
            input.resize(at + count, 0);
            random.fill(&mut input[at..]);
        }
    }
}

fn remove(random: &mut Random, input: &mut Vec<u8>) {
    let range = range(random, input.len());
    input.drain(range);
}

/// Repeats a part, once or, if it is short, many times.
fn repeat(random: &mut Random, input: &mut Vec<u8>) {
    let range = range(random, input.len());
    let part = input[range.clone()].to_vec();
    let count = if part.len() < 16 && random.chance(30) { 1 + place(random, 512) } else { 1 };
    input.splice(range.end..range.end, part.repeat(count));
}

/// Inserts a part of another input, or writes it over this one.
fn take_part(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>]) {
    let other = random.pick(others);
    let part = other[range(random, other.len())].to_vec();
    let at = place(random, input.len() + 1);
    let end = if random.chance(50) { at } else { (at + part.len()).min(input.len()) };
    input.splice(at..end, part);
}

/// Continues this input with the end of another.
fn splice(random: &mut Random, input: &mut Vec<u8>, others: &[Vec<u8>]) {
    let other = random.pick(others);
    let at = place(random, input.len().min(other.len()) + 1);
    input.truncate(at);
    input.extend_from_slice(&other[at..]);
}

/// Replaces a run of letters or of digits of a text.
fn replace_word(random: &mut Random, input: &mut Vec<u8>) {
    let at = usize::try_from(random.below(input.len().max(1) as u64)).expect("below a length");
    let Some(first) = input.get(at) else { return };
    let is_digit = first.is_ascii_digit();
    let is_same = |byte: &u8| match is_digit {
        true => byte.is_ascii_digit(),
        false => byte.is_ascii_alphanumeric() || *byte == b'_',
    };
    let start = input[..at].iter().rposition(|byte| !is_same(byte)).map_or(0, |last| last + 1);
    let count = input[at..].iter().position(|byte| !is_same(byte)).unwrap_or(input.len() - at);
    let end = (at + count).max(start);
    input.splice(start..end, random.pick(WORDS).bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_bounded_and_repeat_with_the_seed() {
        let others = vec![vec![7; 300], Vec::new(), b"{\"number\":12,\"name\":\"db\"}".to_vec()];
        let run = |seed| {
            let mut random = Random::new(seed, 1);
            let mut all = Vec::new();
            for _ in 0..2000 {
                let mut input = random.pick(&others).clone();
                mutate(&mut random, &mut input, &others, 1000);
                assert!(input.len() <= 1000, "{} bytes", input.len());
                all.push(input);
            }
            all
        };
        assert_eq!(run(5), run(5));
        let (all, other) = (run(5), run(6));
        assert_ne!(all, other);
        let changed_count = all.iter().filter(|input| !others.contains(input)).count();
        // A third of the inputs is empty, and few mutators change nothing into something.
        assert!(changed_count > 1200, "{changed_count} of {}", all.len());
    }
}
