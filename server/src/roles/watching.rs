//! Conditions about the members of a pool's log, while this node owns the pool.
//!
//! Invariant: a member that only reconnects, or is slow for a moment, raises nothing.

use super::Roles;
use block::conditions::Report;
use block::{ConditionKind, Conditions};
use control::manifest::{Configuration, Degraded, Member};
use engine::open_pool::OpenPool;
use ensemble::{MemberStatus, SILENCE_SHOWN};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use uuid::Uuid;

/// Pause between two looks at the members.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Looks after which a member that does not take part is a condition. Chosen by hand: a daemon that is
/// started again is back sooner.
const LOOKS: u32 = 5;
/// Looks after which a slow member is a condition. Chosen by hand.
const SLOW_LOOKS: u32 = 10;
/// Answers that come sooner are not slow. Chosen by hand: a disk that syncs, in the next city.
const SLOW_MIN: Duration = Duration::from_millis(20);
/// Factor between the times of a slow member and the fastest other one. Chosen by hand.
const SLOW_FACTOR: u32 = 8;
/// Subject of the condition that too few members answer.
const LOG: &str = "log";

/// Watches the members until `stop`.
pub(crate) async fn watch_members(
    roles: Arc<Roles>,
    open: Arc<OpenPool>,
    mut stop: watch::Receiver<bool>,
) {
    let mut away: BTreeMap<Uuid, u32> = BTreeMap::new();
    let mut shown: Vec<String> = Vec::new();
    let mut slow = SlowMembers::default();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_PAUSE) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let owned = match roles.member() {
            Some(member) => member.local().owned().await,
            None => None,
        };
        let manifest = open.ownership.manifest();
        let (Some(owned), Some(configuration)) = (owned, &manifest.configuration) else { continue };
        let statuses = owned.statuses();
        away.retain(|member, _| configuration.member(*member).is_some());
        for (member, status) in &statuses {
            let looks = if takes_part(status) { 0 } else { away.get(member).map_or(1, |n| n + 1) };
            away.insert(*member, looks);
        }
        let missing = |member: &Uuid| away.get(member).is_some_and(|looks| *looks >= LOOKS);
        shown = show(&open.conditions, configuration, &statuses, missing, &shown);
        slow.look(&open.conditions, configuration, &statuses);
    }
}

/// The members that are slow, with the number of looks since when.
#[derive(Debug, Default)]
struct SlowMembers(BTreeMap<String, u32>);

impl SlowMembers {
    fn look(
        &mut self,
        conditions: &Conditions,
        configuration: &Configuration,
        statuses: &BTreeMap<Uuid, MemberStatus>,
    ) {
        let time_of = |member: &Uuid| {
            let status = statuses.get(member).filter(|status| takes_part(status))?;
            status.answer_time
        };
        let mut looks = BTreeMap::new();
        for member in &configuration.members {
            let others = configuration.members.iter().filter(|other| other.id != member.id);
            let fastest = others.filter_map(|other| time_of(&other.id)).min();
            let Some((time, fastest)) = time_of(&member.id).zip(fastest) else { continue };
            if time < SLOW_MIN || time < fastest * SLOW_FACTOR {
                continue;
            }
            let name = &member.node_name;
            let seen = self.0.get(name).map_or(1, |seen| seen.saturating_add(1));
            looks.insert(name.clone(), seen);
            if seen >= SLOW_LOOKS {
                let ms = |time: Duration| time.as_secs_f64() * 1000.0;
                let report = Report::new(
                    format!(
                        "node {name} answers the owner of the write log after {:.1} ms, and the fastest other one after \
                         {:.1} ms",
                        ms(time),
                        ms(fastest)
                    ),
                    "once another member is away, each write waits for this one",
                    format!(
                        "find out what slows the disk or the network of node {name}, or replace it with another node"
                    ),
                );
                conditions.set(ConditionKind::MemberSlow, name, Some(report));
            }
        }
        for name in self.0.keys().filter(|name| !looks.contains_key(*name)) {
            conditions.clear(ConditionKind::MemberSlow, name);
        }
        self.0 = looks;
    }
}

fn takes_part(status: &MemberStatus) -> bool {
    status.answers_within(SILENCE_SHOWN) && !status.is_full
}

/// Shows the conditions of members. Returns the names of the nodes that have one.
fn show(
    conditions: &Conditions,
    configuration: &Configuration,
    statuses: &BTreeMap<Uuid, MemberStatus>,
    is_missing: impl Fn(&Uuid) -> bool,
    shown: &[String],
) -> Vec<String> {
    let (count, quorum) = (configuration.members.len(), configuration.quorum);
    let missing: Vec<_> =
        configuration.members.iter().filter(|member| is_missing(&member.id)).collect();
    let left = count - missing.len();
    for member in &missing {
        let status = statuses.get(&member.id);
        let cause = match status {
            Some(status) if status.is_full => "its log is full".to_owned(),
            status => {
                let trouble = status.and_then(MemberStatus::trouble);
                trouble.unwrap_or_else(|| "it does not answer".to_owned())
            }
        };
        let name = &member.node_name;
        let report = Report::new(
            format!("node {name} does not take part in the write log: {cause}"),
            match left.checked_sub(quorum) {
                Some(0) => "the loss of one more member stops the pool until it is back".to_owned(),
                Some(more) => format!("the pool survives the loss of {more} more members"),
                None => "the pool waits for more members".to_owned(),
            },
            format!(
                "bring the node back; if it is gone for good, run `spindle pool members remove {name}`, and add another \
                 node"
            ),
        );
        conditions.set(ConditionKind::MemberAway, name, Some(report));
    }
    for Member { node_name: name, .. } in &configuration.away {
        let report = Report::new(
            format!("node {name} was left out of the write log, because too few members answered"),
            match (count, configuration.degraded) {
                (1, Degraded::Store) => {
                    "the write log is on one machine: its loss loses what was not flushed, and each flush waits for the \
                     store"
                        .to_owned()
                }
                (1, _) => "the write log is on one machine: its loss loses what the store lacks".to_owned(),
                _ => format!("the write log is on {count} machines"),
            },
            format!(
                "bring the node back, which makes it a member again; if it is gone for good, run `spindle pool members \
                 remove {name}`, and add another node"
            ),
        );
        conditions.set(ConditionKind::MemberAway, name, Some(report));
    }
    let left_out = configuration.away.iter();
    let names: Vec<String> =
        missing.into_iter().chain(left_out).map(|member| member.node_name.clone()).collect();
    for name in shown.iter().filter(|name| !names.contains(name)) {
        conditions.clear(ConditionKind::MemberAway, name);
    }
    let waits = (left < quorum).then(|| {
        Report::new(
            format!("{left} of {count} members of the write log answer, and {quorum} are needed"),
            "reads and writes wait; no write that was answered is lost",
            format!("bring one of these nodes back: {}", names.join(", ")),
        )
    });
    conditions.set(ConditionKind::QuorumLost, LOG, waits);
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_member_is_a_condition_until_it_is_quick_again() {
        let ids = [1, 2, 3].map(Uuid::from_u128);
        let member =
            |id: &Uuid| Member { id: *id, node: *id, node_name: format!("n{}", id.as_u128()) };
        let members = ids.iter().map(member).collect();
        let configuration =
            Configuration { members, quorum: 2, degraded: Degraded::default(), away: Vec::new() };
        // The first one is the owner, which has no status.
        let statuses = |times: [u64; 2], is_connected: bool| {
            let status = |ms| MemberStatus {
                is_connected,
                answer_time: Some(Duration::from_millis(ms)),
                ..MemberStatus::default()
            };
            BTreeMap::from([(ids[1], status(times[0])), (ids[2], status(times[1]))])
        };
        let (conditions, mut slow) = (Conditions::default(), SlowMembers::default());
        let mut shown = |times, is_connected, looks: u32| {
            for _ in 0..looks {
                slow.look(&conditions, &configuration, &statuses(times, is_connected));
            }
            let listed = conditions.list().into_iter();
            let slow = listed.filter(|one| one.kind == ConditionKind::MemberSlow);
            slow.map(|one| one.subject).collect::<Vec<String>>()
        };
        let none: Vec<String> = Vec::new();
        assert_eq!(shown([1, 100], true, SLOW_LOOKS - 1), none, "only for a moment");
        assert_eq!(shown([1, 1], true, 1), none);
        assert_eq!(shown([1, 100], true, SLOW_LOOKS), ["n3"]);
        assert_eq!(shown([1, 7], true, 1), none);
        assert_eq!(shown([20, 100], true, 2 * SLOW_LOOKS), none, "not much slower than the other");
        assert_eq!(shown([1, 19], true, 2 * SLOW_LOOKS), none, "fast enough");
        assert_eq!(shown([100, 1], true, SLOW_LOOKS), ["n2"]);
        assert_eq!(shown([100, 1], false, 1), none, "it is away");
    }
}
