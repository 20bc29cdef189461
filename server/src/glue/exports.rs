//! The volumes of the open pool as NBD exports.
//!
//! Invariants:
//! - The name of an export is the name of its volume; the empty name is the only volume, if there
//!   is exactly one. `VOLUME@NAME` is a snapshot, which is read-only.
//! - Over a plain or remote socket a volume is served with at least the durability that its client
//!   needs: a client on another machine survives a reboot of this one, so the writes acknowledged
//!   to it must survive it as well.
//! - A client that has not identified itself and that connected while its volume was read-only
//!   stays a reader, because it was admitted next to a writer.

use crate::asker::Asker;
use crate::claims::{Claim, Claims, Gate, Passed};
use crate::pool::Pool;
use crate::record::Durability;
use crate::volume::Volume;
use block::env::boot_id;
use block::{
    AllocationExtent, BlockDevice, Error, ErrorKind, Limits, PayloadBuffer, Result, WriteFlags,
    ZeroFlags,
};
use bytes::Bytes;
use nbd::wire::ClaimRequest;
use nbd::{Client, Export, Exports, Peer};
use std::sync::Arc;

/// Snapshots listed to a client that asks for all exports. Chosen by hand: a snapshot is found by
/// its name whether it is in the list or not.
const LISTED_SNAPSHOTS_MAX: usize = 1000;

/// Exports of the NBD server.
pub struct PoolExports {
    pool: Arc<Pool>,
    claims: Arc<Claims>,
}

impl PoolExports {
    /// Serves every volume of `pool`, including those made later, as far as `claims` allows.
    #[must_use]
    pub(crate) fn new(pool: Arc<Pool>, claims: Arc<Claims>) -> Self {
        PoolExports { pool, claims }
    }

    fn find(&self, name: &str) -> Result<Arc<Volume>> {
        let not_found = || {
            let what = format!("open export {name:?}: there is no such volume");
            Error::new(ErrorKind::NotFound, what)
        };
        if let Some(error) = self.pool.fatal() {
            return Err(error);
        }
        if name.is_empty() {
            let mut volumes = self.pool.volumes();
            return match (volumes.pop(), volumes.len()) {
                (Some(volume), 0) if !self.pool.is_any_held() => Ok(volume),
                _ => Err(not_found()),
            };
        }
        match name.split_once('@') {
            Some((volume, snapshot)) => self.pool.snapshot_view(volume, snapshot),
            None => self.pool.volume(name).ok_or_else(|| match self.pool.why_not(name) {
                busy if busy.kind() == ErrorKind::Busy => busy,
                _ => not_found(),
            }),
        }
    }
}

/// Reports whether a client may continue when this machine reboots. A client that has identified
/// itself may come from another machine by a tunnel or a forwarded socket.
fn outlives_this_machine(client: &Client) -> bool {
    if client.claim.as_ref().is_some_and(|said| said.boot != boot_id().into_bytes()) {
        return true;
    }
    match client.peer {
        Peer::Unix { .. } | Peer::Kernel => false,
        Peer::Tcp(address) => !address.ip().to_canonical().is_loopback(),
    }
}

impl Exports for PoolExports {
    type Device = Attachment;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        let export = |name| Export { name, description: String::new() };
        let records = self.pool.volumes().into_iter().map(|volume| volume.record());
        let mut exports: Vec<Export> = records.map(|record| export(record.name)).collect();
        let snapshots = self.pool.snapshots(None).unwrap_or_default();
        let listed = snapshots.iter().take(LISTED_SNAPSHOTS_MAX);
        exports.extend(listed.map(|one| Export {
            name: format!("{}@{}", one.volume, one.record.name),
            description: "a snapshot, read-only".to_owned(),
        }));
        exports
    }

    async fn open(&self, name: &str, client: &Client) -> Result<Arc<Attachment>> {
        let volume = self.find(name)?;
        let is_remote = outlives_this_machine(client);
        if volume.is_snapshot() && client.claim.is_some() {
            let what = format!(
                "open export {name:?}: a snapshot is not attached as a volume is; connect without a claim"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let record = volume.record();
        if is_remote && record.is_stepped_back {
            let what = format!(
                "open export {name:?}: writes that were answered may be gone since a reboot, a take-over, or a loss or \
                 failure of the write log, and a client that goes on could find that out too late; unmount or restart \
                 every client of before, then run `spindle volume accept {}` on the server",
                record.name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let said = client.claim.as_ref();
        if said.is_some_and(|said| said.export != name) {
            let what = format!("open export {name:?}: this client has claimed another");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        // The volume may become writable while it is attached, or while its client is away. A
        // snapshot never does, and needs no claim.
        let claim = match volume.is_snapshot() || (record.is_read_only && said.is_none()) {
            true => None,
            false => {
                let (id, has_stepped_back) = (record.id, record.is_stepped_back);
                let from = (&client.line, &*client.label());
                let claims = &self.claims;
                Some(claims.connect_from(id, &record.name, has_stepped_back, said, from).await?)
            }
        };
        Ok(Arc::new(Attachment {
            volume,
            is_remote,
            is_reader: claim.is_none(),
            is_write_through: false,
            claim,
        }))
    }

    async fn release(&self, claim: &ClaimRequest, _client: &Client) -> Result<()> {
        let volume = self.find(&claim.export)?;
        self.claims.release(volume.id().0, claim).await
    }

    async fn revoked(&self, device: &Arc<Attachment>) {
        match &device.claim {
            Some(claim) => claim.revoked().await,
            None => std::future::pending().await,
        }
    }

    async fn describe(&self, name: &str, client: &Client) -> Result<(Export, Limits)> {
        // A query does not attach the client.
        let anybody = Client { claim: None, ..client.clone() };
        let device = self.open(name, &anybody).await?;
        let export = Export { name: name.to_owned(), description: String::new() };
        Ok((export, device.limits()))
    }
}

/// A volume as seen by one connection, or by one device of this machine.
pub struct Attachment {
    volume: Arc<Volume>,
    is_remote: bool,
    /// It may change nothing, even if the volume becomes writable.
    is_reader: bool,
    /// Its user was told that flushes are not needed, and never flushes: every write is on stable
    /// storage before it is acknowledged, even if the volume's durability changes.
    is_write_through: bool,
    claim: Option<Claim>,
}

impl Attachment {
    /// Makes the view for a device of this machine, whose claim the caller keeps.
    /// `is_write_through`: the kernel is told that it has no volatile cache.
    pub(crate) fn local(volume: Arc<Volume>, is_write_through: bool) -> Attachment {
        Attachment { volume, is_remote: false, is_reader: false, is_write_through, claim: None }
    }

    /// Passes the gate for one request, which holds the result: see [`crate::claims`].
    fn pass(&self) -> Result<Option<Passed<'_>>> {
        self.claim.as_ref().and_then(Claim::gate).map(|gate| gate.pass()).transpose()
    }

    /// Like [`Attachment::pass`], for a change.
    fn pass_change(&self) -> Result<Option<Passed<'_>>> {
        if self.is_reader {
            let what = format!(
                "change volume {}: it was read-only when this client connected; connect anew to write",
                self.volume.record().name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        self.pass()
    }

    /// Reports whether writes must be on stable storage before they are acknowledged: those of a
    /// remote client, unless a durability was chosen explicitly for the volume, and always those of
    /// a device without a volatile cache.
    pub(crate) fn must_be_durable(&self) -> bool {
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
        self.volume.read(offset, buf).await
    }

    fn payload(&self, length: usize) -> PayloadBuffer {
        self.volume.payload(length)
    }

    async fn write(&self, offset: u64, payload: Bytes, flags: WriteFlags) -> Result<()> {
        let _passed = self.pass_change()?;
        let fua = flags.fua || self.must_be_durable();
        self.volume.write(offset, payload, WriteFlags { fua }).await
    }

    async fn flush(&self) -> Result<()> {
        let _passed = self.pass()?;
        self.volume.flush().await
    }

    async fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let _passed = self.pass_change()?;
        self.volume.discard(offset, length, fua || self.must_be_durable()).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        let _passed = self.pass_change()?;
        let fua = flags.fua || self.must_be_durable();
        self.volume.write_zeroes(offset, length, ZeroFlags { fua, ..flags }).await
    }

    async fn allocation(
        &self,
        offset: u64,
        length: u64,
        extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        self.volume.allocation(offset, length, extent_count_max).await
    }

    async fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.volume.prefetch(offset, length).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let passed = self.pass_change()?;
        let gate = self.claim.as_ref().and_then(Claim::gate);
        let passed_on = gate.map(Gate::pass_on).transpose()?;
        drop(passed);
        // Run it in a task of its own: if the client disconnects, the entry is taken back or the
        // resize is completed.
        let (_waits, asker) = Asker::new();
        let volume = self.volume.clone();
        let resize = asker.scope(async move {
            let resized = volume.resize(size_bytes).await;
            drop(passed_on);
            resized
        });
        let resized = tokio::spawn(resize).await;
        resized.map_err(|error| Error::with_source(ErrorKind::Io, "resize a volume", error))?
    }
}
