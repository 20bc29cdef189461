//! The volume record: what a pool remembers of a volume besides its contents.
//!
//! Invariants:
//! - A record is an absolute image: the newest one in the log, else the one in the metadata, is
//!   the truth, so replaying one twice changes nothing.
//! - Records are never deleted, so an id is never given out twice: a purged volume leaves a
//!   tombstone of a few bytes.
//! - Stored as JSON with a version (docs/format.md, "Volume record"): rare, small, and readable by
//!   a person at 3 a.m. It is sealed like everything else in the log and the metadata.

use crate::schedule::Schedule;
use crate::snapshot::SnapshotRecord;
use block::{Epoch, Error, ErrorKind, Result};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Version of a record without a key of its own.
pub const VERSION: u32 = 1;
/// Version of one with: who does not know of such keys would use the pool's.
pub const KEYED_VERSION: u32 = 2;

/// Bytes of an encoded record at most. Chosen by hand: ten times what the longest name needs.
pub const RECORD_BYTES_MAX: usize = 4096;

/// What an answered request promises. The words are those of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// `Flush` for clients on this machine, `Write` for those that reach it over a network,
    /// because they survive a reboot that the unsynced tail of the log may not.
    #[default]
    Auto,
    /// A write is in the log file when it is answered: safe from a crash of the daemon. A flush or
    /// FUA makes it safe from a loss of power.
    Flush,
    /// Every answer waits for stable storage. For clients that survive a reboot of this machine.
    Write,
    /// As `Flush`, and a flush or FUA also waits until the object store holds the data.
    Store,
}

/// Where a volume is in its life.
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
    /// What its answers promise.
    pub durability: Durability,
    /// No write is accepted.
    pub is_read_only: bool,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// A reboot may have taken writes that were answered but never flushed, and nobody has said yet
    /// that no client of before goes on: clients on other machines are refused.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_stepped_back: bool,
    /// Epoch in which it stepped back last, or 0. What was attached in an earlier one has seen what is
    /// gone, whoever has accepted that since.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stepped_back_in: u64,
    /// Seconds since the Unix epoch from which it is removed by itself, or 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub expires_at: u64,
    /// When snapshots of it are made by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Volume that its own key was made for, or 0: it is under the pool's.
    #[serde(default, skip_serializing_if = "is_zero_id")]
    pub own_key: u32,
    /// What is destaged of it is looked for among what is stored.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_dedup: bool,
    /// Where it is in its life.
    #[serde(flatten)]
    pub state: VolumeState,
}

impl VolumeRecord {
    /// A volume that is present and writable.
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
            is_stepped_back: false,
            stepped_back_in: 0,
            expires_at: 0,
            schedule: None,
            own_key: 0,
            is_dedup: false,
            state: VolumeState::Present,
        }
    }

    /// The same, under the key that was made for the volume with this id; 0: the pool's.
    #[must_use]
    pub fn with_own_key(self, own_key: u32) -> Self {
        let version = if own_key == 0 { VERSION } else { KEYED_VERSION };
        VolumeRecord { version, own_key, ..self }
    }

    /// What was attached in `epoch`, when the volume had stepped back before or not, has seen what is
    /// gone.
    #[must_use]
    pub fn has_stepped_back_since(&self, epoch: Epoch, was_stepped_back: bool) -> bool {
        epoch.0 < self.stepped_back_in || (self.is_stepped_back && !was_stepped_back)
    }

    /// Of the volume as a snapshot shows it: what its clients are told. Never stored.
    #[must_use]
    pub fn of_snapshot(&self, snapshot: &SnapshotRecord) -> VolumeRecord {
        VolumeRecord {
            name: format!("{}@{}", self.name, snapshot.name),
            size_bytes: snapshot.size_bytes,
            is_read_only: true,
            created_at: snapshot.created_at,
            is_stepped_back: false,
            schedule: None,
            ..self.clone()
        }
    }

    /// The image that goes into the log and the metadata.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a record has only plain fields").into()
    }

    /// Reads an image.
    ///
    /// # Errors
    /// `Corrupt` when it is not one, `Unsupported` when a newer release wrote it.
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
        if (record.version == KEYED_VERSION) != (record.own_key != 0) {
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

pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

/// A word of `spindle attach`, which no new volume is called. One that an earlier program has made is attached as
/// `POOL/list`.
const LIST: &str = "list";

/// Whether a new volume may be called so.
///
/// # Errors
/// As [`check_name`]; `Invalid` for a word of the command line.
pub fn check_free_name(name: &str) -> Result<()> {
    check_not_reserved(name)?;
    check_name(name)
}

/// Whether a name is no word of the command line.
///
/// # Errors
/// `Invalid` for one that is.
pub fn check_not_reserved(name: &str) -> Result<()> {
    if name == LIST {
        let what = "`spindle attach list` shows what is attached, so no volume is called list; choose another name";
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

/// Names of volumes, pools and exports: 1 to 63 of letters, digits, `.`, `_` and `-`, not starting
/// with `.` or `-`, so that they are safe in URIs, paths and command lines.
///
/// # Errors
/// `Invalid` with the rule.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_good = (1..=63).contains(&name.len())
        && name.chars().all(is_plain)
        && !name.starts_with(['.', '-']);
    if is_good {
        return Ok(());
    }
    let what = format!(
        "check name {name:?}: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter, \
         digit or '_'"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_everywhere() {
        for name in ["db", "a.b_c-9", "_x", &"n".repeat(63)] {
            check_name(name).unwrap();
        }
        for name in ["", ".", "..", "-rf", "a/b", "a b", "é", "x\n", &"n".repeat(64)] {
            assert_eq!(check_name(name).unwrap_err().kind(), ErrorKind::Invalid, "{name:?}");
        }
    }

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
        let keyed = r#"{"version":2,"id":7,"name":"db","size_bytes":1073741824,"durability":"flush","is_read_only":false,"created_at":1700000000,"own_key":3,"state":"present"}"#;
        let record = VolumeRecord::decode(golden.as_bytes()).unwrap().with_own_key(3);
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
        let newer = golden.replace(r#""version":1"#, r#""version":3"#);
        assert_eq!(
            VolumeRecord::decode(newer.as_bytes()).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        assert_eq!(VolumeRecord::decode(b"{}").unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
