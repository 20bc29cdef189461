//! The job of one copy: makes states of the pool there, one after the other.
//!
//! Invariants:
//! - A state is published only after everything that it names is in the copy, and only by one task
//!   at a time.

use super::list::Published;
use super::target::Target;
use super::{CopySpec, CopyState, Source, StateRecord};
use block::conditions::Report;
use block::env::Clock;
use block::{ConditionKind, Error, ErrorKind, Lsn, Result, VolumeId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::fail_point;
use tiering::{Copier, CopierOptions, CopyProgress};
use tokio::sync::{Notify, watch};

/// Interval at which a copy of snapshots looks for new ones. This costs no request.
const LOOK: Duration = Duration::from_secs(5);
/// Interval at which a copy is checked between states: for data that may be deleted, and for the
/// pool's current key ring, so that revoked keys no longer open it. Chosen by hand: a few requests.
const TARGET_LOOK: Duration = Duration::from_secs(60);
/// Shortest time between two lists of the data that is read most. Chosen by hand: each is a version
/// in a bucket that keeps versions.
const HEAT_PAUSE: Duration = Duration::from_secs(600);
/// Pause after a failure; it doubles up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The list of the data that is read most, as last written to a copy, and when.
#[derive(Default)]
struct ToldHeat {
    looked_at: Option<Instant>,
    written_at: Option<Instant>,
    segments: Vec<(u64, u32)>,
}

/// The job of one copy.
pub(super) struct Running {
    pub(super) source: Source,
    pub(super) spec: CopySpec,
    pub(super) progress: Arc<CopyProgress>,
    pub(super) wake: Arc<Notify>,
    /// Held while a state is being published.
    pub(super) publishing: Arc<tokio::sync::Mutex<()>>,
}

type Snapshots = BTreeSet<(VolumeId, Lsn)>;

impl Running {
    fn clock(&self) -> &dyn Clock {
        &**self.source.pool.tier().clock()
    }

    /// Makes one state after the other, and tries again after each failure.
    pub(super) async fn run(&self, state: &watch::Sender<CopyState>) -> std::convert::Infallible {
        let mut pause = PAUSE;
        let mut open = None;
        let mut is_first = true;
        loop {
            let error = match self.serve(&mut open, state, &mut is_first).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            let has_failed_before = state.borrow().failure.is_some();
            if !has_failed_before {
                pause = PAUSE;
            }
            self.source.show_failure(&self.spec.url, Some(&error));
            let has_keys = state.borrow().has_destroyed_keys(&self.source.pool);
            self.source.show_erased_keys(&self.spec.url, has_keys);
            // The list of objects may be wrong, or the copy may have been replaced. After a
            // permanent refusal, do not list everything again each time.
            use ErrorKind::{Busy, Corrupt, NotFound};
            if matches!(error.kind(), Busy | Corrupt | NotFound) {
                open = None;
            }
            state.send_modify(|state| {
                let since =
                    state.failure.as_ref().map_or_else(|| self.clock().now(), |(_, since)| *since);
                state.failure = Some((error.chain(), since));
                state.attempt_count = state.begun_count;
            });
            let _ = tokio::time::timeout(pause, self.wake.notified()).await;
            // The wake-up asks for a try at once.
            is_first = true;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Makes states until something fails.
    async fn serve(
        &self,
        open: &mut Option<(Target, Copier)>,
        state: &watch::Sender<CopyState>,
        is_due_now: &mut bool,
    ) -> Result<std::convert::Infallible> {
        let interval = Duration::from_secs(self.spec.interval_seconds);
        let mut snapshots_there: Option<Snapshots> = None;
        let clock = self.clock();
        let (mut begun_at, mut looked_at) = (clock.now(), clock.now());
        let mut heat = ToldHeat::default();
        loop {
            let snapshots = self.snapshots();
            let is_due = *is_due_now
                || match self.spec.is_snapshots_only {
                    true => snapshots_there.as_ref() != Some(&snapshots),
                    false => clock.since(begun_at) >= interval,
                };
            if is_due {
                *is_due_now = false;
                begun_at = clock.now();
                state.send_modify(|state| state.begun_count += 1);
            }
            let (target, copier) = match open {
                Some(open) => open,
                None => open.insert(self.open(state).await?),
            };
            if is_due {
                self.make_state(target, copier, state).await?;
                snapshots_there = Some(snapshots);
                self.source.show_failure(&self.spec.url, None);
                state.send_modify(|state| {
                    state.failure = None;
                    state.attempt_count = state.begun_count;
                });
            }
            if is_due || clock.since(looked_at) >= TARGET_LOOK {
                looked_at = clock.now();
                let Source { key, id, lineage, .. } = &self.source;
                if !is_due {
                    target.check_there(key, (*id, *lineage)).await?;
                    self.source.follow_keys(target, &self.spec).await?;
                    self.copy_volume_keys(target, state).await?;
                }
                let oldest = target.oldest_pin(key, self.source.pool.clock().is_even()).await?;
                self.collect(copier, oldest).await?;
                if heat.looked_at.is_none_or(|at| clock.since(at) >= TARGET_LOOK) {
                    self.tell_heat(target, copier, &mut heat).await;
                }
            }
            let left = match self.spec.is_snapshots_only {
                true => LOOK,
                false => interval.saturating_sub(clock.since(begun_at)).min(TARGET_LOOK),
            };
            *is_due_now = tokio::time::timeout(left, self.wake.notified()).await.is_ok();
        }
    }

    /// Deletes everything that no state needs any more. A copy that refuses deletions is still
    /// brought up to date.
    async fn collect(&self, copier: &mut Copier, oldest: Option<u64>) -> Result<()> {
        let url = &self.spec.url;
        let refusal = loop {
            match copier.collect(oldest).await {
                Ok(0) => break None,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Denied => break Some(error),
                Err(error) => return Err(error),
            }
        };
        let report = refusal.map(|error| {
            Report::new(
                format!(
                    "could not delete objects that the copy {url} no longer needs: {}",
                    error.chain()
                ),
                "the space of these objects does not come back; the copy is brought up to date",
                "allow the credentials to delete, or remove the hold on the objects",
            )
        });
        let conditions = self.source.pool.tier().conditions();
        conditions.set(ConditionKind::ObjectUndeletable, url, report);
        Ok(())
    }

    fn snapshots(&self) -> Snapshots {
        let found = self.source.pool.tier().snapshots();
        let is_its = |volume: VolumeId| {
            self.spec.volumes.as_ref().is_none_or(|volumes| volumes.contains(&volume.0))
        };
        let its = found.into_iter().filter(|(volume, ..)| is_its(*volume));
        its.map(|(volume, lsn, _)| (volume, lsn)).collect()
    }

    async fn open(&self, state: &watch::Sender<CopyState>) -> Result<(Target, Copier)> {
        let Source { pool, key, id, lineage, .. } = &self.source;
        let target = Target::existing(&self.spec.url, self.spec.env_prefix.as_deref()).await?;
        // It was claimed when it was added. A folder that is not mounted must not be claimed again.
        target.check_there(key, (*id, *lineage)).await?;
        let newest = target.newest(key, *id).await?;
        self.source.check_known(&self.spec.url, newest.as_ref()).await?;
        state.send_modify(|state| state.newest = newest);
        let options = CopierOptions {
            bytes_per_second: self.spec.bytes_per_second,
            ..CopierOptions::default()
        };
        let copier = pool.tier().copier(target.objects(), options, self.progress.clone()).await?;
        let copier = match &self.spec.volumes {
            Some(volumes) => copier.of_volumes(volumes.iter().map(|id| VolumeId(*id)).collect()),
            None => copier,
        };
        self.source.offer(&self.spec.url, &target);
        // The data read before this start.
        pool.tier().warm(&target.heat(key, *id).await?);
        Ok((target, copier))
    }

    /// Tells the copy which data is read most, so that a restore can fetch it first. Nothing else
    /// depends on it.
    async fn tell_heat(&self, target: &Target, copier: &Copier, told: &mut ToldHeat) {
        let Source { pool, key, id, .. } = &self.source;
        told.looked_at = Some(self.clock().now());
        pool.tier().fade();
        let hottest = copier.hottest();
        let is_due = told.written_at.is_none_or(|at| self.clock().since(at) >= HEAT_PAUSE);
        if hottest.is_empty() || hottest == told.segments || !is_due {
            return;
        }
        match target.put_heat(key, *id, hottest.clone()).await {
            Ok(()) => (told.written_at, told.segments) = (Some(self.clock().now()), hottest),
            Err(error) => {
                tracing::debug!(
                    error = %error.chain(),
                    "could not write to a copy which data is read most"
                );
            }
        }
    }

    async fn copy_volume_keys(
        &self,
        target: &Target,
        state: &watch::Sender<CopyState>,
    ) -> Result<()> {
        let number = target.copy_volume_keys(&self.source.store).await?;
        state.send_modify(|state| state.volume_keys = Some(number.unwrap_or(0)));
        let has_keys = state.borrow().has_destroyed_keys(&self.source.pool);
        self.source.show_erased_keys(&self.spec.url, has_keys);
        Ok(())
    }

    async fn make_state(
        &self,
        target: &Target,
        copier: &mut Copier,
        state: &watch::Sender<CopyState>,
    ) -> Result<()> {
        let Source { pool, key, id, lineage, .. } = &self.source;
        let as_of = self.clock().unix_seconds();
        let stored_before = pool.destage_progress().stored_bytes;
        target.check_there(key, (*id, *lineage)).await?;
        // Keep this order: the keys that open the pool from now on then open every later state.
        self.source.follow_keys(target, &self.spec).await?;
        let made = copier.pass().await?;
        // The keys of all volumes in the state. A key of a volume that was made meanwhile does no
        // harm.
        self.copy_volume_keys(target, state).await?;
        // The copy may have gone meanwhile: only data in the copy that is there now counts.
        target.check_there(key, (*id, *lineage)).await?;
        let newest = state.borrow().newest.clone();
        let newest = match (made, newest) {
            (None, newest) => newest,
            // The state that this process found there when it began.
            (Some(made), Some(newest))
                if (newest.manifest, newest.commit_number, &newest.volumes)
                    == (made.manifest, made.commit_number, &self.spec.volumes) =>
            {
                copier.published(newest.number);
                Some(newest)
            }
            (Some(made), newest) => {
                let number = newest.map_or(1, |newest| newest.number + 1);
                let term = &self.source.term;
                let next = |known| Some(Published::next(known, number, made.commit_number, term));
                let known = self.source.set_published(&self.spec.url, next).await?;
                let nonce = known.map(|known| known.nonce).unwrap_or_default();
                let record =
                    StateRecord::new(*id, (number, nonce), as_of, &made, self.spec.volumes.clone());
                fail_point!("copy-noted");
                pool.tier().check_owner().await?;
                let (turn, there) = (self.publishing.clone().lock_owned().await, target.clone());
                let (key, made) = (key.clone(), record.clone());
                let published = pool.tier().background().spawn(async move {
                    let _turn = turn; // until it is over, even if the caller no longer waits
                    there.publish(&key, &made).await
                });
                published.await.map_err(|cause| {
                    Error::with_source(ErrorKind::Io, "publish a state of a copy", cause)
                })??;
                fail_point!("copy-published");
                copier.published(number);
                Some(record)
            }
        };
        state.send_modify(|state| {
            state.newest = newest;
            (state.unchanged_until, state.stored_before) = (as_of, stored_before);
        });
        Ok(())
    }
}
