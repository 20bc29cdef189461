//! Requests about the scrub.

use super::AdminPool;
use api::Reply;
use api::scrub::{BadSegmentInfo, ScrubInfo, ScrubRequest};
use block::Result;
use engine::scrub::{BadSegment, ScrubStatus};

impl AdminPool {
    pub(super) async fn scrub(&self, request: ScrubRequest) -> Result<Reply> {
        match request {
            ScrubRequest::Start { bytes_per_second, every_seconds } => {
                self.scrub.begin(bytes_per_second, every_seconds).await?;
            }
            ScrubRequest::Stop {} => {
                self.scrub.end().await?;
                let message =
                    "the scrub is stopped; `spindle scrub start` continues it if it was under way";
                return Ok(Reply::Done { message: message.to_owned() });
            }
            ScrubRequest::Status {} => {}
        }
        Ok(Reply::Scrub(scrub_info(self.scrub.status().await?)))
    }
}

/// Reports on the scrub.
pub(super) fn scrub_info(status: ScrubStatus) -> ScrubInfo {
    let mut info = ScrubInfo {
        is_served: status.is_serving,
        failing_seconds: status.failure.as_ref().map(|(_, lasts)| lasts.as_secs()),
        failure: status.failure.map(|(why, _)| why),
        ..ScrubInfo::default()
    };
    let Some(record) = status.record else { return info };
    let bad = |bad: BadSegment| {
        let BadSegment { number, object, why } = bad;
        BadSegmentInfo { number, object, why }
    };
    info.is_running = record.is_running();
    info.is_stopped = record.is_stopped;
    info.started_at = Some(record.started_at);
    info.ended_at = record.ended_at;
    info.next_at = record.next_at();
    info.permille = match record.ended_at {
        Some(_) => 1000,
        None => record.position * 1000 / record.until.max(1),
    };
    info.bytes_per_second = record.bytes_per_second;
    info.every_seconds = record.every_seconds;
    info.segment_count = record.segment_count;
    info.frame_count = record.frame_count;
    info.object_bytes = record.object_bytes;
    info.repaired_count = record.repaired_count;
    info.bad_count = record.bad_count;
    info.bad = record.bad.into_iter().map(bad).collect();
    info
}
