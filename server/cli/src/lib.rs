//! The command line of spindle: its grammar, the requests that commands send, the client of the
//! admin socket, and everything that commands print.
//!
//! It owns the flags and the text and JSON of every command. It refuses to know the engine, the
//! daemon and the object store: commands that open a pool themselves are carried out by server,
//! which takes the parsed [`args::Cli`] and prints with [`output`] and [`print`](mod@print).
//!
//! Invariants:
//! - Results go to standard output, everything else to standard error; errors read `spindle: …`.
//! - What a command prints is made from a type of `api`, as text and as JSON. Files in `testdata/`
//!   hold both for each command.
#![forbid(unsafe_code)]

pub mod args;
pub mod client;
pub mod line;
pub mod output;
pub mod print;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
