//! The members of a pool's log, from the run-time part ([`ensemble`]) to the engine's trait.
//!
//! Invariants:
//! - An owner's side of the log ends with its role.

use async_trait::async_trait;
use block::env::Clock;
use block::{Epoch, Error, ErrorKind, Lsn, Result};
use cluster::NodeId;
use control::manifest::Configuration;
use engine::log_members::{LogMembers, LogTaken, OwnerRole};
use ensemble::{
    ClusterPeers, LocalMember, LocalOptions, MemberStatus, OwnedLog, OwnedOptions, Peers, TakeOver,
    open_ring, page_cache_of,
};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;
use wal::{Log, LogOptions};

/// The member on this node, and the way to the others.
pub struct EnsembleMembers {
    local: LocalMember,
    peers: Arc<dyn PoolPeers>,
    options: OwnedOptions,
    clock: Arc<dyn Clock>,
}

/// The way to the members of a pool's log on other nodes.
pub trait PoolPeers: Peers {
    /// Takes the nodes of the members from a configuration.
    fn reach(&self, configuration: &Configuration);
}

impl PoolPeers for ClusterPeers {
    fn reach(&self, configuration: &Configuration) {
        let nodes = configuration.members.iter();
        self.set_nodes(nodes.map(|member| (member.id, NodeId(member.node))).collect());
    }
}

/// Time without progress after which an opening is given up. Chosen by hand: a member may have to write a whole ring
/// first.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Pause between two looks at the progress. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// The role of the owner, with its side of the log.
struct EnsembleRole {
    clock: Arc<dyn Clock>,
    local: LocalMember,
    owned: OwnedLog,
    _role: ensemble::OwnerRole,
}

impl std::fmt::Debug for EnsembleRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnsembleRole").field("local", &self.local.id()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for EnsembleMembers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnsembleMembers").field("local", &self.local.id()).finish_non_exhaustive()
    }
}

impl EnsembleMembers {
    /// Joins the member on this node with the way to the others.
    #[must_use]
    pub fn new(
        local: LocalMember,
        peers: Arc<dyn PoolPeers>,
        options: OwnedOptions,
        clock: Arc<dyn Clock>,
    ) -> Self {
        EnsembleMembers { local, peers, options, clock }
    }

    /// The member on this node.
    #[must_use]
    pub fn local(&self) -> &LocalMember {
        &self.local
    }

    /// Identity of the member on this node.
    #[must_use]
    pub fn id(&self) -> Uuid {
        self.local.id()
    }

    /// Takes the nodes of the members from a configuration that is about to hold.
    pub fn reach(&self, configuration: &Configuration) {
        self.peers.reach(configuration);
    }

    /// Returns the surroundings of the member whose log is in `dir`.
    #[must_use]
    pub fn local_options(
        dir: &Path,
        pool: Uuid,
        log: LogOptions,
        clock: Arc<dyn Clock>,
    ) -> LocalOptions {
        let open_log = open_ring(dir.to_owned(), pool, log, page_cache_of);
        LocalOptions { dir: dir.to_owned(), pool, clock, open_log }
    }
}

/// Converts a configuration of the manifest chain.
pub(crate) fn configuration_of(
    number: u64,
    configuration: &Configuration,
) -> replication::Configuration {
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
        destaged: Lsn,
    ) -> Result<LogTaken> {
        self.peers.reach(configuration);
        let taking = TakeOver {
            epoch,
            configuration: configuration_of(number, configuration),
            trim_lsn: destaged,
            peers: Arc::clone(&self.peers) as _,
            options: self.options,
        };
        let ensemble::Taken { owned, quorum, role } = taking.run(&self.local).await?;
        let clock = Arc::clone(&self.clock);
        let role = EnsembleRole { clock, local: self.local.clone(), owned, _role: role };
        Ok(LogTaken { quorum, role: Box::new(role) })
    }
}

#[async_trait]
impl OwnerRole for EnsembleRole {
    async fn opened(&self, log: &Log) -> Result<()> {
        self.owned.attach(Box::new(log.downgrade()));
        // They end with the owner's side.
        self.owned.start();
        tokio::select! {
            opened = self.local.opened() => opened,
            error = stalled(&self.owned, &*self.clock) => Err(error),
        }
    }
}

/// Resolves when no other member has taken anything of the log for a while.
async fn stalled(owned: &OwnedLog, clock: &dyn Clock) -> Error {
    let written = || owned.statuses().values().map(|status| status.written).sum::<u64>();
    let (mut most, mut progressed_at) = (written(), clock.now());
    while clock.since(progressed_at) < STALL_MAX {
        tokio::time::sleep(LOOK_PAUSE).await;
        let now = written();
        if now > most {
            (most, progressed_at) = (now, clock.now());
        }
    }
    let troubles: BTreeSet<String> =
        owned.statuses().values().filter_map(MemberStatus::trouble).collect();
    let troubles = Vec::from_iter(troubles).join("; ");
    let what = format!(
        "open the write log: too few members have taken anything of it for {STALL_MAX:?}: {troubles}"
    );
    Error::new(ErrorKind::Unavailable, what)
}

#[cfg(test)]
mod tests;
