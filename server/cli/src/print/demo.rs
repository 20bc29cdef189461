//! Text output of the demonstration.

use api::demo::{DemoInfo, LatencyInfo};
use std::fmt::Write;

/// Prints a table of the latencies.
#[must_use]
pub fn demo(info: &DemoInfo) -> String {
    let mut text = "\nLatency over NBD, 4 KiB, one at a time       median        p99\n".to_owned();
    for LatencyInfo { what, median_us, p99_us } in &info.latencies {
        let _ = writeln!(text, "    {what:<36} {median_us:>7.0} us {p99_us:>7.0} us");
    }
    text
}
