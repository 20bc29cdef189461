//! Connections to members, as the owner and a candidate use them.
//!
//! Invariants:
//! - A link delivers in order, or ends. After its end, requests that were under way may still reach the
//!   member.

use async_trait::async_trait;
use block::Result;
use replication::{Answer, MemberId, Request};
use tokio::sync::mpsc;

/// A connection to one member. It ends when either channel closes.
pub struct Link {
    /// Takes requests.
    pub requests: mpsc::Sender<Request>,
    /// Brings the answers, in the order of the requests that have one.
    pub answers: mpsc::Receiver<Answer>,
}

/// Finds members and connects to them.
#[async_trait]
pub trait Peers: Send + Sync + 'static {
    /// Connects to a member. Ends within ten seconds.
    ///
    /// # Errors
    /// `Unavailable` if the member does not answer; `Denied` if its node refuses this one, or has
    /// another member of the pool; `NotFound` if its node is not known, was removed, or has no member of
    /// the pool.
    async fn connect(&self, member: MemberId) -> Result<Link>;

    /// Returns the name of the member's node, for messages.
    fn name_of(&self, member: MemberId) -> String {
        member.to_string()
    }

    /// Whether the member is in the zone of this node. Asked once for each link.
    fn is_in_own_zone(&self, _member: MemberId) -> bool {
        true
    }
}
