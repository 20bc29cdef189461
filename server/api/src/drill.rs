//! The report of `spindle drill`.

use serde::{Deserialize, Serialize};

/// A rehearsal of fail-over: the pool moved to other nodes and back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrillInfo {
    /// Name of the node that owned the pool before and afterwards.
    pub owner: String,
    /// Each move, in order.
    pub moves: Vec<DrillMove>,
    /// Median of the pauses, in milliseconds.
    pub pause_ms_median: u64,
    /// Longest pause, in milliseconds.
    pub pause_ms_max: u64,
    /// Milliseconds of silence after which a member takes the pool from an owner that has died.
    pub detection_ms: u64,
}

/// One move of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrillMove {
    /// Name of the node that handed the pool over.
    pub from: String,
    /// Name of the node that got it.
    pub to: String,
    /// Milliseconds in which no node took requests.
    pub pause_ms: u64,
}

impl DrillInfo {
    /// Makes the report of these moves.
    #[must_use]
    pub fn new(owner: String, moves: Vec<DrillMove>, detection_ms: u64) -> DrillInfo {
        let mut pauses: Vec<u64> = moves.iter().map(|one| one.pause_ms).collect();
        pauses.sort_unstable();
        DrillInfo {
            owner,
            pause_ms_median: pauses.get(pauses.len() / 2).copied().unwrap_or_default(),
            pause_ms_max: pauses.last().copied().unwrap_or_default(),
            detection_ms,
            moves,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_the_median_and_the_longest_pause() {
        let one = |pause_ms| DrillMove { from: "a".into(), to: "b".into(), pause_ms };
        let of = |pauses: &[u64]| {
            let info = DrillInfo::new("a".into(), pauses.iter().copied().map(one).collect(), 1000);
            (info.pause_ms_median, info.pause_ms_max)
        };
        assert_eq!(of(&[]), (0, 0));
        assert_eq!(of(&[300, 100, 200]), (200, 300));
        assert_eq!(of(&[1, 2, 3, 40]), (3, 40));
    }
}
