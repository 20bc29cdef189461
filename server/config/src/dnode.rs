//! `[dnode]`: the drives of a data node. And the URL of a drive, as pools name it.

use block::quantities::{ByteSize, check_name};
use block::{Error, ErrorKind, Result};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Most drives of a data node. Chosen by hand: more than a machine has.
const COUNT_MAX: usize = 128;
/// Beginning of the URL of a drive of a data node.
const SCHEME: &str = "spindle://";

/// `[dnode]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "options::OPTIONS documents every field")]
pub struct DnodeSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drives: Vec<DriveSettings>,
}

/// `[[dnode.drives]]`: a table, or only the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "options::OPTIONS documents every field")]
pub struct DriveSettings {
    pub dir: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<ByteSize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// The table of a drive.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    dir: PathBuf,
    name: Option<String>,
    capacity: Option<ByteSize>,
    group: Option<String>,
    domain: Option<String>,
}

impl<'de> Deserialize<'de> for DriveSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DriveVisitor)
    }
}

struct DriveVisitor;

impl<'de> Visitor<'de> for DriveVisitor {
    type Value = DriveSettings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the directory of a drive, or a table with its dir")
    }

    fn visit_str<E>(self, dir: &str) -> Result<DriveSettings, E> {
        let dir = dir.into();
        Ok(DriveSettings { dir, name: None, capacity: None, group: None, domain: None })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DriveSettings, A::Error> {
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        let Table { dir, name, capacity, group, domain } = table;
        Ok(DriveSettings { dir, name, capacity, group, domain })
    }
}

impl DriveSettings {
    /// The name: by default that of the directory.
    #[must_use]
    pub fn name(&self) -> &str {
        let of_dir = || self.dir.file_name().and_then(std::ffi::OsStr::to_str);
        self.name.as_deref().or_else(of_dir).unwrap_or_default()
    }
}

impl DnodeSettings {
    /// The media group of a drive: its own, or that of the node.
    #[must_use]
    pub fn group_of(&self, drive: &DriveSettings) -> Option<String> {
        drive.group.clone().or_else(|| self.group.clone())
    }

    /// The label of the failure domain of a drive: its own, or that of the node.
    #[must_use]
    pub fn domain_of(&self, drive: &DriveSettings) -> Option<String> {
        drive.domain.clone().or_else(|| self.domain.clone())
    }

    fn check_labels(&self) -> Result<()> {
        let of_drives = self.drives.iter().flat_map(|drive| {
            [("dnode.drives.group", &drive.group), ("dnode.drives.domain", &drive.domain)]
        });
        let all = [("dnode.group", &self.group), ("dnode.domain", &self.domain)];
        for (key, label) in all.into_iter().chain(of_drives) {
            let what = if key.ends_with("group") { "media group" } else { "failure domain" };
            let checked = label.as_ref().map_or(Ok(()), |label| check_name(what, label));
            checked.map_err(|why| invalid(format!("{key}: {why}")))?;
        }
        Ok(())
    }

    /// Makes the directories absolute, and checks the drives.
    pub(super) fn settle(&mut self) -> Result<()> {
        if self.drives.len() > COUNT_MAX {
            return Err(invalid(format!("dnode.drives: a data node has {COUNT_MAX} at most")));
        }
        self.check_labels()?;
        let absolute = |dir: &Path| {
            std::path::absolute(dir).map_err(|error| {
                Error::with_source(
                    ErrorKind::Invalid,
                    format!("dnode.drives: {}", dir.display()),
                    error,
                )
            })
        };
        for index in 0..self.drives.len() {
            let dir = absolute(&self.drives[index].dir)?;
            self.drives[index].dir.clone_from(&dir);
            let drive = &self.drives[index];
            let shown = dir.display();
            check_name("drive", drive.name()).map_err(|why| {
                invalid(format!("dnode.drives: {shown}: {why}; give it a `name`"))
            })?;
            if drive.capacity == Some(ByteSize(0)) {
                return Err(invalid(format!(
                    "dnode.drives: {shown}: capacity 0: it could store nothing"
                )));
            }
            for earlier in &self.drives[..index] {
                if earlier.name() == drive.name() {
                    let name = drive.name();
                    return Err(invalid(format!(
                        "dnode.drives: two drives are called {name}; give each another `name`"
                    )));
                }
                if earlier.dir.starts_with(&dir) || dir.starts_with(&earlier.dir) {
                    return Err(invalid(format!(
                        "dnode.drives: {} and {shown} are one within the other",
                        earlier.dir.display()
                    )));
                }
            }
        }
        Ok(())
    }
}

/// The place of a drive: `spindle://NODE/DRIVE`, or `spindle://NODE` for the only drive of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveUrl {
    /// Name or id of the node.
    pub node: String,
    /// Name of the drive; empty for the only one.
    pub drive: String,
}

impl DriveUrl {
    /// Reads a URL; `None` for one of another kind.
    ///
    /// # Errors
    /// `Invalid` for a node or a drive that cannot have such a name.
    pub fn parse(url: &str) -> Result<Option<DriveUrl>> {
        let Some(rest) = url.strip_prefix(SCHEME) else { return Ok(None) };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (node, drive) = rest.split_once('/').unwrap_or((rest, ""));
        let checked = check_name("node", node).and_then(|()| match rest.contains('/') {
            true => check_name("drive", drive),
            false => Ok(()),
        });
        checked.map_err(|why| invalid(format!("{url}: {why}; write spindle://NODE/DRIVE")))?;
        Ok(Some(DriveUrl { node: node.to_owned(), drive: drive.to_owned() }))
    }

    /// The part of a URL that names the node: its drives fail together.
    pub(super) fn domain_of(url: &str) -> Option<&str> {
        let rest = url.strip_prefix(SCHEME)?;
        let end = rest.find('/').unwrap_or(rest.len());
        Some(&url[..SCHEME.len() + end])
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_drives_are_read() {
        let read = |url| DriveUrl::parse(url).map_err(|error| error.chain());
        let url = |node: &str, drive: &str| {
            Ok(Some(DriveUrl { node: node.to_owned(), drive: drive.to_owned() }))
        };
        assert_eq!(read("spindle://d1/nvme0"), url("d1", "nvme0"));
        assert_eq!(read("spindle://d1/nvme0/"), url("d1", "nvme0"));
        assert_eq!(read("spindle://d1"), url("d1", ""));
        assert_eq!(read("spindle://d1/"), url("d1", ""));
        assert_eq!((read("/mnt/x"), read("s3://d1/x")), (Ok(None), Ok(None)));
        for wrong in
            ["spindle://", "spindle:///a", "spindle://d1//", "spindle://d1/a/b", "spindle://d 1"]
        {
            assert!(read(wrong).unwrap_err().contains("spindle://NODE/DRIVE"), "{wrong}");
        }
        let domain = DriveUrl::domain_of;
        assert_eq!(domain("spindle://d1/nvme0"), Some("spindle://d1"));
        assert_eq!((domain("spindle://d1"), domain("/mnt/x")), (Some("spindle://d1"), None));
    }
}
