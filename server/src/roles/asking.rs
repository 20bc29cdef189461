//! Requests of the command line on a node that does not own the pool: they are passed on to the owner.
//!
//! Invariants:
//! - Only requests about the pool are passed on. Those about a node, its devices, its files or secrets
//!   stay where they were made.
//! - A request that another node passed on is carried out completely, also if the node no longer waits. It
//!   ends before the pool is closed.

use super::Roles;
use super::messages::{self, Answer, Question};
use api::data::DataRequest;
use api::pool::{MoveInfo, PoolRequest};
use api::volume::VolumeRequest;
use api::{Reply, Request};
use async_trait::async_trait;
use block::{Error, ErrorKind, Result};
use cluster::NodeId;
use config::DriveUrl;
use control::store::Store;
use std::sync::Arc;
use tokio::sync::{RwLock, watch};
use uuid::Uuid;

/// Answers requests about the pool that this node owns.
#[async_trait]
pub(crate) trait Desk: Send + Sync + 'static {
    /// Carries a request out.
    async fn answer(&self, request: Request) -> Result<Reply>;
}

/// The place of the desk while this node serves the pool.
#[derive(Default)]
pub(super) struct Desks {
    desk: Arc<RwLock<Option<Arc<dyn Desk>>>>,
    closes: watch::Sender<bool>,
}

/// Whether a request may be passed on to the owner.
fn concerns_pool(request: &Request) -> bool {
    match request {
        Request::Pool(request) => match request {
            PoolRequest::Status {}
            | PoolRequest::Drain {}
            | PoolRequest::Fsck {}
            | PoolRequest::RepairCounts { .. }
            | PoolRequest::Members {}
            | PoolRequest::AddMember { .. }
            | PoolRequest::ReplaceMember { .. }
            | PoolRequest::RemoveMember { .. }
            | PoolRequest::SetDegraded { .. }
            | PoolRequest::Move { .. } => true,
            PoolRequest::Stop {} | PoolRequest::TakeOver {} | PoolRequest::LastMove {} => false,
        },
        Request::Volume(VolumeRequest::Recover { .. }) => false,
        Request::Volume(_) | Request::Snapshot(_) | Request::Scrub(_) | Request::Doctor(_) => true,
        // A new store may be a directory of this machine, and its credentials in variables of this process.
        Request::Data(DataRequest::Replace { new, env_prefix, .. }) => {
            env_prefix.is_none() && is_anywhere(new)
        }
        Request::Data(_) => true,
        // They name files, variables or devices of the machine on which they were made.
        Request::Copy(_)
        | Request::Restore(_)
        | Request::Key(_)
        | Request::Device(_)
        | Request::Node(_) => false,
    }
}

/// Whether a URL means the same on every node.
fn is_anywhere(url: &str) -> bool {
    matches!(DriveUrl::parse(url), Ok(Some(_))) || matches!(Store::dir_of(url), Ok(None))
}

impl Roles {
    /// Passes a request on to the owner of the pool; `None` if it is none to be passed on, or the
    /// owner is not known or is this node.
    pub(crate) async fn ask_owner(&self, request: Request) -> Option<Result<Reply>> {
        if !concerns_pool(&request) {
            return None;
        }
        let manifest = self.manifest().await.ok().flatten()?;
        let member = manifest.configuration.as_ref()?.member(manifest.owner.node_id)?;
        if self.member().is_some_and(|own| own.id() == member.id) {
            return None;
        }
        let is_move = matches!(&request, Request::Pool(PoolRequest::Move { .. }));
        let question = Question::Ask { pool: manifest.pool, request: Box::new(request) };
        let answered = messages::ask(&self.cluster, NodeId(member.node), &question).await;
        if is_move && matches!(answered, Ok(Answer::Reply { .. })) {
            *self.moved_from.lock() = Some(NodeId(member.node));
        }
        Some(answered.and_then(|answer| match answer {
            Answer::Reply { reply } => Ok(*reply),
            Answer::Failed { failure } => Err(Error::from(failure)),
            _ => {
                let what = "ask the owner of the pool: its answer is not understood";
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }))
    }

    /// Lets `desk` answer what other nodes pass on.
    pub(crate) async fn open_desk(&self, desk: Arc<dyn Desk>) {
        self.desks.closes.send_replace(false);
        *self.desks.desk.write().await = Some(desk);
    }

    /// Ends the requests that other nodes have passed on, and accepts no more.
    pub(crate) async fn close_desk(&self) {
        self.desks.closes.send_replace(true);
        *self.desks.desk.write().await = None;
    }

    /// Answers a request that another node passed on.
    pub(super) async fn answer_passed_on(&self, pool: Uuid, request: Request) -> Result<Answer> {
        let is_ours = self.member().is_some_and(|member| member.local().pool() == pool);
        let mut closes = self.desks.closes.subscribe();
        let guard = Arc::clone(&self.desks.desk).read_owned().await;
        let found = guard.clone().filter(|_| is_ours && concerns_pool(&request));
        let Some(desk) = found else {
            let what = "answer for the pool: this node does not serve it";
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        // A change of the members that is dropped halfway would leave two configurations.
        let answering = tokio::spawn(async move {
            let _guard = guard;
            tokio::select! {
                biased;
                answered = desk.answer(request) => answered,
                _ = closes.wait_for(|closes| *closes) => {
                    let what = "answer for the pool: this node ceases to serve it; ask again";
                    Err(Error::new(ErrorKind::Unavailable, what))
                }
            }
        });
        let answered = answering.await.unwrap_or_else(|error| {
            Err(Error::with_source(ErrorKind::Io, "answer for the pool", error))
        });
        Ok(match answered {
            Ok(reply) => Answer::Reply { reply: Box::new(reply) },
            Err(error) => Answer::Failed { failure: (&error).into() },
        })
    }

    /// Returns how the last hand-over went that was made from this node, or asked for on it.
    ///
    /// # Errors
    /// `NotFound` if there was none since the daemon was started; those of asking the node that had the
    /// pool.
    pub(crate) async fn last_move(&self) -> Result<MoveInfo> {
        let from = *self.moved_from.lock();
        let Some(node) = from else { return self.own_last_move() };
        match messages::ask(&self.cluster, node, &Question::LastMove {}).await? {
            Answer::Moved { info } => Ok(info),
            _ => {
                let what = "ask a node how the pool has moved: its answer is not understood";
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }
}
