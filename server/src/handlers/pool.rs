//! Requests about the pool as a whole.

use super::{AdminPool, convert, name_of};
use crate::adapters::pool_volumes::Attachments;
use crate::roles::{
    Roles, add_member, begin_move, members_of, remove_member, replace_member, set_degraded,
};
use api::Reply;
use api::member;
use api::pool::PoolRequest;
use block::{Error, ErrorKind, Result};
use control::manifest::Degraded;
use engine::open_pool::OpenPool;
use std::sync::Arc;

impl AdminPool {
    pub(super) async fn pool(&self, open: &OpenPool, request: PoolRequest) -> Result<Reply> {
        match request {
            PoolRequest::Status {} => Ok(Reply::Status(Box::new(self.status(open).await))),
            PoolRequest::Drain {} => {
                let drained = open.pool.destage_all().await;
                let lsn = drained.map_err(|error| name_stalled(open, error))?;
                Ok(Reply::Done { message: format!("the store holds everything up to LSN {lsn}") })
            }
            PoolRequest::Fsck {} => {
                let (pool, key) = {
                    let keys = open.keys.lock().await;
                    (keys.pool(), keys.newest().key.clone())
                };
                // Next to the open pool, not through it: a walk of hours must not delay destage.
                let found = engine::fsck::fsck_of(&open.config, pool, &key).await?;
                Ok(Reply::Fsck(convert::fsck_info(found)))
            }
            PoolRequest::RepairCounts { segments } => repair_counts(open, &segments).await,
            PoolRequest::Members {} => Ok(Reply::Members(members_of(self.roles()?, open).await?)),
            PoolRequest::AddMember { node, force } => {
                add_member(self.roles()?, open, &node, force).await
            }
            PoolRequest::ReplaceMember { node, with, force } => {
                replace_member(self.roles()?, open, &node, with.as_deref(), force).await
            }
            PoolRequest::RemoveMember { node } => {
                let message = remove_member(self.roles()?, open, &node).await?;
                Ok(Reply::Done { message })
            }
            PoolRequest::SetDegraded { degraded } => {
                let to = match degraded {
                    member::Degraded::Block => Degraded::Block,
                    member::Degraded::Solo => Degraded::Solo,
                    member::Degraded::Store => Degraded::Store,
                };
                let message = set_degraded(self.roles()?, open, to).await?;
                Ok(Reply::Done { message })
            }
            PoolRequest::TakeOver {} => {
                Ok(Reply::Done { message: "this node owns the pool already".to_owned() })
            }
            PoolRequest::Move { node } => {
                let check = || match self.has_devices() {
                    true => {
                        let what = format!(
                            "move the pool to node {node}: volumes are attached as devices (`spindle attach list`), which \
                             stay with this node; detach them first"
                        );
                        Err(Error::new(ErrorKind::Busy, what))
                    }
                    false => Ok(()),
                };
                let message = begin_move(self.roles()?, open, &node, check).await?;
                Ok(Reply::Done { message })
            }
            PoolRequest::LastMove {} => self.roles()?.last_move().await.map(Reply::Moved),
            PoolRequest::Stop {} => {
                self.stop.send_replace(true);
                Ok(Reply::Done { message: "stopping".to_owned() })
            }
        }
    }
}

impl AdminPool {
    /// Whether a volume is a device of this machine, which another node could not serve.
    fn has_devices(&self) -> bool {
        self.attachments.as_ref().is_some_and(|devices: &Arc<Attachments>| devices.has_devices())
    }

    /// The node's roles.
    fn roles(&self) -> Result<&Roles> {
        self.roles.as_deref().ok_or_else(|| {
            let what = "ask about the members of the write log: this daemon is no node of a cluster; run `spindle node \
                        init`, or `spindle node join`, and start it again";
            Error::new(ErrorKind::Invalid, what)
        })
    }
}

async fn repair_counts(open: &OpenPool, segments: &[u64]) -> Result<Reply> {
    let repaired = open.pool.tier().repair_counts(segments).await?;
    let said = |(number, was, is): &(u64, u32, u32)| format!("segment {number}: {was} is now {is}");
    let each: Vec<String> = repaired.iter().map(said).collect();
    let message = match each.is_empty() {
        true => "every count is right by now".to_owned(),
        false => format!("counts of live blocks were corrected: {}", each.join(", ")),
    };
    Ok(Reply::Done { message })
}

/// Adds the names of the volumes that keep the store from holding everything.
fn name_stalled(open: &OpenPool, error: Error) -> Error {
    let stalled = open.pool.destage_progress().stalled;
    if stalled.is_empty() {
        return error;
    }
    let names: Vec<String> = stalled.keys().map(|volume| name_of(open, *volume)).collect();
    error.context(format!(
        "copy all data of volume {} to the store (`spindle status` shows the cause and the remedy)",
        names.join(", ")
    ))
}
