//! Handing the pool over from this node, which owns it, to another member.
//!
//! Invariants:
//! - Everything that can be done while clients are served is done before they are paused.
//! - The owner gives its lease up only after its last answer to a client.
//! - A hand-over that fails in the middle is an owner that has ended: a stand-in takes the pool over.

use super::messages::{self, Answer, Question, Role};
use super::{Roles, members};
use api::pool::MoveInfo;
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use cluster::NodeId;
use engine::open_pool::{CLOSE_DESTAGE_MAX, OpenPool};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use uuid::Uuid;

/// Longest wait until the successor has the newest batches. Chosen by hand: it does at once unless its
/// disk is ill.
const CATCH_UP_MAX: Duration = Duration::from_secs(10);
/// Pause between two looks at the successor. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// Longest wait until the successor serves the pool. Chosen by hand: a stand-in would serve it by then.
const MOVE_MAX: Duration = Duration::from_secs(60);
/// Attempts to give the order to the successor. Chosen by hand.
const ORDER_ATTEMPTS: u32 = 3;

/// The node that gets the pool.
#[derive(Clone, Debug)]
pub(crate) struct Successor {
    pool: Uuid,
    /// The epoch of this node.
    epoch: u64,
    node: NodeId,
    /// Its name.
    pub(crate) name: String,
}

/// Prepares a hand-over, and begins it: the pool is destaged, and the node has the newest batches.
///
/// # Errors
/// `Invalid`, `NotFound` or `Unavailable` if the node cannot get the pool; `Busy` while the members
/// change; the errors of `check`, which is asked at the beginning and just before the pool leaves. The pool
/// is then served as before.
pub(crate) async fn begin_move(
    roles: &Roles,
    open: &OpenPool,
    name: &str,
    check: impl Fn() -> Result<()>,
) -> Result<String> {
    check()?;
    let refuse =
        |kind, why: String| Err(Error::new(kind, format!("move the pool to node {name}: {why}")));
    let Ok(_no_change) = roles.changes.try_lock() else {
        let why = "its members are being changed, or it is being moved; try again later";
        return refuse(ErrorKind::Busy, why.to_owned());
    };
    if let Some(successor) = &*roles.successor.borrow() {
        return refuse(ErrorKind::Busy, format!("it moves to node {} right now", successor.name));
    }
    let (owned, manifest) = (members::owned_by(roles).await?, open.ownership.manifest());
    let configuration = members::configuration_of(open)?;
    let is_named = |member: &&control::manifest::Member| {
        member.node_name == name || member.node.to_string() == name
    };
    let Some(member) = configuration.members.iter().find(is_named) else {
        let why = "it is no member of the pool's log; make it one with `spindle pool members add`";
        return refuse(ErrorKind::NotFound, why.to_owned());
    };
    if member.id == open.node.node_id() {
        return refuse(ErrorKind::Invalid, "it owns the pool already".to_owned());
    }
    let successor = Successor {
        pool: manifest.pool,
        epoch: manifest.epoch,
        node: NodeId(member.node),
        name: member.node_name.clone(),
    };
    match successor.role(roles).await {
        Ok(Role::Member { .. }) => {}
        Ok(_) => {
            let why = "its member does not run; see the log of its daemon";
            return refuse(ErrorKind::Unavailable, why.to_owned());
        }
        Err(error) => return refuse(ErrorKind::Unavailable, error.chain()),
    }
    // The successor reads what is left in the log before it serves. A volume that cannot be copied to
    // the store stays in the log, which the successor has, too.
    if let Ok(Err(error)) = timeout(CLOSE_DESTAGE_MAX, open.pool.destage_all()).await {
        tracing::info!(error = %error.chain(), "not all of the log is in the store before the pool moves");
    }
    let (clock, begun_at) = (&open.config.clock, open.config.clock.now());
    loop {
        let wanted = owned.acknowledged();
        let status = owned.statuses().remove(&member.id).unwrap_or_default();
        // What it has not synced it syncs before it serves, while clients wait.
        let has_come = status.is_connected && status.synced.saturating_add(NEAR) >= wanted;
        if has_come {
            break;
        }
        owned.replicas().want_sync(wanted);
        if clock.since(begun_at) > CATCH_UP_MAX {
            let behind = wanted.saturating_sub(status.written);
            let cause = status.error.unwrap_or_else(|| "it is too slow".to_owned());
            let why = format!("it lacks {behind} batches of the log: {cause}");
            return refuse(ErrorKind::Unavailable, why);
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    check()?;
    *roles.moved_from.lock() = None;
    *roles.last_move.lock() =
        Some(MoveInfo { node: successor.name.clone(), pause_ms: None, error: None });
    roles.successor.send_replace(Some(successor));
    Ok(format!("the pool moves to node {name}"))
}

/// Batches that the successor may lack or not have synced when the hand-over begins. Chosen by hand.
const NEAR: u64 = 64;

impl Successor {
    async fn role(&self, roles: &Roles) -> Result<Role> {
        match messages::ask(roles.cluster(), self.node, &Question::Role { pool: self.pool }).await?
        {
            Answer::Role(role) => Ok(role),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                "ask a node for its role: it speaks of something else",
            )),
        }
    }

    async fn order(&self, roles: &Roles) -> Result<()> {
        let mut attempts_left = ORDER_ATTEMPTS;
        loop {
            let question = Question::TakeOver { pool: self.pool, epoch: self.epoch };
            match messages::ask(roles.cluster(), self.node, &question).await {
                Ok(_) => return Ok(()),
                Err(error) if attempts_left == 0 => return Err(error),
                Err(_) => attempts_left -= 1,
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    async fn wait_until_served(&self, roles: &Roles) -> Result<()> {
        loop {
            if let Ok(Role::Owner { is_serving: true }) = self.role(roles).await {
                return Ok(());
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }
}

impl Roles {
    /// Resolves when the pool is to be handed over.
    pub(crate) async fn successor(&self) -> Successor {
        let mut successor = self.successor.subscribe();
        loop {
            if let Ok(found) = successor.wait_for(Option::is_some).await
                && let Some(found) = found.clone()
            {
                return found;
            }
        }
    }

    /// Ends the ownership, and lets the successor take the pool over. Clients are served no more since
    /// `paused_at`. Returns the error with which the pool ends here.
    pub(crate) async fn hand_over(
        self: &Arc<Self>,
        successor: Successor,
        clock: Arc<dyn Clock>,
        paused_at: Instant,
    ) -> Error {
        self.successor.send_replace(None);
        let owned = match self.member() {
            Some(member) => member.local().owned().await,
            None => None,
        };
        if !owned.is_some_and(|owned| owned.resign()) {
            tracing::info!(
                "the lease of this node has to run out before another one serves the pool"
            );
        }
        let what = format!("serve the pool: it moves to node {}", successor.name);
        let roles = Arc::clone(self);
        tokio::spawn(async move {
            let node = successor.name.clone();
            let moved = async {
                successor.order(&roles).await?;
                successor.wait_until_served(&roles).await
            };
            let moved = timeout(MOVE_MAX, moved).await.unwrap_or_else(|_| {
                let what = format!(
                    "move the pool to node {node}: it has not come to serve it in {MOVE_MAX:?}"
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            });
            let info = match moved {
                Ok(()) => {
                    let pause = clock.since(paused_at);
                    let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
                    tracing::info!(node, pause_ms, "the pool has moved");
                    MoveInfo { node, pause_ms: Some(pause_ms), error: None }
                }
                Err(error) => {
                    tracing::warn!(
                        error = %error.chain(),
                        "could not hand the pool over; a member of its log takes it over"
                    );
                    MoveInfo { node, pause_ms: None, error: Some(error.chain()) }
                }
            };
            *roles.last_move.lock() = Some(info);
        });
        Error::new(ErrorKind::Fenced, what)
    }

    /// Notes that the last hand-over did not take place.
    pub(super) fn moved_not(&self, why: &str) {
        if let Some(info) = &mut *self.last_move.lock() {
            info.error = Some(format!("move the pool to node {}: {why}", info.node));
        }
    }

    /// The last hand-over from this node.
    ///
    /// # Errors
    /// `NotFound` if there was none since the daemon was started.
    pub(super) fn own_last_move(&self) -> Result<MoveInfo> {
        self.last_move.lock().clone().ok_or_else(|| {
            let what = "show the last move of the pool: this daemon has not moved it";
            Error::new(ErrorKind::NotFound, what)
        })
    }
}
