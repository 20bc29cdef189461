//! Bytes as hexadecimal digits, in documents and names.
//!
//! Invariants:
//! - A value has one spelling, in lower case, so that a flipped bit of a document is noticed.

/// Formats bytes as lower-case hex.
#[must_use]
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all");
        text
    })
}

/// Parses exactly `N` bytes of lower-case hex. Only one spelling is accepted, so that a flipped bit is noticed.
#[must_use]
pub fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let bytes = vec_from_hex(text)?;
    bytes.try_into().ok()
}

/// Parses lower-case hex of any length, with the same strictness as [`from_hex`].
#[must_use]
pub fn vec_from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let pairs = text.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs
        .map(|pair| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_has_one_spelling() {
        assert_eq!(from_hex::<2>("00ff"), Some([0, 255]));
        for text in ["00FF", "00f", "00fg", "00ff00", "", "00é"] {
            assert_eq!(from_hex::<2>(text), None, "{text}");
        }
        assert_eq!(to_hex(&[0, 0xab]), "00ab");
    }
}
