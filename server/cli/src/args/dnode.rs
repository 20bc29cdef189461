//! The options of a data node.

use super::settings::{Setting, Settings};
use clap::Args;
use std::path::PathBuf;
use toml::Value;

/// Options of a data node.
#[derive(Clone, Debug, Default, Args)]
pub struct DnodeArgs {
    /// Directory of the node: its identity, its list of drives, and its socket for commands
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Configuration file
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of a drive, empty at first; may be repeated. Its last part is the name of the drive
    #[arg(long, value_name = "DIR")]
    pub drive: Vec<PathBuf>,
    /// Media group of the drives: pools that name it have them as data stores
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// Failure domain of the drives, such as a rack; by default the node
    #[arg(long, value_name = "NAME")]
    pub domain: Option<String>,
}

impl DnodeArgs {
    /// Returns the settings that these flags set.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let mut set = Settings::default();
        set.path("dir", "--dir", self.dir.as_deref());
        set.text("dnode.group", "--group", self.group.as_deref());
        set.text("dnode.domain", "--domain", self.domain.as_deref());
        let drives = self.drive.iter().map(|dir| Value::String(dir.display().to_string()));
        let drives: Vec<Value> = drives.collect();
        set.value("dnode.drives", "--drive", (!drives.is_empty()).then_some(Value::Array(drives)));
        set.0
    }
}
