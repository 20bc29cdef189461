//! Defines the grammar of the command line, and translates its flags into configuration.

use crate::config::Override;
use block::quantities::{ByteSize, Span};
use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::record::Durability;
use std::path::PathBuf;
use toml::Value;

/// Fast, safe virtual disks on an object store.
#[derive(Clone, Debug, Parser)]
#[command(name = "spindle", version, about, max_term_width = 100, subcommand_required = true)]
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
    /// Create a pool in a directory, write, restart, verify, measure, and serve until Ctrl-C
    Demo(DemoArgs),
    /// Manage the volumes of a pool
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Manage snapshots of volumes, which are made at once, whatever the size
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Create a volume with the contents of a snapshot, at once: `clone db@monday test --ttl 8h`
    Clone {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME
        snapshot: String,
        /// Name of the new volume
        name: String,
        /// Remove the clone automatically after this time, like 8h; it can then be restored like any removed volume
        #[arg(long, value_name = "DURATION")]
        ttl: Option<Span>,
    },
    /// Create a pool in --dir and --store from a copy: `restore s3://bucket/copy --dir /new --key-file K`
    ///
    /// The new pool serves at once, and fetches missing data from the copy in the background
    Restore {
        /// The pool to create, and the key of the copy.
        #[command(flatten)]
        pool: PoolArgs,
        /// URL of the copy, or URL@SNAPSHOT: volumes that have this snapshot show it
        url: String,
        /// Restore only this volume; may be repeated
        #[arg(long, value_name = "NAME")]
        volume: Vec<String>,
        /// Name of the one restored volume in the new pool: NAME, or POOL/NAME
        #[arg(long = "as", value_name = "NAME")]
        name: Option<String>,
        /// Maximum bytes a second to fetch in the background, like 50M
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Read settings and credentials of the copy's store from variables with this prefix: with DR_, from
        /// DR_AWS_ACCESS_KEY_ID …
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
    },
    /// Manage copies of a pool in other stores, of any provider
    #[command(subcommand)]
    Copy(CopyCommand),
    /// Remove a pool, bring it back, or delete it for good
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Make a volume a block device of this machine: `attach db`, `attach POOL/db`, `attach list`
    Attach(AttachArgs),
    /// Remove the block device of a volume, which must not be in use
    Detach(DetachArgs),
    /// Show the state of a pool, the data at risk, and warnings
    Status(PoolArgs),
    /// Verify everything in the store in the background, and put bad segments back from copies
    #[command(subcommand)]
    Scrub(ScrubCommand),
    /// Copy everything to the store, and wait until it is there
    Flush(PoolArgs),
    /// Stop the daemon that runs on a directory, in an orderly way
    Stop(PoolArgs),
    /// Walk a pool and verify every frame, without changing anything
    Fsck {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Verify the newest state of this copy instead, with a key that opens the copy
        #[arg(long, value_name = "URL")]
        copy: Option<String>,
        /// Read settings and credentials of the copy's store from variables with this prefix
        #[arg(long, value_name = "PREFIX", requires = "copy")]
        env_prefix: Option<String>,
        /// Correct wrong counts of live blocks afterwards
        #[arg(long, conflicts_with = "copy")]
        repair_counts: bool,
    },
    /// Back up or replace the keys of a pool
    #[command(subcommand)]
    Key(KeyCommand),
    /// Show the configuration, or print an example
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the versions of the program and of the formats that it reads and writes
    Version,
}

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
        /// Time from the start of one state of the copy to the start of the next
        #[arg(long, value_name = "DURATION", default_value = "60s")]
        interval: Span,
        /// Make a new state only when snapshots were added or removed
        #[arg(long, conflicts_with = "interval")]
        snapshots_only: bool,
        /// Maximum bytes a second, like 50M
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Read settings and credentials of the copy's store from variables with this prefix: with DR_, from
        /// DR_AWS_ACCESS_KEY_ID …
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
        /// Give the copy a key of its own in this file, made if it is missing; the pool's keys do not open the copy
        #[arg(long, value_name = "PATH")]
        copy_key_file: Option<PathBuf>,
        /// Replace the key if the copy already has one of its own; the old key stops working
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
    /// Serve the present state of a copy in place, read-only, until SIGTERM; copying continues
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
    pub fn overrides(&self) -> Vec<Override> {
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
        serve.overrides()
    }
}

/// Commands about the pool's scrub.
#[derive(Clone, Debug, Subcommand)]
pub enum ScrubCommand {
    /// Start a scrub, or continue a stopped one; a running scrub takes the new rate and repetition
    Start {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Maximum bytes a second, like 50M; 32M by default
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Repeat the scrub: time from the start of one to the start of the next, like 30d
        #[arg(long, value_name = "DURATION")]
        every: Option<Span>,
    },
    /// Stop the scrub, and start no other
    Stop {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Show the progress of the scrub, and its findings
    Status {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

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
        size: ByteSize,
        /// Failures that an acknowledged write survives
        #[arg(long, value_enum, default_value_t = DurabilityArg::Auto)]
        durability: DurabilityArg,
        /// Give the volume a key of its own, which `volume rm --erase` destroys; clones share it
        #[arg(long)]
        own_key: bool,
        /// Look for blocks that are already stored, and do not store them again; clones inherit this
        #[arg(long)]
        dedup: bool,
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
        /// Like --now, and destroy the volume's own key: its data can no longer be read, wherever copies of it are
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
    Accept {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        name: String,
        /// If a side file is missing, go back to the state in the store, without the writes of that file
        #[arg(long)]
        give_up_writes: bool,
    },
}

/// Commands about snapshots.
#[derive(Clone, Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Create a snapshot: `snapshot create db@monday`, or of several volumes at the same instant: `db,wal@monday`
    Create {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME, or VOLUME,VOLUME@NAME
        snapshot: String,
    },
    /// List snapshots, oldest first
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// List only the snapshots of this volume
        volume: Option<String>,
        /// Show the space that each snapshot alone holds, which returns when it is removed
        #[arg(long)]
        space: bool,
    },
    /// List the byte ranges that changed from one snapshot to a later one, sorted, for backup programs
    Diff {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Earlier snapshot: VOLUME@NAME
        older: String,
        /// Later snapshot of the same volume: VOLUME@NAME
        newer: String,
    },
    /// Create snapshots of a volume by schedule, or show which snapshots its schedule keeps and removes next
    Schedule {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the volume
        volume: String,
        /// Times in UTC as a cron expression: "0 * * * *", @hourly, @daily; without it, the schedule is only shown
        cron: Option<String>,
        /// Keep the newest snapshot of each of the last COUNT hours that have any; without any count: 24 hours, 7 days,
        /// 4 weeks and 12 months
        #[arg(long, value_name = "COUNT", requires = "cron")]
        hourly: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT days that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        daily: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT weeks that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        weekly: Option<u32>,
        /// Keep the newest snapshot of each of the last COUNT months that have any
        #[arg(long, value_name = "COUNT", requires = "cron")]
        monthly: Option<u32>,
        /// End the schedule; its snapshots stay
        #[arg(long, conflicts_with = "cron")]
        off: bool,
    },
    /// Set a volume that is not in use back to one of its snapshots; all snapshots stay
    Rollback {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME
        snapshot: String,
    },
    /// Remove a snapshot that no client has open and no clone depends on
    Rm {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Name of the snapshot: VOLUME@NAME
        snapshot: String,
    },
}

/// Options of `attach`.
#[derive(Clone, Debug, Args)]
pub struct AttachArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Name of a volume, or POOL/VOLUME; `list` shows all devices; with --cleanup, a device; with --nbd also the URI of an
    /// export elsewhere, whose device this command then serves until it is stopped
    #[arg(required_unless_present = "cleanup")]
    pub target: Option<String>,
    /// Hardware queues, each with a thread; by default one per processor, at most 4, and fewer if many devices share the
    /// memory
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "nbd")]
    pub queues: Option<u16>,
    /// Requests in flight per queue
    #[arg(long, value_name = "COUNT", default_value_t = 64, conflicts_with = "nbd")]
    pub depth: u16,
    /// Logical block of the device, 512 or 4096 bytes (with --nbd also 1024 and 2048); 4096 by default
    #[arg(long, value_name = "BYTES")]
    pub logical_block: Option<u32>,
    /// Use the kernel's nbd driver, for kernels without ublk
    #[arg(long)]
    pub nbd: bool,
    /// Connections between kernel and daemon, 1 to 16
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "nbd")]
    pub connections: u16,
    /// Time without a daemon after which requests to an nbd device fail
    #[arg(long, value_name = "DURATION", default_value = "1d", requires = "nbd")]
    pub dead_timeout: Span,
    /// Let NBD clients open the volume and write to it as well
    #[arg(long)]
    pub shared: bool,
    /// With a URI, lock the process that serves the device in memory, for machines that swap
    #[arg(long, requires = "nbd")]
    pub lock_memory: bool,
    /// Remove the devices that the last daemon left, or only the named one; no daemon may be running
    #[arg(long)]
    pub cleanup: bool,
}

/// Options of `detach`.
#[derive(Clone, Debug, Args)]
pub struct DetachArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Name of the volume, POOL/VOLUME, its device, or the attached URI
    pub target: String,
    /// Detach the device even while it is in use; its users get errors
    #[arg(long)]
    pub force: bool,
}

/// Commands about a whole pool, while no daemon has it open.
#[derive(Clone, Debug, Subcommand)]
pub enum PoolCommand {
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

/// Commands about the configuration.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration and the source of each value
    Show(Box<ServeArgs>),
    /// Print a commented spindle.toml
    Example,
}

/// Options of the demonstration.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Directory of the pool; by default a new one below the temporary directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// End after the measurements instead of serving
    #[arg(long)]
    pub exit: bool,
}

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

/// Options of the daemon.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Address of the NBD server, HOST:PORT; port 0 picks a free one; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub nbd: Vec<String>,
    /// Unix socket of the NBD server
    #[arg(long, value_name = "PATH")]
    pub nbd_unix: Option<PathBuf>,
    /// Create this volume if it is missing, and export it; may be repeated
    #[arg(long, value_name = "NAME=SIZE", value_parser = parse_volume)]
    pub volume: Vec<(String, ByteSize)>,
    /// Take the pool from the node that has it open; clients of that node get errors
    #[arg(long)]
    pub take_over: bool,
    /// Serve other machines without TLS
    #[arg(long)]
    pub allow_plain_remote: bool,
    /// Memory of the whole process, like 1G
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Memory for decrypted data, 0 for none
    #[arg(long, value_name = "SIZE")]
    pub memory_cache: Option<ByteSize>,
    /// Size of a new write log
    #[arg(long, value_name = "SIZE")]
    pub log_size: Option<ByteSize>,
    /// Method of writing log files: auto, buffered, direct
    #[arg(long, value_name = "MODE")]
    pub log_io: Option<String>,
    /// Directory of the read cache; DIR/cache by default
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size of the read cache, 0 for none
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<ByteSize>,
    /// Maximum age of data that only this machine has, like 30s
    #[arg(long, value_name = "DURATION")]
    pub max_age: Option<String>,
}

fn parse_volume(text: &str) -> Result<(String, ByteSize), String> {
    let (name, size) =
        text.split_once('=').ok_or_else(|| "write NAME=SIZE, like db=100G".to_owned())?;
    block::quantities::check_name("volume", name)?;
    Ok((name.to_owned(), size.parse()?))
}

fn path_value(path: &std::path::Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

impl PoolArgs {
    /// Returns the settings that these flags set.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let mut set = Overrides::default();
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

impl ServeArgs {
    /// Returns the path of the configuration file, if one is given.
    #[must_use]
    pub fn config_path(&self) -> Option<PathBuf> {
        self.pool.config.clone()
    }

    /// Returns the settings that these flags set.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let mut set = Overrides(self.pool.overrides());
        let listen: Vec<Value> = self.nbd.iter().cloned().map(Value::String).collect();
        set.value("nbd.listen", "--nbd", (!listen.is_empty()).then_some(Value::Array(listen)));
        set.path("nbd.unix", "--nbd-unix", self.nbd_unix.as_deref());
        let allow = self.allow_plain_remote.then_some(Value::Boolean(true));
        set.value("nbd.allow_plain_remote", "--allow-plain-remote", allow);
        set.size("memory", "--memory", self.memory);
        set.size("memory_cache.size", "--memory-cache", self.memory_cache);
        set.size("log.size", "--log-size", self.log_size);
        set.text("log.io", "--log-io", self.log_io.as_deref());
        set.path("cache.dir", "--cache-dir", self.cache_dir.as_deref());
        set.size("cache.size", "--cache-size", self.cache_size);
        set.text("destage.max_age", "--max-age", self.max_age.as_deref());
        let volumes: Vec<Value> = self
            .volume
            .iter()
            .map(|(name, size)| {
                let mut volume = toml::Table::new();
                volume.insert("name".to_owned(), Value::String(name.clone()));
                volume.insert("size".to_owned(), Value::String(size.to_string()));
                Value::Table(volume)
            })
            .collect();
        set.value("volumes", "--volume", (!volumes.is_empty()).then_some(Value::Array(volumes)));
        set.0
    }
}

/// Collects the settings of flags.
#[derive(Default)]
struct Overrides(Vec<Override>);

impl Overrides {
    fn value(&mut self, key: &'static str, flag: &'static str, value: Option<Value>) {
        self.0.extend(value.map(|value| Override { key, flag, value }));
    }

    fn text(&mut self, key: &'static str, flag: &'static str, value: Option<&str>) {
        self.value(key, flag, value.map(|text| Value::String(text.to_owned())));
    }

    fn path(&mut self, key: &'static str, flag: &'static str, value: Option<&std::path::Path>) {
        self.value(key, flag, value.map(path_value));
    }

    fn size(&mut self, key: &'static str, flag: &'static str, value: Option<ByteSize>) {
        self.value(key, flag, value.map(|size| Value::String(size.to_string())));
    }

    /// Sets `keys.source` if the flag is given: a flag that names the place of a secret also selects the source.
    fn source<T>(&mut self, given: &Option<T>, source: &str, flag: &'static str) {
        self.text("keys.source", flag, given.as_ref().map(|_| source));
    }
}
