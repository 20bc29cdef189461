//! The write log of a pool: one log for all its volumes, and an index of the data that only the log
//! holds.
//!
//! Invariants:
//! - An acknowledged entry survives the death of the process; a flushed entry also survives a loss
//!   of power.
//! - The overlay shows the acknowledged entries, in log order, and never a part of an entry.
//! - The state machine (`core.rs`) does no I/O itself. Threads and the simulation in the tests step
//!   it in the same way.
#![deny(unsafe_code)]

mod contents;
mod core;
mod disk_file;
mod extents;
mod failure;
mod format;
mod incomplete;
mod inspect;
mod log;
mod memory;
mod mounted;
mod options;
mod overlay;
mod pace;
mod planted;
mod queue;
mod quick;
mod reads;
mod recovery;
mod resident;
mod scan;
mod shared;
mod side;
mod side_dir;
#[cfg(test)]
mod sim;
mod state_files;
mod succession;
mod tail;
mod unreadable;
mod walk;

pub use contents::LogContents;
pub use extents::{Piece, Source};
pub use failure::is_log_failure;
pub use format::VERSION as LOG_FORMAT_VERSION;
pub use format::entry::{EntryKind, RECORD_BYTES_MAX};
pub use format::state::TailLoss;
pub use incomplete::is_incomplete;
pub use inspect::{LogSummary, find_overtaken};
pub use log::{Log, LogNotes, LogStatus, ObsoleteSides, RingSpace, SideChange, SidePart};
pub use options::{IoMode, LogIdentity, LogOptions, NewEntry, Wait};
pub use overlay::{Generation, Overlay, VolumeWeight};
pub use reads::UnreadablePlace;
pub use recovery::Recovery;
pub use resident::LogResident;
pub use side::{SideFileId, SideLayer, SideResident};
pub use side_dir::{MissingSide, SidesWanted, weigh as weigh_side_files};
pub use unreadable::is_unreadable;
