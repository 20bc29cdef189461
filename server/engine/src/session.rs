//! A session: one client's or device's use of a volume. It decides whether its user may write, and
//! which writes must be on stable storage before they are acknowledged.
//!
//! Invariants:
//! - Every request passes the gate of the session's reservation, so that none of an earlier client
//!   takes effect after its successor was admitted.
//! - A session that was opened as a reader never changes anything.

use crate::asker::Asker;
use crate::record::Durability;
use crate::reservations::{Permit, PermitUse, Reservation};
use crate::volume::Volume;
use async_recursion::async_recursion;
use block::{
    AllocationExtent, BlockDevice, Error, ErrorKind, Limits, PayloadBuffer, Result, WriteFlags,
    ZeroFlags,
};
use bytes::Bytes;
use std::sync::Arc;

/// A volume as seen by one connection, or by one device of this machine.
pub struct Attachment {
    volume: Arc<Volume>,
    is_remote: bool,
    /// It may change nothing, even if the volume becomes writable.
    is_reader: bool,
    /// Its user was told that flushes are not needed, and never flushes: every write is on stable
    /// storage before it is acknowledged, even if the volume's durability changes.
    is_write_through: bool,
    reservation: Option<Reservation>,
}

impl Attachment {
    /// Makes the session of a client. `is_remote`: the client survives a reboot of this machine.
    /// Without a reservation it may change nothing, even if the volume becomes writable.
    #[must_use]
    pub fn of_client(
        volume: Arc<Volume>,
        is_remote: bool,
        reservation: Option<Reservation>,
    ) -> Attachment {
        let is_reader = reservation.is_none();
        Attachment { volume, is_remote, is_reader, is_write_through: false, reservation }
    }

    /// Resolves when the session was ended: another client, or an operator, has taken the volume.
    #[async_recursion]
    pub async fn revoked(&self) {
        match &self.reservation {
            Some(reservation) => reservation.revoked().await,
            None => std::future::pending().await,
        }
    }

    /// Makes the view for a device of this machine, whose reservation the caller keeps.
    /// `is_write_through`: the kernel is told that it has no volatile cache.
    pub fn local(volume: Arc<Volume>, is_write_through: bool) -> Attachment {
        Attachment {
            volume,
            is_remote: false,
            is_reader: false,
            is_write_through,
            reservation: None,
        }
    }

    /// Passes the gate for one request, which holds the result: see [`crate::reservations`].
    fn pass(&self) -> Result<Option<PermitUse<'_>>> {
        self.reservation
            .as_ref()
            .and_then(Reservation::permit)
            .map(|permit| permit.pass())
            .transpose()
    }

    /// Like [`Attachment::pass`], for a change.
    fn pass_change(&self) -> Result<Option<PermitUse<'_>>> {
        if self.is_reader {
            let what = format!(
                "change volume {}: it was read-only when this client connected; connect again to \
                 write",
                self.volume.record().name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        self.pass()
    }

    /// Returns the outcome of a request as its client gets it.
    fn answer<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.volume.for_client(error))
    }

    /// Reports whether writes must be on stable storage before they are acknowledged: those of a
    /// remote client, unless a durability was chosen explicitly for the volume, and always those of
    /// a device without a volatile cache.
    pub fn must_be_durable(&self) -> bool {
        self.is_write_through
            || self.is_remote && self.volume.record().durability == Durability::Auto
    }
}

impl BlockDevice for Attachment {
    fn limits(&self) -> Limits {
        let limits = self.volume.limits();
        let is_read_only = limits.is_read_only || self.is_reader;
        Limits { is_read_only, has_volatile_cache: !self.is_write_through, ..limits }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let _passed = self.pass()?;
        self.answer(self.volume.read(offset, buf).await)
    }

    fn payload(&self, length: usize) -> PayloadBuffer {
        self.volume.payload(length)
    }

    async fn write(&self, offset: u64, payload: Bytes, flags: WriteFlags) -> Result<()> {
        let _passed = self.pass_change()?;
        let fua = flags.fua || self.must_be_durable();
        self.answer(self.volume.write(offset, payload, WriteFlags { fua }).await)
    }

    async fn flush(&self) -> Result<()> {
        let _passed = self.pass()?;
        self.answer(self.volume.flush().await)
    }

    async fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let _passed = self.pass_change()?;
        self.answer(self.volume.discard(offset, length, fua || self.must_be_durable()).await)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        let _passed = self.pass_change()?;
        let fua = flags.fua || self.must_be_durable();
        self.answer(self.volume.write_zeroes(offset, length, ZeroFlags { fua, ..flags }).await)
    }

    async fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        self.answer(self.volume.allocation(offset, length, extent_count_max).await)
    }

    async fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.answer(self.volume.prefetch(offset, length).await)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let passed = self.pass_change()?;
        let permit = self.reservation.as_ref().and_then(Reservation::permit);
        let passed_on = permit.map(Permit::pass_on).transpose()?;
        drop(passed);
        // Run it in a task of its own: if the client disconnects, the entry is taken back or the
        // resize is completed.
        let (_waits, asker) = Asker::new();
        let volume = self.volume.clone();
        let resize = asker.scope(async move {
            let resized = volume.resize(size_bytes).await;
            drop(passed_on);
            resized.map_err(|error| volume.for_client(error))
        });
        let resized = tokio::spawn(resize).await;
        resized.map_err(|error| Error::with_source(ErrorKind::Io, "resize a volume", error))?
    }
}
