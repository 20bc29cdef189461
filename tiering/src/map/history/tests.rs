//! Tests a page with snapshots against a model that keeps each of its states.

use super::*;
use crate::map::pages::OperandKind;
use crate::testing::{Rng, seeds};
use std::collections::{BTreeMap, BTreeSet};

type Cells = Vec<Option<(u64, u8)>>;

fn cells(runs: &[Run]) -> Cells {
    let mut cells = vec![None; 256];
    for run in runs.iter().filter(|run| run.is_mapped()) {
        for block in run.first..=run.last {
            let within = run.within + (block - run.first);
            cells[usize::from(block)] = Some((run.segment, within));
        }
    }
    cells
}

/// A page, its stored contents, and its state at each snapshot.
struct World {
    rng: Rng,
    lsn: u64,
    segment: u64,
    history: History,
    ranges: Vec<Lsn>,
    now: Cells,
    snapshots: BTreeMap<Lsn, Cells>,
}

impl World {
    fn living(&self) -> Vec<Lsn> {
        self.snapshots.keys().copied().collect()
    }

    fn shown(&self, at: Lsn) -> Cells {
        let copy = self.history.copies.iter().find(|copy| copy.until >= at);
        match copy {
            Some(copy) if copy.since <= at => cells(&copy.runs),
            Some(_) => cells(&[]),
            None => cells(&state_at(&self.history.operands, &self.ranges, at)),
        }
    }

    fn write(&mut self) {
        self.lsn += 1 + self.rng.below(3);
        self.segment += 1;
        let (first, length) = (self.rng.below(250), 1 + self.rng.below(20));
        let last = (first + length).min(255);
        let mut run = Run {
            segment: self.segment,
            frame_index: 0,
            offset: 96,
            sealed_bytes: 5000,
            first: first as u8,
            last: last as u8,
            within: 0,
        };
        if self.rng.below(4) == 0 {
            run = Run::hole(run.first, run.last);
        }
        for block in run.first..=run.last {
            self.now[usize::from(block)] =
                run.is_mapped().then(|| (run.segment, block - run.first));
        }
        let page = pages::fold(&self.history.operands, Lsn::NONE);
        if page.operand_count == 0 {
            if run.is_mapped() {
                self.put(vec![run], Lsn::NONE);
            }
        } else if self.rng.below(5) == 0 {
            let cut = self.ranges.last().copied().unwrap_or_default();
            let runs = pages::assign(&pages::fold(&self.history.operands, cut).runs, &[run]);
            self.settle(runs, Lsn(self.lsn));
        } else {
            let keeps =
                page.copy != Lsn::NONE || !showing(&page, &self.living(), Lsn(self.lsn)).is_empty();
            let kind = OperandKind::Delta { keeps };
            self.history.operands.push(Operand { lsn: Lsn(self.lsn), kind, runs: vec![run] });
        }
    }

    fn put(&mut self, mut runs: Vec<Run>, copy: Lsn) {
        runs.retain(Run::is_mapped);
        let kind = OperandKind::Image { copy };
        self.history.operands = vec![Operand { lsn: Lsn(self.lsn), kind, runs }];
    }

    fn settle(&mut self, runs: Vec<Run>, lsn: Lsn) {
        let page = pages::fold(&self.history.operands, Lsn::NONE);
        let living = self.living();
        let shown = showing(&page, &living, lsn);
        self.history.copies.extend(copies_needed(
            &self.history.operands,
            &self.ranges,
            shown,
            false,
        ));
        let copy = self.history.copies.last().map_or(Lsn::NONE, |copy| copy.until);
        self.put(runs, copy);
        self.history.operands[0].lsn = lsn;
        let is_empty = !self.history.operands[0].runs.iter().any(Run::is_mapped);
        if is_empty && copy == Lsn::NONE {
            self.history.operands.clear();
        }
        self.ranges.clear();
    }

    /// Adds a trim that is not folded yet, or folds one.
    fn trim(&mut self) {
        if self.ranges.is_empty() {
            self.lsn += 1;
            self.ranges.push(Lsn(self.lsn));
            self.now = cells(&[]);
        } else {
            let cut = self.ranges.last().copied().unwrap_or_default();
            let page = pages::fold(&self.history.operands, cut);
            if page.has_hidden {
                self.settle(page.runs.to_vec(), page.last_lsn.max(cut));
            }
            self.ranges.clear();
        }
    }

    fn prune(&mut self) {
        let living = self.living();
        let mut before = Lsn::NONE;
        self.history.copies.retain(|copy| {
            let is_shown = is_shown(copy, before, &living);
            before = copy.until;
            is_shown
        });
    }

    fn check(&self, context: &str) {
        for (at, then) in &self.snapshots {
            assert_eq!(&self.shown(*at), then, "{context}, snapshot {at}: {:?}", self.history);
        }
        let cut = self.ranges.last().copied().unwrap_or_default();
        let now = cells(&pages::fold(&self.history.operands, cut).runs);
        assert_eq!(now, self.now, "{context}: {:?}", self.history);
        // Every place that a state shows is counted exactly once.
        let mut counted = BTreeSet::new();
        for run in self.history.counted() {
            for block in run.first..=run.last {
                let place = (block, run.segment);
                assert!(counted.insert(place), "{context}: {place:?} twice in {:?}", self.history);
            }
        }
        for state in self.snapshots.values().chain([&self.now]) {
            for (block, cell) in (0..=u8::MAX).zip(state) {
                let Some((segment, _)) = cell else { continue };
                assert!(counted.contains(&(block, *segment)), "{context}: {block} {segment}");
            }
        }
    }
}

#[test]
fn every_snapshot_shows_its_state_and_every_place_is_counted_once() {
    for seed in seeds(400) {
        let mut world = World {
            rng: Rng::new(seed),
            lsn: 0,
            segment: 0,
            history: History::default(),
            ranges: Vec::new(),
            now: cells(&[]),
            snapshots: BTreeMap::new(),
        };
        for turn in 0..120 {
            match world.rng.below(20) {
                0..=11 => world.write(),
                12..=15 => {
                    world.lsn += 1;
                    world.snapshots.insert(Lsn(world.lsn), world.now.clone());
                }
                16 => {
                    let count = world.snapshots.len().max(1) as u64;
                    let index = world.rng.below(count) as usize;
                    let removed = world.snapshots.keys().nth(index).copied();
                    removed.map(|lsn| world.snapshots.remove(&lsn));
                }
                17 => world.prune(),
                _ => world.trim(),
            }
            world.check(&format!("SEED={seed}, turn {turn}"));
        }
        world.snapshots.clear();
        world.prune();
        assert_eq!(world.history.copies, [], "SEED={seed}");
    }
}
