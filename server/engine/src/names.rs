//! Rules for what people may call a volume, a snapshot or a pool, and for the length of records.

use block::{Error, ErrorKind, Result};

/// Most bytes of an encoded record. Chosen by hand: ten times the need of the longest name.
pub const RECORD_BYTES_MAX: usize = 4096;

/// A word of `spindle attach`, which no new volume may have as its name. A volume of this name from
/// an earlier program is attached as `POOL/list`.
const LIST: &str = "list";

/// Checks whether a new volume may have this name.
///
/// # Errors
/// Those of [`check_name`]; `Invalid` for a word of the command line.
pub fn check_free_name(name: &str) -> Result<()> {
    check_not_reserved(name)?;
    check_name(name)
}

/// Checks that a name is not a word of the command line.
///
/// # Errors
/// `Invalid` if it is one.
pub fn check_not_reserved(name: &str) -> Result<()> {
    if name == LIST {
        let what = "`spindle attach list` is a command, so no volume may be called list; choose \
                    another name";
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

/// Checks a name of a volume, a pool or an export: 1 to 63 letters, digits, `.`, `_` and `-`, not
/// starting with `.` or `-`, which makes it safe in URIs, paths and command lines.
///
/// # Errors
/// `Invalid` with the rule.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_good = (1..=63).contains(&name.len())
        && name.chars().all(is_plain)
        && !name.starts_with(['.', '-']);
    if is_good {
        return Ok(());
    }
    let what = format!(
        "check name {name:?}: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter, \
         digit or '_'"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_everywhere() {
        for name in ["db", "a.b_c-9", "_x", &"n".repeat(63)] {
            check_name(name).unwrap();
        }
        for name in ["", ".", "..", "-rf", "a/b", "a b", "é", "x\n", &"n".repeat(64)] {
            assert_eq!(check_name(name).unwrap_err().kind(), ErrorKind::Invalid, "{name:?}");
        }
    }
}
