//! Text output about copies, and about pools that were made from one.

use super::table;
use api::copy::CopyInfo;
use api::restore::PoolFromCopy;
use block::quantities::{ByteSize, utc};

pub(super) fn copies(infos: &[CopyInfo]) -> String {
    if infos.is_empty() {
        return "no copies; make one with: spindle copy add s3://bucket/prefix --dir DIR\n"
            .to_owned();
    }
    let mut rows =
        vec![["COPY", "MADE", "RECOVERY POINT", "BEHIND", "NOW"].map(str::to_owned).to_vec()];
    rows.extend(infos.iter().map(|info| {
        let made = match info.is_snapshots_only {
            true => "at snapshots".to_owned(),
            false => format!("every {} s", info.interval_seconds),
        };
        let point = info.recovery_point.as_ref().map_or("none yet".to_owned(), |point| {
            format!("{} of {}", point.number, utc(point.as_of))
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
        vec![info.url.clone(), made, point, behind, now]
    }));
    table(&rows, &[])
}

/// Describes a pool that was made from a copy.
#[must_use]
pub fn restored_copy(made: &PoolFromCopy) -> String {
    let behind = match made.stalled_count {
        0 => String::new(),
        count => format!(
            "{count} volumes were stalled there; `spindle status` says which, and what to do\n"
        ),
    };
    let shown = made.snapshot.as_ref().map_or_else(String::new, |name| {
        let others = match made.without_snapshot.len() {
            0 => String::new(),
            _ => format!(
                "; these have none and stay as in the recovery point: {}",
                made.without_snapshot.join(", ")
            ),
        };
        format!("its volumes show their snapshot {name}{others}\n")
    });
    let part = match made.excluded.len() {
        0 => String::new(),
        _ => format!("without the volumes {}\n", some_of(&made.excluded)),
    };
    let named = made
        .volume_name
        .as_ref()
        .map_or_else(String::new, |name| format!("its volume is called {name}\n"));
    format!(
        "recovery point {} of {} from {} is here, {} to fetch in the background\n{part}{named}{shown}{behind}\
         serve it with the same --dir, --store and key: spindle serve --dir DIR\n",
        made.recovery_point,
        utc(made.as_of),
        made.url,
        ByteSize(made.segment_bytes).rounded()
    )
}

/// Lists the first few names and the number of the others.
fn some_of(names: &[String]) -> String {
    let shown = names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(5) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
