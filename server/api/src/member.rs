//! The members of a pool's write log.

use block::quantities::ByteSize;
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
    /// The node that is brought up before it becomes a member, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joining: Option<JoiningInfo>,
    /// Bytes of the log since the pool was opened.
    #[serde(default)]
    pub traffic: TrafficInfo,
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

/// Bytes of a write log since the pool was opened: written, and sent to other members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficInfo {
    /// Batches that were acknowledged.
    pub written_bytes: u64,
    /// Batches sent to members in the zone of the owner, repeated ones included.
    pub sent_within_bytes: u64,
    /// Batches sent to members in other zones, repeated ones included.
    pub sent_across_bytes: u64,
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
    /// Zone of its node, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
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

/// A node that gets the log before it becomes a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoiningInfo {
    /// Its name.
    pub node: String,
    /// Acknowledged batches that it lacks.
    pub behind: u64,
    /// Bytes of batches sent to it.
    pub sent_bytes: u64,
    /// The reason why the owner does not reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A node that has become a member of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberAdded {
    /// Name of the node.
    pub node: String,
    /// Name of the node whose place it has taken, if it was to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<String>,
    /// Number of members, with this one.
    pub member_count: u64,
    /// Number of members that have a write before it is acknowledged.
    pub quorum: u64,
    /// Reason why it would have been refused without force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced: Option<String>,
    /// The network that was measured, of the new node first.
    pub paths: Vec<PathInfo>,
}

/// The network from one node to another, as it was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathInfo {
    /// Name of the node that measured.
    pub from: String,
    /// Name of the other one.
    pub to: String,
    /// Median time of a small request and its answer, in microseconds.
    pub round_trip_us: u64,
    /// Bytes that reached the other node in a second.
    pub bytes_per_second: u64,
    /// Reason why it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Formats a time in milliseconds, with one digit behind the point.
#[must_use]
pub fn milliseconds(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

/// Formats the time of a round trip, which is short within a machine or a rack.
#[must_use]
pub fn round_trip(us: u64) -> String {
    match us {
        0..1000 => format!("{us} µs"),
        _ => milliseconds(us),
    }
}

/// Formats a bandwidth.
#[must_use]
pub fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", ByteSize(bytes_per_second).rounded())
}
