//! The volume record: everything that a pool remembers of a volume besides its contents.
//!
//! Invariants:
//! - A record is an absolute image: the newest one in the log, or else the one in the metadata, is
//!   the truth, so replaying one twice changes nothing.
//! - Records are never deleted, so no id is given out twice: a purged volume leaves a tombstone of
//!   a few bytes.
//! - Records are stored as JSON with a version (docs/format.md, "Volume record"): they are rare,
//!   small, and readable by a person at 3 a.m. They are sealed like everything else in the log and
//!   the metadata.

use crate::client_record::ClientRecord;
use crate::schedule::Schedule;
use crate::snapshot::SnapshotRecord;
use block::{Epoch, Error, ErrorKind, Result};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Version of a record of a volume without a dedicated key.
pub const VERSION: u32 = 1;
/// Version of a record of a volume with its dedicated key: a program that does not know such keys would
/// use the pool's.
pub const KEYED_VERSION: u32 = 2;

/// Most bytes of an encoded record. Chosen by hand: as many clients as may have volumes, with labels of the greatest
/// length, need 620 KiB. Below the limit of the log.
pub const RECORD_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(RECORD_BYTES_MAX <= wal::RECORD_BYTES_MAX);

/// The promise of an answered request. The words are those of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// `Flush` for clients on this machine, `Write` for those that reach it over a network, because
    /// they survive a reboot that the unsynced tail of the log may not.
    #[default]
    Auto,
    /// An answered write is in the log file, where a crash of the daemon cannot harm it. A flush or
    /// FUA protects it from a loss of power.
    Flush,
    /// Every answer waits for stable storage. For clients that survive a reboot of this machine.
    Write,
    /// Like `Flush`, and a flush or FUA also waits until the object store holds the data.
    Store,
}

/// The stages in the life of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum VolumeState {
    /// It is served.
    Present,
    /// It was removed and can be restored until its contents are purged.
    Removed {
        /// Seconds since the Unix epoch.
        removed_at: u64,
    },
    /// Its contents are gone; only the id stays.
    Purged,
}

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    version: u32,
    /// Identity within the pool, never reused, never 0.
    pub id: u32,
    /// Name of its exports.
    pub name: String,
    /// Size in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// The promise of its answers.
    pub durability: Durability,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// A reboot may have lost writes that were answered but never flushed, and no one has confirmed
    /// yet that no client from before it is still running. Clients on other machines are refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_lost_writes: bool,
    /// Epoch in which the volume last lost writes, or 0. A client that attached in an earlier
    /// epoch has seen writes that are gone, even if the loss was accepted since.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost_writes_in: u64,
    /// Seconds since the Unix epoch at which the volume is removed automatically, or 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub expires_at: u64,
    /// Schedule of its automatic snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Volume that its dedicated key was made for; 0 if it uses the pool's key.
    #[serde(default, skip_serializing_if = "is_zero_id")]
    pub dedicated_key: u32,
    /// Data destaged from it is looked up among the stored data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_dedup: bool,
    /// Clients that it is attached to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<ClientRecord>,
    /// Stage in its life.
    #[serde(flatten)]
    pub state: VolumeState,
}

impl VolumeRecord {
    /// Returns the record of a volume that is present and writable.
    #[must_use]
    pub fn new(id: u32, name: &str, size_bytes: u64, durability: Durability, now: u64) -> Self {
        VolumeRecord {
            version: VERSION,
            id,
            name: name.to_owned(),
            size_bytes,
            durability,
            is_read_only: false,
            created_at: now,
            has_lost_writes: false,
            lost_writes_in: 0,
            expires_at: 0,
            schedule: None,
            dedicated_key: 0,
            is_dedup: false,
            clients: Vec::new(),
            state: VolumeState::Present,
        }
    }

    /// The same record, under the key that was made for the volume with this id, or under the
    /// pool's for 0.
    #[must_use]
    pub fn with_dedicated_key(self, dedicated_key: u32) -> Self {
        let version = if dedicated_key == 0 { VERSION } else { KEYED_VERSION };
        VolumeRecord { version, dedicated_key, ..self }
    }

    /// Tells whether a client that attached in `epoch`, with the volume lost writes or not at that
    /// time, has seen writes that are gone.
    #[must_use]
    pub fn has_lost_writes_since(&self, epoch: Epoch, had_lost_writes: bool) -> bool {
        epoch.0 < self.lost_writes_in || (self.has_lost_writes && !had_lost_writes)
    }

    /// The record of the volume as a snapshot shows it, which its clients are told. Never stored.
    #[must_use]
    pub fn of_snapshot(&self, snapshot: &SnapshotRecord) -> VolumeRecord {
        VolumeRecord {
            name: format!("{}@{}", self.name, snapshot.name),
            size_bytes: snapshot.size_bytes,
            is_read_only: true,
            created_at: snapshot.created_at,
            has_lost_writes: false,
            schedule: None,
            clients: Vec::new(),
            ..self.clone()
        }
    }

    /// The image that goes into the log and the metadata.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a record has only plain fields").into()
    }

    /// Decodes an image.
    ///
    /// # Errors
    /// `Corrupt` if it is not an image, `Unsupported` if a newer release wrote it.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(Error::new(ErrorKind::Corrupt, "decode volume record: it is too long"));
        }
        let record: VolumeRecord = serde_json::from_slice(bytes).map_err(|source| {
            Error::with_source(ErrorKind::Corrupt, "decode volume record", source)
        })?;
        if !matches!(record.version, VERSION | KEYED_VERSION) {
            let what = format!(
                "decode volume record: version {} was written by a newer spindle; use that one",
                record.version
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if record.id == 0 {
            return Err(Error::new(ErrorKind::Corrupt, "decode volume record: id is 0"));
        }
        if (record.version == KEYED_VERSION) != (record.dedicated_key != 0) {
            let what = "decode volume record: its key does not fit its version";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok(record)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero_id(number: &u32) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_form_stays_readable() {
        let golden = r#"{"version":1,"id":7,"name":"db","size_bytes":1073741824,"durability":"flush","is_read_only":false,"created_at":1700000000,"state":"present"}"#;
        let record = VolumeRecord::new(7, "db", 1 << 30, Durability::Flush, 1_700_000_000);
        assert_eq!(record.encode(), golden.as_bytes());
        assert_eq!(VolumeRecord::decode(golden.as_bytes()).unwrap(), record);
        let removed = golden.replace(r#""present""#, r#""removed","removed_at":5"#);
        let record = VolumeRecord::decode(removed.as_bytes()).unwrap();
        assert_eq!(record.state, VolumeState::Removed { removed_at: 5 });
        let with = golden.replace(r#","state""#, r#","is_dedup":true,"state""#);
        let mut record = VolumeRecord::decode(golden.as_bytes()).unwrap();
        record.is_dedup = true;
        assert_eq!(record.encode(), with.as_bytes());
        assert_eq!(VolumeRecord::decode(with.as_bytes()).unwrap(), record);
        let keyed = r#"{"version":2,"id":7,"name":"db","size_bytes":1073741824,"durability":"flush","is_read_only":false,"created_at":1700000000,"dedicated_key":3,"state":"present"}"#;
        let record = VolumeRecord::decode(golden.as_bytes()).unwrap().with_dedicated_key(3);
        assert_eq!(record.encode(), keyed.as_bytes());
        assert_eq!(VolumeRecord::decode(keyed.as_bytes()).unwrap(), record);
        // A reader of version 1 would not see the key.
        for wrong in [
            keyed.replace(r#""version":2"#, r#""version":1"#),
            golden.replace(r#""version":1"#, r#""version":2"#),
        ] {
            assert_eq!(
                VolumeRecord::decode(wrong.as_bytes()).unwrap_err().kind(),
                ErrorKind::Corrupt
            );
        }
        let attached = golden.replace(
            r#","state""#,
            r#","clients":[{"pool":"00000000-0000-0000-0000-000000000001","client":"00000000-0000-0000-0000-000000000002","boot":"00000000-0000-0000-0000-000000000003","attachment":"00000000-0000-0000-0000-000000000004","label":"db1","attached_at":1700000000,"epoch":3}],"state""#,
        );
        let mut record = VolumeRecord::decode(golden.as_bytes()).unwrap();
        let id = uuid::Uuid::from_u128;
        record.clients = vec![ClientRecord {
            pool: id(1),
            client: id(2),
            boot: id(3),
            attachment: id(4),
            label: "db1".to_owned(),
            is_shared: false,
            attached_at: 1_700_000_000,
            epoch: 3,
            has_lost_writes: false,
        }];
        assert_eq!(record.encode(), attached.as_bytes());
        assert_eq!(VolumeRecord::decode(attached.as_bytes()).unwrap(), record);
        let newer = golden.replace(r#""version":1"#, r#""version":3"#);
        assert_eq!(
            VolumeRecord::decode(newer.as_bytes()).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        assert_eq!(VolumeRecord::decode(b"{}").unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
