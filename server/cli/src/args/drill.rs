//! Commands that rehearse failures.

use super::PoolArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Rehearsals.
#[derive(Clone, Debug, Subcommand)]
pub enum DrillCommand {
    /// Move the pool to each other member and back, while it is served, and report each pause
    FailOver(FailOverArgs),
}

/// Options of `drill fail-over`.
#[derive(Clone, Debug, Args)]
pub struct FailOverArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Number of times that each other member gets the pool
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Also write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}
