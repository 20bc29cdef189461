//! The end of an ownership, and the proof that it lasts.
//!
//! Invariant: a pool that another node owns serves nothing any more.

use super::Pool;
use async_recursion::async_recursion;
use block::{Error, Result};

impl Pool {
    /// Ends the pool, which another node owns: nothing is served from now on.
    pub fn lose(&self, error: Error) {
        self.shared.fail(error);
    }

    /// Confirms that this process owns the pool at a moment after the call. Without members of the log, the store
    /// tells.
    ///
    /// # Errors
    /// The failure of the pool, if it does not own it any more; those of reading the store.
    #[async_recursion]
    pub async fn confirm_ownership(&self) -> Result<()> {
        self.shared.check_serving()?;
        match self.shared.log.has_replicas() {
            true => self.shared.log.await_lease().await,
            false => self.shared.tier.check_owner().await,
        }
    }
}
