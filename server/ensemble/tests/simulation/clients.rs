//! The clients: each writes blocks of its own, flushes, and reads blocks of all, through any node that
//! takes its requests.
//!
//! Invariants:
//! - The requests of a client to a node arrive in the order in which they were sent.
//! - A client that gets no answer in time gives the request up, and then reads the block of a write until
//!   an owner shows it.

use crate::executor::World;
use crate::network::Network;
use crate::node::Site;
use crate::oracle::{Answered, Oracle};
use crate::server::Asked;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Blocks of each client.
const BLOCKS: u64 = 9;
/// Those of them that are written all the time. The others keep older segments in use.
const HOT_BLOCKS: u64 = 3;
/// Shares of the other blocks in writes and reads, in percent. Chosen by hand: one of them is written every
/// ten seconds or so.
const COLD_WRITES: u64 = 3;
const COLD_READS: u64 = 25;
/// Shortest and longest wait for an answer, in milliseconds. Chosen by hand: shorter and longer than a
/// take-over.
const PATIENCE_MS: (u64, u64) = (200, 4000);

/// One client. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct Client {
    site: Site,
    number: usize,
    client_count: usize,
    node_count: usize,
    /// Time at which the newest request to a node arrives.
    arrivals: Arc<Mutex<BTreeMap<usize, Duration>>>,
    /// Writes that were answered.
    pub(crate) answered: Arc<Mutex<u64>>,
}

impl Client {
    pub(crate) fn new(site: &Site, number: usize, counts: (usize, usize)) -> Client {
        let (arrivals, answered) = Default::default();
        let (client_count, node_count) = counts;
        Client { site: site.clone(), number, client_count, node_count, arrivals, answered }
    }

    /// Uses the pool for ever.
    pub(crate) async fn run(self) {
        let Site { world, oracle, counts, .. } = &self.site;
        let mut node = self.number % self.node_count;
        loop {
            world.sleep(world.ms(1, 60)).await;
            match world.below(100) {
                0..55 => {
                    let block = self.block_of(self.number as u64, COLD_WRITES);
                    let version = oracle.begin_write(block);
                    match self.call(node, Asked::Write { block, version }).await {
                        Some(answered) => {
                            oracle.end_write(block, answered);
                            *self.answered.lock() += 1;
                            counts.add("writes");
                        }
                        None => {
                            counts.add("writes without an answer");
                            node = self.find_out(block).await;
                        }
                    }
                }
                55..68 => {
                    let flushing = oracle.begin_flush();
                    match self.call(node, Asked::Flush).await {
                        Some(answered) => oracle.end_flush(&flushing, answered),
                        None => node = self.any_node(),
                    }
                }
                // A node that has ceased to be the owner may still have clients.
                68..80 => {
                    let block = self.block_of_any();
                    let asked = self.any_node();
                    let _shown = self.read(asked, block, false).await;
                }
                _ => {
                    let by_writer = world.chance(50);
                    let block = match by_writer {
                        true => self.block_of(self.number as u64, COLD_READS),
                        false => self.block_of_any(),
                    };
                    if !self.read(node, block, by_writer).await {
                        node = self.any_node();
                    }
                }
            }
        }
    }

    /// Returns a block of a client.
    fn block_of(&self, client: u64, cold_percent: u64) -> u64 {
        let world = &self.site.world;
        let block = match world.chance(cold_percent) {
            true => HOT_BLOCKS + world.below(BLOCKS - HOT_BLOCKS),
            false => world.below(HOT_BLOCKS),
        };
        client * BLOCKS + block
    }

    fn block_of_any(&self) -> u64 {
        let client = self.site.world.below(self.client_count as u64);
        self.block_of(client, COLD_READS)
    }

    fn any_node(&self) -> usize {
        let count = u64::try_from(self.node_count).expect("a few");
        usize::try_from(self.site.world.below(count)).expect("a few")
    }

    /// Reads a block of an unanswered write until an owner shows it. Returns the owner's node.
    async fn find_out(&self, block: u64) -> usize {
        loop {
            let node = self.any_node();
            if self.read(node, block, true).await {
                return node;
            }
            self.site.world.sleep(self.site.world.ms(5, 80)).await;
        }
    }

    async fn read(&self, node: usize, block: u64, by_writer: bool) -> bool {
        let reading = self.site.oracle.begin_read(block);
        let Some(answered) = self.call(node, Asked::Read { block }).await else { return false };
        self.site.counts.add("reads");
        self.site.oracle.end_read(&reading, answered, by_writer, self.site.world.now());
        true
    }

    /// Sends a request to a node; `None` if it has no answer.
    async fn call(&self, node: usize, asked: Asked) -> Option<Answered> {
        let network = &self.site.network;
        let world: &World = &network.world;
        let arrives = {
            let mut arrivals = self.arrivals.lock();
            let newest = arrivals.entry(node).or_default();
            let at = world.now() + Duration::from_micros(20 + world.below(800));
            *newest = (*newest + Duration::from_nanos(1)).max(at);
            *newest
        };
        let (answer, answered) = oneshot::channel();
        let (gone, is_gone) = oneshot::channel();
        let request = deliver(
            (network.clone(), self.site.oracle.clone()),
            (self.number, node),
            asked,
            arrives,
            (answer, is_gone),
        );
        world.spawn(request);
        let patience = world.ms(PATIENCE_MS.0, PATIENCE_MS.1);
        let answered = tokio::select! {
            biased;
            answered = answered => answered.ok().flatten(),
            () = world.sleep(patience) => None,
        };
        drop(gone);
        answered
    }
}

/// Brings a request to a node, and its answer back.
async fn deliver(
    (network, oracle): (Network, Oracle),
    (client, node): (usize, usize),
    asked: Asked,
    arrives: Duration,
    (answer, is_gone): (oneshot::Sender<Option<Answered>>, oneshot::Receiver<()>),
) {
    let world = network.world.clone();
    world.sleep(arrives.saturating_sub(world.now())).await;
    let Some(running) = network.running(node) else { return };
    let Some(server) = running.parts().and_then(|parts| parts.server) else { return };
    let (turn, epoch) = (server.turn(client), server.epoch.0);
    let (sender, served) = oneshot::channel();
    running.executor.spawn(Box::pin(async move {
        let outcome = server.serve(turn, asked, is_gone).await;
        let _ = sender.send(outcome); // a client that has gone needs none
    }));
    let outcome = match served.await {
        Ok(Ok(version)) => Some(Answered { node, epoch, version }),
        Ok(Err(error)) if error.kind() == block::ErrorKind::Corrupt => {
            oracle.fail(format!("node {node} answers {asked:?}: {}", error.chain()));
            None
        }
        Ok(Err(_)) | Err(_) => None,
    };
    world.sleep(Duration::from_micros(20 + world.below(800))).await;
    let _ = answer.send(outcome); // a client that has gone needs none
}
