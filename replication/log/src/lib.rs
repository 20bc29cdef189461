//! The write log of a pool: one log for all its volumes, and an index of the data that only the log
//! holds.
//!
//! Invariants:
//! - An acknowledged entry survives a crash of the process; a flushed entry also survives a loss
//!   of power.
//! - The overlay shows the acknowledged entries, in log order, and never a part of an entry.
//! - The state machine (`core.rs`) does no I/O itself. Threads and the simulation in the tests step
//!   it in the same way.
#![deny(unsafe_code)]

mod disk;
mod format;
mod log;
mod options;
mod overlay;
mod planted;
mod ring;
#[cfg(test)]
mod sim;
mod spill;
mod throttle;

pub use disk::failure::is_log_failure;
pub use disk::unreadable::is_unreadable;
pub use format::VERSION as LOG_FORMAT_VERSION;
pub use format::entry::{EntryKind, RECORD_BYTES_MAX};
pub use format::state::TailLoss;
pub use log::{Log, LogNotes, LogStatus, ObsoleteSides, RingSpace, SideChange, SidePart};
pub use options::{IoMode, LogIdentity, LogOptions, NewEntry, Wait};
pub use overlay::extents::{Piece, Source};
pub use overlay::log_resident::LogResident;
pub use overlay::spill_layer::SideLayer;
pub use overlay::spill_resident::{SideFileId, SideResident};
pub use overlay::{Generation, Overlay, VolumeWeight};
pub use ring::contents::LogContents;
pub use ring::incomplete::is_incomplete;
pub use ring::inspect::{LogSummary, find_overtaken};
pub use ring::reads::UnreadablePlace;
pub use ring::recovery::Recovery;
pub use spill::dir::{MissingSide, SidesWanted, weigh as weigh_side_files};
