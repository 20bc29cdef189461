//! Commands about the scrub, and the requests that they send.

use super::{PoolArgs, check_rate, one_second_at_least};
use api::Request;
use api::scrub::ScrubRequest;
use block::Result;
use block::quantities::{ByteSize, Span};
use clap::Subcommand;

/// Commands about the pool's scrub.
#[derive(Clone, Debug, Subcommand)]
pub enum ScrubCommand {
    /// Start a scrub, or continue a stopped one; a running scrub takes the new rate and repetition
    Start {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
        /// Maximum bytes a second, like 50M; 32M by default
        #[arg(long, value_name = "SIZE")]
        rate: Option<ByteSize>,
        /// Repeat the scrub: time from the start of one to the start of the next, like 30d
        #[arg(long, value_name = "DURATION")]
        every: Option<Span>,
    },
    /// Stop the scrub, and start no other
    Stop {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Show the progress of the scrub, and its findings
    Status {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

impl ScrubCommand {
    pub(super) fn request(&self) -> Result<(&PoolArgs, Request)> {
        let (pool, request) = match self {
            ScrubCommand::Start { pool, rate, every } => {
                check_rate(*rate)?;
                let every_seconds = one_second_at_least("--every", *every)?;
                let bytes_per_second = rate.map(|rate| rate.0);
                (pool, ScrubRequest::Start { bytes_per_second, every_seconds })
            }
            ScrubCommand::Stop { pool } => (pool, ScrubRequest::Stop {}),
            ScrubCommand::Status { pool } => (pool, ScrubRequest::Status {}),
        };
        Ok((pool, Request::Scrub(request)))
    }
}
