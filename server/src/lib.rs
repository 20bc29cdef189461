//! The daemon: configuration, pools, volumes, the admin socket and the command line. It is the only
//! package that knows all the others.
#![expect(
    clippy::disallowed_methods,
    reason = "the calls of this crate are still to be moved to `block::env`"
)]

pub mod adapters;
pub mod admin;
mod commands;
pub mod demo;
pub mod handlers;
mod limits;
mod offline;
pub mod process;
pub mod reader;
pub mod serve;
