//! The interface that front ends need of a volume.
//!
//! Invariants:
//! - Offsets and lengths are bytes of the volume and may have any alignment; the implementation
//!   does its own read-modify-write.
//! - A write whose future resolved `Ok` survives any end of the process while the machine stays up.
//!   After [`BlockDevice::flush`], or with FUA, it also survives a loss of power.
//! - Requests run concurrently and without an order. Two requests are ordered only if one completes
//!   before the other starts.
//! - A dropped future may or may not have had its effect.

use crate::buffers::PayloadBuffer;
use crate::error::Result;
use bytes::Bytes;
use std::future::Future;

/// A device keeps the memory of a payload up to this many bytes, and copies a longer one. Front
/// ends therefore pass long writes in parts. Chosen by hand: an entry of the write log.
pub const PAYLOAD_BYTES_KEPT: u32 = 128 << 10;

/// The properties that a front end reports to its client. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the volume; may grow while it is open.
    pub size_bytes: u64,
    /// The size below which a request costs a read-modify-write; a power of two.
    pub preferred_block_bytes: u32,
    /// Largest payload of one request.
    pub payload_bytes_max: u32,
    /// Writes are refused.
    pub is_read_only: bool,
    /// A flush on one connection covers writes that were answered on others.
    pub is_multi_conn: bool,
    /// An answered write may be lost in a power failure until it is flushed.
    pub has_volatile_cache: bool,
}

/// Modifiers of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFlags {
    /// Write to stable storage before the answer.
    pub fua: bool,
}

/// Modifiers of a write-zeroes request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// Write to stable storage before the answer.
    pub fua: bool,
    /// The range must be reported as allocated afterwards, and later writes to it should not fail
    /// for lack of space.
    pub no_hole: bool,
    /// Fail at once with `Unsupported` if it would take as long as a write of the range.
    pub fast_only: bool,
}

/// A run of the volume with one allocation state, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationExtent {
    /// Length of the run, never 0.
    pub length_bytes: u64,
    /// No data is stored for it.
    pub is_hole: bool,
    /// It reads as zeroes.
    pub is_zero: bool,
}

/// A volume as front ends see it. Cheap to clone behind an `Arc`. Any task may call any method at
/// any time.
pub trait BlockDevice: Send + Sync + 'static {
    /// Current limits; `size_bytes` may differ from call to call.
    fn limits(&self) -> Limits;

    /// Fills `buf` from `offset`. Fails with `Invalid` past the end of the volume.
    fn read(&self, offset: u64, buf: &mut [u8]) -> impl Future<Output = Result<()>> + Send;

    /// Returns an empty buffer with room for the payload of a write of `length` bytes. A device
    /// that keeps payloads for a while may reuse earlier memory.
    fn payload(&self, length: usize) -> PayloadBuffer {
        PayloadBuffer::fresh(length)
    }

    /// Writes `payload` at `offset`. Fails with `Full` past the end of the volume.
    ///
    /// Unless it is longer than [`PAYLOAD_BYTES_KEPT`], the device keeps a reference to `payload`
    /// until it is destaged, and counts its length. The payload must therefore own its memory, and
    /// not be a part of a longer buffer.
    fn write(
        &self,
        offset: u64,
        payload: Bytes,
        flags: WriteFlags,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Resolves when every write answered before the call is on stable storage.
    fn flush(&self) -> impl Future<Output = Result<()>> + Send;

    /// Drops the contents of the range, which reads as zeroes afterwards.
    fn discard(
        &self,
        offset: u64,
        length: u64,
        fua: bool,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Makes the range read as zeroes.
    fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Returns the allocation of a range as consecutive runs that start at `offset`: at least one,
    /// at most `extent_count_max`, together at most `length` bytes.
    fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> impl Future<Output = Result<Vec<AllocationExtent>>> + Send;

    /// Hints that the range will be read soon. Returns once the hint is queued or dropped.
    fn prefetch(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>> + Send;

    /// Changes the size, in bytes. Fails with `Denied` if the client is not permitted to do so.
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> + Send;
}
