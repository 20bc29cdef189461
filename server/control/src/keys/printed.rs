//! The printed form of a 32-byte key, as key files hold it and `key backup` prints it.
//!
//! Invariants:
//! - `PREFIX-XXXX-XXXX-…`: base32 in groups of four, without the letters I, L, O and U, with a
//!   checksum over prefix and key, so that a typing error is noticed before the key is tried.
//! - Case, spaces and hyphens do not matter when it is read; O is read as 0, I and L as 1.
//! - Plaintext key bytes live in buffers that are wiped.

use block::seal::KEY_BYTES;
use block::units::crc32c_parts;
use zeroize::Zeroizing;

/// Source: Crockford's base32, <https://www.crockford.com/base32.html>.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
/// Bytes of the checksum: three make 35 bytes, which are 56 digits exactly.
const CHECK_BYTES: usize = 3;
const CODED_BYTES: usize = KEY_BYTES + CHECK_BYTES;
const DIGIT_COUNT: usize = CODED_BYTES * 8 / 5;
const _: () = assert!(DIGIT_COUNT * 5 == CODED_BYTES * 8);

/// Returns the printed form of `key`.
pub(super) fn encode(prefix: &str, key: &[u8; KEY_BYTES]) -> Zeroizing<String> {
    let mut coded = Zeroizing::new([0u8; CODED_BYTES]);
    coded[..KEY_BYTES].copy_from_slice(key);
    coded[KEY_BYTES..].copy_from_slice(&check(prefix, key));
    // Reserved in full: a string that grows leaves copies behind.
    let mut text = Zeroizing::new(String::with_capacity(prefix.len() + DIGIT_COUNT * 2));
    text.push_str(prefix);
    for index in 0..DIGIT_COUNT {
        if index % 4 == 0 {
            text.push('-');
        }
        let mut digit = 0usize;
        for bit in index * 5..index * 5 + 5 {
            digit = digit << 1 | usize::from(coded[bit / 8] >> (7 - bit % 8) & 1);
        }
        text.push(char::from(ALPHABET[digit]));
    }
    text
}

/// Parses a printed key. The error describes the problem without repeating any part of the text.
pub(super) fn decode(prefix: &str, text: &str) -> Result<Zeroizing<[u8; KEY_BYTES]>, String> {
    let text = text.trim();
    let rest = match text.get(..prefix.len()) {
        Some(start) if start.eq_ignore_ascii_case(prefix) => &text[prefix.len()..],
        _ => return Err(format!("it does not start with {prefix}-")),
    };
    let mut coded = Zeroizing::new([0u8; CODED_BYTES]);
    let mut count = 0;
    for character in rest.chars().filter(|c| !c.is_whitespace() && *c != '-') {
        let digit = digit(character)
            .ok_or_else(|| format!("character {} is not one of its alphabet", count + 1))?;
        if count == DIGIT_COUNT {
            return Err(format!("it is longer than {DIGIT_COUNT} characters"));
        }
        for place in 0..5 {
            let bit = count * 5 + place;
            coded[bit / 8] |= (digit >> (4 - place) & 1) << (7 - bit % 8);
        }
        count += 1;
    }
    if count != DIGIT_COUNT {
        return Err(format!("it has {count} of {DIGIT_COUNT} characters"));
    }
    let mut key = Zeroizing::new([0u8; KEY_BYTES]);
    key.copy_from_slice(&coded[..KEY_BYTES]);
    if check(prefix, &key) != coded[KEY_BYTES..] {
        return Err("its checksum differs: look for a typing error".to_owned());
    }
    Ok(key)
}

fn digit(character: char) -> Option<u8> {
    let upper = match character.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        other => other,
    };
    let at = ALPHABET.iter().position(|letter| char::from(*letter) == upper)?;
    u8::try_from(at).ok()
}

fn check(prefix: &str, key: &[u8; KEY_BYTES]) -> [u8; CHECK_BYTES] {
    let [_, a, b, c] = crc32c_parts(&[prefix.as_bytes(), key]).to_be_bytes();
    [a, b, c]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> [u8; KEY_BYTES] {
        std::array::from_fn(|index| u8::try_from(index * 7 + 3).unwrap())
    }

    #[test]
    fn a_key_reads_back_however_it_is_typed() {
        let text = encode("SPINDLE-RECOVERY-1", &key());
        assert_eq!(text.len(), "SPINDLE-RECOVERY-1".len() + DIGIT_COUNT + DIGIT_COUNT / 4);
        assert_eq!(*decode("SPINDLE-RECOVERY-1", &text).unwrap(), key());
        let typed = text.to_lowercase().replace('0', "o").replace('1', "l");
        let typed = typed.replacen("recovery-l", "recovery-1", 1).replace('-', " ");
        let typed = typed.replacen("spindle recovery 1", "spindle-recovery-1", 1);
        assert_eq!(*decode("SPINDLE-RECOVERY-1", &typed).unwrap(), key());
    }

    #[test]
    fn every_single_typing_error_is_noticed() {
        let text = encode("SPINDLE-KEY-1", &key());
        for at in "SPINDLE-KEY-1".len()..text.len() {
            for replacement in ALPHABET {
                let mut typed = text.as_bytes().to_vec();
                if typed[at] == *replacement {
                    continue;
                }
                typed[at] = *replacement;
                let typed = String::from_utf8(typed).unwrap();
                assert!(decode("SPINDLE-KEY-1", &typed).is_err(), "position {at}");
            }
        }
        assert!(decode("SPINDLE-KEY-1", &text[..text.len() - 1]).is_err());
        assert!(decode("SPINDLE-KEY-1", &format!("{}A", *text)).is_err());
        assert!(decode("SPINDLE-RECOVERY-1", &text).is_err());
        assert!(decode("SPINDLE-KEY-1", "").is_err());
        assert!(decode("SPINDLE-KEY-1", "SPINDLE-KEY-1-ü").is_err());
        assert!(decode("SPINDLE-KEY-1", "SPINDLE-KEY-ü").is_err());
    }
}
