//! The members of a pool's write log.

use serde::{Deserialize, Serialize};

/// The members, as the owner of the pool knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembersInfo {
    /// Each of them.
    pub members: Vec<MemberInfo>,
    /// Number of members that have a write before it is acknowledged.
    pub quorum: u64,
    /// The owner's conduct without a quorum.
    pub degraded: Degraded,
    /// Nodes that the owner left out because too few members answered. They become members again when
    /// they are back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub away: Vec<String>,
}

/// The conduct of the owner without a quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Degraded {
    /// Reads and writes wait.
    Block,
    /// The owner goes on with the members that answer.
    Solo,
    /// Like `Solo`, and a flush waits until the store has the data.
    Store,
}

impl MembersInfo {
    /// Losses of machines that an acknowledged write survives.
    #[must_use]
    pub fn losses(&self) -> u64 {
        (self.members.len() as u64).min(self.quorum).saturating_sub(1)
    }

    /// Whether each flush waits for the store.
    #[must_use]
    pub fn flushes_to_store(&self) -> bool {
        self.degraded == Degraded::Store && !self.away.is_empty()
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
