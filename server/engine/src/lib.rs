//! The engine: what a pool is and does once its owner, its keys and its store are known.
//!
//! Owns pools and their volumes, the sessions of clients and the reservations that keep others out,
//! the policy of destage, snapshots and schedules, clones, copies, restores and scrub, and the
//! opening and closing of a pool.
//!
//! Refuses to know the front ends (NBD, ublk), the admin protocol, the command line and the
//! configuration file: front ends reach it through [`block::BlockDevice`], and the process hands it
//! a [`config::PoolConfig`].
//!
//! Invariants:
//! - One [`open_pool::OpenPool`] is all that a process needs to serve a pool, and nothing of the
//!   pool outlives it.
//! - A decision about data (who may write, what is durable, what may be deleted) is made here,
//!   never in a front end or a handler.

pub mod asker;
pub mod background;
pub mod client_record;
pub mod clock;
pub mod closed_pool;
pub mod conditions;
pub mod config;
pub mod copies;
pub mod data_stores;
pub mod destage;
pub mod doctor;
pub mod failed_log;
pub mod fsck;
pub mod jobs;
pub mod log_members;
pub mod lookout;
pub mod marks;
pub mod names;
pub mod open_pool;
pub mod opening;
pub mod pool;
pub mod pool_jobs;
mod ranges;
pub mod rebalance;
pub mod rebuild;
pub mod record;
pub mod removal;
pub mod report;
pub mod reservations;
pub mod restore;
pub mod schedule;
pub mod scrub;
mod seeded_bugs;
pub mod session;
pub mod snapshot;
pub mod state;
pub mod steps;
pub mod superseded;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tier_options;
pub mod tiers;
pub mod volume;
pub mod volume_keys;
