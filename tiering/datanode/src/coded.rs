//! Segments in fragments over several stores.
//!
//! Invariants:
//! - A placement is returned once every fragment that it names is on stable storage, on stores of distinct
//!   failure domains, and at least one more than are needed to read the segment.
//! - A range of a lost fragment is decoded from the same range of others. If too few are left, the read
//!   fails with the error of a store.

mod image;
mod reading;

use crate::fragment_store::{FragmentName, FragmentStore, ListedFragment};
use crate::placing::{StoreId, StoreInfo, candidates};
use bytes::Bytes;
use erasure::fragment::FragmentOwner;
use erasure::{Pattern, Scheme};
use futures::stream::{BoxStream, FuturesUnordered};
use futures::{StreamExt, TryStreamExt};
use image::CodedImage;
use object_store::{Error, Result};
use parking_lot::Mutex;
use reading::Coded;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tiering::listing::OBJECT_COUNT_MAX;
use tiering::segment::{
    Fragments, Placement, SealedSegment, SegmentInfo, SegmentName, StoredSegment,
};
use tiering::segment_store::{Leftover, Listed, ObjectSegments, SegmentStore};

/// Loss patterns whose tables are kept. Chosen by hand: those of one lost store, with any place in the
/// scheme and a few choices of others; 700 bytes each.
const PATTERNS_MAX: usize = 1024;

/// A store of fragments, and what the choice of stores knows of it.
#[derive(Clone, Debug)]
struct Member {
    info: StoreInfo,
    store: Arc<dyn FragmentStore>,
}

/// A loss pattern: the scheme, the lost fragment, and those that are read instead.
type PatternKey = (Scheme, usize, Vec<usize>);

/// Numbers of reads and writes since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodedCounts {
    /// Requests for ranges of fragments.
    pub reads: u64,
    /// Reads whose fragment was not had, and was decoded from others.
    pub degraded_reads: u64,
    /// Fragments written.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Fragments for which no store was left.
    pub missing_writes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    degraded_reads: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    missing_writes: AtomicU64,
}

/// Segments in fragments; see the module.
#[derive(Debug)]
pub struct CodedSegments {
    pool: [u8; 16],
    scheme: Scheme,
    stores: BTreeMap<StoreId, Member>,
    /// Segments that are objects: written before the pool had stores of fragments.
    objects: ObjectSegments,
    patterns: Mutex<HashMap<PatternKey, Arc<Pattern>>>,
    counters: Counters,
}

impl CodedSegments {
    /// Makes the store of a pool's segments. `objects` has those that are not in fragments.
    #[must_use]
    pub fn new(
        pool: [u8; 16],
        scheme: Scheme,
        stores: Vec<(StoreInfo, Arc<dyn FragmentStore>)>,
        objects: ObjectSegments,
    ) -> CodedSegments {
        let stores = stores.into_iter().map(|(info, store)| (info.id, Member { info, store }));
        CodedSegments {
            pool,
            scheme,
            stores: stores.collect(),
            objects,
            patterns: Mutex::default(),
            counters: Counters::default(),
        }
    }

    /// Returns the counts.
    #[must_use]
    pub fn counts(&self) -> CodedCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CodedCounts {
            reads: load(&self.counters.reads),
            degraded_reads: load(&self.counters.degraded_reads),
            writes: load(&self.counters.writes),
            written_bytes: load(&self.counters.written_bytes),
            missing_writes: load(&self.counters.missing_writes),
        }
    }

    fn owner(&self, name: &SegmentName) -> FragmentOwner {
        let SegmentName { epoch, number, id } = *name;
        FragmentOwner { pool: self.pool, segment: id, epoch, number: number.0 }
    }

    fn member(&self, id: u32) -> Option<&Member> {
        self.stores.get(&StoreId(id))
    }

    /// Writes the fragments of a segment. A store that fails is replaced by the next one.
    async fn write(&self, info: &SegmentInfo, object: Bytes) -> Result<Placement> {
        let (owner, scheme) = (self.owner(&info.name()), self.scheme);
        let id = info.id;
        let coding =
            tokio::task::spawn_blocking(move || CodedImage::new(scheme, owner, &id, object));
        let image = coding.await.map_err(|cause| Error::JoinError { source: cause })??;
        let infos: Vec<StoreInfo> =
            self.stores.values().map(|member| member.info.clone()).collect();
        let mut free = candidates(&info.id, &infos).into_iter();
        let count = image.fragments.len();
        let mut stores = vec![Fragments::NOWHERE; count];
        let mut failure = None;
        let mut writing = FuturesUnordered::new();
        let begin = |index: usize, id: StoreId| {
            let name = image.name(&info.name(), index);
            let (member, parts) = (self.member(id.0), image.fragments[index].parts());
            async move {
                let written = match member {
                    Some(member) => member.store.put(&name, parts).await,
                    None => Err(unknown_store(id.0)),
                };
                (index, id, written)
            }
        };
        for index in 0..count {
            if let Some(id) = free.next() {
                writing.push(begin(index, id));
            }
        }
        while let Some((index, id, written)) = writing.next().await {
            match written {
                Ok(()) => {
                    stores[index] = id.0;
                    self.counters.writes.fetch_add(1, Ordering::Relaxed);
                    let bytes = image.fragments[index].bytes();
                    self.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(error) => {
                    tracing::warn!(
                        store = id.0,
                        fragment = %image.name(&info.name(), index),
                        error = %error,
                        "could not write a fragment; another store gets it if there is one"
                    );
                    failure = Some(error);
                    if let Some(id) = free.next() {
                        writing.push(begin(index, id));
                    }
                }
            }
        }
        drop(writing);
        let missing = stores.iter().filter(|store| **store == Fragments::NOWHERE).count();
        if count - missing < image.scheme.data() + 1 {
            return Err(failure.unwrap_or_else(|| too_few(image.scheme, self.stores.len())));
        }
        self.counters.missing_writes.fetch_add(missing as u64, Ordering::Relaxed);
        Ok(Placement::Fragments(Arc::new(image.placement(stores))))
    }

    /// Deletes these fragments. Tries all of them, whichever fail.
    async fn delete_all(&self, fragments: Vec<(u32, FragmentName)>) -> Result<()> {
        let mut deleting: FuturesUnordered<_> = fragments
            .into_iter()
            .filter_map(|(id, name)| Some((self.member(id)?, name)))
            .map(|(member, name)| async move { member.store.delete(&name).await })
            .collect();
        let mut result = Ok(());
        while let Some(deleted) = deleting.next().await {
            result = result.and(deleted);
        }
        result
    }

    /// Lists the fragments that the stores have of a segment.
    async fn find(&self, name: &SegmentName) -> Result<Vec<(u32, FragmentName, u64)>> {
        let mut found = Vec::new();
        for (id, member) in &self.stores {
            let mut listing = member.store.list(Some(name), OBJECT_COUNT_MAX);
            while let Some(listed) = listing.try_next().await? {
                if let ListedFragment::Fragment(fragment, bytes) = listed {
                    found.push((id.0, fragment, bytes));
                }
            }
        }
        Ok(found)
    }
}

fn unknown_store(id: u32) -> Error {
    let source = format!("store {id} of fragments is none of the pool").into();
    Error::Generic { store: "fragments", source }
}

fn too_few(scheme: Scheme, count: usize) -> Error {
    let source = format!(
        "{scheme} needs stores in {} failure domains, and there are {count} stores",
        scheme.fragments()
    );
    Error::Generic { store: "fragments", source: source.into() }
}

fn names(name: &SegmentName, fragments: &Fragments) -> Vec<(u32, FragmentName)> {
    let generation = fragments.generation;
    let name = |(index, id): (usize, &u32)| {
        Some((*id, FragmentName { segment: *name, generation, index: u8::try_from(index).ok()? }))
    };
    fragments.stores.iter().enumerate().filter_map(name).collect()
}

#[async_trait::async_trait]
impl SegmentStore for CodedSegments {
    async fn put(&self, segment: &SealedSegment) -> Result<Placement> {
        self.write(&segment.info, segment.bytes.clone()).await
    }

    async fn restore(&self, info: &SegmentInfo, object: Bytes) -> Result<Placement> {
        self.write(info, object).await
    }

    async fn replace(&self, segment: &StoredSegment, object: Bytes) -> Result<Placement> {
        match Coded::of(segment)? {
            None => self.objects.replace(segment, object).await,
            Some(coded) => {
                self.write_again(&coded, object).await?;
                Ok(segment.placement.clone())
            }
        }
    }

    async fn read(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        match Coded::of(segment)? {
            None => self.objects.read(segment, range).await,
            Some(coded) => self.read_range(&coded, range, false).await,
        }
    }

    async fn read_again(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        match Coded::of(segment)? {
            None => self.objects.read_again(segment, range).await,
            Some(coded) => self.read_range(&coded, range, true).await,
        }
    }

    async fn read_whole(&self, segment: &StoredSegment) -> Result<Bytes> {
        match Coded::of(segment)? {
            None => self.objects.read_whole(segment).await,
            Some(coded) => self.read_image(&coded).await,
        }
    }

    async fn size(&self, name: &SegmentName, placement: Option<&Placement>) -> Result<u64> {
        let Some(placement) = placement else {
            let found = self.find(name).await?;
            return match found.is_empty() {
                true => self.objects.size(name, None).await,
                false => Ok(found.iter().map(|(_, _, bytes)| bytes).sum()),
            };
        };
        match Coded::of_placement(name, placement)? {
            None => self.objects.size(name, Some(placement)).await,
            Some(coded) => self.size_of(&coded).await,
        }
    }

    async fn delete(&self, segment: &Leftover) -> Result<()> {
        match &segment.placement {
            Some(Placement::Fragments(fragments)) => {
                self.delete_all(names(&segment.name, fragments)).await
            }
            Some(Placement::Object) => self.objects.delete(segment).await,
            None => {
                let found = self.find(&segment.name).await?;
                self.delete_all(found.into_iter().map(|(id, name, _)| (id, name)).collect())
                    .await?;
                self.objects.delete(segment).await
            }
        }
    }

    fn list(&self, count_max: u64) -> BoxStream<'static, Result<Listed>> {
        let listings = self.stores.values().map(|member| {
            let listing = member.store.list(None, count_max).map_ok(|listed| match listed {
                ListedFragment::Fragment(name, bytes) => {
                    Listed::Segment { name: name.segment, placement: None, bytes }
                }
                ListedFragment::Foreign => Listed::Foreign,
            });
            listing.boxed()
        });
        let all: Vec<_> = listings.chain([self.objects.list(count_max)]).collect();
        futures::stream::iter(all).flatten().boxed()
    }

    async fn has_any(&self, look_count: u32) -> Result<bool> {
        for member in self.stores.values() {
            if member.store.list(None, OBJECT_COUNT_MAX).try_next().await?.is_some() {
                return Ok(true);
            }
        }
        self.objects.has_any(look_count).await
    }
}

#[cfg(test)]
mod tests;
