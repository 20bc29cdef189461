//! Text output of rehearsals.

use super::table;
use api::drill::{DrillInfo, DrillMove};

/// Lists the moves of a rehearsal, with their pauses.
#[must_use]
pub fn drill(info: &DrillInfo) -> String {
    let head = ["FROM", "TO", "PAUSE"].map(str::to_owned).to_vec();
    let row = |DrillMove { from, to, pause_ms }: &DrillMove| {
        vec![from.clone(), to.clone(), format!("{pause_ms} ms")]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(info.moves.iter().map(row)).collect();
    format!(
        "{}node {} owns the pool again; median pause {} ms, longest {} ms\n\
         when an owner dies, {} ms of silence come before such a pause\n",
        table(&rows, &[2]),
        info.owner,
        info.pause_ms_median,
        info.pause_ms_max,
        info.detection_ms
    )
}
