//! Fragments that no placement may name: their stores were late or failed, others took them, and then they arrived after
//! all; or the attempt that wrote them has failed as a whole.
//!
//! Invariants:
//! - A stray is deleted only if the map names the segment at a placement of its generation or a later one, and not
//!   there: until then, another attempt of the same write may come to name it. Or when its segment is deleted.
//! - Beyond [`STRAYS_MAX`], where those of the oldest segments go first, and after the end of this owner, strays are left
//!   to the sweep after the end of the segment.

use super::names;
use super::reading::Coded;
use crate::fragment_store::FragmentName;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use tiering::segment::{SegmentName, SegmentNumber};

/// Maximum number of segments whose strays are remembered. Chosen by hand: 5 MiB.
const STRAYS_MAX: usize = 16_384;

/// The strays of all segments, with the numbers of their stores.
#[derive(Debug, Default)]
pub(super) struct Strays(Mutex<BTreeMap<SegmentName, Vec<(u32, FragmentName)>>>);

impl Strays {
    /// Remembers a fragment that is stored, or may be, and that another one may replace.
    pub(super) fn add(&self, store: u32, name: FragmentName) {
        let mut strays = self.0.lock();
        let of_segment = strays.entry(name.segment).or_default();
        if !of_segment.contains(&(store, name)) {
            of_segment.push((store, name));
        }
        if strays.len() > STRAYS_MAX {
            strays.pop_first();
        }
    }

    /// The segments that have some.
    pub(super) fn segments(&self) -> Vec<SegmentNumber> {
        self.0.lock().keys().map(|segment| segment.number).collect()
    }

    /// Takes those of a segment that its placement, which the map has, shows to be needless, and forgets those that it
    /// names.
    pub(super) fn take_unnamed(&self, coded: &Coded) -> Vec<(u32, FragmentName)> {
        let newest = coded.next_generation() - 1;
        let named = names(&coded.name, &coded.fragments);
        let mut strays = self.0.lock();
        let Some(mut of_segment) = strays.remove(&coded.name) else { return Vec::new() };
        let later: Vec<_> =
            of_segment.extract_if(.., |(_, name)| name.generation > newest).collect();
        if !later.is_empty() {
            strays.insert(coded.name, later);
        }
        of_segment.retain(|stray| !named.contains(stray));
        of_segment
    }

    /// Takes those of a segment that is deleted.
    pub(super) fn take_all(&self, segment: &SegmentName) -> Vec<(u32, FragmentName)> {
        self.0.lock().remove(segment).unwrap_or_default()
    }
}
