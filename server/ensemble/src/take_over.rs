//! The steps of a candidate, from a won epoch to an owner whose log has every acknowledged batch
//! (docs/protocol.md, "Take-over").
//!
//! Invariants:
//! - Each step is repeated until it succeeds, a later epoch appears, or too few members answer for too long.
//! - Nothing is read from a member that has not promised.

use crate::local::{LocalMember, OwnerRole};
use crate::owned::{OwnedLog, OwnedOptions};
use crate::peers::{Link, Peers};
use crate::seeded_bugs::seeded_bugs;
use crate::tasks::{self, TaskSet};
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use replication::{Answer, Candidate, Configuration, Decision, MemberId, Request};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use wal::{QuorumTail, TailLoss};

/// Pause before a promise is asked for again. Chosen by hand: it adds to the time of a take-over.
const PROMISE_RETRY: Duration = Duration::from_millis(20);
/// Attempts to reach the member on this node, which may have to be started again. Chosen by hand: ten
/// seconds.
const OWN_ERRORS_MAX: u32 = 500;
/// Pause before an attempt to connect again. Chosen by hand.
const CONNECT_RETRY: Duration = Duration::from_millis(50);
/// Answers of members that wait for the candidate. Chosen by hand.
const ANSWERS_MAX: usize = 16;

/// Longest wait for members whose answers decide. Chosen by hand: the node then looks again who is there, and
/// whether the pool may go on without them.
const UNDECIDED_MAX: Duration = Duration::from_secs(10);

/// What a take-over needs besides the member of its node.
pub struct TakeOver {
    /// The epoch that the node has won in the manifest chain.
    pub epoch: Epoch,
    /// The configuration of that link.
    pub configuration: Configuration,
    /// LSN up to which everything is in the store.
    pub trim_lsn: Lsn,
    /// The way to the other members.
    pub peers: Arc<dyn Peers>,
    /// Times and bounds of the owner.
    pub options: OwnedOptions,
}

/// A log that may be opened.
pub struct Taken {
    /// The owner's side. Open the write log with `quorum`, attach the log, start it, and wait for
    /// [`LocalMember::opened`].
    pub owned: OwnedLog,
    /// The decision of the members.
    pub quorum: QuorumTail,
    /// Keeps the node in the role of the owner.
    pub role: OwnerRole,
}

/// The messages of one member to the candidate.
struct Heard {
    from: MemberId,
    answer: Answer,
}

impl TakeOver {
    /// Fences earlier owners, chooses the log to continue, and brings it to this node.
    ///
    /// # Errors
    /// `Fenced` if another node has won a later epoch; `Unavailable` if too few members answer for ten
    /// seconds; `Full` if the ring on this node has no room for the log;
    /// `Corrupt` if so many logs are damaged that flushed
    /// writes may be gone; the failure of the member on this node.
    pub async fn run(self, local: &LocalMember) -> Result<Taken> {
        let TakeOver { epoch, configuration, trim_lsn: _, peers, options } = &self;
        let role = local.owner_role(*epoch);
        let mut candidate = Candidate::new(local.id(), *epoch, configuration.clone());
        let (heard_by, mut heard) = mpsc::channel(ANSWERS_MAX);
        let asking = TaskSet::default();
        for member in configuration.members.iter().filter(|member| **member != local.id()) {
            let (peers, heard) = (Arc::clone(peers), heard_by.clone());
            asking.spawn(ask_for_promise(peers, *member, *epoch, heard));
        }
        let mut is_asked_once = false;
        let mut patience = pin!(tasks::sleep(UNDECIDED_MAX));
        let (tail, loss) = loop {
            // What a damaged member says takes the own promise back, too.
            let is_own_next = candidate.lacks_own_promise() && !is_asked_once;
            let Heard { from, answer } = match is_own_next {
                true => Heard { from: local.id(), answer: own_promise(local, *epoch).await? },
                // The channel stays open: this function has a sender of it.
                false => tokio::select! {
                    biased;
                    () = &mut patience => return Err(self.undecided(&candidate)),
                    heard = heard.recv() => match heard {
                        Some(heard) => heard,
                        None => continue,
                    },
                },
            };
            is_asked_once |= is_own_next && seeded_bugs().own_promise_asked_once;
            candidate.on_answer(from, &answer);
            check_superseded(&candidate)?;
            let Some((tail, from, loss)) = self.choose(&candidate)? else { continue };
            let before = local.state().await?.1.tail();
            if self.fetch(local, &mut candidate, (tail, from)).await? {
                break (tail, loss);
            }
            if local.state().await?.1.tail() != before {
                patience.set(tasks::sleep(UNDECIDED_MAX));
            }
        };
        let (_, index) = local.state().await?;
        let predecessor = match index.tail() == index.before() && tail != Position::START {
            true => {
                let found = self.predecessor(tail, local.id());
                let found = tasks::timeout(UNDECIDED_MAX, found).await;
                Some(found.unwrap_or_else(|_| Err(self.undecided(&candidate)))?)
            }
            false => None,
        };
        drop((asking, heard));
        let owned =
            local.become_owner(*epoch, configuration.clone(), Arc::clone(peers), *options).await?;
        let quorum = QuorumTail { position: tail, predecessor, loss, replicas: owned.replicas() };
        Ok(Taken { owned, quorum, role })
    }

    /// Returns the log to continue, the member that has it, and what may be lost with it; `None` as long
    /// as more members may answer.
    fn choose(
        &self,
        candidate: &Candidate,
    ) -> Result<Option<(Position, MemberId, Option<TailLoss>)>> {
        let have_all = self.configuration.members.iter().all(|one| candidate.has_promise(one));
        match candidate.decide() {
            Decision::Continue(tail, from) => Ok(Some((tail, from, None))),
            // More evidence than that of all members will not come.
            Decision::LossPossible(tail, from) if have_all => {
                Ok(Some((tail, from, Some(TailLoss::Reboot))))
            }
            Decision::LossPossible(..) | Decision::Wait => Ok(None),
            Decision::Damaged => Err(Error::new(
                ErrorKind::Corrupt,
                "take the pool over: so many members have damaged logs that flushed writes may be gone. Nothing was \
                 changed. Keep the directories of all members, and bring one back that was whole",
            )),
        }
    }

    /// Brings the chosen log to this node. Returns false if its member has to promise again first.
    async fn fetch(
        &self,
        local: &LocalMember,
        candidate: &mut Candidate,
        (tail, from): (Position, MemberId),
    ) -> Result<bool> {
        let (_, index) = local.state().await?;
        if candidate.may_open(&index) {
            return Ok(true);
        }
        if from == local.id() {
            return Ok(false);
        }
        let Ok(mut link) = self.peers.connect(from).await else { return Ok(false) };
        loop {
            let (_, index) = local.state().await?;
            if candidate.may_open(&index) {
                return Ok(true);
            }
            let request = candidate.read(tail, &index);
            let Some(answer) = exchange(&mut link, request).await else { return Ok(false) };
            candidate.on_answer(from, &answer);
            check_superseded(candidate)?;
            let Answer::Batches { start, previous, batches, .. } = answer else { return Ok(false) };
            // A member that was reset to the tail has no batch: the own one begins there, too.
            let is_end =
                batches.is_empty() && (previous != tail || seeded_bugs().empty_end_ignored);
            if is_end || !candidate.has_promise(&from) {
                return Ok(false);
            }
            let store = candidate.store(start, previous, batches, &index, self.trim_lsn);
            let Some(answer) = local.ask(store).await? else { return Ok(false) };
            if let Answer::Full { .. } = answer {
                return Err(self.full(from));
            }
            candidate.on_answer(local.id(), &answer);
            check_superseded(candidate)?;
            let (_, index) = local.state().await?;
            candidate.on_own_answer(&answer, &index);
        }
    }
}

impl TakeOver {
    /// Returns the batch at `tail` from a member that has it: the own log is empty and begins behind it.
    /// Waits until one answers.
    ///
    /// # Errors
    /// `Fenced` if another node has won a later epoch.
    async fn predecessor(&self, tail: Position, me: MemberId) -> Result<Bytes> {
        let after = Position { sequence: tail.sequence - 1, ..tail };
        loop {
            for member in self.configuration.members.iter().filter(|member| **member != me) {
                let Ok(mut link) = self.peers.connect(*member).await else { continue };
                let request = Request::Read { epoch: self.epoch, after };
                match exchange(&mut link, request).await {
                    Some(Answer::Batches { batches, .. }) => {
                        let mut found = batches.into_iter().filter(|one| one.position == tail);
                        if let Some(batch) = found.next() {
                            return Ok(batch.bytes);
                        }
                    }
                    Some(Answer::Superseded { promised, .. }) if promised > self.epoch => {
                        return Err(superseded(self.epoch, promised));
                    }
                    Some(_) | None => {}
                }
            }
            tasks::sleep(CONNECT_RETRY).await;
        }
    }

    fn undecided(&self, candidate: &Candidate) -> Error {
        let members = self.configuration.members.iter();
        let silent = members.filter(|member| !candidate.has_promise(member));
        let names: Vec<String> = silent.map(|member| self.peers.name_of(*member)).collect();
        let count = self.configuration.members.len();
        let what = match names.is_empty() {
            true => "take the pool over: no member of its log brings the end of it to this node"
                .to_owned(),
            false => format!(
                "take the pool over: of the {count} members of its log, {} did not answer for {UNDECIDED_MAX:?}, and \
                 acknowledged writes may be there alone",
                names.join(" and ")
            ),
        };
        Error::new(ErrorKind::Unavailable, what)
    }

    fn full(&self, from: MemberId) -> Error {
        let what = format!(
            "take the pool over with epoch {}: the ring of the member on this node is full; give it a ring as \
             large as that of member {from}, or let that node take the pool over",
            self.epoch
        );
        Error::new(ErrorKind::Full, what)
    }
}

fn check_superseded(candidate: &Candidate) -> Result<()> {
    match candidate.superseded_by() {
        Some(later) => Err(superseded(candidate.epoch(), later)),
        None => Ok(()),
    }
}

fn superseded(epoch: Epoch, later: Epoch) -> Error {
    let what = format!(
        "take the pool over with epoch {epoch}: another node came first, with epoch {later}"
    );
    Error::new(ErrorKind::Fenced, what)
}

/// Asks the member on this node until it promises: it does once the lease that it gave has run out. A
/// member that is being started again is waited for, and an earlier owner on this node ends.
async fn own_promise(local: &LocalMember, epoch: Epoch) -> Result<Answer> {
    let mut errors_left = OWN_ERRORS_MAX;
    loop {
        match local.ask(Request::Promise { epoch }).await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => {}
            Err(error) if errors_left == 0 => return Err(error),
            Err(_) => errors_left -= 1,
        }
        tasks::sleep(PROMISE_RETRY).await;
    }
}

/// Asks a member until it promises, and again whenever the candidate may need to know what it has now.
async fn ask_for_promise(
    peers: Arc<dyn Peers>,
    member: MemberId,
    epoch: Epoch,
    heard: mpsc::Sender<Heard>,
) {
    loop {
        if let Ok(mut link) = peers.connect(member).await {
            while let Some(answer) = promise_of(&mut link, epoch).await {
                if heard.send(Heard { from: member, answer }).await.is_err() {
                    return;
                }
                tasks::sleep(CONNECT_RETRY).await;
            }
        }
        tasks::sleep(CONNECT_RETRY).await;
    }
}

/// Asks for a promise until there is an answer; `None` if the link ends.
async fn promise_of(link: &mut Link, epoch: Epoch) -> Option<Answer> {
    loop {
        link.requests.send(Request::Promise { epoch }).await.ok()?;
        match tasks::timeout(PROMISE_RETRY, link.answers.recv()).await {
            Ok(answer) => return answer,
            Err(_) => continue, // the member still holds to an earlier owner's lease
        }
    }
}

async fn exchange(link: &mut Link, request: Request) -> Option<Answer> {
    link.requests.send(request).await.ok()?;
    tasks::timeout(EXCHANGE_MAX, link.answers.recv()).await.ok()?
}

/// Longest wait for the batches of a member. Chosen by hand: far more than reading a megabyte takes.
const EXCHANGE_MAX: Duration = Duration::from_secs(5);
