//! Wrong answers of an object store, like those of real ones. They are injected into any request,
//! for a moment or until the store is healed.
//!
//! Invariants:
//! - A seed chooses the passing faults, and the same request meets at most [`IN_A_ROW_MAX`] of them
//!   in a row, so that a client with bounded retries gets through.
//! - The store itself stays right: a fault changes an answer, never an object.

use crate::http::{Reply, Request, refusal};
use crate::seed::Random;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most passing faults that one request (method and key) meets in a row. Chosen by hand: fewer than any
/// retry loop of the program allows.
pub const IN_A_ROW_MAX: u32 = 2;
/// How long a request hangs before its connection ends, for a passing fault. Chosen by hand: long
/// enough to be seen, short enough for a test with hundreds of faults.
pub const HANG_PASSING: Duration = Duration::from_secs(2);

/// One wrong answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// 409 to a conditional PUT, which is not carried out.
    Conflict,
    /// 404 NoSuchKey to a GET or HEAD of an existing object.
    NoKey,
    /// 404 NoSuchBucket to any request.
    NoBucket,
    /// 403 AccessDenied to any request.
    Denied,
    /// 500 InternalError to any request.
    Internal,
    /// 500 InternalError to a GET of an object; all other requests, a HEAD of it included, are
    /// answered.
    Unsent,
    /// 503 SlowDown to any request.
    SlowDown,
    /// A listing without objects.
    EmptyList,
    /// The first page of a listing instead of a later one.
    RepeatedPage,
    /// Half of an object, then the end of the connection.
    Truncated,
    /// No answer.
    Hang,
    /// A change that is carried out and answered with 500.
    DoneButFailed,
}

impl Fault {
    /// All faults.
    pub const ALL: [Fault; 12] = [
        Fault::Conflict,
        Fault::NoKey,
        Fault::NoBucket,
        Fault::Denied,
        Fault::Internal,
        Fault::Unsent,
        Fault::SlowDown,
        Fault::EmptyList,
        Fault::RepeatedPage,
        Fault::Truncated,
        Fault::Hang,
        Fault::DoneButFailed,
    ];

    /// Whether a request of this kind can get this answer.
    fn suits(self, request: &Request) -> bool {
        let is_list = request.method == "GET" && request.key.is_empty();
        let is_change = matches!(request.method.as_str(), "PUT" | "POST" | "DELETE");
        match self {
            Fault::Conflict => {
                request.method == "PUT" && request.headers.contains_key("if-none-match")
            }
            Fault::NoKey => !is_list && !is_change,
            Fault::EmptyList => is_list,
            Fault::RepeatedPage => is_list && request.query.contains_key("continuation-token"),
            Fault::Truncated | Fault::Unsent => !is_list && request.method == "GET",
            Fault::DoneButFailed => is_change,
            Fault::NoBucket | Fault::Denied | Fault::Internal | Fault::SlowDown | Fault::Hang => {
                true
            }
        }
    }

    /// Returns the answer for a fault that needs nothing of the store.
    pub(super) fn refusal(self) -> Option<Reply> {
        let (status, code) = match self {
            Fault::Conflict => (409, "ConditionalRequestConflict"),
            Fault::NoKey => (404, "NoSuchKey"),
            Fault::NoBucket => (404, "NoSuchBucket"),
            Fault::Denied => (403, "AccessDenied"),
            Fault::Internal | Fault::Unsent | Fault::DoneButFailed => (500, "InternalError"),
            Fault::SlowDown => (503, "SlowDown"),
            Fault::EmptyList | Fault::RepeatedPage | Fault::Truncated | Fault::Hang => return None,
        };
        Some(refusal(status, code))
    }
}

/// The requests that meet a fault.
#[derive(Clone, Debug, Default)]
pub enum Faults {
    /// None.
    #[default]
    None,
    /// `percent` of all requests, each with a random fault.
    Passing {
        /// Chooses the requests and their faults.
        random: Random,
        /// How many requests of a hundred.
        percent: u64,
    },
    /// Every request that the fault suits and whose key, or listing prefix, contains `part`.
    Lasting {
        /// The fault.
        fault: Fault,
        /// Part of the key; empty for all.
        part: String,
    },
}

/// The faults of a bucket, and their effects so far.
#[derive(Debug, Default)]
pub(super) struct Injection {
    faults: Faults,
    /// How often each fault was injected.
    counts: BTreeMap<Fault, u64>,
    /// Passing faults in a row, by method and key.
    in_a_row: BTreeMap<(String, String), u32>,
    /// Increases with each change of the faults, which releases hanging requests.
    pub(super) generation: u64,
}

impl Injection {
    pub(super) fn set(&mut self, faults: Faults) {
        self.faults = faults;
        self.in_a_row.clear();
        self.generation += 1;
    }

    pub(super) fn counts(&self) -> BTreeMap<Fault, u64> {
        self.counts.clone()
    }

    /// Returns the longest time for which a request hangs.
    pub(super) fn hang_time(&self) -> Duration {
        match self.faults {
            Faults::Lasting { .. } => Duration::from_secs(600),
            Faults::None | Faults::Passing { .. } => HANG_PASSING,
        }
    }

    /// Chooses the fault for this request.
    pub(super) fn choose(&mut self, request: &Request) -> Option<Fault> {
        let prefix = request.query.get("prefix").map_or("", String::as_str);
        let name = if request.key.is_empty() { prefix } else { &request.key };
        let fault = match &mut self.faults {
            Faults::None => return None,
            Faults::Lasting { fault, part } => {
                (fault.suits(request) && name.contains(part.as_str())).then_some(*fault)
            }
            Faults::Passing { random, percent } => {
                let suiting: Vec<Fault> =
                    Fault::ALL.into_iter().filter(|fault| fault.suits(request)).collect();
                let fault = *random.pick(&suiting);
                let in_a_row =
                    self.in_a_row.entry((request.method.clone(), name.to_owned())).or_default();
                let is_met = random.chance(*percent) && *in_a_row < IN_A_ROW_MAX;
                *in_a_row = if is_met { *in_a_row + 1 } else { 0 };
                is_met.then_some(fault)
            }
        }?;
        *self.counts.entry(fault).or_default() += 1;
        Some(fault)
    }
}
