//! Appending entries to the log, and taking them back.
//!
//! Invariants:
//! - An entry is queued at the call, so that LSN order is call order.
//! - An append dropped before its answer leaves no entry that could be written much later: the
//!   entry leaves the queue unless it is in a batch, and a batch does not wait for log space.

use super::{Log, LogInner, Reached};
use crate::options::{NewEntry, Wait};
use crate::ring::queue::{ENTRY_OVERHEAD_BYTES, Group, Place, Ticket};
use crate::ring::shared_ring::Target;
use block::{Error, ErrorKind, Lsn, Result};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Log {
    /// Queues an entry at the call, not at the first poll, so that LSN order is call order. If the
    /// queue has no room, callers are served in order of arrival. The future returns the entry's
    /// LSN once the log reaches the state that `wait` names. It waits while the log is full and
    /// never fails for that reason. Dropping the future takes the entry back, unless the entry is
    /// already in a batch; see [`Log::settle`].
    ///
    /// # Errors
    /// `Invalid`: the entry makes no sense, or its payload is larger than
    /// [`Log::payload_bytes_max`]. `Io`: the log has failed. `Unavailable`: it is closed.
    pub fn append(
        &self,
        entry: NewEntry,
        wait: Wait,
    ) -> impl Future<Output = Result<Lsn>> + Send + use<> {
        self.append_group(entry, Vec::new(), wait)
    }

    /// Like [`Log::append`], for up to four entries that form one step in the history: they have
    /// consecutive LSNs, become visible together, and are taken back or refused together. Their
    /// payloads together are limited to the size of one entry's. Returns the LSN of the last entry.
    ///
    /// # Errors
    /// Those of [`Log::append`]; also `Invalid` for too many entries.
    pub fn append_group(
        &self,
        first: NewEntry,
        rest: Vec<NewEntry>,
        wait: Wait,
    ) -> impl Future<Output = Result<Lsn>> + Send + use<> {
        let appending = Appending::begin(&self.inner, first, rest, wait);
        async move { appending?.answered().await }
    }

    /// Like [`Log::append_group`], but takes the entries back when `given_up` resolves, unless they
    /// are already in a batch. The result says whether the entries are in the log, for a caller
    /// that keeps other state in step with it.
    ///
    /// # Errors
    /// Those of [`Log::append_group`]; also `Unavailable` if the entries were taken back.
    pub fn append_unless(
        &self,
        first: NewEntry,
        rest: Vec<NewEntry>,
        wait: Wait,
        given_up: impl Future<Output = ()> + Send,
    ) -> impl Future<Output = Result<Lsn>> + Send {
        let appending = Appending::begin(&self.inner, first, rest, wait);
        async move {
            let mut appending = appending?;
            {
                let answered = pin!(appending.answered());
                tokio::select! {
                    biased;
                    answered = answered => return answered,
                    () = given_up => {}
                }
            }
            if appending.take_back() {
                let what = "append to the write log: the client that asked for it disconnected before there was room";
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            appending.answered().await
        }
    }
}

/// A group on its way into the log.
struct Appending {
    inner: Arc<LogInner>,
    wait: Wait,
    /// Log space that it takes, in bytes, for pacing.
    bytes: u64,
    ticket: Option<Ticket>,
    /// LSN of the last entry, once it has one.
    lsn: Option<Lsn>,
    /// Whether the core still has to be stepped for this group.
    is_due: bool,
    is_answered: bool,
}

impl Appending {
    fn begin(
        inner: &Arc<LogInner>,
        first: NewEntry,
        rest: Vec<NewEntry>,
        wait: Wait,
    ) -> Result<Appending> {
        let payload_bytes_max = inner.payload_bytes_max;
        let room_bytes_max = inner.options.queue_bytes_max;
        let payload_bytes = rest.iter().map(|entry| entry.payload.len()).sum::<usize>();
        let payload_bytes = (payload_bytes + first.payload.len()) as u64;
        let bytes = payload_bytes + (1 + rest.len() as u64) * ENTRY_OVERHEAD_BYTES;
        let group = Group::new(first, rest, wait, payload_bytes_max, room_bytes_max)?;
        let (lsn, ticket) = match inner.shared.push(group)? {
            Place::At(lsn) => (Some(lsn), None),
            Place::Waits(ticket) => (None, Some(ticket)),
        };
        let inner = Arc::clone(inner);
        Ok(Appending { inner, wait, bytes, ticket, lsn, is_due: true, is_answered: false })
    }

    /// Resolves once the group is answered. The future may be dropped and this method called again.
    async fn answered(&mut self) -> Result<Lsn> {
        let lsn = self.placed().await?;
        if self.is_due {
            // Lets other ready tasks queue their entries too: a batch of many costs one write. If
            // each write is flushed before the next one is sent, waiting gains nothing.
            if !self.inner.shared.is_flush_expected.load(Ordering::Relaxed) {
                tokio::task::yield_now().await;
            }
            // Usually another task's round has already written it, and the next batch can gather.
            if !self.inner.shared.is_taken(lsn) {
                self.inner.drive_patiently(1);
            }
            self.is_due = false;
        }
        let (inner, wait) = (&*self.inner, self.wait);
        let reached =
            Reached { inner, target: Target { lsn, wait, is_entry: true }, id: None }.await;
        self.is_answered = true;
        reached?;
        self.inner.gate.hold_back(self.bytes, self.inner.fill()).await;
        // The log may have failed during the wait: nothing is answered after a failure.
        self.inner.shared.check_unfailed()?;
        Ok(lsn)
    }

    async fn placed(&mut self) -> Result<Lsn> {
        if let Some(lsn) = self.lsn {
            return Ok(lsn);
        }
        let ticket = self.ticket.as_mut().expect("a group without a place waits for one");
        let placed = (&mut ticket.placed).await;
        self.ticket = None;
        let lsn = placed.unwrap_or_else(|_| Err(self.inner.gone()))?;
        self.lsn = Some(lsn);
        Ok(lsn)
    }

    /// Takes the group back. Returns false if it is in a batch and will be written.
    fn take_back(&mut self) -> bool {
        if let Some(mut ticket) = self.ticket.take() {
            self.lsn = self.inner.shared.leave(&mut ticket);
        }
        let is_back = self.lsn.is_none_or(|lsn| self.inner.shared.withdraw(lsn));
        if is_back {
            self.lsn = None;
        }
        is_back
    }
}

impl Drop for Appending {
    fn drop(&mut self) {
        match self.lsn {
            Some(lsn) if self.is_answered => self.inner.shared.forget_refusal(lsn),
            _ if self.inner.seeded_bugs.kept_when_dropped => {}
            _ => drop(self.take_back()),
        }
        if self.is_due {
            self.inner.thread.nudge();
        }
    }
}
