//! Simulation of whole nodes from one seed: machines with disks that tear, forget and flip bits, a network
//! that delays, loses and repeats, an object store with ambiguous answers, data stores that lose
//! fragments, and processes that stop, end and start again. Clients write, flush and read meanwhile, and
//! an oracle knows what they may see.
//!
//! `SEED=n` replays a run. `NODE_SEEDS=n` sets the number of seeds, and
//! `NODE_PRINT=1` prints the events.
//!
//! Invariants:
//! - A run is a function of its seed: the hash of its events is the same each time.

mod chain;
mod clients;
mod data;
mod executor;
mod faults;
mod network;
mod node;
mod oracle;
mod printing;
mod report;
mod run;
mod server;
mod stores;
mod tests;
mod tier;
