//! Rounds of failures under load: up to as many data stores of a coded pool as its scheme survives die, lose their
//! drives, hang, lose their network, are slow or full, and come back or are replaced. Nothing is lost, and no request
//! fails. With one loss too many, reads fail, and nothing is wrong.
//!
//! Invariants:
//! - All decisions come from the seed. The moment at which a failure hits a request depends on the machine.
//! - A round begins when every segment survives as many losses as the scheme promises, so that never more stores fail
//!   at once, those included whose fragments were not rebuilt yet.
//! - Writes are sent one at a time, so the volumes must hold all of them in order.

mod drives;
mod stores;

use crate::clients::has_fio_with_nbd;
use crate::conditions::conditions;
use crate::copies::wait_for;
use crate::data_nodes::DataNodes;
use crate::data_stores::{failing, is_whole, settings, store_count, wait_until_whole};
use crate::filesystem::Mounted;
use crate::postgres::Postgres;
use crate::stores::{History, PARTS, open};
use drives::Drives;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stores::{Directories, Nodes, Stores};
use tests::daemon::Daemon;
use tests::nbd::{Connection, Wanted};
use tests::network::Network;
use tests::place::{Place, run, skip};
use tests::seed::{Random, seeds};
use tests::torture::target::Target;
use tests::{needs, needs_network, needs_root};

/// The volumes of [`History`], and one for fio.
const VOLUMES: &[(&str, &str)] = &[("db", "16MiB"), ("log", "16MiB"), (FIO_VOLUME, "16MiB")];
const FIO_VOLUME: &str = "fio";
const NBD_PORT: u16 = 10809;
/// Time for which the failures of a round last, after the last one has begun. Chosen by hand: longer than `lost_after`
/// of the settings, so that fragments are rebuilt where there is a spare store.
const FAILURE_TIME: Duration = Duration::from_millis(2500);
/// Writes of a round while stores fail. Chosen by hand: with those of fio, less than the log has room for, because
/// destage may have to wait for the stores.
const WRITE_COUNT_MAX: usize = 500;
/// Longest time until a pool is whole after a round. Chosen by hand: a store that failed for long is asked every 30 s.
const WHOLE_MAX: Duration = Duration::from_secs(180);
/// Longest wait for an answer. Chosen by hand: longer than the two minutes after which a read fails.
const READ_TIME_MAX: Duration = Duration::from_secs(150);
/// Variable with the number of rounds of each shape, in place of a few rounds of small ones.
const ROUNDS: &str = "SPINDLE_TEST_ROUNDS";
/// Variable with the length of pgbench's load, in seconds.
const PGBENCH_SECONDS: &str = "SPINDLE_TEST_PGBENCH_SECONDS";

/// A failure of a data store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// `kill -9` of its node.
    Killed,
    /// Its directory is empty while the failure lasts, as where a disk is not mounted.
    Unmounted,
    /// Its files are lost. Another drive takes its place.
    Wiped,
    /// SIGSTOP of its node.
    Paused,
    /// Its node loses its network, and packets to it are lost.
    Cut,
    /// Its node stands still most of the time.
    Slowed,
    /// Its file system has not a page left.
    Full,
}

impl Failure {
    /// Whether its requests fail at once, so that the pool soon says so.
    fn is_seen_at_once(self) -> bool {
        matches!(self, Failure::Killed | Failure::Unmounted | Failure::Wiped)
    }

    /// Whether the store takes fragments meanwhile.
    fn takes_writes(self) -> bool {
        self == Failure::Slowed
    }
}

/// A pool over a number of data stores.
#[derive(Clone, Copy)]
struct Shape {
    data: usize,
    parity: usize,
    stores: usize,
}

impl Shape {
    fn text(self, urls: &[String]) -> String {
        let log = "[log]\nsize = \"16MiB\"";
        let text = settings(&format!("{}+{}", self.data, self.parity), urls);
        assert!(text.contains(log), "{text}");
        text.replace(log, "[log]\nsize = \"64MiB\"")
            .replace("[data]\n", "[data]\nlost_after = \"2s\"\n")
    }
}

/// The decisions of a round.
#[derive(Debug)]
struct Round {
    victims: Vec<(usize, Failure)>,
    /// Times between the failures.
    pauses: Vec<Duration>,
    is_owner_killed: bool,
    /// Whether destage has to be done before the stores are repaired, if enough of them are left.
    is_drained: bool,
}

/// A test in progress.
struct Game<S> {
    shape: Shape,
    owner: Daemon,
    stores: S,
    random: Random,
    history: History,
    connections: Vec<Connection>,
    has_fio: bool,
}

/// Ends the clients also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn owner(shape: Shape) -> Daemon {
    // The log keeps the size that it is made with.
    let settings = shape.text(&[]);
    let plain = settings.split("[data]").next().expect("the beginning");
    let mut owner = Daemon::new(plain, VOLUMES);
    let expected = [
        "a data store fails",
        "data-store-away",
        "data-store-full",
        "the store is full",
        "could not upload",
        "fragments-lacking",
    ];
    expected.iter().for_each(|text| owner.announce(text));
    owner
}

impl<S: Stores> Game<S> {
    /// Starts the pool over its stores, and fills it.
    fn start(shape: Shape, mut owner: Daemon, stores: S, seed: u64) -> Game<S> {
        owner.configure(&shape.text(&stores.urls()));
        owner.restart();
        let (connections, has_fio) = (open(&owner), has_fio_with_nbd());
        let (random, history) = (Random::new(seed, 3), History::new(seed));
        let mut game = Game { shape, owner, stores, random, history, connections, has_fio };
        game.history.run_for(&mut game.connections, Duration::from_millis(700));
        let _ = game.owner.json(&["drain"]);
        game.settle();
        game
    }

    fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).expect("small");
        usize::try_from(self.random.below(end)).expect("small")
    }

    fn plan(&mut self) -> Round {
        let mut free: Vec<usize> = (0..self.shape.stores).collect();
        let count = 1 + self.below(self.shape.parity);
        let victim = |game: &mut Self, free: &mut Vec<usize>| {
            let number = free.swap_remove(game.below(free.len()));
            (number, *game.random.pick(game.stores.failures()))
        };
        let victims: Vec<_> = (0..count).map(|_| victim(self, &mut free)).collect();
        let pauses =
            victims.iter().map(|_| Duration::from_millis(self.random.below(400))).collect();
        let (is_owner_killed, is_drained) = (self.random.chance(40), self.random.chance(30));
        Round { victims, pauses, is_owner_killed, is_drained }
    }

    fn round(&mut self, number: usize) {
        let round = self.plan();
        let begun = Instant::now();
        println!("round {number}: {round:?}");
        let is_answered = self.fail(&round);
        if round.is_owner_killed {
            self.owner.restart();
            self.connections = open(&self.owner);
        }
        if !is_answered {
            self.history.reissue(&mut self.connections);
        }
        self.check("while they fail");
        let seen = round.victims.iter().filter(|(_, failure)| failure.is_seen_at_once()).count();
        wait_for("the status names the lost stores", || failing(&self.owner) >= seen);
        let lost = round.victims.iter().filter(|(_, failure)| !failure.takes_writes()).count();
        let is_spare_left = self.shape.stores - lost >= self.shape.data + self.shape.parity;
        if round.is_drained && is_spare_left {
            let _ = self.owner.json(&["drain"]);
            self.check("drained while they fail");
        }
        let failed_ms = begun.elapsed().as_millis();
        for (store, failure) in &round.victims {
            self.stores.repair(*store, *failure);
        }
        if round.victims.iter().any(|(_, failure)| *failure == Failure::Wiped) {
            self.name_stores();
        }
        self.settle();
        self.check("afterwards");
        println!("round {number}: {failed_ms} of {} ms", begun.elapsed().as_millis());
    }

    /// Lets the stores of a round fail under load. Returns whether the newest write was answered.
    fn fail(&mut self, round: &Round) -> bool {
        let is_over = AtomicBool::new(false);
        let Game { owner, stores, history, connections, has_fio, .. } = self;
        let uri = owner.unix(FIO_VOLUME).uri();
        std::thread::scope(|scope| {
            let over = Over(&is_over);
            let load = scope.spawn(|| history.run_until(connections, WRITE_COUNT_MAX, &is_over));
            // It cannot go on without its connection.
            let fio = (*has_fio && !round.is_owner_killed).then(|| scope.spawn(|| fio(&uri)));
            for ((store, failure), pause) in round.victims.iter().zip(&round.pauses) {
                std::thread::sleep(*pause);
                stores.fail(*store, *failure);
            }
            std::thread::sleep(FAILURE_TIME);
            if round.is_owner_killed {
                owner.kill();
            }
            if let Some(fio) = fio {
                fio.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            drop(over);
            load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Names the stores anew in the settings of the pool, which count from its next start.
    fn name_stores(&mut self) {
        self.owner.configure(&self.shape.text(&self.stores.urls()));
        self.connections.clear();
        // At an orderly stop, destage would wait for fragments that have no place yet.
        self.owner.kill();
        self.owner.restart();
        self.connections = open(&self.owner);
    }

    /// Waits until all stores work, and every segment survives as many losses as the scheme promises.
    fn settle(&mut self) {
        let deadline = Instant::now() + WHOLE_MAX;
        let losses = u64::try_from(self.shape.parity).expect("small");
        loop {
            let failing = failing(&self.owner);
            if failing == 0
                && store_count(&self.owner) == self.shape.stores
                && is_whole(&self.owner, losses)
            {
                return;
            }
            let status = || self.owner.json(&["status"])["data_stores"].clone();
            assert!(Instant::now() < deadline, "not whole in {WHOLE_MAX:?}: {}", status());
            // A store that was full counts as well when it has taken a fragment.
            if failing > 0 {
                (0..20).for_each(|_| assert!(self.history.write(&mut self.connections)));
                let _ = self.owner.command(&["drain"]);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Reads everything and insists on all writes.
    fn check(&mut self, when: &str) {
        let found = self.history.prefix(&mut self.connections);
        assert_eq!(found, self.history.count(), "{when}");
    }

    /// Plays the rounds, and ends the pool in order.
    fn play(mut self, round_count: usize) {
        (0..round_count).for_each(|number| self.round(number));
        self.connections.clear();
        self.owner.stop();
        let _ = self.owner.fsck();
        self.stores.stop();
        let Shape { data, parity, stores } = self.shape;
        println!(
            "{data}+{parity} over {stores} stores: {round_count} rounds, {} writes",
            self.history.count()
        );
    }
}

/// Writes all over a volume, reads it back, and insists that it is right.
fn fio(uri: &str) {
    run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &format!("--uri={uri}"),
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--size=8m",
            "--iodepth=8",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--randrepeat=0",
            "--fsync=64",
        ],
    );
}

/// Returns the number in a variable.
fn number_in(variable: &str) -> Option<usize> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

#[test]
fn failures_of_data_nodes_lose_nothing() {
    needs_network!();
    let rounds = number_in(ROUNDS);
    let small = Shape { data: 4, parity: 2, stores: 7 };
    let large = [14, 16].map(|data| Shape { data, parity: 2, stores: 18 });
    let shapes = [&[small][..], if rounds.is_some() { &large } else { &[] }].concat();
    for (seed, shape) in
        seeds(1).into_iter().flat_map(|seed| shapes.iter().map(move |it| (seed, it)))
    {
        println!("SEED={seed}");
        let network = Network::new(shape.stores + 1);
        network.at_switch(|| {
            let mut owner = owner(*shape);
            owner.enter(network.space(0));
            owner.listen(&format!("{}:{NBD_PORT}", network.address(0)));
            owner.argue(&["--allow-plain-remote"]);
            let nodes = Nodes::start(&network, &mut owner, shape.stores);
            Game::start(*shape, owner, nodes, seed).play(rounds.unwrap_or(3));
        });
    }
}

#[test]
fn failures_of_drives_of_one_machine_lose_nothing() {
    needs_root!();
    for seed in seeds(1) {
        println!("SEED={seed}");
        let shape = Shape { data: 21, parity: 3, stores: 24 };
        let drives = Directories(Drives::new(shape.stores));
        Game::start(shape, owner(shape), drives, seed).play(number_in(ROUNDS).unwrap_or(2));
    }
}

/// Opens the volumes of a history for reads that may wait until they fail.
fn open_patiently(owner: &Daemon) -> Vec<Connection> {
    let names = crate::stores::VOLUMES.iter().map(|(name, _)| owner.endpoint(name));
    let open = |endpoint| Connection::open_within(READ_TIME_MAX, &endpoint, &Wanted::everything());
    names.map(open).collect::<std::io::Result<_>>().expect("they open")
}

/// Whether the status says that some data cannot be read.
fn is_unreadable(owner: &Daemon) -> bool {
    let found = conditions(owner, "fragments-lacking");
    let cost = found.first().and_then(|one| one["cost"].as_str());
    cost.is_some_and(|cost| cost.contains("cannot be read now"))
}

/// A pool with a single fragment of parity, two of whose data nodes die with the end of this function.
fn with_two_dead_nodes(seed: u64, scheme: &str, count: usize) -> (DataNodes, History, [usize; 2]) {
    let mut all = DataNodes::start(scheme, count, "");
    for expected in [
        "fragments-lacking",
        "store-unavailable",
        "object-unreadable",
        "destage-failing",
        "data-at-risk",
        "could not carry out a request",
    ] {
        all.owner.announce(expected);
    }
    let mut history = History::new(seed);
    history.run_for(&mut open(&all.owner), Duration::from_secs(1));
    let _ = all.owner.json(&["drain"]);
    wait_until_whole(&all.owner, 1);
    let first = Random::new(seed, 3).below(u64::try_from(count).expect("small"));
    let first = usize::try_from(first).expect("small");
    let dead = [first, (first + 1) % count];
    println!("data nodes {dead:?} die");
    dead.iter().for_each(|number| all.nodes[*number].kill());
    wait_for("the dead nodes are told", || failing(&all.owner) == 2);
    wait_for("the status says that data cannot be read", || is_unreadable(&all.owner));
    // The log has room.
    (0..20).for_each(|_| assert!(history.write(&mut open(&all.owner))));
    (all, history, dead)
}

/// Ends the test of a pool with one dead node, which is whole when that one is back.
fn is_whole_again(mut all: DataNodes, history: &History, dead: usize, id: u32) {
    wait_for("the status says that all data is read", || !is_unreadable(&all.owner));
    all.nodes[dead].restart();
    wait_for("all are back", || failing(&all.owner) == 0);
    let _ = all.owner.json(&["drain"]);
    wait_until_whole(&all.owner, 1);
    assert_eq!(history.prefix(&mut open(&all.owner)), history.count());
    assert_eq!(all.owner.id(), id, "it was not restarted");
    all.owner.stop();
    let _ = all.owner.fsck();
}

#[test]
fn reads_wait_while_nothing_is_readable_and_fail_in_the_end() {
    for seed in seeds(1) {
        // The two nodes have all that there is.
        let (mut all, history, dead) = with_two_dead_nodes(seed, "1+1", 2);
        let id = all.owner.id();
        let mut connections = open_patiently(&all.owner);
        if number_in(ROUNDS).is_some() {
            let refused_count = history.refused_reads(&mut connections);
            println!("{refused_count} reads were refused after {} writes", history.count());
            assert!(refused_count > 0, "they waited for a node that did not come back");
        }
        let sent = history.begin_reads(&mut connections);
        wait_for("the status says that reads wait", || {
            let found = conditions(&all.owner, "store-unavailable");
            found.iter().any(|one| one["subject"] == "read")
        });
        all.nodes[dead[0]].restart();
        assert_eq!(history.end_reads(&mut connections, &sent), 0, "a read that waited was refused");
        drop(connections);
        is_whole_again(all, &history, dead[1], id);
    }
}

#[test]
fn reads_of_unreadable_segments_fail_and_those_of_others_do_not() {
    for seed in seeds(1) {
        // Of four nodes, each segment has fragments on three.
        let (mut all, history, dead) = with_two_dead_nodes(seed, "2+1", 4);
        let id = all.owner.id();
        let mut connections = open_patiently(&all.owner);
        let begun = Instant::now();
        let refused_count = history.refused_reads(&mut connections);
        let count = connections.len() * PARTS;
        println!("{refused_count} of {count} reads were refused within {:?}", begun.elapsed());
        assert!((1..count).contains(&refused_count), "{refused_count}");
        let unreadable = conditions(&all.owner, "object-unreadable");
        assert!(!unreadable.is_empty(), "the status names the segments");
        all.nodes[dead[0]].restart();
        wait_for("everything is read", || history.refused_reads(&mut connections) == 0);
        wait_for("the conditions end", || conditions(&all.owner, "object-unreadable").is_empty());
        drop(connections);
        is_whole_again(all, &history, dead[1], id);
    }
}

#[test]
fn postgresql_goes_on_while_data_nodes_die() {
    needs_root!();
    needs!("nbdfuse", "mkfs.ext4", "losetup", "setpriv");
    let Some(programs) = Postgres::programs() else {
        return skip("PostgreSQL is not installed");
    };
    for seed in seeds(1) {
        println!("SEED={seed}");
        let shape = match number_in(PGBENCH_SECONDS) {
            Some(_) => Shape { data: 4, parity: 2, stores: 7 },
            None => Shape { data: 2, parity: 1, stores: 4 },
        };
        let mut all =
            DataNodes::start_with(&[("disk", "512MiB")], shape.stores, |urls| shape.text(urls));
        all.owner.announce("fragments-lacking");
        let place = Place::new();
        let mounted = Mounted::mount(&all.owner.unix("disk").uri(), &place, true);
        let mut postgres = Postgres::made(programs.clone(), &mounted.mountpoint, &place);
        postgres.bench(&["-i", "-q", "-s", "2"]);
        let _ = all.owner.json(&["drain"]);
        let seconds = number_in(PGBENCH_SECONDS).unwrap_or(8).to_string();
        let bench = std::thread::spawn(postgres.load(&["-T", &seconds, "-c", "4"]));
        let mut random = Random::new(seed, 3);
        let mut kill_count = 0;
        while !bench.is_finished() {
            let losses = u64::try_from(shape.parity).expect("small");
            wait_for("the pool is whole", || {
                failing(&all.owner) == 0 && is_whole(&all.owner, losses)
            });
            let first = random.below(u64::try_from(shape.stores).expect("small"));
            let first = usize::try_from(first).expect("small");
            let victims = (first..first + shape.parity).map(|number| number % shape.stores);
            victims.clone().for_each(|number| all.nodes[number].kill());
            std::thread::sleep(Duration::from_millis(1000 + random.below(2000)));
            victims.for_each(|number| all.nodes[number].restart());
            kill_count += shape.parity;
        }
        let said = bench.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        println!("{said}{kill_count} data nodes were killed");
        assert!(kill_count > 0 && said.contains("number of failed transactions: 0 "), "{said}");
        postgres.check();
        mounted.unmount();
        all.owner.stop();
        let _ = all.owner.fsck();
    }
}
