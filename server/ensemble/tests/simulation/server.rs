//! The pool as its owner serves it: blocks of one sector over the product's write log.
//!
//! Invariants:
//! - The requests of one client are carried out in order, each after the one before has ended.
//! - A read is answered after the log has allowed it, with data that was looked up before.

use crate::data::Data;
use crate::executor::World;
use block::simulated::simulated;
use block::{Epoch, Error, ErrorKind, Result, VolumeId};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use wal::{EntryKind, Log, NewEntry, Source, Wait};

const VOLUME: VolumeId = VolumeId(1);
/// Bytes of a sector, which is a block.
const SECTOR: usize = 512;

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    Write { block: u64, version: u64 },
    Read { block: u64 },
    Flush,
}

/// The open pool.
pub(crate) struct Server {
    pub(crate) log: Log,
    pub(crate) data: Data,
    pub(crate) epoch: Epoch,
    /// Of each client: resolves when its newest request has ended.
    sessions: Mutex<BTreeMap<usize, oneshot::Receiver<()>>>,
}

/// A place in the order of one client's requests.
pub(crate) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _ends: oneshot::Sender<()>,
}

impl Server {
    pub(crate) fn new(log: Log, data: Data, epoch: Epoch) -> Server {
        Server { log, data, epoch, sessions: Mutex::default() }
    }

    /// Takes the next place in the order of a client's requests.
    pub(crate) fn turn(&self, client: usize) -> Turn {
        let (ends, ended) = oneshot::channel();
        Turn { before: self.sessions.lock().insert(client, ended), _ends: ends }
    }

    /// Carries a request out. Returns the version that a read has found. A client that has gone gives its
    /// write up, which is in the log by the end of this, or never.
    pub(crate) async fn serve(
        &self,
        mut turn: Turn,
        asked: Asked,
        gone: oneshot::Receiver<()>,
    ) -> Result<u64> {
        if let Some(before) = turn.before.take() {
            let _ = before.await; // an error is an end, too
        }
        match asked {
            Asked::Write { block, version } => {
                let mut payload = vec![version as u8; SECTOR];
                payload[..8].copy_from_slice(&version.to_le_bytes());
                payload[8..16].copy_from_slice(&block.to_le_bytes());
                let (volume, kind, payload) = (VOLUME, EntryKind::Write, Bytes::from(payload));
                let entry =
                    NewEntry { volume, kind, start_sector: block, sector_count: 1, payload };
                let written = tokio::select! {
                    biased;
                    written = self.log.append(entry, Wait::Written) => Some(written),
                    _ = gone => None,
                };
                match written {
                    Some(written) => written.map(|_| version),
                    None => {
                        self.log.settle().await?;
                        Err(Error::new(ErrorKind::Unavailable, "the client has gone"))
                    }
                }
            }
            Asked::Flush => self.log.flush().await.map(|_| 0),
            Asked::Read { block } => {
                let version = self.version(block).await?;
                self.log.await_lease().await?;
                Ok(version)
            }
        }
    }

    async fn version(&self, block: u64) -> Result<u64> {
        let piece = self.log.overlay().lookup(VOLUME, block, 1).pop().expect("one sector");
        let bytes = match piece.source {
            Source::Payload(bytes) => Some(bytes),
            Source::LogResident(place) => self.log.read(&place).await?,
            _ => None,
        };
        let bytes = match bytes {
            Some(bytes) => bytes,
            None => match self.data.read(block).await? {
                Some(bytes) => Bytes::from(bytes),
                None => return Ok(0),
            },
        };
        let corrupt = || Error::new(ErrorKind::Corrupt, format!("block {block} is another one"));
        version_of(block, &bytes).ok_or_else(corrupt)
    }

    /// Checks the segments now and then, until the log has failed.
    pub(crate) async fn keep_segments(self: Arc<Self>, world: World) {
        let executor = simulated().expect("a process keeps segments");
        while self.log.failure().is_none() {
            executor.sleep(world.ms(2000, 6000)).await;
            if let Err(error) = self.data.walk(&self.log).await {
                self.log.fail(error);
            }
        }
    }

    /// Moves what is in the log to the tier now and then, until the log has failed.
    pub(crate) async fn destage(self: Arc<Self>, world: World) {
        let executor = simulated().expect("a process destages");
        while self.log.failure().is_none() {
            executor.sleep(world.ms(300, 4000)).await;
            self.log.freeze();
            while let Some(generation) = self.log.next_frozen() {
                let up_to = generation.last_lsn();
                if self.log.make_durable(up_to).await.is_err() {
                    return;
                }
                executor.sleep(DESTAGE_TIME).await;
                let blocks = generation.volumes().flat_map(|(_, pieces)| pieces);
                let mut taken: BTreeMap<u64, Bytes> = BTreeMap::new();
                for piece in blocks {
                    match piece.source {
                        // Neighbouring sectors of one entry are one piece.
                        Source::Payload(bytes) => {
                            let sectors = bytes.chunks(SECTOR).map(Bytes::copy_from_slice);
                            taken.extend((piece.start_sector..).zip(sectors));
                        }
                        Source::LogResident(place) => {
                            let Ok(Some(bytes)) = self.log.read(&place).await else { return };
                            let sectors = bytes.chunks(SECTOR).map(Bytes::copy_from_slice);
                            taken.extend((piece.start_sector..).zip(sectors));
                        }
                        other => panic!("a generation holds {other:?}"),
                    }
                }
                let release = || self.log.release(&generation);
                if let Err(error) = self.data.destage(&self.log, &taken, up_to, release).await {
                    self.log.fail(error);
                    return;
                }
            }
        }
    }

    /// Resolves once the log takes nothing more.
    pub(crate) async fn ended(&self) -> Error {
        let mut changes = self.log.changes();
        loop {
            if let Some(error) = self.log.failure() {
                return error;
            }
            if changes.changed().await.is_err() {
                return Error::new(ErrorKind::Unavailable, "the log is closed");
            }
        }
    }
}

/// Returns the version in a block's bytes; `None` if they are not those of a write of this block.
pub(crate) fn version_of(block: u64, bytes: &[u8]) -> Option<u64> {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let is_it = number(8) == block && bytes[16..].iter().all(|byte| *byte == number(0) as u8);
    is_it.then(|| number(0))
}

/// Time in which an owner collects a generation.
const DESTAGE_TIME: Duration = Duration::from_millis(30);
/// Times of the owner, shorter than by default, so that a run sees many take-overs.
pub(crate) const DETECTION: Duration = Duration::from_millis(600);
