//! Measuring the path to another node: the round trip of small requests, and the bandwidth of large
//! ones, over a connection of its own.
//!
//! Invariants:
//! - A probe is bounded in bytes, in time and in bytes under way, so that the messages of pools wait
//!   for it briefly at most.
//! - A node makes one probe and answers one at a time; others wait for their turn, for a bounded time.
//! - The answering side keeps nothing of what it reads, and ends a connection beyond its bounds.

pub mod message;

use crate::connection::{Connection, Frame, FrameReader, FrameWriter};
use crate::seeded_bugs::seeded_bugs;
use block::env::Clock;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use message::{FILL_BYTES_MAX, REPLY, REQUEST, Reply, Request};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Delay of each answer with the seeded bug. Chosen by hand: more than any threshold for a path.
const LATE: Duration = Duration::from_millis(50);

/// What is known of the path to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Median time from a small request to its answer.
    pub round_trip: Duration,
    /// Bytes that reached the node in a second.
    pub bytes_per_second: u64,
}

/// Bounds of a probe, on the side that measures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Small requests, of which the first ones do not count.
    pub ping_count: usize,
    /// Large requests.
    pub load_count_max: usize,
    /// Time for the large requests.
    pub load_time_max: Duration,
    /// Large requests under way.
    pub under_way_max: usize,
    /// Time for the whole.
    pub time_max: Duration,
}

/// Small requests that do not count: the first one also waits for its turn at the other node.
const WARM_UP_COUNT: usize = 2;
/// Large requests that are under way at first. Chosen by hand: a fast network needs several to be busy.
const UNDER_WAY_START: usize = 8;

impl Limits {
    /// The bounds in use. Chosen by hand: 8 MiB, or a quarter of a second, because the owner serves clients and
    /// keeps its lease meanwhile, perhaps with a single processor. 2 MiB under way fill a network of 1 Gbit/s
    /// whose round trip takes 16 ms, and delay other messages on it by as much.
    pub const DEFAULT: Limits = Limits {
        ping_count: WARM_UP_COUNT + 9,
        load_count_max: (8 << 20) / (FILL_BYTES_MAX as usize),
        load_time_max: Duration::from_millis(250),
        under_way_max: (2 << 20) / (FILL_BYTES_MAX as usize),
        time_max: Duration::from_secs(10),
    };
}

/// Bounds of a probe, on the side that answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerLimits {
    /// Bytes that fill the requests of one connection.
    pub bytes_max: u64,
    /// Time for a connection, including that until its turn.
    pub time_max: Duration,
}

impl AnswerLimits {
    /// The bounds in use. Chosen by hand: more than any probe needs.
    pub const DEFAULT: AnswerLimits =
        AnswerLimits { bytes_max: 64 << 20, time_max: Duration::from_secs(15) };
}

/// Measures the path to the node of a connection.
///
/// # Errors
/// `Unavailable` if the connection breaks or the node does not answer in time; `Corrupt` for an answer
/// that is none.
pub(crate) async fn measure(
    connection: Connection,
    clock: &dyn Clock,
    limits: Limits,
) -> Result<Measurement> {
    let name = connection.peer_name().to_owned();
    let (reader, writer) = connection.into_frames();
    let mut probe = Probe { reader, writer, clock, limits, number: 0, sent_bytes: 0 };
    let measured = timeout(limits.time_max, async {
        let round_trip = probe.round_trip().await?;
        let bytes_per_second = probe.bandwidth(round_trip).await?;
        Ok(Measurement { round_trip, bytes_per_second })
    });
    let measured = measured.await.unwrap_or_else(|_| {
        let what = format!("it does not answer within {} ms", limits.time_max.as_millis());
        Err(Error::new(ErrorKind::Unavailable, what))
    });
    measured.map_err(|error| error.context(format!("measure the path to node {name}")))
}

/// A probe on its way.
struct Probe<'a> {
    reader: FrameReader,
    writer: FrameWriter,
    clock: &'a dyn Clock,
    limits: Limits,
    /// Requests that were answered.
    number: u64,
    sent_bytes: u64,
}

impl Probe<'_> {
    /// Returns the median time of small requests, one after the other.
    async fn round_trip(&mut self) -> Result<Duration> {
        let mut times = Vec::with_capacity(self.limits.ping_count);
        for _ in 0..self.limits.ping_count.max(WARM_UP_COUNT + 1) {
            times.push(self.exchange(0).await?);
        }
        let counted = &mut times[WARM_UP_COUNT..];
        counted.sort_unstable();
        Ok(counted[counted.len() / 2])
    }

    /// Sends one request and waits for its answer. Returns the time that it took.
    async fn exchange(&mut self, fill_bytes: u32) -> Result<Duration> {
        let begun = self.clock.now();
        self.number += 1;
        self.sent_bytes += u64::from(fill_bytes);
        write(&mut self.writer, self.number, fill_bytes).await?;
        read(&mut self.reader, self.number, self.sent_bytes).await?;
        Ok(self.clock.since(begun))
    }

    /// Sends large requests, ever more at a time, and returns the bytes per second that were answered.
    async fn bandwidth(&mut self, round_trip: Duration) -> Result<u64> {
        // A network so slow that nothing more is answered in time is measured by the first one.
        let took = self.exchange(FILL_BYTES_MAX).await?.saturating_sub(round_trip);
        let mut load = Load { begun: self.clock.now(), bytes: 0, took };
        let load_time_max = self.limits.load_time_max;
        let loaded = timeout(load_time_max, self.load(&mut load)).await;
        // What was not answered in time ends with the connection.
        loaded.unwrap_or(Ok(()))?;
        match load.bytes {
            0 => Ok(per_second(u64::from(FILL_BYTES_MAX), load.took)),
            bytes => Ok(per_second(bytes, load.took)),
        }
    }

    async fn load(&mut self, load: &mut Load) -> Result<()> {
        let Probe { reader, writer, clock, limits, number, sent_bytes } = self;
        let room = Semaphore::new(UNDER_WAY_START.min(limits.under_way_max));
        let (first, count) = (*number + 1, limits.load_count_max);
        let sending = async {
            for number in (first..).take(count) {
                room.acquire().await.expect("it is never closed").forget();
                write(writer, number, FILL_BYTES_MAX).await?;
            }
            std::future::pending().await
        };
        let receiving = async {
            let mut under_way_max = UNDER_WAY_START;
            for number in (first..).take(count) {
                *sent_bytes += u64::from(FILL_BYTES_MAX);
                read(reader, number, *sent_bytes).await?;
                load.on_answer(*clock);
                let is_growing = under_way_max < limits.under_way_max;
                under_way_max += usize::from(is_growing);
                room.add_permits(1 + usize::from(is_growing));
            }
            Ok(())
        };
        tokio::select! {
            failed = sending => failed,
            received = receiving => received,
        }
    }
}

/// Large requests that were answered.
struct Load {
    begun: Instant,
    bytes: u64,
    /// Time until the last answer.
    took: Duration,
}

impl Load {
    fn on_answer(&mut self, clock: &dyn Clock) {
        self.bytes += u64::from(FILL_BYTES_MAX);
        self.took = clock.since(self.begun);
    }
}

fn per_second(bytes: u64, took: Duration) -> u64 {
    let nanoseconds = took.as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX)
}

/// The bytes of the longest request; not examined by the other side.
static FILL: [u8; FILL_BYTES_MAX as usize] = [0; FILL_BYTES_MAX as usize];

async fn write(writer: &mut FrameWriter, number: u64, fill_bytes: u32) -> Result<()> {
    let head = Bytes::copy_from_slice(&Request { fill_bytes }.encode());
    let fill = Bytes::from_static(&FILL).slice(..fill_bytes as usize);
    writer.write(REQUEST, number, &[head, fill]).await
}

async fn read(reader: &mut FrameReader, number: u64, received_bytes: u64) -> Result<()> {
    let Some(frame) = reader.read().await? else {
        let what = "read the answer to a probe: the node closed the connection";
        return Err(Error::new(ErrorKind::Unavailable, what));
    };
    let reply = decode(&frame, REPLY, Reply::decode)?;
    match frame.request == number && reply == (Reply { received_bytes }) {
        true => Ok(()),
        false => {
            let what = "read the answer to a probe: it belongs to another request";
            Err(Error::new(ErrorKind::Corrupt, what))
        }
    }
}

fn decode<T>(
    frame: &Frame,
    kind: u8,
    decode: impl Fn(&[u8]) -> Result<T, message::MessageError>,
) -> Result<T> {
    let context = "read a message of a probe";
    if frame.kind != kind {
        let what = format!("{context}: a frame of kind {} came in place of {kind}", frame.kind);
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    decode(&frame.payload).map_err(|error| Error::with_source(ErrorKind::Corrupt, context, error))
}

/// Answers the probe of another node, as soon as it is its turn.
///
/// # Errors
/// `Corrupt` for a request that is none; `Full` beyond the bytes of a probe, and `Unavailable` beyond
/// its time, or if the connection breaks.
pub(crate) async fn answer(
    connection: Connection,
    turn: &Semaphore,
    limits: AnswerLimits,
) -> Result<()> {
    let answering = async {
        let _turn = turn.acquire().await.expect("it is never closed");
        let (mut reader, mut writer) = connection.into_frames();
        let mut received_bytes = 0;
        while let Some(frame) = reader.read().await? {
            let request = decode(&frame, REQUEST, Request::decode)?;
            received_bytes += u64::from(request.fill_bytes);
            if received_bytes > limits.bytes_max {
                let what = format!("it sends more than {} bytes", limits.bytes_max);
                return Err(Error::new(ErrorKind::Full, what));
            }
            if seeded_bugs().probe_answered_late {
                tokio::time::sleep(LATE).await;
            }
            let reply = Bytes::copy_from_slice(&Reply { received_bytes }.encode());
            writer.write(REPLY, frame.request, &[reply]).await?;
        }
        writer.close().await
    };
    let answered = timeout(limits.time_max, answering).await.unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::Unavailable,
            format!("it takes longer than {:?}", limits.time_max),
        ))
    });
    answered.map_err(|error| error.context("answer the probe of a node"))
}
