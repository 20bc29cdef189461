//! The task that sends the owner's log to one member.
//!
//! Invariants:
//! - What is under way is bounded in bytes and in requests. A member beyond the bound waits without
//!   holding up another.
//! - A member whose ring is full gets batches when the store has taken more, or a pause has passed. In
//!   between, requests without batches say what the store has.
//! - Each request whose last batch waits for a sync asks for one: the member lets those that wait share it.
//! - A request is noted in the state machine before it is sent. If the link ends, the machine goes back
//!   to what was answered.

use crate::owned::{OwnedLog, Shared, State};
use crate::peers::Link;
use crate::seeded_bugs::seeded_bugs;
use crate::tasks;
use block::Lsn;
use replication::{Answer, Batch, Lease, MemberId, Request, Sending};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Batches in one request. Chosen by hand: enough that bytes bound it.
const BATCHES_MAX: u64 = 256;

/// A request without an answer.
#[derive(Debug)]
struct UnderWay {
    bytes: usize,
    /// In nanoseconds since the owner's origin.
    sent_at: u64,
}

/// What was sent over the present link.
#[derive(Debug, Default)]
struct Sent {
    /// The requests without an answer, oldest first.
    under_way: VecDeque<UnderWay>,
    bytes: usize,
    /// A sync of everything up to this sequence was asked for, in a request with the batches up to it.
    sync_requested: u64,
    /// The next sync is asked for with the batches up to this sequence, unless that was requested before.
    sync_goal: u64,
    /// Time of the last request, in nanoseconds since the owner's origin.
    last_at: Option<u64>,
    /// Time of the last answer, or of the first request that has waited for one since.
    answered_at: u64,
    /// Time of the newest answer that said that the member's ring is full.
    full_at: Option<u64>,
    /// The LSN up to which everything was in the store, in the newest request with batches.
    tried_at: Lsn,
    /// The member was told that the owner has resigned.
    has_resigned: bool,
    /// The member is in the zone of the owner's node.
    is_in_own_zone: bool,
}

impl Sent {
    /// Returns the time since the request that is answered.
    fn on_answer(&mut self, now: u64) -> Option<Duration> {
        let UnderWay { bytes, sent_at } = self.under_way.pop_front()?;
        self.bytes -= bytes;
        self.answered_at = now;
        Some(Duration::from_nanos(now.saturating_sub(sent_at)))
    }

    fn on_request(&mut self, now: u64, bytes: usize) {
        if self.under_way.is_empty() {
            self.answered_at = now;
        }
        self.under_way.push_back(UnderWay { bytes, sent_at: now });
        self.bytes += bytes;
        self.last_at = Some(now);
    }

    /// Whether a member whose ring was full gets no batches yet.
    fn has_no_room(&self, now: u64, trim_lsn: Lsn, pause: Duration) -> bool {
        let pause = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
        let is_early = self.full_at.is_some_and(|at| now < at.saturating_add(pause));
        is_early && trim_lsn <= self.tried_at
    }

    /// Whether an answer is overdue.
    fn is_silent(&self, shared: &Shared) -> bool {
        let since = shared.now().saturating_sub(self.answered_at);
        !self.under_way.is_empty() && Duration::from_nanos(since) >= shared.options.silence
    }
}

/// What to do for the member.
enum Next {
    /// Send this.
    Send(Request, usize),
    /// Read the batches of this from the ring, and send them.
    Read(Sending),
    /// Nothing before something happens, or this time passes.
    Wait(Duration),
    /// The owner has ended.
    End,
}

impl OwnedLog {
    /// Starts a sender for each other member, on the present runtime. They end with
    /// [`OwnedLog::stop`], or when the owner is superseded.
    pub fn start(&self) {
        let wakes = self.shared.wakes.read().clone();
        for (member, wake) in wakes {
            drop(tasks::spawn(run(Arc::clone(&self.shared), member, wake)));
        }
    }
}

/// Sends the log of `shared` to `member` until the owner ends, or it is no member any more.
pub(crate) async fn run(shared: Arc<Shared>, member: MemberId, wake: Arc<Notify>) {
    let mut stop = shared.stop.subscribe();
    let sending = async {
        while shared.state.lock().owner.progress(&member).is_some() {
            match shared.peers.connect(member).await {
                Ok(link) => {
                    note(&shared, member, None);
                    let is_ended = converse(&shared, member, link, &wake).await;
                    shared.state.lock().owner.on_disconnected(&member);
                    if is_ended {
                        return;
                    }
                    note(&shared, member, Some("the connection ended".to_owned()));
                }
                Err(error) => note(&shared, member, Some(error.chain())),
            }
            tasks::sleep(shared.options.reconnect).await;
        }
    };
    tokio::select! {
        biased;
        () = sending => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// Notes the state of the connection; logs a change.
fn note(shared: &Shared, member: MemberId, error: Option<String>) {
    let mut state = shared.state.lock();
    let status = state.statuses.entry(member).or_default();
    let is_connected = error.is_none();
    let is_change = status.is_connected != is_connected || status.error != error;
    (status.is_connected, status.error) = (is_connected, error.clone());
    drop(state);
    match error {
        _ if !is_change => {}
        None => tracing::info!(%member, "connected to a member of the write log"),
        Some(error) => {
            tracing::warn!(%member, error, "could not reach a member of the write log");
        }
    }
}

/// Exchanges messages over one link. Returns whether the owner has ended.
async fn converse(shared: &Arc<Shared>, member: MemberId, mut link: Link, wake: &Notify) -> bool {
    let is_in_own_zone = shared.peers.is_in_own_zone(member);
    let mut sent = Sent { is_in_own_zone, ..Sent::default() };
    loop {
        // Answers first: they free room, and a quorum may wait for them.
        while let Ok(answer) = link.answers.try_recv() {
            take(shared, &member, &mut sent, &answer);
        }
        if sent.is_silent(shared) {
            return false;
        }
        let wait = match next(shared, &member, &mut sent) {
            Next::End => return true,
            Next::Wait(wait) => wait,
            Next::Send(request, bytes) => {
                if !send(shared, &member, &mut link, &mut sent, (request, bytes)).await {
                    return false;
                }
                continue;
            }
            Next::Read(sending) => {
                let Some(request) = read(shared, member, &mut sent, sending).await else {
                    return false;
                };
                if let Some(request) = request
                    && !send(shared, &member, &mut link, &mut sent, request).await
                {
                    return false;
                }
                continue;
            }
        };
        tokio::select! {
            biased;
            answer = link.answers.recv() => match answer {
                Some(answer) => take(shared, &member, &mut sent, &answer),
                None => return false,
            },
            () = wake.notified() => {}
            () = tasks::sleep(wait) => {}
        }
    }
}

fn take(shared: &Shared, member: &MemberId, sent: &mut Sent, answer: &Answer) {
    let now = shared.now();
    let took = sent.on_answer(now);
    if let Answer::Full { .. } = answer {
        sent.full_at = Some(now);
    }
    shared.on_answer(member, answer, (now, took, !sent.under_way.is_empty()));
}

/// Sends a request, and takes answers while the link has no room for it. Returns false if the link has
/// ended.
async fn send(
    shared: &Shared,
    member: &MemberId,
    link: &mut Link,
    sent: &mut Sent,
    (request, bytes): (Request, usize),
) -> bool {
    sent.on_request(shared.now(), bytes);
    let Link { requests, answers } = link;
    let permit = loop {
        tokio::select! {
            biased;
            permit = requests.reserve() => match permit {
                Ok(permit) => break permit,
                Err(_) => return false,
            },
            answer = answers.recv() => match answer {
                Some(answer) => take(shared, member, sent, &answer),
                None => return false,
            },
        }
    };
    permit.send(request);
    true
}

/// Says what to do for the member now.
fn next(shared: &Shared, member: &MemberId, sent: &mut Sent) -> Next {
    let (now, options, trim_lsn) = (shared.now(), &shared.options, shared.trim_lsn());
    let state = &mut *shared.state.lock();
    let Some(progress) = state.owner.progress(member).copied() else { return Next::End };
    if state.owner.superseded_by().is_some() {
        return Next::End;
    }
    if state.owner.has_resigned() {
        // The link stays until the owner's side ends: a request that waits in it might not leave.
        let is_first = !std::mem::replace(&mut sent.has_resigned, true);
        return match is_first {
            true => Next::Send(Request::Resign { epoch: state.owner.epoch() }, 0),
            false => Next::Wait(options.silence),
        };
    }
    // A member that lacked the predecessor has not carried out the request.
    sent.sync_requested = sent.sync_requested.min(progress.next.saturating_sub(1));
    let is_full = progress.is_full && sent.has_no_room(now, trim_lsn, options.reconnect);
    let has_room = progress.may_send()
        && !is_full
        && sent.bytes < options.under_way_bytes
        && sent.under_way.len() < options.under_way_count;
    let batches_max = if has_room { BATCHES_MAX } else { 0 };
    let heartbeat = u64::try_from(options.heartbeat.as_nanos()).unwrap_or(u64::MAX);
    let due_at = sent.last_at.map_or(0, |at| at.saturating_add(heartbeat));
    let wait = || Next::Wait(Duration::from_nanos(due_at.saturating_sub(now)).max(MIN_WAIT));
    let Some(mut sending) = state.owner.sending(member, &state.index, batches_max) else {
        return wait();
    };
    let has_batches = sending.has_batches();
    let mut prepared = Prepared { now, lease: shared.lease_ns(), trim_lsn, ..Prepared::default() };
    if let Sending::Append { previous, last, .. } = &mut sending {
        if has_batches {
            match state.window.batches(previous.sequence + 1, *last, options.request_bytes) {
                Some(found) => prepared.batches = found,
                None => return Next::Read(sending),
            }
            *last = prepared.batches.last().map_or(*previous, |batch| batch.position).sequence;
        }
        prepared.is_sync = is_sync_due(state.sync_wanted, sent, progress.synced, *last);
        let is_full = sent.under_way.len() >= options.under_way_count;
        if !has_batches && (is_full || !prepared.is_sync && now < due_at) {
            return wait();
        }
    }
    let (request, bytes) = request_of(state, member, sent, sending, prepared);
    Next::Send(request, bytes)
}

/// Shortest wait for an event. Chosen by hand: a member at its bound is looked at when it answers.
const MIN_WAIT: Duration = Duration::from_millis(20);

/// Whether a request whose last batch is `last` asks for a sync. While clients want more and more, the
/// member syncs up to what was wanted when it had nothing to sync: else it might never be sent all of it.
fn is_sync_due(wanted: u64, sent: &mut Sent, synced: u64, last: u64) -> bool {
    let known = sent.sync_requested.max(synced);
    if sent.sync_goal <= known || seeded_bugs().sync_goal_moves {
        sent.sync_goal = wanted;
    }
    sent.sync_goal > known && last >= sent.sync_goal
}

/// What a request carries.
#[derive(Debug, Default)]
struct Prepared {
    batches: Vec<Batch>,
    is_sync: bool,
    now: u64,
    /// Length of the lease, in nanoseconds.
    lease: u64,
    /// Everything up to it is in the store.
    trim_lsn: Lsn,
}

/// Makes a request and notes it. Returns it with the bytes of its batches.
fn request_of(
    state: &mut State,
    member: &MemberId,
    sent: &mut Sent,
    sending: Sending,
    Prepared { batches, is_sync, now, lease, trim_lsn }: Prepared,
) -> (Request, usize) {
    let status = state.statuses.entry(*member).or_default();
    state.waits.entry(*member).or_insert(now);
    match &sending {
        Sending::Append { last, .. } if is_sync => sent.sync_requested = *last,
        Sending::Append { .. } => {}
        Sending::Reset { .. } => status.resets += 1,
    }
    let bytes = batches.iter().map(|batch| batch.bytes.len()).sum();
    state.traffic.on_sent(bytes, sent.is_in_own_zone);
    if !batches.is_empty() {
        sent.tried_at = trim_lsn;
    }
    status.sent_bytes += bytes as u64;
    state.owner.on_sent(member, &sending);
    let (epoch, configuration) = (state.owner.epoch(), state.owner.configuration());
    let lease = Some(Lease { sent: now, length: lease });
    (sending.request(epoch, configuration, batches, is_sync, lease, trim_lsn), bytes)
}

/// Reads what is to be sent from the ring. The inner `None` means that the state has changed
/// meanwhile; the outer one, that the ring could not be read.
async fn read(
    shared: &Arc<Shared>,
    member: MemberId,
    sent: &mut Sent,
    mut sending: Sending,
) -> Option<Option<(Request, usize)>> {
    let Sending::Append { previous, last, .. } = &mut sending else { return Some(None) };
    let (after, bytes_max) = (previous.sequence, shared.options.request_bytes);
    let reading = Arc::clone(shared);
    let read = tasks::blocking(move || reading.read(after, bytes_max)).await;
    let mut batches = match read.ok()? {
        Ok(batches) => batches,
        Err(error) => {
            note(shared, member, Some(error.chain()));
            return None;
        }
    };
    batches.retain(|batch| batch.position.sequence <= *last);
    *last = batches.last().map_or(after, |batch| batch.position.sequence);
    let last = *last;
    let (now, trim_lsn) = (shared.now(), shared.trim_lsn());
    let state = &mut *shared.state.lock();
    let progress = state.owner.progress(&member).copied()?;
    if batches.is_empty() {
        // If they were released meanwhile, the next request resets the member.
        return state.index.at(after).is_none().then_some(None);
    }
    // An answer may have moved the member meanwhile.
    let is_current = progress.next == after + 1
        && progress.may_send()
        && batches.first().is_some_and(|first| first.position.sequence == after + 1)
        && batches.iter().all(|batch| state.index.has(batch.position));
    if !is_current {
        return Some(None);
    }
    let is_sync = is_sync_due(state.sync_wanted, sent, progress.synced, last);
    let prepared = Prepared { batches, is_sync, now, lease: shared.lease_ns(), trim_lsn };
    Some(Some(request_of(state, &member, sent, sending, prepared)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sync_is_asked_for_once_and_with_the_last_batch_that_wants_it() {
        let mut sent = Sent::default();
        assert!(is_sync_due(7, &mut sent, 6, 7));
        sent.sync_requested = 7;
        sent.on_request(0, 4096);
        assert!(!is_sync_due(7, &mut sent, 6, 7), "it is under way");
        assert!(!is_sync_due(9, &mut sent, 6, 8), "a batch before it is not sent yet");
        assert!(
            is_sync_due(9, &mut sent, 6, 9),
            "the member lets it share the sync under way, or the next one"
        );
        assert!(sent.on_answer(1).is_some());
        assert_eq!((sent.bytes, sent.on_answer(3)), (0, None));
    }
    #[test]
    fn sync_is_asked_for_while_ever_later_batches_want_one() {
        let mut sent = Sent::default();
        let asked = |last: &u64| {
            let is_due = is_sync_due(last + 100, &mut sent, 0, *last);
            if is_due {
                sent.sync_requested = *last;
            }
            is_due
        };
        let asked: Vec<u64> = (1..=400).filter(asked).collect();
        assert_eq!(asked, [101, 202, 303]);
    }
}
