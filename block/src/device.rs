//! What a front end needs of a volume, and nothing else.
//!
//! Invariants:
//! - Offsets and lengths are bytes of the volume and may have any alignment; the implementation
//!   does its own read-modify-write.
//! - A write whose future resolved `Ok` is never lost while the machine stays up, whatever happens
//!   to the process; after [`BlockDevice::flush`] or with FUA also not to a loss of power.
//! - Requests run concurrently and in no order; only the completion of one before the start of
//!   another orders the two.
//! - A future that is dropped may or may not have had its effect.

use crate::buffers::PayloadBuffer;
use crate::error::Result;
use bytes::Bytes;
use std::future::Future;

/// A device keeps the memory of a payload up to so many bytes as it is handed over, and copies a longer one:
/// front ends hand long writes over in parts. Chosen by hand: an entry of the write log.
pub const PAYLOAD_BYTES_KEPT: u32 = 128 << 10;

/// What a front end tells its client. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the volume; may grow while it is open.
    pub size_bytes: u64,
    /// The size below which a request costs a read-modify-write: a power of two.
    pub preferred_block_bytes: u32,
    /// Largest payload of one request.
    pub payload_bytes_max: u32,
    /// No write is accepted.
    pub is_read_only: bool,
    /// A flush on one connection covers writes that were answered on others.
    pub is_multi_conn: bool,
    /// A write that was answered may be lost with the power until it is flushed.
    pub has_volatile_cache: bool,
}

/// Modifiers of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFlags {
    /// On stable storage before it is answered.
    pub fua: bool,
}

/// Modifiers of a write-zeroes request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// On stable storage before it is answered.
    pub fua: bool,
    /// The range must be reported as allocated afterwards, and later writes to it should not fail
    /// for lack of space.
    pub no_hole: bool,
    /// Fail with `Unsupported` at once rather than take as long as a write of the range.
    pub fast_only: bool,
}

/// A run of the volume with one allocation state, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationExtent {
    /// Length of the run, never 0.
    pub length_bytes: u64,
    /// Nothing is stored for it.
    pub is_hole: bool,
    /// It reads as zeroes.
    pub is_zero: bool,
}

/// A volume, as front ends see it. Cheap to clone behind an `Arc`; every method may be called from
/// any task at any time.
pub trait BlockDevice: Send + Sync + 'static {
    /// Current limits; `size_bytes` may differ from call to call.
    fn limits(&self) -> Limits;

    /// Fills `buf` from `offset`. `Invalid` past the end of the volume.
    fn read(&self, offset: u64, buf: &mut [u8]) -> impl Future<Output = Result<()>> + Send;

    /// An empty buffer with room for the payload of a write of `length` bytes. A device that keeps payloads for a
    /// while may give out memory that it has had before.
    fn payload(&self, length: usize) -> PayloadBuffer {
        PayloadBuffer::fresh(length)
    }

    /// Writes `payload` at `offset`. The device keeps a reference to `payload` until it is
    /// destaged, unless it is longer than [`PAYLOAD_BYTES_KEPT`], and counts its length: it is to have its
    /// memory for itself, and not to be a part of something longer. `Full` past the end of the volume.
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

    /// Allocation of a range as consecutive runs that start at `offset`: at least one, at most
    /// `extent_count_max`, together at most `length` bytes.
    fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> impl Future<Output = Result<Vec<AllocationExtent>>> + Send;

    /// Hint: the range will be read soon. Returns once the hint is queued or dropped.
    fn prefetch(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>> + Send;

    /// Asks for another size, in bytes. `Denied` where the front end's client may not.
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> + Send;
}
