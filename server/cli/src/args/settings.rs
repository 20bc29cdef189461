//! Translates flags into settings of the configuration.
//!
//! Invariant: a flag that is not given sets nothing.

use block::quantities::ByteSize;
use toml::Value;

/// A value that a flag sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Dotted key of the option.
    pub key: &'static str,
    /// The flag, with its hyphens.
    pub flag: &'static str,
    /// The value.
    pub value: Value,
}

fn path_value(path: &std::path::Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

/// Collects the settings of flags.
#[derive(Default)]
pub(super) struct Settings(pub(super) Vec<Setting>);

impl Settings {
    pub(super) fn value(&mut self, key: &'static str, flag: &'static str, value: Option<Value>) {
        self.0.extend(value.map(|value| Setting { key, flag, value }));
    }

    pub(super) fn text(&mut self, key: &'static str, flag: &'static str, value: Option<&str>) {
        self.value(key, flag, value.map(|text| Value::String(text.to_owned())));
    }

    pub(super) fn path(
        &mut self,
        key: &'static str,
        flag: &'static str,
        value: Option<&std::path::Path>,
    ) {
        self.value(key, flag, value.map(path_value));
    }

    pub(super) fn size(&mut self, key: &'static str, flag: &'static str, value: Option<ByteSize>) {
        self.value(key, flag, value.map(|size| Value::String(size.to_string())));
    }

    /// Sets `keys.source` if the flag is given: a flag that names the place of a secret also selects the source.
    pub(super) fn source<T>(&mut self, given: &Option<T>, source: &str, flag: &'static str) {
        self.text("keys.source", flag, given.as_ref().map(|_| source));
    }
}
