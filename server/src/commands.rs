//! Carries out the commands of the command line.
//!
//! Invariants:
//! - A command about a pool asks the daemon that runs on its directory; only if none runs, the
//!   command opens the pool itself.
//! - A mistake in the arguments or in the configuration is found before anything is asked, and is a
//!   [`Failure::Usage`].

mod drill;
mod node;

use crate::adapters::pool_volumes;
use crate::data_stores::pool_config;
use crate::demo::{DataNodes, Demo};
use crate::handlers;
use crate::limits::{self, lock_memory};
use crate::offline;
use crate::serve::Signals;
use api::config::{ConfigInfo, ConfigRow, VersionInfo};
use api::key::{KeyRequest, NewKey};
use api::pool::{FsckInfo, MoveInfo, PoolRequest};
use api::snapshot::{DiffInfo, SnapshotRequest};
use api::{Reply, Request};
use block::quantities::check_name;
use block::{Error, ErrorKind, Result};
use cli::args::{
    AttachArgs, AttachPlan, Cli, Command, ConfigCommand, CopyCommand, CopyOpenArgs, DemoArgs,
    DetachArgs, DnodeArgs, FsckArgs, KeyCommand, NewKeyArgs, PoolArgs, PoolCommand, RestoreArgs,
    ServeArgs, Setting, absolute, is_uri, place,
};
use cli::{output, print};
use config::{Config, Override};
use control::keys::KeySource;
use engine::removal;
use engine::restore::Asked;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Reason why a command did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
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

fn usage(why: impl Into<String>) -> Failure {
    Failure::Usage(Error::new(ErrorKind::Invalid, why))
}

/// Carries out a command and prints its result.
///
/// # Errors
/// The reason why it did not succeed.
pub(crate) async fn run(cli: &Cli) -> Result<ExitCode, Failure> {
    if let Some((args, request)) = cli.command.request().map_err(Failure::Usage)? {
        handlers::check(&request).map_err(Failure::Usage)?;
        match request {
            Request::Snapshot(SnapshotRequest::Diff { older, newer, .. }) => {
                snapshot_diff(cli, args, &older, &newer).await?;
            }
            request => ask(cli, args, request).await?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    match &cli.command {
        Command::Serve(args) => serve(cli, args).await?,
        Command::Dnode(args) => dnode(cli, args).await?,
        Command::Demo(args) => return Ok(demo(cli, args).await?),
        Command::Fsck(args) => return fsck(cli, args).await,
        Command::Restore(args) => restore(cli, args).await?,
        Command::Copy(CopyCommand::Open(args)) => open_copy(cli, args).await?,
        Command::Pool(command) => pool(cli, command).await?,
        Command::Attach(args) => attach(cli, args).await?,
        Command::Detach(args) => detach(cli, args).await?,
        Command::Stop(args) => stop(cli, args).await?,
        Command::Key(KeyCommand::Rotate { pool, new }) => {
            let new = new_key(new).map_err(Failure::Usage)?;
            ask(cli, pool, Request::Key(KeyRequest::Rotate { new })).await?;
        }
        Command::Node(command) => node::run(cli, command).await?,
        Command::Drill(command) => drill::run(cli, command).await?,
        Command::Config(ConfigCommand::Show(args)) => {
            let config = load(args.config_path().as_deref(), args.settings())?;
            output::emit(cli.output, &config_info(&config), print::config)?;
        }
        Command::Config(ConfigCommand::Example) => {
            output::emit(cli.output, &handlers::example(), print::example)?;
        }
        Command::Version => output::emit(cli.output, &version_info(), print::version)?,
        command => unreachable!("{command:?} is a request"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Loads the configuration. A failure is a mistake of the user, not of the pool.
fn load(file: Option<&Path>, settings: Vec<Setting>) -> Result<Config, Failure> {
    let overrides: Vec<Override> = settings
        .into_iter()
        .map(|Setting { key, flag, value }| Override { key, flag, value })
        .collect();
    Config::load(file, &overrides).map_err(Failure::Usage)
}

fn load_pool(args: &PoolArgs) -> Result<Config, Failure> {
    load(args.config.as_deref(), args.settings())
}

/// Asks the daemon, or the pool itself if no daemon runs, and prints the reply.
async fn ask(cli: &Cli, args: &PoolArgs, request: Request) -> Result<(), Failure> {
    let reply = offline::ask(load_pool(args)?, request).await?;
    Ok(output::emit(cli.output, &reply, print::reply)?)
}

/// Sends a request that only a daemon can carry out, and prints the reply.
async fn ask_daemon(
    cli: &Cli,
    config: &Config,
    request: &Request,
    without: &str,
) -> Result<(), Failure> {
    match cli::client::call(config.dir(), request).await? {
        Some(reply) => Ok(output::emit(cli.output, &reply, print::reply)?),
        None => {
            let what = format!("no daemon runs on {}{without}", config.dir().display());
            Err(Failure::Failed(Error::new(ErrorKind::NotFound, what)))
        }
    }
}

/// Requests one part after another: a volume may have more changes than a reply holds.
async fn snapshot_diff(
    cli: &Cli,
    args: &PoolArgs,
    older: &str,
    newer: &str,
) -> Result<(), Failure> {
    let mut all = DiffInfo::default();
    let mut next = Some(0);
    while let Some(offset) = next {
        let (older, newer) = (older.to_owned(), newer.to_owned());
        let request = Request::Snapshot(SnapshotRequest::Diff { older, newer, offset });
        match offline::ask(load_pool(args)?, request).await? {
            Reply::SnapshotDiff(found) => {
                next = found.next_offset.filter(|next| *next > offset);
                all.extents.extend(found.extents);
            }
            other => return Ok(output::emit(cli.output, &other, print::reply)?),
        }
    }
    Ok(output::emit(cli.output, &all, print::diff)?)
}

async fn serve(cli: &Cli, args: &ServeArgs) -> Result<(), Failure> {
    devices::stacked::check(&Vec::from_iter(args.config_path()))?;
    let config = load(args.config_path().as_deref(), args.settings())?;
    if config.settings().lock_memory {
        lock_memory()?;
    }
    let announce = |endpoints: &[String]| output::announce(cli.output, endpoints);
    Ok(crate::serve::run(&config, args.take_over, announce).await?)
}

/// Serves the drives of a data node until a stop is requested.
async fn dnode(cli: &Cli, args: &DnodeArgs) -> Result<(), Failure> {
    let config = load(args.config.as_deref(), args.settings())?;
    let announce = |endpoints: &[String]| output::announce(cli.output, endpoints);
    Ok(crate::data_node::run(&config, announce).await?)
}

/// Serves a copy in place until a stop is requested.
async fn open_copy(cli: &Cli, args: &CopyOpenArgs) -> Result<(), Failure> {
    args.check().map_err(Failure::Usage)?;
    let config = load(args.pool.config.as_deref(), args.settings())?;
    let url = checked_place(&args.url)?;
    let announce = |endpoints: &[String]| output::announce(cli.output, endpoints);
    let listen = (&args.nbd[..], args.nbd_unix.as_deref());
    let from = (&*url, args.env_prefix.as_deref());
    Ok(crate::reader::serve_copy(&config, listen, from, announce).await?)
}

async fn demo(cli: &Cli, args: &DemoArgs) -> Result<ExitCode> {
    let binary = std::env::current_exe()
        .map_err(|error| Error::with_source(ErrorKind::Io, "find the spindle binary", error))?;
    let (args, output) = (args.clone(), cli.output);
    let run = move || {
        let (dir, node_count, is_short) = (args.dir.as_deref(), args.nodes, args.exit);
        let data_nodes = args.dnodes.map(|count| DataNodes { count, scheme: &args.scheme });
        crate::demo::run(Demo { dir, binary: &binary, node_count, data_nodes, is_short, output })
    };
    tokio::task::spawn_blocking(run)
        .await
        .map_err(|error| Error::with_source(ErrorKind::Io, "run the demo", error))?
}

/// Walks the pool, in the daemon that has it open or from the store alone, or a copy of it.
async fn fsck(cli: &Cli, args: &FsckArgs) -> Result<ExitCode, Failure> {
    let config = load_pool(&args.pool)?;
    let found = match &args.copy {
        Some(url) => {
            let found =
                engine::fsck::fsck_copy(&pool_config(&config), url, args.env_prefix.as_deref())
                    .await?;
            handlers::fsck_info(found)
        }
        None => fsck_pool(&config).await?,
    };
    output::emit(cli.output, &found, print::fsck)?;
    if args.repair_counts && !found.miscounted.is_empty() {
        let request = PoolRequest::RepairCounts { segments: found.miscounted };
        ask(cli, &args.pool, Request::Pool(request)).await?;
    }
    Ok(match found.problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(1),
    })
}

async fn fsck_pool(config: &Config) -> Result<FsckInfo> {
    match cli::client::call(config.dir(), &Request::Pool(PoolRequest::Fsck {})).await? {
        Some(Reply::Fsck(found)) => Ok(found),
        Some(_) => Err(Error::new(ErrorKind::Unavailable, "the daemon's reply is not understood")),
        None => Ok(handlers::fsck_info(engine::fsck::fsck(&pool_config(config)).await?)),
    }
}

/// Makes a pool from the contents of a copy.
async fn restore(cli: &Cli, args: &RestoreArgs) -> Result<(), Failure> {
    args.check().map_err(Failure::Usage)?;
    let config = load_pool(&args.pool)?;
    let (url, snapshot) = engine::restore::split_snapshot(&args.url);
    let (url, rate) = (checked_place(url)?, args.rate.map(|rate| rate.0));
    let name = args.name.as_deref().map(|name| name_in_pool(&config, name)).transpose()?;
    let from = (&*url, Asked { snapshot, volumes: &args.volume, name });
    let made =
        engine::restore::restore(&pool_config(&config), from, args.env_prefix.as_deref(), rate)
            .await?;
    Ok(output::emit(cli.output, &handlers::pool_from_copy(made), print::restored_copy)?)
}

/// Reads the new name of a volume in the configured pool: `NAME`, or `POOL/NAME`.
fn name_in_pool<'a>(config: &Config, text: &'a str) -> Result<&'a str, Failure> {
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
    check_name("volume", name).map_err(usage)?;
    engine::names::check_free_name(name).map_err(Failure::Usage)?;
    Ok(name)
}

/// Returns the place of a copy in a form that does not depend on the working directory.
fn checked_place(url: &str) -> Result<String, Failure> {
    control::store::check_url(url).and_then(|()| place(url)).map_err(Failure::Usage)
}

/// Longest wait for the end of a hand-over. Chosen by hand: longer than the daemon's own.
const MOVE_MAX: Duration = Duration::from_secs(90);
/// Pause between two looks at a hand-over. Chosen by hand.
const MOVE_PAUSE: Duration = Duration::from_millis(50);

/// Hands the pool over, and prints the pause.
async fn move_pool(cli: &Cli, args: &PoolArgs, node: &str) -> Result<(), Failure> {
    let pause_ms = Some(move_to(&load_pool(args)?, node).await?);
    let info = MoveInfo { node: node.to_owned(), pause_ms, error: None };
    Ok(output::emit(cli.output, &Reply::Moved(info), print::reply)?)
}

/// Hands the pool over, and waits until the other node serves it. Returns the pause of clients in
/// milliseconds.
async fn move_to(config: &Config, node: &str) -> Result<u64> {
    let ask = async |request| cli::client::call(config.dir(), &Request::Pool(request)).await;
    if ask(PoolRequest::Move { node: node.to_owned() }).await?.is_none() {
        let what = format!("move the pool: no daemon runs on {}", config.dir().display());
        return Err(Error::new(ErrorKind::NotFound, what));
    }
    let looking = async {
        loop {
            // The socket is away for a moment while the daemon changes its role.
            if let Ok(Some(Reply::Moved(info))) = ask(PoolRequest::LastMove {}).await {
                let MoveInfo { pause_ms, error, .. } = info;
                if let Some(pause_ms) = pause_ms {
                    return Ok(pause_ms);
                }
                if let Some(error) = error {
                    return Err(Error::new(ErrorKind::Unavailable, error));
                }
            }
            tokio::time::sleep(MOVE_PAUSE).await;
        }
    };
    tokio::time::timeout(MOVE_MAX, looking).await.unwrap_or_else(|_| {
        let what = format!(
            "move the pool to node {node}: it is not known how it went; see `spindle pool members list`"
        );
        Err(Error::new(ErrorKind::Unavailable, what))
    })
}

/// Runs a command that needs exclusive use of the pool: it asks no daemon, and a running daemon
/// blocks it.
async fn pool(cli: &Cli, command: &PoolCommand) -> Result<(), Failure> {
    match command {
        PoolCommand::Rm { pool } => {
            let config = load_pool(pool)?;
            limits::prepare();
            let removed =
                removal::remove(&pool_config(&config), pool_volumes::check_detached).await?;
            let removed = handlers::pool_removed(removed);
            output::emit(cli.output, &removed, print::pool_removed)?;
        }
        PoolCommand::Restore { pool } => {
            limits::prepare();
            let restored = removal::restore(&pool_config(&load_pool(pool)?)).await?;
            let restored = handlers::pool_restored(restored);
            output::emit(cli.output, &restored, print::pool_restored)?;
        }
        // They are requests to a daemon.
        PoolCommand::Members(_) | PoolCommand::TakeOver(_) => {}
        PoolCommand::Move { node, pool } => move_pool(cli, pool, node).await?,
        PoolCommand::Purge { pool, now } => {
            let config = load_pool(pool)?;
            let purged = handlers::pool_purged(removal::purge(&pool_config(&config), *now).await?);
            let text = |purged: &_| print::pool_purged(purged, config.dir());
            output::emit(cli.output, &purged, text)?;
        }
    }
    Ok(())
}

/// The new secret that opens the pool. Passphrases are read by this process, which has the
/// descriptors and the environment.
fn new_key(args: &NewKeyArgs) -> Result<Option<NewKey>> {
    let passphrase = |source: KeySource| {
        let secret = handlers::secret(&source.passphrase()?);
        Ok(Some(NewKey::Passphrase { secret }))
    };
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

/// Strips the pool's name from the front; only the configured pool is accepted.
fn within(config: &Config, target: &str) -> Result<String, Failure> {
    let Some((pool, name)) = target.split_once('/').filter(|(pool, _)| !pool.is_empty()) else {
        return Ok(target.to_owned());
    };
    let configured = &config.settings().name;
    if pool == configured {
        return Ok(name.to_owned());
    }
    Err(usage(format!("{target}: the pool of this directory is called {configured}, not {pool}")))
}

const ONLY_A_DAEMON: &str = ", and only a daemon can serve a device; start `spindle serve`";

async fn attach(cli: &Cli, args: &AttachArgs) -> Result<(), Failure> {
    let plan = args.plan().map_err(Failure::Usage)?;
    let (config, request) = match &plan {
        AttachPlan::Remote { uris, options } => {
            devices::remote::check_uris(uris).map_err(Failure::Usage)?;
            if args.lock_memory {
                lock_memory()?;
            }
            let mut signals = Signals::new()?;
            let announce = |device: &Path, link: &Path| {
                let lines = [device, link].map(|path| path.display().to_string());
                output::announce(cli.output, &lines);
            };
            let options = handlers::remote_options(uris, options, args.dead_timeout.duration());
            return Ok(devices::remote::serve(&options, signals.stop(), announce).await?);
        }
        AttachPlan::CleanUpDevice(device) => {
            let device = device.clone();
            let done = cleaned(move || devices::clean_up_device(&device)).await?;
            return Ok(output::emit(cli.output, &done, print::reply)?);
        }
        AttachPlan::CleanUp => {
            let dir = load_pool(&args.pool)?.dir().to_owned();
            let done = cleaned(move || crate::adapters::pool_volumes::clean_up(&dir)).await?;
            return Ok(output::emit(cli.output, &done, print::reply)?);
        }
        AttachPlan::ListRemote => {
            let listed = tokio::task::spawn_blocking(devices::remote::list).await;
            let listed = listed
                .map_err(|error| Error::with_source(ErrorKind::Io, "list the devices", error))?;
            let devices = listed?.into_iter().map(handlers::remote_device).collect();
            return Ok(output::emit(cli.output, &Reply::RemoteDevices { devices }, print::reply)?);
        }
        AttachPlan::List => (load_pool(&args.pool)?, AttachArgs::list_request()),
        AttachPlan::Volume(target) => {
            let config = load_pool(&args.pool)?;
            let name = within(&config, target)?;
            (config, args.request(name))
        }
    };
    handlers::check(&request).map_err(Failure::Usage)?;
    ask_daemon(cli, &config, &request, ONLY_A_DAEMON).await
}

async fn cleaned(work: impl FnOnce() -> Result<String> + Send + 'static) -> Result<Reply> {
    let done = tokio::task::spawn_blocking(work).await;
    let message =
        done.map_err(|error| Error::with_source(ErrorKind::Io, "remove devices", error))??;
    Ok(Reply::Done { message })
}

async fn detach(cli: &Cli, args: &DetachArgs) -> Result<(), Failure> {
    if is_uri(&args.target) {
        devices::remote::check_uris(&args.target).map_err(Failure::Usage)?;
        let message = devices::remote::detach(&args.target, args.force).await?;
        return Ok(output::emit(cli.output, &Reply::Done { message }, print::reply)?);
    }
    let config = load_pool(&args.pool)?;
    let request = args.request(within(&config, &args.target)?);
    ask_daemon(cli, &config, &request, ONLY_A_DAEMON).await
}

async fn stop(cli: &Cli, args: &PoolArgs) -> Result<(), Failure> {
    ask_daemon(cli, &load_pool(args)?, &Request::Pool(PoolRequest::Stop {}), "").await
}

fn config_info(config: &Config) -> ConfigInfo {
    let row = |(key, value, origin): (String, Option<String>, config::Origin)| ConfigRow {
        key,
        value,
        origin: origin.to_string(),
    };
    ConfigInfo { options: config.rows().into_iter().map(row).collect() }
}

/// Returns the version of the program, and the newest versions of the formats that it reads and
/// writes.
fn version_info() -> VersionInfo {
    let document = control::chain::Format::CURRENT.version;
    let formats = [
        ("write log", wal::LOG_FORMAT_VERSION.into()),
        ("segment", tiering::segment::format::VERSION.into()),
        ("map", tiering::map::keys::FORMAT_VERSION.into()),
        ("read cache", tiering::cache::format::VERSION.into()),
        ("volume record", engine::record::VERSION),
        ("manifest", document),
        ("key ring", document),
        ("admin protocol", api::VERSION),
    ];
    VersionInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        formats: formats.map(|(name, version)| (name.to_owned(), version)).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn parse(line: &str) -> Command {
        let cli = Cli::try_parse_from(line.split(' '));
        cli.unwrap_or_else(|error| panic!("{line}: {error}")).command
    }

    #[test]
    fn flags_become_configuration() {
        let Command::Serve(args) = parse(
            "spindle serve --dir /d --nbd 127.0.0.1:0 --nbd [::1]:0 --volume a=1G --memory 2G \
             --passphrase-env P --log-io direct --max-age 5s --cache-size 0",
        ) else {
            panic!("not serve");
        };
        let config = load(None, args.settings()).unwrap();
        let settings = config.settings();
        assert_eq!(settings.nbd.listen.as_ref().unwrap().len(), 2);
        assert_eq!(settings.nbd.unix, None);
        assert_eq!(settings.volumes[0].size.0, 1 << 30);
        assert_eq!(settings.memory.0, 2 << 30);
        assert_eq!(config.key_source(), KeySource::PassphraseEnv("P".to_owned()));
        assert_eq!(config.cache_dir(), None);
    }

    #[test]
    fn the_text_of_config_show_is_a_configuration() {
        let Command::Config(ConfigCommand::Show(args)) =
            parse("spindle config show --dir /d --volume a=1G")
        else {
            panic!("not config show");
        };
        let config = load(None, args.settings()).unwrap();
        let text = print::config(&config_info(&config));
        assert!(text.contains("# flag --volume"), "{text}");
        let parsed: config::Settings =
            toml::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(&parsed, config.settings());
    }
}
