//! Text output about the scrub.

use super::pairs;
use api::scrub::ScrubInfo;
use block::quantities::{ByteSize, Span, utc};

pub(super) fn scrub(info: &ScrubInfo) -> String {
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
        ("repaired", format!("{} segments, from copies", info.repaired_count)),
        ("bad", format!("{} segments", info.bad_count)),
    ]);
    for bad in &info.bad {
        text += &format!("bad: {}: {}\n", bad.object, bad.why);
    }
    text
}
