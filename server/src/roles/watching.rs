//! Conditions about the members of a pool's log, while this node owns the pool.
//!
//! Invariant: a member that only reconnects raises nothing.

use super::Roles;
use block::conditions::Report;
use block::{ConditionKind, Conditions};
use control::manifest::Configuration;
use engine::open_pool::OpenPool;
use ensemble::MemberStatus;
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
    }
}

fn takes_part(status: &MemberStatus) -> bool {
    status.is_connected && !status.is_full
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
            Some(MemberStatus { error: Some(error), .. }) => error.clone(),
            _ => "it does not answer".to_owned(),
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
    let names: Vec<String> = missing.iter().map(|member| member.node_name.clone()).collect();
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
