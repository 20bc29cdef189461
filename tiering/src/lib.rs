//! The data tier: turns windows of the log into segments in an object store, and reads blocks back.
//!
//! Owns the volume map, the segments, the caches and their background jobs. The daemon uses
//! [`Tier`]; the rest is public for tools, tests and benches.
//!
//! Invariants:
//! - The store holds a consistent prefix of the pool's history, over all its volumes.
//! - A crash may leave unreferenced segments, but never a map that references missing ones.
//! - Every byte from a disk or the network is verified before it is used.
//! - The object store is the only authoritative copy: local disks only cache.

mod answer;
pub mod cache;
pub mod copier;
mod create;
mod dedup;
pub mod destage;
pub mod failpoint;
pub mod fetch;
pub mod fsck;
mod heat;
pub mod keys;
mod leftovers;
pub mod listing;
pub mod map;
mod orphans;
mod outage;
mod places;
mod pool;
mod read;
pub mod rebuild;
pub mod reclaim;
mod recording_store;
pub mod repair;
pub mod scrub;
mod seeded_bugs;
pub mod segment;
pub mod segment_store;
pub mod survey;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tier;
pub mod tiers;
mod varint;

pub use answer::{Answer, one_line};
pub use copier::{
    CopiedState, Copier, CopierOptions, CopyCounts, CopyProgress, HydrateCounts, HydrateOptions,
    HydrateProgress, Lacking, RestoredStore,
};
pub use dedup::{DedupStatus, Found};
pub use destage::{
    DestageError, DestageReport, ExtentContent, LogSource, Window, WindowExtent, WindowVolume,
};
pub use fsck::{FsckOptions, FsckReport};
pub use keys::{KeyId, VolumeKeys};
pub use map::records::NamedSpillFile;
pub use map::snapshot_store::state_view;
pub use map::snapshots::SnapshotChange;
pub use map::space::Space;
pub use orphans::SweepReport;
pub use outage::{StoreFailure, is_store_full};
pub use pool::{Excluded, OwnerCheck};
pub use read::ChangedExtent;
pub use reclaim::{ReclaimOptions, ReclaimReport, ReclaimStatus};
pub use repair::{Finding, RepairSource};
pub use scrub::Scrubbed;
pub use tier::{Origin, Tier, TierOptions, TierStatus};
