//! Commands about copies and restores, and the requests that they send.

use super::settings::Setting;
use super::{PoolArgs, ServeArgs, absolute, check_rate};
use api::Request;
use api::copy::{CopyRequest, NewCopy};
use api::restore::RestoreRequest;
use block::quantities::{ByteSize, Span, unix_seconds_now};
use block::{Error, ErrorKind, Result};
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Commands about copies.
#[derive(Clone, Debug, Subcommand)]
pub enum CopyCommand {
    /// Copy the pool to an empty prefix of another store from now on: `copy add s3://bucket/prefix`
    Add {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Destination: s3://bucket/prefix, gs://…, az://…, file:///path, or a directory
        url: String,
        /// Copy only this volume and its snapshots; may be repeated
        #[arg(long, value_name = "NAME")]
        volume: Vec<String>,
        /// Time from the start of one recovery point to the start of the next
        #[arg(long, value_name = "DURATION", default_value = "60s")]
        interval: Span,
        /// Make a new recovery point only when snapshots were added or removed
        #[arg(long, conflicts_with = "interval")]
        snapshots_only: bool,
        /// Maximum bytes a second, like 50M
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Read settings and credentials of the copy's store from variables with this prefix: with DR_, from
        /// DR_AWS_ACCESS_KEY_ID …
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
        /// Give the copy a dedicated key in this file, made if it is missing; the pool's keys do not open the copy
        #[arg(long, value_name = "PATH")]
        copy_key_file: Option<PathBuf>,
        /// Replace the copy's existing dedicated key; the old key stops working
        #[arg(long, requires = "copy_key_file")]
        replace_copy_key: bool,
    },
    /// Show the progress of each copy, and its failures
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Bring a copy up to date now, and wait until it is
    Sync {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// URL of the copy
        url: String,
    },
    /// Stop waiting for segments that a restored pool's copy lacks; their data is then lost
    ///
    /// `status` names the segments
    GiveUpMissing(PoolArgs),
    /// Serve the newest recovery point of a copy in place, read-only, until SIGTERM; copying continues
    Open(CopyOpenArgs),
    /// End a copy and leave its data
    Rm {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// URL of the copy
        url: String,
    },
}

/// Options of `copy open`.
#[derive(Clone, Debug, Args)]
pub struct CopyOpenArgs {
    /// The key.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// URL of the copy
    pub url: String,
    /// Read settings and credentials of the copy's store from variables with this prefix
    #[arg(long, value_name = "PREFIX")]
    pub env_prefix: Option<String>,
    /// Address of the NBD server, HOST:PORT; port 0 picks a free one; may be repeated. Addresses in the configuration are
    /// the pool's and are not used
    #[arg(long, value_name = "ADDR", required_unless_present = "nbd_unix")]
    pub nbd: Vec<String>,
    /// Unix socket of the NBD server
    #[arg(long, value_name = "PATH")]
    pub nbd_unix: Option<PathBuf>,
    /// Serve other machines without TLS
    #[arg(long)]
    pub allow_plain_remote: bool,
    /// Memory of the whole process, like 1G
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
}

impl CopyOpenArgs {
    /// Returns the settings that these flags set.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let mut pool = self.pool.clone();
        if pool.config.is_none() {
            // Nothing is created there: it is only the place of the default key file.
            pool.dir.get_or_insert_with(|| PathBuf::from("."));
        }
        let serve = ServeArgs {
            pool,
            allow_plain_remote: self.allow_plain_remote,
            memory: self.memory,
            ..ServeArgs::default()
        };
        serve.settings()
    }
}

/// Options of `restore`.
#[derive(Clone, Debug, Args)]
pub struct RestoreArgs {
    /// The pool to create, and the key of the copy.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// URL of the copy, or URL@SNAPSHOT: volumes that have this snapshot show it
    pub url: String,
    /// Restore only this volume; may be repeated
    #[arg(long, value_name = "NAME")]
    pub volume: Vec<String>,
    /// Name of the one restored volume in the new pool: NAME, or POOL/NAME
    #[arg(long = "as", value_name = "NAME")]
    pub name: Option<String>,
    /// Maximum bytes a second to fetch in the background, like 50M
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<ByteSize>,
    /// Read settings and credentials of the copy's store from variables with this prefix: with DR_, from
    /// DR_AWS_ACCESS_KEY_ID …
    #[arg(long, value_name = "PREFIX")]
    pub env_prefix: Option<String>,
}

impl RestoreArgs {
    /// Checks the options that need no pool.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<()> {
        check_env_prefix(self.env_prefix.as_deref())?;
        check_rate(self.rate)
    }
}

impl CopyOpenArgs {
    /// Checks the options that need no pool.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<()> {
        check_env_prefix(self.env_prefix.as_deref())
    }
}

impl CopyCommand {
    /// Returns the request; `None` for a command that the program carries out itself.
    pub(super) fn request(&self) -> Result<Option<(&PoolArgs, Request)>> {
        let (pool, request) = match self {
            CopyCommand::Add {
                pool,
                url,
                volume,
                interval,
                snapshots_only,
                rate,
                env_prefix,
                copy_key_file,
                replace_copy_key,
            } => {
                check_env_prefix(env_prefix.as_deref())?;
                check_rate(*rate)?;
                let copy = NewCopy {
                    url: place(url)?,
                    env_prefix: env_prefix.clone(),
                    interval_seconds: interval.duration().as_secs(),
                    is_snapshots_only: *snapshots_only,
                    bytes_per_second: rate.map(|rate| rate.0),
                    volumes: volume.clone(),
                    key_file: copy_key_file.as_deref().map(absolute).transpose()?,
                    is_key_replaced: *replace_copy_key,
                    created_at: unix_seconds_now(),
                };
                (pool, CopyRequest::Add { copy })
            }
            CopyCommand::Open(_) => return Ok(None),
            CopyCommand::GiveUpMissing(pool) => {
                return Ok(Some((pool, Request::Restore(RestoreRequest::GiveUpMissing {}))));
            }
            CopyCommand::List { pool } => (pool, CopyRequest::List {}),
            CopyCommand::Sync { pool, url } => (pool, CopyRequest::Sync { url: place(url)? }),
            CopyCommand::Rm { pool, url } => (pool, CopyRequest::Remove { url: place(url)? }),
        };
        Ok(Some((pool, Request::Copy(request))))
    }
}

/// Returns the place of a copy in a form that a daemon with another working directory understands.
/// Does not check that the URL names a store.
///
/// # Errors
/// `Invalid` for a path that cannot be made absolute.
pub fn place(url: &str) -> Result<String> {
    let usage = |why: String| Error::new(ErrorKind::Invalid, why);
    if url.is_empty() {
        return Ok(String::new()); // which names no store
    }
    if let Some((scheme, rest)) = url.split_once("://") {
        // The rest keeps a slash at its start: without it, the URL could read as a path.
        let end = rest.trim_end_matches('/').len().max(usize::from(rest.starts_with('/')));
        return Ok(format!("{scheme}://{}", &rest[..end]));
    }
    let path = std::path::absolute(url).map_err(|error| usage(format!("read {url}: {error}")))?;
    let path = path.into_os_string().into_string();
    path.map_err(|_| usage(format!("read {url}: it is not UTF-8")))
}

pub(super) fn check_env_prefix(prefix: Option<&str>) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match prefix {
        Some(prefix) if prefix.is_empty() || !prefix.bytes().all(is_plain) => {
            let why = "read --env-prefix: it is the beginning of a variable's name, like DR_";
            Err(Error::new(ErrorKind::Invalid, why))
        }
        _ => Ok(()),
    }
}
