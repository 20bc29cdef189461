//! Commands about the data stores, and the requests that they send.

use super::PoolArgs;
use super::copy::{check_env_prefix, place};
use api::Request;
use api::data::DataRequest;
use block::Result;
use clap::Subcommand;

/// Commands about the data stores of a pool.
#[derive(Clone, Debug, Subcommand)]
pub enum DataCommand {
    /// List the data stores, and what is on them
    List {
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Move all fragments away from data stores, to take them out
    Drain {
        /// URLs, as `spindle data list` shows them, or names of data nodes: all of their drives
        #[arg(value_name = "STORE", required = true)]
        stores: Vec<String>,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Let data stores get fragments again
    Undrain {
        /// URLs, as `spindle data list` shows them, or names of data nodes: all of their drives
        #[arg(value_name = "STORE", required = true)]
        stores: Vec<String>,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Add a data store in place of another one, which may be lost
    Replace {
        /// URL of the old one, as `spindle data list` shows it
        old: String,
        /// URL of the new one, or its directory
        new: String,
        /// Failure domain of the new one
        #[arg(long, value_name = "DOMAIN")]
        domain: Option<String>,
        /// Share of new fragments of the new one, 1 to 1000
        #[arg(long, value_name = "NUMBER")]
        weight: Option<u32>,
        /// Read settings and credentials of the new one from variables with this prefix
        #[arg(long, value_name = "PREFIX")]
        env_prefix: Option<String>,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
    /// Move fragments to the data stores that would get them now, so that new ones get their share
    Rebalance {
        /// Move no further ones
        #[arg(long)]
        stop: bool,
        /// The pool.
        #[command(flatten)]
        pool: PoolArgs,
    },
}

impl DataCommand {
    pub(super) fn request(&self) -> Result<(&PoolArgs, Request)> {
        let (pool, request) = match self {
            DataCommand::List { pool } => (pool, DataRequest::List {}),
            DataCommand::Drain { stores, pool } => {
                (pool, DataRequest::Drain { stores: stores.clone() })
            }
            DataCommand::Undrain { stores, pool } => {
                (pool, DataRequest::Undrain { stores: stores.clone() })
            }
            DataCommand::Replace { old, new, domain, weight, env_prefix, pool } => {
                check_env_prefix(env_prefix.as_deref())?;
                let (domain, env_prefix) = (domain.clone(), env_prefix.clone());
                let (old, new) = (old.clone(), place(new)?);
                (pool, DataRequest::Replace { old, new, domain, weight: *weight, env_prefix })
            }
            DataCommand::Rebalance { stop, pool } => (pool, DataRequest::Rebalance { stop: *stop }),
        };
        Ok((pool, Request::Data(request)))
    }
}
