//! Undoes the ownership of an opening that has failed: the previous owner has the pool again.
//!
//! Invariants:
//! - Numbers and epochs never go back. The manifest that gives a pool back has the epoch of the
//!   failed opening, and names in `held_epoch` the one that the owner's directory knows.
//! - A pool that was open in this directory, and not closed in order, stays so: its log is here.
//! - The members of the log are those of before: an opening that has failed removes no member.

use super::own_links::{OwnLinks, Step};
use super::{Manifest, NodeDir, Ownership};
use crate::chain::Chain;
use async_recursion::async_recursion;
use block::Result;
use block::seal::PoolKey;

impl Ownership {
    /// Ownership as if `manifest` had been created.
    pub(super) fn perhaps(
        chain: Chain,
        key: &PoolKey,
        manifest: Manifest,
        previous: Option<Manifest>,
        node: &NodeDir,
    ) -> Ownership {
        let (key, is_from_copy) = (key.clone(), node.is_copy());
        let is_by_quorum = manifest.configuration.is_some();
        Ownership { chain, key, own: OwnLinks::new(manifest), previous, is_from_copy, is_by_quorum }
    }

    /// Undoes [`Ownership::acquire`] for an opening that has failed: the pool returns to its
    /// previous owner, unchanged except for a new epoch. Only while nothing was written to the
    /// pool's metadata and nothing was served. Returns whether it was taken from another owner and
    /// is theirs again.
    ///
    /// # Errors
    /// `Fenced` if another owner took over meanwhile; store errors.
    #[async_recursion]
    pub async fn give_back(&self, node: &NodeDir) -> Result<bool> {
        let manifest = self.manifest();
        let is_own = manifest.owner_since_epoch != manifest.epoch && !self.is_from_copy;
        let configuration = self.previous.as_ref().and_then(|one| one.configuration.as_ref());
        let previous = match &self.previous {
            // It was open here, and not closed in order: it stays so, and its log is here.
            Some(previous) if is_own && !previous.is_released => {
                self.advance(Step::Configure(configuration)).await?;
                return Ok(false);
            }
            // The directory has recorded the new epoch as the one that it held.
            Some(previous)
                if is_own && previous.removed_at.is_none() && node.epoch() == self.epoch() =>
            {
                self.advance(Step::Configure(configuration)).await?;
                self.release().await?;
                return Ok(true);
            }
            Some(previous) => previous,
            None => {
                self.release().await?;
                return Ok(true);
            }
        };
        self.advance(Step::GiveBack(previous)).await?;
        Ok(true)
    }

    /// Gives the pool back after a create with an unknown outcome, if it is ours.
    pub(super) async fn give_back_if_taken(&self, bytes: &bytes::Bytes, node: &NodeDir) {
        let name = self.chain.name(self.manifest().number);
        let given_back = match self.chain.read(self.manifest().number).await {
            Ok(Some(found)) if found == *bytes => self.give_back(node).await.map(drop),
            Ok(_) => return,
            Err(error) => Err(error),
        };
        if let Err(error) = given_back {
            tracing::warn!(
                object = name,
                error = %error.chain(),
                "could not find out whether this directory has taken the pool; open the pool from \
                 here once the store answers"
            );
        }
    }
}
