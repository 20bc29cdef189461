//! Schedules of snapshots: when one is due, and which earlier ones are kept. Pure: times in, times out.
//!
//! Invariants:
//! - All times are UTC, in seconds since the Unix epoch: no hour is missing or comes twice.
//! - In each hour, day, week and month the newest snapshot counts, for as many of them back as the schedule keeps. The
//!   newest snapshot of all is always kept. The newest one is the one made last: if the clock was put back, an hour
//!   that comes again is another hour.

use block::quantities::utc;
use block::{Error, ErrorKind, Result};
use chrono::{DateTime, Datelike, Utc};
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use serde::{Deserialize, Serialize};

/// Most snapshots that a schedule keeps of each kind. Chosen by hand: a year of hours is beyond the limit of a volume.
pub const KEPT_MAX: u32 = 1000;

/// Longest time expression, in bytes. Chosen by hand: ten times any that people write.
const CRON_BYTES_MAX: usize = 256;
/// Seconds by which a stored time may be ahead of the clock. Beyond that the clock was wrong at the time, and the
/// stored time is ignored.
pub const AHEAD_MAX: u64 = 300;

/// Number of snapshots kept: the newest one of each of the last hours, days, weeks (from Monday on) and months.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Keep {
    pub hourly: u32,
    pub daily: u32,
    pub weekly: u32,
    pub monthly: u32,
}

impl Default for Keep {
    fn default() -> Self {
        Keep { hourly: 24, daily: 7, weekly: 4, monthly: 12 }
    }
}

/// The times at which snapshots of a volume are made automatically.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Minute, hour, day of the month, month and day of the week, as in cron; or `@hourly` and the like.
    pub cron: String,
    /// The rule by which snapshots of this schedule are kept.
    pub keep: Keep,
    /// Start of the schedule: nothing is due before it.
    pub since: u64,
}

impl Schedule {
    /// Returns a schedule that begins at `since`.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub fn new(cron: &str, keep: Keep, since: u64) -> Result<Schedule> {
        let schedule = Schedule { cron: cron.trim().to_owned(), keep, since };
        let wrong = |what: String| Error::new(ErrorKind::Invalid, format!("read schedule: {what}"));
        if cron.len() > CRON_BYTES_MAX {
            return Err(wrong(format!("the time has more than {CRON_BYTES_MAX} characters")));
        }
        let counts = [keep.hourly, keep.daily, keep.weekly, keep.monthly];
        if counts.iter().any(|count| *count > KEPT_MAX) {
            return Err(wrong(format!("at most {KEPT_MAX} of each kind are kept")));
        }
        if counts.iter().all(|count| *count == 0) {
            return Err(wrong("keep at least one of a kind".to_owned()));
        }
        if schedule.next_after(since)?.is_none() {
            return Err(wrong(format!("{cron:?} never comes")));
        }
        Ok(schedule)
    }

    fn parsed(&self) -> Result<Cron> {
        let parser =
            CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        parser.parse(&self.cron).map_err(|cause| {
            let what = format!(
                "read schedule {:?}: {cause}; write minute, hour, day of the month, month and day of the week, like \
                 \"0 * * * *\", or @hourly, @daily, @weekly, @monthly",
                self.cron
            );
            Error::new(ErrorKind::Invalid, what)
        })
    }

    /// The next time after `now`.
    ///
    /// # Errors
    /// `Invalid` for text that is not a schedule.
    pub fn next_after(&self, now: u64) -> Result<Option<u64>> {
        let cron = self.parsed()?;
        let next = time(now).and_then(|now| cron.find_next_occurrence(&now, false).ok());
        Ok(next.and_then(seconds))
    }

    /// The last time up to `now`, if it is later than the beginning of the schedule.
    ///
    /// # Errors
    /// `Invalid` for text that is not a schedule.
    pub fn last_before(&self, now: u64) -> Result<Option<u64>> {
        let cron = self.parsed()?;
        let last = time(now).and_then(|now| cron.find_previous_occurrence(&now, true).ok());
        let is_ahead = self.since > now.saturating_add(AHEAD_MAX);
        Ok(last.and_then(seconds).filter(|last| *last > self.since || is_ahead))
    }
}

fn time(seconds: u64) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp(i64::try_from(seconds).ok()?, 0)
}

fn seconds(time: DateTime<Utc>) -> Option<u64> {
    u64::try_from(time.timestamp()).ok()
}

/// The name of the snapshot that is due at a time: `auto-20261122-2015`.
#[must_use]
pub fn name_at(due: u64) -> String {
    let digits: String = utc(due).chars().filter(char::is_ascii_digit).collect();
    let (day, rest) = digits.split_at(digits.len().min(8));
    format!("auto-{day}-{}", rest.get(..4).unwrap_or(rest))
}

/// For each of these snapshots the reason why it is kept, or `None` if it goes. `times` lists them in the order in
/// which they were made, with the clock's time at that moment.
#[must_use]
pub fn kept(times: &[u64], keep: Keep) -> Vec<Option<&'static str>> {
    let mut why: Vec<Option<&'static str>> = vec![None; times.len()];
    if let Some(newest) = why.last_mut() {
        *newest = Some("newest");
    }
    let month = |seconds: u64| {
        time(seconds)
            .map_or(0, |at| u64::from(at.year().unsigned_abs()) * 12 + u64::from(at.month0()))
    };
    let week = |seconds: u64| (seconds / 86_400 + 3) / 7; // 1970 began on a Thursday
    type Bucket<'a> = (&'static str, u32, &'a dyn Fn(u64) -> u64);
    let buckets: [Bucket<'_>; 4] = [
        ("hourly", keep.hourly, &|seconds| seconds / 3600),
        ("daily", keep.daily, &|seconds| seconds / 86_400),
        ("weekly", keep.weekly, &week),
        ("monthly", keep.monthly, &month),
    ];
    for (name, count, bucket) in buckets {
        let (mut left, mut last) = (count, None);
        for (time, why) in times.iter().zip(&mut why).rev() {
            let its = Some(bucket(*time));
            if left > 0 && its != last {
                why.get_or_insert(name);
                (left, last) = (left - 1, its);
            }
        }
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sunday, 22 November 2026, 20:15:30 UTC.
    const NOW: u64 = 1_795_378_530;

    fn schedule(cron: &str) -> Schedule {
        Schedule::new(cron, Keep::default(), NOW - 86_400).unwrap()
    }

    #[test]
    fn schedule_fires_when_cron_would() {
        assert_eq!(utc(NOW), "2026-11-22 20:15:30 UTC");
        for (cron, last, next) in [
            ("0 * * * *", "2026-11-22 20:00:00 UTC", "2026-11-22 21:00:00 UTC"),
            ("*/5 * * * *", "2026-11-22 20:15:00 UTC", "2026-11-22 20:20:00 UTC"),
            ("30 3 * * *", "2026-11-22 03:30:00 UTC", "2026-11-23 03:30:00 UTC"),
            ("@hourly", "2026-11-22 20:00:00 UTC", "2026-11-22 21:00:00 UTC"),
            ("15 20 * * sun", "2026-11-22 20:15:00 UTC", "2026-11-29 20:15:00 UTC"),
        ] {
            let schedule = schedule(cron);
            assert_eq!(utc(schedule.last_before(NOW).unwrap().unwrap()), last, "{cron}");
            assert_eq!(utc(schedule.next_after(NOW).unwrap().unwrap()), next, "{cron}");
        }
        let monthly = schedule("0 0 1 * *");
        assert_eq!(monthly.last_before(NOW).unwrap(), None, "that was before it began");
        assert_eq!(utc(monthly.next_after(NOW).unwrap().unwrap()), "2026-12-01 00:00:00 UTC");
    }

    #[test]
    fn malformed_schedules_are_refused_with_an_example() {
        for wrong in
            ["", "hourly", "* * * *", "0 0 0 * * *", "60 * * * *", "0 0 31 2 *", "a b c d e"]
        {
            let error = Schedule::new(wrong, Keep::default(), NOW).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{wrong}");
        }
        let nothing = Keep { hourly: 0, daily: 0, weekly: 0, monthly: 0 };
        assert!(Schedule::new("@daily", nothing, NOW).is_err());
        assert!(Schedule::new("@daily", Keep { daily: 1001, ..nothing }, NOW).is_err());
        assert!(Schedule::new("@daily", Keep { daily: 1000, ..nothing }, NOW).is_ok());
    }

    #[test]
    fn a_clock_that_was_ahead_ends_nothing() {
        let ahead = Schedule { since: NOW + 1_000_000, ..schedule("@hourly") };
        assert!(ahead.last_before(NOW).unwrap().is_some());
        let long = format!("{} * * * *", vec!["0"; 200].join(","));
        assert!(Schedule::new(&long, Keep::default(), NOW).is_err());
    }

    #[test]
    fn names_say_when_they_were_due() {
        assert_eq!(name_at(NOW), "auto-20261122-2015");
        crate::names::check_name(&name_at(NOW)).unwrap();
    }

    #[test]
    fn the_newest_of_each_hour_day_week_and_month_is_kept() {
        let keep = Keep { hourly: 3, daily: 2, weekly: 2, monthly: 2 };
        // Every half hour for seventy days, the oldest first.
        let times: Vec<u64> = (0..70 * 48).map(|half| NOW - (70 * 48 - 1 - half) * 1800).collect();
        let found = kept(&times, keep);
        let kept_at: Vec<(String, &str)> = times
            .iter()
            .zip(&found)
            .filter_map(|(at, why)| Some((utc(*at)[..16].to_owned(), (*why)?)))
            .collect();
        let want = [
            ("2026-10-31 23:45", "monthly"),
            ("2026-11-15 23:45", "weekly"),
            ("2026-11-21 23:45", "daily"),
            ("2026-11-22 18:45", "hourly"),
            ("2026-11-22 19:45", "hourly"),
            ("2026-11-22 20:15", "newest"),
        ];
        let want: Vec<(String, &str)> =
            want.iter().map(|(at, why)| ((*at).to_owned(), *why)).collect();
        assert_eq!(kept_at, want);
        // Kept snapshots stay kept when the others have gone, until newer ones come.
        let left: Vec<u64> =
            times.iter().zip(&found).filter(|(_, why)| why.is_some()).map(|(at, _)| *at).collect();
        assert!(kept(&left, keep).iter().all(Option::is_some));
        assert_eq!(kept(&[], keep), []);
        let nothing = Keep { hourly: 0, daily: 0, weekly: 0, monthly: 0 };
        assert_eq!(kept(&[NOW - 1, NOW], nothing), [None, Some("newest")]);
    }

    #[test]
    fn after_a_jump_of_the_clock_the_last_ones_made_are_the_newest() {
        let keep = Keep { hourly: 3, daily: 0, weekly: 0, monthly: 0 };
        let hours = |from: u64| (0..5).map(move |hour| from + hour * 3600);
        for after in [NOW - 40 * 86_400, NOW + 40 * 86_400, NOW] {
            let times: Vec<u64> = hours(NOW).chain(hours(after)).collect();
            let kept: Vec<bool> = kept(&times, keep).iter().map(Option::is_some).collect();
            let want: Vec<bool> = (0..10).map(|index| index >= 7).collect();
            assert_eq!(kept, want);
        }
        // An hour that comes twice does not displace another one.
        let times = [NOW, NOW + 3600, NOW, NOW + 60];
        assert_eq!(kept(&times, keep), [Some("hourly"), Some("hourly"), None, Some("newest")]);
    }

    #[test]
    fn the_stored_form_stays_readable() {
        let golden = r#"{"cron":"@hourly","keep":{"hourly":24,"daily":7,"weekly":4,"monthly":12},"since":1700000000}"#;
        let schedule = Schedule::new("@hourly", Keep::default(), 1_700_000_000).unwrap();
        assert_eq!(serde_json::to_string(&schedule).unwrap(), golden);
        assert_eq!(serde_json::from_str::<Schedule>(golden).unwrap(), schedule);
    }
}
