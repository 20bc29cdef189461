//! Owns the grammar of the command line, and the translation of its flags into configuration.

use crate::config::Override;
use crate::record::Durability;
use crate::units::{ByteSize, Span};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use toml::Value;

/// Fast, safe virtual disks on an object store.
#[derive(Clone, Debug, Parser)]
#[command(name = "spindle", version, about, max_term_width = 100, subcommand_required = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 3 ended by a second signal,\n4 attach of a URI: the server ended the attachment, 5 serve: the disk of the write log failed.\n\
    Environment: SPINDLE_LOG sets the log filter (info, tiering=debug, …); the store's credentials \
    come from the variables of its ecosystem (AWS_…, GOOGLE_…, AZURE_…)."
)]
pub struct Cli {
    /// How results are printed.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Open a pool and serve its volumes
    Serve(Box<ServeArgs>),
    /// Make a pool in a directory, write, restart, verify, measure, and serve until Ctrl-C
    Demo(DemoArgs),
    /// Volumes of a pool
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Snapshots of volumes: made at once, whatever the size
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make a volume of what a snapshot shows, at once: `clone db@monday test --ttl 8h`
    Clone {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// VOLUME@NAME
        snapshot: String,
        /// Name of the new volume
        name: String,
        /// Remove it by itself after this time, like 8h; it can be restored then as other removed volumes
        #[arg(long, value_name = "DURATION")]
        ttl: Option<Span>,
    },
    /// Make a new pool in --dir and --store that shows what a copy holds; it serves at once, and fetches what it lacks in
    /// the background: `restore s3://bucket/copy --dir /new --key-file K`
    Restore {
        /// Which pool to make, and what opens the copy
        #[command(flatten)]
        pool: PoolArgs,
        /// The copy, or URL@SNAPSHOT: the volumes that have that snapshot show it
        url: String,
        /// Restore this volume, and none that is not named so. May be repeated
        #[arg(long, value_name = "NAME")]
        volume: Vec<String>,
        /// What the one volume is called in the new pool: NAME, or POOL/NAME
        #[arg(long = "as", value_name = "NAME")]
        name: Option<String>,
        /// Fetch so many bytes a second at most in the background, like 50M
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Take settings and credentials of the copy's store from variables that begin so: with DR_, DR_AWS_ACCESS_KEY_ID …
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
    },
    /// Copies of a pool in other stores, of any provider
    #[command(subcommand)]
    Copy(CopyCommand),
    /// Remove a pool, bring it back, or delete it for good
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Make a volume a block device of this machine: `attach db`, `attach POOL/db`, `attach list`
    Attach(AttachArgs),
    /// Take the block device of a volume away; nothing may use it
    Detach(DetachArgs),
    /// State of a pool
    Status(PoolArgs),
    /// Verify everything that the store holds, in the background, and put back from copies what is bad
    #[command(subcommand)]
    Scrub(ScrubCommand),
    /// Copy everything to the store, and wait until it is there
    Flush(PoolArgs),
    /// Stop the daemon that runs on a directory, in order
    Stop(PoolArgs),
    /// Walk a pool and verify every frame, without changing anything
    Fsck {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Walk this copy of a pool instead, with what opens that
        #[arg(long, value_name = "URL")]
        copy: Option<String>,
        /// The copy's store takes its settings from variables that begin so
        #[arg(long, value_name = "PREFIX", requires = "copy")]
        env_prefix: Option<String>,
        /// Put counts of live blocks right that are wrong
        #[arg(long, conflicts_with = "copy")]
        repair_counts: bool,
    },
    /// Keys of a pool
    #[command(subcommand)]
    Key(KeyCommand),
    /// Configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Version of the program and of the formats it reads and writes
    Version,
}

/// Copies of a pool.
#[derive(Clone, Debug, Subcommand)]
pub enum CopyCommand {
    /// Copy the pool to an empty prefix of another store from now on: `copy add s3://bucket/prefix`
    Add {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// s3://bucket/prefix, gs://…, az://…, file:///path, or a directory
        url: String,
        /// Copy this volume with its snapshots, and none that is not named so. May be repeated
        #[arg(long, value_name = "NAME")]
        volume: Vec<String>,
        /// From the beginning of one state of the copy to that of the next
        #[arg(long, value_name = "DURATION", default_value = "60s")]
        interval: Span,
        /// Only when snapshots have come or gone
        #[arg(long, conflicts_with = "interval")]
        snapshots_only: bool,
        /// Bytes a second at most, like 50M
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Take settings and credentials of its store from variables that begin so: with DR_, DR_AWS_ACCESS_KEY_ID …
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
        /// Only this key file opens the copy, and not what opens the pool; made where it is missing
        #[arg(long, value_name = "PATH")]
        copy_key_file: Option<PathBuf>,
        /// Also where the copy has another key of its own, which opens it no more then
        #[arg(long, requires = "copy_key_file")]
        replace_copy_key: bool,
    },
    /// Show how far each copy is
    List {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Bring a copy up to date now, and wait until it is
    Sync {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Where it is
        url: String,
    },
    /// Restored from a copy that lacks segments, which `status` names: wait for them no longer; what they held is lost then
    GiveUpMissing(PoolArgs),
    /// Serve a copy where it lies, as it is now, to be read only, until SIGTERM; copying to it goes on
    Open(CopyOpenArgs),
    /// End a copy; what is there stays
    Rm {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Where it is
        url: String,
    },
}

/// A copy that is served.
#[derive(Clone, Debug, Args)]
pub struct CopyOpenArgs {
    /// What opens it.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Where it is
    pub url: String,
    /// Take settings and credentials of its store from variables that begin so
    #[arg(long, value_name = "PREFIX")]
    pub env_prefix: Option<String>,
    /// Address of the NBD server, HOST:PORT; port 0 picks a free one. May be repeated. That of the configuration is the pool's
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
    /// What these flags set.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let mut pool = self.pool.clone();
        if pool.config.is_none() {
            // Nothing is made there; it is where a key file that is not named is looked for.
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

/// The pool's scrub.
#[derive(Clone, Debug, Subcommand)]
pub enum ScrubCommand {
    /// Begin, or go on with the one that was stopped; what runs takes the new pace
    Start {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Bytes a second at most, like 50M; 32M without it
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Again and again: from the beginning of one to that of the next, like 30d
        #[arg(long, value_name = "DURATION")]
        every: Option<Span>,
    },
    /// Stop it, and begin no other
    Stop {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Show how far it is, and what it has found
    Status {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

/// Volumes of a pool.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeCommand {
    /// Make a volume: `volume create db 100G`
    Create {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// 1 to 63 characters of A-Z a-z 0-9 . _ -
        name: String,
        /// Like 100G; a multiple of 512 bytes, up to 1P
        size: ByteSize,
        /// What an answered write has survived
        #[arg(long, value_enum, default_value_t = DurabilityArg::Auto)]
        durability: DurabilityArg,
        /// With a key of its own, which `volume rm --erase` destroys; clones share it
        #[arg(long)]
        own_key: bool,
        /// Look for blocks that are stored already, and do not store them again; clones do the same
        #[arg(long)]
        dedup: bool,
    },
    /// List volumes, removed ones that can be restored included
    List {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Show one volume
    Show {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
    },
    /// Give a volume another size, while it is in use
    Resize {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
        /// The new size
        size: ByteSize,
        /// Allow it to become smaller; what lies beyond is gone
        #[arg(long)]
        shrink: bool,
    },
    /// Change what a volume promises, while it is in use; what is not named stays
    #[command(group(clap::ArgGroup::new("change").required(true).multiple(true)))]
    Set {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
        /// What an answered write has survived
        #[arg(long, value_enum, group = "change")]
        durability: Option<DurabilityArg>,
        /// Refuse writes, or accept them again
        #[arg(long, value_name = "true|false", group = "change")]
        read_only: Option<bool>,
        /// Look for blocks that are stored already, or stop that; what was found stays shared
        #[arg(long, value_name = "true|false", group = "change")]
        dedup: Option<bool>,
    },
    /// Remove a volume; it can be restored for the time of deleted_retention
    Rm {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
        /// Beyond recovery, at once
        #[arg(long)]
        now: bool,
        /// As --now, and destroy its own key: nobody reads what it held any more, wherever copies of that are
        #[arg(long, conflicts_with = "now")]
        erase: bool,
    },
    /// Bring a removed volume back
    Restore {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
    },
    /// Give a volume another name; nobody may use it meanwhile
    Rename {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
        /// The new one
        new_name: String,
    },
    /// Make a clone independent of what it was made from, in the background
    Promote {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
    },
    /// After a reboot or take-over took writes: say that no client of before goes on
    Accept {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Its name
        name: String,
        /// Where a side file is missing: go back to what the store has, without its writes
        #[arg(long)]
        give_up_writes: bool,
    },
}

/// Snapshots of volumes.
#[derive(Clone, Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Make a snapshot: `snapshot create db@monday`; of several volumes at the same instant: `db,wal@monday`
    Create {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// VOLUME@NAME, or VOLUME,VOLUME@NAME
        snapshot: String,
    },
    /// List snapshots, oldest first
    List {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Only those of this volume
        volume: Option<String>,
        /// With the space that each of them alone holds: what comes back if it is removed
        #[arg(long)]
        space: bool,
    },
    /// Show what has changed from one snapshot to a later one: bytes, sorted, for backup programs
    Diff {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// VOLUME@NAME
        older: String,
        /// VOLUME@NAME, a later one of the same volume
        newer: String,
    },
    /// Make snapshots of a volume by schedule, or show what its schedule does next: which snapshots stay, and which go
    Schedule {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// The volume
        volume: String,
        /// When, in UTC, as cron has it: "0 * * * *", @hourly, @daily; without it nothing changes
        cron: Option<String>,
        /// Keep the newest snapshot of so many hours; 24 where no number is given, as 7 days, 4 weeks, 12 months
        #[arg(long, value_name = "COUNT", requires = "cron")]
        hourly: Option<u32>,
        /// Of so many days
        #[arg(long, value_name = "COUNT", requires = "cron")]
        daily: Option<u32>,
        /// Of so many weeks
        #[arg(long, value_name = "COUNT", requires = "cron")]
        weekly: Option<u32>,
        /// Of so many months
        #[arg(long, value_name = "COUNT", requires = "cron")]
        monthly: Option<u32>,
        /// End the schedule; its snapshots stay
        #[arg(long, conflicts_with = "cron")]
        off: bool,
    },
    /// Make a volume show what a snapshot of it shows; nobody may use it meanwhile, and all snapshots stay
    Rollback {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// VOLUME@NAME
        snapshot: String,
    },
    /// Remove a snapshot; no client may have it open, and no clone depend on it
    Rm {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// VOLUME@NAME
        snapshot: String,
    },
}

/// How a volume is attached.
#[derive(Clone, Debug, Args)]
pub struct AttachArgs {
    /// Which pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// A volume, or POOL/VOLUME; `list` shows what is attached; with --cleanup, a device; with --nbd also
    /// a URI of an export elsewhere, whose device this command then serves until it is stopped
    #[arg(required_unless_present = "cleanup")]
    pub target: Option<String>,
    /// Hardware queues, each with a thread; by default as many as processors, at most 4, fewer where many devices share
    /// the memory
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "nbd")]
    pub queues: Option<u16>,
    /// Requests in flight of a queue
    #[arg(long, value_name = "COUNT", default_value_t = 64, conflicts_with = "nbd")]
    pub depth: u16,
    /// Logical block of the device, 512 or 4096 bytes (with --nbd also 1024 and 2048); 4096 by default
    #[arg(long, value_name = "BYTES")]
    pub logical_block: Option<u32>,
    /// By the kernel's nbd driver, where it has no ublk
    #[arg(long)]
    pub nbd: bool,
    /// Connections to the nbd driver, 1 to 16
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "nbd")]
    pub connections: u16,
    /// Requests to an nbd device fail when no daemon has served it for so long
    #[arg(long, value_name = "DURATION", default_value = "1d", requires = "nbd")]
    pub dead_timeout: Span,
    /// NBD clients may write to the volume as well
    #[arg(long)]
    pub shared: bool,
    /// With a URI: keep the process, which serves the device, in memory; for machines that swap
    #[arg(long, requires = "nbd")]
    pub lock_memory: bool,
    /// While no daemon runs: remove the devices that the last one left, or the one that is named
    #[arg(long)]
    pub cleanup: bool,
}

/// How a volume is detached.
#[derive(Clone, Debug, Args)]
pub struct DetachArgs {
    /// Which pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// The volume, POOL/VOLUME, or its device; or the URI that was attached
    pub target: String,
    /// Also while something uses it, which gets errors then
    #[arg(long)]
    pub force: bool,
}

/// A pool as a whole, while no daemon has it.
#[derive(Clone, Debug, Subcommand)]
pub enum PoolCommand {
    /// Remove a pool: nothing opens it any more; it can be restored until it is purged
    Rm {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Bring a removed pool back
    Restore {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Delete a removed pool from the store, beyond recovery, once deleted_retention has passed
    Purge {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Do not wait for deleted_retention
        #[arg(long)]
        now: bool,
    },
}

/// The words of [`Durability`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DurabilityArg {
    /// For each connection: write when its client is on another machine, else flush
    Auto,
    /// A crash of the daemon; a flush also a loss of power
    Flush,
    /// Every write also a loss of power
    Write,
    /// As flush, and a flush waits for the store
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

/// Keys of a pool.
#[derive(Clone, Debug, Subcommand)]
pub enum KeyCommand {
    /// Print a recovery key, which opens the pool when the key is lost. It is shown this once
    Backup {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Earlier recovery keys stop working
        #[arg(long)]
        replace: bool,
    },
    /// Replace what opens the pool; the data is not touched. Without a --new flag the key file is
    /// replaced in place
    Rotate {
        /// Which pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// What opens it from now on.
        #[command(flatten)]
        new: NewKeyArgs,
    },
}

/// What opens the pool after a rotation.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = false)]
pub struct NewKeyArgs {
    /// A key file, made where it is missing
    #[arg(long, value_name = "PATH")]
    pub new_key_file: Option<PathBuf>,
    /// The first line of a file
    #[arg(long, value_name = "PATH")]
    pub new_passphrase_file: Option<PathBuf>,
    /// An environment variable
    #[arg(long, value_name = "NAME")]
    pub new_passphrase_env: Option<String>,
    /// An open file descriptor
    #[arg(long, value_name = "NUMBER")]
    pub new_passphrase_fd: Option<u32>,
    /// The first line of output of a program with its arguments
    #[arg(long, value_name = "PROGRAM", num_args = 1.., allow_hyphen_values = true)]
    pub new_command: Option<Vec<String>>,
}

/// Configuration.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration and where each value comes from
    Show(Box<ServeArgs>),
    /// Print a commented spindle.toml
    Example,
}

/// Options of the demonstration.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Directory of the pool; one is made below the temporary directory by default
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// End after the measurements instead of serving
    #[arg(long)]
    pub exit: bool,
}

/// Which pool, and what opens it.
#[derive(Clone, Debug, Default, Args)]
pub struct PoolArgs {
    /// Directory of the pool: log, cache, identity
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Configuration file
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// s3://bucket/prefix, gs://…, az://…, file:///path, or a directory; DIR/store by default
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// What opens it.
    #[command(flatten)]
    pub key: KeyArgs,
}

/// What opens the pool.
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
    /// Open file descriptor that gives the passphrase
    #[arg(long, value_name = "NUMBER")]
    pub passphrase_fd: Option<u32>,
    /// File with a key that `key backup` printed
    #[arg(long, value_name = "PATH")]
    pub recovery_key_file: Option<PathBuf>,
}

/// Options of the daemon.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// Which pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Address of the NBD server, HOST:PORT; port 0 picks a free one. May be repeated
    #[arg(long, value_name = "ADDR")]
    pub nbd: Vec<String>,
    /// Unix socket of the NBD server
    #[arg(long, value_name = "PATH")]
    pub nbd_unix: Option<PathBuf>,
    /// Make this volume when it is missing, and export it. May be repeated
    #[arg(long, value_name = "NAME=SIZE", value_parser = parse_volume)]
    pub volume: Vec<(String, ByteSize)>,
    /// Take the pool from the node that has it open: that node's clients get errors
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
    /// How log files are written: auto, buffered, direct
    #[arg(long, value_name = "MODE")]
    pub log_io: Option<String>,
    /// Directory of the read cache; DIR/cache by default
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Size of the read cache, 0 for none
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<ByteSize>,
    /// Oldest age of data that only this machine has, like 30s
    #[arg(long, value_name = "DURATION")]
    pub max_age: Option<String>,
}

fn parse_volume(text: &str) -> Result<(String, ByteSize), String> {
    let (name, size) =
        text.split_once('=').ok_or_else(|| "write NAME=SIZE, like db=100G".to_owned())?;
    crate::units::check_name("volume", name)?;
    Ok((name.to_owned(), size.parse()?))
}

fn path_value(path: &std::path::Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

impl PoolArgs {
    /// What these flags set.
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
    /// The configuration file, if one is named.
    #[must_use]
    pub fn config_path(&self) -> Option<PathBuf> {
        self.pool.config.clone()
    }

    /// What these flags set.
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

/// Collects what flags set.
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

    /// A flag that names a secret's place also chooses the source.
    fn source<T>(&mut self, given: &Option<T>, source: &str, flag: &'static str) {
        self.text("keys.source", flag, given.as_ref().map(|_| source));
    }
}
