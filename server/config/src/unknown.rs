//! Reads `spindle.toml` and words its errors: file, line, problem, and the known key that was
//! probably meant.

use super::Settings;
use block::{Error, ErrorKind, Result};
use std::path::Path;

/// Parses the file's table and checks it against [`Settings`].
pub(super) fn parse(path: &Path, text: &str) -> Result<toml::Table> {
    let explain = |error: &toml::de::Error| {
        let line = error.span().map(|span| line_of(text, span.start));
        let place = match line {
            Some(line) => format!("{} line {line}", path.display()),
            None => path.display().to_string(),
        };
        Error::new(ErrorKind::Invalid, format!("{place}: {}", improve(error.message())))
    };
    toml::from_str::<Settings>(text).map_err(|error| explain(&error))?;
    text.parse::<toml::Table>().map_err(|error| explain(&error))
}

/// 1-based line of a byte.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}

/// Puts the nearest candidate before serde's "unknown field `x`, expected one of `a`, `b`".
fn improve(message: &str) -> String {
    let Some(rest) = message.strip_prefix("unknown field ") else { return message.to_owned() };
    let mut quoted = rest.split('`').skip(1).step_by(2);
    let Some(unknown) = quoted.next() else { return message.to_owned() };
    let known: Vec<&str> = quoted.collect();
    let nearest = known.iter().map(|key| (distance(unknown, key), *key)).min();
    let limit = (unknown.chars().count() / 3).max(2);
    match nearest {
        Some((distance, key)) if distance <= limit => {
            format!("unknown key `{unknown}`; did you mean `{key}`?")
        }
        _ => format!("unknown key `{unknown}`; the keys here are: {}", known.join(", ")),
    }
}

/// Levenshtein distance, in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (index, a) in a.chars().enumerate() {
        let mut diagonal = index;
        let mut left = index + 1;
        let mut next = vec![left];
        for (above, b) in row.iter().skip(1).zip(&b) {
            let replaced = diagonal + usize::from(a != *b);
            left = replaced.min(above + 1).min(left + 1);
            diagonal = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(Path::new("spindle.toml"), text).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest_known_one() {
        let message = error("name = \"x\"\n\n[log]\nsise = \"1G\"\n");
        assert_eq!(message, "spindle.toml line 4: unknown key `sise`; did you mean `size`?");
        let message = error("[destage]\nmaxage = \"3s\"\n");
        assert_eq!(message, "spindle.toml line 2: unknown key `maxage`; did you mean `max_age`?");
        let message = error("[ndb]\n");
        assert_eq!(message, "spindle.toml line 1: unknown key `ndb`; did you mean `nbd`?");
        let message = error("[[volumes]]\nname = \"a\"\nsize = \"1G\"\nreadonly = true\n");
        assert!(message.contains("line 4") && message.contains("`read_only`"), "{message}");
        let message = error("[encryption]\nbanana = 1\n");
        assert!(message.contains("the keys here are: cipher"), "{message}");
    }

    #[test]
    fn wrong_values_name_their_line() {
        let message = error("memory = \"1GB\"\n");
        assert!(message.contains("line 1") && message.contains("ambiguous"), "{message}");
        assert!(error("[log]\nio = \"fast\"\n").contains("line 2"));
        assert!(error("a = = 1\n").contains("line 1"));
        assert!(error("[destage]\nmax_age = 30\n").contains("line 2"));
    }

    #[test]
    fn distances() {
        for (a, b, expected) in [("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }
}
