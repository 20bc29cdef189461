//! Histories of blocks as registers: each operation of each client, and a judge of them.
//!
//! Invariants:
//! - One clock times all operations. A write without an answer may take effect until the end.
//! - Each value is written to one block only. A client that got no answer writes it once more, and
//!   each attempt is an operation of its own.
//! - The judge refuses no history that has a linear order. It accepts some that have none: a checker
//!   of linearizability (tests/nightly/judge) reads the same operations from a file.

use crate::seed::mix;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

/// Bytes of a register.
pub const BLOCK_BYTES: usize = 4096;
/// The value of a block that was never written: zeroes.
pub const INITIAL: u64 = 0;

/// Returns the contents of a block with this value.
#[must_use]
pub fn block_of(value: u64) -> Vec<u8> {
    (0..BLOCK_BYTES as u64 / 8).flat_map(|index| word_of(value, index).to_be_bytes()).collect()
}

/// Returns the value of a block; `None` for contents that no value has.
#[must_use]
pub fn value_of(block: &[u8]) -> Option<u64> {
    let value = u64::from_be_bytes(block.get(..8)?.try_into().ok()?);
    (block == block_of(value)).then_some(value)
}

const fn word_of(value: u64, index: u64) -> u64 {
    match (value, index) {
        (INITIAL, _) => 0,
        (_, 0) => value,
        _ => mix(value ^ index << 48),
    }
}

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads the block.
    Read,
    /// Writes the block.
    Write,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered.
    Done,
    /// It was answered with this NBD error. A write may have taken effect all the same.
    Failed(u32),
    /// It was not answered.
    Unanswered,
}

/// One request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Number of the client.
    pub client: usize,
    /// Number of the block in the volume.
    pub block: u64,
    /// Whether it reads or writes.
    pub kind: Kind,
    /// The value that was written or read; `None` for contents that no value has.
    pub value: Option<u64>,
    /// Time at which it was sent, in nanoseconds.
    pub call_ns: u64,
    /// Time at which it was answered; for one without an answer, at which the client gave it up.
    pub return_ns: u64,
    /// Its end.
    pub outcome: Outcome,
}

impl Operation {
    fn to_json(self) -> Json {
        let kind = match self.kind {
            Kind::Read => "read",
            Kind::Write => "write",
        };
        let outcome = match self.outcome {
            Outcome::Done => "done".to_owned(),
            Outcome::Failed(error) => format!("error {error}"),
            Outcome::Unanswered => "unanswered".to_owned(),
        };
        let return_ns = (self.outcome == Outcome::Done).then_some(self.return_ns);
        json!({
            "client": self.client,
            "block": self.block,
            "kind": kind,
            "value": self.value,
            "call_ns": self.call_ns,
            "return_ns": return_ns,
            "outcome": outcome,
        })
    }
}

/// The operations so far, of all clients.
pub struct Journal {
    begun: Instant,
    operations: Mutex<Vec<Operation>>,
}

impl Default for Journal {
    fn default() -> Journal {
        Journal { begun: Instant::now(), operations: Mutex::default() }
    }
}

impl Journal {
    /// Returns the time, in nanoseconds.
    ///
    /// # Panics
    /// After 584 years.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).expect("fits")
    }

    /// Adds an operation that has ended.
    pub fn add(&self, operation: Operation) {
        self.operations.lock().expect("no panic holds it").push(operation);
    }

    /// Returns the number of operations.
    #[must_use]
    pub fn count(&self) -> usize {
        self.operations.lock().expect("no panic holds it").len()
    }

    /// Judges the operations so far. No operation may be under way.
    #[must_use]
    pub fn judge(&self) -> Vec<Flaw> {
        let mut blocks: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
        for operation in self.operations.lock().expect("no panic holds it").iter() {
            blocks.entry(operation.block).or_default().push(*operation);
        }
        blocks.values().flat_map(|operations| judge_block(operations)).collect()
    }

    /// Writes all operations to a file, one JSON document a line, in the order of their calls.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut operations = self.operations.lock().expect("no panic holds it").clone();
        operations.sort_by_key(|operation| operation.call_ns);
        let mut file = BufWriter::new(std::fs::File::create(path)?);
        for operation in operations {
            writeln!(file, "{}", operation.to_json())?;
        }
        file.flush()
    }
}

/// A read that no order of the operations explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// It returned an older value than one that had been acknowledged or read before.
    Stale(Operation, String),
    /// It returned contents that were not written there, or not yet.
    Wrong(Operation, String),
}

/// The writes and reads of one value.
#[derive(Clone, Copy, Debug)]
struct Value {
    /// The first call of a write of it.
    begin_ns: u64,
    /// When the last write of it had certainly taken effect; `None` if one may still do so.
    end_ns: Option<u64>,
    /// When a write of it had certainly taken effect; `None` if none has for certain.
    done_ns: Option<u64>,
    write_count: usize,
    /// The first return and the last call of a read that returned it.
    seen: Option<(u64, u64)>,
}

impl Value {
    const INITIAL: Value =
        Value { begin_ns: 0, end_ns: Some(0), done_ns: Some(0), write_count: 1, seen: None };

    fn add_write(self, write: &Operation) -> Value {
        let returned = (write.outcome == Outcome::Done).then_some(write.return_ns);
        let later = |end_ns: u64| returned.map(|returned| end_ns.max(returned));
        Value {
            begin_ns: self.begin_ns.min(write.call_ns),
            end_ns: if self.write_count == 0 { returned } else { self.end_ns.and_then(later) },
            done_ns: earliest(self.done_ns, returned),
            write_count: self.write_count + 1,
            seen: self.seen,
        }
    }

    fn add_read(self, read: &Operation) -> Value {
        let (first, last) = self.seen.unwrap_or((u64::MAX, 0));
        Value { seen: Some((first.min(read.return_ns), last.max(read.call_ns))), ..self }
    }

    /// A value that was read has been written by then.
    fn with_reads(self) -> Value {
        let seen = self.seen.map(|(first, _)| first);
        let end_ns = if self.write_count == 1 { earliest(self.end_ns, seen) } else { self.end_ns };
        Value { end_ns, done_ns: earliest(self.done_ns, seen), ..self }
    }

    /// Whether reads prove that this value was there before the other one.
    fn is_read_before(&self, other: &Value) -> bool {
        let (Some((first, _)), Some((_, last))) = (self.seen, other.seen) else { return false };
        first < last
    }
}

fn earliest(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

fn values_of(operations: &[Operation]) -> BTreeMap<u64, Value> {
    let nothing =
        Value { begin_ns: u64::MAX, end_ns: None, done_ns: None, write_count: 0, seen: None };
    let mut values = BTreeMap::from([(INITIAL, Value::INITIAL)]);
    for write in operations.iter().filter(|operation| operation.kind == Kind::Write) {
        let value = values.entry(write.value.expect("a write has a value")).or_insert(nothing);
        *value = value.add_write(write);
    }
    for read in reads_of(operations) {
        if let Some(value) = read.value.and_then(|value| values.get_mut(&value)) {
            *value = value.add_read(read);
        }
    }
    values.values_mut().for_each(|value| *value = value.with_reads());
    values
}

fn reads_of(operations: &[Operation]) -> impl Iterator<Item = &Operation> {
    let is_read = |one: &&Operation| one.kind == Kind::Read && one.outcome == Outcome::Done;
    operations.iter().filter(is_read)
}

/// Values by the time at which their writes began, and of each and all later ones the one that had
/// certainly taken effect first.
struct Successors(Vec<(u64, Option<(u64, u64)>)>);

impl Successors {
    fn of(values: &BTreeMap<u64, Value>) -> Successors {
        let mut list: Vec<_> = values
            .iter()
            .map(|(number, value)| (value.begin_ns, value.done_ns.map(|done| (done, *number))))
            .collect();
        list.sort_unstable();
        let mut first = None;
        for (_, done) in list.iter_mut().rev() {
            first = first.into_iter().chain(*done).min();
            *done = first;
        }
        Successors(list)
    }

    /// Returns a value whose writes all began after `end_ns`, and one of which was done before
    /// `before_ns`.
    fn between(&self, end_ns: u64, before_ns: u64) -> Option<u64> {
        let from = self.0.partition_point(|(begin_ns, _)| *begin_ns <= end_ns);
        let (done_ns, number) = self.0.get(from)?.1?;
        (done_ns < before_ns).then_some(number)
    }
}

/// Judges the operations on one block.
fn judge_block(operations: &[Operation]) -> Vec<Flaw> {
    let values = values_of(operations);
    let successors = Successors::of(&values);
    let judge = |read: &Operation| {
        let Some(number) = read.value else {
            return Some(Flaw::Wrong(*read, "it returned contents of no write".to_owned()));
        };
        let value = values.get(&number).filter(|value| value.begin_ns < read.return_ns);
        let Some(value) = value else {
            let why = format!("it returned {number:#x}, which had not been written there");
            return Some(Flaw::Wrong(*read, why));
        };
        let next = successors.between(value.end_ns?, read.call_ns)?;
        let why = format!("it returned {number:#x}, which {next:#x} had replaced");
        Some(Flaw::Stale(*read, why))
    };
    let mut flaws: Vec<Flaw> = reads_of(operations).filter_map(judge).collect();
    if flaws.is_empty() {
        flaws = back_and_forth(operations, &values);
    }
    flaws
}

/// Finds two values that reads saw in both orders, although each was written once.
fn back_and_forth(operations: &[Operation], values: &BTreeMap<u64, Value>) -> Vec<Flaw> {
    let once = |number: &u64| values.get(number).is_some_and(|value| value.write_count == 1);
    let read: BTreeSet<u64> =
        reads_of(operations).filter_map(|read| read.value).filter(once).collect();
    let is_before = |one: &u64, other: &u64| values[one].is_read_before(&values[other]);
    let pairs = read.iter().flat_map(|one| read.range(one + 1..).map(move |other| (one, other)));
    let both = pairs.filter(|(one, other)| is_before(one, other) && is_before(other, one));
    let flaw = |(one, other): (&u64, &u64)| {
        let last = reads_of(operations).filter(|read| read.value == Some(*one));
        let last = last.max_by_key(|read| read.call_ns).expect("it was read");
        Flaw::Stale(*last, format!("{one:#x} and {other:#x} were read in both orders"))
    };
    both.map(flaw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(kind: Kind, value: u64, call_ns: u64, return_ns: u64) -> Operation {
        let outcome = Outcome::Done;
        Operation { client: 0, block: 7, kind, value: Some(value), call_ns, return_ns, outcome }
    }

    fn write(value: u64, call_ns: u64, return_ns: u64) -> Operation {
        operation(Kind::Write, value, call_ns, return_ns)
    }

    fn unanswered(value: u64, call_ns: u64) -> Operation {
        Operation { outcome: Outcome::Unanswered, ..write(value, call_ns, call_ns + 1) }
    }

    fn read(value: u64, call_ns: u64, return_ns: u64) -> Operation {
        operation(Kind::Read, value, call_ns, return_ns)
    }

    fn flaws(operations: &[Operation]) -> (usize, usize) {
        let found = judge_block(operations);
        let stale = found.iter().filter(|flaw| matches!(flaw, Flaw::Stale(..))).count();
        (stale, found.len() - stale)
    }

    #[test]
    fn contents_name_their_value() {
        for value in [INITIAL, 1, 2, u64::MAX] {
            assert_eq!(value_of(&block_of(value)), Some(value));
        }
        let mut torn = block_of(1);
        torn[2048..].copy_from_slice(&block_of(2)[2048..]);
        assert_eq!(value_of(&torn), None);
        torn[..8].fill(0);
        assert_eq!(value_of(&torn), None);
        assert_eq!(value_of(&torn[..7]), None);
    }

    #[test]
    fn reads_see_one_of_the_values_that_may_be_there() {
        assert_eq!(flaws(&[read(0, 0, 5), write(1, 10, 20), read(1, 30, 40)]), (0, 0));
        // While it is written, both are there.
        for seen in [0, 1] {
            assert_eq!(flaws(&[write(1, 10, 40), read(seen, 20, 30)]), (0, 0));
        }
        // Two at once have no order.
        for seen in [1, 2] {
            let history = [write(1, 10, 30), write(2, 20, 40), read(seen, 50, 60)];
            assert_eq!(flaws(&history), (0, 0));
        }
    }

    #[test]
    fn lost_writes_and_stale_reads_are_found() {
        assert_eq!(flaws(&[write(1, 10, 20), read(0, 30, 40)]), (1, 0));
        let history = [write(1, 10, 20), write(2, 30, 40), read(1, 35, 36), read(1, 50, 60)];
        assert_eq!(flaws(&history), (1, 0));
    }

    #[test]
    fn a_write_without_an_answer_may_be_there_or_not_until_it_was_read() {
        let write_2 = unanswered(2, 30);
        assert_eq!(flaws(&[write(1, 10, 20), write_2, read(1, 50, 60), read(2, 70, 80)]), (0, 0));
        assert_eq!(flaws(&[write(1, 10, 20), write_2, read(2, 50, 60), read(1, 70, 80)]), (1, 0));
        // It is late, and takes the place of a later write.
        assert_eq!(flaws(&[write_2, write(3, 40, 50), read(2, 60, 70)]), (0, 0));
        assert_eq!(flaws(&[write_2, read(2, 35, 36), write(3, 40, 50), read(2, 60, 70)]), (1, 0));
        // Another attempt may still be under way.
        let history = [write_2, write(2, 35, 40), write(3, 50, 60), read(2, 70, 80)];
        assert_eq!(flaws(&history), (0, 0));
    }

    #[test]
    fn reads_of_concurrent_writes_do_not_go_back() {
        let writes = [write(1, 10, 100), write(2, 10, 100)];
        let reads = [read(1, 20, 25), read(2, 30, 35)];
        assert_eq!(flaws(&[&writes[..], &reads[..]].concat()), (0, 0));
        let reads = [read(1, 20, 25), read(2, 30, 35), read(1, 40, 45)];
        assert_eq!(flaws(&[&writes[..], &reads[..]].concat()), (1, 0));
    }

    #[test]
    fn contents_that_were_not_written_there_are_wrong() {
        assert_eq!(flaws(&[read(9, 10, 20)]), (0, 1));
        assert_eq!(flaws(&[read(1, 10, 20), write(1, 30, 40)]), (0, 1));
        let torn = Operation { value: None, ..read(0, 10, 20) };
        assert_eq!(flaws(&[torn]), (0, 1));
    }

    #[test]
    fn operations_are_saved_in_the_order_of_their_calls() {
        let journal = Journal::default();
        journal.add(read(1, 30, 40));
        journal.add(unanswered(1, 10));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        journal.save(&path).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<Json> = text.lines().map(|line| line.parse().unwrap()).collect();
        let write = json!({"client": 0, "block": 7, "kind": "write", "value": 1, "call_ns": 10,
            "return_ns": null, "outcome": "unanswered"});
        let read = json!({"client": 0, "block": 7, "kind": "read", "value": 1, "call_ns": 30,
            "return_ns": 40, "outcome": "done"});
        assert_eq!(lines, [write, read]);
        assert_eq!((journal.count(), journal.judge().len()), (2, 0));
    }
}
