//! A volume in memory, for tests and for measurements of the protocol alone.
//!
//! Invariants:
//! - Blocks are holes, allocated zeroes or bytes; only whole zeroed blocks are reported as zero.
//! - A request sees each block as a whole, but a request of several blocks is not atomic.

use block::{
    AllocationExtent, BlockDevice, Error, ErrorKind, Limits, Result, WriteFlags, ZeroFlags,
};
use bytes::Bytes;
use nbd::{Client, Export, Exports, Line};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

const BLOCK_BYTES: usize = 64 << 10;
/// Number of newest connections that are kept. Chosen by hand: more than any test inspects.
const LINE_COUNT_MAX: usize = 64;

enum Block {
    Hole,
    Zeroes,
    Data(Box<[u8]>),
}

/// The volume: see the head of the file.
pub struct MemoryDevice {
    blocks: RwLock<Vec<RwLock<Block>>>,
    size_bytes: AtomicU64,
    is_read_only: bool,
    /// Duration of each read and write.
    pub latency: Duration,
    /// The newest connections that have opened the volume.
    pub lines: Mutex<Vec<Line>>,
    /// Error of every request, if set.
    pub failure: Mutex<Option<ErrorKind>>,
    /// Whether fast zeroes are supported.
    pub has_fast_zero: AtomicBool,
    /// Requests that run, and the maximum so far.
    running_count: AtomicUsize,
    pub running_count_peak: AtomicUsize,
    /// Counts of flushes, of prefetches, and of writes with FUA.
    pub flush_count: AtomicUsize,
    pub prefetch_count: AtomicUsize,
    pub fua_count: AtomicUsize,
}

impl MemoryDevice {
    pub fn new(size_bytes: u64) -> Self {
        MemoryDevice {
            blocks: RwLock::new(blocks(size_bytes)),
            size_bytes: AtomicU64::new(size_bytes),
            is_read_only: false,
            latency: Duration::ZERO,
            lines: Mutex::default(),
            failure: Mutex::new(None),
            has_fast_zero: AtomicBool::new(true),
            running_count: AtomicUsize::new(0),
            running_count_peak: AtomicUsize::new(0),
            flush_count: AtomicUsize::new(0),
            prefetch_count: AtomicUsize::new(0),
            fua_count: AtomicUsize::new(0),
        }
    }

    pub fn read_only(mut self) -> Self {
        self.is_read_only = true;
        self
    }

    async fn enter(&self) -> Result<()> {
        if !self.latency.is_zero() {
            let running = self.running_count.fetch_add(1, Ordering::Relaxed) + 1;
            self.running_count_peak.fetch_max(running, Ordering::Relaxed);
            tokio::time::sleep(self.latency).await;
            self.running_count.fetch_sub(1, Ordering::Relaxed);
        }
        match *self.failure.lock().unwrap() {
            Some(kind) => Err(Error::new(kind, "seeded failure")),
            None => Ok(()),
        }
    }

    fn check(&self, offset: u64, length: u64, kind: ErrorKind) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size_bytes.load(Ordering::Acquire) => Ok(()),
            _ => Err(Error::new(kind, "past the end")),
        }
    }

    fn set_range(&self, offset: u64, length: u64, whole: impl Fn() -> Block) {
        for_each(offset, length as usize, &self.blocks.read().unwrap(), |block, at, range| {
            let mut block = block.write().unwrap();
            if range.len() == BLOCK_BYTES {
                *block = whole();
            } else if let Block::Data(bytes) = &mut *block {
                bytes[at..at + range.len()].fill(0);
            } else if matches!((&*block, whole()), (Block::Hole, Block::Zeroes)) {
                *block = Block::Zeroes;
            }
        });
    }
}

fn blocks(size_bytes: u64) -> Vec<RwLock<Block>> {
    let count = size_bytes.div_ceil(BLOCK_BYTES as u64);
    (0..count).map(|_| RwLock::new(Block::Hole)).collect()
}

/// Calls `each` with each block, the offset in it, and the range of the request that it covers.
fn for_each(
    offset: u64,
    length: usize,
    blocks: &[RwLock<Block>],
    mut each: impl FnMut(&RwLock<Block>, usize, std::ops::Range<usize>),
) {
    let mut done = 0;
    while done < length {
        let position = offset as usize + done;
        let at = position % BLOCK_BYTES;
        let count = (BLOCK_BYTES - at).min(length - done);
        each(&blocks[position / BLOCK_BYTES], at, done..done + count);
        done += count;
    }
}

impl BlockDevice for MemoryDevice {
    fn limits(&self) -> Limits {
        Limits {
            size_bytes: self.size_bytes.load(Ordering::Acquire),
            preferred_block_bytes: 4096,
            payload_bytes_max: 32 << 20,
            is_read_only: self.is_read_only,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.enter().await?;
        self.check(offset, buf.len() as u64, ErrorKind::Invalid)?;
        for_each(offset, buf.len(), &self.blocks.read().unwrap(), |block, at, range| {
            let to = &mut buf[range];
            match &*block.read().unwrap() {
                Block::Data(bytes) => to.copy_from_slice(&bytes[at..at + to.len()]),
                Block::Hole | Block::Zeroes => to.fill(0),
            }
        });
        Ok(())
    }

    async fn write(&self, offset: u64, payload: Bytes, flags: WriteFlags) -> Result<()> {
        self.enter().await?;
        self.check(offset, payload.len() as u64, ErrorKind::Full)?;
        self.fua_count.fetch_add(usize::from(flags.fua), Ordering::Relaxed);
        for_each(offset, payload.len(), &self.blocks.read().unwrap(), |block, at, range| {
            let from = &payload[range];
            let mut block = block.write().unwrap();
            if !matches!(&*block, Block::Data(_)) {
                *block = Block::Data(vec![0; BLOCK_BYTES].into_boxed_slice());
            }
            if let Block::Data(bytes) = &mut *block {
                bytes[at..at + from.len()].copy_from_slice(from);
            }
        });
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        self.enter().await?;
        self.flush_count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn discard(&self, offset: u64, length: u64, _fua: bool) -> Result<()> {
        self.enter().await?;
        self.check(offset, length, ErrorKind::Invalid)?;
        self.set_range(offset, length, || Block::Hole);
        Ok(())
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        self.enter().await?;
        self.check(offset, length, ErrorKind::Full)?;
        if flags.fast_only && !self.has_fast_zero.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unsupported, "zeroes are slow here"));
        }
        let whole = || if flags.no_hole { Block::Zeroes } else { Block::Hole };
        self.set_range(offset, length, whole);
        Ok(())
    }

    async fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        self.enter().await?;
        self.check(offset, length, ErrorKind::Invalid)?;
        let mut extents: Vec<AllocationExtent> = Vec::new();
        let mut is_full = false;
        for_each(offset, length as usize, &self.blocks.read().unwrap(), |block, _, range| {
            let (is_hole, is_zero) = match &*block.read().unwrap() {
                Block::Hole => (true, true),
                Block::Zeroes => (false, true),
                Block::Data(_) => (false, false),
            };
            let length_bytes = range.len() as u64;
            let count = extents.len();
            match extents.last_mut() {
                _ if is_full => {}
                Some(last) if (last.is_hole, last.is_zero) == (is_hole, is_zero) => {
                    last.length_bytes += length_bytes;
                }
                _ if count == extent_count_max => is_full = true,
                _ => extents.push(AllocationExtent { length_bytes, is_hole, is_zero }),
            }
        });
        Ok(extents)
    }

    async fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        self.prefetch_count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.enter().await?;
        if size_bytes < self.size_bytes.load(Ordering::Acquire) || size_bytes > 1 << 40 {
            return Err(Error::new(ErrorKind::Invalid, "a volume only grows"));
        }
        let count = size_bytes.div_ceil(BLOCK_BYTES as u64) as usize;
        self.blocks.write().unwrap().resize_with(count, || RwLock::new(Block::Hole));
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }
}

/// Exports by name; the empty name opens the first.
#[derive(Default)]
pub struct MemoryExports(pub BTreeMap<String, Arc<MemoryDevice>>);

impl Exports for MemoryExports {
    type Device = MemoryDevice;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        let describe = |name: &String| Export { name: name.clone(), description: String::new() };
        self.0.keys().map(describe).collect()
    }

    async fn open(&self, name: &str, client: &Client) -> Result<Arc<MemoryDevice>> {
        let found = if name.is_empty() { self.0.values().next() } else { self.0.get(name) };
        if let Some(device) = found {
            let mut lines = device.lines.lock().unwrap();
            lines.push(client.line.clone());
            let excess = lines.len().saturating_sub(LINE_COUNT_MAX);
            lines.drain(..excess);
        }
        found.cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such export"))
    }
}
