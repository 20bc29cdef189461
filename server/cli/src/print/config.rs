//! Text output about the configuration and versions.

use api::config::{ConfigInfo, ExampleInfo, VersionInfo};
use std::fmt::Write;

/// Prints one line per option, valid as TOML; unset ones as comments.
#[must_use]
pub fn config(rows: &ConfigInfo) -> String {
    let rows: Vec<Vec<String>> = rows
        .options
        .iter()
        .map(|row| match &row.value {
            Some(value) => {
                vec![format!("{} = {value}", row.key), format!("# {}", row.origin)]
            }
            None => vec![format!("# {} is not set", row.key)],
        })
        .collect();
    // Short values are aligned; a long one (volumes) does not shift the others.
    let width = rows.iter().filter(|row| row.len() == 2).map(|row| row[0].chars().count());
    let width = width.filter(|width| *width <= 60).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let _ = match row.as_slice() {
            [value, origin] => writeln!(text, "{value:<width$}  {origin}"),
            _ => writeln!(text, "{}", row.join("  ")),
        };
    }
    text
}

/// Prints a commented configuration file.
#[must_use]
pub fn example(example: &ExampleInfo) -> String {
    example.text.clone()
}

/// Prints the version, then one line per format.
#[must_use]
pub fn version(version: &VersionInfo) -> String {
    let mut text = format!("spindle {}\n", version.version);
    for (name, number) in &version.formats {
        let _ = writeln!(text, "{name} format {number}");
    }
    text
}
