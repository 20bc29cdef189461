//! Jobs beside an open pool: keeping its ownership, fetching a restored pool, snapshots by schedule.
//!
//! Invariants:
//! - Each ends soon after `stop`, wherever it is.

use crate::conditions;
use crate::open_pool::OpenPool;
use crate::rebalance::{self, FUTILE_MAX, Pass};
use crate::rebuild::{self, LOOK_PAUSE, WALK_PAUSE, WALK_PAUSE_MAX};
use crate::tiers;
use async_recursion::async_recursion;
use block::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Interval at which the owner checks that it still owns the pool. Chosen by hand: one listing.
const OWNERSHIP_CHECK: Duration = Duration::from_secs(5);
/// Pause between two looks at the data stores. Chosen by hand: one small read of each.
const DATA_STORES_LOOK: Duration = Duration::from_secs(5);
/// Pause of the rebalance when nothing can be moved now. Chosen by hand: a walk reads the records of all segments.
const REBALANCE_PAUSE: Duration = Duration::from_secs(5);
/// Pause between two checks for snapshots that are due.
const SCHEDULE_CHECK: Duration = Duration::from_secs(5);

/// Checks from time to time that the pool is still ours, and otherwise stops acknowledging.
#[async_recursion]
pub async fn watch_ownership(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(OWNERSHIP_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let checked = tokio::select! {
            checked = open.ownership.check() => checked,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match checked {
            Ok(()) => conditions::show_contact(&open.conditions, None),
            Err(error) if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Corrupt) => {
                open.pool.fence(error);
                return;
            }
            // Nothing is known; a store that is away must not stop the writers.
            Err(error) => {
                conditions::show_contact(&open.conditions, Some(&error.chain()));
            }
        }
    }
}

/// Looks at the data stores from time to time.
#[async_recursion]
pub async fn watch_data_stores(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(stores) = open.data_stores.clone() else { return };
    drop(open);
    loop {
        tokio::select! {
            () = stores.look() => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        tokio::select! {
            () = tokio::time::sleep(DATA_STORES_LOOK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Adds the drives that join the pool's media group.
#[async_recursion]
pub async fn watch_media_group(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(stores) = open.data_stores.clone() else { return };
    drop(open);
    tokio::select! {
        () = stores.watch_media_group() => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// Fetches the data of a restored pool that only the copy has, on the background runtime.
#[async_recursion]
pub async fn hydrate(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(restored) = open.restored.clone() else { return };
    let (pool, store) = (open.pool.clone(), open.store.clone());
    let key = open.keys.lock().await.newest().key.clone();
    let is_complete = open.is_complete.clone();
    drop(open);
    let lane = pool.tier().background().clone();
    let fetching = lane.spawn(async move {
        tokio::select! {
            () = restored.hydrate(&pool, &store, &key, &is_complete) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    });
    if let Err(error) = fetching.await
        && error.is_panic()
    {
        // The supervisor of this job handles it.
        std::panic::resume_unwind(error.into_panic());
    }
}

/// Makes and removes the snapshots that are due.
#[async_recursion]
pub async fn run_schedules(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(SCHEDULE_CHECK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let (made, removed) = tokio::select! {
            done = open.pool.run_schedules() => done,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        if made + removed > 0 {
            tracing::info!(made, removed, "the schedule made or removed snapshots");
        }
    }
}

/// Rebuilds whenever stores have come or gone, and from time to time, until `stop`.
#[async_recursion]
pub async fn run_rebuild(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(stores) = open.data_stores.clone() else { return };
    let mut pause = WALK_PAUSE;
    loop {
        let (pool, state) = (open.pool.clone(), open.rebuild.clone());
        let (conditions, clock) = (open.conditions.clone(), open.config.clock.clone());
        let lane = pool.tier().background().clone();
        let mut stopped = stop.clone();
        let seen = rebuild::seen(&*stores);
        let of_round = Arc::clone(&stores);
        let round = lane.spawn(async move {
            tokio::select! {
                done = rebuild::round(&pool, &state, &*of_round, &conditions, &*clock) => done,
                _ = stopped.wait_for(|stop| *stop) => Ok(false),
            }
        });
        match round.await {
            Ok(Ok(true)) => pause = WALK_PAUSE,
            Ok(Ok(false)) => pause = (pause * 2).min(WALK_PAUSE_MAX),
            Ok(Err(error)) => {
                tracing::debug!(error = %error.chain(), "a walk for lacking fragments was cut short");
            }
            // The supervisor of this job handles it.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return,
        }
        let walked = open.config.clock.now();
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_PAUSE) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let now = rebuild::seen(&*stores);
            if now != seen || open.config.clock.since(walked) >= pause {
                pause = if now == seen { pause } else { WALK_PAUSE };
                break;
            }
        }
    }
}

/// Moves fragments to where they would be if their segments were written now, while the list of data stores says so,
/// until `stop`.
#[async_recursion]
pub async fn run_rebalance(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(stores) = open.data_stores.clone() else { return };
    let (mut pause, mut futile_count) = (LOOK_PAUSE, 0);
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = LOOK_PAUSE,
            _ = stop.wait_for(|stop| *stop) => return,
        }
        if !stores.status().is_rebalancing {
            futile_count = 0;
            continue;
        }
        let (pool, state, rebuild) =
            (open.pool.clone(), open.rebalance.clone(), open.rebuild.clone());
        let (of_pass, clock) = (Arc::clone(&stores), open.config.clock.clone());
        let lane = pool.tier().background().clone();
        let mut stopped = stop.clone();
        let pass = lane.spawn(async move {
            tokio::select! {
                done = rebalance::pass(&pool, &state, &rebuild, &*of_pass, &*clock) => done,
                _ = stopped.wait_for(|stop| *stop) => Ok(Pass::Waiting),
            }
        });
        match pass.await {
            Ok(Ok(Pass::Moved)) => futile_count = 0,
            Ok(Ok(Pass::Waiting)) => pause = REBALANCE_PAUSE,
            Ok(Ok(Pass::Futile)) => {
                (pause, futile_count) = (REBALANCE_PAUSE, futile_count + 1);
                if futile_count >= FUTILE_MAX {
                    rebalance::end(&open.rebalance, &*stores).await;
                }
            }
            Ok(Ok(Pass::Ended)) => rebalance::end(&open.rebalance, &*stores).await,
            Ok(Err(error)) => {
                pause = REBALANCE_PAUSE;
                tracing::debug!(error = %error.chain(), "a walk for misplaced fragments was cut short");
            }
            // The supervisor of this job handles it.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return,
        }
    }
}

/// Moves segments between data stores and the object store, and records when they were last read, until `stop`.
#[async_recursion]
pub async fn run_tiers(open: Arc<OpenPool>, mut stop: watch::Receiver<bool>) {
    let Some(stores) = open.data_stores.clone() else { return };
    let policy = stores.status().policy;
    if !policy.tiers.is_moving() {
        return;
    }
    // What the copy has is not the pool's own yet.
    if open.restored.is_some() {
        let mut complete = open.is_complete.subscribe();
        tokio::select! {
            _ = complete.wait_for(|is_complete| *is_complete) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
    let mut pause = LOOK_PAUSE;
    // An owner of before, or a store that comes back, may have left fragments that nothing names.
    let (mut is_sweep_due, mut failing) = (true, tiers::failing(&*stores));
    loop {
        let walked = open.config.clock.now();
        let turns_short = || {
            let leaving_bytes = open.pool.tier().leaving_bytes();
            open.tiers.turns_short(&stores.status(), leaving_bytes)
        };
        while open.config.clock.since(walked) < pause && !turns_short() {
            tokio::select! {
                () = tokio::time::sleep(LOOK_PAUSE) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
        let (pool, state, rebuild) = (open.pool.clone(), open.tiers.clone(), open.rebuild.clone());
        let (of_pass, clock) = (Arc::clone(&stores), open.config.clock.clone());
        let lane = pool.tier().background().clone();
        let mut stopped = stop.clone();
        let failing_now = tiers::failing(&*stores);
        is_sweep_due |= failing.difference(&failing_now).next().is_some();
        failing = failing_now;
        if std::mem::take(&mut is_sweep_due) {
            let (pool, mut stopped) = (pool.clone(), stop.clone());
            let sweep = lane.spawn(async move {
                tokio::select! {
                    done = pool.tier().sweep_unnamed() => done,
                    _ = stopped.wait_for(|stop| *stop) => Ok(0),
                }
            });
            if let Ok(Err(error)) = sweep.await {
                is_sweep_due = true;
                tracing::debug!(error = %error.chain(), "could not look for fragments that nothing names");
            }
        }
        let pass = lane.spawn(async move {
            if let Err(error) = pool.tier().save_read_times().await {
                tracing::debug!(error = %error.chain(), "could not record when segments were last read");
            }
            tokio::select! {
                done = tiers::pass(&pool, &state, &rebuild, &*of_pass, &*clock) => done,
                _ = stopped.wait_for(|stop| *stop) => Ok(tiers::Pass::Idle),
            }
        });
        let passed = pass.await;
        let is_short = open.tiers.is_short();
        match passed {
            Ok(Ok(pass)) => pause = tiers::pause_after(pass, pause, policy.cold_after, is_short),
            Ok(Err(error)) => {
                let failed = tiers::Pass::Failed;
                pause = tiers::pause_after(failed, pause, policy.cold_after, is_short);
                tracing::debug!(error = %error.chain(), "a walk for segments to move was cut short");
                if error.kind() == ErrorKind::Fenced {
                    return;
                }
            }
            // The supervisor of this job handles it.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return,
        }
    }
}
