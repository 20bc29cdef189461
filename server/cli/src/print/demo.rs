//! Text output of the demonstration.

use super::pairs;
use api::demo::{DataNodesInfo, DemoInfo, FailOverInfo, LatencyInfo};
use block::quantities::ByteSize;
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

/// Prints the results of the demonstration on data nodes.
#[must_use]
pub fn data_nodes(info: &DataNodesInfo) -> String {
    let results = pairs(&[
        ("Killed", info.killed.join(", ")),
        ("Lost bytes", info.lost_bytes.to_string()),
        ("Wrong reads", info.wrong_reads.to_string()),
        ("Read of 4 KiB, all nodes there", format!("{:.0} us (median)", info.read_us_p50_healthy)),
        (
            "Read of 4 KiB, decoded",
            format!("{:.0} us (median of {})", info.read_us_p50_degraded, info.degraded_reads),
        ),
        (
            "Made anew",
            format!(
                "{} on {} in {:.2} s",
                ByteSize(info.rebuilt_bytes).rounded(),
                info.spare,
                info.rebuild_seconds
            ),
        ),
    ]);
    let verdict = match info.lost_bytes + info.wrong_reads {
        0 => "Every byte is there.\n",
        _ => "The volume differs from what was written: this is a bug of spindle.\n",
    };
    format!("\n{results}{verdict}")
}
