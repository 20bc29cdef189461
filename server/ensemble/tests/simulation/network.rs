//! The network between the nodes, and to the data stores: connections that delay, end, stall while a
//! direction is cut, and bring requests of ended connections late or twice.
//!
//! Invariants:
//! - A connection delivers in order, or ends. Requests that were under way at its end may still arrive.
//! - A direction between two nodes can be cut by itself. What is under way then waits, or its connection
//!   ends.

use crate::executor::{ProcessId, World};
use crate::report::Counts;
use crate::server::Server;
use async_trait::async_trait;
use block::simulated::{Executor, simulated};
use block::{Error, ErrorKind, Result};
use ensemble::{Link, LocalMember, Peers};
use parking_lot::Mutex;
use replication::{Answer, MemberId, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Requests and answers that wait at the end of a connection. Chosen by hand.
const WAITING_MAX: usize = 64;
/// Longest wait for an answer of a node. Chosen by hand.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A node that runs. Only its own tasks hold its parts, so that they end with the process.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) process: ProcessId,
    pub(crate) executor: Arc<dyn Executor>,
    pub(crate) member: MemberId,
    pub(crate) parts: Arc<Mutex<Option<Parts>>>,
}

/// The parts of a node that others call.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) local: LocalMember,
    /// The pool, while the node serves it.
    pub(crate) server: Option<Arc<Server>>,
    /// The node is trying to serve the pool.
    pub(crate) is_candidate: bool,
}

impl Running {
    pub(crate) fn parts(&self) -> Option<Parts> {
        self.parts.lock().clone()
    }

    /// Changes the parts, unless the process was killed.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Parts)) {
        if let Some(parts) = &mut *self.parts.lock() {
            change(parts);
        }
    }
}

/// Chances of faults, in percent of messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    pub(crate) is_slow: u64,
    pub(crate) ends: u64,
    pub(crate) twice: u64,
}

/// The network. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) world: World,
    pub(crate) counts: Counts,
    running: Arc<Mutex<BTreeMap<usize, Running>>>,
    /// Directions that are cut.
    cut: Arc<Mutex<BTreeSet<(usize, usize)>>>,
    weather: Arc<Mutex<Weather>>,
}

impl Network {
    pub(crate) fn new(world: &World, counts: &Counts) -> Network {
        let (running, cut, weather) = Default::default();
        Network { world: world.clone(), counts: counts.clone(), running, cut, weather }
    }

    pub(crate) fn set_weather(&self, weather: Weather) {
        *self.weather.lock() = weather;
    }

    pub(crate) fn set_running(&self, node: usize, running: Option<Running>) {
        let before = match running {
            Some(running) => self.running.lock().insert(node, running),
            None => self.running.lock().remove(&node),
        };
        drop(before);
    }

    pub(crate) fn running(&self, node: usize) -> Option<Running> {
        self.running.lock().get(&node).cloned()
    }

    fn node_of(&self, member: MemberId) -> Option<(usize, Running)> {
        let running = self.running.lock();
        let found = running.iter().find(|(_, running)| running.member == member);
        found.map(|(node, running)| (*node, running.clone()))
    }

    pub(crate) fn cut(&self, from: usize, to: usize, is_cut: bool) {
        let mut cut = self.cut.lock();
        if is_cut {
            cut.insert((from, to))
        } else {
            cut.remove(&(from, to))
        };
    }

    pub(crate) fn heal(&self) {
        self.cut.lock().clear();
        self.set_weather(Weather::default());
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.lock().contains(&(from, to))
    }

    /// The time of one message on its way.
    fn delay(&self) -> Duration {
        let weather = *self.weather.lock();
        match self.world.chance(weather.is_slow) {
            true => {
                self.counts.add("slow messages");
                self.world.ms(5, 600)
            }
            false => Duration::from_micros(50 + self.world.below(1500)),
        }
    }

    /// Waits until the message has come through. Returns false if it is lost.
    pub(crate) async fn pass(&self, from: usize, to: usize) -> bool {
        self.world.sleep(self.delay()).await;
        !self.is_cut(from, to)
    }

    /// Lets a node answer a question of another one; `None` if no answer comes.
    pub(crate) async fn ask<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        (from, to): (usize, usize),
        answer: impl FnOnce(Running) -> F,
    ) -> Option<T> {
        if !self.pass(from, to).await {
            self.world.sleep(ANSWER_MAX).await;
            return None;
        }
        let running = self.running(to)?;
        let (sender, answered) = oneshot::channel();
        let executor = Arc::clone(&running.executor);
        let answer = answer(running);
        executor.spawn(Box::pin(async move {
            let _ = sender.send(answer.await); // one that waits no more needs none
        }));
        let answered = tokio::select! {
            biased;
            answered = answered => answered.ok()?,
            () = self.world.sleep(ANSWER_MAX) => return None,
        };
        self.pass(to, from).await.then_some(answered)
    }

    /// Carries one direction of a connection until it ends.
    async fn carry<T>(
        self,
        (from, to): (usize, usize),
        mut sent: mpsc::UnboundedReceiver<(Duration, T)>,
        arrived: mpsc::Sender<T>,
    ) {
        while let Some((due, message)) = sent.recv().await {
            self.world.sleep(due.saturating_sub(self.world.now())).await;
            let ends = self.weather.lock().ends;
            if self.world.below(10_000) < ends {
                self.counts.add("connections ended");
                return;
            }
            if self.is_cut(from, to) && self.world.chance(30) {
                return;
            }
            while self.is_cut(from, to) {
                self.world.sleep(self.world.ms(10, 60)).await;
            }
            if arrived.send(message).await.is_err() {
                return;
            }
        }
        // Its end comes as late as a message.
        while self.is_cut(from, to) {
            self.world.sleep(self.world.ms(10, 60)).await;
        }
    }

    /// Brings a request again, later, over a connection of which nothing else is left.
    fn repeat(&self, to: usize, request: Request) {
        self.counts.add("requests brought twice");
        let network = self.clone();
        self.world.spawn(async move {
            network.world.sleep(network.world.ms(1, 3000)).await;
            let Some(running) = network.running(to) else { return };
            let executor = Arc::clone(&running.executor);
            executor.spawn(Box::pin(async move {
                let Some(parts) = running.parts() else { return };
                let mut link = parts.local.link();
                drop(parts);
                if link.requests.send(request).await.is_ok() {
                    drop(link.requests);
                    while link.answers.recv().await.is_some() {}
                }
            }));
        });
    }
}

/// The network as one process sees it.
pub(crate) struct Port {
    pub(crate) network: Network,
    pub(crate) node: usize,
}

impl Port {
    async fn reach(&self, member: MemberId) -> Option<(usize, Running)> {
        let Network { world, .. } = &self.network;
        world.sleep(self.network.delay()).await;
        let (node, running) = self.network.node_of(member)?;
        let is_cut = self.network.is_cut(self.node, node) || self.network.is_cut(node, self.node);
        if is_cut {
            world.sleep(world.ms(100, 500)).await;
            return None;
        }
        // The process there has to take part.
        let (sender, accepted) = oneshot::channel();
        running.executor.spawn(Box::pin(async move { sender.send(()).unwrap_or_default() }));
        tokio::select! {
            biased;
            accepted = accepted => accepted.ok()?,
            () = world.sleep(ANSWER_MAX) => return None,
        }
        world.sleep(self.network.delay()).await;
        Some((node, running))
    }
}

/// Takes what a channel brings, and puts it on a wire.
async fn send_all<T>(
    network: Network,
    mut from: mpsc::Receiver<T>,
    wire: mpsc::UnboundedSender<(Duration, T)>,
    seen: impl Fn(&T) + Send,
) {
    while let Some(message) = from.recv().await {
        seen(&message);
        let due = network.world.now() + network.delay();
        if wire.send((due, message)).is_err() {
            return;
        }
    }
}

/// The end of a connection at the member.
async fn serve(
    network: Network,
    running: Running,
    mut requests: mpsc::Receiver<Request>,
    wire: mpsc::UnboundedSender<(Duration, Answer)>,
) {
    let Some(mut link) = running.parts().map(|parts| parts.local.link()) else { return };
    loop {
        tokio::select! {
            biased;
            answer = link.answers.recv() => {
                let Some(answer) = answer else { return };
                let due = network.world.now() + network.delay();
                if wire.send((due, answer)).is_err() {
                    return;
                }
            }
            request = requests.recv() => {
                let Some(request) = request else { return };
                if link.requests.send(request).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[async_trait]
impl Peers for Port {
    async fn connect(&self, member: MemberId) -> Result<Link> {
        let unreachable =
            || Error::new(ErrorKind::Unavailable, "connect to a member: it does not answer");
        let (node, there) = self.reach(member).await.ok_or_else(unreachable)?;
        let network = &self.network;
        let here = simulated().expect("a process connects");
        let (requests, to_send) = mpsc::channel(WAITING_MAX);
        let (to_take, answers) = mpsc::channel(WAITING_MAX);
        let (request_wire, requests_sent) = mpsc::unbounded_channel();
        let (answer_wire, answers_sent) = mpsc::unbounded_channel();
        let (to_member, requests_there) = mpsc::channel(WAITING_MAX);
        let twice = network.clone();
        let repeat = move |request: &Request| {
            let chance = twice.weather.lock().twice;
            if twice.world.below(1000) < chance {
                twice.repeat(node, request.clone());
            }
        };
        here.spawn(Box::pin(send_all(network.clone(), to_send, request_wire, repeat)));
        let (from, to) = (self.node, node);
        network.world.spawn(network.clone().carry((from, to), requests_sent, to_member));
        network.world.spawn(network.clone().carry((to, from), answers_sent, to_take));
        let executor = Arc::clone(&there.executor);
        executor.spawn(Box::pin(serve(network.clone(), there, requests_there, answer_wire)));
        Ok(Link { requests, answers })
    }
}
