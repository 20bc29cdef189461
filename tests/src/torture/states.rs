//! Snapshots and clones under the crash tester. They are made, written, made independent and
//! removed while the volumes are under load and the server dies. Each is checked after every
//! restart.
//!
//! Invariants:
//! - A snapshot is checked as soon as it is made; from then on it shows exactly these contents,
//!   over any number of deaths.
//! - A command without an answer was carried out wholly or not at all. A command with an answer has
//!   had its effect.
//! - Removed objects do not come back, and no object exists that the test has not made.

use super::rounds::{Unfit, check};
use super::target::{Ask, Target};
use super::worker::Round;
use crate::model::{Effect, VolumeModel};
use crate::nbd::wire::{CMD_TRIM, CMD_WRITE};
use crate::nbd::{Connection, Endpoint, Wanted};
use crate::seed::Random;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Largest number of snapshots, and of clones, at a time.
const SNAPSHOTS_MAX: usize = 8;
const CLONES_MAX: usize = 4;
/// How long a client that is leaving may delay a command.
const GRACE: Duration = Duration::from_secs(20);

/// The known state of existence of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The command that makes it is not answered yet.
    Making,
    /// The command that made it was answered.
    There,
    /// The command that removes it is not answered yet.
    Going,
}

/// A snapshot or a clone.
struct State {
    model: VolumeModel,
    fate: Fate,
    /// It has been read, so the model knows every sector.
    is_settled: bool,
    /// For a clone: the snapshot that it may depend on.
    origin: Option<String>,
    /// For a clone: the contents to which it may have been rolled back.
    or_else: Option<VolumeModel>,
}

impl State {
    fn new(model: VolumeModel) -> State {
        State { model, fate: Fate::Making, is_settled: false, origin: None, or_else: None }
    }

    /// Reads all of it. If the server dies meanwhile, all possibilities remain.
    fn check(&mut self, endpoint: &Endpoint) -> Result<(), Unfit> {
        match &self.or_else {
            None => check(endpoint, &mut self.model)?,
            Some(other) => {
                let (mut one, mut other) = (self.model.copy(), other.copy());
                self.model = match check(endpoint, &mut one) {
                    Ok(()) => one,
                    Err(Unfit::Gone(words)) => return Err(Unfit::Gone(words)),
                    Err(wrong) => match check(endpoint, &mut other) {
                        Ok(()) => other,
                        Err(Unfit::Gone(words)) => return Err(Unfit::Gone(words)),
                        // It matches neither: the error reports the difference from its contents
                        // before the rollback.
                        Err(_) => return Err(wrong),
                    },
                };
                self.or_else = None;
            }
        }
        self.is_settled = true;
        Ok(())
    }
}

/// All snapshots and clones that were made and not removed.
#[derive(Default)]
pub struct States {
    /// By `VOLUME@NAME`.
    snapshots: BTreeMap<String, State>,
    /// By name.
    clones: BTreeMap<String, State>,
    counter: u64,
    /// Number of answered commands by kind, for reports.
    pub done: BTreeMap<&'static str, u64>,
}

/// Part of the refusal to promote a clone that has become independent in the background.
const INDEPENDENT: &str = "depends on no snapshot";

/// The reason why a command was not carried out.
enum Refused {
    /// The server is stopping; it may have carried out the command.
    Gone,
    /// The clone is independent already.
    Independent,
    /// The server refused, with this message.
    Said(String),
}

impl States {
    /// Notes the server's death. Commands in flight may have been carried out or not.
    pub fn crashed(&mut self) {
        for state in self.snapshots.values_mut().chain(self.clones.values_mut()) {
            state.model.crashed();
        }
    }

    /// Compares the restarted server's objects with the expected ones, and reads all of them.
    pub(super) fn check(&mut self, target: &dyn Target) -> Result<(), Unfit> {
        let Some(ask) = target.asker() else { return Ok(()) };
        let snapshots = listed(&ask, &["snapshot", "list"])?;
        let name_of = |one: &Value| format!("{}@{}", text(&one["volume"]), text(&one["name"]));
        let snapshots: BTreeSet<String> = snapshots.iter().map(name_of).collect();
        self.check_together(&snapshots)?;
        settle("snapshot", &mut self.snapshots, &snapshots)?;
        let volumes = listed(&ask, &["volume", "list"])?;
        let is_clone = |one: &&Value| text(&one["name"]).starts_with("clone-");
        // After a death between the two steps of `rm --now` the clone could still be restored, so
        // it is removed again.
        let (gone, volumes): (Vec<Value>, Vec<Value>) =
            volumes.into_iter().partition(|one| !one["removed_at"].is_null());
        for one in gone.iter().filter(is_clone) {
            let words = ["volume", "rm", "--now", text(&one["name"])];
            let output = ask(&words).output().map_err(|error| Unfit::Gone(error.to_string()))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                return Err(Unfit::Gone(format!("{words:?}: {said}")));
            }
        }
        let clones: BTreeMap<&str, &Value> =
            volumes.iter().filter(is_clone).map(|one| (text(&one["name"]), one)).collect();
        let names = clones.keys().map(|name| (*name).to_owned()).collect();
        settle("clone", &mut self.clones, &names)?;
        for (name, state) in &mut self.clones {
            if clones[&name[..]]["origin"].is_null() {
                state.origin = None;
            }
        }
        for (name, state) in self.clones.iter_mut().chain(&mut self.snapshots) {
            state.check(&target.endpoint(name)).map_err(|unfit| unfit.of(name))?;
        }
        Ok(())
    }

    /// Checks that the snapshots of one command exist all or not at all.
    fn check_together(&self, listed: &BTreeSet<String>) -> Result<(), Unfit> {
        let making = self.snapshots.iter().filter(|(_, state)| state.fate == Fate::Making);
        let mut by_name: BTreeMap<&str, BTreeSet<bool>> = BTreeMap::new();
        for (full, _) in making {
            let (_, name) = full.split_once('@').expect("it has a name");
            by_name.entry(name).or_default().insert(listed.contains(full));
        }
        match by_name.iter().find(|(_, there)| there.len() > 1) {
            None => Ok(()),
            Some((name, _)) => {
                Err(Unfit::Wrong(format!("only a part of the snapshots {name} is there")))
            }
        }
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }
}

/// Returns a list of the server's objects.
fn listed(ask: &Ask, words: &[&str]) -> Result<Vec<Value>, Unfit> {
    let output = ask(&[words, &["-o", "json"]].concat()).output();
    let output = output.map_err(|error| Unfit::Gone(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Unfit::Gone(format!("{words:?}: {said}")));
    }
    let value: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Unfit::Wrong(format!("{words:?}: {error}")))?;
    let lists = value.as_object().into_iter().flat_map(|fields| fields.values());
    let list = lists.chain([&value]).find_map(Value::as_array);
    list.cloned().ok_or_else(|| Unfit::Wrong(format!("{words:?}: no list in {value}")))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Resolves each fate after a restart: each object exists or does not.
fn settle(
    what: &str,
    states: &mut BTreeMap<String, State>,
    listed: &BTreeSet<String>,
) -> Result<(), Unfit> {
    let is_kept = |state: &State| state.fate == Fate::There;
    let missing = states.iter().find(|(name, state)| is_kept(state) && !listed.contains(*name));
    if let Some((name, _)) = missing {
        return Err(Unfit::Wrong(format!("{what} {name} is gone")));
    }
    if let Some(name) = listed.iter().find(|name| !states.contains_key(*name)) {
        return Err(Unfit::Wrong(format!("{what} {name} is there, and should not be")));
    }
    states.retain(|name, _| listed.contains(name));
    states.values_mut().for_each(|state| state.fate = Fate::There);
    Ok(())
}

/// Makes and removes snapshots and clones for the length of a round.
pub(super) struct Operator<'a> {
    pub states: &'a mut States,
    pub round: &'a Round,
    /// Names of the volumes under load, in the order of the round's models.
    pub volumes: Vec<String>,
    pub ask: Ask,
    /// The address of all volumes and snapshots, each under its name.
    pub endpoint: Endpoint,
    pub random: Random,
}

impl Operator<'_> {
    /// Runs until the round is over.
    ///
    /// # Errors
    /// The server's error.
    pub fn run(mut self) -> Result<(), String> {
        while !self.round.is_over.load(Ordering::SeqCst) {
            let done = match self.random.below(100) {
                0..30 => self.make_snapshot(),
                30..45 => self.make_clone(),
                45..70 => self.write_clone(),
                70..82 => self.remove_snapshot(),
                82..88 => self.roll_back(),
                88..94 => self.remove_clone(),
                _ => self.promote(),
            };
            match done {
                Ok(()) | Err(Refused::Independent) => {}
                Err(Refused::Gone) if self.is_ending() => return Ok(()),
                Err(Refused::Gone) => return Err("the server is gone while it should run".into()),
                Err(Refused::Said(said)) => return Err(said),
            }
        }
        Ok(())
    }

    fn is_ending(&self) -> bool {
        self.round.is_ending.load(Ordering::SeqCst)
    }

    /// Runs a command that has to succeed while the server runs.
    fn command(&self, words: &[&str]) -> Result<(), Refused> {
        let deadline = Instant::now() + GRACE;
        loop {
            let output = (self.ask)(words).output();
            let output = output.map_err(|error| Refused::Said(format!("{words:?}: {error}")))?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if said.contains(INDEPENDENT) {
                return Err(Refused::Independent);
            }
            if said.contains("a client has it open") && Instant::now() < deadline {
                continue;
            }
            if self.is_ending() {
                return Err(Refused::Gone);
            }
            return Err(Refused::Said(format!("{words:?}: {said}")));
        }
    }

    fn did(&mut self, what: &'static str) {
        *self.states.done.entry(what).or_default() += 1;
    }

    /// Reads it once, so that its contents are known.
    fn settle(&self, name: &str, model: &mut VolumeModel) -> Result<(), Refused> {
        match check(&self.endpoint.with_export(name), model) {
            Ok(()) => Ok(()),
            Err(Unfit::Wrong(words)) => Err(Refused::Said(format!("{name}: {words}"))),
            Err(Unfit::Gone(_)) if self.is_ending() => Err(Refused::Gone),
            Err(Unfit::Gone(words)) => Err(Refused::Said(format!("{name}: {words}"))),
        }
    }

    /// Makes a snapshot of one or two volumes under load, or of a clone.
    fn make_snapshot(&mut self) -> Result<(), Refused> {
        if self.states.snapshots.len() >= SNAPSHOTS_MAX {
            return self.remove_snapshot();
        }
        let name = format!("s{}", self.states.next());
        let clones = self.names_of_clones(|_| true);
        if !clones.is_empty() && self.random.chance(40) {
            let volume = self.random.pick(&clones).clone();
            let full = format!("{volume}@{name}");
            let model = self.states.clones[&volume].model.copy();
            self.states.snapshots.insert(full.clone(), State::new(model));
            self.command(&["snapshot", "create", &full])?;
            self.did("snapshot of a clone");
            return self.look(&full);
        }
        let first = usize_of(self.random.below(self.volumes.len() as u64));
        let mut chosen = BTreeSet::from([first]);
        if self.random.chance(30) {
            chosen.insert(usize_of(self.random.below(self.volumes.len() as u64)));
        }
        let volumes: Vec<&str> = chosen.iter().map(|index| &self.volumes[*index][..]).collect();
        let asked = format!("{}@{name}", volumes.join(","));
        let model_of = |index: &usize| self.round.models[*index].lock().expect("no panic holds it");
        chosen.iter().for_each(|index| model_of(index).snapshot_begins());
        let done = self.command(&["snapshot", "create", &asked]);
        let mut made = Vec::new();
        for index in &chosen {
            let full = format!("{}@{name}", self.volumes[*index]);
            let model = model_of(index).snapshot_ends();
            self.states.snapshots.insert(full.clone(), State::new(model));
            made.push(full);
        }
        done?;
        self.did("snapshot");
        for full in &made {
            self.states.snapshots.get_mut(full).expect("inserted above").fate = Fate::There;
        }
        made.iter().try_for_each(|full| self.look(full))
    }

    /// Reads a snapshot that has just been made.
    fn look(&mut self, full: &str) -> Result<(), Refused> {
        let mut state = self.states.snapshots.remove(full).expect("it was just made");
        state.fate = Fate::There;
        let settled = self.settle(full, &mut state.model);
        state.is_settled = settled.is_ok();
        self.states.snapshots.insert(full.to_owned(), state);
        settled
    }

    fn names_of_clones(&self, is_fit: impl Fn(&State) -> bool) -> Vec<String> {
        let is_there = |state: &State| state.fate == Fate::There && is_fit(state);
        let fit = self.states.clones.iter().filter(|(_, state)| is_there(state));
        fit.map(|(name, _)| name.clone()).collect()
    }

    fn names_of_snapshots(&self, is_fit: impl Fn(&str) -> bool) -> Vec<String> {
        let is_there = |state: &State| state.fate == Fate::There && state.is_settled;
        let all = self.states.snapshots.iter();
        let fit = all.filter(|(name, state)| is_there(state) && is_fit(name));
        fit.map(|(name, _)| name.clone()).collect()
    }

    fn make_clone(&mut self) -> Result<(), Refused> {
        let snapshots = self.names_of_snapshots(|_| true);
        if snapshots.is_empty() || self.states.clones.len() >= CLONES_MAX {
            return Ok(());
        }
        let of = self.random.pick(&snapshots).clone();
        let name = format!("clone-{}", self.states.next());
        let mut state = State::new(self.states.snapshots[&of].model.copy());
        (state.origin, state.is_settled) = (Some(of.clone()), true);
        self.states.clones.insert(name.clone(), state);
        self.command(&["clone", &of, &name])?;
        let state = self.states.clones.get_mut(&name).expect("inserted above");
        state.fate = Fate::There;
        self.did("clone");
        Ok(())
    }

    /// Sends some requests, one at a time.
    fn write_clone(&mut self) -> Result<(), Refused> {
        let clones = self.names_of_clones(|_| true);
        if clones.is_empty() {
            return Ok(());
        }
        let name = self.random.pick(&clones).clone();
        let round = self.round;
        let is_ending = || round.is_ending.load(Ordering::SeqCst);
        let gone = |what: &str, error: std::io::Error| match is_ending() {
            true => Refused::Gone,
            false => Refused::Said(format!("{what} {name}: {error}")),
        };
        let endpoint = self.endpoint.with_export(&name);
        let mut connection = Connection::open(&endpoint, &Wanted::everything())
            .map_err(|error| gone("connect to", error))?;
        let model = &mut self.states.clones.get_mut(&name).expect("picked above").model;
        let window = model.window();
        for _ in 0..self.random.between(1, 40) {
            let blocks = self.random.between(1, 8);
            let places = (window.end - window.start) / 4096 - blocks;
            let start = window.start + self.random.below(places + 1) * 4096;
            let (range, sequence) =
                (start..start + blocks * 4096, round.sequence.fetch_add(1, Ordering::SeqCst) + 1);
            let effect = match self.random.below(10) {
                0 => Effect::Zero,
                1..4 => Effect::Pattern(u8::try_from(self.random.below(4)).expect("few")),
                _ => Effect::Write,
            };
            let sent = model.send(sequence, effect, range);
            let (sent, payload) = sent.expect("one request at a time");
            let command = if effect == Effect::Zero { CMD_TRIM } else { CMD_WRITE };
            let length = u32::try_from(blocks * 4096).expect("small");
            let reply = connection.call(command, 0, start, length, &payload);
            let reply = reply.map_err(|error| gone("write", error))?;
            match reply.error {
                0 => model.acked(&sent),
                // The server is about to stop.
                _ if is_ending() => return Err(Refused::Gone),
                error => return Err(Refused::Said(format!("write {name}: error {error}"))),
            }
        }
        connection.disconnect().map_err(|error| gone("disconnect from", error))?;
        self.did("written clone");
        Ok(())
    }

    fn is_depended_on(&self, snapshot: &str) -> bool {
        self.states.clones.values().any(|clone| clone.origin.as_deref() == Some(snapshot))
    }

    fn remove_snapshot(&mut self) -> Result<(), Refused> {
        let free = self.names_of_snapshots(|name| !self.is_depended_on(name));
        if free.is_empty() {
            return Ok(());
        }
        let name = self.random.pick(&free).clone();
        self.states.snapshots.get_mut(&name).expect("picked above").fate = Fate::Going;
        self.command(&["snapshot", "rm", &name])?;
        self.states.snapshots.remove(&name);
        self.did("removed snapshot");
        Ok(())
    }

    fn roll_back(&mut self) -> Result<(), Refused> {
        let snapshots = self.names_of_snapshots(|name| name.starts_with("clone-"));
        if snapshots.is_empty() {
            return Ok(());
        }
        let of = self.random.pick(&snapshots).clone();
        let (volume, _) = of.split_once('@').expect("it has a name");
        let then = self.states.snapshots[&of].model.copy();
        let clone = self.states.clones.get_mut(volume).expect("a volume with snapshots stays");
        clone.or_else = Some(then);
        self.command(&["snapshot", "rollback", &of])?;
        let clone = self.states.clones.get_mut(volume).expect("as before");
        clone.model = clone.or_else.take().expect("set above");
        // The clone builds on its own snapshot, which the test does not remove before the clone.
        clone.origin = Some(of.clone());
        self.did("rolled back");
        Ok(())
    }

    fn remove_clone(&mut self) -> Result<(), Refused> {
        let has_snapshots = |volume: &str| {
            let mut names = self.states.snapshots.keys();
            names.any(|name| name.split_once('@').is_some_and(|(of, _)| of == volume))
        };
        let mut free = self.names_of_clones(|_| true);
        free.retain(|name| !has_snapshots(name));
        if free.is_empty() {
            return Ok(());
        }
        let name = self.random.pick(&free).clone();
        self.states.clones.get_mut(&name).expect("picked above").fate = Fate::Going;
        self.command(&["volume", "rm", "--now", &name])?;
        self.states.clones.remove(&name);
        self.did("removed clone");
        Ok(())
    }

    /// Promotes a clone in the background. The test forgets its origin once the server has done so.
    fn promote(&mut self) -> Result<(), Refused> {
        let clones = self.names_of_clones(|clone| clone.origin.is_some());
        if clones.is_empty() {
            return Ok(());
        }
        let name = self.random.pick(&clones).clone();
        self.command(&["volume", "promote", &name])?;
        self.did("promoted");
        Ok(())
    }
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).expect("64-bit machine")
}
