//! The write log of one machine: one log for all volumes of a pool, in a ring of files, and an index
//! of the data that only the log holds.
//!
//! It owns the log's directory and every byte in it. It refuses to know where data goes afterwards:
//! the data tier, volumes' names and sizes, snapshots' meaning, clients, and other machines. Its
//! callers say which LSN is stored elsewhere.
//!
//! Invariants:
//! - An acknowledged entry survives a crash of the process; a flushed entry also survives a loss of
//!   power.
//! - The overlay shows the acknowledged entries, in log order, and never a part of an entry.
//! - The state machine (`ring/core.rs`) does no I/O and has no clock of its own. Threads and the
//!   simulation in the tests step it in the same way.
//! - Folders see each other in one direction, and no two files of different folders import each
//!   other.
//!
//! ```text
//! format    bytes <-> types, pure        disk      the directory and its device
//! overlay   entries not destaged yet     spill     files of volumes that cannot be destaged
//! ring      state machine, recovery      throttle  delays as the log fills
//! log       the interface for callers    sim       machines that crash, from a seed (tests)
//! replicas  other machines, as a trait
//!
//! log -> {ring, spill, throttle}   ring -> {replicas, spill, overlay, disk}   spill -> overlay -> disk -> format
//! ```
#![deny(unsafe_code)]

mod disk;
mod format;
mod log;
mod options;
mod overlay;
mod replicas;
mod ring;
mod seeded_bugs;
#[cfg(any(test, feature = "testing"))]
mod sim;
mod spill;
mod throttle;

pub use disk::failure::is_log_failure;
pub use disk::mounted::mounted;
pub use disk::unreadable::is_unreadable;
pub use format::VERSION as LOG_FORMAT_VERSION;
pub use format::entry::{EntryKind, RECORD_BYTES_MAX};
pub use format::reencode::{LogPart, reencode};
pub use format::state::TailLoss;
pub use log::{
    Log, LogNotes, LogSources, LogStatus, ObsoleteSpillFiles, RingSpace, SpillChange, SpillPart,
    WeakLog,
};
pub use options::{IoMode, LogIdentity, LogOptions, NewEntry, Wait};
pub use overlay::extents::{Piece, Source};
pub use overlay::log_resident::LogResident;
pub use overlay::spill_layer::SpillLayer;
pub use overlay::spill_resident::{SpillFileId, SpillResident};
pub use overlay::{Generation, Overlay, VolumeWeight};
pub use replicas::{QuorumTail, Replicas};
pub use ring::archive::{ArchiveEnd, ArchivedEntry, read_entries};
pub use ring::contents::LogContents;
pub use ring::follower_log::{FollowerFound, FollowerLog, FollowerOpening};
pub use ring::incomplete::is_incomplete;
pub use ring::inspect::{LogSummary, find_superseded};
pub use ring::reads::UnreadablePlace;
pub use ring::recovery::Recovery;
#[cfg(feature = "testing")]
pub use sim::machine::{MachineDisk, ProcessDisk};
pub use spill::dir::{MissingSpillFile, SpillFilesWanted, weigh as weigh_spill_files};
