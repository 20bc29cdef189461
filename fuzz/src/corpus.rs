//! Inputs from files: the golden bytes of the packages, and the inputs that once failed.
//!
//! Invariants:
//! - A file that cannot be read or parsed is a panic: a target never runs without its inputs.

use std::path::{Path, PathBuf};

/// Returns the root of the workspace.
#[must_use]
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("fuzz/ is in the workspace")
}

/// Reads a file whose path starts at the root of the workspace.
#[must_use]
pub fn text(path: &str) -> String {
    let path = workspace().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads bytes from annotated hexadecimal digits: `#` starts a comment, and a line in brackets is a
/// title.
#[must_use]
pub fn from_hex(text: &str) -> Vec<u8> {
    let lines = text.lines().filter(|line| !line.starts_with('['));
    let digits: Vec<u8> = lines
        .filter_map(|line| line.split('#').next())
        .flat_map(str::chars)
        .filter(|character| !character.is_whitespace())
        .map(|digit| u8::try_from(digit.to_digit(16).expect("a digit")).expect("below 16"))
        .collect();
    assert!(digits.len().is_multiple_of(2), "half a byte");
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Reads the golden file at this path of the workspace.
#[must_use]
pub fn golden(path: &str) -> Vec<u8> {
    from_hex(&text(path))
}

/// Reads the sealed documents of a golden file: each has a line for its body and one for its seal.
#[must_use]
pub fn documents(path: &str) -> Vec<Vec<u8>> {
    let text = text(path);
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    lines.chunks(2).map(|pair| pair.concat().into_bytes()).collect()
}

/// Returns the inputs that are kept for a target, with their files, in the order of their names.
#[must_use]
pub fn kept(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = workspace().join("fuzz/corpus").join(target);
    let Ok(entries) = std::fs::read_dir(&dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("a readable entry").path()).collect();
    paths.sort();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "hex"));
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a readable file");
        (path, from_hex(&text))
    };
    paths.into_iter().map(read).collect()
}

/// Writes `bytes` as hexadecimal digits, 48 bytes a line.
#[must_use]
pub fn to_hex(bytes: &[u8]) -> String {
    let line = |part: &[u8]| part.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    bytes.chunks(48).map(|part| line(part) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_are_read_as_they_are_written() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)), bytes);
        assert_eq!(from_hex("# head\n[part]\n0102 # two\n\nff"), [1, 2, 255]);
    }
}
