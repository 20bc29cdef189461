//! Adding and removing members of a pool's log, on the node that owns the pool.
//!
//! Invariants:
//! - One change is made at a time, and none counts before the manifest chain has it.
//! - A new configuration counts once its quorum has everything that was acknowledged.
//! - The network of a new member was measured before it gets anything of the log.

use super::degraded::{answers, bring_up_unless_lost};
use super::messages::{self, Answer, Question};
use super::{Roles, measuring, record};
use api::Reply;
use api::member::{self, JoiningInfo, MemberAdded, MemberInfo, MembersInfo, TrafficInfo};
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use cluster::{Node, NodeId};
use control::manifest::{Configuration, Degraded, Member};
use engine::open_pool::OpenPool;
use ensemble::{Change, MemberStatus, OwnedLog};
use std::time::Duration;
use uuid::Uuid;

/// Pause between two looks at a member that is brought up. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Number of batches that a member may lack when clients begin to wait for it. Chosen by hand: a member that
/// keeps up with the load sends them within milliseconds.
const NEAR: u64 = 128;
/// Longest wait of clients for a new quorum, after which they go on with the former one for a while. Chosen
/// by hand: far below the timeouts of clients.
const HOLD_MAX: Duration = Duration::from_millis(500);
/// Pause between two looks meanwhile. Chosen by hand.
const HOLD_LOOK_PAUSE: Duration = Duration::from_millis(2);
/// Pause after the first such wait; it doubles each time. Chosen by hand.
const HOLD_PAUSE: Duration = Duration::from_secs(2);
/// Time without progress after which a member that is brought up is given up. Chosen by hand: it may
/// have to be reset, and its machine to write a whole ring.
const STALL_MAX: Duration = Duration::from_secs(60);

pub(super) fn configuration_of(open: &OpenPool) -> Result<Configuration> {
    open.ownership.manifest().configuration.clone().ok_or_else(|| {
        Error::new(ErrorKind::Invalid, "change the members: the pool's log has none")
    })
}

pub(super) async fn owned_by(roles: &Roles) -> Result<OwnedLog> {
    let owned = match roles.member() {
        Some(members) => members.local().owned().await,
        None => None,
    };
    owned.ok_or_else(|| {
        Error::new(ErrorKind::Unavailable, "change the members: this node does not own the pool")
    })
}

fn node_named(roles: &Roles, name: &str) -> Result<Node> {
    let nodes = roles.cluster().nodes();
    let found = nodes.into_iter().find(|node| node.name == name || node.id.to_string() == name);
    found.ok_or_else(|| {
        let what = format!(
            "find node {name}: the cluster has none of this name; `spindle node list` shows all"
        );
        Error::new(ErrorKind::NotFound, what)
    })
}

/// Makes a node a member of the pool's log, and waits until it counts.
///
/// # Errors
/// `Denied` for a node whose network is far slower than that of the members, without `force`.
pub(crate) async fn add_member(
    roles: &Roles,
    open: &OpenPool,
    name: &str,
    force: bool,
) -> Result<Reply> {
    let _one_at_a_time = roles.changes.lock().await;
    let (owned, node) = (owned_by(roles).await?, node_named(roles, name)?);
    if configuration_of(open)?.members.iter().any(|member| member.node == node.id.0) {
        let message = format!("node {name} is a member of the pool's log already");
        return Ok(Reply::Done { message });
    }
    admit((roles, open), &owned, &node, None, force).await
}

/// Makes a node a member of the pool's log in place of `old`, and waits until it counts: `with`, or without it the node
/// of the cluster that has the name of the old one.
///
/// # Errors
/// `Invalid` if the old one is the owner, or the new one is a member; those of [`add_member`].
pub(crate) async fn replace_member(
    roles: &Roles,
    open: &OpenPool,
    old: &str,
    with: Option<&str>,
    force: bool,
) -> Result<Reply> {
    let _one_at_a_time = roles.changes.lock().await;
    let owned = owned_by(roles).await?;
    let now = configuration_of(open)?;
    let is_old = |member: &&Member| is_on(member, old);
    let Some(member) = now.members.iter().chain(&now.away).find(is_old).cloned() else {
        return Err(no_such_member("replace", old));
    };
    if member.id == open.node.node_id() {
        return Err(is_the_owner("replace", old));
    }
    let node = node_named(roles, with.unwrap_or(old)).map_err(|error| {
        error.context("let the new machine join the cluster first (`spindle node token`, `spindle node join`)")
    })?;
    // The pool would do without the member until its new log has everything, and for good if that fails.
    if node.id.0 == member.node {
        let what = format!(
            "replace node {old}: the cluster has no other node of this name; name the new one, once it has joined the \
             cluster. If only the log of {old} is lost, and its daemon runs: `spindle pool members remove {old}`, then \
             `spindle pool members add {old}`"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    if now.members.iter().any(|member| member.node == node.id.0) {
        let what =
            format!("replace node {old}: node {} is a member of the pool's log already", node.name);
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    admit((roles, open), &owned, &node, Some(&member), force).await
}

/// Whether the member is on the node with this name or id.
fn is_on(member: &Member, name: &str) -> bool {
    member.node_name == name || member.node.to_string() == name
}

fn without_node(now: &Configuration, name: &str) -> Configuration {
    let mut next = now.clone();
    next.members.retain(|member| !is_on(member, name));
    next.away.retain(|member| !is_on(member, name));
    next.quorum = next.members.len() / 2 + 1;
    next
}

fn no_such_member(verb: &str, name: &str) -> Error {
    let what = format!("{verb} node {name}: it is no member of the pool's log");
    Error::new(ErrorKind::NotFound, what)
}

fn is_the_owner(verb: &str, name: &str) -> Error {
    let what = format!(
        "{verb} node {name}: it owns the pool; move the pool to another member first (`spindle pool move`)"
    );
    Error::new(ErrorKind::Invalid, what)
}

/// The place of the node that is brought up, for those who list the members.
pub(super) struct Joining<'a>(&'a Roles);

impl<'a> Joining<'a> {
    pub(super) fn new(roles: &'a Roles, member: &Member) -> Joining<'a> {
        *roles.joining.lock() = Some(member.clone());
        Joining(roles)
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        *self.0.joining.lock() = None;
    }
}

/// Makes a node that is no member one, in place of `replaced` if that is given. The caller holds the lock of the
/// changes.
async fn admit(
    (roles, open): (&Roles, &OpenPool),
    owned: &OwnedLog,
    node: &Node,
    replaced: Option<&Member>,
    force: bool,
) -> Result<Reply> {
    let manifest = open.ownership.manifest();
    let (now, name) = (configuration_of(open)?, node.name.as_str());
    let kept = match replaced {
        Some(old) => without_node(&now, &old.node.to_string()),
        None => now.clone(),
    };
    let me = open.node.node_id();
    let others: Vec<&Member> = kept.members.iter().filter(|member| member.id != me).collect();
    let paths = measuring::measure(roles, &others, node).await?;
    let outlier = paths.verdict();
    if let Some(reason) = outlier.as_ref().filter(|_| !force) {
        let what = format!(
            "make node {name} a member: {reason}. Writes would wait for it: find out what slows its network, or add it all \
             the same with --force"
        );
        return Err(Error::new(ErrorKind::Denied, what));
    }
    let question = Question::Join { pool: manifest.pool, name: manifest.name.clone() };
    let Answer::Member { id } = messages::ask(roles.cluster(), node.id, &question).await? else {
        let what = format!("make node {name} a member: it gave another answer than was asked for");
        return Err(Error::new(ErrorKind::Corrupt, what));
    };
    let member = Member { id, node: node.id.0, node_name: node.name.clone() };
    let next = kept.with(member.clone());
    next.check(open.node.node_id())?;
    // The one that is replaced stays a member until the link without it exists.
    let mut all = now.clone();
    all.members.push(member.clone());
    let reach = |configuration: &Configuration| {
        if let Some(members) = roles.member() {
            members.reach(configuration);
        }
    };
    reach(&all);
    owned.bring_up(id)?;
    let changed = async {
        let _shown = Joining::new(roles, &member);
        match replaced.is_some() && now.degraded == Degraded::Block {
            // The quorum may be lost for good without the new one.
            true => bring_up(&*open.config.clock, owned, id, name).await?,
            false => bring_up_unless_lost(&now, owned, (roles, open), (id, name)).await?,
        }
        change(open, owned, &next).await
    };
    if let Err(error) = changed.await {
        owned.give_up(id);
        return Err(error);
    }
    reach(&next);
    Ok(Reply::MemberAdded(MemberAdded {
        node: node.name.clone(),
        replaced: replaced.map(|old| old.node_name.clone()),
        member_count: next.members.len() as u64,
        quorum: next.quorum as u64,
        forced: outlier,
        paths: paths.into_all(),
    }))
}

/// Removes a node from the members of the pool's log.
pub(crate) async fn remove_member(roles: &Roles, open: &OpenPool, name: &str) -> Result<String> {
    let _one_at_a_time = roles.changes.lock().await;
    let owned = owned_by(roles).await?;
    let now = configuration_of(open)?;
    let next = without_node(&now, name);
    if next.members.len() + next.away.len() == now.members.len() + now.away.len() {
        return Err(no_such_member("remove", name));
    }
    if next.member(open.node.node_id()).is_none() {
        return Err(is_the_owner("remove", name));
    }
    check_answering((roles, open), &owned, &next, name)?;
    change(open, &owned, &next).await?;
    let (count, quorum) = (next.members.len(), next.quorum);
    Ok(format!(
        "node {name} is no member of the pool's log any more: a write is acknowledged by {quorum} of {count} members"
    ))
}

/// Refuses a removal after which too few members would answer: writes would wait for them.
fn check_answering(
    from: (&Roles, &OpenPool),
    owned: &OwnedLog,
    next: &Configuration,
    name: &str,
) -> Result<()> {
    let answers = answers(owned, from);
    let silent = next.members.iter().filter(|member| !answers(member));
    let away: Vec<&str> = silent.map(|member| member.node_name.as_str()).collect();
    let (count, quorum) = (next.members.len(), next.quorum);
    if count - away.len() >= quorum {
        return Ok(());
    }
    let what = format!(
        "remove node {name}: {quorum} of the {count} members that stay would have to acknowledge a write, and of these {} \
         does not answer. Start it again, or remove it first",
        away.join(", ")
    );
    Err(Error::new(ErrorKind::Unavailable, what))
}

/// Waits until a member has nearly everything that was acknowledged: under load, it may never have all.
pub(super) async fn bring_up(
    clock: &dyn Clock,
    owned: &OwnedLog,
    id: Uuid,
    name: &str,
) -> Result<()> {
    let (mut best, mut progressed_at) = (0, clock.now());
    loop {
        let Some(up) = owned.catch_up(id) else {
            let what = format!("bring node {name} up: the change was given up");
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        if up.written > 0 && up.written.saturating_add(NEAR) >= up.acknowledged {
            return Ok(());
        }
        if up.written > best {
            (best, progressed_at) = (up.written, clock.now());
        }
        if clock.since(progressed_at) > STALL_MAX {
            let status = owned.statuses().remove(&id).unwrap_or_default();
            let cause = status.trouble().unwrap_or_else(|| "it does not answer".to_owned());
            let what = format!("bring node {name} up: {cause}");
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Changes the configuration to `next`, whose new member was brought up. Without effect if it holds already.
pub(super) async fn change(open: &OpenPool, owned: &OwnedLog, next: &Configuration) -> Result<()> {
    let newest = open.ownership.manifest();
    if newest.configuration.as_ref() == Some(next) {
        return Ok(()); // the chain would get no link of this number
    }
    let clock = &*open.config.clock;
    let held = crate::adapters::log_members::configuration_of(newest.number + 1, next);
    let change = begin(clock, owned, &held).await?;
    // From here on the change cannot be given up: its link may exist.
    let number = record(open, next).await?;
    change.end(number).inspect_err(|error| {
        // It would acknowledge by both configurations for good, and never give the pool up.
        open.pool.lose(error.clone());
    })
}

/// Begins a change, and waits until its link may be created. Clients wait meanwhile, but never for long.
async fn begin<'a>(
    clock: &dyn Clock,
    owned: &'a OwnedLog,
    held: &replication::Configuration,
) -> Result<Change<'a>> {
    let begun_at = clock.now();
    let mut hold_pause = None;
    loop {
        let held_at = clock.now();
        let mut pause = LOOK_PAUSE;
        if let Some(change) = owned.begin_change(held.clone())? {
            while clock.since(held_at) < HOLD_MAX {
                if change.may_record()? {
                    return Ok(change);
                }
                tokio::time::sleep(HOLD_LOOK_PAUSE).await;
            }
            // Clients wait again, but for ever smaller a part of the time.
            pause = hold_pause.map_or(HOLD_PAUSE, |before| before * 2);
            hold_pause = Some(pause);
        }
        if clock.since(begun_at) > STALL_MAX {
            let what = match hold_pause {
                Some(_) => {
                    "change the members: too few of the new members have the log; look at `spindle pool members list`"
                }
                None => {
                    "change the members: another change of them has not ended, or the pool is being handed over"
                }
            };
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        tokio::time::sleep(pause).await;
    }
}

/// Returns the members of the pool's log, as its owner knows them.
pub(crate) async fn members_of(roles: &Roles, open: &OpenPool) -> Result<MembersInfo> {
    let (owned, configuration) = (owned_by(roles).await?, configuration_of(open)?);
    let statuses = owned.statuses();
    let acknowledged = owned.acknowledged();
    let info = |member: &Member| {
        let status = statuses.get(&member.id).cloned();
        let is_owner = member.id == open.node.node_id();
        MemberInfo {
            node: member.node_name.clone(),
            id: member.id.to_string(),
            zone: roles.cluster().zone_of(NodeId(member.node)),
            is_owner,
            is_connected: is_owner || status.as_ref().is_some_and(|status| status.is_connected),
            error: status.as_ref().and_then(MemberStatus::trouble),
            behind: status.as_ref().map_or(0, |status| acknowledged.saturating_sub(status.written)),
            sent_bytes: status.as_ref().map_or(0, |status| status.sent_bytes),
            answer_us: status
                .as_ref()
                .and_then(|status| status.answer_time)
                .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        }
    };
    Ok(MembersInfo {
        members: configuration.members.iter().map(info).collect(),
        quorum: configuration.quorum as u64,
        away: configuration.away.iter().map(|member| member.node_name.clone()).collect(),
        joining: roles.joining.lock().as_ref().map(|member| {
            let status = statuses.get(&member.id);
            JoiningInfo {
                node: member.node_name.clone(),
                behind: acknowledged.saturating_sub(status.map_or(0, |status| status.written)),
                sent_bytes: status.map_or(0, |status| status.sent_bytes),
                error: status.and_then(MemberStatus::trouble),
            }
        }),
        degraded: match configuration.degraded {
            Degraded::Block => member::Degraded::Block,
            Degraded::Solo => member::Degraded::Solo,
            Degraded::Store => member::Degraded::Store,
        },
        traffic: {
            let sent = owned.traffic();
            TrafficInfo {
                written_bytes: sent.written_bytes,
                sent_within_bytes: sent.sent_within_bytes,
                sent_across_bytes: sent.sent_across_bytes,
            }
        },
    })
}
