//! The survey: how the segments depend on the data stores, as these are and with some of them taken as gone.
//!
//! Invariants:
//! - The count of one segment is a function of its placement and the list of stores: nothing is asked, read or changed.
//! - A failure domain is lost as a whole. The stores that fail now count as gone, too, where some are taken as gone.
//! - A segment that is an object depends on no data store, whether it is in fragments, too, or not.
//! - Memory is in proportion to the stores: the walk streams over the records.

use crate::pool::{Metadata, Segments};
use crate::segment::{Fragments, Placement, StoredSegment};
use crate::segment_store::ANY_LOSS;
use block::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;

/// Records read at a time. Chosen by hand, as in the walk of the rebuild job.
const RECORDS_AT_ONCE: usize = 256;

/// A number of segments and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of their images.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        *self += Amount { segment_count: 1, bytes };
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        self.segment_count += other.segment_count;
        self.bytes += other.bytes;
    }
}

/// The space that segments take, by tier: objects of the pool's store, fragments on data stores, and both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSpace {
    /// Segments that are only objects.
    pub objects: Amount,
    /// Segments in fragments.
    pub coded: Amount,
    /// Those of them that are objects of the pool's store, too.
    pub copied: Amount,
    /// Bytes of their stored fragments of data, without headers and checksums, which add about a hundredth.
    pub data_bytes: u64,
    /// Bytes of their stored fragments of parity, in the same way. Of a segment that is stored whole several times,
    /// all but the first count as parity.
    pub parity_bytes: u64,
}

impl TierSpace {
    /// Adds a segment. `is_object`: it is an object, whatever its placement names.
    pub(crate) fn add(&mut self, segment: &StoredSegment, is_object: bool) {
        let bytes = u64::from(segment.info.object_bytes);
        let Placement::Fragments(fragments) = &segment.placement else {
            return self.objects.add(bytes);
        };
        if is_object {
            return self.objects.add(bytes);
        }
        self.coded.add(bytes);
        if fragments.is_copied {
            self.copied.add(bytes);
        }
        for (index, place) in fragments.places.iter().enumerate() {
            if place.store != Fragments::NOWHERE {
                match index < usize::from(fragments.data) {
                    true => self.data_bytes += payload_bytes(fragments, index),
                    false => self.parity_bytes += payload_bytes(fragments, index),
                }
            }
        }
    }
}

/// Bytes of the payload of a fragment; a fragment of parity may have some more, up to a whole unit of its code.
fn payload_bytes(fragments: &Fragments, index: usize) -> u64 {
    let begins = std::iter::once(0).chain(fragments.ends.iter().copied());
    let mut pieces = begins.zip(&fragments.ends).map(|(begin, end)| end.saturating_sub(begin));
    let bytes = match index < usize::from(fragments.data) {
        true => pieces.nth(index),
        false => pieces.max(),
    };
    u64::from(bytes.unwrap_or(0))
}

/// A data store, as far as a survey needs to know it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SurveyedStore {
    /// Its number in placements.
    pub number: u32,
    /// Its failure domain.
    pub domain: String,
    /// It can be read now.
    pub is_readable: bool,
    /// It takes new fragments now.
    pub is_taking: bool,
    /// Its fragments stay there for good: it is configured, and not lost.
    pub is_staying: bool,
    /// It is taken as gone.
    pub is_gone: bool,
}

/// How segments in fragments would fare with a set of stores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// The segments by the number of further failure domains that may be lost, at worst, without losing them;
    /// [`ANY_LOSS`]: all of them. `None`: too few fragments can be had.
    pub survivals: BTreeMap<Option<u8>, Amount>,
    /// Segments of which a fragment has to be rebuilt: it is not stored, or not on a store that stays.
    pub lacking: Amount,
    /// Those of them that can be read, while too few failure domains take new fragments.
    pub short: Amount,
    /// Bytes of the fragments that have to be rebuilt, of all segments that can be read.
    pub missing_bytes: u64,
    /// For each failure domain with stores, the segments that could not be read if it failed, and can be before.
    pub domains: BTreeMap<String, Amount>,
    /// Failure domains with a store that takes new fragments.
    pub taking_domains: BTreeSet<String>,
}

/// What a survey has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// With the stores as they are.
    pub now: Outlook,
    /// Without those that are taken as gone and those that fail now; absent if none is taken as gone.
    pub then: Option<Outlook>,
    /// Segments that can be read now, and could not be read then.
    pub unavailable: Amount,
    /// Segments that could be read then, with fewer fragments that can be had than now.
    pub thinner: Amount,
    /// Space by tier.
    pub space: TierSpace,
    /// Segments in fragments of a way that this version does not know. They are counted nowhere else but in the space.
    pub unknown: Amount,
    /// Every record could be read. Otherwise there are more segments.
    pub is_complete: bool,
}

/// Returns the number of further failure domains that may be lost, at worst, without losing a segment that needs `data`
/// fragments, of which each domain has one of these counts. `None`: it cannot be read now.
#[must_use]
pub fn further_losses(data: usize, mut counts: Vec<usize>) -> Option<u8> {
    counts.sort_unstable();
    let mut left = counts.iter().sum::<usize>().checked_sub(data)?;
    let mut losses = 0;
    for count in counts.into_iter().rev() {
        let Some(rest) = left.checked_sub(count) else { break };
        (left, losses) = (rest, losses + 1);
    }
    Some(u8::try_from(losses).unwrap_or(u8::MAX))
}

/// A store within a set.
struct KnownStore {
    domain: usize,
    is_readable: bool,
    is_staying: bool,
}

/// A set of stores, and the counts of the segments seen with it.
struct Count {
    stores: BTreeMap<u32, KnownStore>,
    /// The failure domains: name, whether it takes new fragments, and the segments that would be lost with it.
    domains: Vec<(String, bool, Amount)>,
    outlook: Outlook,
}

impl Count {
    /// The set of all stores, or without those that are taken as gone and those that fail.
    fn new(stores: &[SurveyedStore], is_without: bool) -> Count {
        let names: BTreeSet<&str> = stores.iter().map(|store| store.domain.as_str()).collect();
        let mut domains: Vec<(String, bool, Amount)> =
            names.iter().map(|name| ((*name).to_owned(), false, Amount::default())).collect();
        let mut known = BTreeMap::new();
        for store in stores {
            let is_left = !is_without || !store.is_gone;
            let domain = names.iter().take_while(|name| **name < store.domain.as_str()).count();
            domains[domain].1 |= is_left && store.is_taking;
            let is_readable = is_left && store.is_readable;
            let is_staying = store.is_staying && (!is_without || is_readable);
            known.insert(store.number, KnownStore { domain, is_readable, is_staying });
        }
        Count { stores: known, domains, outlook: Outlook::default() }
    }

    /// Whether none of the stores is of this pool: the segment is read as an object.
    fn is_foreign(&self, fragments: &Fragments) -> bool {
        fragments.stores().all(|number| !self.stores.contains_key(&number))
    }

    /// Counts a segment in fragments. Returns the number of its fragments that can be had, if they are enough, or if
    /// it is an object, too.
    fn add(&mut self, fragments: &Fragments, bytes: u64) -> Option<usize> {
        let data = usize::from(fragments.data);
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        let mut staying = BTreeSet::new();
        let mut missing_bytes = 0;
        for (index, place) in fragments.places.iter().enumerate() {
            let store = self.stores.get(&place.store);
            if let Some(store) = store.filter(|store| store.is_readable) {
                *counts.entry(store.domain).or_default() += 1;
            }
            // Of two in one failure domain, one has to go elsewhere.
            if !store.is_some_and(|store| store.is_staying && staying.insert(store.domain)) {
                missing_bytes += payload_bytes(fragments, index);
            }
        }
        let found: usize = counts.values().sum();
        let losses = match fragments.is_copied {
            true => Some(ANY_LOSS),
            false => further_losses(data, counts.values().copied().collect()),
        };
        self.outlook.survivals.entry(losses).or_default().add(bytes);
        let wanted = fragments.places.len() - staying.len();
        if wanted > 0 {
            self.outlook.lacking.add(bytes);
        }
        losses?;
        for (domain, count) in counts.into_iter().filter(|_| !fragments.is_copied) {
            if found - count < data {
                self.domains[domain].2.add(bytes);
            }
        }
        self.outlook.missing_bytes += missing_bytes;
        let is_free = |(index, domain): &(usize, &(String, bool, Amount))| {
            domain.1 && !staying.contains(index)
        };
        if self.domains.iter().enumerate().filter(is_free).take(wanted).count() < wanted {
            self.outlook.short.add(bytes);
        }
        Some(found)
    }

    fn outlook(self) -> Outlook {
        let mut outlook = self.outlook;
        for (name, is_taking, lost) in self.domains {
            if is_taking {
                outlook.taking_domains.insert(name.clone());
            }
            outlook.domains.insert(name, lost);
        }
        outlook
    }
}

/// A survey that is under way.
pub(crate) struct Counting {
    now: Count,
    then: Option<Count>,
    survey: Survey,
}

impl Counting {
    pub(crate) fn new(stores: &[SurveyedStore]) -> Counting {
        let is_any_gone = stores.iter().any(|store| store.is_gone);
        let then = is_any_gone.then(|| Count::new(stores, true));
        Counting { now: Count::new(stores, false), then, survey: Survey::default() }
    }

    /// Counts a segment. `is_known`: this version knows how its fragments are made.
    pub(crate) fn add(&mut self, segment: &StoredSegment, is_known: bool) {
        let bytes = u64::from(segment.info.object_bytes);
        let fragments = match &segment.placement {
            Placement::Fragments(fragments) if !self.now.is_foreign(fragments) => fragments,
            _ => return self.survey.space.add(segment, true),
        };
        self.survey.space.add(segment, false);
        if !is_known {
            return self.survey.unknown.add(bytes);
        }
        let now = self.now.add(fragments, bytes);
        let Some(then) = &mut self.then else { return };
        match (now, then.add(fragments, bytes)) {
            (Some(_), None) => self.survey.unavailable.add(bytes),
            (Some(now), Some(then)) if then < now => self.survey.thinner.add(bytes),
            _ => {}
        }
    }

    pub(crate) fn end(self, is_complete: bool) -> Survey {
        let (now, then) = (self.now.outlook(), self.then.map(Count::outlook));
        Survey { now, then, is_complete, ..self.survey }
    }
}

/// Walks the records of all segments, and counts them.
///
/// # Errors
/// Database errors.
pub(crate) async fn walk(
    metadata: &Metadata,
    segments: &Segments,
    stores: &[SurveyedStore],
) -> Result<Survey> {
    let mut counting = Counting::new(stores);
    let unread = metadata.map.unread_records();
    let mut last = 0;
    loop {
        let (records, next) = metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
        for (record, _) in &records {
            let segment = record.stored();
            counting.add(&segment, segments.store.redundancy(&segment).is_some());
        }
        match next {
            Some(next) => last = next,
            None => break,
        }
    }
    Ok(counting.end(metadata.map.unread_records() == unread))
}

#[cfg(test)]
mod tests;
