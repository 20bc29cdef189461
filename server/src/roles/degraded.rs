//! The conduct of the owner without a quorum, by the pool's setting, and the return of the nodes that were
//! left out.
//!
//! Invariants:
//! - A write is acknowledged by fewer members only after the manifest chain says so: another node that
//!   takes the pool over reads which members have it.
//! - With `store`, no flush is answered by fewer members before the store has its data.
//! - A node that is back counts only once it has every acknowledged batch.

use super::Roles;
use super::members::{Joining, bring_up, change, configuration_of, owned_by};
use super::messages::{self, Answer, Question};
use block::{Error, ErrorKind, Result};
use cluster::NodeId;
use control::manifest::{Configuration, Degraded, Member};
use engine::open_pool::OpenPool;
use ensemble::OwnedLog;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::timeout;
use uuid::Uuid;

/// Pause between two looks at the members. Chosen by hand: a fraction of the shortest detection.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Pause between two attempts to take nodes back. Chosen by hand.
const TAKE_BACK_PAUSE: Duration = Duration::from_secs(1);
/// Pause after an attempt that has failed after [`LONG_ATTEMPT`]: clients may have waited for the node more than once.
/// Chosen by hand.
const FAILED_PAUSE: Duration = Duration::from_secs(30);
const LONG_ATTEMPT: Duration = Duration::from_secs(10);
/// Longest wait for the answer of a node that may be away. Chosen by hand.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Keeps the pool going without a quorum, as far as its setting permits, until `stop`.
pub(crate) async fn keep_going(
    roles: Arc<Roles>,
    open: Arc<OpenPool>,
    mut stop: watch::Receiver<bool>,
) {
    let clock = Arc::clone(&open.config.clock);
    let mut lost_since: Option<Instant> = None;
    let mut looked_back: Option<(Instant, Duration)> = None;
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_PAUSE) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let (Ok(owned), Ok(configuration)) = (owned_by(&roles).await, configuration_of(&open))
        else {
            continue;
        };
        // Also after a change that failed.
        open.pool.set_flushes_to_store(configuration.flushes_to_store());
        open.pool.set_replicated(configuration.members.len() > 1);
        if has_quorum(&owned, &configuration, (&roles, &open)) {
            lost_since = None;
            let is_due = looked_back.is_none_or(|(at, pause)| clock.since(at) >= pause);
            if configuration.away.is_empty() || !is_due {
                continue;
            }
            let pause = tokio::select! {
                is_quiet = take_back(&roles, &open, &owned, &configuration) => match is_quiet {
                    true => TAKE_BACK_PAUSE,
                    false => FAILED_PAUSE,
                },
                _ = stop.wait_for(|stop| *stop) => return,
            };
            looked_back = Some((clock.now(), pause));
            continue;
        }
        let since = *lost_since.get_or_insert_with(|| clock.now());
        let is_lasting = clock.since(since) >= roles.detection;
        if configuration.degraded == Degraded::Block || !is_lasting {
            continue;
        }
        lost_since = None;
        let went = tokio::select! {
            went = go_on(&roles, &open, &owned) => went,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match went {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Fenced => open.pool.lose(error),
            Err(error) => tracing::warn!(
                error = %error.chain(),
                "could not go on without a quorum of the write log; the owner tries again"
            ),
        }
    }
}

/// Whether a member takes part: this one does.
pub(super) fn answers(
    owned: &OwnedLog,
    (roles, open): (&Roles, &OpenPool),
) -> impl Fn(&Member) -> bool {
    let (statuses, me) = (owned.statuses(), open.node.node_id());
    let silence_max = roles.detection;
    move |member| {
        let status = statuses.get(&member.id);
        member.id == me || status.is_some_and(|status| status.answers_within(silence_max))
    }
}

fn has_quorum(
    owned: &OwnedLog,
    configuration: &Configuration,
    (roles, open): (&Roles, &OpenPool),
) -> bool {
    left_out(configuration, answers(owned, (roles, open))).is_none()
}

/// The configuration without the members that do not answer; `None` if those that do are a quorum.
fn left_out(
    configuration: &Configuration,
    answers: impl Fn(&Member) -> bool,
) -> Option<Configuration> {
    // Asked once: a member may answer again meanwhile.
    let silent: Vec<Uuid> = configuration
        .members
        .iter()
        .filter(|member| !answers(member))
        .map(|member| member.id)
        .collect();
    let answering = configuration.members.len() - silent.len();
    (answering < configuration.quorum)
        .then(|| configuration.without(|member| silent.contains(&member.id)))
}

/// Leaves the members out that do not answer.
async fn go_on(roles: &Roles, open: &OpenPool, owned: &OwnedLog) -> Result<()> {
    let Ok(_one_at_a_time) = roles.changes.try_lock() else {
        let what = "leave members out: the members are being changed";
        return Err(Error::new(ErrorKind::Busy, what));
    };
    let configuration = configuration_of(open)?;
    let Some(next) = left_out(&configuration, answers(owned, (roles, open))) else {
        return Ok(()); // enough are back
    };
    let names: Vec<&str> = next.away.iter().map(|member| member.node_name.as_str()).collect();
    let is_to_store = next.flushes_to_store();
    // Before fewer members acknowledge anything.
    open.pool.set_flushes_to_store(is_to_store);
    change(open, owned, &next).await?;
    tracing::warn!(
        away = names.join(", "),
        member_count = next.members.len(),
        is_to_store,
        "too few members of the write log answer; the pool goes on without them"
    );
    Ok(())
}

/// Makes nodes members again that are back. Returns false after a long attempt that has failed.
async fn take_back(
    roles: &Roles,
    open: &OpenPool,
    owned: &OwnedLog,
    configuration: &Configuration,
) -> bool {
    let (begun_at, mut is_quiet) = (open.config.clock.now(), true);
    for away in &configuration.away {
        // The log of the node says why, while it is away.
        match take_back_one(roles, open, owned, away).await {
            Ok(true) => {
                tracing::info!(
                    node = away.node_name,
                    "a node that was left out is a member of the write log again"
                );
            }
            Ok(false) => {}
            Err(error) if error.kind() == ErrorKind::Fenced => {
                open.pool.lose(error);
                return true;
            }
            Err(error) => {
                is_quiet &= open.config.clock.since(begun_at) < LONG_ATTEMPT;
                tracing::debug!(
                    node = away.node_name,
                    error = %error.chain(),
                    "could not make a node a member of the write log again"
                );
            }
        }
    }
    is_quiet
}

async fn take_back_one(
    roles: &Roles,
    open: &OpenPool,
    owned: &OwnedLog,
    away: &Member,
) -> Result<bool> {
    let Ok(_one_at_a_time) = roles.changes.try_lock() else { return Ok(false) };
    let manifest = open.ownership.manifest();
    let question = Question::Join { pool: manifest.pool, name: manifest.name.clone() };
    let asked = timeout(ANSWER_MAX, messages::ask(roles.cluster(), NodeId(away.node), &question));
    let Ok(answer) = asked.await else { return Ok(false) };
    // A directory that was wiped has another identity.
    let Answer::Member { id } = answer? else { return Ok(false) };
    let configuration = configuration_of(open)?;
    let member = Member { id, ..away.clone() };
    let next = configuration.with(member.clone());
    next.check(open.node.node_id())?;
    if let Some(members) = roles.member() {
        members.reach(&next);
    }
    owned.bring_up(id)?;
    let changed = async {
        let _shown = Joining::new(roles, &member);
        bring_up_unless_lost(&configuration, owned, (roles, open), (id, &away.node_name)).await?;
        change(open, owned, &next).await
    };
    if let Err(error) = changed.await {
        owned.give_up(id);
        return Err(error);
    }
    open.pool.set_flushes_to_store(next.flushes_to_store());
    Ok(true)
}

/// Waits until a member has everything that was acknowledged, and no longer than the members of `configuration` answer:
/// leaving out those that are gone does not wait for a new one.
///
/// # Errors
/// `Unavailable` if the member does not come up, or too few of the others answer.
pub(super) async fn bring_up_unless_lost(
    configuration: &Configuration,
    owned: &OwnedLog,
    (roles, open): (&Roles, &OpenPool),
    (id, name): (Uuid, &str),
) -> Result<()> {
    let is_lost = || !has_quorum(owned, configuration, (roles, open));
    let lost = async {
        let mut lost_since = None;
        loop {
            match is_lost() {
                true => {
                    let since = *lost_since.get_or_insert_with(|| open.config.clock.now());
                    if open.config.clock.since(since) >= roles.detection {
                        return;
                    }
                }
                false => lost_since = None,
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    };
    tokio::select! {
        up = bring_up(&*open.config.clock, owned, id, name) => up,
        () = lost => {
            let what = format!("bring node {name} up: too few of the members answer; bring them back, and try again");
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

/// Sets the conduct of the owner without a quorum.
///
/// # Errors
/// `Busy` while the members change; those of recording it.
pub(crate) async fn set_degraded(roles: &Roles, open: &OpenPool, to: Degraded) -> Result<String> {
    let _one_at_a_time = roles.changes.lock().await;
    let owned = owned_by(roles).await?;
    let configuration = configuration_of(open)?;
    if configuration.degraded != to {
        let next = Configuration { degraded: to, ..configuration };
        change(open, &owned, &next).await?;
        open.pool.set_flushes_to_store(next.flushes_to_store());
    }
    Ok(format!("without a quorum of its write log, {}", conduct(to)))
}

/// Describes the conduct.
fn conduct(degraded: Degraded) -> &'static str {
    match degraded {
        Degraded::Block => {
            "the pool waits: nothing is lost, and clients wait until enough members are back"
        }
        Degraded::Solo => {
            "the pool goes on with the members that answer: alone, a loss of the owner's machine loses what the store \
             lacks"
        }
        Degraded::Store => {
            "the pool goes on with the members that answer, and a flush waits for the store: alone, a loss of the \
             owner's machine loses only what was not flushed"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn members_that_answer_again_meanwhile_are_left_out_all_the_same() {
        let member = |number: u128| Member {
            id: Uuid::from_u128(number),
            node: Uuid::from_u128(10 + number),
            node_name: number.to_string(),
        };
        let configuration = Configuration {
            members: (1..=3).map(member).collect(),
            quorum: 2,
            degraded: Degraded::Solo,
            away: Vec::new(),
        };
        let asked = Cell::new(0);
        let answers = |member: &Member| {
            asked.set(asked.get() + 1);
            member.id == Uuid::from_u128(1) || asked.get() > 3
        };
        let next = left_out(&configuration, answers).expect("one answers");
        assert_eq!((next.members.len(), next.away.len(), next.quorum), (1, 2, 1));
        assert_eq!(left_out(&configuration, |member| member.id != Uuid::from_u128(2)), None);
    }
}
