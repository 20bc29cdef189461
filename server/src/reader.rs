//! Serves a copy in place: its volumes and snapshots become read-only exports while copying to it continues.
//!
//! Invariants:
//! - It shows one state, the newest one at its start. A pin at the copy preserves that state for as long as it is
//!   served. Once the pin is gone, nothing is served any longer.
//! - It writes nothing but that pin, neither to the copy nor elsewhere.
//! - It listens only at the addresses it is given, never at the pool's: a client of the pool must not read old bytes.

use crate::adapters::copy_exports::CopyExports;
use crate::data_stores::pool_config;
use crate::serve::{EXIT_AT_ONCE, Signals, listen, reload_tls, server_options, watch_signal};
use block::quantities::unix_seconds_now;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use config::Config;
use engine::copies::StateRecord;
use engine::copies::target::{Pin, Target};
use engine::tier_options::reading_options;
use nbd::{Listener, Server};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tiering::Tier;
use tokio::signal::unix::{Signal, SignalKind};
use uuid::Uuid;

/// Seconds between two renewals of the pin, which ends after a week without one. Chosen by hand: many failures fit in
/// between.
const RENEW_SECONDS: u64 = 6 * 3600;
/// Interval of the checks for a due renewal: the clock of timers stands still while a machine sleeps.
const LOOK: Duration = Duration::from_secs(60);
/// Time that connections have to end.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A state that a pin preserves at the copy.
struct Pinned {
    target: Target,
    pool: Uuid,
    key: PoolKey,
    pin: Pin,
    state: StateRecord,
}

/// The open copy, its server and its sockets.
struct Reading {
    tier: Tier,
    server: Server<CopyExports>,
    listeners: Vec<Listener>,
    endpoints: Vec<String>,
}

/// Serves the newest state of a copy at these addresses, or this unix socket, until SIGTERM or SIGINT. Calls `announce`
/// with the endpoints when everything answers.
///
/// # Errors
/// `NotFound` if there is no copy, or no complete state yet; `Denied` for a wrong key, or for credentials that may not
/// pin the state; errors that keep the sockets from listening.
pub async fn serve_copy(
    config: &Config,
    sockets: (&[String], Option<&Path>),
    (url, env_prefix): (&str, Option<&str>),
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    crate::limits::prepare();
    let mut signals = Signals::new()?;
    let hangups = watch_signal(SignalKind::hangup())?;
    let mut pinning = std::pin::pin!(pin(config, url, env_prefix));
    let pinned = tokio::select! {
        pinned = &mut pinning => pinned?,
        () = signals.stop() => {
            // The pin may be there already.
            if let Ok(Ok(pinned)) = tokio::time::timeout(STOP_GRACE, pinning).await {
                pinned.target.unpin(pinned.pin).await;
            }
            return Ok(());
        }
    };
    let begun = tokio::select! {
        begun = begin(config, sockets, &pinned) => begun.map(Some),
        () = signals.stop() => Ok(None),
    };
    let served = match begun {
        Ok(Some(reading)) => serve(reading, &pinned, (signals, hangups), announce).await,
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    pinned.target.unpin(pinned.pin).await;
    served
}

async fn pin(config: &Config, url: &str, env_prefix: Option<&str>) -> Result<Pinned> {
    let target = Target::existing(url, env_prefix).await?;
    let keys = target.open_keys(&config.key_source()).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let (pin, state) = target.pin_newest(&key, pool, true).await?;
    Ok(Pinned { target, pool, key, pin, state })
}

async fn begin(
    config: &Config,
    sockets: (&[String], Option<&Path>),
    pinned: &Pinned,
) -> Result<Reading> {
    let Pinned { target, pool, key, state, .. } = pinned;
    let mut options =
        reading_options(&pool_config(config), &target.view(state), *pool, key, state.epoch);
    options.volume_keys = target.volume_keys(key, *pool).await?;
    options.excluded = state.excluded();
    let tier = Tier::open_read_only(options).await?;
    tracing::info!(
        state = state.number,
        as_of = block::quantities::utc(state.as_of),
        "the daemon serves a state of the copy"
    );
    let exports = CopyExports::new(tier.clone(), |id| state.has_volume(id))?;
    let names = exports.volume_names();
    let server = Server::new(Arc::new(exports), server_options(config))?;
    let (listeners, endpoints) = listen(config, sockets, &names).await?;
    Ok(Reading { tier, server, listeners, endpoints })
}

async fn serve(
    reading: Reading,
    pinned: &Pinned,
    (mut signals, mut hangups): (Signals, Signal),
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    let Reading { tier, server, listeners, endpoints } = reading;
    let mut serving = tokio::task::JoinSet::new();
    for listener in listeners {
        let server = server.clone();
        serving.spawn(async move { server.serve(listener).await });
    }
    announce(&endpoints);
    let reload = async {
        while hangups.recv().await.is_some() {
            reload_tls(&server);
        }
        std::future::pending::<std::convert::Infallible>().await
    };
    let ended = tokio::select! {
        () = signals.stop() => Ok(()),
        Some(ended) = serving.join_next() => Err(ended_early(ended)),
        error = pinned.keep() => Err(error),
        never = reload => match never {},
    };
    // A second signal asks for an exit at once. The pin ends without further action.
    tokio::spawn(async move {
        signals.stop().await;
        std::process::exit(EXIT_AT_ONCE);
    });
    tracing::info!("the daemon is stopping");
    server.stop(STOP_GRACE);
    while let Some(task) = serving.join_next().await {
        task.map_err(|error| Error::with_source(ErrorKind::Io, "serve NBD", error))??;
    }
    ended.and(tier.close().await)
}

/// The reason why a listener has ended without being stopped.
fn ended_early(ended: std::result::Result<Result<()>, tokio::task::JoinError>) -> Error {
    let early = || Error::new(ErrorKind::Io, "serve NBD: it has stopped");
    match ended {
        Ok(served) => served.err().unwrap_or_else(early),
        Err(cause) => Error::with_source(ErrorKind::Io, "serve NBD", cause),
    }
}

impl Pinned {
    /// Renews the pin. Returns the reason once the state is no longer preserved at the copy.
    async fn keep(&self) -> Error {
        let (mut renewed_at, mut is_failing) = (unix_seconds_now(), false);
        loop {
            tokio::time::sleep(LOOK).await;
            // The renewal is due as well if the clock was put back.
            let is_due = !(renewed_at..renewed_at + RENEW_SECONDS).contains(&unix_seconds_now());
            // A store that is silent for a moment does not prove that the pin is gone.
            let is_there = !matches!(self.target.has_pin(&self.key, &self.pin).await, Ok(false));
            if is_there && !is_due && !is_failing {
                continue;
            }
            match self.renew().await {
                Ok(true) => (renewed_at, is_failing) = (unix_seconds_now(), false),
                Ok(false) => {
                    let what = format!(
                        "state {} of the copy is no longer kept there: its pin has ended, or was \
                         deleted; open the copy again",
                        self.state.number
                    );
                    return Error::new(ErrorKind::NotFound, what);
                }
                Err(error) => {
                    if !is_failing {
                        tracing::warn!(
                            error = %error.chain(),
                            "could not renew the pin at the copy; trying again, but after a week \
                             without it nothing is served any more"
                        );
                    }
                    is_failing = true;
                }
            }
        }
    }

    /// Renews the pin. Returns false if objects of the state may have been deleted.
    async fn renew(&self) -> Result<bool> {
        let Pinned { target, pool, key, pin, state } = self;
        let was_there = target.has_pin(key, pin).await?;
        // A folder that is not mounted proves nothing about the pin, and none is written to it.
        if !was_there {
            target.check_exists().await?;
        }
        let put = target.put_pin(key, pin, state.number, true).await;
        // The order matters: a publisher of a newer state looks for pins before it deletes anything.
        let newest = target.newest(key, *pool).await?.map(|newest| newest.number);
        match was_there || newest == Some(state.number) {
            true => put.map(|()| true),
            // This holds even if the pin cannot be written any longer.
            false => Ok(false),
        }
    }
}
