//! Histories that proptest generates and shrinks: writes, trims, snapshots, clones of clones,
//! rollbacks, removals, reclaim, background steps, restarts and crashes at any request, with and
//! without deduplication, compared with the model of every volume and every snapshot. A failing
//! history is shrunk to the few steps that it needs, and printed.
//!
//! Invariants:
//! - Every step of a history is meaningful in any state, because it chooses among the items that
//!   exist. So any part of a history is a history too.
//! - The seed is printed; `SEED=17` or `SEEDS=100..120` selects seeds, and `PROPTEST_CASES` sets
//!   the number of histories for each.

use super::clones::{Clones, step_all};
use super::*;
use crate::seeded_bugs::SeededBugs;
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof};
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

/// Blocks of a zone that are written: two pages and the beginning of a third.
const BLOCKS: u64 = 2 * PAGE_BYTES / BLOCK_BYTES + 40;
const BLOCK_SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES;

#[derive(Clone, Debug)]
enum Step {
    /// Writes blocks with the contents of these numbers, or only some sectors of the first one.
    Write {
        volume: Index,
        block: u64,
        contents: Vec<u8>,
        is_ragged: bool,
    },
    Trim {
        volume: Index,
        block: u64,
        count: u64,
    },
    Snapshot(Index),
    RemoveSnapshot(Index),
    Clone(Index),
    RollBack(Index),
    Promote(Index),
    RemoveVolume(Index),
    /// Folds, prunes and promotes this many pages.
    Background(u64),
    /// Performs this many steps of reclaim, and the deletions that follow.
    Reclaim(u8),
    SweepBackReferences,
    Reopen,
    /// Ends the process at this request to the store, counted from here.
    DieAfter(u64),
}

fn any_block() -> impl Strategy<Value = u64> {
    // Mostly close together, so that steps overlap.
    prop_oneof![3 => 0..24u64, 1 => 0..BLOCKS]
}

fn any_step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    let contents = prop::collection::vec(0..12u8, 1..20);
    prop_oneof![
        8 => (index(), any_block(), contents, prop::bool::weighted(0.2)).prop_map(
            |(volume, block, contents, is_ragged)| Step::Write { volume, block, contents, is_ragged }
        ),
        2 => (index(), any_block(), prop_oneof![1..30u64, 1..4 * BLOCKS])
            .prop_map(|(volume, block, count)| Step::Trim { volume, block, count }),
        3 => index().prop_map(Step::Snapshot),
        1 => index().prop_map(Step::RemoveSnapshot),
        2 => index().prop_map(Step::Clone),
        1 => index().prop_map(Step::RollBack),
        1 => index().prop_map(Step::Promote),
        1 => index().prop_map(Step::RemoveVolume),
        2 => (1..40u64).prop_map(Step::Background),
        3 => (1..6u8).prop_map(Step::Reclaim),
        1 => Just(Step::SweepBackReferences),
        1 => Just(Step::Reopen),
        1 => (0..60u64).prop_map(Step::DieAfter),
    ]
}

/// The pool, its model, and the process that has it open.
struct Run {
    shared: Arc<dyn ObjectStore>,
    clones: Clones,
    life: Ending,
    tier: Option<Tier>,
    store: Arc<FaultStore>,
    epoch: u64,
    seeded_bugs: SeededBugs,
    is_dedup: bool,
}

impl Run {
    fn new(seeded_bugs: SeededBugs, is_dedup: bool) -> Run {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let store = Arc::new(FaultStore::new(shared.clone()));
        let (clones, life) = (Clones::new(1), runtime());
        let mut run =
            Run { shared, clones, life, tier: None, store, epoch: 0, seeded_bugs, is_dedup };
        run.open();
        run
    }

    fn open(&mut self) {
        self.epoch += 1;
        self.store = Arc::new(FaultStore::new(self.shared.clone()));
        let mut opened = options(self.store.clone(), self.epoch);
        // Small enough that there is something to reclaim.
        opened.segment_bytes = 64 << 10;
        opened.seeded_bugs = self.seeded_bugs;
        opened.is_dedup = self.is_dedup;
        if self.is_dedup {
            opened.fingerprint_mask = 3;
        }
        let tier = self.life.block_on(async {
            let tier = Tier::open(opened).await.unwrap();
            tier.load_fingerprints().await.unwrap();
            tier
        });
        self.tier = Some(tier);
    }

    /// Performs one step, or ends the process during it.
    fn step(&mut self, step: &Step) {
        let tier = self.tier.clone().expect("it is open");
        let (clones, store) = (&mut self.clones, self.store.clone());
        let ended: Result<()> = self.life.block_on(async {
            let death = async {
                while !store.is_away() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                ended = take(clones, &tier, &store, step) => ended,
                () = death => Ok(()),
            }
        });
        if self.store.is_away() {
            return self.die();
        }
        ended.unwrap();
        if matches!(step, Step::Reopen) {
            self.open();
        }
    }

    /// Ends all tasks of this run; the next one finds the finished work.
    fn die(&mut self) {
        self.tier = None;
        self.life = runtime();
        self.open();
        let (tier, clones) = (self.tier.as_ref().expect("it is open"), &mut self.clones);
        self.life.block_on(async {
            clones.settle(tier).await;
            tier.sweep_orphans().await.unwrap();
        });
    }

    fn check(&mut self) {
        if self.store.is_away() {
            self.die();
        }
        self.step(&Step::Reopen);
        let (tier, clones) = (self.tier.as_ref().expect("it is open"), &self.clones);
        self.life.block_on(async {
            clones.check_all(tier).await;
            check_fsck(tier).await;
            step_all(tier).await;
            reclaim_all(tier).await;
            clones.check_all(tier).await;
            check_fsck(tier).await;
            tier.close().await.unwrap();
        });
    }
}

fn pick<T: Copy>(index: &Index, of: impl Iterator<Item = T>) -> Option<T> {
    let all: Vec<T> = of.collect();
    (!all.is_empty()).then(|| all[index.index(all.len())])
}

/// Returns one block for each content number; 0 means zeroes.
fn bytes_of(contents: &[u8]) -> Vec<u8> {
    contents
        .iter()
        .flat_map(|content| match content {
            0 => vec![0; BLOCK_BYTES as usize],
            _ => Rng::new((*content).into()).bytes(BLOCK_BYTES as usize, 90),
        })
        .collect()
}

async fn take(clones: &mut Clones, tier: &Tier, store: &FaultStore, step: &Step) -> Result<()> {
    let any_volume = |clones: &Clones, index: &Index| {
        pick(index, clones.live.keys().copied()).expect("volume 1 is never removed")
    };
    let any_snapshot = |clones: &Clones, index: &Index| pick(index, clones.shown.keys().copied());
    match step {
        Step::Write { volume, block, contents, is_ragged } => {
            let volume = any_volume(clones, volume);
            let (mut start, mut bytes) = (block * BLOCK_SECTORS, bytes_of(contents));
            if *is_ragged {
                start += 3;
                bytes.truncate(2 * SECTOR);
            }
            let end = start + (bytes.len() / SECTOR) as u64;
            let window = clones.window_of(vec![(volume, (start, end, Some(bytes.into())))]);
            clones.destage(tier, window).await
        }
        Step::Trim { volume, block, count } => {
            let volume = any_volume(clones, volume);
            let (start, end) = (block * BLOCK_SECTORS, (block + count) * BLOCK_SECTORS);
            let window = clones.window_of(vec![(volume, (start, end, None))]);
            clones.destage(tier, window).await
        }
        Step::Snapshot(volume) => {
            let volume = any_volume(clones, volume);
            clones.world.lsn += 1;
            let mut window = clones.window_of(Vec::new());
            clones.with_snapshot(&mut window, volume);
            clones.destage(tier, window).await
        }
        Step::RemoveSnapshot(index) => {
            let Some(at) = any_snapshot(clones, index) else { return Ok(()) };
            clones.world.lsn += 1;
            let mut window = clones.window_of(Vec::new());
            clones.without_snapshot(&mut window, at);
            clones.destage(tier, window).await
        }
        Step::Clone(index) => match any_snapshot(clones, index) {
            Some(at) => clones.clone_of(tier, at).await,
            None => Ok(()),
        },
        Step::RollBack(index) => match any_snapshot(clones, index) {
            Some(at) => clones.roll_back(tier, at).await,
            None => Ok(()),
        },
        Step::Promote(volume) => {
            let volume = any_volume(clones, volume);
            clones.promote(tier, volume).await
        }
        Step::RemoveVolume(volume) => {
            let volume = any_volume(clones, volume);
            clones.remove_if_alone(tier, volume).await
        }
        Step::Background(pages) => tier.step(*pages as usize).await.map(drop),
        Step::Reclaim(count) => {
            look_again(tier);
            for _ in 0..*count {
                if tier.reclaim_step(EAGER).await?.is_idle {
                    break;
                }
            }
            tier.sweep_abandoned().await.map(drop)
        }
        Step::SweepBackReferences => {
            tier.sweep_again();
            while tier.sweep_back_references(20).await? {}
            Ok(())
        }
        Step::Reopen => tier.close().await,
        Step::DieAfter(requests) => {
            store.go_away_after(*requests);
            Ok(())
        }
    }
}

/// Returns `None` if all histories of this seed hold, otherwise proptest's report of the shortest
/// failing one.
fn failure(seed: u64, seeded_bugs: SeededBugs, cases: u32, shrinks: u32) -> Option<String> {
    let config =
        Config { cases, failure_persistence: None, max_shrink_iters: shrinks, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let histories = (any::<bool>(), prop::collection::vec(any_step(), 1..80));
    let ended = TestRunner::new_with_rng(config, rng).run(&histories, |(is_dedup, steps)| {
        let mut run = Run::new(seeded_bugs, is_dedup);
        for step in &steps {
            run.step(step);
        }
        run.check();
        Ok(())
    });
    match ended {
        Ok(()) => None,
        Err(TestError::Fail(reason, (is_dedup, steps))) => {
            Some(format!("{reason}\ndeduplication {is_dedup}, {} steps: {steps:#?}", steps.len()))
        }
        Err(TestError::Abort(reason)) => Some(reason.to_string()),
    }
}

#[test]
fn any_history_leaves_every_volume_and_snapshot_as_the_model_says() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    for seed in seeds(2) {
        println!("SEED={seed}");
        if let Some(failure) = failure(seed, SeededBugs::default(), cases.unwrap_or(12), 400) {
            panic!("SEED={seed}: {failure}");
        }
    }
}

/// Each bug that may be seeded here is found when seeded alone, and its history is shrunk.
#[test]
fn seeded_bugs_are_found_and_cut_down() {
    let of = |bug: fn(&mut SeededBugs)| {
        let mut seeded_bugs = SeededBugs::default();
        bug(&mut seeded_bugs);
        seeded_bugs
    };
    let all = [
        ("reclaim ignores clones", of(|bugs| bugs.reclaim_without_clones = true)),
        ("live counts are off", of(|bugs| bugs.count_out_twice = true)),
        ("a segment is deleted first", of(|bugs| bugs.delete_first = true)),
        ("promoted over a newer page", of(|bugs| bugs.promoted_over_newer = true)),
        ("the hash is trusted", of(|bugs| bugs.fingerprints_trusted = true)),
    ];
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found: Vec<_> =
        all.iter().map(|(name, seeded_bugs)| (name, failure(1, *seeded_bugs, 400, 60))).collect();
    std::panic::set_hook(hook);
    for (name, failure) in found {
        let failure = failure.unwrap_or_else(|| panic!("{name}: goes unnoticed"));
        let short: String = failure.lines().take(3).collect::<Vec<_>>().join(" | ");
        println!("{name}: {}", short.chars().take(300).collect::<String>());
    }
}
