//! The latest failure of one way to the object store, for people who ask how it stands.
//!
//! Invariants:
//! - It is there from the first attempt that fails to the first that succeeds.
//! - Its text holds no secret: some stores are asked with signatures in the URL's query, so queries
//!   are cut off.

use parking_lot::Mutex;
use std::error::Error;
use std::time::{Duration, Instant};

/// Longest text kept, in characters. Chosen by hand: a line or two of a terminal.
const TEXT_CHARS_MAX: usize = 400;

/// How a way to the store fails, while it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFailure {
    /// What the last attempt said, without secrets.
    pub error: String,
    /// Time since the first attempt that failed.
    pub lasts: Duration,
    /// Time since the last one.
    pub age: Duration,
}

#[derive(Debug)]
struct Failing {
    error: String,
    began: Instant,
    last: Instant,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outage(Mutex<Option<Failing>>);

impl Outage {
    /// An attempt failed. True when the one before had not.
    pub(crate) fn note(&self, error: &dyn Error) -> bool {
        let now = Instant::now();
        let error = public_text(error);
        let mut failing = self.0.lock();
        let began = failing.as_ref().map_or(now, |failing| failing.began);
        failing.replace(Failing { error, began, last: now }).is_none()
    }

    /// An attempt succeeded. True when the one before had not.
    pub(crate) fn clear(&self) -> bool {
        self.0.lock().take().is_some()
    }

    /// How it fails, while it does.
    pub(crate) fn status(&self) -> Option<StoreFailure> {
        let (failing, now) = (self.0.lock(), Instant::now());
        failing.as_ref().map(|failing| StoreFailure {
            error: failing.error.clone(),
            lasts: now.duration_since(failing.began),
            age: now.duration_since(failing.last),
        })
    }
}

/// The chain of causes in one line, without the queries of URLs.
pub(crate) fn public_text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let part = inner.to_string();
        // Many errors quote their source.
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = inner.source();
    }
    let words: Vec<&str> = text.split_whitespace().map(without_query).collect();
    words.join(" ").chars().take(TEXT_CHARS_MAX).collect()
}

/// A word up to the query of the URL or path in it. A question mark that ends a word is none.
fn without_query(word: &str) -> &str {
    match word.split_once('?') {
        Some((before, query)) if before.contains('/') && !query.is_empty() => before,
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn a_failure_is_shown_from_the_first_attempt_that_fails_to_one_that_succeeds() {
        let outage = Outage::default();
        assert_eq!(outage.status(), None);
        assert!(outage.note(&failed("connection refused")));
        assert!(!outage.note(&failed("access denied")));
        let failure = outage.status().expect("it fails");
        assert!(failure.error.contains("access denied"), "{}", failure.error);
        assert!(!failure.error.contains("refused") && failure.age <= failure.lasts);
        assert!(outage.clear());
        assert!(!outage.clear());
        assert_eq!(outage.status(), None);
    }

    #[test]
    fn signatures_in_urls_are_not_shown() {
        let text = "PUT https://account.example/disks/a?sv=2024&sig=SECRET in 1 s, and\n\
                    (/disks/a?sig=SECRET) or /disks/b?sig=SECRET failed; was it renewed?";
        let shown = public_text(&failed(text));
        assert!(!shown.contains("sv=2024") && shown.contains("https://account.example/disks/a in"));
        assert!(shown.ends_with("was it renewed?"), "{shown}");
        assert_eq!(shown.matches("SECRET").count(), 0, "{shown}");
        assert!(public_text(&failed(&"x".repeat(9000))).len() <= TEXT_CHARS_MAX);
    }
}
