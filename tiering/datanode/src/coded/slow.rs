//! Stores that are slower than the others for a while are shown, even while reads of other stores hide it.
//!
//! Invariants:
//! - A store is slow by comparison with the others of the pool, or because others are asked first. Reads of all of them
//!   that become slower together are no reason.

use super::CodedSegments;
use super::member::Member;
use block::ConditionKind;
use block::conditions::Report;
use std::sync::Arc;
use std::time::Duration;

/// Time for which a store must have been slow. Chosen by hand: longer than a backup or a trim keeps a drive busy.
const SLOW_AFTER: Duration = Duration::from_secs(60);
/// How many times as long as that of most others its mean read must take. Chosen by hand.
const FACTOR: u32 = 4;
/// Mean below which a store is not slow, whatever the others do. Chosen by hand: two turns of a disk.
const MEAN_MIN: Duration = Duration::from_millis(10);
/// Other stores of which the mean must be known. Chosen by hand: with one, either could be the odd one.
const OTHERS_MIN: usize = 2;

impl CodedSegments {
    /// Shows the stores that have been slow for a while as conditions. To be called every few seconds.
    pub(super) fn show_slow(&self) {
        let members = self.in_list();
        for member in &members {
            let is_working = member.health().failure().is_none() && !member.is_forgotten();
            let why = match is_working {
                true => member.health().lateness().or_else(|| slower(member, &members)),
                false => None,
            };
            let slow_for = member.slow_for(why.is_some());
            let report = why.filter(|_| slow_for >= SLOW_AFTER).map(|why| {
                Report::new(
                    format!("the data store {} has been slow for {} s: {why}", member.name, slow_for.as_secs()),
                    "none while the others answer: reads are decoded from their fragments. With as many of them away as the \
                     scheme survives, each read waits for this one",
                    "find out what slows its drive (`smartctl -a`, the log of the kernel) or its network, or replace it with \
                     `spindle data replace`",
                )
            });
            self.conditions.set(ConditionKind::DataStoreSlow, &member.name, report);
        }
    }
}

/// Says how much slower the reads of a store are than those of most others, if they are by far.
fn slower(member: &Arc<Member>, members: &[Arc<Member>]) -> Option<String> {
    let own = member.health().mean()?;
    let others = members.iter().filter(|other| other.id != member.id);
    let mut means: Vec<Duration> = others.filter_map(|other| other.health().mean()).collect();
    means.sort_unstable();
    let median = *means.get(means.len() / 2)?;
    let is_slow = means.len() >= OTHERS_MIN && own >= MEAN_MIN && own >= median * FACTOR;
    is_slow.then(|| {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        format!("a read takes {:.1} ms, and {:.1} ms from most others", ms(own), ms(median))
    })
}
