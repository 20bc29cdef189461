//! Commands about keys.

use super::PoolArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// The way to open the pool.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = false)]
pub struct KeyArgs {
    /// Key file; DIR/spindle.key by default
    #[arg(long, value_name = "PATH")]
    pub key_file: Option<PathBuf>,
    /// File whose first line is the passphrase
    #[arg(long, value_name = "PATH")]
    pub passphrase_file: Option<PathBuf>,
    /// Environment variable that holds the passphrase
    #[arg(long, value_name = "NAME")]
    pub passphrase_env: Option<String>,
    /// Open file descriptor from which the passphrase is read
    #[arg(long, value_name = "NUMBER")]
    pub passphrase_fd: Option<u32>,
    /// File with a recovery key that `key backup` printed
    #[arg(long, value_name = "PATH")]
    pub recovery_key_file: Option<PathBuf>,
}

/// Commands about keys.
#[derive(Clone, Debug, Subcommand)]
pub enum KeyCommand {
    /// Print a recovery key, which opens the pool if the key is lost; it is shown only once
    Backup {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Make this the only recovery key; earlier ones stop working
        #[arg(long)]
        replace: bool,
    },
    /// Replace the key, or the way to open the pool; the data is not touched
    ///
    /// Without a --new flag, the key file is replaced in place
    Rotate {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// The new key.
        #[command(flatten)]
        new: NewKeyArgs,
    },
}

/// The way to open the pool after a rotation.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = false)]
pub struct NewKeyArgs {
    /// New key file, made if it is missing
    #[arg(long, value_name = "PATH")]
    pub new_key_file: Option<PathBuf>,
    /// File whose first line is the new passphrase
    #[arg(long, value_name = "PATH")]
    pub new_passphrase_file: Option<PathBuf>,
    /// Environment variable that holds the new passphrase
    #[arg(long, value_name = "NAME")]
    pub new_passphrase_env: Option<String>,
    /// Open file descriptor from which the new passphrase is read
    #[arg(long, value_name = "NUMBER")]
    pub new_passphrase_fd: Option<u32>,
    /// Program, with its arguments, whose first line of output is the new secret
    #[arg(long, value_name = "PROGRAM", num_args = 1.., allow_hyphen_values = true)]
    pub new_command: Option<Vec<String>>,
}
