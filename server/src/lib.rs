//! The daemon: configuration, pools, volumes, the admin socket and the command line. It is the only
//! package that knows all the others.

pub mod admin;
mod asker;
pub mod attach;
pub mod background;
pub(crate) mod claims;
pub mod cli;
pub(crate) mod clock;
pub(crate) mod conditions;
pub mod config;
pub mod copies;
pub mod demo;
pub mod destage;
pub mod glue;
pub(crate) mod jobs;
pub(crate) mod planted;
pub mod pool;
mod ranges;
pub mod reader;
pub mod record;
pub mod removal;
pub mod restore;
pub mod schedule;
pub mod scrub;
pub mod serve;
pub mod snapshot;

pub mod volume;
pub(crate) mod volume_keys;
