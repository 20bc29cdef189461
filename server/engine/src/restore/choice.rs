//! The part of a copy to restore: its volumes, a snapshot to show, and the name of a single volume.
//!
//! Invariants:
//! - The choice is checked against the state before anything is made. A request that the state
//!   cannot fulfil is refused with the reason.
//! - It is carried out once, before anything is served. After an interruption it is repeated, and
//!   nothing else has been written by then.

use super::{Origin, Restored, note};
use crate::config::PoolConfig;
use crate::copies::StateRecord;
use crate::copies::target::Target;
use crate::pool::{Pool, some_of};
use crate::record::{VolumeRecord, VolumeState};
use crate::snapshot::SnapshotRecord;
use crate::tier_options::look_options;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result, VolumeId};
use control::store::Store;
use std::collections::{BTreeMap, BTreeSet};
use tiering::{Tier, fail_point};
use uuid::Uuid;

/// Choice as requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked<'a> {
    /// Volumes with a snapshot of this name show that snapshot.
    pub snapshot: Option<&'a str>,
    /// Names of volumes; empty: all that the copy has.
    pub volumes: &'a [String],
    /// Name of the single volume in the new pool.
    pub name: Option<&'a str>,
}

/// Choice resolved in a state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    /// Volumes to keep. All others are dropped, including those that the copy does not have.
    pub only: Option<BTreeSet<u32>>,
    /// New name of the single volume.
    pub volume_name: Option<String>,
    /// Names of volumes without such a snapshot.
    pub without_snapshot: Vec<String>,
    /// Names of volumes that are dropped.
    pub excluded: Vec<String>,
}

/// Resolves the request in the state, unless all of the state is requested.
///
/// # Errors
/// `NotFound` if the state has no such volume or snapshot, listing those that exist; `Invalid` if a
/// volume with the snapshot cannot show it because it is behind the others, lacks its key, or is
/// made from too many others, or if several volumes would get one name; errors reading the copy.
pub(super) async fn choose(
    config: &PoolConfig,
    (target, state): (&Target, &StateRecord),
    (pool, key): (Uuid, &PoolKey),
    (url, asked): (&str, Asked<'_>),
) -> Result<Choice> {
    if asked == Asked::default() && state.volumes.is_none() {
        return Ok(Choice::default());
    }
    let refused = |kind, why: String| Err(Error::new(kind, format!("restore from {url}: {why}")));
    let as_of = block::quantities::utc(state.as_of);
    let mut options = look_options(config, &target.view(state), pool, key, state.epoch);
    options.volume_keys = target.volume_keys(key, pool).await?;
    options.excluded = state.excluded();
    let tier = Tier::open_read_only(options).await?;
    let (records, snapshots) = (tier.volume_records(), tier.snapshots());
    let (stalled_volumes, keys) = (tier.stalled_volumes(), tier.volume_keys().clone());
    let mut too_deep: BTreeMap<u32, String> = BTreeMap::new();
    for (volume, at, record) in &snapshots {
        let is_it = asked.snapshot.is_some_and(|name| {
            SnapshotRecord::decode(record).is_ok_and(|record| record.name == name)
        });
        if is_it && let Err(error) = tier.check_depth(*volume, *at) {
            too_deep.insert(volume.0, error.chain());
        }
    }
    tier.close().await?;
    let mut present: Vec<VolumeRecord> = Vec::new();
    for (_, record) in records {
        let record = VolumeRecord::decode(&record)?;
        if record.state == VolumeState::Present && state.has_volume(record.id) {
            present.push(record);
        }
    }
    let mut choice = Choice { only: state.volumes.clone(), ..Choice::default() };
    if !asked.volumes.is_empty() {
        let mut only = BTreeSet::new();
        for name in asked.volumes {
            let Some(found) = present.iter().find(|record| record.name == *name) else {
                let there: Vec<String> = present.iter().map(|record| record.name.clone()).collect();
                let there = match there.len() {
                    0 => "it has none".to_owned(),
                    _ => format!("it has {}", some_of(&there)),
                };
                let why = format!("no volume {name} in its newest state, of {as_of}; {there}");
                return refused(ErrorKind::NotFound, why);
            };
            only.insert(found.id);
        }
        let is_excluded = |record: &VolumeRecord| !only.contains(&record.id);
        let excluded = present.extract_if(.., |record| is_excluded(record));
        choice.excluded = excluded.map(|record| record.name).collect();
        choice.only = Some(only);
    }
    if let Some(name) = asked.name {
        let [record] = &present[..] else {
            let names: Vec<String> = present.iter().map(|record| record.name.clone()).collect();
            let why = format!(
                "--as {name} is a name for one volume, but the restore has several: {}; choose one \
                 with --volume",
                some_of(&names)
            );
            return refused(ErrorKind::Invalid, why);
        };
        choice.volume_name = Some(name.to_owned()).filter(|name| *name != record.name);
    }
    let Some(name) = asked.snapshot else { return Ok(choice) };
    let (mut names, mut having) = (BTreeSet::new(), BTreeSet::new());
    for (volume, _, record) in snapshots {
        if !present.iter().any(|record| record.id == volume.0) {
            continue;
        }
        let record = SnapshotRecord::decode(&record)?;
        if record.name == name {
            having.insert(volume.0);
        }
        names.insert(record.name);
    }
    let (able, without): (Vec<_>, Vec<_>) =
        present.into_iter().partition(|record| having.contains(&record.id));
    let cannot = |record: &&VolumeRecord| {
        stalled_volumes.contains_key(&block::VolumeId(record.id)) || !keys.has(record.key())
    };
    let unable: Vec<String> =
        able.iter().filter(cannot).map(|record| record.name.clone()).collect();
    if !unable.is_empty() {
        let why = format!(
            "the copy has an earlier state of these volumes than of the others, or lacks their dedicated key, so that they cannot \
             be shown as of snapshot {name}: {}; restore without @{name}, and roll the others back",
            unable.join(", ")
        );
        return refused(ErrorKind::Invalid, why);
    }
    if let Some((record, why)) =
        able.iter().find_map(|record| too_deep.get(&record.id).map(|why| (record, why)))
    {
        let why = format!(
            "volume {} cannot be rolled back to snapshot {name}: {why}; restore without @{name}, and promote it first",
            record.name
        );
        return refused(ErrorKind::Invalid, why);
    }
    if able.is_empty() {
        let of = match asked.volumes {
            [] => "no volume has".to_owned(),
            [one] => format!("volume {one} does not have"),
            _ => "none of these volumes has".to_owned(),
        };
        let there = match names.len() {
            0 => "it has no snapshots".to_owned(),
            _ => format!("it has {}", some_of(&names.into_iter().collect::<Vec<_>>())),
        };
        let why = format!("{of} a snapshot {name} in its newest state, of {as_of}; {there}");
        return refused(ErrorKind::NotFound, why);
    }
    choice.without_snapshot = without.into_iter().map(|record| record.name).collect();
    Ok(choice)
}

/// Reports whether the next start should try again, because the volume is not the cause.
fn is_for_next_start(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Unavailable
        | ErrorKind::Unreadable
        | ErrorKind::Fenced
        | ErrorKind::Io
        | ErrorKind::Denied => true,
        ErrorKind::Invalid
        | ErrorKind::Unsupported
        | ErrorKind::Full
        | ErrorKind::NotFound
        | ErrorKind::Busy
        | ErrorKind::Corrupt => false,
    }
}

/// Carries out the choice before anything of a restored pool is served: drops the other volumes,
/// and rolls the chosen ones back to the snapshot.
///
/// # Errors
/// Errors of the store and the log, after which the next start tries again. A volume that cannot be
/// rolled back for another reason is logged as an error and keeps the state of the copy.
pub(crate) async fn apply_choice(
    restored: &mut Restored,
    pool: &Pool,
    store: &Store,
    key: &PoolKey,
) -> Result<()> {
    let Origin { snapshot, only, volume_name, first_new_volume, .. } = restored.origin.clone();
    let is_part = (only.is_some() || volume_name.is_some()) && first_new_volume.is_none();
    if snapshot.is_none() && !is_part {
        return Ok(());
    }
    let is_wanted = |id: u32| only.as_ref().is_none_or(|only| only.contains(&id));
    if let Some(name) = &snapshot {
        let found = pool.snapshots(None)?.into_iter();
        let is_it = |record: &SnapshotRecord| record.name == *name && is_wanted(record.volume);
        for found in found.filter(|found| is_it(&found.record)) {
            // A failure of the volume itself, of any kind, must not keep the others from being
            // served.
            let has_key = pool.check_key(VolumeId(found.record.volume));
            let done = match &has_key {
                Ok(()) => pool.roll_back(&found.volume, name, async { Ok(()) }).await.map(drop),
                Err(_) => has_key.clone(),
            };
            match done {
                Ok(()) => {}
                Err(error) if has_key.is_ok() && is_for_next_start(&error) => return Err(error),
                // The others must not wait for it for ever.
                Err(error) => tracing::error!(
                    volume = %found.volume, snapshot = name, error = %error.chain(),
                    "a restored volume does not show the snapshot that was asked for, but the state of the copy"
                ),
            }
        }
        tracing::info!(snapshot = name, "the restored volumes show the snapshot");
    }
    fail_point!("restore-rolled-back");
    if let Some(only) = only.as_ref().filter(|_| is_part) {
        pool.keep_only(only).await?;
        fail_point!("restore-others-dropped");
    }
    if is_part {
        let present = pool.records().into_iter();
        let is_it =
            |record: &VolumeRecord| record.state == VolumeState::Present && is_wanted(record.id);
        for record in present.filter(is_it) {
            // A volume requested by name is wanted even if its time is over.
            pool.keep_for_good(&record.name).await?;
            if let Some(new) = volume_name.as_ref().filter(|new| **new != record.name) {
                pool.rename_volume(&record.name, new, async { Ok(()) }).await?;
            }
        }
        // The link is in the store. The changes that it records as done must be there, too, for a
        // later owner of the pool.
        pool.wait_logged_in_store().await?;
    }
    let first_new_volume = first_new_volume.or(Some(pool.first_new_volume()));
    let done = Origin { snapshot: None, first_new_volume, ..restored.origin.clone() };
    note(store, key, &mut restored.origin, done).await?;
    fail_point!("restore-chosen");
    Ok(())
}
