//! One connection of the crash tester: sends random requests and keeps the model true.
//!
//! Invariants:
//! - The model learns of a request before it is sent, and of its acknowledgement after it arrived.
//! - Replies that the server sent before it died are acknowledgements, and are still read.
//! - An error is a failure unless the server was asked to stop.

use super::profile::{Kind, Profile};
use super::target::Kill;
use crate::model::{Effect, Sent, VolumeModel};
use crate::nbd::wire::*;
use crate::nbd::{Connection, Endpoint, Reply, Wanted};
use crate::seed::Random;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The state shared by all connections of a round.
pub struct Round {
    /// One model per volume.
    pub models: Vec<Mutex<VolumeModel>>,
    /// Number of the newest request of the run.
    pub sequence: AtomicU64,
    /// The mix.
    pub profile: Profile,
    /// Ends the server.
    pub kill: Kill,
    /// Number of durable acknowledgements at which to kill the server; `u64::MAX` for never.
    pub kill_at_durable: u64,
    /// Number of acknowledgements at which to kill the server; `u64::MAX` for never.
    pub kill_at_acknowledged: u64,
    /// Acknowledged flushes and FUA requests.
    pub durable_count: AtomicU64,
    /// Acknowledged requests.
    pub acknowledged_count: AtomicU64,
    /// No new requests are sent.
    pub is_over: AtomicBool,
    /// The server was killed or asked to stop, so errors are expected.
    pub is_ending: AtomicBool,
    /// How many of a hundred writes write one of a few patterns.
    pub pattern_percent: u64,
}

/// Number of different patterns.
const PATTERNS: u64 = 6;

enum Flying {
    Effect(Sent, bool),
    Read(Range<u64>),
    Flush,
}

impl Round {
    /// Notes that the server is about to end: errors are no failures from here on.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        self.is_over.store(true, Ordering::SeqCst);
    }

    fn acknowledged(&self, is_durable: bool) {
        let count = self.acknowledged_count.fetch_add(1, Ordering::SeqCst) + 1;
        let durable = self.durable_count.fetch_add(u64::from(is_durable), Ordering::SeqCst);
        let is_durable_kill = is_durable && durable + 1 == self.kill_at_durable;
        if is_durable_kill || count == self.kill_at_acknowledged {
            self.end();
            (self.kill)();
        }
    }

    /// Drives one connection to `volume` until the round is over.
    ///
    /// # Errors
    /// The first failure.
    pub fn drive(
        &self,
        volume: usize,
        endpoint: &Endpoint,
        mut random: Random,
    ) -> Result<(), String> {
        let wanted = if random.chance(70) { Wanted::everything() } else { Wanted::default() };
        let mut connection = match Connection::open(endpoint, &wanted) {
            Ok(connection) => connection,
            Err(_) if self.is_ending.load(Ordering::SeqCst) => return Ok(()),
            Err(error) => return Err(format!("connect to volume {volume}: {error}")),
        };
        let mut flying = HashMap::new();
        let mut is_open = true;
        loop {
            while is_open && flying.len() < self.profile.depth {
                if self.is_over.load(Ordering::SeqCst) {
                    is_open = false;
                } else if let Some(sent) = self.send(volume, &mut connection, &mut random) {
                    match sent {
                        Ok((cookie, request)) => {
                            flying.insert(cookie, request);
                        }
                        Err(error) => {
                            self.expected(volume, "send", &error)?;
                            is_open = false;
                        }
                    }
                } else {
                    break;
                }
            }
            if flying.is_empty() {
                if is_open {
                    continue;
                }
                return Ok(());
            }
            match connection.receive() {
                Ok(reply) => {
                    let request = flying.remove(&reply.cookie).expect("it was sent");
                    self.answered(volume, request, &reply)?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    return Err(format!("volume {volume}: the server broke the protocol: {error}"));
                }
                Err(error) => return self.expected(volume, "receive", &error),
            }
        }
    }

    /// Decides whether an I/O error is the end of the round or a failure.
    fn expected(&self, volume: usize, what: &str, error: &std::io::Error) -> Result<(), String> {
        // The kill may come from a fail point, of which this thread gets no notice.
        if self.is_ending.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(format!("volume {volume}: {what}: {error} while the server should run"))
    }

    /// Sends one random request; returns `None` if the chosen one must not be sent at this time.
    fn send(
        &self,
        volume: usize,
        connection: &mut Connection,
        random: &mut Random,
    ) -> Option<std::io::Result<(u64, Flying)>> {
        for _ in 0..20 {
            let model = &self.models[volume];
            let window = model.lock().expect("no panic holds it").window();
            let (kind, range, fua) = self.profile.request(random, &window);
            let length = u32::try_from(range.end - range.start).expect("bounded");
            let offset = range.start;
            let mut flags = if fua { CMD_FLAG_FUA } else { 0 };
            match kind {
                Kind::Flush => {
                    let cookie = connection.submit(CMD_FLUSH, 0, 0, 0, &[]);
                    return Some(cookie.map(|cookie| (cookie, Flying::Flush)));
                }
                Kind::Read => {
                    if model.lock().expect("no panic holds it").read_begins(range.clone()) {
                        let cookie = connection.submit(CMD_READ, 0, offset, length, &[]);
                        return Some(cookie.map(|cookie| (cookie, Flying::Read(range))));
                    }
                }
                Kind::Write | Kind::Trim | Kind::Zero => {
                    let effect = match kind {
                        Kind::Write if random.chance(self.pattern_percent) => {
                            Effect::Pattern(u8::try_from(random.below(PATTERNS)).expect("few"))
                        }
                        Kind::Write => Effect::Write,
                        _ => Effect::Zero,
                    };
                    let sequence = self.sequence.fetch_add(1, Ordering::SeqCst) + 1;
                    let mut model = model.lock().expect("no panic holds it");
                    let Some((sent, payload)) = model.send(sequence, effect, range) else {
                        continue;
                    };
                    drop(model);
                    let command = match kind {
                        Kind::Write => CMD_WRITE,
                        Kind::Trim => CMD_TRIM,
                        _ => CMD_WRITE_ZEROES,
                    };
                    if kind == Kind::Zero && random.chance(30) {
                        flags |= CMD_FLAG_NO_HOLE;
                    }
                    let cookie = connection.submit(command, flags, offset, length, &payload);
                    return Some(cookie.map(|cookie| (cookie, Flying::Effect(sent, fua))));
                }
            }
        }
        None
    }

    fn answered(&self, volume: usize, request: Flying, reply: &Reply) -> Result<(), String> {
        if reply.error != 0 {
            let is_ending = self.is_ending.load(Ordering::SeqCst);
            if is_ending && reply.error == ESHUTDOWN {
                return Ok(());
            }
            return Err(format!("volume {volume}: NBD error {} for a good request", reply.error));
        }
        let model = &self.models[volume];
        match request {
            Flying::Flush => {
                self.acknowledged(true);
                Ok(())
            }
            Flying::Effect(sent, is_durable) => {
                self.acknowledged(is_durable);
                model.lock().expect("no panic holds it").acked(&sent);
                Ok(())
            }
            Flying::Read(range) => {
                self.acknowledged(false);
                model.lock().expect("no panic holds it").read_ends(&range, &reply.payload)
            }
        }
    }
}
