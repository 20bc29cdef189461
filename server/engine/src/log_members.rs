//! The members of a pool's write log, as the engine sees them: a pool whose log is on several machines
//! opens where they have decided that the log ends, and serves once they agree.
//!
//! Invariants:
//! - The members are asked after the pool is taken in the manifest chain and before its log is opened.
//! - Nothing of the pool is served, and no job of it runs, before a quorum has the opening batch.

use async_trait::async_trait;
use block::{Epoch, Lsn, Result};
use control::manifest::Configuration;
use wal::{Log, QuorumTail};

/// The end of a log that its members have decided, and the role of the owner that opens the log there.
#[derive(Debug)]
pub struct LogTaken {
    /// The end.
    pub quorum: QuorumTail,
    /// The role.
    pub role: Box<dyn OwnerRole>,
}

/// The role of an owner. Dropping it makes the node a plain member, once the log is closed.
#[async_trait]
pub trait OwnerRole: Send + Sync + std::fmt::Debug + 'static {
    /// Names the log that was opened at the decided end. Resolves once a quorum has its opening batch.
    ///
    /// # Errors
    /// `Fenced` if another node has taken the pool since.
    async fn opened(&self, log: &Log) -> Result<()>;
}

/// The members of one pool's log, and the member on this node among them.
#[async_trait]
pub trait LogMembers: Send + Sync + std::fmt::Debug + 'static {
    /// Fences the owners of earlier epochs, finds the end of the log, and brings the log on this node to
    /// it. `number` is that of the link with `configuration`. Everything up to `destaged` is in the store,
    /// which gives a full ring room. Waits as long as too few members answer.
    /// The log's directory is free afterwards.
    ///
    /// # Errors
    /// `Fenced` if another node has taken the pool since; `Corrupt` if so many logs are damaged that
    /// flushed writes may be gone.
    async fn take_over(
        &self,
        epoch: Epoch,
        number: u64,
        configuration: &Configuration,
        destaged: Lsn,
    ) -> Result<LogTaken>;
}
