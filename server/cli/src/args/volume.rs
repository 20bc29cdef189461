//! Commands about volumes, and the requests that they send.

use super::{PoolArgs, one_second_at_least};
use api::Request;
use api::volume::{Durability, RemoveMode, VolumeRequest};
use block::Result;
use block::quantities::{ByteSize, Span};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Commands about volumes.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create a volume: `volume create db 100G`
    Create {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name: 1 to 63 characters of A-Z a-z 0-9 . _ -
        name: String,
        /// Size, like 100G: a multiple of 512 bytes, up to 1P
        #[arg(required_unless_present = "from_superseded")]
        size: Option<ByteSize>,
        /// Failures that an acknowledged write survives
        #[arg(long, value_enum, default_value_t = DurabilityArg::Auto)]
        durability: DurabilityArg,
        /// Give the volume a dedicated key, which `volume rm --erase` destroys; clones share it
        #[arg(long)]
        dedicated_key: bool,
        /// Look for blocks that are already stored, and do not store them again; clones inherit this
        #[arg(long)]
        dedup: bool,
        /// Make it from a write log that the pool went on without, with the contents of this volume there
        #[arg(long, value_name = "VOLUME", conflicts_with_all = ["size", "durability", "dedicated_key", "dedup"])]
        from_superseded: Option<String>,
        /// Directory of that log, if it is not one that was set aside in DIR
        #[arg(long, value_name = "DIR", requires = "from_superseded", value_parser = absolute_path)]
        log: Option<PathBuf>,
    },
    /// List volumes, including removed ones that can be restored
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Show one volume
    Show {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
    },
    /// Change the size of a volume, even while it is in use
    Resize {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// New size
        size: ByteSize,
        /// Allow a smaller size, if the volume is not attached; data beyond the new end is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Change options of a volume, even while it is in use; options that are not named stay
    #[command(group(clap::ArgGroup::new("change").required(true).multiple(true)))]
    Set {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// Failures that an acknowledged write survives
        #[arg(long, value_enum, group = "change")]
        durability: Option<DurabilityArg>,
        /// Refuse writes, or accept them again
        #[arg(long, value_name = "true|false", group = "change")]
        read_only: Option<bool>,
        /// Look for blocks that are already stored, or stop looking; blocks that are shared stay shared
        #[arg(long, value_name = "true|false", group = "change")]
        dedup: Option<bool>,
    },
    /// Remove a volume; it can be restored until deleted_retention has passed
    Rm {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// Remove it at once, beyond recovery
        #[arg(long)]
        now: bool,
        /// Like --now, and destroy the volume's dedicated key: its data can no longer be read, wherever copies of it are
        #[arg(long, conflicts_with = "now")]
        erase: bool,
    },
    /// Bring a removed volume back
    Restore {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
    },
    /// Rename a volume that is not in use
    Rename {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// New name
        new_name: String,
    },
    /// Make a clone independent of its origin, in the background
    Promote {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
    },
    /// Confirm that no client from before a loss of writes still runs, and serve remote clients again
    ///
    /// After a reboot or a take-over that may have lost writes, a volume refuses clients on other machines
    AcceptLoss {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// If a spill file is missing, go back to the state in the store, without the writes of that file
        #[arg(long)]
        discard_local_writes: bool,
    },
}

/// Reads a path, which the daemon cannot take for one in its own working directory.
fn absolute_path(text: &str) -> std::io::Result<PathBuf> {
    std::path::absolute(text)
}

/// The values of [`Durability`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DurabilityArg {
    /// For each connection, write if its client is on another machine, otherwise flush
    Auto,
    /// A crash of the daemon; after a flush, also a loss of power
    Flush,
    /// A crash of the daemon and a loss of power
    Write,
    /// Like flush, but a flush also waits until the store has the data
    Store,
}

impl From<DurabilityArg> for Durability {
    fn from(arg: DurabilityArg) -> Durability {
        match arg {
            DurabilityArg::Auto => Durability::Auto,
            DurabilityArg::Flush => Durability::Flush,
            DurabilityArg::Write => Durability::Write,
            DurabilityArg::Store => Durability::Store,
        }
    }
}

/// Options of `clone`.
#[derive(Clone, Debug, Args)]
pub struct CloneArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Name of the snapshot: VOLUME@NAME
    pub snapshot: String,
    /// Name of the new volume
    pub name: String,
    /// Remove the clone automatically after this time, like 8h; it can then be restored like any removed volume
    #[arg(long, value_name = "DURATION")]
    pub ttl: Option<Span>,
}

impl CloneArgs {
    pub(super) fn request(&self) -> Result<(&PoolArgs, Request)> {
        let request = VolumeRequest::Clone {
            snapshot: self.snapshot.clone(),
            name: self.name.clone(),
            ttl_seconds: one_second_at_least("--ttl", self.ttl)?,
        };
        Ok((&self.pool, Request::Volume(request)))
    }
}

impl VolumeCommand {
    pub(super) fn request(&self) -> (&PoolArgs, Request) {
        let (pool, request) = match self {
            VolumeCommand::List { pool } => (pool, VolumeRequest::List {}),
            VolumeCommand::Create { pool, name, from_superseded: Some(of), log, .. } => {
                let (name, of, log) = (name.clone(), of.clone(), log.clone());
                (pool, VolumeRequest::Recover { name, of, log })
            }
            VolumeCommand::Create {
                pool, name, size, durability, dedicated_key, dedup, ..
            } => {
                let request = VolumeRequest::Create {
                    name: name.clone(),
                    // It is required without `from_superseded`.
                    size_bytes: size.map_or(0, |size| size.0),
                    durability: (*durability).into(),
                    dedicated_key: *dedicated_key,
                    dedup: *dedup,
                };
                (pool, request)
            }
            VolumeCommand::Show { pool, name } => {
                (pool, VolumeRequest::Show { name: name.clone() })
            }
            VolumeCommand::Resize { pool, name, size, shrink } => {
                let (name, size_bytes) = (name.clone(), size.0);
                (pool, VolumeRequest::Resize { name, size_bytes, shrink: *shrink })
            }
            VolumeCommand::Set { pool, name, durability, read_only, dedup } => {
                let request = VolumeRequest::Set {
                    name: name.clone(),
                    durability: durability.map(Into::into),
                    is_read_only: *read_only,
                    dedup: *dedup,
                };
                (pool, request)
            }
            VolumeCommand::Rm { pool, name, now, erase } => {
                let mode = match (now, erase) {
                    (_, true) => RemoveMode::Erase,
                    (true, false) => RemoveMode::Now,
                    (false, false) => RemoveMode::Restorable,
                };
                (pool, VolumeRequest::Remove { name: name.clone(), mode })
            }
            VolumeCommand::Restore { pool, name } => {
                (pool, VolumeRequest::Restore { name: name.clone() })
            }
            VolumeCommand::Rename { pool, name, new_name } => {
                let (name, new_name) = (name.clone(), new_name.clone());
                (pool, VolumeRequest::Rename { name, new_name })
            }
            VolumeCommand::Promote { pool, name } => {
                (pool, VolumeRequest::Promote { name: name.clone() })
            }
            VolumeCommand::AcceptLoss { pool, name, discard_local_writes } => {
                let (name, discard_local_writes) = (name.clone(), *discard_local_writes);
                (pool, VolumeRequest::AcceptLoss { name, discard_local_writes })
            }
        };
        (pool, Request::Volume(request))
    }
}
