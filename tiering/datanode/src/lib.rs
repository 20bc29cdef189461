//! Segments as erasure-coded fragments on several stores: the data tier's [`tiering::segment_store::SegmentStore`]
//! over stores of fragments ([`FragmentStore`]), which are directories, buckets or data nodes.
//!
//! Invariants:
//! - A segment is stored once its fragments are, on stores of distinct failure domains.
//! - A healthy read is one request to one store. A read of what is lost decodes it from any others that are
//!   enough.
//! - Bytes that cannot be had are an error, never zeroes.

mod coded;
mod fragment_store;
mod placing;
mod seeded_bugs;

pub use coded::{CodedCounts, CodedOptions, CodedSegments, NamedStore, StoreState};
pub use erasure::Scheme;
pub use fragment_store::{
    Check, FragmentName, FragmentStore, ObjectFragments, Room, RoomTeller, Verifier, Witness,
};
pub use placing::{StoreId, StoreInfo};
