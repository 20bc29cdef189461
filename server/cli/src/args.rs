//! The grammar of the command line, one module a noun, and the requests that commands send.
//!
//! Invariants:
//! - No secret is taken from an argument, except a join token, which admits one node within an hour.
//! - Paths in requests are absolute: the daemon has another working directory.
//! - A request is made from the arguments alone. Checks that need the rules of the engine, such as
//!   the range of a size, follow in server.

mod copy;
mod data;
mod device;
mod dnode;
mod doctor;
mod drill;
mod key;
mod node;
mod pool;
mod scrub;
mod serve;
mod settings;
mod snapshot;
mod volume;

pub use copy::{CopyCommand, CopyOpenArgs, RestoreArgs, place};
pub use data::DataCommand;
pub use device::{AttachArgs, AttachPlan, DetachArgs, is_uri};
pub use dnode::DnodeArgs;
pub use doctor::DoctorArgs;
pub use drill::{DrillCommand, FailOverArgs};
pub use key::{KeyArgs, KeyCommand, NewKeyArgs};
pub use node::{NewNodeArgs, NodeCommand};
pub use pool::{FsckArgs, PoolArgs, PoolCommand};
pub use scrub::ScrubCommand;
pub use serve::{ConfigCommand, DemoArgs, ServeArgs};
pub use settings::Setting;
pub use snapshot::SnapshotCommand;
pub use volume::{CloneArgs, DurabilityArg, VolumeCommand};

use api::Request;
use api::key::KeyRequest;
use api::pool::PoolRequest;
use block::quantities::{ByteSize, Span};
use block::{Error, ErrorKind, Result};
use clap::{Parser, Subcommand, ValueEnum};
use std::path::{Path, PathBuf};

/// Fast, safe virtual disks on an object store.
#[derive(Clone, Debug, Parser)]
#[command(name = "spindle", version, max_term_width = 100, subcommand_required = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 3 ended by a second signal,\n4 attach of a URI: the server ended the attachment, 5 serve: the disk of the write log failed.\n\
    Environment: SPINDLE_LOG sets the log filter (info, tiering=debug, …); the store's credentials \
    come from the variables of its provider (AWS_…, GOOGLE_…, AZURE_…)."
)]
pub struct Cli {
    /// Format of the results
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// Format of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Readable text
    Text,
    /// One JSON document
    Json,
}

/// The command to run.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Open a pool and serve its volumes
    Serve(Box<ServeArgs>),
    /// Serve the drives of this machine to the pools of a cluster, as a data node
    ///
    /// The directory must have joined a cluster: `spindle node join TOKEN --without-key`. Pools name the
    /// drives in `data.stores` as spindle://NODE/DRIVE
    Dnode(DnodeArgs),
    /// Create a pool in a directory, write, restart, verify, measure, and serve until Ctrl-C
    Demo(DemoArgs),
    /// Manage the volumes of a pool
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Manage snapshots of volumes, which are made at once, whatever the size
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Create a volume with the contents of a snapshot, at once: `clone db@monday test --ttl 8h`
    Clone(CloneArgs),
    /// Create a pool in --dir and --store from a copy: `restore s3://bucket/copy --dir /new --key-file K`
    ///
    /// The new pool serves at once, and fetches missing data from the copy in the background
    Restore(RestoreArgs),
    /// Manage copies of a pool in other stores, of any provider
    #[command(subcommand)]
    Copy(CopyCommand),
    /// List, drain and replace the data stores of a pool, and move fragments to new ones
    #[command(subcommand)]
    Data(DataCommand),
    /// Manage the members of a pool's write log, move the pool, remove it, bring it back
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Rehearse a failure, and measure what clients see of it
    #[command(subcommand)]
    Drill(DrillCommand),
    /// Make a volume a block device of this machine: `attach db`, `attach POOL/db`, `attach list`
    Attach(AttachArgs),
    /// Remove the block device of a volume, which must not be in use
    Detach(DetachArgs),
    /// Show the state of a pool, the data at risk, and warnings
    Status(PoolArgs),
    /// Say whether data is at risk, and what would be unavailable without some data stores
    ///
    /// Counts all segments, and changes nothing
    Doctor(DoctorArgs),
    /// Verify everything in the store in the background, and put bad segments back from copies
    #[command(subcommand)]
    Scrub(ScrubCommand),
    /// Copy everything to the store, and wait until it is there
    Drain(PoolArgs),
    /// Stop the daemon that runs on a directory, in an orderly way
    Stop(PoolArgs),
    /// Walk a pool and verify every frame, without changing anything
    Fsck(FsckArgs),
    /// Back up or replace the keys of a pool
    #[command(subcommand)]
    Key(KeyCommand),
    /// Join machines to a cluster, list its nodes, and remove them
    #[command(subcommand)]
    Node(NodeCommand),
    /// Show the configuration, or print an example
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the versions of the program and of the formats that it reads and writes
    Version,
}

impl Command {
    /// Returns the request that the command sends, and its pool. `None` for a command that the
    /// program carries out itself, or with more than one request.
    ///
    /// # Errors
    /// `Invalid` for an argument that no daemon accepts.
    pub fn request(&self) -> Result<Option<(&PoolArgs, Request)>> {
        let asked = match self {
            Command::Volume(command) => command.request(),
            Command::Snapshot(command) => command.request(),
            Command::Clone(args) => args.request()?,
            Command::Copy(command) => return command.request(),
            Command::Scrub(command) => command.request()?,
            Command::Data(command) => command.request()?,
            Command::Node(command) => return Ok(command.request()),
            Command::Status(pool) => (pool, Request::Pool(PoolRequest::Status {})),
            Command::Doctor(args) => args.request(),
            Command::Drain(pool) => (pool, Request::Pool(PoolRequest::Drain {})),
            Command::Pool(command) => return Ok(command.request()),
            Command::Key(KeyCommand::Backup { pool, replace }) => {
                (pool, Request::Key(KeyRequest::Backup { replace: *replace }))
            }
            Command::Serve(_)
            | Command::Dnode(_)
            | Command::Demo(_)
            | Command::Drill(_)
            | Command::Restore(_)
            | Command::Attach(_)
            | Command::Detach(_)
            | Command::Stop(_)
            | Command::Fsck(_)
            | Command::Key(KeyCommand::Rotate { .. })
            | Command::Config(_)
            | Command::Version => return Ok(None),
        };
        Ok(Some(asked))
    }

    /// Tells whether the command serves a pool, a copy or drives until it is told to stop.
    #[must_use]
    pub fn is_daemon(&self) -> bool {
        matches!(self, Command::Serve(_) | Command::Dnode(_) | Command::Copy(CopyCommand::Open(_)))
    }

    /// Tells whether the command serves the device of an export elsewhere.
    #[must_use]
    pub fn is_remote_attach(&self) -> bool {
        matches!(self, Command::Attach(args) if args.target.as_deref().is_some_and(is_uri))
    }
}

/// Makes a path absolute.
///
/// # Errors
/// `Invalid` for an empty path.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, format!("path {}", path.display()), error)
    })
}

fn check_rate(rate: Option<ByteSize>) -> Result<()> {
    match rate {
        Some(rate) if rate.0 < 1 << 10 => {
            Err(Error::new(ErrorKind::Invalid, "read --rate: it is 1K a second at least"))
        }
        _ => Ok(()),
    }
}

fn one_second_at_least(flag: &str, span: Option<Span>) -> Result<Option<u64>> {
    match span.map(|span| span.duration().as_secs()) {
        Some(0) => {
            Err(Error::new(ErrorKind::Invalid, format!("read {flag}: it is a second at least")))
        }
        seconds => Ok(seconds),
    }
}
