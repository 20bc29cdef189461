//! Objects that the store does not delete while it answers otherwise. Each is retried at growing
//! intervals.
//!
//! Invariants:
//! - They delay nothing: a sweep that finds one continues with the rest.
//! - Conditions are raised for some of them, and end when the objects are gone. The others are only
//!   counted in these conditions, so that a bucket that deletes nothing does not fill the registry.

use crate::segment::{Placement, SegmentName};
use crate::segment_store::Leftover;
use block::conditions::Report;
use block::{ConditionKind, Conditions};
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
    placement: Option<Placement>,
    try_count: u32,
    pause: Duration,
    due: Instant,
    is_raised: bool,
}

/// The list of undeletable objects; see the module.
#[derive(Debug, Default)]
pub(crate) struct Undeletable(Mutex<BTreeMap<SegmentName, Refused>>);

impl Undeletable {
    /// Records that the store did not delete the segment, because of `why`, although it answers.
    pub(crate) fn note(
        &self,
        conditions: &Conditions,
        segment: &Leftover,
        why: &str,
        now: Instant,
    ) {
        let name = segment.name;
        let mut all = self.0.lock();
        let (count, raised_count) = (all.len(), all.values().filter(|one| one.is_raised).count());
        if count >= COUNT_MAX && !all.contains_key(&name) {
            return;
        }
        let refused = all.entry(name).or_insert_with(|| Refused {
            placement: segment.placement.clone(),
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
                count => format!(", nor {count} objects besides those that are named"),
            };
            let report = Report::new(
                format!("could not delete {name} from the store{beside}: {why}"),
                "its space stays in use",
                "check that the credentials and the bucket's policy allow deletion; spindle tries \
                 again at least every hour",
            );
            conditions.raise(ConditionKind::ObjectUndeletable, &name.to_string(), report);
        }
    }

    /// Removes a segment that is gone, or referenced again.
    pub(crate) fn forget(&self, conditions: &Conditions, name: &SegmentName) {
        let removed = self.0.lock().remove(name);
        if removed.is_some_and(|refused| refused.is_raised) {
            conditions.clear(ConditionKind::ObjectUndeletable, &name.to_string());
        }
    }

    /// Returns whether the object is on the list and retried separately.
    pub(crate) fn has(&self, name: &SegmentName) -> bool {
        self.0.lock().contains_key(name)
    }

    /// Returns some of the objects that are due for a retry.
    pub(crate) fn due(&self, count_max: usize, now: Instant) -> Vec<Leftover> {
        let all = self.0.lock();
        let due = all.iter().filter(|(_, refused)| refused.due <= now);
        let leftover = |(name, refused): (&SegmentName, &Refused)| Leftover {
            name: *name,
            placement: refused.placement.clone(),
        };
        due.map(leftover).take(count_max).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::SegmentNumber;
    use block::Epoch;
    use block::env::{Clock, ManualClock};

    fn leftover(number: u64) -> Leftover {
        let name = SegmentName { epoch: Epoch(1), number: SegmentNumber(number), id: [7; 16] };
        Leftover { name, placement: None }
    }

    #[test]
    fn tries_come_later_and_later_and_the_registry_is_not_filled() {
        let (all, conditions) = (Undeletable::default(), Conditions::default());
        let (segment, subject) = (leftover(0), leftover(0).name.to_string());
        let mut now = ManualClock::new().now();
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            all.note(&conditions, &segment, "denied", now);
            let pause = Duration::from_secs(minutes * 60);
            let is_raised = conditions.is_raised(ConditionKind::ObjectUndeletable, &subject);
            assert_eq!(is_raised, minutes > 1, "{minutes}");
            assert!(all.due(9, now + pause - Duration::from_millis(1)).is_empty(), "{minutes}");
            let due = all.due(9, now + pause);
            let due: Vec<SegmentName> = due.iter().map(|one| one.name).collect();
            assert_eq!(due, [segment.name], "{minutes}");
            now += pause;
        }
        assert!(conditions.is_raised(ConditionKind::ObjectUndeletable, &subject));
        let others = 1..COUNT_MAX as u64 + 10;
        for number in others.clone().chain(others) {
            all.note(&conditions, &leftover(number), "denied", now);
        }
        assert_eq!((all.count(), conditions.list().len()), (COUNT_MAX, RAISED_MAX));
        all.note(&conditions, &segment, "still denied", now);
        let found = conditions.list();
        let first = found.iter().find(|one| one.subject == subject).expect("it is raised");
        assert!(first.report.what.contains("nor 4088 objects"), "{}", first.report.what);
        all.forget(&conditions, &segment.name);
        assert!(!all.has(&segment.name) && conditions.list().len() == RAISED_MAX - 1);
    }
}
