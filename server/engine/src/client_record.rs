//! The record of a client that a volume is attached to.
//!
//! It is part of the record of its volume: the write log carries it to every member of the pool, and the metadata keeps
//! it, so it survives the owner's machine.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A client that a volume is attached to. Stored as JSON (docs/format.md, "Volume record").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientRecord {
    /// Pool in which it was attached. A record with another pool came with a copy of the volume, and grants nothing.
    pub pool: Uuid,
    /// Identity of the client.
    pub client: Uuid,
    /// Boot id of the client's machine.
    pub boot: Uuid,
    /// Identity of the attachment.
    pub attachment: Uuid,
    /// Label that the client gives itself.
    pub label: String,
    /// Other writers are allowed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_shared: bool,
    /// Seconds since the Unix epoch.
    pub attached_at: u64,
    /// Epoch of the pool in which it was attached.
    pub epoch: u64,
    /// The volume had lost writes before the client attached: the client has seen nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_lost_writes: bool,
}
