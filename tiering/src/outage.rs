//! The latest failure of one kind of access to the object store, as a condition and for status.
//!
//! Invariants:
//! - The failure lasts from the first attempt that fails to the first that succeeds, and so does
//!   its condition.
//! - The text contains no secret: some stores are accessed with signatures in the URL's query, so
//!   queries are cut off.

use crate::answer::{Answer, one_line};
use block::conditions::Report;
use block::env::Clock;
use block::{ConditionKind, Conditions};
use parking_lot::Mutex;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum length of the text, in characters. Chosen by hand: a line or two of a terminal.
const TEXT_CHARS_MAX: usize = 400;

/// A current failure of access to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFailure {
    /// Error of the last attempt, without secrets.
    pub error: String,
    /// Time since the first failed attempt.
    pub lasts: Duration,
    /// Time since the last failed attempt.
    pub age: Duration,
}

#[derive(Debug)]
struct Failing {
    error: String,
    began: Instant,
    last: Instant,
}

/// A kind of access to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Uploads of segments.
    Upload,
    /// Reads of frames.
    Read,
    /// Writes of the metadata database.
    Metadata,
}

impl Way {
    /// Returns the subject of its conditions.
    const fn subject(self) -> &'static str {
        match self {
            Way::Upload => "upload",
            Way::Read => "read",
            Way::Metadata => "metadata",
        }
    }

    fn report(self, error: &str) -> Report {
        let remedy = "check the store, the network and the credentials";
        match self {
            Way::Upload => Report::new(
                format!("could not upload to the store, trying again: {error}"),
                "writes go on until the log is full",
                remedy,
            ),
            Way::Read => Report::new(
                format!("the object store does not answer; reads from it wait: {error}"),
                "a read of data that is in no cache fails after two minutes",
                remedy,
            ),
            Way::Metadata => Report::new(
                format!("could not write the metadata to the store, trying again: {error}"),
                "nothing is destaged, and writes go on until the log is full",
                remedy,
            ),
        }
    }

    fn full_report(self, error: &str) -> Report {
        let what = match self {
            Way::Metadata => "the metadata",
            Way::Upload | Way::Read => "segments",
        };
        Report::new(
            format!("the store is full, and takes no more of {what}: {error}"),
            "writes go on until the log is full, and then wait",
            "make room in the store or enlarge it; spindle then continues automatically",
        )
    }
}

/// Tracker of failures; see the module.
#[derive(Debug)]
pub(crate) struct Outage {
    way: Way,
    conditions: Conditions,
    clock: Arc<dyn Clock>,
    failing: Mutex<Option<Failing>>,
}

impl Outage {
    pub(crate) fn new(way: Way, conditions: Conditions, clock: Arc<dyn Clock>) -> Outage {
        Outage { way, conditions, clock, failing: Mutex::default() }
    }

    /// Records a failed attempt.
    pub(crate) fn note(&self, error: &(dyn Error + 'static)) {
        let now = self.clock.now();
        let (text, is_full) = (public_text(error), is_store_full(error));
        // Hold the lock, so that a concurrent success does not come between the failure and its
        // condition.
        let mut failing = self.failing.lock();
        let began = failing.as_ref().map_or(now, |failing| failing.began);
        let (full, away) = match is_full {
            true => (Some(self.way.full_report(&text)), None),
            false => (None, Some(self.way.report(&text))),
        };
        *failing = Some(Failing { error: text, began, last: now });
        let subject = self.way.subject();
        self.conditions.set(ConditionKind::StoreFull, subject, full);
        self.conditions.set(ConditionKind::StoreUnavailable, subject, away);
    }

    /// Records the outcome of an attempt. An answer that refuses the request is not a failure.
    pub(crate) fn note_outcome<T>(&self, outcome: &object_store::Result<T>) {
        match outcome {
            Err(error) if !crate::answer::is_answer(error) => self.note(error),
            _ => self.clear(),
        }
    }

    /// Records a successful attempt.
    pub(crate) fn clear(&self) {
        let mut failing = self.failing.lock();
        if failing.take().is_some() {
            self.conditions.clear(ConditionKind::StoreFull, self.way.subject());
            self.conditions.clear(ConditionKind::StoreUnavailable, self.way.subject());
        }
    }

    /// Returns the current failure, if any.
    pub(crate) fn status(&self) -> Option<StoreFailure> {
        let (failing, now) = (self.failing.lock(), self.clock.now());
        failing.as_ref().map(|failing| StoreFailure {
            error: failing.error.clone(),
            lasts: now.duration_since(failing.began),
            age: now.duration_since(failing.last),
        })
    }
}

/// Returns the chain of causes in one line, without the queries of URLs.
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
    let advice = Answer::find(&text).map(|answer| format!("; {}", answer.advice()));
    let advice = advice.unwrap_or_default();
    let line = one_line(&text);
    let words: Vec<&str> = line.split_whitespace().map(without_query).collect();
    let length_max = TEXT_CHARS_MAX.saturating_sub(advice.chars().count());
    let said: String = words.join(" ").chars().take(length_max).collect();
    said + &advice
}

/// Messages by which stores report that they have no space left. Sources: `errno(3)` as the
/// standard library words it; the codes of MinIO, Ceph and SeaweedFS; HTTP status 507 (RFC 4918).
const FULL_WORDS: [&str; 7] = [
    "No space left on device",
    "Disk quota exceeded",
    "XMinioStorageFull",
    "QuotaExceeded",
    "InsufficientStorage",
    "Insufficient Storage",
    "InsufficientCapacity",
];

/// Returns whether the store refused because it has no space left.
#[must_use]
pub fn is_store_full(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        if matches!(kind, Some(StorageFull | QuotaExceeded)) {
            return true;
        }
        next = error.source();
        if next.is_none() {
            let text = error.to_string();
            return FULL_WORDS.iter().any(|word| text.contains(word));
        }
    }
    false
}

/// Returns a word up to the query of the URL or path in it. A question mark at the end of a word
/// does not begin a query.
fn without_query(word: &str) -> &str {
    match word.split_once('?') {
        Some((before, query)) if before.contains('/') && !query.is_empty() => before,
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    fn failed(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn a_failure_is_shown_from_the_first_attempt_that_fails_to_one_that_succeeds() {
        let conditions = Conditions::default();
        let clock = ManualClock::new();
        let outage = Outage::new(Way::Read, conditions.clone(), Arc::new(clock.clone()));
        assert_eq!(outage.status(), None);
        outage.note(&failed("connection refused"));
        clock.advance(Duration::from_secs(20));
        outage.note(&failed("access denied"));
        clock.advance(Duration::from_secs(5));
        let failure = outage.status().expect("it fails");
        assert!(failure.error.contains("access denied"), "{}", failure.error);
        assert!(!failure.error.contains("refused"), "{}", failure.error);
        assert_eq!((failure.lasts.as_secs(), failure.age.as_secs()), (25, 5));
        let listed = conditions.list();
        assert_eq!((listed.len(), listed[0].kind), (1, ConditionKind::StoreUnavailable));
        assert_eq!(listed[0].subject, "read");
        assert!(listed[0].report.what.contains("access denied"), "{listed:?}");
        outage.clear();
        outage.clear();
        assert_eq!((outage.status(), conditions.list()), (None, Vec::new()));
    }

    #[test]
    fn full_store_is_distinguished_from_an_unreachable_one() {
        let conditions = Conditions::default();
        let clock = Arc::new(ManualClock::new());
        let outage = Outage::new(Way::Upload, conditions.clone(), clock);
        let kinds = || conditions.list().iter().map(|one| one.kind).collect::<Vec<_>>();
        outage.note(&failed("connection refused"));
        assert_eq!(kinds(), [ConditionKind::StoreUnavailable]);
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = object_store::Error::Generic { store: "local", source: Box::new(full) };
        outage.note(&full);
        assert_eq!(kinds(), [ConditionKind::StoreFull]);
        for text in [
            "507: <Code>XMinioStorageFull</Code>",
            "Unable to copy: No space left on device (os error 28)",
        ] {
            assert!(is_store_full(&failed(text)), "{text}");
        }
        assert!(!is_store_full(&failed("503: SlowDown")));
        outage.clear();
        assert_eq!(kinds(), []);
    }

    #[test]
    fn answers_in_xml_are_shown_in_words_with_advice() {
        let body = "status code: 400 Bad Request: <?xml version=\"1.0\"?><Error><Code>ExpiredToken</Code>\
                    <Message>It&apos;s over.</Message><Token-0>HUNTER2</Token-0></Error>";
        let shown = public_text(&failed(&("x".repeat(60) + body)));
        assert!(shown.contains("ExpiredToken It's over.; the credentials have expired"), "{shown}");
        assert!(shown.ends_with("restart the daemon") && !shown.contains("HUNTER2"), "{shown}");
        let long = public_text(&failed(&("x".repeat(500) + body)));
        assert!(long.ends_with("restart the daemon") && long.len() <= TEXT_CHARS_MAX, "{long}");
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
