//! Volumes that are stalled: behind the others in the store because their data cannot be destaged.
//! Keeps the state that the rest of the pool needs of them, and lets callers ask for a round of retries
//! and wait for its end. `crate::destage` runs the rounds.
//!
//! Invariants:
//! - `is_any_stalled` says whether the list has any entries. Reads and writes check only this flag if
//!   it is false.
//! - The data that all of them keep on this machine is bounded. If it exceeds the bound, a volume
//!   with at least its share refuses writes until the store has taken enough of it.
//! - A volume with a missing spill file is not served until the file is brought back or an operator
//!   gives up its contents.
//! - A caller that waits for a round is answered by one that began after the call.

use super::Shared;
use super::progress::StalledVolume;
use block::conditions::Report;
use block::{ConditionKind, Error, ErrorKind, Lsn, Result, VolumeId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::Ordering;
use tiering::Tier;
use wal::MissingSpillFile;

/// Data that volumes that cannot be destaged may have in the ring and in spill files together, in
/// lengths of the ring. Chosen by hand: one ring, in case it was full of such data when the problem
/// was found and the spill files must take it to free the ring, and one more to overwrite the
/// damaged data.
const STALLED_RINGS: u64 = 2;

/// Volumes that are behind the others in the store.
#[derive(Default)]
pub(crate) struct StalledVolumes {
    /// Reason, and the first LSN that is not in the store.
    pub(crate) volumes: BTreeMap<VolumeId, (String, Lsn)>,
    /// Volumes with too much data that exists only on this machine.
    refused: HashSet<VolumeId>,
    /// Volumes with a missing spill file. They are not served.
    pub(crate) closed: HashMap<VolumeId, Error>,
    /// Closed volumes that shall go back to their state in the store.
    pub(crate) given_up: HashSet<VolumeId>,
}

impl StalledVolumes {
    /// Returns why a volume is stalled. A missing file takes precedence over the error of the last
    /// try.
    fn reason(&self, volume: VolumeId) -> String {
        match self.closed.get(&volume) {
            Some(error) => error.chain(),
            None => self.volumes.get(&volume).map(|(why, _)| why.clone()).unwrap_or_default(),
        }
    }

    pub(crate) fn first(&self, is_one: impl Fn(VolumeId) -> bool) -> Option<(VolumeId, String)> {
        self.volumes
            .keys()
            .find(|volume| is_one(**volume))
            .map(|volume| (*volume, self.reason(*volume)))
    }
}

impl Shared {
    /// Records that a volume cannot be destaged, from `since` on.
    pub(crate) fn note_stalled(&self, volume: VolumeId, since: Lsn, cause: &Error) {
        let reason = cause.chain();
        self.stalled.lock().volumes.insert(volume, (reason, since));
        self.is_any_stalled.store(true, Ordering::Release);
    }

    /// Records that the volume is still stalled, and why.
    pub(crate) fn note_still_stalled(&self, volume: VolumeId, cause: &Error) {
        tracing::debug!(volume = volume.0, error = %cause.chain(), "the volume is still stalled");
        if let Some((reason, _)) = self.stalled.lock().volumes.get_mut(&volume) {
            *reason = cause.chain();
        }
    }

    /// Records that the store has the volume up to, but not including, `since`.
    pub(crate) fn note_nearer(&self, volume: VolumeId, since: Lsn) {
        tracing::debug!(
            volume = volume.0,
            since_lsn = since.0,
            "the store has more of a stalled volume"
        );
        if let Some((_, behind)) = self.stalled.lock().volumes.get_mut(&volume) {
            *behind = since;
        }
    }

    /// Reports whether an operator gave up the data that only missing spill files of the volume
    /// held.
    pub(crate) fn is_given_up(&self, volume: VolumeId) -> bool {
        let stalled = self.stalled.lock();
        stalled.given_up.contains(&volume) && stalled.closed.contains_key(&volume)
    }

    /// Records that the volume is as far in the store as the others.
    pub(crate) fn note_back(&self, volume: VolumeId) {
        let mut stalled = self.stalled.lock();
        self.progress.lock().stalled.remove(&volume.0);
        self.tier.conditions().clear(ConditionKind::VolumeStalled, &self.name_of(volume));
        stalled.volumes.remove(&volume);
        stalled.closed.remove(&volume);
        stalled.given_up.remove(&volume);
        if stalled.refused.remove(&volume) {
            self.log.refuse(volume, None);
        }
        self.is_any_stalled.store(!stalled.volumes.is_empty(), Ordering::Release);
    }

    pub(crate) fn is_any_stalled(&self) -> bool {
        self.is_any_stalled.load(Ordering::Acquire)
    }

    pub(crate) fn is_stalled(&self, volume: VolumeId) -> bool {
        self.is_any_stalled() && self.stalled.lock().volumes.contains_key(&volume)
    }

    pub(crate) fn stalled_volumes(&self) -> Vec<VolumeId> {
        self.stalled.lock().volumes.keys().copied().collect()
    }

    /// Counts the data that volumes that are stalled have on this machine. If the total exceeds its
    /// limit, volumes with at least their share of the limit refuse writes.
    pub(crate) fn update_stalled_quota(&self) {
        let mut stalled = self.stalled.lock();
        if stalled.volumes.is_empty() && self.progress.lock().stalled.is_empty() {
            return;
        }
        let status = self.log.status();
        let bytes_max = status.ring_bytes * STALLED_RINGS;
        // Their index is in memory next to the index of the log.
        let extents_max = status.extent_count_max / 2;
        let share = stalled.volumes.len().max(1) as u64;
        let weights: Vec<_> = stalled
            .volumes
            .keys()
            .map(|volume| (*volume, self.log.overlay().weight_of(*volume)))
            .collect();
        let bytes_of = |weight: &wal::VolumeWeight| weight.log_bytes + weight.spill_bytes;
        let bytes: u64 = weights.iter().map(|(_, weight)| bytes_of(weight)).sum();
        let extents: u64 = weights.iter().map(|(_, weight)| weight.extent_count).sum();
        let mut listed = BTreeMap::new();
        for (volume, weight) in weights {
            let is_too_much = (bytes > bytes_max && bytes_of(&weight) >= bytes_max / share)
                || (extents > extents_max && weight.extent_count >= extents_max / share);
            let since = stalled.volumes[&volume].1;
            let reason = stalled.reason(volume);
            if is_too_much != stalled.refused.contains(&volume) {
                self.set_refused(&mut stalled, volume, is_too_much.then_some(&reason));
            }
            let entry = StalledVolume {
                since_lsn: since.0,
                log_bytes: weight.log_bytes,
                spill_bytes: weight.spill_bytes,
                spill_file_count: weight.spill_file_count,
                is_refusing_writes: is_too_much,
                is_closed: stalled.closed.contains_key(&volume),
                reason,
            };
            let (conditions, name) = (self.tier.conditions(), self.name_of(volume));
            let report = stalled_report(&name, &entry);
            conditions.raise(ConditionKind::VolumeStalled, &name, report);
            listed.insert(volume.0, entry);
        }
        self.progress.lock().stalled = listed;
    }

    fn set_refused(&self, stalled: &mut StalledVolumes, volume: VolumeId, reason: Option<&String>) {
        let error = reason.map(|reason| refusal(volume, reason));
        match &error {
            Some(error) => {
                tracing::error!(
                    volume = volume.0, error = %error.chain(),
                    "the pool refuses writes of a volume"
                );
                stalled.refused.insert(volume);
            }
            None => {
                tracing::info!(volume = volume.0, "the pool accepts writes of a volume again");
                stalled.refused.remove(&volume);
            }
        }
        self.log.refuse(volume, error);
    }

    /// Fails for a volume that already has too much data here.
    pub(crate) fn check_not_refused(&self, volume: VolumeId) -> Result<()> {
        if !self.is_any_stalled() {
            return Ok(());
        }
        let stalled = self.stalled.lock();
        match (stalled.refused.contains(&volume), stalled.volumes.get(&volume)) {
            (true, Some((reason, _))) => Err(refusal(volume, reason)),
            _ => Ok(()),
        }
    }

    /// Fails for a volume with a missing spill file, or whose key is gone.
    pub(crate) fn check_open(&self, volume: VolumeId) -> Result<()> {
        self.check_key(volume)?;
        if !self.is_any_stalled() {
            return Ok(());
        }
        self.stalled.lock().closed.get(&volume).cloned().map_or(Ok(()), Err)
    }

    pub(crate) fn is_catch_up_wanted(&self) -> bool {
        self.is_catch_up_wanted.load(Ordering::Acquire)
    }

    pub(crate) fn catch_up_begins(&self) {
        self.catch_up_begun.fetch_add(1, Ordering::AcqRel);
        self.is_catch_up_wanted.store(false, Ordering::Release);
    }

    pub(crate) fn catch_up_ended(&self) {
        self.catch_up_ended.send_replace(self.catch_up_begun.load(Ordering::Acquire));
    }

    /// Resolves when every volume that is stalled has been tried after this call.
    pub(crate) async fn try_catch_up(&self) -> Result<()> {
        let mut ended = self.catch_up_ended.subscribe();
        let begun = self.catch_up_begun.load(Ordering::Acquire);
        self.is_catch_up_wanted.store(true, Ordering::Release);
        self.wanted.notify_one();
        let tried = ended.wait_for(|ended| *ended > begun || self.is_ending()).await;
        self.check_serving()?;
        match tried {
            Ok(ended) if *ended > begun => Ok(()),
            _ => Err(Error::new(ErrorKind::Unavailable, "wait for destage: the pool is closing")),
        }
    }

    /// Like [`Shared::wait_destaged`], for acknowledged writes of one volume. Fails if the store
    /// lacks them although it has later writes of other volumes.
    pub(crate) async fn wait_destaged_of(&self, volume: VolumeId, lsn: Lsn) -> Result<()> {
        self.wait_destaged(lsn).await?;
        let stalled = self.stalled.lock();
        match stalled.volumes.get(&volume) {
            Some((reason, since)) if *since <= lsn => {
                let what = format!(
                    "wait for destage: volume {volume} cannot be destaged, its writes since LSN \
                     {since} are on this machine only: {reason}"
                );
                Err(Error::new(ErrorKind::Unavailable, what))
            }
            _ => Ok(()),
        }
    }
}

/// Describes the condition of a volume that is stalled.
fn stalled_report(name: &str, stalled: &StalledVolume) -> Report {
    if stalled.is_closed {
        return Report::new(
            format!("volume {name} is not served: {}", stalled.reason),
            "its clients get errors; the other volumes go on",
            "bring the spill file back from the machine that wrote it, and restart spindle",
        );
    }
    let refusing = if stalled.is_refusing_writes { ", and it refuses further writes" } else { "" };
    Report::new(
        format!(
            "volume {name} cannot be destaged: its writes since LSN {} are on this machine only: {}",
            stalled.since_lsn, stalled.reason
        ),
        format!(
            "{} bytes in {} spill files and {} bytes in the log would be lost with this machine{refusing}; the other \
             volumes go on",
            stalled.spill_bytes, stalled.spill_file_count, stalled.log_bytes
        ),
        "bring the damaged object of the store back, or write over the damaged data; spindle tries \
         again automatically",
    )
}

fn refusal(volume: VolumeId, reason: &str) -> Error {
    let what = format!(
        "change volume {volume}: it cannot be destaged, and this machine holds as much of it as it \
         may: {reason}"
    );
    Error::new(ErrorKind::Unavailable, what)
}

/// Collects the volumes for which the metadata lists spill files, and closes those with a missing
/// one.
pub(super) fn stalled_volumes_at_start(
    tier: &Tier,
    missing: &[MissingSpillFile],
) -> StalledVolumes {
    let mut stalled = StalledVolumes::default();
    for (volume, files) in tier.stalled_volumes() {
        let since = files.first().map_or(Lsn::NONE, |file| file.first_lsn);
        let last = files.last().map_or(Lsn::NONE, |file| file.last_lsn);
        let reason = "not tried since the start".to_owned();
        stalled.volumes.insert(volume, (reason, since));
        let Some(file) = missing.iter().find(|file| file.volume == volume) else { continue };
        let here = match std::fs::metadata(&file.path) {
            Ok(file) => format!("{} bytes are here", file.len()),
            Err(_) => "nothing of it is here".to_owned(),
        };
        let what = format!(
            "open volume {volume}: its writes from LSN {since} to {last} are only in spill files \
             beside the write log of the machine that wrote them, and {} is not whole here ({}; \
             {here}). Bring it back from that machine (there it is in DIR/log or \
             DIR/log.superseded-…) and restart. Only if it is gone for good: `spindle volume \
             accept-loss --discard-local-writes` takes the volume back to its state in the store, \
             without any of these writes",
            file.path.display(),
            file.why
        );
        stalled.closed.insert(volume, Error::new(ErrorKind::Corrupt, what));
    }
    stalled
}
