//! Three machines, a network and the manifest chain. Every action is one step of one machine.
//!
//! Invariants:
//! - Machines know only what a real node knows: their document, their log, and messages.
//! - A record of every acknowledgement is kept apart, and each step compares the machines with it.

use crate::batch::Batch;
use crate::follower::{Document, Effect, Follower, Found};
use crate::log_index::LogIndex;
use crate::messages::{Answer, Lease, Proof, Request};
use crate::owner::Owner;
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::SeededBugs;
use crate::take_over::{Candidate, Decision};
use block::{Epoch, Position};
use bytes::Bytes;
use std::collections::BTreeSet;
use uuid::Uuid;

/// What may happen in a world, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) take_overs: u8,
    pub(super) writes: u8,
    pub(super) crashes: u8,
    pub(super) reboots: u8,
    pub(super) wipes: u8,
    /// Messages that arrive later than others that were sent after them.
    pub(super) delays: u8,
    pub(super) losses: u8,
    pub(super) repeats: u8,
    pub(super) changes: u8,
    pub(super) ticks: u8,
    /// Length of a lease in ticks; 0: owners do not serve reads.
    pub(super) lease: u64,
    /// Leases get longer with every write.
    pub(super) is_lease_growing: bool,
    /// Batches in one message.
    pub(super) batches: u64,
    /// An operator opens the pool although acknowledged writes may be gone.
    pub(super) is_forced: bool,
}

impl Bounds {
    pub(super) const NONE: Bounds = Bounds {
        take_overs: 0,
        writes: 2,
        crashes: 0,
        reboots: 0,
        wipes: 0,
        delays: 1,
        losses: 1,
        repeats: 0,
        changes: 0,
        ticks: 0,
        lease: 0,
        is_lease_growing: false,
        batches: 2,
        is_forced: false,
    };
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Answered,
    AnswerLost,
    AnswerLate,
    Late,
    /// The process of the member is killed after so many effects.
    Interrupted(usize),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A machine sends its next request to another.
    Send(usize, usize, Fate),
    /// A late message arrives.
    Deliver(Envelope),
    /// A late message arrives and will arrive again.
    Repeat(Envelope),
    Write(usize),
    Crash(usize),
    Reboot(usize),
    Wipe(usize),
    Start(usize),
    TakeOver(usize),
    Open(usize),
    AddLearner(usize),
    BeginChange(usize, usize),
    /// The owner creates the link of its change; false: it does not learn of it.
    Record(usize, bool),
    Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Message {
    Request(Request),
    Answer(Answer),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Envelope {
    from: usize,
    from_id: MemberId,
    to: usize,
    to_id: MemberId,
    message: Message,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Role {
    Idle,
    Candidate(Candidate),
    Owner(Owner),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    follower: Follower,
    role: Role,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Machine {
    id: MemberId,
    stored: Document,
    log: Vec<Batch>,
    /// Batches on stable storage.
    synced: usize,
    boot: Uuid,
    node: Option<Node>,
}

/// What an owner writes.
#[derive(Clone, Copy)]
struct Written {
    content: u8,
    is_sync: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Link {
    epoch: Epoch,
    configuration: Configuration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Used {
    take_overs: u8,
    writes: u8,
    crashes: u8,
    reboots: u8,
    wipes: u8,
    delays: u8,
    losses: u8,
    repeats: u8,
    changes: u8,
    identities: u8,
    boots: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    machines: Vec<Machine>,
    network: BTreeSet<Envelope>,
    chain: Vec<Link>,
    now: u64,
    used: Used,
    acknowledged: BTreeSet<Position>,
    flushed: BTreeSet<Position>,
    /// Logs with which an operator forced an epoch to open: the loss of older batches that they lack
    /// is recorded.
    forced: Vec<(Epoch, LogIndex)>,
    /// Epochs that have opened.
    opened: BTreeSet<Epoch>,
    pub(super) wrong: Option<&'static str>,
}

fn index(log: &[Batch]) -> LogIndex {
    let mut index = LogIndex::new(Position::START);
    log.iter().for_each(|batch| index.push(batch.position));
    index
}

const BOOT: Uuid = Uuid::from_u128(100);
const FRESH: Document =
    Document { boot: BOOT, run: 0, promised: Epoch(0), proof: Proof::All, synced: 0, lease: 0 };

impl World {
    /// Three members with empty logs, of which the first has won the first epoch.
    pub(super) fn new(bounds: &Bounds, seeded_bugs: SeededBugs) -> World {
        let ids: Vec<MemberId> = (1..=3).map(Uuid::from_u128).collect();
        let machines = ids.iter().map(|id| Machine {
            id: *id,
            stored: FRESH,
            log: Vec::new(),
            synced: 0,
            boot: BOOT,
            node: None,
        });
        let configuration =
            Configuration { number: 1, members: ids.iter().copied().collect(), quorum: 2 };
        let mut world = World {
            machines: machines.collect(),
            network: BTreeSet::new(),
            chain: vec![Link { epoch: Epoch(0), configuration }],
            now: 0,
            used: Used::default(),
            acknowledged: BTreeSet::new(),
            flushed: BTreeSet::new(),
            forced: Vec::new(),
            opened: BTreeSet::new(),
            wrong: None,
        };
        for machine in 0..3 {
            world.start(seeded_bugs, machine);
        }
        world.take_over(seeded_bugs, 0);
        for _ in 0..4 {
            (0..3)
                .for_each(|to| world.act(bounds, seeded_bugs, Action::Send(0, to, Fate::Answered)));
            world.act(bounds, seeded_bugs, Action::Open(0));
        }
        assert!(world.opened.contains(&Epoch(1)), "the first owner opens");
        world.used = Used::default();
        world
    }

    pub(super) fn has_write(&self) -> bool {
        self.acknowledged.len() > self.opened.len()
    }

    pub(super) fn is_taken_over(&self) -> bool {
        self.opened.iter().any(|epoch| epoch.0 > 1)
    }

    // --- possible actions ---

    pub(super) fn actions(&self, bounds: &Bounds, actions: &mut Vec<Action>) {
        for envelope in &self.network {
            actions.push(Action::Deliver(envelope.clone()));
            if self.used.repeats < bounds.repeats {
                actions.push(Action::Repeat(envelope.clone()));
            }
        }
        if self.now < u64::from(bounds.ticks) {
            actions.push(Action::Tick);
        }
        for (at, machine) in self.machines.iter().enumerate() {
            let Some(node) = &machine.node else {
                actions.push(Action::Start(at));
                if self.used.wipes < bounds.wipes {
                    actions.push(Action::Wipe(at));
                }
                continue;
            };
            if self.used.crashes < bounds.crashes {
                actions.push(Action::Crash(at));
            }
            if self.used.reboots < bounds.reboots {
                actions.push(Action::Reboot(at));
            }
            if self.used.take_overs < bounds.take_overs && self.is_member(at) {
                actions.push(Action::TakeOver(at));
            }
            self.actions_of(bounds, at, node, actions);
        }
    }

    fn actions_of(&self, bounds: &Bounds, at: usize, node: &Node, actions: &mut Vec<Action>) {
        for to in 0..self.machines.len() {
            if self.next_request(bounds, at, to).is_none() {
                continue;
            }
            let mut fates = vec![Fate::Answered];
            if to != at {
                if self.used.losses < bounds.losses {
                    fates.push(Fate::AnswerLost);
                }
                if self.used.delays < bounds.delays {
                    fates.extend([Fate::AnswerLate, Fate::Late]);
                }
                if self.used.crashes < bounds.crashes {
                    fates.extend((1..=2).map(Fate::Interrupted));
                }
            }
            actions.extend(fates.into_iter().map(|fate| Action::Send(at, to, fate)));
        }
        match &node.role {
            Role::Candidate(candidate) => {
                if self.tail_to_open(bounds, candidate, &node.follower).is_some() {
                    actions.push(Action::Open(at));
                }
            }
            Role::Owner(owner) if owner.superseded_by().is_none() => {
                if owner.is_open() && self.used.writes < bounds.writes {
                    actions.push(Action::Write(at));
                }
                if self.used.changes < bounds.changes && owner.is_open() {
                    let others = (0..self.machines.len()).filter(|to| *to != at);
                    actions.extend(others.clone().map(|to| Action::BeginChange(at, to)));
                }
                let ids = self.machines.iter().map(|machine| &machine.id);
                if owner.is_open() && ids.clone().any(|id| owner.progress(id).is_none()) {
                    actions.push(Action::AddLearner(at));
                }
                if owner.change_to_record().is_some() {
                    actions.extend([true, false].map(|learns| Action::Record(at, learns)));
                }
            }
            Role::Owner(_) | Role::Idle => {}
        }
    }

    fn is_member(&self, at: usize) -> bool {
        let newest = self.chain.last().expect("never empty");
        newest.configuration.members.contains(&self.machines[at].id)
    }

    /// The tail behind which a candidate may open, if it has it.
    fn tail_to_open(
        &self,
        bounds: &Bounds,
        candidate: &Candidate,
        own: &Follower,
    ) -> Option<(Position, bool)> {
        let (tail, is_proven) = match candidate.decide() {
            Decision::Wait | Decision::Damaged => return None,
            Decision::Continue(tail, _) => (tail, true),
            Decision::LossPossible(tail, _) if bounds.is_forced => (tail, false),
            Decision::LossPossible(..) => return None,
        };
        candidate.may_open(own.log()).then_some((tail, is_proven))
    }

    fn next_request(&self, bounds: &Bounds, at: usize, to: usize) -> Option<Request> {
        let (machine, target) = (&self.machines[at], self.machines[to].id);
        let node = machine.node.as_ref()?;
        match &node.role {
            Role::Idle => None,
            Role::Candidate(candidate) => {
                if candidate.superseded_by().is_some()
                    || !candidate.configuration().members.contains(&target)
                {
                    return None;
                }
                let epoch = candidate.epoch();
                match candidate.decide() {
                    _ if !candidate.has_promise(&target) => Some(Request::Promise { epoch }),
                    Decision::Continue(tail, from) | Decision::LossPossible(tail, from)
                        if from == target && at != to && node.follower.log().tail() != tail =>
                    {
                        Some(candidate.clone().read(tail, node.follower.log()))
                    }
                    _ => None,
                }
            }
            Role::Owner(owner) => {
                if owner.superseded_by().is_some() {
                    return None;
                }
                let log = node.follower.log();
                let tail = log.tail().sequence;
                let progress = *owner.progress(&target)?;
                let is_sync = progress.next > tail && progress.synced < tail;
                let is_behind = progress.next <= tail;
                if !is_behind && !is_sync && bounds.lease == 0 {
                    return None;
                }
                if at == to && progress.synced >= tail {
                    return None;
                }
                let sending = owner.sending(&target, log, bounds.batches)?;
                let from = usize::try_from(sending.previous.sequence).expect("small");
                let end = usize::try_from(sending.last).expect("small");
                let batches = machine.log.get(from..end)?.to_vec();
                let growth = u64::from(self.used.writes) * u64::from(bounds.is_lease_growing);
                let lease = Lease { sent: self.now, length: bounds.lease + growth };
                let lease = (bounds.lease > 0 && at != to).then_some(lease);
                let is_sync = is_sync || at == to || bounds.reboots == 0;
                let (epoch, configuration) = (owner.epoch(), owner.configuration());
                Some(sending.request(epoch, configuration, batches, is_sync, lease))
            }
        }
    }

    fn envelope(&self, from: usize, to: usize, message: Message) -> Envelope {
        let id = |at: usize| self.machines[at].id;
        Envelope { from, from_id: id(from), to, to_id: id(to), message }
    }

    // --- steps ---

    pub(super) fn act(&mut self, bounds: &Bounds, seeded_bugs: SeededBugs, action: Action) {
        match action {
            Action::Send(at, to, fate) => self.send(bounds, at, to, fate),
            Action::Deliver(envelope) => {
                self.network.remove(&envelope);
                self.deliver(envelope, usize::MAX);
            }
            Action::Repeat(envelope) => {
                self.used.repeats += 1;
                self.deliver(envelope, usize::MAX);
            }
            Action::Write(at) => self.write(bounds, at),
            Action::Crash(at) => {
                self.used.crashes += 1;
                self.stop(at);
            }
            Action::Reboot(at) => {
                self.used.reboots += 1;
                self.stop(at);
                let machine = &mut self.machines[at];
                machine.log.truncate(machine.synced);
                self.used.boots += 1;
                machine.boot = Uuid::from_u128(100 + u128::from(self.used.boots));
            }
            Action::Wipe(at) => {
                self.used.wipes += 1;
                self.used.identities += 1;
                let machine = &mut self.machines[at];
                machine.id = Uuid::from_u128(10 + u128::from(self.used.identities));
                (machine.stored, machine.synced, machine.boot) = (FRESH, 0, BOOT);
                machine.log.clear();
            }
            Action::Start(at) => self.start(seeded_bugs, at),
            Action::TakeOver(at) => self.take_over(seeded_bugs, at),
            Action::Open(at) => self.open(bounds, seeded_bugs, at),
            Action::AddLearner(at) => self.add_learner(at),
            Action::BeginChange(at, to) => self.begin_change(at, to),
            Action::Record(at, learns) => self.record(at, learns),
            Action::Tick => self.now += 1,
        }
        self.check(bounds);
    }

    fn send(&mut self, bounds: &Bounds, at: usize, to: usize, fate: Fate) {
        let Some(request) = self.next_request(bounds, at, to) else { return };
        if let Some(node) = &mut self.machines[at].node
            && let (Role::Candidate(candidate), Request::Read { .. }) = (&mut node.role, &request)
            && let Decision::Continue(tail, _) | Decision::LossPossible(tail, _) =
                candidate.decide()
        {
            let _ = candidate.read(tail, node.follower.log());
        }
        self.note_sent(bounds, at, to);
        let envelope = self.envelope(at, to, Message::Request(request));
        let earlier = self.network.clone();
        match fate {
            Fate::Late => {
                self.used.delays += 1;
                self.network.insert(envelope);
                return;
            }
            Fate::Interrupted(steps) => {
                self.used.crashes += 1;
                self.deliver(envelope, steps);
                self.stop(to);
            }
            Fate::Answered | Fate::AnswerLost | Fate::AnswerLate => {
                self.deliver(envelope, usize::MAX);
            }
        }
        if fate == Fate::AnswerLate {
            self.used.delays += 1;
            return;
        }
        self.used.losses += u8::from(fate == Fate::AnswerLost);
        let answers: Vec<Envelope> = self.network.difference(&earlier).cloned().collect();
        self.network = earlier;
        if fate == Fate::AnswerLost || answers.is_empty() && at != to {
            self.disconnect(at, self.machines[to].id);
        }
        if fate != Fate::AnswerLost {
            answers.into_iter().for_each(|answer| self.deliver(answer, usize::MAX));
        }
    }

    /// Tells an owner what it has sent.
    fn note_sent(&mut self, bounds: &Bounds, at: usize, to: usize) {
        let target = self.machines[to].id;
        if let Some(Node { follower, role: Role::Owner(owner) }) = &mut self.machines[at].node
            && let Some(sending) = owner.sending(&target, follower.log(), bounds.batches)
        {
            owner.on_sent(&target, &sending);
        }
    }

    fn disconnect(&mut self, at: usize, target: MemberId) {
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            owner.on_disconnected(&target);
        }
    }

    /// Ends the process of a machine, and all its connections.
    fn stop(&mut self, at: usize) {
        self.machines[at].node = None;
        let id = self.machines[at].id;
        (0..self.machines.len()).for_each(|other| self.disconnect(other, id));
    }

    fn start(&mut self, seeded_bugs: SeededBugs, at: usize) {
        let machine = &mut self.machines[at];
        let (document, boot) = (machine.stored, machine.boot);
        let found = Found { document, log: index(&machine.log), is_end_damaged: false, boot };
        let (follower, effects) = Follower::start_with(found, self.now, seeded_bugs);
        machine.node = Some(Node { follower, role: Role::Idle });
        effects.into_iter().for_each(|effect| self.perform(at, at, effect));
    }

    fn take_over(&mut self, seeded_bugs: SeededBugs, at: usize) {
        self.used.take_overs += 1;
        let newest = self.chain.last().expect("never empty").clone();
        let epoch = Epoch(newest.epoch.0 + 1);
        let number = newest.configuration.number + 1;
        let configuration = Configuration { number, ..newest.configuration };
        self.chain.push(Link { epoch, configuration: configuration.clone() });
        let candidate = Candidate::new_with(epoch, configuration, seeded_bugs);
        if let Some(node) = &mut self.machines[at].node {
            node.role = Role::Candidate(candidate);
        }
        self.own_request(at, Request::Promise { epoch });
    }

    fn open(&mut self, bounds: &Bounds, seeded_bugs: SeededBugs, at: usize) {
        let id = self.machines[at].id;
        let Some(node) = &mut self.machines[at].node else { return };
        let Role::Candidate(candidate) = &node.role else { return };
        let candidate = candidate.clone();
        let follower = node.follower.clone();
        let Some((tail, is_proven)) = self.tail_to_open(bounds, &candidate, &follower) else {
            return;
        };
        let (previous, opening) = match seeded_bugs.opening_over_tail && tail.sequence > 0 {
            true => {
                let before = follower.log().at(tail.sequence - 1).expect("it has its log");
                (before, tail.sequence)
            }
            false => (tail, tail.sequence + 1),
        };
        if !is_proven {
            self.forced.push((candidate.epoch(), follower.log().clone()));
        }
        let owner = Owner::new_with(
            id,
            candidate.epoch(),
            candidate.configuration().clone(),
            opening,
            seeded_bugs,
        );
        if let Some(node) = &mut self.machines[at].node {
            node.role = Role::Owner(owner);
        }
        let epoch = candidate.epoch();
        self.own_append(
            at,
            previous,
            Position { epoch, sequence: opening },
            Written { content: 0, is_sync: true },
        );
    }

    fn write(&mut self, bounds: &Bounds, at: usize) {
        self.used.writes += 1;
        let Some(Node { follower, role: Role::Owner(owner) }) = &self.machines[at].node else {
            return;
        };
        let previous = follower.log().tail();
        let position = Position { epoch: owner.epoch(), sequence: previous.sequence + 1 };
        let written = Written { content: self.used.writes, is_sync: bounds.reboots == 0 };
        self.own_append(at, previous, position, written);
    }

    fn own_append(&mut self, at: usize, previous: Position, position: Position, written: Written) {
        let batch = Batch { position, bytes: Bytes::copy_from_slice(&[written.content]) };
        let request = Request::Append {
            epoch: position.epoch,
            previous,
            batches: vec![batch],
            proven_at: None,
            is_sync: written.is_sync,
            lease: None,
            configuration: 0,
        };
        self.own_request(at, request);
    }

    /// Hands a request to the member on the same node.
    fn own_request(&mut self, at: usize, request: Request) {
        let envelope = self.envelope(at, at, Message::Request(request));
        self.deliver(envelope, usize::MAX);
    }

    fn add_learner(&mut self, at: usize) {
        let ids: Vec<MemberId> = self.machines.iter().map(|machine| machine.id).collect();
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            let new = ids.into_iter().find(|id| owner.progress(id).is_none());
            new.into_iter().for_each(|id| owner.add_learner(id));
        }
    }

    fn begin_change(&mut self, at: usize, other: usize) {
        self.used.changes += 1;
        let newest = self.chain.last().expect("never empty").configuration.clone();
        let id = self.machines[other].id;
        let mut members = newest.members.clone();
        if members.contains(&id) {
            members.remove(&id);
        } else {
            // A wiped member is replaced by what its machine has become.
            let present: BTreeSet<MemberId> = self.machines.iter().map(|one| one.id).collect();
            members.retain(|member| present.contains(member));
            members.insert(id);
        }
        let quorum = members.len() / 2 + 1;
        let next = Configuration { number: newest.number + 1, members, quorum };
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            owner.begin_change(next);
        }
    }

    fn record(&mut self, at: usize, learns: bool) {
        let newest = self.chain.last().expect("never empty").clone();
        let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node else {
            return;
        };
        let Some(next) = owner.change_to_record().cloned() else { return };
        if newest.epoch == owner.epoch() && newest.configuration != next {
            self.chain.push(Link { epoch: owner.epoch(), configuration: next.clone() });
        }
        let is_ours = self.chain.last().is_some_and(|link| link.configuration == next);
        if learns && is_ours {
            owner.end_change(next.number);
        } else if learns {
            // Another node has the next number: it owns the pool.
            self.machines[at].node.as_mut().expect("just seen").role = Role::Idle;
        }
    }

    fn deliver(&mut self, envelope: Envelope, steps: usize) {
        let Envelope { from, from_id, to, to_id, message } = envelope;
        let now = self.now;
        let is_known = self.machines[to].id == to_id;
        let Some(node) = self.machines[to].node.as_mut().filter(|_| is_known) else { return };
        match message {
            Message::Request(request) => {
                let effects = node.follower.on_request(now, request);
                if let Role::Owner(owner) = &mut node.role {
                    owner.on_own_promise(node.follower.document().promised);
                }
                for effect in effects.into_iter().take(steps) {
                    self.perform(to, from, effect);
                }
            }
            Message::Answer(answer) => self.take_answer(to, from_id, answer),
        }
    }

    fn perform(&mut self, at: usize, from: usize, effect: Effect) {
        let machine = &mut self.machines[at];
        match effect {
            Effect::Store(document) => machine.stored = document,
            Effect::Cut(sequence) => {
                let end = usize::try_from(sequence).expect("small");
                machine.log.truncate(end);
                machine.synced = machine.synced.min(end);
            }
            Effect::Write(batches) => machine.log.extend(batches),
            Effect::Sync => machine.synced = machine.log.len(),
            Effect::Answer(answer) => self.reply(at, from, answer),
            Effect::Send { epoch, run, previous } => {
                let first = usize::try_from(previous.sequence).expect("small");
                let batches = machine.log.get(first..).unwrap_or_default().to_vec();
                self.reply(at, from, Answer::Batches { epoch, run, previous, batches });
            }
        }
    }

    fn reply(&mut self, at: usize, to: usize, answer: Answer) {
        if at == to {
            let id = self.machines[at].id;
            self.take_answer(at, id, answer);
        } else {
            let envelope = self.envelope(at, to, Message::Answer(answer));
            self.network.insert(envelope);
        }
    }

    fn take_answer(&mut self, at: usize, from: MemberId, answer: Answer) {
        let is_own = self.machines[at].id == from;
        let Some(node) = &mut self.machines[at].node else { return };
        match &mut node.role {
            Role::Idle => {}
            Role::Owner(owner) => {
                owner.on_answer(&from, &answer, node.follower.log());
            }
            Role::Candidate(candidate) => {
                candidate.on_answer(from, &answer);
                if is_own {
                    candidate.on_own_answer(&answer, node.follower.log());
                }
                let epoch = candidate.epoch();
                if let Answer::Batches { epoch: of, previous, batches, .. } = answer
                    && of == epoch
                    && candidate.superseded_by().is_none()
                {
                    self.own_request(
                        at,
                        Request::Append {
                            epoch,
                            previous,
                            batches,
                            proven_at: None,
                            is_sync: false,
                            lease: None,
                            configuration: 0,
                        },
                    );
                }
            }
        }
    }

    // --- what must hold ---

    /// Whether the loss of a batch was recorded by an operator.
    fn is_forgiven(&self, position: &Position) -> bool {
        self.forced.iter().any(|(epoch, log)| position.epoch < *epoch && !log.has(*position))
    }

    fn check(&mut self, bounds: &Bounds) {
        let mut wrong = None;
        for machine in &self.machines {
            let Some(Node { follower, role: Role::Owner(owner) }) = &machine.node else { continue };
            if owner.superseded_by().is_some() {
                continue;
            }
            let (epoch, log) = (owner.epoch(), follower.log());
            if owner.is_open() && self.opened.insert(epoch) {
                if self.flushed.iter().any(|one| !log.has(*one)) {
                    wrong = Some("a flushed write is lost");
                } else if self
                    .acknowledged
                    .iter()
                    .any(|one| !self.is_forgiven(one) && !log.has(*one))
                {
                    wrong = Some("an acknowledged write is lost");
                }
            }
            for sequence in 1..=owner.acknowledged() {
                self.acknowledged.extend(log.at(sequence));
            }
            for sequence in 1..=owner.committed() {
                self.flushed.extend(log.at(sequence));
            }
        }
        for machine in &self.machines {
            let Some(Node { follower, role: Role::Owner(owner) }) = &machine.node else { continue };
            let is_served = bounds.lease > 0
                && owner.is_open()
                && owner.lease_until().is_some_and(|until| self.now < until);
            let is_stale = self.acknowledged.iter().any(|position| {
                let is_shown =
                    position.sequence <= owner.acknowledged() && follower.log().has(*position);
                !is_shown && !self.is_forgiven(position)
            });
            let is_lost = self.opened.last() == Some(&owner.epoch()) && is_stale;
            if is_lost && owner.is_open() && owner.superseded_by().is_none() {
                wrong = Some("an acknowledged write is lost");
            }
            if is_served && is_stale {
                wrong = Some("a read is stale");
            }
        }
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let (one, other) = (&self.machines[one].log, &self.machines[other].log);
            let mut pairs = one.iter().zip(other.iter());
            let equal = pairs.rposition(|(a, b)| a.position == b.position).map_or(0, |at| at + 1);
            if one[..equal] != other[..equal] {
                wrong = Some("logs differ below an equal position");
            }
        }
        self.wrong = self.wrong.or(wrong);
    }
}
