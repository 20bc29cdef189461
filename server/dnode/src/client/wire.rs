//! Connections to a data node: requests that wait for their answers, and listings.
//!
//! Invariants:
//! - An answer goes to the request with its number, or nowhere. A request that is given up takes no other one with
//!   it, but one that was not answered in time ends a connection over which nothing else came meanwhile.
//! - A connection that has ended carries nothing more: the next request makes another one.
//! - Of requests that wait for a new connection, one makes it; if that fails, all of them fail.

use super::{away, in_time};
use crate::messages::{Answer, Listed, Request};
use bytes::Bytes;
use cluster::{Connection, Frame, FrameReader, FrameWriter};
use futures::Stream;
use object_store::{Error, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Requests that wait for the connection. Chosen by hand.
const QUEUE_MAX: usize = 16;
/// Longest wait for an answer but for its bytes, and the slowest transfer in bytes a second. Chosen by hand: what
/// sits above gives up sooner.
const ANSWER_MAX: Duration = Duration::from_secs(30);
const RATE_MIN: u64 = 1 << 20;

/// A frame to send: its kind and the parts of its body.
pub(super) type Outgoing = (u8, Vec<Bytes>);

/// An open connection.
#[derive(Debug)]
pub(super) struct Wire {
    outgoing: mpsc::Sender<(u64, Outgoing)>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
    /// Answers received.
    received: Arc<AtomicU64>,
}

/// The requests that wait for their answers; without a map, the connection has ended.
#[derive(Debug)]
struct Waiting(Mutex<State>);

#[derive(Debug)]
enum State {
    Open(HashMap<u64, oneshot::Sender<Answer>>),
    Ended(String),
}

/// Takes a request back that was given up.
struct Given<'a>(&'a Waiting, u64);

impl Drop for Given<'_> {
    fn drop(&mut self) {
        if let State::Open(waiting) = &mut *self.0.0.lock() {
            waiting.remove(&self.1);
        }
    }
}

impl Waiting {
    fn end(&self, why: &str) {
        let mut state = self.0.lock();
        if let State::Open(_) = &*state {
            *state = State::Ended(why.to_owned());
        }
    }

    fn why(&self) -> Option<String> {
        match &*self.0.lock() {
            State::Open(_) => None,
            State::Ended(why) => Some(why.clone()),
        }
    }
}

/// Sends the first request, and reads its answer.
async fn greet(connection: Connection, open: &Request) -> Result<(FrameReader, FrameWriter)> {
    let (mut reader, mut writer) = connection.into_frames();
    let greeting = async {
        let (kind, parts) = open.encode();
        writer.write(kind, 0, &parts).await.map_err(|error| away(error.chain()))?;
        match next_answer(&mut reader).await? {
            (0, Answer::Done) => Ok(()),
            (_, Answer::Refused(_, why)) => Err(away(why)),
            _ => Err(away("the node gave another answer than to an opening")),
        }
    };
    let late = |_| away(format!("no answer in {} s", ANSWER_MAX.as_secs()));
    timeout(ANSWER_MAX, greeting).await.map_err(late)??;
    Ok((reader, writer))
}

async fn next_answer(reader: &mut FrameReader) -> Result<(u64, Answer)> {
    let frame = reader.read().await.map_err(|error| away(error.chain()))?;
    let Some(Frame { kind, request, payload }) = frame else {
        return Err(away("the node closed the connection"));
    };
    match Answer::decode(kind, &payload) {
        Some(answer) => Ok((request, answer)),
        None => Err(away(format!("a message of kind {kind} is no answer of a data node"))),
    }
}

impl Wire {
    /// Opens the folder over a connection.
    pub(super) async fn open(connection: Connection, open: &Request) -> Result<Wire> {
        let (mut reader, mut writer) = greet(connection, open).await?;
        let (outgoing, mut to_send) = mpsc::channel::<(u64, Outgoing)>(QUEUE_MAX);
        let waiting = Arc::new(Waiting(Mutex::new(State::Open(HashMap::new()))));
        let ending = Arc::clone(&waiting);
        let received = Arc::new(AtomicU64::new(0));
        let receiving = Arc::clone(&received);
        tokio::spawn(async move {
            let writing = async {
                while let Some((number, (kind, parts))) = to_send.recv().await {
                    let written = writer.write(kind, number, &parts).await;
                    written.map_err(|error| away(error.chain()))?;
                }
                Ok::<_, Error>(())
            };
            let reading = async {
                loop {
                    let (number, answer) = next_answer(&mut reader).await?;
                    receiving.fetch_add(1, Ordering::Relaxed);
                    if let State::Open(waiting) = &mut *ending.0.lock()
                        && let Some(asker) = waiting.remove(&number)
                    {
                        // The asker may have given up.
                        let _ = asker.send(answer);
                    }
                }
            };
            let ended: Result<()> = tokio::select! {
                ended = writing => ended,
                ended = reading => ended,
            };
            let why = ended.map_or_else(|error| error.to_string(), |()| "it was closed".to_owned());
            ending.end(&why);
            // A connection that is broken needs no end.
            let _ = timeout(Duration::from_secs(1), writer.close()).await;
        });
        Ok(Wire { outgoing, waiting, next: AtomicU64::new(1), received })
    }

    /// Sends a request and waits for its answer. `Err` with the request if the connection has ended before it was
    /// sent.
    async fn ask(&self, request: Outgoing, bytes: u64) -> Result<Result<Answer>, Outgoing> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        match &mut *self.waiting.0.lock() {
            State::Open(waiting) => drop(waiting.insert(number, sender)),
            State::Ended(_) => return Err(request),
        }
        let _given = Given(&self.waiting, number);
        let received = self.received.load(Ordering::Relaxed);
        let time_max = ANSWER_MAX + Duration::from_secs(bytes / RATE_MIN);
        let asked = async {
            match self.outgoing.send((number, request)).await {
                Ok(()) => Ok(answer.await.map_err(|_| {
                    away(self.waiting.why().unwrap_or_else(|| "the connection ended".to_owned()))
                })),
                Err(unsent) => Err(unsent.0.1),
            }
        };
        timeout(time_max, asked).await.unwrap_or_else(|_| {
            let why = format!("no answer in {} s", time_max.as_secs());
            // One slow request takes no others with it, and a silent node all of them.
            if self.received.load(Ordering::Relaxed) == received {
                self.waiting.end(&why);
            }
            Ok(Err(away(why)))
        })
    }
}

/// The connection for one kind of requests, which is made when it is needed.
#[derive(Debug)]
pub(super) struct Lane {
    /// Serves the connection; without one, the runtime does that needs it first.
    runtime: Option<Handle>,
    /// No client waits for its requests.
    is_bulk: bool,
    wire: tokio::sync::Mutex<Option<Arc<Wire>>>,
    /// Attempts that have failed, and the last error.
    failures: Mutex<(u64, String)>,
}

impl Lane {
    /// The lane of requests that clients may wait for.
    pub(super) fn new(runtime: Option<Handle>) -> Lane {
        Lane { runtime, is_bulk: false, wire: Default::default(), failures: Mutex::default() }
    }

    /// The lane of other requests.
    pub(super) fn bulk() -> Lane {
        Lane { is_bulk: true, ..Lane::new(None) }
    }

    /// Sends a request, over a new connection if there is none.
    pub(super) async fn ask<C: Future<Output = Result<Wire>> + Send + 'static>(
        &self,
        connect: impl Fn(bool) -> C,
        mut request: Outgoing,
        bytes: u64,
    ) -> Result<Answer> {
        for _ in 0..2 {
            let wire = self.wire(&connect).await?;
            match wire.ask(request, bytes).await {
                Ok(answered) => return answered,
                Err(unsent) => request = unsent,
            }
        }
        Err(away("the connection to the node ended"))
    }

    async fn wire<C: Future<Output = Result<Wire>> + Send + 'static>(
        &self,
        connect: &impl Fn(bool) -> C,
    ) -> Result<Arc<Wire>> {
        let failures = self.failures.lock().0;
        let mut wire = self.wire.lock().await;
        if let Some(open) = wire.as_ref().filter(|wire| wire.waiting.why().is_none()) {
            return Ok(Arc::clone(open));
        }
        *wire = None;
        {
            let failed = self.failures.lock();
            if failed.0 != failures {
                return Err(away(failed.1.clone()));
            }
        }
        let made = match &self.runtime {
            Some(runtime) => {
                let making = runtime.spawn(connect(self.is_bulk));
                making.await.unwrap_or_else(|cause| Err(Error::JoinError { source: cause }))
            }
            None => connect(self.is_bulk).await,
        };
        match made {
            Ok(made) => Ok(Arc::clone(wire.insert(Arc::new(made)))),
            Err(error) => {
                let mut failed = self.failures.lock();
                *failed = (failed.0 + 1, error.to_string());
                Err(error)
            }
        }
    }
}

/// A listing, over a connection of its own.
pub(super) struct Listing {
    reader: FrameReader,
    /// Closes the connection when it is dropped.
    _writer: FrameWriter,
}

impl Listing {
    pub(super) async fn begin(
        connection: Connection,
        open: &Request,
        list: &Request,
    ) -> Result<Listing> {
        let (reader, mut writer) = greet(connection, open).await?;
        let (kind, parts) = list.encode();
        writer.write(kind, 1, &parts).await.map_err(|error| away(error.chain()))?;
        Ok(Listing { reader, _writer: writer })
    }

    /// Returns the parts of the listing.
    pub(super) fn parts(self) -> impl Stream<Item = Result<Vec<Listed>>> + Send + 'static {
        futures::stream::try_unfold(Some(self), |listing| async move {
            let Some(mut listing) = listing else { return Ok(None) };
            match in_time(next_answer(&mut listing.reader)).await?? {
                (1, Answer::Listed(part, has_more)) => {
                    Ok(Some((part, has_more.then_some(listing))))
                }
                (_, Answer::Refused(_, why)) => Err(away(why)),
                _ => Err(away("the node gave another answer than to a listing")),
            }
        })
    }
}
