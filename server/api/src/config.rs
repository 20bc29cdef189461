//! Output of the commands that need no pool: the configuration, its options, and versions.

use serde::{Deserialize, Serialize};

/// The effective configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigInfo {
    /// All options, in the order of the file.
    pub options: Vec<ConfigRow>,
}

/// One option of the effective configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigRow {
    /// Dotted key.
    pub key: String,
    /// The value as TOML; absent if the option is unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Source of the value: a file, a flag, or the default.
    pub origin: String,
}

/// An example file with all options.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExampleInfo {
    /// The commented `spindle.toml`.
    pub text: String,
    /// The documentation of each option.
    pub options: Vec<OptionInfo>,
}

/// Documentation of one option.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionInfo {
    /// Dotted key.
    pub key: String,
    /// Type and unit.
    pub kind: String,
    /// Allowed values.
    pub range: String,
    /// Default as TOML, or a sentence in parentheses if it depends on other options.
    pub default: String,
    /// A value for the example file, if there is no fixed default.
    pub example: String,
    /// Purpose.
    pub about: String,
}

/// Versions of the program and of its formats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// Version of the program.
    pub version: String,
    /// Formats with the newest version that is read and written.
    pub formats: Vec<(String, u32)>,
}
