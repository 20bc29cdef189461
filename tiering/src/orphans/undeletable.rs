//! Objects that the store does not delete while it answers otherwise. Each is retried at growing
//! intervals.
//!
//! Invariants:
//! - They delay nothing: a sweep that finds one continues with the rest.
//! - Conditions are raised for some of them, and end when the objects are gone. The others are only
//!   counted in these conditions, so that a bucket that deletes nothing does not fill the registry.

use block::conditions::Report;
use block::{ConditionKind, Conditions};
use object_store::path::Path;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Maximum number of remembered objects; further ones are left to the next epoch's sweep. Chosen by
/// hand: 400 KiB of names.
const COUNT_MAX: usize = 4096;
/// Maximum number of objects with a condition of their own. Chosen by hand: as many as a person
/// handles one by one.
const RAISED_MAX: usize = 8;
/// Tries after which a condition is raised. Chosen by hand: one may fail because the store is busy.
const TRIES_MIN: u32 = 2;
/// Pause before the second try; it doubles up to [`PAUSE_MAX`]. Chosen by hand: an overloaded store
/// recovers within a minute, and an operator who has changed a policy waits at most an hour.
const PAUSE_MIN: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct Refused {
    try_count: u32,
    pause: Duration,
    due: Instant,
    is_raised: bool,
}

/// The list of undeletable objects; see the module.
#[derive(Debug, Default)]
pub(super) struct Undeletable(Mutex<BTreeMap<Path, Refused>>);

impl Undeletable {
    /// Records that the store did not delete the object, because of `why`, although it answers.
    pub(super) fn note(&self, conditions: &Conditions, path: &Path, why: &str, now: Instant) {
        let mut all = self.0.lock();
        let (count, raised_count) = (all.len(), all.values().filter(|one| one.is_raised).count());
        if count >= COUNT_MAX && !all.contains_key(path) {
            return;
        }
        let refused = all.entry(path.clone()).or_insert(Refused {
            try_count: 0,
            pause: PAUSE_MIN / 2,
            due: now,
            is_raised: false,
        });
        refused.try_count = refused.try_count.saturating_add(1);
        refused.is_raised |= refused.try_count >= TRIES_MIN && raised_count < RAISED_MAX;
        refused.pause = (refused.pause * 2).min(PAUSE_MAX);
        refused.due = now + refused.pause;
        let is_raised = refused.is_raised;
        let others = all.len().saturating_sub(RAISED_MAX);
        drop(all);
        if is_raised {
            let beside = match others {
                0 => String::new(),
                count => format!(", nor {count} objects beside those that are named"),
            };
            let report = Report::new(
                format!("the store does not delete {path}{beside}: {why}"),
                "its space stays in use",
                "check that the credentials and the bucket's policy allow deleting; it is tried again at least every hour",
            );
            conditions.raise(ConditionKind::ObjectUndeletable, path.as_ref(), report);
        }
    }

    /// Removes an object that is gone, or referenced again.
    pub(super) fn forget(&self, conditions: &Conditions, path: &Path) {
        let removed = self.0.lock().remove(path);
        if removed.is_some_and(|refused| refused.is_raised) {
            conditions.clear(ConditionKind::ObjectUndeletable, path.as_ref());
        }
    }

    /// Returns whether the object is on the list and retried separately.
    pub(super) fn has(&self, path: &Path) -> bool {
        self.0.lock().contains_key(path)
    }

    /// Returns some of the objects that are due for a retry.
    pub(super) fn due(&self, count_max: usize, now: Instant) -> Vec<Path> {
        let all = self.0.lock();
        let due = all.iter().filter(|(_, refused)| refused.due <= now);
        due.map(|(path, _)| path.clone()).take(count_max).collect()
    }

    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// Makes all objects due, as if hours had passed.
    #[cfg(test)]
    pub(super) fn make_due(&self) {
        let now = Instant::now();
        self.0.lock().values_mut().for_each(|refused| refused.due = now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_come_later_and_later_and_the_registry_is_not_filled() {
        let (all, conditions) = (Undeletable::default(), Conditions::default());
        let path = Path::from("segments/a");
        let mut now = Instant::now();
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            all.note(&conditions, &path, "denied", now);
            let pause = Duration::from_secs(minutes * 60);
            let is_raised = conditions.is_raised(ConditionKind::ObjectUndeletable, "segments/a");
            assert_eq!(is_raised, minutes > 1, "{minutes}");
            assert!(all.due(9, now + pause - Duration::from_millis(1)).is_empty(), "{minutes}");
            assert_eq!(all.due(9, now + pause), std::slice::from_ref(&path), "{minutes}");
            now += pause;
        }
        assert!(conditions.is_raised(ConditionKind::ObjectUndeletable, "segments/a"));
        for number in (0..COUNT_MAX + 9).chain(0..COUNT_MAX + 9) {
            all.note(&conditions, &Path::from(format!("x/{number}")), "denied", now);
        }
        assert_eq!((all.count(), conditions.list().len()), (COUNT_MAX, RAISED_MAX));
        all.note(&conditions, &path, "still denied", now);
        let found = conditions.list();
        let first = found.iter().find(|one| one.subject == "segments/a").expect("it is raised");
        assert!(first.report.what.contains("nor 4088 objects"), "{}", first.report.what);
        all.forget(&conditions, &path);
        assert!(!all.has(&path) && conditions.list().len() == RAISED_MAX - 1);
    }
}
