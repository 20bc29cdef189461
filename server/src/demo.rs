//! `spindle demo`: a disk in five seconds, on one node, on three or over data nodes, and a proof that it keeps the data
//! written to it.
//!
//! Invariants:
//! - One daemon is killed hard, on purpose, in the middle; every answered write must be there afterwards.
//! - All daemons end with the demo.

mod client;
mod daemon;
mod data_nodes;
mod fail_over;
mod history;
mod nodes;
mod one_node;
mod place;
mod stop;

use block::Result;
use cli::args::Output;
use std::path::Path;
use std::process::ExitCode;

/// The data nodes of a demo.
#[derive(Clone, Copy, Debug)]
pub struct DataNodes<'a> {
    /// Their number.
    pub count: usize,
    /// Scheme of the segments over them, such as `4+2`.
    pub scheme: &'a str,
}

/// Settings of a demo.
#[derive(Clone, Copy, Debug)]
pub struct Demo<'a> {
    /// Its directory; a temporary one by default.
    pub dir: Option<&'a Path>,
    /// The program that it runs as its daemons.
    pub binary: &'a Path,
    /// Number of nodes: 1 or 3.
    pub node_count: u64,
    /// Present for a pool over data nodes.
    pub data_nodes: Option<DataNodes<'a>>,
    /// It ends after the measurements.
    pub is_short: bool,
    /// With [`Output::Json`] it prints one document after the measurements, in place of its text.
    pub output: Output,
}

/// Runs a demo until Ctrl-C, or with `is_short` until its end. Returns a failure if an acknowledged
/// write was lost or a read was wrong.
///
/// # Errors
/// Every failure to carry it out.
pub fn run(demo: Demo<'_>) -> Result<ExitCode> {
    let Demo { dir, binary, node_count, data_nodes, is_short, output } = demo;
    match (node_count, data_nodes) {
        (_, Some(asked)) => data_nodes::run(demo, asked),
        (1, None) => one_node::run(dir, binary, is_short, output).map(|()| ExitCode::SUCCESS),
        _ => fail_over::run(demo),
    }
}
