//! The rounds: start, check everything, load, end badly, perhaps again during recovery.
//!
//! Invariants:
//! - Every sector of every window is checked after every restart that succeeds.
//! - The first error ends the run, and is reported with the seed and the round.
//! - A fail point counts when the server's process ended at it, not when it was armed.

use super::profile::{Ending, Profile};
use super::states::{Operator, States};
use super::target::Target;
use super::worker::Round;
use crate::model::VolumeModel;
use crate::nbd::wire::CMD_READ;
use crate::nbd::{Connection, Endpoint, Wanted};
use crate::seed::Random;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One volume of a plan; its requests go to one window.
#[derive(Clone, Debug)]
pub struct VolumePlan {
    /// Name of the export.
    pub name: String,
    /// First sector of the window.
    pub start_sector: u64,
    /// Sectors of the window.
    pub sector_count: usize,
}

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed, with which the run can be replayed.
    pub seed: u64,
    /// Largest number of rounds.
    pub round_count: u64,
    /// A round lasts at most about this long.
    pub round: Duration,
    /// No round begins after this.
    pub time: Duration,
    /// The volumes.
    pub volumes: Vec<VolumePlan>,
    /// Places where the server can be told to die. Each is armed until it has ended the server
    /// once, as far as the rounds suffice; after that, any of them is.
    pub fail_points: Vec<String>,
    /// How many of a hundred rounds arm a fail point; more if the rounds run out.
    pub fail_point_percent: u64,
    /// A server that does not reach the armed fail point within this time is killed.
    pub fail_point_time: Duration,
    /// The server dies at a random passage of the fail point, from the first to this one.
    pub fail_point_nth_max: u64,
    /// Snapshots and clones are made and removed all the time.
    pub has_states: bool,
    /// How many of a hundred writes write blocks that are stored already, many times over.
    pub pattern_percent: u64,
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Rounds that were begun.
    pub round_count: u64,
    /// Acknowledged requests.
    pub acknowledged_count: u64,
    /// Kills during recovery.
    pub recovery_kill_count: u64,
    /// How often each fail point ended the server.
    pub fired: BTreeMap<String, u64>,
    /// Longest start, in milliseconds.
    pub start_ms_max: u64,
    /// Number of answered commands on snapshots and clones, by kind.
    pub states: BTreeMap<&'static str, u64>,
}

/// Runs the plan.
///
/// # Errors
/// The first error found, with the round, its mix and its end, and the totals so far.
pub fn torture(target: &mut dyn Target, plan: &Plan) -> Result<Totals, String> {
    let mut run = Run::new(plan);
    let begun = Instant::now();
    while run.totals.round_count < plan.round_count && begun.elapsed() < plan.time {
        run.totals.round_count += 1;
        run.round(target).map_err(|error| run.blame(&error))?;
    }
    // The end of the last round is checked too, and an orderly stop leaves nothing to recover.
    run.words = "the final check".to_owned();
    let last = run.final_check(target);
    last.map_err(|error| run.blame(&error))?;
    run.totals.states = run.states.done;
    Ok(run.totals)
}

struct Run<'a> {
    plan: &'a Plan,
    random: Random,
    models: Vec<Mutex<VolumeModel>>,
    states: States,
    sequence: u64,
    totals: Totals,
    /// How often each fail point was armed.
    armed: BTreeMap<String, u64>,
    words: String,
    start: Duration,
}

/// The reason why a started server fails its check.
pub(super) enum Unfit {
    /// It has ended, or never came up.
    Gone(String),
    /// It answered, and the answer is wrong.
    Wrong(String),
}

impl Unfit {
    fn words(self) -> String {
        let (Unfit::Gone(words) | Unfit::Wrong(words)) = self;
        words
    }

    /// Adds the name of the unfit volume or snapshot.
    pub(super) fn of(self, name: &str) -> Unfit {
        match self {
            Unfit::Gone(words) => Unfit::Gone(format!("{name}: {words}")),
            Unfit::Wrong(words) => Unfit::Wrong(format!("{name}: {words}")),
        }
    }
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan) -> Run<'a> {
        let model = |(volume, number): (&VolumePlan, u8)| {
            Mutex::new(VolumeModel::new(
                plan.seed,
                number,
                volume.start_sector,
                volume.sector_count,
            ))
        };
        Run {
            plan,
            random: Random::new(plan.seed, 0),
            models: plan.volumes.iter().zip(0u8..).map(model).collect(),
            states: States::default(),
            sequence: 0,
            totals: Totals::default(),
            armed: BTreeMap::new(),
            words: String::new(),
            start: Duration::from_millis(100),
        }
    }

    fn blame(&self, error: &str) -> String {
        let Totals { round_count, acknowledged_count, .. } = self.totals;
        format!(
            "SEED={} round {round_count} ({}), {acknowledged_count} requests acknowledged:\n{error}",
            self.plan.seed, self.words
        )
    }

    fn round(&mut self, target: &mut dyn Target) -> Result<(), String> {
        let profile = Profile::random(&mut self.random);
        let (ending, point) = self.ending();
        self.words =
            format!("mix {}, ending {ending:?} {}", profile.name, point.as_deref().unwrap_or(""));
        target.arm(point);
        let is_up = match self.start(target) {
            Ok(()) => true,
            // A fail point may be passed before the server serves, or before the last answer of the
            // check.
            Err(Unfit::Gone(error)) if matches!(ending, Ending::FailPoint(_)) => {
                let fired = target.reap().map_err(|ended| format!("{error}\n{ended}"))?;
                self.fired(fired.ok_or(error)?);
                false
            }
            Err(unfit) => return Err(unfit.words()),
        };
        target.arm(None);
        if is_up {
            self.load(target, profile, &ending)?;
        }
        for model in &self.models {
            model.lock().expect("no panic holds it").crashed();
        }
        self.states.crashed();
        self.complain(target)?;
        while self.random.chance(25) {
            let micros = u64::try_from(self.start.as_micros()).expect("short").max(1);
            let delay = Duration::from_micros(self.random.below(micros * 5 / 4 + 1));
            self.words = format!("{}, then a kill {delay:?} into recovery", self.words);
            target.start_and_kill(delay)?;
            self.totals.recovery_kill_count += 1;
            self.complain(target)?;
        }
        Ok(())
    }

    fn ending(&mut self) -> (Ending, Option<String>) {
        let all = &self.plan.fail_points;
        let is_left = |point: &&String| !self.totals.fired.contains_key(*point);
        let left: Vec<&String> = all.iter().filter(is_left).collect();
        let round_count_left = self.plan.round_count - self.totals.round_count + 1;
        let is_urgent = u64::try_from(left.len()).expect("few") >= round_count_left;
        let is_armed = self.random.chance(self.plan.fail_point_percent) || is_urgent;
        if all.is_empty() || !is_armed {
            return (Ending::random(&mut self.random, self.plan.round), None);
        }
        // A fail point that is never reached must not take the turns of the others.
        let armed_count = |point: &&String| self.armed.get(*point).copied().unwrap_or(0);
        let least = left.iter().map(armed_count).min();
        let candidates: Vec<&String> = match least {
            None => all.iter().collect(),
            Some(least) => left.into_iter().filter(|one| armed_count(one) == least).collect(),
        };
        let point = *self.random.pick(&candidates);
        *self.armed.entry(point.clone()).or_default() += 1;
        let nth = self.random.between(1, self.plan.fail_point_nth_max);
        (Ending::FailPoint(self.plan.fail_point_time), Some(format!("{point}:{nth}")))
    }

    fn fired(&mut self, point: String) {
        *self.totals.fired.entry(point).or_default() += 1;
    }

    /// Starts the server and checks everything that it serves.
    fn start(&mut self, target: &mut dyn Target) -> Result<(), Unfit> {
        let begun = Instant::now();
        target.start().map_err(Unfit::Gone)?;
        self.start = begun.elapsed();
        let start_ms = u64::try_from(self.start.as_millis()).expect("short");
        self.totals.start_ms_max = self.totals.start_ms_max.max(start_ms);
        for (volume, model) in self.plan.volumes.iter().zip(&self.models) {
            check(&target.endpoint(&volume.name), &mut model.lock().expect("no panic holds it"))?;
        }
        if self.plan.has_states {
            self.states.check(target)?;
        }
        Ok(())
    }

    fn load(
        &mut self,
        target: &mut dyn Target,
        profile: Profile,
        ending: &Ending,
    ) -> Result<(), String> {
        let never = u64::MAX;
        let round = Round {
            models: std::mem::take(&mut self.models),
            sequence: AtomicU64::new(self.sequence),
            profile,
            kill: target.killer(),
            kill_at_durable: if let Ending::AfterDurable(n) = ending { *n } else { never },
            kill_at_acknowledged: if let Ending::AfterAcknowledged(n) = ending {
                *n
            } else {
                never
            },
            durable_count: AtomicU64::new(0),
            acknowledged_count: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            // The moment at which a fail point strikes is not known beforehand.
            is_ending: AtomicBool::new(matches!(ending, Ending::FailPoint(_))),
            pattern_percent: self.plan.pattern_percent,
        };
        let mut connections = Vec::new();
        for (number, volume) in self.plan.volumes.iter().enumerate() {
            for _ in 0..self.random.between(1, 3) {
                let random = Random::new(self.random.bits(), 1);
                connections.push((number, target.endpoint(&volume.name), random));
            }
        }
        let asker = target.asker().filter(|_| self.plan.has_states);
        let operator = asker.map(|ask| Operator {
            states: &mut self.states,
            round: &round,
            volumes: self.plan.volumes.iter().map(|volume| volume.name.clone()).collect(),
            ask,
            endpoint: target.endpoint(&self.plan.volumes[0].name),
            random: Random::new(self.random.bits(), 2),
        });
        let (result, is_killed) = std::thread::scope(|scope| {
            let operator = operator.map(|operator| {
                let round = &round;
                scope.spawn(move || operator.run().inspect_err(|_| round.end()))
            });
            let drive = |(number, endpoint, random): (usize, Endpoint, Random)| {
                let round = &round;
                scope.spawn(move || {
                    let result = round.drive(number, &endpoint, random);
                    // One failure ends the round for all connections.
                    result.inspect_err(|_| round.end())
                })
            };
            let threads: Vec<_> = connections.into_iter().map(drive).collect();
            let is_done = || threads.iter().all(|thread| thread.is_finished());
            let is_killed = conduct(&round, ending, self.plan.round, target, &is_done);
            let threads = threads.into_iter().chain(operator);
            let results = threads.map(|thread| thread.join().expect("no panic"));
            (results.collect::<Result<Vec<()>, String>>(), is_killed)
        });
        self.models = round.models;
        self.sequence = round.sequence.into_inner();
        self.totals.acknowledged_count += round.acknowledged_count.into_inner();
        if let Err(wrong) = result {
            let said = target.complaints().join("\n");
            return Err(format!("{wrong}\nmeanwhile it said: {said}"));
        }
        if is_killed {
            if let Some(point) = target.reap()? {
                self.fired(point);
            }
        } else {
            target.finish_stop()?;
        }
        Ok(())
    }

    fn final_check(&mut self, target: &mut dyn Target) -> Result<(), String> {
        for _ in 0..2 {
            self.start(target).map_err(Unfit::words)?;
            target.begin_stop();
            target.finish_stop()?;
            self.complain(target)?;
        }
        Ok(())
    }

    fn complain(&self, target: &mut dyn Target) -> Result<(), String> {
        let complaints = target.complaints();
        if complaints.is_empty() {
            return Ok(());
        }
        Err(format!("log lines that nobody announced:\n{}", complaints.join("\n")))
    }
}

/// Ends the round as planned; true when the server was killed rather than stopped.
fn conduct(
    round: &Round,
    ending: &Ending,
    time: Duration,
    target: &mut dyn Target,
    is_done: &dyn Fn() -> bool,
) -> bool {
    let wait = |limit: Duration| {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && !is_done() {
            std::thread::sleep(Duration::from_millis(1).min(limit));
        }
    };
    match ending {
        Ending::AfterDurable(_) | Ending::AfterAcknowledged(_) => wait(time * 4),
        Ending::AfterTime(limit) => wait(*limit),
        Ending::FailPoint(limit) => wait(*limit),
        Ending::DuringStop(_) | Ending::Stop => {
            wait(time / 2);
            round.is_ending.store(true, Ordering::SeqCst);
            target.begin_stop();
            if let Ending::DuringStop(delay) = ending {
                std::thread::sleep(*delay);
            } else {
                // Requests continue for a moment: the server has to refuse them in order.
                wait(Duration::from_millis(20));
                round.end();
                return false;
            }
        }
    }
    round.end();
    (round.kill)();
    true
}

/// Reads the window of a volume and checks it.
pub(super) fn check(endpoint: &Endpoint, model: &mut VolumeModel) -> Result<(), Unfit> {
    const STEP: u32 = 256 << 10;
    const DEPTH: usize = 8;
    let failed = |error: std::io::Error| {
        let words = format!("read {} after a restart: {error}", endpoint.uri());
        match error.kind() {
            std::io::ErrorKind::InvalidData => Unfit::Wrong(words),
            _ => Unfit::Gone(words),
        }
    };
    let mut connection = Connection::open(endpoint, &Wanted::everything()).map_err(failed)?;
    let window = model.window();
    let mut next = window.start;
    let mut flying = std::collections::HashMap::new();
    while next < window.end || !flying.is_empty() {
        while next < window.end && flying.len() < DEPTH {
            let length = u64::from(STEP).min(window.end - next);
            let length = u32::try_from(length).expect("bounded");
            let cookie = connection.submit(CMD_READ, 0, next, length, &[]).map_err(failed)?;
            flying.insert(cookie, next);
            next += u64::from(length);
        }
        let reply = connection.receive().map_err(failed)?;
        let offset = flying.remove(&reply.cookie).expect("it was sent");
        if reply.error != 0 {
            let words = format!("read {} at {offset}: error {}", endpoint.uri(), reply.error);
            return Err(Unfit::Wrong(words));
        }
        model.recovered(offset, &reply.payload).map_err(Unfit::Wrong)?;
    }
    connection.disconnect().map_err(failed)
}
