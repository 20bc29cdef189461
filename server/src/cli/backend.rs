//! The connection from the command line to the pool: the only part of it that knows the daemon.

use super::args::DemoArgs;
use crate::admin::{self, AdminHandler, FsckInfo, Reply, Request};
use crate::attach::{self, remote::RemoteOptions};
use crate::config::Config;
use crate::glue::admin::{AdminPool, Look};
use crate::removal::{self, PoolPurged, PoolRemoved, PoolRestored};
use block::{Error, ErrorKind, Result};
use engine::opening::Opening;
use engine::restore::{Asked, PoolOfCopy};
use std::path::Path;

/// Serves until a stop is requested; calls `announce` with the endpoints when everything answers.
pub(super) async fn serve(
    config: Config,
    take_over: bool,
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    crate::serve::run(&config, take_over, announce).await
}

/// Runs the demonstration.
pub(super) async fn demo(args: &DemoArgs, is_json: bool) -> Result<()> {
    let binary = std::env::current_exe()
        .map_err(|error| Error::with_source(ErrorKind::Io, "find the spindle binary", error))?;
    let (dir, is_short) = (args.dir.clone(), args.exit);
    tokio::task::spawn_blocking(move || {
        crate::demo::run(dir.as_deref(), &binary, is_short, is_json)
    })
    .await
    .map_err(|error| Error::with_source(ErrorKind::Io, "run the demo", error))?
}

/// Walks the pool: in the daemon that has it open, or from the store alone.
pub(super) async fn fsck(config: Config) -> Result<FsckInfo> {
    match admin::call(config.dir(), &Request::Fsck).await? {
        Some(Reply::Fsck(found)) => Ok(found),
        Some(_) => Err(Error::new(ErrorKind::Unavailable, "the daemon's reply is not understood")),
        None => engine::fsck::fsck(&config.pool()).await.map(crate::serve::fsck_info),
    }
}

/// Makes a pool from the contents of a copy.
pub(super) async fn restore(
    config: Config,
    from: (&str, Asked<'_>),
    env_prefix: Option<&str>,
    bytes_per_second: Option<u64>,
) -> Result<PoolOfCopy> {
    engine::restore::restore(&config.pool(), from, env_prefix, bytes_per_second).await
}

/// Serves a copy in place until a stop is requested.
pub(super) async fn open_copy(
    config: Config,
    sockets: (&[String], Option<&Path>),
    from: (&str, Option<&str>),
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    crate::reader::serve_copy(&config, sockets, from, announce).await
}

/// Walks a copy of a pool.
pub(super) async fn fsck_copy(
    config: Config,
    url: &str,
    env_prefix: Option<&str>,
) -> Result<FsckInfo> {
    engine::fsck::fsck_copy(&config.pool(), url, env_prefix).await.map(crate::serve::fsck_info)
}

/// Removes devices that a daemon left in the kernel when it ended.
pub(super) async fn clean_up_devices(config: &Config) -> Result<Reply> {
    let dir = config.dir().to_owned();
    cleaned(move || attach::clean_up(&dir)).await
}

/// Removes a device without a serving process, even if another program made it.
pub(super) async fn clean_up_device(device: String) -> Result<Reply> {
    cleaned(move || attach::clean_up_device(&device)).await
}

async fn cleaned(work: impl FnOnce() -> Result<String> + Send + 'static) -> Result<Reply> {
    let done = tokio::task::spawn_blocking(work).await;
    let message =
        done.map_err(|error| Error::with_source(ErrorKind::Io, "remove devices", error))??;
    Ok(Reply::Done { message })
}

/// Serves the device of a volume of another machine or process until a stop is requested.
pub(super) async fn attach_remote(
    options: &RemoteOptions,
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    let mut signals = crate::serve::Signals::new()?;
    let announce = |device: &std::path::Path, link: &std::path::Path| {
        announce(&[device.display().to_string(), link.display().to_string()]);
    };
    attach::remote::serve(options, signals.stop(), announce).await
}

/// Removes such a device from the kernel.
pub(super) async fn detach_remote(uri: &str, is_forced: bool) -> Result<Reply> {
    Ok(Reply::Done { message: attach::remote::detach(uri, is_forced).await? })
}

/// Removes the pool.
pub(super) async fn pool_remove(config: Config) -> Result<PoolRemoved> {
    removal::remove(&config).await
}

/// Brings a removed pool back.
pub(super) async fn pool_restore(config: Config) -> Result<PoolRestored> {
    removal::restore(&config).await
}

/// Deletes a removed pool.
pub(super) async fn pool_purge(config: Config, now: bool) -> Result<PoolPurged> {
    removal::purge(&config, now).await
}

/// Opens the pool for one request, or only looks at it if that is enough. Only the creation of a
/// volume may make its pool.
pub(super) async fn offline(config: Config, request: &Request) -> Result<impl AdminHandler> {
    if Look::answers(request)
        && let Some(look) = crate::serve::look(&config).await?
    {
        return Ok(Offline::Look(look));
    }
    let opening = match request {
        Request::VolumeCreate { .. } => Opening::OrNew,
        _ => Opening::Existing,
    };
    Ok(Offline::Open(crate::serve::offline(&config, opening).await?))
}

/// A pool for one request.
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum Offline {
    Open(AdminPool),
    Look(Look),
}

impl AdminHandler for Offline {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match self {
            Offline::Open(pool) => pool.handle(request).await,
            Offline::Look(look) => look.handle(request).await,
        }
    }

    async fn close(&self) -> Result<()> {
        match self {
            Offline::Open(pool) => pool.close().await,
            Offline::Look(look) => look.close().await,
        }
    }
}

/// Formats and their newest versions that this build reads and writes.
pub(super) fn formats() -> Vec<(&'static str, u32)> {
    let document = control::chain::Format::CURRENT.version;
    vec![
        ("write log", wal::LOG_FORMAT_VERSION.into()),
        ("segment", tiering::segment::format::VERSION.into()),
        ("map", tiering::map::keys::FORMAT_VERSION.into()),
        ("read cache", tiering::cache::format::VERSION.into()),
        ("volume record", engine::record::VERSION),
        ("manifest", document),
        ("key ring", document),
    ]
}
