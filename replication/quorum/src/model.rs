//! The protocol in small worlds: the real machines, with every order of messages, losses,
//! repetitions, crashes, reboots, take-overs and changes of members that the bounds allow.
//!
//! `MODEL_STATES` sets the number of states that each world explores at most, and `MODEL_WORLDS` a part
//! of the names of the worlds that are explored.

mod world;

use self::world::{Bounds, World};
use crate::seeded_bugs::SeededBugs;
use stateright::{Checker, Model, Property};
use std::io::Write;

/// States of each world, about half of which are distinct, unless `MODEL_STATES` says otherwise.
const STATES: usize = 420_000;
/// States of each world that `tests/nightly` asks for at least.
const STATES_BY_NIGHT: usize = 3_000_000;
/// States within which a seeded bug is found.
const STATES_OF_A_BUG: usize = 6_000_000;

struct Small {
    bounds: Bounds,
    seeded_bugs: SeededBugs,
}

impl Model for Small {
    type State = World;
    type Action = world::Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.bounds, self.seeded_bugs)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<world::Action>) {
        if world.wrong.is_none() {
            world.actions(&self.bounds, actions);
        }
    }

    fn next_state(&self, world: &World, action: world::Action) -> Option<World> {
        let mut next = world.clone();
        next.act(&self.bounds, self.seeded_bugs, action);
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing wrong", |_, world: &World| world.wrong.is_none()),
            // Without these the worlds would prove nothing.
            Property::sometimes("an acknowledged write", |_, world: &World| world.has_write()),
            Property::sometimes("a later owner", |small: &Small, world: &World| {
                small.bounds.take_overs == 0 || world.is_taken_over()
            }),
        ]
    }
}

/// A network that delivers everything in order.
const QUIET: Bounds = Bounds { delays: 0, losses: 0, ..Bounds::NONE };
/// Two owners of three members, whose processes crash at any moment.
const CRASHES: Bounds = Bounds { take_overs: 2, crashes: 1, ..Bounds::NONE };
/// Three owners in a network without faults: logs that diverge deeply.
const DIVERGING: Bounds = Bounds { take_overs: 2, delays: 0, losses: 0, ..Bounds::NONE };
/// Machines that lose what was not synced.
const POWER: Bounds = Bounds { take_overs: 1, reboots: 2, is_forced: true, ..Bounds::NONE };
/// A member that was wiped, and returns with nothing under another identity.
const WIPED: Bounds = Bounds { take_overs: 1, wipes: 1, crashes: 1, changes: 1, ..Bounds::NONE };
/// Changes of the members, with links of which the owner does not learn.
const CHANGES: Bounds = Bounds { take_overs: 1, changes: 1, crashes: 1, ..Bounds::NONE };
/// Leases, with an owner that is stopped and continues.
const LEASES: Bounds = Bounds { take_overs: 1, ticks: 5, lease: 2, ..Bounds::NONE };
/// Leases that owners give up.
const RESIGNED: Bounds =
    Bounds { take_overs: 2, ticks: 3, lease: 2, resigns: 2, writes: 1, losses: 0, ..Bounds::NONE };
/// The resignation of an owner that arrives late, when the next one has a lease. Opening batches are its
/// only writes.
const RESIGNED_LATE: Bounds = Bounds { resigns: 1, ticks: 1, lease: 1, writes: 0, ..RESIGNED };
/// Leases that owners give up, between crashes, and resignations that come twice.
const RESIGNED_CRASHES: Bounds =
    Bounds { take_overs: 1, resigns: 1, crashes: 1, repeats: 1, ..RESIGNED };
/// Two members, of which one gives its lease up while the other may go on alone.
const TWO_RESIGNED: Bounds = Bounds { resigns: 1, ..TWO_LEASES };
/// Leases that get longer, and members that forget when they granted one.
const FORGETFUL: Bounds = Bounds {
    take_overs: 1,
    ticks: 4,
    lease: 1,
    is_lease_growing: true,
    crashes: 1,
    writes: 1,
    delays: 0,
    losses: 0,
    ..Bounds::NONE
};
/// A member whose disk fails while the owner lives.
const FAILURE: Bounds = Bounds { take_overs: 2, failures: 1, writes: 1, ..QUIET };
/// One member that reboots while the owner lives, and then loses the owner.
const AMNESIA: Bounds = Bounds { take_overs: 1, reboots: 1, repeats: 1, ..Bounds::NONE };

/// Members that are reset, because the owner has released batches that they lack.
const RESETS: Bounds =
    Bounds { take_overs: 2, trims: 1, delays: 1, losses: 0, writes: 2, ..Bounds::NONE };
/// Resets that are repeated late.
const LATE_RESETS: Bounds = Bounds { take_overs: 0, repeats: 1, ..RESETS };
/// Resets between crashes.
const RESET_CRASHES: Bounds = Bounds { crashes: 1, take_overs: 1, delays: 0, ..RESETS };
/// Resets between losses of power, and a member that is damaged meanwhile.
const RESET_POWER: Bounds =
    Bounds { take_overs: 1, trims: 1, reboots: 1, damages: 1, writes: 1, ..QUIET };
/// Resets between losses of power, and an operator who opens the pool by force.
const RESET_FORCED: Bounds =
    Bounds { take_overs: 2, trims: 1, reboots: 1, writes: 1, is_forced: true, ..QUIET };
/// A batch that turns bad.
const DAMAGE: Bounds = Bounds { damages: 1, crashes: 1, take_overs: 2, ..QUIET };
/// Two members, one of which may go on alone.
const TWO: Bounds =
    Bounds { members: 2, is_alone: true, take_overs: 2, crashes: 1, ..Bounds::NONE };
/// Two members, one of which may go on alone and is reset.
const TWO_RESETS: Bounds = Bounds { trims: 1, delays: 0, losses: 0, ..TWO };
/// Two members that lose power.
const TWO_POWER: Bounds = Bounds { reboots: 1, crashes: 0, ..TWO };
/// Two members, of which one is left and admitted again.
const TWO_CHANGES: Bounds = Bounds { changes: 2, crashes: 0, ..undisturbed(TWO) };
/// Two members and leases.
const TWO_LEASES: Bounds = Bounds { ticks: 3, lease: 1, crashes: 0, ..undisturbed(TWO) };
/// Three members that all have to write.
const ALL: Bounds = Bounds { quorum: 3, is_alone: true, reboots: 1, take_overs: 2, ..QUIET };
/// Two changes of the members.
const CHANGES_TWICE: Bounds = Bounds { changes: 2, ..undisturbed(CHANGES) };

/// The same, while batches are sent one at a time.
const RENEWAL: Bounds = Bounds { batches: 1, ..undisturbed(AMNESIA) };

/// Several requests under way to one member, which arrive in any order.
const STREAMED: Bounds =
    Bounds { take_overs: 1, crashes: 1, delays: 3, losses: 0, batches: 1, ..Bounds::NONE };

const WORLDS: &[(&str, Bounds)] = &[
    ("crashes", CRASHES),
    ("diverging", DIVERGING),
    ("power", POWER),
    ("wiped", WIPED),
    ("changes", CHANGES),
    ("leases", LEASES),
    ("resigned", RESIGNED),
    ("resigned, crashes", RESIGNED_CRASHES),
    ("two, resigned", TWO_RESIGNED),
    ("amnesia", AMNESIA),
    ("failure", FAILURE),
    ("power, undisturbed", undisturbed(POWER)),
    ("changes, undisturbed", undisturbed(CHANGES)),
    ("amnesia, undisturbed", undisturbed(AMNESIA)),
    ("renewal", RENEWAL),
    ("forgetful", FORGETFUL),
    ("streamed", STREAMED),
    ("resets", RESETS),
    ("late resets", LATE_RESETS),
    ("reset crashes", RESET_CRASHES),
    ("reset power", RESET_POWER),
    ("reset forced", RESET_FORCED),
    ("damage", DAMAGE),
    ("two", TWO),
    ("two, resets", TWO_RESETS),
    ("two, power", TWO_POWER),
    ("two, changes", TWO_CHANGES),
    ("two, leases", TWO_LEASES),
    ("all", ALL),
    ("changes, twice", CHANGES_TWICE),
];

/// The same world with a network that delivers everything in order, which is explored more deeply.
const fn undisturbed(bounds: Bounds) -> Bounds {
    Bounds { delays: 0, losses: 0, repeats: 0, crashes: 0, ..bounds }
}

fn explore(bounds: Bounds, seeded_bugs: SeededBugs, states: usize) -> impl Checker<Small> {
    Small { bounds, seeded_bugs }.checker().target_state_count(states).threads(2).spawn_bfs().join()
}

fn states() -> usize {
    std::env::var("MODEL_STATES").ok().and_then(|count| count.parse().ok()).unwrap_or(STATES)
}

#[test]
fn no_order_of_events_loses_an_acknowledged_write() {
    let mut sum = 0;
    let named = std::env::var("MODEL_WORLDS").unwrap_or_default();
    for (name, bounds) in WORLDS.iter().filter(|(name, _)| name.contains(&named)) {
        let checker = explore(*bounds, SeededBugs::default(), states());
        sum += checker.unique_state_count();
        println!(
            "{name}: {} distinct states, {} steps deep",
            checker.unique_state_count(),
            checker.max_depth()
        );
        if let Some(path) = checker.discovery("nothing wrong") {
            let wrong = path.last_state().wrong;
            panic!("{name}: {wrong:?} after {:#?}", path.into_actions());
        }
        for sometimes in ["an acknowledged write", "a later owner"] {
            assert!(checker.discovery(sometimes).is_some(), "{name}: there never was {sometimes}");
        }
    }
    // To standard error itself: the figure is part of every run's output.
    let _ = writeln!(std::io::stderr(), "done: the model saw {sum} distinct states");
    let least = match states() {
        0..STATES => 0,
        STATES..STATES_BY_NIGHT => 3_000_000,
        _ => 20_000_000,
    };
    assert!(sum >= least || !named.is_empty(), "only {sum} distinct states, of {least}");
}

#[test]
fn seeded_bugs_are_found() {
    let of = |bug: fn(&mut SeededBugs)| {
        let mut seeded_bugs = SeededBugs::default();
        bug(&mut seeded_bugs);
        seeded_bugs
    };
    let all = [
        ("promise-not-kept", CRASHES, of(|bugs| bugs.promise_not_kept = true)),
        ("promise-not-stored", CRASHES, of(|bugs| bugs.promise_not_stored = true)),
        ("amnesiac-votes", undisturbed(AMNESIA), of(|bugs| bugs.amnesiac_votes = true)),
        ("tail-by-length", DIVERGING, of(|bugs| bugs.tail_by_length = true)),
        ("opening-over-tail", CRASHES, of(|bugs| bugs.opening_over_tail = true)),
        (
            "unrecorded-configuration",
            undisturbed(CHANGES),
            of(|bugs| bugs.unrecorded_configuration = true),
        ),
        ("recorded-too-early", undisturbed(CHANGES), of(|bugs| bugs.recorded_too_early = true)),
        ("recording-given-up", undisturbed(CHANGES), of(|bugs| bugs.recording_given_up = true)),
        ("read-without-lease", LEASES, of(|bugs| bugs.read_without_lease = true)),
        ("proven-too-early", RENEWAL, of(|bugs| bugs.proven_too_early = true)),
        ("resign-of-any-epoch", RESIGNED_LATE, of(|bugs| bugs.resign_of_any_epoch = true)),
        ("resigned-reads", RESIGNED, of(|bugs| bugs.resigned_reads = true)),
        ("own-promise-unseen", LEASES, of(|bugs| bugs.own_promise_unseen = true)),
        ("lease-forgotten", FORGETFUL, of(|bugs| bugs.lease_forgotten = true)),
        ("lease-not-stored", FORGETFUL, of(|bugs| bugs.lease_not_stored = true)),
        ("late-reset-obeyed", LATE_RESETS, of(|bugs| bugs.late_reset_obeyed = true)),
        ("reset-above-released", RESETS, of(|bugs| bugs.reset_above_released = true)),
        ("damage-skipped", DAMAGE, of(|bugs| bugs.damage_skipped = true)),
        ("damage-unseen", DAMAGE, of(|bugs| bugs.damage_unseen = true)),
        ("failure-not-stored", FAILURE, of(|bugs| bugs.failure_not_stored = true)),
        ("note-forgotten", DAMAGE, of(|bugs| bugs.note_forgotten = true)),
        (
            "alone-below-all",
            Bounds { is_alone: true, ..CRASHES },
            of(|bugs| bugs.alone_below_all = true),
        ),
        ("alone-unproven", TWO_POWER, of(|bugs| bugs.alone_unproven = true)),
        ("sent-is-written", STREAMED, of(|bugs| bugs.sent_is_written = true)),
        ("own-sync-is-commit", undisturbed(POWER), of(|bugs| bugs.own_sync_is_commit = true)),
    ];
    for (name, bounds, seeded_bugs) in all {
        let checker = explore(bounds, seeded_bugs, STATES_OF_A_BUG);
        let path = checker.discovery("nothing wrong");
        let path = path.unwrap_or_else(|| {
            panic!("{name} goes unnoticed in {} states", checker.unique_state_count())
        });
        let wrong = path.last_state().wrong.expect("the property says so");
        println!(
            "{name}: {wrong}, after {} steps, {} states",
            path.into_actions().len(),
            checker.unique_state_count()
        );
    }
}
