//! The write log of a pool: one log for all its volumes, and the index of what is only there.
//!
//! Invariants:
//! - What was acknowledged is found again after the process dies; what was flushed, also after the
//!   machine loses power.
//! - What the overlay shows is what was acknowledged, in log order, never a part of an entry.
//! - The state machine (`core.rs`) does no I/O itself and is stepped the same way by threads and by
//!   the simulation in its tests.
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
