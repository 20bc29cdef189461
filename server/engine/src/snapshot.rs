//! Snapshots: the daemon's record of each, the log entries that make and remove them, and their
//! names.
//!
//! Invariants:
//! - A snapshot is identified by its volume and the LSN of the log entry that made it. Its name is
//!   for people, and unique among the snapshots of its volume.
//! - An entry lists everything that it makes and removes. All snapshots of one entry show the same
//!   instant.
//! - Stored as JSON with a version (docs/format.md, "Snapshots"), sealed like everything else in
//!   the log and the metadata.

use crate::names::{RECORD_BYTES_MAX, check_name};
use block::{Error, ErrorKind, Lsn, Result, VolumeId};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tiering::SnapshotChange;

/// Version written by this release; the only one so far.
const VERSION: u32 = 1;

/// One snapshot as the log and the metadata store it. Its LSN is the key under which it is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    version: u32,
    /// The volume.
    pub volume: u32,
    /// Unique among the volume's snapshots.
    pub name: String,
    /// Size of the volume when it was made, in bytes.
    pub size_bytes: u64,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// It was made by a schedule, which may remove it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_scheduled: bool,
}

impl SnapshotRecord {
    /// Returns the record of a snapshot that is made of a volume at `created_at`.
    #[must_use]
    pub fn new(volume: u32, name: &str, size_bytes: u64, created_at: u64) -> SnapshotRecord {
        SnapshotRecord {
            version: VERSION,
            volume,
            name: name.to_owned(),
            size_bytes,
            created_at,
            is_scheduled: false,
        }
    }

    /// The image that goes into the metadata.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a record has only plain fields").into()
    }

    /// Decodes an image.
    ///
    /// # Errors
    /// `Corrupt` if it is not an image, `Unsupported` if a newer release wrote it.
    pub fn decode(bytes: &[u8]) -> Result<SnapshotRecord> {
        decode(bytes, "decode snapshot record", |record: &SnapshotRecord| record.version)
    }
}

/// The changes that a log entry makes to snapshots, at its LSN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotEntry {
    version: u32,
    /// Snapshots that it makes.
    #[serde(default)]
    pub made: Vec<SnapshotRecord>,
    /// Snapshots that it removes.
    #[serde(default)]
    pub removed: Vec<Removed>,
}

/// A snapshot that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// The volume.
    pub volume: u32,
    /// LSN of the entry that made it.
    pub lsn: u64,
}

impl SnapshotEntry {
    pub(crate) fn making(made: Vec<SnapshotRecord>) -> SnapshotEntry {
        SnapshotEntry { version: VERSION, made, removed: Vec::new() }
    }

    pub(crate) fn removing(removed: Vec<Removed>) -> SnapshotEntry {
        SnapshotEntry { version: VERSION, made: Vec::new(), removed }
    }

    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("an entry has only plain fields").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<SnapshotEntry> {
        decode(bytes, "decode a log entry about snapshots", |entry: &SnapshotEntry| entry.version)
    }

    /// The changes in the types of the data tier.
    pub(crate) fn changes(&self) -> Vec<SnapshotChange> {
        let made = self.made.iter().map(|record| SnapshotChange::Made {
            volume: VolumeId(record.volume),
            record: record.encode(),
        });
        let removed = self.removed.iter().map(|removed| SnapshotChange::Removed {
            volume: VolumeId(removed.volume),
            lsn: Lsn(removed.lsn),
        });
        made.chain(removed).collect()
    }
}

fn decode<T: serde::de::DeserializeOwned>(
    bytes: &[u8],
    what: &str,
    version: impl Fn(&T) -> u32,
) -> Result<T> {
    let found: T = serde_json::from_slice(bytes)
        .map_err(|source| Error::with_source(ErrorKind::Corrupt, what.to_owned(), source))?;
    match version(&found) {
        VERSION => Ok(found),
        version => {
            let what =
                format!("{what}: version {version} was written by a newer spindle; use that one");
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

/// Most volumes of one snapshot: as many as one log entry holds.
pub const VOLUMES_MAX: usize = 256;
const _: () = assert!(VOLUMES_MAX * 512 < 1 << 20 && RECORD_BYTES_MAX >= 512);

/// `VOLUME@NAME`, or several volumes before the `@`: one instant of all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotName {
    /// At least one volume, each named once.
    pub volumes: Vec<String>,
    /// The snapshot's own name.
    pub name: String,
}

impl std::str::FromStr for SnapshotName {
    type Err = Error;

    fn from_str(text: &str) -> Result<SnapshotName> {
        let Some((volumes, name)) = text.split_once('@') else {
            let what = format!("read {text:?}: write VOLUME@NAME, or VOLUME,VOLUME@NAME");
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        check_name(name).map_err(|error| error.context(format!("read {text:?}")))?;
        let volumes: Vec<String> = volumes.split(',').map(str::to_owned).collect();
        for (index, volume) in volumes.iter().enumerate() {
            check_name(volume).map_err(|error| error.context(format!("read {text:?}")))?;
            if volumes[..index].contains(volume) {
                let what = format!("read {text:?}: it names volume {volume} twice");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        if volumes.len() > VOLUMES_MAX {
            let what = format!("read a snapshot's name: more than {VOLUMES_MAX} volumes");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(SnapshotName { volumes, name: name.to_owned() })
    }
}

impl SnapshotName {
    /// Returns the volume and the name.
    ///
    /// # Errors
    /// `Invalid` if it names several volumes.
    pub fn single(&self) -> Result<(&str, &str)> {
        match &self.volumes[..] {
            [volume] => Ok((volume, &self.name)),
            _ => {
                let what = format!("read a snapshot's name: {} is of one volume", self.name);
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_forms_stay_readable() {
        let record = SnapshotRecord::new(7, "nightly", 1 << 30, 1_700_000_000);
        let golden = r#"{"version":1,"volume":7,"name":"nightly","size_bytes":1073741824,"created_at":1700000000}"#;
        assert_eq!(record.encode(), golden.as_bytes());
        assert_eq!(SnapshotRecord::decode(golden.as_bytes()).unwrap(), record);
        let made = SnapshotEntry::making(vec![record]);
        let golden = format!(r#"{{"version":1,"made":[{golden}],"removed":[]}}"#);
        assert_eq!(made.encode(), golden.as_bytes());
        assert_eq!(SnapshotEntry::decode(golden.as_bytes()).unwrap(), made);
        let removed = SnapshotEntry::removing(vec![Removed { volume: 7, lsn: 99 }]);
        let golden = r#"{"version":1,"made":[],"removed":[{"volume":7,"lsn":99}]}"#;
        assert_eq!(removed.encode(), golden.as_bytes());
        let newer = golden.replace(r#""version":1"#, r#""version":2"#);
        let error = SnapshotEntry::decode(newer.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(SnapshotEntry::decode(b"{").unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn names_say_volumes_and_a_name() {
        let read = |text: &str| text.parse::<SnapshotName>();
        let name = read("db,wal@before-upgrade").unwrap();
        assert_eq!((name.volumes.len(), &name.name[..]), (2, "before-upgrade"));
        assert!(name.single().is_err());
        assert_eq!(read("db@a").unwrap().single().unwrap(), ("db", "a"));
        for wrong in ["db", "@a", "db@", "db@a@b", "db,db@a", "db, wal@a", "d/b@a", "db@-a", "@"] {
            assert_eq!(read(wrong).unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }
}
