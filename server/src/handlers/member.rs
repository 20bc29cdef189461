//! Answers the command line on a node that does not own the pool.
//!
//! Invariant: it changes nothing of the pool itself. Requests about the pool are passed on to its owner,
//! and the others name it.

use super::node;
use crate::admin::AdminHandler;
use crate::roles::Roles;
use api::pool::PoolRequest;
use api::{Reply, Request};
use block::{Error, ErrorKind, Result};
use std::sync::Arc;
use tokio::sync::watch;

/// The handler of a member.
pub(crate) struct MemberAdmin {
    roles: Arc<Roles>,
    stop: watch::Sender<bool>,
}

impl MemberAdmin {
    /// Makes the handler. A request to stop sets `stop`.
    pub(crate) fn new(roles: Arc<Roles>, stop: watch::Sender<bool>) -> MemberAdmin {
        MemberAdmin { roles, stop }
    }

    async fn elsewhere(&self) -> Error {
        let owner = match self.roles.manifest().await {
            Ok(Some(manifest)) => {
                let configuration = manifest.configuration.as_ref();
                let member = configuration.and_then(|one| one.member(manifest.owner.node_id));
                member.map(|member| format!("node {}", member.node_name))
            }
            Ok(None) | Err(_) => None,
        };
        let owner = owner.unwrap_or_else(|| "another node".to_owned());
        let name = &self.roles.config().name;
        let what = format!(
            "ask about pool {name}: {owner} owns it, and this node stores its log; ask there, or let this node take the \
             pool over with `spindle pool take-over`"
        );
        Error::new(ErrorKind::Unavailable, what)
    }
}

impl AdminHandler for MemberAdmin {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Pool(PoolRequest::Stop {}) => {
                self.stop.send_replace(true);
                Ok(Reply::Done { message: "stopping".to_owned() })
            }
            Request::Pool(PoolRequest::TakeOver {}) => {
                self.roles.take_over_by_order().await?;
                Ok(Reply::Done { message: "this node takes the pool over".to_owned() })
            }
            Request::Pool(PoolRequest::LastMove {}) => {
                self.roles.last_move().await.map(Reply::Moved)
            }
            Request::Node(request) => {
                node::answer(Some(self.roles.cluster()), &self.roles.config().dir, request).await
            }
            request => match self.roles.ask_owner(request).await {
                Some(answered) => answered,
                None => Err(self.elsewhere().await),
            },
        }
    }
}
