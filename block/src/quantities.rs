//! The printed forms of quantities: sizes, durations and moments, as the configuration, the command
//! line and the admin replies write them.
//!
//! Invariants:
//! - Text that [`ByteSize`] and [`Span`] print parses back to the same value.
//! - Multiples are binary: `1K` is 1024 bytes. `KB` and the like are refused, because people
//!   disagree about what they mean.
//! - No text makes these functions panic or wrap.

use crate::env::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Suffix letter and the power of two it stands for.
const SIZE_UNITS: [(char, u32); 6] =
    [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// A number of bytes, written like `512`, `64KiB`, `100G` or `1.5T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "SizeText")]
pub struct ByteSize(pub u64);

/// Configuration files may write a size as a string or as a plain number of bytes.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a size like \"100G\", \"512MiB\" or a number of bytes")]
enum SizeText {
    Bytes(u64),
    Text(String),
}

impl TryFrom<SizeText> for ByteSize {
    type Error = String;

    fn try_from(text: SizeText) -> Result<Self, String> {
        match text {
            SizeText::Bytes(bytes) => Ok(ByteSize(bytes)),
            SizeText::Text(text) => text.parse(),
        }
    }
}

impl From<ByteSize> for String {
    fn from(size: ByteSize) -> String {
        size.to_string()
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let digits_end =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, suffix) = trimmed.split_at(digits_end);
        let shift = size_shift(text, suffix.trim())?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || (number.contains('.') && fraction.is_empty()) || fraction.len() > 9 {
            return Err(not_a_size(text));
        }
        let too_large = || format!("size \"{text}\" is too large: at most 16EiB less one byte");
        let whole: u128 = whole.parse().map_err(|_| not_a_size(text))?;
        let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| not_a_size(text))?);
        let fraction: u128 = match fraction {
            "" => 0,
            digits => digits.parse().map_err(|_| not_a_size(text))?,
        };
        let whole_bytes = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
        let fraction_scaled = fraction << shift; // below 10^9 * 2^60
        if !fraction_scaled.is_multiple_of(scale) {
            return Err(format!("size \"{text}\" is not a whole number of bytes"));
        }
        let bytes = whole_bytes.checked_add(fraction_scaled / scale).ok_or_else(too_large)?;
        u64::try_from(bytes).map(ByteSize).map_err(|_| too_large())
    }
}

fn not_a_size(text: &str) -> String {
    format!(
        "\"{text}\" is not a size: write a number and K, M, G, T or P (binary multiples), like 100G or 512MiB"
    )
}

/// Power of two that a suffix stands for.
fn size_shift(text: &str, suffix: &str) -> Result<u32, String> {
    let mut letters = suffix.chars();
    let Some(first) = letters.next() else { return Ok(0) };
    let rest = letters.as_str();
    if suffix.eq_ignore_ascii_case("b") {
        return Ok(0);
    }
    let unit = SIZE_UNITS.iter().find(|(letter, _)| first.eq_ignore_ascii_case(letter));
    match (unit, rest) {
        (Some((_, shift)), "" | "i" | "ib" | "iB" | "IB") => Ok(*shift),
        (Some((letter, _)), "b" | "B") => Err(format!(
            "size \"{text}\": {letter}B is ambiguous; write {letter} or {letter}iB for binary multiples"
        )),
        _ => Err(not_a_size(text)),
    }
}

/// Prints the exact size in the largest unit that divides it.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 != 0 {
            for (letter, shift) in SIZE_UNITS.iter().rev() {
                if self.0.trailing_zeros() >= *shift {
                    return write!(f, "{}{letter}iB", self.0 >> shift);
                }
            }
        }
        write!(f, "{}", self.0)
    }
}

impl ByteSize {
    /// Rounded to three digits, for tables: `1.50 GiB`.
    #[must_use]
    pub fn rounded(self) -> String {
        for (letter, shift) in SIZE_UNITS.iter().rev() {
            let unit = 1u64 << shift;
            if self.0 >= unit {
                let hundredths = u128::from(self.0) * 100 / u128::from(unit);
                let (whole, rest) = (hundredths / 100, hundredths % 100);
                return match whole {
                    0..=9 => format!("{whole}.{rest:02} {letter}iB"),
                    10..=99 => format!("{whole}.{} {letter}iB", rest / 10),
                    _ => format!("{whole} {letter}iB"),
                };
            }
        }
        format!("{} B", self.0)
    }
}

/// Suffix and milliseconds, largest first.
const SPAN_UNITS: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// A duration in whole milliseconds, written like `500ms`, `30s`, `5m`, `2h` or `7d`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Span(u64);

impl Span {
    /// Returns a span of whole seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Span(seconds.saturating_mul(1000))
    }

    /// Returns the span in the standard library's type.
    #[must_use]
    pub fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl From<Span> for String {
    fn from(span: Span) -> String {
        span.to_string()
    }
}

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("\"{text}\" is not a duration: write a number and ms, s, m, h or d, like 30s")
        };
        let trimmed = text.trim();
        let at = trimmed.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, suffix) = trimmed.split_at(at);
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let (_, unit) =
            SPAN_UNITS.iter().find(|(name, _)| *name == suffix.trim()).ok_or_else(wrong)?;
        number
            .checked_mul(*unit)
            .map(Span)
            .ok_or_else(|| format!("duration \"{text}\" is too long"))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0s");
        }
        for (name, unit) in SPAN_UNITS {
            if self.0.is_multiple_of(unit) {
                return write!(f, "{}{name}", self.0 / unit);
            }
        }
        write!(f, "{}ms", self.0)
    }
}

/// Seconds since 1970-01-01 UTC by this machine's clock, which may jump (see `ProvenClock` in the daemon).
#[must_use]
pub fn unix_seconds_now() -> u64 {
    SystemClock.unix_seconds()
}

/// Formats seconds since 1970 like `2026-11-21 10:15:37 UTC`. Dates past the year 9999 print as
/// seconds.
#[must_use]
pub fn utc(unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400;
    let second = unix_seconds % 86_400;
    if days > 2_932_896 {
        return format!("{unix_seconds} s after 1970");
    }
    // Civil-from-days over eras of 400 years that begin on 1 March. Source: Howard Hinnant,
    // "chrono-Compatible Low-Level Date Algorithms".
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153; // 0 is March
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (second / 3600, second % 3600 / 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{:02} UTC", second % 60)
}

/// Longest name of a volume or pool, in bytes. Source: Linux device-mapper names and DNS labels may
/// be this long.
pub const NAME_BYTES_MAX: usize = 63;

/// Checks whether `name` can name a volume or a pool.
///
/// # Errors
/// A sentence that names the allowed characters.
pub fn check_name(what: &str, name: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_dots = name == "." || name == "..";
    if name.is_empty() || name.len() > NAME_BYTES_MAX || is_dots || !name.chars().all(is_allowed) {
        let shown: String = name.chars().take(80).collect();
        return Err(format!(
            "{what} name {shown:?} is not allowed: 1 to {NAME_BYTES_MAX} characters of A-Z a-z 0-9 . _ -"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_as_binary_multiples() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("1K", 1024),
            ("64KiB", 65_536),
            ("512MiB", 512 << 20),
            ("100G", 100 << 30),
            (" 100 g ", 100 << 30),
            ("1.5T", 3 << 39),
            ("1P", 1 << 50),
        ] {
            assert_eq!(text.parse::<ByteSize>(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_refused_with_the_expected_form() {
        for text in ["", "G", "-1G", "1X", "1GG", "1..5G", ".5G", "5.", "1e9", "١G", "99999999999E"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert!("1KB".parse::<ByteSize>().unwrap_err().contains("ambiguous"));
        assert!("16E".parse::<ByteSize>().unwrap_err().contains("too large"));
        assert!("0.3K".parse::<ByteSize>().unwrap_err().contains("whole number"));
        assert!("340282366920938463463374607431768211456".parse::<ByteSize>().is_err());
    }

    #[test]
    fn printed_quantities_parse_back() {
        for bytes in [0, 1, 1000, 1024, 4096 + 512, 1 << 30, 3 << 39, u64::MAX] {
            let size = ByteSize(bytes);
            assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
        }
        for text in ["0s", "1ms", "1500ms", "30s", "5m", "2h", "7d"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        for text in ["", "30", "s", "1.5s", "-3s", "3 weeks", "99999999999999999999d"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn rounded_sizes_have_three_digits() {
        assert_eq!(ByteSize(1023).rounded(), "1023 B");
        assert_eq!(ByteSize(3 << 29).rounded(), "1.50 GiB");
        assert_eq!(ByteSize(100 << 30).rounded(), "100 GiB");
    }

    #[test]
    fn moments_print_as_calendar_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_826_954), "2000-02-29 12:22:34 UTC");
        assert_eq!(utc(1_795_256_137), "2026-11-21 10:15:37 UTC");
        assert!(utc(u64::MAX).contains("after 1970"));
    }

    #[test]
    fn names_are_short_and_plain() {
        for name in ["a", "db-1", "A.b_c", &"x".repeat(63)] {
            assert!(check_name("volume", name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a b", "a/b", "ü", "a\n", &"x".repeat(64)] {
            assert!(check_name("volume", name).is_err(), "{name}");
        }
    }
}
