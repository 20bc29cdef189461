//! The data stores: actors of the simulation that keep fragments, beyond a network that loses and delays.
//!
//! Invariants:
//! - A store refuses the requests of an owner once it has carried one out of a later owner. It keeps the
//!   newest epoch over restarts.
//! - A request without an answer may be carried out later, also when its sender has ended.
//! - A put changes no fragment that is there.
//! - Fragments are destroyed only while each segment has all of them, and while no owner still counts on
//!   a put from before the last such loss.

use crate::network::Network;
use crate::oracle::Oracle;
use crate::server::version_of;
use crate::tier::{Place, Record, Tier};
use block::{Epoch, Error, ErrorKind, Result};
use erasure::Scheme;
use erasure::codec;
use erasure::fragment::{Checksums, FragmentHeader, FragmentOwner, HEADER_BYTES};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Segments of an epoch at most.
pub(crate) const SEGMENTS_OF_EPOCH: u64 = 1_000_000;
/// Shortest and longest wait for an answer, in milliseconds. Chosen by hand.
const PATIENCE_MS: (u64, u64) = (300, 1500);
/// Longest time for which a request waits for a store that hangs or is cut off. Chosen by hand: above a
/// take-over.
const LATE_MAX: Duration = Duration::from_secs(6);

/// Returns the segment as fragments name it. It follows from the number, so that two owners make the same
/// bytes.
pub(crate) fn owner_of(number: u64) -> FragmentOwner {
    let mut segment = [0; 16];
    segment[..8].copy_from_slice(&number.to_le_bytes());
    FragmentOwner { pool: [7; 16], segment, epoch: Epoch(number / SEGMENTS_OF_EPOCH), number }
}

/// The name of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) number: u64,
    pub(crate) generation: u64,
    pub(crate) index: usize,
}

/// A request to a store.
pub(crate) enum Asked {
    Put(Name, Vec<u8>),
    /// A range of the payload. What is beyond its end is left out.
    Read(Name, Range<usize>),
    /// Whether a whole valid fragment is there.
    Check(Name),
    Delete(Name),
}

/// An answer: what verifies a range of a fragment. Empty if nothing was read.
#[derive(Default)]
pub(crate) struct Part {
    header: Vec<u8>,
    begin: usize,
    payload: Vec<u8>,
    trailer: Vec<u8>,
}

impl Part {
    /// Takes a range and what verifies it out of a fragment.
    fn of(fragment: &[u8], range: &Range<usize>) -> Result<Part> {
        let header = FragmentHeader::decode(fragment)?;
        if fragment.len() != header.fragment_bytes() {
            return Err(Error::new(ErrorKind::Corrupt, "read a fragment: it has another length"));
        }
        let bytes = header.payload_bytes();
        let checked = Checksums::checked(&(range.start.min(bytes)..range.end.min(bytes)), bytes);
        Ok(Part {
            header: fragment[..HEADER_BYTES].to_vec(),
            begin: checked.start,
            payload: fragment[header.range_of(&checked)].to_vec(),
            trailer: fragment[header.directory_range().start..].to_vec(),
        })
    }

    /// Verifies that it is of the fragment with this name, and as it was put.
    fn verify(&self, name: Name, bug: &str) -> Result<()> {
        let header = FragmentHeader::decode(&self.header)?;
        let index = u8::try_from(name.index).expect("a scheme has few fragments");
        let is_it = header.is_of(&owner_of(name.number), index, name.generation);
        if !is_it && bug != "stale-fragment-accepted" {
            return Err(Error::new(ErrorKind::Corrupt, "read a fragment: it is another one"));
        }
        let is_right = bug == "checksum-skipped"
            || header.checksums(&self.trailer)?.verify(self.begin, &self.payload);
        match is_right {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Corrupt, "read a fragment: it is damaged")),
        }
    }

    /// Returns the range, as far as the payload has it.
    fn range(&self, range: &Range<usize>) -> Vec<u8> {
        let place = |at: usize| at.saturating_sub(self.begin).min(self.payload.len());
        self.payload[place(range.start)..place(range.end)].to_vec()
    }
}

/// One store.
#[derive(Default)]
pub(crate) struct Store {
    fragments: BTreeMap<Name, Vec<u8>>,
    /// The newest epoch that it has seen.
    fence: Epoch,
    pub(crate) is_down: bool,
    pub(crate) is_hanging: bool,
    pub(crate) is_full: bool,
}

#[derive(Default)]
struct State {
    stores: Vec<Store>,
    /// Times that fragments were destroyed.
    loss_count: u64,
    /// Of each attempt that is under way, the losses before it began.
    attempts: BTreeMap<u64, u64>,
    attempt_count: u64,
}

/// The stores. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct Stores {
    pub(crate) network: Network,
    /// The scheme of the run's segments.
    pub(crate) scheme: Scheme,
    pub(crate) count: usize,
    /// Of the nodes, behind which the stores are in the network.
    node_count: usize,
    tier: Tier,
    oracle: Oracle,
    /// The bug that is seeded; empty for none.
    bug: Arc<str>,
    state: Arc<Mutex<State>>,
}

/// Puts that an owner counts on and has not committed. They end with its process.
pub(crate) struct Attempt {
    state: Arc<Mutex<State>>,
    id: u64,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.state.lock().attempts.remove(&self.id);
    }
}

impl Stores {
    pub(crate) fn new(network: &Network, tier: &Tier, oracle: &Oracle, nodes: usize) -> Stores {
        let world = &network.world;
        let (scheme, count) = match world.chance(50) {
            true => (Scheme::new(2, 1), 4 + world.below(3)),
            false => (Scheme::new(4, 2), 6 + world.below(2)),
        };
        let count = usize::try_from(count).expect("a few");
        let stores = (0..count).map(|_| Store::default()).collect();
        Stores {
            network: network.clone(),
            scheme: scheme.expect("it is one of the schemes"),
            count,
            node_count: nodes,
            tier: tier.clone(),
            oracle: oracle.clone(),
            bug: std::env::var("SPINDLE_SIM_BUG").unwrap_or_default().into(),
            state: Arc::new(Mutex::new(State { stores, ..State::default() })),
        }
    }

    /// Whether this bug is seeded.
    pub(crate) fn has_bug(&self, bug: &str) -> bool {
        *self.bug == *bug
    }

    /// The number of a store in the network.
    pub(crate) fn number(&self, store: usize) -> usize {
        self.node_count + store
    }

    pub(crate) fn change(&self, store: usize, change: impl FnOnce(&mut Store)) {
        change(&mut self.state.lock().stores[store]);
    }

    /// Brings all stores back.
    pub(crate) fn repair(&self) {
        for one in &mut self.state.lock().stores {
            (one.is_down, one.is_hanging, one.is_full) = (false, false, false);
        }
    }

    pub(crate) fn attempt(&self) -> Attempt {
        let mut state = self.state.lock();
        state.attempt_count += 1;
        let (id, losses) = (state.attempt_count, state.loss_count);
        state.attempts.insert(id, losses);
        Attempt { state: Arc::clone(&self.state), id }
    }

    /// Sends a request, and waits for its answer.
    pub(crate) async fn call(
        &self,
        (node, store): (usize, usize),
        epoch: Epoch,
        asked: Asked,
    ) -> Result<Part> {
        let world = &self.network.world;
        let (answer, answered) = oneshot::channel();
        world.spawn(self.clone().deliver((node, store), epoch, asked, answer));
        let patience = world.ms(PATIENCE_MS.0, PATIENCE_MS.1);
        let answered = tokio::select! {
            biased;
            answered = answered => answered.ok(),
            () = world.sleep(patience) => None,
        };
        let silent = || Err(Error::new(ErrorKind::Unavailable, "ask a store: it does not answer"));
        answered.unwrap_or_else(silent)
    }

    /// Sends a request, and waits for no answer.
    pub(crate) fn post(&self, (node, store): (usize, usize), epoch: Epoch, asked: Asked) {
        let (answer, _) = oneshot::channel();
        self.network.world.spawn(self.clone().deliver((node, store), epoch, asked, answer));
    }

    /// Reads a range of a fragment's payload, as far as it goes, and verifies it.
    pub(crate) async fn read(
        &self,
        (node, store): (usize, usize),
        epoch: Epoch,
        name: Name,
        range: &Range<usize>,
    ) -> Result<Vec<u8>> {
        let asked = Asked::Read(name, range.clone());
        let part = self.call((node, store), epoch, asked).await?;
        part.verify(name, &self.bug)?;
        Ok(part.range(range))
    }

    /// Brings a request to a store, and its answer back.
    async fn deliver(
        self,
        (node, store): (usize, usize),
        epoch: Epoch,
        asked: Asked,
        answer: oneshot::Sender<Result<Part>>,
    ) {
        let outcome = self.bring((node, store), epoch, asked).await;
        match outcome {
            Some(outcome) => {
                let _ = answer.send(outcome); // one that waits no more needs none
            }
            None => {
                // Silence, and no end of the channel, by which the sender would know.
                self.network.world.sleep(Duration::from_millis(PATIENCE_MS.1)).await;
                drop(answer);
            }
        }
    }

    async fn bring(
        &self,
        (node, store): (usize, usize),
        epoch: Epoch,
        asked: Asked,
    ) -> Option<Result<Part>> {
        let world = &self.network.world;
        if world.chance(2) {
            world.sleep(world.ms(500, 5000)).await;
        }
        let number = self.number(store);
        let until = world.now() + LATE_MAX;
        let mut has_come = self.network.pass(node, number).await;
        let is_kept = world.chance(60);
        while !has_come || self.state.lock().stores[store].is_hanging {
            if !is_kept || world.now() > until {
                return None;
            }
            world.sleep(world.ms(50, 400)).await;
            has_come = !self.network.is_cut(node, number);
        }
        if self.state.lock().stores[store].is_down {
            return None;
        }
        let outcome = self.carry_out(store, epoch, asked);
        self.network.pass(number, node).await.then_some(outcome)
    }

    /// Returns the name under which a store keeps a fragment.
    fn key(&self, name: Name) -> Name {
        match self.has_bug("stale-fragment-accepted") {
            true => Name { generation: 0, ..name },
            false => name,
        }
    }

    fn carry_out(&self, store: usize, epoch: Epoch, asked: Asked) -> Result<Part> {
        let mut state = self.state.lock();
        let one = &mut state.stores[store];
        if epoch < one.fence {
            if !self.has_bug("store-without-fence") {
                self.network.counts.add("requests fenced by stores");
                return Err(Error::new(ErrorKind::Fenced, "ask a store: it knows a later owner"));
            }
            if matches!(asked, Asked::Put(..) | Asked::Delete(_)) {
                let late = format!("store {store} takes a change of {epoch:?} after a later owner");
                self.oracle.fail(late);
            }
        }
        one.fence = one.fence.max(epoch);
        let missing = || Error::new(ErrorKind::NotFound, "ask a store: it has no such fragment");
        match asked {
            Asked::Put(name, bytes) => {
                let key = self.key(name);
                match one.fragments.get(&key) {
                    Some(found) if *found == bytes => {}
                    Some(_) => {
                        let what = "put a fragment: another one has its name";
                        return Err(Error::new(ErrorKind::Busy, what));
                    }
                    None if one.is_full => {
                        let what = "put a fragment: the store is full";
                        return Err(Error::new(ErrorKind::Full, what));
                    }
                    None => {
                        one.fragments.insert(key, bytes);
                    }
                }
                Ok(Part::default())
            }
            Asked::Read(name, range) => {
                let fragment = one.fragments.get(&self.key(name)).ok_or_else(missing)?;
                Part::of(fragment, &range)
            }
            Asked::Check(name) => {
                let fragment = one.fragments.get(&self.key(name)).ok_or_else(missing)?;
                Part::of(fragment, &(0..usize::MAX))?.verify(name, &self.bug)?;
                Ok(Part::default())
            }
            Asked::Delete(name) => {
                let places = self.tier.record(name.number).map(|record| record.places);
                let named = places.and_then(|places| places[name.index]);
                let named = named.filter(|place| place.store == store);
                let was_whole = named.is_some_and(|place| one.has(name.number, name.index, place));
                one.fragments.remove(&self.key(name));
                if was_whole && !named.is_some_and(|place| one.has(name.number, name.index, place))
                {
                    let what = format!("store {store} deletes {name:?}, which a record names");
                    self.oracle.fail(what);
                }
                Ok(Part::default())
            }
        }
    }

    /// Looks at all fragments that the metadata names. Returns what is wrong with one of them.
    pub(crate) fn wrong(&self) -> Option<String> {
        let state = self.state.lock();
        for record in self.tier.records() {
            for (index, place) in record.places.iter().enumerate() {
                let is_right =
                    place.is_some_and(|at| state.stores[at.store].has(record.number, index, at));
                if !is_right {
                    let number = record.number;
                    return Some(format!("segment {number} has no fragment {index} at {place:?}"));
                }
            }
        }
        None
    }

    /// Decodes all segments, without as many data fragments as can be lost. Returns what is wrong with one.
    pub(crate) fn misread(&self) -> Option<String> {
        let misread = |record: &Record| match self.image(record) {
            Ok(image) => {
                let blocks = self.tier.blocks_of(record.number);
                let wrong = blocks.iter().find(|(block, at)| {
                    let at = *at as usize;
                    version_of(*block, &image[at..at + 512]).is_none()
                });
                wrong.map(|(block, _)| format!("segment {} has not {block}", record.number))
            }
            Err(error) => Some(format!("segment {}: {}", record.number, error.chain())),
        };
        self.tier.records().iter().find_map(misread)
    }

    fn image(&self, record: &Record) -> Result<Vec<u8>> {
        let state = self.state.lock();
        let payload = |index: usize| {
            let place = record.places[index]?;
            let one = &state.stores[place.store];
            let fragment = one.fragment(record.number, index, place)?;
            Some(Part::of(fragment, &(0..usize::MAX)).ok()?.payload)
        };
        let fragments = record.scheme.fragments();
        let payloads: Vec<Option<Vec<u8>>> = (0..fragments)
            .map(|index| if index < record.scheme.parity() { None } else { payload(index) })
            .collect();
        let found: Vec<Option<&[u8]>> = payloads.iter().map(Option::as_deref).collect();
        let wanted: Vec<usize> = (0..record.scheme.data()).collect();
        Ok(codec::rebuild(record.scheme, &record.cuts, &found, &wanted)?.concat())
    }

    /// Whether a loss of fragments is one that has to be survived.
    pub(crate) fn may_lose(&self) -> bool {
        let is_whole = self.wrong().is_none();
        let state = self.state.lock();
        is_whole && state.attempts.values().all(|losses| *losses == state.loss_count)
    }

    /// Removes all fragments of a store. The fence stays: the newest owner is the first to open a new drive.
    pub(crate) fn empty(&self, store: usize) {
        let mut state = self.state.lock();
        state.loss_count += 1;
        state.stores[store].fragments.clear();
    }

    /// Flips a bit of a fragment that the metadata names, if there is one.
    pub(crate) fn flip(&self) -> bool {
        let world = &self.network.world;
        let any = |count: usize| usize::try_from(world.below(count as u64)).expect("an index");
        let records = self.tier.records();
        if records.is_empty() {
            return false;
        }
        let record = &records[any(records.len())];
        let index = any(record.places.len());
        let Some(place) = record.places[index] else { return false };
        let mut state = self.state.lock();
        state.loss_count += 1;
        let name = Name { number: record.number, generation: place.generation, index };
        let key = self.key(name);
        let fragments = &mut state.stores[place.store].fragments;
        let Some(fragment) = fragments.get_mut(&key) else { return false };
        // More often in the payload, if there is one.
        let payload = HEADER_BYTES..fragment.len() - 4;
        let at = match world.chance(80) && !payload.is_empty() {
            true => payload.start + any(payload.len()),
            false => any(fragment.len()),
        };
        fragment[at] ^= 1u8 << world.below(8);
        true
    }
}

impl Store {
    fn fragment(&self, number: u64, index: usize, place: Place) -> Option<&Vec<u8>> {
        let name = Name { number, generation: place.generation, index };
        // Under the second name by the bug that leaves generations out.
        self.fragments.get(&name).or_else(|| self.fragments.get(&Name { generation: 0, ..name }))
    }

    /// Whether it has this fragment, whole and valid, whatever bug is seeded.
    fn has(&self, number: u64, index: usize, place: Place) -> bool {
        let name = Name { number, generation: place.generation, index };
        let fragment = self.fragment(number, index, place);
        let part = fragment.map(|fragment| Part::of(fragment, &(0..usize::MAX)));
        matches!(part, Some(Ok(part)) if part.verify(name, "").is_ok())
    }
}
