//! A few machines, a network and the manifest chain. Every action is one step of one machine.
//!
//! Invariants:
//! - Machines know only what a real node knows: their document, their log, and messages.
//! - A record of every acknowledgement is kept apart, and each step compares the machines with it.

mod actions;
mod check;
mod delivery;
mod disk;

use self::disk::{Damage, Disk};
use crate::batch::Batch;
use crate::follower::{Document, Follower};
use crate::log_index::LogIndex;
use crate::messages::{Answer, Lease, Proof, Request};
use crate::owner::{Owner, Sending};
use crate::quorum::{Configuration, MemberId};
use crate::seeded_bugs::SeededBugs;
use crate::take_over::{Candidate, Decision};
use block::{Epoch, Lsn, Position};
use bytes::Bytes;
use std::collections::BTreeSet;
use uuid::Uuid;

/// What may happen in a world, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Number of members, which is that of machines.
    pub(super) members: u8,
    pub(super) quorum: usize,
    pub(super) take_overs: u8,
    pub(super) writes: u8,
    pub(super) crashes: u8,
    pub(super) reboots: u8,
    /// Disks that fail a write or sync, and lose data that was not synced.
    pub(super) failures: u8,
    pub(super) wipes: u8,
    /// Messages that arrive later than others that were sent after them.
    pub(super) delays: u8,
    pub(super) losses: u8,
    pub(super) repeats: u8,
    pub(super) changes: u8,
    pub(super) ticks: u8,
    /// Owners give their leases up.
    pub(super) resigns: u8,
    /// Length of a lease in ticks; 0: owners do not serve reads.
    pub(super) lease: u64,
    /// Leases get longer with every write.
    pub(super) is_lease_growing: bool,
    /// Batches in one message.
    pub(super) batches: u64,
    /// An operator opens the pool although acknowledged writes may be gone.
    pub(super) is_forced: bool,
    /// Batches are destaged and released from the owner's log.
    pub(super) trims: u8,
    /// Batches whose bytes turn bad.
    pub(super) damages: u8,
    /// A member that may takes over alone.
    pub(super) is_alone: bool,
}

impl Bounds {
    /// Whether machines may lose what was not synced.
    pub(super) fn loses_unsynced(&self) -> bool {
        self.reboots + self.failures > 0
    }

    pub(super) const NONE: Bounds = Bounds {
        members: 3,
        quorum: 2,
        take_overs: 0,
        writes: 2,
        crashes: 0,
        reboots: 0,
        failures: 0,
        wipes: 0,
        delays: 1,
        losses: 1,
        repeats: 0,
        changes: 0,
        ticks: 0,
        resigns: 0,
        lease: 0,
        is_lease_growing: false,
        batches: 2,
        is_forced: false,
        trims: 0,
        damages: 0,
        is_alone: false,
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
    /// The process of the sender is killed after so many effects of the answer on its own member.
    SenderKilled(usize),
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
    /// A loss of power, and what is left of the log.
    Reboot(usize, Option<usize>),
    /// A write or sync fails, and what is left of the log once the kernel has dropped its pages.
    Fail(usize, Option<usize>),
    Wipe(usize),
    /// The bytes of a batch turn bad.
    Damage(usize, u64),
    Start(usize),
    TakeOver(usize),
    GoAlone(usize),
    /// The owner destages what is acknowledged, and releases it.
    Trim(usize),
    /// A member releases what is destaged.
    Release(usize),
    Open(usize),
    AddLearner(usize),
    BeginChange(usize, usize),
    /// An owner gives up the change of the members that it has begun.
    GiveUpChange(usize),
    /// The owner creates the link of its change; false: it does not learn of it.
    Record(usize, bool),
    /// The owner gives its lease up.
    Resign(usize),
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
    disk: Disk,
    page_cache: Uuid,
    node: Option<Node>,
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
    failures: u8,
    wipes: u8,
    delays: u8,
    losses: u8,
    repeats: u8,
    changes: u8,
    trims: u8,
    resigns: u8,
    damages: u8,
    identities: u8,
    page_caches: u8,
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
    destaged: BTreeSet<Position>,
    /// Logs with which an operator forced an epoch to open: the loss of older batches that they lack
    /// is recorded.
    forced: Vec<(Epoch, LogIndex)>,
    /// Epochs that have opened.
    opened: BTreeSet<Epoch>,
    pub(super) wrong: Option<&'static str>,
}

fn index(before: Position, log: &[Batch]) -> LogIndex {
    let mut index = LogIndex::new(before);
    log.iter().for_each(|batch| index.push(batch.position));
    index
}

const CACHE: Uuid = Uuid::from_u128(100);
const FRESH: Document = Document {
    page_cache: CACHE,
    run: 0,
    promised: Epoch(0),
    proof: Proof::All,
    synced: 0,
    lease: 0,
};

impl World {
    /// Members with empty logs, of which the first has won the first epoch and opened.
    pub(super) fn new(bounds: &Bounds, seeded_bugs: SeededBugs) -> World {
        let ids: Vec<MemberId> =
            (1..=bounds.members).map(|id| Uuid::from_u128(id.into())).collect();
        let machines = ids.iter().map(|id| Machine {
            id: *id,
            disk: Disk::new(FRESH, seeded_bugs.note_forgotten),
            page_cache: CACHE,
            node: None,
        });
        let members = ids.iter().copied().collect();
        let configuration = Configuration { number: 1, members, quorum: bounds.quorum };
        let mut world = World {
            machines: machines.collect(),
            network: BTreeSet::new(),
            chain: vec![Link { epoch: Epoch(0), configuration }],
            now: 0,
            used: Used::default(),
            acknowledged: BTreeSet::new(),
            flushed: BTreeSet::new(),
            destaged: BTreeSet::new(),
            forced: Vec::new(),
            opened: BTreeSet::new(),
            wrong: None,
        };
        let count = ids.len();
        (0..count).for_each(|machine| world.start(seeded_bugs, machine));
        world.take_over(seeded_bugs, 0);
        for _ in 0..4 {
            for to in 0..count {
                world.act(bounds, seeded_bugs, Action::Send(0, to, Fate::Answered));
            }
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

    fn is_member(&self, at: usize) -> bool {
        let newest = self.chain.last().expect("never empty");
        newest.configuration.members.contains(&self.machines[at].id)
    }

    fn may_go_alone(&self, at: usize, node: &Node) -> bool {
        let newest = &self.chain.last().expect("never empty").configuration;
        newest.members.len() > 1 && node.follower.may_go_alone(&self.machines[at].id, newest)
    }

    fn newest_destaged(&self) -> Option<Position> {
        self.destaged.iter().copied().max_by_key(|position| position.sequence)
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
                if owner.has_resigned() {
                    let is_other = at != to && owner.progress(&target).is_some();
                    return is_other.then_some(Request::Resign { epoch: owner.epoch() });
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
                let batches = match sending {
                    Sending::Append { previous, last, .. } => {
                        machine.disk.read(previous.sequence, last)?.to_vec()
                    }
                    Sending::Reset { .. } => Vec::new(),
                };
                let growth = u64::from(self.used.writes) * u64::from(bounds.is_lease_growing);
                let lease = Lease { sent: self.now, length: bounds.lease + growth };
                let lease = (bounds.lease > 0 && at != to).then_some(lease);
                let is_sync = is_sync || at == to || !bounds.loses_unsynced();
                let (epoch, configuration) = (owner.epoch(), owner.configuration());
                Some(sending.request(epoch, configuration, batches, is_sync, lease, Lsn::NONE))
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
            Action::Reboot(at, kept) => {
                self.used.reboots += 1;
                self.stop(at);
                let machine = &mut self.machines[at];
                machine.disk.lose_power(kept);
                self.used.page_caches += 1;
                machine.page_cache = Uuid::from_u128(100 + u128::from(self.used.page_caches));
            }
            Action::Fail(at, kept) => self.fail(at, kept),
            Action::Wipe(at) => {
                self.used.wipes += 1;
                self.used.identities += 1;
                let machine = &mut self.machines[at];
                machine.id = Uuid::from_u128(10 + u128::from(self.used.identities));
                (machine.disk, machine.page_cache) =
                    (Disk::new(FRESH, seeded_bugs.note_forgotten), CACHE);
            }
            Action::Damage(at, sequence) => {
                self.used.damages += 1;
                self.machines[at].disk.damage = Some(Damage { sequence, is_old: false });
            }
            Action::GoAlone(at) => self.go_alone(seeded_bugs, at),
            Action::Trim(at) => self.trim(at),
            Action::Release(at) => self.release(at),
            Action::Start(at) => self.start(seeded_bugs, at),
            Action::TakeOver(at) => self.take_over(seeded_bugs, at),
            Action::Open(at) => self.open(bounds, seeded_bugs, at),
            Action::AddLearner(at) => self.add_learner(at),
            Action::BeginChange(at, to) => self.begin_change(at, to),
            Action::GiveUpChange(at) => self.give_up_change(at),
            Action::Record(at, learns) => self.record(at, learns),
            Action::Resign(at) => self.resign(at),
            Action::Tick => self.now += 1,
        }
        self.check(bounds);
    }

    fn start(&mut self, seeded_bugs: SeededBugs, at: usize) {
        let machine = &mut self.machines[at];
        let found = machine.disk.start(machine.page_cache);
        let (follower, effects) = Follower::start_with(found, self.now, seeded_bugs);
        machine.node = Some(Node { follower, role: Role::Idle });
        effects.into_iter().for_each(|effect| self.perform(at, at, effect));
    }

    /// A write or sync of a machine's log fails: its member says so in its document and ends.
    fn fail(&mut self, at: usize, kept: Option<usize>) {
        self.used.failures += 1;
        let machine = &mut self.machines[at];
        if let Some(node) = &machine.node {
            let document = node.follower.on_failure(machine.disk.document);
            machine.disk.fail(document, kept);
        }
        self.stop(at);
    }

    fn take_over(&mut self, seeded_bugs: SeededBugs, at: usize) {
        let newest = self.chain.last().expect("never empty").configuration.clone();
        self.take_over_with(seeded_bugs, at, newest);
    }

    /// Creates a link whose configuration contains only this member, and takes over with it.
    fn go_alone(&mut self, seeded_bugs: SeededBugs, at: usize) {
        self.check_alone(at);
        let members = [self.machines[at].id].into();
        self.take_over_with(seeded_bugs, at, Configuration { number: 0, members, quorum: 1 });
    }

    fn take_over_with(&mut self, seeded_bugs: SeededBugs, at: usize, next: Configuration) {
        self.used.take_overs += 1;
        let newest = self.chain.last().expect("never empty");
        let epoch = Epoch(newest.epoch.0 + 1);
        let configuration = Configuration { number: newest.configuration.number + 1, ..next };
        self.chain.push(Link { epoch, configuration: configuration.clone() });
        let machine = &mut self.machines[at];
        let candidate = Candidate::new_with(machine.id, epoch, configuration, seeded_bugs);
        if let Some(node) = &mut machine.node {
            node.role = Role::Candidate(candidate);
        }
        self.own_request(at, Request::Promise { epoch }, usize::MAX);
    }

    fn trim(&mut self, at: usize) {
        self.used.trims += 1;
        let Some(Node { follower, role: Role::Owner(owner) }) = &self.machines[at].node else {
            return;
        };
        let (log, acknowledged) = (follower.log(), owner.acknowledged());
        self.destaged.extend((log.start()..=acknowledged).filter_map(|one| log.at(one)));
        let before = log.at(acknowledged).expect("an owner has what it acknowledged");
        self.release_to(at, before);
    }

    fn release(&mut self, at: usize) {
        let newest = self.newest_destaged().expect("something is destaged");
        self.release_to(at, newest);
    }

    fn release_to(&mut self, at: usize, before: Position) {
        let Machine { node, disk, .. } = &mut self.machines[at];
        disk.release(before);
        if let Some(node) = node {
            node.follower.on_released(before.sequence);
        }
    }

    /// A machine reads a damaged batch of its own log. If it is the owner, it ends.
    fn notice_damage(&mut self, at: usize, sequence: u64) {
        let Some(node) = &mut self.machines[at].node else { return };
        if let Role::Owner(_) = node.role {
            node.role = Role::Idle;
        }
        let effects = node.follower.on_damage(sequence);
        effects.into_iter().for_each(|effect| self.perform(at, at, effect));
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
        let position = Position { epoch, sequence: opening };
        let batch = Batch { position, bytes: Bytes::from_static(&[0]) };
        let request = Request::Append {
            epoch,
            previous,
            batches: vec![batch],
            proven_at: None,
            is_sync: true,
            lease: None,
            configuration: 0,
            trim_lsn: Lsn::NONE,
        };
        self.own_request(at, request, usize::MAX);
    }

    fn write(&mut self, bounds: &Bounds, at: usize) {
        self.used.writes += 1;
        let content = Bytes::copy_from_slice(&[self.used.writes]);
        let Machine { node, disk, .. } = &mut self.machines[at];
        let Some(Node { follower, role: Role::Owner(owner) }) = node else { return };
        let sequence = follower.log().tail().sequence + 1;
        let position = Position { epoch: owner.epoch(), sequence };
        if !follower.on_own_written(position) {
            return;
        }
        disk.write([Batch { position, bytes: content }]);
        let mut synced = 0;
        if !bounds.loses_unsynced() {
            disk.sync();
            follower.on_own_synced(sequence);
            synced = sequence;
        }
        owner.on_own(sequence, synced);
    }

    /// Hands a request to the member on the same node, which is killed after so many effects.
    fn own_request(&mut self, at: usize, request: Request, steps: usize) {
        let envelope = self.envelope(at, at, Message::Request(request));
        self.deliver(envelope, steps);
    }

    fn resign(&mut self, at: usize) {
        self.used.resigns += 1;
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            owner.resign();
        }
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

    fn give_up_change(&mut self, at: usize) {
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            owner.change().into_iter().for_each(|number| owner.give_up_change(number));
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
}
