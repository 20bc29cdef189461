//! Commands about a pool that no daemon serves: the command opens the pool itself, for one request.
//!
//! Invariants:
//! - Only the creation of a volume may make its pool.
//! - A request about nodes opens no pool.
//! - A request that changes nothing does not take a pool that was closed in order: it is answered
//!   from the store alone.

use crate::admin::AdminHandler;
use crate::data_stores::pool_config;
use crate::handlers::{self, AdminPool, answers_closed};
use api::volume::VolumeRequest;
use api::{Reply, Request};
use block::Result;
use config::Config;
use engine::closed_pool::ClosedPool;
use engine::opening::Opening;

/// Asks the daemon that runs on the directory, or carries out the request in this process if none
/// runs.
///
/// # Errors
/// Those of the request and of opening the pool.
pub(crate) async fn ask(config: Config, request: Request) -> Result<Reply> {
    if let Some(reply) = cli::client::call(config.dir(), &request).await? {
        return Ok(reply);
    }
    if let Request::Node(request) = request {
        return handlers::node::answer(None, config.dir(), request).await;
    }
    let pool = open(config, &request).await?;
    let outcome = pool.handle(request).await;
    // The pool is closed after any answer; the first error is the one to report.
    let closed = pool.close().await;
    let reply = outcome?;
    closed?;
    Ok(reply)
}

async fn open(config: Config, request: &Request) -> Result<impl AdminHandler> {
    if answers_closed(request)
        && let Some(closed) = engine::closed_pool::look(&pool_config(&config)).await?
    {
        return Ok(Offline::Closed(closed));
    }
    let opening = match request {
        Request::Volume(VolumeRequest::Create { .. }) => Opening::OrNew,
        _ => Opening::Existing,
    };
    let open = crate::serve::open_offline(&config, opening).await?;
    Ok(Offline::Open(AdminPool::offline(open).await))
}

/// A pool for one request.
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum Offline {
    Open(AdminPool),
    Closed(ClosedPool),
}

impl AdminHandler for Offline {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match self {
            Offline::Open(pool) => pool.handle(request).await,
            Offline::Closed(pool) => pool.handle(request).await,
        }
    }

    async fn close(&self) -> Result<()> {
        match self {
            Offline::Open(pool) => pool.close().await,
            Offline::Closed(pool) => pool.close().await,
        }
    }
}
