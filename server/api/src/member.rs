//! The members of a pool's write log.

use serde::{Deserialize, Serialize};

/// The members, as the owner of the pool knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembersInfo {
    /// Each of them.
    pub members: Vec<MemberInfo>,
    /// Number of members that have a write before it is acknowledged.
    pub quorum: u64,
    /// The owner's conduct without a quorum: `block`, `solo` or `store`.
    pub degraded: String,
}

impl MembersInfo {
    /// Losses of machines that an acknowledged write survives.
    #[must_use]
    pub fn losses(&self) -> u64 {
        (self.members.len() as u64).min(self.quorum).saturating_sub(1)
    }
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Name of its node.
    pub node: String,
    /// Its identity, a UUID.
    pub id: String,
    /// The node owns the pool.
    pub is_owner: bool,
    /// The owner has a connection to it.
    pub is_connected: bool,
    /// The reason why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Acknowledged batches that it lacks.
    pub behind: u64,
    /// Bytes of batches sent to it since the pool was opened.
    pub sent_bytes: u64,
    /// Microseconds from a request to its answer, on average over about the last ten; absent for the
    /// owner and before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_us: Option<u64>,
}
