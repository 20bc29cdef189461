//! The fragments of a segment go to their stores side by side, and to others in place of those that fail or are late.
//!
//! Invariants:
//! - A fragment is named at the first store that has it on stable storage. One that arrives at another store later is
//!   a leftover, which the sweep removes: only the sweep knows that no placement names it.
//! - A store is late by comparison with those that took other fragments of the segment, never by a fixed time alone.

use super::health::Way;
use super::image::CodedImage;
use super::{CodedSegments, unknown_store};
use crate::placing::StoreId;
use crate::seeded_bugs::seeded_bugs;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use object_store::Error;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tiering::segment::{Fragments, SegmentName};

/// Shortest time that a store is waited for when the others have taken their fragments. Chosen by hand: longer than the
/// sync of a disk that is busy.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// How many times longer than the others a store may take. Chosen by hand.
const PATIENCE_FACTOR: u32 = 3;
/// A time that does not come while a segment is written.
const NEVER: Duration = Duration::from_secs(24 * 3600);

/// A fragment on its way: the stores that were asked to take it, and the one that has.
#[derive(Clone, Debug, Default)]
struct Sent {
    asked: Vec<StoreId>,
    under_way: usize,
    stored_at: Option<StoreId>,
}

impl CodedSegments {
    /// Writes the fragments to the first of the stores, and to the next ones instead of those that fail or are late.
    /// Returns the store of each fragment, or [`Fragments::NOWHERE`], and the last failure.
    pub(super) async fn write_fragments(
        &self,
        image: &CodedImage,
        segment: &SegmentName,
        free: Vec<StoreId>,
    ) -> (Vec<u32>, Option<Error>) {
        let mut free = free.into_iter();
        let mut sent = vec![Sent::default(); image.fragments.len()];
        let (mut writing, mut failure) = (FuturesUnordered::new(), None);
        let begin = |index: usize, id: StoreId, one: &mut Sent| {
            one.asked.push(id);
            one.under_way += 1;
            let (name, parts) = (image.name(segment, index), image.fragments[index].parts());
            async move {
                let written = match self.member(id.0) {
                    Some(member) => member.put(&name, parts).await,
                    None => Err(unknown_store(id.0)),
                };
                (index, id, written)
            }
        };
        for (index, one) in sent.iter_mut().enumerate() {
            if let Some(id) = free.next() {
                writing.push(begin(index, id, one));
            }
        }
        let (begun, mut is_patient) = (self.clock.now(), true);
        let mut patience = pin!(tokio::time::sleep(NEVER));
        while sent.iter().any(|one| one.stored_at.is_none() && one.under_way > 0) {
            let next = tokio::select! {
                biased;
                written = writing.next() => written,
                () = &mut patience, if is_patient => {
                    is_patient = false;
                    let late = sent.iter_mut().enumerate();
                    for (index, one) in late.filter(|(_, one)| one.stored_at.is_none()) {
                        let Some(id) = free.next() else { break };
                        self.note_late(&one.asked);
                        writing.push(begin(index, id, one));
                    }
                    continue;
                }
            };
            let Some((index, id, written)) = next else { break };
            let one = &mut sent[index];
            one.under_way -= 1;
            match written {
                Ok(()) if one.stored_at.is_some() => {}
                Ok(()) => {
                    one.stored_at = Some(id);
                    self.counters.writes.fetch_add(1, Ordering::Relaxed);
                    let bytes = image.fragments[index].bytes();
                    self.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                    let stored = sent.iter().filter(|one| one.stored_at.is_some()).count();
                    if stored == image.scheme.data() && !seeded_bugs().late_store_awaited {
                        let taken = self.clock.since(begun);
                        let rest = (taken * PATIENCE_FACTOR).max(PATIENCE_MIN);
                        patience.set(tokio::time::sleep(rest));
                    }
                }
                Err(error) => {
                    tracing::debug!(
                        store = id.0,
                        fragment = %image.name(segment, index),
                        error = %error,
                        "could not write a fragment; another store gets it if there is one"
                    );
                    failure = Some(error);
                    if one.stored_at.is_none()
                        && one.under_way == 0
                        && let Some(id) = free.next()
                    {
                        writing.push(begin(index, id, one));
                    }
                }
            }
        }
        let place = |one: &Sent| one.stored_at.map_or(Fragments::NOWHERE, |id| id.0);
        (sent.iter().map(place).collect(), failure)
    }

    /// Notes that these stores are late with a fragment that others had taken long since: later ones go elsewhere for a
    /// while.
    fn note_late(&self, stores: &[StoreId]) {
        self.counters.hedged_writes.fetch_add(1, Ordering::Relaxed);
        for member in stores.iter().filter_map(|id| self.member(id.0)) {
            let why = "it is late with a fragment, and the others have taken theirs";
            if member.health().fail(Way::Write, why) {
                tracing::warn!(store = member.name, "a data store is late with a fragment");
            }
        }
    }
}
