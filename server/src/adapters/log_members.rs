//! The members of a pool's log, from the run-time part ([`ensemble`]) to the engine's trait.
//!
//! Invariants:
//! - A node has one owner's side at a time; leaving ownership ends it.

use async_trait::async_trait;
use block::env::{Clock, boot_id};
use block::{Epoch, Error, ErrorKind, Result};
use control::manifest::Configuration;
use engine::log_members::LogMembers;
use ensemble::{LocalMember, LocalOptions, OwnedLog, OwnedOptions, Peers, TakeOver, open_ring};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;
use wal::{Log, LogOptions, QuorumTail};

/// The member on this node, and the way to the others.
pub struct EnsembleMembers {
    local: LocalMember,
    peers: Arc<dyn Peers>,
    options: OwnedOptions,
    /// The owner's side, while this node is the owner or about to be.
    owned: Mutex<Option<OwnedLog>>,
}

impl std::fmt::Debug for EnsembleMembers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnsembleMembers").field("local", &self.local.id()).finish_non_exhaustive()
    }
}

impl EnsembleMembers {
    /// Joins the member on this node with the way to the others.
    #[must_use]
    pub fn new(local: LocalMember, peers: Arc<dyn Peers>, options: OwnedOptions) -> Self {
        EnsembleMembers { local, peers, options, owned: Mutex::new(None) }
    }

    /// Returns the surroundings of the member whose log is in `dir`.
    #[must_use]
    pub fn local_options(
        dir: &Path,
        pool: Uuid,
        log: LogOptions,
        clock: Arc<dyn Clock>,
    ) -> LocalOptions {
        let open_log = open_ring(dir.to_owned(), pool, log);
        LocalOptions { dir: dir.to_owned(), pool, boot: boot_id(), clock, open_log }
    }

    /// Returns the owner's side, if this node is the owner.
    #[must_use]
    pub fn owned(&self) -> Option<OwnedLog> {
        self.owned.lock().clone()
    }
}

fn configuration_of(number: u64, configuration: &Configuration) -> replication::Configuration {
    replication::Configuration {
        number,
        members: configuration.members.iter().map(|member| member.id).collect(),
        quorum: configuration.quorum,
    }
}

#[async_trait]
impl LogMembers for EnsembleMembers {
    async fn take_over(
        &self,
        epoch: Epoch,
        number: u64,
        configuration: &Configuration,
    ) -> Result<QuorumTail> {
        let taking = TakeOver {
            epoch,
            configuration: configuration_of(number, configuration),
            peers: Arc::clone(&self.peers),
            options: self.options,
        };
        let taken = taking.run(&self.local).await?;
        *self.owned.lock() = Some(taken.owned);
        Ok(taken.quorum)
    }

    async fn opened(&self, log: &Log) -> Result<()> {
        let Some(owned) = self.owned() else {
            let what = "open the pool: its node has not asked the members of the log";
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        owned.attach(Box::new(log.downgrade()));
        // They end with the owner's side.
        drop(owned.start());
        self.local.opened().await
    }

    async fn leave(&self) {
        if let Some(owned) = self.owned.lock().take() {
            owned.stop();
        }
        if let Err(error) = self.local.leave_ownership().await {
            tracing::warn!(
                error = %error.chain(),
                "could not make this node a plain member of the write log again"
            );
        }
    }
}

#[cfg(test)]
mod tests;
