//! The daemon: configuration, pools, volumes, the admin socket and the command line. It is the only
//! package that knows all the others.

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
