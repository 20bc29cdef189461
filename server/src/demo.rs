//! `spindle demo`: a disk in five seconds, and a proof that it keeps the data written to it.

mod client;
mod daemon;
mod one_node;
mod place;
mod stop;

pub use one_node::run;
