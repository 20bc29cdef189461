//! A simulation: stores that fail in every way, bit flips, old contents that come back, owners that end in the middle
//! of a move. What the stores really hold decides which answer is right.
//!
//! Invariants that are demanded:
//! - A read returns the right bytes or an error. It returns the bytes whenever enough fragments are on stores that
//!   work, and says that the segment is gone only if that is so.
//! - What a placement names newly is stored and whole, in failure domains of its own.
//! - Once the stores work, every segment gets all its fragments back, and survives the loss of any stores up to its
//!   parity.

use super::*;
use erasure::fragment::FragmentHeader;
use tiering::testing::seeds;

/// Steps of a seed.
const STEPS: u64 = 120;
/// Segments at a time.
const SEGMENTS_MAX: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Well,
    Away,
    Hanging,
    /// It takes no writes.
    Full,
    /// A third of the requests fail, some of which are carried out.
    Flaky,
    /// It takes fragments after three seconds.
    Late,
}

struct Segment {
    sealed: SealedSegment,
    frames: Vec<FrameAt>,
    /// The record in the map.
    stored: StoredSegment,
}

/// What happened, to show that the simulation reaches all of it.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    puts: u64,
    refused_puts: u64,
    reads: u64,
    decoded_reads: u64,
    unreadable: u64,
    rebuilt: u64,
    dropped_moves: u64,
    flips: u64,
    returns: u64,
    restarts: u64,
    hedged_writes: u64,
    strays: u64,
}

struct Simulation {
    world: World,
    scheme: Scheme,
    rng: Rng,
    states: Vec<State>,
    segments: Vec<Segment>,
    /// Segments as they were before they moved.
    moved: Vec<(usize, StoredSegment)>,
    next_number: u64,
    seen: Seen,
}

impl Simulation {
    async fn new(seed: u64) -> Simulation {
        let mut rng = Rng::new(seed);
        let scheme = ["1+1", "2+1", "4+2"][rng.below(3) as usize];
        let scheme_of: Scheme = scheme.parse().expect("a scheme");
        let count = scheme_of.fragments() + rng.below(3) as usize;
        let world = world(scheme, count).await;
        Simulation {
            world,
            scheme: scheme_of,
            rng,
            states: vec![State::Well; count],
            segments: Vec::new(),
            moved: Vec::new(),
            next_number: 1,
            seen: Seen::default(),
        }
    }

    fn set_state(&mut self, number: usize, state: State) {
        let store = &self.world.stores[number];
        store.heal();
        store.set_hang_time(Duration::from_secs(if state == State::Late { 3 } else { 60 }));
        let every = |answer| Rule { op: None, ..Rule::for_good(Op::Get, "", answer) };
        match state {
            State::Well => {}
            State::Away => store.add(every(Answer::Internal)),
            State::Hanging => store.add(every(Answer::Hang)),
            State::Late => store.add(Rule::for_good(Op::Put, "", Answer::Late)),
            State::Full => store.add(Rule::for_good(Op::Put, "", Answer::Denied)),
            State::Flaky => {
                let answers = [Answer::Internal, Answer::DoneButFailed, Answer::Truncated];
                store.answer_randomly(self.rng.next_u64(), 33, &answers);
            }
        }
        self.states[number] = state;
    }

    /// The indexes of the fragments of a placement that are stored, whole and the right ones; of stores that work, or of all.
    async fn valid(&self, stored: &StoredSegment, is_any: bool) -> BTreeSet<usize> {
        let coded = self.world.coded_of(stored);
        let mut valid = BTreeSet::new();
        for (index, (id, name)) in
            names(&stored.info.name(), fragments(stored)).into_iter().enumerate()
        {
            if id == Fragments::NOWHERE {
                continue;
            }
            let state = self.states[id as usize - 1];
            if !is_any && !matches!(state, State::Well | State::Full | State::Late) {
                continue;
            }
            let Ok(found) = self.world.store(id).inner().get(&name.path()).await else { continue };
            let whole = found.bytes().await.expect("the memory reads");
            let is_valid = || {
                let header = FragmentHeader::decode(&whole).ok()?;
                let generation = coded.fragments.places[index].generation;
                let owner = self.world.coded.owner(&coded.name);
                let is_of = header.owner == owner
                    && usize::from(header.index) == index
                    && header.generation == generation;
                let payload = whole.get(header.range_of(&(0..header.payload_bytes())))?;
                let trailer = whole.get(header.directory_range().start..)?;
                Some(is_of && header.checksums(trailer).ok()?.verify(0, payload))
            };
            if is_valid() == Some(true) {
                valid.insert(index);
            }
        }
        valid
    }

    /// Checks what a new placement names, but for the fragments of an earlier one.
    async fn check_placement(&self, stored: &StoredSegment, before: Option<&StoredSegment>) {
        let valid = self.valid(stored, true).await;
        let places = &fragments(stored).places;
        let stores: Vec<u32> = fragments(stored).stores().collect();
        for (index, place) in places.iter().enumerate() {
            let is_new = before.is_none_or(|before| fragments(before).places[index] != *place);
            if place.store != Fragments::NOWHERE && is_new {
                assert!(valid.contains(&index), "fragment {index} is named and not stored");
            }
            let is_twin = stores[..index].contains(&place.store);
            assert!(place.store == Fragments::NOWHERE || !is_twin, "two on one store: {stores:?}");
        }
    }

    async fn put(&mut self) {
        if self.segments.len() == SEGMENTS_MAX {
            return;
        }
        let (sealed, frames) = segment(self.next_number, 1 + self.rng.below(24) as usize);
        self.next_number += 1;
        match self.world.coded.put(&sealed).await {
            Ok(placement) => {
                let stored = StoredSegment { info: sealed.info, placement };
                self.check_placement(&stored, None).await;
                self.segments.push(Segment { sealed, frames, stored });
                self.seen.puts += 1;
            }
            Err(_) => self.seen.refused_puts += 1,
        }
    }

    async fn read(&mut self, number: usize) {
        let Segment { sealed, frames, stored } = &self.segments[number];
        let at = &frames[self.rng.below(frames.len() as u64) as usize];
        let right = &sealed.bytes[at.offset as usize..(at.offset + at.sealed_bytes) as usize];
        let needed = self.scheme_of(stored).data();
        let (reachable, all) = (self.valid(stored, false).await, self.valid(stored, true).await);
        let before = self.world.coded.counts().degraded_reads;
        // As the reader above does: bytes that do not verify are read again.
        let mut read = self.world.coded.read(stored, range(at)).await;
        if !matches!(&read, Ok(bytes) if bytes == right) {
            read = self.world.coded.read_again(stored, range(at)).await;
        }
        match &read {
            Ok(bytes) => {
                assert!(bytes == right, "wrong bytes of {stored:?}");
                self.seen.reads += 1;
                let is_decoded = self.world.coded.counts().degraded_reads > before;
                self.seen.decoded_reads += u64::from(is_decoded);
            }
            Err(error) => {
                self.seen.unreadable += 1;
                let states = &self.states;
                assert!(reachable.len() < needed, "{error}; {reachable:?}, {states:?}, {stored:?}");
                let is_gone = matches!(error, Error::NotFound { .. });
                assert!(!is_gone || all.len() < needed, "{error}; {all:?}, {states:?}, {stored:?}");
            }
        }
    }

    fn scheme_of(&self, stored: &StoredSegment) -> Scheme {
        self.world.coded_of(stored).scheme
    }

    async fn rebuild(&mut self, number: usize) {
        let depth = [Depth::Presence, Depth::Checksums][self.rng.below(2) as usize];
        let before = self.segments[number].stored.clone();
        let Ok(rebuilt) = self.world.coded.rebuild(&before, depth).await else { return };
        let Some(placement) = rebuilt.placement else { return };
        let after = StoredSegment { info: before.info, placement };
        self.check_placement(&after, Some(&before)).await;
        // The owner may end before the commit.
        if self.rng.below(5) == 0 {
            self.seen.dropped_moves += 1;
            return;
        }
        self.seen.rebuilt += 1;
        self.segments[number].stored = after;
        self.moved.push((number, before));
    }

    /// Deletes what moved segments have at their old places, as far as stores answer.
    async fn sweep(&mut self) {
        for (number, old) in std::mem::take(&mut self.moved) {
            let Some(segment) = self.segments.get(number) else { continue };
            if segment.stored.info.id == old.info.id {
                let _ = self.world.coded.delete_moved(&old, &segment.stored.placement).await;
            }
        }
        for number in self.world.coded.strays() {
            self.seen.strays += 1;
            let named = self.segments.iter().find(|it| it.stored.info.number == number);
            if let Some(segment) = named {
                let _ = self.world.coded.delete_strays(&segment.stored).await;
            }
        }
    }

    async fn delete(&mut self, number: usize) {
        let segment = self.segments.swap_remove(number);
        self.moved.clear();
        let _ = self.world.coded.delete(&Leftover::from(&segment.stored)).await;
    }

    /// Whether every segment could be read if all stores worked.
    async fn is_everything_left(&self) -> bool {
        for segment in &self.segments {
            let left = self.valid(&segment.stored, true).await.len();
            if left < self.scheme_of(&segment.stored).data() {
                return false;
            }
        }
        true
    }

    /// Flips a bit of a stored fragment, cuts it, or removes it, if enough others are left.
    async fn damage(&mut self, number: usize) {
        let stored = self.segments[number].stored.clone();
        let valid = Vec::from_iter(self.valid(&stored, true).await);
        if valid.len() <= self.scheme_of(&stored).data() {
            return;
        }
        let index = valid[self.rng.below(valid.len() as u64) as usize];
        let (id, name) = names(&stored.info.name(), fragments(&stored))[index];
        let store = self.world.store(id).inner();
        let found = store.get(&name.path()).await.expect("it is stored");
        let mut bytes = found.bytes().await.expect("the memory reads").to_vec();
        match self.rng.below(4) {
            0 => return store.delete(&name.path()).await.expect("the memory deletes"),
            1 => bytes.truncate(self.rng.below(bytes.len() as u64) as usize),
            _ => {
                let at = self.rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
            }
        }
        self.seen.flips += 1;
        store.put(&name.path(), bytes.into()).await.expect("the memory writes");
    }

    /// Everything that a store has.
    async fn contents(&self, number: usize) -> BTreeMap<Path, Bytes> {
        let store = self.world.stores[number].inner();
        let mut contents = BTreeMap::new();
        let listed: Vec<_> = store.list(None).try_collect().await.expect("the memory lists");
        for found in listed {
            let bytes = store.get(&found.location).await.expect("it is listed");
            contents.insert(found.location, bytes.bytes().await.expect("the memory reads"));
        }
        contents
    }

    async fn set_contents(&self, number: usize, contents: &BTreeMap<Path, Bytes>) {
        let store = self.world.stores[number].inner();
        for path in self.contents(number).await.into_keys() {
            store.delete(&path).await.expect("the memory deletes");
        }
        for (path, bytes) in contents {
            store.put(path, bytes.clone().into()).await.expect("the memory writes");
        }
    }

    /// The owner ends, and another one opens the stores.
    async fn restart(&mut self) {
        self.seen.restarts += 1;
        self.seen.hedged_writes += self.world.coded.counts().hedged_writes;
        let mut members = Vec::new();
        for (number, store) in self.world.stores.iter().enumerate() {
            let id = number as u32 + 1;
            let ill = Arc::new(store.clone());
            let fragments =
                ObjectFragments::new(ill, witness(), Arc::new(self.world.clock.clone()));
            let info = StoreInfo { id: StoreId(id), domain: format!("node {id}"), weight: 1 };
            let name = format!("store {id}");
            // Requests that hang never end here, and keep their places when the store works again.
            members.push(NamedStore { info, name, store: Arc::new(fragments), width: 1024 });
        }
        let clock: Arc<dyn Clock> = Arc::new(self.world.clock.clone());
        let scheme = self.scheme.to_string();
        let options = CodedOptions { clock, ..options(&scheme, members, &self.world.objects) };
        self.world.coded = CodedSegments::new(options);
        self.moved.clear();
    }

    async fn step(&mut self, old: &mut Option<(usize, BTreeMap<Path, Bytes>)>) {
        let store = self.rng.below(self.states.len() as u64) as usize;
        let number = match self.segments.len() as u64 {
            0 => return self.put().await,
            count => self.rng.below(count) as usize,
        };
        match self.rng.below(100) {
            0..12 => self.put().await,
            12..50 => self.read(number).await,
            50..62 => self.rebuild(number).await,
            62..66 => self.sweep().await,
            66..69 => self.delete(number).await,
            69..75 => {
                let all = [
                    State::Away,
                    State::Hanging,
                    State::Full,
                    State::Flaky,
                    State::Late,
                    State::Well,
                ];
                let state = all[self.rng.below(6) as usize];
                self.set_state(store, state);
            }
            75..81 => self.set_state(store, State::Well),
            81..87 => self.damage(number).await,
            87..90 => *old = Some((store, self.contents(store).await)),
            90..92 => {
                // A disk comes back as it was long ago: it lacks fragments, and has some that were deleted.
                if let Some((store, contents)) = old.take() {
                    let present = self.contents(store).await;
                    self.set_contents(store, &contents).await;
                    match self.is_everything_left().await {
                        true => self.seen.returns += 1,
                        false => self.set_contents(store, &present).await,
                    }
                }
            }
            92..94 => self.restart().await,
            _ => {
                self.world.clock.advance(Duration::from_secs(1 + self.rng.below(1000)));
                self.world.coded.look().await;
            }
        }
    }

    /// The stores work again: everything becomes whole.
    async fn end(&mut self) {
        (0..self.states.len()).for_each(|number| self.set_state(number, State::Well));
        self.world.heal().await;
        for number in 0..self.segments.len() {
            for _ in 0..4 {
                let before = self.segments[number].stored.clone();
                let rebuilt = self.world.coded.rebuild(&before, Depth::Checksums).await;
                let rebuilt = rebuilt.expect("enough fragments are left");
                if let Some(placement) = rebuilt.placement {
                    self.segments[number].stored = StoredSegment { info: before.info, placement };
                }
            }
            let stored = &self.segments[number].stored;
            let count = self.scheme_of(stored).fragments();
            assert_eq!(self.valid(stored, true).await.len(), count, "{stored:?}");
        }
        // As many as the scheme survives, from any place on.
        let first = self.rng.below(self.states.len() as u64) as usize;
        for at in 0..self.scheme.parity() {
            self.set_state((first + at) % self.states.len(), State::Away);
        }
        for number in 0..self.segments.len() {
            self.read(number).await;
        }
    }
}

#[test]
fn stores_that_fail_in_every_way_neither_lose_nor_change_bytes() {
    let mut total = Seen::default();
    let all = seeds(300);
    let is_default = all.len() == 300;
    for seed in all {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        total = runtime.block_on(async {
            println!("SEED={seed}");
            let mut simulation = Simulation::new(seed).await;
            simulation.seen = total;
            let mut old = None;
            for _ in 0..STEPS {
                simulation.step(&mut old).await;
            }
            let unreadable = simulation.seen.unreadable;
            simulation.end().await;
            let mut seen = simulation.seen;
            assert_eq!(seen.unreadable, unreadable, "what is left must be readable");
            seen.hedged_writes += simulation.world.coded.counts().hedged_writes;
            seen
        });
    }
    println!("{total:?}");
    let Seen { refused_puts, decoded_reads, unreadable, rebuilt, dropped_moves, .. } = total;
    let Seen { hedged_writes, strays, returns, .. } = total;
    let late = [hedged_writes, strays, returns];
    let least = [refused_puts, decoded_reads, unreadable, rebuilt, dropped_moves];
    let is_enough = least.iter().chain(&late).all(|count| *count > 20);
    assert!(!is_default || is_enough, "too little happened: {total:?}");
}
