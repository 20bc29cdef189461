//! Objects whose reads fail, and the verdict on each: whether this object is missing or unreadable
//! while the store answers for others.
//!
//! Invariants:
//! - Logic only: no clock and no I/O. The reader reports how an attempt failed, and whether another
//!   object was read at the same time.
//! - A verdict needs rounds. In each round this object failed and one read of another object
//!   succeeded at the first try. Therefore neither an outage nor a store that fails some requests
//!   at random looks like one bad object.
//! - A verdict lasts until the object is read. It applies only while others are read: in an outage
//!   it is suspended.
//! - The list is bounded. Beyond the bound a failing object is not judged, and its readers wait as
//!   in an outage.

use crate::segment::{SegmentId, StoredSegment};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Rounds, in the sum of their weights, before an object counts as unreadable. Chosen by hand: with
/// a store that fails every second request at random, six such rounds in a row occur once in 4,096
/// times, and only if the object's own reads keep failing meanwhile.
pub(super) const UNREADABLE_ROUNDS: u32 = 6;
/// Rounds in which the object was not found before it counts as missing. Chosen by hand: one, and
/// two confirmations.
pub(super) const MISSING_ROUNDS: u32 = 3;
/// Each such period that an attempt lasted adds one to the weight of its round, up to
/// [`WEIGHT_MAX`]. Chosen by hand: no request that a store refuses at random takes that long.
const WEIGHT_TIME: Duration = Duration::from_secs(10);
const WEIGHT_MAX: u32 = 3;
/// Rounds that are subtracted when a round finds that nothing else could be read either.
const SETBACK: u32 = 2;
/// For this long after a round that went against the object, its readers are answered without
/// another round. Chosen by hand.
const FRESH: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5_000 });
/// Failures further apart than this do not count as one lasting failure. Chosen by hand: a few
/// times as long as a reader waits.
const STALE: Duration = Duration::from_secs(600);
/// Maximum number of objects on the list. Chosen by hand: a few hundred KiB.
pub(super) const SUSPECTS_MAX: usize = 4096;

/// Kind of failure of an attempt to read an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// A failure that may be transient.
    Passing,
    /// The object was not found, and the request for its size confirms this.
    Missing,
}

/// A round of an object: an attempt to read it that failed, and what followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub cause: Cause,
    /// Duration of the attempt.
    pub lasted: Duration,
    /// A read of another object succeeded after it.
    pub are_others_read: bool,
}

/// State of an object on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The cause may be the store: wait.
    Undecided,
    /// The object does not exist.
    Missing,
    /// The object exists and cannot be read.
    Unreadable,
}

/// Shortest times for which an object must keep failing before it is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub missing: Duration,
    pub unreadable: Duration,
}

impl Patience {
    /// Returns the shortest time between two rounds of one object.
    fn spacing(&self) -> Duration {
        self.unreadable / UNREADABLE_ROUNDS
    }
}

#[derive(Clone, Debug)]
struct Suspect {
    segment: StoredSegment,
    /// First and latest failure.
    since: Instant,
    newest: Instant,
    /// Start of the current series of failures that did not find the object.
    missing_since: Option<Instant>,
    round_begun: Option<Instant>,
    /// The latest round in which another object was read.
    others_read: Option<Instant>,
    unreadable_rounds: u32,
    missing_rounds: u32,
    /// The latest judgement; it is shown to the user and retried from time to time.
    verdict: Verdict,
    tried_again: Instant,
}

/// The list; see the module.
#[derive(Debug)]
pub(super) struct Suspects {
    patience: Patience,
    list: HashMap<SegmentId, Suspect>,
}

impl Suspects {
    pub(super) fn new(patience: Patience) -> Suspects {
        Suspects { patience, list: HashMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn has(&self, id: &SegmentId) -> bool {
        self.list.contains_key(id)
    }

    /// Returns the ids of the objects on the list.
    pub(super) fn ids(&self) -> HashSet<SegmentId> {
        self.list.keys().copied().collect()
    }

    /// Returns the verdict on an object, regardless of whether others are read now.
    pub(super) fn judged(&self, id: &SegmentId) -> Verdict {
        self.list.get(id).map_or(Verdict::Undecided, |suspect| suspect.verdict)
    }

    /// Registers a failed attempt. If it returns true, the reader must find out whether other
    /// objects can be read, and report the outcome to [`Suspects::end_round`].
    pub(super) fn begin_round(&mut self, segment: &StoredSegment, now: Instant) -> bool {
        let spacing = self.patience.spacing();
        if !self.make_room(&segment.info.id) {
            return false;
        }
        let fresh = Suspect {
            segment: segment.clone(),
            since: now,
            newest: now,
            missing_since: None,
            round_begun: None,
            others_read: None,
            unreadable_rounds: 0,
            missing_rounds: 0,
            verdict: Verdict::Undecided,
            tried_again: now,
        };
        let suspect = self.list.entry(segment.info.id).or_insert_with(|| fresh.clone());
        if now - suspect.newest > STALE && suspect.verdict == Verdict::Undecided {
            *suspect = fresh;
        }
        suspect.newest = now;
        let is_due = suspect.round_begun.is_none_or(|begun| now - begun >= spacing);
        if is_due {
            suspect.round_begun = Some(now);
        }
        is_due
    }

    /// Judges an object after a round. Returns the verdict for waiting readers, and whether it is new.
    pub(super) fn end_round(
        &mut self,
        id: &SegmentId,
        now: Instant,
        round: Round,
    ) -> (Verdict, bool) {
        let Round { cause, lasted, are_others_read } = round;
        let patience = self.patience;
        let Some(suspect) = self.list.get_mut(id) else { return (Verdict::Undecided, false) };
        if !are_others_read {
            suspect.unreadable_rounds = suspect.unreadable_rounds.saturating_sub(SETBACK);
            suspect.missing_rounds = suspect.missing_rounds.saturating_sub(SETBACK);
            suspect.others_read = None;
            return (Verdict::Undecided, false);
        }
        suspect.others_read = Some(now);
        let verdict = match cause {
            Cause::Passing => {
                suspect.missing_since = None;
                suspect.missing_rounds = 0;
                let weight = 1 + (lasted.as_secs() / WEIGHT_TIME.as_secs()).min(2) as u32;
                let rounds = suspect.unreadable_rounds + weight.min(WEIGHT_MAX);
                suspect.unreadable_rounds = rounds.min(UNREADABLE_ROUNDS);
                let is_long = now - suspect.since >= patience.unreadable;
                if is_long && rounds >= UNREADABLE_ROUNDS {
                    Verdict::Unreadable
                } else {
                    Verdict::Undecided
                }
            }
            Cause::Missing => {
                let since = *suspect.missing_since.get_or_insert(now);
                suspect.missing_rounds = (suspect.missing_rounds + 1).min(MISSING_ROUNDS);
                let is_long = now - since >= patience.missing;
                match is_long && suspect.missing_rounds >= MISSING_ROUNDS {
                    true => Verdict::Missing,
                    false => Verdict::Undecided,
                }
            }
        };
        let is_new = verdict != Verdict::Undecided && verdict != suspect.verdict;
        if verdict != Verdict::Undecided {
            suspect.verdict = verdict;
        }
        (verdict, is_new)
    }

    /// Makes the next reader try the object, which may have changed.
    pub(super) fn set_stale(&mut self, id: &SegmentId) {
        if let Some(suspect) = self.list.get_mut(id) {
            suspect.others_read = None;
        }
    }

    /// Makes the next reader of every object try it.
    pub(super) fn set_all_stale(&mut self) {
        for suspect in self.list.values_mut() {
            suspect.others_read = None;
        }
    }

    /// Returns the verdict for a reader that takes part in no round, while the evidence of the last
    /// round is fresh, and whether other objects are known to be readable.
    pub(super) fn verdict(&self, id: &SegmentId, now: Instant) -> (Verdict, bool) {
        let Some(suspect) = self.list.get(id) else { return (Verdict::Undecided, false) };
        let is_fresh = suspect.others_read.is_some_and(|at| now - at <= FRESH);
        match is_fresh {
            true => (suspect.verdict, true),
            false => (Verdict::Undecided, false),
        }
    }

    /// Removes an object from the list because it was read or is no longer wanted. Returns its last
    /// verdict.
    pub(super) fn clear(&mut self, id: &SegmentId) -> Verdict {
        self.list.remove(id).map_or(Verdict::Undecided, |suspect| suspect.verdict)
    }

    /// Returns at most `count_max` judged objects that were not retried within `pause`, least
    /// recently tried first, and marks them as tried now.
    pub(super) fn take_due(
        &mut self,
        now: Instant,
        pause: Duration,
        count_max: usize,
    ) -> Vec<StoredSegment> {
        let is_due = |suspect: &&mut Suspect| {
            suspect.verdict != Verdict::Undecided && now - suspect.tried_again >= pause
        };
        let mut due: Vec<&mut Suspect> = self.list.values_mut().filter(is_due).collect();
        due.sort_by_key(|suspect| (suspect.tried_again, suspect.segment.info.number.0));
        due.truncate(count_max);
        let take = |suspect: &mut Suspect| {
            suspect.tried_again = now;
            suspect.segment.clone()
        };
        due.into_iter().map(take).collect()
    }

    /// Makes room for an object. Returns false if the list is full of judged objects.
    fn make_room(&mut self, id: &SegmentId) -> bool {
        if self.list.len() < SUSPECTS_MAX || self.list.contains_key(id) {
            return true;
        }
        let undecided = self.list.values().filter(|one| one.verdict == Verdict::Undecided);
        let oldest = undecided.min_by_key(|one| one.newest).map(|one| one.segment.info.id);
        oldest.is_some_and(|id| self.list.remove(&id).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyId;
    use crate::segment::{SegmentInfo, SegmentNumber};
    use crate::testing::{Rng, seeds};
    use block::Epoch;
    use block::env::{Clock, ManualClock};

    const PATIENCE: Patience =
        Patience { missing: Duration::from_secs(5), unreadable: Duration::from_secs(10) };

    fn info(number: u64) -> SegmentInfo {
        SegmentInfo {
            number: SegmentNumber(number),
            epoch: Epoch(1),
            id: u128::from(number).to_be_bytes(),
            algorithm: block::seal::Algorithm::default(),
            key: KeyId::POOL,
            object_bytes: 1000,
            frame_count: 1,
        }
    }

    /// Simulates the attempts of a reader that doubles its pause. Returns the time of the first
    /// verdict, and the verdict.
    fn judge(
        seconds: u64,
        mut attempt: impl FnMut(&mut Suspects, Duration) -> Option<(Cause, Duration, bool)>,
    ) -> Option<(Duration, Verdict)> {
        let (mut suspects, begin, one) =
            (Suspects::new(PATIENCE), ManualClock::new().now(), info(1));
        let (mut at, mut pause) = (Duration::ZERO, Duration::from_millis(50));
        while at < Duration::from_secs(seconds) {
            match attempt(&mut suspects, at) {
                None => drop(suspects.clear(&one.id)),
                Some((cause, lasted, are_others_read)) => {
                    at += lasted;
                    let now = begin + at;
                    if suspects.begin_round(&one.into(), now) {
                        let round = Round { cause, lasted, are_others_read };
                        let (verdict, _) = suspects.end_round(&one.id, now, round);
                        if verdict != Verdict::Undecided {
                            return Some((at, verdict));
                        }
                    }
                }
            }
            at += pause;
            pause = (pause * 2).min(Duration::from_secs(3));
        }
        None
    }

    #[tokio::test]
    async fn one_object_that_fails_while_others_are_read_is_judged_within_bounds() {
        let quick = Duration::from_millis(5);
        let failed = judge(100, |_, _| Some((Cause::Passing, quick, true)));
        let (at, verdict) = failed.expect("it is judged");
        assert_eq!(verdict, Verdict::Unreadable);
        assert!(at >= PATIENCE.unreadable && at < Duration::from_secs(20), "{at:?}");
        let (at, verdict) = judge(100, |_, _| Some((Cause::Missing, quick, true))).unwrap();
        assert_eq!(verdict, Verdict::Missing);
        assert!(at >= PATIENCE.missing && at < Duration::from_secs(10), "{at:?}");
        // An object that hangs is judged before its readers give up.
        let hang = Duration::from_secs(30);
        let (at, _) = judge(200, |_, _| Some((Cause::Passing, hang, true))).unwrap();
        assert!(at < Duration::from_secs(100), "{at:?}");
        // An outage is not attributed to the object, however long it lasts; nor is a 404 during
        // one.
        for cause in [Cause::Passing, Cause::Missing] {
            assert_eq!(judge(3600, |_, _| Some((cause, quick, false))), None);
        }
    }

    #[tokio::test]
    async fn randomly_failing_store_is_not_mistaken_for_bad_objects() {
        let (mut judged, mut run_count) = (0, 0);
        for seed in seeds(200) {
            let mut rng = Rng::new(seed);
            for percent in [10, 30, 50, 70, 90] {
                run_count += 1;
                let found = judge(100, |_, _| {
                    let fails = rng.below(100) < percent;
                    let quick = Duration::from_millis(5);
                    fails.then(|| (Cause::Passing, quick, rng.below(100) >= percent))
                });
                judged += u64::from(found.is_some());
            }
        }
        assert!(judged * 500 <= run_count, "{judged} of {run_count}");
    }

    #[tokio::test]
    async fn a_verdict_is_suspended_in_an_outage_and_ends_when_the_object_is_read() {
        let (mut suspects, one) = (Suspects::new(PATIENCE), info(1));
        let round = Round { cause: Cause::Passing, lasted: Duration::ZERO, are_others_read: true };
        let mut now = ManualClock::new().now();
        for _ in 0..8 {
            now += Duration::from_secs(2);
            assert!(suspects.begin_round(&one.into(), now));
            suspects.end_round(&one.id, now, round);
        }
        assert_eq!(suspects.verdict(&one.id, now), (Verdict::Unreadable, true));
        assert!(!suspects.begin_round(&one.into(), now), "two rounds have their distance");
        now += Duration::from_secs(2);
        assert!(suspects.begin_round(&one.into(), now));
        let round = Round { are_others_read: false, ..round };
        assert_eq!(suspects.end_round(&one.id, now, round), (Verdict::Undecided, false));
        assert_eq!(suspects.verdict(&one.id, now), (Verdict::Undecided, false));
        assert_eq!(suspects.judged(&one.id), Verdict::Unreadable);
        let mut due = || suspects.take_due(now, Duration::from_secs(1), 9);
        let infos: Vec<SegmentInfo> = due().iter().map(|segment| segment.info).collect();
        assert_eq!(infos, [one]);
        assert!(due().is_empty());
        assert_eq!(suspects.clear(&one.id), Verdict::Unreadable);
        assert!(suspects.is_empty() && !suspects.has(&one.id));
    }

    #[tokio::test]
    async fn the_list_is_bounded() {
        let mut suspects = Suspects::new(PATIENCE);
        let now = ManualClock::new().now();
        for number in 0..SUSPECTS_MAX as u64 + 100 {
            assert!(
                suspects.begin_round(&info(number).into(), now + Duration::from_millis(number))
            );
        }
        assert_eq!(suspects.list.len(), SUSPECTS_MAX);
        assert!(!suspects.has(&info(0).id), "the oldest one has gone");
    }
}
