//! The fragments of a segment go to their stores side by side, and to others in place of those that fail or are late.
//!
//! Invariants:
//! - A fragment is named at the first store that has it on stable storage. One that arrives at another store later is
//!   a stray; see [`super::strays`].
//! - A store is late by comparison with those that took other fragments of the segment, never by a fixed time alone.

use super::image::CodedImage;
use super::member::Member;
use super::{CodedSegments, unknown_store};
use crate::fragment_store::FragmentName;
use crate::placing::StoreId;
use crate::seeded_bugs::seeded_bugs;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use object_store::{Error, Result};
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tiering::segment::{Fragments, SegmentName};

/// Shortest time that a store is waited for when others have taken their fragments. Chosen by hand: longer than the
/// sync of a disk that is busy.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// How many times longer than the others a store may take. Chosen by hand.
const PATIENCE_FACTOR: u32 = 3;

/// A fragment on its way: the stores that are asked to take it, since which turn of the timer, and the one that has it.
#[derive(Clone, Debug, Default)]
struct Sent {
    asked: Vec<(StoreId, u32)>,
    stored_at: Option<StoreId>,
}

/// The end of an attempt to store a fragment.
struct Attempt {
    index: usize,
    id: StoreId,
    name: FragmentName,
    written: Result<()>,
}

async fn attempt(
    member: Option<Arc<Member>>,
    index: usize,
    id: StoreId,
    name: FragmentName,
    parts: Vec<bytes::Bytes>,
) -> Attempt {
    let written = match member {
        Some(member) => member.put(&name, parts).await,
        None => Err(unknown_store(id.0)),
    };
    Attempt { index, id, name, written }
}

impl Sent {
    fn is_waiting(&self) -> bool {
        self.stored_at.is_none() && !self.asked.is_empty()
    }

    /// Whether every store that is asked has been since before this turn of the timer.
    fn is_late(&self, turn: u32) -> bool {
        self.is_waiting() && self.asked.iter().all(|(_, since)| *since < turn)
    }
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
        let (mut free, begun) = (VecDeque::from(free), self.clock.now());
        let mut sent = vec![Sent::default(); image.fragments.len()];
        let (mut writing, mut failure) = (FuturesUnordered::new(), None);
        let begin = |index: usize, id: StoreId, one: &mut Sent, turn: u32| {
            one.asked.push((id, turn));
            let (name, parts) = (image.name(segment, index), image.fragments[index].parts());
            attempt(self.member(id.0), index, id, name, parts)
        };
        // Set once enough others are stored to compare with.
        let (mut patience, mut turn) = (None, 0);
        let mut timer = pin!(tokio::time::sleep(PATIENCE_MIN));
        loop {
            // At first, when one has failed, and when a store is free again because another one was faster.
            for (index, one) in sent.iter_mut().enumerate() {
                if one.stored_at.is_none()
                    && one.asked.is_empty()
                    && let Some(id) = free.pop_front()
                {
                    writing.push(begin(index, id, one, turn));
                }
            }
            if !sent.iter().any(Sent::is_waiting) {
                break;
            }
            let next = tokio::select! {
                biased;
                attempt = writing.next() => attempt,
                () = &mut timer, if patience.is_some() && !free.is_empty() => {
                    for (index, one) in sent.iter_mut().enumerate() {
                        if one.is_late(turn)
                            && let Some(id) = free.pop_front()
                        {
                            self.note_late(&one.asked);
                            writing.push(begin(index, id, one, turn));
                        }
                    }
                    turn += 1;
                    timer.set(tokio::time::sleep(patience.unwrap_or_default()));
                    continue;
                }
            };
            let Some(Attempt { index, id, name, written }) = next else { break };
            let one = &mut sent[index];
            one.asked.retain(|(asked, _)| *asked != id);
            match written {
                Ok(()) if one.stored_at.is_some() => self.strays.add(id.0, name),
                Ok(()) => {
                    one.stored_at = Some(id);
                    // What they get of this fragment is a stray, and they may get another one.
                    free.extend(one.asked.iter().map(|(id, _)| *id));
                    self.counters.writes.fetch_add(1, Ordering::Relaxed);
                    let bytes = image.fragments[index].bytes();
                    self.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                    let stored = sent.iter().filter(|one| one.stored_at.is_some()).count();
                    if stored == image.scheme.data() && !seeded_bugs().late_store_awaited {
                        let taken = self.clock.since(begun);
                        let rest = (taken * PATIENCE_FACTOR).max(PATIENCE_MIN);
                        turn += 1;
                        timer.set(tokio::time::sleep(rest));
                        patience = Some(rest);
                    }
                }
                Err(error) => {
                    tracing::debug!(
                        store = id.0,
                        fragment = %name,
                        error = %error,
                        "could not write a fragment; another store gets it if there is one"
                    );
                    failure = Some(error);
                    // It may arrive after all.
                    self.strays.add(id.0, name);
                }
            }
        }
        if !writing.is_empty() {
            let strays = Arc::clone(&self.strays);
            // Each ends in a limited time, and its store is passed over meanwhile, so they are few.
            tokio::spawn(async move {
                while let Some(Attempt { id, name, .. }) = writing.next().await {
                    strays.add(id.0, name);
                }
            });
        }
        let place = |one: &Sent| one.stored_at.map_or(Fragments::NOWHERE, |id| id.0);
        (sent.iter().map(place).collect(), failure)
    }

    /// Notes that these stores are late with a fragment: others get later ones first for a while.
    fn note_late(&self, stores: &[(StoreId, u32)]) {
        self.counters.hedged_writes.fetch_add(1, Ordering::Relaxed);
        for member in stores.iter().filter_map(|(id, _)| self.member(id.0)) {
            if member.health().note_late_write() {
                tracing::info!(store = member.name, "a data store is late with a fragment");
            }
        }
    }
}
