//! Text output about a pool as a whole: its consistency, and its removal.

use api::pool::{FsckInfo, MoveInfo, PoolPurged, PoolRemoved, PoolRestored};
use block::quantities::{ByteSize, utc};
use std::fmt::Write;
use std::path::Path;

/// Describes a hand-over.
#[must_use]
pub fn moved(info: &MoveInfo) -> String {
    let MoveInfo { node, pause_ms, error } = info;
    match (pause_ms, error) {
        (Some(pause), _) => format!("node {node} serves the pool, after a pause of {pause} ms\n"),
        (None, Some(error)) => format!("node {node} does not serve the pool: {error}\n"),
        (None, None) => format!("the pool is being handed over to node {node}\n"),
    }
}

/// Describes the findings of fsck.
#[must_use]
pub fn fsck(found: &FsckInfo) -> String {
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
#[must_use]
pub fn pool_removed(removed: &PoolRemoved) -> String {
    format!(
        "pool {} is removed: nothing opens it any more, and nothing of it is deleted\n\
         bring it back with:        spindle pool restore\n\
         delete it for good with:   spindle pool purge        (from {}; before that with --now)\n",
        removed.name,
        utc(removed.purge_at)
    )
}

/// Describes the restoration of a removed pool.
#[must_use]
pub fn pool_restored(restored: &PoolRestored) -> String {
    format!(
        "pool {} is back (volumes: {}); serve it with: spindle serve\n",
        restored.name, restored.volume_count
    )
}

/// Describes the purge of a pool. `dir` is its directory.
#[must_use]
pub fn pool_purged(purged: &PoolPurged, dir: &Path) -> String {
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
