//! Text output for people: tables and sentences made from the admin replies.

use crate::admin::{
    CacheInfo, ConditionInfo, CopyInfo, DiffInfo, FsckInfo, NbdInfo, Reply, RestoreInfo,
    ScheduleInfo, ScrubInfo, SnapshotInfo, SpaceInfo, StatusInfo, VolumeInfo,
};
use crate::config::Config;
use crate::config::options::{self, OptionDoc};
use crate::removal::{PoolPurged, PoolRemoved, PoolRestored};
use block::quantities::{ByteSize, Span, utc};
use block::units::BLOCK_BYTES;
use engine::pool::some_of;
use engine::restore::PoolOfCopy;
use serde::Serialize;
use std::fmt::Write;

mod devices;

/// Formats columns two spaces apart, left-aligned except those named in `right`.
fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..column_count)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        })
        .map(|width| width.unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to a string cannot fail.
            let _ = if right.contains(&column) {
                write!(line, "{cell:>width$}  ")
            } else {
                write!(line, "{cell:<width$}  ")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn durability(volume: &VolumeInfo) -> String {
    format!("{:?}", volume.durability).to_lowercase()
}

fn state(volume: &VolumeInfo) -> String {
    match (volume.removed_at, volume.purge_at) {
        (Some(_), Some(purge_at)) => format!("removed, restorable until {}", utc(purge_at)),
        (Some(removed_at), None) => format!("removed {}", utc(removed_at)),
        _ => present_state(volume),
    }
}

fn present_state(volume: &VolumeInfo) -> String {
    let mut words = vec![if volume.is_read_only { "read-only" } else { "read-write" }];
    if volume.is_closed {
        words = vec!["not served"];
    }
    if volume.own_key.is_some() {
        words.push("own key");
    }
    let dedup = volume.dedup.map(|dedup| match dedup.is_on {
        true => format!("dedup x {:.2}", dedup.ratio),
        false => format!("dedup off (was x {:.2})", dedup.ratio),
    });
    words.extend(dedup.as_deref());
    if volume.is_aside {
        words.push("behind in the store");
    }
    if volume.is_stepped_back {
        words.push("refuses other machines");
    }
    let mut text = words.join(", ");
    if volume.origin.is_some() {
        text.push_str(", ");
        text.push_str(&origin(volume));
    }
    if let Some(expires_at) = volume.expires_at {
        text.push_str(&format!(", until {}", utc(expires_at)));
    }
    text
}

/// Describes the snapshot that a volume depends on, if any.
fn origin(volume: &VolumeInfo) -> String {
    match (&volume.origin, volume.promoted_bytes) {
        (Some(origin), Some(bytes)) => {
            let percent = u128::from(bytes) * 100 / u128::from(volume.size_bytes.max(1));
            format!("from {origin}, {percent} % independent")
        }
        (Some(origin), None) => format!("from {origin}"),
        (None, _) => String::new(),
    }
}

fn volumes(volumes: &[VolumeInfo]) -> String {
    if volumes.is_empty() {
        return "no volumes; make one with: spindle volume create NAME SIZE --dir DIR\n".to_owned();
    }
    let mut rows = vec![["NAME", "SIZE", "DURABILITY", "STATE"].map(str::to_owned).to_vec()];
    rows.extend(volumes.iter().map(|volume| {
        vec![
            volume.name.clone(),
            ByteSize(volume.size_bytes).rounded(),
            durability(volume),
            state(volume),
        ]
    }));
    table(&rows, &[1])
}

fn snapshots(snapshots: &[SnapshotInfo]) -> String {
    if snapshots.is_empty() {
        return "no snapshots; make one with: spindle snapshot create VOLUME@NAME --dir DIR\n"
            .to_owned();
    }
    let mut rows = vec![["SNAPSHOT", "SIZE", "CREATED", "STATE"].map(str::to_owned).to_vec()];
    let has_space = snapshots.iter().any(|snapshot| snapshot.held_bytes.is_some());
    if has_space {
        rows[0].push("ALONE".to_owned());
    }
    rows.extend(snapshots.iter().map(|snapshot| {
        let held = snapshot.held_bytes.map_or("-".to_owned(), |bytes| ByteSize(bytes).rounded());
        let state = if snapshot.is_in_store { "in the store" } else { "on its way to the store" };
        vec![
            format!("{}@{}", snapshot.volume, snapshot.name),
            ByteSize(snapshot.size_bytes).rounded(),
            utc(snapshot.created_at),
            state.to_owned(),
            if has_space { held } else { String::new() },
        ]
    }));
    table(&rows, &[1, 4])
}

/// Describes a pool that was made from a copy.
pub(super) fn restored_copy(made: &PoolOfCopy) -> String {
    let behind = match made.aside_count {
        0 => String::new(),
        count => format!(
            "{count} volumes were behind the others there; `spindle status` says which, and what to do\n"
        ),
    };
    let shown = made.snapshot.as_ref().map_or_else(String::new, |name| {
        let others = match made.without_snapshot.len() {
            0 => String::new(),
            _ => format!(
                "; these have none and stay as in the state: {}",
                made.without_snapshot.join(", ")
            ),
        };
        format!("its volumes show their snapshot {name}{others}\n")
    });
    let part = match made.left_out.len() {
        0 => String::new(),
        _ => format!("without the volumes {}\n", some_of(&made.left_out)),
    };
    let named = made
        .volume_name
        .as_ref()
        .map_or_else(String::new, |name| format!("its volume is called {name}\n"));
    format!(
        "state {} of {} from {} is here, {} to fetch in the background\n{part}{named}{shown}{behind}\
         serve it with the same --dir, --store and key: spindle serve --dir DIR\n",
        made.state,
        utc(made.as_of),
        made.url,
        ByteSize(made.segment_bytes).rounded()
    )
}

fn copies(infos: &[CopyInfo]) -> String {
    if infos.is_empty() {
        return "no copies; make one with: spindle copy add s3://bucket/prefix --dir DIR\n"
            .to_owned();
    }
    let mut rows = vec![["COPY", "MADE", "STATE", "BEHIND", "NOW"].map(str::to_owned).to_vec()];
    rows.extend(infos.iter().map(|info| {
        let made = match info.is_snapshots_only {
            true => "at snapshots".to_owned(),
            false => format!("every {} s", info.interval_seconds),
        };
        let state = info.state.as_ref().map_or("none yet".to_owned(), |state| {
            format!("{} of {}", state.number, utc(state.as_of))
        });
        let behind = match info.lag_seconds {
            None => "-".to_owned(),
            Some(0) => "nothing".to_owned(),
            Some(seconds) => format!("{seconds} s, {}", ByteSize(info.lag_bytes).rounded()),
        };
        let now = match (&info.failure, info.pass_permille) {
            _ if !info.is_running => "no daemon runs".to_owned(),
            (Some(failure), _) => {
                format!("failing for {} s: {failure}", info.failing_seconds.unwrap_or(0))
            }
            (None, Some(permille)) => format!("copying, {} %", permille / 10),
            (None, None) if info.damaged_count > 0 => {
                format!("waiting; {} segments were damaged, see the log", info.damaged_count)
            }
            (None, None) => "waiting".to_owned(),
        };
        let made = match &info.volumes {
            Some(volumes) => format!("{made}, of {}", some_of(volumes)),
            None => made,
        };
        vec![info.url.clone(), made, state, behind, now]
    }));
    table(&rows, &[])
}

fn scrub(info: &ScrubInfo) -> String {
    let Some(started_at) = info.started_at else {
        return "nothing was verified yet; begin with: spindle scrub start --dir DIR\n".to_owned();
    };
    let how = match (&info.failure, info.ended_at) {
        (Some(failure), _) => {
            format!("waits, for {} s: {failure}", info.failing_seconds.unwrap_or(0))
        }
        (None, _) if info.is_running && !info.is_served => {
            format!("{} % done; no daemon runs, so it does not go on", info.permille / 10)
        }
        (None, _) if info.is_running => {
            let rate = ByteSize(info.bytes_per_second).rounded();
            format!("{} % done, at {rate} a second", info.permille / 10)
        }
        (None, Some(at)) => format!("ended at {}", utc(at)),
        (None, None) => format!("stopped at {} %", info.permille / 10),
    };
    let every = |seconds: u64| Span::from_secs(seconds).to_string();
    let again = match (info.every_seconds, info.next_at) {
        (Some(seconds), Some(at)) => format!("every {}, next at {}", every(seconds), utc(at)),
        (Some(seconds), None) => format!("every {}", every(seconds)),
        (None, _) => "only when it is asked for".to_owned(),
    };
    let mut text = pairs(&[
        ("begun", utc(started_at)),
        ("now", how),
        ("repeated", again),
        (
            "verified",
            format!(
                "{} segments of {}, {} frames",
                info.segment_count,
                ByteSize(info.object_bytes).rounded(),
                info.frame_count
            ),
        ),
        ("put back", format!("{} segments, from copies", info.mended_count)),
        ("bad", format!("{} segments", info.bad_count)),
    ]);
    for bad in &info.bad {
        text += &format!("bad: {}: {}\n", bad.object, bad.why);
    }
    text
}

fn schedule(info: &ScheduleInfo) -> String {
    let volume = &info.volume;
    let mut text = match (&info.cron, &info.keep) {
        (Some(cron), Some(keep)) => pairs(&[
            ("volume", volume.clone()),
            ("snapshots", format!("{cron} (UTC)")),
            ("next", info.next_at.map_or_else(|| "never".to_owned(), utc)),
            (
                "kept",
                format!(
                    "{} hourly, {} daily, {} weekly, {} monthly",
                    keep.hourly, keep.daily, keep.weekly, keep.monthly
                ),
            ),
        ]),
        _ => format!(
            "volume {volume} has no schedule; make one with: spindle snapshot schedule {volume} @hourly\n"
        ),
    };
    if !info.snapshots.is_empty() {
        let mut rows = vec![["SNAPSHOT", "CREATED", "WITH THE NEXT"].map(str::to_owned).to_vec()];
        rows.extend(info.snapshots.iter().map(|one| {
            let next =
                one.kept_as.as_ref().map_or("goes".to_owned(), |why| format!("stays: {why}"));
            vec![format!("{volume}@{}", one.name), utc(one.created_at), next]
        }));
        text.push_str(&table(&rows, &[]));
    }
    text
}

/// Lists the differences between two snapshots, one line per extent.
pub(super) fn diff(found: &DiffInfo) -> String {
    if found.extents.is_empty() {
        return "nothing has changed\n".to_owned();
    }
    let mut rows = vec![["OFFSET", "LENGTH", "NOW"].map(str::to_owned).to_vec()];
    rows.extend(found.extents.iter().map(|extent| {
        let now = if extent.is_hole { "hole" } else { "data" };
        vec![extent.offset.to_string(), extent.length.to_string(), now.to_owned()]
    }));
    table(&rows, &[0, 1])
}

fn pairs(pairs: &[(&str, String)]) -> String {
    let rows: Vec<Vec<String>> =
        pairs.iter().map(|(key, value)| vec![format!("{key}:"), value.clone()]).collect();
    table(&rows, &[])
}

fn volume(volume: &VolumeInfo) -> String {
    let mut text = pairs(&[
        ("name", volume.name.clone()),
        ("id", volume.id.to_string()),
        ("size", format!("{} ({} bytes)", ByteSize(volume.size_bytes), volume.size_bytes)),
        ("durability", durability(volume)),
        ("state", state(volume)),
        ("created", utc(volume.created_at)),
    ]);
    if let Some(warning) = &volume.warning {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

/// Formats a reply of the daemon.
pub(super) fn reply(reply: &Reply) -> String {
    match reply {
        Reply::Volume(info) => volume(info),
        Reply::Volumes { volumes: infos } => volumes(infos),
        Reply::Snapshots { snapshots: infos } => snapshots(infos),
        Reply::Schedule(info) => schedule(info),
        Reply::Copies { copies: infos } => copies(infos),
        Reply::Scrub(info) => scrub(info),
        Reply::SnapshotDiff(found) => diff(found),
        Reply::Status(info) => status(info),
        Reply::Fsck(found) => fsck(found),
        Reply::Done { message } => format!("{message}\n"),
        Reply::RecoveryKey { key } => format!(
            "{}\n\n\
             This key opens the pool when its key file or passphrase is lost. It is not stored\n\
             anywhere and not shown again. Print it, or keep it where the pool's directory is not.\n\
             To use it: put it in a file and start spindle with --recovery-key-file FILE.\n",
            key.expose()
        ),
        Reply::Attached(info) => devices::attached(info),
        Reply::Attachments { attachments, clients } => devices::list(attachments, clients),
        Reply::KeyRotated { message, .. } => format!("{message}\n"),
    }
}

fn status(info: &StatusInfo) -> String {
    let percent = |part: u64, whole: u64| match whole {
        0 => 0,
        _ => u128::from(part) * 100 / u128::from(whole),
    };
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let log = &info.log;
    let state = if info.is_offline { "no daemon runs" } else { "serving" };
    let mut text = pairs(&[
        ("pool", format!("{} ({})", info.name, info.pool)),
        ("state", state.to_owned()),
        ("store", info.store.clone()),
        (
            "owner",
            format!(
                "{} (pid {}) since {}, epoch {}",
                info.host,
                info.pid,
                utc(info.opened_at),
                info.epoch
            ),
        ),
        ("volumes", info.volume_count.to_string()),
        (
            "at risk",
            format!(
                "{:.1} s, {} (only on this machine)",
                info.at_risk.oldest_seconds,
                size(info.at_risk.bytes)
            ),
        ),
        (
            "log",
            format!(
                "{} of {} used ({} %), LSN {} written, {} on stable storage, {} in the store",
                size(log.used_bytes),
                size(log.ring_bytes),
                percent(log.used_bytes, log.ring_bytes),
                log.last_lsn,
                log.durable_lsn,
                log.destaged_lsn
            ),
        ),
        (
            "destage",
            format!(
                "{} in {} windows became {}; {} attempts failed",
                size(info.destage.destaged_bytes),
                info.destage.window_count,
                size(info.destage.stored_bytes),
                info.destage.failure_count
            ),
        ),
        ("space", space(&info.space)),
        ("dedup", dedup(info)),
        (
            "reads",
            format!(
                "frames from memory {}, from the cache {}, from the store {} ({} read twice, {} bad){}",
                info.tier.memory_hit_count,
                info.tier.cache_hit_count,
                info.tier.store_frame_count,
                info.tier.store_refetch_count,
                info.tier.store_bad_count,
                match info.tier.mended_count {
                    0 => String::new(),
                    count => format!("; {count} segments put back from copies"),
                }
            ),
        ),
        (
            "metadata",
            format!(
                "{} commits, {} trims being folded, {} uploads tried again, opened anew {} times",
                info.tier.commit_number,
                info.tier.range_count,
                info.tier.upload_retry_count,
                info.tier.reopen_count
            ),
        ),
        ("clients", clients(info.nbd.as_ref())),
        ("cache", cache(info.cache.as_ref())),
        ("memory", size(info.memory_bytes_max)),
        ("opened by", slots(info)),
        ("version", info.version.clone()),
    ]);
    if let Some(restored) = &info.restored {
        text.push_str(&pairs(&[("restored", restored_from(restored))]));
    }
    for endpoint in &info.endpoints {
        let _ = writeln!(text, "{endpoint}");
    }
    text.push_str(&conditions(&info.conditions, info.condition_excluded_count));
    text
}

/// Lists the conditions, each with its start, its cost and its remedy.
fn conditions(conditions: &[ConditionInfo], excluded_count: u64) -> String {
    let mut text = String::new();
    for condition in conditions {
        let ConditionInfo { kind, what, since, seconds, cost, remedy, .. } = condition;
        let _ = writeln!(text, "warning: {what} ({kind})");
        let _ = writeln!(text, "  since: {}, for {}", utc(*since), lasting(*seconds));
        for (name, words) in [("cost", cost), ("to do", remedy)] {
            if !words.is_empty() {
                let _ = writeln!(text, "  {name}: {words}");
            }
        }
    }
    if excluded_count > 0 {
        let _ = writeln!(
            text,
            "warning: {excluded_count} more were raised than can be listed; see the log"
        );
    }
    text
}

fn lasting(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

fn restored_from(info: &RestoreInfo) -> String {
    let from = format!("from {}, state {} of {}", info.url, info.state, utc(info.as_of));
    let size = |bytes: u64| ByteSize(bytes).rounded();
    if info.is_whole {
        return format!("{from}; everything is here");
    }
    let left = info.left_seconds.map_or_else(String::new, |left| format!(", {left} s left"));
    let bad = match info.bad_count {
        0 => String::new(),
        count => format!("; {count} segments are bad there, see the log"),
    };
    format!(
        "{from}; {} fetched since the start, {} to go{left}{bad}",
        size(info.done_bytes),
        size(info.left_bytes)
    )
}

fn clients(nbd: Option<&NbdInfo>) -> String {
    let Some(nbd) = nbd else { return "none, nothing is served".to_owned() };
    format!(
        "{} connections ({} refused), {} requests ({} failed)",
        nbd.connection_count, nbd.refused_count, nbd.request_count, nbd.error_count
    )
}

fn cache(cache: Option<&CacheInfo>) -> String {
    let Some(cache) = cache else { return "none".to_owned() };
    format!(
        "{}, {} in {} frames ({} bad, {} not kept, {} errors)",
        if cache.is_on { "on" } else { "OFF" },
        ByteSize(cache.used_bytes).rounded(),
        cache.frame_count,
        cache.bad_count,
        cache.dropped_count,
        cache.error_count
    )
}

fn dedup(info: &StatusInfo) -> String {
    match &info.dedup {
        None => "no volume has it".to_owned(),
        Some(found) => format!(
            "x {:.2}: {} destaged, {} of it stored already",
            found.ratio,
            ByteSize(found.block_count * BLOCK_BYTES).rounded(),
            ByteSize(found.duplicate_count * BLOCK_BYTES).rounded()
        ),
    }
}

fn space(space: &SpaceInfo) -> String {
    let size = |bytes: u64| ByteSize(bytes).rounded();
    let held = match space.is_known {
        true => format!(
            "{} stored, {} of it live (x {:.2}) in {} segments",
            size(space.stored_bytes),
            size(space.live_bytes),
            space.space_amplification,
            space.segment_count
        ),
        false => "not counted yet".to_owned(),
    };
    let waiting = match space.held_count {
        0 => String::new(),
        count => format!("; {count} reclaimed segments wait for copies"),
    };
    format!(
        "{held}; {} reclaimed, {} moved, written x {:.2}{waiting}",
        size(space.reclaimed_bytes),
        size(space.moved_bytes),
        space.write_amplification
    )
}

fn slots(info: &StatusInfo) -> String {
    let slots: Vec<String> = info.key_slots.iter().map(|slot| slot.kind.to_string()).collect();
    slots.join(", ")
}

/// Describes the findings of fsck.
pub(super) fn fsck(found: &FsckInfo) -> String {
    let mut text = format!(
        "{} volumes, {} blocks in {} map pages; {} segments of {}, {} frames verified\n",
        found.volume_count,
        found.block_count,
        found.page_count,
        found.segment_count,
        ByteSize(found.object_bytes).rounded(),
        found.frame_count,
    );
    if found.reclaimed_count > 0 {
        let _ = writeln!(
            text,
            "{} segments were reclaimed during the check; what was in them has moved, and was not looked at",
            found.reclaimed_count
        );
    }
    for problem in &found.problems {
        let _ = writeln!(text, "PROBLEM: {problem}");
    }
    let more = found.problem_count.saturating_sub(found.problems.len() as u64);
    if more > 0 {
        let _ = writeln!(text, "… and {more} more");
    }
    text.push_str(if found.problem_count == 0 {
        "the pool is consistent\n"
    } else {
        "the pool is NOT consistent\n"
    });
    text
}

/// Describes the removal of a pool.
pub(super) fn pool_removed(removed: &PoolRemoved) -> String {
    format!(
        "pool {} is removed: nothing opens it any more, and nothing of it is deleted\n\
         bring it back with:        spindle pool restore\n\
         delete it for good with:   spindle pool purge        (from {}; before that with --now)\n",
        removed.name,
        utc(removed.purge_at)
    )
}

/// Describes the restoration of a removed pool.
pub(super) fn pool_restored(restored: &PoolRestored) -> String {
    format!(
        "pool {} is back (volumes: {}); serve it with: spindle serve\n",
        restored.name, restored.volume_count
    )
}

/// Describes the purge of a pool. `dir` is its directory.
pub(super) fn pool_purged(purged: &PoolPurged, dir: &std::path::Path) -> String {
    format!(
        "pool {} is deleted: {} objects, {}\n\
         {} is left as it is: what it holds of the pool (log, cache, key) is of no use any more, and \
         may be deleted\n",
        purged.name,
        purged.object_count,
        ByteSize(purged.object_bytes).rounded(),
        dir.display()
    )
}

/// The effective configuration.
#[derive(Debug, Serialize)]
pub(super) struct ConfigRows {
    options: Vec<ConfigRow>,
}

#[derive(Debug, Serialize)]
struct ConfigRow {
    key: String,
    /// The value as TOML; absent if the option is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    origin: String,
}

impl ConfigRows {
    pub(super) fn of(config: &Config) -> ConfigRows {
        let options = config
            .rows()
            .into_iter()
            .map(|(key, value, origin)| ConfigRow { key, value, origin: origin.to_string() })
            .collect();
        ConfigRows { options }
    }
}

/// Prints one line per option, valid as TOML; unset ones as comments.
pub(super) fn config(rows: &ConfigRows) -> String {
    let rows: Vec<Vec<String>> = rows
        .options
        .iter()
        .map(|row| match &row.value {
            Some(value) => {
                vec![format!("{} = {value}", row.key), format!("# {}", row.origin)]
            }
            None => vec![format!("# {} is not set", row.key)],
        })
        .collect();
    // Short values are aligned; a long one (volumes) does not shift the others.
    let width = rows.iter().filter(|row| row.len() == 2).map(|row| row[0].chars().count());
    let width = width.filter(|width| *width <= 60).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let _ = match row.as_slice() {
            [value, origin] => writeln!(text, "{value:<width$}  {origin}"),
            _ => writeln!(text, "{}", row.join("  ")),
        };
    }
    text
}

/// All options, and an example file with all of them.
#[derive(Debug, Serialize)]
pub(super) struct Example {
    /// The commented `spindle.toml`.
    pub(super) text: String,
    options: &'static [OptionDoc],
}

impl Example {
    pub(super) fn of_all() -> Example {
        Example { text: options::example(), options: options::OPTIONS }
    }
}

/// Output of `spindle version`.
#[derive(Debug, Serialize)]
pub(super) struct Version {
    version: &'static str,
    /// Formats with the newest version that is read and written.
    formats: Vec<(&'static str, u32)>,
}

impl Version {
    pub(super) fn current() -> Version {
        Version { version: env!("CARGO_PKG_VERSION"), formats: super::backend::formats() }
    }
}

/// Prints the version, then one line per format.
pub(super) fn version(version: &Version) -> String {
    let mut text = format!("spindle {}\n", version.version);
    for (name, number) in &version.formats {
        let _ = writeln!(text, "{name} format {number}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::DedupInfo;
    use engine::record::Durability;

    fn info(name: &str) -> VolumeInfo {
        VolumeInfo {
            id: 1,
            name: name.to_owned(),
            size_bytes: 100 << 30,
            durability: Durability::Flush,
            is_read_only: false,
            created_at: 0,
            removed_at: None,
            purge_at: None,
            is_stepped_back: false,
            is_aside: false,
            is_closed: false,
            origin: None,
            promoted_bytes: None,
            expires_at: None,
            own_key: None,
            dedup: None,
            warning: None,
        }
    }

    #[test]
    fn tables_line_up() {
        let text = volumes(&[info("a"), info("a-longer-name")]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "NAME              SIZE  DURABILITY  STATE");
        assert_eq!(lines[1], "a              100 GiB  flush       read-write");
        assert_eq!(lines[2], "a-longer-name  100 GiB  flush       read-write");
    }

    #[test]
    fn a_removed_volume_says_until_when_it_can_be_restored() {
        let found = DedupInfo { is_on: true, block_count: 30, duplicate_count: 10, ratio: 1.5 };
        let dedup = VolumeInfo { dedup: Some(found), ..info("a") };
        assert_eq!(state(&dedup), "read-write, dedup x 1.50");
        let removed = VolumeInfo { removed_at: Some(0), purge_at: Some(86_400), ..info("a") };
        assert!(volume(&removed).contains("removed, restorable until 1970-01-02"));
    }

    #[test]
    fn a_volume_that_needs_somebody_says_so_in_the_list() {
        let aside = VolumeInfo { is_aside: true, is_stepped_back: true, ..info("a") };
        let text = volumes(std::slice::from_ref(&aside));
        assert!(text.contains("read-write, behind in the store, refuses other machines"), "{text}");
        let closed = VolumeInfo { is_closed: true, ..aside };
        assert!(volumes(&[closed]).contains("not served, behind in the store"));
    }

    #[test]
    fn a_clone_says_what_it_is_made_from() {
        let mut clone = VolumeInfo { origin: Some("db@monday".to_owned()), ..info("test") };
        assert!(volume(&clone).contains("read-write, from db@monday\n"));
        (clone.promoted_bytes, clone.expires_at) = (Some(clone.size_bytes / 4), Some(0));
        let text = volumes(&[clone]);
        let said = "read-write, from db@monday, 25 % independent, until 1970-01-01";
        assert!(text.contains(said), "{text}");
    }

    #[test]
    fn status_shows_what_is_at_risk_and_every_warning() {
        let mut info = StatusInfo { name: "main".to_owned(), ..StatusInfo::default() };
        info.at_risk.bytes = 3 << 20;
        info.at_risk.oldest_seconds = 12.34;
        info.conditions.push(ConditionInfo {
            kind: "pool-stopped".to_owned(),
            what: "disk on fire".to_owned(),
            since: 1_700_000_000,
            seconds: 7265,
            cost: "nothing is served".to_owned(),
            remedy: "call the fire brigade".to_owned(),
            ..ConditionInfo::default()
        });
        info.condition_excluded_count = 3;
        let text = status(&info);
        assert!(text.contains("12.3 s, 3.00 MiB"), "{text}");
        let shown = "warning: disk on fire (pool-stopped)\n  since: 2023-11-14 22:13:20 UTC, for 2 h 1 min\n  \
                     cost: nothing is served\n  to do: call the fire brigade\nwarning: 3 more were raised";
        assert!(text.contains(shown), "{text}");
    }
}
