//! The daemon: configuration, pools, volumes, the admin socket and the command line. It is the only
//! package that knows all the others.
#![expect(
    clippy::disallowed_methods,
    reason = "the calls of this crate are still to be moved to `block::env`"
)]

pub mod admin;
pub mod attach;
pub mod cli;
pub mod config;
pub mod demo;
pub mod glue;
mod lookout;
pub(crate) mod planted;
pub mod reader;
pub mod removal;
pub mod serve;
