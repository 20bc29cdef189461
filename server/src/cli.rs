//! Owns the command line: the requests, the process that carries them out, and the exit code.
//!
//! Invariants:
//! - Results go to standard output, everything else to standard error; errors read `spindle: …` and
//!   say what to do.
//! - Exit codes: 0 done, 1 failed, 2 the command line or the configuration is wrong, 3 a second
//!   signal ended the daemon before its stop was done, 4 the server ended the attachment of a
//!   client, 5 the disk of the write log failed.
//! - A command about a pool asks the daemon that runs on its directory; only if none runs, it opens
//!   the pool itself.
//! - No secret is taken from an argument.

pub mod args;
mod backend;
mod print;

use crate::admin::{self, AdminHandler, DiffInfo, Request, ScheduleSet};
use crate::attach::remote::RemoteOptions;
use crate::attach::{self, AttachOptions, Driver};
use crate::config::{self, Config};
use crate::serve::EXIT_LOG_FAILED;
use args::{
    Cli, Command, ConfigCommand, CopyCommand, KeyCommand, NewKeyArgs, Output, PoolCommand,
    ScrubCommand, SnapshotCommand, VolumeCommand,
};
use block::{Error, ErrorKind, Result};
use clap::Parser;
use control::keys::{KeySource, NewKey};
use engine::copies::NewCopy;
use engine::restore::Asked;
use engine::schedule::{Keep, Schedule};
use engine::snapshot::SnapshotName;
use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Default log filter of a daemon. Libraries log only unusual events.
const FILTER_DAEMON: &str = "warn,server=info,engine=info,devices=info,control=info,nbd=info,ublk=info,wal=info,tiering=info";
/// Threads for files. Chosen by hand: enough for a queue of 32 reads of a cold cache, and some
/// more.
const BLOCKING_THREAD_COUNT_MAX: usize = 40;
/// Polls of tasks between two looks at sockets and at tasks that other threads woke. Chosen by
/// hand: one poll moves up to a quarter of a megabyte, and a small synced write must not wait for
/// many.
const POLLS_BETWEEN_LOOKS: u32 = 4;
const FILTER_COMMAND: &str = "warn";

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    if let Some(code) = attach::apart::serve_if_asked() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misread(&error),
    };
    if let Err(error) = start_logging(&cli.command) {
        return fail(&cli, &Failure::Usage(error));
    }
    if is_daemon(&cli.command) || is_remote_attach(&cli.command) {
        write_back_memory();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREAD_COUNT_MAX)
        .event_interval(POLLS_BETWEEN_LOOKS)
        .global_queue_interval(POLLS_BETWEEN_LOOKS)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = Error::with_source(ErrorKind::Io, "start the runtime", error);
            return fail(&cli, &Failure::Failed(error));
        }
    };
    let outcome = runtime.block_on(run(&cli));
    // Work that still blocks (an opening that a signal ended) must not delay the exit.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(failure) => fail(&cli, &failure),
    }
}

/// Tells whether the command serves exports until it is told to stop.
fn is_daemon(command: &Command) -> bool {
    matches!(command, Command::Serve(_) | Command::Copy(CopyCommand::Open(_)))
}

/// Tells whether the command serves a device, as the daemon does.
fn is_remote_attach(command: &Command) -> bool {
    matches!(command, Command::Attach(args) if args.target.as_deref().is_some_and(is_uri))
}

/// Tells the kernel that this process and all of its threads write back memory: if memory is short,
/// the kernel must not make it wait for a device that it serves itself.
fn write_back_memory() {
    match rustix::process::configure_io_flusher_behavior(true) {
        Ok(()) | Err(Errno::PERM | Errno::INVAL) => {} // not root, or a kernel before 5.6
        Err(error) => tracing::debug!(%error, "the process is an ordinary one to the kernel"),
    }
}

/// Locks the memory that this process touches, now and later. Memory that is only reserved is not
/// locked.
fn lock_memory() -> Result<(), Error> {
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(flags).map_err(|errno| {
        let what = "lock the process in memory: raise its limit (LimitMEMLOCK=infinity in the unit, \
                    ulimit -l unlimited in a shell), or set lock_memory = false";
        Error::with_source(ErrorKind::Denied, what, std::io::Error::from(errno))
    })
}

/// Reason why a command did not succeed.
#[derive(Debug)]
enum Failure {
    /// The command line or the configuration is wrong.
    Usage(Error),
    /// The command was attempted and failed.
    Failed(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Failed(error)
    }
}

fn fail(cli: &Cli, failure: &Failure) -> ExitCode {
    let (error, code) = match failure {
        Failure::Usage(error) => (error, 2),
        Failure::Failed(error)
            if error.kind() == ErrorKind::Fenced && is_remote_attach(&cli.command) =>
        {
            (error, 4)
        }
        Failure::Failed(error) if wal::is_log_failure(error) && is_daemon(&cli.command) => {
            (error, EXIT_LOG_FAILED)
        }
        Failure::Failed(error) => (error, 1),
    };
    // Standard error may be closed; the exit code still tells the result.
    let _ = writeln!(std::io::stderr(), "spindle: {}", error.chain());
    if cli.output == Output::Json {
        let kind = admin::kind_name(error.kind());
        let document = serde_json::json!({"error": {"kind": kind, "message": error.chain()}});
        let _ = writeln!(std::io::stdout(), "{document}");
    }
    ExitCode::from(code)
}

/// Prints the error of the command line, or the text that `--help` and `--version` ask for.
fn misread(error: &clap::Error) -> ExitCode {
    // Standard output or error may be closed; the exit code still tells the result.
    let _ = error.print();
    if error.use_stderr() && wants_json(std::env::args_os().skip(1)) {
        let text = error.render().to_string();
        let document = serde_json::json!({"error": {"kind": "invalid", "message": text.trim()}});
        let _ = writeln!(std::io::stdout(), "{document}");
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Tells whether arguments that could not be parsed ask for JSON.
fn wants_json(arguments: impl Iterator<Item = std::ffi::OsString>) -> bool {
    let words: Vec<String> =
        arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    let is_flag = |word: &str| matches!(word, "-o" | "--output");
    let is_whole = |word: &str| matches!(word, "-ojson" | "-o=json" | "--output=json");
    words.iter().any(|word| is_whole(word))
        || words.windows(2).any(|pair| is_flag(&pair[0]) && pair[1] == "json")
}

fn start_logging(command: &Command) -> Result<()> {
    let filter = match std::env::var("SPINDLE_LOG") {
        Ok(text) => EnvFilter::try_new(&text).map_err(|error| {
            let context = format!("SPINDLE_LOG={text} is not a filter, like info or tiering=debug");
            Error::with_source(ErrorKind::Invalid, context, error)
        })?,
        Err(_) if is_daemon(command) || is_remote_attach(command) => EnvFilter::new(FILTER_DAEMON),
        Err(_) => EnvFilter::new(FILTER_COMMAND),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

async fn run(cli: &Cli) -> Result<ExitCode, Failure> {
    match &cli.command {
        Command::Serve(args) => {
            attach::stacked::check(&Vec::from_iter(args.config_path())).map_err(Failure::Failed)?;
            let config = load(&args.config_path(), &args.overrides())?;
            if config.settings().lock_memory {
                lock_memory().map_err(Failure::Failed)?;
            }
            let announce = |endpoints: &[String]| announce(cli.output, endpoints);
            backend::serve(config, args.take_over, announce).await?;
        }
        Command::Demo(args) => backend::demo(args, cli.output == Output::Json).await?,
        Command::Fsck { pool, copy, env_prefix, repair_counts } => {
            let config = load(&pool.config, &pool.overrides())?;
            let found = match copy {
                Some(url) => backend::fsck_copy(config, url, env_prefix.as_deref()).await?,
                None => backend::fsck(config).await?,
            };
            emit(cli.output, &found, print::fsck)?;
            if *repair_counts && !found.miscounted.is_empty() {
                ask(cli, pool, Request::RepairCounts { segments: found.miscounted }).await?;
            }
            if !found.problems.is_empty() {
                return Ok(ExitCode::from(1));
            }
        }
        Command::Volume(command) => {
            let (args, request) = volume_request(command)?;
            ask(cli, args, request).await?;
        }
        Command::Snapshot(command) => match snapshot_request(command)? {
            (args, Request::SnapshotDiff { older, newer, .. }) => {
                snapshot_diff(cli, args, &older, &newer).await?;
            }
            (args, request) => ask(cli, args, request).await?,
        },
        Command::Clone { pool, snapshot, name, ttl } => {
            let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
            block::quantities::check_name("volume", name).map_err(usage)?;
            engine::record::check_free_name(name).map_err(Failure::Usage)?;
            let of: SnapshotName = snapshot.parse().map_err(Failure::Usage)?;
            of.single().map_err(Failure::Usage)?;
            let (snapshot, name) = (snapshot.clone(), name.clone());
            let ttl_seconds = ttl.map(|ttl| ttl.duration().as_secs());
            if ttl_seconds == Some(0) {
                return Err(usage("read --ttl: it is a second at least".to_owned()));
            }
            ask(cli, pool, Request::Clone { snapshot, name, ttl_seconds }).await?;
        }
        Command::Restore { pool, url, volume, name, rate, env_prefix } => {
            check_env_prefix(env_prefix.as_deref())?;
            check_rate(*rate)?;
            let config = load(&pool.config, &pool.overrides())?;
            let (url, snapshot) = engine::restore::split_snapshot(url);
            let (url, rate) = (place(url)?, rate.map(|rate| rate.0));
            let name = name.as_deref().map(|name| name_in_pool(&config, name)).transpose()?;
            let from = (&*url, Asked { snapshot, volumes: volume, name });
            let made = backend::restore(config, from, env_prefix.as_deref(), rate).await?;
            emit(cli.output, &made, print::restored_copy)?;
        }
        Command::Copy(CopyCommand::Open(args)) => {
            check_env_prefix(args.env_prefix.as_deref())?;
            let config = load(&args.pool.config, &args.overrides())?;
            let url = place(&args.url)?;
            let announce = |endpoints: &[String]| announce(cli.output, endpoints);
            let listen = (&args.nbd[..], args.nbd_unix.as_deref());
            let from = (&*url, args.env_prefix.as_deref());
            backend::open_copy(config, listen, from, announce).await?;
        }
        Command::Copy(command) => {
            let (args, request) = copy_request(command)?;
            ask(cli, args, request).await?;
        }
        Command::Scrub(command) => {
            let (args, request) = scrub_request(command)?;
            ask(cli, args, request).await?;
        }
        Command::Pool(command) => pool_command(cli, command).await?,
        Command::Attach(args) => attach(cli, args).await?,
        Command::Detach(args) if is_uri(&args.target) => {
            attach::remote::check_uri(&args.target).map_err(Failure::Usage)?;
            let done = backend::detach_remote(&args.target, args.force).await?;
            emit(cli.output, &done, print::reply)?;
        }
        Command::Detach(args) => {
            let config = load(&args.pool.config, &args.pool.overrides())?;
            let target = within(&config, &args.target)?;
            let request = Request::Detach { target, force: args.force };
            ask_daemon(cli, &config, &request).await?;
        }
        Command::Status(args) => ask(cli, args, Request::Status).await?,
        Command::Flush(args) => ask(cli, args, Request::Flush).await?,
        Command::Stop(args) => stop(cli, args).await?,
        Command::Key(KeyCommand::Backup { pool, replace }) => {
            ask(cli, pool, Request::KeyBackup { replace: *replace }).await?;
        }
        Command::Key(KeyCommand::Rotate { pool, new }) => {
            let new = new_key(new).map_err(Failure::Usage)?;
            ask(cli, pool, Request::KeyRotate { new }).await?;
        }
        Command::Config(ConfigCommand::Show(args)) => {
            let config = load(&args.config_path(), &args.overrides())?;
            emit(cli.output, &print::ConfigRows::of(&config), print::config)?;
        }
        Command::Config(ConfigCommand::Example) => {
            emit(cli.output, &print::Example::of_all(), |example| example.text.clone())?;
        }
        Command::Version => emit(cli.output, &print::Version::current(), print::version)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Loads the configuration. A failure is a mistake of the user, not of the pool.
fn load(
    file: &Option<std::path::PathBuf>,
    overrides: &[config::Override],
) -> Result<Config, Failure> {
    Config::load(file.as_deref(), overrides).map_err(Failure::Usage)
}

fn volume_request(command: &VolumeCommand) -> Result<(&args::PoolArgs, Request), Failure> {
    let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
    let check = |name: &str| block::quantities::check_name("volume", name).map_err(usage);
    let (pool, name, request) = match command {
        VolumeCommand::List { pool } => return Ok((pool, Request::VolumeList)),
        VolumeCommand::Create { pool, name, size, durability, own_key, dedup } => {
            engine::record::check_not_reserved(name).map_err(Failure::Usage)?;
            config::check_volume_size(name, size.0).map_err(Failure::Usage)?;
            let durability = (*durability).into();
            (
                pool,
                name,
                Request::VolumeCreate {
                    name: name.clone(),
                    size_bytes: size.0,
                    durability,
                    own_key: *own_key,
                    dedup: *dedup,
                },
            )
        }
        VolumeCommand::Show { pool, name } => {
            (pool, name, Request::VolumeShow { name: name.clone() })
        }
        VolumeCommand::Resize { pool, name, size, shrink } => {
            config::check_volume_size(name, size.0).map_err(Failure::Usage)?;
            let (name_copy, size_bytes) = (name.clone(), size.0);
            (pool, name, Request::VolumeResize { name: name_copy, size_bytes, shrink: *shrink })
        }
        VolumeCommand::Set { pool, name, durability, read_only, dedup } => {
            let request = Request::VolumeSet {
                name: name.clone(),
                durability: durability.map(Into::into),
                is_read_only: *read_only,
                dedup: *dedup,
            };
            (pool, name, request)
        }
        VolumeCommand::Rm { pool, name, now, erase } => {
            let (name_copy, now, erase) = (name.clone(), *now, *erase);
            (pool, name, Request::VolumeRemove { name: name_copy, now, erase })
        }
        VolumeCommand::Restore { pool, name } => {
            (pool, name, Request::VolumeRestore { name: name.clone() })
        }
        VolumeCommand::Rename { pool, name, new_name } => {
            check(new_name)?;
            let (name_copy, new_name) = (name.clone(), new_name.clone());
            (pool, name, Request::VolumeRename { name: name_copy, new_name })
        }
        VolumeCommand::Promote { pool, name } => {
            (pool, name, Request::VolumePromote { name: name.clone() })
        }
        VolumeCommand::Accept { pool, name, give_up_writes } => {
            let give_up_writes = *give_up_writes;
            (pool, name, Request::VolumeAccept { name: name.clone(), give_up_writes })
        }
    };
    check(name)?;
    Ok((pool, request))
}

/// Reads the new name of a volume in the configured pool: `NAME`, or `POOL/NAME`.
fn name_in_pool<'a>(config: &Config, text: &'a str) -> Result<&'a str, Failure> {
    let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
    let own = &config.settings().name;
    let name = match text.split_once('/') {
        Some((pool, _)) if pool != own => {
            return Err(usage(format!(
                "--as {text}: the new pool is called {own}, by `name` of its configuration; write --as {own}/NAME or --as NAME"
            )));
        }
        Some((_, name)) => name,
        None => text,
    };
    block::quantities::check_name("volume", name).map_err(usage)?;
    engine::record::check_free_name(name).map_err(Failure::Usage)?;
    Ok(name)
}

/// The place of a copy in a form that a daemon with another working directory understands.
fn place(url: &str) -> Result<String, Failure> {
    let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
    control::store::check_url(url).map_err(Failure::Usage)?;
    if url.contains("://") {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    let path = std::path::absolute(url).map_err(|error| usage(format!("read {url}: {error}")))?;
    let path = path.into_os_string().into_string();
    path.map_err(|_| usage(format!("read {url}: it is not UTF-8")))
}

fn check_env_prefix(prefix: Option<&str>) -> Result<(), Failure> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match prefix {
        Some(prefix) if prefix.is_empty() || !prefix.bytes().all(is_plain) => {
            let why = "read --env-prefix: it is the beginning of a variable's name, like DR_";
            Err(Failure::Usage(Error::new(ErrorKind::Invalid, why)))
        }
        _ => Ok(()),
    }
}

fn check_rate(rate: Option<block::quantities::ByteSize>) -> Result<(), Failure> {
    match rate {
        Some(rate) if rate.0 < 1 << 10 => {
            let why = "read --rate: it is 1K a second at least";
            Err(Failure::Usage(Error::new(ErrorKind::Invalid, why)))
        }
        _ => Ok(()),
    }
}

fn scrub_request(command: &ScrubCommand) -> Result<(&args::PoolArgs, Request), Failure> {
    match command {
        ScrubCommand::Start { pool, rate, every } => {
            check_rate(*rate)?;
            let every_seconds = every.map(|every| every.duration().as_secs());
            if every_seconds == Some(0) {
                let why = "read --every: it is a second at least";
                return Err(Failure::Usage(Error::new(ErrorKind::Invalid, why)));
            }
            let bytes_per_second = rate.map(|rate| rate.0);
            Ok((pool, Request::ScrubStart { bytes_per_second, every_seconds }))
        }
        ScrubCommand::Stop { pool } => Ok((pool, Request::ScrubStop)),
        ScrubCommand::Status { pool } => Ok((pool, Request::ScrubStatus)),
    }
}

fn copy_request(command: &CopyCommand) -> Result<(&args::PoolArgs, Request), Failure> {
    match command {
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
            let new = NewCopy {
                url: place(url)?,
                env_prefix: env_prefix.clone(),
                interval_seconds: interval.duration().as_secs(),
                is_snapshots_only: *snapshots_only,
                bytes_per_second: rate.map(|rate| rate.0),
                volumes: volume.clone(),
                key_file: copy_key_file.as_deref().map(absolute).transpose()?,
                is_key_replaced: *replace_copy_key,
                created_at: block::quantities::unix_seconds_now(),
            };
            Ok((pool, Request::CopyAdd(new)))
        }
        CopyCommand::Open(_) => unreachable!("it is no request of the daemon"),
        CopyCommand::GiveUpMissing(pool) => Ok((pool, Request::RestoreGiveUpMissing)),
        CopyCommand::List { pool } => Ok((pool, Request::CopyList)),
        CopyCommand::Sync { pool, url } => Ok((pool, Request::CopySync { url: place(url)? })),
        CopyCommand::Rm { pool, url } => Ok((pool, Request::CopyRemove { url: place(url)? })),
    }
}

fn snapshot_request(command: &SnapshotCommand) -> Result<(&args::PoolArgs, Request), Failure> {
    let check = |snapshot: &str| -> Result<SnapshotName, Failure> {
        snapshot.parse().map_err(Failure::Usage)
    };
    match command {
        SnapshotCommand::Create { pool, snapshot } => {
            check(snapshot)?;
            Ok((pool, Request::SnapshotCreate { snapshot: snapshot.clone() }))
        }
        SnapshotCommand::List { pool, volume, space } => {
            Ok((pool, Request::SnapshotList { volume: volume.clone(), space: *space }))
        }
        SnapshotCommand::Diff { pool, older, newer } => {
            check(older)?.single().map_err(Failure::Usage)?;
            check(newer)?.single().map_err(Failure::Usage)?;
            let (older, newer) = (older.clone(), newer.clone());
            Ok((pool, Request::SnapshotDiff { older, newer, offset: 0 }))
        }
        SnapshotCommand::Schedule { pool, volume, cron, hourly, daily, weekly, monthly, off } => {
            let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
            block::quantities::check_name("volume", volume).map_err(usage)?;
            let counts = [hourly, daily, weekly, monthly];
            let keep = match counts.iter().all(|count| count.is_none()) {
                true => Keep::default(),
                false => Keep {
                    hourly: hourly.unwrap_or(0),
                    daily: daily.unwrap_or(0),
                    weekly: weekly.unwrap_or(0),
                    monthly: monthly.unwrap_or(0),
                },
            };
            let set = cron.as_ref().map(|cron| ScheduleSet { cron: cron.clone(), keep });
            if let Some(set) = &set {
                Schedule::new(&set.cron, keep, 0).map_err(Failure::Usage)?;
            }
            Ok((pool, Request::SnapshotSchedule { volume: volume.clone(), set, off: *off }))
        }
        SnapshotCommand::Rollback { pool, snapshot } => {
            check(snapshot)?.single().map_err(Failure::Usage)?;
            Ok((pool, Request::SnapshotRollback { snapshot: snapshot.clone() }))
        }
        SnapshotCommand::Rm { pool, snapshot } => {
            check(snapshot)?.single().map_err(Failure::Usage)?;
            Ok((pool, Request::SnapshotRemove { snapshot: snapshot.clone() }))
        }
    }
}

/// Runs a command that needs exclusive use of the pool: it asks no daemon, and a running daemon
/// blocks it.
async fn pool_command(cli: &Cli, command: &PoolCommand) -> Result<(), Failure> {
    let load = |args: &args::PoolArgs| load(&args.config, &args.overrides());
    match command {
        PoolCommand::Rm { pool } => {
            let removed = backend::pool_remove(load(pool)?).await?;
            emit(cli.output, &removed, print::pool_removed)
        }
        PoolCommand::Restore { pool } => {
            let restored = backend::pool_restore(load(pool)?).await?;
            emit(cli.output, &restored, print::pool_restored)
        }
        PoolCommand::Purge { pool, now } => {
            let config = load(pool)?;
            let dir = config.dir().to_owned();
            let purged = backend::pool_purge(config, *now).await?;
            emit(cli.output, &purged, |purged| print::pool_purged(purged, &dir))
        }
    }
}

/// Makes a path absolute, as the daemon has another current directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, format!("path {}", path.display()), error)
    })
}

/// The new secret that opens the pool. Passphrases are read by this process, which has the
/// descriptors and the environment. Paths are made absolute, because the daemon has another current
/// directory.
fn new_key(args: &NewKeyArgs) -> Result<Option<NewKey>> {
    let passphrase =
        |source: KeySource| Ok(Some(NewKey::Passphrase { secret: source.passphrase()? }));
    if let Some(path) = &args.new_key_file {
        return Ok(Some(NewKey::File { path: absolute(path)? }));
    }
    if let Some(path) = &args.new_passphrase_file {
        return passphrase(KeySource::PassphraseFile(path.clone()));
    }
    if let Some(name) = &args.new_passphrase_env {
        return passphrase(KeySource::PassphraseEnv(name.clone()));
    }
    if let Some(number) = args.new_passphrase_fd {
        return passphrase(KeySource::PassphraseFd(number));
    }
    Ok(args.new_command.clone().map(|command| NewKey::Command { command }))
}

/// Asks the daemon, or the pool itself if no daemon runs, and prints the reply.
async fn ask(cli: &Cli, args: &args::PoolArgs, request: Request) -> Result<(), Failure> {
    let reply = answer(args, request).await?;
    emit(cli.output, &reply, print::reply)
}

async fn answer(args: &args::PoolArgs, request: Request) -> Result<admin::Reply, Failure> {
    let config = load(&args.config, &args.overrides())?;
    if let Some(reply) = admin::call(config.dir(), &request).await? {
        return Ok(reply);
    }
    let pool = backend::offline(config, &request).await?;
    let outcome = pool.handle(request).await;
    // The pool is closed after any answer; the first error is the one to report.
    let closed = pool.close().await;
    let reply = outcome?;
    closed?;
    Ok(reply)
}

/// Requests one part after another: a volume may have more changes than a reply holds.
async fn snapshot_diff(
    cli: &Cli,
    args: &args::PoolArgs,
    older: &str,
    newer: &str,
) -> Result<(), Failure> {
    let mut all = DiffInfo::default();
    let mut next = Some(0);
    while let Some(at) = next {
        let (older, newer) = (older.to_owned(), newer.to_owned());
        match answer(args, Request::SnapshotDiff { older, newer, offset: at }).await? {
            admin::Reply::SnapshotDiff(found) => {
                next = found.next_offset.filter(|next| *next > at);
                all.extents.extend(found.extents);
            }
            other => return emit(cli.output, &other, print::reply),
        }
    }
    emit(cli.output, &all, print::diff)
}

/// Sends a request that only a daemon can carry out.
async fn ask_daemon(cli: &Cli, config: &Config, request: &Request) -> Result<(), Failure> {
    match admin::call(config.dir(), request).await? {
        Some(reply) => emit(cli.output, &reply, print::reply),
        None => Err(Failure::Failed(Error::new(
            ErrorKind::NotFound,
            format!(
                "no daemon runs on {}, and only a daemon can serve a device; start `spindle serve`",
                config.dir().display()
            ),
        ))),
    }
}

/// Strips the pool's name from the front; only the configured pool is accepted.
fn within(config: &Config, target: &str) -> Result<String, Failure> {
    let Some((pool, name)) = target.split_once('/').filter(|(pool, _)| !pool.is_empty()) else {
        return Ok(target.to_owned());
    };
    let configured = &config.settings().name;
    if pool == configured {
        return Ok(name.to_owned());
    }
    let what = format!("{target}: the pool of this directory is called {configured}, not {pool}");
    Err(Failure::Usage(Error::new(ErrorKind::Invalid, what)))
}

async fn attach(cli: &Cli, args: &args::AttachArgs) -> Result<(), Failure> {
    if let Some(uri) = args.target.as_deref().filter(|target| is_uri(target)) {
        let usage = |why: &str| Failure::Usage(Error::new(ErrorKind::Invalid, why));
        if !args.nbd {
            return Err(usage("attach a URI: that is what the nbd driver is for; add --nbd"));
        }
        if args.connections != 1 {
            return Err(usage("attach a URI: a volume of another machine takes one connection"));
        }
        attach::remote::check_uri(uri).map_err(Failure::Usage)?;
        if args.lock_memory {
            lock_memory().map_err(Failure::Failed)?;
        }
        let local = attach_options(args);
        let options = RemoteOptions {
            uri: uri.to_owned(),
            logical_block_bytes: local.logical_block_bytes,
            dead_timeout: args.dead_timeout.duration(),
            is_shared: args.shared,
        };
        backend::attach_remote(&options, |lines| announce(cli.output, lines)).await?;
        return Ok(());
    }
    if args.lock_memory {
        let what = "--lock-memory is for the process that serves the device of a URI; the daemon has lock_memory \
                    in its configuration";
        return Err(Failure::Usage(Error::new(ErrorKind::Invalid, what)));
    }
    if args.cleanup
        && let Some(device) = args.target.clone()
    {
        // The device itself is named, as its directory may be gone, too.
        let done = backend::clean_up_device(device).await?;
        return emit(cli.output, &done, print::reply);
    }
    let config = load(&args.pool.config, &args.pool.overrides())?;
    if args.cleanup {
        let done = backend::clean_up_devices(&config).await?;
        return emit(cli.output, &done, print::reply);
    }
    let target = args.target.as_deref().unwrap_or_default();
    if target == "list" {
        return ask_daemon(cli, &config, &Request::AttachList).await;
    }
    let name = within(&config, target)?;
    let usage = |why: String| Failure::Usage(Error::new(ErrorKind::Invalid, why));
    block::quantities::check_name("volume", &name).map_err(usage)?;
    ask_daemon(cli, &config, &Request::Attach { name, options: attach_options(args) }).await
}

fn is_uri(target: &str) -> bool {
    target.contains("://")
}

fn attach_options(args: &args::AttachArgs) -> AttachOptions {
    let is_shared = args.shared;
    // Both drivers use the same size, so that either can use a device formatted with the other. It
    // is the engine's, and the nbd driver reports it as the physical block too.
    let logical_block_bytes = args.logical_block.unwrap_or(4096);
    if args.nbd {
        return AttachOptions {
            driver: Driver::Nbd,
            queue_count: args.connections,
            queue_depth: nbd::kernel::QUEUE_DEPTH,
            logical_block_bytes,
            is_shared,
            dead_timeout_seconds: args.dead_timeout.duration().as_secs(),
        };
    }
    AttachOptions {
        driver: Driver::Ublk,
        queue_count: args.queues.unwrap_or(0), // the daemon's choice
        queue_depth: args.depth,
        logical_block_bytes,
        is_shared,
        dead_timeout_seconds: 0,
    }
}

/// Reports on standard output that everything answers, and the endpoints. As text: one line for
/// each endpoint, then `ready`. As JSON: one document in one line. A supervisor can wait for
/// either.
fn announce(output: Output, endpoints: &[String]) {
    let text = match output {
        Output::Text => {
            endpoints.iter().map(String::as_str).chain(["ready"]).collect::<Vec<_>>().join("\n")
        }
        Output::Json => serde_json::json!({"is_ready": true, "endpoints": endpoints}).to_string(),
    };
    let mut out = std::io::stdout().lock();
    // The reader may be gone; the daemon serves all the same.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

async fn stop(cli: &Cli, args: &args::PoolArgs) -> Result<(), Failure> {
    let config = load(&args.config, &args.overrides())?;
    match admin::call(config.dir(), &Request::Stop).await? {
        Some(reply) => emit(cli.output, &reply, print::reply),
        None => Err(Failure::Failed(Error::new(
            ErrorKind::NotFound,
            format!("no daemon runs on {}", config.dir().display()),
        ))),
    }
}

fn emit<T: serde::Serialize>(
    output: Output,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let printed = match output {
        Output::Text => text(value),
        Output::Json => {
            let mut json = serde_json::to_string_pretty(value).map_err(|error| {
                Error::with_source(ErrorKind::Invalid, "encode the reply", error)
            })?;
            json.push('\n');
            json
        }
    };
    write_out(&printed)
}

fn write_out(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()), // `| head`
        outcome => outcome.map_err(|error| {
            Failure::Failed(Error::with_source(ErrorKind::Io, "write to standard output", error))
        }),
    }
}

#[cfg(test)]
mod tests;
