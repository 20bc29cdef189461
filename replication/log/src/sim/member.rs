//! Another member of the log, as the core sees it: it takes batches late and syncs them later.
//!
//! Invariants:
//! - Both the owner and the member are needed for a quorum, so whatever is committed is on the
//!   owner's own disk too, and every promise of a log on one machine holds.

use super::Rng;
use crate::format::batch::BatchHeader;
use crate::replicas::Replicas;
use block::{Lsn, Position};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;

#[derive(Debug, Default)]
struct Progress {
    written: u64,
    synced: u64,
}

#[derive(Debug, Default)]
struct State {
    own: Progress,
    member: Progress,
    sync_wanted: u64,
    /// Last sequence that the owner has handed over.
    appended: u64,
    /// Sequence and last LSN of the batches that the member may have.
    batches: VecDeque<(u64, Lsn)>,
    wrong: Option<String>,
}

impl State {
    fn reached(&self) -> Progress {
        Progress {
            written: self.own.written.min(self.member.written),
            synced: self.own.synced.min(self.member.synced),
        }
    }

    fn last_lsn(&self, sequence: u64) -> Option<Lsn> {
        let mut up_to = self.batches.iter().rev().filter(|(of, _)| *of <= sequence);
        up_to.next().map(|(_, lsn)| *lsn)
    }
}

/// The member; see the head of the file.
#[derive(Debug, Default)]
pub(super) struct SimMember(Mutex<State>);

impl SimMember {
    /// Makes a member that has every batch up to `sequence`, whose last entry has `last_lsn`.
    pub(super) fn new(sequence: u64, last_lsn: Lsn) -> SimMember {
        let at = || Progress { written: sequence, synced: sequence };
        SimMember(Mutex::new(State {
            own: at(),
            member: at(),
            appended: sequence,
            batches: [(sequence, last_lsn)].into(),
            ..State::default()
        }))
    }

    /// Lets the member write or sync some of what it was sent.
    pub(super) fn step(&self, rng: &mut Rng) {
        let state = &mut *self.0.lock();
        let ahead = state.appended - state.member.written;
        state.member.written += rng.below(ahead + 1);
        if state.sync_wanted > state.member.synced && rng.chance(50) {
            state.member.synced = state.member.written;
        }
    }

    /// Lets the member catch up.
    pub(super) fn catch_up(&self) {
        let state = &mut *self.0.lock();
        state.member.written = state.appended;
        if state.sync_wanted > state.member.synced {
            state.member.synced = state.member.written;
        }
    }

    /// Checks that the log has promised nothing that the quorum does not have.
    pub(super) fn check(&self, acked: Lsn, durable: Lsn) -> Result<(), String> {
        let state = self.0.lock();
        if let Some(wrong) = &state.wrong {
            return Err(wrong.clone());
        }
        let Progress { written, synced } = state.reached();
        let may = |sequence| state.last_lsn(sequence).unwrap_or(Lsn::NONE);
        if acked > may(written) || durable > may(synced) {
            return Err(format!(
                "acked {acked} and durable {durable}, but the quorum has {} and {}",
                may(written),
                may(synced)
            ));
        }
        Ok(())
    }
}

impl Replicas for SimMember {
    fn append(&self, position: Position, bytes: Bytes, is_sync: bool) {
        let state = &mut *self.0.lock();
        let header = BatchHeader::decode(&bytes).expect("the core hands over whole batches");
        if position.sequence != state.appended + 1 || header.sequence != position.sequence {
            state.wrong = Some(format!("batch {position} comes after {}", state.appended));
        }
        state.appended = position.sequence;
        state.batches.push_back((position.sequence, header.last_lsn()));
        if is_sync {
            state.sync_wanted = position.sequence;
        }
    }

    fn on_own(&self, written: u64, synced: u64) {
        let state = &mut *self.0.lock();
        if written > state.appended || synced > written {
            state.wrong =
                Some(format!("{written} written, {synced} synced, of {}", state.appended));
        }
        state.own = Progress { written, synced };
    }

    fn want_sync(&self, sequence: u64) {
        let state = &mut *self.0.lock();
        state.sync_wanted = state.sync_wanted.max(sequence);
    }

    fn acknowledged(&self) -> u64 {
        self.0.lock().reached().written
    }

    fn committed(&self) -> u64 {
        self.0.lock().reached().synced
    }

    fn has_lease(&self) -> bool {
        true
    }
}
