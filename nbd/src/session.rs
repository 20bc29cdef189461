//! The transmission phase: one task per connection reads requests, runs them and sends replies. The
//! form of replies is in `replies`.
//!
//! Invariants:
//! - One task polls the socket, all running requests and the outbox, so that there are no locks, no
//!   channels and no spawn between a request and its reply.
//! - At most `request_count_max` requests run. Nothing is read from the socket beyond that, nor
//!   while too many reply bytes wait. Payload memory is reserved before it is allocated; memory
//!   without a reservation (headers, messages, extents) is bounded per connection.
//! - A write larger than `PIECE_BYTES` reaches the device in pieces as they arrive, so a client
//!   that stalls in the middle of it holds only one piece.
//! - After DISC, end of file or stop, no request is started. Running requests are answered first,
//!   or dropped if their client has disconnected (`gone`).
//! - With several connections of a kernel device, a received request starts only when no other
//!   connection that the kernel has given up is still served ([`Siblings`]).

use crate::kernel::{Look, Siblings};
use crate::memory::{Allotment, PAYLOAD_BYTES_MAX, PayloadMemory, Reservation};
use crate::negotiate::{Opened, advertised};
use crate::outbox::Outbox;
use crate::request::{Rules, Verdict, Work, judge_status_query};
use crate::stopping::stopped;
use crate::stream::{Inbox, Stream};
use crate::wire::{self, RequestHeader};
use block::device::PAYLOAD_BYTES_KEPT;
use block::{AllocationExtent, BlockDevice, Limits, PayloadBuffer, Result, WriteFlags};
use bytes::BufMut;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::Sleep;

mod gone;
mod replies;

/// Size of the inbox, the most that one system call reads. Chosen by hand: 31 writes of 4 KiB.
const INBOX_BYTES: usize = 128 << 10;
/// Largest part of a write that is one call of the device: the most that it keeps without a copy.
const PIECE_BYTES: u32 = PAYLOAD_BYTES_KEPT;
/// Every piece but the first begins at a multiple of this many bytes of the volume. If a piece
/// ended inside the device's smallest unit, the device would have to read that unit first.
const PIECE_ALIGN_BYTES: u32 = 4096;
/// Largest part of a read that is one call of the device, if the reply may come in parts. Chosen by
/// hand: one such part of a scan delays other sessions of its thread by 50 us of copying; smaller
/// parts cost the scan a fifth of its rate.
const READ_PIECE_BYTES: u32 = 256 << 10;
/// Waiting reply bytes at which no more requests are read. Chosen by hand: four pieces, so that a
/// fast reader never has to wait.
const OUTBOX_BYTES_MAX: usize = 4 << 20;
/// The same limit for bytes that no reservation covers. Chosen by hand: thousands of small replies.
const UNRESERVED_BYTES_MAX: usize = 256 << 10;
/// If at least this many payload bytes are missing, they are read past the inbox. Chosen by hand.
const DIRECT_BYTES_MIN: usize = 16 << 10;
/// Largest payload of a refused request that is read and dropped; a longer one ends the connection
/// (spec, "Size constraints": a server may disconnect). Chosen by hand: four largest payloads.
const DROP_BYTES_MAX: u64 = 4 * PAYLOAD_BYTES_MAX as u64;
/// Bytes that one poll of a session moves before other sessions of its thread get their turn.
/// Chosen by hand: 25 us of copying.
const TURN_BYTES_MAX: u64 = 128 << 10;
/// Extents in one answer to BLOCK_STATUS. Chosen by hand: 4 KiB in the extended form, which no
/// reservation covers.
const EXTENT_COUNT_MAX: usize = 256;

/// Totals over all connections, updated once per batch.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests answered.
    pub requests: AtomicU64,
    /// Requests answered with an error.
    pub errors: AtomicU64,
}

/// The server's settings for a session.
pub struct SessionOptions {
    /// Requests that run at the same time.
    pub request_count_max: usize,
    /// A client without progress for this long is disconnected while others wait for memory.
    pub stall_timeout: Duration,
    /// RESIZE is supported.
    pub can_resize: bool,
    /// The budget of payload memory.
    pub memory: Arc<PayloadMemory>,
    /// The totals to update.
    pub counters: Arc<Counters>,
    /// Changes once, when the server stops.
    pub stop: watch::Receiver<Option<Instant>>,
    /// The device's other connections, for a kernel device.
    pub siblings: Option<Siblings>,
}

/// The reason why a session ended.
#[derive(Debug)]
pub enum End {
    /// The client sent DISC or closed the connection, or the server stops.
    Orderly,
    /// The client violated the protocol.
    Protocol(&'static str),
    /// No byte moved while others waited for memory.
    Stalled,
    /// The client has disconnected, and its running requests were dropped.
    Gone {
        /// Their number.
        request_count: usize,
    },
    /// The volume has another owner, and the requests that failed for that were not answered.
    Fenced {
        /// Their number so far.
        request_count: usize,
    },
    /// The socket failed.
    Io(io::Error),
}

/// The request that an outcome belongs to.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    cookie: u64,
    offset: u64,
    command: u16,
    is_fast_zero: bool,
    /// Key of the request's entry in `splits` if it runs in pieces.
    split: Option<u64>,
}

enum Outcome {
    Done,
    Data { offset: u64, bytes: Vec<u8> },
    Status(Vec<AllocationExtent>),
}

struct Finished {
    ticket: Ticket,
    outcome: Result<Outcome>,
    reservation: Reservation,
}

/// A request that runs in pieces.
#[derive(Default)]
struct Split {
    running: usize,
    is_submitted: bool,
    /// NBD error and message of the first piece that failed.
    failure: Option<(u32, String)>,
}

type Running = Pin<Box<dyn Future<Output = Finished> + Send>>;

/// The kind of the next bytes from the client.
enum Receiving {
    Header,
    /// Payload of a refused request.
    Drop {
        remaining: u64,
        ticket: Ticket,
        error: u32,
    },
    /// Payload of an extended BLOCK_STATUS.
    Query {
        ticket: Ticket,
        payload_bytes: usize,
        is_one: bool,
    },
    Write(Incoming),
    /// No bytes; the next piece of a read waits for memory.
    Read(Outgoing),
    /// No more requests.
    Ended,
}

struct Incoming {
    ticket: Ticket,
    offset: u64,
    /// Bytes that belong to no piece yet.
    remaining: u32,
    flags: WriteFlags,
    piece: Option<(PayloadBuffer, usize, Reservation)>,
}

struct Outgoing {
    ticket: Ticket,
    offset: u64,
    remaining: u32,
    piece_bytes_max: u32,
}

/// The result of a receiving step.
enum Flow {
    /// A step was completed: continue.
    Next,
    /// Needs bytes from the socket.
    Hungry,
    /// Needs another event, whose waker is set.
    Blocked,
}

/// One connection in transmission.
pub struct Session<D: BlockDevice> {
    device: Arc<D>,
    rules: Rules,
    stream: Stream,
    inbox: Inbox,
    receiving: Receiving,
    running: FuturesUnordered<Running>,
    splits: HashMap<u64, Split>,
    split_next: u64,
    outbox: Outbox,
    needs_flush: bool,
    allotment: Allotment,
    request_count_max: usize,
    counters: Arc<Counters>,
    answered: u64,
    failed: u64,
    failed_total: u64,
    /// Requests that failed because the volume has another owner.
    fenced_count: usize,
    stop: Pin<Box<dyn Future<Output = ()> + Send>>,
    is_stopping: bool,
    stall_timeout: Duration,
    /// Armed while the client owes bytes or does not read its replies. Holds the value of
    /// `moved_bytes` from when it was armed.
    stall: Option<(Pin<Box<Sleep>>, u64)>,
    moved_bytes: u64,
    watch: gone::Watch,
    /// The other connections of a kernel device.
    siblings: Option<Siblings>,
    /// Bytes have arrived since the last look at the siblings.
    needs_look: bool,
    label: String,
}

impl<D: BlockDevice> Session<D> {
    /// Takes over a negotiated connection.
    pub fn new(opened: Opened<D>, options: SessionOptions) -> Self {
        let SessionOptions {
            request_count_max,
            stall_timeout,
            can_resize,
            memory,
            counters,
            stop,
            siblings,
        } = options;
        let payload_bytes_max = advertised(opened.device.limits()).payload_bytes_max;
        let mut stop = stop;
        Session {
            rules: Rules { terms: opened.terms, can_resize, payload_bytes_max },
            label: format!("{} from {}", opened.name, opened.client.label()),
            device: opened.device,
            stream: opened.stream,
            inbox: opened.inbox.grown(INBOX_BYTES),
            receiving: Receiving::Header,
            running: FuturesUnordered::new(),
            splits: HashMap::new(),
            split_next: 0,
            outbox: Outbox::default(),
            needs_flush: false,
            allotment: Allotment::new(memory),
            request_count_max: request_count_max.max(1),
            counters,
            answered: 0,
            failed: 0,
            failed_total: 0,
            fenced_count: 0,
            stop: Box::pin(async move {
                stopped(&mut stop).await;
            }),
            is_stopping: false,
            stall_timeout,
            stall: None,
            moved_bytes: 0,
            watch: gone::Watch::default(),
            siblings,
            needs_look: false,
        }
    }

    /// Serves until the end of the connection.
    pub async fn run(mut self) -> End {
        let end = match poll_fn(|cx| self.poll(cx)).await {
            Ok(()) => End::Orderly,
            Err(end) => end,
        };
        self.publish();
        // Dropping the requests removes their waiting entries from the log.
        self.running.clear();
        self.close().await;
        end
    }

    /// Sends the end of the stream. If the server is stopping, also reads for a moment and discards
    /// the bytes: closing a socket with unread bytes would reset it and could destroy replies in
    /// flight.
    async fn close(&mut self) {
        let goodbye = async {
            self.stream.shutdown().await?;
            if self.is_stopping {
                let mut buffer = vec![0; 16 << 10];
                while self.stream.read(&mut buffer).await? > 0 {}
            }
            io::Result::Ok(())
        };
        let closed = tokio::time::timeout(Duration::from_millis(500), goodbye).await;
        tracing::trace!(?closed, "the session closes its connection");
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), End>> {
        if !self.is_stopping && self.stop.as_mut().poll(cx).is_ready() {
            self.is_stopping = true;
            self.receiving = Receiving::Ended;
        }
        let turn_end = self.moved_bytes + TURN_BYTES_MAX;
        loop {
            let received = self.poll_receive(cx)?;
            let finished = self.poll_running(cx);
            let sent = self.poll_send(cx)?;
            if self.fenced_count > 0 {
                return Poll::Ready(Err(End::Fenced { request_count: self.fenced_count }));
            }
            if matches!(self.receiving, Receiving::Ended)
                && self.running.is_empty()
                && self.outbox.is_empty()
                && !self.needs_flush
            {
                return Poll::Ready(Ok(()));
            }
            if !(received || finished || sent) {
                self.publish();
                self.poll_stall(cx)?;
                self.poll_gone(cx)?;
                return Poll::Pending;
            }
            if self.moved_bytes >= turn_end {
                self.publish();
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    // ---- requests in ----

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Result<bool, End> {
        if matches!(self.receiving, Receiving::Ended) {
            return Ok(false);
        }
        let limits = self.device.limits();
        let (mut progressed, mut has_read) = (false, false);
        loop {
            if self.needs_look
                && let Some(siblings) = &self.siblings
            {
                match siblings.poll_look(cx) {
                    Poll::Pending => return Ok(progressed),
                    Poll::Ready(Look::Go) => self.needs_look = false,
                    Poll::Ready(Look::Over) => {
                        return Err(End::Io(io::ErrorKind::BrokenPipe.into()));
                    }
                }
            }
            let flow = match &self.receiving {
                Receiving::Header => self.take_header(&limits)?,
                Receiving::Drop { .. } => self.drop_payload(),
                Receiving::Query { .. } => self.take_query(&limits),
                Receiving::Write(_) => self.take_payload(cx),
                Receiving::Read(_) => self.start_reads(cx),
                Receiving::Ended => Flow::Blocked,
            };
            match flow {
                Flow::Next => progressed = true,
                Flow::Blocked => return Ok(progressed),
                // Read once per round, so that running requests and finished replies come first.
                Flow::Hungry if has_read => return Ok(progressed),
                Flow::Hungry => match self.poll_read(cx) {
                    Poll::Pending => return Ok(progressed),
                    Poll::Ready(Ok(0)) => {
                        self.receiving = Receiving::Ended;
                        return Ok(true);
                    }
                    Poll::Ready(Ok(count)) => {
                        self.moved_bytes += count as u64;
                        (progressed, has_read) = (true, true);
                        self.needs_look = true;
                    }
                    Poll::Ready(Err(error)) => return Err(End::Io(error)),
                },
            }
        }
    }

    /// Reads once, directly into the payload in progress if enough of it is missing.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Receiving::Write(Incoming { piece: Some((bytes, wanted, _)), .. }) =
            &mut self.receiving
        {
            let missing = *wanted - bytes.len();
            if missing >= DIRECT_BYTES_MIN {
                let mut rest = (&mut **bytes).limit(missing);
                return pin!(self.stream.read_buf(&mut rest)).poll(cx);
            }
        }
        self.inbox.poll_fill(cx, &mut self.stream)
    }

    fn take_header(&mut self, limits: &Limits) -> Result<Flow, End> {
        if self.running.len() >= self.request_count_max
            || self.outbox.unsent_bytes() >= OUTBOX_BYTES_MAX
            || self.outbox.unreserved_bytes() >= UNRESERVED_BYTES_MAX
        {
            return Ok(Flow::Blocked);
        }
        let dialect = self.rules.terms.dialect;
        let header_bytes = dialect.request_header_bytes();
        let Some(bytes) = self.inbox.bytes().get(..header_bytes) else { return Ok(Flow::Hungry) };
        let header = RequestHeader::decode(dialect, bytes)
            .map_err(|_| End::Protocol("bad request magic"))?;
        self.inbox.consume(header_bytes);
        let ticket = Ticket {
            cookie: header.cookie,
            offset: header.offset,
            command: header.command,
            is_fast_zero: header.flags & wire::command_flag::FAST_ZERO != 0,
            split: None,
        };
        match self.rules.judge(&header, limits) {
            Verdict::Run(work) => self.start(ticket, work),
            Verdict::Refuse { payload_bytes, .. } if payload_bytes > DROP_BYTES_MAX => {
                return Err(End::Protocol("absurd payload length"));
            }
            Verdict::Refuse { error, payload_bytes } => {
                self.receiving = Receiving::Drop { remaining: payload_bytes, ticket, error };
            }
        }
        Ok(Flow::Next)
    }

    fn start(&mut self, ticket: Ticket, work: Work) {
        match work {
            Work::Nothing => self.answer_done(ticket),
            Work::Disconnect => self.receiving = Receiving::Ended,
            Work::Write { offset, length, flags } => {
                let ticket = self.split_if(length > piece_at(offset), ticket);
                let incoming = Incoming { ticket, offset, remaining: length, flags, piece: None };
                self.receiving = Receiving::Write(incoming);
            }
            Work::Read { offset, length, is_complete } => {
                let piece_bytes_max = if is_complete { length } else { READ_PIECE_BYTES };
                let ticket = self.split_if(length > piece_bytes_max, ticket);
                let outgoing = Outgoing { ticket, offset, remaining: length, piece_bytes_max };
                self.receiving = Receiving::Read(outgoing);
            }
            Work::BlockStatusQuery { payload_bytes, is_one, .. } => {
                let payload_bytes = payload_bytes as usize;
                self.receiving = Receiving::Query { ticket, payload_bytes, is_one };
            }
            Work::Flush
            | Work::Discard { .. }
            | Work::WriteZeroes { .. }
            | Work::Prefetch { .. }
            | Work::BlockStatus { .. }
            | Work::Resize { .. } => {
                let device = Arc::clone(&self.device);
                self.running.push(Box::pin(async move {
                    let outcome = perform(&*device, work).await;
                    Finished { ticket, outcome, reservation: Reservation::default() }
                }));
            }
        }
    }

    fn split_if(&mut self, is_split: bool, ticket: Ticket) -> Ticket {
        if !is_split {
            return ticket;
        }
        let key = self.split_next;
        self.split_next += 1;
        self.splits.insert(key, Split::default());
        Ticket { split: Some(key), ..ticket }
    }

    fn drop_payload(&mut self) -> Flow {
        let Receiving::Drop { remaining, ticket, error } = &mut self.receiving else {
            unreachable!("the caller matched")
        };
        let have = self.inbox.bytes().len();
        let count = usize::try_from(*remaining).unwrap_or(usize::MAX).min(have);
        self.inbox.consume(count);
        *remaining -= count as u64;
        if *remaining > 0 {
            return Flow::Hungry;
        }
        let (ticket, error) = (*ticket, *error);
        self.receiving = Receiving::Header;
        self.answer_error(ticket, error, "the request was refused");
        Flow::Next
    }

    fn take_query(&mut self, limits: &Limits) -> Flow {
        let Receiving::Query { ticket, payload_bytes, is_one } = self.receiving else {
            unreachable!("the caller matched")
        };
        let Some(payload) = self.inbox.bytes().get(..payload_bytes) else { return Flow::Hungry };
        let verdict = judge_status_query(payload, ticket.offset, is_one, limits);
        self.inbox.consume(payload_bytes);
        self.receiving = Receiving::Header;
        match verdict {
            Ok(work) => self.start(ticket, work),
            Err(error) => self.answer_error(ticket, error, "malformed block status query"),
        }
        Flow::Next
    }

    fn take_payload(&mut self, cx: &mut Context<'_>) -> Flow {
        let Receiving::Write(incoming) = &mut self.receiving else {
            unreachable!("the caller matched")
        };
        let (bytes, wanted, _) = match &mut incoming.piece {
            Some(piece) => piece,
            None => {
                let length = incoming.remaining.min(piece_at(incoming.offset));
                let Poll::Ready(reservation) = self.allotment.poll_reserve(cx, length) else {
                    return Flow::Blocked;
                };
                incoming.remaining -= length;
                let wanted = length as usize;
                let buffer = self.device.payload(wanted);
                incoming.piece.insert((buffer, wanted, reservation))
            }
        };
        let have = self.inbox.bytes();
        let count = have.len().min(*wanted - bytes.len());
        bytes.extend_from_slice(&have[..count]);
        self.inbox.consume(count);
        if bytes.len() < *wanted {
            return Flow::Hungry;
        }
        let (bytes, wanted, reservation) = incoming.piece.take().expect("filled above");
        let (ticket, offset, flags) = (incoming.ticket, incoming.offset, incoming.flags);
        incoming.offset += wanted as u64;
        let is_last = incoming.remaining == 0;
        if is_last {
            self.receiving = Receiving::Header;
        }
        self.count_piece(ticket, is_last);
        let device = Arc::clone(&self.device);
        self.running.push(Box::pin(async move {
            let written = device.write(offset, bytes.into_bytes(), flags).await;
            Finished { ticket, outcome: written.map(|()| Outcome::Done), reservation }
        }));
        Flow::Next
    }

    fn start_reads(&mut self, cx: &mut Context<'_>) -> Flow {
        let Receiving::Read(outgoing) = &mut self.receiving else {
            unreachable!("the caller matched")
        };
        if outgoing.ticket.split.is_some() && self.running.len() >= self.request_count_max {
            return Flow::Blocked;
        }
        let length = outgoing.remaining.min(outgoing.piece_bytes_max);
        let Poll::Ready(reservation) = self.allotment.poll_reserve(cx, length) else {
            return Flow::Blocked;
        };
        let (ticket, offset) = (outgoing.ticket, outgoing.offset);
        outgoing.offset += u64::from(length);
        outgoing.remaining -= length;
        let is_last = outgoing.remaining == 0;
        if is_last {
            self.receiving = Receiving::Header;
        }
        self.count_piece(ticket, is_last);
        let device = Arc::clone(&self.device);
        self.running.push(Box::pin(async move {
            let mut bytes = vec![0; length as usize];
            let read = device.read(offset, &mut bytes).await;
            Finished {
                ticket,
                outcome: read.map(|()| Outcome::Data { offset, bytes }),
                reservation,
            }
        }));
        Flow::Next
    }

    fn count_piece(&mut self, ticket: Ticket, is_last: bool) {
        if let Some(key) = ticket.split {
            let split = self.splits.get_mut(&key).expect("lives until its last piece");
            split.running += 1;
            split.is_submitted = is_last;
        }
    }

    // ---- replies out ----

    fn poll_running(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        let mut data_bytes = 0;
        while let Poll::Ready(Some(finished)) = self.running.poll_next_unpin(cx) {
            progressed = true;
            if let Ok(Outcome::Data { bytes, .. }) = &finished.outcome {
                data_bytes += bytes.len() as u64;
            }
            self.finish(finished);
            if data_bytes >= TURN_BYTES_MAX {
                break; // send these first
            }
        }
        progressed
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Result<bool, End> {
        let mut progressed = false;
        while !self.outbox.is_empty() {
            let mut parts = Outbox::no_parts();
            let count = self.outbox.parts(&mut parts);
            match Pin::new(&mut self.stream).poll_write_vectored(cx, &parts[..count]) {
                Poll::Pending => return Ok(progressed),
                Poll::Ready(Ok(0)) => return Err(End::Io(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(bytes)) => {
                    progressed = true;
                    self.needs_flush = true;
                    self.moved_bytes += bytes as u64;
                    self.outbox.advance(bytes, &mut self.allotment);
                }
                Poll::Ready(Err(error)) => return Err(End::Io(error)),
            }
        }
        // TLS buffers records that the socket did not take; on plain sockets this does nothing.
        if self.needs_flush {
            match Pin::new(&mut self.stream).poll_flush(cx) {
                Poll::Pending => return Ok(progressed),
                Poll::Ready(Ok(())) => self.needs_flush = false,
                Poll::Ready(Err(error)) => return Err(End::Io(error)),
            }
        }
        Ok(progressed)
    }

    // ---- limits and counters ----

    /// Ends the session if its client blocks memory that others need. A client may be slow to send
    /// an announced payload or to read its replies, until another connection waits for memory.
    /// Over TCP, the kernel ends the connection of a client that takes nothing for
    /// [`crate::ServerOptions::client_timeout`].
    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Result<(), End> {
        let owes = matches!(&self.receiving, Receiving::Write(Incoming { piece: Some(_), .. }));
        if !owes && self.outbox.is_empty() {
            self.stall = None;
            return Ok(());
        }
        loop {
            let (sleep, armed_at) = self.stall.get_or_insert_with(|| {
                (Box::pin(tokio::time::sleep(self.stall_timeout)), self.moved_bytes)
            });
            if sleep.as_mut().poll(cx).is_pending() {
                return Ok(());
            }
            if *armed_at == self.moved_bytes && self.allotment.memory().is_contended() {
                return Err(End::Stalled);
            }
            self.stall = None;
        }
    }

    fn publish(&mut self) {
        if self.answered > 0 {
            self.counters.requests.fetch_add(std::mem::take(&mut self.answered), Ordering::Relaxed);
        }
        if self.failed > 0 {
            self.counters.errors.fetch_add(std::mem::take(&mut self.failed), Ordering::Relaxed);
        }
    }
}

/// Runs work without a payload and without data in its reply.
async fn perform<D: BlockDevice>(device: &D, work: Work) -> Result<Outcome> {
    match work {
        Work::Flush => device.flush().await?,
        Work::Discard { offset, length, fua } => device.discard(offset, length, fua).await?,
        Work::WriteZeroes { offset, length, flags } => {
            device.write_zeroes(offset, length, flags).await?;
        }
        Work::Prefetch { offset, length } => device.prefetch(offset, length).await?,
        Work::Resize { size_bytes } => device.resize(size_bytes).await?,
        Work::BlockStatus { offset, length, is_one } => {
            let extent_count_max = if is_one { 1 } else { EXTENT_COUNT_MAX };
            let mut extents = device.allocation(offset, length, extent_count_max).await?;
            clip(&mut extents, length, extent_count_max);
            return Ok(Outcome::Status(extents));
        }
        Work::Nothing
        | Work::Disconnect
        | Work::Read { .. }
        | Work::Write { .. }
        | Work::BlockStatusQuery { .. } => unreachable!("started elsewhere"),
    }
    Ok(Outcome::Done)
}

/// Returns the length of the longest piece of a write that begins at `offset`.
fn piece_at(offset: u64) -> u32 {
    let ragged = offset % u64::from(PIECE_ALIGN_BYTES);
    PIECE_BYTES - u32::try_from(ragged).expect("less than a piece")
}

/// Cuts the extents to the requested length and count, in case the device returns more.
fn clip(extents: &mut Vec<AllocationExtent>, length: u64, extent_count_max: usize) {
    let mut left = length;
    extents.truncate(extent_count_max);
    extents.retain_mut(|extent| {
        extent.length_bytes = extent.length_bytes.min(left);
        left -= extent.length_bytes;
        extent.length_bytes > 0
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_long_write_begin_where_the_device_need_not_read() {
        for start in [0, 1, 512, 4095, 4096, 131_071, (1 << 40) + 5] {
            let (mut at, end) = (start, start + 1_000_003);
            while at < end {
                let length = (end - at).min(u64::from(piece_at(at)));
                assert!(length > 0 && length <= u64::from(PAYLOAD_BYTES_KEPT));
                assert!(at == start || at.is_multiple_of(u64::from(PIECE_ALIGN_BYTES)), "{at}");
                at += length;
            }
        }
    }
}
