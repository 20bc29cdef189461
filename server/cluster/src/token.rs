//! A join token: one word that names a node of the cluster, pins its certificate, and carries a
//! secret that admits one node.
//!
//! Invariants:
//! - A token is one word of lower-case letters and digits, and has one spelling.
//! - A checksum covers it, so that a mistyped or cut token is noticed before anything is sent.
//! - The secret is in no `Debug` output; [`Token::to_word`] is the only way to it.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use crate::admission::{ADDRESS_COUNT_MAX, is_address};
use crate::identity::{ClusterId, Digest};
use block::units::{array_at, crc32c};
use block::{Error, ErrorKind, Result};
use std::fmt;
use uuid::Uuid;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// First characters of a token. The rest is base 32.
const PREFIX: &str = "spindle";
/// Version of the bytes.
const VERSION: u8 = 1;
/// Bytes of a token's secret: 128 bits.
pub const SECRET_BYTES: usize = 16;
/// Characters of the longest token. Chosen by hand: 8 addresses of the longest kind have 2,200 bytes.
const WORD_BYTES_MAX: usize = 4096;
/// Digits, by value. Source: RFC 4648, section 6, in lower case.
const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// A secret that admits one node.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub(crate) struct Secret(pub(crate) [u8; SECRET_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// An invitation of one node into a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub(crate) cluster: ClusterId,
    /// SHA-256 of the issuer's certificate.
    pub(crate) issuer: Digest,
    pub(crate) secret: Secret,
    /// Addresses of the issuer.
    pub(crate) addresses: Vec<String>,
}

impl Token {
    /// Returns the cluster that the token is for.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Returns the token as the word that a person copies. It is secret.
    #[must_use]
    pub fn to_word(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(vec![VERSION]);
        bytes.extend_from_slice(self.cluster.0.as_bytes());
        bytes.extend_from_slice(&self.issuer);
        bytes.extend_from_slice(&self.secret.0);
        let count = u8::try_from(self.addresses.len().min(ADDRESS_COUNT_MAX)).unwrap_or(0);
        bytes.push(count);
        for address in self.addresses.iter().take(ADDRESS_COUNT_MAX) {
            let length = u16::try_from(address.len()).unwrap_or(0);
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(address.as_bytes());
        }
        let checksum = crc32c(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        let mut word = Zeroizing::new(PREFIX.to_owned());
        push_base32(&bytes, &mut word);
        word
    }

    /// Reads a token.
    ///
    /// # Errors
    /// `Invalid` for a word that is no token, or a cut or mistyped one; `Unsupported` for a token of
    /// another version.
    pub fn parse(word: &str) -> Result<Token> {
        let word = word.trim();
        let Some(digits) = word.strip_prefix(PREFIX).filter(|_| word.len() <= WORD_BYTES_MAX)
        else {
            return Err(invalid("this is not a join token: it does not begin with \"spindle\""));
        };
        let mistyped = || invalid("the join token is cut or mistyped: copy the whole word");
        let bytes = Zeroizing::new(from_base32(digits).ok_or_else(mistyped)?);
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or_else(mistyped)?;
        if crc32c(body) != u32::from_le_bytes(*checksum) {
            return Err(mistyped());
        }
        match body.first() {
            Some(&VERSION) => {}
            Some(version) => {
                let context = format!(
                    "the join token has version {version}, and this program reads version \
                     {VERSION}: run the same version of the program on all nodes"
                );
                return Err(Error::new(ErrorKind::Unsupported, context));
            }
            None => return Err(mistyped()),
        }
        decode(body).ok_or_else(mistyped)
    }
}

/// Decodes the bytes after the checks of version and checksum.
fn decode(body: &[u8]) -> Option<Token> {
    let cluster = ClusterId(Uuid::from_bytes(array_at(body, 1)?));
    let issuer = array_at(body, 17)?;
    let secret = Secret(array_at(body, 49)?);
    let (count, mut rest) = body.get(65..)?.split_first()?;
    let mut addresses = Vec::new();
    for _ in 0..*count {
        let (length, tail) = rest.split_first_chunk::<2>()?;
        let (address, tail) = tail.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        let address = std::str::from_utf8(address).ok()?;
        addresses.push(Some(address.to_owned()).filter(|address| is_address(address))?);
        rest = tail;
    }
    let is_complete = rest.is_empty() && (1..=ADDRESS_COUNT_MAX).contains(&addresses.len());
    is_complete.then_some(Token { cluster, issuer, secret, addresses })
}

fn invalid(context: &str) -> Error {
    Error::new(ErrorKind::Invalid, context)
}

/// Appends the digits of these bytes, most significant bit first.
fn push_base32(bytes: &[u8], word: &mut String) {
    let (mut bits, mut bit_count) = (0u32, 0u32);
    // Reserved at once: a buffer that grows leaves parts of the secret in freed memory.
    word.reserve_exact(bytes.len().div_ceil(5).saturating_mul(8));
    for byte in bytes {
        bits = (bits << 8 | u32::from(*byte)) & 0xffff;
        bit_count = bit_count.saturating_add(8);
        while bit_count >= 5 {
            bit_count = bit_count.saturating_sub(5);
            word.push(digit(bits >> bit_count));
        }
    }
    if bit_count > 0 {
        word.push(digit(bits << 5u32.saturating_sub(bit_count)));
    }
}

fn digit(value: u32) -> char {
    let index = usize::try_from(value & 31).unwrap_or(0);
    DIGITS.get(index).map_or('a', |byte| char::from(*byte))
}

/// Reads digits. `None` for other characters, and for left-over bits that are not zero.
fn from_base32(digits: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(digits.len());
    let (mut bits, mut bit_count) = (0u32, 0u32);
    for byte in digits.bytes() {
        let value = DIGITS.iter().position(|digit| *digit == byte)?;
        bits = (bits << 5 | u32::try_from(value).ok()?) & 0xffff;
        bit_count = bit_count.saturating_add(5);
        if bit_count >= 8 {
            bit_count = bit_count.saturating_sub(8);
            bytes.push(u8::try_from(bits >> bit_count & 0xff).ok()?);
        }
    }
    let left_over = bits & 1u32.checked_shl(bit_count)?.saturating_sub(1);
    (bit_count < 5 && left_over == 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        reason = "a panic fails the test"
    )]

    use super::*;
    use proptest::prelude::*;

    fn token() -> Token {
        Token {
            cluster: ClusterId(Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888)),
            issuer: [0xab; 32],
            secret: Secret([0xc3; SECRET_BYTES]),
            addresses: vec!["10.0.0.1:7400".to_owned(), "[::1]:7400".to_owned()],
        }
    }

    /// Golden: a token that was issued must be readable by the next version of the program.
    #[test]
    fn word_of_a_token_stays_the_same() {
        let golden = include_str!("../testdata/token-v1.txt").trim();
        assert_eq!(token().to_word().as_str(), golden);
        assert_eq!(Token::parse(golden).unwrap(), token());
        assert_eq!(Token::parse(&format!(" {golden}\n")).unwrap(), token());
    }

    #[test]
    fn mistyped_and_cut_tokens_are_refused() {
        let word = token().to_word();
        for cut in 0..word.len() {
            assert_eq!(Token::parse(&word[..cut]).unwrap_err().kind(), ErrorKind::Invalid, "{cut}");
        }
        for at in PREFIX.len()..word.len() {
            let mut bytes = word.as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'a' { b'b' } else { b'a' };
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(Token::parse(&changed).unwrap_err().kind(), ErrorKind::Invalid, "{at}");
        }
        assert!(Token::parse(&word.to_uppercase()).is_err());
    }

    #[test]
    fn token_of_another_version_names_both() {
        let mut bytes = vec![9, 1, 2, 3];
        bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
        let mut word = PREFIX.to_owned();
        push_base32(&bytes, &mut word);
        let error = Token::parse(&word).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("version 9") && error.to_string().contains("version 1"));
    }

    #[test]
    fn debug_output_has_no_secret() {
        let shown = format!("{:?}", token());
        assert!(
            shown.contains("10.0.0.1") && !shown.contains("c3") && !shown.contains("195"),
            "{shown}"
        );
    }

    proptest! {
        #[test]
        fn base_32_returns_the_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut word = String::new();
            push_base32(&bytes, &mut word);
            prop_assert_eq!(from_base32(&word), Some(bytes));
        }

        #[test]
        fn a_word_that_parses_has_one_spelling(digits in "[a-z2-7]{0,200}") {
            if let Some(bytes) = from_base32(&digits) {
                let mut word = String::new();
                push_base32(&bytes, &mut word);
                prop_assert_eq!(word, digits);
            }
        }
    }
}
