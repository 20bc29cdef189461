//! Erasure codes of segments, and the bytes of their fragments.
//!
//! Owns the schemes ([`Scheme`]), the cut of a segment's image into pieces ([`Cuts`]), encoding and
//! decoding ([`codec`]), and the format of a fragment ([`fragment`]). It does no I/O, and refuses to know
//! stores, nodes, keys and the contents of segments.
//!
//! Invariants:
//! - Any `data` of the fragments of a segment give its image, byte for byte.
//! - A frame lies within one data fragment, so a healthy read of it is one request.
//! - Bytes of strangers never panic a decoder.

pub mod codec;
pub mod cuts;
pub mod fragment;
pub mod pattern;
pub mod scheme;
mod seeded_bugs;

pub use cuts::Cuts;
pub use pattern::Pattern;
pub use scheme::{CodecId, Scheme};
