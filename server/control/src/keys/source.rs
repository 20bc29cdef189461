//! Sources of the secret that opens a key ring: a key file, a passphrase, a command, or a recovery
//! key. Also makes key files.
//!
//! Invariants:
//! - A secret never comes from a command-line argument, and never goes into a log line, a `Debug`
//!   text or an error.
//! - Secrets live in buffers that are wiped when dropped.
//! - A key file is made with mode 0600 and made durable before anything is sealed with it.

use super::printed;
use block::durable_file::sync_parent;
use block::env::random_bytes;
use block::seal::KEY_BYTES;
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use zeroize::Zeroizing;

/// Start of the text of a key file's key.
pub(super) const KEY_PREFIX: &str = "SPINDLE-KEY-1";
/// Start of the text of a recovery key.
pub(super) const RECOVERY_PREFIX: &str = "SPINDLE-RECOVERY-1";
/// Maximum length in bytes of a secret that is read. Chosen by hand: a KMS blob is below 4 KiB.
const SECRET_BYTES_MAX: usize = 8192;
/// Shortest passphrase that may be set, in bytes. Source: NIST SP 800-63B, section 5.1.1.
pub(super) const PASSPHRASE_BYTES_MIN: usize = 8;
/// Longest a key command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// A text that is wiped when dropped and never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the text.
    #[must_use]
    pub fn new(text: String) -> Secret {
        Secret(Zeroizing::new(text))
    }

    pub(super) fn from_zeroizing(text: Zeroizing<String>) -> Secret {
        Secret(text)
    }

    /// Gives access to the text, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Source of the secret. Holds no secret, except `Passphrase`, which prints as `…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A key file, made on first use of a pool.
    File(PathBuf),
    /// First line of a file.
    PassphraseFile(PathBuf),
    /// First line read from an open file descriptor.
    PassphraseFd(u32),
    /// An environment variable of this name.
    PassphraseEnv(String),
    /// A passphrase that was read already.
    Passphrase(Secret),
    /// First line of the output of a command: a KMS client, for example. Program and arguments.
    Command(Vec<String>),
    /// A file with the recovery key that `key backup` printed.
    RecoveryFile(PathBuf),
}

/// Kind of secret that opens a slot, as stored in the key ring.
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

/// A secret, ready to open or make a slot.
pub(super) enum Material {
    /// 32 random bytes.
    Key(SlotKind, Zeroizing<[u8; KEY_BYTES]>),
    /// A text of unknown strength, stretched by argon2id.
    Phrase(SlotKind, Secret),
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Material({})", self.kind())
    }
}

impl Material {
    pub(super) fn kind(&self) -> SlotKind {
        match self {
            Material::Key(kind, _) | Material::Phrase(kind, _) => *kind,
        }
    }
}

impl KeySource {
    /// Kind of slot that it opens.
    #[must_use]
    pub fn kind(&self) -> SlotKind {
        match self {
            KeySource::File(_) => SlotKind::KeyFile,
            KeySource::PassphraseFile(_)
            | KeySource::PassphraseFd(_)
            | KeySource::PassphraseEnv(_)
            | KeySource::Passphrase(_) => SlotKind::Passphrase,
            KeySource::Command(_) => SlotKind::Command,
            KeySource::RecoveryFile(_) => SlotKind::Recovery,
        }
    }

    /// Reads the secret.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Invalid` if it is malformed. An error never contains any part
    /// of it.
    pub(super) async fn load(&self) -> Result<Material> {
        match self {
            KeySource::File(path) => {
                let text = read_secret_file("key file", path)?;
                let key = decode_file("key file", path, KEY_PREFIX, &text)?;
                Ok(Material::Key(SlotKind::KeyFile, key))
            }
            KeySource::RecoveryFile(path) => {
                let text = read_secret_file("recovery key file", path)?;
                let key = decode_file("recovery key file", path, RECOVERY_PREFIX, &text)?;
                Ok(Material::Key(SlotKind::Recovery, key))
            }
            KeySource::Command(command) => {
                let output = run(command).await?;
                Ok(Material::Phrase(SlotKind::Command, first_line("key command", &output)?))
            }
            other => Ok(Material::Phrase(SlotKind::Passphrase, other.passphrase()?)),
        }
    }

    /// Reads the passphrase of one of the passphrase sources, to hand it to a running daemon.
    ///
    /// # Errors
    /// Errors reading it; `Invalid` for a source of another kind.
    pub fn passphrase(&self) -> Result<Secret> {
        match self {
            KeySource::PassphraseFile(path) => {
                first_line("passphrase file", &read_secret_file("passphrase file", path)?)
            }
            KeySource::PassphraseFd(number) => {
                let path = PathBuf::from(format!("/proc/self/fd/{number}"));
                let text = read_limited(&path).map_err(|error| {
                    let context = format!("read the passphrase from file descriptor {number}");
                    Error::with_source(ErrorKind::NotFound, context, error)
                })?;
                first_line("passphrase", &text)
            }
            KeySource::PassphraseEnv(name) => match std::env::var(name) {
                Ok(text) => first_line("passphrase", &Zeroizing::new(text)),
                Err(_) => Err(Error::new(
                    ErrorKind::NotFound,
                    format!("the environment variable {name} for the passphrase is not set"),
                )),
            },
            KeySource::Passphrase(secret) => Ok(secret.clone()),
            other => Err(Error::new(
                ErrorKind::Invalid,
                format!("a {} is not a passphrase", other.kind()),
            )),
        }
    }
}

fn read_secret_file(what: &str, path: &Path) -> Result<Zeroizing<String>> {
    let text = read_limited(path).map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Denied,
        };
        Error::with_source(kind, format!("read {what} {}", path.display()), error)
    })?;
    if let Ok(metadata) = std::fs::metadata(path)
        && metadata.mode() & 0o077 != 0
    {
        tracing::warn!(
            path = %path.display(),
            "other users can read the {what}; set its mode to 600"
        );
    }
    Ok(text)
}

/// Reads a text of at most [`SECRET_BYTES_MAX`] without leaving copies in memory.
fn read_limited(path: &Path) -> std::io::Result<Zeroizing<String>> {
    read_all(std::fs::File::open(path)?)
}

fn read_all(source: impl Read) -> std::io::Result<Zeroizing<String>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(SECRET_BYTES_MAX + 1));
    source.take(SECRET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > SECRET_BYTES_MAX {
        return Err(std::io::Error::other(format!("longer than {SECRET_BYTES_MAX} bytes")));
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| std::io::Error::other("not text"))?;
    Ok(Zeroizing::new(text.to_owned()))
}

fn first_line(what: &str, text: &str) -> Result<Secret> {
    match text.lines().next() {
        Some(line) if !line.is_empty() => Ok(Secret::new(line.to_owned())),
        _ => Err(Error::new(ErrorKind::Invalid, format!("the {what} is empty"))),
    }
}

/// Describes invisible characters in a passphrase that were not typed, but added by an editor, a
/// copy or a shell. Checked only for a passphrase that makes a slot; one that opens a slot is taken
/// unchanged. The text repeats no part of the secret.
pub(super) fn oddity(secret: &str) -> Option<&'static str> {
    if secret.contains('\u{feff}') {
        return Some("has a byte order mark");
    }
    if secret.contains('\r') {
        return Some("has a carriage return");
    }
    if secret.contains('\0') {
        return Some("has a NUL character");
    }
    if secret.starts_with(char::is_whitespace) || secret.ends_with(char::is_whitespace) {
        return Some("begins or ends with a blank");
    }
    secret.contains(char::is_control).then_some("has a control character")
}

/// Decodes the key in a file: the line that is neither empty nor a comment.
fn decode_file(
    what: &str,
    path: &Path,
    prefix: &str,
    text: &str,
) -> Result<Zeroizing<[u8; KEY_BYTES]>> {
    let mut lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let decoded = match (lines.next(), lines.next()) {
        (Some(line), None) => printed::decode(prefix, line),
        (None, _) => Err("it holds no key".to_owned()),
        (Some(_), Some(_)) => Err("it holds more than one line".to_owned()),
    };
    decoded
        .map_err(|why| Error::new(ErrorKind::Invalid, format!("{what} {}: {why}", path.display())))
}

/// Runs a key command and returns its output. Its standard error goes to ours.
async fn run(command: &[String]) -> Result<Zeroizing<String>> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Error::new(ErrorKind::Invalid, "the key command is empty"));
    };
    let failed = |error: std::io::Error| {
        Error::with_source(ErrorKind::Unavailable, format!("run key command {program}"), error)
    };
    let mut child = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let stdout = child.stdout.take().expect("standard output is piped");
    let finish = async {
        use tokio::io::AsyncReadExt;
        let mut bytes = Zeroizing::new(Vec::with_capacity(SECRET_BYTES_MAX + 1));
        stdout.take(SECRET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).await?;
        let status = child.wait().await?;
        Ok::<_, std::io::Error>((bytes, status))
    };
    let (bytes, status) = tokio::time::timeout(COMMAND_TIMEOUT, finish)
        .await
        .map_err(|_| {
            Error::new(
                ErrorKind::Unavailable,
                format!("key command {program} did not end within {COMMAND_TIMEOUT:?}"),
            )
        })?
        .map_err(failed)?;
    if !status.success() {
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!("key command {program} failed: {status}"),
        ));
    }
    read_all(&bytes[..]).map_err(failed)
}

/// Makes sure that a key file is on stable storage, including its name: the process that made it
/// may have ended before it was.
///
/// # Errors
/// `Io` of the file system.
pub(super) fn make_durable(path: &Path) -> Result<()> {
    use std::io::ErrorKind::PermissionDenied;
    let sync = || {
        // A pipe or the like has nothing to sync.
        if !std::fs::metadata(path)?.is_file() {
            return Ok(());
        }
        std::fs::File::open(path)?.sync_all()?;
        match sync_parent(path) {
            // This process cannot have made the file in that directory.
            Err(error) if error.kind() == PermissionDenied => Ok(()),
            synced => synced,
        }
    };
    sync().map_err(|error: std::io::Error| {
        Error::with_source(ErrorKind::Io, format!("sync key file {}", path.display()), error)
    })
}

fn write_key_file(mut file: std::fs::File, path: &Path, text: &str) -> std::io::Result<()> {
    file.write_all(
        b"# Key of a spindle pool. Whoever has it and the store can read the volumes;\n\
          # without it, or a recovery key (spindle key backup), nobody can.\n",
    )?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    sync_parent(path)
}

/// Makes a key file with a fresh key.
///
/// # Errors
/// `Busy` if the file exists.
pub(super) fn make_key_file(path: &Path) -> Result<Zeroizing<[u8; KEY_BYTES]>> {
    let key = Zeroizing::new(random_bytes::<KEY_BYTES>());
    let text = printed::encode(KEY_PREFIX, &key);
    let write = || -> std::io::Result<()> {
        let file =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        // A file that may not be on stable storage must not be found by the next attempt, which
        // would take it for a durable one.
        write_key_file(file, path, &text).inspect_err(|_| drop(std::fs::remove_file(path)))
    };
    write().map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::AlreadyExists => ErrorKind::Busy,
            _ => ErrorKind::Io,
        };
        Error::with_source(kind, format!("make key file {}", path.display()), error)
    })?;
    Ok(key)
}
