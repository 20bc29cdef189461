//! A copy that is looked at where it lies: its volumes and snapshots as exports that nobody can write, while copying to it
//! goes on.
//!
//! Invariants:
//! - It shows one state, the newest when it began, and a pin at the copy keeps that for as long as it is served.
//! - Nothing is written to the copy but that pin, and nothing anywhere else.

use crate::config::Config;
use crate::copies::StateRecord;
use crate::copies::target::{Pin, Target};
use crate::glue::copy_exports::CopyExports;
use crate::serve::{Signals, listen, reading_options, server_options};
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use nbd::Server;
use std::sync::Arc;
use std::time::Duration;
use tiering::Tier;
use uuid::Uuid;

/// A pin that nobody renews ends after a week; it is renewed this often. Chosen by hand: many failures fit in between.
const RENEW: Duration = Duration::from_secs(6 * 3600);
/// After one that failed.
const RENEW_AGAIN: Duration = Duration::from_secs(60);
/// How long connections have to end.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Serves the newest state of a copy until SIGTERM or SIGINT. Calls `announce` with the endpoints when everything answers.
///
/// # Errors
/// `NotFound` where there is no copy, or no whole state yet; `Denied` for a wrong key, or credentials that may not pin the
/// state; whatever keeps the sockets from listening.
pub async fn serve_copy(
    config: &Config,
    (url, env_prefix): (&str, Option<&str>),
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    let mut signals = Signals::new()?;
    let target = Target::existing(url, env_prefix)?;
    let keys = target.open_keys(&config.key_source()).await?;
    let (pool, key) = (keys.pool(), keys.newest().key.clone());
    let (pin, state) = target.pin_newest(&key, pool, true).await?;
    let opened = tokio::select! {
        opened = open_state(config, &target, &state, (pool, &key)) => Some(opened),
        () = signals.stop() => None,
    };
    let served = match opened {
        Some(Ok((tier, exports))) => {
            let renew = renew(&target, &key, &pin, &state);
            let served = tokio::select! {
                served = serve(config, exports, &mut signals, announce) => served,
                never = renew => match never {},
            };
            served.and(tier.close().await)
        }
        Some(Err(error)) => Err(error),
        None => Ok(()),
    };
    target.unpin(pin).await;
    served
}

async fn open_state(
    config: &Config,
    target: &Target,
    state: &StateRecord,
    (pool, key): (Uuid, &PoolKey),
) -> Result<(Tier, CopyExports)> {
    let mut options = reading_options(config, &target.view(state), pool, key, state.epoch);
    options.volume_keys = target.volume_keys(key, pool).await?;
    let tier = Tier::open_read_only(options).await?;
    tracing::info!(
        state = state.number,
        as_of = crate::units::utc(state.as_of),
        "a state of the copy is open"
    );
    let exports = CopyExports::new(tier.clone())?;
    Ok((tier, exports))
}

async fn serve(
    config: &Config,
    exports: CopyExports,
    signals: &mut Signals,
    announce: impl FnOnce(&[String]),
) -> Result<()> {
    let names = exports.volume_names();
    let server = Server::new(Arc::new(exports), server_options(config))?;
    let (listeners, endpoints) = listen(config, &names).await?;
    let mut serving = tokio::task::JoinSet::new();
    for listener in listeners {
        let server = server.clone();
        serving.spawn(async move { server.serve(listener).await });
    }
    announce(&endpoints);
    signals.stop().await;
    tracing::info!("stopping");
    server.stop(STOP_GRACE);
    while let Some(ended) = serving.join_next().await {
        ended.map_err(|error| Error::with_source(ErrorKind::Io, "serve NBD", error))??;
    }
    Ok(())
}

/// Keeps the pin from ending.
async fn renew(
    target: &Target,
    key: &PoolKey,
    pin: &Pin,
    state: &StateRecord,
) -> std::convert::Infallible {
    let mut pause = RENEW;
    loop {
        tokio::time::sleep(pause).await;
        pause = RENEW;
        if let Err(error) = target.put_pin(key, pin, state.number, true).await {
            tracing::warn!(
                error = %error.chain(),
                "the pin at the copy is not renewed for now; after a week without that the state is not kept there"
            );
            pause = RENEW_AGAIN;
        }
    }
}
