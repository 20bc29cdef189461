//! Clients that use a pool by way of all its nodes, whatever happens to these.
//!
//! Invariants:
//! - A client has one request under way. Without an answer it sends the same request again until it
//!   gets one: by way of the same node if that has ended the connection, otherwise of another one.
//! - All requests and their ends are in the journal, those of the deposed owner's sockets included.

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tests::nbd::wire::{CMD_READ, CMD_WRITE};
use tests::nbd::{Connection, Endpoint, Reply, Wanted};
use tests::registers::{BLOCK_BYTES, Journal, Kind, Operation, Outcome, block_of, value_of};
use tests::seed::Random;

/// Clients of a load: one for each socket of each node.
pub const CLIENT_COUNT: usize = 6;
/// Blocks of each client alone, and of all.
const OWN_COUNT: u64 = 2;
const SHARED_COUNT: u64 = 12;
/// Blocks of a round. Each round has others, so that a history of one block stays short.
pub const ROUND_BLOCKS: u64 = OWN_COUNT * CLIENT_COUNT as u64 + SHARED_COUNT;
/// The client numbers of the test's own reads.
const WATCHER: usize = CLIENT_COUNT;
const DEPOSED: usize = CLIENT_COUNT + 1;
const AUDITOR: usize = CLIENT_COUNT + 2;

/// Silence after which a client tries another node. Chosen by hand: the kernel's client waits longer.
const SILENCE_MAX: Duration = Duration::from_millis(1500);
/// Longest wait for the answers of a deposed owner, which come or not when it is back.
const DEPOSED_MAX: Duration = Duration::from_secs(15);
/// Pause of a client that reached no node.
const RETRY_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two requests of a client, in milliseconds. Chosen by hand: two processors
/// are enough for three nodes under this load.
const THINK_MS_MAX: u64 = 4;
const BLOCK_LENGTH: u32 = BLOCK_BYTES as u32;

/// The load of a test.
pub struct Load {
    pub journal: Journal,
    seed: u64,
    /// The sockets of all nodes. Neighbours are of different nodes.
    ways: Vec<Endpoint>,
    round: AtomicU64,
    newest_value: AtomicU64,
    is_paused: AtomicBool,
    is_ended: AtomicBool,
    /// Clients that wait for the end of a pause.
    idle_count: AtomicUsize,
    /// Writes that were sent after this time count as sent after the failure.
    failure_ns: AtomicU64,
    /// When the first of them was acknowledged.
    acknowledged_ns: AtomicU64,
    failed: Mutex<Vec<String>>,
}

/// A client and its connection.
struct Client<'a> {
    load: &'a Load,
    number: usize,
    random: Random,
    way: usize,
    connection: Option<Connection>,
}

impl Load {
    pub fn new(seed: u64, ways: Vec<Endpoint>) -> Load {
        Load {
            journal: Journal::default(),
            seed,
            ways,
            round: AtomicU64::new(0),
            newest_value: AtomicU64::new(0),
            is_paused: AtomicBool::new(true),
            is_ended: AtomicBool::new(false),
            idle_count: AtomicUsize::new(0),
            failure_ns: AtomicU64::new(u64::MAX),
            acknowledged_ns: AtomicU64::new(u64::MAX),
            failed: Mutex::default(),
        }
    }

    /// Runs a client until [`Load::end`].
    pub fn run(&self, number: usize) {
        let random = Random::new(self.seed, 100 + number as u64);
        let mut client = Client { load: self, number, random, way: number, connection: None };
        while !self.is_ended() {
            if self.is_paused.load(Ordering::SeqCst) {
                self.idle_count.fetch_add(1, Ordering::SeqCst);
                while self.is_paused.load(Ordering::SeqCst) && !self.is_ended() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.idle_count.fetch_sub(1, Ordering::SeqCst);
                // Otherwise all clients meet at the node that has failed least of late.
                (client.way, client.connection) = (number, None);
                continue;
            }
            client.step();
            std::thread::sleep(Duration::from_millis(client.random.below(THINK_MS_MAX + 1)));
        }
    }

    pub fn end(&self) {
        self.is_ended.store(true, Ordering::SeqCst);
    }

    fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::SeqCst)
    }

    /// Lets the clients use the blocks of the next round.
    pub fn begin_round(&self) {
        self.round.fetch_add(1, Ordering::SeqCst);
        self.is_paused.store(false, Ordering::SeqCst);
    }

    /// Waits until each client has got an answer to its last request, and pauses. Returns false if
    /// one has not got any in time.
    pub fn pause(&self, timeout: Duration) -> bool {
        self.is_paused.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        while self.idle_count.load(Ordering::SeqCst) < CLIENT_COUNT {
            if begun.elapsed() > timeout {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Returns the blocks of this round.
    pub fn blocks(&self) -> Range<u64> {
        let first = (self.round.load(Ordering::SeqCst) - 1) * ROUND_BLOCKS;
        first..first + ROUND_BLOCKS
    }

    /// Notes that writes which are sent from here on need the pool as the failure has left it.
    pub fn note_failure(&self) {
        self.acknowledged_ns.store(u64::MAX, Ordering::SeqCst);
        self.failure_ns.store(self.journal.now_ns(), Ordering::SeqCst);
    }

    /// Waits for the first acknowledgement of a write that was sent after the failure, and returns
    /// its time.
    pub fn first_acknowledgement(&self, timeout: Duration) -> Option<u64> {
        let begun = Instant::now();
        while begun.elapsed() < timeout {
            let found = self.acknowledged_ns.load(Ordering::SeqCst);
            if found != u64::MAX {
                return Some(found);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// Returns the requests that were answered with an error.
    pub fn failed(&self) -> Vec<String> {
        self.failed.lock().expect("no panic holds it").clone()
    }

    /// Reads one block after the other over one connection until it ends, or `is_over`.
    pub fn watch(&self, mut connection: Connection, is_over: &AtomicBool) {
        let blocks = self.blocks();
        for block in blocks.clone().cycle() {
            if is_over.load(Ordering::SeqCst) || self.is_ended() {
                return;
            }
            let read = self.begin(WATCHER, block, Kind::Read, None);
            let reply = connection.call(CMD_READ, 0, offset_of(block), BLOCK_LENGTH, &[]);
            if self.finish(read, reply).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Opens a connection to a node, for [`Load::watch`] or [`Load::read_deposed`].
    pub fn open(way: &Endpoint) -> io::Result<Connection> {
        Connection::open_within(DEPOSED_MAX, way, &Wanted::default())
    }

    /// Sends a read of each block of the round to a node that was deposed and does not know it. The
    /// answers are for [`Load::receive_deposed`].
    pub fn read_deposed(&self, connection: &mut Connection) -> Vec<(u64, Operation)> {
        let mut sent = Vec::new();
        for block in self.blocks() {
            let read = self.begin(DEPOSED, block, Kind::Read, None);
            match connection.submit(CMD_READ, 0, offset_of(block), BLOCK_LENGTH, &[]) {
                Ok(cookie) => sent.push((cookie, read)),
                Err(_) => break,
            }
        }
        sent
    }

    /// Receives answers until all are there, or the connection ends. Returns their number.
    pub fn receive_deposed(
        &self,
        connection: &mut Connection,
        mut sent: Vec<(u64, Operation)>,
    ) -> usize {
        let mut count = 0;
        while !sent.is_empty() {
            let Ok(reply) = connection.receive() else { break };
            let at = sent.iter().position(|(cookie, _)| *cookie == reply.cookie);
            let (_, read) = sent.swap_remove(at.expect("the connection knows its requests"));
            // An error of the connection is none of the request.
            let _ = self.finish(read, Ok(reply));
            count += 1;
        }
        count
    }

    /// Reads all blocks of all rounds so far by way of any node.
    pub fn audit(&self, ways: &[Endpoint]) {
        let mut client = Client {
            load: self,
            number: AUDITOR,
            random: Random::new(self.seed, 99),
            way: 0,
            connection: None,
        };
        for (block, way) in (0..self.blocks().end).zip(ways.iter().cycle()) {
            client.way = self.ways.iter().position(|one| one == way).expect("one of them");
            client.request(block, Kind::Read, None);
        }
    }

    fn begin(&self, client: usize, block: u64, kind: Kind, value: Option<u64>) -> Operation {
        let call_ns = self.journal.now_ns();
        let outcome = Outcome::Unanswered;
        Operation { client, block, kind, value, call_ns, return_ns: call_ns, outcome }
    }

    /// Notes the end of an operation. Returns an error unless it is done.
    fn finish(&self, begun: Operation, reply: io::Result<Reply>) -> io::Result<()> {
        let return_ns = self.journal.now_ns();
        let mut ended = Operation { return_ns, ..begun };
        let result = match reply {
            Ok(reply) if reply.error == 0 => {
                ended.outcome = Outcome::Done;
                if ended.kind == Kind::Read {
                    ended.value = value_of(&reply.payload);
                }
                Ok(())
            }
            Ok(reply) => {
                ended.outcome = Outcome::Failed(reply.error);
                let text = format!("{ended:?}");
                self.failed.lock().expect("no panic holds it").push(text.clone());
                Err(io::Error::other(text))
            }
            Err(error) => Err(error),
        };
        let is_acknowledged = result.is_ok() && ended.kind == Kind::Write;
        if is_acknowledged && ended.call_ns >= self.failure_ns.load(Ordering::SeqCst) {
            self.acknowledged_ns.fetch_min(return_ns, Ordering::SeqCst);
        }
        self.journal.add(ended);
        result
    }
}

impl Client<'_> {
    /// Makes one request, on a block of its own or of all.
    fn step(&mut self) {
        let blocks = self.load.blocks();
        let block = if self.random.chance(50) {
            let own = blocks.start + OWN_COUNT * self.number as u64;
            own + self.random.below(OWN_COUNT)
        } else {
            blocks.end - 1 - self.random.below(SHARED_COUNT)
        };
        if self.random.chance(60) {
            let value = self.load.newest_value.fetch_add(1, Ordering::SeqCst) + 1;
            self.request(block, Kind::Write, Some(value));
        } else {
            self.request(block, Kind::Read, None);
        }
    }

    /// Repeats a request until it is done, or the load ends.
    fn request(&mut self, block: u64, kind: Kind, value: Option<u64>) {
        while !self.load.is_ended() {
            let was_connected = self.connection.is_some();
            let Err(error) = self.attempt(block, kind, value) else { return };
            self.connection = None;
            // A node that ended the connection may know the next owner, or be it.
            if !was_connected || error.kind() == io::ErrorKind::WouldBlock {
                self.way = (self.way + 1) % self.load.ways.len();
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    }

    fn attempt(&mut self, block: u64, kind: Kind, value: Option<u64>) -> io::Result<()> {
        let way = &self.load.ways[self.way];
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(Connection::open_within(SILENCE_MAX, way, &Wanted::default())?),
        };
        let (command, payload) = match value {
            Some(value) => (CMD_WRITE, block_of(value)),
            None => (CMD_READ, Vec::new()),
        };
        let operation = self.load.begin(self.number, block, kind, value);
        let reply = connection.call(command, 0, offset_of(block), BLOCK_LENGTH, &payload);
        self.load.finish(operation, reply)
    }
}

fn offset_of(block: u64) -> u64 {
    block * BLOCK_BYTES as u64
}
