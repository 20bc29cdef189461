//! The rounds: start, check everything, load, end badly, perhaps again during recovery.
//!
//! Invariants:
//! - Every sector of every window is checked after every restart that comes up.
//! - The first wrong thing ends the run with the seed, the round and what was wrong.

use super::profile::{Ending, Profile};
use super::target::Target;
use super::worker::Round;
use crate::model::VolumeModel;
use crate::nbd::wire::CMD_READ;
use crate::nbd::{Connection, Endpoint, Wanted};
use crate::seed::Random;
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

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Replays the run.
    pub seed: u64,
    /// Rounds at most.
    pub round_count: u64,
    /// A round lasts at most about this long.
    pub round: Duration,
    /// No round begins after this.
    pub time: Duration,
    /// The volumes.
    pub volumes: Vec<VolumePlan>,
    /// Of a hundred rounds, how many arm a fail point, where the server has some.
    pub fail_point_percent: u64,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Rounds that were begun.
    pub round_count: u64,
    /// Acknowledged requests.
    pub acknowledged_count: u64,
    /// Kills during recovery.
    pub recovery_kill_count: u64,
    /// Rounds that ended at a fail point.
    pub fail_point_count: u64,
    /// Longest start, in milliseconds.
    pub start_ms_max: u64,
}

/// Runs the plan.
///
/// # Errors
/// The first thing that was wrong, with the round, its mix and its end, and the totals so far.
pub fn torture(target: &mut dyn Target, plan: &Plan) -> Result<Totals, String> {
    let mut run = Run::new(plan);
    let begun = Instant::now();
    while run.totals.round_count < plan.round_count && begun.elapsed() < plan.time {
        run.totals.round_count += 1;
        run.round(target).map_err(|error| run.blame(&error))?;
    }
    // The last round's end is checked as well, and an orderly stop leaves nothing to recover.
    run.words = "the final check".to_owned();
    let last = run.final_check(target);
    last.map_err(|error| run.blame(&error))?;
    Ok(run.totals)
}

struct Run<'a> {
    plan: &'a Plan,
    random: Random,
    models: Vec<Mutex<VolumeModel>>,
    sequence: u64,
    totals: Totals,
    words: String,
    start: Duration,
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
            sequence: 0,
            totals: Totals::default(),
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
        let (ending, point) = self.ending(target);
        self.words =
            format!("mix {}, ending {ending:?} {}", profile.name, point.as_deref().unwrap_or(""));
        target.arm(point);
        let is_up = match self.start(target) {
            // A fail point may lie before serving.
            Err(_) if matches!(ending, Ending::FailPoint(_)) && target.reap().is_ok() => false,
            started => started.map(|()| true)?,
        };
        target.arm(None);
        if is_up {
            self.load(target, profile, &ending)?;
        }
        for model in &self.models {
            model.lock().expect("no panic holds it").crashed();
        }
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

    fn ending(&mut self, target: &dyn Target) -> (Ending, Option<String>) {
        let points = target.fail_points();
        if !points.is_empty() && self.random.chance(self.plan.fail_point_percent) {
            let point = self.random.pick(&points).clone();
            let nth = self.random.between(1, 6);
            return (Ending::FailPoint(self.plan.round * 4), Some(format!("{point}:{nth}")));
        }
        (Ending::random(&mut self.random, self.plan.round), None)
    }

    /// Starts the server and checks all it serves.
    fn start(&mut self, target: &mut dyn Target) -> Result<(), String> {
        let begun = Instant::now();
        target.start()?;
        self.start = begun.elapsed();
        let start_ms = u64::try_from(self.start.as_millis()).expect("short");
        self.totals.start_ms_max = self.totals.start_ms_max.max(start_ms);
        for (volume, model) in self.plan.volumes.iter().zip(&self.models) {
            check(&target.endpoint(&volume.name), &mut model.lock().expect("no panic holds it"))?;
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
            // Where a fail point strikes, nobody can say beforehand.
            is_ending: AtomicBool::new(matches!(ending, Ending::FailPoint(_))),
        };
        let mut connections = Vec::new();
        for (number, volume) in self.plan.volumes.iter().enumerate() {
            for _ in 0..self.random.between(1, 3) {
                let random = Random::new(self.random.bits(), 1);
                connections.push((number, target.endpoint(&volume.name), random));
            }
        }
        let (result, is_killed) = std::thread::scope(|scope| {
            let drive = |(number, endpoint, random): (usize, Endpoint, Random)| {
                let round = &round;
                scope.spawn(move || {
                    let result = round.drive(number, &endpoint, random);
                    // One failure ends the round for all.
                    result.inspect_err(|_| round.end())
                })
            };
            let threads: Vec<_> = connections.into_iter().map(drive).collect();
            let is_done = || threads.iter().all(|thread| thread.is_finished());
            let is_killed = conduct(&round, ending, self.plan.round, target, &is_done);
            let results = threads.into_iter().map(|thread| thread.join().expect("no panic"));
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
            target.reap()?;
        } else {
            target.finish_stop()?;
        }
        self.totals.fail_point_count += u64::from(matches!(ending, Ending::FailPoint(_)));
        Ok(())
    }

    fn final_check(&mut self, target: &mut dyn Target) -> Result<(), String> {
        self.start(target)?;
        target.begin_stop();
        target.finish_stop()?;
        self.complain(target)?;
        self.start(target)?;
        target.begin_stop();
        target.finish_stop()?;
        self.complain(target)
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
                // Requests go on for a moment: the server has to turn them away in order.
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
fn check(endpoint: &Endpoint, model: &mut VolumeModel) -> Result<(), String> {
    const STEP: u32 = 256 << 10;
    const DEPTH: usize = 8;
    let failed =
        |error: std::io::Error| format!("read {} after a restart: {error}", endpoint.uri());
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
            return Err(format!("read {} at {offset}: error {}", endpoint.uri(), reply.error));
        }
        model.recovered(offset, &reply.payload)?;
    }
    connection.disconnect().map_err(failed)
}
