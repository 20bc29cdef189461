//! The daemon: configuration, pools, volumes, the admin socket and the command line. It is the only
//! package that knows all the others.

pub mod adapters;
pub mod admin;
mod commands;
mod data_node;
mod data_stores;
pub mod demo;
pub mod handlers;
mod limits;
mod node;
mod offline;
pub mod process;
pub mod reader;
mod roles;
pub mod serve;
