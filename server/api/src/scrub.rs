//! The scrub: it verifies all segments in the background and replaces bad ones from copies.

use serde::{Deserialize, Serialize};

/// A request about the scrub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum ScrubRequest {
    /// Starts a scrub, or continues a stopped one.
    Start {
        /// Pace; absent: the default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes_per_second: Option<u64>,
        /// Repeats it after this many seconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        every_seconds: Option<u64>,
    },
    /// Stops verifying.
    Stop {},
    /// Shows the progress and the findings.
    Status {},
}

/// State of the pool's scrub: the current run, or the newest one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// A daemon serves the pool, so the scrub makes progress.
    pub is_served: bool,
    /// It is under way.
    pub is_running: bool,
    /// It was stopped before it had checked everything, and continues when it is started again.
    pub is_stopped: bool,
    /// Start of the run, in seconds since 1970; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<u64>,
    /// End of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<u64>,
    /// Start of the next run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_at: Option<u64>,
    /// Progress through the numbers of segments, in thousandths.
    pub permille: u64,
    /// Pace.
    pub bytes_per_second: u64,
    /// Seconds from the start of one run to the start of the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Segments that were checked.
    pub segment_count: u64,
    /// Frames in the intact ones.
    pub frame_count: u64,
    /// Bytes of their objects.
    pub object_bytes: u64,
    /// Segments that were repaired from copies.
    pub repaired_count: u64,
    /// Segments that are damaged or missing and are in no copy.
    pub bad_count: u64,
    /// The first of these, including those of the previous run until they are checked again.
    pub bad: Vec<BadSegmentInfo>,
    /// Reason why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Seconds for which it has been waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_seconds: Option<u64>,
}

/// A segment that is damaged or missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadSegmentInfo {
    /// Its number.
    pub number: u64,
    /// Path of its object below the pool's prefix.
    pub object: String,
    /// Problem with it, and with its copies.
    pub why: String,
}
