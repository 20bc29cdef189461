//! Text output of the demonstration.

use super::pairs;
use api::demo::{DemoInfo, FailOverInfo, LatencyInfo};
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

/// Prints the results of a fail-over.
#[must_use]
pub fn fail_over(info: &FailOverInfo) -> String {
    let results = pairs(&[
        ("Owner before the kill", info.owner_before.clone()),
        ("Owner after it", info.owner_after.clone()),
        ("Pause of the client", format!("{} ms", info.pause_ms)),
        ("Acknowledged writes", info.acknowledged_writes.to_string()),
        ("Lost writes", info.lost_writes.to_string()),
        ("Wrong reads", info.wrong_reads.to_string()),
        ("Batches that the killed node lacked", info.missed_batches.to_string()),
        ("Time until it had them", format!("{} ms", info.catch_up_ms)),
    ]);
    let verdict = match info.is_verified {
        true => "Every acknowledged write is there.\n",
        false => "The volume differs from the acknowledged writes: this is a bug of spindle.\n",
    };
    format!("\n{results}{verdict}")
}
