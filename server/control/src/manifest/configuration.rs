//! The members of a pool's log, as a link of the manifest chain records them.
//!
//! Invariants:
//! - A quorum is more than half of the members, so two quorums of one configuration share a member.
//! - Members have distinct directories on distinct nodes: a quorum never counts one machine twice.
//! - The owner is a member.
//! - The number of a configuration is that of the link that holds it.

use super::{Manifest, NodeDir, TakeOver};
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Write;
use uuid::Uuid;

/// Most members of one configuration. Chosen by hand: the owner sends each batch to all of them.
pub const MEMBER_COUNT_MAX: usize = 16;
/// Bytes of the longest name of a node. Source: RFC 1035, section 2.3.4.
pub const NODE_NAME_BYTES_MAX: usize = 255;

/// A directory that stores the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Identity of the directory, from its `node.json`. A directory that was wiped gets another one.
    pub id: Uuid,
    /// Identity of the node in the cluster.
    pub node: Uuid,
    /// The node's name, for display: 1 to [`NODE_NAME_BYTES_MAX`] bytes.
    pub node_name: String,
}

/// The owner's conduct without a quorum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Degraded {
    /// Writes wait.
    #[default]
    Block,
    /// The owner continues with the members that answer, once a link says so.
    Solo,
    /// Like `Solo`, and a flush waits until the store has the data.
    Store,
}

/// The members, and how many of them acknowledge a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// The members, 1 to [`MEMBER_COUNT_MAX`]; the owner is one of them.
    pub members: Vec<Member>,
    /// Number of members that must have written a batch before it is acknowledged.
    pub quorum: usize,
    /// The owner's conduct without a quorum.
    pub degraded: Degraded,
    /// Nodes that the owner left out because too few members answered. They become members again when
    /// they are back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub away: Vec<Member>,
}

impl Configuration {
    /// Checks the configuration for a pool that `owner`, a member's id, owns.
    ///
    /// # Errors
    /// `Invalid`, with the rule that is broken.
    pub fn check(&self, owner: Uuid) -> Result<()> {
        match self.fault(owner) {
            Some(fault) => {
                Err(Error::new(ErrorKind::Invalid, format!("set the members of the log: {fault}")))
            }
            None => Ok(()),
        }
    }

    /// The rule that the configuration breaks.
    pub(super) fn fault(&self, owner: Uuid) -> Option<String> {
        let (count, quorum) = (self.members.len(), self.quorum);
        let ids: BTreeSet<Uuid> = self.members.iter().map(|member| member.id).collect();
        let nodes: BTreeSet<Uuid> = self.members.iter().map(|member| member.node).collect();
        let known = self.members.iter().chain(&self.away);
        let known_nodes: BTreeSet<Uuid> = known.clone().map(|member| member.node).collect();
        let is_name = |name: &str| (1..=NODE_NAME_BYTES_MAX).contains(&name.len());
        match () {
            () if known.clone().count() > MEMBER_COUNT_MAX => {
                Some(format!("more than {MEMBER_COUNT_MAX} members"))
            }
            () if quorum > count => {
                Some(format!("a quorum of {quorum} is more than all {count} members"))
            }
            // The first condition bounds both numbers, so the product does not overflow.
            () if 2 * quorum <= count => Some(format!(
                "a quorum of {quorum} is not more than half of {count} members, so two quorums \
                 could have no member in common"
            )),
            () if ids.len() < count => Some("one directory is named twice".to_owned()),
            () if nodes.len() < count => Some("two members are on one node".to_owned()),
            () if known_nodes.len() < known.clone().count() => {
                Some("a node that is away is named twice".to_owned())
            }
            () if !ids.contains(&owner) => Some("the owner is not a member".to_owned()),
            () if !known.clone().all(|member| is_name(&member.node_name)) => {
                Some(format!("a node's name does not have 1 to {NODE_NAME_BYTES_MAX} bytes"))
            }
            () => None,
        }
    }

    /// The member with this id.
    #[must_use]
    pub fn member(&self, id: Uuid) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    /// Number of members that a take-over needs: at least one of them has any acknowledged batch.
    #[must_use]
    pub fn recovery_quorum(&self) -> usize {
        (self.members.len() + 1).saturating_sub(self.quorum)
    }

    /// The configuration with this member alone, or `None` if it is not a member. The others are away.
    #[must_use]
    pub fn alone(&self, id: Uuid) -> Option<Configuration> {
        self.member(id)?;
        Some(self.without(|member| member.id != id))
    }

    /// Whether each flush waits for the store: members are away, and the pool's setting asks for it.
    #[must_use]
    pub fn flushes_to_store(&self) -> bool {
        self.degraded == Degraded::Store && !self.away.is_empty()
    }

    /// The configuration without the members that are missing, which are away. Its quorum is the majority
    /// of the others.
    #[must_use]
    pub fn without(&self, is_missing: impl Fn(&Member) -> bool) -> Configuration {
        let (missing, members): (Vec<Member>, Vec<Member>) =
            self.members.iter().cloned().partition(|member| is_missing(member));
        let quorum = members.len() / 2 + 1;
        let away = self.away.iter().cloned().chain(missing).collect();
        Configuration { members, quorum, degraded: self.degraded, away }
    }

    /// The configuration with a member more, whose node is no longer away. Its quorum is a majority.
    #[must_use]
    pub fn with(&self, member: Member) -> Configuration {
        let mut next = self.clone();
        next.away.retain(|away| away.node != member.node);
        next.members.push(member);
        next.quorum = next.members.len() / 2 + 1;
        next
    }

    /// Names of the members' nodes, for display.
    fn node_names(&self) -> String {
        let mut names = String::new();
        for member in &self.members {
            let separator = if names.is_empty() { "" } else { ", " };
            write!(names, "{separator}{}", member.node_name).expect("a string takes all");
        }
        names
    }
}

/// Returns the configuration of the link that follows `previous` when `node` takes the pool.
///
/// # Errors
/// `Denied` if the directory may not take a pool with this configuration.
pub(super) fn carried_over(
    node: &NodeDir,
    previous: &Manifest,
    take_over: TakeOver,
) -> Result<Option<Configuration>> {
    let Some(configuration) = &previous.configuration else { return Ok(None) };
    match take_over {
        TakeOver::Forced => return Ok(None),
        TakeOver::No | TakeOver::ByQuorum | TakeOver::Alone => {}
    }
    check_member(node, previous, configuration, take_over)?;
    match take_over {
        TakeOver::Alone => Ok(configuration.alone(node.node_id())),
        _ => Ok(Some(configuration.clone())),
    }
}

/// Checks whether the directory of `node` may take a pool with this configuration without force.
fn check_member(
    node: &NodeDir,
    previous: &Manifest,
    configuration: &Configuration,
    take_over: TakeOver,
) -> Result<()> {
    let (name, dir) = (&previous.name, node.path().display());
    let (count, nodes) = (configuration.members.len(), configuration.node_names());
    let denied =
        |why: String| Err(Error::new(ErrorKind::Denied, format!("open pool {name}: {why}")));
    if configuration.member(node.node_id()).is_none() {
        let was_here = node.pool() == Some(previous.pool);
        let state = if was_here { "is no longer" } else { "is not" };
        return denied(format!(
            "directory {dir} {state} a member of its log, which is on {nodes}; open the pool on one \
             of them, or admit this directory. --take-over opens it here without them: it gives up \
             the writes that are not in the store"
        ));
    }
    if node.is_copy() {
        return denied(format!(
            "directory {dir} is a copy of the one that is a member of its log: it was moved, or \
             restored from a backup, and may lack writes that the member has answered for. Use the \
             original, or admit an empty directory as a new member. --take-over continues from this \
             copy, and gives up the writes that are not in the store"
        ));
    }
    let needed = configuration.recovery_quorum();
    match take_over {
        TakeOver::No => denied(format!(
            "its log is on {count} nodes ({nodes}), and this command does not ask them; use the \
             daemon of one of them"
        )),
        TakeOver::Alone if needed > 1 => denied(format!(
            "one member is below the quorum: with {count} members and a quorum of {}, acknowledged \
             writes are certain to be on {needed} members together; start another one of {nodes}",
            configuration.quorum
        )),
        TakeOver::Alone | TakeOver::ByQuorum | TakeOver::Forced => Ok(()),
    }
}
