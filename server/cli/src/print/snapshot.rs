//! Text output about snapshots, their schedules and their differences.

use super::{pairs, table};
use api::snapshot::{DiffInfo, ScheduleInfo, SnapshotInfo};
use block::quantities::{ByteSize, utc};

pub(super) fn snapshots(snapshots: &[SnapshotInfo]) -> String {
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

pub(super) fn schedule(info: &ScheduleInfo) -> String {
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
#[must_use]
pub fn diff(found: &DiffInfo) -> String {
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
