//! The numbers of a simulation: injected faults and events by kind.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Counts by name. Clones are handles to the same.
#[derive(Clone, Default)]
pub(crate) struct Counts(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Counts {
    pub(crate) fn add(&self, name: &'static str) {
        self.add_many(name, 1);
    }

    pub(crate) fn add_many(&self, name: &'static str, count: u64) {
        *self.0.lock().entry(name).or_default() += count;
    }

    pub(crate) fn take_in(&self, other: &Counts) {
        let other = other.0.lock().clone();
        other.into_iter().for_each(|(name, count)| self.add_many(name, count));
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = self.0.lock();
        let shown: Vec<String> =
            counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
        f.write_str(&shown.join(", "))
    }
}

/// The outcome of one run.
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    /// The broken promise.
    pub(crate) failure: Option<String>,
    pub(crate) trace: u64,
    pub(crate) simulated: Duration,
    pub(crate) counts: Counts,
}
