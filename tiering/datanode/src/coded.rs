//! Segments in fragments over several stores.
//!
//! Invariants:
//! - A placement is returned once every fragment that it names is on stable storage, on stores of distinct
//!   failure domains. It lacks fragments only while stores have failed for long, and has at least one more
//!   than are needed to read the segment; with a single parity fragment, as many as are needed.
//! - A range of a lost fragment is decoded from the same range of others. If too few are left, the read
//!   fails with the error of a store.
//! - A segment whose stores are all those of another pool is an object: the pool was restored from a copy.
//! - A segment that is an object, too, is read from there if too few of its fragments can be had.

mod health;
mod hedges;
mod image;
mod member;
mod reading;
mod rebalancing;
mod rebuilding;
mod room;
mod slow;
mod strays;
mod tiers;
mod writing;

use crate::fragment_store::{FragmentName, FragmentStore, ListedFragment, Room};
use crate::placing::{StoreId, StoreInfo, Weighed, candidates};
use crate::seeded_bugs::seeded_bugs;
use block::conditions::Report;
use block::env::Clock;
use block::{ConditionKind, Conditions};
use bytes::Bytes;
use erasure::fragment::FragmentOwner;
use erasure::{Pattern, Scheme};
use futures::stream::{BoxStream, FuturesUnordered};
use futures::{StreamExt, TryStreamExt};
use health::Way;
use hedges::Hedges;
use image::CodedImage;
use member::Member;
use object_store::{Error, Result};
use parking_lot::{Mutex, RwLock};
use reading::Coded;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use strays::Strays;
use tiering::listing::OBJECT_COUNT_MAX;
use tiering::segment::{
    FragmentPlace, Fragments, Placement, SealedSegment, SegmentInfo, SegmentName, SegmentNumber,
    StoredSegment,
};
use tiering::segment_store::{
    Depth, Leftover, Listed, Misplaced, ObjectSegments, Rebuilt, RedundancyOf, SegmentStore,
    StoredFragment,
};

/// Loss patterns whose tables are kept. Chosen by hand: those of one lost store, with any place in the
/// scheme and a few choices of others; 700 bytes each.
const PATTERNS_MAX: usize = 1024;

/// A store of fragments of a pool.
#[derive(Clone, Debug)]
pub struct NamedStore {
    /// What the choice of stores knows of it.
    pub info: StoreInfo,
    /// Its URL, for people.
    pub name: String,
    /// The store.
    pub store: Arc<dyn FragmentStore>,
    /// Requests at a time. Few for a directory: each keeps a thread while its drive hangs.
    pub width: usize,
}

/// Everything that the segments of a pool in fragments depend on.
#[derive(Debug)]
pub struct CodedOptions {
    /// Identity of the pool.
    pub pool: [u8; 16],
    /// Scheme of new segments.
    pub scheme: Scheme,
    /// The stores, with those that get no new fragments.
    pub stores: Vec<NamedStore>,
    /// Segments that are not in fragments, and those that are objects, too.
    pub objects: ObjectSegments,
    /// New segments are objects, and segments that are objects, too, are to be only that: the stores are to be empty.
    pub is_emptying: bool,
    /// Time for pauses and latencies. Timers are tokio's.
    pub clock: Arc<dyn Clock>,
    /// Registry for stores that are away.
    pub conditions: Conditions,
    /// Time for which a store must have failed before a segment goes without the fragment that it would get.
    /// Until then the write fails, and its caller tries again.
    pub debt_after: Duration,
    /// Time after which a store that is away counts as lost: its fragments are rebuilt elsewhere.
    pub lost_after: Duration,
}

/// The state of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreState {
    /// The store.
    pub info: StoreInfo,
    /// Its URL.
    pub name: String,
    /// The cause of the last failure, while it fails.
    pub failure: Option<String>,
    /// Its reads do not fail.
    pub is_readable: bool,
    /// It takes new fragments: it stays, and neither its reads nor its writes fail.
    pub is_taking: bool,
    /// Its fragments stay there: it is in use, and not lost.
    pub is_staying: bool,
    /// Why others are asked first although it works: its answers are late.
    pub lateness: Option<String>,
    /// It has been away for so long that its fragments are rebuilt elsewhere.
    pub is_lost: bool,
    /// Time since it was last asked to take a fragment; the longest time if it never was.
    pub quiet_for: Duration,
    /// Its room, as it was last told.
    pub room: Option<Room>,
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
    /// Reads that were tried another way because the answer was late.
    pub hedged_reads: u64,
    /// Reads of the object of a segment in fragments, too few of which were had.
    pub object_reads: u64,
    /// Fragments written.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Fragments for which no store was left.
    pub missing_writes: u64,
    /// Fragments that another store was asked to take, too, because one was late.
    pub hedged_writes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    degraded_reads: AtomicU64,
    hedged_reads: AtomicU64,
    object_reads: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    missing_writes: AtomicU64,
    hedged_writes: AtomicU64,
}

/// The stores by their numbers.
type Members = BTreeMap<StoreId, Arc<Member>>;

/// Segments in fragments; see the module.
#[derive(Debug)]
pub struct CodedSegments {
    pool: [u8; 16],
    scheme: Scheme,
    /// Replaced as a whole when a store is added.
    stores: RwLock<Arc<Members>>,
    clock: Arc<dyn Clock>,
    lost_after: Duration,
    /// Segments that are objects: written before the pool had stores of fragments, read from a copy, or in this tier.
    objects: ObjectSegments,
    is_emptying: bool,
    /// A segment in fragments may be an object, too, whatever its placement says.
    may_be_both: AtomicBool,
    /// Fragments are to be moved to where they would be if their segments were written now.
    is_rebalancing: AtomicBool,
    conditions: Conditions,
    debt_after: Duration,
    patterns: Mutex<HashMap<PatternKey, Arc<Pattern>>>,
    strays: Arc<Strays>,
    counters: Counters,
    hedges: Hedges,
}

impl CodedSegments {
    /// Makes the store of a pool's segments.
    #[must_use]
    pub fn new(options: CodedOptions) -> CodedSegments {
        let CodedOptions { pool, scheme, stores, objects, clock, .. } = options;
        let CodedOptions { conditions, debt_after, lost_after, is_emptying, .. } = options;
        let member = |named: NamedStore| {
            (named.info.id, Arc::new(Member::new(named, Arc::clone(&clock), lost_after)))
        };
        let stores: Members = stores.into_iter().map(member).collect();
        CodedSegments {
            pool,
            scheme,
            stores: RwLock::new(Arc::new(stores)),
            clock,
            lost_after,
            objects,
            is_emptying,
            may_be_both: AtomicBool::new(false),
            is_rebalancing: AtomicBool::new(false),
            conditions,
            debt_after,
            patterns: Mutex::default(),
            strays: Arc::default(),
            counters: Counters::default(),
            hedges: Hedges::default(),
        }
    }

    /// Looks at every store, and shows those that are away, slow, nearly full or wearing out as conditions. To be called
    /// every few seconds.
    pub async fn look(&self) {
        let may_rise = !self.is_rebalancing.load(Ordering::Relaxed);
        let looks = self.in_list().into_iter().map(|member| async move {
            // One that is away may answer for another file system.
            if member.look().await.is_ok() {
                member.ask_room(may_rise).await;
            }
            let failure = member.health().failure();
            let report = failure.map(|why| {
                let what = format!("the data store {} fails: {why}", member.name);
                let cost = "reads of its fragments are decoded from those of other stores, and new ones go elsewhere \
                            or are missing";
                Report::new(what, cost, "bring the store back, or replace it with `spindle data replace`")
            });
            let report = report.filter(|_| !member.is_forgotten());
            self.conditions.set(ConditionKind::DataStoreAway, &member.name, report);
        });
        futures::future::join_all(looks).await;
        self.show_slow();
        self.show_rooms();
    }

    /// Forgets a store that gets no fragments, and that no segment names any more: it is neither shown nor listed.
    pub fn forget(&self, id: StoreId) {
        if let Some(member) = self.stores().get(&id) {
            member.forget();
            for kind in [
                ConditionKind::DataStoreAway,
                ConditionKind::DataStoreSlow,
                ConditionKind::DataStoreFull,
                ConditionKind::DataStoreWearing,
            ] {
                self.conditions.set(kind, &member.name, None);
            }
        }
    }

    /// Adds a store, which gets fragments from now on. One of the same number is replaced if it was forgotten, and
    /// otherwise stays as it is.
    pub fn add(&self, store: NamedStore) {
        let mut stores = self.stores.write();
        let id = store.info.id;
        if stores.get(&id).is_none_or(|member| member.is_forgotten()) {
            let member = Member::new(store, Arc::clone(&self.clock), self.lost_after);
            let mut more = Members::clone(&stores);
            more.insert(id, Arc::new(member));
            *stores = Arc::new(more);
        }
    }

    /// Sets the share of new fragments of a store. With 0 it gets none from now on, except those that are being
    /// written, and a rebuild moves those that it has.
    pub fn set_weight(&self, id: StoreId, weight: u32) {
        if let Some(member) = self.stores().get(&id) {
            member.set_weight(weight);
        }
    }

    /// Sets the failure domain of a store. A rebuild moves fragments of a segment that share one from now on.
    pub fn set_domain(&self, id: StoreId, domain: &str) {
        if let Some(member) = self.stores().get(&id) {
            member.set_domain(domain);
        }
    }

    /// Notes whether fragments are to be moved to where they would be if their segments were written now. Meanwhile no
    /// store gets a larger part of its share because its room grows.
    pub fn set_rebalancing(&self, is_rebalancing: bool) {
        self.is_rebalancing.store(is_rebalancing, Ordering::Relaxed);
    }

    /// The stores as they are now.
    fn stores(&self) -> Arc<Members> {
        Arc::clone(&self.stores.read())
    }

    /// The stores that were not forgotten.
    fn in_list(&self) -> Vec<Arc<Member>> {
        self.stores().values().filter(|member| !member.is_forgotten()).cloned().collect()
    }

    /// The states of the stores, in the order of their numbers.
    #[must_use]
    pub fn states(&self) -> Vec<StoreState> {
        let state = |member: &Arc<Member>| {
            let health = member.health();
            let is_readable = !health.is_failing(Way::Read);
            let is_staying = self.stays(&FragmentPlace { store: member.id.0, generation: 0 });
            StoreState {
                info: member.info(),
                name: member.name.clone(),
                failure: health.failure(),
                is_readable,
                is_taking: is_staying && is_readable && !health.is_failing(Way::Write),
                is_staying,
                lateness: health.lateness(),
                is_lost: member.is_lost(),
                quiet_for: member.quiet_for(),
                room: member.room(),
            }
        };
        self.in_list().iter().map(state).collect()
    }

    /// Scheme of new segments.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the counts.
    #[must_use]
    pub fn counts(&self) -> CodedCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CodedCounts {
            reads: load(&self.counters.reads),
            degraded_reads: load(&self.counters.degraded_reads),
            hedged_reads: load(&self.counters.hedged_reads),
            object_reads: load(&self.counters.object_reads),
            writes: load(&self.counters.writes),
            written_bytes: load(&self.counters.written_bytes),
            missing_writes: load(&self.counters.missing_writes),
            hedged_writes: load(&self.counters.hedged_writes),
        }
    }

    fn owner(&self, name: &SegmentName) -> FragmentOwner {
        let SegmentName { epoch, number, id } = *name;
        FragmentOwner { pool: self.pool, segment: id, epoch, number: number.0 }
    }

    fn member(&self, id: u32) -> Option<Arc<Member>> {
        self.stores.read().get(&StoreId(id)).cloned()
    }

    /// Whether none of the stores is of this pool.
    fn is_foreign(&self, placement: &Placement) -> bool {
        match placement {
            Placement::Object => false,
            Placement::Fragments(fragments) => {
                fragments.stores().all(|id| self.member(id).is_none())
            }
        }
    }

    /// The segment, if it is in fragments on stores of this pool.
    fn coded(&self, segment: &StoredSegment) -> Result<Option<Coded>> {
        self.coded_at(&segment.info.name(), &segment.placement)
    }

    fn coded_at(&self, name: &SegmentName, placement: &Placement) -> Result<Option<Coded>> {
        match self.is_foreign(placement) {
            true => Ok(None),
            false => Coded::of_placement(name, placement),
        }
    }

    /// The stores that may get fragments of a segment, the best first, and behind them those that were late, and those that
    /// are full or nearly so. Those that fail are among them, as the last ones, only if the others are fewer than
    /// `count_min`.
    fn candidates(&self, id: &[u8; 16], count_min: usize) -> Vec<StoreId> {
        let takes = |member: &&Arc<Member>| {
            !member.health().is_failing(Way::Read) && member.health().may_ask(Way::Write)
        };
        let stores = self.stores();
        let (take, failing): (Vec<_>, Vec<_>) = stores.values().partition(takes);
        let (late, well): (Vec<_>, Vec<_>) =
            take.into_iter().partition(|member| member.health().is_late_to_write());
        let has_room = |member: &&Arc<Member>| !member.level().is_last();
        let (well, full): (Vec<_>, Vec<_>) = well.into_iter().partition(has_room);
        let (late, late_full): (Vec<_>, Vec<_>) = late.into_iter().partition(has_room);
        let (mut chosen, mut domains) = (Vec::new(), BTreeSet::new());
        let working = [well, late, full, late_full].map(|members| (members, usize::MAX));
        for (members, count_min) in working.into_iter().chain([(failing, count_min)]) {
            if chosen.len() >= count_min {
                break;
            }
            // One that fails must not hide another one of its failure domain.
            let rest = members.iter().filter(|member| !domains.contains(&member.domain()));
            let weighed: Vec<Weighed> = rest.map(|member| member.weighed()).collect();
            chosen.extend(candidates(id, &weighed));
            let with_weight = members.iter().filter(|member| member.weight() > 0);
            domains.extend(with_weight.map(|member| member.domain()));
        }
        chosen
    }

    /// The number of failure domains with a store that takes fragments, or has failed to for a short while only.
    fn able_domains(&self) -> usize {
        let stores = self.stores();
        let able = stores.values().filter(|member| {
            let failing_for = member.health().failing_for();
            member.weight() > 0 && (failing_for.is_zero() || failing_for < self.debt_after)
        });
        able.map(|member| member.domain()).collect::<BTreeSet<_>>().len()
    }

    /// Writes the fragments of a segment, all of this generation. A store that fails is replaced by the next one.
    async fn write(&self, info: &SegmentInfo, object: Bytes, generation: u64) -> Result<Fragments> {
        let (owner, scheme) = (self.owner(&info.name()), self.scheme);
        let id = info.id;
        let coding = tokio::task::spawn_blocking(move || {
            CodedImage::new(scheme, generation, owner, &id, object)
        });
        let image = coding.await.map_err(|cause| Error::JoinError { source: cause })??;
        // What is read now must survive a later loss, if the scheme can make it so.
        let count_min = image.scheme.written_min();
        let count = image.scheme.fragments();
        let free = self.candidates(&info.id, count_min);
        let (stores, failure) = self.write_fragments(&image, &info.name(), free).await;
        let missing = stores.iter().filter(|store| **store == Fragments::NOWHERE).count();
        if count - missing < count_min
            || (missing > 0 && self.able_domains() >= count && !seeded_bugs().debt_at_once)
        {
            // The next attempt may put them elsewhere.
            for (index, store) in stores.iter().enumerate() {
                if *store != Fragments::NOWHERE {
                    self.strays.add(*store, image.name(&info.name(), index));
                }
            }
            return Err(failure.unwrap_or_else(|| too_few(image.scheme, count - missing)));
        }
        self.counters.missing_writes.fetch_add(missing as u64, Ordering::Relaxed);
        Ok(image.placement(stores))
    }

    /// Deletes these fragments. Tries all of them, whichever fail. Those on stores that are away are left to the
    /// sweep of a later owner: the deletion must not wait for a store that may never come back.
    async fn delete_all(&self, fragments: Vec<(u32, FragmentName)>) -> Result<()> {
        let mut deleting: FuturesUnordered<_> = fragments
            .into_iter()
            .filter_map(|(id, name)| Some((self.member(id)?, name)))
            .filter(|(member, _)| !member.health().is_failing(Way::Read))
            .map(|(member, name)| async move { member.delete(&name).await })
            .collect();
        let mut result = Ok(());
        while let Some(deleted) = deleting.next().await {
            result = result.and(deleted);
        }
        result
    }

    /// Lists the fragments that the stores have of a segment, as far as they answer.
    async fn find(&self, name: &SegmentName) -> Vec<(u32, FragmentName, u64)> {
        let mut found = Vec::new();
        for member in self.in_list() {
            let mut listing = member.list(Some(name), OBJECT_COUNT_MAX);
            while let Some(listed) = listing.next().await {
                match listed {
                    Ok(ListedFragment::Fragment(fragment, bytes)) => {
                        found.push((member.id.0, fragment, bytes));
                    }
                    Ok(ListedFragment::Foreign) => {}
                    Err(error) => {
                        tracing::debug!(store = member.name, %error, "could not list a data store");
                        break;
                    }
                }
            }
        }
        found
    }
}

fn unknown_store(id: u32) -> Error {
    let source = format!("store {id} of fragments is none of the pool").into();
    Error::Generic { store: "fragments", source }
}

/// The error for a segment that has no fragments.
fn not_coded() -> Error {
    Error::NotImplemented {
        operation: "read the fragments of a segment that is an object".to_owned(),
        implementer: "the data stores".to_owned(),
    }
}

fn too_few(scheme: Scheme, count: usize) -> Error {
    let source = format!(
        "a segment of {scheme} needs data stores in {} failure domains, and {count} take fragments now",
        scheme.fragments()
    );
    Error::Generic { store: "fragments", source: source.into() }
}

fn names(name: &SegmentName, fragments: &Fragments) -> Vec<(u32, FragmentName)> {
    let name = |(index, place): (usize, &FragmentPlace)| {
        let (generation, index) = (place.generation, u8::try_from(index).ok()?);
        Some((place.store, FragmentName { segment: *name, generation, index }))
    };
    fragments.places.iter().enumerate().filter_map(name).collect()
}

#[async_trait::async_trait]
impl SegmentStore for CodedSegments {
    async fn put(&self, segment: &SealedSegment) -> Result<Placement> {
        match self.is_emptying {
            true => self.objects.put(segment).await,
            false => {
                let written = self.write(&segment.info, segment.bytes.clone(), 1).await;
                written.map(|fragments| Placement::Fragments(Arc::new(fragments)))
            }
        }
    }

    async fn restore(&self, info: &SegmentInfo, object: Bytes) -> Result<Placement> {
        match self.is_emptying {
            true => self.objects.restore(info, object).await,
            false => {
                let written = self.write(info, object, 1).await;
                written.map(|fragments| Placement::Fragments(Arc::new(fragments)))
            }
        }
    }

    async fn replace(&self, segment: &StoredSegment, object: Bytes) -> Result<Placement> {
        let Some(coded) = self.coded(segment)? else {
            return self.objects.replace(segment, object).await;
        };
        let is_copied = coded.fragments.is_copied;
        if is_copied {
            self.put_object(&segment.info, object.clone()).await?;
        }
        // Beside what is left of it, on stores that take fragments now.
        let written = self.write(&segment.info, object, coded.next_generation()).await?;
        Ok(Placement::Fragments(Arc::new(Fragments { is_copied, ..written })))
    }

    async fn read(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        match self.coded(segment)? {
            None => self.objects.read(segment, range).await,
            Some(coded) => self.read_either(segment, &coded, range, false).await,
        }
    }

    async fn read_again(&self, segment: &StoredSegment, range: Range<u64>) -> Result<Bytes> {
        match self.coded(segment)? {
            None => self.objects.read_again(segment, range).await,
            Some(coded) => self.read_either(segment, &coded, range, true).await,
        }
    }

    async fn read_whole(&self, segment: &StoredSegment) -> Result<Bytes> {
        match self.coded(segment)? {
            None => self.objects.read_whole(segment).await,
            Some(coded) => {
                let whole = 0..u64::from(coded.cuts.image_bytes());
                self.read_either(segment, &coded, whole, false).await
            }
        }
    }

    async fn read_fragments(&self, segment: &StoredSegment) -> Result<Bytes> {
        match self.coded(segment)? {
            None => Err(not_coded()),
            Some(coded) => {
                self.read_range(&coded, 0..u64::from(coded.cuts.image_bytes()), true).await
            }
        }
    }

    async fn read_object(&self, segment: &StoredSegment) -> Result<Bytes> {
        self.objects.read_whole(segment).await
    }

    async fn put_object(&self, info: &SegmentInfo, object: Bytes) -> Result<()> {
        self.put_as_object(info, object).await
    }

    async fn put_fragments(
        &self,
        info: &SegmentInfo,
        object: Bytes,
        generation: u64,
    ) -> Result<Placement> {
        self.put_beside_object(info, object, generation).await
    }

    fn list_fragments(&self, store: Option<u32>) -> BoxStream<'static, Result<StoredFragment>> {
        self.list_stored(store)
    }

    async fn delete_fragment(&self, fragment: &StoredFragment) -> Result<()> {
        let StoredFragment { segment, index, place } = *fragment;
        let name = FragmentName { segment, generation: place.generation, index };
        self.delete_all(vec![(place.store, name)]).await
    }

    fn expect_objects(&self) {
        self.may_be_both.store(true, Ordering::Relaxed);
    }

    fn redundancy(&self, segment: &StoredSegment) -> Option<RedundancyOf> {
        self.redundancy_of(segment)
    }

    fn is_lost(&self, segment: &StoredSegment) -> bool {
        let Ok(Some(coded)) = self.coded(segment) else { return false };
        let is_there = |id: &u32| self.member(*id).is_some_and(|member| !member.is_lost());
        coded.fragments.stores().filter(is_there).count() < coded.scheme.data()
    }

    fn is_object(&self, segment: &StoredSegment) -> bool {
        matches!(segment.placement, Placement::Object) || self.is_foreign(&segment.placement)
    }

    async fn rebuild(&self, segment: &StoredSegment, depth: Depth) -> Result<Rebuilt> {
        match self.coded(segment)? {
            None => Ok(Rebuilt::default()),
            Some(coded) if self.is_leaving_tier(&coded.fragments) => {
                Ok(Rebuilt { is_unsure: true, ..Rebuilt::default() })
            }
            Some(coded) => self.rebuild_coded(&coded, depth).await,
        }
    }

    fn misplaced(&self, segment: &StoredSegment) -> Misplaced {
        match self.coded(segment) {
            Ok(Some(coded)) if !self.is_emptying => self.misplaced_of(&coded),
            Ok(_) | Err(_) => Misplaced::default(),
        }
    }

    async fn rebalance(&self, segment: &StoredSegment) -> Result<Rebuilt> {
        match self.coded(segment)? {
            Some(coded) if !self.is_emptying => self.rebalance_coded(&coded).await,
            Some(_) | None => Ok(Rebuilt::default()),
        }
    }

    async fn delete_moved(&self, segment: &StoredSegment, kept: &Placement) -> Result<()> {
        match self.coded(segment)? {
            None => Ok(()),
            Some(coded) => self.delete_places(&coded, kept).await,
        }
    }

    async fn size(&self, name: &SegmentName, placement: Option<&Placement>) -> Result<u64> {
        let Some(placement) = placement else {
            let found = self.find(name).await;
            return match found.is_empty() {
                true => self.objects.size(name, None).await,
                false => Ok(found.iter().map(|(_, _, bytes)| bytes).sum()),
            };
        };
        match self.coded_at(name, placement)? {
            None => self.objects.size(name, Some(placement)).await,
            Some(coded) => match self.size_of(&coded).await {
                Err(_) if coded.fragments.is_copied => {
                    self.objects.size(name, Some(placement)).await
                }
                size => size,
            },
        }
    }

    fn strays(&self) -> Vec<SegmentNumber> {
        self.strays.segments()
    }

    async fn delete_strays(&self, segment: &StoredSegment) -> Result<()> {
        match self.coded(segment)? {
            None => Ok(()),
            Some(coded) => self.delete_all(self.strays.take_unnamed(&coded)).await,
        }
    }

    async fn delete(&self, segment: &Leftover) -> Result<()> {
        // The map has forgotten the segment: nothing names it any more.
        let of_strays = self.delete_all(self.strays.take_all(&segment.name)).await;
        let deleted = match &segment.placement {
            Some(placement) if self.is_foreign(placement) => self.objects.delete(segment).await,
            Some(Placement::Fragments(fragments)) => {
                let deleted = self.delete_all(names(&segment.name, fragments)).await;
                match fragments.is_copied || self.may_be_both.load(Ordering::Relaxed) {
                    // Both, whichever fails.
                    true => self.objects.delete(segment).await.and(deleted),
                    false => deleted,
                }
            }
            // What it had in data stores has moved, and is deleted as such.
            Some(Placement::Object) => self.objects.delete(segment).await,
            None => {
                let found = self.find(&segment.name).await;
                self.delete_all(found.into_iter().map(|(id, name, _)| (id, name)).collect())
                    .await?;
                self.objects.delete(segment).await
            }
        };
        deleted.and(of_strays)
    }

    fn list(&self, count_max: u64) -> BoxStream<'static, Result<Listed>> {
        let listings = self.in_list().into_iter().map(|member| {
            let listing = member.list(None, count_max).map_ok(|listed| match listed {
                ListedFragment::Fragment(name, bytes) => {
                    Listed::Segment { name: name.segment, placement: None, bytes }
                }
                ListedFragment::Foreign => Listed::Foreign,
            });
            listing.boxed()
        });
        // What a store that is away has is found by the sweep of a later owner.
        let answered = listings.map(|listing| {
            let told = listing.inspect_err(|error: &Error| {
                tracing::debug!(%error, "could not list a data store");
            });
            told.filter(|listed| std::future::ready(listed.is_ok())).boxed()
        });
        let all: Vec<_> = answered.chain([self.objects.list(count_max)]).collect();
        futures::stream::iter(all).flatten().boxed()
    }

    async fn has_any(&self, look_count: u32) -> Result<bool> {
        for member in self.in_list() {
            if member.list(None, OBJECT_COUNT_MAX).try_next().await?.is_some() {
                return Ok(true);
            }
        }
        self.objects.has_any(look_count).await
    }
}

#[cfg(test)]
mod tests;
