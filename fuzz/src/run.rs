//! One run of a target: the kept inputs, then mutated ones until the budget is used.
//!
//! Invariants:
//! - The target sees exactly the bytes that a report shows.
//! - An input that gives an outcome not seen before joins the inputs that are mutated, so that a
//!   run gets deeper with its length; their number is bounded.

use crate::allocation::{AllocationBound, peak_of};
use crate::corpus;
use crate::mutate::mutate;
use ::tests::seed::{Random, seeds};
use block::env::{Clock, SystemClock};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

/// Most inputs that are mutated. Chosen by hand: far more outcomes than any decoder has.
const INPUT_COUNT_MAX: usize = 2000;
/// Executions between two looks at the clock.
const LOOK_COUNT: u64 = 64;
/// Bytes of an input that a report shows; its file has all.
const SHOWN_BYTES_MAX: usize = 4096;

/// The outcome of one execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The decoder took the input.
    Accepted,
    /// The decoder refused it, for this reason. Numbers in the reason do not count when reasons are
    /// compared.
    Refused(String),
}

impl Outcome {
    /// Makes an outcome from the result of a decoder.
    pub fn of<T, E: fmt::Display>(result: Result<T, E>) -> Outcome {
        result.map_or_else(|error| Outcome::Refused(error.to_string()), |_| Outcome::Accepted)
    }
}

/// A decoder and its inputs.
pub struct Target<'a> {
    /// Name: that of its folder in `corpus/`.
    pub name: &'static str,
    /// Valid inputs, before `repair`.
    pub inputs: Vec<Vec<u8>>,
    /// Puts checksums and seals of a mutated input right, so that the decoders behind them are
    /// reached.
    pub repair: &'a dyn Fn(&mut Vec<u8>),
    /// Runs the decoder, and panics if a promise is broken.
    pub decode: &'a dyn Fn(&[u8]) -> Outcome,
    /// Executions of a run in CI.
    pub execution_count: u64,
    /// Longest input, in bytes.
    pub input_bytes_max: usize,
    /// Memory that the decoder may take.
    pub allocation: AllocationBound,
}

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// This many executions.
    Executions(u64),
    /// As many as fit in this time.
    Time(Duration),
}

impl Budget {
    /// Reads `FUZZ_SECONDS` or `FUZZ_EXECUTIONS`; without them it is `execution_count`.
    ///
    /// # Panics
    /// If a variable is not a number, so that a typing error does not shorten a run silently.
    #[must_use]
    pub fn from_environment(execution_count: u64) -> Budget {
        let read = |name| {
            let text = std::env::var(name).ok()?;
            Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
        };
        match (read("FUZZ_SECONDS"), read("FUZZ_EXECUTIONS")) {
            (Some(seconds), _) => Budget::Time(Duration::from_secs(seconds)),
            (None, Some(count)) => Budget::Executions(count),
            (None, None) => Budget::Executions(execution_count),
        }
    }
}

/// The figures of a run without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Executions, with those of kept inputs.
    pub executions: u64,
    /// Executions whose input was accepted.
    pub accepted: u64,
    /// Outcomes that differ in more than numbers.
    pub outcomes: usize,
}

/// An input that breaks a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed of the run.
    pub seed: u64,
    /// Executions up to and including this one.
    pub execution: u64,
    /// The input.
    pub input: Vec<u8>,
    /// The promise.
    pub why: String,
}

/// Prints a line past the capture of the test harness, so that a log of CI shows what was run.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}"); // nothing depends on it
}

thread_local! {
    /// The newest panic of this thread, also if something caught it.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes panics. Those that a run catches are printed too: a report without them would lack the
/// place.
fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANIC.with_borrow_mut(|noted| *noted = Some(panic.to_string()));
            before(panic);
        }));
    });
}

impl Target<'_> {
    /// Runs the target as a test: prints the seed and the figures, and panics with a report of the
    /// first failure. The environment sets the seed (`SEED`) and the length (`FUZZ_SECONDS`,
    /// `FUZZ_EXECUTIONS`). Without them the run is the same each time, so that a change fails by its
    /// own fault; a longer run takes a fresh seed.
    ///
    /// # Panics
    /// On a failure, and if no input was accepted.
    pub fn check(&self) {
        let is_set = |name| std::env::var_os(name).is_some();
        let is_usual = !["SEED", "FUZZ_SECONDS", "FUZZ_EXECUTIONS"].into_iter().any(is_set);
        let seed = if is_usual { 1 } else { seeds(1)[0] };
        say(&format!("{}: SEED={seed}", self.name));
        match self.run(seed, Budget::from_environment(self.execution_count)) {
            Ok(run) => {
                let (name, Run { executions, accepted, outcomes }) = (self.name, run);
                let counts = format!("executions={executions} accepted={accepted}");
                say(&format!("{name}: {counts} outcomes={outcomes}"));
                assert!(accepted > 0, "{name}: no input was accepted; SEED={seed}");
            }
            Err(failure) => panic!("{}", self.report(&failure)),
        }
    }

    /// Runs the target with this seed.
    ///
    /// # Errors
    /// The first failure.
    pub fn run(&self, seed: u64, budget: Budget) -> Result<Run, Box<Failure>> {
        note_panics();
        assert!(!self.inputs.is_empty(), "{}: a target has valid inputs", self.name);
        let (clock, mut run) = (SystemClock, Run { executions: 0, accepted: 0, outcomes: 0 });
        let (begin, mut seen) = (clock.now(), BTreeSet::new());
        let mut pool = self.inputs.clone();
        let mut first: Vec<Vec<u8>> =
            corpus::kept(self.name).into_iter().map(|(_, input)| input).collect();
        first.extend(self.inputs.iter().map(|input| self.repaired(input.clone())));
        first.reverse();
        loop {
            let is_over = match budget {
                Budget::Executions(count) => run.executions >= count,
                Budget::Time(time) => {
                    run.executions.is_multiple_of(LOOK_COUNT) && clock.now() - begin >= time
                }
            };
            if is_over && first.is_empty() {
                run.outcomes = seen.len();
                return Ok(run);
            }
            // A generator for each execution: one decoder's use of it does not shift the others.
            let mut random = Random::new(seed, run.executions);
            let (base, input) = match first.pop() {
                Some(input) => (None, input),
                None => self.mutated(&mut random, &pool),
            };
            run.executions += 1;
            let outcome = self.execute(&input).map_err(|why| {
                Box::new(Failure { seed, execution: run.executions, input: input.clone(), why })
            })?;
            let text = match outcome {
                Outcome::Accepted => {
                    run.accepted += 1;
                    String::new()
                }
                Outcome::Refused(why) => why.chars().filter(|c| !c.is_ascii_digit()).collect(),
            };
            let is_new = seen.len() < INPUT_COUNT_MAX && seen.insert(text);
            if let Some(base) = base.filter(|_| is_new && pool.len() < INPUT_COUNT_MAX) {
                pool.push(base);
            }
        }
    }

    /// Returns a mutated input before its repair, and the bytes to run. A quarter of the inputs is
    /// changed after the repair, so that checksums and seals are wrong.
    fn mutated(&self, random: &mut Random, pool: &[Vec<u8>]) -> (Option<Vec<u8>>, Vec<u8>) {
        let mut input = random.pick(pool).clone();
        if random.chance(25) {
            input = self.repaired(input);
            mutate(random, &mut input, pool, self.input_bytes_max);
            return (None, input);
        }
        mutate(random, &mut input, pool, self.input_bytes_max);
        (Some(input.clone()), self.repaired(input))
    }

    fn repaired(&self, mut input: Vec<u8>) -> Vec<u8> {
        (self.repair)(&mut input);
        input
    }

    /// Runs the decoder once; the error is the broken promise.
    fn execute(&self, input: &[u8]) -> Result<Outcome, String> {
        PANIC.set(None);
        let (outcome, peak_bytes) =
            peak_of(|| catch_unwind(AssertUnwindSafe(|| (self.decode)(input))));
        if let Some(panic) = PANIC.take() {
            return Err(panic);
        }
        let Ok(outcome) = outcome else { return Err("it panicked".to_owned()) };
        let bound = self.allocation.of(input.len());
        if peak_bytes > bound {
            let len = input.len();
            return Err(format!("{len} bytes made it hold {peak_bytes}; the bound is {bound}"));
        }
        Ok(outcome)
    }

    /// Describes a failure, and writes its input to a file.
    fn report(&self, failure: &Failure) -> String {
        let Failure { seed, execution, input, why } = failure;
        let path = self.write(failure);
        let shown = corpus::to_hex(&input[..input.len().min(SHOWN_BYTES_MAX)]);
        format!(
            "{name}: {why}\nSEED={seed}, execution {execution}; the input has {len} bytes and is in \
             {path}: keep it as fuzz/corpus/{name}/NAME.hex\n{shown}",
            name = self.name,
            len = input.len(),
            path = path.display(),
        )
    }

    fn write(&self, failure: &Failure) -> PathBuf {
        let name = format!("fuzz-{}-{}-{}.hex", self.name, failure.seed, failure.execution);
        let path = std::env::temp_dir().join(name);
        let why: String = failure.why.lines().map(|line| format!("# {line}\n")).collect();
        if let Err(error) = std::fs::write(&path, why + &corpus::to_hex(&failure.input)) {
            say(&format!("could not write {}: {error}", path.display()));
        }
        path
    }
}

#[cfg(test)]
mod tests;
