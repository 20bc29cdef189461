//! Keys of a pool: requests, and secrets on the wire.
//!
//! Invariant: a [`Secret`] is wiped when it is dropped, and `Debug` does not print it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use zeroize::Zeroizing;

/// A request about keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum KeyRequest {
    /// Makes a recovery key.
    Backup {
        /// Revokes earlier recovery keys.
        #[serde(default)]
        replace: bool,
    },
    /// Replaces the secret that opens the pool.
    Rotate {
        /// Secret that opens it from now on; absent: the configured key file is replaced in place.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        new: Option<NewKey>,
    },
}

/// The secret that opens the pool from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "to")]
pub enum NewKey {
    /// A key file, created if it is missing. A key file that opens the pool now is replaced in
    /// place.
    File {
        /// Path on the machine of the daemon.
        path: PathBuf,
    },
    /// A passphrase.
    Passphrase {
        /// The passphrase itself: the request never leaves the machine.
        secret: Secret,
    },
    /// The output of a command.
    Command {
        /// Program and arguments.
        command: Vec<String>,
    },
}

/// Kind of a secret that opens the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlotKind {
    /// A key file.
    KeyFile,
    /// A passphrase.
    Passphrase,
    /// The output of a command.
    Command,
    /// A printed recovery key.
    Recovery,
}

impl fmt::Display for SlotKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlotKind::KeyFile => "key file",
            SlotKind::Passphrase => "passphrase",
            SlotKind::Command => "key command",
            SlotKind::Recovery => "recovery key",
        })
    }
}

/// One way to open the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySlotInfo {
    /// Kind of secret that opens it.
    pub kind: SlotKind,
    /// Seconds since 1970.
    pub created_at: u64,
}

/// A text that is wiped when dropped and never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the text.
    #[must_use]
    pub fn new(text: String) -> Secret {
        Secret(Zeroizing::new(text))
    }

    /// Gives access to the text, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret::new(text)
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> String {
        secret.0.as_str().to_owned()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reply, Request};

    #[test]
    fn secrets_are_not_in_debug_texts() {
        let secret = || Secret::new("hunter2hunter2".to_owned());
        let new = Some(NewKey::Passphrase { secret: secret() });
        let request = Request::Key(KeyRequest::Rotate { new });
        assert!(!format!("{request:?}").contains("hunter2"));
        let reply = Reply::RecoveryKey { key: secret() };
        assert!(!format!("{reply:?}").contains("hunter2"));
    }
}
