//! The pool that a command is about, and the commands about a whole pool.

use super::KeyArgs;
use super::settings::{Setting, Settings};
use api::Request;
use api::member::Degraded;
use api::pool::PoolRequest;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use toml::Value;

/// The pool, and its key.
#[derive(Clone, Debug, Default, Args)]
pub struct PoolArgs {
    /// Directory of the pool: log, cache, identity
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Configuration file
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Store: s3://bucket/prefix, gs://…, az://…, file:///path, or a directory; DIR/store by default
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// The key.
    #[command(flatten)]
    pub key: KeyArgs,
}

impl PoolArgs {
    /// Returns the settings that these flags set.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let mut set = Settings::default();
        set.path("dir", "--dir", self.dir.as_deref());
        set.text("store", "--store", self.store.as_deref());
        let key = &self.key;
        set.source(&key.key_file, "file", "--key-file");
        set.path("keys.file", "--key-file", key.key_file.as_deref());
        set.source(&key.passphrase_file, "passphrase", "--passphrase-file");
        set.path("keys.passphrase_file", "--passphrase-file", key.passphrase_file.as_deref());
        set.source(&key.passphrase_env, "passphrase", "--passphrase-env");
        set.text("keys.passphrase_env", "--passphrase-env", key.passphrase_env.as_deref());
        set.source(&key.passphrase_fd, "passphrase", "--passphrase-fd");
        let number = key.passphrase_fd.map(|number| Value::Integer(i64::from(number)));
        set.value("keys.passphrase_fd", "--passphrase-fd", number);
        set.source(&key.recovery_key_file, "recovery", "--recovery-key-file");
        set.path("keys.recovery_file", "--recovery-key-file", key.recovery_key_file.as_deref());
        set.0
    }
}

/// Commands about a whole pool.
#[derive(Clone, Debug, Subcommand)]
pub enum PoolCommand {
    /// List, add, replace and remove the nodes that keep the pool's write log
    #[command(subcommand)]
    Members(MembersCommand),
    /// Let this node, which is a member, take the pool over from its owner
    TakeOver(PoolArgs),
    /// Hand the pool over to another member, without a failed request
    Move {
        /// Name or id of the node
        node: String,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Remove a pool, so that nothing can open it; it can be restored until it is purged
    Rm {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Bring a removed pool back
    Restore {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Delete a removed pool from the store, beyond recovery, once deleted_retention has passed
    Purge {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Do not wait for deleted_retention
        #[arg(long)]
        now: bool,
    },
}

/// Commands about the members of a pool's write log, on any of its nodes.
#[derive(Clone, Debug, Subcommand)]
pub enum MembersCommand {
    /// List the members, and how far each has come
    List(PoolArgs),
    /// Make a node of the cluster a member, while the pool is served
    ///
    /// The network between it, the owner and the other members is measured first. A node with a far
    /// slower one is refused, because writes would wait for it
    Add {
        /// Name or id of the node
        node: String,
        /// Also add a node whose network is far slower
        #[arg(long)]
        force: bool,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Put another node in the place of a member whose machine or files are lost
    ///
    /// The new node gets the log first, and then counts in place of the member. `spindle pool members list` shows how far
    /// it has come
    Replace {
        /// Name or id of the member's node
        node: String,
        /// Name or id of the new node; NODE if the machine has joined the cluster again under that name
        new: Option<String>,
        /// Also take a node whose network is far slower
        #[arg(long)]
        force: bool,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Remove a member, while the pool is served
    Remove {
        /// Name or id of the node
        node: String,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Set what happens when too few members answer
    Degraded {
        /// The conduct of the owner
        conduct: Conduct,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

/// The conduct of the owner when too few members of the write log answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Conduct {
    /// Reads and writes wait until enough members are back
    Block,
    /// Go on with the members that answer: alone, a loss of the machine loses what the store lacks
    Solo,
    /// Like solo, and each flush waits for the store: alone, a loss loses only what was not flushed
    Store,
}

impl PoolCommand {
    /// Returns the request to the daemon; `None` for a command that asks none.
    pub(super) fn request(&self) -> Option<(&PoolArgs, Request)> {
        let (pool, request) = match self {
            PoolCommand::Members(MembersCommand::List(pool)) => (pool, PoolRequest::Members {}),
            PoolCommand::Members(MembersCommand::Add { node, force, pool }) => {
                (pool, PoolRequest::AddMember { node: node.clone(), force: *force })
            }
            PoolCommand::Members(MembersCommand::Replace { node, new, force, pool }) => {
                let (node, with) = (node.clone(), new.clone());
                (pool, PoolRequest::ReplaceMember { node, with, force: *force })
            }
            PoolCommand::Members(MembersCommand::Remove { node, pool }) => {
                (pool, PoolRequest::RemoveMember { node: node.clone() })
            }
            PoolCommand::Members(MembersCommand::Degraded { conduct, pool }) => {
                let degraded = match conduct {
                    Conduct::Block => Degraded::Block,
                    Conduct::Solo => Degraded::Solo,
                    Conduct::Store => Degraded::Store,
                };
                (pool, PoolRequest::SetDegraded { degraded })
            }
            PoolCommand::TakeOver(pool) => (pool, PoolRequest::TakeOver {}),
            PoolCommand::Move { .. }
            | PoolCommand::Rm { .. }
            | PoolCommand::Restore { .. }
            | PoolCommand::Purge { .. } => return None,
        };
        Some((pool, Request::Pool(request)))
    }
}

/// Options of `fsck`.
#[derive(Clone, Debug, Args)]
pub struct FsckArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Verify the newest recovery point of this copy instead, with a key that opens the copy
    #[arg(long, value_name = "URL")]
    pub copy: Option<String>,
    /// Read settings and credentials of the copy's store from variables with this prefix
    #[arg(long, value_name = "PREFIX", requires = "copy")]
    pub env_prefix: Option<String>,
    /// Correct wrong counts of live blocks afterwards
    #[arg(long, conflicts_with = "copy")]
    pub repair_counts: bool,
}
