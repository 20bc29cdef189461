//! Supervised jobs of a daemon that do not belong to the pool.

use super::looking;
use super::{purge_removed, reload_certificates};
use crate::adapters::exports::PoolExports;
use crate::adapters::pool_volumes::Attachments;
use crate::handlers::AdminPool;
use block::{Error, ErrorKind, Job};
use engine::jobs::{Jobs, Need};
use engine::open_pool::OpenPool;
use engine::pool_jobs::{
    hydrate, run_rebalance, run_rebuild, run_schedules, run_tiers, watch_data_stores,
    watch_media_group, watch_ownership,
};
use nbd::{Listener, Server};
use std::sync::Arc;
use tokio::signal::unix::Signal;
use tokio::sync::watch;

/// Starts the jobs of a daemon that do not belong to the pool.
pub(super) fn start_jobs(
    jobs: &Jobs,
    open: &Arc<OpenPool>,
    (handler, attachments): (&Arc<AdminPool>, &Arc<Attachments>),
    (server, hangups): (Server<PoolExports>, Signal),
    stop: &watch::Sender<bool>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let watch = Job::new("ownership", "another owner of the pool is noticed late");
    let purge = Job::new("purge", "removed volumes stay after their time");
    let schedules = Job::new("snapshot schedules", "no snapshot is made or pruned by schedule");
    let fetch = Job::new("hydration", "the restored pool still depends on its copy");
    let stores = Job::new("data stores", "data stores that fail are noticed late");
    let group = Job::new("media group", "drives that join the media group get no fragments");
    let anew = Job::new("rebuild", "fragments of lost data stores are not made anew");
    let balance = Job::new("rebalance", "data stores that were added later do not get their share");
    let tiers = Job::new("tiers", "segments stay in the tier where they are");
    let look = Job::new("lookout", "some conditions that last are noticed late, or not at all");
    let reload = Job::new("certificates", "TLS certificates are not read again at SIGHUP");
    let stopped = || stop.subscribe();
    vec![
        jobs.spawn(Need::Vital, watch, watch_ownership(open.clone(), stopped())),
        jobs.spawn(Need::Useful, purge, purge_removed(open.clone(), handler.clone(), stopped())),
        jobs.spawn(Need::Useful, schedules, run_schedules(open.clone(), stopped())),
        jobs.spawn(Need::Useful, stores, watch_data_stores(open.clone(), stopped())),
        jobs.spawn(Need::Useful, group, watch_media_group(open.clone(), stopped())),
        jobs.spawn(Need::Useful, anew, run_rebuild(open.clone(), stopped())),
        jobs.spawn(Need::Useful, balance, run_rebalance(open.clone(), stopped())),
        jobs.spawn(Need::Useful, tiers, run_tiers(open.clone(), stopped())),
        jobs.spawn(Need::Useful, fetch, hydrate(open.clone(), stopped())),
        jobs.spawn(Need::Useful, look, looking::run(open.clone(), attachments.clone(), stopped())),
        jobs.spawn(Need::Useful, reload, reload_certificates(server, hangups, stopped())),
    ]
}

/// Serves the NBD clients of one listener until `stop`. If it ends before, the daemon ends, too.
pub(super) async fn serve_listener(
    jobs: Jobs,
    server: Server<PoolExports>,
    listener: Listener,
    stop: watch::Receiver<bool>,
) {
    let job = Job::new(format!("NBD listener {listener}"), "no client can connect there");
    let (supervisor, its) = (jobs.clone(), job.clone());
    let work = async move {
        let served = server.serve(listener).await;
        if !*stop.borrow() {
            let early = || Error::new(ErrorKind::Io, "serve NBD: it has stopped");
            supervisor.ended(Need::Vital, &its, &served.err().unwrap_or_else(early));
        }
    };
    jobs.supervise(Need::Vital, job, work).await;
}
